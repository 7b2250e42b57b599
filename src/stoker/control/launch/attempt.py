"""One attempt: what every rank did, gathered from the agents' words. Holds no effects; the coordinator acts."""

from __future__ import annotations

import time
from typing import Any

from stoker.contract.checkpoints import SavedCheckpoint
from stoker.contract.evidence import Evidence, ExitContext, LastCall, RankError, RankExit, ScriptEnd, Stall, Verdict
from stoker.contract.frozen import fields_of, pick_fields
from stoker.contract.typed_values import read_frozen
from stoker.control.plan.run_plan import RunPlan
from stoker.control.verdict.echo import is_consequence, is_failure, is_mismatch, unquoted

TYPE_CHECKING = False  # the watch room is loaded once the ranks are on their way
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

    from stoker.control.watch.loss_monitor import LossMonitor
    from stoker.control.watch.watcher import Watcher

LOOK_S = 15.0  # at most, for a look at the ranks that outlived an echo
ASKS = 1_000_000  # inspections an attempt may number: an answer that comes late is nobody else's


class Attempt:
    watch: Watcher
    losses: LossMonitor

    def __init__(self, number: int, plan: RunPlan) -> None:
        self.number = number
        self.plan = plan
        self.up: dict[int, int] = {}  # rank -> pid
        self.errors: dict[int, RankError] = {}
        self.ends: dict[int, RankExit] = {}
        self.steps: dict[int, int] = {}
        self.trouble: list[dict[str, Any]] = []
        self.first_failure = 0.0
        self.stopping = False
        self.stop_signal = 0
        self.stop_now = False
        self.stopped_at = 0.0
        self.steps_reached = 0
        self.regrouping = ""  # the host that is to join: the attempt was ended for that
        self.finished: set[str] = set()  # hosts whose agents have swept
        self.told: set[str] = set()  # hosts that have heard of a stop, or are lost: no rank of theirs comes up any more
        self.suspected_s: float | None = None  # seconds of silence after which the newest stall was explained
        self.unwatched = False  # the watch room failed
        self.notes: list[str] = []  # what was noticed on the way and ended nothing
        self.checkpoints = 0  # saved whole in this attempt, as rank 0 says
        self.checkpoint_at = 0.0  # when rank 0 reported the newest of them
        self.checkpoint_before: SavedCheckpoint | None = None  # the newest when the stop signal came
        self.gauges: dict[str, tuple[float, dict[str, Any]]] = {}  # host -> when it came, and what it says
        self.can: set[str] = set()  # what the script says it can do (stoker.mark)

    def begin_watch(self, hang_timeout: float, busy_timeout: float) -> None:
        from stoker.control.watch.loss_monitor import LossMonitor
        from stoker.control.watch.watcher import Watcher

        hosts = frozenset(place.host for place in self.plan.places)
        world, ranks = self.plan.world_size, self.plan.ranks
        self.watch = Watcher(world, hang_timeout, hosts, time.monotonic(), self.number * ASKS, ranks, busy_timeout)
        self.losses = LossMonitor()

    def label(self, rank: int | None) -> str:
        return self.plan.place(rank).label if rank is not None else ""

    @property
    def fewest_steps(self) -> int:
        """Of all ranks."""
        return min((self.steps.get(rank, 0) for rank in self.plan.ranks), default=0)

    @property
    def expected(self) -> int:
        return len(self.plan.places)

    @property
    def all_ended(self) -> bool:
        if len(self.ends) == self.expected:
            return True
        if not self.stopping or not {place.host for place in self.plan.places} <= self.told:
            return False
        return all(rank in self.ends for rank in self.up)  # a rank that was never started will not start now

    def must_stop(self, now: float, settle_s: float, quiet: bool = False) -> bool:
        """A cause stops the others at once, a possible echo after a moment, or when a `quiet` host is lost."""
        bad = [end for end in self.ends.values() if is_failure(end)]
        if not bad and not self.trouble:
            return False
        if not self.first_failure:
            self.first_failure = now
        only_echoes = bool(bad) and not self.trouble and all(is_consequence(end) or is_mismatch(end) for end in bad)
        left_early = any(end.code == 0 for end in self.ends.values())
        if not only_echoes or left_early:
            return True
        if quiet:
            return False
        # An echo: of a failure still to be reported, or of a rank that stands still. The others are looked at for that.
        if not self.unwatched:
            self.watch.failing()
        return now - self.first_failure >= (settle_s if self.unwatched or self.watch.looked else LOOK_S)

    def left_early(self, now: float, seconds: float) -> list[int]:
        """Ranks that ended with exit code 0 a while ago while others go on."""
        if len(self.ends) == self.expected:
            return []
        return [rank for rank, end in self.ends.items() if end.code == 0 and now - end.time > seconds]

    def _stall(self) -> Stall | None:
        """What is known of a rank that stopped; of a run that somebody stopped, what was known by then."""
        if self.unwatched:
            return None
        if self.stop_signal:
            return self.watch.stall
        return self.watch.last_word(any(is_mismatch(end) for end in self.ends.values()))

    def note_bad_numbers(self) -> None:
        """Of a run that is over: a last loss that is no number, though too few in a row to stop it for."""
        from stoker.control.verdict.rules.numbers import summary

        for bad in self.losses.unresolved():
            said = summary(bad, self.label(bad.rank), self.plan.world_size)
            self.notes.append(f"{said}: the last one it had")

    def detected_s(self, verdict: Verdict) -> float | None:
        """Seconds from what the verdict is about until it was noticed."""
        if verdict.stalled and self.suspected_s is not None:
            return self.suspected_s
        if not self.first_failure:
            return None
        ended = [end.time for end in self.ends.values() if end.rank == verdict.rank]
        return max(round(self.first_failure - min(ended, default=self.first_failure), 3), 0.0)

    def evidence(self, newest: SavedCheckpoint | None = None) -> Evidence:
        """`newest`: the newest complete checkpoint below the run directory."""
        saved = self.checkpoint_at >= self.stopped_at or (newest is not None and newest != self.checkpoint_before)
        return Evidence(
            self.expected,
            tuple(self.ends[rank] for rank in sorted(self.ends)),
            stall=self._stall(),
            trouble=tuple(self.trouble),
            notes=tuple(self.notes),
            checkpoint=newest,
            saved=bool(self.stop_signal) and saved,
            **pick_fields(self, "stop_signal", "stop_now", "stopped_at", "steps_reached", "regrouping"),
        )


def read_error(data: Any) -> RankError | None:
    """None: the rank wrote none, or one that is not to be read."""
    try:
        return unquoted(_known(RankError, data))
    except ValueError:
        return None


def read_last_call(calls: list[Any]) -> LastCall | None:
    """Return the call that had not returned, from an agent's list of calls (control/rank/call_log.py)."""
    from stoker.control.watch import rank_inspection

    *earlier, newest = rank_inspection.read(0, {"calls": calls}).calls or (None,)
    if newest is None or newest.returned or not newest.frames:
        return None
    conditions = [condition.text for frame in newest.frames for condition in reversed(frame.conditions)]
    repeated = any(call is not None and call.where == newest.where for call in earlier)
    return LastCall(newest.name, newest.where, conditions[0] if conditions else "", repeated)


def read_script_end(data: Any) -> ScriptEnd | None:
    try:
        return _known(ScriptEnd, data)
    except ValueError:
        return None


def read_around(data: Any) -> ExitContext:
    try:
        return _known(ExitContext, data)
    except ValueError:
        return ExitContext()


def _known(kind: type[T], data: Any) -> T:
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if key in fields_of(kind)}
    return read_frozen(kind, data)
