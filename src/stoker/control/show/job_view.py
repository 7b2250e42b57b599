"""A job of several roles, as one run: the ranks of all its roles, the curves of the one that trains."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker.contract.frozen import replace
from stoker.contract.units import plural
from stoker.control.record import run_index, run_record
from stoker.control.record.serving_log import ServerSample, read_samples
from stoker.control.show.curves import Curve
from stoker.control.show.run_tail import RunTail, group_by_role
from stoker.control.show.snapshot import RUNNING, SERVER_METRICS, UNKNOWN, RankView, RunView, ServerLoad, as_int64

_PAGES_S = 60.0  # rates of servers whose pages the job reads are means over so long
_LOOK_S = 1.0  # between two looks for roles that have been started
_TOLD = (
    "step",
    "total_steps",
    "loss",
    "tokens_per_s",
    "mfu",
    "grad_norm",
    "lr",
    "eta_s",
    "phase",
    "metrics",
    "problem",
)


def open_run_tail(record: run_record.RunRecord, whole_curves: bool = True) -> RunTail:
    """As the run is: a job of roles, or a plain one."""
    made = JobTail if len(_planned(record)) > 1 else RunTail
    return made(record, whole_curves)


def _planned(record: run_record.RunRecord) -> dict[str, int]:
    """Role -> the number that its first rank has in the job."""
    ranks = (record.data.get("plan") or {}).get("ranks")
    found: dict[str, int] = {}
    for one in ranks if isinstance(ranks, list) else ():
        if isinstance(one, dict) and isinstance(one.get("role"), str) and type(one.get("rank")) is int:
            found.setdefault(one["role"], one["rank"])
    return found


class JobTail(RunTail):
    def __init__(self, record: run_record.RunRecord, whole_curves: bool = True) -> None:
        super().__init__(record, whole_curves)
        self._roles: dict[str, RunTail] = {}
        self._looked = 0.0
        self._server_curves_of: tuple[Any, ...] = ()
        self._curves_of_servers: dict[str, Curve] = {}

    def run(self, now: float, watched: bool) -> RunView:
        made = super().run(now, watched)
        if now - self._looked >= _LOOK_S or now < self._looked:
            self._looked = now
            self._look()
        parts = {name: folder.run(now, watched) for name, folder in self._roles.items()}
        training = self.training
        if training is not self:
            trainer = parts[training.record.name]
            made = replace(made, **{name: getattr(trainer, name) for name in _TOLD}, curve=trainer.curve)
        started = 1 + sum(made.restarts.values()) if parts else 0  # all roles together
        made = replace(made, attempts=max([started, *(part.attempts for part in parts.values())]))
        restarts = dict(made.restarts)
        for cause, count in ((cause, count) for part in parts.values() for cause, count in part.restarts.items()):
            restarts[cause] = restarts.get(cause, 0) + count
        doubts = [part.suspicion for part in parts.values() if part.suspicion is not None]
        going = made.state in (RUNNING, UNKNOWN)
        made = replace(made, restarts=restarts, suspicion=doubts[0] if doubts and going else None)
        made = replace(made, servers=tuple(self._loads(parts, now, made.state == RUNNING)))
        if not watched:
            return made
        ranks = tuple(rank for rank in (self._rank_of(one, parts) for one in made.ranks))
        return replace(made, ranks=ranks, roles=group_by_role(ranks))

    def _loads(self, parts: Mapping[str, RunView], now: float, is_running: bool) -> Iterator[ServerLoad]:
        """Yield each server role's load: by the counters of its own run, else by the page that the job reads."""
        for name in dict.fromkeys((*_planned(self.record), *parts)):
            part = parts.get(name)
            if part is not None and part.servers:
                yield replace(part.servers[0], role=name)
            elif name in self.events.served:
                yield _load_by_pages(name, self.events.served[name], now, is_running)

    def _rank_of(self, planned: RankView, parts: dict[str, RunView]) -> RankView:
        """With what its role's own run knows of it."""
        part = parts.get(planned.role)
        known = next((one for one in part.ranks if one.rank == planned.role_rank), None) if part is not None else None
        if known is None:
            return planned
        known = replace(known, rank=planned.rank, role=planned.role, role_rank=planned.role_rank)
        served = self._served(planned.role, planned.role_rank)
        # A server makes no steps: what it has answered is how far it is.
        return replace(known, phase=known.phase or served, step=known.step or None) if served else known

    def _served(self, role: str, replica: int) -> str:
        folder = self._roles.get(role)
        samples = folder.samples.get(replica) if folder is not None else None
        if samples:
            counts: tuple[int, int] | None = samples[-1].requests, samples[-1].tokens
        else:
            pages = self.events.served.get(role)
            replicas = pages[-1][1] if pages else []
            counts = _counts(replicas[replica]) if 0 <= replica < len(replicas) else None
        return f"{plural(counts[0], 'request')}, {plural(counts[1], 'token')}" if counts is not None else ""

    def _look(self) -> None:
        for record in run_index.list_roles(self.record).values():
            known = self._roles.get(record.name)
            if known is None or known.record.dir != record.dir:
                self._roles[record.name] = known = RunTail(record, self._whole_curves)
            known.record = record

    @property
    def training(self) -> RunTail:
        """Return the role that trains, whose metrics are shown as the job's; the job itself while there is none."""
        trainer = max(self._roles.values(), key=lambda folder: folder.evidence_of_training, default=None)
        return trainer if trainer is not None and trainer.evidence_of_training else self

    @property
    def first_rank(self) -> int:
        return _planned(self.record).get(self.training.record.name, 0)

    @property
    def interval(self) -> int:
        training = self.training
        return training.interval if training is not self else super().interval

    def curve(self, name: str) -> Curve:
        training = self.training
        if training is self:
            return super().curve(name)
        return self._server_curves().get(name, Curve()) if name in SERVER_METRICS else training.curve(name)

    def curve_names(self) -> list[str]:
        names = super().curve_names()
        return [*names, *(name for name, curve in self._server_curves().items() if curve.steps)]

    def _server_curves(self) -> dict[str, Curve]:
        """Requests and tokens a second of all servers over the trainer's steps: means over the logging interval."""
        metrics = self.training.metrics
        if metrics is None or not metrics.clock.steps:
            return {}
        clock = metrics.clock
        newest = [samples[-1].time for folder in self._roles.values() for samples in folder.samples.values()]
        key = (len(clock.steps), clock.steps[-1], tuple(newest), metrics.interval)
        if key != self._server_curves_of:
            self._server_curves_of = key
            replicas = [one for folder in self._roles.values() for one in read_samples(folder.record.dir).values()]
            self._curves_of_servers = compute_server_curves(clock, replicas, metrics.interval)
        return self._curves_of_servers


