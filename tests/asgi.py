"""Calls an ASGI application as uvicorn does, without a socket."""

from __future__ import annotations

import asyncio
from typing import Any


class Exchange:
    """One request; `status` and `body` are what came back so far."""

    def __init__(self, path: str, body: bytes, method: str = "POST") -> None:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        self._scope = {"type": "http", "method": method, "path": path, "headers": headers}
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.status, self.body = 0, b""

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def run(self, app: Any) -> None:
        await app(self._scope, self._incoming.get, self._send)

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self.status
            self.status = message["status"]
        self.body += message.get("body", b"")
