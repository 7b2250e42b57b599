"""Shows a multi-role job as one run: the ranks of all its roles, the metrics and curves of the role that trains."""

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
from stoker.control.show.run_tail import RunTail, group_by_role, planned_ranks
from stoker.control.show.snapshot import RUNNING, SERVER_METRICS, UNKNOWN, RankView, RunView, ServerLoad, as_int64

_RATE_S = 60.0  # if the job reads a server's metrics page, its rates are means over this time
_READ_ROLES_S = 1.0  # the run directories of newly started roles are listed at most this often
# A job shows these fields of its trainer's run.
_TRAINER_FIELDS = (
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
    "curve",
)


def open_run_tail(record: run_record.RunRecord, whole_curves: bool = True) -> RunTail:
    """Return a JobTail for a multi-role job, else a RunTail."""
    tail_type = JobTail if len(_first_ranks(record)) > 1 else RunTail
    return tail_type(record, whole_curves)


def _first_ranks(record: run_record.RunRecord) -> dict[str, int]:
    """Return each role's first rank, by its number in the job."""
    first_ranks: dict[str, int] = {}
    for rank in planned_ranks(record):
        if isinstance(rank.get("role"), str) and type(rank.get("rank")) is int:
            first_ranks.setdefault(rank["role"], rank["rank"])
    return first_ranks


class JobTail(RunTail):
    """Follows the run directories of a job and of its roles."""

    def __init__(self, record: run_record.RunRecord, whole_curves: bool = True) -> None:
        super().__init__(record, whole_curves)
        self._roles: dict[str, RunTail] = {}
        self._roles_read_at = 0.0
        self._server_curves_key: tuple[Any, ...] = ()
        self._server_curves: dict[str, Curve] = {}

    def view(self, now: float, watched: bool) -> RunView:
        job = super().view(now, watched)
        if now - self._roles_read_at >= _READ_ROLES_S or now < self._roles_read_at:
            self._roles_read_at = now
            self._read_roles()
        role_views = {name: tail.view(now, watched) for name, tail in self._roles.items()}
        training = self.training
        if training is not self:
            trainer = role_views[training.record.name]
            job = replace(job, **{name: getattr(trainer, name) for name in _TRAINER_FIELDS})
        restarts = dict(job.restarts)
        for role_view in role_views.values():
            for cause, count in role_view.restarts.items():
                restarts[cause] = restarts.get(cause, 0) + count
        job_attempts = 1 + job.restarted if role_views else 0  # a job restarts all its roles together
        suspicion = next(
            (role_view.suspicion for role_view in role_views.values() if role_view.suspicion is not None), None
        )
        job = replace(
            job,
            attempts=max([job_attempts, *(role_view.attempts for role_view in role_views.values())]),
            restarts=restarts,
            suspicion=suspicion if job.state in (RUNNING, UNKNOWN) else None,
            servers=tuple(self._find_server_loads(role_views, now, job.state == RUNNING)),
        )
        if not watched:
            return job
        ranks = tuple(self._fill_in_rank(rank, role_views) for rank in job.ranks)
        return replace(job, ranks=ranks, roles=group_by_role(ranks))

    def _read_roles(self) -> None:
        for record in run_index.list_roles(self.record).values():
            tail = self._roles.get(record.name)
            if tail is None or tail.record.dir != record.dir:
                self._roles[record.name] = tail = RunTail(record, self._whole_curves)
            tail.record = record

    def _find_server_loads(
        self, role_views: Mapping[str, RunView], now: float, is_running: bool
    ) -> Iterator[ServerLoad]:
        """Yield the load of each server role, from its run directory or from the metrics page that the job reads."""
        for name in dict.fromkeys((*_first_ranks(self.record), *role_views)):
            role_view = role_views.get(name)
            if role_view is not None and role_view.servers:
                yield replace(role_view.servers[0], role=name)
            elif name in self.events.server_counts:
                yield _compute_load_from_counts(name, self.events.server_counts[name], now, is_running)

    def _fill_in_rank(self, planned: RankView, role_views: dict[str, RunView]) -> RankView:
        """Return a planned rank with the state that its role's run has recorded."""
        role_view = role_views.get(planned.role)
        ranks = role_view.ranks if role_view is not None else ()
        rank = next((rank for rank in ranks if rank.rank == planned.role_rank), None)
        if rank is None:
            return planned
        rank = replace(rank, rank=planned.rank, role=planned.role, role_rank=planned.role_rank)
        counts_text = self._format_counts(planned.role, planned.role_rank)
        # A server makes no steps, so show the number of requests it has answered as its phase.
        return replace(rank, phase=rank.phase or counts_text, step=rank.step or None) if counts_text else rank

    def _format_counts(self, role: str, replica: int) -> str:
        tail = self._roles.get(role)
        samples = tail.server_samples.get(replica) if tail is not None else None
        if samples:
            counts: tuple[int, int] | None = samples[-1].requests, samples[-1].tokens
        else:
            counts_history = self.events.server_counts.get(role)
            replicas = counts_history[-1][1] if counts_history else []
            counts = _parse_counts(replicas[replica]) if 0 <= replica < len(replicas) else None
        return f"{plural(counts[0], 'request')}, {plural(counts[1], 'token')}" if counts is not None else ""

    @property
    def training(self) -> RunTail:
        """The run of the role that trains, whose metrics are shown as the job's, or the job's run until a role has trained."""
        trainer = max(self._roles.values(), key=lambda tail: tail.training_score, default=None)
        return trainer if trainer is not None and trainer.training_score else self

    @property
    def first_rank(self) -> int:
        return _first_ranks(self.record).get(self.training.record.name, 0)

    @property
    def interval(self) -> int:
        training = self.training
        return training.interval if training is not self else super().interval

    def curve(self, name: str) -> Curve:
        training = self.training
        if training is self:
            return super().curve(name)
        return self._update_server_curves().get(name, Curve()) if name in SERVER_METRICS else training.curve(name)

    def curve_names(self) -> list[str]:
        return [*super().curve_names(), *(name for name, curve in self._update_server_curves().items() if curve.steps)]

    def _update_server_curves(self) -> dict[str, Curve]:
        """Return the curves of SERVER_METRICS; compute them only when steps or samples were added."""
        metrics = self.training.metrics
        if metrics is None or not metrics.clock.steps:
            return {}
        clock = metrics.clock
        newest = [samples[-1].time for tail in self._roles.values() for samples in tail.server_samples.values()]
        key = (len(clock.steps), clock.steps[-1], tuple(newest), metrics.interval)
        if key != self._server_curves_key:
            self._server_curves_key = key
            replicas = [samples for tail in self._roles.values() for samples in read_samples(tail.record.dir).values()]
            self._server_curves = compute_server_curves(clock, replicas, metrics.interval)
        return self._server_curves


