"""Writes a world: the same seed, level and size give the same bytes, a larger size begins with the smaller one's rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import islice

from stoker.contract.names import EX_CANTCREAT, EX_USAGE, Refusal
from stoker.contract.shape import shape
from stoker.contract.wholefile import WholeFile, sync_folder, write_whole
from stoker.training.world import rows
from stoker.training.world.dice import Dice
from stoker.training.world.world import World

VERSION = 4  # of what is written: another number, other bytes
SCHEMA = 1
WORLD = "world.json"
CHUNK = 4096  # rows that are joined and written at once


@shape
class File:
    name: str
    rows: Callable[[World, Dice, bool], Iterator[str]]
    held: bool
    count: int  # rows at size 1, or, of base text, bytes


FILES = (
    File("base", rows.base, False, 6_000_000), File("base-held-out", rows.base, True, 300_000),
    File("midtrain", rows.midtrain, False, 20_000), File("midtrain-held-out", rows.midtrain, True, 1_000),
    File("sft", rows.sft, False, 12_000), File("sft-held-out", rows.sft, True, 600),
    File("pairs", rows.pairs, False, 8_000), File("pairs-held-out", rows.pairs, True, 800),
    File("prompts", rows.prompts, False, 4_000), File("prompts-held-out", rows.prompts, True, 400), File("questions", rows.questions, True, 600),
)  # fmt: skip


def make(folder: str, *, seed: int, level: int, size: float) -> None:
    """world.json is written last: where it is, the rest is whole."""
    if level < 0:
        raise Refusal(f"world level {level}: levels are 0, 1, 2 …; 0 is the easiest", EX_USAGE)
    if not 0 < size < float("inf"):
        raise Refusal(
            f"world size {size}: it multiplies the number of rows, so it is above 0; 1 gives 6 MB of base text",
            EX_USAGE,
        )
    world = World(level)
    try:
        os.makedirs(folder, exist_ok=True)
        told = os.path.join(folder, WORLD)
        if os.path.exists(told):
            os.unlink(told)
        counts = {
            file.name: _write(os.path.join(folder, f"{file.name}.jsonl"), _rows(world, file, seed, size))
            for file in FILES
        }
        version = sha256(f"stoker world {VERSION}".encode()).hexdigest()[:16]
        story = {"schema": SCHEMA, "generator": version, "seed": seed, "level": level, "size": size, "rows": counts}
        write_whole(told, json.dumps(story, indent=1).encode())
        sync_folder(folder)
    except OSError as problem:
        raise Refusal(
            f"the world can't be written in {folder}: {problem.strerror}; give another place or make room", EX_CANTCREAT
        ) from problem


def _rows(world: World, file: File, seed: int, size: float) -> Iterator[str]:
    found = file.rows(world, Dice(seed, world.level, file.name), file.held)
    wanted = max(round(file.count * size), 1)
    if file.rows is rows.base:
        return _until(found, wanted)
    return islice(found, wanted)


def _until(found: Iterator[str], wanted: int) -> Iterator[str]:
    written = 0
    for row in found:
        yield row
        written += len(row) - len('{"text": ""}')
        if written >= wanted:
            return


def _write(path: str, lines: Iterator[str]) -> int:
    """Row by row, so that a large world needs no memory; under a temporary name until the last byte is on the disk."""
    count = 0
    with WholeFile(path) as file:
        while chunk := list(islice(lines, CHUNK)):
            count += len(chunk)
            file.write(("\n".join(chunk) + "\n").encode())
    return count
