"""Checks in a thread whether a role is ready and stays healthy, so that a hanging server does not hold up the job."""

from __future__ import annotations

import http.client
import math
import os
import re
import socket
import threading
import time
from collections.abc import Sequence

from stoker.contract import listeners, safe_io
from stoker.contract.frozen import frozen
from stoker.contract.text import escape
from stoker.control.record import run_record
from stoker.control.roles.role import ReadyRule

READY_CHECK_S = 0.25  # time between two checks until the role is ready
CONNECT_S = 2.0
MAX_FAILED_CHECKS = 3  # consecutive failures that make a role unhealthy
_MAX_ANSWER = 1 << 20  # bytes

# Counters of answered requests and generated tokens in Prometheus' text format: vLLM, SGLang, TGI, and servers of users.
_COUNTERS = {
    "requests": (
        "vllm:request_success_total", "sglang:num_requests_total", "tgi_request_success", "requests_total",
        "stoker_serve_answers_total",
    ),
    "tokens": (
        "vllm:generation_tokens_total", "sglang:generation_tokens_total", "tgi_request_generated_tokens_sum",
        "generated_tokens_total", "stoker_serve_tokens_total",
    ),
}  # fmt: skip
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]{0,199})(?:\{[^\n]*\})?[ \t]+(\S{1,40})(?:[ \t]+-?\d{1,20})?[ \t\r]*", re.ASCII)


@frozen
class ServedCounts:
    """The requests and tokens that a server has processed."""

    requests: int = 0
    tokens: int = 0


