"""New weights for a model that is being served: read beside the old ones, and put in their place in one go.

A body names a folder below the one given for that, or one that a trainer of the same user has put into shared memory
(contract/shared_weights.py), or a transfer through a process group (receiving.py): whole weights, or an adapter for those that the server began with. The
old weights stay until all of the new ones are in memory, so whatever is wrong with a folder changes nothing.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from stoker.contract import shared_weights
from stoker.contract.errors import EX_CONFIG, EX_NOINPUT, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.options import suggest
from stoker.contract.text import escape
from stoker.training.model import adapters, hf
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import base_of, is_adapter, shape_of
from stoker.training.model.hf_read import added_by
from stoker.training.serve.api import OTHER_MODEL, Problem, error, object_in
from stoker.training.serve.receiving import Receiver

KEYS = ("folder", "version", "digest", "transfer", "group", "tensors", "adapter", "base")
MOST_WAITING = 16
SWEEP_S = 5.0  # between two looks for what a trainer that was killed left in shared memory
_NOT_SHAPE = {"load": "", "kept": "", "longest": 0, "stored": 0, "dropout": 0.0, "init_std": 1.0}
Reply = Callable[[int, bytes], None]  # HTTP's status, and a body of JSON


class Engine(Protocol):
    """driver.Driver: calls both in the engine's thread."""

    def update(
        self, change: Callable[[], None], version: int | None, digest: str, applied: Callable[[int], None]
    ) -> None: ...


@frozen
class Asked:
    folder: str  # empty: a transfer
    version: int | None
    digest: str  # what it must be; empty: not known
    transfer: str = ""
    begins: dict[str, Any] | None = None  # the body of a transfer that is to come


class _Coming:
    """Weights that were read. `waiting`: who is to hear that they are in place; None: they are."""

    def __init__(self, version: int | None, digest: str, waiting: list[Reply] | None) -> None:
        self.version, self.digest, self.waiting = version, digest, waiting
        self.in_place = threading.Event()


class Loader:
    """`root`: folders below it may be loaded (empty: none); `folder`: where the model's weights are from; `groups`: addresses of
    process groups that may be joined.
    """

    def __init__(
        self,
        model: Decoder,
        folder: str,
        root: str,
        engine: Engine,
        say: Callable[[str], None],
        groups: tuple[str, ...] = (),
    ) -> None:
        self._model, self._root, self._engine, self._say = model, root and os.path.realpath(root), engine, say
        self._base = base_of(folder)  # what adapters are for: folders that were pushed may be gone
        self._receiver = Receiver(model, self._base, groups)
        self._bodies: queue.Queue[tuple[bytes, Reply] | None] = queue.Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._newest: _Coming | None = None
        self._source = ""  # of the newest, as it was printed: trainers publish in one place, step after step
        self.has_loaded = False  # new weights are in place: the server's are no longer those it was started with
        self._sweeps = False  # weights have come through shared memory
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def load(self, body: bytes, reply: Reply) -> None:
        """Without waiting. `reply` is called once, in any thread: when the engine has them, or with what is wrong."""
        try:
            self._bodies.put_nowait((body, reply))
        except queue.Full:
            reply(429, error(f"{MOST_WAITING} folders are already waiting to be loaded: try again later", 429))

    def _run(self) -> None:
        while (item := self._next()) is not None:
            body, reply = item
            try:
                self._load(asked_in(body), reply)
            except Problem as problem:
                reply(problem.status, error(problem.line, problem.status, problem.key, problem.code))
            except Refusal as refusal:
                status = {EX_NOINPUT: 404, EX_CONFIG: 409}.get(refusal.code, 422)
                code = OTHER_MODEL if status == 409 else ""
                reply(status, error(escape(refusal.line, 500), status, "folder", code))
            except (OSError, ValueError, RuntimeError, MemoryError) as problem:
                line = escape(f"the folder can't be loaded: {type(problem).__name__}: {problem}", 500)
                reply(422, error(line, 422, "folder"))
            except Exception as problem:  # one folder must not end the thread that loads all
                self._say(escape(f"new weights: {type(problem).__name__}: {problem}", 500))
                reply(500, error("loading failed; see the server's log", 500))

    def _next(self) -> tuple[bytes, Reply] | None:
        while self._sweeps or self._receiver.is_open:
            try:
                return self._bodies.get(timeout=SWEEP_S)
            except queue.Empty:
                self._receiver.rest()
                if self._sweeps:
                    shared_weights.remove_dead_folders()
        return self._bodies.get()

    def _load(self, asked: Asked, reply: Reply) -> None:
        if asked.begins is not None:
            if self._newest is not None:
                self._newest.in_place.wait()  # until then the second copy is in use
            reply(200, json.dumps(self._receiver.begin(asked.transfer, asked.begins)).encode())
            return
        if asked.transfer:
            fresh = self._receiver.has(asked.transfer)
            if fresh or asked.version is None or not self._has(asked.version, asked.digest, reply):
                taken = self._receiver.take(asked.transfer, asked.digest)
                self._put(taken, asked.version, asked.digest, reply, "a process group")
            return
        folder = self._folder(asked.folder)
        adapts = is_adapter(folder)
        base = self._base if adapts else folder
        if adapts:
            adapters.check_base(folder, base)
        digest = adapters.weights_digest(folder, base)
        if asked.digest not in ("", digest):
            raise Problem(
                f"{asked.folder} has the digest {digest}, not {asked.digest}: damaged, or other weights", 422, "digest"
            )
        if asked.version is not None and self._has(asked.version, digest, reply):
            return
        if self._newest is not None:
            self._newest.in_place.wait()  # until then they are in memory, too: there is room for one copy, not for many
        model = self._read(folder, base, adapts)

        def change() -> None:
            with torch.no_grad():
                for ours, new in zip(self._model.parameters(), model.parameters(), strict=True):
                    ours.copy_(new)

        self._put(change, asked.version, digest, reply, folder)

    def _folder(self, path: str) -> str:
        if not self._root:
            raise Problem("this server takes no folders: start it with --weights-from FOLDER", 403, "folder")
        if shared_weights.is_shared_folder(path):
            self._sweeps = True
            return inside(os.path.dirname(path), path)
        return inside(self._root, path)

    def _put(self, change: Callable[[], None], version: int | None, digest: str, reply: Reply, where: str) -> None:
        coming = _Coming(version, digest, [reply])

        def applied(version: int) -> None:
            with self._lock:
                waiting, coming.waiting = coming.waiting or [], None
            coming.in_place.set()
            self.has_loaded = True
            for one in waiting:
                one(200, in_place(version, digest))

        self._newest = coming
        source = os.path.dirname(where) or where
        come = "new weights" if source == self._source and version is not None else f"new weights from {where}"
        self._source = source
        self._say(f"{come}{'' if version is None else f': version {version}'}")
        self._engine.update(change, version, digest, applied)

    def _has(self, version: int, digest: str, reply: Reply) -> bool:
        """Several trainers publish the same: it is loaded once, and all hear when it is in place."""
        newest = self._newest
        if newest is None or (newest.version, newest.digest) != (version, digest):
            return False
        with self._lock:
            if newest.waiting is not None:
                newest.waiting.append(reply)
                return True
        reply(200, in_place(version, digest))
        return True

    def _read(self, folder: str, base: str, adapts: bool) -> Decoder:
        """A model beside the one that is served, in host memory."""
        model = self._model
        refuse_other_shape(shape_of(base), model.config, folder)
        added = added_by(folder, model.config, False, _quiet, base) if adapts else None

        def fill(fresh: Decoder, _: str, say: Callable[[str], None]) -> None:
            hf.load_named(fresh, hf.named(fresh), base, say, added)

        return hf.opened(base, model.context_length, model.dtype, torch.device("cpu"), _quiet, load=fill)


