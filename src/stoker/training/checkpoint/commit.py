"""Rank 0 makes the parts of all ranks one checkpoint: waits for the files, writes the manifest, renames. No collective
anywhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from stoker.contract.quantities import span
from stoker.contract.shape import replace, shape
from stoker.contract.wholefile import sync_folder, write_whole
from stoker.training.checkpoint.folders import put_in_place
from stoker.training.checkpoint.manifest import NAME, Entry, Manifest, Sums, disagreement, encode
from stoker.training.checkpoint.part import GivenUp, Part, failure_name, note_name, read_part
from stoker.training.checkpoint.sums import sizes_wrong_in


@shape
class Wanted:
    """What the manifest says beside the parts."""

    step: int
    world: int
    token: str
    meta: dict[str, Any]
    score: float | None


def gather(folder: str, world: int, patience: float, pause: Callable[[float], bool]) -> list[Part]:
    """The parts of all ranks, once they are there. `pause(seconds)` waits and says whether to stop."""
    deadline = time.monotonic() + patience
    wait = 0.005
    while True:
        there = set(os.listdir(folder))
        for rank in range(world):
            if failure_name(rank) in there:
                with open(os.path.join(folder, failure_name(rank)), encoding="utf-8") as file:
                    raise GivenUp(f"rank {rank} could not write its part: {file.read() or 'no reason given'}")
        missing = [rank for rank in range(world) if note_name(rank) not in there]
        if not missing:
            return [read_part(folder, rank) for rank in range(world)]
        if time.monotonic() > deadline:
            raise GivenUp(
                f"the part of rank {missing[0]} did not come within {span(patience)}; all hosts must see the same"
                f" {os.path.dirname(folder)}"
            )
        if pause(wait):
            raise GivenUp("the run ended before all ranks had written their parts")
        wait = min(wait * 1.5, 0.2)


def merge(parts: Sequence[Part]) -> tuple[dict[str, Sums], dict[str, Entry]]:
    files: dict[str, Sums] = {}
    tensors: dict[str, Entry] = {}
    for part in parts:
        files |= part.files
        for name, entry in part.tensors.items():
            known = tensors.get(name)
            if known is None:
                tensors[name] = entry
            elif (known.shape, known.dtype, known.rank) != (entry.shape, entry.dtype, entry.rank):
                raise GivenUp(
                    f"rank {part.rank} has {name} as {entry.dtype} {list(entry.shape)}, others as {known.dtype}"
                    f" {list(known.shape)}"
                )
            else:
                tensors[name] = replace(known, pieces=known.pieces + entry.pieces)
    return files, tensors


def commit(unfinished: str, final: str, parts: Sequence[Part], wanted: Wanted) -> None:
    files, tensors = merge(parts)
    wrong = sizes_wrong_in(unfinished, files)
    problem = wrong[0] if wrong else disagreement(files, tensors)
    if problem:
        raise GivenUp(problem)
    write_whole(
        os.path.join(unfinished, NAME),
        encode(Manifest(wanted.step, wanted.world, wanted.token, files, tensors, wanted.meta, wanted.score)),
    )
    for rank in range(wanted.world):
        os.unlink(os.path.join(unfinished, note_name(rank)))  # the manifest has what they said
    sync_folder(unfinished)
    put_in_place(unfinished, final)
