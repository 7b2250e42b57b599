"""The HTTP server of `stoker metrics`: GET /metrics and GET /, nothing else.

One thread and one select loop: a client that sends its request a byte a minute costs a descriptor for 5 s. Whatever
arrives, the answer is a fixed text or the newest page; nothing of a request is ever repeated in it.
"""

from __future__ import annotations

import ipaddress
import selectors
import socket
import time
from collections.abc import Callable

from stoker.contract.names import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.control.machine import ports

LONGEST_REQUEST = 8192  # bytes, with all headers
REQUEST_S = 5.0  # for a whole request
ANSWER_S = 10.0
MOST_CLIENTS = 64
_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_LOCAL_NAMES = (b"localhost", b"127.0.0.1", b"[::1]")


def where(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"metrics at http://{f'[{host}]' if ':' in host else host}:{port}/metrics"


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Refusal, with who has it, where the port can't be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as problem:
        raise Refusal(f"--host {host}: {problem.strerror or problem}", EX_USAGE) from problem
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(MOST_CLIENTS)
    except OSError as problem:
        server.close()
        holder = ports.listener(port) if port else None
        if holder:
            line = f"port {port} is in use by {holder}; choose another {flag}, or 0 for a free one"
            raise Refusal(line, EX_UNAVAILABLE, cause="launch.port-in-use") from problem
        line = f"{flag} {port} of {host} can't be had: {problem.strerror}"
        raise Refusal(line, EX_UNAVAILABLE, cause="launch.port") from problem
    server.setblocking(False)
    return server


def is_loopback(server: socket.socket) -> bool:
    return ipaddress.ip_address(server.getsockname()[0]).is_loopback


class _Client:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.request = b""
        self.answer: memoryview | None = None  # what is left of it
        self.deadline = time.monotonic() + REQUEST_S


class Server:
    """`page`: the text of the newest snapshot; None before the first."""

    def __init__(self, server: socket.socket, page: Callable[[], bytes | None], content_type: str) -> None:
        self._server = server
        self._page = page
        self._content_type = content_type
        # A page of a browser here must not read it under a foreign name that leads to this address (DNS rebinding).
        # On other addresses Prometheus comes by any name.
        self._names = _LOCAL_NAMES if is_loopback(server) else ()
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._accepting = False

    def serve(self, stopped: Callable[[], bool], look_s: float = 0.5) -> None:
        """Until `stopped`, which is asked at least every `look_s`."""
        try:
            while not stopped():
                self._accept_if_room()
                for key, _ in self._selector.select(look_s):
                    if key.data is None:
                        self._accept()
                    else:
                        self._go_on(key.data)
                now = time.monotonic()
                for late in [client for client in self._clients if client.deadline < now]:
                    self._close(late)
        finally:
            for client in tuple(self._clients):
                self._close(client)
            self._selector.close()
            self._server.close()

    def _accept_if_room(self) -> None:
        """Others wait in the kernel's queue."""
        room = len(self._clients) < MOST_CLIENTS
        if room and not self._accepting:
            self._selector.register(self._server, selectors.EVENT_READ)
        elif self._accepting and not room:
            self._selector.unregister(self._server)
        self._accepting = room

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return  # it is gone already, or there are no descriptors left: the next look tries again
        connection.setblocking(False)
        client = _Client(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _close(self, client: _Client) -> None:
        self._clients.discard(client)
        self._selector.unregister(client.socket)
        client.socket.close()

    def _go_on(self, client: _Client) -> None:
        try:
            if client.answer is None:
                self._read(client)
            else:
                self._write(client)
        except BlockingIOError:
            return
        except OSError:  # the client went away
            self._close(client)

    def _read(self, client: _Client) -> None:
        data = client.socket.recv(LONGEST_REQUEST)
        client.request += data
        whole = b"\r\n\r\n" in client.request or b"\n\n" in client.request
        if not data and not whole:
            self._close(client)
        elif whole or len(client.request) > LONGEST_REQUEST:
            status, body, content_type = self._answer(client.request)
            client.answer = memoryview(_response(status, body, content_type))
            client.deadline = time.monotonic() + ANSWER_S
            self._selector.modify(client.socket, selectors.EVENT_WRITE, client)

    def _write(self, client: _Client) -> None:
        assert client.answer is not None
        client.answer = client.answer[client.socket.send(client.answer) :]
        if not client.answer:
            self._close(client)

    def _answer(self, request: bytes) -> tuple[int, bytes, str]:
        plain = "text/plain; charset=utf-8"
        status = judged(request, self._names)
        if status != 200:
            return status, f"{status} {_REASONS[status]}\n".encode(), plain
        if _path(request) == b"/":
            return 200, b"stoker metrics: the metrics are at /metrics\n", plain
        page = self._page()
        if page is None:
            return 503, b"no snapshot yet\n", plain
        return 200, page, self._content_type


def _response(status: int, body: bytes, content_type: str) -> bytes:
    allow = "Allow: GET\r\n" if status == 405 else ""
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"{allow}Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


def _path(request: bytes) -> bytes:
    return request.split(b" ", 2)[1].partition(b"?")[0]


def judged(request: bytes, host_names: tuple[bytes, ...] = ()) -> int:
    """The status for a request. `host_names`: those it may name us by, where not every name will do."""
    if len(request) > LONGEST_REQUEST:
        return 431
    head = request.replace(b"\r\n", b"\n").partition(b"\n\n")[0]
    first, *headers = head.split(b"\n")
    words = first.split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1.") or not words[1].startswith(b"/") or b"\0" in head:
        return 400
    named = [line.partition(b":") for line in headers]
    if any(not colon or not name.strip() for name, colon, _ in named):
        return 400
    hosts = [value.strip().lower() for name, _, value in named if name.strip().lower() == b"host"]
    if len(hosts) > 1:
        return 400
    if words[0] != b"GET":
        return 405
    if host_names and hosts and _without_port(hosts[0]) not in host_names:
        return 403
    return 200 if words[1].partition(b"?")[0] in (b"/metrics", b"/") else 404


def _without_port(host: bytes) -> bytes:
    name, colon, port = host.rpartition(b":")
    return name if colon and port.isdigit() else host
