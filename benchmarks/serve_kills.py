"""GRPO jobs with a server, whose server, trainers and launcher are killed again and again: does every job end, is no sample learned
that is older than grpo.staleness allows, and is nothing left running?

    python benchmarks/serve_kills.py                             30 kills at each of staleness 0, 1, 2 and 4: about 25 minutes on 2 cores
    python benchmarks/serve_kills.py --kills 3 --staleness 2     a try

One command, `stoker train grpo --allocation stoker:d1+ddp:d1`, on CPUs, with the two-layer model of the tests. Server, trainers and
launcher take turns in a random order, killed with SIGKILL at a random moment. The next one is killed when steps are learned again.
After a kill of the launcher, all of its processes must end by themselves, and the same command continues the job.

`staleness_max` of every step (metrics.jsonl, all ranks) is compared with the bound. With staleness 0 every number of every step,
and every answer, must be those of a run without kills and without a server. With more, every step must have each of its samples once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from test_grpo import TIMES, Forks, model_that_answers_with_a_digit  # noqa: E402
from test_grpo_server import AGES, ranks_of  # noqa: E402

LONG_S, POLL_S = 180.0, 0.05
KINDS = ("server", "trainer", "launcher")
WORDS = {"server": b"serve", "trainer": b"stoker.training.recipes.grpo"}
NOT_LEARNED = {*TIMES, *AGES, "mfu", "memory", "seconds_per_step", "resumed_at", "planned_bytes", "peak_bytes"}
SAMPLES = 48  # of a step: 6 prompts with 8 answers each


class JobCompletedError(Exception):
    """The job ended with exit code 0 before all kills were made."""


class Job:
    def __init__(self, folder: Path, name: str, words: list[str]) -> None:
        self._folder, self._name = folder, name
        self._command = [sys.executable, "-m", "stoker", "train", "grpo", "--name", name, *words]
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent / "src")}
        self._environment |= {"STOKER_RUNS": str(folder / "runs"), "HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
        self.oldest = 0  # staleness_max of all steps that were ever written
        self.start()

    def start(self) -> None:
        with open(self._folder / f"{self._name}.log", "ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self._folder, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def _root(self) -> Path:
        (found,) = (path for path in (self._folder / "runs").glob(f"*-{self._name}") if not path.is_symlink())
        return found

    @property
    def run(self) -> Path:
        """The job's run directory, or that of its trainers."""
        return next(iter((self._root / "roles").glob("*-trainer")), self._root)

    def lines(self) -> list[dict[str, Any]]:
        try:
            rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().split("\n")[:-1] if line]
        except (OSError, ValueError):
            return []
        self.oldest = max([self.oldest, *(row.get("staleness_max", 0) for row in rows)])
        return rows

    def rows(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if key not in NOT_LEARNED} for row in self.lines()]

    def steps(self) -> int:
        return len(self.lines())

    def ranks(self, kind: str) -> list[int]:
        return ranks_of(self._root, WORDS[kind])

    def processes(self) -> list[int]:
        """Return the pids of all processes that were started below this job's folder, but for this benchmark's own."""
        found = []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and str(self._folder).encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(int(entry))
            except OSError:
                continue  # it has just ended
        return found

    def until(self, condition: Callable[[], bool], what: str, *, lives: bool = True) -> float:
        """Wait, and return how many seconds it took. `lives`: the job must not end meanwhile."""
        began = time.monotonic()
        while not condition():
            if lives and self.process.poll() == 0:
                raise JobCompletedError
            if time.monotonic() - began > LONG_S or (lives and self.process.poll() is not None):
                log = (self._folder / f"{self._name}.log").read_text(errors="replace")
                raise SystemExit(f"{what}: not seen; exit code {self.process.poll()}\n{log[-6000:]}")
            time.sleep(POLL_S)
        return time.monotonic() - began


def kill_rank(job: Job, kind: str) -> float:
    """Kill the server or the trainer. Return the seconds until steps are learned again."""
    job.until(lambda: bool(job.ranks(kind)), f"a {kind} to kill")
    before = job.ranks(kind) or [-1]
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    began, steps = time.monotonic(), job.steps()
    job.until(lambda: bool(set(job.ranks(kind)) - set(before)), f"another {kind}")
    # Trainers go back to their checkpoint: lines of lost steps are taken out before new ones come.
    job.until(lambda: not job.ranks(kind) or job.steps() != steps, "a change")
    least = job.steps()
    job.until(lambda: job.steps() > least, "a step behind the kill")
    return time.monotonic() - began