def compute_server_curves(clock: Curve, replicas: Sequence[Sequence[ServerSample]], interval: int) -> dict[str, Curve]:
    """Return the curves of SERVER_METRICS, whose value at a step is the rate over the last `interval` steps.

    `clock` has the time at which each step was logged. A step gets a value once all replicas have a sample after it.
    """
    curves = {name: Curve() for name in SERVER_METRICS}
    times = [[float(sample.time) for sample in samples] for samples in replicas]
    first_ranks = max((column[0] for column in times), default=math.inf)
    last = min((column[-1] for column in times), default=-math.inf)
    points = [(step, time) for step, time in zip(clock.steps, clock.values, strict=True) if first_ranks <= time <= last]
    for curve, field in zip(curves.values(), ("requests", "tokens"), strict=True):
        columns = [[getattr(sample, field) for sample in samples] for samples in replicas]
        totals = [sum(_interpolate(time, *column) for column in zip(times, columns, strict=True)) for _, time in points]
        for index in range(1, len(points)):
            before = max(0, index - interval)
            seconds = points[index][1] - points[before][1]
            if seconds > 0:
                curve.add(points[index][0], max(0.0, totals[index] - totals[before]) / seconds)
    return curves


def _interpolate(time: float, times: Sequence[float], totals: Sequence[int]) -> float:
    """Return a total at a time between the first and the last sample."""
    index = bisect.bisect_right(times, time)
    if index == len(times):
        return totals[-1]
    share = (time - times[index - 1]) / (times[index] - times[index - 1])
    return totals[index - 1] + share * (totals[index] - totals[index - 1])


def _compute_load_from_counts(
    role: str, counts_history: Sequence[tuple[float, list[Any]]], now: float, is_running: bool
) -> ServerLoad:
    """Compute the load of a role from its counts, which are recorded only when they change."""
    sums: list[tuple[float, int, int]] = []
    for time, replicas in counts_history:
        counts = [_parse_counts(replica) or (0, 0) for replica in replicas]
        sums.append((time, sum(requests for requests, _ in counts), sum(tokens for _, tokens in counts)))
    newest = sums[-1]
    first_ranks = next(point for point in sums if point[0] >= newest[0] - _RATE_S)
    end = newest[0] if now - newest[0] <= _RATE_S / 2 else now
    seconds = end - first_ranks[0]
    is_known = is_running and seconds > 0 and newest[0] > first_ranks[0]
    requests_per_s, tokens_per_s = (
        max(0, newest[column] - first_ranks[column]) / seconds if is_known else None for column in (1, 2)
    )
    return ServerLoad(
        role, len(counts_history[-1][1]), newest[1], newest[2], requests_per_s=requests_per_s, tokens_per_s=tokens_per_s
    )


def _parse_counts(counts: Any) -> tuple[int, int] | None:
    """Return the recorded (requests, tokens) of a replica, or None if they are not valid."""
    numbers = [as_int64(counts.get(key)) for key in ("requests", "tokens")] if isinstance(counts, dict) else []
    if not numbers or any(number is None or not 0 <= number < 10**18 for number in numbers):
        return None
    return numbers[0] or 0, numbers[1] or 0
