"""The store's port, reserved: bound and not listening, so that rank 0's store can bind it too, and no other launch and no
program that takes any free port gets it meanwhile. It is not a lock: a program of any user that sets SO_REUSEADDR and
asks for this very port gets it, and then the store's own bind fails.
"""

from __future__ import annotations

import errno
import socket
from typing import Any

from stoker.control.machine import ports


def reserve(address: str, port: int, soft: bool) -> tuple[socket.socket | None, dict[str, Any]]:
    """(what to keep open, answer). `soft`: a wanted port that is taken is replaced by a free one, and its holder named."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return _bind(family, port)
    except OSError as problem:
        if problem.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        holder = ports.listener(port) or "another launch that has reserved it"
        if not soft:
            return None, {"port": 0, "wanted": port, "holder": holder}
        kept, answer = _bind(family, 0)
        return kept, {**answer, "wanted": port, "holder": holder}


def _bind(family: socket.AddressFamily, port: int) -> tuple[socket.socket, dict[str, Any]]:
    kept = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            _probe(family, port)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("", port))  # all addresses, as torch's store will
    except OSError:
        kept.close()
        raise
    return kept, {"port": kept.getsockname()[1]}


def _probe(family: socket.AddressFamily, port: int) -> None:
    """A bind without SO_REUSEADDR fails where another launch has merely reserved the port: SO_REUSEADDR alone would
    share it.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            if ports.listener(port) is None and ports.closing(port):
                return  # only connections of an earlier run in TIME_WAIT: the store's SO_REUSEADDR gets past those
            raise
