"""The way to a host's sshd: where full-size packets vanish, ssh connects and then nothing passes."""

from __future__ import annotations

import fcntl
import socket
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from stoker.contract.frozen import frozen
from stoker.control.cluster.hosts import Host, Hosts
from stoker.control.cluster.ssh import ssh_command

SEGMENTS = (536, 1000, 1160, 1240, 1340, 1360, 1400, 1420)
HEADERS = 40
WAIT_S = 2.0
_TIOCOUTQ = 0x5411  # bytes that the other side's kernel has not acknowledged
_PADDING = 8


@frozen
class MtuHole:
    passes: int  # the largest packet, of those tried, that arrives


def hole(host: Host, hosts: Hosts) -> MtuHole | None:
    """None where full-size packets arrive, or nothing can be said: no connection at all, or one through a jump host."""
    where = _destination(host, hosts)
    if where is None:
        return None
    if _arrives(where, 0) is not False:
        return None
    with ThreadPoolExecutor(len(SEGMENTS)) as pool:
        tried = list(pool.map(lambda segment: _arrives(where, segment), SEGMENTS))
    passes = max((segment + HEADERS for segment, good in zip(SEGMENTS, tried, strict=True) if good), default=0)
    return MtuHole(passes) if passes else None  # where nothing arrives it is not the size


def _destination(host: Host, hosts: Hosts) -> tuple[str, int] | None:
    """What ssh itself makes of the name."""
    argv = ssh_command(host, hosts, ["true"])
    asks = [argv[0], "-G", *argv[1:-1]]
    said = subprocess.run(asks, capture_output=True, text=True, timeout=5, check=False, stdin=subprocess.DEVNULL)
    found = dict(line.split(" ", 1) for line in said.stdout.splitlines() if " " in line)
    if said.returncode or found.get("proxyjump", "none") != "none" or found.get("proxycommand", "none") != "none":
        return None
    return found["hostname"], int(found["port"])


def _arrives(where: tuple[str, int], segment: int) -> bool | None:
    """Does a large message arrive? None: there is no connection. The message is one that ssh servers ignore."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as one:
            one.settimeout(WAIT_S)
            if segment:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
            one.connect(address)
            one.sendall(b"SSH-2.0-stoker\r\n" + _ignored(8000))
            deadline = time.monotonic() + WAIT_S
            while time.monotonic() < deadline:
                if struct.unpack("i", fcntl.ioctl(one, _TIOCOUTQ, bytes(4)))[0] == 0:
                    return True
                time.sleep(0.01)
            return False
    except OSError:
        return None


def _ignored(count: int) -> bytes:
    """An SSH_MSG_IGNORE of so many bytes, as RFC 4253 has it before encryption begins."""
    payload = b"\x02" + struct.pack("!I", count) + bytes(count)
    padding = _PADDING - (5 + len(payload)) % _PADDING + _PADDING
    return struct.pack("!IB", 1 + len(payload) + padding, padding) + payload + bytes(padding)
