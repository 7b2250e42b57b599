"""The HTTP interface of `stoker serve`, an ASGI application: routes, who may ask, limits, streams. No torch.

http_server.py runs it under uvicorn. Bodies are parsed in a thread of their own, and the engine runs in another one (driver.py):
the event loop only moves bytes.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from stoker.contract.frozen import frozen
from stoker.contract.text import escape
from stoker.training.serve import api
from stoker.training.serve.api import Problem
from stoker.training.serve.request import ABORTED, Event, Request

JSON, EVENTS, PLAIN = "application/json", "text/event-stream; charset=utf-8", "text/plain; version=0.0.4; charset=utf-8"
MAX_BODY = 1 << 20  # bytes
RETRY_S = 1
WEIGHTS, MODELS = "/v1/weights", "/v1/models"
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")


class Engine(Protocol):
    """driver.Driver."""

    most: int
    failure: str

    def reserve(self, count: int) -> bool: ...
    def send(
        self, requests: Sequence[Request], sink: Callable[[Event], None], failed: Callable[[str, bool], None]
    ) -> None: ...
    def abort(self, requests: Sequence[Request]) -> None: ...


class WeightsLoader(Protocol):
    """weights.Loader."""

    @property
    def has_loaded(self) -> bool: ...
    def load(self, body: bytes, reply: Callable[[int, bytes], None]) -> None: ...


@frozen
class HttpRequest:
    method: str
    path: str  # percent-decoded
    headers: Mapping[str, str]  # names in lower case, values as latin-1
    receive: Receive

    @property
    def hostname(self) -> str:
        """The name in the Host header, in lower case and without the port."""
        return _hostname(f"//{self.headers.get('host', '')}")


class LoopCalls:
    """Lets other threads call functions in the event loop. Calls that come together wake it once."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def close(self) -> None:
        """Drop all further calls: the loop ends."""
        with self._lock:
            self._loop = None

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` called in the event loop, after those posted before."""
        with self._lock:
            if self._loop is None:
                return
            self._calls.append(call)
            if len(self._calls) == 1:
                self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call()


class _Channel:
    """Receives what the engine reports about the requests of one body, for the task that answers it."""

    def __init__(self) -> None:
        self.is_gone = False  # the client left
        self.failure: Problem | None = None
        self._events: list[Event] = []
        self._changed = asyncio.Event()

    async def take(self) -> list[Event]:
        """Wait for events, a failure or the client's leaving, and return the events."""
        await self._changed.wait()
        self._changed.clear()
        events, self._events = self._events, []
        return events

    def add(self, event: Event) -> None:
        self._events.append(event)
        self._changed.set()

    def fail(self, problem: Problem) -> None:
        self.failure = problem
        self._changed.set()

    async def watch(self, receive: Receive) -> None:
        """Wait until the client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        self._changed.set()


class _Disconnected(Exception):
    """The client left before its request was complete."""


class App:
    """`names`: hosts that a client without a key may call us by (empty: any); `key`: the API key (empty: none is needed);
    `metrics`: returns the page of /metrics; `weights`: loads new ones (None: nobody may), and `token` is what a client without
    a key needs for that; `version`: returns the version and digest of the weights; `about`: more about this server for those
    who load weights; `log`: gets one line about a bug.
    """

    def __init__(
        self,
        served: api.Served,
        engine: Engine,
        *,
        key: str = "",
        names: tuple[str, ...] = (),
        metrics: Callable[[], str] = str,
        weights: WeightsLoader | None = None,
        token: str = "",
        version: Callable[[], tuple[int, str]] = lambda: (0, ""),
        about: Mapping[str, str] | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        self._served, self._engine = served, engine
        self._key, self._names, self._token = key, names, token
        self._metrics_page, self._weights, self._version, self._about = metrics, weights, version, about or {}
        self._log = log
        self.calls = LoopCalls()
        self.turned_away = 0  # requests that got status 429
        self.active = 0  # requests that are being answered
        self.is_draining = False  # new requests get status 503
        # One body after the other: a long prompt delays the next body's parsing, but nobody's stream.
        self._parser = ThreadPoolExecutor(1, "parsing")
        self._routes: dict[str, dict[str, Callable[[HttpRequest, Send], Awaitable[None]]]] = {
            "/v1/completions": {"POST": partial(self._generate, is_chat=False)},
            "/v1/chat/completions": {"POST": partial(self._generate, is_chat=True)},
            "/tokenize": {"POST": partial(self._convert, api.tokenize)},
            "/detokenize": {"POST": partial(self._convert, api.detokenize)},
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._metrics},
            MODELS: {"GET": self._models},
            WEIGHTS: {"GET": self._weights_version, "POST": self._load_weights},
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request = HttpRequest(scope["method"], scope["path"], headers, receive)
        is_started = False

        async def sending(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        self.active += 1
        try:
            await self._answer(request, sending)
        except Problem as problem:
            if is_started:
                raise  # uvicorn cuts the connection: the client must not take what it has for the whole
            await _respond(send, problem.status, _error(problem), JSON, problem.headers)
        except _Disconnected:
            return
        except Exception as problem:  # one request must not end the server
            self._log(f"stoker serve: {request.path} failed: {type(problem).__name__}: {problem}")
            if is_started:
                raise
            await _respond(send, 500, api.error("internal error; see the server's log", 500), JSON)
        finally:
            self.active -= 1

    def close(self) -> None:
        self.calls.close()
        self._parser.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, request: HttpRequest, send: Send) -> None:
        self._authorize(request)
        if request.path.startswith(f"{MODELS}/"):
            methods: Mapping[str, Callable[[HttpRequest, Send], Awaitable[None]]] = {"GET": self._model}
        elif request.path in self._routes:
            methods = self._routes[request.path]
        else:
            line = f"no such path: {escape(request.path, 80)}; there are {', '.join(self._routes)}"
            raise Problem(line, 404)
        if request.method not in methods:
            allowed = ", ".join(methods)
            raise Problem(f"{request.path} takes {allowed}", 405, headers=(("Allow", allowed),))
        if request.method == "POST":
            self._refuse_unfit(request)
        await methods[request.method](request, send)

    def _authorize(self, request: HttpRequest) -> None:
        if self._key:
            if not _has_key(request, self._key) and request.path != "/health":
                line = "wrong or missing API key: send it as `Authorization: Bearer KEY`"
                raise Problem(line, 401, code="invalid_api_key")
            return
        if not self._names:
            return
        # Pages of other sites may turn their own name to this machine (Host), or post from a browser (Origin).
        origin = request.headers.get("origin")
        if request.hostname not in self._names or (origin is not None and _hostname(origin) not in self._names):
            raise Problem(f"without an API key this server answers {', '.join(self._names)} only", 403)

    def _refuse_unfit(self, request: HttpRequest) -> None:
        """Refuse a POST before its body is read."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON:  # a page of another site can't send this without asking first
            raise Problem(f"the body must be {JSON}", 415)
        self._refuse_unready()

    def _refuse_unready(self) -> None:
        if self._engine.failure:
            raise Problem("the engine failed; see the server's log", 503)
        if self.is_draining:
            line = "this server is being stopped: it finishes what it began, and takes no new requests"
            raise Problem(line, 503, headers=(("Retry-After", str(RETRY_S)), ("Connection", "close")))

    # ---- pages ----

    async def _health(self, _: HttpRequest, send: Send) -> None:
        self._refuse_unready()
        await _respond_json(send, {"status": "ok"})

    async def _models(self, _: HttpRequest, send: Send) -> None:
        await _respond_json(send, {"object": "list", "data": [api.model_card(self._served)]})

    async def _model(self, request: HttpRequest, send: Send) -> None:
        name = request.path.removeprefix(f"{MODELS}/")
        if name != self._served.name:
            raise api.unknown_model(name, self._served)
        await _respond_json(send, api.model_card(self._served))

    async def _metrics(self, _: HttpRequest, send: Send) -> None:
        await _respond(send, 200, self._metrics_page().encode(), PLAIN)

    # ---- weights ----

    async def _weights_version(self, _: HttpRequest, send: Send) -> None:
        version, digest = self._version()
        about = self._about if self._weights is not None else {}
        await _respond_json(send, {"version": version, "digest": digest, **about})

    async def _load_weights(self, request: HttpRequest, send: Send) -> None:
        if self._weights is None:
            line = "this server accepts no new weights: start it with --weights-from FOLDER or --weights-group HOST"
            raise Problem(line, 403)
        if not self._key and not (self._token and _has_key(request, self._token)):
            line = "wrong or missing token: the server printed it when it started"
            raise Problem(line, 401, code="invalid_api_key")
        body = await _read_body(request)
        replies: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        # A client that leaves does not undo its request.
        self._weights.load(body, lambda *reply: self.calls.post(partial(replies.put_nowait, reply)))
        status, data = await replies.get()
        await _respond(send, status, data, JSON)

    # ---- tokens ----

    async def _convert(
        self, convert: Callable[[bytes, api.Served], Mapping[str, Any]], request: HttpRequest, send: Send
    ) -> None:
        body = await _read_body(request)
        await _respond_json(send, await self._parsed(lambda: convert(body, self._served)))

    async def _parsed(self, parse: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse)

    async def _generate(self, request: HttpRequest, send: Send, is_chat: bool) -> None:
        body, channel = await _read_body(request), _Channel()
        watching = asyncio.create_task(channel.watch(request.receive))
        try:
            asked = await self._parsed(lambda: self._read(body, channel, is_chat))
            if asked is not None and not channel.is_gone:
                await self._complete(asked, channel, send)
        finally:
            watching.cancel()

    def _read(self, body: bytes, channel: _Channel, is_chat: bool) -> api.Asked | None:
        """Parse a body, in the parser's thread. Returns None if its client left while it waited for its turn."""
        if channel.is_gone:
            return None
        asked, most = api.read(body, is_chat, self._served), self._engine.most
        if len(asked.requests) > most:
            line = f"{len(asked.requests)} answers are too many: this server takes {most} at a time"
            raise Problem(line, key="n")
        return asked

    async def _complete(self, asked: api.Asked, channel: _Channel, send: Send) -> None:
        engine, post = self._engine, self.calls.post
        self._refuse_old_weights(asked.min_weight_version)
        if not engine.reserve(len(asked.requests)):
            self.turned_away += 1
            line = f"the queue is full ({engine.most} answers): try again later"
            raise Problem(line, 429, code="rate_limit_exceeded", headers=(("Retry-After", str(RETRY_S)),))

        def failed(line: str, is_clients: bool) -> None:
            post(partial(channel.fail, Problem(line, 400 if is_clients else 500)))

        reply = api.Reply(asked, self._served)
        engine.send(asked.requests, lambda event: post(partial(channel.add, event)), failed)
        try:
            await self._write(asked, reply, channel, send)
        finally:
            if not reply.is_done:
                engine.abort(asked.requests)

    def _refuse_old_weights(self, oldest: int) -> None:
        """`oldest`: version; -1: any weights will do. Those that the server was started with are older than any version."""
        has_loaded = self._weights is not None and self._weights.has_loaded
        version, _ = self._version()
        if oldest < 0 or (has_loaded and version >= oldest):
            return
        current = f"version {version}" if has_loaded else "those it was started with"
        line = (
            f"the weights of this server are {current}, and min_weight_version is {oldest}: load newer ones ({WEIGHTS})"
        )
        raise Problem(line, 409, "min_weight_version", "weights_too_old")

    async def _write(self, asked: api.Asked, reply: api.Reply, channel: _Channel, send: Send) -> None:
        is_begun = False
        while not reply.is_done:
            events = await channel.take()
            data = b"".join([reply.take(event) for event in events if event.finish != ABORTED])
            if channel.is_gone:
                return
            if channel.failure is not None:
                if is_begun:
                    error = _event(_error(channel.failure))
                    await send({"type": "http.response.body", "body": error, "more_body": True})
                raise channel.failure
            if data:
                if not is_begun:
                    await send(_start(200, EVENTS))
                    is_begun = True
                await send({"type": "http.response.body", "body": data, "more_body": True})
        if asked.stream:
            await send({"type": "http.response.body", "body": b""})
        else:
            body = reply.whole() if reply.is_short else await asyncio.to_thread(reply.whole)
            await _respond(send, 200, body, JSON)


def _has_key(request: HttpRequest, key: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Headers are read as latin-1, whatever their bytes mean.
    is_known = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
    return scheme.lower() == "bearer" and is_known


def _hostname(url: str) -> str:
    """Return the URL's host in lower case, an IPv6 address in brackets; empty where it has none."""
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return ""
    return f"[{name}]" if ":" in name else name


async def _read_body(request: HttpRequest) -> bytes:
    """Read all of the body. Raises Problem where it is too large."""
    too_large = Problem(f"the body is too large: at most {MAX_BODY} bytes", 413)
    if int(request.headers.get("content-length", 0)) > MAX_BODY:  # h11 has checked that it is a number
        raise too_large
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(parts)


def _start(status: int, content_type: str, headers: Sequence[tuple[str, str]] = ()) -> Message:
    every = (
        ("Content-Type", content_type),
        *headers,
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
    )
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in every]
    return {"type": "http.response.start", "status": status, "headers": encoded}


async def _respond(
    send: Send, status: int, body: bytes, content_type: str, headers: Sequence[tuple[str, str]] = ()
) -> None:
    await send(_start(status, content_type, (*headers, ("Content-Length", str(len(body))))))
    await send({"type": "http.response.body", "body": body})


async def _respond_json(send: Send, value: Mapping[str, Any]) -> None:
    await _respond(send, 200, json.dumps(value).encode(), JSON)


def _error(problem: Problem) -> bytes:
    return api.error(problem.line, problem.status, problem.key, problem.code)


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
