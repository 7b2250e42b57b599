"""`stoker top --replay RUN`: the moments of a run's history one after the other, at any speed."""

from __future__ import annotations

import bisect
import time
from bisect import bisect_right
from typing import Any

from stoker.contract.errors import EX_NOINPUT, Refusal
from stoker.contract.frozen import replace
from stoker.contract.text import escape
from stoker.contract.units import format_duration
from stoker.control.record import run_record
from stoker.control.record.history import EVERY_S, HistoryColumns, HistoryPoint, read_full_history
from stoker.control.show.collector import GPU_SERIES, HOST_SERIES, recorded_hosts
from stoker.control.show.curves import Curve, MetricsTail
from stoker.control.show.run_tail import RECENT, RunTail
from stoker.control.show.slow_rank import slow_ranks
from stoker.control.show.snapshot import RUNNING, UNKNOWN, Snapshot, finite, headline_metric, metric
from stoker.control.show.top.view import BACK, FASTER, FORTH, PAUSE, SLOWER


class Replay:
    """`moments` is empty for a run that was over within seconds."""

    def __init__(self, record: run_record.RunRecord) -> None:
        self._record = record
        self.moments = read_full_history(record.dir)
        self._events = list(record.events())
        self._metrics = MetricsTail(record.dir)
        self._metrics.look()
        self._begin()

    def _begin(self) -> None:
        self._folder = RunTail(self._record)
        self._next = self._told = 0

    def snapshot(self, number: int) -> Snapshot:
        """As it was at moment `number`. One after the other is quick; going back starts from the beginning."""
        if number < self._next - 1:
            self._begin()
        folder = self._folder
        for moment in self.moments[self._next : number]:
            folder.pass_by(moment)
        moment = self.moments[number]
        self._next = number + 1
        while self._told < len(self._events) and self._events[self._told]["time"] <= moment.time:
            folder.events.take(self._events[self._told])
            self._told += 1
        if folder.moments and folder.moments[-1] is moment:
            folder.moments.pop()
        curves = self._metrics.curves
        run = folder.at(moment, self._values(moment.time), curves.get(headline_metric(curves), Curve()))
        readings = list(recorded_hosts(folder, moment.time))
        hosts, gpus = tuple(host for host, _ in readings), tuple(card for _, cards in readings for card in cards)
        run = replace(run, slow=slow_ranks(run, folder, hosts, gpus))
        return Snapshot(moment.time, hosts, gpus, (run,), root="", interval=EVERY_S)

    def _values(self, when: float) -> dict[str, Any]:
        """The newest metrics by that time."""
        times = self._metrics.clock
        at = bisect_right(times.values, when) - 1
        if at < 0:
            return {}
        step = times.steps[at]
        found: dict[str, Any] = {"step": step, "time": times.values[at]}
        for name, curve in self._metrics.curves.items():
            place = bisect_right(curve.steps, step) - 1
            if place >= 0:
                found[name] = metric(curve.values[place])
        return found


_SPEED = 10.0  # seconds of the run in a second
_FASTEST, _SLOWEST = 4096.0, 0.25
_SEEK_S, _SEEK_SHARE = 30.0, 0.02


class Player:
    def __init__(self, record: run_record.RunRecord, interval: float) -> None:
        self.interval = interval
        self._record, self._replay = record, Replay(record)
        self._moments = self._replay.moments
        if not self._moments:
            line = f"run {escape(record.id)} has no history: one is recorded from a run's first seconds on"
            raise Refusal(line, EX_NOINPUT)
        self._times = [moment.time for moment in self._moments]
        self._at = self._times[0]  # of the run's own clock
        self._looked: float | None = None
        self._speed = _SPEED
        self._held = False

    def look(self, watched: tuple[str, ...]) -> Snapshot:
        now = time.monotonic()
        if self._looked is not None and not self._held:
            self._go(self._at + (now - self._looked) * self._speed)
        self._looked = now
        return self._snapshot(max(0, bisect.bisect_right(self._times, self._at) - 1))

    def look_once(self, watched: tuple[str, ...] = ()) -> Snapshot:
        return self._snapshot(len(self._moments) - 1)

    def seek(self, what: str) -> str:
        step = max(_SEEK_S, (self._times[-1] - self._times[0]) * _SEEK_SHARE)
        if what == PAUSE:
            self._held = not self._held
        elif what in (FASTER, SLOWER):
            self._speed = max(_SLOWEST, min(_FASTEST, self._speed * (2.0 if what == FASTER else 0.5)))
        elif what in (BACK, FORTH):
            self._go(self._at + (step if what == FORTH else -step))
        return self.status

    @property
    def status(self) -> str:
        done, whole = self._at - self._times[0], self._times[-1] - self._times[0]
        held = ", held" if self._held else ""
        return f"replay {format_duration(max(0.0, done))} of {format_duration(max(0.0, whole))}, {self._speed:g}×{held}"

    def close(self) -> None:
        return None

    def _go(self, to: float) -> None:
        self._at = max(self._times[0], min(self._times[-1], to))

    def _snapshot(self, number: int) -> Snapshot:
        """The last moment has how the run ended, too."""
        made = self._replay.snapshot(number)
        past = self._moments[max(0, number - RECENT + 1) : number + 1]
        of_hosts, of_gpus = _columns(past, "hosts"), _columns(past, "gpus")
        hosts = tuple(replace(host, recent=_recent(of_hosts, host.name, HOST_SERIES)) for host in made.hosts)
        gpus = tuple(replace(card, recent=_recent(of_gpus, (card.host, card.uuid), GPU_SERIES)) for card in made.gpus)
        runs = made.runs
        if number == len(self._moments) - 1:
            state = run_record.run_status(self._record)
            over = {} if state in (RUNNING, UNKNOWN) else {"suspicion": None, "slow": ()}
            runs = tuple(replace(run, state=state, verdict=self._record.verdict, **over) for run in runs)
        return replace(made, hosts=hosts, gpus=gpus, runs=runs)


def _columns(past: list[HistoryPoint], part: str) -> list[tuple[dict[Any, int], HistoryColumns]]:
    """`part`: gpus or hosts. Of each moment where each of them stands in the columns, and those: 500 cards are looked for."""
    places: dict[int, dict[Any, int]] = {}  # moments share their members
    for moment in past:
        if id(moment.members) not in places:
            places[id(moment.members)] = {key: at for at, key in enumerate(getattr(moment.members, part))}
    return [(places[id(moment.members)], getattr(moment, part)) for moment in past]


def _recent(
    past: list[tuple[dict[Any, int], HistoryColumns]], key: Any, names: tuple[str, ...]
) -> dict[str, tuple[float | None, ...]]:
    """Its newest values, None for a moment it was not there."""
    found: dict[str, list[float | None]] = {name: [] for name in names}
    for places, columns in past:
        at = places.get(key, -1)
        for name, values in found.items():
            values.append(finite(metric(columns[name][at])) if at >= 0 and name in columns else None)
    return {name: tuple(values) for name, values in found.items()}
