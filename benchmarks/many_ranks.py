"""Many ranks on several hosts that are one machine: do 64 torch ranks on 8 hosts start, train, lose a host and continue, and what does their coordinator cost?

    python benchmarks/many_ranks.py                                        64 torch ranks on 8 hosts, then 8 to 256 torch-free ones: about 5 minutes on 16 cores
    python benchmarks/many_ranks.py --torch 4 --hosts 2 --plain 8,16,32    a try on 2 cores

A host is an agent and its ranks, with a home and a loopback address of its own; coordinator, agents and ranks are the real ones. An `ssh` that stands first on
the PATH starts each agent here: no sshd, no network namespace, no root. GPUs are not used. A host is lost in two ways: all its processes are killed (their
connections close), later all are stopped (it says nothing any more, as after a power cut). Each time it comes back once the run has gone on without it.

Beat lateness: at each moment of the run's history (every 2 s), the age of the oldest beat of a rank that the coordinator does not know of yet; agents send beats
twice a second. CPU time, not load, is what a coordinator costs: on a machine with fewer cores than ranks all times are those of a machine that is too small.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from goodput import Trial, Trials, trials
from launch import STOKER, BenchmarkError, _cpu_seconds, _environment, _memory, _pids, setting

from stoker.control.record.history import read_history

HERE = Path(__file__).resolve().parent
HOST = "MANY_RANKS_HOST"
STEP_S = {"torch": 0.2, "plain": 0.45}  # not the 0.5 s between an agent's beats: both would stay in phase
START_S, LOSS_S, END_S = 240.0, 120.0, 60.0  # most that is waited for: all ranks' first step, the next step, the end
LOSSES = {signal.SIGKILL: "all its processes killed", signal.SIGSTOP: "silent"}
WARM_S = 4.0  # after the first step: imports are over, the history has begun
SSH = """#!/bin/sh
# ssh OPTIONS -- HOST COMMAND: runs it here, unless the host is down.
while [ "$1" != "--" ]; do shift; done
if [ -e "{folder}/down-$2" ]; then
    echo "ssh: connect to host $2 port 22: No route to host" >&2
    exit 255
