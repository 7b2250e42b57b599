"""What one's own runs before have measured of memory and speed: their memory.json. Read with bounds."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from typing import Any

from stoker.contract import layout
from stoker.contract.safe_io import is_mine, open_below
from stoker.contract.text import parse_json

MOST_RUNS = 200  # newest ones of one's own that are looked at
LONGEST = 1 << 16  # bytes of a memory.json


def recorded(runs: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(run, what it measured), newest first. Others' runs in the same folder are not looked into: they would steer the plan."""
    try:
        names = sorted(os.listdir(runs), reverse=True)
    except OSError:
        return
    for name in itertools.islice((name for name in names if _is_own(runs, name)), MOST_RUNS):
        try:
            with os.fdopen(open_below(runs, f"{name}/{layout.MEMORY}"), "rb") as file:
                mine, data = is_mine(os.fstat(file.fileno()).st_uid, runs), file.read(LONGEST + 1)
            told = parse_json(data) if mine and len(data) <= LONGEST else None
        except (OSError, ValueError):
            continue  # another kind of run, or one that has not got so far
        if isinstance(told, dict):
            yield name, told


def _is_own(runs: str, name: str) -> bool:
    """A folder, and no link to one."""
    try:
        about = os.lstat(os.path.join(runs, name))
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and is_mine(about.st_uid, runs)


def contexts(runs: str) -> dict[str, int]:
    """Card -> bytes that a process took on it beside torch's tensors, as last measured here."""
    found: dict[str, int] = {}
    for _, told in recorded(runs):
        size, cards = told.get("context_bytes"), told.get("cards")
        if type(size) is int and 1 << 26 < size < 1 << 33 and isinstance(cards, list) and len(cards) == 1:
            found.setdefault(str(cards[0]), size)
    return found
