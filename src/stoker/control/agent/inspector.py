"""Inspects ranks and probes this host in forked children, because such work may block, and the agent must not.

A probe is a function in a file of PROBES. Its arguments come with the order, and its return value is its answer. A probe
that is a generator answers as often as it yields, in messages that are marked "more". It reads further orders as JSON
lines from its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stoker.contract import protocol
from stoker.contract.process import find_process, read_kernel_file, read_status, send_signal
from stoker.contract.text import escape
from stoker.control.agent import prctl
from stoker.control.agent.relay import Relay
from stoker.control.agent.spawn import RankProcess
from stoker.control.agent.stack_dump import (
    INSPECTION_S,
    MAX_CALLS,
    PY_SPY_S,
    StackDumper,
    add_source,
    add_source_to_calls,
    read_collective_times,
    read_flight_recorder,
)
from stoker.control.agent.sweep import Sweeper
from stoker.control.machine import blocking, procfs

# Probe -> its file in agent/probes/, which is imported when the probe is called, in the forked child.
# To add a probe: write a function of its name there, and a line here.
PROBES = {
    **dict.fromkeys(("builds", "clock", "examine", "names", "ready", "setup"), "host"),
    **dict.fromkeys(("net", "route"), "network"),
    "files": "files",
    "torch": "torch_bench",
}

LIMIT_S = 60.0  # for an order without a limit
_MORE, _LAST = b"+", b"="
_NO_ANSWER = {"error": "the probe ended without an answer: it took too long or was stopped"}


class Inspector:
    """Starts the children and sends their answers to the coordinator."""

    def __init__(self, selector: selectors.BaseSelector, relay: Relay, sweeper: Sweeper) -> None:
        self._selector = selector
        self._relay = relay
        self._sweeper = sweeper
        self._children: dict[int, InspectorChild] = {}

    def start_inspection(self, order: protocol.Message, ranks: Iterable[RankProcess]) -> None:
        """Inspect the ranks that the order names, one inspection at a time.

        Stacks and the flight recorder may take seconds, and reading from a stuck process may never end.
        """
        targets = [rank for rank in ranks if order.get("ranks") is None or rank.rank in order["ranks"]]
        header: protocol.Message = {"is": "inspection", "ask": order["ask"]}
        is_busy = any(child.header["is"] == "inspection" for child in self._children.values())
        if targets and not is_busy:
            self._add(InspectorChild(header, {}, INSPECTION_S * 3, lambda: iter([(_LAST, inspect(order, targets))])))
        else:
            self._relay.send(header, b"{}\n")

    def start_probe(self, order: protocol.Message) -> None:
        header: protocol.Message = {"is": "probe", "ask": order["ask"], "what": order["what"]}
        limit_s = float(order.get("seconds", LIMIT_S))
        arguments = order.get("args") or {}
        self._add(InspectorChild(header, _NO_ANSWER, limit_s, lambda: _run_probe(order["what"], arguments)))

    def _add(self, child: InspectorChild) -> None:
        self._children[child.fd] = child
        self._sweeper.spare.add(child.pid)  # a child of the agent, not one that the ranks left behind
        self._selector.register(child.fd, selectors.EVENT_READ, "inspector")

    def forward_order(self, order: protocol.Message) -> None:
        """Forward an order to a running probe, or kill the probe."""
        for child in self._children.values():
            if child.header["ask"] == order["ask"] and order["do"] == "tell":
                child.send(order["word"])
            elif child.header["ask"] == order["ask"]:
                child.kill()

    def read(self, fd: int) -> None:
        """Forward a child's answers to the coordinator."""
        child = self._children[fd]
        for message, payload in child.read():
            if "more" not in message:
                self._selector.unregister(fd)
                self._sweeper.spare.discard(child.pid)
                del self._children[fd]
            self._relay.send(message, payload)


