"""Collects and serves the page of `stoker metrics`: a background loop renders it every few seconds, a server returns it.

A scrape never reads NVML: if a driver hangs, the server returns the last page, whose timestamp shows its age.
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

CHECKS_INTERVAL_S = 300.0  # the doctor's checks run this often


class MetricsCollector:
    """Renders the page from `take_snapshot` and from the doctor's checks that `examine` runs; `log` gets each problem once."""

    def __init__(
        self,
        take_snapshot: Callable[[], Snapshot],
        examine: Callable[[], DoctorFindings],
        dcgm: str,
        log: Callable[[str], None],
    ) -> None:
        self._take_snapshot, self._run_checks, self._dcgm, self._log = take_snapshot, examine, dcgm, log
        self.page: bytes | None = None
        self._snapshot = Snapshot(time=0.0)
        self._status = CollectionStatus(False, 0.0, 0.0)
        self._findings: DoctorFindings | None = None
        self._reported = ""
        self._stopped = threading.Event()

    def start(self, interval: float) -> None:
        for work, pause in ((self.collect, interval), (self.examine, CHECKS_INTERVAL_S)):
            threading.Thread(target=self._repeat, args=(work, pause), daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _repeat(self, work: Callable[[], None], pause: float) -> None:
        while True:
            began = time.monotonic()
            work()
            if self._stopped.wait(max(pause - (time.monotonic() - began), pause / 10)):
                return

    def collect(self) -> None:
        """Take a snapshot and render the page; if that fails, render the previous snapshot again."""
        began = time.monotonic()
        try:
            snapshot = self._take_snapshot()
            status = CollectionStatus(True, snapshot.time, time.monotonic() - began)
            self.page = render(snapshot, status, self._findings, self._dcgm)
            self._snapshot, self._status, self._reported = snapshot, status, ""
        except Exception as problem:  # a failed collection must not end the loop: the next may succeed
            self._report("taking a snapshot failed", problem)
            self._status = CollectionStatus(False, self._status.time, time.monotonic() - began)
            self.page = render(self._snapshot, self._status, self._findings, self._dcgm)

    def examine(self) -> None:
        """Run the doctor's checks; their findings are on the next page."""
        try:
            self._findings = self._run_checks()
        except (Refusal, OSError) as problem:
            self._report("the doctor's checks failed", problem)

    def _report(self, failure: str, problem: Exception) -> None:
        reason = problem.line if isinstance(problem, Refusal) else f"{type(problem).__name__}: {problem}"
        if reason != self._reported:
            self._reported = reason
            self._log(f"stoker metrics: {failure}: {reason}")


class MetricsServer(http_server.HttpServer):
    """Answers GET for /metrics and /. `page` returns the newest page, or None before the first.

    Every response is a fixed text or the page, so nothing of a request is repeated in it.
    """

    def __init__(self, listening: socket.socket, page: Callable[[], bytes | None], content_type: str) -> None:
        self._page = page
        self._content_type = content_type
        # Refuse foreign host names on loopback, so that a web page in a browser here can't read the metrics under a name
        # that resolves to this address (DNS rebinding). On other addresses Prometheus may use any name.
        self._names = http_server.LOCAL_NAMES if http_server.is_loopback(listening) else ()
        super().__init__(listening, self._answer)

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
        if page is None:
            return HttpResponse(503, b"no snapshot yet\n")
        return HttpResponse(200, page, self._content_type)
