"""Finds which users have sockets on a port of this machine: any user may have taken the port first."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys

from stoker.contract.process import read_kernel_lines

LISTEN = "0A"
_NO_INODE = "0"  # the inode of a connection that is not accepted yet, or is closed
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def read_socket_table(port: int, state: str) -> list[list[str]]:
    """Return the kernel's rows of the sockets on this local port that are in this state."""
    rows = _read_socket_rows()
    return [row for row in rows if row[3] == state and int(row[1].rsplit(":", 1)[1], 16) == port]


def _read_socket_rows() -> list[list[str]]:
    return [line.split() for table in _TABLES for line in read_kernel_lines(table)[1:]]


def find_listening_users(host: str, port: int) -> set[int]:
    """Return the uids whose sockets would get a connection to this address of this machine.

    The kernel prefers a socket that listens on that very address to one that listens on all. Others may have the port
    on other addresses, such as 127.0.0.2.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return set()  # the connection itself will report why
    rows = read_socket_table(port, LISTEN)
    listening: set[int] = set()
    for family, address in {(family, str(sockaddr[0]).partition("%")[0]) for family, _, _, _, sockaddr in infos}:
        if family == socket.AF_INET:
            candidates = [_kernel_spellings(address), _kernel_spellings("0.0.0.0", mapped=False)]
        else:
            candidates = [_kernel_spellings(address)]
        for spellings in (*candidates, _kernel_spellings("::")):
            uids = {int(row[7]) for row in rows if row[1].rpartition(":")[0] in spellings}
            if uids:
                listening |= uids
                break
    return listening


def find_answering_users(connected: socket.socket) -> set[int]:
    """Return the uids that have, or will have, the other end of this connection; an empty set for another machine.

    Reads the listening sockets first: a process that stops listening has taken the connection by then. Raises OSError
    if the other end is closed: the kernel lists it as root's then, and it may have sent an answer before.
    """
    (local, local_port), (remote, remote_port) = connected.getsockname()[:2], connected.getpeername()[:2]
    if remote != local and not ipaddress.ip_address(remote.partition("%")[0]).is_loopback:
        return set()
    pairs = zip(_kernel_spellings(remote), _kernel_spellings(local), strict=True)
    ends = {(f"{remote_hex}:{remote_port:04X}", f"{local_hex}:{local_port:04X}") for remote_hex, local_hex in pairs}
    for _ in range(3):  # /proc may miss a row while other sockets open and close
        uids = find_listening_users(remote, remote_port)
        rows = [row for row in _read_socket_rows() if (row[1], row[2]) in ends]
        uids |= {int(row[7]) for row in rows if row[9] != _NO_INODE}
        if rows or uids:
            break
    if rows and not uids:
        raise ConnectionResetError(errno.ECONNRESET, "the other end closed the connection")
    connected.getpeername()  # raises OSError if the other end reset the connection
    return uids


def _kernel_spellings(address: str, mapped: bool = True) -> list[str]:
    """Return an address as the kernel's tables have it: in hexadecimal, each 32 bits as a number of this machine.

    With `mapped`, an IPv4 address has a second spelling, as an IPv6 address.
    """
    address = address.partition("%")[0]
    spellings = []
    for text in (address, f"::ffff:{address}") if mapped and ":" not in address else (address,):
        packed = socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)
        words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
        spellings.append("".join(f"{word:08X}" for word in words))
    return spellings
