"""Two threads of a CPU rank that wait for each other: how long they spin before they sleep, on a quiet and on a busy machine.

    python benchmarks/threads.py                     quiet, then beside two processes that only compute: 5 minutes
    python benchmarks/threads.py --shape debug --first     the quiet case on a machine that others use, too (needs root)

Every way is a rank of `stoker run`, started once; they train in turn, a slice each. A slice of the quiet case counts where other
processes took less than 8 % of a core, and is repeated otherwise; with --first it runs at real-time priority instead, before all others.
First each makes ten steps from one seed: spinning changes no loss.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
ONE, LIBRARY = "one thread", "300,000 spins (libgomp's own)"
WAYS = {
    ONE: {"OMP_NUM_THREADS": "1"},
    LIBRARY: {"GOMP_SPINCOUNT": "300000"},
    "10,000 spins": {"GOMP_SPINCOUNT": "10000"},
    "3,000 spins": {"GOMP_SPINCOUNT": "3000"},
    "2,000 spins": {"GOMP_SPINCOUNT": "2000"},
    "1,000 spins (Stoker's)": {},
    "no spin (OMP_WAIT_POLICY=passive)": {"OMP_WAIT_POLICY": "passive"},
}
OWN = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
RANK = """import os, sys, time
from multiprocessing.connection import Client
import torch
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder

depth, context, batch, vocabulary = (int(word) for word in sys.argv[2:])
torch.manual_seed(0)
shape = ModelConfig(layers=depth, dim=64 * depth, heads=depth, kv_heads=depth, head_dim=64, ff=-(-512 * depth // 192) * 64, vocab_size=vocabulary)
model = Decoder(shape, context)
model.start(seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(0, vocabulary, (batch, context))

def step():
    loss = model(tokens, tokens) / tokens.numel()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

def before_all(first):
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), os.SCHED_FIFO if first else os.SCHED_OTHER, os.sched_param(int(first)))

with Client(sys.argv[1]) as link:
    link.send((os.getpid(), torch.get_num_threads(), [step() for _ in range(10)]))
    while order := link.recv():
        seconds, first = order
        before_all(first)
        began, steps = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < seconds:
            step()
            steps += 1
        before_all(False)
        link.send(steps * tokens.numel() / took)
"""
SHAPES = {"debug": (2, 256, 2, 1024), "small": (4, 256, 8, 4096)}  # of the presets


@dataclass
class Way:
    run: subprocess.Popen[bytes]
    link: Connection
    pid: int
    threads: int
    losses: list[float]
    speeds: list[float] = field(default_factory=list)


def machine_cpu() -> float:
    """Seconds of all processes, without idle and waiting for disks."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def process_cpu(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def start(settings: dict[str, str], shape: str, folder: Path) -> Way:
    env = {name: value for name, value in os.environ.items() if name not in OWN} | settings
    env["PYTHONPATH"] = f"{SOURCE}:{os.environ.get('PYTHONPATH', '')}"
    address = folder / f"link-{len(list(folder.iterdir()))}"
    with Listener(str(address)) as listener:
        words = ["run", "--nproc-per-node", "1", "--hang-timeout", "0", "rank.py", str(address)]
        run = subprocess.Popen(
            [sys.executable, "-m", "stoker", *words, *map(str, SHAPES[shape])],
            cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        link = listener.accept()
    return Way(run, link, *link.recv())


@contextmanager
def busy(processes: int) -> Iterator[None]:
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # none outlives a benchmark that is killed
    started = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(way: Way, seconds: float, others_at_most: float | None, first: bool) -> None:
    """One slice; with a limit, of the first try in which other processes stayed below it."""
    while True:
        time.sleep(2 * seconds if first else 0.05)  # the others' turn; the way before sleeps by then
        before, began = machine_cpu() - process_cpu(way.pid), time.monotonic()
        way.link.send((seconds, first))
        speed = way.link.recv()
        others = (machine_cpu() - process_cpu(way.pid) - before) / (time.monotonic() - began)
        if others_at_most is None or others < others_at_most:
            way.speeds.append(speed)
            return
        time.sleep(0.5)


def table(ways: dict[str, Way], beside: int) -> None:
    one, library = (statistics.median(ways[name].speeds) for name in (ONE, LIBRARY))
    print(f"\nbeside {beside} processes; load {os.getloadavg()[0]:.1f}\n| | tok/s | × one thread | × 300,000 spins |")
    print("|---|---|---|---|")
    for name, way in ways.items():
        middle = statistics.median(way.speeds)
        spread = f"{min(way.speeds):,.0f} – {max(way.speeds):,.0f}"
        print(f"| {name} | {middle:,.0f} ({spread}) | {middle / one:.2f} | {middle / library:.2f} |", flush=True)
        way.speeds.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 2], help="processes that only compute")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a slice")
    parser.add_argument("--first", action="store_true", help="the quiet case at real-time priority")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rank.py").write_text(RANK)
        ways = {}
        try:
            for title, settings in WAYS.items():
                ways[title] = start(settings, options.shape, folder)
            same = len({tuple(way.losses) for way in ways.values() if way.threads > 1}) == 1
            print(
                f"{options.shape}, losses of ten steps by more than one thread: {'the same' if same else 'DIFFERENT'}"
            )
            for beside in options.beside:
                with busy(beside):
                    for _ in range(options.rounds):
                        for way in random.sample(list(ways.values()), len(ways)):
                            measure(
                                way,
                                options.seconds,
                                None if beside or options.first else 0.08,
                                options.first and not beside,
                            )
                table(ways, beside)
        finally:
            for way in ways.values():
                way.link.send(None)
                way.run.wait()


if __name__ == "__main__":
    main()
