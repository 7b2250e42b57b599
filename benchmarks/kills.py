"""SIGKILL of a random rank, or of the whole job, while checkpoints are written at every step: does it always go on, and never from a damaged file?

    python benchmarks/kills.py                  200 kills: 20 to 25 minutes on 2 cores
    python benchmarks/kills.py --kills 10       a try

A rank that is killed is followed by the launcher's own restart; after the whole job the same command is given again. Most kills come while a
checkpoint is being written, once there is a new one; some come at any time, the start included. A run of --steps steps that has ended is
compared with one that nobody killed, loss by loss and bit by bit, and the next one begins, until all kills are done.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from goodput import trials
from launch import setting

from stoker.control.machine import procfs

CAP_S = 180.0  # for what takes seconds: a restart that has not come by then never does
AT_ANY_TIME = 0.2  # this share of the kills does not wait for a new checkpoint
WHOLE_JOB = 0.4
WORDS = (
    "--tokenizer.path", "bytes", "--preset", "small", "--model.depth", "2", "--context_length", "32", "--batch.tokens", "160", "--batch.micro", "2",
    "--data.validation", "0", "--eval_every", "0", "--log_every", "1", "--export", "false", "--every_steps", "1", "--deterministic", "true",
    "--max-restarts", "1000", "--no-preflight", "--quiet", "--name", "kills",
)  # fmt: skip


class WentWrong(Exception):
    """What must not happen, in a line."""


@dataclass(frozen=True)
class Kill:
    who: str  # rank 1, job
    saving: bool  # a checkpoint was being written
    steps: int  # that were done, as far as metrics.jsonl told
    resumed: int  # the step it went on at
    refused: int  # checkpoints that were said to be damaged
    again_s: float  # from the kill to the line that says where it goes on

    @property
    def lost(self) -> int:
        return max(self.steps - self.resumed, 0)


class Job:
    """One run of the recipe in a folder of its own; started again as often as it takes."""

    def __init__(self, folder: Path, data: Path, ranks: int, steps: int) -> None:
        folder.mkdir()
        self.folder, self._ranks = folder, ranks
        self._command = [
            sys.executable,
            "-m",
            "stoker",
            "train",
            "pretrain",
            "--data",
            str(data),
            "--cache",
            str(data.parent / "cache"),
            *WORDS,
            "--nproc-per-node",
            str(ranks),
            "--max-steps",
            str(steps),
            "--runs-dir",
            str(folder / "runs"),
        ]
        self._launcher: subprocess.Popen[bytes] | None = None

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "latest"

    def start(self) -> None:
        with open(self.folder / "output.txt", "ab") as output:
            # One thread a rank: two that share a core with others wait for each other most of the time.
            env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            self._launcher = subprocess.Popen(
                self._command,
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def ended(self) -> int | None:
        assert self._launcher is not None
        return self._launcher.poll()

    def processes(self) -> list[int]:
        return running_below(self.folder)

    def attempts(self) -> list[dict[int, int]]:
        """Rank -> pid, of each attempt, as the launcher recorded them."""
        found: list[dict[int, int]] = []
        for line in whole_lines(self.run / "events.jsonl"):
            event = json.loads(line)
            if event["event"] == "attempt":
                found.append({})
            elif event["event"] == "rank-up":
                found[-1][event["rank"]] = event["pid"]
        return found

    def said(self, attempt: int) -> str:
        path = self.run / f"attempt-{attempt}" / "rank-0.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def losses(self) -> dict[int, float]:
        lines = (json.loads(line) for line in whole_lines(self.run / "metrics.jsonl"))
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    def newest(self) -> int:
        return max(
            (
                int(path.name.removeprefix("step-"))
                for path in (self.run / "checkpoints").glob("step-*")
                if path.name[5:].isdigit()
            ),
            default=0,
        )

    def saving(self) -> bool:
        return any((self.run / "checkpoints").glob("*.tmp"))

    def kill_rank(self, attempt: int, rank: int) -> bool:
        return _kill(self.attempts()[attempt][rank])

    def kill_job(self) -> None:
        """Launcher, agent, guardian and ranks at once, as if the machine had lost them; nothing is left when this
        returns.
        """
        assert self._launcher is not None
        self._launcher.kill()
        for pid in self.processes():
            _kill(pid)
        self._launcher.wait()
        wait(lambda: not self.processes(), "the killed job's processes to end")

    def close(self) -> None:
        if self._launcher is not None and self._launcher.poll() is None:
            self.kill_job()


def running_below(folder: Path) -> list[int]:
    """All that carry the tag of a run in this folder: ranks, agent, guardian."""
    found = []
    for one in procfs.list_processes():
        tag = procfs.read_run_tag(one.pid)
        if tag is not None and tag[1].startswith(str(folder)) and one.state != "Z":
            found.append(one.pid)
    return found


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def whole_lines(path: Path) -> list[str]:
    """Of a file that is being written: what is behind the last newline is not there yet."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def wait(there: Callable[[], bool], what: str, every: float = 0.01, cap: float = CAP_S) -> None:
    deadline = time.monotonic() + cap
    while not there():
        if time.monotonic() > deadline:
            raise WentWrong(f"waited {cap:.0f} s in vain for {what}")
        time.sleep(every)


