"""One run directory, looked at again and again: each look reads only what is new. What is half written or gone is shown as it is."""

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
from stoker.control.record.history import HistoryColumns, HistoryPoint, HistoryTail, newest_columns
from stoker.control.record.serving_log import ServerSample, rates, recent_samples
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
    parse_metric,
)

RECENT = 60  # values of a sparkline
_BLOCK = 16 << 20
_TEXT = 400  # characters of a summary
_SERVED = 32  # counts of a role's servers that are kept: their rate needs the newest, and a run of weeks has a million
_HISTORY_LAG_S = 1.0  # beats are collected twice a second, so a moment has steps of up to this long before it


class EventTail:
    """events.jsonl, and what it adds up to."""

    def __init__(self, run_dir: str) -> None:
        self._dir = run_dir
        self._clear()

    def _clear(self) -> None:
        self._inode = self._at = 0
        self.start: tuple[float, float] | None = None  # first and last event of the newest start of the run
        self.before = 0.0  # seconds that the starts before took
        self.restarts: dict[str, int] = {}
        self.attempt: int | None = None
        self.up: dict[int, int] = {}  # rank -> pid, of the newest attempt
        self.ended: dict[int, tuple[int | None, int]] = {}  # rank -> (exit code, steps)
        self.stopped: set[int] = set()  # ranks that ended because the launcher signalled them
        self.phases: dict[int, tuple[float, str]] = {}  # rank -> when it entered it
        self.suspicions: dict[str, Suspicion] = {}
        self.slow: dict[int, dict[str, Any]] = {}  # rank -> what the watch found out
        # Role of a job -> what each of its replicas had counted, and when; the newest last. Of servers that have a page of
        # metrics; `stoker serve` counts in its own run directory.
        self.served: dict[str, deque[tuple[float, list[Any]]]] = {}

    def look(self) -> None:
        try:
            with os.fdopen(open_below(self._dir, layout.EVENTS), "rb") as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._inode or about.st_size < self._at:
                    self._clear()
                    self._inode = about.st_ino
                while self._at < about.st_size:
                    file.seek(self._at)
                    data = file.read(min(_BLOCK, about.st_size - self._at))
                    end = data.rfind(b"\n") + 1
                    if not end:
                        break  # half written
                    for block in parse_lines(data[:end]):
                        for event in block:
                            self.take(event)
                    self._at += end
        except OSError:
            return  # none yet, or gone; a damaged record is reported by reader.read

    @property
    def last(self) -> float | None:
        return self.start[1] if self.start else None

    @property
    def begin(self) -> float | None:
        """Of the newest start."""
        return self.start[0] if self.start else None

    def take(self, event: dict[str, Any]) -> None:
        kind, when = event.get("event"), event.get("time", 0.0)
        if not isinstance(kind, str) or type(when) not in (int, float) or not 0 <= when <= 1e11:
            return
        begin, end = self.start or (when, 0.0)
        if kind == "run" or self.start is None:
            began = finite(parse_metric(event.get("began")))
            if self.start is not None:
                self.before += max(0.0, end - begin)
            begin = began if began is not None and end <= began <= when else when  # as the run's last line counts
        self.start = begin, when
        rank = as_int64(event.get("rank"))
        rank = rank if rank is not None and rank >= 0 else None
        if kind == "attempt":
            self.attempt = as_int64(event.get("attempt"))
            for of_attempt in (self.up, self.ended, self.stopped, self.phases, self.slow, self.suspicions):
                of_attempt.clear()
        elif kind == "restart":
            cause = escape(str(event.get("cause")), 80)
            self.restarts[cause] = self.restarts.get(cause, 0) + 1
        elif kind in ("relief", "busy"):
            self.suspicions.pop("suspicion", None)
        elif kind == "role-served" and isinstance(event.get("replicas"), list) and isinstance(event.get("role"), str):
            served = self.served.setdefault(event["role"], deque(maxlen=_SERVED))
            served.append((float(when), event["replicas"]))
        elif kind == "straggler-over":
            self._over(rank)
        elif kind in ("suspicion", "straggler", "numbers") and isinstance(event.get("summary"), str):
            self._suspect(kind, float(when), rank, event)
        elif rank is not None:
            self._of_rank(kind, rank, event, float(when))

    def _of_rank(self, kind: str, rank: int, event: dict[str, Any], when: float) -> None:
        if kind == "rank-up" and (pid := as_int64(event.get("pid"))) is not None:
            self.up[rank] = pid
        elif kind == "rank-exit":
            self.ended[rank] = as_int64(event.get("code")), as_int64(event.get("steps")) or 0
            if event.get("ours") is True:
                self.stopped.add(rank)
        elif kind == "phase" and isinstance(event.get("name"), str):
            self.phases[rank] = when, escape(event["name"], 80)

    def _suspect(self, kind: str, when: float, rank: int | None, event: dict[str, Any]) -> None:
        waiting = event.get("waiting") if isinstance(event.get("waiting"), list) else []
        ranks = tuple(one for one in waiting or () if as_int64(one) is not None)
        cause, summary = escape(str(event.get("cause")), 80), escape(event["summary"], _TEXT)
        silent = parse_metric(event.get("silent_s"))
        self.suspicions[kind] = Suspicion(when, kind, cause, summary, rank, ranks, finite(silent))
        if kind == "straggler" and rank is not None:
            told = {name: finite(parse_metric(event.get(name))) for name in ("wait_s", "step_s")}
            self.slow[rank] = {**told, "cause": cause, "summary": summary, "time": when}

    def _over(self, rank: int | None) -> None:
        """It is no longer slow."""
        if rank is not None:
            self.slow.pop(rank, None)
        told = self.suspicions.get("straggler")
        if told is not None and told.rank == rank:
            del self.suspicions["straggler"]

    @property
    def suspicion(self) -> Suspicion | None:
        """The newest; one that ends the job before one that only costs time."""
        return self.suspicions.get("suspicion") or max(self.suspicions.values(), key=lambda one: one.time, default=None)


