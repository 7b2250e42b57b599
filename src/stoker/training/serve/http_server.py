"""Runs the application of front.py under uvicorn until a signal, or until the engine fails.

SIGTERM drains: new requests get status 503, those that are being answered may finish within the grace. Ctrl-C, SIGHUP or a
second signal ends the server immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn

from stoker.training.serve.front import App

BACKLOG = 2048  # connections that the kernel holds until they are accepted
# Longer than clients keep idle connections (httpx: 5 s): who closes first must be the client, or its next request is lost.
KEEP_ALIVE_S = 75
LAST_WORDS_S = 1.0  # for telling clients that the engine failed
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`: uvicorn's SIGTERM refuses connections and raises the signal again at the end."""
        yield


class HttpServer:
    """`received`: signals that came while the model was loaded; `grace_s`: how long SIGTERM waits for running requests."""

    def __init__(self, app: App, listening: socket.socket, received: list[int], grace_s: float) -> None:
        self._app, self._listening, self._received, self._grace_s = app, listening, received, grace_s
        self._changed = asyncio.Event()  # there is a signal, or the engine failed

    def run(self, started: Callable[[], None], has_failed: Callable[[], bool]) -> None:
        """Serve until it is over. `started` is called once clients get answers; `has_failed`: whether the engine ended."""
        asyncio.run(self._run(started, has_failed))

    async def _run(self, started: Callable[[], None], has_failed: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        self._app.calls.open(loop)
        for signum in SIGNALS:
            loop.add_signal_handler(signum, self._take_signal, signum)
        config = uvicorn.Config(
            self._app, http="h11", ws="none", lifespan="off", loop="asyncio", log_config=None, log_level="critical",
            access_log=False, server_header=False, proxy_headers=False, backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[self._listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.001)
        started()
        while not self._received and not has_failed() and not serving.done():
            await self._changed.wait()
            self._changed.clear()
        if has_failed():
            await self._finish_requests(LAST_WORDS_S, lambda: False)
        elif self._received == [signal.SIGTERM]:
            self._app.is_draining = True
            await self._finish_requests(self._grace_s, lambda: len(self._received) > 1 or has_failed())
        # A response that is complete may still be on its way out: that is what uvicorn waits for, no longer than a second.
        server.should_exit, server.force_exit = True, self._app.active > 0
        await serving
        self._app.close()

    def wake(self) -> None:
        """Look again whether the engine has failed. From any thread."""
        self._app.calls.post(self._changed.set)

    def _take_signal(self, signum: int) -> None:
        self._received.append(signum)
        self._changed.set()

    async def _finish_requests(self, seconds: float, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while self._app.active and not is_over() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
