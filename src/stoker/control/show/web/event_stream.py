"""Viewers and their streams: one thread takes snapshots while anybody looks, and sends each viewer what has changed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from stoker.contract.errors import Refusal
from stoker.contract.text import escape
from stoker.control.show.http_server import ResponseStream
from stoker.control.show.snapshot import Snapshot
from stoker.control.show.web.page_data import State, diff_states, rank_rows, recent_utilization, shared_state

MOST_VIEWERS = 32
_LEAST_S = 0.25  # between two snapshots
EVENTS = "text/event-stream; charset=utf-8"


class _Viewer:
    def __init__(self, run: str) -> None:
        self.run = run
        self.stream: ResponseStream | None = None
        self.state: State = {}
        self.fresh = True


class EventHub:
    """`look` makes a snapshot, with these runs watched; it may take its time."""

    def __init__(self, look: Callable[[tuple[str, ...]], Snapshot], interval: float) -> None:
        self._look, self._interval = look, interval
        self._viewers: set[_Viewer] = set()
        self._lock = threading.Lock()
        self._over = False
        self._hurry = threading.Event()
        self._expected = False
        self._early: tuple[float, Snapshot] | None = None  # taken before its viewer came, and when
        self.sent = 0  # bytes, to all

    def start(self) -> None:
        threading.Thread(target=self._run, name="snapshots", daemon=True).start()

    def stop(self) -> None:
        self._over = True
        self._hurry.set()

    def expect(self) -> None:
        """A page is about to be opened: look while the browser loads its scripts. 1,000 runs take 0.4 s the first time."""
        self._expected = True
        self._hurry.set()

    def open(self, run: str, headers: tuple[tuple[str, str], ...]) -> ResponseStream | None:
        """None: there are too many already."""
        viewer = _Viewer(run)
        with self._lock:
            if len(self._viewers) >= MOST_VIEWERS:
                return None
            viewer.stream = ResponseStream(EVENTS, headers, lambda: self._leave(viewer))
            self._viewers.add(viewer)
        viewer.stream.push(b"retry: 2000\n\n")
        self._hurry.set()
        return viewer.stream

    def _leave(self, viewer: _Viewer) -> None:
        with self._lock:
            self._viewers.discard(viewer)

    def _run(self) -> None:
        while not self._over:
            with self._lock:
                viewers = tuple(self._viewers)
            if not viewers:
                self._hurry.wait()
                self._hurry.clear()
                self._look_early()
                continue
            began = time.monotonic()
            self._tell(viewers)
            self._hurry.wait(max(_LEAST_S, self._interval - (time.monotonic() - began)))
            self._hurry.clear()

    def _look_early(self) -> None:
        if not self._expected:
            return
        self._expected = False
        try:
            snapshot = self._look(())
            self._early = time.monotonic(), snapshot
        except Exception:
            self._early = None  # the page's own look fails as well, and is there to show why

    def _tell(self, viewers: tuple[_Viewer, ...]) -> None:
        try:
            self._look_and_tell(viewers)
        except Exception as problem:  # a damaged folder must not end the page: it is shown
            line = problem.line if isinstance(problem, Refusal) else f"{type(problem).__name__}: {problem}"
            for viewer in viewers:
                self._push(viewer, {"time": time.time(), "problems": [escape(line, 500)]})

    def _look_and_tell(self, viewers: tuple[_Viewer, ...]) -> None:
        watched = tuple(sorted({viewer.run for viewer in viewers if viewer.run}))
        early, self._early = self._early, None
        if early is not None and not watched and time.monotonic() - early[0] < self._interval:
            snapshot = early[1]
        else:
            snapshot = self._look(watched)
        common = shared_state(snapshot)
        for viewer in viewers:
            state = {**common, "ranks": rank_rows(snapshot.run(viewer.run) if viewer.run else None)}
            changed, gone = diff_states(viewer.state, state)
            message: dict[str, Any] = {"time": snapshot.time, "problems": list(snapshot.problems), "set": changed}
            if gone:
                message["gone"] = gone
            if viewer.fresh:
                about = {"root": snapshot.root, "others": snapshot.others, "interval": self._interval}
                message |= {"whole": True, "recent": recent_utilization(snapshot), **about}
            viewer.state, viewer.fresh = state, False
            self._push(viewer, message)

    def _push(self, viewer: _Viewer, message: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"
        self.sent += len(data)
        if viewer.stream is not None:
            viewer.stream.push(data)
