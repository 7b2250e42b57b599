"""Saves while training goes on: a snapshot now, the writing in a thread. A save that fails is said, and the last good
one stays.

In a loop: `prepare_buffers` once; `before_update` between backward and the optimizer's step; `save` after it; `close`
at the end.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import stoker
from stoker.contract.shape import shape
from stoker.training.checkpoint.commit import Wanted
from stoker.training.checkpoint.pieces import sources
from stoker.training.checkpoint.snapshot import Buffers, Copying, Placed, lay_out
from stoker.training.checkpoint.store import Store

_LINGER_S = 3.0  # how long a save under way may hold up the exit of a process that did not call close()


@shape
class _Job:
    serial: int
    wanted: Wanted
    placed: list[Placed]
    copying: Copying


class Saver:
    """`token`: the same on all ranks, and never used before in this folder. `say`: one line for people.

    `patience`: how many seconds rank 0 waits for the other ranks' parts. `keep_best`: the lowest score stays.
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
    ) -> None:
        self._store = Store(folder, rank, world, token, say)
        self._rank, self._world, self._token, self._say = rank, world, token, say
        self._keep, self._keep_best, self._patience = keep, keep_best, patience
        self._buffers = Buffers(say)
        self._streams: dict[torch.device, Any] = {}
        self._copying: Copying | None = None
        self._serial = (
            0  # counts the calls of save(), which all ranks make alike: so they agree on a name without talking
        )
        self._job: _Job | None = None
        self._declined: list[tuple[int, int]] = []
        self._written: tuple[int, int] | None = (
            None  # serial and step of the newest save of which this rank did its share
        )
        self._skips_said = False
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._preparing: threading.Thread | None = None

    def prepare_buffers(
        self, tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor] | None = None
    ) -> int:
        """Takes the host memory a snapshot of these needs (pinned, for GPUs), so that no save has to. Returns the bytes
        held.
        """
        self._reserve(lay_out(sources(tensors, own or {}, self._rank, self._world)))
        return self._buffers.size

    def prepare_buffers_aside(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The same in a thread: pinning takes half a second a GB, and the first step need not wait for it."""
        self._preparing = threading.Thread(
            target=self.prepare_buffers, args=(tensors,), name="checkpoint buffers", daemon=True
        )
        self._preparing.start()

    def busy(self) -> bool:
        """Whether a save asked for now would be skipped. Ranks may differ for a moment: agree on it before you call
        `save`.
        """
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
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        meta: Mapping[str, Any],
        score: float | None = None,
        *,
        own: Mapping[str, torch.Tensor] | None = None,
        wait: bool = False,
    ) -> bool:
        """Every rank calls this, in the same order. `tensors` are the job's (replicated, or DTensors), `own` this
        rank's alone.

        Returns whether the save was taken up; with `wait`, whether the checkpoint is there. rank 0's `meta` and `score`
        count.
        """
        if self._closed:
            raise ValueError("this Saver is closed")
        self._join_preparing()
        self._serial += 1
        if wait:
            self._wait_idle()
            if (
                self._written is not None
                and self._written[1] == step
                and self._store.became_a_checkpoint(*self._written, self._patience)
            ):
                return True
        elif self.busy():
            self._decline(step)
            return False
        placed = lay_out(sources(tensors, own or {}, self._rank, self._world))
        self._reserve(placed)
        copying = Copying()
        copying.start(placed, self._buffers, self._streams)
        self._copying = copying
        best = float(score) if score is not None and math.isfinite(score) else None
        self._hand_over(
            _Job(
                self._serial,
                Wanted(step, self._world, self._token, json.loads(json.dumps(meta)), best),
                placed,
                copying,
            )
        )
        if not wait:
            return True
        self._wait_idle()
        return self._written == (self._serial, step) and self._store.became_a_checkpoint(
            self._serial, step, self._patience
        )

    def close(self, wait: bool = True) -> None:
        """With `wait` the save under way is finished, else given up."""
        self._closed = True
        self._join_preparing()
        if wait:
            self._wait_idle()
        self._end_thread(None if wait else _LINGER_S)
        if self._thread is None or not self._thread.is_alive():
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

    def _reserve(self, placed: list[Placed]) -> None:
        on_gpu = any(one.source.block is not None and one.source.block.data.is_cuda for one in placed)
        self._buffers.reserve(max((one.stop for one in placed), default=0), pinned=on_gpu)

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
        """The interpreter ends without close(), after an exception say: a moment to finish, then the thread must be out
        of torch.
        """
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
            self._store.write(job.serial, job.wanted, job.placed, self._buffers, self._patience, self._stop)
            self._written = (job.serial, step)
        except Exception as problem:  # whatever it is: training goes on, and it is said
            self._store.failed(job.serial, step, problem)
            return
        self._store.worked(step)
        if self._rank == 0:
            self._store.retire(step, self._keep, self._keep_best)
            stoker.mark("CHECKPOINT")  # the run may be ended from here: a host that is back joins now