class ReadyWatch:
    """Watches the replicas of one start of a role. It is ready when all of them are.

    Its public attributes are written by the thread and read by the job.
    """

    def __init__(
        self, rule: ReadyRule, addresses: Sequence[tuple[str, int]], start_time: float, replicas: int, here: bool = True
    ) -> None:
        """`here`: the replicas are on this machine, where another user may take a port before the role does."""
        self.ready = threading.Event()
        self.problem = ""  # found by the newest check
        self.problem_since = 0.0  # time of the first of the consecutive failed checks
        self.unhealthy = ""  # why a role that was ready became unhealthy
        self.checks = 0
        self.served_counts: tuple[ServedCounts | None, ...] = ()  # by replica, if the rule has a metrics page
        self.run_dir = ""  # run directory of the role, once it is known
        self._rule = rule
        self._addresses = addresses
        self._start_time = start_time
        self._replicas = replicas
        self._here = here
        self._closed, self._wake = threading.Event(), threading.Event()
        if rule.kind != "line":
            threading.Thread(target=self._watch, name="ready", daemon=True).start()

    @property
    def max_check_s(self) -> float:
        """The longest time until a requested check has ended. Another check may run before it."""
        return 2 * self._rule.answer_timeout_s if self._rule.kind == "http" else 2 * CONNECT_S

    @property
    def repeats(self) -> bool:
        """Whether the checks continue after the role is ready."""
        return self._rule.check_interval_s > 0

    def read_line(self, line: bytes) -> None:
        """Make the role ready if this line of its output satisfies a `line` rule."""
        if self._rule.kind == "line" and self._rule.value.encode() in line:
            self.ready.set()

    def check_now(self) -> None:
        self._wake.set()

    def close(self) -> None:
        self._closed.set()
        self._wake.set()

    def _watch(self) -> None:
        failed_checks = 0
        while True:
            self._wake.wait(READY_CHECK_S if not self.ready.is_set() else self._rule.check_interval_s)
            if self._closed.is_set():
                return
            self._wake.clear()
            check_time = time.time()
            try:
                problem = self._check()
            except Exception as error:  # a thread's traceback would not reach the user
                problem = f"{type(error).__name__}: {escape(str(error), 200)}"
            self.problem_since = self.problem_since if self.problem else check_time
            self.problem = problem
            self.checks += 1
            if not problem:
                failed_checks = 0
                self.ready.set()
                if self._rule.metrics:
                    self.served_counts = tuple(self._read_counts(host, port) for host, port in self._addresses)
            elif self.ready.is_set():
                failed_checks += 1
                if failed_checks == MAX_FAILED_CHECKS:
                    self.unhealthy = problem
                    return
            if self.ready.is_set() and not self._rule.check_interval_s:
                return

    def _check(self) -> str:
        """Return why the rule is not satisfied, or "" if it is."""
        if self._rule.kind == "file":
            return self._check_file(self._rule.value)
        if self._rule.kind == "mark":
            return self._check_marks(self._rule.value)
        for host, port in self._addresses:
            problem = self._check_owner(host, port)
            if not problem:
                problem = self._check_port(host, port) if self._rule.kind == "port" else self._check_http(host, port)
            if problem:
                return problem
        return ""

    def _check_file(self, path: str) -> str:
        try:
            link, status = os.lstat(path), os.stat(path)
        except OSError as problem:
            return f"{path}: {problem.strerror}"
        for uid in (link.st_uid, status.st_uid):  # another user's link may point to any file
            if not safe_io.is_trusted(uid, os.path.dirname(path)):
                return f"{path} belongs to {safe_io.user_name(uid)}"
        return "" if status.st_mtime >= self._start_time - 1.0 else f"{path} is older than this start"

    def _check_marks(self, name: str) -> str:
        ranks = set()
        for event in run_record.read_events(self.run_dir) if self.run_dir else ():
            if event["event"] == "mark" and event.get("name") == name and event["time"] >= self._start_time:
                ranks.add(event.get("rank"))
        return (
            ""
            if len(ranks) >= self._replicas
            else f"{len(ranks)} of {self._replicas} ranks have called stoker.mark({name!r})"
        )

    def _check_owner(self, host: str, port: int) -> str:
        """Return a problem if another user of this machine listens on the port: it could respond in the role's place."""
        if not self._here:
            return ""
        users = listeners.find_listening_users(host, port)
        others = sorted(uid for uid in users if not safe_io.is_trusted(uid, os.curdir))
        return f"port {port} is in use by {safe_io.user_name(others[0])}" if others else ""

    def _check_port(self, host: str, port: int) -> str:
        try:
            with socket.create_connection((host, port), CONNECT_S):
                return ""
        except OSError as problem:
            return f"{host}:{port}: {problem.strerror or problem}"

    def _check_http(self, host: str, port: int) -> str:
        rule = self._rule
        url = f"{host}:{port}{rule.value}"
        connection = http.client.HTTPConnection(host, port, timeout=rule.answer_timeout_s)
        started = time.monotonic()
        try:
            headers = {"Content-Type": "application/json"} if rule.body else {}
            connection.request("POST" if rule.body else "GET", rule.value, rule.body or None, headers)
            response = connection.getresponse()
            body = response.read(_MAX_ANSWER)
        except TimeoutError:
            return f"{url}: no response within {time.monotonic() - started:.0f} s"
        except (OSError, http.client.HTTPException) as problem:
            return f"{url}: {escape(str(problem), 200) or type(problem).__name__}"
        finally:
            connection.close()
        if not 200 <= response.status < 300:
            return f"{url}: HTTP status {response.status}"
        if rule.contains and rule.contains.encode() not in body:
            return f"{url}: its response does not contain {rule.contains!r}"
        return ""

    def _read_counts(self, host: str, port: int) -> ServedCounts | None:
        """Return what a replica has served, or None. A missing metrics page does not make a role unhealthy."""
        connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        try:
            connection.request("GET", self._rule.metrics)
            response = connection.getresponse()
            text = response.read(_MAX_ANSWER)
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return parse_served_counts(text.decode("utf-8", "replace")) if response.status == 200 else None


def parse_served_counts(text: str) -> ServedCounts | None:
    """Return the counts of a page in Prometheus' text format, or None if it has neither count.

    All samples of a counter are added: it has one for each model, or for each reason why a request ended.
    """
    counts: dict[str, float] = {}
    for line in text.split("\n"):
        if line.startswith("#") or not (sample := _SAMPLE.fullmatch(line)):
            continue
        name, number = sample.groups()
        kind = next((kind for kind, names in _COUNTERS.items() if name in names), "")
        try:
            value = float(number) if kind else 0.0
        except ValueError:
            continue
        if kind and math.isfinite(value) and 0 <= value < 1e18:
            counts[kind] = counts.get(kind, 0.0) + value
    return ServedCounts(**{kind: int(value) for kind, value in counts.items()}) if counts else None
