"""The port of rank 0's store: which one is wanted, and the words where it can't be had."""

from __future__ import annotations

import os
from typing import Any

from stoker.contract.names import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.untrusted import is_count
from stoker.control.launch.request import Request


def wanted_port(request: Request) -> tuple[int, bool]:
    """(port or 0 for a free one, was it asked for as a flag)."""
    options = request.options
    if options.standalone:
        return 0, False
    if options.master_port is not None:
        return options.master_port, True
    if options.rdzv_endpoint:
        _, colon, port = options.rdzv_endpoint.rpartition(":")
        if colon and not is_count(port):
            raise Refusal(f"--rdzv-endpoint {options.rdzv_endpoint}: write HOST:PORT", EX_USAGE)
        return (int(port), True) if colon else (0, False)
    asked = os.environ.get("MASTER_PORT", "")
    return (int(asked), False) if is_count(asked) and 1024 <= int(asked) <= 65535 else (0, False)


def check_numbers(request: Request) -> None:
    options = request.options
    if options.max_restarts < 0:
        raise Refusal(f"--max-restarts {options.max_restarts}: give a number from 0 up", EX_USAGE)
    port = wanted_port(request)[0]
    if port and not 1024 <= port <= 65535:
        told = (
            f"--master-port {port}" if options.master_port is not None else f"--rdzv-endpoint {options.rdzv_endpoint}"
        )
        raise Refusal(
            f"{told}: ports from 1024 to 65535 can be used; 0 or no flag takes a free one",
            EX_USAGE,
            cause="launch.port",
        )


def taken(answer: dict[str, Any]) -> Refusal:
    line = f"port {answer['wanted']} is in use by {answer['holder']}; leave --master-port out for a free one"
    return Refusal(line, EX_UNAVAILABLE, cause="launch.port-in-use")