class RunTail:
    """`record`: as finder.look gives it. `whole_curves`: else only their newest values are read, which is all a page's list needs."""

    def __init__(self, record: run_record.RunRecord, whole_curves: bool = True) -> None:
        self.record = record
        self._whole_curves = whole_curves
        self.events = EventTail(record.dir)
        self.metrics: MetricsTail | None = None  # of a run that is watched
        self._history: HistoryTail | None = None
        self.moments: deque[HistoryPoint] = deque(maxlen=RECENT)
        self._signature: tuple[Any, ...] = ()
        self._row: RunView | None = None
        self._newest: dict[str, Any] = {}
        self._told = Curve()
        self._points: tuple[tuple[int, Metric], ...] | None = (
            None  # of the headline metric, until there is anything new
        )
        self._columns: HistoryColumns = {}  # of ranks, where the history was not read
        self.samples: dict[int, tuple[ServerSample, ...]] = {}  # of a server: the newest of each replica, by its rank

    def run(self, now: float, watched: bool) -> RunView:
        """A row of the list; of a run that is watched with its ranks and its curve."""
        signature = tuple(_stamp(self.record.dir, name) for name in (layout.EVENTS, layout.METRICS))
        state = run_record.run_status(self.record)
        if watched:
            self._look_closely()
        elif self._row is not None and signature == self._signature and state == self._row.state != RUNNING:
            return self._row
        if signature != self._signature:
            self._signature = signature
            self.events.look()
            self._newest = read_newest_line(self.record.dir) if self.metrics is None else {}
            known = watched or (self._newest and (self.events.ended or not self._is_recipe))
            self._columns = {} if known else newest_columns(self.record.dir)
        made = self._made(now, state)
        self._row = made
        return replace(made, **self._closely(now, made)) if watched else made

    def at(self, moment: HistoryPoint, metrics: dict[str, Any], curve: Curve) -> RunView:
        """As it was then: `metrics` are its newest by that time, and `events` has been told no more."""
        self.pass_by(moment)
        self._newest = metrics
        made = self._made(moment.time, RUNNING)
        ranks = tuple(self._ranks(self.record.data.get("plan") or {}, moment.time, RUNNING))
        points = curve.points(last=metrics.get("step", -1)) if curve.steps else self._told.points()
        return replace(made, verdict=None, ranks=ranks, roles=group_by_role(ranks), curve=tuple(points))

    def _look_closely(self) -> None:
        record = self.record
        if self.metrics is None:
            self.metrics = MetricsTail(record.dir, newest_only=not self._whole_curves)
            self._history = HistoryTail(record.dir)
        if self.metrics.look():
            self._points = None
        assert self._history is not None
        for moment in self._history.new():
            self.pass_by(moment)

    def pass_by(self, moment: HistoryPoint) -> None:
        self.moments.append(moment)
        self._points = None
        self._heard_loss(moment)

    @property
    def training(self) -> RunTail:
        """The run whose metrics are shown: of a job of roles its trainer's."""
        return self

    @property
    def first_rank(self) -> int:
        """Return the number that rank 0 of `training` has in this run."""
        return 0

    @property
    def evidence_of_training(self) -> int:
        """Return how sure it is that this run trains, as far as is known; 0: nothing shows it."""
        row = self._row
        if row is None:
            return 0
        signs = (bool(row.step) or row.loss is not None, bool(row.metrics), self._is_recipe, REWARD in row.metrics)
        return max((number for number, sign in enumerate(signs, 1) if sign), default=0)

    def curve_names(self) -> list[str]:
        """Return the names of all curves; of a run that is watched."""
        metrics = self.training.metrics
        names = list(metrics.curves) if metrics is not None else []
        return names if "loss" in names or not self.curve("loss").steps else ["loss", *names]

    @property
    def interval(self) -> int:
        """Steps over which viewers average: the logging interval where metrics.jsonl has every step, else 1."""
        return self.metrics.interval if self.metrics is not None else 1

    def _heard_loss(self, moment: HistoryPoint) -> None:
        """Of a script that writes no metrics, but beats or prints its loss: the lowest rank's."""
        for step, loss in zip(moment.ranks.get("step", ()), moment.ranks.get("loss", ()), strict=False):
            kept = parse_metric(loss)
            if as_int64(step) is not None and kept is not None:
                if self._told.steps and step < self._told.steps[-1]:  # an attempt that began again
                    self._told = Curve()
                self._told.add(step, float(kept))
                return

    @property
    def moment(self) -> HistoryPoint | None:
        """The newest of the attempt under way, or of the last one."""
        newest = self.moments[-1] if self.moments else None
        return newest if newest is not None and newest.attempt == self.events.attempt else None

    def _values(self) -> tuple[dict[str, Metric], int | None, float | None]:
        """(newest metrics, steps made, time of them), from metrics.jsonl."""
        if self.metrics is not None:
            return self._means_of_newest(self.metrics), self.metrics.step, self.metrics.time
        told = ((name, parse_metric(value)) for name, value in self._newest.items())
        known: dict[str, Metric] = {name: value for name, value in told if value is not None}
        step, when = known.pop("step", None), known.pop("time", None)
        known.pop("schema", None)
        return known, as_int64(step), finite(when)

    def _means_of_newest(self, metrics: MetricsTail) -> dict[str, Metric]:
        if metrics.interval == 1:
            return metrics.newest
        means = dict(metrics.newest)
        for name in AVERAGED & means.keys():
            values = (parse_metric(value) for value in metrics.curves[name].values[-metrics.interval :])
            means[name] = mean_of_newest(values, means[name])
        return means

    def _servers(self, now: float, state: str) -> tuple[ServerLoad, ...]:
        """Return what this run has served, if it is a server that writes counters."""
        self.samples = recent_samples(self.record.dir)
        return (server_load("", list(self.samples.values()), now, state == RUNNING),) if self.samples else ()

    def _made(self, now: float, state: str) -> RunView:
        record, events = self.record, self.events
        values, step, when = self._values()
        # A line is written when its step is done, and counts from 0.
        logged = step + 1 if step is not None else None
        done = logged if logged is not None and not self._is_recipe else self._done(logged)
        total = values.get("total_steps")
        total_steps = int(total) if isinstance(total, (int, float)) and 0 < total < 1 << 62 else None
        plan = record.data.get("plan") or {}
        command = record.data.get("command")
        loss = values.get("loss", self._loss_of_ranks())
        signs = [sign for sign in (events.last, when) if sign is not None]
        return RunView(
            id=record.id,
            name=record.name,
            dir=record.dir,
            user=record.user,
            mine=record.mine,
            state=state,
            started=record.started,
            updated=max(signs, default=None),
            seconds=self._seconds(now, state),
            world=record.ranks,
            attempts=(events.attempt or 0) + 1 if events.attempt is not None else 0,
            attempt=events.attempt,
            restarts=dict(events.restarts),
            step=done,
            total_steps=total_steps,
            loss=loss,
            tokens_per_s=values.get("tokens_per_s"),
            mfu=values.get("mfu"),
            grad_norm=values.get("grad_norm"),
            lr=values.get("lr"),
            eta_s=self._eta(state, done, total_steps, values),
            phase=self._phase(),
            metrics=dict(values),
            suspicion=events.suspicion if state in (RUNNING, UNKNOWN) else None,
            verdict=record.verdict,
            problem=self.metrics.problem if self.metrics is not None else "",
            command=escape(" ".join(map(str, command)), 500) if isinstance(command, list) else "",
            hosts=_hosts(plan, record),
            servers=self._servers(now, state),
        )

    @property
    def _is_recipe(self) -> bool:
        """Its ranks tell after every step how many are done; the metrics have a line for every tenth or so."""
        return str(self.record.data.get("script") or "").startswith(RECIPES)

    def _done(self, logged: int | None) -> int | None:
        beaten = self._beaten()
        if not beaten and self._is_recipe:  # it was resumed and has made no step since
            beaten = checkpoints.find_newest_step(self.record.dir) or beaten
        known = [steps for steps in (logged, beaten) if steps is not None]
        return max(known, default=None)

    def _beaten(self) -> int | None:
        """Steps, of the ranks that still run as their beats told, else as they ended."""
        ended = self.events.ended
        members = self.moment.members.ranks if self.moment is not None else ()
        first = members[0] if members else 0  # the ranks of a job are numbered without gaps
        beats = enumerate(self._of_ranks("step"), first)
        steps = [step for rank, step in beats if as_int64(step) is not None and rank not in ended]
        return min(steps or [made for _, made in ended.values() if made], default=None)

    def _loss_of_ranks(self) -> Metric:
        losses = (parse_metric(one) for one in self._of_ranks("loss"))
        return next((one for one in losses if one is not None), None)

    def _of_ranks(self, name: str) -> tuple[Any, ...]:
        columns = self.moment.ranks if self.moment is not None else self._columns
        return columns.get(name, ())

    def _phase(self) -> str:
        """Of the lowest rank that is in one."""
        known = self.moment.members.ranks if self.moment is not None else sorted(self.events.phases)
        return next((phase for phase in map(self._phase_of, known) if phase), "")

    def _phase_of(self, rank: int) -> str:
        """The coordinator knows when one is over; the event is there sooner."""
        entered, name = self.events.phases.get(rank, (0.0, ""))
        if self.moment is None or entered > self.moment.time:
            return name
        return escape(str(self.moment.of_rank(rank).get("phase") or ""), 80)

    def _seconds(self, now: float, state: str) -> float | None:
        """All starts of the run together, without the time between them. A start begins with the event "run"."""
        start = self.events.start
        if start is None:
            return max(0.0, now - self.record.started) if state == RUNNING and self.record.started else None
        begin, end = start
        return self.events.before + max(0.0, (now if state == RUNNING else end) - begin)

    def _eta(self, state: str, done: int | None, total: int | None, values: dict[str, Metric]) -> float | None:
        if state != RUNNING or done is None or total is None:
            return None
        per_step = finite(values.get("seconds_per_step"))
        if per_step is None and self.metrics is not None:
            per_step = self.metrics.step_s
        return finite(parse_metric(max(0, total - done) * per_step)) if per_step is not None else None

    def _closely(self, now: float, made: RunView) -> dict[str, Any]:
        assert self.metrics is not None
        plan = self.record.data.get("plan") or {}
        ranks = tuple(self._ranks(plan, now, made.state))
        if self._points is None:
            self._points = tuple(self.mean_curve(made.headline).points())
        return {"ranks": ranks, "roles": group_by_role(ranks), "curve": self._points}

    def curve(self, name: str) -> Curve:
        """Of a run that is watched; without points where it has no such metric."""
        known = self.metrics.curves.get(name) if self.metrics is not None else None
        if known is not None:
            return known
        return self._told if name == "loss" else Curve()

    def mean_curve(self, name: str) -> Curve:
        """Return the curve as viewers draw it: of AVERAGED metrics means over the logging interval."""
        return average_curve(self.curve(name), self.interval if name in AVERAGED else 1)

    def _ranks(self, plan: dict[str, Any], now: float, state: str) -> list[RankView]:
        told = plan.get("ranks")
        here = self.record.launcher[2]
        ranks: list[RankView] = []
        for one in told if isinstance(told, list) else ():
            if not isinstance(one, dict) or as_int64(one.get("rank")) is None:
                continue
            text = {name: one[name] if isinstance(one.get(name), str) else "" for name in ("role", "label", "host")}
            role_rank = one["role_rank"] if type(one.get("role_rank")) is int else one["rank"]
            gpu = one["gpu"] if isinstance(one.get("gpu"), str) else None
            place = RankView(one["rank"], text["role"], role_rank, text["label"], text["host"] or here, gpu)
            ranks.append(self._rank(place, now, state))
        return ranks

    def _rank(self, place: RankView, now: float, state: str) -> RankView:
        events, moment, number = self.events, self.moment, place.rank
        row = moment.of_rank(number) if moment is not None else {}
        age = max(0.0, now - moment.time) if moment is not None and state == RUNNING else 0.0
        code, steps = events.ended.get(number, (None, 0))
        made = max(as_int64(row.get("step")) or 0, steps, self._logged_by(number)) or as_int64(row.get("step"))
        aged = {name: finite(parse_metric(row.get(name))) for name in ("beat_age", "collective_age")}
        known: dict[str, Any] = {
            "pid": events.up.get(number),
            "state": self._state_of(number, row, state),
            "exit_code": code,
            "step": made,
            "step_s": finite(parse_metric(row.get("step_s"))),
            "waiting": finite(parse_metric(row.get("waiting"))),
            "phase": self._phase_of(number),
            "memory": as_int64(row.get("memory")),
            "loss": parse_metric(row.get("loss")),
            "recent": {name: self._recent_of_rank(name, number) for name in ("step_s", "waiting")},
            **{name: None if value is None else value + age for name, value in aged.items()},
        }
        return replace(place, **known)

    def _logged_by(self, rank: int) -> int:
        """Return the steps that metrics.jsonl proves the rank to have made.

        A recipe's rank 0 writes a line when its step is done, and the other ranks take part in each step. The history
        is up to two seconds older than that line. Where it is newer, the other ranks count as it says: one that hangs
        is behind.
        """
        _, logged, when = self._values()
        if logged is None or not self._is_recipe or rank not in self.events.up:
            return 0
        is_history_older = self.moment is None or when is None or self.moment.time < when + _HISTORY_LAG_S
        return logged + 1 if rank == 0 or is_history_older else 0

    def _state_of(self, rank: int, row: dict[str, Any], state: str) -> str:
        events = self.events
        if rank in events.ended:
            if events.ended[rank][0] == 0:
                return "ended"
            return "stopped" if rank in events.stopped else "failed"
        if rank not in events.up:
            return "waiting" if state in (RUNNING, UNKNOWN) else "gone"
        if state not in (RUNNING, UNKNOWN):
            return "gone"
        return "stopped" if str(row.get("state") or "") in ("T", "t") else "running"

    def _recent_of_rank(self, name: str, rank: int) -> tuple[float | None, ...]:
        found: list[float | None] = []
        for moment in self.moments:
            column, members = moment.ranks.get(name, ()), moment.members.ranks
            # The ranks of a job are numbered without gaps.
            at = rank - members[0] if members else -1
            there = 0 <= at < len(members) and members[at] == rank and at < len(column)
            found.append(finite(parse_metric(column[at])) if there else None)
        return tuple(found)


