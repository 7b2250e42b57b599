"""Answers that came from a server and that no checkpoint has learned from, in the run directory: trainers that start again take
them from here and ask for the others alone.

A file for each step and rank, a line for each question. What is damaged, or was asked with other settings, is asked again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress

from stoker.contract import layout
from stoker.contract.safe_io import APPEND, read_lines
from stoker.contract.text import parse_json
from stoker.training.rl.sampler import Written

FOLDER = "answers"
MOST_BYTES = 64 << 20  # of a rank; beyond that the oldest steps go
_NAME = re.compile(r"step-(\d{8})-rank-(\d{1,6})\.jsonl")
_CHECKPOINT = re.compile(r"step-(\d+)")


class Kept:
    """`settings`: what an answer depends on beside prompt, seed and place."""

    def __init__(self, run: str, rank: int, settings: str) -> None:
        self._run, self._rank, self._settings = run, rank, settings
        self._place = os.path.join(run, FOLDER)
        self._lock = threading.Lock()
        self._found: dict[tuple[str, int], Written] = {}
        self._sizes: dict[int, int] = {}  # of this rank's files, by step
        for name, step, writer in sorted(self._files(), key=lambda one: one[1:]):
            self._read(os.path.join(self._place, name))
            if writer == rank:
                self._sizes[step] = os.path.getsize(os.path.join(self._place, name))

    @property
    def count(self) -> int:
        return len(self._found)

    def find(self, prompt: Sequence[int], seed: int, first: int, count: int) -> list[Written] | None:
        """All of these answers, or None."""
        key = self._key(prompt, seed)
        found = [self._found.get((key, place)) for place in range(first, first + count)]
        whole = [one for one in found if one is not None]
        return whole if len(whole) == count else None

    def keep(self, step: int, prompt: Sequence[int], seed: int, first: int, answers: Sequence[Written]) -> None:
        rows = [[list(one.ids), list(one.logprobs), list(one.versions)] for one in answers]
        line = json.dumps({"key": self._key(prompt, seed), "first": first, "answers": rows})
        data = f"\n{line}\n".encode()  # behind whatever a killed writer left
        with self._lock:
            os.makedirs(self._place, mode=0o700, exist_ok=True)
            handle = os.open(os.path.join(self._place, f"step-{step:08d}-rank-{self._rank}.jsonl"), APPEND, 0o600)
            with os.fdopen(handle, "ab") as file:
                file.write(data)
            self._sizes[step] = self._sizes.get(step, 0) + len(data)

    def forget(self) -> None:
        """What every checkpoint has learned from, and the oldest where there is too much."""
        first = self._oldest_checkpoint()
        with self._lock:
            total = sum(self._sizes.values())
            for name, step, writer in sorted(self._files(), key=lambda one: one[1]):
                own = writer == self._rank
                too_much = own and total > MOST_BYTES
                if (step < first and (own or self._rank == 0)) or too_much:
                    with suppress(FileNotFoundError):  # rank 0 was faster
                        os.unlink(os.path.join(self._place, name))
                    total -= self._sizes.pop(step, 0) if own else 0

    def close(self) -> None:
        """The run is over: nobody will start again."""
        if self._rank == 0:
            shutil.rmtree(self._place, ignore_errors=True)

    def _oldest_checkpoint(self) -> int:
        try:
            names = os.listdir(os.path.join(self._run, layout.CHECKPOINTS))
        except FileNotFoundError:
            return 0
        return min((int(found[1]) for name in names if (found := _CHECKPOINT.fullmatch(name))), default=0)

    def _files(self) -> list[tuple[str, int, int]]:
        """(name, step, rank)."""
        try:
            names = os.listdir(self._place)
        except FileNotFoundError:
            return []
        return [(name, int(found[1]), int(found[2])) for name in names if (found := _NAME.fullmatch(name))]

    def _read(self, path: str) -> None:
        for line in read_lines(path):
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            told = parse_json(line)
            for place, (ids, logprobs, versions) in enumerate(told["answers"], int(told["first"])):
                written = Written(tuple(map(int, ids)), tuple(map(float, logprobs)), tuple(map(int, versions)))
                self._found[str(told["key"]), place] = written
        except (ValueError, KeyError, TypeError, OverflowError):
            return  # half a line: it is asked for again

    def _key(self, prompt: Sequence[int], seed: int) -> str:
        about = f"{self._settings} {seed} {' '.join(map(str, prompt))}"
        return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()
