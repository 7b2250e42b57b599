"""What the server answers to each address, whatever carries it: who may ask, how much, and what is refused. No torch."""

from __future__ import annotations

import hmac
import json
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from stoker.contract.untrusted import printable
from stoker.training.serve import api
from stoker.training.serve.request import ABORTED, Event, Request

JSON, EVENTS, PLAIN = "application/json", "text/event-stream; charset=utf-8", "text/plain; version=0.0.4; charset=utf-8"
Headers = tuple[tuple[str, str], ...]
RETRY_S = 1
WEIGHTS = "/v1/weights"


class Incoming(Protocol):
    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def body(self) -> bytes: ...
    @property
    def host(self) -> str: ...


class Pipe(Protocol):
    """To a client that waits: bytes of HTTP."""

    def push(self, data: bytes) -> None: ...
    def end(self) -> None: ...


class Carrier(Protocol):
    """How HTTP is spoken."""

    def answer(self, status: int, body: bytes, content_type: str, headers: Headers) -> Any: ...
    def to_bytes(self, status: int, body: bytes, content_type: str, headers: Headers) -> bytes: ...
    def head(self, content_type: str) -> bytes: ...
    def pipe(self, gone: Callable[[], None]) -> Pipe: ...


class Answerer(Protocol):
    """driver.Driver."""

    most: int
    failure: str

    def reserve(self, count: int) -> bool: ...
    def give_back(self, count: int) -> None: ...
    def send(
        self, requests: tuple[Request, ...], sink: Callable[[Event], None], failed: Callable[[str, bool], None]
    ) -> None: ...
    def abort(self, requests: tuple[Request, ...]) -> None: ...


class Weights(Protocol):
    """weights.Loader."""

    def load(self, body: bytes, reply: Callable[[int, bytes], None]) -> None: ...


