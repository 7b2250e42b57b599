"""Goodput under faults: the same small job, the same faults at the same steps, under stoker and under torchrun.

    python benchmarks/goodput.py                        about 10 minutes
    python benchmarks/goodput.py --seed 7 --only stoker

Goodput = useful steps × median step time ÷ wall time. Useful steps are those in the state that is left at the end: the last one's number where
the job ended well, else the newest checkpoint's. Faults come after a random number of steps made, redone ones included (exponential; every
kind equally often, in random order), so both launchers meet the same faults after the same work, and none while they are down.

The process group's timeout is 60 s, for both: by default gloo's is 30 min, and torchrun would never notice a hang before the cap.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launch import STOKER, TORCHRUN, Bench, Job, Setting, setting

TRAIN = Path(__file__).resolve().parent / "scripts" / "train.py"
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGSEGV": signal.SIGSEGV}
STEP_S = 0.05
KINDS = (*SIGNALS, "exception", "exit 0", "hang")


# ---- one job ----


class Trials(Bench):
    """Jobs whose whole command line is told."""

    def command(self, way: str, script: str, args: tuple[object, ...]) -> list[str]:
        launcher = [*self.stoker, "run"] if way == STOKER else [*self.torchrun, "--standalone"]
        return [*launcher, script, *map(str, args)]


def trials(folder: str, ranks: int) -> Trials:
    return Trials(
        Path(folder),
        [sys.executable, "-m", "stoker"],
        [sys.executable, "-m", "torch.distributed.run"],
        ranks,
        repeats=0,
        soak=0,
    )


@dataclass(frozen=True)
class Step:
    attempt: int
    number: int
    time: float


class Trial(Job):
    """A job that is watched, and hurt, while it runs."""

    def __init__(self, bench: Trials, way: str, *argv: object, env: dict[str, str] | None = None) -> None:
        super().__init__(bench, way, str(argv[0]), *argv[1:], env=env)
        self._read = 0
        self._torn = ""
        self._steps: list[Step] = []

    def __enter__(self) -> Trial:
        return self

    def ended(self) -> int | None:
        """The launcher's exit code, once it has one."""
        return self._processes[0].poll()

    def steps(self) -> list[Step]:
        """All that rank 0 has made so far, redone ones too."""
        log = self.dir / "steps"
        if log.exists():
            with open(log) as file:
                file.seek(self._read)
                text = self._torn + file.read()
                self._read = file.tell()
            *lines, self._torn = text.split("\n")
            for line in lines:
                attempt, number, when = line.split()
                self._steps.append(Step(int(attempt), int(number), float(when)))
        return self._steps

    def strike(self, rank: int, kind: str) -> bool:
        """Does it to the rank's process, if that is alive and ours: a signal, or an order it finds before its next
        step.
        """
        pid = int((self.dir / f"pid-{rank}").read_text())
        if pid not in self.alive():
            return False
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            if kind in SIGNALS:
                signal.pidfd_send_signal(handle, SIGNALS[kind])
            else:
                order = self.dir / f"fault-{pid}.tmp"
                order.write_text(kind)
                order.rename(self.dir / f"fault-{pid}")
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True

    def checkpoints(self) -> Path:
        return self.dir / "runs" / "latest" / "checkpoints" if self.way == STOKER else self.dir / "checkpoints"

    def saved(self) -> int:
        return max((int(path.stem.removeprefix("step-")) for path in self.checkpoints().glob("step-*.pt")), default=0)


def train(bench: Trials, way: str, options: list[str], steps: int, every: int, timeout_s: float = 60.0) -> Trial:
    where = ["--checkpoints", str(bench.folder / str(bench.jobs + 1) / "checkpoints")] if way == TORCHRUN else []
    return Trial(
        bench,
        way,
        "--nproc-per-node",
        bench.ranks,
        *options,
        TRAIN,
        "--steps",
        steps,
        "--every",
        every,
        "--step-s",
        STEP_S,
        "--timeout-s",
        timeout_s,
        *where,
    )


# ---- faults ----


@dataclass(frozen=True)
class Fault:
    after_steps: int  # made, since the start of the job
    rank: int
    kind: str
    within_step: float  # where in the step, 0 to 1


def schedule(seed: int, ranks: int, mean_steps: float, kinds: tuple[str, ...]) -> Iterator[Fault]:
    """Without end; the same for everybody with this seed."""
    draw = random.Random(seed)
    at = 0.0
    while True:
        for kind in draw.sample(kinds, len(kinds)):
            at += 1 + draw.expovariate(1 / mean_steps)
            yield Fault(int(at), draw.randrange(ranks), kind, draw.random())


@dataclass(frozen=True)
class Struck:
    kind: str
    rank: int
    after_steps: int
    back_s: float | None  # until the next step was made; None: never again


@dataclass(frozen=True)
class Result:
    way: str
    code: int | None  # None: the cap was reached
    wall_s: float
    useful: int
    made: int
    attempts: int
    step_s: float  # median of this job
    faults: list[Struck]


