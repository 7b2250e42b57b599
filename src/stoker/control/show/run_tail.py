"""Reads one run directory incrementally for the viewers: each call reads only what was appended since the last one.

Incomplete or missing files are not an error.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from stoker.contract import checkpoints, layout
from stoker.contract.env_vars import RECIPES
from stoker.contract.frozen import replace
from stoker.contract.safe_io import open_below
from stoker.contract.text import escape
from stoker.control.record import run_record
from stoker.control.record.history import HistoryColumns, HistoryPoint, HistoryTail, read_newest_columns
from stoker.control.record.serving_log import ServerSample, compute_rates, read_recent_samples
from stoker.control.show.curves import Curve, MetricsTail, average_curve, mean_of_newest, read_newest_line
from stoker.control.show.metrics_columns import parse_lines
from stoker.control.show.snapshot import (
    AVERAGED,
    REWARD,
    RUNNING,
    UNKNOWN,
    Metric,
    RankView,
    RoleView,
    RunView,
    ServerLoad,
    Suspicion,
    as_int64,
    finite,
    parse_finite,
    parse_metric,
)

RECENT = 60  # values of a sparkline
_BLOCK = 16 << 20  # bytes of events.jsonl read at once
_MAX_SUMMARY = 400  # characters
_MAX_SERVER_COUNTS = 32  # per server role: a rate needs only the newest, and a run of weeks writes a million
_HISTORY_LAG_S = 1.0  # beats are collected twice a second, so the steps of a history point may be this much older


class EventTail:
    """Reads events.jsonl incrementally and keeps the state that the events describe."""

    def __init__(self, run_dir: str) -> None:
        self._dir = run_dir
        self._clear()

    def _clear(self) -> None:
        self._inode = self._offset = 0
        # Times of the first and the last event since the run was last started.
        self.event_times: tuple[float, float] | None = None
        self.earlier_run_s = 0.0  # run time of the earlier starts
        self.restarts: dict[str, int] = {}  # by cause
        self.attempt: int | None = None
        # These describe the newest attempt, by rank:
        self.pids: dict[int, int] = {}
        self.exits: dict[int, tuple[int | None, int]] = {}  # (exit code, steps)
        self.stopped: set[int] = set()  # ranks that ended because the launcher signalled them
        self.phases: dict[int, tuple[float, str]] = {}  # (time it was entered, name)
        self.slow: dict[int, dict[str, Any]] = {}  # the watch's finding about a slow rank
        self.suspicions: dict[str, Suspicion] = {}  # by kind
        # Role of a job -> (time, counts of each replica), newest last. It has the servers whose metrics page the job
        # reads; `stoker serve` records its counts in its run directory.
        self.server_counts: dict[str, deque[tuple[float, list[Any]]]] = {}

    def read_new(self) -> None:
        """Apply the events that were written since the last call; a replaced file is read from its start."""
        try:
            with os.fdopen(open_below(self._dir, layout.EVENTS), "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._clear()
                    self._inode = status.st_ino
                while self._offset < status.st_size:
                    file.seek(self._offset)
                    data = file.read(min(_BLOCK, status.st_size - self._offset))
                    end = data.rfind(b"\n") + 1
                    if not end:
                        break  # the line is still being written
                    for events in parse_lines(data[:end]):
                        for event in events:
                            self.apply(event)
                    self._offset += end
        except OSError:
            return  # the file is not written yet, or was deleted; read_run reports a damaged record

    def apply(self, event: dict[str, Any]) -> None:
        """Update the state with an event; events of an unknown kind only move the time of the last event."""
        kind, time = event.get("event"), event.get("time", 0.0)
        if not isinstance(kind, str) or type(time) not in (int, float) or not 0 <= time <= 1e11:
            return
        first, last = self.event_times or (time, 0.0)
        if kind == "run" or self.event_times is None:
            if self.event_times is not None:
                self.earlier_run_s += max(0.0, last - first)
            launcher_start = parse_finite(event.get("began"))
            # Count from the time that the launcher recorded, so that the run time agrees with its last console line.
            first = launcher_start if launcher_start is not None and last <= launcher_start <= time else time
        self.event_times = first, time
        rank = as_int64(event.get("rank"))
        rank = rank if rank is not None and rank >= 0 else None
        if kind == "attempt":
            self.attempt = as_int64(event.get("attempt"))
            for state in (self.pids, self.exits, self.stopped, self.phases, self.slow, self.suspicions):
                state.clear()
        elif kind == "restart":
            cause = escape(str(event.get("cause")), 80)
            self.restarts[cause] = self.restarts.get(cause, 0) + 1
        elif kind in ("relief", "busy"):
            self.suspicions.pop("suspicion", None)
        elif kind == "role-served" and isinstance(event.get("replicas"), list) and isinstance(event.get("role"), str):
            server_counts = self.server_counts.setdefault(event["role"], deque(maxlen=_MAX_SERVER_COUNTS))
            server_counts.append((float(time), event["replicas"]))
        elif kind in ("suspicion", "straggler", "numbers") and isinstance(event.get("summary"), str):
            self._add_suspicion(kind, float(time), rank, event)
        elif kind == "straggler-over":
            if rank is not None:
                self.slow.pop(rank, None)
            straggler = self.suspicions.get("straggler")
            if straggler is not None and straggler.rank == rank:
                del self.suspicions["straggler"]
        elif rank is None:
            return
        elif kind == "rank-up" and (pid := as_int64(event.get("pid"))) is not None:
            self.pids[rank] = pid
        elif kind == "rank-exit":
            self.exits[rank] = as_int64(event.get("code")), as_int64(event.get("steps")) or 0
            if event.get("ours") is True:
                self.stopped.add(rank)
        elif kind == "phase" and isinstance(event.get("name"), str):
            self.phases[rank] = float(time), escape(event["name"], 80)

    def _add_suspicion(self, kind: str, time: float, rank: int | None, event: dict[str, Any]) -> None:
        waiting = event.get("waiting")
        ranks = waiting if isinstance(waiting, list) else ()
        waiting_ranks = tuple(other for other in ranks if as_int64(other) is not None)
        cause, summary = escape(str(event.get("cause")), 80), escape(event["summary"], _MAX_SUMMARY)
        silent_s = parse_finite(event.get("silent_s"))
        self.suspicions[kind] = Suspicion(time, kind, cause, summary, rank, waiting_ranks, silent_s)
        if kind == "straggler" and rank is not None:
            cost = {name: parse_finite(event.get(name)) for name in ("wait_s", "step_s")}
            self.slow[rank] = {**cost, "cause": cause, "summary": summary, "time": time}

    @property
    def suspicion(self) -> Suspicion | None:
        """The suspicion of a hang if there is one, because it ends the job. Otherwise the newest suspicion, or None."""
        newest = max(self.suspicions.values(), key=lambda suspicion: suspicion.time, default=None)
        return self.suspicions.get("suspicion") or newest


class RunTail:
    """Turns one run directory into a RunView.

    With `whole_curves` False it reads only the newest metrics, which are enough for lists.
    """

    def __init__(self, record: run_record.RunRecord, whole_curves: bool = True) -> None:
        self.record = record
        self._whole_curves = whole_curves
        self.events = EventTail(record.dir)
        self.metrics: MetricsTail | None = None  # None until the run is watched
        self._history: HistoryTail | None = None
        self.points: deque[HistoryPoint] = deque(maxlen=RECENT)
        self._stamps: tuple[Any, ...] = ()
        self._row: RunView | None = None
        self._newest_line: dict[str, Any] = {}
        self._loss_of_history = Curve()  # for scripts without metrics.jsonl
        self._headline_points: tuple[tuple[int, Metric], ...] | None = None  # None: outdated
        self._columns: HistoryColumns = {}  # newest columns of the ranks, if the history was not read
        self.server_samples: dict[int, tuple[ServerSample, ...]] = {}  # newest samples of each replica, by rank

    def view(self, now: float, watched: bool) -> RunView:
        """Return the run as a list shows it. If it is `watched`, also fill in its ranks and its curve."""
        stamps = tuple(_file_stamp(self.record.dir, name) for name in (layout.EVENTS, layout.METRICS))
        state = run_record.run_status(self.record)
        if watched:
            self._read_metrics_and_history()
        elif self._row is not None and stamps == self._stamps and state == self._row.state != RUNNING:
            return self._row
        if stamps != self._stamps:
            self._stamps = stamps
            self.events.read_new()
            self._newest_line = read_newest_line(self.record.dir) if self.metrics is None else {}
            is_step_known = watched or (self._newest_line and (self.events.exits or not self._is_recipe))
            self._columns = {} if is_step_known else read_newest_columns(self.record.dir)
        self._row = self._make_row(now, state)
        if not watched:
            return self._row
        ranks = tuple(self._make_rank_views(now, state))
        if self._headline_points is None:
            self._headline_points = tuple(self.mean_curve(self._row.headline).points())
        return replace(self._row, ranks=ranks, roles=group_by_role(ranks), curve=self._headline_points)

    def view_at(self, point: HistoryPoint, metrics: dict[str, Any], curve: Curve) -> RunView:
        """Return the run as it was at `point`, for a replay.

        `metrics` are the newest ones at that time. The caller must have applied only the events up to that time.
        """
        self.add_point(point)
        self._newest_line = metrics
        row = self._make_row(point.time, RUNNING)
        ranks = tuple(self._make_rank_views(point.time, RUNNING))
        points = curve.points(last=metrics.get("step", -1)) if curve.steps else self._loss_of_history.points()
        return replace(row, verdict=None, ranks=ranks, roles=group_by_role(ranks), curve=tuple(points))

    def _read_metrics_and_history(self) -> None:
        if self.metrics is None:
            self.metrics = MetricsTail(self.record.dir, newest_only=not self._whole_curves)
        if self._history is None:
            self._history = HistoryTail(self.record.dir)
        if self.metrics.read_new():
            self._headline_points = None
        for point in self._history.read_new():
            self.add_point(point)

    def add_point(self, point: HistoryPoint) -> None:
        """Append a history point, and its loss to the curve that scripts without metrics.jsonl have."""
        self.points.append(point)
        self._headline_points = None
        # A script without metrics.jsonl may report or print its loss. Use the loss of the lowest rank that has one.
        for step, value in zip(point.ranks.get("step", ()), point.ranks.get("loss", ()), strict=False):
            loss = parse_metric(value)
            if as_int64(step) is not None and loss is not None:
                steps = self._loss_of_history.steps
                if steps and step < steps[-1]:  # a new attempt repeats steps
                    self._loss_of_history = Curve()
                self._loss_of_history.add(step, float(loss))
                return

    # ---- answers for viewers ----

    @property
    def training(self) -> RunTail:
        """The run whose metrics are shown. In a multi-role job that is the trainer's run."""
        return self

    @property
    def first_rank(self) -> int:
        """The number that rank 0 of `training` has in this run."""
        return 0

    @property
    def training_score(self) -> int:
        """A score from 0 to 4 for the evidence that this run trains; a job takes the role with the highest as its trainer."""
        row = self._row
        if row is None:
            return 0
        if REWARD in row.metrics:
            return 4
        if self._is_recipe:
            return 3
        if row.metrics:
            return 2
        return 1 if row.step or row.loss is not None else 0

    @property
    def interval(self) -> int:
        """Steps over which viewers average: the logging interval if metrics.jsonl has every step, else 1."""
        return self.metrics.interval if self.metrics is not None else 1

    @property
    def newest_point(self) -> HistoryPoint | None:
        """The newest history point of the newest attempt."""
        newest = self.points[-1] if self.points else None
        return newest if newest is not None and newest.attempt == self.events.attempt else None

    def curve_names(self) -> list[str]:
        """Return the names of all curves of a watched run."""
        metrics = self.training.metrics
        names = list(metrics.curves) if metrics is not None else []
        return names if "loss" in names or not self.curve("loss").steps else ["loss", *names]

    def curve(self, name: str) -> Curve:
        """Return a curve of a watched run, or an empty curve if the run has no such metric."""
        curve = self.metrics.curves.get(name) if self.metrics is not None else None
        if curve is not None:
            return curve
        return self._loss_of_history if name == "loss" else Curve()

    def mean_curve(self, name: str) -> Curve:
        """Return the curve as viewers draw it: AVERAGED metrics are means over the logging interval."""
        return average_curve(self.curve(name), self.interval if name in AVERAGED else 1)

    # ---- the row ----

    def _make_row(self, now: float, state: str) -> RunView:
        record, events = self.record, self.events
        values = self._newest_metrics()
        last_step, metrics_time = self._newest_step()
        # Steps count from 0, and a line is written once its step is done.
        logged_steps = last_step + 1 if last_step is not None else None
        steps = logged_steps
        if logged_steps is None or self._is_recipe:
            steps = max(
                (count for count in (logged_steps, self._count_steps_of_ranks()) if count is not None), default=None
            )
        total = values.get("total_steps")
        total_steps = int(total) if isinstance(total, (int, float)) and 0 < total < 1 << 62 else None
        losses = (parse_metric(value) for value in self._rank_column("loss"))
        first_loss = next((loss for loss in losses if loss is not None), None)
        command = record.data.get("command")
        launcher_host = record.launcher[2]
        planned_hosts = (rank.get("host") or launcher_host for rank in planned_ranks(record))
        hosts = tuple(dict.fromkeys(host for host in planned_hosts if isinstance(host, str)))
        last_event_time = events.event_times[1] if events.event_times is not None else None
        self.server_samples = read_recent_samples(record.dir)
        servers: tuple[ServerLoad, ...] = ()
        if self.server_samples:
            servers = (compute_server_load("", list(self.server_samples.values()), now, state == RUNNING),)
        return RunView(
            id=record.id,
            name=record.name,
            dir=record.dir,
            user=record.user,
            mine=record.mine,
            state=state,
            started=record.started,
            updated=max((time for time in (last_event_time, metrics_time) if time is not None), default=None),
            seconds=self._compute_run_time(now, state),
            world=record.ranks,
            attempts=(events.attempt or 0) + 1 if events.attempt is not None else 0,
            attempt=events.attempt,
            restarts=dict(events.restarts),
            step=steps,
            total_steps=total_steps,
            loss=values.get("loss", first_loss),
            tokens_per_s=values.get("tokens_per_s"),
            mfu=values.get("mfu"),
            grad_norm=values.get("grad_norm"),
            lr=values.get("lr"),
            eta_s=self._estimate_eta(state, steps, total_steps, values),
            phase=self._find_phase(),
            metrics=values,
            suspicion=events.suspicion if state in (RUNNING, UNKNOWN) else None,
            verdict=record.verdict,
            problem=self.metrics.problem if self.metrics is not None else "",
            command=escape(" ".join(map(str, command)), 500) if isinstance(command, list) else "",
            hosts=hosts or ((launcher_host,) if launcher_host else ()),
            servers=servers,
        )

    def _newest_metrics(self) -> dict[str, Metric]:
        """Return the newest value of each metric. Those in AVERAGED are means over the logging interval."""
        if self.metrics is None:
            values = ((name, parse_metric(value)) for name, value in self._newest_line.items())
            return {
                name: value for name, value in values if value is not None and name not in ("step", "time", "schema")
            }
        means = dict(self.metrics.newest)
        interval = self.metrics.interval
        for name in AVERAGED & means.keys() if interval > 1 else ():
            recent = (parse_metric(value) for value in self.metrics.curves[name].values[-interval:])
            means[name] = mean_of_newest(recent, means[name])
        return means

    def _newest_step(self) -> tuple[int | None, float | None]:
        """Return the step and the time of the newest line of metrics.jsonl, None where unknown."""
        if self.metrics is not None:
            return self.metrics.step, self.metrics.time
        return as_int64(self._newest_line.get("step")), parse_finite(self._newest_line.get("time"))

    @property
    def _is_recipe(self) -> bool:
        """True for a `stoker train` stage, whose ranks report every step while metrics.jsonl may have only every tenth."""
        return str(self.record.data.get("script") or "").startswith(RECIPES)

    def _count_steps_of_ranks(self) -> int | None:
        """Return the fewest steps that any running rank has reported, or None.

        If none has, return the fewest of the ranks that exited. A resumed recipe that has made no step since has those of
        its checkpoint.
        """
        exits = self.events.exits
        members = self.newest_point.members.ranks if self.newest_point is not None else ()
        first_rank = members[0] if members else 0  # ranks are numbered without gaps
        column = enumerate(self._rank_column("step"), first_rank)
        steps = [step for rank, step in column if as_int64(step) is not None and rank not in exits]
        fewest = min(steps or [count for _, count in exits.values() if count], default=None)
        if not fewest and self._is_recipe:
            return checkpoints.find_newest_step(self.record.dir) or fewest
        return fewest

    def _rank_column(self, name: str) -> tuple[Any, ...]:
        columns = self.newest_point.ranks if self.newest_point is not None else self._columns
        return columns.get(name, ())

    def _find_phase(self) -> str:
        """Return the phase of the lowest rank that is in a phase, or ""."""
        ranks = self.newest_point.members.ranks if self.newest_point is not None else sorted(self.events.phases)
        return next((phase for phase in map(self._phase_of_rank, ranks) if phase), "")

    def _phase_of_rank(self, rank: int) -> str:
        """Return a rank's phase, or "".

        An event has it sooner than the history, but only the history shows that a phase has ended.
        """
        entered, name = self.events.phases.get(rank, (0.0, ""))
        if self.newest_point is None or entered > self.newest_point.time:
            return name
        return escape(str(self.newest_point.of_rank(rank).get("phase") or ""), 80)

    def _compute_run_time(self, now: float, state: str) -> float | None:
        """Return the seconds that the run has been running over all its starts, without the pauses between them."""
        times = self.events.event_times
        if times is None:
            return max(0.0, now - self.record.started) if state == RUNNING and self.record.started else None
        first, last = times
        return self.events.earlier_run_s + max(0.0, (now if state == RUNNING else last) - first)

    def _estimate_eta(
        self, state: str, steps: int | None, total: int | None, values: dict[str, Metric]
    ) -> float | None:
        if state != RUNNING or steps is None or total is None:
            return None
        per_step = finite(values.get("seconds_per_step"))
        if per_step is None and self.metrics is not None:
            per_step = self.metrics.step_s
        return parse_finite(max(0, total - steps) * per_step) if per_step is not None else None

    # ---- ranks ----

    def _make_rank_views(self, now: float, state: str) -> list[RankView]:
        ranks: list[RankView] = []
        for planned in planned_ranks(self.record):
            if as_int64(planned.get("rank")) is None:
                continue
            role, label, host = (
                planned[key] if isinstance(planned.get(key), str) else "" for key in ("role", "label", "host")
            )
            role_rank = planned["role_rank"] if type(planned.get("role_rank")) is int else planned["rank"]
            gpu = planned["gpu"] if isinstance(planned.get("gpu"), str) else None
            view = RankView(planned["rank"], role, role_rank, label, host or self.record.launcher[2], gpu)
            ranks.append(self._fill_in_state(view, now, state))
        return ranks

    def _fill_in_state(self, view: RankView, now: float, state: str) -> RankView:
        """Fill in the state of a planned rank from the events and the newest history point."""
        events, point, rank = self.events, self.newest_point, view.rank
        row = point.of_rank(rank) if point is not None else {}
        point_age = max(0.0, now - point.time) if point is not None and state == RUNNING else 0.0
        exit_code, steps_at_exit = events.exits.get(rank, (None, 0))
        reported = as_int64(row.get("step"))
        ages = {name: parse_finite(row.get(name)) for name in ("beat_age", "collective_age")}
        changes: dict[str, Any] = {
            "pid": events.pids.get(rank),
            "state": self._state_of_rank(rank, row, state),
            "exit_code": exit_code,
            "step": max(reported or 0, steps_at_exit, self._count_logged_steps(rank)) or reported,
            "step_s": parse_finite(row.get("step_s")),
            "waiting": parse_finite(row.get("waiting")),
            "phase": self._phase_of_rank(rank),
            "memory": as_int64(row.get("memory")),
            "loss": parse_metric(row.get("loss")),
            "recent": {name: self._recent_of_rank(name, rank) for name in ("step_s", "waiting")},
            **{name: None if age is None else age + point_age for name, age in ages.items()},
        }
        return replace(view, **changes)

    def _count_logged_steps(self, rank: int) -> int:
        """Return the number of steps that a rank must have made according to metrics.jsonl, or 0.

        A recipe's rank 0 writes a line when a step is done, and every rank takes part in each step. The line counts for
        the other ranks only while the newest history point is older: a newer point shows a hanging rank that is behind.
        """
        last_step, time = self._newest_step()
        if last_step is None or not self._is_recipe or rank not in self.events.pids:
            return 0
        point = self.newest_point
        is_history_older = point is None or time is None or point.time < time + _HISTORY_LAG_S
        return last_step + 1 if rank == 0 or is_history_older else 0

    def _state_of_rank(self, rank: int, row: dict[str, Any], state: str) -> str:
        events = self.events
        if rank in events.exits:
            if events.exits[rank][0] == 0:
                return "ended"
            return "stopped" if rank in events.stopped else "failed"
        if state not in (RUNNING, UNKNOWN):
            return "gone"
        if rank not in events.pids:
            return "waiting"
        return "stopped" if str(row.get("state") or "") in ("T", "t") else "running"

    def _recent_of_rank(self, name: str, rank: int) -> tuple[float | None, ...]:
        values: list[float | None] = []
        for point in self.points:
            column, members = point.ranks.get(name, ()), point.members.ranks
            index = rank - members[0] if members else -1  # ranks are numbered without gaps
            is_known = 0 <= index < len(members) and members[index] == rank and index < len(column)
            values.append(parse_finite(column[index]) if is_known else None)
        return tuple(values)


