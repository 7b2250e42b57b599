"""SIGKILL of a speedrun at random moments, of the command, of a stage's launcher or of a rank: does the same command always finish, with the same results?

    python benchmarks/speedrun_kills.py                     10 kills: 25 to 30 minutes on 2 cores
    python benchmarks/speedrun_kills.py --kills 2           a try
    python benchmarks/speedrun_kills.py --jobs 6            on a machine with 12 cores

A short chain (all 16 stages, few steps, deterministic) runs once with nobody touching it. Then each trial starts the same chain in a folder of its own,
kills at a random moment (a stage by its share of that time, then a share of the stage), and gives the same command until it ends with 0. Each result.json
must be the uninterrupted chain's, times apart, and so must the report's tables.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from goodput import trials
from kills import WentWrong, running_below, whole_lines
from launch import setting

from stoker.contract import process

CAP_S = 900.0  # for a chain of a minute or two
TARGETS = ("speedrun", "launcher", "rank")
SETTINGS = (
    "compute.deterministic=true", "checkpoint.every_steps=3", "pretrain:train.max_steps=40", "midtrain:train.max_steps=12", "sft:train.max_steps=20",
    "reward:train.max_steps=9", "grpo:train.max_steps=4", "grpo:grpo.prompts_per_step=4", "grpo:grpo.group=4", "evaluate.most=24", "diversity.most=8",
    "diversity.answers=3", "model.dim=32", "model.heads=2", "model.ff=64", "model.layers=2", "generate.new_tokens=24",
)  # fmt: skip
TIMES = {"seconds", "time", "tokens_per_s", "began", "created", "seconds_per_step", "answers_s", "learn_s"}


@dataclass(frozen=True)
class Kill:
    who: str
    stage: str  # that was running
    after_s: float
    starts: int  # of the command, until it ended with exit code 0


def command(ranks: int) -> list[str]:
    words = [sys.executable, "-m", "stoker", "speedrun", "--preset", "cpu", "--nproc-per-node", str(ranks)]
    return words + [word for one in SETTINGS for word in ("--set", one)]


class Chain:
    def __init__(self, folder: Path, ranks: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self._ranks = folder, ranks
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # One thread a rank: sums in another order would be other bits.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with open(self.folder / "output.txt", "ab") as output:
            self.process = subprocess.Popen(
                command(self._ranks),
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait(self, seconds: float) -> int | None:
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    @property
    def root(self) -> Path:
        return self.folder / "runs" / "speedrun-cpu"

    def stage(self) -> tuple[str, Path | None]:
        """The one that runs, and its run directory."""
        try:
            rows = json.loads((self.root / "chain.json").read_text())["stages"]
        except (OSError, ValueError):
            return "", None
        running = next((row for row in rows if row["status"] == "running"), None)
        if running is None:
            return "", None
        found = sorted(self.root.glob(f"stages/*-{running['name']}-{running['key'][:8]}"))
        return running["name"], found[-1] if found else None

    def victim(self, who: str) -> int | None:
        """A pid of this kind that lives now."""
        assert self.process is not None
        if who == "speedrun":
            return self.process.pid
        _, run = self.stage()
        if run is None:
            return None
        if who == "launcher":
            told = _json(run / "run.json")
            return told["launcher"]["pid"] if told and process.find_process(told["launcher"]["pid"]) else None
        up = [json.loads(line) for line in whole_lines(run / "events.jsonl") if '"rank-up"' in line]
        living = [one["pid"] for one in up if process.find_process(one["pid"])]
        return living[-1] if living else None

    def results(self) -> dict[str, Any]:
        found = {}
        for row in json.loads((self.root / "chain.json").read_text())["stages"]:
            if row["name"] not in ("report", "world"):
                found[row["name"]] = _timeless(_json(self.root / row["run"] / "result.json"))
        return found

    def seconds(self) -> dict[str, float]:
        """Of each stage that is a run, up to shortly before its end."""
        rows = json.loads((self.root / "chain.json").read_text())["stages"]
        return {row["name"]: max(row["seconds"] - 1.0, 0.0) for row in rows if row["name"] not in ("report", "world")}

    def report(self) -> list[str]:
        """The report's lines that tell of the models, not of the clock or of restarts."""
        text = (self.root / "report.md").read_text()
        told = text[text.find("## Did each stage help?") : text.find("## Hardware")]
        return [line for line in told.splitlines() if not re.search(r"\d (s|min|h)\b|tokens/s", line)]

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in running_below(self.folder):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _timeless(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _timeless(value) for key, value in found.items() if key not in TIMES}
    if isinstance(found, list):
        return [_timeless(one) for one in found]
    return found


def whole(chain: Chain) -> float:
    began = time.monotonic()
    chain.start()
    code = chain.wait(CAP_S)
    if code != 0:
        raise WentWrong(
            f"the uninterrupted chain ended with {code}: {(chain.folder / 'output.txt').read_text()[-1500:]}"
        )
    return time.monotonic() - began


