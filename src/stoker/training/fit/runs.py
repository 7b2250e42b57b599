"""What runs before have measured of memory and speed: their memory.json. Read with bounds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from stoker.contract import layout
from stoker.contract.untrusted import read_json

MOST_RUNS = 200  # newest ones that are looked at
LONGEST = 1 << 16  # bytes of a memory.json


def recorded(runs: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(run, what it measured), newest first."""
    try:
        names = sorted(os.listdir(runs), reverse=True)[:MOST_RUNS]
    except OSError:
        return
    for name in names:
        try:
            told = read_json(os.path.join(runs, name, layout.MEMORY), LONGEST)
        except (OSError, ValueError):
            continue  # another kind of run, or one that has not got so far
        if isinstance(told, dict):
            yield name, told


def contexts(runs: str) -> dict[str, int]:
    """Card -> bytes that a process took on it beside torch's tensors, as last measured here."""
    found: dict[str, int] = {}
    for _, told in recorded(runs):
        size, cards = told.get("context_bytes"), told.get("cards")
        if type(size) is int and 1 << 26 < size < 1 << 33 and isinstance(cards, list) and len(cards) == 1:
            found.setdefault(str(cards[0]), size)
    return found
