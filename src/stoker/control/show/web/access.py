"""Who may ask: the token in the printed address, the cookie it is exchanged for, the names we are called by. Pure.

A page of another site can make a browser here send requests to this port, under our address or under a name of its own that
leads to it. It has no cookie of ours (SameSite=Strict), its Host or its Origin is foreign, and it can't send JSON.

Cookies know no ports: a browser sends one of 127.0.0.1:9910 to whoever listens on 127.0.0.1:6006, too. So ours belongs to a
path that nobody can guess, and everything is below it: no other server is asked for that path, so none sees the cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
from urllib.parse import quote

from stoker.control.show import http_server
from stoker.control.show.http_server import HttpRequest, HttpResponse

_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
CLOSED = f"{_POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# What a run wrote: it may look as it likes, and do nothing. An opaque origin of its own, no script, nothing loaded.
SANDBOX = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
_REFUSED = b"""<!doctype html><meta charset="utf-8"><title>stoker web</title>
<h1>403: no access</h1><p>Open the address that <code>stoker web</code> printed: it has a token in it.</p>
<p>If you have just done so: <a href="">continue</a>.</p>
"""


def safe(policy: str = CLOSED) -> tuple[tuple[str, str], ...]:
    return (
        ("Content-Security-Policy", policy),
        ("Referrer-Policy", "no-referrer"),
        ("X-Frame-Options", "DENY"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Cross-Origin-Opener-Policy", "same-origin"),
    )


class AccessGuard:
    """`run`: the one that the printed address opens; empty: the list."""

    def __init__(self, listening: socket.socket, run: str = "") -> None:
        self.token, self._session, place = (secrets.token_urlsafe(32) for _ in range(3))
        self.base = f"/{place}/"  # the page's own address, known to the browser that had the token
        self._first = f"{self.base}#run/{quote(run, safe='')}" if run else self.base
        self._cookie = f"stoker-web-{listening.getsockname()[1]}"
        self._names: tuple[str, ...] = http_server.LOCAL_NAMES
        self._any_address = not http_server.is_loopback(listening)
        if self._any_address:
            name = os.uname().nodename.lower()
            self._names += (name, name.partition(".")[0], socket.getfqdn().lower())

    def refused(self, request: HttpRequest) -> HttpResponse | None:
        """None: it may have an answer. The token comes first, and only with a GET of the page."""
        if not self._is_our_name(request.host) or self._is_foreign(request):
            return http_server.error_response(403, *safe())
        if self._is(request.query.get("token", ""), self.token) and (request.method, request.path) == ("GET", "/"):
            return None
        here = self._is(request.path[: len(self.base)], self.base)
        if not here or not any(self._is(value, self._session) for value in self._cookies(request)):
            return HttpResponse(403, _REFUSED, "text/html; charset=utf-8", safe())
        return None

    def exchange(self, request: HttpRequest) -> HttpResponse | None:
        """The token becomes a cookie, and leaves the address."""
        if request.path != "/":
            return None
        cookie = f"{self._cookie}={self._session}; HttpOnly; SameSite=Strict; Path={self.base}"
        return HttpResponse(303, headers=(*safe(), ("Set-Cookie", cookie), ("Location", self._first)))

    def may_act(self, request: HttpRequest) -> bool:
        """Return whether a request that `refused` let pass may do more than read.

        A browser sends the origin with every POST, and JSON to another site only after that site has agreed.
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        return bool(request.headers.get("origin")) and content_type == "application/json"

    def _is_our_name(self, name: str) -> bool:
        """An address is none that a name server could turn on us."""
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return self._any_address

    def _is_foreign(self, request: HttpRequest) -> bool:
        origin = request.headers.get("origin")
        return origin is not None and origin.lower() != f"http://{request.headers.get('host', '').lower()}"

    def _cookies(self, request: HttpRequest) -> list[str]:
        """All of our name: another server of this host may have set one, too, which must not hide ours."""
        pairs = (part.strip().partition("=") for part in request.headers.get("cookie", "").split(";"))
        return [value for name, _, value in pairs if name == self._cookie]

    @staticmethod
    def _is(given: str, secret: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())
