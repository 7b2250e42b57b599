"""A rank that is persistently slower: who enters the collectives last, by how much a step, and why. Pure.

In a synchronised training every rank steps at the same pace, so beats alone don't show it. The flight recorder's times
of entry do: the last one in makes the others wait. It is asked in the first steps, when steps have become slower, and
once a minute.
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

FIRST_ASK = 8  # steps
EVERY = 2  # steps, while it is watched closely
CLOSELY = 16  # steps: at the start, and after a rise
RISE = 1.4  # times the usual step: somebody may have become slow
NOT_SOONER_S = 0.5
AGAIN_S = 60.0
NEWEST = 10  # waits that count
FEWEST = 5  # of them, and
AGAIN = 4  # new ones in the second look
SHARE = 0.9  # of them that one rank causes, twice in a row, for it to be the one
WORTH = 0.2  # of a step
WORTH_S = 0.02
OVER = 0.1  # of the time or less that the others wait for it, twice in a row: it is no longer slow
SAMPLES = 10
PACES = 100
_GPU_WAITS = ("synchronize", "item", "tolist", "cpu")


@frozen
class Straggler:
    cause: str  # slow.data, slow.cpu, slow.swap, slow.throttle, slow.link, slow.code
    rank: int
    wait_s: float  # what each of the others waits a step
    step_s: float
    because: str
    where: str
    step: int


@frozen
class Late:
    rank: int
    wait_s: float  # what it makes the others wait
    step_s: float
    when: float  # the newest time it was late
    asynchronous: bool = False  # NCCL's times are those of the launch: only a peer that really waits makes it true


@frozen
class Named:
    """Reported as slow, and not yet seen to keep up again."""

    step_s: float
    since: float  # what happened later counts
    kept_up: bool = False  # in the look before


class Pace:
    """One rank's seconds a step, kept in order: sorting 512 ranks' anew is a tenth of the coordinator's work."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, seconds: float) -> None:
        self._newest.append(seconds)
        bisect.insort(self._ordered, seconds)
        if len(self._newest) > PACES:
            del self._ordered[bisect.bisect_left(self._ordered, self._newest.popleft())]

    @property
    def usual(self) -> float:
        """The median; 0 while there are too few to say."""
        return self._ordered[len(self._ordered) // 2] if len(self._ordered) >= 4 else 0.0


class StragglerDetector:
    def __init__(self, world: int) -> None:
        self._world = world
        self.asked = 0  # number of the inspection that is ours
        self._asked_at = 0.0
        self._mode = ""
        self._timings: dict[str, dict[int, list[list[Any]]]] = {}  # by host: clocks of different hosts are not compared
        self._pace: dict[int, Pace] = {}
        self._steps: dict[int, int] = {}
        self._beaten: dict[int, float] = {}
        self._slow_since: dict[int, int] = {}
        self._next_step = FIRST_ASK
        self._closely_until = CLOSELY + FIRST_ASK  # in steps
        self._first: Late | None = None  # late once: asked again a few steps later
        self._suspect: Late | None = None
        self._named: dict[int, Named] = {}
        self.found: list[Straggler] = []  # news, taken by the coordinator
        self.over: list[int] = []  # ranks that are no longer slow: likewise
        self.seconds: dict[int, float] = {}  # rank -> of its newest steps, each
        self.waiting: dict[int, float] = {}  # rank -> share of its time, as of the newest look at the collectives

    def stepped(self, rank: int, steps: int, count: int, longest: float, now: float) -> None:
        before = self._beaten.get(rank)
        self._beaten[rank] = now
        self._steps[rank] = steps
        if before is None or count <= 0 or steps <= 2:
            return
        pace = self._pace.setdefault(rank, Pace())
        seconds = longest if count == 1 else max((now - before) / count, 0.0)
        self.seconds[rank] = seconds
        if pace.usual and seconds > RISE * pace.usual:
            self._slow_since.setdefault(rank, steps)
        else:
            self._slow_since.pop(rank, None)
            pace.add(seconds)

    def question(self, now: float, steps: Mapping[int, int]) -> dict[str, Any] | None:
        """The order for the agents, if it is time to ask."""
        if self._world < 2 or len(steps) < self._world or not steps:
            return None
        if self._suspect is not None and not self._mode:
            late = self._suspect
            self._mode = "why"
            peer = next(one for one in sorted(steps) if one != late.rank)
            gap = min(max(late.step_s * 1.5 / SAMPLES, 0.03), 0.3)
            return {"ranks": [late.rank, peer], "samples": SAMPLES, "gap": gap}
        slowest = min(steps.values())
        if any(slowest - since >= 2 for since in self._slow_since.values()):
            self._slow_since = {}
            self._closely_until = max(self._closely_until, slowest + CLOSELY)
        due = slowest >= self._next_step if slowest < self._closely_until else now - self._asked_at > AGAIN_S
        if not due or now - self._asked_at < NOT_SOONER_S:
            return None
        self._next_step = slowest + EVERY
        self._asked_at = now
        self._mode = "timings"
        self._timings = {}
        return {"timings": True}

    def answered(self, host: str, told: Mapping[str, Any]) -> None:
        for rank, data in told.items():
            if is_digits(rank) and isinstance(data, dict) and "timings" in data:
                entries = data["timings"] if isinstance(data["timings"], list) else []
                self._timings.setdefault(host, {})[int(rank)] = [entry for entry in entries if _is_timing(entry)]

    def conclude(self, answers: InspectionSet) -> None:
        mode, self._mode, self.asked = self._mode, "", 0
        if mode == "timings":
            for ranks in self._timings.values():
                self.waiting |= waiting_shares(ranks)
                self._look_at_named(ranks)
            before = self._first
            since, fewest = (before.when, AGAIN) if before else (0.0, FEWEST)
            found = (who_is_late(ranks, since, fewest) for ranks in self._timings.values())
            fresh = (one for one in found if one is not None and one.rank not in self._named)
            late = max(fresh, key=lambda one: one.wait_s, default=None)
            if late is None:
                return  # no news, or too few: the next look will tell
            self._first = None
            if before is not None and before.rank == late.rank:
                self._suspect = late
            else:
                self._first = late
                self._look_closely()
        elif mode == "why" and self._suspect is not None:
            late, self._suspect = self._suspect, None
            rank = late.rank
            peer = next((one for other, one in answers.items() if other != rank), None)
            if rank in answers and not (late.asynchronous and (peer is None or not waits_for_others(peer))):
                cause, because, where = why(answers[rank], peer)
                self._named[rank] = Named(late.step_s, late.when)
                wait_s, step_s, step = round(late.wait_s, 3), round(late.step_s, 3), self._steps.get(rank, 0)
                self.found.append(Straggler(cause, rank, wait_s, step_s, because, where, step))

    def _look_closely(self) -> None:
        self._closely_until = max(self._closely_until, min(self._steps.values(), default=0) + CLOSELY)

    def _look_at_named(self, timings: Mapping[int, list[list[Any]]]) -> None:
        for rank in sorted(timings.keys() & self._named.keys()):
            named = self._named[rank]
            cost, begin, until = cost_of(rank, timings, named.since)
            if until - begin < FEWEST * named.step_s:
                continue  # too short to say
            keeps_up = cost <= OVER * (until - begin)
            if keeps_up and named.kept_up:
                del self._named[rank]
                self.over.append(rank)
                continue
            self._named[rank] = Named(named.step_s, until, keeps_up)
            if keeps_up:
                self._look_closely()


def _is_timing(entry: Any) -> bool:
    """[group, number, nanoseconds] and perhaps the backend. A host may have written anything."""
    if not isinstance(entry, list) or len(entry) not in (3, 4) or not isinstance(entry[0], str):
        return False
    return all(type(number) is int and 0 <= number < 1 << 63 for number in entry[1:3])


def cost_of(rank: int, timings: Mapping[int, list[list[Any]]], since: float) -> tuple[float, float, float]:
    """(seconds that the others waited for this rank alone, time of the first and of the last collective after `since`)."""
    entries_of_rank = (entries for entries in _entries(timings).values() if rank in entries)
    waits = [
        (entries[rank], max(entered for other, entered in entries.items() if other != rank))
        for entries in entries_of_rank
    ]
    newer = [(entered, before) for entered, before in waits if max(entered, before) > since]
    if not newer:
        return 0.0, since, since
    cost = sum(entered - before for entered, before in newer if entered - before > WORTH_S)
    return cost, min(map(max, newer)), max(map(max, newer))


def _entries(timings: Mapping[int, list[list[Any]]]) -> dict[tuple[Any, Any], dict[int, float]]:
    """Return collective -> member of its group -> when it entered, in seconds; only those that all members entered.

    The members of a group are the ranks that have entered any collective of it.
    """
    entries: dict[tuple[Any, Any], dict[int, float]] = {}
    members: dict[Any, set[int]] = {}
    for rank, table in _tables(timings).items():
        for key, entered in table.items():
            entries.setdefault(key, {})[rank] = entered
            members.setdefault(key[0], set()).add(rank)
    return {key: ranks for key, ranks in entries.items() if len(ranks) > 1 and ranks.keys() == members[key[0]]}


def _tables(timings: Mapping[int, list[list[Any]]]) -> dict[int, dict[tuple[Any, Any], float]]:
    """Rank -> collective -> when it was entered, in seconds."""
    return {rank: {(entry[0], entry[1]): entry[2] / 1e9 for entry in entries} for rank, entries in timings.items()}


def who_is_late(timings: Mapping[int, list[list[Any]]], after: float = 0.0, fewest: int = FEWEST) -> Late | None:
    """The rank that nearly always came last, of the newest times that somebody was waited for (those after `after`).

    Every group counts: a slow member of a pair makes its partner late for the collectives of all ranks, too.
    A step's first collective absorbs the delay and the others of the same step follow closely, so a late rank is late
    once a step. Only what one rank alone costs counts: two equally slow ones are no straggler, and of uneven steps now
    this rank is last, now that.
    """
    if len(timings) < 2:
        return None
    events: list[tuple[float, int, float]] = []  # when, who came last, how long after the one before
    for entries in _entries(timings).values():
        (_, before), (rank, last) = sorted(entries.items(), key=lambda item: item[1])[-2:]
        if last - before > WORTH_S and last > after:
            events.append((last, rank, last - before))
    recent = sorted(events)[-NEWEST:]
    if len(recent) < fewest:
        return None
    ranks = [rank for _, rank, _ in recent]
    rank = max(set(ranks), key=ranks.count)
    mine = [(when, wait) for when, who, wait in recent if who == rank]
    if len(mine) < SHARE * len(recent):
        return None
    step_s = _median([later - sooner for (sooner, _), (later, _) in itertools.pairwise(mine)])
    wait_s = _median([wait for _, wait in mine])
    asynchronous = any(entry[3:] == ["nccl"] for entries in timings.values() for entry in entries)
    return Late(rank, wait_s, step_s, mine[-1][0], asynchronous) if WORTH * step_s <= wait_s < step_s else None


def waiting_shares(timings: Mapping[int, list[list[Any]]]) -> dict[int, float]:
    """Rank -> share of the time in which it was in a collective that another rank of its host had not entered yet.

    NCCL's times are those of the launch: there it is the share of the time in which it was ahead.
    """
    if len(timings) < 2:
        return {}
    tables = _tables(timings)
    common = set.intersection(*(set(table) for table in tables.values()))
    last = {key: max(table[key] for table in tables.values()) for key in common}
    if len(common) < FEWEST or max(last.values()) <= min(last.values()):
        return {}
    begin, end = min(last.values()), max(last.values())
    shares = {}
    for rank, table in tables.items():
        waited, until = 0.0, begin
        for entered, left in sorted((table[key], last[key]) for key in common):
            # A rank that is far ahead is in several at once.
            waited += max(0.0, left - max(entered, until))
            until = max(until, left)
        shares[rank] = round(min(waited / (end - begin), 1.0), 3)
    return shares


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def waits_for_others(one: RankInspection) -> bool:
    """In most samples its main thread is in a collective, or waits for the GPU, where NCCL's are waited for."""
    inside = 0
    for threads in one.samples:
        main = main_thread(threads)
        if main is not None and (
            stack_frames.in_collective(main.frames)
            or any(frame.function in _GPU_WAITS for frame in main.frames[:2])
            or not main.active
        ):
            inside += 1
    return 2 * inside > len(one.samples)


def _narrow(one: RankInspection) -> bool:
    return len(one.lanes) == 2 and one.lanes[0] is not None and one.lanes[1] is not None and one.lanes[0] < one.lanes[1]


def why(one: RankInspection, peer: RankInspection | None) -> tuple[str, str, str]:
    """(cause, reason in words, the line it spends its time on)."""
    own: Counter[str] = Counter()
    loader = busy = 0
    for threads in one.samples:
        main = main_thread(threads)
        if main is None or not main.frames or stack_frames.in_collective(main.frames):
            continue
        busy += 1
        loader += stack_frames.in_loader(main.frames)
        own[str(stack_frames.users_frame(main.frames))] += 1
    where = max(own, key=lambda line: own[line], default="")
    only_here = [word for word in one.throttle if peer is None or word not in peer.throttle]
    if only_here:
        return "slow.throttle", f"its GPU's clock is held down: {', '.join(only_here)}", where
    if _narrow(one) and not (peer is not None and _narrow(peer)):
        return "slow.link", f"its GPU's PCIe link has {one.lanes[0]} of {one.lanes[1]} lanes", where
    if one.swap and one.faults > 20:
        faults, out = f"{one.faults:.0f} page faults a second from the disk", f"{format_bytes(one.swap)} swapped out"
        return "slow.swap", f"it swaps: {faults}, {out}", where
    if one.waiting_for_core > 0.25 and (peer is None or one.waiting_for_core > 1.5 * peer.waiting_for_core):
        may = f"; it may run on {one.cpus} CPU{'s' if one.cpus != 1 else ''}" if one.cpus else ""
        return "slow.cpu", f"it waits for a CPU {one.waiting_for_core:.0%} of the time{may}", where
    if loader and loader >= 0.5 * busy:
        return "slow.data", "it waits for its data loader", where
    if where:
        return "slow.code", f"it spends its time at {where}", where
    return "slow.unknown", "no reason could be seen from outside", where
