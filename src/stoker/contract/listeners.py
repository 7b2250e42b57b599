"""Whose sockets are at the other end: anybody on this machine may take a port before the one who is meant."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys

from stoker.contract.process import kernel_lines

LISTEN = "0A"
_NO_INODE = "0"  # not accepted yet, or closed
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def read_socket_table(port: int, state: str) -> list[list[str]]:
    """The kernel's rows of the sockets on this local port in this state."""
    found: list[list[str]] = []
    for table in _TABLES:
        rows = [line.split() for line in kernel_lines(table)][1:]
        found += [row for row in rows if row[3] == state and int(row[1].rsplit(":", 1)[1], 16) == port]
    return found


def listening_users(host: str, port: int) -> set[int]:
    """Whose sockets get a connection to this address, which is one of this machine's. As the kernel chooses: one that listens
    on that very address goes before one that listens on all. Others may have the port on other addresses, 127.0.0.2 say.
    """
    rows = read_socket_table(port, LISTEN)
    return {uid for family, address in _resolved(host, port) for uid in _taking(rows, family, address)}


def answering_users(connected: socket.socket) -> set[int]:
    """Who has, or will have, the other end of this connection, where that is on this machine; of other machines' nobody is
    known. Who listens is looked at first: whoever has stopped to has taken the connection by then. OSError: they have
    closed it, too. What nobody has any more is the kernel's, under root's number, and may hold an answer already.
    """
    (here, own), (there, port) = connected.getsockname()[:2], connected.getpeername()[:2]
    if there != here and not ipaddress.ip_address(there.partition("%")[0]).is_loopback:
        return set()
    ends = {(f"{a}:{port:04X}", f"{b}:{own:04X}") for a, b in zip(_spellings(there), _spellings(here), strict=True)}
    for _ in range(3):  # a row may be missed where others come and go beside it
        uids = listening_users(there, port)
        rows = [line.split() for table in _TABLES for line in kernel_lines(table)[1:]]
        found = [row for row in rows if (row[1], row[2]) in ends]
        uids |= {int(row[7]) for row in found if row[9] != _NO_INODE}
        if found or uids:
            break
    if found and not uids:
        raise ConnectionResetError(errno.ECONNRESET, "who had this port has closed the connection")
    connected.getpeername()  # it has none where they have reset it
    return uids


def _spellings(address: str) -> tuple[str, ...]:
    address = address.partition("%")[0]
    both = (address,) if ":" in address else (address, f"::ffff:{address}")
    return tuple(_as_kernel_writes(one) for one in both)


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
