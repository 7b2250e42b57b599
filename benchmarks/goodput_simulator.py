"""What detection and restart times mean at 8 … 1,024 GPUs: a Monte Carlo of failures, checkpoints, hangs and restarts, beside the closed form.

    python benchmarks/goodput_simulator.py
    python benchmarks/goodput_simulator.py --mtbf-hours 2000 --checkpoint-s 60 --stoker-silent-s 300
    python benchmarks/goodput_simulator.py --gpus 64 --interval-s 1800 --json out.json

Failures are exponential, one GPU's failure ends the job's attempt, and what was done since the last checkpoint is done again. A failure
during the restart begins the restart again. Until a failure is noticed nothing happens; a silent one (a hang) is noticed late.
Checked in tests/test_goodput_simulator.py against J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", FGCS 22 (2006), and J. W. Young's first-order waste, CACM 17 (1974).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

HOUR = 3600.0
DAY = 24 * HOUR
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs are one per 50,700 GPU-hours, in Meta's own halls
# ("The Llama 3 Herd of Models", 2024, section 3.3.4). Nobody publishes rented pods and home machines: 2,000 h is our
# guess for them.
MTBF_HOURS = (50_000.0, 2_000.0)


@dataclass(frozen=True)
class Launcher:
    """How long a launcher leaves a failed job lying. Seconds."""

    name: str
    crash_s: float  # until an exit is noticed
    silent_s: float  # until a hang is noticed
    restart_s: float  # from then to the first step, loading included


@dataclass(frozen=True)
class Job:
    """Seconds, except for the share."""

    mtbf_s: float  # of the whole job: one GPU's divided by the number of GPUs
    checkpoint_s: float
    interval_s: float  # work between two checkpoints
    silent_share: float


def young_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """The work between checkpoints that wastes least, to first order."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def mean_detection(job: Job, launcher: Launcher) -> float:
    return job.silent_share * launcher.silent_s + (1 - job.silent_share) * launcher.crash_s


def first_order_waste(job: Job, launcher: Launcher) -> float:
    """Seconds lost per second of work where the interval is much shorter than the MTBF: C/T + (T/2 + R + D)/M."""
    lost = job.interval_s / 2 + launcher.restart_s + mean_detection(job, launcher)
    return job.checkpoint_s / job.interval_s + lost / job.mtbf_s


def exact_goodput(job: Job, launcher: Launcher) -> float:
    """Daly's complete model: work W takes M·e^(R/M)·(e^((T+C)/M) − 1)·W/T.

    All of that time is exposed to failures, so there are E/M of them on average; each adds the time until it is
    noticed, which is not.
    """
    mtbf = job.mtbf_s
    exposed = (
        mtbf
        * math.exp(launcher.restart_s / mtbf)
        * math.expm1((job.interval_s + job.checkpoint_s) / mtbf)
        / job.interval_s
    )
    return 1 / (exposed * (1 + mean_detection(job, launcher) / mtbf))


