"""`kill -9` of the launcher, again and again: how many processes of the run are left one second later, and when the last one was gone.

    python benchmarks/kill9.py [--times 20] [--ranks 2]

Each rank has two forked and two spawned data-loader workers that ignore SIGTERM, a `setsid` helper and a daemon that forked twice.
torchrun beside it: what it leaves is counted too, and then ended by pid and start time.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TAG = "KILL9_BENCH"
FAMILY = """
import multiprocessing, os, signal, subprocess, sys, time
def work():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
if __name__ == "__main__":
    for context in ("fork", "spawn"):
        for _ in range(2):
            multiprocessing.get_context(context).Process(target=work, daemon=True).start()
    subprocess.Popen(["setsid", "sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    subprocess.Popen(["sh", "-c", "(setsid sleep 600 >/dev/null 2>&1 &) &"]).wait()
    open(os.path.join(sys.argv[1], "ready-" + os.environ["RANK"]), "w").close()
    time.sleep(600)
"""


def family(tag: str) -> dict[int, str]:
    """pid -> start ticks of every living process with this tag in its environment, the launcher's own aside."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if f"{TAG}={tag}".encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
                    if fields[0] != "Z":
                        found[int(entry)] = fields[19]
            except OSError:
                continue
    return found


def once(command: list[str], ranks: int) -> tuple[int, float, int]:
    """(left after 1 s, seconds until the last was gone or -1, processes before)."""
    tag = f"{os.getpid()}-{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "family.py")
        script.write_text(FAMILY)
        env = {**os.environ, TAG: tag, "CUDA_VISIBLE_DEVICES": ""}
        launcher = subprocess.Popen(
            [*command, str(script), folder], cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while not all(Path(folder, f"ready-{rank}").exists() for rank in range(ranks)):
            if time.monotonic() > deadline:
                raise SystemExit(f"{command} did not start")
            time.sleep(0.02)
        before = len(family(tag))
        launcher.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        launcher.wait()
        gone = -1.0
        while time.monotonic() - killed < 1.0:
            if not family(tag):
                gone = time.monotonic() - killed
                break
            time.sleep(0.01)
        left = family(tag)
        for pid, start in left.items():
            if family(tag).get(pid) == start:
                os.kill(pid, signal.SIGKILL)
        return len(left), gone, before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    told = parser.parse_args()
    ways = {
        "stoker": [sys.executable, "-m", "stoker", "run", "--nproc-per-node", str(told.ranks)],
        "torchrun": [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(told.ranks),
        ],
    }
    print(
        "| launcher | kills | processes before | left after 1 s (sum) | all gone after, median (max)"
        " |\n|---|---|---|---|---|"
    )
    for name, command in ways.items():
        times = told.times if name == "stoker" else min(told.times, 3)
        results = [once(command, told.ranks) for _ in range(times)]
        gone = [seconds for _, seconds, _ in results if seconds >= 0]
        when = f"{statistics.median(gone):.2f} s ({max(gone):.2f} s)" if len(gone) == times else "not within 1 s"
        print(f"| {name} | {times} | {results[0][2]} | {sum(left for left, _, _ in results)} | {when} |", flush=True)


if __name__ == "__main__":
    main()
