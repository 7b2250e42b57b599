"""Sends live updates to the page: one thread takes snapshots while there are viewers and sends each viewer the changes."""

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
from stoker.control.show.web.page_data import (
    State,
    collect_recent_utilization,
    diff_states,
    make_rank_rows,
    make_shared_state,
)

MAX_VIEWERS = 32
_MIN_INTERVAL_S = 0.25
EVENTS = "text/event-stream; charset=utf-8"


class _Viewer:
    """A page that is open in a browser."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.stream: ResponseStream | None = None
        self.state: State = {}  # the state that it has been sent
        self.is_new = True


class EventHub:
    """Sends snapshots to viewers. `take_snapshot` gets the ids of the watched runs and may block."""

    def __init__(self, take_snapshot: Callable[[tuple[str, ...]], Snapshot], interval: float) -> None:
        self._take_snapshot, self._interval = take_snapshot, interval
        self._viewers: set[_Viewer] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self._wake = threading.Event()
        self._is_viewer_expected = False
        self._early_snapshot: tuple[float, Snapshot] | None = (
            None  # (monotonic time, snapshot) from before its viewer connected
        )

    def start(self) -> None:
        threading.Thread(target=self._run, name="snapshots", daemon=True).start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    def expect_viewer(self) -> None:
        """Take a snapshot while the browser loads the page's scripts, because the first one of 1,000 runs takes 0.4 s."""
        self._is_viewer_expected = True
        self._wake.set()

    def open(self, run: str, headers: tuple[tuple[str, str], ...]) -> ResponseStream | None:
        """Add a viewer that watches `run` and return its stream, or None if there are MAX_VIEWERS already."""
        viewer = _Viewer(run)
        with self._lock:
            if len(self._viewers) >= MAX_VIEWERS:
                return None
            viewer.stream = ResponseStream(EVENTS, headers, lambda: self._remove(viewer))
            self._viewers.add(viewer)
        viewer.stream.push(b"retry: 2000\n\n")
        self._wake.set()
        return viewer.stream

    def _remove(self, viewer: _Viewer) -> None:
        with self._lock:
            self._viewers.discard(viewer)

    def _run(self) -> None:
        while not self._stopped:
            with self._lock:
                viewers = tuple(self._viewers)
            if not viewers:
                self._wake.wait()
                self._wake.clear()
                self._take_early_snapshot()
                continue
            began = time.monotonic()
            try:
                self._update(viewers)
            except Exception as problem:  # show it on the page: a damaged folder must not end the updates
                line = problem.line if isinstance(problem, Refusal) else f"{type(problem).__name__}: {problem}"
                for viewer in viewers:
                    self._send(viewer, {"time": time.time(), "problems": [escape(line, 500)]})
            self._wake.wait(max(_MIN_INTERVAL_S, self._interval - (time.monotonic() - began)))
            self._wake.clear()

    def _take_early_snapshot(self) -> None:
        if not self._is_viewer_expected:
            return
        self._is_viewer_expected = False
        try:
            self._early_snapshot = time.monotonic(), self._take_snapshot(())
        except Exception:
            self._early_snapshot = None  # the next snapshot fails, too, and its error is shown

    def _update(self, viewers: tuple[_Viewer, ...]) -> None:
        """Take a snapshot and send each viewer the changes since its last one."""
        watched = tuple(sorted({viewer.run for viewer in viewers if viewer.run}))
        early, self._early_snapshot = self._early_snapshot, None
        if early is not None and not watched and time.monotonic() - early[0] < self._interval:
            snapshot = early[1]
        else:
            snapshot = self._take_snapshot(watched)
        shared = make_shared_state(snapshot)
        for viewer in viewers:
            state = {**shared, "ranks": make_rank_rows(snapshot.run(viewer.run) if viewer.run else None)}
            changed, removed_keys = diff_states(viewer.state, state)
            message: dict[str, Any] = {"time": snapshot.time, "problems": list(snapshot.problems), "set": changed}
            if removed_keys:
                message["gone"] = removed_keys
            if viewer.is_new:
                message |= {
                    "whole": True,
                    "recent": collect_recent_utilization(snapshot),
                    "root": snapshot.root,
                    "others": snapshot.others,
                    "interval": self._interval,
                }
            viewer.state, viewer.is_new = state, False
            self._send(viewer, message)

    def _send(self, viewer: _Viewer, message: dict[str, Any]) -> None:
        if viewer.stream is not None:
            data = json.dumps(message, separators=(",", ":"), allow_nan=False)
            viewer.stream.push(b"data: " + data.encode() + b"\n\n")
