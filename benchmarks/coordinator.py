"""What the coordinator of a large run costs: memory and CPU of `stoker run --hosts cluster.yaml` with 64 hosts of 8 ranks each.

    python benchmarks/coordinator.py                        2 minutes
    python benchmarks/coordinator.py --hosts 8 --seconds 20   a try

The process measured is the real one, untouched. An `ssh` that stands first on its PATH leads to simulated agents (coordinator_agent.py), which
speak the real protocol: every check before the start is answered, then every rank steps twice a second and prints a line each time. At the
end the record must have every line of every rank, and the run must be complete.
"""

from __future__ import annotations

import argparse
import json
import os
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
from launch import BenchmarkError, setting

HERE = Path(__file__).resolve().parent
WINDOW_S = 5.0
MOST_MB = 150.0
MOST_CPU = 0.10
START_S = 120.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Window:
    seconds: float
    cpu: float  # of one core
    pss: float  # MB
    rss: float


@dataclass(frozen=True)
class Found:
    start_s: float  # from the command to the last rank's first step
    windows: tuple[Window, ...]
    peak_rss: float  # MB, the start included
    lines: int  # that the ranks printed, all of them in the record
    late_s: float  # of the simulated agents, at worst


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def megabytes(pid: int, file: str, name: str) -> float:
    return (
        next(
            int(line.split()[1])
            for line in Path(f"/proc/{pid}/{file}").read_text().splitlines()
            if line.startswith(f"{name}:")
        )
        * 1024
        / 1e6
    )


def window(pid: int, seconds: float) -> Window:
    began, before = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    took = time.monotonic() - began
    cpu = (cpu_seconds(pid) - before) / took
    return Window(
        round(took, 2),
        round(cpu, 4),
        round(megabytes(pid, "smaps_rollup", "Pss"), 1),
        round(megabytes(pid, "status", "VmRSS"), 1),
    )


def prepare(folder: Path, hosts: int, ranks: int) -> dict[str, str]:
    """The environment of the run: its ssh is ours."""
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    ssh.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -I -S "{HERE / "coordinator_agent.py"}" connect "{folder}/player" "$@"\n'
    )
    ssh.chmod(0o755)
    # Addresses of RFC 5737 and RFC 2544: nobody's, and certainly not this machine's own.
    entries = [{"host": f"198.18.{n // 250}.{n % 250 + 1}", "slots": ranks} for n in range(hosts)]
    (folder / "cluster.yaml").write_text(json.dumps({"hosts": entries}))
    (folder / "train.py").write_text("raise SystemExit('started by nobody: the agents are simulated')\n")
    return {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}


def measure(folder: Path, hosts: int, ranks: int, seconds: float, jitter: float) -> Found:
    env = prepare(folder, hosts, ranks)
    player = subprocess.Popen(
        [
            sys.executable,
            str(HERE / "coordinator_agent.py"),
            "play",
            str(folder / "player"),
            "--ranks",
            str(ranks),
            "--jitter",
            str(jitter),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        text=True,
    )
    run: subprocess.Popen[bytes] | None = None
    try:
        wait_until((folder / "player").exists, 10, "the simulated agents did not start")
        began = time.monotonic()
        with open(folder / "console", "wb") as console:
            run = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "stoker",
                    "run",
                    "--hosts",
                    "cluster.yaml",
                    "--runs-dir",
                    str(folder / "runs"),
                    "train.py",
                ],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
            )
        steps = folder / "runs" / "latest" / "events.jsonl"
        wait_until(
            lambda: (
                run.poll() is not None or (steps.exists() and steps.read_text().count('"first-step"') == hosts * ranks)
            ),
            START_S,
            "no first step",
        )
        if run.poll() is not None:
            raise BenchmarkError(f"the run ended with {run.returncode}: {(folder / 'console').read_text()[-2000:]}")
        start_s = time.monotonic() - began
        windows = tuple(window(run.pid, WINDOW_S) for _ in range(max(1, round(seconds / WINDOW_S))))
        peak = megabytes(run.pid, "status", "VmHWM")
        said, _ = player.communicate(timeout=60)  # closes its stdin: the ranks end
        code = run.wait(60)
        if code:
            raise BenchmarkError(f"the run ended with {code}: {(folder / 'console').read_text()[-2000:]}")
        told = json.loads(said.splitlines()[-1])
        kept = sum(
            path.read_bytes().count(b"\n") for path in (folder / "runs" / "latest" / "attempt-0").glob("rank-*.log")
        )
        if kept != told["lines"]:
            raise BenchmarkError(f"the ranks printed {told['lines']} lines and the record has {kept}")
        return Found(round(start_s, 1), windows, round(peak, 1), told["lines"], told["latest_s"])
    finally:
        for one in (run, player):
            if one is not None and one.poll() is None:
                one.kill()
                one.wait()


