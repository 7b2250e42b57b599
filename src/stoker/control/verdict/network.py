"""net.*, nccl.*, gloo.*: ports and connections between ranks."""

from __future__ import annotations

import re

from stoker.control.verdict.catalogue import Case, Found, cause
from stoker.control.verdict.wording import first_line, place


@cause(
    "net.port-in-use",
    seen="EADDRINUSE in the exception: the script listens on a port of its own choice that somebody else has",
    contradicts="the port is Stoker's own (MASTER_PORT): that one is reserved before the ranks start",
    fix=("use env:// (MASTER_ADDR and MASTER_PORT, which Stoker sets to a free port) instead of a port of your own",),
    retryable=True,
)
def port_in_use(case: Case) -> Found | None:
    """The script asked for a port that is taken."""
    error = case.end.error
    if error is None or not ("EADDRINUSE" in error.message or "address already in use" in error.message.lower()):
        return None
    port = re.search(r"port:? (\d+)", error.message)
    which = f"port {port[1]}" if port else "a port"
    return Found(f"{case.who}: {which} is already in use", (f"{error.type}: {first_line(error.message)}", f"at {place(case.end)}"))