def compute_server_curves(clock: Curve, replicas: Sequence[Sequence[ServerSample]], interval: int) -> dict[str, Curve]:
    """Return the curves of SERVER_METRICS: at each step the rate since `interval` steps before. `clock`: when each step was
    logged. A step has a value once all replicas have been counted after it.
    """
    curves = {name: Curve() for name in SERVER_METRICS}
    times = [[float(sample.time) for sample in samples] for samples in replicas]
    first, last = max((one[0] for one in times), default=math.inf), min((one[-1] for one in times), default=-math.inf)
    points = [(step, when) for step, when in zip(clock.steps, clock.values, strict=True) if first <= when <= last]
    for curve, total in zip(curves.values(), ("requests", "tokens"), strict=True):
        columns = [[getattr(sample, total) for sample in samples] for samples in replicas]
        done = [sum(_interpolated(when, *column) for column in zip(times, columns, strict=True)) for _, when in points]
        for at in range(1, len(points)):
            before = max(0, at - interval)
            seconds = points[at][1] - points[before][1]
            if seconds > 0:
                curve.add(points[at][0], max(0.0, done[at] - done[before]) / seconds)
    return curves


def _interpolated(when: float, times: Sequence[float], totals: Sequence[int]) -> float:
    """Return a total at a time between the first and the last sample."""
    at = bisect.bisect_right(times, when)
    if at == len(times):
        return totals[-1]
    share = (when - times[at - 1]) / (times[at] - times[at - 1])
    return totals[at - 1] + share * (totals[at] - totals[at - 1])


def _load_by_pages(role: str, pages: Sequence[tuple[float, list[Any]]], now: float, is_running: bool) -> ServerLoad:
    """Compute a load from counts that are recorded only when they change."""
    totals = [(when, [_counts(one) or (0, 0) for one in replicas]) for when, replicas in pages]
    sums = [(when, sum(one[0] for one in counts), sum(one[1] for one in counts)) for when, counts in totals]
    newest = sums[-1]
    first = next(one for one in sums if one[0] >= newest[0] - _PAGES_S)
    end = newest[0] if now - newest[0] <= _PAGES_S / 2 else now
    seconds = end - first[0]
    known = is_running and seconds > 0 and newest[0] > first[0]
    requests, tokens = (max(0, newest[at] - first[at]) / seconds if known else None for at in (1, 2))
    return ServerLoad(role, len(pages[-1][1]), newest[1], newest[2], requests_per_s=requests, tokens_per_s=tokens)


def _counts(done: Any) -> tuple[int, int] | None:
    """(requests, tokens) of a replica in the record."""
    numbers = [as_int64(done.get(key)) for key in ("requests", "tokens")] if isinstance(done, dict) else []
    if not numbers or any(number is None or not 0 <= number < 10**18 for number in numbers):
        return None
    return numbers[0] or 0, numbers[1] or 0
