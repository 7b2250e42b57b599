"""Is a role ready, and is it still? Looked at in a thread of its own: a server that hangs must not hold up the others."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from collections.abc import Sequence

from stoker.contract import listeners, safe_io
from stoker.contract.text import escape
from stoker.control.record import run_record
from stoker.control.roles.role import Ready
from stoker.control.roles.service_address import Served, parse

LOOK_S = 0.25  # between two looks until it is ready
CONNECT_S = 2.0
MISSES = 3  # looks in a row after which it is not healthy any more
_MOST = 1 << 20  # bytes of an answer


class ReadyWatch:
    """`addresses`: of the role's replicas. All of them must be ready. `here`: they are on this machine, where anybody may
    take a port before the role does.
    """

    def __init__(
        self, rule: Ready, addresses: Sequence[tuple[str, int]], began: float, replicas: int, here: bool = True
    ) -> None:
        self.ready = threading.Event()
        self.unhealthy = ""  # why, once it was ready
        self.newest = ""  # what the newest look found
        self.wrong_since = 0.0  # the first of the looks in a row that found something
        self.looks = 0
        self.served: tuple[Served | None, ...] = ()  # by replica, where the rule names a page that counts
        self.run_dir = ""  # of the role, once it has one
        self._rule, self._addresses, self._began, self._replicas, self._here = rule, addresses, began, replicas, here
        self._lines: set[int] = set()
        self._over, self._now = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        if rule.kind != "line":
            self._thread = threading.Thread(target=self._watch, name="ready", daemon=True)
            self._thread.start()

    def printed(self, line: bytes) -> None:
        if self._rule.kind == "line" and self._rule.value.encode() in line:
            self.ready.set()

    def close(self) -> None:
        self._over.set()
        self._now.set()

    @property
    def longest_look_s(self) -> float:
        """At most; one may be under way."""
        return 2 * self._rule.answer if self._rule.kind == "http" else 2 * CONNECT_S

    @property
    def goes_on(self) -> bool:
        """Whether it is looked at again once it is ready."""
        return self._rule.check > 0

    def look_now(self) -> None:
        """Not only when it is time to."""
        self._now.set()

    def _watch(self) -> None:
        misses = 0
        while True:
            self._now.wait(LOOK_S if not self.ready.is_set() else self._rule.check)
            if self._over.is_set():
                return
            self._now.clear()
            began = time.time()
            try:
                found = self._wrong()
            except Exception as problem:  # of a thread nobody would hear of it
                found = f"{type(problem).__name__}: {escape(str(problem), 200)}"
            self.wrong_since = self.wrong_since if self.newest else began
            self.newest = found
            self.looks += 1
            if not self.newest:
                misses = 0
                self.ready.set()
                if self._rule.metrics:
                    self.served = tuple(self._counted(host, port) for host, port in self._addresses)
            elif self.ready.is_set():
                misses += 1
                if misses == MISSES:
                    self.unhealthy = self.newest
                    return
            if self.ready.is_set() and not self._rule.check:
                return

    def _wrong(self) -> str:
        """Empty: it is as it should be."""
        rule = self._rule
        if rule.kind == "file":
            try:
                link, about = os.lstat(rule.value), os.stat(rule.value)
            except OSError as problem:
                return f"{rule.value}: {problem.strerror}"
            for uid in (link.st_uid, about.st_uid):  # another user's link leads where they like
                if not safe_io.is_trusted(uid, os.path.dirname(rule.value)):
                    return f"{rule.value} belongs to {safe_io.user_name(uid)}"
            return "" if about.st_mtime >= self._began - 1.0 else f"{rule.value} is older than this start"
        if rule.kind == "mark":
            return self._unmarked()
        for host, port in self._addresses:
            wrong = self._foreign(host, port)
            wrong = wrong or (self._unconnected(host, port) if rule.kind == "port" else self._unanswered(host, port))
            if wrong:
                return wrong
        return ""

    def _unmarked(self) -> str:
        marked = set()
        for event in run_record.read_events(self.run_dir) if self.run_dir else ():
            if event["event"] == "mark" and event.get("name") == self._rule.value and event["time"] >= self._began:
                marked.add(event.get("rank"))
        return "" if len(marked) >= self._replicas else f"{len(marked)} of {self._replicas} ranks have said so"

    def _foreign(self, host: str, port: int) -> str:
        """Another user who listens there could be asked in the role's place."""
        return _in_use_by(listeners.listening_users(host, port), port) if self._here else ""

    def _unconnected(self, host: str, port: int) -> str:
        try:
            with socket.create_connection((host, port), CONNECT_S):
                return ""
        except OSError as problem:
            return f"{host}:{port}: {problem.strerror or problem}"

    def _counted(self, host: str, port: int) -> Served | None:
        """A page that is not there says nothing about the role's health: `ready` does."""
        connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        try:
            connection.request("GET", self._rule.metrics)
            answer = connection.getresponse()
            text = answer.read(_MOST)
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return parse(text.decode("utf-8", "replace")) if answer.status == 200 else None

    def _unanswered(self, host: str, port: int) -> str:
        rule = self._rule
        connection = http.client.HTTPConnection(host, port, timeout=rule.answer)
        began = time.monotonic()
        try:
            headers = {"Content-Type": "application/json"} if rule.body else {}
            connection.request("POST" if rule.body else "GET", rule.value, rule.body or None, headers)
            answer = connection.getresponse()
            text = answer.read(_MOST)
        except TimeoutError:
            return f"{host}:{port}{rule.value}: no answer within {time.monotonic() - began:.0f} s"
        except (OSError, http.client.HTTPException) as problem:
            return f"{host}:{port}{rule.value}: {escape(str(problem), 200) or type(problem).__name__}"
        finally:
            connection.close()
        if not 200 <= answer.status < 300:
            return f"{host}:{port}{rule.value}: HTTP status {answer.status}"
        if rule.contains and rule.contains.encode() not in text:
            return f"{host}:{port}{rule.value}: its answer does not contain {rule.contains!r}"
        return ""


def _in_use_by(uids: set[int], port: int) -> str:
    others = sorted(uid for uid in uids if not safe_io.is_trusted(uid, os.curdir))
    return f"port {port} is in use by {safe_io.user_name(others[0])}" if others else ""