def wait_until(look: Callable[[], bool], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{otherwise} within {seconds:.0f} s")
        time.sleep(0.05)


def report(found: Found) -> str:
    cpu = [one.cpu for one in found.windows]
    pss = max(one.pss for one in found.windows)
    middle = statistics.median(cpu)
    rows = [
        ("memory (PSS, the largest of all windows)", f"{pss:.0f} MB", f"≤ {MOST_MB:.0f} MB", pss <= MOST_MB),
        (
            "resident (RSS; its peak, the start included)",
            f"{max(one.rss for one in found.windows):.0f} MB ({found.peak_rss:.0f} MB)",
            "–",
            None,
        ),
        (
            f"CPU (of one core, median of {len(cpu)} windows of {WINDOW_S:.0f} s)",
            f"{middle:.1%} ({min(cpu):.1%} – {max(cpu):.1%})",
            f"≤ {MOST_CPU:.0%}",
            middle <= MOST_CPU,
        ),
        (
            "from the command to the last rank's first step (3 s of it are the ranks' own)",
            f"{found.start_s:.1f} s",
            "–",
            None,
        ),
        ("lines the ranks printed, all of them in the record", f"{found.lines}", "–", None),
    ]
    met = {True: "✓", False: "✗ missed", None: ""}
    return "\n".join(
        [
            "| | | bar | |",
            "|---|---|---|---|",
            *(f"| {name} | {value} | {bar} | {met[kept]} |" for name, value, bar, kept in rows),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=64, metavar="N")
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="on each host, 8 at most (default 8)")
    parser.add_argument(
        "--seconds", type=float, default=120.0, metavar="S", help="measured, once every rank has stepped (default 120)"
    )
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.005,
        metavar="S",
        help="ranks of a step print within this time (default 0.005: after a collective)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="every window")
    told = parser.parse_args()
    if told.hosts < 2 or not 1 <= told.ranks <= 8 or told.seconds < WINDOW_S:
        parser.error(f"--hosts from 2 up, --ranks 1 to 8, --seconds from {WINDOW_S:.0f} up")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is cleaned up then too
    with tempfile.TemporaryDirectory(prefix="coordinator-") as name:
        rhythm = f"a step and a line every 0.5 s, within {told.jitter:g} s of each other"
        notes = (
            (
                f"{told.hosts} simulated agents with {told.ranks} ranks each, {rhythm}; load before the start"
                f" {os.getloadavg()[0]:.2f}."
            ),
        )
        where = replace(setting(trials(name, told.ranks)), notes=notes)
        try:
            found = measure(Path(name), told.hosts, told.ranks, told.seconds, told.jitter)
        except BenchmarkError as problem:
            print(f"coordinator.py: {problem}", file=sys.stderr)
            return 1
    if found.late_s > 0.5:
        where = replace(
            where,
            notes=(
                *where.notes,
                f"The simulated agents were up to {found.late_s:.1f} s late: this machine is too busy for them.",
            ),
        )
    lines = [
        f"Hardware: {where.hardware}  ",
        f"Software: {where.software}  ",
        f"Commit: {where.commit}, {where.date}  ",
        f"Command: `{where.command}`  ",
    ]
    print("\n".join([*lines, *where.notes, "", report(found)]))
    if told.json:
        told.json.write_text(
            json.dumps({"schema": 1, **asdict(where), **asdict(found)}, indent=1, ensure_ascii=False) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
