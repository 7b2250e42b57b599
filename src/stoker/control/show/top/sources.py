"""Provides snapshots for `stoker top`: live ones, and those of a simulated cluster for `--demo`. replay.py plays recorded runs."""

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

# ---- live ----

_HOSTS_TIMEOUT_S = 10.0  # a single snapshot waits at most this long for other hosts
_GAP_S = 0.3  # time between the two readings of the gauges that rates need


class RemoteHosts(Protocol):
    """Reads the gauges of other hosts; control/cluster/host_monitor.py implements it."""

    def readings(self) -> list[HostReading]: ...

    def wait(self, seconds: float) -> None: ...

    def close(self) -> None: ...


class LiveSource:
    """Takes snapshots of the runs in a folder with this machine's gauges, or with those of other hosts if `remote` is given."""

    status = ""

    def __init__(self, root: str, interval: float, everybody: bool = False, remote: RemoteHosts | None = None) -> None:
        self.interval = interval
        self._collector = SnapshotCollector(root, everybody, machine=remote is None)
        self._remote = remote

    def take_snapshot(self, watched: tuple[str, ...]) -> Snapshot:
        return self._collector.snapshot(watched, self._remote.readings() if self._remote is not None else ())

    def take_single_snapshot(self, watched: tuple[str, ...] = ()) -> Snapshot:
        """Take a snapshot that includes rates. Each host has its gauges or the reason why they are missing.

        Runs in `watched` (ids) have ranks and curves even after they have ended.
        """
        if self._remote is not None:
            self._remote.wait(_HOSTS_TIMEOUT_S)
        else:
            self.take_snapshot(watched)
            time.sleep(_GAP_S)
        return self.take_snapshot(watched)

    def seek(self, command: str) -> str:
        return ""

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()


# ---- demo ----

_DEMO_ID = "demo-20260101-120000"
_TOTAL_STEPS = 20_000
_STEP_S = 1.6
_WAIT_S = 0.9  # the other ranks wait this long per step while the hot GPU is throttled
_RECENT = 120  # values of a sparkline
_CYCLE_S = 240.0  # the hot GPU heats up and cools down in this time
_DEMO_BEFORE_S = 250.0  # the demo starts at this time of the simulation, so that the sparklines show a cool GPU, too
_GB = 10**9


class DemoSource:
    status = "demo"

    def __init__(self, interval: float, hosts: int = 2, gpus: int = 4) -> None:
        self.interval = interval
        self._began, self._size = time.time() - _DEMO_BEFORE_S, (hosts, gpus)

    def take_snapshot(self, watched: tuple[str, ...]) -> Snapshot:
        return demo_snapshot(time.time(), self._began, *self._size)

    def take_single_snapshot(self, watched: tuple[str, ...] = ()) -> Snapshot:
        return self.take_snapshot(watched)

    def seek(self, command: str) -> str:
        return ""

    def close(self) -> None:
        return None


def demo_snapshot(now: float, began: float, hosts: int = 2, gpus: int = 4) -> Snapshot:
    """Simulate a cluster in which one GPU gets too hot, so that its rank is slow and the others wait for it.

    Depends only on its arguments; `gpus` is the number of GPUs of each host. The hot GPU is the third one of the last host.
    """
    elapsed = max(0.0, now - began)
    hot = (hosts - 1) * gpus + min(2, gpus - 1)
    world_size = hosts * gpus
    ranks = tuple(_simulate_rank(rank, gpus, elapsed, rank == hot) for rank in range(world_size))
    return Snapshot(
        time=now,
        hosts=tuple(_simulate_host(host, now, elapsed) for host in range(hosts)),
        gpus=tuple(_simulate_gpu(rank, gpus, elapsed, rank == hot) for rank in range(world_size)),
        runs=(_make_finished_run(began), _simulate_running_run(ranks, elapsed, began, hot)),
        root="demo",
        interval=2.0,
    )


def _wave(seed: float, time: float, period: float = 30.0) -> float:
    """Return a value from 0 to 1 that varies smoothly with time, different for each seed."""
    return 0.5 + 0.25 * (math.sin(2 * math.pi * time / period + seed * 1.7) + math.sin(time / period * 3.1 + seed))


def _is_throttled(elapsed: float) -> bool:
    """Return True while the hot GPU's clock is held down, which is two thirds of the time."""
    return (elapsed + _CYCLE_S / 6) % _CYCLE_S < _CYCLE_S * 2 / 3


def _recent_times(elapsed: float) -> Iterator[float]:
    return (elapsed - 2.0 * back for back in range(_RECENT - 1, -1, -1))


def _simulate_host(number: int, now: float, elapsed: float) -> HostGauges:
    busy = 0.2 + 0.2 * _wave(number, elapsed)
    return HostGauges(
        name=f"node{number + 1}",
        time=now,
        cores=64,
        load=(busy * 64, busy * 60, busy * 50),
        cpu=busy,
        memory_total=512 * _GB,
        memory_available=int((380 - 20 * _wave(number, elapsed, 90.0)) * _GB),
        disk_path="/data",
        disk_free=(1800 - number * 300) * _GB,
        disk_total=4000 * _GB,
        disk_read=40e6 * _wave(number + 5, elapsed),
        disk_written=900e6 if elapsed % 60 < 4 else 2e6,
        received=4e9 * (0.5 + _wave(number, elapsed) / 2),
        sent=4e9 * (0.5 + _wave(number + 1, elapsed) / 2),
        link=25e9,
        driver="570.00",
        recent={"cpu": tuple(0.2 + 0.2 * _wave(number, time) for time in _recent_times(elapsed))},
    )


