"""How a verdict on one rank is put: its exit code, its place, its first line."""

from __future__ import annotations

from stoker.contract.names import EX_SOFTWARE
from stoker.contract.shapes import RankEnd

LINE = 500  # of one line of evidence: the log has the rest


def exit_code(end: RankEnd) -> int:
    """The guilty rank's own; 128 + n for a signal; 70 where that would be 0 or was our doing."""
    if end.ours and end.code and end.code < 0 and end.error is not None and not end.error.late:
        return (
            1  # it had reported its exception and was on its way out when our signal met it: Python's own code for that
        )
    if not end.code or (end.ours and (end.error is None or end.code < 0)):
        return EX_SOFTWARE
    return end.code if end.code > 0 else 128 - end.code


def place(end: RankEnd) -> str:
    error = end.error
    return f"{error.file}:{error.line}, in {error.function}" if error and error.file else "no place known"


def first_line(text: str, limit: int = 200) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= limit else line[: limit - 1] + "…"


def traced(end: RankEnd, lines: int = 6) -> tuple[str, ...]:
    """The exception, where it was, and the end of its traceback: what most causes quote."""
    error = end.error
    if error is None:
        return ()
    return (f"{error.type} at {place(end)}", *error.traceback.strip().splitlines()[-lines:])


def last_lines(end: RankEnd, count: int = 3) -> tuple[str, ...]:
    return tuple([line for line in end.tail.strip().splitlines() if line.strip()][-count:])
