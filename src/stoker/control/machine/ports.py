"""TCP ports: is one free, and who listens on it."""

from __future__ import annotations

from stoker.contract.process import kernel_lines
from stoker.control.machine import processes

_LISTEN = "0A"
_TIME_WAIT = "06"


def _rows(port: int, state: str) -> list[list[str]]:
    """The kernel's rows of the sockets on this local port in this state."""
    found: list[list[str]] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = [line.split() for line in kernel_lines(table)][1:]
        found += [row for row in rows if row[3] == state and int(row[1].rsplit(":", 1)[1], 16) == port]
    return found


def _sockets(port: int, state: str) -> set[str]:
    """Their inodes."""
    return {row[9] for row in _rows(port, state)}


def listening_users(port: int) -> set[int]:
    """Whose sockets accept connections there, on any address."""
    return {int(row[7]) for row in _rows(port, _LISTEN)}


def closing(port: int) -> bool:
    return bool(_sockets(port, _TIME_WAIT))


def listener(port: int) -> str | None:
    """The process that holds a port, in words; None when nobody listens there."""
    inodes = _sockets(port, _LISTEN)
    if not inodes:
        return None
    for pid in processes.pids_here():
        if not {f"socket:[{inode}]" for inode in inodes}.isdisjoint(processes.open_files(pid)):
            return f"pid {pid} ({' '.join((processes.command(pid) or '?').split())[:200]})"
    return "a process that is not ours to see"