def trial(
    folder: Path, ranks: int, who: str, moment: tuple[str, float], expected: dict[str, Any], lines: list[str]
) -> Kill:
    chain = Chain(folder, ranks)
    try:
        began = time.monotonic()
        chain.start()
        deadline = began + CAP_S
        while chain.stage()[0] != moment[0]:
            if chain.wait(0.02) is not None or time.monotonic() > deadline:
                raise WentWrong(f"{folder.name}: stage {moment[0]} never ran")
        if chain.wait(moment[1]) is not None:
            raise WentWrong(f"{folder.name}: it ended before it was killed")
        while True:  # a rank to kill is there most of the time, not always
            stage, victim = chain.stage()[0], chain.victim(who)
            if victim is not None:
                try:
                    os.kill(victim, signal.SIGKILL)
                    break
                except ProcessLookupError:
                    pass
            if chain.wait(0.02) is not None or time.monotonic() > deadline:
                return Kill(f"no {who} was there to kill", stage, time.monotonic() - began, 1)
        after, starts = time.monotonic() - began, 1
        code = chain.wait(CAP_S)
        while code != 0 and starts < 4:
            chain.start()
            starts += 1
            code = chain.wait(CAP_S)
        if code != 0:
            raise WentWrong(
                f"{folder.name}: {who} killed in {stage}: the same command ends with {code}:"
                f" {(folder / 'output.txt').read_text()[-1500:]}"
            )
        found = chain.results()
        differing = [name for name in expected if found.get(name) != expected[name]]
        if differing:
            raise WentWrong(f"{folder.name}: {who} killed in {stage}: another result in {', '.join(differing)}")
        if chain.report() != lines:
            raise WentWrong(f"{folder.name}: {who} killed in {stage}: another table in the report")
        left = running_below(folder)
        if left:
            raise WentWrong(f"{folder.name}: {who} killed in {stage}: {len(left)} processes are left")
        return Kill(who, stage, after, starts)
    finally:
        chain.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, metavar="N")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trials at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    draw = random.Random(told.seed)
    with tempfile.TemporaryDirectory(prefix="speedrun-kills-") as name:
        folder = Path(name)
        notes = (
            f"{told.ranks} CPU ranks, {told.jobs} trial(s) at a time, seed {told.seed}; load {os.getloadavg()[0]:.2f}.",
        )
        where = replace(setting(trials(name, told.ranks)), notes=notes)
        chain = Chain(folder / "uninterrupted", told.ranks)
        kills: list[Kill] = []
        wrong: list[str] = []
        try:
            took = whole(chain)
            expected, lines, seconds = chain.results(), chain.report(), chain.seconds()
            if len(lines) < 5 or len(expected) < 14:
                raise WentWrong(
                    f"the uninterrupted chain has {len(expected)} results and a report's table of {len(lines)} lines"
                )
            print(f"uninterrupted: {took:.0f} s, {len(expected)} stages", file=sys.stderr, flush=True)
            with concurrent.futures.ThreadPoolExecutor(told.jobs) as pool:
                waiting = []
                for number in range(told.kills):
                    stage = draw.choices(list(seconds), list(seconds.values()))[0]
                    moment = stage, draw.random() * seconds[stage]
                    waiting.append(
                        pool.submit(
                            trial,
                            folder / f"trial-{number}",
                            told.ranks,
                            TARGETS[number % len(TARGETS)],
                            moment,
                            expected,
                            lines,
                        )
                    )
                for one in concurrent.futures.as_completed(waiting):
                    try:
                        kills.append(one.result())
                        print(f"{len(kills)}/{told.kills}: {kills[-1]}", file=sys.stderr, flush=True)
                    except WentWrong as problem:
                        wrong.append(str(problem))
                        print(f"✗ {problem}", file=sys.stderr, flush=True)
        except WentWrong as problem:
            wrong.append(str(problem))
        finally:
            chain.close()
    lines = [
        f"Hardware: {where.hardware}  ",
        f"Software: {where.software}  ",
        f"Commit: {where.commit}, {where.date}  ",
        f"Command: `{where.command}`  ",
    ]
    killed = [one for one in kills if one.who in TARGETS]
    rows = [f"| {one.who} | {one.stage or 'between two'} | {one.after_s:.0f} s | {one.starts} |" for one in killed]
    print(
        "\n".join(
            [
                *lines,
                *where.notes,
                "",
                "| killed | in stage | after | starts of the command |",
                "|---|---|---|---|",
                *rows,
            ]
        )
    )
    print(f"\n{len(killed)} killed, {len(kills) - len(killed)} met nobody to kill, {len(wrong)} went wrong")
    for problem in wrong:
        print(f"✗ {problem}")
    if told.json:
        told.json.write_text(
            json.dumps(
                {"schema": 1, **asdict(where), "kills": [asdict(one) for one in kills], "wrong": wrong}, indent=1
            )
            + "\n"
        )
    return 1 if wrong or len(killed) < told.kills else 0


if __name__ == "__main__":
    sys.exit(main())
