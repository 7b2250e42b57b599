"""What `stoker metrics` answers: GET /metrics and GET /, nothing else.

Whatever arrives, the answer is a fixed text or the newest page; nothing of a request is ever repeated in it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from stoker.control.show import http_server
from stoker.control.show.http_server import HttpRequest, HttpResponse, failure


def where(listening: socket.socket) -> str:
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
            return failure(405, ("Allow", "GET"))
        if self._names and request.host and request.host not in self._names:
            return failure(403)
        if request.path == "/":
            return HttpResponse(200, b"stoker metrics: the metrics are at /metrics\n")
        if request.path != "/metrics":
            return failure(404)
        page = self._page()
        return HttpResponse(200, page, self._content_type) if page is not None else HttpResponse(503, b"no snapshot yet\n")