def began(job: Job, attempt: int) -> bool:
    """Rank 0 has said where it goes on: "resumes at step N", or with no checkpoint yet, its model."""
    return " | [CPU 0] model: " in job.said(attempt) or "resumes at step" in job.said(attempt)


def until_due(job: Job, attempt: int, ranks: int, draw: random.Random) -> bool:
    """Waits for the moment of the next kill; False where the run has ended before it."""
    wait(
        lambda: job.ended() is not None or (len(job.attempts()) > attempt and len(job.attempts()[attempt]) == ranks),
        "the ranks of an attempt",
    )
    if draw.random() < AT_ANY_TIME:
        moment = time.monotonic() + draw.uniform(0.0, 4.0)
        wait(lambda: job.ended() is not None or time.monotonic() >= moment, "a moment")
    else:
        before = job.newest()
        wait(lambda: job.ended() is not None or job.newest() > before, "a new checkpoint")
        time.sleep(draw.uniform(0.0, 0.1))
        wait(lambda: job.ended() is not None or job.saving(), "a save", every=0.0005)
        time.sleep(draw.uniform(0.0, 0.02))
    return job.ended() is None


def one_kill(job: Job, attempt: int, ranks: int, draw: random.Random) -> Kill | None:
    """None: the run ended before it, or with it."""
    if not until_due(job, attempt, ranks, draw):
        return None
    whole = draw.random() < WHOLE_JOB
    rank = draw.randrange(ranks)
    saving = job.saving()
    killed = time.monotonic()
    if whole:
        job.kill_job()
    elif not job.kill_rank(attempt, rank):
        return None
    steps = max(job.losses(), default=-1) + 1
    if whole:
        check_all(job)
        job.start()
    wait(
        lambda: job.ended() is not None or (len(job.attempts()) > attempt + 1 and began(job, attempt + 1)),
        "the run to go on",
    )
    again = time.monotonic() - killed
    said = job.said(attempt + 1)
    if not said:
        return None  # it was at its very end: the other ranks had finished, and so has the run
    resumed = re.search(r"resumes at step (\d+) from", said)
    return Kill(
        "job" if whole else f"rank {rank}",
        saving,
        steps,
        int(resumed[1]) if resumed else 0,
        said.count("; looking at the one before"),
        again,
    )


def check_all(job: Job) -> None:
    """Nothing runs: whatever has a checkpoint's name must be one, to the last byte."""
    from stoker.training.checkpoint.reading import verify

    for path in (job.run / "checkpoints").glob("step-*"):
        wrong = verify(str(path)) if path.name[5:].isdigit() else []
        if wrong:
            raise WentWrong(f"a damaged checkpoint has a checkpoint's name: {wrong[0]}")


def end(job: Job, expected: dict[int, float] | None) -> dict[int, float]:
    """Waits for the run's end; its losses, which must be the expected ones."""
    wait(lambda: job.ended() is not None, "the run's end")
    found = job.losses()
    if job.ended() != 0:
        raise WentWrong(f"exit code {job.ended()}: {(job.folder / 'output.txt').read_text('utf-8', 'replace')[-2000:]}")
    if expected is not None and found != expected:
        differs = [step for step in sorted(expected.keys() | found.keys()) if expected.get(step) != found.get(step)]
        raise WentWrong(
            f"{job.folder}: step {differs[0]} (and {len(differs) - 1} more): {found.get(differs[0])}, uninterrupted"
            f" {expected.get(differs[0])}"
        )
    return found