def planned_ranks(record: run_record.RunRecord) -> list[dict[str, Any]]:
    """Return the ranks of the plan in run.json, skipping entries that are not objects."""
    ranks = (record.data.get("plan") or {}).get("ranks")
    return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []


def compute_server_load(
    role: str, replicas: Sequence[Sequence[ServerSample]], now: float, is_running: bool
) -> ServerLoad:
    """Sum the newest sample of each replica; every replica must have at least one sample."""
    newest = [samples[-1] for samples in replicas]
    replica_rates = [compute_rates(samples, now) for samples in replicas] if is_running else []
    known_rates = [rate for rate in replica_rates if rate.requests is not None and rate.tokens is not None]
    return ServerLoad(
        role,
        len(newest),
        requests=sum(sample.requests for sample in newest),
        tokens=sum(sample.tokens for sample in newest),
        prompt_tokens=sum(sample.prompt_tokens for sample in newest),
        running=sum(sample.running for sample in newest) if is_running else None,
        waiting=sum(sample.waiting for sample in newest) if is_running else None,
        weights_version=min(sample.weights_version for sample in newest),
        requests_per_s=sum(rate.requests or 0.0 for rate in known_rates) if known_rates else None,
        tokens_per_s=sum(rate.tokens or 0.0 for rate in known_rates) if known_rates else None,
    )


