"""The live snapshot: everything a viewer draws, at one moment, as frozen types with one JSON form.

Units are bytes, seconds, watts, degrees Celsius, hertz and shares from 0 to 1; times are seconds since 1970. What is not
known is None. A metric that is not a finite number is a word, as metrics.jsonl has it ("nan", "inf", "-inf"): `finite`
gives the number, or None.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from stoker.contract.evidence import Verdict
from stoker.contract.frozen import as_json, frozen
from stoker.contract.typed_values import Real, read_frozen
from stoker.control.machine.model import OFFLINE, OK, GpuGauges, Holder, HostGauges

__all__ = ["OFFLINE", "OK", "GpuGauges", "Holder", "HostGauges"]  # and what is defined here

SCHEMA = 1
RUNNING, UNKNOWN, LOST, DAMAGED = "running", "unknown", "lost", "damaged"  # and a verdict's own states
_WORDS = ("nan", "inf", "-inf")

Metric = Real | str | None  # typed.py reads annotations as they are written: fields spell it out

REWARD, LOSS = "reward", "loss"
# Metrics of a reinforcement-learning run in the order in which viewers list them, and what they are called there.
RL_METRICS = {
    REWARD: "reward",
    "kl": "KL",
    "entropy": "entropy",
    "length": "length",
    "cut": "truncated",
    "staleness": "staleness",
    "weights_version": "weights",
}
# Of these, viewers show means over the run's logging interval: in reinforcement learning single steps say little.
AVERAGED = frozenset((*RL_METRICS, LOSS, "correct", "grad_norm")) - {"weights_version"}
# Curves of a job's servers over the trainer's steps, and what they are called.
SERVER_METRICS = {"server_requests_per_s": "server requests/s", "server_tokens_per_s": "server tokens/s"}
SHARES = frozenset(("cut",))  # of these, shown in percent


def headline_metric(names: Collection[str]) -> str:
    """Return the metric that shows how far a run with metrics of these names has got."""
    return REWARD if REWARD in names else LOSS


def sort_metrics(names: Iterable[str]) -> list[str]:
    """Sort names of metrics for a viewer: reward and its companions of a run that has rewards, losses, then the rest."""
    known = list(names)
    first = [*RL_METRICS, *SERVER_METRICS, LOSS, "val_loss"] if REWARD in known else [LOSS, "val_loss"]
    return [name for name in first if name in known] + sorted(name for name in known if name not in first)


@frozen
class Suspicion:
    """What the watch reported of a run and has not taken back."""

    time: float
    kind: str  # suspicion, straggler, numbers
    cause: str  # an id of docs/verdicts.md
    summary: str
    rank: int | None = None
    waiting: tuple[int, ...] = ()  # ranks that wait for it
    silent_s: Real | None = None


@frozen
class SlowRank:
    """Joined: a slow rank, what its GPU or its host has that the others' don't, and what that costs the others."""

    rank: int
    label: str  # GPU0, host/GPU0
    host: str
    gpu: str | None  # uuid
    cause: str  # slow.throttle, slow.cpu, slow.disk ...: an id of docs/verdicts.md
    because: str
    wait_s: Real | None  # what each of the others waits a step
    step_s: Real | None
    since: float
    summary: str  # one sentence with all of it


@frozen
class RankView:
    rank: int  # unique in the job
    role: str
    role_rank: int
    label: str
    host: str
    gpu: str | None = None  # uuid
    pid: int | None = None
    state: str = "waiting"  # waiting, running, stopped (by SIGSTOP, or ended by the launcher), ended, failed, gone
    exit_code: int | None = None
    step: int | None = None
    step_s: Real | None = None
    waiting: Real | None = None  # share of its time that it waits for others in collectives
    phase: str = ""
    collective_age: Real | None = None  # since it entered the collective it has been in without a beat
    beat_age: Real | None = None  # since its last sign of progress
    memory: int | None = None  # resident, with its children
    loss: Real | str | None = None
    recent: Mapping[str, tuple[Real | None, ...]] = {}  # step_s, waiting: newest values, evenly spaced


@frozen
class RoleView:
    name: str
    world: int
    ranks: tuple[int, ...]


@frozen
class ServerLoad:
    """The load of a server, all its replicas together: totals since its run began, and rates of the last half minute."""

    role: str  # of a job; empty: of a run alone
    replicas: int
    requests: int
    tokens: int  # generated
    prompt_tokens: int | None = None
    running: int | None = None  # requests
    waiting: int | None = None
    weights_version: int | None = None  # the oldest of its replicas
    requests_per_s: Real | None = None
    tokens_per_s: Real | None = None


@frozen
class RunView:
    """A row of the list. `ranks`, `roles`, `slow` and `curve` are filled in for runs that are watched (gather.py)."""

    id: str
    name: str
    dir: str
    user: str
    mine: bool
    state: str  # running, unknown (on another host), lost (no launcher, no verdict), damaged; a verdict's status
    started: float
    updated: float | None = None  # the newest sign of it
    seconds: Real | None = None  # all starts together, without the time between
    world: int = 0  # ranks
    attempts: int = 0
    attempt: int | None = None  # the newest
    restarts: Mapping[str, int] = {}  # by cause
    step: int | None = None
    total_steps: int | None = None
    loss: Real | str | None = None
    tokens_per_s: Real | str | None = None
    mfu: Real | str | None = None
    grad_norm: Real | str | None = None
    lr: Real | str | None = None
    eta_s: Real | None = None
    phase: str = ""
    metrics: Mapping[str, Real | str | None] = {}  # the newest value of every metric it has written; see AVERAGED
    suspicion: Suspicion | None = None
    verdict: Verdict | None = None
    problem: str = ""  # why its record is damaged, or what of it can't be read
    command: str = ""
    hosts: tuple[str, ...] = ()
    roles: tuple[RoleView, ...] = ()
    ranks: tuple[RankView, ...] = ()
    slow: tuple[SlowRank, ...] = ()
    curve: tuple[tuple[int, Real | str | None], ...] = ()  # (step, value of `headline`), thinned out
    servers: tuple[ServerLoad, ...] = ()

    @property
    def restarted(self) -> int:
        return sum(self.restarts.values())

    @property
    def headline(self) -> str:
        """The metric that shows how far the run has got: reward in reinforcement learning, else loss."""
        return headline_metric(self.metrics)

    @property
    def headline_value(self) -> Metric:
        return self.metrics[REWARD] if self.headline == REWARD else self.loss

    @property
    def rl_metrics(self) -> dict[str, Metric]:
        """Reward, KL and the like in the order in which viewers list them; empty unless the run has rewards."""
        return (
            {name: self.metrics[name] for name in RL_METRICS if name in self.metrics} if self.headline == REWARD else {}
        )


@frozen
class Snapshot:
    time: float
    hosts: tuple[HostGauges, ...] = ()
    gpus: tuple[GpuGauges, ...] = ()  # of all hosts, each with its processes
    runs: tuple[RunView, ...] = ()  # oldest first
    root: str = ""  # the folder of the runs
    others: int = 0  # folders of other users that were not looked into
    problems: tuple[str, ...] = ()  # one line each
    interval: Real | None = None  # seconds between two values of `recent`
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return dict(as_json(self))

    def run(self, run_id: str) -> RunView | None:
        return next((run for run in self.runs if run.id == run_id), None)

    def host(self, name: str) -> HostGauges | None:
        return next((host for host in self.hosts if host.name == name), None)

    def gpu(self, host: str, uuid: str | None) -> GpuGauges | None:
        """A uuid is the world's, but of a recorded machine two hosts may have the same."""
        cards = [card for card in self.gpus if card.uuid == uuid and uuid]
        return next((card for card in cards if card.host == host), cards[0] if cards else None)

    def rank_on(self, card: GpuGauges) -> Iterator[tuple[RunView, RankView]]:
        for run in self.runs:
            for rank in run.ranks if run.state == RUNNING else ():
                if rank.gpu == card.uuid and rank.host == card.host:
                    yield run, rank

    @property
    def processes(self) -> tuple[tuple[GpuGauges, Holder], ...]:
        """(card, process on it), in the order of the cards."""
        return tuple((card, one) for card in self.gpus for one in card.processes or ())


def snapshot_from_json(data: Any) -> Snapshot:
    """ValueError: it is none, or of another version."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"not a snapshot of schema {SCHEMA}")
    return read_frozen(Snapshot, data)


def parse_metric(value: Any) -> Metric:
    """A value of metrics.jsonl, a beat or a line, as a snapshot keeps it; None for what is no number."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        number = as_float(value)
        return value if math.isfinite(number) else str(number)
    return value.lower() if isinstance(value, str) and value.lower() in _WORDS else None


def as_float(value: float) -> float:
    """An integer of 400 digits is JSON, too."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_int64(value: Any) -> int | None:
    """A whole number of 64 bits; None for all else. JSON has larger ones, which no float can hold."""
    return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else None


def finite(value: Metric) -> float | None:
    return None if value is None or isinstance(value, str) else float(value)
