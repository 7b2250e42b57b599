"""SIGKILL and SIGSTOP of a random rank while a model in shards (FSDP2) is being saved: is anything lost, does anybody wait for long, and is the right rank named?

    python benchmarks/sharded_saves.py                            50 kills and 20 stalls of 3 CPU ranks: about 20 minutes on 2 cores
    python benchmarks/sharded_saves.py --kills 3 --stalls 2       a try

Every rank writes its part of a checkpoint at each step. A signal comes as soon as an unfinished checkpoint is there, at a random moment of it, to a
random rank. The launcher must say which rank it was, and start again from the newest complete checkpoint; a run that has ended must have the losses of
one that nobody disturbed. From the signal to the end of the attempt it may take --hang-timeout, and what ending its ranks takes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from goodput import trials
from kills import Job, WentWrong, began, check_all, make_text, wait, whole_lines
from launch import setting

HANG_TIMEOUT_S = 20.0
RUN_S = 900.0  # a run that nobody disturbs, on a busy machine
STOP_S = 10.0  # ranks that wait for a stalled one are ended, the stalled one, too; stacks are written
# About 6 million numbers, 72 MB with their moments: a save takes long enough to be hit.
WORDS = (
    "--parallel.strategy", "fsdp", "--model.depth", "8", "--model.dim", "256", "--model.heads", "4", "--model.tied", "false",
    "--hang-timeout", f"{HANG_TIMEOUT_S:g}s", "--timeout", "600s",
)  # fmt: skip
KINDS = {"kill": signal.SIGKILL, "stall": signal.SIGSTOP}


@dataclass(frozen=True)
class Trial:
    kind: str  # kill, stall
    rank: int
    saving: bool  # the checkpoint was still unfinished when the signal came
    named: int | None  # the rank that the attempt's verdict blames
    cause: str
    complete: int  # the newest complete checkpoint before the signal
    resumed: int
    ended_s: float  # from the signal to the verdict of the attempt
    again_s: float  # and to the line that says where it goes on

    @property
    def problem(self) -> str:
        if self.resumed < self.complete:
            return f"step {self.complete} was complete, and it resumed at {self.resumed}"
        if self.named != self.rank:
            return f"rank {self.rank} had the signal, and the verdict ({self.cause}) blames {self.named}"
        if self.ended_s > HANG_TIMEOUT_S + STOP_S:
            return f"the attempt ended {self.ended_s:.1f} s after the signal"
        return ""


class Sharded(Job):
    def __init__(self, folder: Path, data: Path, ranks: int, steps: int) -> None:
        super().__init__(folder, data, ranks, steps)
        self._command += WORDS

    def blamed(self, attempt: int) -> dict[str, Any] | None:
        """Cause and rank of the restart after it."""
        events = (json.loads(line) for line in whole_lines(self.run / "events.jsonl"))
        return next((one for one in events if one["event"] == "restart" and one["attempt"] == attempt + 1), None)

    def signal(self, attempt: int, rank: int, which: signal.Signals) -> bool:
        try:
            os.kill(self.attempts()[attempt][rank], which)
        except ProcessLookupError:
            return False
        return True


def one(job: Sharded, attempt: int, kind: str, ranks: int, draw: random.Random) -> Trial | None:
    """None: the run ended before it."""
    there = lambda: len(job.attempts()) > attempt and len(job.attempts()[attempt]) == ranks  # noqa: E731
    wait(lambda: job.ended() is not None or there(), "the ranks of an attempt")
    before = job.newest()
    wait(lambda: job.ended() is not None or job.newest() > before, "a new checkpoint")
    time.sleep(draw.uniform(0.0, 0.1))
    wait(lambda: job.ended() is not None or job.saving(), "a save", every=0.0005)
    time.sleep(draw.uniform(0.0, 0.05))
    rank, complete = draw.randrange(ranks), job.newest()
    sent = time.monotonic()
    if job.ended() is not None or not job.signal(attempt, rank, KINDS[kind]):
        return None
    saving = job.saving()
    wait(lambda: job.ended() is not None or job.blamed(attempt) is not None, "a verdict")
    ended = time.monotonic() - sent
    again = lambda: len(job.attempts()) > attempt + 1 and began(job, attempt + 1)  # noqa: E731
    wait(lambda: job.ended() is not None or again(), "the run to go on")
    told = job.blamed(attempt)
    said = job.said(attempt + 1)
    if told is None or not said:
        return None  # at its very end
    resumed = re.search(r"resumes at step (\d+) from", said)
    at = int(resumed[1]) if resumed else 0
    return Trial(kind, rank, saving, told.get("rank"), told["cause"], complete, at, ended, time.monotonic() - sent)


def disturb(
    folder: Path, data: Path, *, kills: int, stalls: int, ranks: int, steps: int, seed: int, say: Callable[[str], None]
) -> tuple[list[Trial], int]:
    """(the trials, how many runs ended with the losses of the one that nobody disturbed)."""
    draw = random.Random(seed)
    kinds = ["kill"] * kills + ["stall"] * stalls
    draw.shuffle(kinds)
    found: list[Trial] = []
    job, runs = Sharded(folder / "undisturbed", data, ranks, steps), 0
    try:
        expected = _ended(job, None)
        while len(found) < len(kinds):
            job = Sharded(folder / f"run-{runs}", data, ranks, steps)
            found += _disturbed(job, kinds[len(found) :], ranks, draw, say)
            check_all(job)
            _ended(job, expected)
            runs += 1
            say(f"run {runs}: the losses are those of the undisturbed one")
    finally:
        job.close()
    return found, runs


def _disturbed(
    job: Sharded, kinds: list[str], ranks: int, draw: random.Random, say: Callable[[str], None]
) -> Iterator[Trial]:
    job.start()
    for kind in kinds:
        attempt = max(len(job.attempts()) - 1, 0)
        trial = one(job, attempt, kind, ranks, draw)
        if trial is None:
            return
        when = f"step {trial.complete}{', saving' if trial.saving else ''}"
        say(
            f"{kind} of rank {trial.rank} behind {when}: {trial.cause}, ended {trial.ended_s:.1f} s later, resumes at {trial.resumed}"
        )
        if trial.problem:
            say(f"✗ {trial.problem}")
        yield trial


def _ended(job: Sharded, expected: dict[int, float] | None) -> dict[int, float]:
    if expected is None:
        job.start()
    wait(lambda: job.ended() is not None, "the run's end", every=0.1, cap=RUN_S)
    found = job.losses()
    if job.ended() != 0:
        raise WentWrong(f"exit code {job.ended()}: {(job.folder / 'output.txt').read_text('utf-8', 'replace')[-2000:]}")
    if expected is not None and found != expected:
        differs = [step for step in sorted(expected.keys() | found.keys()) if expected.get(step) != found.get(step)]
        raise WentWrong(f"step {differs[0]}: {found.get(differs[0])}, undisturbed {expected.get(differs[0])}")
    return found


def report(found: list[Trial], runs: int, steps: int) -> str:
    lines = ["| | kills | stalls |", "|---|---|---|"]
    both = [[trial for trial in found if trial.kind == kind] for kind in KINDS]

    def row(name: str, of: Callable[[list[Trial]], str]) -> None:
        lines.append(f"| {name} | " + " | ".join(of(some) if some else "–" for some in both) + " |")

    row(
        "signals, of these while the checkpoint was unfinished",
        lambda some: f"{len(some)}, {sum(one.saving for one in some)}",
    )
    row("the right rank named", lambda some: f"{sum(one.named == one.rank for one in some)} of {len(some)}")
    row("causes", lambda some: ", ".join(sorted({one.cause for one in some})))
    row(
        "resumed behind the newest complete checkpoint",
        lambda some: str(sum(one.resumed < one.complete for one in some)),
    )
    row(
        "from the signal to the verdict",
        lambda some: (
            f"{statistics.median(one.ended_s for one in some):.1f} s, at most {max(one.ended_s for one in some):.1f} s"
        ),
    )
    row(
        "and to going on",
        lambda some: (
            f"{statistics.median(one.again_s for one in some):.1f} s, at most {max(one.again_s for one in some):.1f} s"
        ),
    )
    lines += [f"✗ {trial}: {trial.problem}" for trial in found if trial.problem]
    lines.append(
        f"\n{runs} of {runs} runs of {steps} steps have the losses of an undisturbed one, bit by bit; --hang-timeout {HANG_TIMEOUT_S:g} s."
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, metavar="N")
    parser.add_argument("--stalls", type=int, default=20, metavar="N")
    parser.add_argument("--ranks", type=int, default=3, metavar="N")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="of one run (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job is cleaned up then too
    with tempfile.TemporaryDirectory(prefix="sharded-saves-") as name:
        folder = Path(name)
        notes = (
            f"{told.ranks} CPU ranks, gloo, FSDP2, a checkpoint at every step, seed {told.seed}; load {os.getloadavg()[0]:.2f}.",
        )
        where = replace(setting(trials(name, told.ranks)), notes=notes)
        asked = {
            "kills": told.kills,
            "stalls": told.stalls,
            "ranks": told.ranks,
            "steps": told.steps,
            "seed": told.seed,
        }
        try:
            found, runs = disturb(
                folder,
                make_text(folder / "text.txt"),
                **asked,
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
            json.dumps({"schema": 1, **asdict(where), "runs": runs, "trials": [asdict(one) for one in found]}, indent=1)
            + "\n"
        )
    return 1 if any(trial.problem for trial in found) else 0


if __name__ == "__main__":
    sys.exit(main())
