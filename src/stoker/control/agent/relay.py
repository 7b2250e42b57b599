"""Sends the ranks' output and the agent's messages to the coordinator, and slows down ranks that flood it."""

from __future__ import annotations

import os
import selectors
import time

from stoker.contract import protocol
from stoker.control.agent.spawn import RankProcess

CHUNK = 1 << 18
MAX_BACKLOG = (
    8 << 20
)  # bytes not sent yet: above it no rank's output is read, so that a rank that floods us has to wait
REST_S = 0.1
FLOOD_BYTES = 1 << 16  # a chunk this large is a flood, which is read without a rest


class Relay:
    """The outbox to the coordinator, and the output streams of the ranks."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self.outbox = bytearray()
        self.is_broken = False  # the coordinator has closed its end
        self.streams: dict[int, RankProcess] = {}
        self._resting: dict[int, float] = {}  # streams that were just read, and when to read them again
        self._is_paused = False

    def send(self, message: protocol.Message, payload: bytes = b"") -> None:
        """Put a message into the outbox."""
        self.outbox += protocol.encode_message(message, payload)

    def flush(self) -> None:
        """Write what the coordinator's pipe takes, and pause the ranks' output while too much is waiting."""
        while self.outbox:
            try:
                sent = os.write(1, memoryview(self.outbox)[:CHUNK])
            except BlockingIOError:
                break
            except BrokenPipeError:
                self.outbox.clear()
                self.is_broken = True
                return
            del self.outbox[:sent]
        is_registered = 1 in self._selector.get_map()
        if self.outbox and not is_registered:
            self._selector.register(1, selectors.EVENT_WRITE, "out")
        elif is_registered and not self.outbox:
            self._selector.unregister(1)
        must_pause = len(self.outbox) > MAX_BACKLOG
        if must_pause != self._is_paused:
            self._is_paused = must_pause
            for fd in self.streams:
                if fd not in self._resting:
                    self._listen(fd, not must_pause)

    def add(self, rank: RankProcess) -> None:
        """Begin to read a rank's output."""
        for fd in rank.streams:
            self.streams[fd] = rank
            if not self._is_paused:
                self._listen(fd, True)

    def read(self, fd: int) -> int:
        """Read one chunk of a stream. Return its bytes; 0 when there is nothing more for now."""
        rank = self.streams.get(fd)
        if rank is None:  # closed by an event of the same batch: the rank's end was collected first
            return 0
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return 0
        if not data:
            self.close(fd)
            return 0
        self.send({"is": "out", "rank": rank.rank, "fd": rank.streams[fd]}, data)
        return len(data)

    def read_all(self, fd: int) -> None:
        """Read all that a stream holds now."""
        while fd in self.streams and self.read(fd):
            continue

    def close(self, fd: int) -> None:
        del self.streams[fd]
        if self._resting.pop(fd, None) is None and not self._is_paused:
            self._listen(fd, False)
        os.close(fd)

    def _listen(self, fd: int, wanted: bool) -> None:
        if wanted:
            self._selector.register(fd, selectors.EVENT_READ, "stream")
        else:
            self._selector.unregister(fd)

    def rest(self, fd: int) -> None:
        """Don't read a stream until the next tenth of a second: a rank that prints 50 lines a second wakes us 10 times."""
        if fd in self.streams and fd not in self._resting and not self._is_paused:
            self._listen(fd, False)
            self._resting[fd] = (time.monotonic() // REST_S + 1) * REST_S  # all streams wake together

    def wake(self, now: float) -> None:
        """Read the streams again whose rest is over."""
        for fd in [fd for fd, until in self._resting.items() if now >= until]:
            del self._resting[fd]
            if not self._is_paused:
                self._listen(fd, True)

    @property
    def next_wake(self) -> float | None:
        return min(self._resting.values()) if self._resting else None
