"""Probes of the network between hosts: the route to a peer, which ports it lets through, packet sizes and bandwidth.

For `net`, every host listens on two ports and connects to those of the others. A connection that does not begin with the
check's random token is closed. The listeners are bound to the address that the others use, and close when the
coordinator ends the probe or its connection, or when the probe's time is over.
"""

from __future__ import annotations

import array
import errno
import fcntl
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stoker.contract.process import read_kernel_lines

# ---- the route to a peer, which the kernel tells without sending a packet ----

_SIOCGIFCONF, _SIOCGIFMTU = 0x8912, 0x8921
_IFREQ_BYTES = 40  # of a struct ifreq on 64-bit Linux


def route(to: list[str]) -> Any:
    """Return the interface, own address and MTU of the route to each address or name in `to`, or an error for it."""
    own_addresses = read_addresses()
    ssh_server = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""][2]
    return {
        "routes": {target: _find_route(target, own_addresses) for target in to},
        "addresses": own_addresses,
        "hostname": socket.gethostname(),
        # The address that ssh connected to. An sshd that a ProxyCommand started writes UNKNOWN.
        "reached_at": None if ssh_server in ("", "UNKNOWN") else ssh_server,
    }


def _find_route(target: str, own_addresses: dict[str, list[str]]) -> dict[str, Any]:
    try:
        family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # connecting a datagram socket chooses the route and sends nothing
            source = str(probe.getsockname()[0])
    except OSError as problem:
        return {"error": problem.strerror or str(problem)}
    interface = next((name for name, own in own_addresses.items() if source in own), None)
    return {
        "interface": interface,
        "source": source,
        "mtu": _read_mtu(interface) if interface else None,
        "address": str(address[0]),
    }


def read_addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface. It uses ioctl, because /sys may show another network namespace."""
    entries = array.array("B", bytes(_IFREQ_BYTES * 256))
    pointer, length = entries.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFCONF, struct.pack("iL", length, pointer))
    raw = entries.tobytes()[: struct.unpack("iL", answer)[0]]
    by_interface: dict[str, list[str]] = {}
    for at in range(0, len(raw), _IFREQ_BYTES):
        name = raw[at : at + 16].split(b"\0")[0].decode("utf-8", "replace").partition(":")[0]
        by_interface.setdefault(name, []).append(socket.inet_ntoa(raw[at + 20 : at + 24]))
    for line in read_kernel_lines("/proc/net/if_inet6"):
        digits, _, _, _, _, name = line.split()
        by_interface.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return by_interface


def _read_mtu(interface: str) -> int | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFMTU, struct.pack("16si12x", interface.encode()[:15], 0))
        except OSError:
            return None
    return int(struct.unpack("16si12x", answer)[1])


# ---- ports, packet sizes and bandwidth between hosts ----

STORE_PORTS = range(29500, 29600)  # where torch's store usually listens, and for which firewalls are opened
CONNECT_S = 1.5
SMALL_BYTES = 64
BIG_BYTES = 256 << 10  # dozens of full-size segments: a path that drops those never delivers it
BIG_S = 2.5
SEGMENTS = (536, 1000, 1160, 1240, 1340, 1360, 1400, 1420)  # payload sizes to try where full-size segments are dropped
HEADER_BYTES = 40  # IPv4 and TCP, without options
STREAM_S = 0.3
_CHUNK = 1 << 18
_LENGTH = struct.Struct("!I")


def net(address: str, token: str, store_port: int = 0) -> Iterator[Any]:
    """Listen on `address`, yield {"ports": [store, ephemeral]}, then yield one answer per order on standard input.

    The orders are {"do": "meet", "peers": {name: {"address", "ports"}}} and {"do": "stream", "address", "port"}.
    """
    key = token.encode()
    listeners = [_listen(address, STORE_PORTS if store_port == 0 else (store_port,)), _listen(address, (0,))]
    for listener in listeners:
        threading.Thread(target=_accept_peers, args=(listener, key), daemon=True).start()
    try:
        yield {"ports": [listener.getsockname()[1] for listener in listeners]}
        for order in _read_orders():
            if order["do"] == "meet":
                yield _measure_peers(order["peers"], key)
            elif order["do"] == "stream":
                yield _measure_bandwidth(order["address"], order["port"], key)
            else:
                return
    finally:
        for listener in listeners:
            listener.close()


def _read_orders() -> Iterator[Any]:
    partial = b""
    while data := os.read(0, 1 << 16):
        *lines, partial = (partial + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def _listen(address: str, ports: Sequence[int]) -> socket.socket:
    """Listen on the first free port. Where `address` is a router's that forwards to this host, listen on all addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    problem = ""
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                listener.bind(("", port))
            listener.listen(64)
        except OSError as error:
            listener.close()
            problem = error.strerror or str(error)
            continue
        return listener
    raise OSError(f"can't listen on {address}, port {ports[0]}: {problem}")


def _accept_peers(listener: socket.socket, key: bytes) -> None:
    """Serve every connection in its own thread, until the listener is closed."""
    while True:
        try:
            peer, _ = listener.accept()
        except ConnectionAbortedError:  # the peer closed the connection before it was accepted
            continue
        except OSError:  # closed: the check is over
            return
        threading.Thread(target=_serve_peer, args=(peer, key), daemon=True).start()


