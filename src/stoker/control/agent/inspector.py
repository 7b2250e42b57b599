"""What the agent has children look at: ranks that may be stuck, and questions about this host, the probes.
They may block; the agent goes on.

A probe is a plain function in a file of PROBES: what it returns is its answer. One that has something to say before its
end yields that: those words are marked "more". It may also be told more while it runs: JSON lines on its standard input.
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

from stoker.contract import process, protocol
from stoker.contract.process import find_process, read_kernel_file, read_status, send_signal
from stoker.contract.text import escape
from stoker.control.agent import prctl
from stoker.control.agent.relay import Relay
from stoker.control.agent.spawn import RankProcess
from stoker.control.agent.stack_dump import (
    CALLS,
    LOOK_S,
    SPY_S,
    StackDumper,
    newest_calls,
    read_flight_recorder,
    timings,
    with_source,
)
from stoker.control.agent.sweep import Sweeper
from stoker.control.agent.vitals import children
from stoker.control.machine import blocking, procfs

LIMIT_S = 60.0  # where the order does not say
_MORE, _LAST = b"+", b"="
_NOTHING = {"error": "it ended without an answer: it took too long, or was ended"}


class Inspector:
    def __init__(self, selector: selectors.BaseSelector, relay: Relay, sweeper: Sweeper) -> None:
        self._selector = selector
        self._relay = relay
        self._sweeper = sweeper
        self._children: dict[int, Child] = {}

    def inspect(self, order: protocol.Message, ranks: Iterable[RankProcess]) -> None:
        """Stacks and the flight recorder may take seconds, and a sick kernel may keep whoever asks. One at a time."""
        asked = [rank for rank in ranks if order.get("ranks") is None or rank.rank in order["ranks"]]
        answer: protocol.Message = {"is": "inspection", "ask": order["ask"]}
        if asked and not any(child.answer["is"] == "inspection" for child in self._children.values()):
            self._begin(Child(answer, {}, LOOK_S * 3, lambda: iter([(_LAST, inspect(order, asked))])))
        else:
            self._relay.say(answer, b"{}\n")

    def probe(self, order: protocol.Message) -> None:
        answer: protocol.Message = {"is": "probe", "ask": order["ask"], "what": order["what"]}
        seconds = float(order.get("seconds", LIMIT_S))
        self._begin(Child(answer, _NOTHING, seconds, lambda: _answers(order["what"], order.get("args") or {})))

    def _begin(self, child: Child) -> None:
        self._children[child.handle] = child
        self._sweeper.spare.add(child.pid)  # ends by itself, and is nothing the ranks left behind
        self._selector.register(child.handle, selectors.EVENT_READ, "look")

    def tell(self, order: protocol.Message) -> None:
        """To a probe that runs: a word, or its end."""
        for child in self._children.values():
            if child.answer["ask"] == order["ask"]:
                child.tell(order["word"]) if order["do"] == "tell" else child.end()

    def read(self, handle: int) -> None:
        child = self._children[handle]
        for message, payload in child.read():
            if "more" not in message:
                self._selector.unregister(handle)
                self._sweeper.spare.discard(child.pid)
                del self._children[handle]
            self._relay.say(message, payload)


class Child:
    """Forked. `work` gives its words, marked _MORE, and last its answer; `nothing` is sent where there is none."""

    def __init__(
        self,
        answer: protocol.Message,
        nothing: dict[str, Any],
        seconds: float,
        work: Callable[[], Iterator[tuple[bytes, Any]]],
    ) -> None:
        self.answer = answer
        self._payload = json.dumps(nothing).encode()
        self._words = b""
        self.handle, write = os.pipe()
        told, self._tell = os.pipe()
        os.set_blocking(self.handle, False)
        os.set_blocking(self._tell, False)
        agent = os.getpid()
        try:
            self.pid = os.fork()
        except OSError:
            for handle in (self.handle, write, told, self._tell):
                os.close(handle)
            raise
        if self.pid == 0:
            self._run(work, told, write, agent, seconds)
        os.close(write)
        os.close(told)
        self._me = find_process(self.pid)

    def _run(self, work: Callable[[], Any], told: int, write: int, agent: int, seconds: float) -> None:
        """In the child. Never returns."""
        try:
            prctl.die_with_parent(agent)
            os.dup2(told, 0)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(write, 3)
            # The protocol's, the guardian's and the ranks' ends: their closing must mean what it means.
            os.closerange(4, 4096)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            for mark, word in work():
                text = mark + json.dumps(word).encode() + b"\n"
                while text:
                    text = text[os.write(3, text) :]
        except BaseException as problem:
            what = f"a probe ({self.answer['what']})" if "what" in self.answer else "an inspection"
            line = escape(f"stoker: {what} failed: {type(problem).__name__}: {problem}")
            os.write(2, line.encode() + b"\n")
        os._exit(0)

    def read(self) -> Iterator[tuple[protocol.Message, bytes]]:
        """What to tell; the one without "more" is the last, and `handle` is closed by then."""
        try:
            data = os.read(self.handle, 1 << 18)
        except BlockingIOError:
            return
        *lines, self._words = (self._words + data).split(b"\n")
        for line in lines:
            if line.startswith(_MORE):
                yield {**self.answer, "more": True}, line[1:] + b"\n"
            else:
                self._payload = line[1:]
        if not data:
            os.close(self.handle)
            os.close(self._tell)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)  # its pipe is closed by its end
            yield self.answer, self._payload + b"\n"  # some transports pass whole lines on only

    def tell(self, word: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended: its answer is on its way
            os.write(self._tell, json.dumps(word).encode() + b"\n")

    def end(self) -> None:
        """Its answer is not wanted any more. Its pipe closes, and that is told like any other end."""
        if self._me is not None:
            send_signal(self._me, signal.SIGKILL)


def _answers(what: str, args: dict[str, Any]) -> Iterator[tuple[bytes, Any]]:
    """What can go wrong on a host is an answer too: {"error": ...}."""
    if what not in PROBES:
        yield _LAST, {"error": f"this agent has no probe {what!r}"}
        return
    try:
        found = find(what)(**args)
        if isinstance(found, Iterator):
            for word in found:
                yield _MORE, word
            found = {}
    except Exception as problem:
        found = {"error": f"{type(problem).__name__}: {problem}" if not isinstance(problem, OSError) else str(problem)}
    yield _LAST, found


# ---- a close look at ranks that may be stuck or slow: states, stacks, workers, collectives, cards. It only looks ----

SAMPLES = 4  # stacks of a rank, over about half a second
GAP_S = 0.14  # between two of them, on average: uneven gaps don't keep time with a loop
WORKERS = 16


def inspect(order: dict[str, Any], ranks: list[RankProcess]) -> dict[str, Any]:
    """`order`: {"ranks", "samples", "gap", "timings"}. Rank -> what was seen."""
    if order.get("timings"):
        return {str(rank.rank): {"timings": timings(rank.files["server"])} for rank in ranks}
    samples, gap = int(order.get("samples", SAMPLES)), float(order.get("gap", GAP_S))
    spy = StackDumper()
    files = blocking.OpenFiles()
    rank_of = {pid: (rank.rank, pid == rank.pid) for rank in ranks for pid in (*children(rank.pid), rank.pid)}
    found = {rank.rank: _Look(rank, spy, files, rank_of) for rank in ranks}
    for look in found.values():
        look.begin()
    deadline = spy.deadline = time.monotonic() + LOOK_S
    for n in range(samples):
        if n and time.monotonic() < deadline:
            time.sleep(random.uniform(0.4, 1.6) * gap)
        for look in found.values():
            if n == 0 or time.monotonic() < deadline:
                look.sample()
    cards = _cards([rank.gpu for rank in ranks if rank.gpu])
    return {str(number): {**look.end(), "gpu": cards.get(look.rank.gpu or "")} for number, look in found.items()}


class _Look:
    """One rank, over the time of an inspection."""

    def __init__(self, rank: RankProcess, spy: StackDumper, files: blocking.OpenFiles, rank_of: blocking.RankOf) -> None:
        self.rank = rank
        self._spy = spy
        self._files = files
        self._rank_of = rank_of
        self._samples: list[list[dict[str, Any]]] = []

    def begin(self) -> None:
        self._since = time.monotonic()
        self._first = self._meter(self.rank.pid)
        before = process.find_process(self.rank.pid)
        self._state = before.state if before else "Z"
        self._children = children(self.rank.pid)
        awaited = blocking.awaited_child(self.rank.pid)
        below = sorted(self._children, key=lambda pid: pid != awaited)  # the one that the rank waits for first
        self._below = below[:WORKERS]
        self._below_first = {pid: procfs.cpu_seconds(pid) or 0.0 for pid in self._below}
        self._groups: list[dict[str, Any]] = []
        self._no_groups = "its process is stopped"
        if self._state not in "Tt":
            self._groups, self._no_groups = read_flight_recorder(self.rank.files["server"])

    def sample(self) -> None:
        threads = self._spy.stacks(self.rank.pid, self.rank.files["asked"])
        for thread in threads:
            if thread["main"]:
                thread["frames"] = [with_source(frame) for frame in thread["frames"]]
        self._samples.append(threads)

    def end(self) -> dict[str, Any]:
        one = process.find_process(self.rank.pid)
        took = max(time.monotonic() - self._since, 0.01)
        last = self._meter(self.rank.pid)
        share = {key: round((last[key] - value) / took, 5) for key, value in self._first.items() if key != "swap"}
        return {
            **share,
            "pid": self.rank.pid,
            "state": _steady(self._state, one.state if one else "Z"),
            "took": round(took, 2),
            "swap": last["swap"],
            **blocking.read_wait(self.rank.pid, self._files, self._rank_of),
            **self._counters(),
            "cpus": len(os.sched_getaffinity(self.rank.pid)) if one else 0,
            "samples": self._samples,
            "stacks_by": self._spy.how,
            "stacks_unseen": "" if any(self._samples) else self._spy.problems.get(self.rank.pid, ""),
            "groups": self._groups,
            "no_groups": self._no_groups,
            "calls": newest_calls(self.rank.calls(CALLS)),
            "children": children(self.rank.pid),
            "children_before": self._children,
            "workers": [self._worker(pid, took) for pid in self._below if process.find_process(pid)],
        }

    def _counters(self) -> dict[str, int]:
        """Return what the rank has read, written and touched so far. What faulthandler wrote for us doesn't count."""
        pid, ours = self.rank.pid, 0
        with contextlib.suppress(OSError):
            ours = os.path.getsize(self.rank.files["asked"])
        return {
            "main_bytes": (procfs.bytes_moved(pid, pid) or 0) - ours,
            "all_bytes": (procfs.bytes_moved(pid) or 0) - ours,
            "main_faults": procfs.page_faults(pid, pid),
            "all_faults": procfs.page_faults(pid),
        }

    def _worker(self, pid: int, took: float) -> dict[str, Any]:
        one = process.find_process(pid)
        cpu = (procfs.cpu_seconds(pid) or 0.0) - self._below_first[pid]
        return {
            "pid": pid,
            "parent": one.parent if one else 0,
            "name": one.name if one else "?",
            "state": one.state if one else "Z",
            "cpu": round(cpu / took, 3),
            "moved": procfs.bytes_moved(pid) or 0,
            "faults": procfs.page_faults(pid),
            **blocking.read_wait(pid, self._files, self._rank_of),
            "command": (procfs.command_line(pid) or "")[:120],
            "threads": self._spy.stacks(pid, self.rank.files["asked"]) if _is_python(pid) else [],
        }

    @staticmethod
    def _meter(pid: int) -> dict[str, float]:
        # None where it is gone, or the kernel has none.
        faults = (
            read_kernel_file(f"/proc/{pid}/stat").rpartition(")")[2].split()[9:10]
        )  # major ones: they went to the disk
        ran, delayed = procfs.main_thread_seconds(pid)
        return {
            "cpu": procfs.cpu_seconds(pid) or 0.0,
            "main_cpu": ran,
            "waiting_for_core": delayed,
            "faults": sum(map(int, faults)),
            "moved": procfs.bytes_moved(pid) or 0,
            "swap": int(read_status(pid, "VmSwap:") or 0) * 1024,
        }


def _steady(before: str, after: str) -> str:
    """D for a moment is a disk at work: it counts only if it was so twice."""
    return "S" if after == "D" and before != "D" else after


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


_ASK_NVML = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from stoker.control.machine.nvml import Nvml
nvml = Nvml()
nvml.gpus()
print(json.dumps(nvml.work(sys.argv[2:])))
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


# ---- the probes. Adding one: a file with a function of the probe's name, and its line here ----

# name -> the file of this folder it is in; imported when asked for, in the forked child
PROBES = {
    **dict.fromkeys(("builds", "clock", "examine", "names", "setup"), "probe_builds"),
    **dict.fromkeys(("files", "ready"), "probe_ready"),
    "net": "probe_net",
    "route": "probe_route",
    "torch": "probe_torch",
}


def find(name: str) -> Callable[..., Any]:
    from importlib import import_module  # in the child: the agent itself does without

    found: Callable[..., Any] = getattr(import_module(f"stoker.control.agent.{PROBES[name]}"), name)
    return found
