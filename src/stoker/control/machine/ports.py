"""TCP ports: is one free, which process listens on it, and reserving one for rank 0's store."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from typing import Any

from stoker.contract.listeners import LISTEN, read_socket_table
from stoker.control.machine import procfs

_TIME_WAIT = "06"


def _sockets(port: int, state: str) -> set[str]:
    """Their inodes."""
    return {row[9] for row in read_socket_table(port, state)}


def closing(port: int) -> bool:
    return bool(_sockets(port, _TIME_WAIT))


def is_listening(port: int, pids: Iterable[int]) -> bool:
    """Return whether one of these processes listens on this TCP port, on any address."""
    sockets = {f"socket:[{inode}]" for inode in _sockets(port, LISTEN)}
    return bool(sockets) and any(not sockets.isdisjoint(procfs.open_files(pid)) for pid in pids)


def listener(port: int) -> str | None:
    """The process that holds a port, in words; None when nobody listens there."""
    inodes = _sockets(port, LISTEN)
    if not inodes:
        return None
    for pid in procfs.pids_here():
        if not {f"socket:[{inode}]" for inode in inodes}.isdisjoint(procfs.open_files(pid)):
            return f"pid {pid} ({' '.join((procfs.command_line(pid) or '?').split())[:200]})"
    return "a process that is not ours to see"


# ---- the store's port ----
#
# It is bound and not listened on, so that rank 0's store can bind it too, and no other launch and no program that takes
# any free port gets it meanwhile. It is not a lock: a program that sets SO_REUSEADDR and asks for this very port gets it,
# and then the store's own bind fails.


def reserve(address: str, port: int, soft: bool) -> tuple[socket.socket | None, dict[str, Any]]:
    """Return a socket to keep open, and the answer to the coordinator. `port`: 0 for any free one.

    With `soft`, a port that is taken is replaced by a free one, and its holder is named.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return _bind(family, port)
    except OSError as problem:
        if problem.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        holder = listener(port) or "another launch that has reserved it"
        if not soft:
            return None, {"port": 0, "wanted": port, "holder": holder}
        reserved, answer = _bind(family, 0)
        return reserved, {**answer, "wanted": port, "holder": holder}


def _bind(family: socket.AddressFamily, port: int) -> tuple[socket.socket, dict[str, Any]]:
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            _probe(family, port)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", port))  # all addresses, as torch's store will
    except OSError:
        reserved.close()
        raise
    return reserved, {"port": reserved.getsockname()[1]}


def _probe(family: socket.AddressFamily, port: int) -> None:
    """Raise OSError where another launch has reserved the port: with SO_REUSEADDR both would get it."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            if listener(port) is None and closing(port):
                return  # only connections of an earlier run in TIME_WAIT: the store's SO_REUSEADDR gets past those
            raise
