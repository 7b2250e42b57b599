"""Finds a rank that is persistently slower: who enters the collectives last, by how much per step, and why.

In synchronized training every rank steps at the same pace, so step times don't show it. The times at which ranks enter
collectives do: the others wait for the last rank. A check asks the agents for these times in the flight recorders. Checks
are made in the first steps, when steps have become slower, and once a minute. It does no I/O.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from stoker.contract.frozen import frozen
from stoker.contract.text import is_digits
from stoker.contract.units import format_bytes
from stoker.control.watch import stack_frames
from stoker.control.watch.rank_inspection import InspectionSet, RankInspection, main_thread

FIRST_CHECK_STEP = 8
CHECK_EVERY_STEPS = 2  # while watching closely
CLOSE_WATCH_STEPS = 16  # steps to watch closely at the start, and after steps have become slower
SLOWDOWN = 1.4  # a step that takes this many times the usual one starts a close watch
MIN_CHECK_INTERVAL_S = 0.5
CHECK_INTERVAL_S = 60.0  # while not watching closely
MAX_WAITS = 10  # number of newest waits that a check evaluates
MIN_WAITS = 5  # number of waits that a check needs
MIN_NEW_WAITS = 4  # number of new waits that the second check needs
MIN_LAST_SHARE = 0.9  # share of the waits that one rank must cause, in two checks in a row
MIN_WAIT_SHARE = 0.2  # of a step: a rank that costs the others less is not reported
MIN_WAIT_S = 0.02  # shorter waits are ignored
RECOVERED_SHARE = 0.1  # a rank has recovered if it costs the others at most this share of the time, in two checks
SAMPLES = 10  # stack samples of a suspect
STEP_TIMES = 100  # number of step times for the median
_GPU_WAITS = ("synchronize", "item", "tolist", "cpu")


@frozen
class Straggler:
    cause: str  # slow.data, slow.cpu, slow.swap, slow.throttle, slow.link, slow.code
    rank: int
    wait_s: float  # seconds that each of the others waits per step
    step_s: float
    because: str
    where: str
    step: int


@frozen
class LateRank:
    """A rank that enters the collectives last."""

    rank: int
    wait_s: float  # seconds that each of the others waits per step
    step_s: float
    late_at: float  # when it was late last
    is_asynchronous: bool = (
        False  # NCCL records the launch of a collective: then a peer's stack must show that it waits
    )


@frozen
class ReportedStraggler:
    """A rank that was reported as slow and has not recovered."""

    step_s: float
    since: float  # only collectives after this time count
    kept_up: bool = False  # whether it kept up in the previous check


class StepTimes:
    """The newest step times of one rank. They are kept sorted: sorting those of 512 ranks takes a tenth of the launcher's CPU."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, seconds: float) -> None:
        self._newest.append(seconds)
        bisect.insort(self._ordered, seconds)
        if len(self._newest) > STEP_TIMES:
            del self._ordered[bisect.bisect_left(self._ordered, self._newest.popleft())]

    @property
    def usual(self) -> float:
        """Return the median in seconds, or 0 if there are fewer than 4 step times."""
        return self._ordered[len(self._ordered) // 2] if len(self._ordered) >= 4 else 0.0


class StragglerDetector:
    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.inspection = 0  # number of the inspection that this detector asked for, or 0
        self._asked_at = 0.0
        self._mode = ""  # what was asked for: "timings", or "why" a rank is slow
        self._timings: dict[
            str, dict[int, list[list[Any]]]
        ] = {}  # by host, because clocks of different hosts can't be compared
        self._step_times: dict[int, StepTimes] = {}
        self._steps: dict[int, int] = {}
        self._last_beat_at: dict[int, float] = {}
        self._slow_since: dict[int, int] = {}  # rank -> step at which its steps became slower
        self._next_step = FIRST_CHECK_STEP
        self._close_until_step = CLOSE_WATCH_STEPS + FIRST_CHECK_STEP
        self._candidate: LateRank | None = None  # late in one check; the next one is a few steps later
        self._suspect: LateRank | None = None  # late in two checks, so its stack is to be sampled
        self._reported: dict[int, ReportedStraggler] = {}
        self.newly_slow: list[Straggler] = []  # the launcher reports and removes them
        self.recovered: list[int] = []  # the launcher reports and removes them
        self.step_seconds: dict[int, float] = {}  # rank -> seconds of its newest step
        self.waiting_shares: dict[
            int, float
        ] = {}  # rank -> share of its time that it waits for others, from the newest check

    def add_steps(self, rank: int, steps: int, count: int, longest: float, now: float) -> None:
        """Note a beat: a rank has made `count` more steps, `steps` in all."""
        before = self._last_beat_at.get(rank)
        self._last_beat_at[rank] = now
        self._steps[rank] = steps
        if before is None or count <= 0 or steps <= 2:
            return
        step_times = self._step_times.setdefault(rank, StepTimes())
        seconds = longest if count == 1 else max((now - before) / count, 0.0)
        self.step_seconds[rank] = seconds
        if step_times.usual and seconds > SLOWDOWN * step_times.usual:
            self._slow_since.setdefault(rank, steps)
        else:
            self._slow_since.pop(rank, None)
            step_times.add(seconds)

    def next_order(self, now: float, steps: Mapping[int, int]) -> dict[str, Any] | None:
        """Return the order for the agents if a check is due, else None. `steps` maps living ranks to their steps."""
        if self._world_size < 2 or len(steps) < self._world_size or not steps:
            return None
        if self._suspect is not None and not self._mode:
            suspect = self._suspect
            self._mode = "why"
            peer = next(rank for rank in sorted(steps) if rank != suspect.rank)
            gap = min(max(suspect.step_s * 1.5 / SAMPLES, 0.03), 0.3)
            return {"ranks": [suspect.rank, peer], "samples": SAMPLES, "gap": gap}
        slowest = min(steps.values())
        if any(slowest - since >= 2 for since in self._slow_since.values()):
            self._slow_since = {}
            self._close_until_step = max(self._close_until_step, slowest + CLOSE_WATCH_STEPS)
        watching_closely = slowest < self._close_until_step
        due = slowest >= self._next_step if watching_closely else now - self._asked_at > CHECK_INTERVAL_S
        if not due or now - self._asked_at < MIN_CHECK_INTERVAL_S:
            return None
        self._next_step = slowest + CHECK_EVERY_STEPS
        self._asked_at = now
        self._mode = "timings"
        self._timings = {}
        return {"timings": True}

    def add_timings(self, host: str, answer: Mapping[str, Any]) -> None:
        """Note the entry times in a host's answer, which may be malformed."""
        for rank, data in answer.items():
            if is_digits(rank) and isinstance(data, dict) and "timings" in data:
                entries = data["timings"] if isinstance(data["timings"], list) else []
                self._timings.setdefault(host, {})[int(rank)] = [entry for entry in entries if _is_timing(entry)]

    def conclude(self, inspections: InspectionSet) -> None:
        """Evaluate the answers to the newest order: the timings, or the inspections of the suspect and a peer."""
        mode, self._mode, self.inspection = self._mode, "", 0
        if mode == "timings":
            self._conclude_timings()
        elif mode == "why" and self._suspect is not None:
            suspect, self._suspect = self._suspect, None
            rank = suspect.rank
            peer = next((inspection for other, inspection in inspections.items() if other != rank), None)
            if rank in inspections and not (suspect.is_asynchronous and (peer is None or not waits_for_others(peer))):
                cause, because, where = explain_slow_rank(inspections[rank], peer)
                self._reported[rank] = ReportedStraggler(suspect.step_s, suspect.late_at)
                wait_s, step_s, step = round(suspect.wait_s, 3), round(suspect.step_s, 3), self._steps.get(rank, 0)
                self.newly_slow.append(Straggler(cause, rank, wait_s, step_s, because, where, step))

    def _conclude_timings(self) -> None:
        for timings in self._timings.values():
            self.waiting_shares |= compute_waiting_shares(timings)
            self._check_recovery(timings)
        before = self._candidate
        since, min_waits = (before.late_at, MIN_NEW_WAITS) if before else (0.0, MIN_WAITS)
        late_ranks = (find_late_rank(timings, since, min_waits) for timings in self._timings.values())
        unreported = (late for late in late_ranks if late is not None and late.rank not in self._reported)
        latest = max(unreported, key=lambda late: late.wait_s, default=None)
        if latest is None:
            return  # no rank is late, or there are too few waits: the next check decides
        self._candidate = None
        if before is not None and before.rank == latest.rank:
            self._suspect = latest
        else:
            self._candidate = latest
            self._watch_closely()

    def _watch_closely(self) -> None:
        self._close_until_step = max(self._close_until_step, min(self._steps.values(), default=0) + CLOSE_WATCH_STEPS)

    def _check_recovery(self, timings: Mapping[int, list[list[Any]]]) -> None:
        for rank in sorted(timings.keys() & self._reported.keys()):
            reported = self._reported[rank]
            cost, begin, end = measure_delay(rank, timings, reported.since)
            if end - begin < MIN_WAITS * reported.step_s:
                continue  # too short to tell
            keeps_up = cost <= RECOVERED_SHARE * (end - begin)
            if keeps_up and reported.kept_up:
                del self._reported[rank]
                self.recovered.append(rank)
                continue
            self._reported[rank] = ReportedStraggler(reported.step_s, end, keeps_up)
            if keeps_up:
                self._watch_closely()


def _is_timing(entry: Any) -> bool:
    """Return whether an entry is [group, number, nanoseconds] or [group, number, nanoseconds, backend]."""
    if not isinstance(entry, list) or len(entry) not in (3, 4) or not isinstance(entry[0], str):
        return False
    return all(type(number) is int and 0 <= number < 1 << 63 for number in entry[1:3])


def measure_delay(rank: int, timings: Mapping[int, list[list[Any]]], since: float) -> tuple[float, float, float]:
    """Return (seconds that the others waited for this rank alone, time of the first and last collective after `since`)."""
    entries_of_rank = (entries for entries in _shared_entries(timings).values() if rank in entries)
    waits = [
        (entries[rank], max(entered for other, entered in entries.items() if other != rank))
        for entries in entries_of_rank
    ]
    newer = [(entered, before) for entered, before in waits if max(entered, before) > since]
    if not newer:
        return 0.0, since, since
    cost = sum(entered - before for entered, before in newer if entered - before > MIN_WAIT_S)
    return cost, min(map(max, newer)), max(map(max, newer))


def _shared_entries(timings: Mapping[int, list[list[Any]]]) -> dict[tuple[Any, Any], dict[int, float]]:
    """Return collective -> rank -> when it entered, in seconds, for the collectives that all members of their group entered.

    The ranks that have entered any collective of a group count as its members.
    """
    entries: dict[tuple[Any, Any], dict[int, float]] = {}
    members: dict[Any, set[int]] = {}
    for rank, times in _entry_times(timings).items():
        for collective, entered in times.items():
            entries.setdefault(collective, {})[rank] = entered
            members.setdefault(collective[0], set()).add(rank)
    return {
        collective: ranks
        for collective, ranks in entries.items()
        if len(ranks) > 1 and ranks.keys() == members[collective[0]]
    }


def _entry_times(timings: Mapping[int, list[list[Any]]]) -> dict[int, dict[tuple[Any, Any], float]]:
    """Return rank -> collective (group, number) -> when the rank entered it, in seconds of its host's clock."""
    return {rank: {(entry[0], entry[1]): entry[2] / 1e9 for entry in entries} for rank, entries in timings.items()}


def find_late_rank(
    timings: Mapping[int, list[list[Any]]], after: float = 0.0, min_waits: int = MIN_WAITS
) -> LateRank | None:
    """Return the rank that entered last in nearly all of the newest waits after the time `after`, or None.

    Every group counts: a slow member of a pair also delays its partner in the collectives of all ranks. The first
    collective of a step absorbs the delay and the others follow closely, so a late rank is late once per step. Only the time
    that one rank alone costs counts: two equally slow ranks are not stragglers. Neither are ranks with an uneven load, where
    another rank is last in each step.
    """
    if len(timings) < 2:
        return None
    waits: list[tuple[float, int, float]] = []  # (time, rank that entered last, seconds after the previous rank)
    for entries in _shared_entries(timings).values():
        (_, before), (rank, last) = sorted(entries.items(), key=lambda item: item[1])[-2:]
        if last - before > MIN_WAIT_S and last > after:
            waits.append((last, rank, last - before))
    newest = sorted(waits)[-MAX_WAITS:]
    if len(newest) < min_waits:
        return None
    ranks = [rank for _, rank, _ in newest]
    rank = max(set(ranks), key=ranks.count)
    waits_for_rank = [(when, wait) for when, last_rank, wait in newest if last_rank == rank]
    if len(waits_for_rank) < MIN_LAST_SHARE * len(newest):
        return None
    step_s = _median([later - sooner for (sooner, _), (later, _) in itertools.pairwise(waits_for_rank)])
    wait_s = _median([wait for _, wait in waits_for_rank])
    if not MIN_WAIT_SHARE * step_s <= wait_s < step_s:
        return None
    is_asynchronous = any(entry[3:] == ["nccl"] for entries in timings.values() for entry in entries)
    return LateRank(rank, wait_s, step_s, waits_for_rank[-1][0], is_asynchronous)


def compute_waiting_shares(timings: Mapping[int, list[list[Any]]]) -> dict[int, float]:
    """Return rank -> share of the time in which it was in a collective that another rank of its host had not entered yet.

    NCCL records the launch of a collective, so with NCCL it is the share of the time in which the rank was ahead.
    """
    if len(timings) < 2:
        return {}
    times_by_rank = _entry_times(timings)
    common = set.intersection(*(set(times) for times in times_by_rank.values()))
    last = {collective: max(times[collective] for times in times_by_rank.values()) for collective in common}
    if len(common) < MIN_WAITS or max(last.values()) <= min(last.values()):
        return {}
    begin, end = min(last.values()), max(last.values())
    shares = {}
    for rank, times in times_by_rank.items():
        waited_s, counted_until = 0.0, begin
        for entered, finished in sorted((times[collective], last[collective]) for collective in common):
            # A rank that is far ahead is in several collectives at the same time: count that time once.
            waited_s += max(0.0, finished - max(entered, counted_until))
            counted_until = max(counted_until, finished)
        shares[rank] = round(min(waited_s / (end - begin), 1.0), 3)
    return shares


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def waits_for_others(inspection: RankInspection) -> bool:
    """Return whether in most samples the main thread is in a collective or waits for the GPU, as it does for NCCL's."""
    waits = 0
    for threads in inspection.samples:
        main = main_thread(threads)
        if main is not None and (
            stack_frames.in_collective(main.frames)
            or any(frame.function in _GPU_WAITS for frame in main.frames[:2])
            or not main.active
        ):
            waits += 1
    return 2 * waits > len(inspection.samples)


def _has_narrow_link(inspection: RankInspection) -> bool:
    lanes = inspection.lanes
    return len(lanes) == 2 and lanes[0] is not None and lanes[1] is not None and lanes[0] < lanes[1]


def explain_slow_rank(inspection: RankInspection, peer: RankInspection | None) -> tuple[str, str, str]:
    """Return why a rank is slow: (id of the cause, reason, the line at which it spends most time)."""
    lines: Counter[str] = Counter()
    in_loader = samples = 0
    for threads in inspection.samples:
        main = main_thread(threads)
        if main is None or not main.frames or stack_frames.in_collective(main.frames):
            continue
        samples += 1
        in_loader += stack_frames.in_loader(main.frames)
        lines[str(stack_frames.script_frame(main.frames))] += 1
    where = max(lines, key=lambda line: lines[line], default="")
    throttled = [reason for reason in inspection.throttle if peer is None or reason not in peer.throttle]
    if throttled:
        return "slow.throttle", f"its GPU's clock is held down: {', '.join(throttled)}", where
    if _has_narrow_link(inspection) and not (peer is not None and _has_narrow_link(peer)):
        now, maximum = inspection.lanes
        return "slow.link", f"its GPU's PCIe link has {now} of {maximum} lanes", where
    if inspection.swap and inspection.faults > 20:
        faults = f"{inspection.faults:.0f} page faults per second from disk"
        return "slow.swap", f"it is swapping: {faults}, {format_bytes(inspection.swap)} swapped out", where
    waiting = inspection.waiting_for_core
    if waiting > 0.25 and (peer is None or waiting > 1.5 * peer.waiting_for_core):
        cpus = f"; it may run on {inspection.cpus} CPU{'s' if inspection.cpus != 1 else ''}" if inspection.cpus else ""
        return "slow.cpu", f"it waits for a CPU {waiting:.0%} of the time{cpus}", where
    if in_loader and in_loader >= 0.5 * samples:
        return "slow.data", "it waits for its data loader", where
    if where:
        return "slow.code", f"it spends its time at {where}", where
    return "slow.unknown", "no reason was found", where
