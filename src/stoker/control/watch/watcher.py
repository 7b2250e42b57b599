"""Watches one attempt: hears what agents say, and answers "what now?". Two tiers: a suspicion is explained in seconds
and the job keeps running; it is stopped on proof, or when --hang-timeout is over. A rank with evidence of work has
until --busy-timeout. Decides; the coordinator acts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract.evidence import Stall
from stoker.contract.frozen import frozen, replace
from stoker.contract.text import is_digits, parse_json
from stoker.contract.units import format_duration
from stoker.control.watch import rank_inspection, rank_progress, stack_frames
from stoker.control.watch.activity import activity
from stoker.control.watch.culprit import find_culprit
from stoker.control.watch.divergence import after_the_end
from stoker.control.watch.rank_inspection import RankInspection
from stoker.control.watch.rank_progress import RankProgress
from stoker.control.watch.straggler import StragglerDetector

STOPPED_S = 0.5  # a stopped process is worth a look after this
AGAIN_S = 3.0  # a proof is looked at a second time, this much later
SECOND_LOOK_S = 1.0  # from a first look at which a silent rank used CPU to the second, before it is suspected
PRINTS_AFTER_S = 1.0  # a line printed this long after the last step shows that the rank goes on
IDLE_CPU = 0.0002  # of a core, measured in nanoseconds: less is the inspection itself
ANSWER_S = 12.0  # an inspection that has not been answered by then is given up
PHASE_TIMES = 6.0  # --hang-timeout in an announced phase, and before the first step
START_STOP_S = 60.0
MAX_WAIT_S = 60.0
BUSY_REPORT_S = 60.0  # a rank that works is reported after this long without a step, or after --hang-timeout
BUSY_TIMEOUT_S = 1800.0
COMPUTES_S = 10.0  # silence of a rank that computes and keeps nobody waiting: before that it is only slow


@frozen
class Inspect:
    """Ask the agents."""

    order: Mapping[str, Any]


@frozen
class Suspect:
    stall: Stall
    stops_in: float | None  # seconds until the job is stopped for it, if nothing changes; None: never


@frozen
class Busy:
    """A rank works for long without finishing a step. It is no suspicion, and withdraws one that was reported."""

    stall: Stall
    stops_in: float | None  # seconds until the job is stopped for it, if no step ends; None: never


@frozen
class Relieve:
    """What was suspected makes progress again."""

    rank: int | None
    silent_s: float


@frozen
class Stop:
    stall: Stall
    why: str


@frozen
class Standing:
    """How one rank stands, for those who look on."""

    step: int
    step_s: float | None
    waiting: float | None  # share of its time
    phase: str
    state: str  # of its process: R, S, D, T, Z; ? while it beats
    beat_age: float  # since its last sign of progress
    collective_age: float | None  # since it entered the collective it was last seen in, unless it has beaten since


Action = Inspect | Suspect | Busy | Relieve | Stop


class Watcher:
    def __init__(
        self,
        world: int,
        hang_timeout: float,
        hosts: frozenset[str],
        now: float,
        first_ask: int = 0,
        ranks: range | None = None,
        busy_timeout: float = BUSY_TIMEOUT_S,
    ) -> None:
        """`ranks`: those that are heard here; None: all of the world's. `busy_timeout` 0: a rank that works is never stopped."""
        self._world = world
        self._timeout = hang_timeout
        self._busy_timeout = max(busy_timeout, hang_timeout) if busy_timeout else float("inf")
        self._max_wait = min(MAX_WAIT_S, max(AGAIN_S, hang_timeout / 4)) if hang_timeout else MAX_WAIT_S
        self._ranks = {rank: RankProgress(now) for rank in (range(world) if ranks is None else ranks)}
        self._ended: dict[int, int] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._asked = first_ask  # number of the newest inspection
        self._asked_at = 0.0  # 0: none is under way
        self._answers: dict[int, RankInspection] = {}
        self._waiting_hosts: set[str] = set()
        self._next_look = 0.0
        self._wait = AGAIN_S
        self.stall: Stall | None = None
        self._said: tuple[Any, ...] = ()
        self._busy: dict[int, str] = {}  # rank -> what it does, of those with evidence of work since the look before
        self._reported_busy: int | None = None
        self._inspected: dict[int, float] = {}  # rank -> when it was inspected last, in this stall
        self._first_seen = 0.0
        self._looks = 0
        self._silent_from = 0.0
        self.snapshots: dict[int, RankInspection] = {}
        self.stragglers = StragglerDetector(world)
        self._hosts = hosts
        self._failing = False
        self._for_failure = False  # the newest inspection began after the failure
        self.looked = False  # at those that outlived a failure, and they were seen
        self._failed: dict[int, RankInspection] = {}  # ranks that are gone, as they were
        self._inside: dict[int, float] = {}  # rank -> when it entered the collective it is in

    def beats(self, rank: int, steps: int, count: int, longest: float, now: float) -> None:
        self._ranks[rank].beat(steps, longest, now)
        self._inside.pop(rank, None)
        self.stragglers.stepped(rank, steps, count, longest, now)

    def printed(self, rank: int, now: float) -> None:
        self._ranks[rank].printed(now)

    def said(self, rank: int, now: float, phase: str | None = None) -> None:
        waited = self._ranks[rank].waits_for_server(now)
        self._ranks[rank].said(now)
        if phase is not None:
            self._ranks[rank].enter(phase)
            if waited and not self._ranks[rank].waits_for_server(now):
                self.resumed(now)  # the others waited for this rank: their silence begins now, too

    def beatless(self, rank: int, now: float) -> None:
        self._ranks[rank].beatless(now)

    def vitals(self, rank: int, state: str, cpu: float, moved: int, now: float) -> None:
        self._ranks[rank].vitals(state, cpu, moved, now)

    def groups(self, text: str) -> None:
        everybody = tuple(range(self._world))
        for item in text.split(";"):
            name, _, ranks = item.partition("=")
            if ranks:
                told = (int(word) for word in ranks.split(",") if is_digits(word))
                self._members[name] = everybody if ranks == "*" else tuple(told)

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
        seen = rank_inspection.read(rank, {"state": "Z", "groups": collectives, "samples": samples, "calls": calls})
        orders = {op.order: op.usual for group in seen.groups for op in group.ops}
        usual = max((order for order, was in orders.items() if was), default=0)
        failed = min(
            (order for order, was in orders.items() if was is False and order > usual), default=max(orders, default=0)
        )

        def until_then(group: rank_inspection.Group) -> rank_inspection.Group:
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
        if self.stragglers.asked == ask:
            self.stragglers.answered(host, told)
        for rank, data in told.items():
            if is_digits(rank) and isinstance(data, dict) and "timings" not in data:
                one = self._answers[int(rank)] = rank_inspection.read(int(rank), data)
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
        if self._waits_for_server(now):
            return found  # the others wait for that rank, and it says itself what it waits for, and gives up by itself
        quiet = {rank: one for rank, one in alive.items() if one.steps and now - one.heard > rank_progress.FLOOR_S}
        found |= {rank: now - one.heard for rank, one in quiet.items() if now - one.heard > one.patience}
        starting = {rank: one for rank, one in alive.items() if not one.steps}
        # Who never steps is not accused of that: somebody must be waiting for him, and nobody at work.
        if starting and self._world > 1:
            idle = {rank: now - one.active for rank, one in starting.items() if now - one.active > rank_progress.IDLE_S}
            if len(idle) == len(alive) or any(silence > rank_progress.START_S for silence in idle.values()):
                found |= idle
        return found

    def _waits_for_server(self, now: float) -> bool:
        return any(one.waits_for_server(now) for rank, one in self._ranks.items() if rank not in self._ended)

    def _relieved(self, now: float) -> list[Action]:
        stall, reported = self.stall, self._said or self._reported_busy is not None
        if stall is None:
            return []
        silent = now - self._silent_from if self._silent_from else 0.0
        self._forget()
        is_progress = stall.rank not in self._ended and not self._waits_for_server(now)
        return [Relieve(stall.rank, silent)] if reported and is_progress else []

    def _forget(self) -> None:
        self.stall, self._said, self._looks, self._silent_from, self._wait = None, (), 0, 0.0, AGAIN_S
        self._next_look = 0.0
        self._busy, self._reported_busy, self._inspected = {}, None, {}

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
        self._note_work(answers, now)
        self.snapshots.update(answers)
        steps = {rank: one.steps for rank, one in self._ranks.items()}
        alive = {rank: code for rank, code in self._ended.items() if rank not in self._failed}
        stall = find_culprit({**self._failed, **answers}, self._world, self._members, alive, overdue, steps, self._busy)
        if stall is not None and stall.rank is not None and stall.rank not in self._ranks:
            stall = None  # of a machine we don't hear: its own launcher looks at it
        if stall is None or not self._is_evidence(stall):
            self._wait = min(self._wait * 2, self._max_wait)
            return self._unseen(overdue, now)
        stall = self._as_busy(stall, now)
        self._silent_from = now - stall.silent_s
        same = self.stall is not None and _identity(self.stall) == _identity(stall)
        if not same:
            self._first_seen, self._looks = now, 0
        self._looks += 1
        if self._looks > 2 and not stall.proof:
            self._wait = min(self._wait * 2, self._max_wait)  # nothing new in it: looking costs stacks of all ranks
        self.stall = stall
        actions: list[Action] = []
        if stall.kind == "busy":
            report_after = min(BUSY_REPORT_S, self._timeout or BUSY_REPORT_S)
            if self._reported_busy != stall.rank and (self._said or stall.silent_s >= report_after):
                self._reported_busy, self._said = stall.rank, ()  # it takes back what was suspected
                actions.append(Busy(stall, self._stops_in(stall, now)))
        elif self._looks == 1 and not self._said and self._may_work(stall):
            self._next_look = now + SECOND_LOOK_S
            return []
        # Said once, and again when it turns out worse.
        elif not self._said or stall.rank != self._said[0] or stall.proof > self._said[1]:
            self._said = stall.rank, stall.proof
            actions.append(Suspect(stall, self._stops_in(stall, now)))
        why = self._stop_reason(stall, now)
        if why:
            actions.append(Stop(stall, why))
        self._next_look = min(now + self._wait, self._deadline(stall, now))
        return actions

    def _note_work(self, answers: Mapping[int, RankInspection], now: float) -> None:
        """Note which ranks have given evidence of work since they were inspected last in this stall."""
        self._busy = {}
        for rank, one in answers.items():
            if rank not in self._ranks or one.state in "TtZ":
                continue
            progress_, at = self._ranks[rank], self._inspected.get(rank)
            before = self.snapshots.get(rank) if at is not None else None
            if before is not None and one.newest > before.newest:
                doing = "it enters one collective after another"
            else:
                doing = activity(before, one, now - at if at is not None else 0.0)
            if doing:
                progress_.works(doing, now)
            elif not stack_frames.in_collective(one.main) and progress_.shown > (at or progress_.heard + PRINTS_AFTER_S):
                doing = progress_.doing
            if doing:
                self._busy[rank] = doing
            self._inspected[rank] = now

    def _may_work(self, stall: Stall) -> bool:
        """Return whether the first look at a rank leaves open that it works: it, or a process it waits for, used some CPU."""
        seen = self.snapshots.get(stall.rank) if stall.rank is not None else None
        if seen is None or stall.proof or stall.kind in ("spin", "kernel", "stopped", "debugged"):
            return False
        changed = seen.children != seen.children_before
        return seen.main_cpu > IDLE_CPU or changed or any(worker.cpu > IDLE_CPU for worker in seen.workers)

    def _as_busy(self, stall: Stall, now: float) -> Stall:
        """Return the stall as the work of a busy rank, if that is who the others wait for; else as it is."""
        if stall.proof or stall.kind in ("stopped", "debugged"):
            return stall
        if stall.rank in self._busy:
            ranks = tuple(rank for rank in stall.ranks if rank in self._busy)
            return self._busy_stall(stall, ranks, self._busy[ranks[0]], now)
        accused = self.snapshots.get(stall.rank) if stall.rank is not None else None
        waits = stall.rank is None or (accused is not None and stack_frames.in_collective(accused.main))
        if self._busy and waits:
            ranks = tuple(sorted(self._busy))
            return self._busy_stall(stall, ranks, self._busy[ranks[0]], now)
        if stall.rank is not None and stall.rank in self._ranks and self._is_busy_timeout_over(stall.rank, now):
            return self._busy_stall(stall, stall.ranks, self._ranks[stall.rank].doing, now)
        return stall

    def _busy_stall(self, stall: Stall, ranks: tuple[int, ...], doing: str, now: float) -> Stall:
        rank = ranks[0]
        seen, one = self.snapshots.get(rank), self._ranks[rank]
        frame = stack_frames.users_frame(seen.main) if seen is not None else None
        waiting = stall.waiting if stall.rank == rank else ()
        operation = stall.operation or ("a collective" if waiting else "")
        at = stack_frames.users_frame(self.snapshots[waiting[0]].main) if waiting and waiting[0] in self.snapshots else None
        if at is not None:
            operation += f" ({at.file.rpartition('/')[2]}:{at.line})"
        silent = round(now - one.no_step_since, 1)
        return replace(
            stall, kind="busy", rank=rank, ranks=ranks, waiting=waiting, where=str(frame or ""), detail=doing,
            operation=operation, silent_s=silent, step=one.steps, parties=(),
        )  # fmt: skip

    def _is_busy_timeout_over(self, rank: int, now: float) -> bool:
        """Return whether the rank gave evidence of work to the end, and had --busy-timeout for it."""
        one = self._ranks[rank]
        if not one.steps or not one.training or now - one.heard < self._busy_timeout - 0.5:
            return False
        return one.shown > one.heard and now - one.shown < self._timeout - 0.5

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
        if self._failing and not stall.proof and stall.kind != "stopped" and stall.silent_s < rank_progress.FLOOR_S:
            return False  # another rank has just failed: this one may be on its way to report the same
        if stall.kind == "spin" and not (stall.waiting and stall.where):  # without a line it may be shutting down
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
        return max(self._timeout, rank_progress.K * one.usual) if one is not None else self._timeout

    def _stops_in(self, stall: Stall, now: float) -> float | None:
        if not self._timeout or stall.kind == "debugged":
            return None
        if stall.kind == "busy" and stall.rank is not None:
            one = self._ranks[stall.rank]
            over = one.heard + self._busy_timeout if one.steps and one.training else float("inf")
            return None if over == float("inf") else max(0.0, over - now)
        return AGAIN_S if stall.proof else max(0.0, self._silent_since(stall, now) + self._limit(stall) - now)

    def _deadline(self, stall: Stall, now: float) -> float:
        if not self._timeout:
            return now + self._wait
        over = self._silent_since(stall, now) + self._limit(stall)
        if stall.rank is not None and self._ranks[stall.rank].steps and self._ranks[stall.rank].training:
            over = min(over, max(self._ranks[stall.rank].heard + self._busy_timeout, now))
        return max(now + 0.25, over - 0.5)

    def _silent_since(self, stall: Stall, now: float) -> float:
        """Return when it last gave a sign: a step, a line, evidence of work. Signs without a step count up to --busy-timeout."""
        if stall.rank is None or stall.rank in self._ended:
            since = now - stall.silent_s
            worked = max((one.worked for rank, one in self._ranks.items() if rank not in self._ended), default=since)
            return max(since, worked) if stall.silent_s < self._busy_timeout else since
        one = self._ranks[stall.rank]
        if not one.steps:
            return max(one.heard, one.active)
        if not one.training:  # an announced phase may take as long as it likes while it gives signs
            return max(one.heard, one.shown)
        return max(one.heard, one.shown) if now - one.heard < self._busy_timeout - 0.5 else one.heard

    def _stop_reason(self, stall: Stall, now: float) -> str:
        if not self._timeout:
            return ""
        if stall.proof and self._looks > 1 and now - self._first_seen >= AGAIN_S - 0.5:
            return "it can't continue by itself"
        if now - self._silent_since(stall, now) >= self._limit(stall) - 0.5:
            if stall.kind == "busy":
                return f"--busy-timeout of {format_duration(self._busy_timeout)} is over"
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
                evidence = (*stall.evidence, *stack_frames.told(seen.values()))
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
        return {rank: stack_frames.full(one) for rank, one in self.snapshots.items()}


def _identity(stall: Stall) -> tuple[Any, ...]:
    """When two looks see the same: of a proof also the operation, of a suspicion only the rank."""
    return (stall.rank, stall.kind, stall.operation, stall.evidence[:1]) if stall.proof else (stall.rank, False)
