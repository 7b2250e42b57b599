"""The HTTP server of `stoker metrics` and `stoker web`: one thread, one select loop.

Work that reads files is done by a second thread, so that a disk that hangs holds up no other answer. A stream (server-sent
events) is an answer that others write, piece by piece, until the client goes.
"""

from __future__ import annotations

import ipaddress
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import parse_qsl

from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.text import is_digits
from stoker.control.machine import ports

MAX_HEADERS = 8192  # bytes
MAX_BODY = 4096
IDLE_S = 60.0  # a connection on which nothing has moved for so long is closed
DRAIN_S = 5.0  # for the rest of a request that was refused
MAX_CLIENTS = 64  # at once; more wait in the kernel's queue
MAX_PENDING = 4 << 20  # bytes that wait for the client of a stream: a slower one is closed, and asks anew
REASONS = {
    200: "OK",
    303: "See Other",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
READ = 65536  # bytes at once
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
PLAIN = "text/plain; charset=utf-8"


# ---- where it listens ----


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
        server.listen(MAX_CLIENTS)
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


def url(server: socket.socket, path: str) -> str:
    host, port = server.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:  # all of this machine's: its name is one that can be opened
        host = os.uname().nodename
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"


# ---- requests and answers: pure ----


@frozen
class HttpRequest:
    method: str
    path: str  # as it came: nothing in it is decoded
    query: Mapping[str, str]
    headers: Mapping[str, str]  # by their names in small letters
    body: bytes = b""

    @property
    def host(self) -> str:
        """The name it calls us by, without the port; empty where it gives none."""
        host = self.headers.get("host", "").lower()
        name, colon, port = host.rpartition(":")
        return name if colon and port.isdigit() else host


@frozen
class HttpResponse:
    status: int
    body: bytes = b""
    content_type: str = PLAIN
    headers: tuple[tuple[str, str], ...] = ()

    def to_bytes(self) -> bytes:
        return (
            response_head(self.status, self.content_type, (*self.headers, ("Content-Length", str(len(self.body)))))
            + self.body
        )


def error_response(status: int, *headers: tuple[str, str]) -> HttpResponse:
    return HttpResponse(status, f"{status} {REASONS[status]}\n".encode(), PLAIN, headers)


def response_head(status: int, content_type: str, headers: Iterable[tuple[str, str]]) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {REASONS[status]}",
        f"Content-Type: {content_type}",
        *(f"{name}: {value}" for name, value in headers),
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def parse_request(data: bytes | bytearray) -> HttpRequest | int | None:
    """Return the request, None if it has not arrived completely, or the status of one that can't be answered."""
    end = min((at for at in (data.find(b"\r\n\r\n"), data.find(b"\n\n")) if at >= 0), default=-1)
    if end < 0:
        return 431 if len(data) > MAX_HEADERS else None
    if end > MAX_HEADERS:
        return 431
    begin = end + (4 if data[end : end + 1] == b"\r" else 2)
    first, *lines = data[:end].replace(b"\r\n", b"\n").decode("latin-1").split("\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        return 400
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.strip().lower()
        if not colon or not name:
            return 400
        headers[name] = value.strip()
    size = _body_size(headers)
    if not 0 <= size <= MAX_BODY:
        return 413 if size > MAX_BODY else 400
    if len(data) < begin + size:
        return None
    path, _, query = words[1].partition("?")
    try:
        fields = dict(parse_qsl(query, keep_blank_values=True, errors="strict"))
    except ValueError:  # not UTF-8
        return 400
    return HttpRequest(words[0], path, fields, headers, bytes(data[begin : begin + size]))


def _body_size(headers: Mapping[str, str]) -> int:
    """Return the size of the body, or -1 if the headers don't say it."""
    text = headers.get("content-length", "0")
    return int(text) if is_digits(text) and "transfer-encoding" not in headers else -1


# ---- the loop ----


class ResponseStream:
    """Pushed to from any thread. `over` is called when the client is gone."""

    def __init__(self, content_type: str, headers: tuple[tuple[str, str], ...], over: Callable[[], None]) -> None:
        self.over = over
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._pending = [response_head(200, content_type, headers)]

    def push(self, data: bytes) -> None:
        with self._lock:
            self._pending.append(data)
        self._wake()

    def bind(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def take(self) -> bytes:
        with self._lock:
            data, self._pending = b"".join(self._pending), []
        return data


Work = Callable[[], HttpResponse]  # done in the thread that reads
Handler = Callable[[HttpRequest], "HttpResponse | ResponseStream | Work"]


class _Client:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.request = bytearray()
        self.answer: memoryview | None = None  # what is left of it
        self.stream: ResponseStream | None = None
        self.open = True
        self.has_request = False  # it was read
        self.refused = False  # before all of the request was read
        self.events = selectors.EVENT_READ
        self.deadline = time.monotonic() + IDLE_S


class HttpServer:
    """`handler` must not block; what it gives as Work may. `failed` gets an exception of either."""

    def __init__(
        self,
        server: socket.socket,
        handler: Handler,
        failed: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._server, self._handler, self._failed = server, handler, failed
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._accepting = False
        self._work: queue.SimpleQueue[tuple[_Client, Work] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_Client, HttpResponse]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._worker: threading.Thread | None = None

    def serve(self, stopped: Callable[[], bool], look_s: float = 0.5) -> None:
        """Until `stopped`, which is asked at least every `look_s`."""
        self._selector.register(self._woken, selectors.EVENT_READ, self._woken)
        try:
            while not stopped():
                self._accept_if_room()
                for key, _ in self._selector.select(look_s):
                    if key.data is None:
                        self._accept()
                    elif key.data is self._woken:
                        self._wake_up()
                    elif key.data.open:
                        self._go_on(key.data)
                now = time.monotonic()
                for late in [client for client in self._clients if client.deadline < now]:
                    self._close(late)
        finally:
            for client in tuple(self._clients):
                self._close(client)
            self._selector.close()
            self._server.close()
            if self._worker is not None:
                self._work.put(None)

    def wake(self) -> None:
        try:
            self._waker.send(b"!")
        except OSError:
            return  # it is full: awake already; or closed: over

    def _wake_up(self) -> None:
        try:
            self._woken.recv(4096)
        except BlockingIOError:
            pass
        while not self._done.empty():
            client, answer = self._done.get()
            if client.open:
                self._begin(client, answer.to_bytes())
        for client in [client for client in self._clients if client.stream is not None]:
            self._refill(client)

    def _refill(self, client: _Client) -> None:
        assert client.stream is not None
        more = client.stream.take()
        if not more:
            return
        left = bytes(client.answer or b"")
        if left and len(left) + len(more) > MAX_PENDING:  # one that is idle gets whatever was pushed at once
            self._close(client)
            return
        deadline = client.deadline
        self._begin(client, left + more)
        if left:  # it has taken nothing since
            client.deadline = deadline

    def _accept_if_room(self) -> None:
        room = len(self._clients) < MAX_CLIENTS
        if room and not self._accepting:
            self._selector.register(self._server, selectors.EVENT_READ)
        elif self._accepting and not room:
            self._selector.unregister(self._server)
        self._accepting = room

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return  # the client is gone, or there are no descriptors left: the next look tries again
        connection.setblocking(False)
        client = _Client(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _close(self, client: _Client) -> None:
        client.open = False
        self._clients.discard(client)
        self._selector.unregister(client.socket)
        client.socket.close()
        if client.stream is not None:
            client.stream.over()

    def _go_on(self, client: _Client) -> None:
        try:
            if client.answer is not None:
                self._write(client)
            elif client.events == selectors.EVENT_READ:
                self._read(client)
        except BlockingIOError:
            return
        except OSError:  # the client went away
            self._close(client)

    def _read(self, client: _Client) -> None:
        data = client.socket.recv(READ)
        if client.has_request:  # the rest of a refused request, or the end of a stream
            if not data:
                self._close(client)
            return
        client.deadline = time.monotonic() + IDLE_S
        client.request += data
        request = parse_request(client.request)
        if request is None:
            if not data:
                self._close(client)
            return
        client.has_request = True
        self._answer(client, request)

    def _answer(self, client: _Client, request: HttpRequest | int) -> None:
        if isinstance(request, int):
            client.refused = True
            self._begin(client, error_response(request).to_bytes())
            return
        try:
            answer = self._handler(request)
        except Exception as problem:  # a bug must not end the server
            self._failed(problem)
            answer = error_response(500)
        if isinstance(answer, HttpResponse):
            self._begin(client, answer.to_bytes())
        elif isinstance(answer, ResponseStream):
            client.stream = answer
            answer.bind(self.wake)
            client.deadline = float("inf")  # it may wait for its first piece
            self._refill(client)
        else:
            if self._worker is None:
                self._worker = threading.Thread(target=self._read_files, name="reading", daemon=True)
                self._worker.start()
            client.deadline = time.monotonic() + IDLE_S  # a disk that hangs must not keep clients for ever
            self._work.put((client, answer))

    def _read_files(self) -> None:
        while (item := self._work.get()) is not None:
            client, work = item
            if not client.open:
                continue
            try:
                answer = work()
            except Exception as problem:
                self._failed(problem)
                answer = error_response(500)
            self._done.put((client, answer))
            self.wake()

    def _begin(self, client: _Client, data: bytes) -> None:
        client.answer = memoryview(data)
        client.deadline = time.monotonic() + IDLE_S
        client.events = selectors.EVENT_WRITE
        self._selector.modify(client.socket, selectors.EVENT_WRITE, client)

    def _write(self, client: _Client) -> None:
        assert client.answer is not None
        client.answer = client.answer[client.socket.send(client.answer) :]
        client.deadline = time.monotonic() + IDLE_S
        if client.answer:
            return
        if client.stream is None and not client.refused:
            self._close(client)
            return
        client.answer = None
        client.events = selectors.EVENT_READ
        client.deadline = float("inf")
        self._selector.modify(client.socket, selectors.EVENT_READ, client)
        if client.stream is None:  # closing now would reset the connection before the client has read why
            client.socket.shutdown(socket.SHUT_WR)
            client.deadline = time.monotonic() + DRAIN_S