def _serve_peer(peer: socket.socket, key: bytes) -> None:
    """Serve one connection. It begins with the token. A message is its length and that many bytes, and is answered with a byte.

    Length 0 begins a stream, which is answered with its size.
    """
    import hmac

    with peer:
        peer.settimeout(10.0)
        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_receive(peer, len(key)), key):
                return
            while True:
                (length,) = _LENGTH.unpack(_receive(peer, _LENGTH.size))
                if not length:
                    peer.sendall(struct.pack("!Q", _drain(peer)))
                    return
                _receive(peer, length)
                peer.sendall(b".")
        except OSError:
            return  # the peer reports what went wrong


def _receive(peer: socket.socket, count: int) -> bytes:
    parts, missing = [], count
    while missing:
        data = peer.recv(min(missing, _CHUNK))
        if not data:
            raise ConnectionError("closed")
        parts.append(data)
        missing -= len(data)
    return b"".join(parts)


def _drain(peer: socket.socket) -> int:
    """Receive until the peer stops sending. Return the number of bytes."""
    buffer, total = bytearray(_CHUNK), 0
    while count := peer.recv_into(buffer):
        total += count
    return total


def _measure_peers(peers: Any, key: bytes) -> dict[str, Any]:
    """Measure the network paths to all peers at the same time.

    Return name -> {"ports": {port: why it can't be reached, or ""}, "rtt", "segment", "big", "passes"}.
    """
    answers: dict[str, Any] = {name: {"ports": {}} for name in peers}

    def reach(name: str, port: int) -> None:
        answers[name]["ports"][str(port)] = _explain_unreachable(peers[name]["address"], port, key)

    def measure(name: str) -> None:
        open_ports = [int(port) for port, problem in answers[name]["ports"].items() if not problem]
        if open_ports:
            answers[name].update(_measure_path(peers[name]["address"], open_ports[0], key))

    _run_in_threads(
        [(reach, (name, port)) for name, peer in peers.items() for port in peer["ports"]], 2 * CONNECT_S + 1.0
    )
    _run_in_threads([(measure, (name,)) for name in peers], 2 * CONNECT_S + 2 * BIG_S + 1.0)
    snapshot: dict[str, Any] = json.loads(json.dumps(answers))  # a copy, because a late thread may still write
    return snapshot


def _run_in_threads(calls: list[tuple[Callable[..., None], tuple[Any, ...]]], seconds: float) -> None:
    """Run all calls at the same time and wait for them, but no longer than `seconds`."""
    threads = [threading.Thread(target=function, args=args, daemon=True) for function, args in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _connect(address: str, port: int, key: bytes, segment: int = 0) -> socket.socket:
    """Connect and send the token. `segment` limits the payload of a packet."""
    connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_S)
        if segment:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        connection.connect((address, port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(key)
    except OSError:
        connection.close()
        raise
    return connection


def _explain_unreachable(address: str, port: int, key: bytes) -> str:
    """Return why a port of a peer can't be reached, or ""."""
    try:
        with _connect(address, port, key) as connection:
            _send_message(connection, SMALL_BYTES, CONNECT_S)
    except TimeoutError:
        return "does not answer"
    except ConnectionRefusedError:
        return "is refused"
    except OSError as problem:
        return problem.strerror or str(problem)
    return ""


def _send_message(connection: socket.socket, count: int, limit_s: float) -> float:
    """Send `count` bytes. Return the seconds until the peer has all of them."""
    connection.settimeout(limit_s)
    began = time.perf_counter()
    connection.sendall(_LENGTH.pack(count) + bytes(count))
    _receive(connection, 1)
    return time.perf_counter() - began


def _measure_path(address: str, port: int, key: bytes) -> dict[str, Any]:
    """Return the round-trip time, the TCP segment size, and whether full-size packets arrive ("big")."""
    try:
        with _connect(address, port, key) as connection:
            rtt = min(_send_message(connection, SMALL_BYTES, CONNECT_S) for _ in range(8))
            segment = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            try:
                _send_message(connection, BIG_BYTES, BIG_S)
            except TimeoutError:
                largest = _find_largest_packet(address, port, key)
                return {"rtt": rtt, "segment": segment, "big": False, "passes": largest}
            return {"rtt": rtt, "segment": segment, "big": True}
    except OSError as problem:
        return {"error": str(problem)}


def _find_largest_packet(address: str, port: int, key: bytes) -> int:
    """Try the sizes of SEGMENTS at the same time. Return the largest packet that arrives, or 0."""
    sizes: list[int] = []

    def attempt(segment: int) -> None:
        try:
            with _connect(address, port, key, segment) as connection:
                _send_message(connection, BIG_BYTES, BIG_S)
                sizes.append(segment + HEADER_BYTES)
        except OSError:
            return  # packets of this size don't arrive

    _run_in_threads([(attempt, (segment,)) for segment in SEGMENTS], CONNECT_S + BIG_S + 0.5)
    return max(sizes, default=0)


def _measure_bandwidth(address: str, port: int, key: bytes) -> dict[str, Any]:
    """Return the bandwidth of one TCP connection in bytes per second, as the receiver counts the bytes."""
    block = bytes(_CHUNK)
    try:
        with _connect(address, port, key) as connection:
            connection.sendall(_LENGTH.pack(0))
            connection.settimeout(2.0)
            began = time.perf_counter()
            while time.perf_counter() - began < STREAM_S:
                connection.send(block)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(8.0)  # the buffers of a slow link still have to drain
            (total,) = struct.unpack("!Q", _receive(connection, 8))
            seconds = time.perf_counter() - began
    except OSError as problem:
        return {"error": str(problem)}
    return {"bytes": total, "seconds": seconds, "rate": total / seconds}