def server_load(role: str, replicas: Sequence[Sequence[ServerSample]], now: float, is_running: bool) -> ServerLoad:
    """`replicas`: the newest samples of each, none of them empty."""
    newest = [samples[-1] for samples in replicas]
    speeds = [rates(samples, now) for samples in replicas] if is_running else []
    known = [speed for speed in speeds if speed.requests is not None and speed.tokens is not None]
    return ServerLoad(
        role,
        len(newest),
        requests=sum(one.requests for one in newest),
        tokens=sum(one.tokens for one in newest),
        prompt_tokens=sum(one.prompt_tokens for one in newest),
        running=sum(one.running for one in newest) if is_running else None,
        waiting=sum(one.waiting for one in newest) if is_running else None,
        weights_version=min(one.weights_version for one in newest),
        requests_per_s=sum(one.requests or 0.0 for one in known) if known else None,
        tokens_per_s=sum(one.tokens or 0.0 for one in known) if known else None,
    )


def group_by_role(ranks: tuple[RankView, ...]) -> tuple[RoleView, ...]:
    by_name: dict[str, list[int]] = {}
    for rank in ranks:
        by_name.setdefault(rank.role, []).append(rank.rank)
    return tuple(RoleView(name, len(members), tuple(members)) for name, members in by_name.items())


