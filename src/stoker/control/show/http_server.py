"""The HTTP server of `stoker metrics` and `stoker web`: one thread with a select loop, limits on everything a client sends.

The standard library's http.server has no limit on the size or the time of a request and answers some malformed ones with
their own text. This one allows 8 KB of headers, 4 KB of body and 60 s without progress.

A second thread computes responses that read files, so that a hanging disk does not block other requests. Other threads
extend a ResponseStream (server-sent events) until the client disconnects.
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
IDLE_S = 60.0  # a connection is closed after this time without a byte in either direction
DRAIN_S = 5.0  # time to receive the rest of a refused request
MAX_CLIENTS = 64  # further clients wait in the kernel's queue
MAX_PENDING = 4 << 20  # bytes; a client of a stream that has more to receive is disconnected, and reconnects
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
READ = 65536  # bytes read at once
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
PLAIN = "text/plain; charset=utf-8"


# ---- listening ----


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Return a listening socket. Raises Refusal if the port can't be used, and names the process that uses it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as problem:
        raise Refusal(f"--host {host}: {problem.strerror or problem}", EX_USAGE) from problem
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(MAX_CLIENTS)
    except OSError as problem:
        listening.close()
        holder = ports.find_listener(port) if port else None
        if holder:
            line = f"port {port} is in use by {holder}; choose another {flag}, or 0 for a free one"
            raise Refusal(line, EX_UNAVAILABLE, cause="launch.port-in-use") from problem
        line = f"can't listen on {flag} {port} of {host}: {problem.strerror}"
        raise Refusal(line, EX_UNAVAILABLE, cause="launch.port") from problem
    listening.setblocking(False)
    return listening


def is_loopback(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def server_url(listening: socket.socket, path: str) -> str:
    """Return the URL of a path, with a host that a browser can reach."""
    host, port = listening.getsockname()[:2]
    if ipaddress.ip_address(
        host
    ).is_unspecified:  # the machine's name works because the socket listens on all its addresses
        host = os.uname().nodename
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"


# ---- requests and responses ----


@frozen
class HttpRequest:
    """A parsed request."""

    method: str
    path: str  # not decoded
    query: Mapping[str, str]
    headers: Mapping[str, str]  # names in lower case
    body: bytes = b""

    @property
    def host(self) -> str:
        """The name in the Host header without the port, or ""."""
        host = self.headers.get("host", "").lower()
        name, colon, port = host.rpartition(":")
        return name if colon and port.isdigit() else host


@frozen
class HttpResponse:
    """A complete response."""

    status: int
    body: bytes = b""
    content_type: str = PLAIN
    headers: tuple[tuple[str, str], ...] = ()

    def to_bytes(self) -> bytes:
        headers = (*self.headers, ("Content-Length", str(len(self.body))))
        return response_head(self.status, self.content_type, headers) + self.body


class ResponseStream:
    """A response that stays open. Any thread may push data; `on_closed` is called when the client has disconnected."""

    def __init__(self, content_type: str, headers: tuple[tuple[str, str], ...], on_closed: Callable[[], None]) -> None:
        self.on_closed = on_closed
        self.wake_server: Callable[[], None] = lambda: None  # set by the server
        self._lock = threading.Lock()
        self._pending = [response_head(200, content_type, headers)]

    def push(self, data: bytes) -> None:
        """Queue data for the client and wake the server, which sends it."""
        with self._lock:
            self._pending.append(data)
        self.wake_server()

    def take(self) -> bytes:
        """Return and remove the data that was pushed since the last call."""
        with self._lock:
            data, self._pending = b"".join(self._pending), []
        return data


Work = Callable[[], HttpResponse]  # computes a response; may block
Handler = Callable[[HttpRequest], HttpResponse | ResponseStream | Work]


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
    """Return the request, None if more data is needed, or the HTTP status of an invalid request."""
    end = min((index for index in (data.find(b"\r\n\r\n"), data.find(b"\n\n")) if index >= 0), default=-1)
    if end < 0:
        return 431 if len(data) > MAX_HEADERS else None
    if end > MAX_HEADERS:
        return 431
    body_begin = end + (4 if data[end : end + 1] == b"\r" else 2)
    request_line, *header_lines = data[:end].replace(b"\r\n", b"\n").decode("latin-1").split("\n")
    parts = request_line.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or not parts[1].startswith("/"):
        return 400
    headers: dict[str, str] = {}
    for line in header_lines:
        name, colon, value = line.partition(":")
        name = name.strip().lower()
        if not colon or not name:
            return 400
        headers[name] = value.strip()
    length = headers.get("content-length", "0")
    if not is_digits(length) or "transfer-encoding" in headers:
        return 400
    if int(length) > MAX_BODY:
        return 413
    if len(data) < body_begin + int(length):
        return None
    path, _, query = parts[1].partition("?")
    try:
        fields = dict(parse_qsl(query, keep_blank_values=True, errors="strict"))
    except ValueError:  # not UTF-8
        return 400
    return HttpRequest(parts[0], path, fields, headers, bytes(data[body_begin : body_begin + int(length)]))


# ---- the loop ----


class _Client:
    """A connection, which sends one request and gets one response."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.received = bytearray()
        self.has_request = False
        self.is_refused = False  # True if the request is invalid; the client may still be sending it
        self.response: memoryview | None = None  # bytes that are still to be sent
        self.stream: ResponseStream | None = None
        self.is_open = True
        self.is_writing = False
        self.deadline = time.monotonic() + IDLE_S

    def extend_deadline(self) -> None:
        self.deadline = time.monotonic() + IDLE_S


