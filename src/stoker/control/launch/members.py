"""The coordinator's side of its agents: reads and writes without blocking, knows when one is gone."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Callable

from stoker.contract import protocol
from stoker.control.cluster.transport import Link

_CHUNK = 1 << 20


class Member:
    """One host's agent."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.host = link.host
        self.decoder = protocol.Decoder(expect_sentinel=True)
        self.outbox = bytearray(link.first_bytes)
        self.heard = time.monotonic()
        self.gone: str = ""  # why we lost it
        self._lock = threading.RLock()  # the pinger writes too
        self.complaint = ""  # the last thing it wrote to stderr

    def say(self, message: protocol.Message) -> None:
        with self._lock:
            if not self.gone:
                self.outbox += protocol.encode(message)
                self.flush()

    def flush(self) -> None:
        with self._lock:
            try:
                while self.outbox:
                    del self.outbox[: os.write(self.link.orders, bytes(self.outbox[:65536]))]
            except BlockingIOError:
                return
            except OSError as problem:
                self.lose(f"its pipe is closed ({problem.strerror})")

    def lose(self, why: str) -> None:
        with self._lock:
            if not self.gone:
                self.gone = why
                self.outbox.clear()

    def retire(self) -> None:
        """The last word is said. Under the lock: a ping must not go to a descriptor that is somebody else's by then."""
        with self._lock:
            self.flush()
            self.lose("closed")
            os.close(self.link.orders)


Hear = Callable[[Member, protocol.Message, bytes], None]
Complain = Callable[[Member, str], None]


class Members:
    """All agents of a run, in rank order."""

    def __init__(self, members: list[Member], hear: Hear, complain: Complain) -> None:
        self.all = members
        self._hear = hear
        self._complain = complain
        self._selector = selectors.DefaultSelector()
        for member in members:
            self._selector.register(member.link.answers, selectors.EVENT_READ, (self._read, member))
            self._selector.register(member.link.errors, selectors.EVENT_READ, (self._read_errors, member))
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        # A thread of its own: a log file on a stalled NFS holds the main loop up, and the agents must not take that for death.
        self._closing = threading.Event()
        threading.Thread(target=self._ping, name="ping", daemon=True).start()

    def _ping(self) -> None:
        while not self._closing.wait(protocol.PING_S):
            self.say({"do": "ping"})

    def say(self, message: protocol.Message) -> None:
        for member in self.all:
            member.say(message)

    def pump(self, seconds: float) -> None:
        """Waits for the next word, from agents or a signal, for at most so long, and delivers it."""
        for member in self.all:
            if member.outbox:
                member.flush()
        ready = self._selector.select(min(seconds, protocol.PING_S))
        now = time.monotonic()  # before the words are handled: time spent on those is not the agents' silence
        for key, _ in ready:
            if key.data is None:
                os.read(self._wake_read, 4096)
            else:
                read, member = key.data
                read(member)
                member.heard = now
        for member in self.all:
            if not member.gone and now - member.heard > protocol.SILENCE_S:
                self._lose(member, f"it has been silent for {protocol.SILENCE_S:.0f} s")

    def _read(self, member: Member) -> None:
        try:
            data = os.read(member.link.answers, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._read_errors(member)
            last = member.complaint or member.decoder.greeting.decode("utf-8", "replace").strip().rpartition("\n")[2]
            self._lose(member, "it ended" + (f": {last}" if last else ""))
            return
        try:
            for message, payload in member.decoder.feed(data):
                self._hear(member, message, payload)
        except protocol.ProtocolError as problem:
            self._lose(member, str(problem))

    def _read_errors(self, member: Member) -> None:
        if member.link.errors not in self._selector.get_map():
            return
        try:
            data = os.read(member.link.errors, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(member.link.errors)
            return
        for line in data.decode("utf-8", "replace").splitlines():
            if line.strip():
                member.complaint = line.strip()
                self._complain(member, line)

    def _lose(self, member: Member, why: str) -> None:
        member.lose(why)
        if member.link.answers in self._selector.get_map():
            self._selector.unregister(member.link.answers)

    def close(self) -> None:
        """Tells every agent to end and waits for it; an agent that does not is left to its guardian, which sees the pipe close."""
        self._closing.set()
        self.say({"do": "close"})
        deadline = time.monotonic() + 3.0
        waiting = {member.link.pid for member in self.all}
        for member in self.all:
            member.retire()
        while waiting and time.monotonic() < deadline:
            for pid in list(waiting):
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    waiting.discard(pid)
            if waiting:
                time.sleep(0.001)
        for member in self.all:
            os.close(member.link.answers)
            os.close(member.link.errors)
        signal.set_wakeup_fd(-1)
