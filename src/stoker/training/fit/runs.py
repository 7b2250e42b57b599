"""Memory and speed measured by this user's earlier runs, from their memory.json."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from typing import Any

from stoker.contract import layout
from stoker.contract.safe_io import is_own_uid, read_json

MAX_RUNS = 200  # newest runs that are looked at: a plan is made in a moment


def recorded(runs: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, memory.json) of this user's runs, newest first. Other users' runs don't steer a plan."""
    try:
        names = sorted(os.listdir(runs), reverse=True)
    except OSError:
        return
    for name in itertools.islice((name for name in names if _is_own(runs, name)), MAX_RUNS):
        try:
            measured = read_json(os.path.join(runs, name, layout.MEMORY))
        except (OSError, ValueError):
            continue  # another kind of run, or one that has not measured yet
        if isinstance(measured, dict):
            yield name, measured


def _is_own(runs: str, name: str) -> bool:
    try:
        about = os.lstat(os.path.join(runs, name))
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and is_own_uid(about.st_uid, runs)


def contexts(runs: str) -> dict[str, int]:
    """Card -> bytes that a process took on it beside torch's tensors, as last measured here."""
    found: dict[str, int] = {}
    for _, told in recorded(runs):
        size, cards = told.get("context_bytes"), told.get("cards")
        if type(size) is int and 1 << 26 < size < 1 << 33 and isinstance(cards, list) and len(cards) == 1:
            found.setdefault(str(cards[0]), size)
    return found
