"""Sends the ranks' output and the agent's messages to the coordinator, and slows down ranks that flood it."""

from __future__ import annotations

import os
import selectors
import time

from stoker.contract import protocol
from stoker.control.agent.spawn import RankProcess

CHUNK = 1 << 18
# Bytes that may wait to be sent. Above this, no output of ranks is read, so that a rank that floods us blocks.
MAX_BACKLOG = 8 << 20
REST_S = 0.1
FLOOD_BYTES = 1 << 16  # a chunk this large is a flood, which is read without a rest


class Relay:
    """The outbox to the coordinator, and the output streams of the ranks."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self.outbox = bytearray()
        self.is_broken = False  # the coordinator has closed its end
        self.streams: dict[int, RankProcess] = {}
        self._resting: dict[int, float] = {}  # stream that was just read -> when to read it again
        self._is_paused = False

    def send(self, message: protocol.Message, payload: bytes = b"") -> None:
        """Put a message into the outbox."""
        self.outbox += protocol.encode_message(message, payload)

    def flush(self) -> None:
        """Write as much as the coordinator's pipe takes. While more than MAX_BACKLOG waits, don't read the ranks' output."""
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
                    self._set_listening(fd, not must_pause)

    def add(self, rank: RankProcess) -> None:
        """Begin to read a rank's output."""
        for fd in rank.streams:
            self.streams[fd] = rank
            if not self._is_paused:
                self._set_listening(fd, True)

    def read(self, fd: int) -> int:
        """Read one chunk of a stream. Return its size in bytes, or 0 if there is nothing to read now."""
        rank = self.streams.get(fd)
        if rank is None:  # an event of the same batch has closed it, when the rank's end was collected
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
            self._set_listening(fd, False)
        os.close(fd)

    def _set_listening(self, fd: int, is_listening: bool) -> None:
        if is_listening:
            self._selector.register(fd, selectors.EVENT_READ, "stream")
        else:
            self._selector.unregister(fd)

    def rest(self, fd: int) -> None:
        """Don't read a stream until the next tenth of a second. A rank that prints 50 lines a second then wakes us 10 times."""
        if fd in self.streams and fd not in self._resting and not self._is_paused:
            self._set_listening(fd, False)
            self._resting[fd] = (time.monotonic() // REST_S + 1) * REST_S  # all streams wake together

    def wake(self, now: float) -> None:
        """Listen again to the streams whose rest is over."""
        for fd in [fd for fd, until in self._resting.items() if now >= until]:
            del self._resting[fd]
            if not self._is_paused:
                self._set_listening(fd, True)

    @property
    def next_wake(self) -> float | None:
        return min(self._resting.values()) if self._resting else None
