"""Where the snapshots of `stoker top` come from: what is there, or (`--demo`) a made-up cluster that moves, in which one card is
too hot, its rank is slow, and the others wait for it. (A recorded run: player.py.)"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Protocol

from stoker.contract.units import rank_name
from stoker.control.machine.model import Holder
from stoker.control.show.collector import HostReading, SnapshotCollector
from stoker.control.show.snapshot import (
    RUNNING,
    GpuGauges,
    HostGauges,
    RankView,
    RoleView,
    RunView,
    SlowRank,
    Snapshot,
    Suspicion,
)

_RUN = "demo-20260101-120000"
_TOTAL = 20_000
_STEP_S = 1.6
_RECENT = 120
_TOO_HOT_S = 240.0  # the slow card heats up and cools down in this time
_GB = 10**9


def demo_snapshot(now: float, begun: float, hosts: int = 2, gpus: int = 4) -> Snapshot:
    """The same for the same times. The card that gets hot is the third of the last host."""
    passed = max(0.0, now - begun)
    hot = (hosts - 1) * gpus + min(2, gpus - 1)
    world = hosts * gpus
    ranks = tuple(_rank(number, gpus, passed, number == hot) for number in range(world))
    return Snapshot(
        time=now,
        hosts=tuple(_host(number, now, passed) for number in range(hosts)),
        gpus=tuple(_card(number, gpus, passed, number == hot) for number in range(world)),
        runs=(_finished(begun), _run(ranks, passed, begun, hot)),
        root="demo",
        interval=2.0,
    )


def _wave(seed: float, when: float, period: float = 30.0) -> float:
    """From 0 to 1, smooth, different for each seed."""
    return 0.5 + 0.25 * (math.sin(2 * math.pi * when / period + seed * 1.7) + math.sin(when / period * 3.1 + seed))


def _held(passed: float) -> bool:
    """The clock of the hot card is held down for two thirds of the time."""
    return (passed + _TOO_HOT_S / 6) % _TOO_HOT_S < _TOO_HOT_S * 2 / 3


def _times(passed: float) -> Iterator[float]:
    return (passed - 2.0 * back for back in range(_RECENT - 1, -1, -1))


def _host(number: int, now: float, passed: float) -> HostGauges:
    busy = 0.2 + 0.2 * _wave(number, passed)
    return HostGauges(
        name=f"node{number + 1}",
        time=now,
        cores=64,
        load=(busy * 64, busy * 60, busy * 50),
        cpu=busy,
        memory_total=512 * _GB,
        memory_available=int((380 - 20 * _wave(number, passed, 90.0)) * _GB),
        disk_path="/data",
        disk_free=(1800 - number * 300) * _GB,
        disk_total=4000 * _GB,
        disk_read=40e6 * _wave(number + 5, passed),
        disk_written=900e6 if passed % 60 < 4 else 2e6,
        received=4e9 * (0.5 + _wave(number, passed) / 2),
        sent=4e9 * (0.5 + _wave(number + 1, passed) / 2),
        link=25e9,
        driver="570.00",
        recent={"cpu": tuple(0.2 + 0.2 * _wave(number, when) for when in _times(passed))},
    )


def _utilization(number: int, when: float, hot: bool) -> float:
    if hot:
        return 0.99
    return (0.62 if _held(when) else 0.93) + 0.05 * _wave(number, when, 11.0)


def _card(number: int, gpus: int, passed: float, hot: bool) -> GpuGauges:
    held = hot and _held(passed)
    temperature = 88 + int(3 * _wave(number, passed)) if held else 61 + int(8 * _wave(number, passed, 60.0))
    pid = 40_000 + number
    return GpuGauges(
        index=number % gpus,
        uuid=f"GPU-demo-{number:04}",
        name="NVIDIA H100 80GB HBM3",
        host=f"node{number // gpus + 1}",
        utilization=_utilization(number, passed, hot),
        memory_used=int((61 + 2 * _wave(number, passed)) * _GB),
        memory_total=80 * _GB,
        temperature=temperature,
        temperature_slowdown=90,
        power=310.0 + 30 * _wave(number, passed) if held else 560.0 + 90 * _wave(number, passed),
        power_limit=700.0,
        clock=1.1e9 if held else 1.98e9,
        clock_max=1.98e9,
        throttle=("thermal slowdown",) if held else (),
        processes=(Holder(pid, 60 * _GB, "python -u train.py --preset d20", "ada", _RUN, passed + 600.0),),
        recent={"utilization": tuple(_utilization(number, when, hot) for when in _times(passed))},
    )


def _step_s(passed: float) -> float:
    return _STEP_S + (0.9 if _held(passed) else 0.0)


def _rank(number: int, gpus: int, passed: float, hot: bool) -> RankView:
    step_s = _step_s(passed) + 0.02 * _wave(number, passed)
    share = 0.03 + 0.02 * _wave(number, passed)
    waiting = share + (0.9 / _step_s(passed) if _held(passed) and not hot else 0.0)
    return RankView(
        rank=number,
        role="train",
        role_rank=number,
        label=f"node{number // gpus + 1}/GPU{number % gpus}",
        host=f"node{number // gpus + 1}",
        gpu=f"GPU-demo-{number:04}",
        pid=40_000 + number,
        state="running",
        step=_step(passed),
        step_s=step_s,
        waiting=waiting,
        phase="step" if passed % 60 >= 4 else "checkpoint",
        beat_age=passed % _STEP_S,
        memory=int((9 + _wave(number, passed)) * _GB),
        recent={"step_s": tuple(_step_s(when) + 0.02 * _wave(number, when) for when in _times(passed))},
    )


def _step(passed: float) -> int:
    return 4_000 + int(passed / _STEP_S)


def _loss(step: int) -> float:
    return 2.1 + 8.0 / (1.0 + step / 120.0) + 0.06 * math.sin(step * 0.7) * math.exp(-step / 9000)


def _run(ranks: tuple[RankView, ...], passed: float, begun: float, hot: int) -> RunView:
    step = _step(passed)
    rate = 8192 * len(ranks) * 16 / _step_s(passed)
    slow: tuple[SlowRank, ...] = ()
    suspicion = None
    if _held(passed):
        rank = ranks[hot]
        because = "its GPU's clock is held down: thermal slowdown at 89 °C"
        cost = f"; the others wait 0.9 s of each {_step_s(passed):.2g} s step"
        summary = f"{rank_name(hot, rank.label)} is slow because {because}{cost}"
        since = begun + passed
        slow = (
            SlowRank(hot, rank.label, rank.host, rank.gpu, "slow.throttle", because, 0.9, _step_s(passed), since, summary),
        )
        suspicion = Suspicion(since, "straggler", "slow.throttle", summary, hot)
    every = max(1, step // 300)
    return RunView(
        id=_RUN,
        name="demo",
        dir="demo",
        user="ada",
        mine=False,
        state=RUNNING,
        started=begun - 600.0,
        updated=begun + passed,
        seconds=600.0 + passed,
        world=len(ranks),
        attempts=2,
        attempt=1,
        restarts={"gpu.xid": 1},
        step=step,
        total_steps=_TOTAL,
        loss=_loss(step),
        tokens_per_s=rate,
        mfu=0.44 * _STEP_S / _step_s(passed),
        grad_norm=0.8 + 0.2 * _wave(3, passed),
        lr=3e-4 * (1 - step / _TOTAL),
        eta_s=(_TOTAL - step) * _step_s(passed),
        phase="step",
        suspicion=suspicion,
        command="train.py --preset d20",
        hosts=tuple(dict.fromkeys(rank.host for rank in ranks)),
        roles=(RoleView("train", len(ranks), tuple(rank.rank for rank in ranks)),),
        ranks=ranks,
        slow=slow,
        curve=tuple((at, _loss(at)) for at in range(0, step, every)),
    )


def _finished(begun: float) -> RunView:
    return RunView(
        id="demo-first", name="first try", dir="demo", user="ada", mine=False, state="completed", started=begun - 9000.0,
        seconds=7200.0, world=8, attempts=1, attempt=0, step=4000, total_steps=4000, loss=2.9124, tokens_per_s=210_000.0,
    )  # fmt: skip


_FIRST_S = 10.0  # that one picture waits for other hosts
_BEFORE_S = 250.0  # that the demonstration has run already: its card was cool for a while
_GAP_S = 0.3  # between two readings: rates need two


class Elsewhere(Protocol):
    """Other hosts (control/cluster/host_monitor.py)."""

    def readings(self) -> list[HostReading]: ...

    def wait(self, seconds: float) -> None: ...

    def close(self) -> None: ...


class Live:
    """This machine, or other hosts instead; and the runs of a folder."""

    status = ""

    def __init__(self, root: str, interval: float, everybody: bool = False, elsewhere: Elsewhere | None = None) -> None:
        self.interval = interval
        self._gatherer = SnapshotCollector(root, everybody, machine=elsewhere is None)
        self._elsewhere = elsewhere

    def look(self, watched: tuple[str, ...]) -> Snapshot:
        return self._gatherer.snapshot(watched, self._elsewhere.readings() if self._elsewhere is not None else ())

    def look_once(self, watched: tuple[str, ...] = ()) -> Snapshot:
        """Take a snapshot that has rates, and of every host an answer or the reason why there is none.

        `watched` are ids of runs that are read with their ranks and curves also when they are over.
        """
        if self._elsewhere is not None:
            self._elsewhere.wait(_FIRST_S)
            return self.look(watched)
        self.look(watched)
        time.sleep(_GAP_S)
        return self.look(watched)

    def seek(self, what: str) -> str:
        return ""

    def close(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.close()


class Demo:
    status = "demo"

    def __init__(self, interval: float, hosts: int = 2, gpus: int = 4) -> None:
        self.interval = interval
        self._begun, self._size = time.time() - _BEFORE_S, (hosts, gpus)

    def look(self, watched: tuple[str, ...]) -> Snapshot:
        return demo_snapshot(time.time(), self._begun, *self._size)

    def look_once(self, watched: tuple[str, ...] = ()) -> Snapshot:
        return self.look(watched)

    def seek(self, what: str) -> str:
        return ""

    def close(self) -> None:
        return None