fi
export {variable}="$2" HOME="{folder}/home-$2"
mkdir -p "$HOME"
exec sh -c "$3"
"""


@dataclass(frozen=True)
class Loss:
    """Of one host."""

    kind: str
    ranks_left: int
    again_s: float  # from the loss to the next step
    step_lost: int  # the last one before it
    step_next: int
    back_s: float  # from its return to a step of all ranks


@dataclass(frozen=True)
class Found:
    kind: str
    hosts: int
    ranks: int
    first_line_s: float  # of the first rank, from the command
    last_line_s: float  # of the last rank
    first_step_s: float
    coordinator_cpu: float  # seconds a second
    agents_cpu: float  # of all hosts
    coordinator_mb: float  # PSS
    agent_mb: float  # agent and guardian of a host, the mean
    ranks_mb: float  # all of them
    late_median_s: float
    late_most_s: float
    step_s: float
    losses: tuple[Loss, ...] = ()


class Crowd(Trial):
    """A run on hosts of this machine."""

    def __init__(self, bench: Trials, kind: str, hosts: int, ranks: int) -> None:
        self.kind, self.names = kind, [f"node{number}" for number in range(hosts)]
        self.slots = [ranks // hosts + (number < ranks % hosts) for number in range(hosts)]
        self.ranks = ranks
        folder = bench.folder / f"{bench.jobs + 1}-hosts"
        (folder / "bin").mkdir(parents=True)
        self._folder = folder
        ssh = folder / "bin" / "ssh"
        ssh.write_text(SSH.format(folder=folder, variable=HOST))
        ssh.chmod(0o755)
        entries = [
            {
                "host": name, "address": f"127.0.0.{number + 2}", "interface": "lo", "local": False, "slots": self.slots[number],
                "gpus": "none", "python": sys.executable, "workdir": str(folder),
            }
            for number, name in enumerate(self.names)
        ]  # fmt: skip
        (folder / "hosts.yaml").write_text(json.dumps({"hosts": entries}))
        words = ["--hosts", folder / "hosts.yaml", "--min-hosts", "1", "--max-restarts", "20", "--quiet"]
        env = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        super().__init__(bench, STOKER, *words, HERE / "scripts" / "many.py", kind, STEP_S[kind], env=env)

    @property
    def run_dir(self) -> Path:
        return self.dir / "runs" / "latest"

    @property
    def coordinator(self) -> int:
        return self._processes[0].pid

    def of_host(self, name: str) -> list[int]:
        """All its processes: agent, guardian, ranks."""
        words = {self._tag, f"{HOST}={name}".encode()}
        return [pid for pid in _pids() if words <= set(_environment(pid))]

    def agents(self) -> list[int]:
        """With their guardians, and what an agent forks for a moment."""
        return [pid for pid in self.own() if _name(pid) in ("stoker-agent", "stoker-guard")]

    def send(self, name: str, signum: signal.Signals) -> None:
        """To every process of a host. A pidfd holds on to the very process: no other can get the signal."""
        words = {self._tag, f"{HOST}={name}".encode()}
        for pid in self.of_host(name):
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                if words <= set(_environment(pid)):
                    signal.pidfd_send_signal(handle, signum)
            except ProcessLookupError:
                continue
            finally:
                os.close(handle)

    def lose(self, name: str, how: signal.Signals) -> None:
        (self._folder / f"down-{name}").touch()
        self.send(name, how)

    def bring_back(self, name: str) -> None:
        self.send(name, signal.SIGKILL)  # what was stopped
        (self._folder / f"down-{name}").unlink()

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [one for one in map(json.loads, lines) if one["event"] == kind]

    def world(self, attempt: int) -> int:
        """Ranks that have stepped in it."""
        return sum(path.stat().st_size > 0 for path in self.dir.glob(f"beats-{attempt}-*"))

    def wait_for(self, there: Callable[[], bool], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not there():
            if self.ended() is not None:
                raise BenchmarkError(f"the run ended with {self.ended()} before {what}\n{self._tail()[-800:]}")
            if time.monotonic() > deadline:
                raise BenchmarkError(f"no {what} within {seconds:.0f} s\n{self._tail()[-800:]}")
            time.sleep(0.05)

    def first_lines(self) -> list[float]:
        """Seconds from the command to each rank's first line."""
        logs = (self.run_dir / "attempt-0").glob("rank-*.log")
        words = (path.read_text(errors="replace").partition("HELLO ")[2].split() for path in logs)
        return sorted(float(word[0]) - self.began for word in words if word)

    def lateness(self) -> list[float]:
        """Of each rank at each moment of the history."""
        beats: dict[tuple[int, int], dict[int, float]] = {}
        for path in self.dir.glob("beats-*"):
            _, attempt, rank = path.name.split("-")
            data = path.read_bytes()
            beats[int(attempt), int(rank)] = dict(struct.iter_unpack("<qd", data[: len(data) // 16 * 16]))
        found = []
        for moment in read_history(str(self.run_dir)):
            for at, rank in enumerate(moment.members.ranks):
                known, told = moment.ranks.get("step", ())[at : at + 1], beats.get((moment.attempt, rank), {})
                if told and known and known[0] is not None:
                    unknown = told.get(known[0] + 1)
                    found.append(max(moment.time - unknown, 0.0) if unknown is not None else 0.0)
        return found

    def end(self) -> None:
        (self.dir / "stop").touch()
        code = self.wait(END_S)
        if code:
            raise BenchmarkError(f"the run ended with {code}\n{self._tail()[-800:]}")
        if left := self.alive():
            self.gone()
            print(f"! {len(left)} processes were still there when the launcher had ended, and ended by themselves")


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""


def measure(bench: Trials, kind: str, hosts: int, ranks: int, seconds: float, say: Callable[[str], None]) -> Found:
    with Crowd(bench, kind, hosts, ranks) as job:
        job.wait_for(lambda: job.world(0) == ranks, f"step of all {ranks} ranks", START_S)
        first_step = time.monotonic() - job.began
        lines = job.first_lines()
        if len(lines) != ranks:
            raise BenchmarkError(f"{len(lines)} of {ranks} ranks printed a first line")
        say(
            f"{ranks} {kind} ranks: first line {lines[0]:.1f} s, the last rank's {lines[-1]:.1f} s, all have stepped {first_step:.1f} s"
        )
        time.sleep(WARM_S)
        before = {pid: _cpu_seconds([pid]) for pid in (job.coordinator, *job.agents())}
        begun, made = time.monotonic(), len(job.steps())
        time.sleep(seconds)
        took = time.monotonic() - begun
        agents = [pid for pid in job.agents() if pid in before]
        if len(agents) != 2 * hosts:
            raise BenchmarkError(f"{len(agents)} agents and guardians of {hosts} hosts")
        spent = {pid: (_cpu_seconds([pid]) - before[pid]) / took for pid in (job.coordinator, *agents)}
        cpu, agents_cpu = spent[job.coordinator], sum(spent[pid] for pid in agents)
        steps = len(job.steps()) - made
        memory = _memory([job.coordinator])[1], _memory(agents)[1] / hosts
        of_ranks = _memory(
            [pid for pid in job.alive() if b"RANK" in {word.partition(b"=")[0] for word in _environment(pid)}]
        )[1]
        losses = [lose(job, job.names[-1], how, say) for how in LOSSES] if kind == "torch" else []
        job.end()
        late = job.lateness() or [0.0]
    return Found(
        kind, hosts, ranks, lines[0], lines[-1], first_step, cpu, agents_cpu, *memory, of_ranks, statistics.median(late), max(late),
        took / max(steps, 1), tuple(losses),
    )  # fmt: skip


def lose(job: Crowd, name: str, how: signal.Signals, say: Callable[[str], None]) -> Loss:
    """A host, and its return."""
    words = LOSSES[how]
    attempt, before = len(job.events("attempt")) - 1, job.steps()[-1].number
    left, lost = job.ranks - job.slots[job.names.index(name)], time.time()
    job.lose(name, how)
    job.wait_for(lambda: job.steps()[-1].attempt > attempt, "step without the lost host", LOSS_S)
    again = next(one for one in job.steps() if one.attempt > attempt)
    job.wait_for(lambda: job.world(again.attempt) == left, f"step of all {left} ranks", LOSS_S)
    seconds = again.time - lost
    say(f"{name} lost ({words}) behind step {before}: step {again.number} by {left} ranks {seconds:.1f} s later")
    job.bring_back(name)
    back = time.time()

    def whole() -> bool:
        newest = job.steps()[-1].attempt
        return newest > again.attempt and job.world(newest) == job.ranks

    job.wait_for(whole, f"step of all {job.ranks} ranks again", LOSS_S)
    returned = next(one for one in job.steps() if one.attempt == job.steps()[-1].attempt)
    say(f"{name} back: step {returned.number} by {job.ranks} ranks {returned.time - back:.1f} s later")
    return Loss(words, left, seconds, before, again.number, returned.time - back)


def report(found: list[Found]) -> str:
    lines = [
        "| ranks | hosts | first line | last rank's | all stepped | coordinator CPU s/s | agents' CPU s/s, all | coordinator PSS | agent PSS, each | ranks PSS | beat lateness, median (most) | step |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.ranks} {one.kind} | {one.hosts} | {one.first_line_s:.2f} s | {one.last_line_s:.1f} s | {one.first_step_s:.1f} s | {one.coordinator_cpu:.3f} |"
        f" {one.agents_cpu:.3f} | {one.coordinator_mb:.0f} MB | {one.agent_mb:.0f} MB | {one.ranks_mb:.0f} MB | {one.late_median_s:.2f} ({one.late_most_s:.2f}) s |"
        f" {one.step_s:.2f} s |"
        for one in found
    ]
    losses = [loss for one in found for loss in one.losses]
    if losses:
        lines += [
            "",
            "| host lost | from the loss to the next step | ranks then | step before, next | from its return to a step of all |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {one.kind} | {one.again_s:.1f} s | {one.ranks_left} | {one.step_lost}, {one.step_next} | {one.back_s:.1f} s |"
            for one in losses
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8, metavar="N")
    parser.add_argument("--torch", type=int, default=64, metavar="N", help="torch ranks in all (default 64; 0: none)")
    parser.add_argument("--plain", default="8,16,32,64,128,256", metavar="N,N", help="torch-free ranks; '' for none")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="measured of each (default 15)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    told = parser.parse_args()
    plain = [int(word) for word in told.plain.split(",") if word]
    if told.hosts < 2 or min([*plain, told.torch or told.hosts]) < told.hosts:
        parser.error("at least two hosts, and a rank on each")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is cleaned up then too
    found, wrong = list[Found](), list[str]()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="many-ranks-") as name:
        bench = trials(name, told.torch)
        notes = (
            f"Hosts are agents on this machine with loopback addresses; load before the start {os.getloadavg()[0]:.2f}.",
        )
        where = replace(setting(bench), notes=notes)
        for kind, ranks in [("torch", told.torch)] * bool(told.torch) + [("plain", count) for count in plain]:
            try:
                found.append(measure(bench, kind, told.hosts, ranks, told.seconds, say))
            except BenchmarkError as problem:
                wrong.append(f"✗ {ranks} {kind} ranks: {problem}")
                say(wrong[-1])
                continue
            say(report(found[-1:]))
            if told.json:
                told.json.write_text(
                    json.dumps({"schema": 1, **asdict(where), "found": [asdict(one) for one in found]}, indent=1) + "\n"
                )
    head = [
        f"Hardware: {where.hardware}  ",
        f"Software: {where.software}  ",
        f"Commit: {where.commit}, {where.date}  ",
        f"Command: `{where.command}`  ",
    ]
    print("\n".join([*head, *where.notes, "", report(found), *wrong]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