def _hosts(plan: dict[str, Any], record: run_record.RunRecord) -> tuple[str, ...]:
    told = plan.get("ranks")
    names = (one.get("host") or record.launcher[2] for one in told or () if isinstance(one, dict))
    known = dict.fromkeys(name for name in names if isinstance(name, str)) if isinstance(told, list) else {}
    return tuple(known) or ((record.launcher[2],) if record.launcher[2] else ())


def _stamp(run_dir: str, name: str) -> tuple[int, int, int] | None:
    try:
        about = os.stat(os.path.join(run_dir, name), follow_symlinks=False)
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns, about.st_size


class RecordCache:
    """reader.read, of folders that have changed since."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[Any, ...], run_record.RunRecord | None]] = {}

    def __call__(self, run_dir: str) -> run_record.RunRecord | None:
        names = (layout.RUN, layout.VERDICT, layout.EVENTS)  # where there is no verdict.json the events may hold it
        stamp = (
            *(_stamp(run_dir, name) for name in names),
            _stamp(os.path.dirname(run_dir), os.path.basename(run_dir)),
        )
        known = self._known.get(run_dir)
        if known is not None and known[0] == stamp:
            return known[1]
        found = run_record.read_run(run_dir)
        self._known[run_dir] = stamp, found
        return found

    def forget(self, kept: set[str]) -> None:
        for gone in self._known.keys() - kept:
            del self._known[gone]
