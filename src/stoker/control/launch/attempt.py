"""All facts about one attempt, collected from the agents' reports. It has no effects: `Supervisor` and `Run` act."""

from __future__ import annotations

import time
from typing import Any

from stoker.contract.checkpoints import SavedCheckpoint
from stoker.contract.evidence import Evidence, ExitContext, LastCall, RankError, RankExit, ScriptEnd, Stall, Verdict
from stoker.contract.frozen import fields_of, pick_fields
from stoker.contract.typed_values import read_frozen
from stoker.control.plan.run_plan import RunPlan
from stoker.control.verdict.echo import is_consequence, is_failure, is_size_mismatch, unquote_traceback

TYPE_CHECKING = False  # the watcher is loaded when the ranks are starting
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

    from stoker.control.watch.loss_monitor import LossMonitor
    from stoker.control.watch.watcher import Watcher

INSPECTION_S = 15.0  # longest wait for an inspection of the ranks that survived a possible echo
# Inspection ids that an attempt may use, so that a late answer is not taken for one of the next attempt.
INSPECTIONS_PER_ATTEMPT = 1_000_000


class Attempt:
    """The facts about one attempt: what its ranks did, and why Stoker stopped them."""

    watch: Watcher
    losses: LossMonitor

    def __init__(self, number: int, plan: RunPlan) -> None:
        self.number = number
        self.plan = plan
        self.start_time = time.monotonic()
        # By rank.
        self.pids: dict[int, int] = {}  # pid of each rank that was started
        self.errors: dict[int, RankError] = {}
        self.ends: dict[int, RankExit] = {}
        self.steps: dict[int, int] = {}  # of the newest beat
        # By host.
        self.finished: set[str] = set()  # hosts whose agents have swept
        self.stopping_hosts: set[str] = set()  # hosts that obey a stop, or are lost: they start no more ranks
        self.gauges: dict[str, tuple[float, dict[str, Any]]] = {}  # time and content of the newest gauges
        # Why and when the ranks are stopped.
        self.trouble: list[dict[str, Any]] = []  # the problems for which Stoker stops the job
        self.first_failure = 0.0
        self.stopping = False
        self.stop_signal = 0
        self.stop_now = False
        self.stopped_at = 0.0
        self.steps_reached = 0  # --stop-after-steps
        self.regrouping = ""  # the returned host that joins after this attempt
        # Checkpoints that rank 0 reported.
        self.checkpoints = 0
        self.checkpoint_at = 0.0
        self.checkpoint_before: SavedCheckpoint | None = None  # the newest one when the stop signal arrived
        # The watcher.
        self.watch_failed = False  # the watcher has failed
        self.stall_detected_s: float | None = None  # seconds of silence after which the newest stall was explained
        self.notes: list[str] = []  # findings that did not end the job
        self.capabilities: set[str] = set()  # features that the script announced (stoker.mark)

    def begin_watch(self, hang_timeout: float, busy_timeout: float) -> None:
        from stoker.control.watch.loss_monitor import LossMonitor
        from stoker.control.watch.watcher import Watcher

        hosts = frozenset(rank.host for rank in self.plan.places)
        first_inspection = self.number * INSPECTIONS_PER_ATTEMPT
        world_size, ranks = self.plan.world_size, self.plan.ranks
        self.watch = Watcher(world_size, hang_timeout, hosts, time.monotonic(), first_inspection, ranks, busy_timeout)
        self.losses = LossMonitor()

    def label(self, rank: int | None) -> str:
        return self.plan.place(rank).label if rank is not None else ""

    @property
    def min_steps(self) -> int:
        """The number of steps of the slowest rank."""
        return min((self.steps.get(rank, 0) for rank in self.plan.ranks), default=0)

    @property
    def expected(self) -> int:
        """The number of ranks that this launcher starts."""
        return len(self.plan.places)

    @property
    def all_ended(self) -> bool:
        if len(self.ends) == self.expected:
            return True
        if not self.stopping or not {rank.host for rank in self.plan.places} <= self.stopping_hosts:
            return False
        return all(rank in self.ends for rank in self.pids)  # a rank that was not started yet will not start now

    def must_stop(self, now: float, settle_s: float, host_is_quiet: bool = False) -> bool:
        """Return whether a failure must stop the other ranks now.

        A failure that is a cause stops them immediately. A possible echo waits until the other ranks are inspected: its
        cause may be a failure that is not reported yet, or a stuck rank. It also waits while a quiet host may be lost.
        """
        failed = [end for end in self.ends.values() if is_failure(end)]
        if not failed and not self.trouble:
            return False
        if not self.first_failure:
            self.first_failure = now
        only_echoes = (
            bool(failed) and not self.trouble and all(is_consequence(end) or is_size_mismatch(end) for end in failed)
        )
        if not only_echoes or any(end.code == 0 for end in self.ends.values()):
            return True
        if host_is_quiet:
            return False
        if not self.watch_failed:
            self.watch.inspect_survivors()
        return now - self.first_failure >= (
            settle_s if self.watch_failed or self.watch.survivors_inspected else INSPECTION_S
        )

    def find_early_exits(self, now: float, seconds: float) -> list[int]:
        """Return the ranks that ended with exit code 0 more than `seconds` ago while others still run."""
        if len(self.ends) == self.expected:
            return []
        return [rank for rank, end in self.ends.items() if end.code == 0 and now - end.time > seconds]

    def note_bad_numbers(self) -> None:
        """Add a note for each rank whose last losses are bad but too few to stop the run."""
        from stoker.control.verdict.rules.numbers import summarize_bad_number

        for bad in self.losses.unresolved():
            self.notes.append(f"{summarize_bad_number(bad, self.label(bad.rank), self.plan.world_size)}, its last loss")

    def compute_detection_s(self, verdict: Verdict) -> float | None:
        """Return how many seconds after the failure it was noticed."""
        if verdict.stalled and self.stall_detected_s is not None:
            return self.stall_detected_s
        if not self.first_failure:
            return None
        ended = [end.time for end in self.ends.values() if end.rank == verdict.rank]
        return max(round(self.first_failure - min(ended, default=self.first_failure), 3), 0.0)

    def evidence(self, newest: SavedCheckpoint | None = None) -> Evidence:
        """Return what the judge needs. `newest` is the newest complete checkpoint in the run directory."""
        saved = self.checkpoint_at >= self.stopped_at or (newest is not None and newest != self.checkpoint_before)
        return Evidence(
            self.expected,
            tuple(self.ends[rank] for rank in sorted(self.ends)),
            stall=self._find_stall(),
            trouble=tuple(self.trouble),
            notes=tuple(self.notes),
            checkpoint=newest,
            saved=bool(self.stop_signal) and saved,
            **pick_fields(self, "stop_signal", "stop_now", "stopped_at", "steps_reached", "regrouping"),
        )

    def _find_stall(self) -> Stall | None:
        """Return the stall, or None. After a stop signal it is what was known before the signal."""
        if self.watch_failed:
            return None
        if self.stop_signal:
            return self.watch.stall
        return self.watch.final_stall(any(is_size_mismatch(end) for end in self.ends.values()))


