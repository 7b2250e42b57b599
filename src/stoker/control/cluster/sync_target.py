"""The conversation with a program of ours on another host: the receiver of a copy, or the gauges. Nothing is installed there.

It speaks every second: one that stays silent is lost, and so is one that reads nothing any more.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections import deque

from stoker.contract import protocol
from stoker.contract.text import escape, escape_lines
from stoker.control.cluster import agent_zip, transport
from stoker.control.cluster.hosts import Host, Hosts
from stoker.control.cluster.ssh import explain

_CHUNK = 1 << 18
_COMPLAINTS = 1 << 16  # bytes of its stderr that are kept: only a few lines are ever shown
GREETING_S = 60.0  # a login, and the start of Python from a slow disk


class SyncTimeout(Exception):
    """It has said nothing for too long."""


class SyncRefused(Exception):
    """The far end's own line."""


class SyncTarget:
    """Starts the program, and listens while it sends: else what the far end says could fill the pipe, and both would wait."""

    def __init__(self, host: Host, hosts: Hosts, module: str, silence_s: float, *words: str) -> None:
        """Call `start` next. Raises OSError if there is no ssh client. `words` are for `boot` of the module."""
        self._host = host
        self._files = agent_zip.pack()
        code = ("-I", "-S", "-c", agent_zip.unpack(module), agent_zip.announced(self._files))
        argv = transport.transport_for(host, hosts).python(host, hosts, [*code, *words])
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        assert self._process.stdin is not None and self._process.stdout is not None and self._process.stderr is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._errors = self._process.stderr.fileno()  # -1: it is closed
        self._complaints = b""
        os.set_blocking(self._to, False)
        os.set_blocking(self._errors, False)
        self._decoder = protocol.Decoder(expect_sentinel=True)
        self._answers: deque[tuple[protocol.Message, bytes]] = deque()
        self._silence_s = silence_s
        self._heard = time.monotonic()

    @property
    def greeted(self) -> bool:
        return self._decoder.greeted

    def start(self) -> None:
        self.send(self._files)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def why(self, problem: Exception) -> str:
        """Say why the conversation ended with `problem`. Empty: the connection broke without a word."""
        if isinstance(problem, (SyncRefused, SyncTimeout)):
            return str(problem)
        if isinstance(problem, protocol.ProtocolError):
            return f"it is broken: {problem}" if self.greeted else str(problem)
        try:
            code: int | None = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            code = None
        while self._errors >= 0 and len(self._complaints) < _COMPLAINTS and self._take_complaint():
            pass
        complaints = escape_lines(self._complaints.decode("utf-8", "replace"))
        if self.greeted and not complaints:
            return ""
        return explain(self._host.name, complaints, code).removeprefix(f"host {self._host.name}: ")

    def send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            if not self._wait(sending=True):
                continue
            try:
                left = left[os.write(self._to, left[:_CHUNK]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                until = time.monotonic() + self._silence_s
                while time.monotonic() < until:
                    self._wait(sending=False)  # it may have said why before it ended
                raise

    def answer(self) -> tuple[protocol.Message, bytes]:
        while not self._answers:
            self._wait(sending=False)
        return self._answers.popleft()

    def _wait(self, sending: bool) -> bool:
        """Until it says something, which is taken in, or (`sending`) may be written to: then True."""
        limit = self._silence_s if self.greeted else GREETING_S
        ready = select.poll()  # select() knows no descriptor above 1023
        ready.register(self._from, select.POLLIN)
        if self._errors >= 0:
            ready.register(self._errors, select.POLLIN)
        if sending:
            ready.register(self._to, select.POLLOUT)
        left = self._heard + limit - time.monotonic()
        events = dict(ready.poll(max(0.0, left) * 1000.0))
        if self._errors in events:
            self._take_complaint()
        if self._from in events:
            self._take_in()
        elif time.monotonic() - self._heard >= limit:
            raise SyncTimeout(f"nothing was heard from it for {limit:.0f} s")
        return self._to in events

    def _take_complaint(self) -> bool:
        """Read from its stderr and keep the first 64 KB. Return whether there was any."""
        try:
            data = os.read(self._errors, _CHUNK)
        except BlockingIOError:
            return False
        self._complaints += data[: _COMPLAINTS - len(self._complaints)]
        if not data:
            self._errors = -1
        return bool(data)

    def _take_in(self) -> None:
        data = os.read(self._from, _CHUNK)
        if not data:
            raise EOFError("the other side ended")
        self._heard = time.monotonic()
        for message, payload in self._decoder.feed(data):
            if message.get("is") == "refused":
                raise SyncRefused(escape(message["line"]))
            if message.get("is") != "ping":
                self._answers.append((message, payload))
