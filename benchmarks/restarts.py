"""Restart after SIGKILL of a random rank at a random step: how often it is clean, and how soon the next attempt makes its first step.

    python benchmarks/restarts.py                  20 runs under stoker: about 6 minutes
    python benchmarks/restarts.py --torchrun 12    and 12 under torchrun: up to 20 minutes more

Clean is: completed, with exactly one restart. The bar: from the kill to the first step again at most one rank start + 0.5 s, a rank start
being what the same run needed from the beginning of its first attempt to the first step. Both are counted until every rank has stepped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from goodput import Trial, Trials, train, trials
from launch import STOKER, TORCHRUN, Setting, setting

MAX_RESTARTS = 3
STEPS = 80
EVERY = 10
BAR_S = 0.5
CAP_S = 90.0  # a clean run takes 15 s; one that hangs in the process group's timeout of 60 s is not clean


@dataclass(frozen=True)
class Restart:
    way: str
    rank: int
    step: int
    code: int | None  # None: not ended after the cap
    restarts: int
    begun_s: float | None  # from the kill to the beginning of the next attempt; torchrun doesn't say
    start_s: float | None  # one rank start
    again_s: float | None  # from the kill to the first step again
    said: str = ""

    @property
    def clean(self) -> bool:
        return self.code == 0 and self.restarts == 1

    @property
    def over_s(self) -> float | None:
        return None if self.start_s is None or self.again_s is None else self.again_s - self.start_s


def once(bench: Trials, way: str, draw: random.Random) -> Restart:
    rank, step, within = draw.randrange(bench.ranks), draw.randrange(1, STEPS - EVERY), draw.random()
    with train(bench, way, ["--max-restarts", str(MAX_RESTARTS)], STEPS, EVERY) as trial:
        _until(trial, lambda: len(trial.steps()) >= step)
        time.sleep(within * 0.05)
        killed = time.time()
        if not trial.strike(rank, "SIGKILL"):
            raise SystemExit(
                f"{way}: rank {rank} was gone before it could be killed; its output is lost with {trial.dir}"
            )
        _until(trial, lambda: False)
        code = trial.ended()
        seen = _by_events(trial, killed) if way == STOKER else _by_steps(trial, killed)
    return Restart(way, rank, step, code, *seen)


def _until(trial: Trial, there: Callable[[], bool]) -> None:
    """Or until the launcher has ended or the cap is over."""
    while not there() and trial.ended() is None and time.monotonic() - trial.began < CAP_S:
        time.sleep(0.02)


def _by_events(trial: Trial, killed: float) -> tuple[int, float | None, float | None, float | None, str]:
    """(restarts, from the kill to the next attempt, one rank start, from the kill to the first step again, the verdict)
    as stoker recorded them.
    """
    run_dir = trial.dir / "runs" / "latest"
    attempts: list[dict[str, Any]] = []
    restarts = 0
    for event in map(json.loads, (run_dir / "events.jsonl").read_text().splitlines()):
        if event["event"] == "attempt":
            attempts.append({"time": event["time"], "first": []})
        elif event["event"] == "first-step":
            attempts[-1]["first"].append(event["at"])
        restarts += event["event"] == "restart"
    first = [max(one["first"], default=None) for one in attempts]
    verdict = run_dir / "verdict.json"
    return (
        restarts,
        None if len(attempts) < 2 else attempts[1]["time"] - killed,
        None if first[0] is None else first[0] - attempts[0]["time"],
        None if len(first) < 2 or first[1] is None else first[1] - killed,
        json.loads(verdict.read_text())["summary"] if verdict.exists() else "no verdict",
    )


def _by_steps(trial: Trial, killed: float) -> tuple[int, float | None, float | None, float | None, str]:
    """The same from rank 0's own log: torchrun keeps none. Its start counts from the launch, so it holds torchrun's
    own.
    """
    steps = trial.steps()
    launched = time.time() - (time.monotonic() - trial.began)
    again = next((step.time for step in steps if step.attempt > 0), None)
    return (
        max(step.attempt for step in steps),
        None,
        steps[0].time - launched,
        None if again is None else again - killed,
        "",
    )


def report(where: Setting, found: list[Restart]) -> str:
    lines = [
        f"Hardware: {where.hardware}  ",
        f"Software: {where.software}  ",
        f"Commit: {where.commit}, {where.date}  ",
        f"Command: `{where.command}`  ",
    ]
    lines += [f"{note}  " for note in where.notes]
    lines += [
        "Medians (max).",
        "",
        (
            "| launcher | clean | kill to the next attempt | one start | kill to the first step again | that less one"
            " start | bar | |"
        ),
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for way in (STOKER, TORCHRUN):
        mine = [one for one in found if one.way == way]
        if mine:
            cells = [
                _middle([getattr(one, name) for one in mine]) for name in ("begun_s", "start_s", "again_s", "over_s")
            ]
            bar, met = (f"all clean, ≤ {BAR_S:+} s", "✓" if good(mine) else "✗ missed") if way == STOKER else ("–", "")
            lines.append(
                f"| {way} | {sum(one.clean for one in mine)} of {len(mine)} | {' | '.join(cells)} | {bar} | {met} |"
            )
    lines += [
        f"- {one.way}, rank {one.rank} killed after step {one.step}: {_ended(one)}, {one.restarts}"
        f" restart(s){'; ' + one.said if one.said else ''}"
        for one in found
        if not one.clean
    ]
    return "\n".join(lines)


def good(mine: list[Restart]) -> bool:
    return all(one.clean and one.over_s is not None and one.over_s <= BAR_S for one in mine)


def _ended(one: Restart) -> str:
    return f"not ended after {CAP_S:.0f} s" if one.code is None else f"exit code {one.code}"


def _middle(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f} s ({max(known):.2f} s)" if known else "–"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, metavar="N", help="under stoker (default 20)")
    parser.add_argument(
        "--torchrun", type=int, default=0, metavar="N", help="under torchrun, for comparison (default 0)"
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the jobs are cleaned up then too
    found: list[Restart] = []
    with tempfile.TemporaryDirectory(prefix="restarts-") as folder:
        bench = trials(folder, told.ranks)
        notes = (
            (
                f"{told.ranks} CPU ranks, gloo DDP, {STEPS} steps of 50 ms, --max-restarts {MAX_RESTARTS}, seed"
                f" {told.seed}; load {os.getloadavg()[0]:.2f}."
            ),
        )
        where = replace(setting(bench), notes=notes)
        for way, times in ((STOKER, told.times), (TORCHRUN, told.torchrun)):
            draw = random.Random(told.seed)
            for number in range(times):
                one = once(bench, way, draw)
                found.append(one)
                over = "–" if one.over_s is None else f"{one.over_s:+.2f} s"
                print(
                    f"{way} {number + 1}/{times}: {_ended(one)}, {one.restarts} restart(s), {over}",
                    file=sys.stderr,
                    flush=True,
                )
    print(report(where, found))
    if told.json:
        told.json.write_text(
            json.dumps({"schema": 1, **asdict(where), "restarts": [asdict(one) for one in found]}, indent=1) + "\n"
        )
    return 0 if good([one for one in found if one.way == STOKER]) else 1


if __name__ == "__main__":
    sys.exit(main())
