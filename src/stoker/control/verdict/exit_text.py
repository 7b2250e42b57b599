"""What ended a rank, in its own words: the text that causes search, and how a verdict quotes it."""

from __future__ import annotations

import re
import signal

from stoker.contract.errors import EX_SOFTWARE
from stoker.contract.evidence import ExitContext, RankExit
from stoker.contract.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.verdict.catalogue import Case

LINE = 500  # of one line of evidence: the log has the rest
_DIRECT = "\nThe above exception was the direct cause of the following exception:\n"
_DURING = "\nDuring handling of the above exception, another exception occurred:\n"
_LONG = 2000  # of one line, and
_ALL = 40_000  # of all: an exception that quotes ten megabytes of data is not searched for its cause in them
_LAST = 40  # printed lines that count as last words: older ones may be of an error that was caught and survived


def said(case: Case) -> str:
    """The exception and those it was raised from; else the last lines printed, unless it was killed: those are not why."""
    end = case.end
    if end.error is not None:
        lines = "\n".join((_unquoted(end.error.message), *_causes(end.error.traceback))).splitlines()
        return "\n".join(line[:_LONG] for line in lines)[:_ALL]
    if end.code is None or (end.code <= 0 and end.code != -signal.SIGABRT):
        return ""
    lines = [
        line for line in end.tail.splitlines() if line.strip() and not line.startswith(("frame #", "stoker: could not"))
    ]  # ours is not the script's
    return "\n".join(line[:_LONG] for line in lines[-_LAST:])


def _causes(traceback: str) -> list[str]:
    """`raise … from` only: an error that was being handled when this one came up is not its reason."""
    found: list[str] = []
    for part in reversed(traceback.split(_DIRECT)):
        _, handled, own = part.rpartition(_DURING)
        found.extend(
            line for line in own.splitlines() if line and not line[0].isspace() and not line.startswith("Traceback ")
        )
        if handled:
            break
    return found


def _unquoted(message: str) -> str:
    """A data loader hands on its worker's whole traceback: its lines of source are not what the exception says."""
    if "Original Traceback (most recent call last)" not in message:
        return message
    return "\n".join(line for line in message.splitlines() if line and not line[0].isspace())


def find(case: Case, pattern: str) -> re.Match[str] | None:
    return re.search(pattern, said(case))


def line_of(found: re.Match[str]) -> str:
    """The whole line that holds the match."""
    before, after = found.string[: found.start()].rpartition("\n")[2], found.string[found.end() :].partition("\n")[0]
    return (before + found[0] + after).strip()


def at(case: Case) -> str:
    """at FILE:LINE, in FUNCTION: nothing where there was no exception to tell it."""
    return f" at {place(case.end)}" if case.end.error and case.end.error.file else ""


def noticed(case: Case, line: str) -> tuple[str, ...]:
    """A GPU's errors are asynchronous: the place is where somebody asked, not where it went wrong."""
    return (line, f"noticed at {place(case.end)}") if case.end.error else (line,)


def path_in(line: str) -> str:
    """The file an OSError names: [Errno 2] No such file or directory: '/data/x'."""
    named = re.search(r": '([^']+)'", line)
    return named[1] if named else ""


def shm_left(around: ExitContext) -> tuple[str, ...]:
    if around.shm_total is None:
        return ()
    return (f"/dev/shm: {format_bytes(around.shm_free or 0)} of {format_bytes(around.shm_total)} free",)


def exit_code(end: RankExit) -> int:
    """The guilty rank's own; 128 + n for a signal; 70 where that would be 0 or was our doing."""
    if end.ours and end.code and end.code < 0 and end.error is not None and not end.error.late:
        return 1  # Python's own: it had reported its exception and was on its way out when our signal met it
    if not end.code or (end.ours and (end.error is None or end.code < 0)):
        return EX_SOFTWARE
    return end.code if end.code > 0 else 128 - end.code


def place(end: RankExit) -> str:
    error = end.error
    return f"{error.file}:{error.line}, in {error.function}" if error and error.file else "no place known"


def last_seen(case: Case) -> str:
    """Return where the watch had last seen the rank if it was suspected of standing still: FILE:LINE, in FUNCTION; or ""."""
    stall = case.evidence.stall
    return stall.where if stall is not None and case.end.rank == stall.rank else ""


def first_line(text: str, limit: int = 200) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= limit else line[: limit - 1] + "…"


def traced(end: RankExit, lines: int = 6) -> tuple[str, ...]:
    """The exception, where it was, and the end of its traceback: what most causes quote."""
    error = end.error
    if error is None:
        return ()
    return (f"{error.type} at {place(end)}", *error.traceback.strip().splitlines()[-lines:])


def traced_line(case: Case, line: str) -> tuple[str, ...]:
    return (line, *traced(case.end, 4))


def last_lines(end: RankExit, count: int = 3) -> tuple[str, ...]:
    return tuple([line for line in end.tail.strip().splitlines() if line.strip()][-count:])


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"
