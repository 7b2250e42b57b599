"""A GRPO job with a server, both killed again and again: is the killed one replaced, does the job go on, and does it end with
what a job that nobody disturbed ends with?

    python benchmarks/serve_kills.py                        20 kills of the server, 10 of the trainers: about 6 minutes on 2 cores
    python benchmarks/serve_kills.py --server 2 --trainer 1    a try
    python benchmarks/serve_kills.py --staleness 1          answers are begun a step ahead: no other run has the same numbers

One command, `stoker train grpo --allocation stoker:d1+ddp:d1`, on CPUs, with the two-layer model of the tests. Ranks are killed
with SIGKILL at a random moment of a step, in a random order; the next one is killed when steps are learned again. With staleness 0
every number of every step, and every answer, must be those of a run without kills and without a server. With more, every step
must have each of its samples once.
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

from conftest import wait_for  # noqa: E402
from test_grpo import TIMES, Forks, model_that_answers_with_a_digit  # noqa: E402
from test_grpo_server import AGES, ranks_of  # noqa: E402

LONG_S = 180.0
WORDS = {"server": b"serve", "trainer": b"stoker.training.recipes.grpo"}
NOT_LEARNED = {*TIMES, *AGES, "mfu", "memory", "seconds_per_step", "resumed_at", "planned_bytes", "peak_bytes"}
SAMPLES = 48  # of a step: 6 prompts with 8 answers each


class Job:
    def __init__(self, folder: Path, name: str, words: list[str]) -> None:
        command = [sys.executable, "-m", "stoker", "train", "grpo", "--name", name, *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent / "src")}
        environment |= {"STOKER_RUNS": str(folder / "runs"), "HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
        self._folder, self._name = folder, name
        with open(folder / f"{name}.log", "wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)

    @property
    def run(self) -> Path:
        """The job's, or that of its trainers."""
        (found,) = (path for path in (self._folder / "runs").glob(f"*-{self._name}") if not path.is_symlink())
        return next(iter((found / "roles").glob("*-trainer")), found)

    def rows(self) -> list[dict[str, Any]]:
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [
            {key: value for key, value in json.loads(line).items() if key not in NOT_LEARNED} for line in lines if line
        ]

    def steps(self) -> int:
        try:
            return (self.run / "metrics.jsonl").read_text().count("\n")
        except (OSError, ValueError):
            return 0

    def ranks(self, kind: str) -> list[int]:
        (found,) = (path for path in (self._folder / "runs").glob(f"*-{self._name}") if not path.is_symlink())
        return ranks_of(found, WORDS[kind])

    def until(self, condition: Callable[[], bool], what: str) -> None:
        done = wait_for(lambda: condition() or self.process.poll() is not None or None, LONG_S)
        if not done or self.process.poll() is not None:
            log = (self._folder / f"{self._name}.log").read_text(errors="replace")
            raise SystemExit(f"{what}: not seen; exit code {self.process.poll()}\n{log[-4000:]}")


def killed(job: Job, kind: str, draw: random.Random) -> float:
    """Seconds until steps are learned again."""
    job.until(lambda: bool(job.ranks(kind)), f"a {kind} to kill")
    time.sleep(draw.random())  # any moment of a step
    before = job.ranks(kind) or [-1]
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    begun, steps = time.monotonic(), job.steps()
    job.until(lambda: bool(set(job.ranks(kind)) - set(before)), f"another {kind}")
    # Trainers go back to their checkpoint: lines of lost steps are taken out before new ones come.
    job.until(lambda: not job.ranks(kind) or job.steps() != steps, "a change")
    least = job.steps()
    job.until(lambda: job.steps() > least, "a step behind the kill")
    return time.monotonic() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=int, default=20, help="kills")
    parser.add_argument("--trainer", type=int, default=10, help="kills")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--steps-each", type=int, default=8, help="steps of the job for each kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="")
    told = parser.parse_args()
    draw = random.Random(told.seed)
    kills = ["server"] * told.server + ["trainer"] * told.trainer
    draw.shuffle(kills)
    count = told.steps_each * len(kills) + 10
    with tempfile.TemporaryDirectory(prefix="serve-kills-") as place:
        folder = Path(place)
        model_that_answers_with_a_digit(folder)
        common = [
            "--max-steps",
            str(count),
            "--every_steps",
            "3",
            "--learning_rate",
            "3e-4",
            "--grpo.breaker_steps",
            "0",
        ]
        words = Forks(None, folder).words(*common, "--parallel.device", "cpu")  # type: ignore[arg-type]
        more = ["--allocation", "stoker:d1+ddp:d1", "--grpo.staleness", str(told.staleness), "--max-restarts", "99"]
        job = Job(folder, "killed", [*more, *words])
        took: dict[str, list[float]] = {"server": [], "trainer": []}
        job.until(lambda: job.steps() > 2, "the first steps")
        for number, kind in enumerate(kills, 1):
            took[kind].append(killed(job, kind, draw))
            print(f"{number}: {kind} killed, goes on after {took[kind][-1]:.1f} s at step {job.steps()}", flush=True)
        code = job.process.wait(1800)
        steps = [json.loads(line)["step"] for line in (job.run / "rollouts.jsonl").read_text().splitlines()]
        row: dict[str, Any] = {
            "server_kills": len(took["server"]), "trainer_kills": len(took["trainer"]), "staleness": told.staleness,
            "code": code, "steps": job.steps(),
            **{f"{kind}_s": [round(statistics.median(times), 1), round(max(times), 1)] for kind, times in took.items() if times},
            "samples_not_once": sum(steps.count(step) != SAMPLES for step in range(count)),
        }  # fmt: skip
        if not told.staleness:
            quiet = Job(folder, "quiet", ["--nproc-per-node", "1", *words])
            assert quiet.process.wait(1800) == 0, (folder / "quiet.log").read_text()[-2000:]
            row["steps_that_differ"] = sum(one != other for one, other in zip(job.rows(), quiet.rows(), strict=True))
            same = (job.run / "rollouts.jsonl").read_bytes() == (quiet.run / "rollouts.jsonl").read_bytes()
            row["answers_as_undisturbed"] = same
        left = job.ranks("server") + job.ranks("trainer")
        row["left_running"] = len(left)
        print(json.dumps(row), flush=True)
        if told.json:
            with open(told.json, "a") as file:
                file.write(json.dumps(row) + "\n")
        wrong = code or row["samples_not_once"] or row.get("steps_that_differ") or left
        return int(bool(wrong) or row.get("answers_as_undisturbed") is False)


if __name__ == "__main__":
    sys.exit(main())
