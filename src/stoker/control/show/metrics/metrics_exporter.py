"""The background loop of `stoker metrics`: a snapshot every few seconds, made into the page that scrapes get.

NVML is asked here and never in a scrape: a driver that hangs leaves the last page, whose timestamp grows old.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from stoker.contract.errors import Refusal
from stoker.control.show import http_server
from stoker.control.show.http_server import HttpRequest, HttpResponse, error_response
from stoker.control.show.metrics.metrics_page import CollectionStatus, DoctorFindings, render
from stoker.control.show.snapshot import Snapshot

EXAMINE_S = 300.0


class MetricsCollector:
    """`gather` makes a snapshot, `checks` asks the doctor. `say`: told of a problem, once."""

    def __init__(
        self,
        gather: Callable[[], Snapshot],
        checks: Callable[[], DoctorFindings],
        dcgm: str,
        say: Callable[[str], None],
    ) -> None:
        self._gather, self._checks, self._dcgm, self._say = gather, checks, dcgm, say
        self.page: bytes | None = None
        self._snapshot = Snapshot(time=0.0)
        self._collected = CollectionStatus(False, 0.0, 0.0)
        self._examined: DoctorFindings | None = None
        self._problem = ""
        self._over = threading.Event()

    def start(self, every_s: float) -> None:
        for work, pause in ((self.collect, every_s), (self.examine, EXAMINE_S)):
            threading.Thread(target=self._repeat, args=(work, pause), daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _repeat(self, work: Callable[[], None], pause: float) -> None:
        while True:
            began = time.monotonic()
            work()
            if self._over.wait(max(pause - (time.monotonic() - began), pause / 10)):
                return

    def collect(self) -> None:
        began = time.monotonic()
        try:
            snapshot = self._gather()
            collected = CollectionStatus(True, snapshot.time, time.monotonic() - began)
            self.page = render(snapshot, collected, self._examined, self._dcgm)
            self._snapshot, self._collected, self._problem = snapshot, collected, ""
        except Exception as problem:  # what is served gets older, and says so; the next collection may succeed
            self._complain("no snapshot", problem)
            self._collected = CollectionStatus(False, self._collected.time, time.monotonic() - began)
            self.page = render(self._snapshot, self._collected, self._examined, self._dcgm)

    def _complain(self, what: str, problem: Exception) -> None:
        told = problem.line if isinstance(problem, Refusal) else f"{type(problem).__name__}: {problem}"
        if told != self._problem:
            self._problem = told
            self._say(f"stoker metrics: {what}: {told}")

    def examine(self) -> None:
        try:
            self._examined = self._checks()
        except (Refusal, OSError) as problem:
            self._complain("the checks of the doctor can't be made", problem)


def describe_address(listening: socket.socket) -> str:
    return f"metrics at {http_server.url(listening, '/metrics')}"


class MetricsServer:
    """`page`: the text of the newest snapshot; None before the first."""

    def __init__(self, listening: socket.socket, page: Callable[[], bytes | None], content_type: str) -> None:
        self._page = page
        self._content_type = content_type
        # A page of a browser here must not read it under a foreign name that leads to this address (DNS rebinding).
        # On other addresses Prometheus comes by any name.
        self._names = http_server.LOCAL_NAMES if http_server.is_loopback(listening) else ()
        self._server = http_server.HttpServer(listening, self._answer)

    def serve(self, stopped: Callable[[], bool], look_s: float = 0.5) -> None:
        self._server.serve(stopped, look_s)

    def _answer(self, request: HttpRequest) -> HttpResponse:
        if request.method != "GET":
            return error_response(405, ("Allow", "GET"))
        if self._names and request.host and request.host not in self._names:
            return error_response(403)
        if request.path == "/":
            return HttpResponse(200, b"stoker metrics: the metrics are at /metrics\n")
        if request.path != "/metrics":
            return error_response(404)
        page = self._page()
        return (
            HttpResponse(200, page, self._content_type) if page is not None else HttpResponse(503, b"no snapshot yet\n")
        )
