"""Turns whatever a parser raises into one line that names the file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal

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
        if f"{os.sep}stoker{os.sep}" in code.co_filename and code is not reading.__wrapped__.__code__:  # type: ignore[attr-defined]
            place = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    why = ": ".join(filter(None, (type(problem).__name__, str(problem).strip().partition("\n")[0][:_MAX_REASON])))
    return Refusal(f"{what} can't be read: {why}{place}", EX_DATAERR)


@contextlib.contextmanager
def reading(what: str, *passed_on: type[Exception]) -> Iterator[None]:
    """Refuse in one line, with the file's name, whatever a parser raises within the block.

    OSErrors and the exceptions in `passed_on` reach the caller unchanged.
    """
    try:
        yield
    except Exception as problem:
        if isinstance(problem, (*_PASSED_ON, OSError, *passed_on)):
            raise
        raise unreadable(what, problem) from problem