class HttpServer:
    """Serves one listening socket.

    `handler` must not block; it returns Work for what may. `on_error` gets the exceptions that either raises.
    """

    def __init__(
        self,
        listening: socket.socket,
        handler: Handler,
        on_error: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._listening, self._handler, self._on_error = listening, handler, on_error
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._is_accepting = False
        self._work: queue.SimpleQueue[tuple[_Client, Work] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_Client, HttpResponse]] = queue.SimpleQueue()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)
        self._worker: threading.Thread | None = None

    def serve(self, stopped: Callable[[], bool], poll_s: float = 0.5) -> None:
        """Serve until `stopped` returns True, which is called at least every `poll_s` seconds."""
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._wake_receiver)
        try:
            while not stopped():
                self._update_accepting()
                for key, _ in self._selector.select(poll_s):
                    if key.data is None:
                        self._accept()
                    elif key.data is self._wake_receiver:
                        self._on_wake()
                    elif key.data.is_open:
                        self._on_ready(key.data)
                now = time.monotonic()
                for client in [client for client in self._clients if client.deadline < now]:
                    self._close(client)
        finally:
            for client in tuple(self._clients):
                self._close(client)
            self._selector.close()
            self._listening.close()
            if self._worker is not None:
                self._work.put(None)

    def wake(self) -> None:
        """Make the loop send finished work and pushed data. Any thread may call this."""
        try:
            self._wake_sender.send(b"!")
        except OSError:
            return  # either the buffer is full and the loop wakes anyway, or the server has ended

    def _on_wake(self) -> None:
        try:
            self._wake_receiver.recv(4096)
        except BlockingIOError:
            pass
        while not self._done.empty():
            client, response = self._done.get()
            if client.is_open:
                self._start_sending(client, response.to_bytes())
        for client in [client for client in self._clients if client.stream is not None]:
            self._send_pushed(client)

    def _send_pushed(self, client: _Client) -> None:
        assert client.stream is not None
        pushed = client.stream.take()
        if not pushed:
            return
        unsent = bytes(client.response or b"")
        if (
            unsent and len(unsent) + len(pushed) > MAX_PENDING
        ):  # one push may be larger if the client has received all before
            self._close(client)
            return
        deadline = client.deadline
        self._start_sending(client, unsent + pushed)
        if unsent:  # new data must not extend the time of a client that receives nothing
            client.deadline = deadline

    def _update_accepting(self) -> None:
        has_room = len(self._clients) < MAX_CLIENTS
        if has_room and not self._is_accepting:
            self._selector.register(self._listening, selectors.EVENT_READ)
        elif self._is_accepting and not has_room:
            self._selector.unregister(self._listening)
        self._is_accepting = has_room

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return  # the client has disconnected, or no file descriptor is free and the next loop tries again
        connection.setblocking(False)
        client = _Client(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _close(self, client: _Client) -> None:
        client.is_open = False
        self._clients.discard(client)
        self._selector.unregister(client.socket)
        client.socket.close()
        if client.stream is not None:
            client.stream.on_closed()

    def _on_ready(self, client: _Client) -> None:
        try:
            if client.response is not None:
                self._write(client)
            elif not client.is_writing:
                self._read(client)
        except BlockingIOError:
            return
        except OSError:  # the client disconnected
            self._close(client)

    def _read(self, client: _Client) -> None:
        data = client.socket.recv(READ)
        if client.has_request:  # these bytes are the rest of a refused request, or show the end of a stream
            if not data:
                self._close(client)
            return
        client.extend_deadline()
        client.received += data
        request = parse_request(client.received)
        if request is None:
            if not data:
                self._close(client)
            return
        client.has_request = True
        if isinstance(request, int):
            client.is_refused = True
            self._start_sending(client, error_response(request).to_bytes())
        else:
            self._respond(client, request)

    def _respond(self, client: _Client, request: HttpRequest) -> None:
        try:
            response = self._handler(request)
        except Exception as problem:  # a bug in the handler must not end the server
            self._on_error(problem)
            response = error_response(500)
        if isinstance(response, HttpResponse):
            self._start_sending(client, response.to_bytes())
        elif isinstance(response, ResponseStream):
            client.stream = response
            response.wake_server = self.wake
            client.deadline = float("inf")  # the first data may come at any time
            self._send_pushed(client)
        else:
            if self._worker is None:
                self._worker = threading.Thread(target=self._do_work, name="reading", daemon=True)
                self._worker.start()
            client.extend_deadline()  # a client of a hanging disk is disconnected after IDLE_S
            self._work.put((client, response))

    def _do_work(self) -> None:
        """Compute responses until None is queued. Runs in the second thread."""
        while (item := self._work.get()) is not None:
            client, work = item
            if not client.is_open:
                continue
            try:
                response = work()
            except Exception as problem:
                self._on_error(problem)
                response = error_response(500)
            self._done.put((client, response))
            self.wake()

    def _start_sending(self, client: _Client, data: bytes) -> None:
        client.response = memoryview(data)
        client.extend_deadline()
        client.is_writing = True
        self._selector.modify(client.socket, selectors.EVENT_WRITE, client)

    def _write(self, client: _Client) -> None:
        assert client.response is not None
        client.response = client.response[client.socket.send(client.response) :]
        client.extend_deadline()
        if client.response:
            return
        if client.stream is None and not client.is_refused:
            self._close(client)
            return
        client.response = None
        client.is_writing = False
        client.deadline = float("inf")
        self._selector.modify(client.socket, selectors.EVENT_READ, client)
        if client.stream is None:  # closing now would reset the connection before the client has read the refusal
            client.socket.shutdown(socket.SHUT_WR)
            client.deadline = time.monotonic() + DRAIN_S
