"""TCP ports: is one free, and who listens on it."""

from __future__ import annotations

import socket
import sys

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


def listening_users(host: str, port: int) -> set[int]:
    """Whose sockets get a connection to this address, which is one of this machine's. As the kernel chooses: one that listens
    on that very address goes before one that listens on all. Others may have the port on other addresses, 127.0.0.2 say.
    """
    rows = _rows(port, _LISTEN)
    return {uid for family, address in _resolved(host, port) for uid in _taking(rows, family, address)}


def _resolved(host: str, port: int) -> set[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return set()  # whoever connects says why
    return {(family, str(address[0]).partition("%")[0]) for family, _, _, _, address in found}


def _taking(rows: list[list[str]], family: socket.AddressFamily, address: str) -> set[int]:
    if family == socket.AF_INET:
        places = [(address, f"::ffff:{address}"), ("0.0.0.0",), ("::",)]
    else:
        places = [(address,), ("::",)]
    for same in places:
        wanted = {_as_kernel_writes(one) for one in same}
        uids = {int(row[7]) for row in rows if row[1].rpartition(":")[0] in wanted}
        if uids:
            return uids
    return set()


def _as_kernel_writes(address: str) -> str:
    """In hexadecimal, each 32 bits as a number of this machine."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


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