def group_by_role(ranks: tuple[RankView, ...]) -> tuple[RoleView, ...]:
    by_name: dict[str, list[int]] = {}
    for rank in ranks:
        by_name.setdefault(rank.role, []).append(rank.rank)
    return tuple(RoleView(name, len(members), tuple(members)) for name, members in by_name.items())


def _file_stamp(run_dir: str, name: str) -> tuple[int, int, int] | None:
    """Return a file's inode, modification time and size, which change whenever it does, or None if it does not exist."""
    try:
        status = os.stat(os.path.join(run_dir, name), follow_symlinks=False)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class RecordCache:
    """Calls run_record.read_run, but only for run directories that have changed."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[tuple[Any, ...], run_record.RunRecord | None]] = {}

    def __call__(self, run_dir: str) -> run_record.RunRecord | None:
        names = (layout.RUN, layout.VERDICT, layout.EVENTS)  # the events hold the verdict if verdict.json is missing
        stamps = (
            *(_file_stamp(run_dir, name) for name in names),
            _file_stamp(os.path.dirname(run_dir), os.path.basename(run_dir)),
        )
        cached = self._records.get(run_dir)
        if cached is not None and cached[0] == stamps:
            return cached[1]
        record = run_record.read_run(run_dir)
        self._records[run_dir] = stamps, record
        return record

    def forget_others(self, run_dirs: set[str]) -> None:
        """Drop the records of all other run directories."""
        for deleted in self._records.keys() - run_dirs:
            del self._records[deleted]