def _utilization_at(number: int, time: float, is_hot: bool) -> float:
    if is_hot:
        return 0.99
    return (0.62 if _is_throttled(time) else 0.93) + 0.05 * _wave(number, time, 11.0)


def _simulate_gpu(number: int, gpus: int, elapsed: float, is_hot: bool) -> GpuGauges:
    is_throttled = is_hot and _is_throttled(elapsed)
    temperature = 88 + int(3 * _wave(number, elapsed)) if is_throttled else 61 + int(8 * _wave(number, elapsed, 60.0))
    pid = 40_000 + number
    return GpuGauges(
        index=number % gpus,
        uuid=f"GPU-demo-{number:04}",
        name="NVIDIA H100 80GB HBM3",
        host=f"node{number // gpus + 1}",
        utilization=_utilization_at(number, elapsed, is_hot),
        memory_used=int((61 + 2 * _wave(number, elapsed)) * _GB),
        memory_total=80 * _GB,
        temperature=temperature,
        temperature_slowdown=90,
        power=310.0 + 30 * _wave(number, elapsed) if is_throttled else 560.0 + 90 * _wave(number, elapsed),
        power_limit=700.0,
        clock=1.1e9 if is_throttled else 1.98e9,
        clock_max=1.98e9,
        throttle=("thermal slowdown",) if is_throttled else (),
        processes=(Holder(pid, 60 * _GB, "python -u train.py --preset d20", "ada", _DEMO_ID, elapsed + 600.0),),
        recent={"utilization": tuple(_utilization_at(number, time, is_hot) for time in _recent_times(elapsed))},
    )


def _step_s_at(elapsed: float) -> float:
    return _STEP_S + (_WAIT_S if _is_throttled(elapsed) else 0.0)


def _simulate_rank(number: int, gpus: int, elapsed: float, is_hot: bool) -> RankView:
    waiting = 0.03 + 0.02 * _wave(number, elapsed)
    if _is_throttled(elapsed) and not is_hot:
        waiting += _WAIT_S / _step_s_at(elapsed)
    return RankView(
        rank=number,
        role="train",
        role_rank=number,
        label=f"node{number // gpus + 1}/GPU{number % gpus}",
        host=f"node{number // gpus + 1}",
        gpu=f"GPU-demo-{number:04}",
        pid=40_000 + number,
        state="running",
        step=_step_at(elapsed),
        step_s=_step_s_at(elapsed) + 0.02 * _wave(number, elapsed),
        waiting=waiting,
        phase="step" if elapsed % 60 >= 4 else "checkpoint",
        beat_age=elapsed % _STEP_S,
        memory=int((9 + _wave(number, elapsed)) * _GB),
        recent={"step_s": tuple(_step_s_at(time) + 0.02 * _wave(number, time) for time in _recent_times(elapsed))},
    )


def _step_at(elapsed: float) -> int:
    return 4_000 + int(elapsed / _STEP_S)


def _loss_at(step: int) -> float:
    return 2.1 + 8.0 / (1.0 + step / 120.0) + 0.06 * math.sin(step * 0.7) * math.exp(-step / 9000)


def _simulate_running_run(ranks: tuple[RankView, ...], elapsed: float, began: float, hot: int) -> RunView:
    step, step_s, now = _step_at(elapsed), _step_s_at(elapsed), began + elapsed
    slow: tuple[SlowRank, ...] = ()
    suspicion = None
    if _is_throttled(elapsed):
        rank = ranks[hot]
        because = "its GPU's clock is held down: thermal slowdown at 89 °C"
        summary = f"{rank_name(hot, rank.label)} is slow because {because}; the others wait {_WAIT_S} s of each {step_s:.2g} s step"
        slow = (
            SlowRank(hot, rank.label, rank.host, rank.gpu, "slow.throttle", because, _WAIT_S, step_s, now, summary),
        )
        suspicion = Suspicion(now, "straggler", "slow.throttle", summary, hot)
    return RunView(
        id=_DEMO_ID,
        name="demo",
        dir="demo",
        user="ada",
        mine=False,
        state=RUNNING,
        started=began - 600.0,
        updated=now,
        seconds=600.0 + elapsed,
        world=len(ranks),
        attempts=2,
        attempt=1,
        restarts={"gpu.xid": 1},
        step=step,
        total_steps=_TOTAL_STEPS,
        loss=_loss_at(step),
        tokens_per_s=8192 * len(ranks) * 16 / step_s,
        mfu=0.44 * _STEP_S / step_s,
        grad_norm=0.8 + 0.2 * _wave(3, elapsed),
        lr=3e-4 * (1 - step / _TOTAL_STEPS),
        eta_s=(_TOTAL_STEPS - step) * step_s,
        phase="step",
        suspicion=suspicion,
        command="train.py --preset d20",
        hosts=tuple(dict.fromkeys(rank.host for rank in ranks)),
        roles=(RoleView("train", len(ranks), tuple(rank.rank for rank in ranks)),),
        ranks=ranks,
        slow=slow,
        curve=tuple((point, _loss_at(point)) for point in range(0, step, max(1, step // 300))),
    )


def _make_finished_run(began: float) -> RunView:
    return RunView(
        id="demo-first", name="first try", dir="demo", user="ada", mine=False, state="completed", started=began - 9000.0,
        seconds=7200.0, world=8, attempts=1, attempt=0, step=4000, total_steps=4000, loss=2.9124, tokens_per_s=210_000.0,
    )  # fmt: skip
