"""Probe of the host's own torch: which build it is, and how fast it all-reduces with the other hosts.

One process per host imports torch and waits for orders. Each measurement runs in a fork of it, because NCCL reads its
environment variables only once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from stoker.contract.process import NOT_FROM_HERE

WORKER = r"""
import ctypes, json, os, signal, sys, time
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the probe that started it
if os.getppid() != int(sys.argv[1]): sys.exit(1)
def send(**message):
    sys.stdout.write(json.dumps(message) + "\n"); sys.stdout.flush()
began = time.perf_counter()
try:
    import torch
    import torch.distributed as dist
except Exception as problem:
    is_missing = isinstance(problem, ImportError) and problem.name == "torch"
    send(error=str(problem) if is_missing else "%s: %s" % (type(problem).__name__, problem), python=sys.version.split()[0]); sys.exit(0)
seconds = time.perf_counter() - began
try: nccl = ".".join(map(str, torch.cuda.nccl.version()))
except Exception: nccl = None
flags = getattr(getattr(torch, "_C", None), "_cuda_getArchFlags", lambda: None)() or ""
send(version=torch.__version__, cuda=torch.version.cuda, archs=flags.split(), nccl=nccl, seconds=round(seconds, 2), python=sys.version.split()[0])

def reduce(order):
    from datetime import timedelta
    os.environ.update(order["env"])
    signal.alarm(int(order["seconds"]) + 1)
    rank, world_size, limit = order["rank"], order["world"], timedelta(seconds=order["seconds"])
    if rank == 0:
        store = dist.TCPStore(order["address"], 0, world_size, True, limit, False)
        send(port=store.port)
    else:
        store = dist.TCPStore(order["address"], order["port"], world_size, False, limit)
    backend = order["backend"]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    cuda = backend == "nccl"
    if cuda: torch.cuda.set_device(0)
    device = "cuda:0" if cuda else "cpu"
    def time_all_reduce(x):
        began = time.perf_counter()
        dist.all_reduce(x)
        if cuda: torch.cuda.synchronize()
        return time.perf_counter() - began
    def slowest(seconds):  # over all hosts, so that all of them choose the same size
        t = torch.tensor([seconds], device=device, dtype=torch.float64 if not cuda else torch.float32)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return t.item()
    small = torch.ones(1 << 16, device=device)
    time_all_reduce(small)
    seconds = slowest(min(time_all_reduce(small) for _ in range(3)))
    count = 1 << 16
    while count < (1 << 26 if cuda else 1 << 23) and seconds * 2 < order["target"]:
        count, seconds = count * 2, seconds * 2
        if count >= 1 << 20: seconds = slowest(time_all_reduce(torch.ones(count, device=device)))
    x = torch.ones(count, device=device)
    time_all_reduce(x)
    times = [slowest(time_all_reduce(x)) for _ in range(order["repeats"])]
    dist.destroy_process_group()
    send(bytes=count * 4, times=times, backend=backend)

for line in sys.stdin:
    order = json.loads(line)
    if order.get("do") != "reduce": break
    child = os.fork()
    if child == 0:
        try:
            reduce(order)
        except BaseException as problem:
            send(error=("%s: %s" % (type(problem).__name__, problem)).strip().splitlines()[0][:400])
        sys.stdout.flush(); os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status:
        send(error="did not finish within %d s" % order["seconds"] if status & 0x7F == signal.SIGALRM else "it was killed by signal %d" % (status & 0x7F))
"""


def torch(python: str = "") -> Iterator[Any]:
    """Yield the build of torch, then one answer per order {"do": "reduce", ...} on stdin; rank 0 yields {"port"} first."""
    with tempfile.TemporaryFile() as stderr:
        worker = subprocess.Popen(
            [os.path.expanduser(python) or sys.executable, "-c", NOT_FROM_HERE + WORKER, str(os.getpid())],
            stdin=0,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        assert worker.stdout is not None
        has_answered = False
        for line in worker.stdout:
            if line.startswith(b"{"):  # a site's start-up code may print other lines
                has_answered = True
                yield json.loads(line)
        code = worker.wait()
        if not has_answered:
            stderr.seek(0)
            last_line = stderr.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
            yield {"error": f"its Python ended with exit code {code}" + (f": {last_line}" if last_line else "")}
