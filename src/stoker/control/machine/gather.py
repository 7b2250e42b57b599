"""The gatherers: each finds out one thing, in a child of its own, so that a driver that never answers holds up nobody
but itself.

python -I -S -c BOOT <folder of stoker> <folder of nvidia-ml-py> KIND [argument]        prints one JSON object
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

from stoker.contract.shape import as_json, replace
from stoker.control.machine import facts, kernellog, ports, processes
from stoker.control.machine.observe import Observer
from stoker.control.machine.room import quick_host

BOOT = "import sys; sys.path += sys.argv[1:3]; from stoker.control.machine.gather import main; main(sys.argv[3:])"

# Runs in the Python that will run the ranks, with its site-packages; never makes a CUDA context.
TORCH = """
import json, sys, time
began = time.perf_counter()
try:
    import torch
    took = time.perf_counter() - began
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)() or ""
    try: nccl = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception: nccl = None
    print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "archs": flags.split(), "nccl": nccl, "seconds": round(took, 2)}))
except ImportError as problem:
    print(json.dumps({"error": str(problem) if problem.name == "torch" else f"{type(problem).__name__}: {problem}"}))
"""


def main(argv: list[str]) -> None:
    kind, *more = argv
    gatherers: dict[str, Any] = {"machine": _machine, "health": _health, "host": _host, "net": _net, "probe": _probe}
    json.dump(gatherers[kind](*more), sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # no interpreter shutdown with a driver's library loaded


def _machine() -> Any:
    return Observer().look().to_json()


def _probe() -> Any:
    from stoker.control.machine.cuda import probe

    return probe()


def _health() -> Any:
    nvml = Observer().nvml
    return {} if nvml is None else {uuid: as_json(one) for uuid, one in nvml.health(_kernel_xids()).items()}


def _kernel_xids() -> dict[str, list[int]]:
    """PCI address -> Xid numbers in the kernel's log, where we may read it."""
    found: dict[str, list[int]] = {}
    for line in kernellog.lines():
        one = kernellog.xid(line)
        if one is not None:
            found.setdefault(one[0], []).append(one[1])
    return found


def _host(disk: str) -> Any:
    first = {one.pid: one for one in processes.all_processes() if one.state == "D"}
    if first:
        time.sleep(0.5)  # D for a moment is disk at work; D twice in a row is stuck
    stuck = tuple(
        f"{pid} ({one.name})"
        for pid, one in first.items()
        if (now := processes.process(pid)) and now.state == "D" and now.start == one.start
    )
    return as_json(
        replace(quick_host(disk), stuck=stuck, zombies=sum(1 for one in processes.all_processes() if one.state == "Z"))
    )


def _net(port: str) -> Any:
    name = socket.gethostname()
    try:
        addresses = tuple(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}))
        error = None
    except OSError as problem:
        addresses, error = (), str(problem)
    interfaces = tuple(sorted(entry for entry in os.listdir("/sys/class/net") if entry != "lo" and _up(entry)))
    number = int(port)
    return as_json(
        facts.Net(name, addresses, interfaces, number or None, ports.listener(number) if number else None, error)
    )


def _up(interface: str) -> bool:
    try:
        with open(f"/sys/class/net/{interface}/operstate", encoding="ascii") as file:
            return file.read().strip() in ("up", "unknown")
    except OSError:
        return False
