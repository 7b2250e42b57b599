"""False alarms: 50 healthy runs or more of varied shape under stoker. Suspicions may be voiced; nothing may be stopped, and nothing blamed in the end.

    python benchmarks/healthy.py                            50 runs, two at a time: about half an hour
    python benchmarks/healthy.py --quick                    pauses a tenth as long, --hang-timeout 20s: about 6 minutes
    python benchmarks/healthy.py --only subgroups pipeline  the shapes whose names contain one of these words

The shapes are in tests/healthy/shapes.py. Each runs once with stoker's default options (--hang-timeout 5m); those whose longest silence is
well below 30 s run again, with another seed, with --hang-timeout 30s. Prints Markdown for docs/benchmarks.md; exit code 1 on a false alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1] / "tests")
)  # before this folder, where `healthy` is this file
from goodput import Trial, Trials, trials
from launch import STOKER, GlooAborted, Setting, setting

from healthy.outcome import Outcome, outcome
from healthy.shapes import SHAPES, Shape

RUNS = 50
AT_ONCE = 2
SHORT_S = 30.0
WELL_BELOW_S = 20.0  # and some seconds to import torch with another job on the same two cores
QUICK_SCALE = 0.1
QUICK_TIMEOUT_S = 20.0
PATIENCE_S = 300.0  # the longest shape takes 90 s on two busy cores
SPIN = "import os\nwhile os.getppid() == {parent}: pass"


@dataclass(frozen=True)
class Run:
    shape: Shape
    seed: int
    hang_timeout_s: float | None  # None: stoker's default
    scale: float

    @property
    def timeout_s(self) -> float | None:
        return self.shape.hang_timeout_s or self.hang_timeout_s

    @property
    def name(self) -> str:
        timeout = "default" if self.timeout_s is None else f"{self.timeout_s:g}s"
        return f"{self.shape.name} ({self.shape.ranks} ranks, --hang-timeout {timeout}, seed {self.seed})"


def plan(shapes: tuple[Shape, ...], total: int) -> list[Run]:
    """Every shape once as it is by default; then, until there are enough, with a short --hang-timeout and other seeds."""
    found = [Run(shape, seed, None, 1.0) for seed, shape in enumerate(shapes)]
    short = [shape for shape in shapes if shape.silence_s <= WELL_BELOW_S]
    more = max(0, total - len(found)) if short else 0
    return found + [
        Run(short[number * len(short) // more], len(shapes) + number, SHORT_S, 1.0) for number in range(more)
    ]


def quick_plan(shapes: tuple[Shape, ...], total: int) -> list[Run]:
    """Every shape in turn, each time with another seed."""
    runs = range(max(total, len(shapes)))
    return [Run(shapes[n % len(shapes)], n, QUICK_TIMEOUT_S, QUICK_SCALE) for n in runs]


@dataclass(frozen=True)
class Result:
    run: Run
    outcome: Outcome
    seconds: float
    again: bool  # the second try: gloo had aborted at the end of the first

    @property
    def wrong(self) -> list[str]:
        return self.outcome.wrong(self.run.shape.straggler)


@dataclass
class Going:
    """A run on its way, with the neighbours that load the machine for it."""

    run: Run
    trial: Trial
    again: bool
    neighbours: list[subprocess.Popen[bytes]]

    def done(self) -> bool:
        return self.trial.ended() is not None or time.monotonic() - self.trial.began > PATIENCE_S

    def result(self) -> Result:
        seconds = time.monotonic() - self.trial.began
        found = outcome((self.trial.dir / "runs" / "latest").resolve())
        if self.trial.ended() is None:
            found = replace(found, status="not ended", summary=f"still running after {seconds:.0f} s")
        self.end()
        return Result(self.run, found, seconds, self.again)

    def end(self) -> None:
        for one in self.neighbours:
            one.kill()
            one.wait()
        self.trial.__exit__(None)

    def gloo_aborted(self) -> bool:
        return GlooAborted.TEXT in (self.trial.dir / "output").read_bytes()


def start(bench: Trials, run: Run, again: bool) -> Going:
    neighbours = [
        subprocess.Popen([sys.executable, "-c", SPIN.format(parent=os.getpid())]) for _ in range(run.shape.neighbours)
    ]
    timeout = [] if run.timeout_s is None else ["--hang-timeout", f"{run.timeout_s:g}s"]
    return Going(
        run,
        Trial(bench, STOKER, "--nproc-per-node", run.shape.ranks, *timeout, *run.shape.command(run.seed, run.scale)),
        again,
        neighbours,
    )


def results(bench: Trials, runs: list[Run], at_once: int) -> Iterator[Result]:
    """A few at a time, in the order in which they end. A run in whose end gloo aborted is made once more."""
    waiting = [(run, False) for run in runs]
    going: list[Going] = []
    try:
        while waiting or going:
            while waiting and len(going) < at_once:
                going.append(start(bench, *waiting.pop(0)))
            for one in [one for one in going if one.done()]:
                going.remove(one)
                found = one.result()
                if found.wrong and one.gloo_aborted() and not one.again:
                    waiting.insert(0, (one.run, True))
                else:
                    yield found
            time.sleep(0.1)
    finally:
        for one in going:
            one.end()


def report(where: Setting, found: list[Result]) -> str:
    stopped = [one for one in found if one.outcome.stopped]
    blamed = [one for one in found if one.outcome.status != "completed"]
    suspected = [one for one in found if one.outcome.suspicions]
    named = [one for one in found if one.outcome.stragglers]
    falsely = [one for one in named if not one.run.shape.straggler]
    voiced = sum(len(one.outcome.suspicions) for one in suspected)
    lines = [
        f"Hardware: {where.hardware}  ",
        f"Software: {where.software}  ",
        f"Commit: {where.commit}, {where.date}  ",
        f"Command: `{where.command}`  ",
    ]
    lines += [f"{note}  " for note in where.notes]
    lines += [
        "",
        (
            "| runs | stopped | blamed in the end | stragglers named where there is none | where there is one |"
            " suspicions voiced |"
        ),
        "|---|---|---|---|---|---|",
        (
            f"| {len(found)} | {len(stopped)} | {len(blamed)} | {len(falsely)} | {len(named) - len(falsely)} of"
            f" {sum(one.run.shape.straggler for one in found)} | {voiced} in {len(suspected)} runs |"
        ),
    ]
    for title, which in (
        ("False alarms", [one for one in found if one.wrong]),
        ("Suspicions and stragglers", suspected + falsely + named),
    ):
        texts = {
            f"- {one.run.name}: {text}": None
            for one in which
            for text in (one.wrong if title == "False alarms" else _voiced(one))
        }
        lines += ["", f"{title}:", *texts] if texts else []
    return "\n".join(lines)


def _voiced(one: Result) -> tuple[str, ...]:
    return one.outcome.suspicions + one.outcome.stragglers


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs",
        type=int,
        metavar="N",
        help=f"how many; every shape once at least (default {RUNS}, with --quick each once)",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=AT_ONCE,
        metavar="N",
        help=f"runs side by side; two to four ranks each (default {AT_ONCE})",
    )
    parser.add_argument("--quick", action="store_true", help="short pauses, --hang-timeout 20s")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only shapes whose names contain one of these")
    parser.add_argument("--default-options", action="store_true", help="never give --hang-timeout")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    told = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the jobs are cleaned up then too
    shapes = tuple(shape for shape in SHAPES if not told.only or any(word in shape.name for word in told.only))
    total = told.runs or (len(shapes) if told.only or told.quick else RUNS)
    runs = quick_plan(shapes, total) if told.quick else plan(shapes, total)
    if told.default_options:
        runs = [replace(run, hang_timeout_s=None) for run in runs]
    found: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="healthy-") as folder:
        bench = trials(folder, ranks=0)  # each shape has its own
        where = replace(setting(bench), notes=(f"{len(runs)} runs, {told.at_once} at a time.",))
        try:
            for one in results(bench, runs, told.at_once):
                found.append(one)
                verdict = "; ".join(one.wrong) or "left alone" + (
                    f", {len(_voiced(one))} remark(s)" if _voiced(one) else ""
                )
                print(
                    f"{len(found)}/{len(runs)} {one.run.name}: {verdict}, {one.seconds:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
        except KeyboardInterrupt:
            print("healthy.py: interrupted: what is done so far follows", file=sys.stderr)
    if again := sum(one.again for one in found):
        where = replace(
            where,
            notes=(
                *where.notes,
                f"{again} run(s) made twice: gloo aborted at their end, as it does now and then with no launcher too.",
            ),
        )
    print(report(where, found))
    if told.json:
        told.json.write_text(
            json.dumps(
                {"schema": 1, **asdict(where), "results": [asdict(one) | {"wrong": one.wrong} for one in found]},
                indent=1,
            )
            + "\n"
        )
    return 1 if any(one.wrong for one in found) or len(found) < len(runs) else 0


if __name__ == "__main__":
    sys.exit(main())
