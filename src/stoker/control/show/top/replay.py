"""Plays the history of a recorded run for `stoker top --replay RUN`, at any speed."""

from __future__ import annotations

import time
from bisect import bisect_right
from typing import Any

from stoker.contract.errors import EX_NOINPUT, Refusal
from stoker.contract.frozen import replace
from stoker.contract.text import escape
from stoker.contract.units import format_duration
from stoker.control.record import run_record
from stoker.control.record.history import EVERY_S, HistoryColumns, HistoryPoint, read_full_history
from stoker.control.show.collector import GPU_SERIES, HOST_SERIES, read_recorded_hosts
from stoker.control.show.curves import Curve, MetricsTail
from stoker.control.show.run_tail import RECENT, RunTail
from stoker.control.show.slow_rank import find_slow_ranks
from stoker.control.show.snapshot import RUNNING, UNKNOWN, Snapshot, headline_metric, parse_finite, parse_metric
from stoker.control.show.top.view import BACK, FASTER, FORTH, PAUSE, SLOWER

_INITIAL_SPEED = 10.0  # seconds of the run per second of the replay
_MAX_SPEED, _MIN_SPEED = 4096.0, 0.25
_SEEK_S, _SEEK_SHARE = 30.0, 0.02  # a seek skips the longer of 30 s and 2 % of the run


class Replay:
    """Rebuilds the snapshot of any history point. `points` is empty for a run that ended within seconds."""

    def __init__(self, record: run_record.RunRecord) -> None:
        self._record = record
        self.points = read_full_history(record.dir)
        self._events = list(record.events())
        self._metrics = MetricsTail(record.dir)
        self._metrics.read_new()
        self._rewind()

    def _rewind(self) -> None:
        self._tail = RunTail(self._record)
        self._next_point = self._next_event = 0

    def snapshot(self, index: int) -> Snapshot:
        """Return the snapshot at point `index`. Going back is slow: it applies all points and events again from the start."""
        if index < self._next_point - 1:
            self._rewind()
        tail = self._tail
        for point in self.points[self._next_point : index]:
            tail.add_point(point)
        point = self.points[index]
        self._next_point = index + 1
        while self._next_event < len(self._events) and self._events[self._next_event]["time"] <= point.time:
            tail.events.apply(self._events[self._next_event])
            self._next_event += 1
        if tail.points and tail.points[-1] is point:
            tail.points.pop()  # view_at adds it again
        curves = self._metrics.curves
        run = tail.view_at(point, self._metrics_at(point.time), curves.get(headline_metric(curves), Curve()))
        readings = list(read_recorded_hosts(tail, point.time))
        hosts, gpus = tuple(host for host, _ in readings), tuple(gpu for _, gpus in readings for gpu in gpus)
        run = replace(run, slow=find_slow_ranks(run, tail, hosts, gpus))
        return Snapshot(point.time, hosts, gpus, (run,), root="", interval=EVERY_S)

    def _metrics_at(self, time: float) -> dict[str, Any]:
        """Return the newest metrics at a time of the run, or {} before the first."""
        clock = self._metrics.clock
        index = bisect_right(clock.values, time) - 1
        if index < 0:
            return {}
        step = clock.steps[index]
        metrics: dict[str, Any] = {"step": step, "time": clock.values[index]}
        for name, curve in self._metrics.curves.items():
            newest = bisect_right(curve.steps, step) - 1
            if newest >= 0:
                metrics[name] = parse_metric(curve.values[newest])
        return metrics


