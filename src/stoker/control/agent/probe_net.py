"""What the network between hosts lets through: every host listens on two ports, every other connects.

A connection without the check's random token is closed at once. The listeners are bound to the address the others use,
and close when the coordinator says so, goes away, or after LIMIT_S.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

STORE_PORTS = range(29500, 29600)  # where torch's store is usually put: the range that firewalls are opened for
CONNECT_S = 1.5
SMALL = 64
BIG = 256 << 10  # dozens of full-size segments: a path that loses those never delivers it
BIG_S = 2.5
SEGMENTS = (536, 1000, 1160, 1240, 1340, 1360, 1400, 1420)  # payload sizes to try where full-size ones vanish
HEADERS = 40  # IPv4 and TCP, without options
STREAM_S = 0.3
_CHUNK = 1 << 18
_LENGTH = struct.Struct("!I")
_TIMED_OUT = (socket.timeout, TimeoutError)  # two classes before Python 3.10


def net(address: str, token: str, store_port: int = 0) -> Iterator[Any]:
    """Yields {"ports": [store, ephemeral]}, then one answer per order on standard input:
    {"do": "meet", "peers": {name: {"address", "ports"}}} and {"do": "stream", "address", "port"}."""
    key = token.encode()
    listeners = [_listen(address, STORE_PORTS if store_port == 0 else (store_port,)), _listen(address, (0,))]
    for one in listeners:
        threading.Thread(target=_serve, args=(one, key), daemon=True).start()
    try:
        yield {"ports": [one.getsockname()[1] for one in listeners]}
        for line in _orders():
            if line["do"] == "meet":
                yield meet(line["peers"], key)
            elif line["do"] == "stream":
                yield stream(line["address"], line["port"], key)
            else:
                return
    finally:
        for one in listeners:
            one.close()


def _orders() -> Iterator[Any]:
    words = b""
    while data := os.read(0, 1 << 16):
        *lines, words = (words + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def _listen(address: str, ports: Any) -> socket.socket:
    """The first port that is free. An address that is not ours is a router's that leads here: then on all ours."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    problem = ""
    for port in ports:
        one = socket.socket(family, socket.SOCK_STREAM)
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind((address, port))
            except OSError as refused:
                if refused.errno != errno.EADDRNOTAVAIL:
                    raise
                one.bind(("", port))
            one.listen(64)
        except OSError as refused:
            one.close()
            problem = refused.strerror or str(refused)
            continue
        return one
    raise OSError(f"can't listen on {address}, port {ports[0]}: {problem}")


def _serve(listener: socket.socket, key: bytes) -> None:
    """Answer every connection in a thread of its own, until the listener is closed."""
    while True:
        try:
            peer, _ = listener.accept()
        except ConnectionAbortedError:  # it went before it was accepted
            continue
        except OSError:  # closed: the check is over
            return
        threading.Thread(target=_answer, args=(peer, key), daemon=True).start()


def _answer(peer: socket.socket, key: bytes) -> None:
    """After the token: messages of a length, each answered by a byte; length 0 begins a stream, then its size."""
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
            return  # the peer's side has the words for what happened


def _receive(peer: socket.socket, count: int) -> bytes:
    parts, left = [], count
    while left:
        data = peer.recv(min(left, _CHUNK))
        if not data:
            raise ConnectionError("closed")
        parts.append(data)
        left -= len(data)
    return b"".join(parts)


def _drain(peer: socket.socket) -> int:
    room, total = bytearray(_CHUNK), 0
    while count := peer.recv_into(room):
        total += count
    return total


def meet(peers: Any, key: bytes) -> dict[str, Any]:
    """Everybody at once: name -> {"ports": {port: "" or why not}, "rtt", "segment", "big", "passes"}."""
    found: dict[str, Any] = {name: {"ports": {}} for name in peers}

    def reach(name: str, port: int) -> None:
        found[name]["ports"][str(port)] = _reach(peers[name]["address"], port, key)

    def measure(name: str) -> None:
        open_ports = [int(port) for port, why in found[name]["ports"].items() if not why]
        if open_ports:
            found[name].update(_measure(peers[name]["address"], open_ports[0], key))

    _side_by_side([(reach, (name, port)) for name, one in peers.items() for port in one["ports"]], 2 * CONNECT_S + 1.0)
    _side_by_side([(measure, (name,)) for name in peers], 2 * CONNECT_S + 2 * BIG_S + 1.0)
    snapshot: dict[str, Any] = json.loads(json.dumps(found))  # as it is now: a thread that is late may still write
    return snapshot


def _side_by_side(calls: list[tuple[Any, tuple[Any, ...]]], seconds: float) -> None:
    threads = [threading.Thread(target=function, args=args, daemon=True) for function, args in calls]
    for one in threads:
        one.start()
    deadline = time.monotonic() + seconds
    for one in threads:
        one.join(max(0.0, deadline - time.monotonic()))


def _connect(address: str, port: int, segment: int = 0) -> socket.socket:
    one = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        one.settimeout(CONNECT_S)
        if segment:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        one.connect((address, port))
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        one.close()
        raise
    return one


def _reach(address: str, port: int, key: bytes) -> str:
    try:
        with _connect(address, port) as one:
            one.sendall(key)
            _send(one, SMALL, CONNECT_S)
    except _TIMED_OUT:
        return "does not answer"
    except ConnectionRefusedError:
        return "is refused"
    except OSError as problem:
        return problem.strerror or str(problem)
    return ""


def _send(one: socket.socket, count: int, seconds: float) -> float:
    """Seconds until the other side has all of it."""
    one.settimeout(seconds)
    began = time.perf_counter()
    one.sendall(_LENGTH.pack(count) + bytes(count))
    _receive(one, 1)
    return time.perf_counter() - began


def _measure(address: str, port: int, key: bytes) -> dict[str, Any]:
    try:
        with _connect(address, port) as one:
            one.sendall(key)
            rtt = min(_send(one, SMALL, CONNECT_S) for _ in range(8))
            found = {"rtt": rtt, "segment": one.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG), "big": True}
            try:
                _send(one, BIG, BIG_S)
            except _TIMED_OUT:
                return {**found, "big": False, "passes": _largest(address, port, key)}
            return found
    except OSError as problem:
        return {"error": str(problem)}


def _largest(address: str, port: int, key: bytes) -> int:
    """The largest packet that passes, of those tried, all at the same time; 0 where none does."""
    passed: list[int] = []

    def attempt(segment: int) -> None:
        try:
            with _connect(address, port, segment) as one:
                one.sendall(key)
                _send(one, BIG, BIG_S)
                passed.append(segment + HEADERS)
        except OSError:
            return  # a size that does not pass: that is the answer

    _side_by_side([(attempt, (segment,)) for segment in SEGMENTS], CONNECT_S + BIG_S + 0.5)
    return max(passed, default=0)


def stream(address: str, port: int, key: bytes) -> dict[str, Any]:
    """Bytes a second over one TCP connection, as the receiver counts them."""
    block = bytes(_CHUNK)
    try:
        with _connect(address, port) as one:
            one.sendall(key + _LENGTH.pack(0))
            one.settimeout(2.0)
            began = time.perf_counter()
            while time.perf_counter() - began < STREAM_S:
                one.send(block)
            one.shutdown(socket.SHUT_WR)
            one.settimeout(8.0)  # what lies in the buffers of a slow link still has to get there
            (total,) = struct.unpack("!Q", _receive(one, 8))
            took = time.perf_counter() - began
    except OSError as problem:
        return {"error": str(problem)}
    return {"bytes": total, "seconds": took, "rate": total / took}
