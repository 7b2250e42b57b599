"""A run as it was: one snapshot for each moment of its history, for a viewer that plays it back."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from stoker.contract.shape import replace
from stoker.control.record import reader
from stoker.control.record.history import EVERY_S, whole_history
from stoker.control.show.curves import MOST_OF_OTHERS, Curve, MetricsTail
from stoker.control.show.folder import RunFolder
from stoker.control.show.gather import recorded_hosts
from stoker.control.show.joined import slow_ranks
from stoker.control.show.snapshot import Snapshot, metric


class Replay:
    """`moments` is empty for a run that was over within seconds."""

    def __init__(self, record: reader.Run) -> None:
        self._record = record
        self.moments = whole_history(record.dir, record.mine)
        self._events = list(record.events())
        self._metrics = MetricsTail(record.dir, 0 if record.mine else MOST_OF_OTHERS)
        self._metrics.look()
        self._begin()

    def _begin(self) -> None:
        self._folder = RunFolder(self._record)
        self._next = self._told = 0

    def snapshot(self, number: int) -> Snapshot:
        """As it was at moment `number`. One after the other is quick; going back begins anew."""
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
        run = folder.at(moment, self._values(moment.time), self._metrics.curves.get("loss", Curve()))
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
        found: dict[str, Any] = {"step": step}
        for name, curve in self._metrics.curves.items():
            place = bisect_right(curve.steps, step) - 1
            if place >= 0:
                found[name] = metric(curve.values[place])
        return found