class InspectorChild:
    """A forked child and the pipes to it.

    `work` yields answers marked _MORE, then the last one. `no_answer` is sent if the child ends without one.
    """

    def __init__(
        self,
        header: protocol.Message,
        no_answer: dict[str, Any],
        limit_s: float,
        work: Callable[[], Iterator[tuple[bytes, Any]]],
    ) -> None:
        self.header = header
        self._payload = json.dumps(no_answer).encode()
        self._partial = b""
        self.fd, write = os.pipe()
        stdin, self._stdin = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._stdin, False)
        agent = os.getpid()
        try:
            self.pid = os.fork()
        except OSError:
            for fd in (self.fd, write, stdin, self._stdin):
                os.close(fd)
            raise
        if self.pid == 0:
            self._run(work, stdin, write, agent, limit_s)
        os.close(write)
        os.close(stdin)
        self._process = find_process(self.pid)

    def _run(self, work: Callable[[], Any], stdin: int, write: int, agent: int, limit_s: float) -> None:
        """Do the work. Runs in the child and never returns."""
        try:
            prctl.die_with_parent(agent)
            os.dup2(stdin, 0)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(write, 3)
            # Close our copies of the protocol's, the guardian's and the ranks' ends, so that the others see them close.
            os.closerange(4, 4096)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            for mark, answer in work():
                text = mark + json.dumps(answer).encode() + b"\n"
                while text:
                    text = text[os.write(3, text) :]
        except BaseException as problem:
            task = f"a probe ({self.header['what']})" if "what" in self.header else "an inspection"
            line = escape(f"stoker: {task} failed: {type(problem).__name__}: {problem}")
            os.write(2, line.encode() + b"\n")
        os._exit(0)

    def read(self) -> Iterator[tuple[protocol.Message, bytes]]:
        """Yield the messages to send. The one without "more" is the last, and `fd` is closed by then."""
        try:
            data = os.read(self.fd, 1 << 18)
        except BlockingIOError:
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            if line.startswith(_MORE):
                yield {**self.header, "more": True}, line[1:] + b"\n"
            else:
                self._payload = line[1:]
        if not data:
            os.close(self.fd)
            os.close(self._stdin)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)  # its pipe is closed, so it is about to end
            yield self.header, self._payload + b"\n"  # with a newline, because some transports only pass whole lines

    def send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its answer will be read
            os.write(self._stdin, json.dumps(message).encode() + b"\n")

    def kill(self) -> None:
        """Kill the child, whose answer is no longer needed. Its pipe closes, and `read` reports its end as usual."""
        if self._process is not None:
            send_signal(self._process, signal.SIGKILL)


def _run_probe(name: str, arguments: dict[str, Any]) -> Iterator[tuple[bytes, Any]]:
    """Yield a probe's answers. If it fails, its last answer is {"error": ...}."""
    if name not in PROBES:
        yield _LAST, {"error": f"this agent has no probe {name!r}"}
        return
    try:
        from importlib import import_module  # the agent itself doesn't need it

        module = import_module(f"stoker.control.agent.probes.{PROBES[name]}")
        answer = getattr(module, name)(**arguments)
        if isinstance(answer, Iterator):
            for part in answer:
                yield _MORE, part
            answer = {}
    except OSError as problem:
        answer = {"error": str(problem)}
    except Exception as problem:
        answer = {"error": f"{type(problem).__name__}: {problem}"}
    yield _LAST, answer


# ---- inspection of ranks that may be stuck or slow: reads states, stacks, workers, collectives and GPUs, changes nothing ----

SAMPLES = 4  # stacks of a rank, over about half a second
GAP_S = 0.14  # mean seconds between two samples, varied at random so that they don't keep in step with a loop
MAX_WORKERS = 16


def inspect(order: dict[str, Any], ranks: list[RankProcess]) -> dict[str, Any]:
    """Inspect ranks, and return the findings by rank. `order` may have "samples", "gap" and "timings"."""
    if order.get("timings"):
        return {str(rank.rank): {"timings": read_collective_times(rank.files["server"])} for rank in ranks}
    samples, gap = int(order.get("samples", SAMPLES)), float(order.get("gap", GAP_S))
    dumper = StackDumper()
    open_files = blocking.OpenFiles()
    rank_of = {
        pid: (rank.rank, pid == rank.pid) for rank in ranks for pid in (*procfs.read_descendants(rank.pid), rank.pid)
    }
    samplers = [_RankSampler(rank, dumper, open_files, rank_of) for rank in ranks]
    for sampler in samplers:
        sampler.start()
    deadline = dumper.deadline = time.monotonic() + INSPECTION_S
    for number in range(samples):
        if number and time.monotonic() < deadline:
            time.sleep(random.uniform(0.4, 1.6) * gap)
        for sampler in samplers:
            if number == 0 or time.monotonic() < deadline:
                sampler.sample()
    gpus = _read_gpus([rank.gpu for rank in ranks if rank.gpu])
    return {
        str(sampler.rank.rank): {**sampler.finish(), "gpu": gpus.get(sampler.rank.gpu or "")} for sampler in samplers
    }


