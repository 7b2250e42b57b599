"""The way to a peer: interface, own address, longest packet. Asked of the kernel, without a packet sent."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from typing import Any

from stoker.contract.process import kernel_lines

_SIOCGIFCONF, _SIOCGIFMTU = 0x8912, 0x8921
_ENTRY = 40  # bytes of a struct ifreq on 64-bit Linux


def route(to: list[str]) -> Any:
    """`to`: addresses or names. One that does not resolve, or has no way to it, has an error for a route."""
    found = addresses()
    reached_at = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""][2]
    return {
        "routes": {target: _route(target, found) for target in to},
        "addresses": found,
        "hostname": socket.gethostname(),
        # The address ssh came to. sshd writes UNKNOWN where it was started by a ProxyCommand.
        "reached_at": None if reached_at in ("", "UNKNOWN") else reached_at,
    }


def _route(target: str, found: dict[str, list[str]]) -> dict[str, Any]:
    try:
        family, _, _, _, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # of a datagram socket: the kernel chooses the route, and sends nothing
            source = str(probe.getsockname()[0])
    except OSError as problem:
        return {"error": problem.strerror or str(problem)}
    interface = next((name for name, mine in found.items() if source in mine), None)
    longest = mtu(interface) if interface else None
    return {"interface": interface, "source": source, "mtu": longest, "address": str(where[0])}


def addresses() -> dict[str, list[str]]:
    """Interface -> its addresses. By ioctl: another network namespace's /sys may be mounted."""
    room = array.array("B", bytes(_ENTRY * 256))
    where, length = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("iL", length, where))
    raw = room.tobytes()[: struct.unpack("iL", answer)[0]]
    found: dict[str, list[str]] = {}
    for at in range(0, len(raw), _ENTRY):
        name = raw[at : at + 16].split(b"\0")[0].decode("utf-8", "replace").partition(":")[0]
        found.setdefault(name, []).append(socket.inet_ntoa(raw[at + 20 : at + 24]))
    for line in kernel_lines("/proc/net/if_inet6"):
        digits, _, _, _, _, name = line.split()
        found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def mtu(interface: str) -> int | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, _SIOCGIFMTU, struct.pack("16si12x", interface.encode()[:15], 0))
        except OSError:
            return None
    return int(struct.unpack("16si12x", answer)[1])