class Front:
    """`names`: hosts that a client may call us by without a key (empty: any); `key`: the API key (empty: none is needed);
    `numbers`: the page of /metrics; `weights`: what loads new ones (None: nobody may), and `token`, where there is no key,
    what those have to send who ask for it; `now`: the version and digest of the weights; `about`: what
    those are told, too, who ask for it.
    """

    def __init__(
        self,
        served: api.Served,
        driver: Answerer,
        carrier: Carrier,
        *,
        key: str = "",
        names: tuple[str, ...] = (),
        numbers: Callable[[], str] = str,
        weights: Weights | None = None,
        token: str = "",
        now: Callable[[], tuple[int, str]] = lambda: (0, ""),
        about: Mapping[str, str] | None = None,
    ) -> None:
        self._served, self._driver, self._carrier = served, driver, carrier
        self._key, self._names, self._numbers = key, names, numbers
        self._weights, self._token, self._now, self._about = weights, token, now, about or {}
        self.turned_away = 0
        self._bodies: queue.SimpleQueue[_Exchange | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_bodies, name="reading", daemon=True)

    def start(self) -> None:
        self._reader.start()

    def stop(self) -> None:
        self._bodies.put(None)
        self._reader.join()

    def answer(self, request: Incoming) -> Any:
        """Without waiting for anything."""
        if refused := self._refused(request):
            return self._error(*refused)
        pages = {"/health": self._health, "/metrics": self._metrics, "/v1/models": self._models}
        posts = {"/v1/completions": False, "/v1/chat/completions": True}
        if request.path == WEIGHTS and request.method in ("GET", "POST"):
            return self._said(self._versions()) if request.method == "GET" else self._new_weights(request)
        if request.path in pages or request.path in posts:
            wanted = "GET" if request.path in pages else "POST"
            if request.method != wanted:
                return self._error(405, f"{request.path} takes {wanted}", (("Allow", wanted),))
            return pages[request.path]() if wanted == "GET" else self._ask(request, posts[request.path])
        if request.path == WEIGHTS:
            return self._error(405, f"{WEIGHTS} takes GET and POST", (("Allow", "GET, POST"),))
        there = ", ".join([*posts, *pages, WEIGHTS])
        return self._error(404, f"no such path: {printable(request.path, 80)}; there are {there}")

    def _refused(self, request: Incoming) -> tuple[int, str] | None:
        if self._key:
            if not _has_key(request, self._key) and request.path != "/health":
                return 401, "wrong or missing API key: send it as `Authorization: Bearer KEY`"
        elif self._names and request.host not in self._names:
            # a page of another site whose name was turned to this machine
            return 403, f"this server answers to {', '.join(self._names)} only"
        return None

    def _unfit(self, request: Incoming) -> Any:
        """What is wrong with a POST as such; None: nothing."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON:  # a page of another site can't send this without asking first
            return self._error(415, f"the body must be {JSON}")
        if self._driver.failure:
            return self._error(503, "the engine failed; see the server's log")
        return None

    def _versions(self) -> dict[str, Any]:
        version, digest = self._now()
        told: dict[str, Any] = {"version": version, "digest": digest}
        return told if self._weights is None else {**told, **self._about}

    def _new_weights(self, request: Incoming) -> Any:
        if self._weights is None:
            return self._error(
                403, "this server accepts no new weights: start it with --weights-from FOLDER or --weights-group HOST"
            )
        if not self._key and not (self._token and _has_key(request, self._token)):
            return self._error(401, "wrong or missing token: the server printed it when it started")
        if unfit := self._unfit(request):
            return unfit
        pipe = self._carrier.pipe(lambda: None)  # who leaves does not change what was asked for

        def reply(status: int, body: bytes) -> None:
            pipe.push(self._carrier.to_bytes(status, body, JSON, ()))
            pipe.end()

        self._weights.load(request.body, reply)
        return pipe

    def _ask(self, request: Incoming, is_chat: bool) -> Any:
        if unfit := self._unfit(request):
            return unfit
        exchange = _Exchange(self, request.body, is_chat)
        exchange.pipe = self._carrier.pipe(exchange.gone)
        self._bodies.put(exchange)
        return exchange.pipe

    def _read_bodies(self) -> None:
        """Long prompts take their time: in a thread of their own, so that nobody else waits."""
        while (exchange := self._bodies.get()) is not None:
            exchange.begin()

    def _health(self) -> Any:
        if self._driver.failure:
            return self._error(503, "the engine failed; see the server's log")
        return self._said({"status": "ok"})

    def _models(self) -> Any:
        model = {"id": self._served.name, "object": "model", "created": 0, "owned_by": "stoker"}
        return self._said({"object": "list", "data": [{**model, "max_model_len": self._served.length}]})

    def _metrics(self) -> Any:
        return self._carrier.answer(200, self._numbers().encode(), PLAIN, ())

    def _said(self, told: dict[str, Any]) -> Any:
        return self._carrier.answer(200, json.dumps(told).encode(), JSON, ())

    def _error(self, status: int, line: str, headers: Headers = ()) -> Any:
        return self._carrier.answer(status, api.error(line, status), JSON, headers)


def _has_key(request: Incoming, key: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # headers are read as latin-1, whatever their bytes mean
    is_known = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
    return scheme.lower() == "bearer" and is_known


class _Exchange:
    """A body, from its reading to the last piece of its answer. Threads: the reader's, then the engine's; `gone` from any."""

    def __init__(self, front: Front, body: bytes, is_chat: bool) -> None:
        self._front, self._body, self._is_chat = front, body, is_chat
        self._lock = threading.Lock()
        self._asked: api.Asked | None = None
        self._reply: api.Reply | None = None
        self._is_gone = self._is_begun = False
        self.pipe: Any = None

    def gone(self) -> None:
        """The client left, or has everything."""
        with self._lock:
            self._is_gone = True
            asked, self._body = self._asked, b""
        if asked is not None and self._reply is not None and not self._reply.is_done:
            self._front._driver.abort(asked.requests)

    def _taken(self) -> bytes | None:
        """The body. None: its client left; who sends bodies and leaves must not make others wait."""
        with self._lock:
            body, self._body = self._body, b""
            return None if self._is_gone else body

    def begin(self) -> None:
        front, driver = self._front, self._front._driver
        body = self._taken()
        if body is None:
            return
        try:
            asked = api.read(body, self._is_chat, front._served)
            if len(asked.requests) > driver.most:
                raise api.Problem(
                    f"{len(asked.requests)} answers are too many: this server takes {driver.most} at a time", key="n"
                )
        except api.Problem as problem:
            self._fail(problem.line, problem.status, problem.key)
            return
        except Exception as problem:  # one body must not end the thread that reads all
            self._fail(f"the request could not be read: {type(problem).__name__}", 500)
            return
        if not driver.reserve(len(asked.requests)):
            front.turned_away += 1
            line = f"the queue is full ({driver.most} answers): try again later"
            self._fail(line, 429, headers=(("Retry-After", str(RETRY_S)),))
            return
        with self._lock:
            if self._is_gone:
                driver.give_back(len(asked.requests))
                return
            self._asked, self._reply = asked, api.Reply(asked, front._served)
            driver.send(asked.requests, self._take, self._failed)

    def _take(self, event: Event) -> None:
        assert self._reply is not None and self._asked is not None
        data = self._reply.take(event)
        carrier = self._front._carrier
        if self._is_gone or event.finish == ABORTED:
            return
        if self._reply.is_too_long:
            self._is_gone = True
            self._failed("the tokens of its answers are too long: ask for fewer answers, tokens or alternatives", True)
            self._front._driver.abort(self._asked.requests)
            return
        if data:
            if not self._is_begun:
                self._is_begun = True
                data = carrier.head(EVENTS) + data
            self.pipe.push(data)
        if self._reply.is_done:
            if not self._asked.stream:
                self.pipe.push(carrier.to_bytes(200, self._reply.whole(), JSON, ()))
            self.pipe.end()

    def _failed(self, line: str, theirs: bool) -> None:
        if self._is_begun:
            self.pipe.push(b"data: " + api.error(line, 500) + b"\n\n")
            self.pipe.end()
        else:
            self._fail(line, 400 if theirs else 500)

    def _fail(self, line: str, status: int, key: str = "", headers: Headers = ()) -> None:
        self.pipe.push(self._front._carrier.to_bytes(status, api.error(line, status, key), JSON, headers))
        self.pipe.end()
