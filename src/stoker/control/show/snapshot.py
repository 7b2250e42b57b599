"""The types of a snapshot, which holds everything that a viewer shows at one moment, and its JSON form.

Units are bytes, seconds, watts, degrees Celsius, hertz and shares from 0 to 1; times are seconds since 1970. An unknown
value is None. A metric that is not finite is a string, as in metrics.jsonl ("nan", "inf", "-inf"); `finite` returns the
number, or None.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from stoker.contract.evidence import Verdict
from stoker.contract.frozen import as_json, frozen
from stoker.contract.typed_values import Real, read_frozen
from stoker.control.machine.model import OFFLINE, OK, GpuGauges, Holder, HostGauges

__all__ = ["OFFLINE", "OK", "GpuGauges", "Holder", "HostGauges"]  # re-exported; the rest is defined here

SCHEMA = 1
RUNNING, UNKNOWN, LOST, DAMAGED = "running", "unknown", "lost", "damaged"  # a finished run has its verdict's status
_NOT_FINITE = ("nan", "inf", "-inf")

Metric = Real | str | None  # read_frozen parses annotations as text, so the fields below spell it out

REWARD, LOSS = "reward", "loss"
# Metrics of a reinforcement-learning run, in the order in which viewers list them, with their labels.
RL_METRICS = {
    REWARD: "reward",
    "kl": "KL",
    "entropy": "entropy",
    "length": "length",
    "cut": "truncated",
    "staleness": "staleness",
    "weights_version": "weights",
}
# Viewers show these as means over the run's logging interval: single steps of reinforcement learning are too noisy.
AVERAGED = frozenset((*RL_METRICS, LOSS, "correct", "grad_norm")) - {"weights_version"}
# Curves of a job's servers over the trainer's steps, with their labels.
SERVER_METRICS = {"server_requests_per_s": "server requests/s", "server_tokens_per_s": "server tokens/s"}
SHARES = frozenset(("cut",))  # metrics shown in percent


def headline_metric(names: Collection[str]) -> str:
    """Return the metric that best shows the progress of a run with these metrics: reward if there is one, else loss."""
    return REWARD if REWARD in names else LOSS


def sort_metrics(names: Iterable[str]) -> list[str]:
    """Sort metric names for display: the reward and its companions if there are rewards, then losses, then the rest."""
    remaining = list(names)
    first = [*RL_METRICS, *SERVER_METRICS, LOSS, "val_loss"] if REWARD in remaining else [LOSS, "val_loss"]
    return [name for name in first if name in remaining] + sorted(name for name in remaining if name not in first)


@frozen
class Suspicion:
    """A problem that the watch suspects in a run and has not taken back."""

    time: float
    kind: str  # suspicion, straggler, numbers
    cause: str  # a cause id of docs/verdicts.md
    summary: str
    rank: int | None = None
    waiting: tuple[int, ...] = ()  # ranks that wait for `rank`
    silent_s: Real | None = None  # seconds without a sign of progress


@frozen
class SlowRank:
    """A slow rank, the reason, which its GPU or host has and the others' don't, and the time that the other ranks wait."""

    rank: int
    label: str  # GPU0, host/GPU0
    host: str
    gpu: str | None  # uuid
    cause: str  # a cause id of docs/verdicts.md: slow.throttle, slow.cpu, slow.disk ...
    because: str
    wait_s: Real | None  # how long each other rank waits per step
    step_s: Real | None
    since: float
    summary: str  # all of this in one sentence


@frozen
class RankView:
    """A rank as viewers show it."""

    rank: int  # unique in the job
    role: str
    role_rank: int
    label: str
    host: str
    gpu: str | None = None  # uuid
    pid: int | None = None
    state: str = "waiting"  # waiting, running, stopped (by SIGSTOP or the launcher), ended, failed, gone
    exit_code: int | None = None
    step: int | None = None
    step_s: Real | None = None
    waiting: Real | None = None  # share of its time spent waiting for other ranks in collectives
    phase: str = ""
    collective_age: Real | None = None  # seconds since it entered its current collective, if it has not reported since
    beat_age: Real | None = None  # seconds since its last sign of progress
    memory: int | None = None  # resident, including child processes
    loss: Real | str | None = None
    recent: Mapping[str, tuple[Real | None, ...]] = {}  # newest values of step_s and waiting, evenly spaced


@frozen
class RoleView:
    """A role of a job and its ranks."""

    name: str
    world: int  # number of ranks
    ranks: tuple[int, ...]


@frozen
class ServerLoad:
    """The load of a server, summed over its replicas: totals since its run started, rates over the last half minute."""

    role: str  # role in a job; empty for a run without roles
    replicas: int
    requests: int
    tokens: int  # generated tokens
    prompt_tokens: int | None = None
    running: int | None = None  # requests being processed
    waiting: int | None = None
    weights_version: int | None = None  # the oldest among the replicas
    requests_per_s: Real | None = None
    tokens_per_s: Real | None = None


@frozen
class RunView:
    """A run as viewers show it. `ranks`, `roles`, `slow` and `curve` are filled in only for watched runs (collector.py)."""

    id: str
    name: str
    dir: str
    user: str
    mine: bool  # True if it belongs to the user who views it
    state: str  # running, unknown (on another host), lost (no launcher, no verdict), damaged, or a verdict's status
    started: float
    updated: float | None = None  # time of its newest event or metrics line
    seconds: Real | None = None  # run time of all starts, without the pauses between them
    world: int = 0  # number of ranks
    attempts: int = 0
    attempt: int | None = None  # number of the newest attempt, from 0
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
    metrics: Mapping[str, Real | str | None] = {}  # newest value of every metric; those in AVERAGED are means
    suspicion: Suspicion | None = None
    verdict: Verdict | None = None
    problem: str = ""  # why its record is damaged or a file can't be read
    command: str = ""
    hosts: tuple[str, ...] = ()
    roles: tuple[RoleView, ...] = ()
    ranks: tuple[RankView, ...] = ()
    slow: tuple[SlowRank, ...] = ()
    curve: tuple[tuple[int, Real | str | None], ...] = ()  # (step, value of `headline`), thinned for drawing
    servers: tuple[ServerLoad, ...] = ()

    @property
    def restarted(self) -> int:
        """The number of restarts."""
        return sum(self.restarts.values())

    @property
    def headline(self) -> str:
        """The metric that best shows the run's progress: reward in reinforcement learning, else loss."""
        return headline_metric(self.metrics)

    @property
    def headline_value(self) -> Metric:
        """The newest value of `headline`."""
        return self.metrics[REWARD] if self.headline == REWARD else self.loss

    @property
    def rl_metrics(self) -> dict[str, Metric]:
        """The reinforcement-learning metrics in display order, or {} for a run without rewards."""
        if self.headline != REWARD:
            return {}
        return {name: self.metrics[name] for name in RL_METRICS if name in self.metrics}


