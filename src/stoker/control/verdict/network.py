"""net.*: ports and connections that the script itself asked for."""

from __future__ import annotations

import re

from stoker.contract.shapes import Evidence, RankEnd, Verdict
from stoker.control.verdict.wording import base, first_line, place


def explain(end: RankEnd, _evidence: Evidence) -> Verdict | None:
    error = end.error
    if error is None or not ("EADDRINUSE" in error.message or "address already in use" in error.message.lower()):
        return None
    port = re.search(r"port:? (\d+)", error.message)
    which = f"port {port[1]}" if port else "a port"
    return base(
        end, "net.port-in-use", f"rank {end.rank} ({end.label}): {which} is already in use", retryable=True,
        evidence=[f"{error.type}: {first_line(error.message)}", f"at {place(end)}"],
        fix=["use env:// (MASTER_ADDR and MASTER_PORT, which Stoker sets to a free port) instead of a port of your own"],
    )  # fmt: skip