# ---- parts of the agents' reports ----


def read_error(data: Any) -> RankError | None:
    """Return the exception that a rank reported, or None if there is none or it can't be read."""
    try:
        return unquote_traceback(_read_known_fields(RankError, data))
    except ValueError:
        return None


def read_last_call(calls: list[Any]) -> LastCall | None:
    """Return the call that had not returned, from an agent's list of calls (control/rank/call_log.py)."""
    from stoker.control.watch import rank_inspection

    *earlier, newest = rank_inspection.parse_inspection(0, {"calls": calls}).calls or (None,)
    if newest is None or newest.returned or not newest.frames:
        return None
    conditions = [condition.text for frame in newest.frames for condition in reversed(frame.conditions)]
    repeated = any(call is not None and call.where == newest.where for call in earlier)
    return LastCall(newest.name, newest.where, conditions[0] if conditions else "", repeated)


def read_script_end(data: Any) -> ScriptEnd | None:
    try:
        return _read_known_fields(ScriptEnd, data)
    except ValueError:
        return None


def read_exit_context(data: Any) -> ExitContext:
    try:
        return _read_known_fields(ExitContext, data)
    except ValueError:
        return ExitContext()


def _read_known_fields(cls: type[T], data: Any) -> T:
    """Read a dataclass and ignore fields that it does not have."""
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if key in fields_of(cls)}
    return read_frozen(cls, data)
