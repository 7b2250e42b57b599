"""What a user can fix: refusals, their exit codes, and one line for whatever a parser raises."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from stoker.contract.text import escape

# Exit codes of Stoker's own refusals: sysexits.h.
EX_USAGE = 64  # a flag or a count that can't be
EX_DATAERR = 65  # a script or a config file that doesn't parse
EX_NOINPUT = 66  # a script, module, config or run that isn't there
EX_UNAVAILABLE = 69  # GPUs, driver or port that can't be had
EX_SOFTWARE = 70  # the guilty rank's own code would be 0, or was our doing
EX_OSERR = 71  # the operating system said no
EX_CANTCREAT = 73  # the run directory can't be written
EX_TEMPFAIL = 75  # --wait ran out: try again later
EX_NOPERM = 77
EX_CONFIG = 78  # a config file with unknown or impossible values

_MAX_LINE = 16_000  # 512 hosts that do not answer, each with its reason


class Refusal(Exception):
    """Something a user can fix: one line, and the exit code that goes with it.

    The line quotes file names, keys and texts from anywhere: control codes and line ends in it are escaped, and its
    middle is cut where it is endless. `more`: lines below it.
    """

    def __init__(
        self, line: str, code: int = EX_USAGE, *, cause: str = "launch.refused", fix: str = "", more: Iterable[str] = ()
    ) -> None:
        self.line = "\n".join(escape(_shorten(one)) for one in (line, *more))
        super().__init__(self.line)
        self.code = code
        self.cause = cause
        self.fix = escape(fix)


def _shorten(line: str) -> str:
    return line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE // 2]} … {line[-_MAX_LINE // 2 :]}"


_MAX_REASON = 200  # characters of an exception's text

# Not turned into "can't be read": our own refusals, a closed pipe of whoever reads our output, and lack of memory.
_PASSED_ON = (Refusal, BrokenPipeError, MemoryError)


def unreadable(what: str, problem: Exception) -> Refusal:
    """Return the refusal for `what`, which raised `problem` while it was read.

    The line names our last line on the stack: a bug report needs it.
    """
    if isinstance(problem, OSError):
        return Refusal(f"{what} can't be read: {problem.strerror or problem}", EX_NOINPUT)
    trace, place = problem.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if f"{os.sep}stoker{os.sep}" in code.co_filename and code is not parsing.__wrapped__.__code__:  # type: ignore[attr-defined]
            place = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    why = ": ".join(filter(None, (type(problem).__name__, str(problem).strip().partition("\n")[0][:_MAX_REASON])))
    return Refusal(f"{what} can't be read: {why}{place}", EX_DATAERR)


@contextlib.contextmanager
def parsing(what: str, *passed_on: type[Exception]) -> Iterator[None]:
    """Refuse in one line, with the file's name, whatever a parser raises within the block.

    OSErrors and the exceptions in `passed_on` reach the caller unchanged.
    """
    try:
        yield
    except Exception as problem:
        if isinstance(problem, (*_PASSED_ON, OSError, *passed_on)):
            raise
        raise unreadable(what, problem) from problem