class _RankSampler:
    """Reads the state of one rank several times, and reports what changed."""

    def __init__(
        self, rank: RankProcess, dumper: StackDumper, open_files: blocking.OpenFiles, rank_of: blocking.RankOf
    ) -> None:
        self.rank = rank
        self._dumper = dumper
        self._open_files = open_files
        self._rank_of = rank_of
        self._samples: list[list[dict[str, Any]]] = []

    def start(self) -> None:
        pid = self.rank.pid
        self._started_at = time.monotonic()
        self._counters_before = _read_counters(pid)
        process = find_process(pid)
        self._state_before = process.state if process else "Z"
        self._children_before = procfs.read_descendants(pid)
        awaited = blocking.find_awaited_child(pid)
        # The child that the rank waits for comes first, and so is never cut off.
        self._workers = sorted(self._children_before, key=lambda child: child != awaited)[:MAX_WORKERS]
        self._worker_cpu_before = {child: procfs.cpu_seconds(child) or 0.0 for child in self._workers}
        self._groups: list[dict[str, Any]] = []
        self._no_groups = "its process is stopped"
        if self._state_before not in "Tt":
            self._groups, self._no_groups = read_flight_recorder(self.rank.files["server"])

    def sample(self) -> None:
        threads = self._dumper.dump_stacks(self.rank.pid, self.rank.files["asked"])
        for thread in threads:
            if thread["main"]:
                thread["frames"] = [add_source(frame) for frame in thread["frames"]]
        self._samples.append(threads)

    def finish(self) -> dict[str, Any]:
        pid = self.rank.pid
        process = find_process(pid)
        state = process.state if process else "Z"
        if state == "D" and self._state_before != "D":
            state = "S"  # a short wait for a disk: D counts only in both readings
        seconds = max(time.monotonic() - self._started_at, 0.01)
        counters = _read_counters(pid)
        rates = {
            key: round((counters[key] - before) / seconds, 5)
            for key, before in self._counters_before.items()
            if key != "swap"
        }
        dumped_bytes = 0  # bytes that faulthandler wrote for us are not the rank's
        with contextlib.suppress(OSError):
            dumped_bytes = os.path.getsize(self.rank.files["asked"])
        return {
            **rates,
            "pid": pid,
            "state": state,
            "took": round(seconds, 2),
            "swap": counters["swap"],
            **blocking.read_wait(pid, self._open_files, self._rank_of),
            "main_bytes": (procfs.bytes_moved(pid, pid) or 0) - dumped_bytes,
            "all_bytes": (procfs.bytes_moved(pid) or 0) - dumped_bytes,
            "main_faults": procfs.page_faults(pid, pid),
            "all_faults": procfs.page_faults(pid),
            "cpus": len(os.sched_getaffinity(pid)) if process else 0,
            "samples": self._samples,
            "stacks_by": self._dumper.method,
            "stacks_unseen": "" if any(self._samples) else self._dumper.problems.get(pid, ""),
            "groups": self._groups,
            "no_groups": self._no_groups,
            "calls": add_source_to_calls(self.rank.read_calls(MAX_CALLS)),
            "children": procfs.read_descendants(pid),
            "children_before": self._children_before,
            "workers": [self._inspect_worker(worker, seconds) for worker in self._workers if find_process(worker)],
        }

    def _inspect_worker(self, pid: int, seconds: float) -> dict[str, Any]:
        process = find_process(pid)
        cpu = (procfs.cpu_seconds(pid) or 0.0) - self._worker_cpu_before[pid]
        return {
            "pid": pid,
            "parent": process.parent if process else 0,
            "name": process.name if process else "?",
            "state": process.state if process else "Z",
            "cpu": round(cpu / seconds, 3),
            "moved": procfs.bytes_moved(pid) or 0,
            "faults": procfs.page_faults(pid),
            **blocking.read_wait(pid, self._open_files, self._rank_of),
            "command": (procfs.read_command_line(pid) or "")[:120],
            "threads": self._dumper.dump_stacks(pid, self.rank.files["asked"]) if _is_python(pid) else [],
        }


def _read_counters(pid: int) -> dict[str, float]:
    """Return a process's counters so far: seconds, major page faults (read from disk), bytes. 0 once it is gone."""
    major_faults = read_kernel_file(f"/proc/{pid}/stat").rpartition(")")[2].split()[9:10]
    ran, delayed = procfs.main_thread_seconds(pid)
    return {
        "cpu": procfs.cpu_seconds(pid) or 0.0,
        "main_cpu": ran,
        "waiting_for_core": delayed,
        "faults": sum(map(int, major_faults)),
        "moved": procfs.bytes_moved(pid) or 0,
        "swap": int(read_status(pid, "VmSwap:") or 0) * 1024,
    }


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


_PRINT_GPU_WORK = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from stoker.control.machine.nvml import Nvml
nvml = Nvml()
nvml.read_gpus()
print(json.dumps(nvml.read_work(sys.argv[2:])))
"""


def _read_gpus(uuids: list[str]) -> dict[str, dict[str, Any]]:
    """Return the work of these GPUs by UUID, or {} if it can't be read.

    It reads them in a new process: NVML does not survive a fork, and a driver that hangs must not delay the other findings.
    """
    if not uuids:
        return {}
    import subprocess
    import sys

    try:
        command = [sys.executable, "-I", "-S", "-c", _PRINT_GPU_WORK, json.dumps(sys.path), *set(uuids)]
        done = subprocess.run(command, capture_output=True, timeout=PY_SPY_S, check=True)
        gpus: dict[str, dict[str, Any]] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError):
        return {}
    return gpus