def in_place(version: int, digest: str) -> bytes:
    return json.dumps({"version": version, "digest": digest}).encode()


def asked_in(body: bytes) -> Asked:
    told = object_in(body)
    for key in told:
        if key not in KEYS:
            raise Problem(f"unknown key {escape(repr(key), 60)}{suggest(key, KEYS)}", key=escape(key, 60))
    folder, version, digest, transfer = (told.get(key) for key in KEYS[:4])
    if transfer is not None:
        if not isinstance(transfer, str) or not transfer or folder is not None:
            raise Problem("transfer must be a name, without a folder beside it", key="transfer")
    elif not isinstance(folder, str) or not folder or "\0" in folder:
        raise Problem("folder must be the path of a folder with weights", key="folder")
    if version is not None and (type(version) is not int or version < 0):
        raise Problem("version must be a whole number of 0 or more", key="version")
    if digest is not None and not isinstance(digest, str):
        raise Problem("digest must be a text", key="digest")
    if transfer is not None and "group" not in told and not digest:
        raise Problem(
            "a transfer needs its digest: it tells what came through the group from other weights", key="digest"
        )
    if transfer is None:
        return Asked(str(folder), version, digest or "")
    return Asked("", version, digest or "", transfer, told if "group" in told else None)


def inside(root: str, path: str) -> str:
    """The folder, below `root` with all its files, wherever links lead."""
    found = os.path.realpath(os.path.join(root, path))
    shown = escape(path, 200)
    if not _is_below(found, root):
        raise Problem(
            f"{shown} is not in the folder that this server takes weights from (--weights-from)", 403, "folder"
        )
    if not os.path.isdir(found):
        raise Problem(f"{shown}: no such folder", 404, "folder")
    for name in os.listdir(found):
        if not _is_below(os.path.realpath(os.path.join(found, name)), root):
            raise Problem(f"{escape(name, 100)} of {shown} is a link to a place outside", 403, "folder")
    return found


def _is_below(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root


def refuse_other_shape(theirs: ModelConfig, ours: ModelConfig, folder: str) -> None:
    one, other = (vars(replace(c, **_NOT_SHAPE)) for c in (theirs, ours))
    key = next((key for key in other if one[key] != other[key]), "")
    if key:
        line = f"{folder}: its {key} is {one[key]}, and that of the served model is {other[key]}"
        raise Problem(f"{escape(line, 400)}: weights of another shape", 409, "folder", OTHER_MODEL)


def _quiet(line: str) -> None:
    """Who pushed them gets the rest in the answer."""