def wall_time(job: Job, launcher: Launcher, segments: int, draw: random.Random) -> float:
    """Seconds that one run takes for so many intervals of work, each with its checkpoint. From failure to failure:
    nothing else is random.
    """
    segment = job.interval_s + job.checkpoint_s
    wall, done = 0.0, 0
    while True:
        needed = (segments - done) * segment
        ran = draw.expovariate(1 / job.mtbf_s)
        if ran >= needed:
            return wall + needed
        done += int(ran // segment)
        wall += ran + _noticed(job, launcher, draw)
        while (ran := draw.expovariate(1 / job.mtbf_s)) < launcher.restart_s:
            wall += ran + _noticed(job, launcher, draw)
        wall += launcher.restart_s


def _noticed(job: Job, launcher: Launcher, draw: random.Random) -> float:
    return launcher.silent_s if draw.random() < job.silent_share else launcher.crash_s


@dataclass(frozen=True)
class Estimate:
    goodput: float
    error: float  # standard error


def simulate(job: Job, launcher: Launcher, work_s: float, runs: int, seed: int) -> Estimate:
    """Useful time over all time, over `runs` runs of about `work_s` each (a whole number of intervals)."""
    draw = random.Random(seed)
    segments = max(1, round(work_s / job.interval_s))
    walls = [wall_time(job, launcher, segments, draw) for _ in range(runs)]
    mean = statistics.fmean(walls)
    goodput = segments * job.interval_s / mean
    return Estimate(goodput, goodput * statistics.stdev(walls) / math.sqrt(runs) / mean)


# ---- the table ----


@dataclass(frozen=True)
class Row:
    gpus: int
    mtbf_gpu_hours: float
    job: Job
    goodput: dict[str, Estimate]
    formula: dict[str, float]


def rows(told: argparse.Namespace, launchers: tuple[Launcher, ...]) -> list[Row]:
    found = []
    for hours in told.mtbf_hours:
        for gpus in told.gpus:
            mtbf = hours * HOUR / gpus
            job = Job(
                mtbf, told.checkpoint_s, told.interval_s or young_interval(told.checkpoint_s, mtbf), told.silent_share
            )
            estimates = {one.name: simulate(job, one, told.days * DAY, told.runs, told.seed) for one in launchers}
            found.append(Row(gpus, hours, job, estimates, {one.name: exact_goodput(job, one) for one in launchers}))
    return found


def report(found: list[Row], launchers: tuple[Launcher, ...], told: argparse.Namespace) -> str:
    ours, theirs = (one.name for one in launchers)
    lines = [
        f"{one.name}: a crash is noticed after {one.crash_s:g} s, a hang after {one.silent_s:g} s, the first step comes"
        f" {one.restart_s:g} s later.  "
        for one in launchers
    ]
    lines += [
        (
            f"Checkpoint {told.checkpoint_s:g} s; {told.silent_share:.0%} of the failures are silent; {told.days:g}"
            f" days of work, {told.runs} runs, seed {told.seed}; ± is one standard error, in brackets Daly's formula."
        ),
        "",
        f"| GPUs | MTBF of a GPU | of the job | checkpoint every | {ours} | {theirs} | GPU-hours saved in 30 days |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        cells = [
            f"{100 * row.goodput[one].goodput:.2f} ± {100 * row.goodput[one].error:.2f} %"
            f" ({100 * row.formula[one]:.2f})"
            for one in (ours, theirs)
        ]
        saved = (row.formula[ours] - row.formula[theirs]) * row.gpus * 30 * 24
        lines.append(
            f"| {row.gpus:,} | {row.mtbf_gpu_hours:,.0f} h | {row.job.mtbf_s / HOUR:.3g} h |"
            f" {row.job.interval_s / 60:.3g} min | {' | '.join(cells)} | {saved:,.0f} |"
        )
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS, metavar="N")
    parser.add_argument(
        "--mtbf-hours",
        type=float,
        nargs="+",
        default=MTBF_HOURS,
        metavar="H",
        help="of one GPU with its share of the host (default both)",
    )
    parser.add_argument(
        "--checkpoint-s", type=float, default=60.0, metavar="S", help="training stands still for this long (default 60)"
    )
    parser.add_argument(
        "--interval-s", type=float, metavar="S", help="work between checkpoints (default: Young's optimum)"
    )
    parser.add_argument(
        "--silent-share",
        type=float,
        default=0.1,
        metavar="P",
        help="failures that are hangs, 0 to 1: a guess (default 0.1)",
    )
    parser.add_argument(
        "--load-s",
        type=float,
        default=120.0,
        metavar="S",
        help="model and checkpoint are read again, whoever starts it (default 120)",
    )
    parser.add_argument("--stoker-crash-s", type=float, default=0.5, metavar="S", help="default 0.5")
    parser.add_argument(
        "--stoker-silent-s",
        type=float,
        default=300.0,
        metavar="S",
        help="--hang-timeout; 3 to 10 where a proof ends it (default 300)",
    )
    parser.add_argument(
        "--stoker-restart-s",
        type=float,
        default=0.2,
        metavar="S",
        help="the launcher's own share of a restart: measured 0.14 (default 0.2)",
    )
    parser.add_argument("--torchrun-crash-s", type=float, default=0.5, metavar="S", help="default 0.5")
    parser.add_argument(
        "--torchrun-silent-s",
        type=float,
        default=600.0,
        metavar="S",
        help="the process group's timeout: NCCL 600, gloo 1800 (default 600)",
    )
    parser.add_argument("--torchrun-restart-s", type=float, default=3.0, metavar="S", help="default 3")
    parser.add_argument("--days", type=float, default=30.0, help="useful work of a run (default 30)")
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    told = parser.parse_args()
    if (
        min(*told.gpus, *told.mtbf_hours, told.checkpoint_s, told.days) <= 0
        or told.runs < 2
        or not 0 <= told.silent_share <= 1
    ):
        parser.error("GPUs, MTBF, checkpoint and days are above 0, --runs from 2 up, --silent-share from 0 to 1")
    return told


def main() -> int:
    told = _arguments()
    launchers = (
        Launcher("stoker", told.stoker_crash_s, told.stoker_silent_s, told.load_s + told.stoker_restart_s),
        Launcher("torchrun", told.torchrun_crash_s, told.torchrun_silent_s, told.load_s + told.torchrun_restart_s),
    )
    found = rows(told, launchers)
    print(report(found, launchers, told))
    if told.json:
        content = {"schema": 1, "launchers": [asdict(one) for one in launchers], "rows": [asdict(row) for row in found]}
        told.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
