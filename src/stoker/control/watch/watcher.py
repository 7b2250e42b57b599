"""Watches one attempt: takes the agents' messages and decides what to do about a rank that makes no progress.

A stuck rank is inspected and reported within seconds while the job keeps running. The job is stopped on proof, or when
--hang-timeout is over; a rank with evidence of work has until --busy-timeout. The watcher returns actions, which the
launcher carries out.
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
from stoker.control.watch.activity import describe_work
from stoker.control.watch.culprit import find_culprit
from stoker.control.watch.divergence import find_divergence_of_failed
from stoker.control.watch.rank_inspection import RankInspection
from stoker.control.watch.rank_progress import RankProgress
from stoker.control.watch.straggler import StragglerDetector

STOPPED_S = 0.5  # a process that has been in state T for this long is inspected
CONFIRM_S = 3.0  # a proof is confirmed by a second inspection, this much later
SECOND_INSPECTION_S = 1.0  # a silent rank that used CPU is inspected again this much later, before it is suspected
PRINTS_AFTER_S = 1.0  # a line printed this long after the last step shows that the rank continues
IDLE_CPU = 0.0002  # cores: the inspection itself makes a process use this much
ANSWER_S = 12.0  # an inspection is concluded after this time even if hosts have not answered
PHASE_FACTOR = 6.0  # an announced phase (eval, save) has this many times --hang-timeout
START_STOP_S = 60.0  # minimum time before the job is stopped for a rank without a first step
MAX_WAIT_S = 60.0  # maximum time between inspections of the same stall
BUSY_REPORT_S = 60.0  # a working rank is reported after this long without a step, or after a shorter --hang-timeout
BUSY_TIMEOUT_S = 1800.0
COMPUTES_S = 10.0  # a rank that computes while no rank waits for it is reported after this long without a step


@frozen
class Inspect:
    """An order to inspect ranks, to be sent to all agents."""

    order: Mapping[str, Any]


@frozen
class Suspect:
    """A rank seems to be stuck: report it."""

    stall: Stall
    stops_in: float | None  # seconds until the job is stopped if nothing changes; None if it won't be stopped


@frozen
class Busy:
    """A rank has been working for a long time without finishing a step. This withdraws a reported suspicion."""

    stall: Stall
    stops_in: float | None  # seconds until the job is stopped if no step ends; None if it won't be stopped


@frozen
class Recovered:
    """The suspected rank makes progress again."""

    rank: int | None
    silent_s: float


@frozen
class Stop:
    """The job is to be stopped because of a stall."""

    stall: Stall
    why: str


@frozen
class RankStatus:
    """The status of one rank for the views."""

    step: int
    step_s: float | None
    waiting: float | None  # share of its time that it waits for others
    phase: str
    state: str  # of its process: R, S, D, T, Z; ? until the agent reports one
    beat_age: float  # seconds since its last progress
    collective_age: float | None  # seconds since it entered its last seen collective; None if it made progress since


Action = Inspect | Suspect | Busy | Recovered | Stop


class Watcher:
    def __init__(
        self,
        world_size: int,
        hang_timeout: float,
        hosts: frozenset[str],
        now: float,
        first_inspection: int = 0,
        ranks: range | None = None,
        busy_timeout: float = BUSY_TIMEOUT_S,
    ) -> None:
        """Watch `ranks` (None for all). With a `busy_timeout` of 0 the job is never stopped because of a working rank."""
        self._world_size = world_size
        self._hang_timeout = hang_timeout
        self._busy_timeout = max(busy_timeout, hang_timeout) if busy_timeout else float("inf")
        self._max_wait = min(MAX_WAIT_S, max(CONFIRM_S, hang_timeout / 4)) if hang_timeout else MAX_WAIT_S
        self._ranks = {rank: RankProgress(now) for rank in (range(world_size) if ranks is None else ranks)}
        self._exit_codes: dict[int, int] = {}  # rank -> exit code
        self._members: dict[str, tuple[int, ...]] = {}  # process group -> ranks
        # The inspection in progress.
        self._inspection = first_inspection  # number of the newest inspection
        self._inspected_at = 0.0  # when the inspection in progress was ordered; 0 if there is none
        self._hosts = hosts
        self._waiting_hosts: set[str] = set()  # hosts that have not answered
        self._answers: dict[int, RankInspection] = {}
        # The stall, and the inspections of it.
        self.stall: Stall | None = None
        self.inspections: dict[int, RankInspection] = {}  # the newest of each rank
        self._next_inspection_at = 0.0
        self._interval_s = CONFIRM_S  # seconds to the next inspection
        self._stall_found_at = 0.0  # when this stall was first found
        self._confirmations = 0  # inspections that found this stall
        self._silent_from = 0.0  # when the stalled rank made its last progress
        self._reported: tuple[Any, ...] = ()  # (rank, proof) of the reported suspicion
        # rank -> what it is doing, of ranks with evidence of work since the previous inspection
        self._busy: dict[int, str] = {}
        self._reported_busy: int | None = None
        self._inspected: dict[int, float] = {}  # rank -> when it was last inspected in this stall
        self._in_collective_since: dict[int, float] = {}  # rank -> when it entered the collective it is in
        self.stragglers = StragglerDetector(world_size)
        # After a failure.
        self._has_failure = False
        self._is_after_failure = False  # the newest inspection began after the failure
        self.survivors_inspected = False  # the ranks that survived a failure have been inspected
        self._failed: dict[int, RankInspection] = {}  # failed rank -> its state when it failed

    # ---- messages from the agents ----

    def note_steps(self, rank: int, steps: int, count: int, longest: float, now: float) -> None:
        self._ranks[rank].note_steps(steps, longest, now)
        self._in_collective_since.pop(rank, None)
        self.stragglers.add_steps(rank, steps, count, longest, now)

    def note_output(self, rank: int, now: float) -> None:
        self._ranks[rank].note_output(now)

    def note_mark(self, rank: int, now: float, phase: str | None = None) -> None:
        """Note that the script set a mark, or entered `phase`."""
        waited_before = self._ranks[rank].waits_for_server(now)
        self._ranks[rank].note_mark(now)
        if phase is not None:
            self._ranks[rank].enter_phase(phase)
            if waited_before and not self._ranks[rank].waits_for_server(now):
                self.restart_clocks(now)  # the others could not progress while this rank waited for the server

    def note_unreadable_beats(self, rank: int, now: float) -> None:
        self._ranks[rank].note_unreadable_beats(now)

    def note_vitals(self, rank: int, state: str, cpu: float, moved: int, now: float) -> None:
        self._ranks[rank].note_vitals(state, cpu, moved, now)

    def note_groups(self, text: str) -> None:
        """Note the members of process groups: "0=*;1=0,1"."""
        for item in text.split(";"):
            name, _, ranks = item.partition("=")
            if ranks == "*":
                self._members[name] = tuple(range(self._world_size))
            elif ranks:
                self._members[name] = tuple(int(rank) for rank in ranks.split(",") if is_digits(rank))

    def note_exit(self, rank: int, code: int) -> None:
        self._exit_codes[rank] = code

    def restart_clocks(self, now: float) -> None:
        """Count silence from `now` on for all ranks, after a time in which none of them could make progress."""
        for progress in self._ranks.values():
            progress.note_mark(now)
            progress.stopped_since = 0.0
        self._forget_stall()

    def note_failure(
        self, rank: int, collectives: Sequence[Any], frames: Sequence[Any], calls: Sequence[Any] = ()
    ) -> None:
        """Note a failed rank's last operations, stack and calls.

        torch marks operations that failed as done. Mark them as not done: all from the first unusual one on, else the newest.
        """
        samples = [[{"main": True, "frames": frames}]]
        data = {"state": "Z", "groups": collectives, "samples": samples, "calls": calls}
        inspection = rank_inspection.parse_inspection(rank, data)
        orders = {op.order: op.usual for group in inspection.groups for op in group.ops}
        last_usual = max((order for order, usual in orders.items() if usual), default=0)
        unusual = (order for order, usual in orders.items() if usual is False and order > last_usual)
        failed_from = min(unusual, default=max(orders, default=0))
        groups = tuple(
            replace(group, ops=tuple(replace(op, done=op.done and op.order < failed_from) for op in group.ops))
            for group in inspection.groups
        )
        self._failed[rank] = replace(inspection, groups=groups)

    def inspect_survivors(self) -> None:
        """Inspect the living ranks soon: a rank has failed, perhaps because another one is stuck."""
        self._has_failure = True

    def take_answer(self, host: str, number: int, payload: bytes, now: float) -> None:
        """Take a host's answer to inspection `number`. An answer that can't be parsed counts as empty."""
        if number != self._inspection or not self._inspected_at:
            return
        try:
            answer = parse_json(payload or b"{}")
        except ValueError:
            answer = {}
        if self.stragglers.inspection == number:
            self.stragglers.add_timings(host, answer)
        for rank, data in answer.items():
            if is_digits(rank) and isinstance(data, dict) and "timings" not in data:
                inspection = self._answers[int(rank)] = rank_inspection.parse_inspection(int(rank), data)
                if inspection.newest_entry_ns and any(group.pending for group in inspection.groups):
                    age = max(0.0, time.time() - inspection.newest_entry_ns / 1e9)
                    self._in_collective_since[int(rank)] = now - age
        self._waiting_hosts.discard(host)

    # ---- what to do now ----

    def next_actions(self, now: float) -> list[Action]:
        """Return what the launcher is to do now. The launcher calls this a few times per second."""
        if self._inspected_at:
            if self._waiting_hosts and now - self._inspected_at < ANSWER_S:
                return []
            return self._conclude(now)
        overdue = self._find_overdue(now)
        if not overdue and not self._has_failure:
            actions = self._withdraw_stall(now)
            steps = {rank: progress.steps for rank, progress in self._ranks.items() if rank not in self._exit_codes}
            order = self.stragglers.next_order(now, steps)
            return [*actions, self._inspect(order, now)] if order else actions
        if now < self._next_inspection_at and self._is_after_failure == self._has_failure:
            return []
        return [self._inspect({}, now)]

    def _inspect(self, order: dict[str, Any], now: float) -> Inspect:
        self._inspection += 1
        self._inspected_at = now
        self._is_after_failure = self._has_failure
        self._answers = {}
        self._waiting_hosts = set(self._hosts)
        if order:
            self.stragglers.inspection = self._inspection
        return Inspect({"do": "inspect", "ask": self._inspection, **order})

    def _find_overdue(self, now: float) -> dict[int, float]:
        """Return rank -> seconds without progress, for ranks whose silence exceeds what is usual for them."""
        alive = {rank: progress for rank, progress in self._ranks.items() if rank not in self._exit_codes}
        overdue = {
            rank: now - progress.last_progress_at
            for rank, progress in alive.items()
            if progress.stopped_since and now - progress.stopped_since >= STOPPED_S
        }
        if self._any_waits_for_server(now):
            return overdue  # the others wait for that rank, which announced its wait and has a timeout for it
        for rank, progress in alive.items():
            silence = now - progress.last_progress_at
            if progress.steps and silence > rank_progress.FLOOR_S and silence > progress.max_silence_s:
                overdue[rank] = silence
        # A rank without a first step is only overdue if all are idle, or if it has been idle for very long.
        starting = {rank: progress for rank, progress in alive.items() if not progress.steps}
        if starting and self._world_size > 1:
            idle = {
                rank: now - progress.last_activity_at
                for rank, progress in starting.items()
                if now - progress.last_activity_at > rank_progress.IDLE_S
            }
            if len(idle) == len(alive) or any(silence > rank_progress.START_S for silence in idle.values()):
                overdue |= idle
        return overdue

    def _any_waits_for_server(self, now: float) -> bool:
        return any(
            progress.waits_for_server(now) for rank, progress in self._ranks.items() if rank not in self._exit_codes
        )

    def _withdraw_stall(self, now: float) -> list[Action]:
        """Forget the stall, and withdraw the report of it if the rank makes progress again."""
        stall, reported = self.stall, self._reported or self._reported_busy is not None
        if stall is None:
            return []
        silent_s = now - self._silent_from if self._silent_from else 0.0
        self._forget_stall()
        is_progress = stall.rank not in self._exit_codes and not self._any_waits_for_server(now)
        return [Recovered(stall.rank, silent_s)] if reported and is_progress else []

    def _forget_stall(self) -> None:
        self.stall, self._reported, self._confirmations, self._silent_from, self._interval_s = (
            None,
            (),
            0,
            0.0,
            CONFIRM_S,
        )
        self._next_inspection_at = 0.0
        self._busy, self._reported_busy, self._inspected = {}, None, {}

    def _conclude(self, now: float) -> list[Action]:
        """Evaluate the answers to the newest inspection."""
        answers, self._inspected_at = self._answers, 0.0
        if self.stragglers.inspection == self._inspection:
            self.stragglers.conclude(answers)
            return []
        overdue = self._find_overdue(now)
        self._next_inspection_at = now + self._interval_s
        self.survivors_inspected = self.survivors_inspected or (self._is_after_failure and bool(answers))
        if self._has_failure:
            overdue |= {rank: now - self._ranks[rank].last_progress_at for rank in answers}
        if not overdue and not self._has_failure:
            return self._withdraw_stall(now)
        self._note_work(answers, now)
        self.inspections.update(answers)
        steps = {rank: progress.steps for rank, progress in self._ranks.items()}
        ended = {rank: code for rank, code in self._exit_codes.items() if rank not in self._failed}
        stall = find_culprit(
            {**self._failed, **answers}, self._world_size, self._members, ended, overdue, steps, self._busy
        )
        if stall is not None and stall.rank is not None and stall.rank not in self._ranks:
            stall = None  # the rank is on another machine, whose launcher watches it
        if stall is None or not self._is_evidence(stall):
            self._interval_s = min(self._interval_s * 2, self._max_wait)
            return self._stop_without_evidence(overdue, now)
        stall = self._mark_if_busy(stall, now)
        self._silent_from = now - stall.silent_s
        if self.stall is None or _stall_key(self.stall) != _stall_key(stall):
            self._stall_found_at, self._confirmations = now, 0
        self._confirmations += 1
        if self._confirmations > 2 and not stall.proof:
            self._interval_s = min(
                self._interval_s * 2, self._max_wait
            )  # nothing is new, and an inspection reads the stacks of all ranks
        self.stall = stall
        actions: list[Action] = []
        if stall.kind == "busy":
            report_after = min(BUSY_REPORT_S, self._hang_timeout or BUSY_REPORT_S)
            if self._reported_busy != stall.rank and (self._reported or stall.silent_s >= report_after):
                self._reported_busy, self._reported = stall.rank, ()  # this withdraws the suspicion
                actions.append(Busy(stall, self._seconds_to_stop(stall, now)))
        elif self._confirmations == 1 and not self._reported and self._may_be_working(stall):
            self._next_inspection_at = now + SECOND_INSPECTION_S
            return []
        # A suspicion is reported once, and again if it gets worse.
        elif not self._reported or stall.rank != self._reported[0] or stall.proof > self._reported[1]:
            self._reported = stall.rank, stall.proof
            actions.append(Suspect(stall, self._seconds_to_stop(stall, now)))
        reason = self._find_stop_reason(stall, now)
        if reason:
            actions.append(Stop(stall, reason))
        self._next_inspection_at = min(now + self._interval_s, self._latest_inspection_time(stall, now))
        return actions

    def _note_work(self, answers: Mapping[int, RankInspection], now: float) -> None:
        """Note which ranks have given evidence of work since their last inspection in this stall."""
        self._busy = {}
        for rank, inspection in answers.items():
            if rank not in self._ranks or inspection.state in "TtZ":
                continue
            progress, inspected_at = self._ranks[rank], self._inspected.get(rank)
            before = self.inspections.get(rank) if inspected_at is not None else None
            if before is not None and inspection.newest_entry_ns > before.newest_entry_ns:
                doing = "it is entering one collective after another"
            else:
                doing = describe_work(before, inspection, now - inspected_at if inspected_at is not None else 0.0)
            if doing:
                progress.note_work(doing, now)
            elif not stack_frames.in_collective(inspection.main) and progress.last_sign_at > (
                inspected_at or progress.last_progress_at + PRINTS_AFTER_S
            ):
                doing = progress.last_work
            if doing:
                self._busy[rank] = doing
            self._inspected[rank] = now

    def _may_be_working(self, stall: Stall) -> bool:
        """Return whether the rank or one of its children used CPU in the inspection, so that it needs a second one."""
        inspection = self.inspections.get(stall.rank) if stall.rank is not None else None
        if inspection is None or stall.proof or stall.kind in ("spin", "kernel", "stopped", "debugged"):
            return False
        changed = inspection.children != inspection.children_before
        return inspection.main_cpu > IDLE_CPU or changed or any(worker.cpu > IDLE_CPU for worker in inspection.workers)

    def _mark_if_busy(self, stall: Stall, now: float) -> Stall:
        """Return the stall with kind busy if the others wait for a rank that is working, else the stall unchanged."""
        if stall.proof or stall.kind in ("stopped", "debugged"):
            return stall
        if stall.rank in self._busy:
            ranks = tuple(rank for rank in stall.ranks if rank in self._busy)
            return self._make_busy_stall(stall, ranks, self._busy[ranks[0]], now)
        accused = self.inspections.get(stall.rank) if stall.rank is not None else None
        is_waiting = stall.rank is None or (accused is not None and stack_frames.in_collective(accused.main))
        if self._busy and is_waiting:
            ranks = tuple(sorted(self._busy))
            return self._make_busy_stall(stall, ranks, self._busy[ranks[0]], now)
        if stall.rank is not None and stall.rank in self._ranks and self._is_busy_timeout_over(stall.rank, now):
            return self._make_busy_stall(stall, stall.ranks, self._ranks[stall.rank].last_work, now)
        return stall

    def _make_busy_stall(self, stall: Stall, ranks: tuple[int, ...], doing: str, now: float) -> Stall:
        rank = ranks[0]
        inspection, progress = self.inspections.get(rank), self._ranks[rank]
        frame = stack_frames.script_frame(inspection.main) if inspection is not None else None
        waiting = stall.waiting if stall.rank == rank else ()
        operation = stall.operation or ("a collective" if waiting else "")
        waiter = self.inspections.get(waiting[0]) if waiting else None
        waits_at = stack_frames.script_frame(waiter.main) if waiter is not None else None
        if waits_at is not None:
            operation += f" ({waits_at.file.rpartition('/')[2]}:{waits_at.line})"
        silent_s = round(now - progress.last_step_at, 1)
        return replace(
            stall, kind="busy", rank=rank, ranks=ranks, waiting=waiting, where=str(frame or ""), detail=doing,
            operation=operation, silent_s=silent_s, step=progress.steps, parties=(),
        )  # fmt: skip

    def _is_busy_timeout_over(self, rank: int, now: float) -> bool:
        """Return whether --busy-timeout is over for a rank that gave evidence of work until recently."""
        progress = self._ranks[rank]
        if not progress.steps or not progress.is_training or now - progress.last_progress_at < self._busy_timeout - 0.5:
            return False
        return (
            progress.last_sign_at > progress.last_progress_at and now - progress.last_sign_at < self._hang_timeout - 0.5
        )

    def _stop_without_evidence(self, overdue: Mapping[int, float], now: float) -> list[Action]:
        """Stop the job if the inspection explained nothing and the timeout is over."""
        silent = {rank: seconds for rank, seconds in overdue.items() if self._ranks[rank].steps}
        if not silent or self._has_failure:
            return []
        rank = max(silent, key=lambda rank: silent[rank])
        seconds, step = round(silent[rank], 1), self._ranks[rank].steps
        stall = Stall("place", rank, (rank,), detail="what it is doing could not be seen", silent_s=seconds, step=step)
        self._next_inspection_at = min(self._next_inspection_at, self._latest_inspection_time(stall, now))
        reason = self._find_stop_reason(stall, now)
        return [Suspect(stall, 0.0), Stop(stall, reason)] if reason else []

    def _is_evidence(self, stall: Stall) -> bool:
        """Return whether a stall is worth a suspicion.

        Before the first step, only a rank that others wait for or that can't continue is evidence. An interpreter that is
        starting never is.
        """
        if not stall.where and not stall.waiting and not stall.proof and stall.kind not in ("disk", "stopped"):
            return False
        if self._has_failure and not stall.proof and stall.kind != "stopped" and stall.silent_s < rank_progress.FLOOR_S:
            return False  # another rank has just failed: this one may be about to report the same
        if stall.kind == "spin" and not (stall.waiting and stall.where):  # without a line it may be shutting down
            return stall.silent_s >= min(COMPUTES_S, self._silence_limit_s(stall) / 2)
        if stall.rank is not None and not any(progress.steps for progress in self._ranks.values()):
            return bool(stall.waiting) or stall.proof
        return True

    # ---- when to stop ----

    def _silence_limit_s(self, stall: Stall) -> float:
        """Return the seconds of silence after which the job is stopped without proof."""
        if not self._hang_timeout:
            return float("inf")
        if stall.rank is None:
            return self._hang_timeout
        progress = self._ranks[stall.rank]
        if not progress.steps:
            return max(START_STOP_S, self._hang_timeout)
        if not progress.is_training:
            return PHASE_FACTOR * self._hang_timeout
        return max(self._hang_timeout, rank_progress.PATIENCE_FACTOR * progress.usual_gap_s)

    def _seconds_to_stop(self, stall: Stall, now: float) -> float | None:
        if not self._hang_timeout or stall.kind == "debugged":
            return None
        if stall.kind == "busy" and stall.rank is not None:
            progress = self._ranks[stall.rank]
            stop_at = (
                progress.last_progress_at + self._busy_timeout
                if progress.steps and progress.is_training
                else float("inf")
            )
            return None if stop_at == float("inf") else max(0.0, stop_at - now)
        return (
            CONFIRM_S
            if stall.proof
            else max(0.0, self._last_sign_of_life(stall, now) + self._silence_limit_s(stall) - now)
        )

    def _latest_inspection_time(self, stall: Stall, now: float) -> float:
        """Return the latest time for the next inspection, so that the job can be stopped in time."""
        if not self._hang_timeout:
            return now + self._interval_s
        stop_at = self._last_sign_of_life(stall, now) + self._silence_limit_s(stall)
        if stall.rank is not None and self._ranks[stall.rank].steps and self._ranks[stall.rank].is_training:
            stop_at = min(stop_at, max(self._ranks[stall.rank].last_progress_at + self._busy_timeout, now))
        return max(now + 0.25, stop_at - 0.5)

    def _last_sign_of_life(self, stall: Stall, now: float) -> float:
        """Return the time of the newest sign of life: a step, a printed line or evidence of work.

        Without a step, signs of life count only until --busy-timeout is over.
        """
        if stall.rank is None or stall.rank in self._exit_codes:
            since = now - stall.silent_s
            alive = (progress for rank, progress in self._ranks.items() if rank not in self._exit_codes)
            worked = max((progress.last_work_at for progress in alive), default=since)
            return max(since, worked) if stall.silent_s < self._busy_timeout else since
        progress = self._ranks[stall.rank]
        if not progress.steps:
            return max(progress.last_progress_at, progress.last_activity_at)
        # An announced phase may take any time while the rank shows signs of life.
        if not progress.is_training or now - progress.last_progress_at < self._busy_timeout - 0.5:
            return max(progress.last_progress_at, progress.last_sign_at)
        return progress.last_progress_at

    def _find_stop_reason(self, stall: Stall, now: float) -> str:
        """Return why the job is to be stopped now, or ""."""
        if not self._hang_timeout:
            return ""
        if stall.proof and self._confirmations > 1 and now - self._stall_found_at >= CONFIRM_S - 0.5:
            return "it can't continue"
        if now - self._last_sign_of_life(stall, now) >= self._silence_limit_s(stall) - 0.5:
            if stall.kind == "busy":
                return f"--busy-timeout of {format_duration(self._busy_timeout)} is over"
            return f"--hang-timeout of {self._hang_timeout:g} s is over"
        return ""

    # ---- for the verdict, the record and the views ----

    def final_stall(self, sizes_differ: bool) -> Stall | None:
        """Return the stall at the end of the attempt, or None. `sizes_differ` means that gloo ended a rank for that."""
        if len(self._failed) > 1:
            inspections = {**self.inspections, **self._failed}
            stall = find_divergence_of_failed(inspections, self._members, self._world_size, sizes_differ)
            if stall is not None:
                ranks = (stall.rank,) if stall.rank is not None else self._failed
                steps = [self._ranks[rank].steps for rank in ranks if rank in self._ranks]
                evidence = (*stall.evidence, *stack_frames.summarize_stacks(inspections.values()))
                return replace(stall, step=min(steps, default=0), evidence=evidence)
        return None if sizes_differ else self.stall

    def rank_statuses(self, now: float) -> dict[int, RankStatus]:
        """Return rank -> its status, for each watched rank."""
        statuses = {}
        for rank, progress in self._ranks.items():
            since = self._in_collective_since.get(rank)
            statuses[rank] = RankStatus(
                progress.steps,
                self.stragglers.step_seconds.get(rank),
                self.stragglers.waiting_shares.get(rank),
                progress.phase,
                progress.state,
                now - progress.last_progress_at,
                now - since if since is not None else None,
            )
        return statuses

    def format_stacks(self) -> dict[int, str]:
        return {rank: stack_frames.format_stacks(inspection) for rank, inspection in self.inspections.items()}


def _stall_key(stall: Stall) -> tuple[Any, ...]:
    """Return a key that is equal for inspections of the same stall: the rank and, for a proof, the operation."""
    return (stall.rank, stall.kind, stall.operation, stall.evidence[:1]) if stall.proof else (stall.rank, False)
