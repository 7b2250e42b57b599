"""`stoker top --replay RUN`: a run as its history has it, moment by moment."""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from stoker.contract.names import EX_NOINPUT, Refusal
from stoker.contract.quantities import span
from stoker.contract.shape import replace
from stoker.contract.untrusted import printable
from stoker.control.record import reader
from stoker.control.record.history import Moment, whole_history
from stoker.control.show.curves import MetricsTail
from stoker.control.show.folder import RECENT, EventTail, RunFolder
from stoker.control.show.gather import GPU_SERIES, HOST_SERIES, recorded_hosts
from stoker.control.show.joined import slow_ranks
from stoker.control.show.snapshot import RUNNING, Metric, Run, Snapshot, finite, metric
from stoker.control.show.top.view import BACK, FASTER, FORTH, PAUSE, SLOWER

_SPEED = 10.0  # seconds of the run in a second
_FASTEST, _SLOWEST = 4096.0, 0.25
_SEEK_S, _SEEK_SHARE = 30.0, 0.02


class Replay:
    def __init__(self, record: reader.Run, interval: float) -> None:
        self.interval = interval
        self._folder = _Recorded(record)
        self._moments = self._folder.recorded
        if not self._moments:
            line = f"run {printable(record.id)} has no history: one is recorded from a run's first seconds on"
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

    def look_once(self) -> Snapshot:
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
        return f"replay {span(max(0.0, done))} of {span(max(0.0, whole))}, {self._speed:g}×{held}"

    def close(self) -> None:
        return None

    def _go(self, to: float) -> None:
        self._at = max(self._times[0], min(self._times[-1], to))

    def _snapshot(self, number: int) -> Snapshot:
        folder, moment = self._folder, self._moments[number]
        run = folder.at(number)
        readings = [
            (
                replace(host, recent=folder.recent("hosts", host.name, HOST_SERIES)),
                tuple(
                    replace(card, recent=folder.recent("gpus", (card.host, card.uuid), GPU_SERIES)) for card in cards
                ),
            )
            for host, cards in recorded_hosts(folder, moment.time)
        ]
        hosts = tuple(host for host, _ in readings)
        cards = tuple(card for _, gpus in readings for card in gpus)
        slow = slow_ranks(run, folder, hosts, cards)
        return Snapshot(moment.time, hosts, cards, (replace(run, slow=slow),), run.dir, interval=self.interval)


class _Events(EventTail):
    """The events up to a time."""

    def __init__(self, run_dir: str, mine: bool) -> None:
        super().__init__(run_dir, mine)
        self._known = [event for event in reader.events(run_dir) if finite(metric(event.get("time"))) is not None]
        self._taken = 0

    def go_to(self, when: float) -> None:
        if self._taken and float(self._known[self._taken - 1]["time"]) > when:
            self._clear()
            self._taken = 0
        while self._taken < len(self._known) and float(self._known[self._taken]["time"]) <= when:
            self._take(self._known[self._taken])
            self._taken += 1


class _Recorded(RunFolder):
    """A run directory as it was at a moment. Everything is read once."""

    def __init__(self, record: reader.Run) -> None:
        super().__init__(record)
        self.recorded = whole_history(record.dir)
        self._past = self.events = _Events(record.dir, record.mine)
        self._whole = MetricsTail(record.dir, record.mine)
        self._whole.look()
        self.metrics = self._whole
        for moment in self.recorded:
            self._heard_loss(moment)

    def at(self, number: int) -> Run:
        moment = self.recorded[number]
        self._past.go_to(moment.time)
        self.moments = deque(self.recorded[max(0, number - RECENT + 1) : number + 1], maxlen=RECENT)
        last = number == len(self.recorded) - 1
        state = reader.status(self.record) if last else RUNNING
        made = self._made(moment.time, state)
        if not last:
            made = replace(made, verdict=None)
        closely = self._closely(moment.time, made)
        steps = self._beaten()
        limit = steps if steps is not None and not last else float("inf")
        return replace(made, **{**closely, "curve": tuple(self.curve("loss").points(last=limit))})

    def _values(self) -> tuple[dict[str, Metric], int | None, float | None]:
        """The newest metrics at the moment that is shown, by the step the ranks had made."""
        steps = self._beaten()
        if (self.moments and self.moments[-1] is self.recorded[-1]) or steps is None:
            return super()._values()
        values: dict[str, Metric] = {}
        for name, curve in self._whole.curves.items():
            at = bisect.bisect_right(curve.steps, steps - 1) - 1
            if at >= 0:
                values[name] = metric(curve.values[at])
        return values, steps - 1 if steps > 0 else None, self.moments[-1].time

    def recent(self, part: str, key: Any, names: Iterable[str]) -> dict[str, tuple[float | None, ...]]:
        """`part`: gpus or hosts."""
        places = [_place(moment, part, key) for moment in self.moments]
        return {
            name: tuple(
                None if at < 0 else finite(metric(getattr(moment, part).get(name, (None,) * (at + 1))[at]))
                for moment, at in zip(self.moments, places, strict=True)
            )
            for name in names
        }


def _place(moment: Moment, part: str, key: Any) -> int:
    members = getattr(moment.members, part)
    return members.index(key) if key in members else -1
