"""A version of the weights for the servers, sent through a process group of rank 0 and the servers: no disk, and other machines, too.

Each server is told over HTTP what comes and where to (serve/receiving.py), then the bytes are broadcast, then Servers tells it
the version and the digest of all bytes. Where a member is lost, the group is left and another one made.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.contract.text import escape
from stoker.training.model import adapters, hf
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_write import DTYPES
from stoker.training.model.pieces import collected, give_back
from stoker.training.parallel.group import Group
from stoker.training.rl.asking import ServerFailed
from stoker.training.rl.dialects import Published
from stoker.training.rl.publish import To, on_rank_0, told_by
from stoker.training.rl.waiting import ServerWait, StopRequested
from stoker.training.serve.member import IDLE_S, JOIN_S
from stoker.training.serve.transfer import ALIGNED, BUCKET, Entry, Manifest, MemberFailed, Moving, own_address

_GRACE_S = 30.0  # a member gives up by itself before


class Sender:
    """Has the interface of Publisher. `bucket`: bytes that are broadcast at once; `patience_s`: until a lost group is made anew."""

    def __init__(
        self,
        model: Decoder,
        own: adapters.Beside | None,
        group: Group,
        to: To,
        patience_s: float,
        bucket: int = BUCKET,
    ) -> None:
        self._model, self._own, self._group, self._to = model, own, group, to
        self._patience_s, self._bucket = patience_s, bucket
        self._outlet: Outlet | None = None
        self._manifest = manifest_of(model, own)

    def __call__(self, version: int) -> Published:
        """All ranks call it. Raises ServerFailed or StopRequested, on all ranks."""
        until = time.monotonic() + self._patience_s
        while True:
            transfer = on_rank_0(self._group, self._begin)
            problem = self._send()
            found = on_rank_0(self._group, lambda: self._sent(version, transfer, problem, until))  # noqa: B023
            if found is not None:
                return found

    def _begin(self) -> str:
        """Return the transfer's name. Every server is told, and is a member of one group with this rank. Raises ServerFailed or
        StopRequested.
        """
        to = self._to
        try:
            while True:
                transfer, is_fresh = secrets.token_hex(8), self._outlet is None
                if self._outlet is None:
                    hosts = [address.rpartition(":")[0].strip("[]") for address in to.addresses]
                    size = len(to.addresses) + 1
                    self._outlet = Outlet(own_address(hosts), size, self._backend(), self._bucket, to.wait)
                joined = [self._told(address, rank, transfer) for rank, address in enumerate(to.addresses, 1)]
                if is_fresh or all(joined):
                    return transfer
                self.end()  # one was replaced: a group of before can't be joined
        except (ServerFailed, StopRequested):
            self.end()
            raise
        except (MemberFailed, OSError) as problem:
            self.end()
            raise ServerFailed(str(problem)) from problem

    def _backend(self) -> str:
        on_cards = self._model.device.type == "cuda" and dist.is_nccl_available()
        if not on_cards:
            return "gloo"
        kinds = [told_by(self._to, address, None).get("device") for address in self._to.addresses]
        return "nccl" if all(kind == "cuda" for kind in kinds) else "gloo"

    def _told(self, address: str, rank: int, transfer: str) -> bool:
        """Whether the server was a member before."""
        assert self._outlet is not None
        body = {"transfer": transfer, "group": self._outlet.seen_by(rank), **self._manifest.body}
        joined = told_by(self._to, address, body).get("joined")
        if not isinstance(joined, bool):
            raise ServerFailed(f"the server at {address} sent no answer to /v1/weights that can be read")
        return joined

    def _send(self) -> str:
        """All ranks gather, one tensor at a time; rank 0 sends them. Why it could not; empty: it could."""
        gathered = self._gathered()
        try:
            if self._group.first:
                assert self._outlet is not None
                for tensor in gathered:
                    self._outlet.put(tensor)
                self._outlet.flush()
        except (MemberFailed, StopRequested) as problem:
            return str(problem)
        finally:
            for _ in gathered:  # the other ranks gather all of it, and wait for this one
                pass
        return ""

    @torch.no_grad()
    def _gathered(self) -> Iterator[Tensor]:
        model, own = self._model, self._own
        if own is None:
            give_back(model)
            for _, tensor in hf.named(model):
                yield collected(tensor.detach().to(model.dtype))
            return
        parts = adapters.gathered(model, own.settings)
        if self._group.first:
            found = adapters.peft_tensors(model.config, own.settings, parts.__getitem__)
            yield from (found[entry.name] for entry in self._manifest.entries)

    def _sent(self, version: int, transfer: str, problem: str, until: float) -> Published | None:
        """Return None where it has to be sent again. Raises ServerFailed or StopRequested."""
        try:
            if problem or self._outlet is None:
                raise MemberFailed(problem)
            return Published(version, "", self._manifest.digest(self._outlet.digest()), transfer)
        except StopRequested:
            self.end()
            raise
        except MemberFailed as failed:
            self.end()
            if self._to.wait.should_stop():
                raise StopRequested(str(failed)) from failed
            if time.monotonic() < until:
                self._to.say(f"new weights did not reach all servers, and are sent again: {escape(str(failed), 200)}")
                return None
            servers = ", ".join(self._to.addresses)
            line = f"the server at {servers} could not be sent new weights: {escape(str(failed), 300)}"
            raise ServerFailed(line) from failed

    def end(self) -> None:
        if self._outlet is not None:
            self._outlet.end()
            self._outlet = None

    def close(self) -> None:
        self.end()


class Outlet:
    """Rank 0 of a group: two buckets, one that is filled while the other one travels."""

    def __init__(self, host: str, size: int, backend: str, bucket: int, wait: ServerWait) -> None:
        self._waiting = wait
        self._name, self._size, self._backend, self._bucket = secrets.token_hex(8), size, backend, bucket
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            # Here, not by the member: the servers are told the address at once, and all members start side by side.
            listening.bind((host, 0))
            listening.listen()
            port = listening.getsockname()[1]
            self._moving = Moving(2 * bucket, host, (listening.fileno(),))
            told = {"host": host, "port": port, "rank": 0, "size": size, "backend": backend, "bucket": bucket}
            self._moving.tell(**told, device="cuda" if backend == "nccl" else "cpu", listening=listening.fileno())
        self._address = f"{host}:{port}"
        self._memory = torch.frombuffer(mmap.mmap(self._moving.handle, 2 * bucket), dtype=torch.uint8)
        self._is_joined = False
        self._slot = self._filled = self._travelling = 0

    def seen_by(self, rank: int) -> dict[str, object]:
        return {
            "name": self._name, "address": self._address, "backend": self._backend, "rank": rank, "size": self._size,
            "bucket": self._bucket,
        }  # fmt: skip

    def put(self, tensor: Tensor) -> None:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        size = -(-len(data) // ALIGNED) * ALIGNED
        begin = 0
        while begin < size:
            room = min(self._bucket - self._filled, size - begin)
            at = self._slot * self._bucket + self._filled
            piece = data[begin : begin + room]
            self._memory[at : at + len(piece)].copy_(piece)
            self._memory[at + len(piece) : at + room] = 0  # padding has a digest, too
            self._filled, begin = self._filled + room, begin + room
            if self._filled == self._bucket:
                self._go()

    def flush(self) -> None:
        if self._filled:
            self._go()
        self._wait(0)

    def digest(self) -> str:
        self._moving.tell(digest=True)
        return str(self._hear("digest", IDLE_S))

    def _go(self) -> None:
        self._join()
        self._moving.tell(move=[self._slot * self._bucket, self._filled])
        self._travelling, self._filled, self._slot = self._travelling + 1, 0, 1 - self._slot
        self._wait(1)

    def _join(self) -> None:
        if not self._is_joined:
            self._hear("joined", JOIN_S + _GRACE_S)
            self._is_joined = True

    def _wait(self, left: int) -> None:
        """Until at most so many buckets travel."""
        while self._travelling > left:
            self._hear("moved", IDLE_S + _GRACE_S)
            self._travelling -= 1

    def _hear(self, key: str, seconds: float) -> Any:
        return self._waiting.call(lambda: self._moving.hear(key, seconds))

    def end(self) -> None:
        self._moving.end()


def manifest_of(model: Decoder, own: adapters.Beside | None) -> Manifest:
    if own is None:
        kind = DTYPES[model.dtype][0]
        return Manifest(tuple(Entry(name, kind, tuple(tensor.shape)) for name, tensor in hf.named(model)))
    shapes = adapters.shapes_of(model.config, own.settings)
    settings = adapters.settings_for(model.config, own.settings, os.path.basename(own.base))
    entries = tuple(Entry(name, "F32", size) for name, size in shapes.items())
    return Manifest(entries, settings, adapters.base_digest(own.base))