def run(bench: Trials, way: str, told: argparse.Namespace) -> Result:
    options = ["--max-restarts", str(told.max_restarts)]
    if way == STOKER:
        options += told.stoker_options.split()
    faults = schedule(told.seed, bench.ranks, told.mean_steps, tuple(told.kinds))
    struck: list[tuple[Fault, float]] = []
    with train(bench, way, options, told.steps, told.every, told.group_timeout) as trial:
        fault, hit = next(faults), -1
        while trial.ended() is None and time.monotonic() - trial.began < told.cap:
            made = trial.steps()
            # An attempt is hit once: what has been hit is down, or soon will be.
            if len(made) >= fault.after_steps and made[-1].attempt > hit and made[-1].number < told.steps:
                time.sleep(fault.within_step * STEP_S)
                if trial.strike(fault.rank, fault.kind):
                    struck.append((fault, time.time()))
                    _progress(
                        f"{way}: {fault.kind} on rank {fault.rank} at step {made[-1].number},"
                        f" {time.monotonic() - trial.began:.0f} s"
                    )
                    fault, hit = next(faults), made[-1].attempt
            time.sleep(0.02)
        wall, code = time.monotonic() - trial.began, trial.ended()
        made = trial.steps()
        useful = told.steps if code == 0 else trial.saved()
    return Result(
        way,
        code,
        wall,
        useful,
        len(made),
        len({step.attempt for step in made}),
        _median_step(made),
        [Struck(fault.kind, fault.rank, fault.after_steps, _back(when, made)) for fault, when in struck],
    )


def _back(when: float, made: list[Step]) -> float | None:
    """Seconds to the first step of the attempt after the one that was hit."""
    hit = max((step.attempt for step in made if step.time <= when), default=0)
    return next((step.time - when for step in made if step.attempt > hit), None)


def _median_step(made: list[Step]) -> float:
    gaps = [b.time - a.time for a, b in itertools.pairwise(made) if a.attempt == b.attempt]
    return statistics.median(gaps) if gaps else float("nan")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- the table ----


def goodput(result: Result, step_s: float) -> float:
    return result.useful * step_s / result.wall_s


def report(where: Setting, results: list[Result], step_s: float, told: argparse.Namespace) -> str:
    lines = [
        f"Hardware: {where.hardware}  ",
        f"Software: {where.software}  ",
        f"Commit: {where.commit}, {where.date}  ",
        f"Command: `{where.command}`  ",
    ]
    lines += [f"{note}  " for note in where.notes]
    lines += [
        "",
        "| launcher | goodput | useful steps | steps made | faults | attempts | wall | ended |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        ended = (
            f"cap of {told.cap:.0f} s"
            if one.code is None
            else "completed"
            if one.code == 0
            else f"gave up, exit code {one.code}"
        )
        lines.append(
            f"| {one.way} | {100 * goodput(one, step_s):.1f} % | {one.useful} of {told.steps} | {one.made} |"
            f" {len(one.faults)} | {one.attempts} | {one.wall_s:.0f} s | {ended} |"
        )
    lines += ["", "Seconds from the fault to the next attempt's first step:", ""]
    lines += [f"| | {' | '.join(told.kinds)} |", "|---" * (1 + len(told.kinds)) + "|"]
    for one in results:
        cells = [
            ", ".join("never" if hit.back_s is None else f"{hit.back_s:.1f}" for hit in one.faults if hit.kind == kind)
            or "–"
            for kind in told.kinds
        ]
        lines.append(f"| {one.way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, metavar="N", help="of 50 ms: the target (default 1500)")
    parser.add_argument("--every", type=int, default=40, metavar="N", help="steps between checkpoints (default 40)")
    parser.add_argument("--mean-steps", type=float, default=150.0, metavar="N", help="between faults (default 150)")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=f"some of: {', '.join(KINDS)}"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cap",
        type=float,
        default=300.0,
        metavar="S",
        help="wall clock of each launcher; what it reached by then is counted (default 300)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=30,
        metavar="N",
        help="more than there are faults: torchrun burns extra ones (default 30)",
    )
    parser.add_argument(
        "--group-timeout", type=float, default=60.0, metavar="S", help="of the process group (default 60)"
    )
    parser.add_argument(
        "--stoker-options", default="--hang-timeout 10s", metavar="OPTIONS", help="default: --hang-timeout 10s"
    )
    parser.add_argument("--only", choices=(STOKER, TORCHRUN))
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    told = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the jobs are cleaned up then too
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        bench = trials(folder, told.ranks)
        notes = (
            (
                f"{told.ranks} CPU ranks, gloo, a checkpoint every {told.every} steps, a fault every"
                f" {told.mean_steps:g} steps on average, seed {told.seed}."
            ),
            (
                f"stoker: --max-restarts {told.max_restarts} {told.stoker_options}. torchrun: --max-restarts"
                f" {told.max_restarts}; it notices a hang by the process group's timeout alone, {told.group_timeout:g}"
                " s here for both (gloo's default is 30 min, NCCL's 10), and keeps its store from attempt to attempt,"
                " where gloo's ranks find addresses of dead ones: attempts fail or hang while they meet."
            ),
        )
        where = replace(setting(bench), notes=notes)
        results = [run(bench, way, told) for way in ((told.only,) if told.only else (STOKER, TORCHRUN))]
    # One step time for both: with its own a launcher that slows its ranks down would look no worse for it.
    step_s = min(one.step_s for one in results)
    print(report(where, results, step_s, told))
    if told.json:
        told.json.write_text(
            json.dumps(
                {"schema": 1, **asdict(where), "step_s": step_s, "results": [asdict(one) for one in results]}, indent=1
            )
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
