"""The checkpoints' folder as one rank writes to it: a save becomes a checkpoint, or leaves nothing behind and says why."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence

from stoker.contract.names import Refusal
from stoker.training.checkpoint.commit import Wanted, commit, gather
from stoker.training.checkpoint.folders import (
    LOCK,
    hold,
    is_trusted,
    mend,
    name_of,
    remove,
    retire,
    steps_in,
    sweep,
    unfinished_name,
)
from stoker.training.checkpoint.part import GivenUp, note_failure, write_part
from stoker.training.checkpoint.reading import open_checkpoint
from stoker.training.checkpoint.snapshot import Buffers, Placed


class Store:
    def __init__(self, folder: str, rank: int, world: int, token: str, say: Callable[[str], None]) -> None:
        self.folder, self._rank, self._world, self._token, self._say = os.path.abspath(folder), rank, world, token, say
        unfinished_name(0, token, 0)  # a token that can't be part of a name is refused now
        self.problem: str | None = None
        self._said: object = None
        self._device: int | None = None
        self._lock: int | None = None
        if rank == 0:
            self._lock = hold(self.folder, say)
            mend(self.folder)
            self._sweep(lambda other, _: other != token)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(
        self,
        serial: int,
        wanted: Wanted,
        placed: Sequence[Placed],
        buffers: Buffers,
        patience: float,
        stop: threading.Event,
    ) -> None:
        """This rank's part; on rank 0 then all ranks' parts become a checkpoint."""
        unfinished = self._unfinished(wanted.step, serial)
        self._make(unfinished)
        write_part(unfinished, self._rank, wanted.step, placed, buffers, stop.is_set)
        if self._rank == 0:
            parts = gather(unfinished, self._world, patience, stop.wait)
            commit(unfinished, os.path.join(self.folder, name_of(wanted.step)), parts, wanted)
            self._sweep(lambda token, one: token == self._token and one <= serial)

    def worked(self, step: int) -> None:
        if self._said is not None:
            self._say(f"the checkpoint of step {step} is written; checkpoints work again")
        self.problem = self._said = None

    def failed(self, serial: int, step: int, problem: Exception) -> None:
        """Keeps the reason, says it once, removes what there is of this save."""
        if isinstance(problem, OSError):
            why = f"{os.path.basename(problem.filename) + ': ' if isinstance(problem.filename, str) else ''}{problem.strerror or problem}{self._free()}"
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
                remove(unfinished)
            elif os.path.isdir(unfinished):
                note_failure(unfinished, self._rank, why)
        except OSError as second:
            self.problem += f" (and {second.filename or 'its folder'} can't be cleaned up: {second.strerror})"

    def declined(self, serial: int, step: int) -> None:
        """This rank skipped a save that rank 0 may have begun: it shall not wait for it."""
        unfinished = self._unfinished(step, serial)
        try:
            if self._rank != 0 and os.path.isdir(unfinished):
                note_failure(unfinished, self._rank, "it was still writing the one before")
        except OSError as problem:
            self._say(f"{unfinished}: {problem.strerror}")

    def became_a_checkpoint(self, serial: int, step: int, patience: float) -> bool:
        """Asked by a rank whose part is written; others than rank 0 see the rest in the folder."""
        deadline = time.monotonic() + patience
        while self._rank != 0:
            pending = os.path.isdir(
                self._unfinished(step, serial)
            )  # asked first: from there to the final name is one rename
            line = "rank 0 gave it up"
            try:
                if open_checkpoint(os.path.join(self.folder, name_of(step))).manifest.token == self._token:
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
        for one, path in steps_in(self.folder).items():
            try:
                if is_trusted(path):
                    scores[one] = open_checkpoint(path).score
            except Refusal as problem:
                self._say(f"{problem.line}; it does not count among those that are kept")
        try:
            retire(self.folder, step, keep, scores, keep_best)
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
            self._say(f"{self.folder} was gone, with all checkpoints in it; it is made anew")
        elif os.stat(self.folder).st_dev != self._device and not os.path.exists(os.path.join(self.folder, LOCK)):
            raise GivenUp("the file system it was on is gone (unmounted?)")
        os.makedirs(unfinished, exist_ok=True)

    def _unfinished(self, step: int, serial: int) -> str:
        return os.path.join(self.folder, unfinished_name(step, self._token, serial))

    def _last_good(self) -> str:
        try:
            good = next((os.path.basename(path) for path in steps_in(self.folder).values()), None)
        except OSError as problem:
            return f"whether there is a good one can't be seen: {problem.strerror}"
        return f"the last good one is {good}" if good else "there is no other one"

    def _free(self) -> str:
        try:
            disk = os.statvfs(self.folder)
        except OSError as problem:
            return f" (its free space can't be asked for: {problem.strerror})"
        return f" ({disk.f_bavail * disk.f_frsize / 1e9:.2f} GB free)"

    def _sweep(self, dead: Callable[[str, int], bool]) -> None:
        try:
            sweep(self.folder, dead)
        except OSError as problem:
            self._say(f"{problem.filename or self.folder}: leftovers can't be removed: {problem.strerror}")
