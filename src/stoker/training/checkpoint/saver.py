"""Saves while training goes on: a snapshot now, the writing in a thread. A failed save is reported; the last one stays.

In a loop: `prepare_buffers` once; `before_update` before the optimizer's step; `save` after it; `close` at the end.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import stoker
from stoker.contract.errors import Refusal
from stoker.contract.frozen import frozen
from stoker.contract.units import format_bytes
from stoker.training.checkpoint import folders
from stoker.training.checkpoint.manifest import Manifest
from stoker.training.checkpoint.part import GivenUp, commit, gather, note_failure, write_part
from stoker.training.checkpoint.reading import open_checkpoint
from stoker.training.checkpoint.snapshot import Buffers, Copying, Source, lay_out, sources

Tensors = Mapping[str, torch.Tensor]
_LINGER_S = 3.0  # how long a save under way may hold up the exit of a process that did not call close()


@frozen
class _Job:
    serial: int
    wanted: Manifest
    placed: list[Source]
    copying: Copying


class _Store:
    """The checkpoints' folder as one rank writes to it: a save becomes a checkpoint, or leaves nothing and says why."""

    def __init__(self, folder: str, rank: int, token: str, say: Callable[[str], None], only: str | None) -> None:
        """`only`: the run whose checkpoints are counted and removed; None: all that are there."""
        self._only = only
        self.folder, self._rank, self._token, self._say = os.path.abspath(folder), rank, token, say
        folders.unfinished_name(0, token, 0)  # a token that can't be part of a name is refused now
        self.problem: str | None = None
        self._said: object = None
        self._device: int | None = None
        self._lock: int | None = None
        if rank == 0:
            self._lock = folders.hold(self.folder, say)
            folders.repair(self.folder)
            self._sweep(lambda other, _: other != token)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(
        self, job: _Job, buffers: Buffers, writers: Sequence[int], patience: float, stop: threading.Event
    ) -> None:
        """This rank's part; on rank 0 then all writers' parts become a checkpoint."""
        wanted, serial = job.wanted, job.serial
        unfinished = self._unfinished(wanted.step, serial)
        self._make(unfinished)
        write_part(unfinished, self._rank, wanted.step, job.placed, buffers, stop.is_set)
        if self._rank == 0:
            parts = gather(unfinished, writers, patience, stop.wait)
            commit(unfinished, os.path.join(self.folder, folders.name_of(wanted.step)), parts, wanted)
            self._sweep(lambda token, one: token == self._token and one <= serial)

    def worked(self, step: int) -> None:
        if self._said is not None:
            self._say(f"the checkpoint of step {step} is written; checkpoints work again")
        self.problem = self._said = None

    def failed(self, serial: int, step: int, problem: Exception) -> None:
        """Keeps the reason, says it once, removes what there is of this save."""
        if isinstance(problem, OSError):
            file = f"{os.path.basename(problem.filename)}: " if isinstance(problem.filename, str) else ""
            why = f"{file}{problem.strerror or problem}{self._free()}"
        else:
            why = str(problem) if isinstance(problem, GivenUp) else f"{type(problem).__name__}: {problem}"
        self.problem = f"the checkpoint of step {step} was not written in {self.folder}: {why}; {self._last_good()}"
        kind = problem.errno if isinstance(problem, OSError) else re.sub(r"[\d.]+", "", why)
        if kind != self._said and not (isinstance(problem, GivenUp) and not problem.own):
            self._said = kind
            self._say(self.problem)
        unfinished = self._unfinished(step, serial)
        try:
            if self._rank == 0:
                folders.remove(unfinished)
            elif folders.is_own_folder(unfinished):
                note_failure(unfinished, self._rank, why)
        except OSError as second:
            self.problem += f" (and {second.filename or 'its folder'} can't be cleaned up: {second.strerror})"

    def declined(self, serial: int, step: int) -> None:
        """This rank skipped a save that rank 0 may have begun: it shall not wait for it."""
        unfinished = self._unfinished(step, serial)
        try:
            if self._rank != 0 and folders.is_own_folder(unfinished):
                note_failure(unfinished, self._rank, "it was still writing the one before")
        except OSError as problem:
            self._say(f"{unfinished}: {problem.strerror}")

    def became_a_checkpoint(self, serial: int, step: int, patience: float) -> bool:
        """Asked by a rank whose part is written; others than rank 0 see the rest in the folder."""
        deadline = time.monotonic() + patience
        while self._rank != 0:
            # Asked first: from there to the final name is one rename.
            pending = os.path.isdir(self._unfinished(step, serial))
            line = "rank 0 gave it up"
            try:
                if open_checkpoint(os.path.join(self.folder, folders.name_of(step))).manifest.token == self._token:
                    return True
            except Refusal as problem:
                line = problem.line
            if not pending or time.monotonic() > deadline:
                self.problem = f"the checkpoint of step {step} did not become complete: {line}"
                return False
            time.sleep(0.02)
        return True

    def retire(self, step: int, keep: int, keep_best: bool) -> None:
        """After the one of `step` is there: the newest and the best stay."""
        scores: dict[int, float | None] = {}
        for one, path in folders.steps_in(self.folder).items():
            try:
                if folders.is_trusted(path):
                    found = open_checkpoint(path)
                    if self._only is None or found.meta.get("run") == self._only:
                        scores[one] = found.score
            except Refusal as problem:
                self._say(f"{problem.line}; it does not count among those that are kept")
        try:
            folders.retire(self.folder, step, keep, scores, keep_best)
        except OSError as problem:
            self._say(f"{problem.filename or self.folder}: an old checkpoint can't be removed: {problem.strerror}")

    def _make(self, unfinished: str) -> None:
        """A folder that was deleted is made anew; a file system that went away is not written around."""
        if self._device is None:
            os.makedirs(self.folder, exist_ok=True)
            self._device = os.stat(self.folder).st_dev
        elif not os.path.isdir(self.folder):
            if os.stat(os.path.dirname(self.folder)).st_dev != self._device:
                raise GivenUp("the file system it was on is gone (unmounted?)")
            os.makedirs(self.folder, exist_ok=True)
            self._say(f"{self.folder} was removed, with all checkpoints in it; it is created again")
        elif os.stat(self.folder).st_dev != self._device and not os.path.exists(
            os.path.join(self.folder, folders.LOCK)
        ):
            raise GivenUp("the file system it was on is gone (unmounted?)")
        folders.make_unfinished(unfinished)

    def _unfinished(self, step: int, serial: int) -> str:
        return os.path.join(self.folder, folders.unfinished_name(step, self._token, serial))

    def _last_good(self) -> str:
        try:
            good = next((os.path.basename(path) for path in folders.steps_in(self.folder).values()), None)
        except OSError as problem:
            return f"the folder of the others can't be read: {problem.strerror}"
        return f"the last good one is {good}" if good else "there is no other one"

    def _free(self) -> str:
        try:
            disk = os.statvfs(self.folder)
        except OSError as problem:
            return f" (its free space is unknown: {problem.strerror})"
        return f" ({format_bytes(disk.f_bavail * disk.f_frsize)} free)"

    def _sweep(self, dead: Callable[[str, int], bool]) -> None:
        try:
            folders.sweep(self.folder, dead)
        except OSError as problem:
            self._say(f"{problem.filename or self.folder}: leftovers can't be removed: {problem.strerror}")


