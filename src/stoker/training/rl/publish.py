"""A version of the weights for the servers that write the answers: a folder in shared memory, where they see the same one, or in
the run directory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from stoker.contract import shared_weights
from stoker.contract.errors import EX_CANTCREAT, EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.text import escape
from stoker.training.model import adapters, hf
from stoker.training.model.decoder import Decoder
from stoker.training.model.targets import extra, targets
from stoker.training.parallel.group import Group
from stoker.training.rl.asking import Patient, ServerFailed
from stoker.training.rl.config import AUTO, MEMORY
from stoker.training.rl.dialects import Published
from stoker.training.rl.versions import versions_kept
from stoker.training.rl.waiting import ServerWait, StopRequested

FOLDER = "published"
_BESIDE = 1 << 20  # bytes of a folder that are no weights, at most
Say = Callable[[str], None]
T = TypeVar("T")


@frozen
class To:
    """The servers, and how weights reach them: grpo.publish."""

    addresses: Sequence[str]
    how: str
    staleness: int
    ask: Patient
    wait: ServerWait
    say: Say  # on rank 0


def told_by(
    to: To,
    address: str,
    body: Mapping[str, Any] | None,
    is_fine: Callable[[int, str], bool] = lambda status, line: False,
) -> dict[str, Any]:
    """What the server says at /v1/weights; nothing: what is no object. Raises StopRequested."""
    text = to.wait.call(lambda: to.ask(address, "/v1/weights", body, is_fine))
    try:
        told = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def on_rank_0(group: Group, work: Callable[[], T]) -> T:
    """Return on every rank what `work` returns on rank 0. Its ServerFailed and StopRequested are raised on every rank, too."""

    def attempt() -> tuple[T | None, tuple[type[Exception], str] | None]:
        try:
            return work(), None
        except (ServerFailed, StopRequested) as problem:
            return None, (type(problem), str(problem))

    result, failure = group.agreed(attempt)
    if failure is not None:
        kind, line = failure
        raise kind(line)
    return result  # type: ignore[return-value]


def _is_not_there(status: int, line: str) -> bool:
    """A server that is no `stoker serve`, or an older one."""
    return status in (404, 405, 501)


class Publisher:
    """Whole weights in the dtype that answers are computed in, or the adapters alone."""

    def __init__(self, model: Decoder, own: adapters.Beside | None, run: str, group: Group, to: To) -> None:
        self._model, self._own, self._group, self._to = model, own, group, to
        self._disk = os.path.join(os.path.abspath(run), FOLDER)
        self._shared: shared_weights.SharedFolder | None = None
        self._is_settled = False
        self._size = _BESIDE + bytes_of(model, own)

    def __call__(self, version: int) -> Published:
        """All ranks call it; the folder is complete when it returns. Raises Refusal, ServerFailed or StopRequested, on all
        ranks.
        """
        if not self._is_settled:
            on_rank_0(self._group, self._take_memory)
            self._is_settled = True
        while True:
            problem: Refusal | None = None
            folder = ""
            try:
                folder = self._folder_for(version) if self._group.first else ""
                self._write(folder)
            except Refusal as refused:
                problem = refused
            found = self._group.agreed(lambda folder=folder, problem=problem: self._published(version, folder, problem))  # type: ignore[misc]
            if found is not None:
                return found

    def _take_memory(self) -> None:
        to = self._to
        if to.how not in (AUTO, MEMORY):
            return
        here = shared_weights.shm_identity()
        for address in to.addresses:
            if not here or told_by(to, address, None, _is_not_there).get("shared_memory") != here:
                if to.how == MEMORY:
                    line = f"grpo.publish {MEMORY}: the server at {address} does not share memory with the trainers"
                    raise Refusal(f"{line} (another machine, container or user): use {AUTO}", EX_USAGE)
                return
        problem = shared_weights.why_too_large(versions_kept(to.staleness) * self._size)
        try:
            self._shared = None if problem else shared_weights.SharedFolder()
        except OSError as refused:
            problem = f"{shared_weights.SHM}: {refused.strerror}"
        if problem:
            self._leave_memory(problem)
        elif self._shared is not None:
            to.say(f"new weights reach the servers through shared memory: {self._shared.path}")

    def _leave_memory(self, problem: str) -> None:
        self._to.say(f"new weights go to {self._disk}, not to shared memory: {escape(problem, 300)}")
        self.end()

    def _folder_for(self, version: int) -> str:
        name = f"version-{version:08d}"
        if self._shared is not None:
            _remove_old(
                self._shared.path, versions_kept(self._to.staleness) - 1, name
            )  # and the one that is written now
            if problem := shared_weights.why_too_large(self._size):
                self._leave_memory(problem)
        return os.path.join(self._disk if self._shared is None else self._shared.path, name)

    def _write(self, folder: str) -> None:
        model, own, first = self._model, self._own, self._group.first
        if own is None:
            dtype = torch.float32 if model.dtype == torch.float32 else model.dtype
            hf.save(model, folder, say=_quiet, dtype=dtype, write=first)
        else:
            adapters.save(model, own.settings, own.base, folder, None, _quiet, first)

    def _published(self, version: int, folder: str, problem: Refusal | None) -> Published | None:
        """None: shared memory did not hold it, and it has to be written again."""
        if problem is not None:
            if self._shared is None or problem.code != EX_CANTCREAT:
                raise problem
            self._leave_memory(problem.line)
            return None
        if self._shared is None:
            _remove_old(self._disk, versions_kept(self._to.staleness), f"{os.path.basename(folder)}.")
        base = "" if self._own is None else self._own.base
        return Published(version, folder, adapters.weights_digest(folder, base))

    def end(self) -> None:
        """However the run ends: memory is given back."""
        if self._shared is not None:
            self._shared.remove()
            self._shared = None

    def close(self) -> None:
        """Nobody needs them any more."""
        self.end()
        if self._group.first and os.path.isdir(self._disk):
            shutil.rmtree(self._disk)


def bytes_of(model: Decoder, own: adapters.Beside | None) -> int:
    """Of the tensors of a version."""
    if own is None:
        return sum(tensor.numel() for _, tensor in hf.named(model)) * model.dtype.itemsize
    pairs = (f"{target.name}.adapter.{part}" for target in targets(model.config, own.settings) for part in ("a", "up"))
    return 4 * sum(model.get_parameter(name).numel() for name in (*pairs, *extra(model.config, own.settings)))


def _remove_old(place: str, count: int, before: str) -> None:
    """Remove all versions but the `count` newest whose names come before this one: later ones are of a run that was resumed
    before them.
    """
    with os.scandir(place) as entries:
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    versions = sorted(name for name in folders if name.startswith("version-"))
    kept = [name for name in versions if name < before][-count:] if count else []
    for name in versions:
        if name not in kept:
            shutil.rmtree(os.path.join(place, name))


def _quiet(line: str) -> None:
    """Each step."""
