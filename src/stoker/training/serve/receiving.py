"""Weights that come through a process group: into a second copy, which the model is given only once all of it is there."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stoker.contract.frozen import frozen
from stoker.contract.host_memory import read_memory
from stoker.contract.text import escape
from stoker.contract.units import format_bytes
from stoker.training.model import adapters, hf
from stoker.training.model.config import LORA
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_read import Added
from stoker.training.model.hf_stream import STORED
from stoker.training.serve.api import OTHER_MODEL, Problem
from stoker.training.serve.member import IDLE_S, JOIN_S
from stoker.training.serve.transfer import ITEM, Entry, Manifest, MemberFailed, Moving

GROUP_KEYS = ("name", "address", "backend", "rank", "size", "bucket")
BACKENDS = ("gloo", "nccl")
REST_S = 600.0  # nothing came for so long: the second copy's memory is given back


@frozen
class Group:
    name: str
    host: str
    port: int
    backend: str
    rank: int
    size: int
    bucket: int


class Receiver:
    """`allowed`: HOST or HOST:PORT of the groups that this server may join; `base`: the folder that adapters are for."""

    def __init__(self, model: Decoder, base: str, allowed: tuple[str, ...]) -> None:
        self._model, self._base, self._allowed = model, base, allowed
        self._moving: Moving | None = None
        self._group: Group | None = None
        self._manifest: Manifest | None = None
        self._transfer = ""
        self._is_joined = False
        self._used = 0.0

    @property
    def is_open(self) -> bool:
        return self._moving is not None

    def rest(self) -> None:
        """Who sends again after a long time makes a new group."""
        if time.monotonic() - self._used > REST_S:
            self._transfer = ""
            self._leave()

    def begin(self, transfer: str, told: dict[str, Any]) -> dict[str, Any]:
        """From now on the bytes may come. `joined`: it was a member of that group already."""
        group = self._group_in(told["group"])
        manifest = manifest_in(told)
        self._check(manifest)
        known = self._group is not None and self._group.name == group.name and self._moving is not None
        known = known and not self._transfer  # nobody took what came before: the member would answer out of turn
        self._transfer = ""
        if not known:
            self._leave()
            free, needed = read_memory()[1], manifest.total
            if free < needed:
                raise Problem(
                    f"{format_bytes(needed)} of host memory are needed, and {format_bytes(free)} are free",
                    422,
                    "tensors",
                )
            self._moving, self._group = Moving(needed, group.host), group
            device = self._model.device if group.backend == "nccl" else "cpu"
            self._moving.tell(**{**vars(group), "device": str(device)})
        assert self._moving is not None
        os.ftruncate(self._moving.handle, manifest.total)
        self._moving.tell(receive=manifest.total)
        self._transfer, self._manifest, self._is_joined = transfer, manifest, known
        self._used = time.monotonic()
        return {"transfer": transfer, "joined": known}

    def has(self, transfer: str) -> bool:
        """It has come, or comes, and nobody took it."""
        return bool(transfer) and transfer == self._transfer

    def take(self, transfer: str, digest: str) -> Callable[[], None]:
        """What gives the model these weights. Waits for the last of them."""
        moving, manifest = self._moving, self._manifest
        if not self.has(transfer) or moving is None or manifest is None:
            raise Problem(
                f"transfer {escape(transfer, 40)} has not come to this server: send it again", 409, "transfer"
            )
        self._transfer, self._used = "", time.monotonic()
        try:
            if not self._is_joined:
                moving.hear("joined", JOIN_S + IDLE_S)
            found = manifest.digest(str(moving.hear("digest", JOIN_S + IDLE_S)))
        except MemberFailed as problem:
            self._leave()
            line = f"transfer {escape(transfer, 40)} broke off: {escape(str(problem), 300)}"
            raise Problem(line, 409, "transfer") from None
        if digest != found:
            line = f"transfer {escape(transfer, 40)} has the digest {found}: damaged, or another transfer"
            raise Problem(line, 422, "digest")
        tensors = _tensors(manifest, moving.handle)
        return self._adapted(manifest, tensors) if manifest.adapter is not None else self._whole(tensors)

    def _leave(self) -> None:
        if self._moving is not None:
            self._moving.end()
        self._moving = self._group = self._manifest = None

    def _group_in(self, told: Any) -> Group:
        if not isinstance(told, dict) or sorted(told) != sorted(GROUP_KEYS):
            raise Problem(f"group must be an object with {', '.join(GROUP_KEYS)}", key="group")
        name, address, backend, rank, size, bucket = (told[key] for key in GROUP_KEYS)
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        good = isinstance(name, str) and bool(name) and backend in BACKENDS and bool(host) and port.isdecimal()
        good = good and all(type(one) is int for one in (rank, size, bucket))
        if not good or not 0 < rank < size or bucket < 1:
            raise Problem(
                "group: a name, HOST:PORT, gloo or nccl, a rank from 1 up, a size and bytes of a bucket", key="group"
            )
        if host not in self._allowed and address not in self._allowed:
            shown = ", ".join(self._allowed) or "none"
            line = f"group {escape(address, 100)}: this server joins those at {shown} (--weights-group)"
            raise Problem(line, 403, "group")
        return Group(name, host, int(port), backend, rank, size, bucket)

    def _check(self, manifest: Manifest) -> None:
        c = self._model.config
        if manifest.adapter is None:
            wanted = {name: tuple(tensor.shape) for name, tensor in hf.named(self._model)}
        else:
            if manifest.base != adapters.base_digest(self._base):
                raise Problem(
                    "the adapter was trained on a base model other than the one this server was started with",
                    409,
                    "base",
                    OTHER_MODEL,
                )
            settings, _ = adapters.settings_from(manifest.adapter, "the adapter that is sent", LORA)
            wanted = adapters.shapes_of(c, settings)
        given = {one.name: one.size for one in manifest.entries}
        for name, size in given.items():
            if name not in wanted:
                raise Problem(
                    f"{escape(name, 100)}: the served model does not have this tensor", 409, "tensors", OTHER_MODEL
                )
            if size != wanted[name]:
                line = f"{escape(name, 100)} is {list(size)}, and in the served model {list(wanted[name])}"
                raise Problem(f"{line}: weights of another shape", 409, "tensors", OTHER_MODEL)
        missing = next((name for name in wanted if name not in given), "")
        if missing or len(given) != len(manifest.entries):
            raise Problem(
                f"{missing or 'a tensor'} is missing in the list of tensors, or listed twice",
                409,
                "tensors",
                OTHER_MODEL,
            )

    def _whole(self, tensors: dict[str, Tensor]) -> Callable[[], None]:
        def change() -> None:
            with torch.no_grad():
                for name, ours in hf.named(self._model):
                    ours.copy_(tensors[name])

        return change

    def _adapted(self, manifest: Manifest, tensors: dict[str, Tensor]) -> Callable[[], None]:
        model, base = self._model, self._base
        settings, _ = adapters.settings_from(manifest.adapter or {}, "the adapter that is sent", LORA)
        added = Added(model.config, settings, {name: lambda one=one: one for name, one in tensors.items()})  # type: ignore[misc]

        def fill(fresh: Decoder, _: str, say: Callable[[str], None]) -> None:
            hf.load_named(fresh, hf.named(fresh), base, say, added)

        fresh = hf.opened(base, model.context_length, model.dtype, torch.device("cpu"), lambda _: None, load=fill)

        def change() -> None:
            with torch.no_grad():
                for ours, new in zip(model.parameters(), fresh.parameters(), strict=True):
                    ours.copy_(new)

        return change


def manifest_in(told: dict[str, Any]) -> Manifest:
    tensors, adapter, base = told.get("tensors"), told.get("adapter"), told.get("base", "")
    if not isinstance(tensors, list) or not tensors or not isinstance(base, str):
        raise Problem("tensors: a list of [name, dtype, shape]", key="tensors")
    if adapter is not None and not isinstance(adapter, dict):
        raise Problem("adapter: settings as peft has them", key="adapter")
    return Manifest(tuple(map(_entry, tensors)), adapter, base)


def _entry(told: Any) -> Entry:
    good = isinstance(told, list) and len(told) == 3 and isinstance(told[0], str) and told[1] in ITEM
    if not good or not isinstance(told[2], list) or not all(type(one) is int and one > 0 for one in told[2]):
        raise Problem(f"tensors: each is [name, one of {', '.join(ITEM)}, shape]", key="tensors")
    return Entry(told[0], told[1], tuple(told[2]))


def _tensors(manifest: Manifest, handle: int) -> dict[str, Tensor]:
    whole = torch.frombuffer(mmap.mmap(handle, manifest.total), dtype=torch.uint8)
    return {
        one.name: whole[begin : begin + one.bytes].view(STORED[one.dtype]).view(one.size)
        for one, begin in manifest.places
    }
