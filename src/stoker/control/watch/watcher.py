"""Watches one attempt: hears what agents say, and answers "what now?". Two tiers: a suspicion is explained in seconds
and the job keeps running; it is stopped on proof, or when --hang-timeout is over. Decides; the coordinator acts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract.shape import replace, shape
from stoker.contract.shapes import Stall
from stoker.contract.untrusted import is_count, parse_json, within
from stoker.control.watch import progress, snapshot, stacks
from stoker.control.watch.culprit import explain
from stoker.control.watch.diverged import after_the_end
from stoker.control.watch.progress import Progress
from stoker.control.watch.snapshot import Snapshot
from stoker.control.watch.straggler import Stragglers

STOPPED_S = 0.5  # a stopped process is worth a look after this
AGAIN_S = 3.0  # a proof is looked at a second time, this much later
ANSWER_S = 12.0  # an inspection that has not been answered by then is given up
PHASE_TIMES = 6.0  # --hang-timeout in an announced phase, and before the first step
START_STOP_S = 60.0
MAX_WAIT_S = 60.0
COMPUTES_S = 10.0  # silence of a rank that computes and keeps nobody waiting: before that it is only slow
_MOST_GROUPS = 10_000  # process groups of a job; a host may be hostile
_LONGEST_GROUP = 500  # characters of a group's name
# Of a host's words about one rank: ten samples of 60 threads have 90,000 values; and of one text: a path has 4096 characters.
_ROOM, _LONGEST_TEXT = 16 << 20, 4096


@shape
class Inspect:
    """Ask the agents."""

    order: Mapping[str, Any]


@shape
class Suspect:
    stall: Stall
    stops_in: float | None  # seconds until the job is stopped for it, if nothing changes; None: never


@shape
class Relieve:
    """What was suspected makes progress again."""

    rank: int | None
    silent_s: float


@shape
class Stop:
    stall: Stall
    why: str


@shape
class Standing:
    """How one rank stands, for those who look on."""

    step: int
    step_s: float | None
    waiting: float | None  # share of its time
    phase: str
    state: str  # of its process: R, S, D, T, Z; ? while it beats
    beat_age: float  # since its last sign of progress
    collective_age: float | None  # since it entered the collective it was last seen in, unless it has beaten since


Action = Inspect | Suspect | Relieve | Stop


class Watcher:
    def __init__(
        self,
        world: int,
        hang_timeout: float,
        hosts: frozenset[str],
        now: float,
        first_ask: int = 0,
        ranks: range | None = None,
    ) -> None:
        """`ranks`: those that are heard here; None: all of the world's."""
        self._world = world
        self._timeout = hang_timeout
        self._ranks = {rank: Progress(now) for rank in (range(world) if ranks is None else ranks)}
        self._ended: dict[int, int] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._asked = first_ask  # number of the newest inspection
        self._asked_at = 0.0  # 0: none is under way
        self._answers: dict[int, Snapshot] = {}
        self._waiting_hosts: set[str] = set()
        self._next_look = 0.0
        self._wait = AGAIN_S
        self.stall: Stall | None = None
        self._said: tuple[Any, ...] = ()
        self._first_seen = 0.0
        self._looks = 0
        self._silent_from = 0.0
        self.snapshots: dict[int, Snapshot] = {}
        self.stragglers = Stragglers(world)
        self._hosts = hosts
        self._failing = False
        self._for_failure = False  # the newest inspection began after the failure
        self.looked = False  # at those that outlived a failure, and they were seen
        self._failed: dict[int, Snapshot] = {}  # ranks that are gone, as they were
        self._inside: dict[int, float] = {}  # rank -> when it entered the collective it is in

    def beats(self, rank: int, steps: int, count: int, longest: float, now: float) -> None:
        self._ranks[rank].beat(steps, longest, now)
        self._inside.pop(rank, None)
        self.stragglers.stepped(rank, steps, count, longest, now)

    def printed(self, rank: int, now: float) -> None:
        self._ranks[rank].printed(now)

    def said(self, rank: int, now: float, phase: str | None = None) -> None:
        self._ranks[rank].said(now)
        if phase is not None:
            self._ranks[rank].enter(phase)

    def beatless(self, rank: int, now: float) -> None:
        self._ranks[rank].beatless(now)

    def vitals(self, rank: int, state: str, cpu: float, moved: int, now: float) -> None:
        self._ranks[rank].vitals(state, cpu, moved, now)

    def groups(self, text: str) -> None:
        everybody = tuple(range(self._world))
        for item in text.split(";", _MOST_GROUPS)[:_MOST_GROUPS]:
            name, _, ranks = item.partition("=")
            if ranks and len(self._members) < _MOST_GROUPS:
                told = (int(word) for word in ranks.split(",", self._world)[: self._world] if is_count(word))
                self._members[name[:_LONGEST_GROUP]] = everybody if ranks == "*" else tuple(told)

    def ended(self, rank: int, code: int) -> None:
        self._ended[rank] = code

    def resumed(self, now: float) -> None:
        """The whole run was suspended: nobody was silent by himself."""
        for one in self._ranks.values():
            one.said(now)
            one.stopped_since = 0.0
        self._forget()

    def failed(self, rank: int, collectives: Sequence[Any], frames: Sequence[Any], calls: Sequence[Any] = ()) -> None:
        """Its last operations and its stack. torch calls one that failed done: the newest, or all from the first unusual."""
        samples = [[{"main": True, "frames": frames}]]
        seen = snapshot.read(rank, {"state": "Z", "groups": collectives, "samples": samples, "calls": calls})
        orders = {op.order: op.usual for group in seen.groups for op in group.ops}
        usual = max((order for order, was in orders.items() if was), default=0)
        failed = min(
            (order for order, was in orders.items() if was is False and order > usual), default=max(orders, default=0)
        )

        def until_then(group: snapshot.Group) -> snapshot.Group:
            return replace(group, ops=tuple(replace(op, done=op.done and op.order < failed) for op in group.ops))

        self._failed[rank] = replace(seen, groups=tuple(map(until_then, seen.groups)))

    def failing(self) -> None:
        """A rank has failed, perhaps as the echo of one that stands still: look at those that live, at once."""
        self._failing = True

    def answered(self, host: str, ask: int, payload: bytes, now: float) -> None:
        if ask != self._asked or not self._asked_at:
            return
        try:
            told = parse_json(payload or b"{}")
        except ValueError:
            told = {}
        told = {rank: within(data, _ROOM, _LONGEST_TEXT) for rank, data in told.items()}
        if self.stragglers.asked == ask:
            self.stragglers.answered(host, told)
        for rank, data in told.items():
            if is_count(rank) and isinstance(data, dict) and "timings" not in data:
                one = self._answers[int(rank)] = snapshot.read(int(rank), data)
                if one.newest and any(group.pending for group in one.groups):
                    self._inside[int(rank)] = now - max(0.0, time.time() - one.newest / 1e9)
        self._waiting_hosts.discard(host)

    def look(self, now: float) -> list[Action]:
        if self._asked_at:
            if self._waiting_hosts and now - self._asked_at < ANSWER_S:
                return []
            return self._conclude(now)
        overdue = self._overdue(now)
        if not overdue and not self._failing:
            actions = self._relieved(now)
            steps = {rank: one.steps for rank, one in self._ranks.items() if rank not in self._ended}
            order = self.stragglers.question(now, steps)
            return [*actions, self._ask(order, now)] if order else actions
        if now < self._next_look and self._for_failure == self._failing:
            return []
        return [self._ask({}, now)]

    def _ask(self, order: dict[str, Any], now: float) -> Inspect:
        self._asked += 1
        self._asked_at = now
        self._for_failure = self._failing
        self._answers = {}
        self._waiting_hosts = set(self._hosts)
        if order:
            self.stragglers.asked = self._asked
        return Inspect({"do": "inspect", "ask": self._asked, **order})

    def _overdue(self, now: float) -> dict[int, float]:
        """Rank -> seconds of silence, of those that have been silent for longer than is usual for them."""
        alive = {rank: one for rank, one in self._ranks.items() if rank not in self._ended}
        still = [rank for rank, one in alive.items() if one.stopped_since and now - one.stopped_since >= STOPPED_S]
        found = {rank: now - alive[rank].heard for rank in still}
        quiet = {rank: one for rank, one in alive.items() if one.steps and now - one.heard > progress.FLOOR_S}
        found |= {rank: now - one.heard for rank, one in quiet.items() if now - one.heard > one.patience}
        starting = {rank: one for rank, one in alive.items() if not one.steps}
        # Who never steps is not accused of that: somebody must be waiting for him, and nobody at work.
        if starting and self._world > 1:
            idle = {rank: now - one.active for rank, one in starting.items() if now - one.active > progress.IDLE_S}
            if len(idle) == len(alive) or any(silence > progress.START_S for silence in idle.values()):
                found |= idle
        return found

    def _relieved(self, now: float) -> list[Action]:
        stall, reported = self.stall, self._said
        if stall is None:
            return []
        silent = now - self._silent_from if self._silent_from else 0.0
        self._forget()
        return [Relieve(stall.rank, silent)] if reported and stall.rank not in self._ended else []

    def _forget(self) -> None:
        self.stall, self._said, self._looks, self._silent_from, self._wait = None, (), 0, 0.0, AGAIN_S
        self._next_look = 0.0

    def _conclude(self, now: float) -> list[Action]:
        answers, self._asked_at = self._answers, 0.0
        if self.stragglers.asked == self._asked:
            self.stragglers.conclude(answers)
            return []
        overdue = self._overdue(now)
        self._next_look = now + self._wait
        self.looked = self.looked or (self._for_failure and bool(answers))
        if self._failing:
            overdue |= {rank: now - self._ranks[rank].heard for rank in answers}
        if not overdue and not self._failing:
            return self._relieved(now)
        for rank, one in answers.items():
            if rank in self.snapshots and one.newest > self.snapshots[rank].newest:
                self._ranks[rank].shown = now  # it went on to another collective
        self.snapshots.update(answers)
        steps = {rank: one.steps for rank, one in self._ranks.items()}
        alive = {rank: code for rank, code in self._ended.items() if rank not in self._failed}
        stall = explain({**self._failed, **answers}, self._world, self._members, alive, overdue, steps)
        if stall is not None and stall.rank is not None and stall.rank not in self._ranks:
            stall = None  # of a machine we don't hear: its own launcher looks at it
        if stall is None or not self._is_evidence(stall):
            self._wait = min(self._wait * 2, MAX_WAIT_S)
            return self._unseen(overdue, now)
        self._silent_from = now - stall.silent_s
        same = self.stall is not None and _identity(self.stall) == _identity(stall)
        if not same:
            self._first_seen, self._looks = now, 0
        self._looks += 1
        if self._looks > 2 and not stall.proof:
            self._wait = min(self._wait * 2, MAX_WAIT_S)  # nothing new in it: looking costs stacks of all ranks
        self.stall = stall
        actions: list[Action] = []
        # Said once, and again when it turns out worse.
        if not self._said or stall.rank != self._said[0] or stall.proof > self._said[1]:
            self._said = stall.rank, stall.proof
            actions.append(Suspect(stall, self._stops_in(stall, now)))
        why = self._stop_reason(stall, now)
        if why:
            actions.append(Stop(stall, why))
        self._next_look = min(now + self._wait, self._deadline(stall, now))
        return actions

    def _unseen(self, overdue: Mapping[int, float], now: float) -> list[Action]:
        """Nothing could be seen, and the time is over all the same."""
        silent = {rank: seconds for rank, seconds in overdue.items() if self._ranks[rank].steps}
        if not silent or self._failing:
            return []
        rank = max(silent, key=lambda one: silent[one])
        seconds, step = round(silent[rank], 1), self._ranks[rank].steps
        stall = Stall("place", rank, (rank,), detail="what it does could not be seen", silent_s=seconds, step=step)
        self._next_look = min(self._next_look, self._deadline(stall, now))
        why = self._stop_reason(stall, now)
        return [Suspect(stall, 0.0), Stop(stall, why)] if why else []

    def _is_evidence(self, stall: Stall) -> bool:
        """Before the first step only who keeps others waiting, or can't go on, counts; never a starting interpreter."""
        if not stall.where and not stall.waiting and not stall.proof and stall.kind not in ("disk", "stopped"):
            return False
        if stall.kind == "spin" and not stall.waiting:
            return stall.silent_s >= min(COMPUTES_S, self._limit(stall) / 2)
        if stall.rank is not None and not any(one.steps for one in self._ranks.values()):
            return bool(stall.waiting) or stall.proof
        return True

    def _limit(self, stall: Stall) -> float:
        """Seconds of silence after which it is stopped without a proof."""
        if not self._timeout:
            return float("inf")
        one = self._ranks[stall.rank] if stall.rank is not None else None
        if one is not None and not one.steps:
            return max(START_STOP_S, self._timeout)
        if one is not None and not one.training:
            return PHASE_TIMES * self._timeout
        return max(self._timeout, progress.K * one.usual) if one is not None else self._timeout

    def _stops_in(self, stall: Stall, now: float) -> float | None:
        if not self._timeout or stall.kind == "debugged":
            return None
        return AGAIN_S if stall.proof else max(0.0, self._silent_since(stall, now) + self._limit(stall) - now)

    def _deadline(self, stall: Stall, now: float) -> float:
        if not self._timeout:
            return now + self._wait
        over = self._silent_since(stall, now) + self._limit(stall)
        if stall.rank is not None and self._ranks[stall.rank].steps and self._ranks[stall.rank].training:
            over = min(over, max(self._ranks[stall.rank].heard + PHASE_TIMES * self._timeout, now))
        return max(now + 0.25, over - 0.5)

    def _silent_since(self, stall: Stall, now: float) -> float:
        """When it last gave a sign: a step, a line, another collective. Signs without a step count for a while only."""
        if stall.rank is None or stall.rank in self._ended:
            return now - stall.silent_s
        one = self._ranks[stall.rank]
        if not one.steps:
            return max(one.heard, one.active)
        if not one.training:  # an announced phase may take as long as it likes while it gives signs
            return max(one.heard, one.shown)
        return max(one.heard, one.shown) if now - one.heard < PHASE_TIMES * self._timeout else one.heard

    def _stop_reason(self, stall: Stall, now: float) -> str:
        if not self._timeout:
            return ""
        if stall.proof and self._looks > 1 and now - self._first_seen >= AGAIN_S - 0.5:
            return "it can't continue by itself"
        if now - self._silent_since(stall, now) >= self._limit(stall) - 0.5:
            return f"--hang-timeout of {self._timeout:g} s is over"
        return ""

    def last_word(self, sizes_differ: bool) -> Stall | None:
        """What is known of a stall at the end. `sizes_differ`: gloo ended a rank; what they entered shows the odd one."""
        if len(self._failed) > 1:
            seen = {**self.snapshots, **self._failed}
            stall = after_the_end(seen, self._members, self._world, sizes_differ)
            if stall is not None:
                ranks = (stall.rank,) if stall.rank is not None else self._failed
                made = [self._ranks[rank].steps for rank in ranks if rank in self._ranks]
                evidence = (*stall.evidence, *stacks.told(seen.values()))
                return replace(stall, step=min(made, default=0), evidence=evidence)
        return None if sizes_differ else self.stall

    def standings(self, now: float) -> dict[int, Standing]:
        """By rank, of those that are heard here."""
        pace, waiting = self.stragglers.seconds, self.stragglers.waiting
        return {
            rank: Standing(
                one.steps,
                pace.get(rank),
                waiting.get(rank),
                one.phase,
                one.state,
                now - one.heard,
                now - self._inside[rank] if rank in self._inside else None,
            )
            for rank, one in self._ranks.items()
        }

    def text_of_stacks(self) -> dict[int, str]:
        return {rank: stacks.full(one) for rank, one in self.snapshots.items()}


def _identity(stall: Stall) -> tuple[Any, ...]:
    """When two looks see the same: of a proof also the operation, of a suspicion only the rank."""
    return (stall.rank, stall.kind, stall.operation, stall.evidence[:1]) if stall.proof else (stall.rank, False)
