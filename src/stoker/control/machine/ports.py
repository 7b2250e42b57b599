"""TCP ports: is one free, and which process listens on it."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.contract.listeners import LISTEN, rows_of
from stoker.control.machine import processes

_TIME_WAIT = "06"


def _sockets(port: int, state: str) -> set[str]:
    """Their inodes."""
    return {row[9] for row in rows_of(port, state)}


def closing(port: int) -> bool:
    return bool(_sockets(port, _TIME_WAIT))


def is_listening(port: int, pids: Iterable[int]) -> bool:
    """Return whether one of these processes listens on this TCP port, on any address."""
    sockets = {f"socket:[{inode}]" for inode in _sockets(port, LISTEN)}
    return bool(sockets) and any(not sockets.isdisjoint(processes.open_files(pid)) for pid in pids)


def listener(port: int) -> str | None:
    """The process that holds a port, in words; None when nobody listens there."""
    inodes = _sockets(port, LISTEN)
    if not inodes:
        return None
    for pid in processes.pids_here():
        if not {f"socket:[{inode}]" for inode in inodes}.isdisjoint(processes.open_files(pid)):
            return f"pid {pid} ({' '.join((processes.command(pid) or '?').split())[:200]})"
    return "a process that is not ours to see"
