"""A close look at ranks that may be stuck or slow: their states, stacks, workers, collectives and cards. In a forked
child.

The child may block (a sick kernel, a dead socket) and may be killed; the agent goes on. It only looks.
"""

from __future__ import annotations

import os
import time
from typing import Any

from stoker.contract.process import of_kernel, status
from stoker.contract.untrusted import is_count
from stoker.control.agent.spawn import Rank
from stoker.control.agent.spy import LOOK_S, SPY_S, Spy, flight_recorder, loops_around, timings
from stoker.control.agent.vitals import children
from stoker.control.machine import processes

GAP_S = 0.4
WORKERS = 16


def inspect(order: dict[str, Any], ranks: list[Rank]) -> dict[str, Any]:
    """`order`: {"ranks", "samples", "gap", "timings"}. Rank -> what was seen."""
    if order.get("timings"):
        return {str(rank.rank): {"timings": timings(rank.files["server"])} for rank in ranks}
    samples, gap = int(order.get("samples", 2)), float(order.get("gap", GAP_S))
    spy = Spy()
    found = {rank.rank: _Look(rank, spy) for rank in ranks}
    for look in found.values():
        look.begin()
    deadline = spy.deadline = time.monotonic() + LOOK_S
    for n in range(samples):
        if n and time.monotonic() < deadline:
            time.sleep(gap)  # not waiting for anything: the distance between two samples
        for look in found.values():
            if n == 0 or time.monotonic() < deadline:
                look.sample()
    cards = _cards([rank.gpu for rank in ranks if rank.gpu])
    return {str(number): {**look.end(), "gpu": cards.get(look.rank.gpu or "")} for number, look in found.items()}


class _Look:
    """One rank, over the time of an inspection."""

    def __init__(self, rank: Rank, spy: Spy) -> None:
        self.rank = rank
        self._spy = spy
        self._samples: list[list[dict[str, Any]]] = []

    def begin(self) -> None:
        self._since = time.monotonic()
        self._first = self._meter(self.rank.pid)
        before = processes.process(self.rank.pid)
        self._state = before.state if before else "Z"
        self._below = children(self.rank.pid)[:WORKERS]
        self._below_first = {pid: processes.cpu_seconds(pid) or 0.0 for pid in self._below}
        self._groups: list[dict[str, Any]] = []
        self._no_groups = "its process is stopped"
        if self._state not in "Tt":
            self._groups, self._no_groups = flight_recorder(self.rank.files["server"])

    def sample(self) -> None:
        threads = self._spy.stacks(self.rank.pid, self.rank.files["asked"])
        for thread in threads:
            if thread["main"]:
                thread["frames"] = [[*frame, loops_around(frame[1], frame[2])] for frame in thread["frames"]]
        self._samples.append(threads)

    def end(self) -> dict[str, Any]:
        one = processes.process(self.rank.pid)
        took = max(time.monotonic() - self._since, 0.01)
        last = self._meter(self.rank.pid)
        share = {key: round((last[key] - value) / took, 3) for key, value in self._first.items() if key != "swap"}
        return {
            **share,
            "pid": self.rank.pid,
            "state": _steady(self._state, one.state if one else "Z"),
            "took": round(took, 2),
            "swap": last["swap"],
            "wchan": _wchan(self.rank.pid),
            "syscall": _syscall(self.rank.pid),
            "cpus": len(os.sched_getaffinity(self.rank.pid)) if one else 0,
            "samples": self._samples,
            "stacks_by": self._spy.how,
            "groups": self._groups,
            "no_groups": self._no_groups,
            "workers": [self._worker(pid, took) for pid in self._below if processes.process(pid)],
            **self._message(),
        }

    def _message(self) -> dict[str, Any]:
        """Where it is in a send or a receive, and with whom: gloo's recorder does not know these."""
        newest = self._samples[-1] if self._samples else []
        for name, file, *_ in next((thread["frames"] for thread in newest if thread["main"]), []):
            if name in ("recv", "send") and file.endswith("distributed_c10d.py"):
                return {"message": name, "peer": self._spy.argument(self.rank.pid, name, ("src", "dst"))}
        return {}

    def _worker(self, pid: int, took: float) -> dict[str, Any]:
        one = processes.process(pid)
        cpu = (processes.cpu_seconds(pid) or 0.0) - self._below_first[pid]
        return {
            "pid": pid,
            "name": one.name if one else "?",
            "state": one.state if one else "Z",
            "cpu": round(cpu / took, 3),
            "wchan": _wchan(pid),
            "syscall": _syscall(pid),
            "command": (processes.command(pid) or "")[:120],
            "threads": self._spy.stacks(pid, self.rank.files["asked"]) if _is_python(pid) else [],
        }

    @staticmethod
    def _meter(pid: int) -> dict[str, float]:
        # None where it is gone, or the kernel has none.
        faults = of_kernel(f"/proc/{pid}/stat").rpartition(")")[2].split()[9:10]  # major ones: they went to the disk
        delay = of_kernel(f"/proc/{pid}/schedstat").split()[1:2]  # the main thread's, on the run queue and not running
        return {
            "cpu": processes.cpu_seconds(pid) or 0.0,
            "main_cpu": processes.cpu_seconds(pid, pid) or 0.0,
            "waiting_for_core": sum(map(int, delay)) / 1e9,
            "faults": sum(map(int, faults)),
            "moved": processes.bytes_moved(pid) or 0,
            "swap": int(status(pid, "VmSwap:") or 0) * 1024,
        }


def _steady(before: str, after: str) -> str:
    """D for a moment is a disk at work: it counts only if it was so twice."""
    return "S" if after == "D" and before != "D" else after


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


def _wchan(pid: int) -> str:
    return of_kernel(f"/proc/{pid}/wchan").strip().strip("0")


def _syscall(pid: int) -> str:
    """The system call its main thread is in, by name; "running" where it is in none."""
    word = of_kernel(f"/proc/{pid}/syscall").split(" ")[0].strip()
    if not is_count(word.removeprefix("-")):
        return word
    return SYSCALLS.get(os.uname().machine, {}).get(int(word), f"system call {word}")


_ASK_NVML = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from stoker.control.machine.nvml import Nvml
nvml = Nvml()
nvml.gpus()
print(json.dumps({uuid: nvml.work(uuid) for uuid in sys.argv[2:]}))
"""


def _cards(uuids: list[str]) -> dict[str, dict[str, Any]]:
    """In a fresh process: NVML does not survive a fork, and a driver that hangs must not keep the rest of the answer."""
    if not uuids:
        return {}
    import json
    import subprocess
    import sys

    try:
        command = [sys.executable, "-I", "-S", "-c", _ASK_NVML, json.dumps(sys.path), *set(uuids)]
        done = subprocess.run(command, capture_output=True, timeout=SPY_S, check=True)
        found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError):
        return {}
    return found


SYSCALLS: dict[str, dict[int, str]] = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 23: "select", 35: "nanosleep", 42: "connect", 43: "accept", 45: "recvfrom", 47: "recvmsg", 61: "wait4", 73: "flock",
        74: "fsync", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
    },
    "aarch64": {
        63: "read", 64: "write", 72: "pselect6", 73: "ppoll", 101: "nanosleep", 203: "connect", 202: "accept", 207: "recvfrom", 212: "recvmsg", 260: "wait4",
        32: "flock", 82: "fsync", 98: "futex", 115: "clock_nanosleep", 22: "epoll_pwait", 95: "waitid", 56: "openat",
    },
}  # fmt: skip
