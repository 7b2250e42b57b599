"""`bash test.sh --gpu`: the tests marked `gpu`, in several processes that share one GPU.

Each process runs its share of the tests (--gpu-shard, below) and imports only the files that have some. Tests that need
the GPU for themselves (the fixture `real`) are left to the whole suite. STOKER_TEST_DEVICE=cpu runs the same on a CPU.
Standard library only; it needs a Python with pytest and what the extra [train] installs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
UNAVAILABLE = 69  # as Stoker refuses what this machine lacks
NO_TESTS = 5  # pytest's exit code
MOST_PROCESSES = 8  # a CUDA context each; one core each for Python and one for compilers
# What the extra [train] installs besides torch, by the names it is imported by.
PACKAGES = (
    "huggingface_hub", "jinja2", "llguidance", "matplotlib", "numpy", "pyarrow", "safetensors", "tiktoken", "tokenizers", "uvicorn",
)  # fmt: skip
PROBE = """
import torch
print(torch.__version__)
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
"""
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|rerun)\b")
_SLOW = re.compile(r"^(\d+\.\d+)s (?:call|setup) +(.*)$", re.M)
_RULE = re.compile(r"([=_!-])\1{30,}")  # pytest draws them as wide as COLUMNS
_SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] (\S+?):\d+: (.*)$", re.M)


@dataclass
class Shard:
    number: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started: float

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read().decode("utf-8", "replace")


def refuse(line: str) -> int:
    print(f"test.sh --gpu: {line}", file=sys.stderr)
    return UNAVAILABLE


def commit() -> str:
    """Return the commit of the working tree, or why it is not known."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown commit (git can't tell it here)"
    return f"commit {head.stdout.strip()}{' with uncommitted changes' if changed.stdout.strip() else ''}"


def files() -> list[str]:
    """Return the test files that have tests marked `gpu`."""
    marked = re.compile(r"^from devices import|mark\.gpu\b", re.M)
    return sorted(
        str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_*.py") if marked.search(path.read_text())
    )


def processes(on_gpu: bool) -> int:
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MOST_PROCESSES, cores // 2)) if on_gpu else max(1, min(2, cores))


def start(number: int, count: int, device: str, arguments: list[str]) -> Shard:
    output = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
    command = [
        sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-p", "no:rerunfailures", "-m", "gpu", "--durations=5",
        "--continue-on-collection-errors",
        f"--gpu-shard={number}/{count}", *arguments, *files(),
    ]  # fmt: skip
    environment = {**os.environ, "STOKER_TEST_DEVICE": device, "COLUMNS": "500"}
    if device == "cpu":
        environment["STOKER_TEST_ALL"] = "1"  # all combinations, as on a GPU
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    return Shard(number, process, output, time.monotonic())


def wait(shards: list[Shard]) -> list[Shard]:
    """Print each process's result when it ends, and all of its output if tests failed. Return the failed ones."""
    failed, running = [], list(shards)
    while running:
        time.sleep(0.2)
        for shard in [shard for shard in running if shard.process.poll() is not None]:
            running.remove(shard)
            code, text = shard.process.returncode, shard.text()
            if code not in (0, NO_TESTS):
                failed.append(shard)
                print(_RULE.sub(lambda rule: rule[1] * 10, text), flush=True)
            last = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
            took = time.monotonic() - shard.started
            print(
                f"process {shard.number + 1} of {len(shards)}: exit code {code} after {took:.0f} s: {last}", flush=True
            )
    return failed


def stop(shards: list[Shard]) -> None:
    for shard in shards:
        if shard.process.poll() is None:
            shard.process.send_signal(signal.SIGINT)
    for shard in shards:
        shard.process.wait()


def main(arguments: list[str]) -> int:
    started = time.monotonic()
    device = os.environ.get("STOKER_TEST_DEVICE") or "cuda"
    try:
        import pytest  # noqa: F401
    except ImportError:
        return refuse(f"{sys.executable} has no pytest: name a Python that has it and torch: PYTHON=/path/to/python3")
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        return refuse(f"{sys.executable} lacks {', '.join(missing)}, which '.[train]' installs")
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    if probe.returncode:
        return refuse(f"{sys.executable} can't import torch: name a Python that can: PYTHON=/path/to/python3")
    version, gpu = probe.stdout.split("\n")[:2]
    if device == "cuda" and not gpu:
        return refuse(
            f"torch {version} sees no GPU: run it on a machine with one, or set STOKER_TEST_DEVICE=cpu to run the same"
            " tests on the CPU"
        )
    count = processes(device == "cuda")
    shown = gpu if device == "cuda" else "the CPU"
    print(f"gate: {commit()}, torch {version}, {shown}, {count} processes", flush=True)
    shards = [start(number, count, device, arguments) for number in range(count)]
    try:
        failed = wait(shards)
    except KeyboardInterrupt:
        stop(shards)
        return 130
    finally:
        stop(shards)
    counts, skipped, slow = Counter[str](), Counter[str](), list[tuple[float, str]]()
    for shard in shards:
        text = shard.text()
        counts.update({kind: int(number) for number, kind in _COUNT.findall(text.rstrip().rpartition("\n")[2])})
        slow += [(float(seconds), test) for seconds, test in _SLOW.findall(text)]
        for number, file, reason in _SKIPPED.findall(text):
            skipped[f"{file}: {reason}"] += int(number)
    for reason, number in sorted(skipped.items()):
        print(f"skipped {number}: {reason}")
    for seconds, test in sorted(slow, reverse=True)[:5]:
        print(f"{seconds:6.1f} s: {test}")
    total = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    passed = not failed and counts["passed"] > 0
    print(
        f"gate: {'passed' if passed else 'FAILED'} on {shown} in {time.monotonic() - started:.0f} s"
        f" ({total or 'no test ran'}) at {commit()}"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
