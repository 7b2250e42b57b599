"""Shows a run's ranks over time from its history: how long each rank waited, which kept the others waiting, which was stuck.

The state of a rank at a history point is one letter, so an hour of 128 ranks takes 40 KB: A to K for 0 to 100 % of its time
spent waiting for others, p for a phase that it announced, w for a long time in one collective, s for no sign of progress, and
a dot for an unknown state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stoker.contract.text import escape
from stoker.control.record import run_record
from stoker.control.record.history import HistoryPoint, HistoryTail, read_history
from stoker.control.show.slow_rank import find_late_index
from stoker.control.show.snapshot import parse_finite

_MAX_COLUMNS = 360  # in one answer
_BY_SEVERITY = ".ABCDEFGHIJKpws"  # a column of several points shows the letter that is furthest to the right here
_LONG_S = 5.0  # a rank in one collective for this long gets w
_STUCK_S = 10.0  # a rank without a sign of progress for this long gets s
_MAX_MARKS = 200
_STEP_PHASES = ("step", "train", "training")  # these phases are ordinary training, so they get no p
_SHOWN_EVENTS = (
    "suspicion",
    "busy",
    "relief",
    "straggler",
    "straggler-over",
    "numbers",
    "restart",
    "attempt",
    "host-lost",
    "host-back",
    "stop",
    "verdict",
)
_MAX_CELLS = 64 << 20  # letters in memory; a page that is open for weeks drops its oldest points


class RankTimeline:
    """Reads the history of a run incrementally."""

    def __init__(
        self, record: run_record.RunRecord, job: run_record.RunRecord | None = None, first_rank: int = 0
    ) -> None:
        """If the run is a role of `job`, show the job's events, too, and number the ranks from `first_rank`."""
        self.dir = record.dir
        self._record, self._job, self._first_rank = record, job, first_rank
        self._tail: HistoryTail | None = None
        self._columns: list[tuple[float, tuple[int, ...], str, int | None]] = []  # time, ranks, letters, late rank

    def _read_new(self) -> None:
        if self._tail is None:
            self._tail = HistoryTail(self._record.dir)
            newest = self._tail.read_new()
            first_time = newest[0].time if newest else math.inf
            for tier in ("hours", "minutes"):  # these tiers have coarser points from before the newest hour
                older = [point for point in read_history(self._record.dir, tier) if point.time < first_time]
                if older:
                    self._columns = [column for column in self._columns if column[0] < older[0].time]
                    self._add(older)
        else:
            newest = self._tail.read_new()
        self._add(newest)

    def _add(self, points: Iterable[HistoryPoint]) -> None:
        for point in points:
            if point.ranks:
                late = find_late_index([parse_finite(share) for share in point.ranks.get("waiting", ())])
                ranks = point.members.ranks
                late_rank = ranks[late] if late is not None else None
                self._columns.append((point.time, ranks, "".join(choose_letters(point)), late_rank))
        cells = 0
        for index in range(len(self._columns) - 1, -1, -1):
            cells += len(self._columns[index][1])
            if cells > _MAX_CELLS:
                del self._columns[: index + 1]
                return

    def to_json(self, since: float, time_range: tuple[float, float] = (-math.inf, math.inf)) -> dict[str, Any]:
        """Return the points newer than `since` and between the two times of `time_range`, in at most _MAX_COLUMNS columns."""
        self._read_new()
        first, last = time_range
        points = [column for column in self._columns if column[0] > since and first <= column[0] <= last]
        ranks = sorted({rank for _, members, _, _ in points for rank in members})
        groups = [[point] for point in points]
        if len(points) > _MAX_COLUMNS:
            edges = [index * len(points) // _MAX_COLUMNS for index in range(_MAX_COLUMNS + 1)]
            groups = [points[begin:end] for begin, end in itertools.pairwise(edges)]
        cells: dict[int, list[str]] = {rank: [] for rank in ranks}
        late_ranks: list[int | None] = []
        for group in groups:
            worst = dict.fromkeys(ranks, ".")
            for _, members, letters, _ in group:
                for rank, letter in zip(members, letters, strict=True):
                    if _BY_SEVERITY.index(letter) > _BY_SEVERITY.index(worst[rank]):
                        worst[rank] = letter
            for rank, letter in worst.items():
                cells[rank].append(letter)
            late = [point[3] for point in group if point[3] is not None]
            late_ranks.append(self._first_rank + late[-1] if late else None)
        return {
            "times": [round(group[-1][0], 1) for group in groups],
            "ranks": [self._first_rank + rank for rank in ranks],
            "cells": ["".join(cells[rank]) for rank in ranks],
            "late": late_ranks,
            "marks": self._collect_marks(since),
        }

    def _collect_marks(self, since: float) -> list[dict[str, Any]]:
        """Return the newest events to mark in the timeline."""
        events = [(event, self._first_rank) for event in self._record.events()]
        if self._job is not None:
            events += [(event, 0) for event in self._job.events()]
            events.sort(key=lambda pair: float(pair[0]["time"]))
        marks = [
            _make_mark(event, first_rank)
            for event, first_rank in events
            if event["event"] in _SHOWN_EVENTS and event["time"] > since
        ]
        return marks[-_MAX_MARKS:]


def _make_mark(event: Mapping[str, Any], first_rank: int) -> dict[str, Any]:
    """Return an event as a mark. `first_rank` is the job's number for rank 0 of the run that wrote the event."""
    text = event.get("summary") or event.get("cause") or ""
    if event["event"] == "attempt":
        text = f"attempt {event.get('attempt')}"
    elif event["event"] == "stop":
        text = f"by {event.get('signal') or 'a request'}"
    return {
        "time": round(float(event["time"]), 1),
        "kind": event["event"],
        "rank": first_rank + event["rank"] if type(event.get("rank")) is int else None,
        "text": escape(str(text), 400),
    }


def choose_letters(point: HistoryPoint) -> Iterator[str]:
    """Yield the letter of each rank at a history point."""
    columns = [point.ranks.get(name, ()) for name in ("waiting", "collective_age", "beat_age", "phase", "step")]
    for index in range(len(point.members.ranks)):
        waiting, collective, beat, phase, step = (column[index] if column else None for column in columns)
        share, collective_age, beat_age = (parse_finite(value) for value in (waiting, collective, beat))
        if collective_age is not None and collective_age >= _LONG_S:
            yield "w"
        elif phase and phase not in _STEP_PHASES:
            yield "p"
        elif beat_age is not None and beat_age >= _STUCK_S:
            yield "s"
        elif share is not None:
            yield "ABCDEFGHIJK"[round(max(0.0, min(share, 1.0)) * 10)]
        else:
            yield "A" if step is not None else "."
