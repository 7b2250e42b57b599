"""The runs that a page may ask about: by the name of a folder directly below the runs folder, and nothing else.

And their ranks over time, from a run's history: how long each waited, who kept the others waiting, who stood still. A moment of
a rank is one letter, so that an hour of 128 ranks travels in 40 KB: A to K, none to all of its time waiting for others; p, in a
phase that it announced; w, in a collective for a long time; s, no sign of progress; a dot, nothing known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from stoker.contract.text import escape
from stoker.control.record import run_record
from stoker.control.record.history import HistoryPoint, HistoryTail, read_history
from stoker.control.show.slow_rank import late_index
from stoker.control.show.snapshot import finite, parse_metric

COLUMNS = 360  # of an answer
_ORDER = ".ABCDEFGHIJKpws"  # of several moments the last of these is shown
_LONG_S = 5.0  # in one collective
_STILL_S = 10.0  # without a sign of progress
_MARKS = 200
_STEPS = ("step", "train", "training")  # phases in which it makes steps
_TOLD = (
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
_CELLS = 64 << 20  # ranks of all moments: a page that is open for weeks drops the oldest moments beyond so many


class RankTimeline:
    def __init__(self, record: run_record.RunRecord, job: run_record.RunRecord | None = None, first: int = 0) -> None:
        """`job`: of which the run is a role, whose events are shown, too; its rank 0 is rank `first` there."""
        self.dir = record.dir
        self._record, self._job, self._first = record, job, first
        self._tail: HistoryTail | None = None
        self._columns: list[tuple[float, tuple[int, ...], str, int | None]] = []  # time, ranks, letters, who is late

    def look(self) -> None:
        if self._tail is None:
            self._tail = HistoryTail(self._record.dir)
            newest = self._tail.new()
            begun = newest[0].time if newest else float("inf")
            for tier in ("hours", "minutes"):
                older = [moment for moment in read_history(self._record.dir, tier) if moment.time < begun]
                if older:
                    self._columns = [one for one in self._columns if one[0] < older[0].time]
                    self._take(older)
        else:
            newest = self._tail.new()
        self._take(newest)

    def _take(self, moments: Iterable[HistoryPoint]) -> None:
        for moment in moments:
            if not moment.ranks:  # nothing is known of them
                continue
            row = "".join(rank_letters(moment))
            shares = [finite(parse_metric(one)) for one in moment.ranks.get("waiting", ())]
            late = late_index(shares)
            ranks = moment.members.ranks
            self._columns.append((moment.time, ranks, row, ranks[late] if late is not None else None))
        self._forget()

    def _forget(self) -> None:
        room = _CELLS
        for place in range(len(self._columns) - 1, -1, -1):
            room -= len(self._columns[place][1])
            if room < 0:
                del self._columns[: place + 1]
                return

    def to_json(self, since: float, within: tuple[float, float] = (-math.inf, math.inf)) -> dict[str, Any]:
        """`since`: only what is newer. `within`: from, to; a shorter time has finer columns."""
        self.look()
        first, last = within
        chosen = [one for one in self._columns if one[0] > since and first <= one[0] <= last]
        ranks = sorted({rank for _, members, _, _ in chosen for rank in members})
        groups = [chosen[at * len(chosen) // COLUMNS : (at + 1) * len(chosen) // COLUMNS] for at in range(COLUMNS)]
        groups = [group for group in groups if group] if len(chosen) > COLUMNS else [[one] for one in chosen]
        rows: dict[int, list[str]] = {rank: [] for rank in ranks}
        for group in groups:
            worst = dict.fromkeys(ranks, ".")
            for _, members, letters, _ in group:
                for rank, letter in zip(members, letters, strict=True):
                    if _ORDER.index(letter) > _ORDER.index(worst[rank]):
                        worst[rank] = letter
            for rank, letter in worst.items():
                rows[rank].append(letter)
        return {
            "times": [round(group[-1][0], 1) for group in groups],
            "ranks": [self._first + rank for rank in ranks],
            "cells": ["".join(rows[rank]) for rank in ranks],
            "late": [
                next((self._first + one[3] for one in reversed(group) if one[3] is not None), None) for group in groups
            ],
            "marks": self._marks(since),
        }

    def _marks(self, since: float) -> list[dict[str, Any]]:
        events = [(event, self._first) for event in self._record.events()]
        if self._job is not None:
            events += [(event, 0) for event in self._job.events()]
            events.sort(key=lambda one: float(one[0]["time"]))
        marks = [_mark(event, first) for event, first in events if event["event"] in _TOLD and event["time"] > since]
        return marks[-_MARKS:]


def _mark(event: Mapping[str, Any], first: int) -> dict[str, Any]:
    """`first`: what the job calls the run's rank 0."""
    text = event.get("summary") or event.get("cause") or ""
    if event["event"] == "attempt":
        text = f"attempt {event.get('attempt')}"
    elif event["event"] == "stop":
        text = f"by {event.get('signal') or 'a request'}"
    return {
        "time": round(float(event["time"]), 1),
        "kind": event["event"],
        "rank": first + event["rank"] if type(event.get("rank")) is int else None,
        "text": escape(str(text), 400),
    }


def rank_letters(moment: HistoryPoint) -> Iterable[str]:
    columns = [moment.ranks.get(name, ()) for name in ("waiting", "collective_age", "beat_age", "phase", "step")]
    for at in range(len(moment.members.ranks)):
        waiting, collective, beat, phase, step = (column[at] if column else None for column in columns)
        share, in_collective, silent = (finite(parse_metric(one)) for one in (waiting, collective, beat))
        if in_collective is not None and in_collective >= _LONG_S:
            yield "w"
        elif phase and phase not in _STEPS:
            yield "p"
        elif silent is not None and silent >= _STILL_S:
            yield "s"
        elif share is not None:
            yield "ABCDEFGHIJK"[round(max(0.0, min(share, 1.0)) * 10)]
        else:
            yield "A" if step is not None else "."