@frozen
class Snapshot:
    """Hosts, GPUs and runs at one moment."""

    time: float
    hosts: tuple[HostGauges, ...] = ()
    gpus: tuple[GpuGauges, ...] = ()  # of all hosts, with the processes on each
    runs: tuple[RunView, ...] = ()  # oldest first
    root: str = ""  # the runs folder
    others: int = 0  # number of folders of other users that were skipped
    problems: tuple[str, ...] = ()  # one line each
    interval: Real | None = None  # seconds between two values of `recent`
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return dict(as_json(self))

    def run(self, run_id: str) -> RunView | None:
        return next((run for run in self.runs if run.id == run_id), None)

    def host(self, name: str) -> HostGauges | None:
        return next((host for host in self.hosts if host.name == name), None)

    @property
    def processes(self) -> tuple[tuple[GpuGauges, Holder], ...]:
        """The pairs (GPU, process on it), in the order of the GPUs."""
        return tuple((gpu, process) for gpu in self.gpus for process in gpu.processes or ())


def snapshot_from_json(data: Any) -> Snapshot:
    """Parse `Snapshot.to_json`. Raises ValueError if `data` is not a snapshot of this version."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"not a snapshot of schema {SCHEMA}")
    return read_frozen(Snapshot, data)


def parse_metric(value: Any) -> Metric:
    """Convert a value from metrics.jsonl, a beat or a printed line to a Metric, or return None if it is not a number."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        number = as_float(value)
        return value if math.isfinite(number) else str(number)
    return value.lower() if isinstance(value, str) and value.lower() in _NOT_FINITE else None


def as_float(value: float) -> float:
    """Convert a number to float. An integer that is too large for a float, which JSON allows, becomes infinity."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_int64(value: Any) -> int | None:
    """Return `value` if it is an integer of at most 64 bits, else None, because JSON allows larger integers."""
    return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else None


def finite(value: Metric) -> float | None:
    """Return the number, or None if it is unknown or not finite."""
    return None if value is None or isinstance(value, str) else float(value)


def parse_finite(value: Any) -> float | None:
    """Convert a value of any type to a finite number, or return None."""
    return finite(parse_metric(value))
