"""Exceptions that quote the traceback of another process: a data loader's worker, a child of mp.spawn, a pool. What
failed there, and where. Pure.
"""

from __future__ import annotations

import re

from stoker.contract.shape import replace
from stoker.contract.shapes import RankError
from stoker.contract.stacktext import is_library

_FRAME = re.compile(r'^ *File "([^"\n]+)", line (\d+), in ([^\n]+)', re.M)
_LAST = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?\Z", re.M | re.S)
_WRAPPERS = ("ProcessRaisedException",)  # their own type says nothing: the quoted one does


def unquoted(error: RankError) -> RankError:
    """With the place inside the quoted traceback and what was said there; of a mere wrapper also with the type there."""
    _, quotes, quoted = error.message.rpartition("Traceback (most recent call last):\n")
    frames = _FRAME.findall(quoted) if quotes else []
    if not frames:
        return error
    file, line, function = next((frame for frame in reversed(frames) if not is_library(frame[0])), frames[-1])
    placed = replace(error, file=file, line=int(line), function=function)
    ended = _LAST.search(quoted.rstrip()[_after_frames(quoted) :])
    if ended is None:
        return placed
    kind = ended["type"].rpartition(".")[2] if error.type in _WRAPPERS else error.type
    which = re.search(r"Process (\d+) terminated|in (DataLoader worker process \d+)", error.message)
    where = "a process that it started" if which is None else which[2] or f"process {which[1]} that it started"
    first = (ended["message"] or "").partition("\n")[0]
    return replace(placed, type=kind, message=f"{first} (in {where})\n{error.message.strip()}")


def _after_frames(quoted: str) -> int:
    """Where the last line begins that is not indented: the exception's own."""
    lines = quoted.rstrip().splitlines(keepends=True)
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith("  "):
            return sum(len(line) for line in lines[: number + 1])
    return 0
