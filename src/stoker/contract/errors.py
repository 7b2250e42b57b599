"""Errors that a user can fix: refusals, their exit codes, and one line for any exception of a parser."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from stoker.contract.text import escape

# Exit codes of Stoker's own refusals: sysexits.h.
EX_USAGE = 64  # an impossible flag or count
EX_DATAERR = 65  # a script or a config file that doesn't parse
EX_NOINPUT = 66  # a script, module, config or run that doesn't exist
EX_UNAVAILABLE = 69  # GPUs, driver or port are not available
EX_SOFTWARE = 70  # the guilty rank's own code would be 0, or the fault is ours
EX_OSERR = 71  # the operating system refused
EX_CANTCREAT = 73  # the run directory can't be written
EX_TEMPFAIL = 75  # --wait ran out: try again later
EX_NOPERM = 77
EX_CONFIG = 78  # a config file with unknown or impossible values

_MAX_LINE = 16_000  # characters; fits 512 hosts that are not responding, each with its reason


class Refusal(Exception):
    """An error that the user can fix: a line, further lines in `more`, and the exit code.

    The line quotes file names, keys and other foreign text, so control codes and line ends in it are escaped. The
    middle of a line above 16,000 characters is cut out.
    """

    def __init__(
        self, line: str, code: int = EX_USAGE, *, cause: str = "launch.refused", fix: str = "", more: Iterable[str] = ()
    ) -> None:
        self.line = "\n".join(escape(_shorten(part)) for part in (line, *more))
        super().__init__(self.line)
        self.code = code
        self.cause = cause
        self.fix = escape(fix)


def _shorten(line: str) -> str:
    return line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE // 2]} … {line[-_MAX_LINE // 2 :]}"


_MAX_REASON = 200  # characters of an exception's text

# Never reported as "can't be read": our own refusals, a closed pipe behind our output, and lack of memory.
_PASSED_ON = (Refusal, BrokenPipeError, MemoryError)


def unreadable(what: str, problem: Exception) -> Refusal:
    """Return the refusal for `what`, which raised `problem` while it was read.

    The refusal names the innermost line of Stoker on the stack: a bug report needs it.
    """
    if isinstance(problem, OSError):
        return Refusal(f"{what} can't be read: {problem.strerror or problem}", EX_NOINPUT)
    trace, source = problem.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if f"{os.sep}stoker{os.sep}" in code.co_filename and code is not parsing.__wrapped__.__code__:  # type: ignore[attr-defined]
            source = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    reason = ": ".join(filter(None, (type(problem).__name__, str(problem).strip().partition("\n")[0][:_MAX_REASON])))
    return Refusal(f"{what} can't be read: {reason}{source}", EX_DATAERR)


@contextlib.contextmanager
def parsing(what: str, *passed_on: type[Exception]) -> Iterator[None]:
    """Turn any exception of a parser within the block into a Refusal of one line that names the file.

    OSErrors and the exceptions in `passed_on` reach the caller unchanged.
    """
    try:
        yield
    except Exception as problem:
        if isinstance(problem, (*_PASSED_ON, OSError, *passed_on)):
            raise
        raise unreadable(what, problem) from problem
