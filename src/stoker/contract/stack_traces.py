"""Parses stacks as faulthandler writes them: threads of `File "x.py", line 3 in work`, the main thread last."""

from __future__ import annotations

from typing import Any

from stoker.contract.text import is_digits

_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", "<string>", "/stoker/control/rank/")
_CURRENT = "Current thread 0x"  # marks the thread that got a fatal signal


def is_library(file: str) -> bool:
    """Return whether a file is not the script's own code."""
    return any(part in file for part in _LIBRARY)


def parse_stacks(text: str) -> list[dict[str, Any]]:
    """Return the threads with their frames [function, file, line], innermost first. `current` marks a crashed one."""
    threads: list[dict[str, Any]] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", _CURRENT)):
            state = {"main": False, "active": False, "gil": False, "current": line.startswith(_CURRENT)}
            threads.append({"name": "", **state, "frames": []})
        elif line.startswith('  File "') and threads:
            file, _, rest = line[len('  File "') :].rpartition('", line ')
            number, _, name = rest.partition(" in ")
            threads[-1]["frames"].append([name, file, int(number) if is_digits(number) else 0])
    if threads:
        threads[-1]["main"] = True
    return threads
