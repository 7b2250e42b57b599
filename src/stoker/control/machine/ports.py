"""Finds the process that listens on a TCP port, and reserves a port for rank 0's store."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from typing import Any

from stoker.contract.listeners import LISTEN, read_socket_table
from stoker.control.machine import procfs

_TIME_WAIT = "06"


def _find_listening_sockets(port: int) -> set[str]:
    """Return the sockets that listen on a port, as /proc/PID/fd names them."""
    return {f"socket:[{row[9]}]" for row in read_socket_table(port, LISTEN)}


def is_listening(port: int, pids: Iterable[int]) -> bool:
    """Return whether one of these processes listens on this TCP port, on any address."""
    sockets = _find_listening_sockets(port)
    return bool(sockets) and any(not sockets.isdisjoint(procfs.list_open_files(pid)) for pid in pids)


def find_listener(port: int) -> str | None:
    """Return the process that listens on a port, in words, or None."""
    sockets = _find_listening_sockets(port)
    if not sockets:
        return None
    for pid in procfs.list_pids():
        if not sockets.isdisjoint(procfs.list_open_files(pid)):
            return f"pid {pid} ({' '.join((procfs.read_command_line(pid) or '?').split())[:200]})"
    return "a process that is not visible from here"


def reserve_port(address: str, port: int, soft: bool) -> tuple[socket.socket | None, dict[str, Any]]:
    """Reserve a port for rank 0's store. Return a socket to keep open, and the reply to the launcher.

    `port` 0 means any free port. With `soft`, a port in use is replaced by a free one, and the reply names its holder.

    The port is bound and not listened on: the store can bind it too, while other launches, and programs that take any
    free port, don't get it. A program that sets SO_REUSEADDR and asks for this very port does get it, and then the
    store's own bind fails.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return _bind(family, port)
    except OSError as problem:
        if problem.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        holder = find_listener(port) or "another launch that has reserved it"
        if not soft:
            return None, {"port": 0, "wanted": port, "holder": holder}
        reserved, answer = _bind(family, 0)
        return reserved, {**answer, "wanted": port, "holder": holder}


def _bind(family: socket.AddressFamily, port: int) -> tuple[socket.socket, dict[str, Any]]:
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            _check_not_reserved(family, port)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", port))  # all addresses, as torch's store will
    except OSError:
        reserved.close()
        raise
    return reserved, {"port": reserved.getsockname()[1]}


def _check_not_reserved(family: socket.AddressFamily, port: int) -> None:
    """Raise OSError if another launch has reserved the port. With SO_REUSEADDR, both launches would get it."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            if find_listener(port) is None and read_socket_table(port, _TIME_WAIT):
                return  # connections of an earlier run in TIME_WAIT don't stop the store, which sets SO_REUSEADDR
            raise
