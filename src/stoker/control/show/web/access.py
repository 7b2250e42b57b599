"""Checks access to the page: the token in the printed address, the cookie that replaces it, and the accepted host names.

A page of another site can make a browser send requests to this port, by our address or by a name that resolves to it. Such
a request lacks our cookie (SameSite=Strict), has a foreign Host or Origin, and can't send JSON.

Cookies ignore ports: a browser sends a cookie of 127.0.0.1:9910 to a server on 127.0.0.1:6006, too. Therefore our cookie is
limited to a secret path that all our pages share, which the browser never requests from another server.
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
PAGE_POLICY = f"{_POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# HTML that a run wrote may use inline styles and data images, but no script and no other file, and gets an opaque origin.
SANDBOX = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
_REFUSED = b"""<!doctype html><meta charset="utf-8"><title>stoker web</title>
<h1>403: no access</h1><p>Open the address that <code>stoker web</code> printed: it contains a token.</p>
<p>If you have just done so: <a href="">continue</a>.</p>
"""


def security_headers(policy: str = PAGE_POLICY) -> tuple[tuple[str, str], ...]:
    return (
        ("Content-Security-Policy", policy),
        ("Referrer-Policy", "no-referrer"),
        ("X-Frame-Options", "DENY"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Cross-Origin-Opener-Policy", "same-origin"),
    )


class AccessGuard:
    """Decides which requests get an answer. The printed address opens `run`, or the list of runs if it is empty."""

    def __init__(self, listening: socket.socket, run: str = "") -> None:
        self.token, self._session, path = (secrets.token_urlsafe(32) for _ in range(3))
        self.base = f"/{path}/"  # path of the page, which only browsers that had the token know
        self._first_page = f"{self.base}#run/{quote(run, safe='')}" if run else self.base
        self._cookie = f"stoker-web-{listening.getsockname()[1]}"
        self._names: tuple[str, ...] = http_server.LOCAL_NAMES
        self._accepts_any_address = not http_server.is_loopback(listening)
        if self._accepts_any_address:
            name = os.uname().nodename.lower()
            self._names += (name, name.partition(".")[0], socket.getfqdn().lower())

    def check_access(self, request: HttpRequest) -> HttpResponse | None:
        """Return the response that refuses a request, or None if it has access.

        A GET of `/` needs the token, any other request the cookie.
        """
        if not self._is_our_name(request.host) or self._is_cross_origin(request):
            return http_server.error_response(403, *security_headers())
        if _equal(request.query.get("token", ""), self.token) and (request.method, request.path) == ("GET", "/"):
            return None
        is_below_base = _equal(request.path[: len(self.base)], self.base)
        if not is_below_base or not any(_equal(value, self._session) for value in self._cookies(request)):
            return HttpResponse(403, _REFUSED, "text/html; charset=utf-8", security_headers())
        return None

    def make_token_redirect(self, request: HttpRequest) -> HttpResponse | None:
        """Return the redirect that sets the cookie and drops the token from the address, or None if the path is not `/`."""
        if request.path != "/":
            return None
        cookie = f"{self._cookie}={self._session}; HttpOnly; SameSite=Strict; Path={self.base}"
        return HttpResponse(303, headers=(*security_headers(), ("Set-Cookie", cookie), ("Location", self._first_page)))

    def may_act(self, request: HttpRequest) -> bool:
        """Return True if a request that has access may do more than read.

        A browser sends the origin with every POST, and JSON to another site only after that site has agreed.
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        return bool(request.headers.get("origin")) and content_type == "application/json"

    def _is_our_name(self, name: str) -> bool:
        """Accept our names and, off loopback, any IP address, which no name server can redirect."""
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return self._accepts_any_address

    def _is_cross_origin(self, request: HttpRequest) -> bool:
        origin = request.headers.get("origin")
        return origin is not None and origin.lower() != f"http://{request.headers.get('host', '').lower()}"

    def _cookies(self, request: HttpRequest) -> list[str]:
        """Return the values of all cookies with our name, because another server of this host may have set one, too."""
        pairs = (part.strip().partition("=") for part in request.headers.get("cookie", "").split(";"))
        return [value for name, _, value in pairs if name == self._cookie]


def _equal(text: str, secret: str) -> bool:
    return hmac.compare_digest(text.encode("utf-8", "replace"), secret.encode())
