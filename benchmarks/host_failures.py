"""Hosts that fail at random moments of a run with three of them: does it always end finished, or with a true verdict, and leave nothing behind?

    python benchmarks/host_failures.py                   200 failures: about two hours on 2 cores
    python benchmarks/host_failures.py --failures 10     a try

Three hosts (network namespaces with their own sshd, tests/netcluster.py; root only), `stoker run --hosts ... --min-hosts 2`. A failure is one of: the
cable is cut; the agent, its guardian, a rank, or everything on the host is killed with SIGKILL; the agent is stopped. It is mended a while later. Most
come while all hosts train, some at any time: at the start, while the run goes on without a host, while that one joins again. A few hit two hosts.

What must be true at each end: every step was made in order, with its own samples and the loss of a lone process; no two attempts trained at
the same time; a run that did not finish had fewer than two hosts left, and its verdict names one that was hurt; no process is left on any host.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from goodput import trials  # noqa: E402
from launch import setting  # noqa: E402

from conftest import Stoker, machine_json  # noqa: E402  before netcluster, which stands on it
from netcluster import NetCluster, why_not  # noqa: E402

STEADY = 0.65  # this share of the failures waits until all hosts train
# this often a second host is hit at the same moment: fewer than --min-hosts may be left, and that must be the verdict
TWO = 0.08
STUCK_S = 120.0  # for what takes seconds: a host lost often is asked again after a minute at the latest
CLEAN_S = 15.0
SAMPLES = 12
RATE = 0.05

# The same curve with any number of ranks: 12 samples a step, shared out. A checkpoint every 5 steps; every step is also
# written down as it is made.
JOB = """
import json, os, time
import torch, torch.distributed as dist
import stoker

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
folder = os.path.join(os.environ["STOKER_RUN_DIR"], "checkpoints")
os.makedirs(folder, exist_ok=True)
found = stoker.resume()
state = json.load(open(found)) if found else {"step": 0, "w": 1.0}
made = os.open(os.path.join(os.environ["STOKER_RUN_DIR"], "made.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    step = state["step"]
    ids = [step * SAMPLES + n for n in range(SAMPLES)]
    w = torch.tensor(state["w"], dtype=torch.float64)
    told = torch.zeros(3, dtype=torch.float64)  # gradient, loss, is it enough?
    for one in ids[rank::world]:
        target = (one * 7919 % 101) / 101
        told[0] += 2 * (w - target) / SAMPLES
        told[1] += (w - target) ** 2 / SAMPLES
    told[2] = float(rank == 0 and os.path.exists("enough"))
    mine = torch.zeros(world * SAMPLES, dtype=torch.int64)
    mine[: len(ids[rank::world])] = torch.tensor(ids[rank::world])
    everybody = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_reduce(told)
    dist.all_gather(everybody, mine)
    state = {"step": step + 1, "w": float(w - RATE * told[0])}
    if rank == 0:
        used = sorted(int(one) for r, part in enumerate(everybody) for one in part[: len(ids[r::world])])
        line = {"attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "step": step, "ids": used, "loss": float(told[1]), "time": time.time()}
        os.write(made, json.dumps(line).encode() + b"\\n")
    print("step", step, flush=True)
    stoker.beat(step=step, loss=float(told[1]))
    if state["step"] % 5 == 0 and rank == 0:
        path = os.path.join(folder, f"step-{state['step']}.json")
        with open(path + ".tmp", "w") as file:
            json.dump(state, file)
        os.rename(path + ".tmp", path)
        stoker.mark("CHECKPOINT")
    if told[2] and state["step"] % 5 == 0:
        break
    time.sleep(0.05)
dist.barrier()
os._exit(0)  # torch 2.13 can abort in its own shutdown of gloo, with no launcher at all
""".replace("SAMPLES", str(SAMPLES)).replace("RATE", str(RATE))


class WentWrong(Exception):
    """What must not happen, in a line."""


@dataclass(frozen=True)
class Failure:
    run: int
    kind: str
    host: str
    steady: bool  # all hosts trained
    hosts_before: int  # that trained, or were about to
    again_s: float | None  # until the next attempt's first step; None: the run ended, or it hit nothing that mattered
    at: float = 0.0
    mended: float = 0.0


@dataclass
class Ending:
    run: int
    status: str  # completed, or the verdict's cause
    code: int
    steps: int
    attempts: int
    seconds: float
    summary: str
    wrong: list[str] = field(default_factory=list)


# ---- what can happen to a host ----


def named(cluster: NetCluster, host: int, name: str) -> list[int]:
    found = []
    for pid in cluster.pids(host):
        with suppress(OSError):  # it ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(pid)
    return found


def ranks_on(cluster: NetCluster, host: int) -> list[int]:
    found = []
    for pid in cluster.pids(host):
        with suppress(OSError):
            if b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def send(pids: list[int], signum: int) -> bool:
    """Whether there was anybody to send it to."""
    hit = False
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
            hit = True
    return hit


def cut(cluster: NetCluster, host: int) -> bool:
    cluster.cut(host)
    return True


KINDS: dict[str, Callable[[NetCluster, int], bool]] = {
    "cable cut": cut,
    "agent killed": lambda cluster, host: send(named(cluster, host, "stoker-agent")[:1], signal.SIGKILL),
    "guardian killed": lambda cluster, host: send(named(cluster, host, "stoker-guard")[:1], signal.SIGKILL),
    "agent stopped": lambda cluster, host: send(named(cluster, host, "stoker-agent")[:1], signal.SIGSTOP),
    "all killed": lambda cluster, host: send(cluster.pids(host), signal.SIGKILL),
    "rank killed": lambda cluster, host: send(ranks_on(cluster, host)[:1], signal.SIGKILL),
}


def repair(cluster: NetCluster, host: int) -> None:
    cluster.repair(host)
    send([pid for pid in named(cluster, host, "stoker-agent") if _state(pid) == "T"], signal.SIGCONT)


def _state(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


# ---- one run ----


class Run:
    """`stoker run` on the cluster, in a folder of its own."""

    def __init__(self, cluster: NetCluster, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "job.py").write_text(JOB)
        (folder / "machine.json").write_text(json.dumps(machine_json(0)))
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("STOKER_", "PET_", "CUDA_", "RANK", "WORLD_SIZE", "MASTER_"))
        }
        self._stoker = Stoker(folder, {**env, "STOKER_MACHINE": str(folder / "machine.json"), "OMP_NUM_THREADS": "1"})
        self._read: dict[str, tuple[list[dict[str, Any]], int]] = {}
        self.began = time.monotonic()
        words = (
            "--hosts",
            str(cluster.file((1, 1, 1), workdir=str(folder))),
            "--min-hosts",
            "2",
            "--max-restarts",
            "1000",
            "--quiet",
        )
        with open(folder / "console", "wb") as console:
            self._process = self._stoker.start("run", *words, "job.py", stdout=console)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def code(self) -> int:
        return self._process.wait()

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Of a file of the run directory, as far as it is written. Read once: it is asked for many times a second."""
        known, at = self._read.get(name, ([], 0))
        try:
            with open(self._stoker.latest / name, "rb") as file:
                file.seek(at)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        known += [json.loads(line) for line in whole.splitlines()]
        self._read[name] = known, at + len(whole)
        return known

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.lines("events.jsonl") if one["event"] == kind]

    def verdict(self) -> dict[str, Any]:
        path = self._stoker.latest / "verdict.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def console(self) -> str:
        return (self.folder / "console").read_text(errors="replace")

    def whole(self) -> bool:
        """All three hosts train: the newest attempt has them, and has made some steps."""
        attempts = self.events("attempt")
        return bool(attempts) and len(attempts[-1]["hosts"]) == 3 and self.steps_of(len(attempts) - 1) >= 3

    def steps_of(self, attempt: int) -> int:
        return sum(one["attempt"] == attempt for one in self.lines("made.jsonl"))

    def finish(self) -> None:
        (self.folder / "enough").touch()

    def kill(self) -> None:
        if not self.ended:
            self._process.kill()
            self._process.wait()


def wait_until(look: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class Draw(random.Random):
    """What comes next. Every kind of failure as often as the others."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._kinds: list[str] = []

    def kind(self) -> str:
        if not self._kinds:
            self._kinds = self.sample(list(KINDS), len(KINDS))
        return self._kinds.pop()


def strike(cluster: NetCluster, run: Run, number: int, draw: Draw, steady: bool, two: bool) -> list[Failure]:
    """One failure, or two at once, and their mending. None where there was nobody of that kind to hit."""
    if steady:
        if not wait_until(lambda: run.ended or run.whole(), STUCK_S):
            raise WentWrong(f"the hosts did not all train within {STUCK_S:.0f} s")
        time.sleep(draw.uniform(0.0, 1.5))
    else:
        time.sleep(draw.uniform(0.0, 12.0))
    if run.ended:
        return []
    attempts = run.events("attempt")
    at = time.time()
    planned = [(draw.kind(), host) for host in draw.sample(range(3), 2 if two else 1)]
    hit = [(kind, host) for kind, host in planned if KINDS[kind](cluster, host)]
    if not hit:
        return []
    seconds = draw.uniform(0.5, 12.0)

    def went_on() -> bool:
        return run.ended or run.steps_of(len(attempts)) > 0

    def unharmed() -> bool:
        """A cable that is back soon harms nobody: the same attempt goes on."""
        return any(one["time"] > mended + 3.0 for one in run.lines("made.jsonl")[-3:])

    if steady:
        wait_until(went_on, seconds)
    else:
        time.sleep(seconds)
    for _, host in hit:
        repair(cluster, host)
    mended = time.time()
    again: float | None = None
    if steady:
        if not wait_until(lambda: went_on() or unharmed(), STUCK_S):
            raise WentWrong(
                f"nothing came of it within {STUCK_S:.0f} s:"
                f" {', '.join(f'{kind}, host {host + 1}' for kind, host in hit)}"
            )
        first = next((one["time"] for one in run.lines("made.jsonl") if one["attempt"] == len(attempts)), None)
        again = round(first - at, 1) if first is not None else None
    before = len(attempts[-1]["hosts"]) if attempts else 0
    return [Failure(number, kind, cluster.hosts[host].name, steady, before, again, at, mended) for kind, host in hit]


def reference(steps: int) -> list[tuple[list[int], float]]:
    """Samples and loss of every step, as a lone process makes them."""
    w, found = 1.0, []
    for step in range(steps):
        ids = [step * SAMPLES + n for n in range(SAMPLES)]
        targets = [(one * 7919 % 101) / 101 for one in ids]
        found.append((ids, sum((w - t) ** 2 for t in targets) / SAMPLES))
        w -= RATE * sum(2 * (w - t) / SAMPLES for t in targets)
    return found


def faults_in(run: Run, hurt: set[str]) -> Iterator[str]:
    """What is wrong with a run that has ended; nothing where all is as it must be."""
    made = run.lines("made.jsonl")
    curve = reference(max((one["step"] for one in made), default=-1) + 1)
    for one in made:
        ids, loss = curve[one["step"]]
        if one["ids"] != ids or not math.isclose(one["loss"], loss, rel_tol=1e-6):
            yield (
                f"attempt {one['attempt']}, step {one['step']}: loss {one['loss']} and samples {one['ids']}, a lone"
                f" process has {loss} and {ids}"
            )
    for before, after in itertools.pairwise(made):
        if after["attempt"] < before["attempt"]:
            yield (
                f"attempt {after['attempt']} made step {after['step']} after attempt {before['attempt']} had begun: two"
                " halves trained"
            )
        elif after["attempt"] == before["attempt"] and after["step"] != before["step"] + 1:
            yield f"attempt {after['attempt']}: step {after['step']} after step {before['step']}"
        elif after["attempt"] != before["attempt"] and (after["step"] > before["step"] + 1 or after["step"] % 5):
            yield (
                f"attempt {after['attempt']} began at step {after['step']}, the one before had come to {before['step']}"
            )
    verdict = run.verdict()
    if run.code == 0:
        if verdict.get("status") != "completed":
            yield f"exit code 0 and a verdict of {verdict.get('status')}"
        if not made or sorted({one["step"] for one in made}) != list(range(len(curve))):
            yield "finished without all of its steps"
    elif not verdict:  # refused before any rank started
        if not any(name in run.console() for name in hurt):
            yield f"refused, and no hurt host is named: {run.console()[-300:]}"
    elif not _is_true(verdict, hurt):
        yield (
            f"the verdict is {verdict['cause']} of host {verdict.get('host')}, hurt were {sorted(hurt)}:"
            f" {verdict['summary']}"
        )


def _is_true(verdict: dict[str, Any], hurt: set[str]) -> bool:
    """A hurt host was lost (None: all at once), or a rank was killed there and then too few hosts were left to start
    again.
    """
    if verdict["host"] is not None and verdict["host"] not in hurt:
        return False
    return verdict["cause"] == "host.lost" or (
        verdict["cause"] == "rank.killed" and "hosts left, and --min-hosts is" in verdict["summary"]
    )


def one_run(
    cluster: NetCluster, folder: Path, number: int, most: int, draw: Draw, say: Callable[[str], None]
) -> tuple[list[Failure], Ending]:
    run = Run(cluster, folder)
    found: list[Failure] = []
    wrong: list[str] = []
    try:
        try:
            while len(found) < most and not run.ended:
                more = strike(
                    cluster,
                    run,
                    number,
                    draw,
                    steady=draw.random() < STEADY,
                    two=draw.random() < TWO and most - len(found) > 1,
                )
                for one in more:
                    found.append(one)
                    after = (
                        f"goes on {one.again_s} s later"
                        if one.again_s is not None
                        else "the run has ended"
                        if run.ended
                        else "mended"
                    )
                    say(
                        f"run {number}, failure {len(found)}: {one.kind}, host"
                        f" {one.host[-1]}{'' if one.steady else ', at any time'}: {after}"
                    )
            if not run.ended and not wait_until(lambda: run.ended or bool(run.lines("made.jsonl")), STUCK_S):
                raise WentWrong(f"no step within {STUCK_S:.0f} s")
            run.finish()
            if not wait_until(lambda: run.ended, STUCK_S):
                raise WentWrong(f"not finished within {STUCK_S:.0f} s")
        except WentWrong as problem:
            wrong.append(str(problem))
        if run.ended:
            wrong += list(faults_in(run, {one.host for one in found}))
            alone = _too_few(run, found)
            if run.code and not alone:
                wrong.append(f"ended with {run.code} though two hosts were left: {run.console()[-400:]}")
        run.kill()
        if not wait_until(lambda: not any(cluster.pids(n) for n in range(3)), CLEAN_S):
            wrong.append(f"left running after {CLEAN_S:.0f} s: {_left(cluster)}")
    finally:
        run.kill()
        for n in range(3):
            repair(cluster, n)
    verdict = run.verdict()
    made = run.lines("made.jsonl")
    status = "completed" if run.code == 0 else verdict.get("cause", "refused")
    ending = Ending(
        number,
        status,
        run.code,
        max((one["step"] + 1 for one in made), default=0),
        len(run.events("attempt")),
        round(time.monotonic() - run.began, 1),
        verdict.get("summary") or (run.console().splitlines() or [""])[-1],
        wrong,
    )
    say(
        f"run {number}: {status} after {ending.steps} steps, {ending.attempts} attempts, {ending.seconds:.0f} s"
        + "".join(f"\n  ✗ {line}" for line in wrong)
    )
    return found, ending


def _too_few(run: Run, found: list[Failure]) -> bool:
    """Were two hosts out at the same time? As the record tells it: lost and not yet joined again, or hurt and not
    noticed.
    """
    lost: set[str] = set()
    for event in run.lines("events.jsonl"):
        if event["event"] == "host-lost":
            lost.add(event["on"])
        elif event["event"] == "host-joined":
            lost.discard(event["on"])
    recent = {one.host for one in found if one.kind != "rank killed" and time.time() - one.at < 60}
    return len(lost | recent) >= 2


def _left(cluster: NetCluster) -> list[str]:
    found = []
    for n in range(3):
        for pid in cluster.pids(n):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(bytes(1), b" ").decode(errors="replace")
                found.append(f"host {n + 1}: {pid} {words[:80]} ({_state(pid)})")
    return found


def fail_hosts(
    folder: Path, *, failures: int, per_run: int, seed: int, say: Callable[[str], None], until: float = math.inf
) -> tuple[list[Failure], list[Ending]]:
    """As many runs as it takes. `until`: no run begins after this time."""
    draw = Draw(seed)
    found: list[Failure] = []
    endings: list[Ending] = []
    with cluster_in(folder / "net") as cluster:
        while len(found) < failures and time.monotonic() < until:
            number = len(endings)
            more, ending = one_run(
                cluster, folder / f"run-{number}", number, min(per_run, failures - len(found)), draw, say
            )
            found += more
            endings.append(ending)
    return found, endings


@contextmanager
def cluster_in(folder: Path) -> Iterator[NetCluster]:
    cluster = NetCluster(folder)
    try:
        cluster.build()
        yield cluster
    finally:
        cluster.close()


def report(found: list[Failure], endings: list[Ending]) -> str:
    lines = ["| failure | count | next attempt's first step after, median (most) |", "|---|---|---|"]
    for kind in KINDS:
        mine = [one for one in found if one.kind == kind]
        again = [one.again_s for one in mine if one.again_s is not None]
        lines.append(
            f"| {kind} | {len(mine)} | {f'{statistics.median(again):.1f} s ({max(again):.1f} s)' if again else '–'} |"
        )
    finished = [one for one in endings if one.status == "completed"]
    other = [one for one in endings if one.status != "completed"]
    wrong = [one for one in endings if one.wrong]
    lines += [
        "",
        "| | |",
        "|---|---|",
        (
            f"| failures | {len(found)}: {sum(one.steady for one in found)} while all hosts trained,"
            f" {sum(not one.steady for one in found)} at any time |"
        ),
        f"| runs | {len(endings)}: {len(finished)} finished, {len(other)} ended with a verdict, two hosts being out |",
        f"| steps | {sum(one.steps for one in endings)}, each with the samples and the loss of a lone process |",
        f"| attempts | {sum(one.attempts for one in endings)} |",
        f"| runs in which something was wrong | {len(wrong)} |",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=200, metavar="N")
    parser.add_argument("--per-run", type=int, default=5, metavar="N", help="failures of one run, at most (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="no run begins after so long")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the runs' folders stay (default: nowhere)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    told = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"host_failures.py: no test cluster here: {reason}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is removed then too
    with tempfile.TemporaryDirectory(prefix="host-failures-") as name:
        folder = told.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        notes = (
            (
                f"3 hosts (network namespaces) with a CPU rank each, gloo, --min-hosts 2, seed {told.seed}; load before"
                f" the start {os.getloadavg()[0]:.2f}."
            ),
        )
        where = replace(setting(trials(name, 3)), notes=notes)
        found, endings = fail_hosts(
            folder,
            failures=told.failures,
            per_run=told.per_run,
            seed=told.seed,
            until=time.monotonic() + told.minutes * 60,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    lines = [
        f"Hardware: {where.hardware}  ",
        f"Software: {where.software}  ",
        f"Commit: {where.commit}, {where.date}  ",
        f"Command: `{where.command}`  ",
    ]
    print("\n".join([*lines, *where.notes, "", report(found, endings)]))
    if told.json:
        told.json.write_text(
            json.dumps(
                {
                    "schema": 1,
                    **asdict(where),
                    "failures": [asdict(one) for one in found],
                    "runs": [asdict(one) for one in endings],
                },
                indent=1,
            )
            + "\n"
        )
    return 1 if any(one.wrong for one in endings) else 0


if __name__ == "__main__":
    sys.exit(main())
