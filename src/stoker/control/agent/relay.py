"""Carries ranks' output home, and everything else the agent says: one outbox, streams that rest, a brake on floods."""

from __future__ import annotations

import os
import selectors
import time

from stoker.contract import protocol
from stoker.control.agent.spawn import RankProcess

CHUNK = 1 << 18
BACKLOG = 8 << 20  # of unsent output: past it ranks are not read, and the flooding one waits
REST_S = 0.1
RESTLESS = 1 << 16  # a chunk this large is a flood: no rest for that


class Relay:
    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self.outbox = bytearray()
        self.broken = False  # the coordinator's end is closed
        self.streams: dict[int, RankProcess] = {}
        self._resting: dict[int, float] = {}  # streams that were just read, and when to listen to them again
        self._paused = False

    def say(self, message: protocol.Message, payload: bytes = b"") -> None:
        self.outbox += protocol.encode_message(message, payload)

    def flush(self) -> None:
        while self.outbox:
            try:
                sent = os.write(1, memoryview(self.outbox)[:CHUNK])
            except BlockingIOError:
                break
            except BrokenPipeError:
                self.outbox.clear()
                self.broken = True
                return
            del self.outbox[:sent]
        self._watch_out(bool(self.outbox))
        self._throttle(len(self.outbox) > BACKLOG)

    def _watch_out(self, wanted: bool) -> None:
        registered = 1 in self._selector.get_map()
        if wanted and not registered:
            self._selector.register(1, selectors.EVENT_WRITE, "out")
        elif registered and not wanted:
            self._selector.unregister(1)

    def add(self, rank: RankProcess) -> None:
        for handle in rank.streams:
            self.streams[handle] = rank
            if not self._paused:
                self._listen(handle, True)

    def read(self, handle: int) -> int:
        """One chunk; how many bytes it had, 0 when there is nothing more for now."""
        rank = self.streams.get(handle)
        if rank is None:  # closed by an event of the same batch: its rank's end was collected first
            return 0
        try:
            data = os.read(handle, CHUNK)
        except BlockingIOError:
            return 0
        if not data:
            self.forget(handle)
            return 0
        self.say({"is": "out", "rank": rank.rank, "fd": rank.streams[handle]}, data)
        return len(data)

    def read_all(self, handle: int) -> None:
        while handle in self.streams and self.read(handle):
            continue

    def forget(self, handle: int) -> None:
        del self.streams[handle]
        if self._resting.pop(handle, None) is None and not self._paused:
            self._listen(handle, False)
        os.close(handle)

    def _throttle(self, pause: bool) -> None:
        if pause != self._paused:
            self._paused = pause
            for handle in self.streams:
                if handle not in self._resting:
                    self._listen(handle, not pause)

    def _listen(self, handle: int, wanted: bool) -> None:
        if wanted:
            self._selector.register(handle, selectors.EVENT_READ, "stream")
        else:
            self._selector.unregister(handle)

    def rest(self, handle: int) -> None:
        """Not read for a moment: a rank that prints 50 lines a second wakes us and the coordinator 10 times."""
        if handle in self.streams and handle not in self._resting and not self._paused:
            self._listen(handle, False)
            self._resting[handle] = (time.monotonic() // REST_S + 1) * REST_S  # all streams wake together

    def wake(self, now: float) -> None:
        for handle in [handle for handle, until in self._resting.items() if now >= until]:
            del self._resting[handle]
            if not self._paused:
                self._listen(handle, True)

    @property
    def next_wake(self) -> float | None:
        return min(self._resting.values()) if self._resting else None