def kill_launcher(job: Job) -> float:
    """Kill the job's launcher, and start the same command when all is gone. Return the seconds until all is gone."""
    job.process.kill()
    job.process.wait()
    took = job.until(lambda: not job.processes(), "the end of all processes", lives=False)
    steps = job.steps()
    job.start()
    job.until(lambda: job.steps() > steps, "a step behind the kill of the launcher")
    return took


def measure(
    folder: Path, staleness: int, kills: int, steps_each: int, ranks: int, draw: random.Random
) -> dict[str, Any]:
    model_that_answers_with_a_digit(folder)
    order = [KINDS[number % len(KINDS)] for number in range(kills)]
    draw.shuffle(order)
    count = steps_each * len(order) + 10
    common = ["--max-steps", str(count), "--every_steps", "3", "--learning_rate", "3e-4", "--grpo.breaker_steps", "0"]
    words = Forks(None, folder).words(*common, "--parallel.device", "cpu")  # type: ignore[arg-type]
    allocation = f"stoker:d1+ddp:d{ranks}"
    more = ["--allocation", allocation, "--grpo.staleness", str(staleness), "--max-restarts", "99"]
    job = Job(folder, "killed", [*more, *words])
    took: dict[str, list[float]] = {kind: [] for kind in KINDS}
    job.until(lambda: job.steps() > 2, "the first steps")
    for number, kind in enumerate(order, 1):
        time.sleep(2 * draw.random())  # any moment of a step, and of what a kill has left to do
        try:
            took[kind].append(kill_launcher(job) if kind == "launcher" else kill_rank(job, kind))
        except JobCompletedError:
            print(f"the job completed during kill {number}: give more --steps-each", flush=True)
            break
        print(f"{number}: {kind} killed, {took[kind][-1]:.1f} s, step {job.steps()}", flush=True)
    code = job.process.wait(1800)
    lines = job.lines()
    steps = [json.loads(line)["step"] for line in (job.run / "rollouts.jsonl").read_text().splitlines()]
    job.until(lambda: not job.processes(), "the end of all processes", lives=False)
    here = SAMPLES // ranks  # rollouts.jsonl has rank 0's
    row: dict[str, Any] = {
        "staleness": staleness, **{f"{kind}_kills": len(times) for kind, times in took.items()}, "code": code,
        "steps": len(lines), "staleness_max": job.oldest, "resampled_stale": sum(line["resampled_stale"] for line in lines),
        **{f"{kind}_s": [round(statistics.median(times), 1), round(max(times), 1)] for kind, times in took.items() if times},
        "samples_not_once": sum(steps.count(step) != here for step in range(count)),
    }  # fmt: skip
    if not staleness and ranks == 1:
        quiet = Job(folder, "quiet", ["--nproc-per-node", "1", *words])
        assert quiet.process.wait(1800) == 0, (folder / "quiet.log").read_text()[-2000:]
        row["steps_that_differ"] = sum(one != other for one, other in zip(job.rows(), quiet.rows(), strict=True))
        same = (job.run / "rollouts.jsonl").read_bytes() == (quiet.run / "rollouts.jsonl").read_bytes()
        row["answers_as_undisturbed"] = same
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kills", type=int, default=30, help="of server, trainer and launcher together, at each staleness"
    )
    parser.add_argument("--staleness", default="0,1,2,4")
    parser.add_argument("--ranks", type=int, default=1, help="trainers")
    parser.add_argument("--steps-each", type=int, default=8, help="steps of the job for each kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    draw, is_wrong = random.Random(args.seed), False
    for staleness in map(int, args.staleness.split(",")):
        with tempfile.TemporaryDirectory(prefix="serve-kills-") as place:
            row = measure(Path(place), staleness, args.kills, args.steps_each, args.ranks, draw)
        print(json.dumps(row), flush=True)
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(row) + "\n")
        is_wrong = is_wrong or bool(row["code"] or row["samples_not_once"] or row.get("steps_that_differ"))
        is_wrong = is_wrong or row["staleness_max"] > staleness or row.get("answers_as_undisturbed") is False
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
