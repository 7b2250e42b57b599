"""Extracts from a rank's output the text that causes search, and formats the lines that verdicts quote as evidence."""

from __future__ import annotations

import re
import signal

from stoker.contract.errors import EX_SOFTWARE
from stoker.contract.evidence import ExitContext, RankExit
from stoker.contract.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.verdict.catalogue import Case

MAX_EVIDENCE_LINE = 500  # characters: the log has the rest
_DIRECT_CAUSE = "\nThe above exception was the direct cause of the following exception:\n"
_DURING_HANDLING = "\nDuring handling of the above exception, another exception occurred:\n"
_MAX_LINE = 2000  # characters that are searched of one line
_MAX_TEXT = 40_000  # characters that are searched of an exception: it may quote ten megabytes of data
_LAST_LINES = 40  # printed lines that are searched: older ones may belong to an error that the script caught


def extract_searched_text(case: Case) -> str:
    """Return the text to search: the exception and those it was raised from, else the last lines the rank printed.

    Return "" for a rank that was killed: its output doesn't show why.
    """
    end = case.end
    if end.error is not None:
        lines = "\n".join((_without_source(end.error.message), *_direct_causes(end.error.traceback))).splitlines()
        return "\n".join(line[:_MAX_LINE] for line in lines)[:_MAX_TEXT]
    if end.code is None or (end.code <= 0 and end.code != -signal.SIGABRT):
        return ""
    # Skip C++ frames and Stoker's own messages: the script did not print them.
    lines = [
        line for line in end.tail.splitlines() if line.strip() and not line.startswith(("frame #", "stoker: could not"))
    ]
    return "\n".join(line[:_MAX_LINE] for line in lines[-_LAST_LINES:])


def _direct_causes(traceback: str) -> list[str]:
    """Return the exceptions that this one was raised from. One that was only being handled at that time is left out."""
    exceptions: list[str] = []
    for part in reversed(traceback.split(_DIRECT_CAUSE)):
        _, handled, own = part.rpartition(_DURING_HANDLING)
        exceptions.extend(
            line for line in own.splitlines() if line and not line[0].isspace() and not line.startswith("Traceback ")
        )
        if handled:
            break
    return exceptions


def _without_source(message: str) -> str:
    """Drop the source lines of the worker's traceback that a data loader's exception quotes."""
    if "Original Traceback (most recent call last)" not in message:
        return message
    return "\n".join(line for line in message.splitlines() if line and not line[0].isspace())


def find_in_output(case: Case, pattern: str) -> re.Match[str] | None:
    return re.search(pattern, extract_searched_text(case))


def line_of(match: re.Match[str]) -> str:
    """Return the whole line that holds the match."""
    before, after = match.string[: match.start()].rpartition("\n")[2], match.string[match.end() :].partition("\n")[0]
    return (before + match[0] + after).strip()


def location(end: RankExit) -> str:
    """Return where the exception was raised: FILE:LINE, in FUNCTION."""
    error = end.error
    return f"{error.file}:{error.line}, in {error.function}" if error and error.file else "an unknown line"


def at_location(case: Case) -> str:
    """Return " at FILE:LINE, in FUNCTION", or "" if no exception with a location was reported."""
    return f" at {location(case.end)}" if case.end.error and case.end.error.file else ""


def last_seen_at(case: Case) -> str:
    """Return FILE:LINE, in FUNCTION, where the watcher last saw a rank that it suspected of being stuck, or ""."""
    stall = case.evidence.stall
    return stall.where if stall is not None and case.end.rank == stall.rank else ""


def path_in(line: str) -> str:
    """Return the file an OSError names: [Errno 2] No such file or directory: '/data/x'."""
    match = re.search(r": '([^']+)'", line)
    return match[1] if match else ""


def exit_code(end: RankExit) -> int:
    """Return the exit code of the verdict: the rank's own, 128 + n for a signal, or 70 if it is 0 or Stoker caused it."""
    if end.ours and end.code and end.code < 0 and end.error is not None and not end.error.late:
        return (
            1  # Python's code for an exception: the rank had reported it and was exiting when Stoker's signal arrived
        )
    if not end.code or (end.ours and (end.error is None or end.code < 0)):
        return EX_SOFTWARE
    return end.code if end.code > 0 else 128 - end.code


def first_line(text: str, limit: int = 200) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= limit else line[: limit - 1] + "…"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


# ---- evidence ----


def noticed_evidence(case: Case, line: str) -> tuple[str, ...]:
    """Return the evidence for a GPU error. GPU errors are asynchronous: the location is where it was noticed."""
    return (line, f"noticed at {location(case.end)}") if case.end.error else (line,)


def traceback_evidence(end: RankExit, lines: int = 6) -> tuple[str, ...]:
    """Return the exception, where it was raised, and the end of its traceback."""
    error = end.error
    if error is None:
        return ()
    return (f"{error.type} at {location(end)}", *error.traceback.strip().splitlines()[-lines:])


def line_evidence(case: Case, line: str) -> tuple[str, ...]:
    """Return a line and the end of the traceback."""
    return (line, *traceback_evidence(case.end, 4))


def shm_evidence(context: ExitContext) -> tuple[str, ...]:
    """Return how much of /dev/shm was free, or () if the agent could not read it."""
    if context.shm_total is None:
        return ()
    return (f"/dev/shm: {format_bytes(context.shm_free or 0)} of {format_bytes(context.shm_total)} free",)


def last_lines(end: RankExit, count: int = 3) -> tuple[str, ...]:
    return tuple([line for line in end.tail.strip().splitlines() if line.strip()][-count:])