class Saver:
    """`token`: the same on all ranks, and never used before in this folder. `say`: one line for people.

    `only`: the run whose checkpoints are counted and removed; None: all in the folder. `patience`: how many seconds rank 0 waits for the other ranks' parts. `keep_best`: the lowest score stays.
    """

    def __init__(
        self,
        folder: str,
        *,
        rank: int,
        world: int,
        token: str,
        say: Callable[[str], None],
        keep: int = 2,
        keep_best: bool = True,
        patience: float = 300.0,
        only: str | None = None,
    ) -> None:
        self._store = _Store(folder, rank, token, say, only)
        self._writers: Sequence[int] = range(world)
        self._rank, self._world, self._token, self._say = rank, world, token, say
        self._keep, self._keep_best, self._patience = keep, keep_best, patience
        self._buffers = Buffers(say)
        self._streams: dict[torch.device, Any] = {}
        self._copying: Copying | None = None
        # Counts the calls of save(), which all ranks make alike: so they agree on a name without talking.
        self._serial = 0
        self._job: _Job | None = None
        self._declined: list[tuple[int, int]] = []
        # Serial and step of the newest save of which this rank did its share.
        self._written: tuple[int, int] | None = None
        self._skips_said = False
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._preparing: threading.Thread | None = None

    def write_by(self, ranks: Sequence[int]) -> None:
        """Before the first save, on all ranks alike: these write, rank 0 among them. The others don't see the folder, so what they
        alone have can't be saved: there must be no shards."""
        self._writers = tuple(ranks)

    def prepare_buffers(self, tensors: Tensors) -> None:
        """Takes the host memory of a snapshot, in a thread: pinning takes half a second a GB, and no save has to."""
        self._preparing = threading.Thread(target=self._placed, args=(tensors,), name="checkpoint buffers", daemon=True)
        self._preparing.start()

    def busy(self) -> bool:
        """Whether a save asked for now would be skipped. Ranks may differ for a moment: agree before `save`."""
        return self._job is not None

    def problem(self) -> str | None:
        """Why the newest save failed; None once one has worked."""
        return self._store.problem

    def before_update(self) -> None:
        """The GPU, not the host, waits here until the snapshot has been copied out: then the optimizer may write."""
        if self._copying is not None:
            self._copying.let_current_streams_wait()
            self._copying = None

    def save(
        self, step: int, tensors: Tensors, meta: Mapping[str, Any], score: float | None = None, *, wait: bool = False
    ) -> bool:
        """Every rank calls this, in the same order; rank 0's `meta` and `score` count. `tensors`: replicated or DTensors.

        Returns whether the save was taken up; with `wait`, whether the checkpoint is there: rank 0's answer is the true one.
        """
        if self._closed:
            raise ValueError("this Saver is closed")
        self._join_preparing()
        self._serial += 1
        if self._rank not in self._writers:
            return True
        if wait:
            self._wait_idle()
            if self._written is not None and self._written[1] == step and self._is_there():
                return True
        elif self.busy():
            self._decline(step)
            return False
        placed, copying = self._placed(tensors), Copying()
        copying.start(placed, self._buffers, self._streams)
        self._copying = copying
        best = float(score) if score is not None and math.isfinite(score) else None
        wanted = Manifest(step, self._world, self._token, {}, {}, json.loads(json.dumps(meta)), best)
        self._hand_over(_Job(self._serial, wanted, placed, copying))
        if not wait:
            return True
        self._wait_idle()
        return self._written == (self._serial, step) and self._is_there()

    def close(self) -> None:
        """The save under way is finished."""
        self._closed = True
        self._join_preparing()
        self._wait_idle()
        self._end_thread(None)
        self._buffers.free()
        atexit.unregister(self._at_exit)
        self._store.close()

    def _join_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _decline(self, step: int) -> None:
        with self._changed:
            self._declined.append((self._serial, step))
        if not self._skips_said:
            self._skips_said = True
            self._say(
                f"the checkpoint of step {step} is skipped: the one before is still being written; save less often, or"
                " to a faster disk"
            )

    def _placed(self, tensors: Tensors) -> list[Source]:
        """Where each goes, with the memory for it reserved."""
        if self._rank not in self._writers:
            return []
        placed = lay_out(sources(tensors, self._writers.index(self._rank), len(self._writers)))
        on_gpu = any(one.block is not None and one.block.data.is_cuda for one in placed)
        self._buffers.reserve(max((one.stop for one in placed), default=0), pinned=on_gpu)
        return placed

    def _is_there(self) -> bool:
        """The newest save of which this rank did its share became a checkpoint."""
        return self._written is not None and self._store.became_a_checkpoint(*self._written, self._patience)

    def _hand_over(self, job: _Job) -> None:
        with self._changed:
            self._job = job
            self._changed.notify_all()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="checkpoint", daemon=True)
            self._thread.start()
            atexit.register(self._at_exit, os.getpid())

    def _wait_idle(self) -> None:
        with self._changed:
            while self._job is not None:
                self._changed.wait(1.0)  # in pieces, so that a signal's handler gets its turn

    def _end_thread(self, seconds: float | None) -> None:
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)

    def _at_exit(self, pid: int) -> None:
        """The interpreter ends without close(): a moment to finish, then the thread must be out of torch."""
        if os.getpid() != pid:
            return
        deadline = time.monotonic() + _LINGER_S
        while self.busy() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._end_thread(_LINGER_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._job is None and not self._stop.is_set():
                    self._changed.wait()
                job = self._job
            if job is None:
                return
            try:
                self._write(job)
            finally:  # even if `say` raises: nobody may wait for this job for ever
                with self._changed:
                    declined, self._declined, self._job = self._declined, [], None
                    self._changed.notify_all()
            for serial, step in declined:
                self._store.declined(serial, step)

    def _write(self, job: _Job) -> None:
        step = job.wanted.step
        try:
            job.copying.finish()
            self._store.write(job, self._buffers, self._writers, self._patience, self._stop)
            self._written = (job.serial, step)
        except Exception as problem:  # whatever it is: training goes on, and it is said
            self._store.failed(job.serial, step, problem)
            return
        self._store.worked(step)
        if self._rank == 0:
            self._store.retire(step, self._keep, self._keep_best)
            stoker.mark("CHECKPOINT")  # the run may be ended from here: a host that is back joins now