class Player:
    """Provides the snapshots of a Replay to the screen at the chosen speed."""

    def __init__(self, record: run_record.RunRecord, interval: float) -> None:
        self.interval = interval
        self._record, self._replay = record, Replay(record)
        self._points = self._replay.points
        if not self._points:
            line = f"can't replay run {escape(record.id)}, which has no history: runs shorter than {EVERY_S:g} s record none"
            raise Refusal(line, EX_NOINPUT)
        self._times = [point.time for point in self._points]
        self._position = self._times[0]  # the time of the run that is shown
        self._taken_at: float | None = None
        self._speed = _INITIAL_SPEED
        self._paused = False

    def take_snapshot(self, watched: tuple[str, ...]) -> Snapshot:
        now = time.monotonic()
        if self._taken_at is not None and not self._paused:
            self._move_to(self._position + (now - self._taken_at) * self._speed)
        self._taken_at = now
        return self._snapshot(max(0, bisect_right(self._times, self._position) - 1))

    def take_single_snapshot(self, watched: tuple[str, ...] = ()) -> Snapshot:
        return self._snapshot(len(self._points) - 1)

    def seek(self, command: str) -> str:
        step = max(_SEEK_S, (self._times[-1] - self._times[0]) * _SEEK_SHARE)
        if command == PAUSE:
            self._paused = not self._paused
        elif command in (FASTER, SLOWER):
            self._speed = max(_MIN_SPEED, min(_MAX_SPEED, self._speed * (2.0 if command == FASTER else 0.5)))
        elif command in (BACK, FORTH):
            self._move_to(self._position + (step if command == FORTH else -step))
        return self.status

    @property
    def status(self) -> str:
        played, total = self._position - self._times[0], self._times[-1] - self._times[0]
        paused = ", paused" if self._paused else ""
        return f"replay {format_duration(max(0.0, played))} of {format_duration(max(0.0, total))}, {self._speed:g}×{paused}"

    def close(self) -> None:
        return None

    def _move_to(self, position: float) -> None:
        self._position = max(self._times[0], min(self._times[-1], position))

    def _snapshot(self, index: int) -> Snapshot:
        """Return the snapshot at a point, with sparklines. The last one also shows the verdict."""
        snapshot = self._replay.snapshot(index)
        past = self._points[max(0, index - RECENT + 1) : index + 1]
        host_columns, gpu_columns = _index_columns(past, "hosts"), _index_columns(past, "gpus")
        hosts = tuple(
            replace(host, recent=_collect_recent(host_columns, host.name, HOST_SERIES)) for host in snapshot.hosts
        )
        gpus = tuple(
            replace(gpu, recent=_collect_recent(gpu_columns, (gpu.host, gpu.uuid), GPU_SERIES)) for gpu in snapshot.gpus
        )
        runs = snapshot.runs
        if index == len(self._points) - 1:
            state = run_record.run_status(self._record)
            ended = {} if state in (RUNNING, UNKNOWN) else {"suspicion": None, "slow": ()}
            runs = tuple(replace(run, state=state, verdict=self._record.verdict, **ended) for run in runs)
        return replace(snapshot, hosts=hosts, gpus=gpus, runs=runs)


def _index_columns(past: list[HistoryPoint], part: str) -> list[tuple[dict[Any, int], HistoryColumns]]:
    """Return for each point the index of each member in the columns, with the columns. `part` is "gpus" or "hosts"."""
    indices: dict[int, dict[Any, int]] = {}  # by members: points share them, so 500 GPUs are indexed once
    for point in past:
        if id(point.members) not in indices:
            indices[id(point.members)] = {key: index for index, key in enumerate(getattr(point.members, part))}
    return [(indices[id(point.members)], getattr(point, part)) for point in past]


def _collect_recent(
    past: list[tuple[dict[Any, int], HistoryColumns]], key: Any, names: tuple[str, ...]
) -> dict[str, tuple[float | None, ...]]:
    """Return the newest values of a GPU or host, with None for points without it."""
    recent: dict[str, list[float | None]] = {name: [] for name in names}
    for indices, columns in past:
        index = indices.get(key, -1)
        for name, values in recent.items():
            values.append(parse_finite(columns[name][index]) if index >= 0 and name in columns else None)
    return {name: tuple(values) for name, values in recent.items()}
