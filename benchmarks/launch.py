"""torchrun and stoker side by side, in one run, alternating: how soon, how big, how clean, and what supervision costs.

    python benchmarks/launch.py                          everything: about 15 minutes
    python benchmarks/launch.py --only first-line help   two of the measures
    python benchmarks/launch.py --only soak --soak 600   memory after ten minutes of logging

The ranks are CPU ranks on every machine: what is measured is the launcher. Prints Markdown for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import random
import re
import select
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TAG = "LAUNCH_BENCH_TAG"
TORCHRUN, HAND, STOKER = "torchrun", "by hand", "stoker"
PATIENCE_S = 180.0  # for one job that has nothing to wait for; torchrun needs 32 s where a rank ignores SIGTERM
CPU_S = 20.0
CODE_REPEATS = 3  # a code is not a timing: it is the same every time, or that is the finding
ANSWERS_TO_TORCH = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "NPROC_PER_NODE",
    "NUM_GPUS",
)


class BenchmarkError(Exception):
    """A job that did not do what it is there to do: the numbers would mean nothing."""


class GlooAborted(BenchmarkError):
    """About 1 in 50 gloo jobs of torch 2.13 on 2 cores, under a launcher or not: a worker thread wants the GIL of an
    interpreter
    that is ending (github.com/pytorch/pytorch/pull/179291). Says nothing about who started it."""

    TEXT = b"terminate called without an active exception"


@dataclass(frozen=True)
class Row:
    """One line of the table. `values` has every sample of every way to launch; the table shows the median, or the last."""

    name: str
    unit: str
    values: dict[str, list[float]]
    bar: str = ""
    met: bool | None = None
    ratio: str = ""
    take_last: bool = False

    def value(self, way: str) -> float | None:
        samples = self.values.get(way)
        if not samples:
            return None
        return samples[-1] if self.take_last else statistics.median(samples)

    def cell(self, way: str) -> str:
        value, samples = self.value(way), self.values.get(way, [])
        if value is None:
            return "–"
        if self.unit == "code":
            return ", ".join(f"{int(code)}" for code in sorted(set(samples)))
        shown = f"{_digits(value)} {self.unit}"
        return shown if len(samples) == 1 else f"{shown} ({_digits(min(samples))} – {_digits(max(samples))})"

    def shown_ratio(self) -> str:
        ours, theirs = self.value(STOKER), self.value(TORCHRUN)
        if self.ratio or self.unit == "code" or ours is None or not theirs:
            return self.ratio or "–"
        return f"{ours / theirs:.3f}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


# ---- jobs ----


@dataclass
class Bench:
    folder: Path
    stoker: list[str]
    torchrun: list[str]
    ranks: int
    repeats: int
    soak: float
    omp: str = ""  # what stoker gives its ranks
    jobs: int = 0
    aborted: int = 0  # jobs run again because gloo aborted at their end

    def command(self, way: str, script: str, args: tuple[object, ...]) -> list[str]:
        launcher = [*self.stoker, "run"] if way == STOKER else self.torchrun
        return [
            *launcher,
            "--standalone",
            "--nproc-per-node",
            str(self.ranks),
            str(HERE / "scripts" / script),
            *map(str, args),
        ]

    def rounds(self, name: str, ways: tuple[str, ...], count: int | None = None) -> Iterator[str]:
        """A B A B ..., with progress for whoever watches."""
        total = (count or self.repeats) * len(ways)
        begun = time.monotonic()
        for done in range(total):
            if sys.stderr.isatty():
                left = f", {(time.monotonic() - begun) / done * (total - done):.0f} s left" if done else ""
                print(
                    f"\r\033[K{name}: {done + 1} of {total}, {ways[done % len(ways)]}{left}",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
            yield ways[done % len(ways)]
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class Job:
    """One launch. Every process of it has a tag in its environment: by that it is found, counted and, at the latest on
    exit, killed.
    """

    def __init__(
        self, bench: Bench, way: str, script: str, *args: object, piped: bool = False, env: dict[str, str] | None = None
    ) -> None:
        self.way = way
        bench.jobs += 1
        self.dir = bench.folder / str(bench.jobs)
        self.dir.mkdir()
        self._tag = f"{TAG}={bench.folder.name}-{bench.jobs}".encode()
        name, _, value = self._tag.decode().partition("=")
        folders = {"BENCH_DIR": str(self.dir), "STOKER_RUNS": str(self.dir / "runs"), "TMPDIR": str(self.dir)}
        self._env = _clean_environment() | {name: value} | folders | (env or {})
        self._output = open(self.dir / "output", "wb")  # noqa: SIM115  closed in __exit__
        self._sink = subprocess.PIPE if piped else self._output
        self._processes: list[subprocess.Popen[bytes]] = []
        # CLOCK_MONOTONIC is one clock for all processes of the machine, and nobody sets it back during a run.
        self.began = time.monotonic()
        try:
            if way == HAND:
                self._start_by_hand(bench, [sys.executable, str(HERE / "scripts" / script), *map(str, args)])
            else:
                self._start(bench.command(way, script, args), {})
        except BaseException as problem:
            self.__exit__(type(problem))
            raise

    def _start(self, argv: list[str], more: dict[str, str]) -> None:
        self._processes.append(
            subprocess.Popen(
                argv,
                env=self._env | more,
                stdin=subprocess.DEVNULL,
                stdout=self._sink,
                stderr=self._output,
                start_new_session=True,
            )
        )

    def _start_by_hand(self, bench: Bench, argv: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        job = {"WORLD_SIZE": str(bench.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        threads = {} if "OMP_NUM_THREADS" in self._env else {"OMP_NUM_THREADS": bench.omp}
        for rank in range(bench.ranks):
            self._start(argv, job | threads | {"RANK": str(rank), "LOCAL_RANK": str(rank)})

    def __enter__(self) -> Job:
        return self

    def __exit__(self, problem: type[BaseException] | None, *_: object) -> None:
        now = time.monotonic()
        patient_until, deadline = now + (0 if problem else 2), now + 12
        while left := self.alive():  # after a good end there may be one that is still tidying up
            if time.monotonic() > patient_until:
                for pid in left:
                    self._kill(pid)
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{self.way}: processes {left} survive SIGKILL")
            time.sleep(0.01)
        for process in self._processes:
            process.wait()
            if process.stdout:
                process.stdout.close()
        self._output.close()

    def _kill(self, pid: int) -> None:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            if self._tag in _environment(pid):  # the pidfd holds on to this very process: no other can get the signal
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            os.close(handle)

    def alive(self) -> list[int]:
        return [pid for pid in _pids() if self._tag in _environment(pid)]

    def own(self) -> list[int]:
        """The launcher's own processes: all of the job but its ranks."""
        return [
            pid
            for pid in _pids()
            if self._tag in (words := _environment(pid)) and not any(word.startswith(b"RANK=") for word in words)
        ]

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """Until all that was started directly has ended. The first exit code that isn't 0, as a shell would give it."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            handle = os.pidfd_open(process.pid)
            try:  # Popen.wait with a timeout sleeps up to 50 ms between looks: that would be in the numbers
                if not select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise BenchmarkError(f"{self.way}: not done after {seconds:.0f} s\n{self._tail()}")
            finally:
                os.close(handle)
        codes = [process.wait() for process in self._processes]
        return next((code if code > 0 else 128 - code for code in codes if code), 0)

    def finish(self) -> float:
        """Seconds from launch to the end of a job that must succeed."""
        code = self.wait()
        ended = time.monotonic()
        if code:
            aborted = GlooAborted.TEXT in (self.dir / "output").read_bytes()
            raise (GlooAborted if aborted else BenchmarkError)(f"{self.way}: exit code {code}\n{self._tail()}")
        return ended - self.began

    def gone(self) -> float:
        """When the last process of the job was gone: to be asked once the launcher has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            looked = time.monotonic()
            if not self.alive():
                return looked
            if looked > deadline:
                raise BenchmarkError(f"{self.way}: processes {self.alive()} outlive the launcher")
            time.sleep(0.005)

    def until(self, names: list[str], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not all((self.dir / name).exists() for name in names):
            if time.monotonic() > deadline or self._processes[0].poll() is not None:
                raise BenchmarkError(f"{self.way}: no {', '.join(names)}\n{self._tail()}")
            time.sleep(0.02)

    def first_line(self) -> tuple[float, float]:
        """(seconds until a rank wrote it, seconds until the launcher had passed it on)."""
        pipe = self._processes[0].stdout
        assert pipe is not None
        text, seen = b"", 0.0
        while data := os.read(pipe.fileno(), 65536):
            text += data
            if not seen and b"HELLO" in text:
                seen = time.monotonic()
        self.finish()
        written = [float(word) for word in re.findall(rb"HELLO ([\d.]+)", text)]
        if not written:
            raise BenchmarkError(f"{self.way}: no line from any rank\n{self._tail()}")
        return min(written) - self.began, seen - self.began

    def result(self, name: str) -> Any:
        return json.loads((self.dir / name).read_text())

    def _tail(self) -> str:
        return (self.dir / "output").read_text(errors="replace")[-2000:]


def _clean_environment() -> dict[str, str]:
    """CPU ranks, and nothing that tells torch or stoker how to start: not even where this runs under one of them."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ANSWERS_TO_TORCH and not name.startswith(("STOKER_", "PET_", "TORCHELASTIC_", "ROLE_", "GROUP_"))
    }
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # ended, a zombie, or another user's: none of ours
        return []


def _memory(pids: list[int]) -> tuple[float, float]:
    """(RSS, PSS) of all of them together, in MB."""
    rss = pss = 0
    for pid in pids:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        rss += int(re.search(r"^Rss:\s+(\d+)", text, re.M)[1])  # type: ignore[index]
        pss += int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1])  # type: ignore[index]
    return rss * 1024 / 1e6, pss * 1024 / 1e6


def _cpu_seconds(pids: list[int]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


# ---- measures ----


def first_line(bench: Bench) -> list[Row]:
    written: dict[str, list[float]] = {TORCHRUN: [], STOKER: []}
    passed_on: dict[str, list[float]] = {TORCHRUN: [], STOKER: []}
    for way in bench.rounds("first-line", (TORCHRUN, STOKER)):
        with Job(bench, way, "hello.py", piped=True) as job:
            inside, outside = job.first_line()
        written[way].append(inside)
        passed_on[way].append(outside)
    return [
        _against_torchrun(Row("launch to the first rank's first line", "s", written), 0.12),
        _against_torchrun(Row("launch to that line on the console", "s", passed_on), 0.12),
    ]


def job3(bench: Bench) -> list[Row]:
    taken: dict[str, list[float]] = {TORCHRUN: [], HAND: [], STOKER: []}
    for way in bench.rounds("job3", (TORCHRUN, HAND, STOKER)):
        taken[way].append(_ddp(bench, way, 3)[0])
    row = Row("a 3-step gloo DDP job", "s", taken)
    over = row.value(STOKER) - row.value(HAND)  # type: ignore[operator]
    return [Row(row.name, row.unit, taken, f"≤ by hand + 0.25 s (here {over:+.3f} s)", over <= 0.25)]


def memory(bench: Bench) -> list[Row]:
    rss: dict[str, list[float]] = {TORCHRUN: [], STOKER: []}
    pss: dict[str, list[float]] = {TORCHRUN: [], STOKER: []}
    for way in bench.rounds("memory", (TORCHRUN, STOKER)):
        big, fair = _paced(bench, way, 1.0, "talk")[0][-1]
        rss[way].append(big)
        pss[way].append(fair)
    return [
        Row("launcher RSS, all its processes, after 1 s", "MB", rss),
        Row("launcher PSS, all its processes, after 1 s", "MB", pss),
    ]


def soak(bench: Bench) -> list[Row]:
    """Once each: the number is the last sample, the range that of all samples of the run."""
    rss: dict[str, list[float]] = {}
    pss: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for way in bench.rounds("soak", (TORCHRUN, STOKER), 1):
        samples, used = _paced(bench, way, bench.soak, "talk")
        rss[way], pss[way] = [big for big, _ in samples], [fair for _, fair in samples]
        cpu[way] = [used]
    when = f"after {bench.soak:.0f} s of 50 lines/s a rank"
    enough = bench.soak >= 600 or pss[STOKER][-1] > 45
    return [
        Row(f"launcher RSS {when}", "MB", rss, take_last=True),
        Row(
            f"launcher PSS {when}",
            "MB",
            pss,
            "≤ 45 MB after 600 s",
            pss[STOKER][-1] <= 45 if enough else None,
            take_last=True,
        ),
        Row(
            f"launcher CPU meanwhile, per rank, 20 ms steps and 50 lines/s over {bench.soak:.0f} s", "% of a core", cpu
        ),
    ]


def death(bench: Bench) -> list[Row]:
    rows = []
    for what, script, args in (("sleeping ranks", "die.py", ()), ("a DDP job", "ddp.py", (20, "sigkill"))):
        taken: dict[str, list[float]] = {TORCHRUN: [], STOKER: []}
        codes: dict[str, list[float]] = {TORCHRUN: [], STOKER: []}
        for way in bench.rounds(f"death, {what}", (TORCHRUN, STOKER)):
            with Job(bench, way, script, *args) as job:
                code, gone = job.wait(), job.gone()
                codes[way].append(code)
                taken[way].append(gone - float((job.dir / "died").read_text()))
        rows += [
            Row(f"SIGKILL of rank 1 to everything gone, {what}", "s", taken),
            _code(f"exit code then, {what}", codes, 137),
        ]
    return rows


def exit_codes(bench: Bench) -> list[Row]:
    rows = []
    for how, what, wanted in (
        ("exit3", "sys.exit(3)", 3),
        ("sigkill", "SIGKILL", 137),
        ("sigsegv", "SIGSEGV", 139),
        ("exit0", "os._exit(0)", 70),
    ):
        codes: dict[str, list[float]] = {TORCHRUN: [], STOKER: []}
        for way in bench.rounds(f"exit-codes, {what}", (TORCHRUN, STOKER), min(CODE_REPEATS, bench.repeats)):
            with Job(bench, way, "ddp.py", 20, how) as job:
                codes[way].append(job.wait())
        rows.append(_code(f"exit code, rank 1 of a DDP job: {what} at step 20", codes, wanted))
    return rows


def help_time(bench: Bench) -> list[Row]:
    taken: dict[str, list[float]] = {TORCHRUN: [], STOKER: []}
    for way in bench.rounds("help", (TORCHRUN, STOKER)):
        argv = [*(bench.stoker if way == STOKER else bench.torchrun), "--help"]
        begun = time.monotonic()
        subprocess.run(argv, env=_clean_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
        taken[way].append(time.monotonic() - begun)
    return [_at_most(Row("--help", "s", taken), 0.25, "≤ 0.25 s")]


def beat(bench: Bench) -> list[Row]:
    with Job(bench, STOKER, "beat.py", bench.repeats) as job:
        job.finish()
        ranks = [job.result(f"beat-{rank}.json") for rank in range(bench.ranks)]
    names = {
        "direct": "a beat: the hook called directly, 10,000 times",
        "hook": "a beat: SGD.step with the hook less SGD.step without, 10,000 times each",
        "cold": "a beat: one call with cold caches, less an empty call",
    }
    found = {key: {STOKER: [sample for one in ranks for sample in one[key]]} for key in names}
    return [_at_most(Row(name, "µs", found[key]), 20, "≤ 20 µs") for key, name in names.items()]


def cpu(bench: Bench) -> list[Row]:
    used: dict[str, list[float]] = {TORCHRUN: [], STOKER: []}
    for way in bench.rounds("cpu", (TORCHRUN, STOKER)):
        used[way].append(_paced(bench, way, CPU_S, "quiet")[1])
    return [
        _at_most(
            Row(f"launcher CPU, all its processes, per rank, 20 ms steps over {CPU_S:.0f} s", "% of a core", used),
            0.5,
            "≤ 0.5 %",
        )
    ]


def steps(bench: Bench) -> list[Row]:
    rates: dict[str, list[float]] = {TORCHRUN: [], HAND: [], STOKER: []}
    for way in bench.rounds("steps", (TORCHRUN, HAND, STOKER)):
        # One thread each for all three: torchrun and stoker choose differently, and that is not the cost of
        # supervision.
        rates[way].append(_ddp(bench, way, 1020, {"OMP_NUM_THREADS": "1"})[1].result("rate.json"))
    told = "; ".join(f"{_interval(rates[STOKER], rates[other])} × {other}" for other in (TORCHRUN, HAND))
    return [Row("steps/s of a small DDP job, 1,000 steps, OMP_NUM_THREADS=1", "/s", rates, ratio=told)]


def _ddp(bench: Bench, way: str, steps: int, env: dict[str, str] | None = None) -> tuple[float, Job]:
    """(seconds from launch to end, the job) of a DDP job that did end well."""
    for _ in range(3):
        try:
            with Job(bench, way, "ddp.py", steps, env=env) as job:
                return job.finish(), job
        except GlooAborted:
            bench.aborted += 1
    raise BenchmarkError(f"{way}: gloo aborted at the end of three jobs in a row")


def _paced(bench: Bench, way: str, seconds: float, voice: str) -> tuple[list[tuple[float, float]], float]:
    """Ranks at 20 ms a step for `seconds`: the launcher's (RSS, PSS) sampled along the way, and its CPU in % of a core
    per rank.
    """
    with Job(bench, way, "pace.py", seconds + 60, voice) as job:
        job.until([f"up-{rank}" for rank in range(bench.ranks)])
        own = job.own()
        begun, used = time.monotonic(), _cpu_seconds(own)
        samples = []
        end = begun + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, max(1.0, seconds / 60)))
            if voice == "talk":  # reading smaps makes the kernel walk the page tables, on that process's account or not
                samples.append(_memory(own))
        share = (_cpu_seconds(own) - used) / (time.monotonic() - begun) / bench.ranks * 100
        (job.dir / "stop").touch()
        job.finish()
    return samples, share


def _against_torchrun(row: Row, most: float) -> Row:
    ours, theirs = row.value(STOKER), row.value(TORCHRUN)
    assert ours is not None and theirs is not None
    return Row(row.name, row.unit, row.values, f"≤ {most} × torchrun", ours <= most * theirs)


def _at_most(row: Row, most: float, bar: str) -> Row:
    value = row.value(STOKER)
    assert value is not None
    return Row(row.name, row.unit, row.values, bar, value <= most, row.ratio, row.take_last)


def _code(name: str, codes: dict[str, list[float]], wanted: int) -> Row:
    return Row(name, "code", codes, str(wanted), set(codes[STOKER]) == {wanted})


def _interval(ours: list[float], theirs: list[float]) -> str:
    """Geometric mean of the rounds' ratios, and its 95 % bootstrap interval: a round's runs are neighbours in time, so
    they are paired.
    """
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(10_000))
    return f"{math.exp(statistics.fmean(logs)):.4f} [{math.exp(means[249]):.4f}, {math.exp(means[9749]):.4f}]"


MEASURES: dict[str, Callable[[Bench], list[Row]]] = {
    "first-line": first_line, "job3": job3, "memory": memory, "soak": soak, "death": death, "exit-codes": exit_codes, "help": help_time,
    "beat": beat, "cpu": cpu, "steps": steps,
}  # fmt: skip


# ---- where, when, with what ----


@dataclass(frozen=True)
class Setting:
    hardware: str
    software: str
    commit: str
    date: str
    command: str
    notes: tuple[str, ...]


def setting(bench: Bench) -> Setting:
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    cores = len(os.sched_getaffinity(0))
    ram = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")) * 1024 / 1e9
    gpus = _said("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    graphics = "; ".join(gpus.splitlines()) if gpus else "none"
    commit = _said("git", "-C", str(HERE), "rev-parse", "--short", "HEAD") or "unknown"
    dirty = _said("git", "-C", str(HERE), "status", "--porcelain")
    notes = [
        f"{bench.ranks} CPU ranks; medians of {bench.repeats} (min – max), ways to launch in turn; load before the"
        f" start {os.getloadavg()[0]:.2f}."
    ]
    if bench.repeats < 7:
        notes.append("Fewer than 7 repeats: a try, not a result.")
    if cores < bench.ranks + 2:
        notes.append(
            f"{cores} cores for {bench.ranks} ranks: the launcher and the ranks take turns, and steps/s shows it."
        )
    return Setting(
        f"{model}, {cores} cores, {ram:.0f} GB RAM, GPU: {graphics}",
        f"Linux {platform.release()}, Python {platform.python_version()}, torch {_version('torch')}",
        commit + (" + uncommitted changes" if dirty else ""),
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        shlex.join([os.path.basename(sys.executable), *sys.argv]),
        tuple(notes),
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _said(*argv: str) -> str:
    """A program's output; nothing where it is missing or fails: both mean that it has nothing to tell."""
    if shutil.which(argv[0]) is None:
        return ""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def report(where: Setting, rows: list[Row]) -> str:
    lines = [
        f"Hardware: {where.hardware}  ",
        f"Software: {where.software}  ",
        f"Commit: {where.commit}, {where.date}  ",
        f"Command: `{where.command}`  ",
    ]
    lines += [f"{note}  " for note in where.notes]
    lines += ["", "| | torchrun | by hand | stoker | stoker / torchrun | bar | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        met = {True: "✓", False: "✗ missed", None: ""}[row.met]
        lines.append(
            f"| {row.name} | {row.cell(TORCHRUN)} | {row.cell(HAND)} | {row.cell(STOKER)} | {row.shown_ratio()} |"
            f" {row.bar or '–'} | {met} |"
        )
    return "\n".join(lines)


def as_json(where: Setting, rows: list[Row]) -> str:
    told = [{**vars(row), "shown": {way: row.value(way) for way in row.values}} for row in rows]
    return json.dumps({"schema": 1, **vars(where), "rows": told}, indent=1, ensure_ascii=False) + "\n"


def _beside_python(name: str, module: str) -> list[str]:
    found = os.path.join(os.path.dirname(sys.executable), name)
    return [found] if os.access(found, os.X_OK) else [sys.executable, "-m", module]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="launches of each kind; 7 or more for a result (default 7)"
    )
    parser.add_argument("--only", nargs="+", choices=MEASURES, metavar="NAME", help=f"some of: {', '.join(MEASURES)}")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="2 or more: rank 1 has to die (default 2)")
    parser.add_argument(
        "--soak",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="how long the ranks log in `soak`; the bar's is 600 (default 20)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="every sample")
    parser.add_argument(
        "--stoker", type=shlex.split, metavar="CMD", help="default: next to this Python, else python -m stoker"
    )
    parser.add_argument(
        "--torchrun",
        type=shlex.split,
        metavar="CMD",
        help="default: next to this Python, else python -m torch.distributed.run",
    )
    asked = parser.parse_args()
    if asked.ranks < 2 or asked.repeats < 1 or asked.soak < 1:
        parser.error("--ranks from 2 up, --repeats and --soak from 1 up")
    if asked.json and not os.access(asked.json.absolute().parent, os.W_OK):
        parser.error(f"--json {asked.json}: its folder can't be written")
    return asked


def main() -> int:
    asked = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the jobs and the folder are cleaned up then too
    with tempfile.TemporaryDirectory(prefix="launch-bench-") as folder:
        stoker = asked.stoker or _beside_python("stoker", "stoker")
        torchrun = asked.torchrun or _beside_python("torchrun", "torch.distributed.run")
        bench = Bench(Path(folder), stoker, torchrun, asked.ranks, asked.repeats, asked.soak)
        where = setting(bench)
        rows: list[Row] = []
        try:
            for way in (TORCHRUN, STOKER):  # also fills the bytecode caches: nobody pays for that in the numbers
                with Job(bench, way, "hello.py") as job:
                    job.finish()
                    heard = re.search(r"HELLO \S+ (\d*)", (job.dir / "output").read_text(errors="replace"))
                    bench.omp = heard[1] if heard else ""
            for name in asked.only or MEASURES:
                rows += MEASURES[name](bench)
        except (BenchmarkError, OSError, subprocess.CalledProcessError) as problem:
            print(f"launch.py: {problem}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            if bench.aborted:
                note = (
                    f"{bench.aborted} DDP job(s) run again: gloo aborted at the end, as it does now and then with no"
                    " launcher too."
                )
                where = replace(where, notes=(*where.notes, note))
            if rows:
                print(report(where, rows))
                if asked.json:
                    asked.json.write_text(as_json(where, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