def kill_and_resume(
    folder: Path, data: Path, *, kills: int, ranks: int, steps: int, seed: int, say: Callable[[str], None]
) -> tuple[list[Kill], int]:
    """(the kills, how many runs ended with the losses of the one that nobody killed)."""
    draw = random.Random(seed)
    found: list[Kill] = []
    runs = 0
    job = Job(folder / "uninterrupted", data, ranks, steps)
    try:
        job.start()
        expected = end(job, None)
        if sorted(expected) != list(range(steps)):
            raise WentWrong(f"the uninterrupted run has {len(expected)} of {steps} steps")
        while len(found) < kills:
            job = Job(folder / f"run-{runs}", data, ranks, steps)
            job.start()
            attempt = 0
            while len(found) < kills:
                one = one_kill(job, attempt, ranks, draw)
                attempt = max(len(job.attempts()) - 1, 0)
                if job.ended() is not None:
                    break
                if one is not None:
                    found.append(one)
                    when = f"after {one.steps} steps{', saving' if one.saving else ''}"
                    say(f"{len(found)}/{kills}: {one.who} {when}: goes on at {one.resumed}, {one.again_s:.1f} s later")
            end(job, expected)
            runs += 1
            say(f"run {runs}: all {steps} losses are those of the uninterrupted one")
    finally:
        job.close()
    return found, runs


def make_text(path: Path) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 7))) for _ in range(300)]
    path.write_text("\n".join(" ".join(draw.choice(words) for _ in range(12)) for _ in range(300)))
    return path


def report(found: list[Kill], runs: int, steps: int) -> str:
    ranks = [one for one in found if one.who != "job"]
    lost = [one.lost for one in found]
    again = [one.again_s for one in found]
    resumed = sum(one.resumed > 0 for one in found)
    return "\n".join(
        (
            "| | |",
            "|---|---|",
            (
                f"| kills | {len(found)}: {len(ranks)} of a rank, {len(found) - len(ranks)} of the whole job;"
                f" {sum(one.saving for one in found)} during a save |"
            ),
            (
                f"| went on | {len(found)}: {resumed} from a checkpoint, {len(found) - resumed} from the beginning,"
                " there being none yet |"
            ),
            f"| checkpoints refused as damaged | {sum(one.refused for one in found)} |",
            f"| steps lost | {statistics.mean(lost):.1f} on average, at most {max(lost)} |",
            f"| from the kill to going on | {statistics.median(again):.1f} s, at most {max(again):.1f} s |",
            f"| runs of {steps} steps with the losses of an uninterrupted one, bit by bit | {runs} of {runs} |",
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, metavar="N")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--steps", type=int, default=150, metavar="N", help="of one run (default 150)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job is cleaned up then too
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        notes = (
            (
                f"{told.ranks} CPU ranks, gloo DDP, a checkpoint at every step, --max-restarts, seed {told.seed}; load"
                f" {os.getloadavg()[0]:.2f}."
            ),
        )
        where = replace(setting(trials(name, told.ranks)), notes=notes)
        try:
            found, runs = kill_and_resume(
                folder,
                make_text(folder / "text.txt"),
                kills=told.kills,
                ranks=told.ranks,
                steps=told.steps,
                seed=told.seed,
                say=lambda line: print(line, file=sys.stderr, flush=True),
            )
        except WentWrong as problem:
            print(f"✗ {problem}")
            return 1
    lines = [
        f"Hardware: {where.hardware}  ",
        f"Software: {where.software}  ",
        f"Commit: {where.commit}, {where.date}  ",
        f"Command: `{where.command}`  ",
    ]
    print("\n".join([*lines, *where.notes, "", report(found, runs, told.steps)]))
    if told.json:
        told.json.write_text(
            json.dumps({"schema": 1, **asdict(where), "runs": runs, "kills": [asdict(one) for one in found]}, indent=1)
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
