"""A close look at ranks that may be stuck or slow: their states, stacks, workers, collectives and cards. In a forked child.

The child may block (a sick kernel, a dead socket) and may be killed; the agent goes on. It only looks: py-spy reads memory without
stopping its target; where it is missing or not allowed, faulthandler is asked by a signal, and only a process that catches it.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from stoker.contract import collectives, names
from stoker.control.agent import kernel
from stoker.control.agent.memory import children
from stoker.control.agent.spawn import Rank
from stoker.control.machine import processes, syscalls

DEADLINE_S = 6.0
SPY_S = 2.0
ASK_S = 1.0
GAP_S = 0.4
FRAMES = 60  # per thread
THREADS = 24
WORKERS = 16


class Inspection:
    """Started by an order {"ask", "ranks", "samples", "gap", "timings"}; its answer is JSON: rank -> what was seen."""

    def __init__(self, order: dict[str, Any], ranks: list[Rank]) -> None:
        self.ask = order["ask"]
        self._parts: list[bytes] = []
        self.handle, write = os.pipe()
        os.set_blocking(self.handle, False)
        try:
            self._pid = os.fork()
        except OSError:
            os.close(self.handle)
            os.close(write)
            raise
        if self._pid == 0:
            _in_child(order, ranks, write)
        os.close(write)

    def read(self) -> bool:
        """True when the answer is complete."""
        try:
            data = os.read(self.handle, 1 << 18)
        except BlockingIOError:
            return False
        if data:
            self._parts.append(data)
            return False
        os.close(self.handle)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)  # its pipe is closed by its end
        return True

    def answer(self) -> bytes:
        return b"".join(self._parts) or b"{}"


def _in_child(order: dict[str, Any], ranks: list[Rank], write: int) -> None:
    """Never returns."""
    try:
        import json
        import signal

        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.dup2(write, 3)
        os.closerange(4, 4096)  # the protocol's, the guardian's and the ranks' ends: their closing must mean what it means
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.alarm(int(DEADLINE_S * 3))
        text = json.dumps(inspect(order, ranks)).encode()
        while text:
            text = text[os.write(3, text) :]
    except BaseException as problem:
        os.write(2, f"stoker: an inspection failed: {type(problem).__name__}: {problem}\n".encode())
    os._exit(0)


def inspect(order: dict[str, Any], ranks: list[Rank]) -> dict[str, Any]:
    if order.get("timings"):
        return {str(rank.rank): {"timings": _timings(rank)} for rank in ranks}
    samples, gap = int(order.get("samples", 2)), float(order.get("gap", GAP_S))
    spy, loops = _Spy(), _Loops()
    found = {rank.rank: _Look(rank, spy, loops) for rank in ranks}
    for look in found.values():
        look.begin()
    deadline = spy.deadline = time.monotonic() + DEADLINE_S
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

    def __init__(self, rank: Rank, spy: _Spy, loops: _Loops) -> None:
        self.rank = rank
        self._spy = spy
        self._loops = loops
        self._samples: list[list[dict[str, Any]]] = []
        self._workers: dict[int, dict[str, Any]] = {}

    def begin(self) -> None:
        self._since = time.monotonic()
        self._first = self._meter(self.rank.pid)
        before = processes.process(self.rank.pid)
        self._state = before.state if before else "Z"
        self._below = children(self.rank.pid)[:WORKERS]
        self._below_first = {pid: processes.cpu_seconds(pid) or 0.0 for pid in self._below}
        self._asked_from = _size(self.rank.files["asked"])
        one = processes.process(self.rank.pid)
        stopped = one is not None and one.state in "Tt"
        self._collectives, self._no_collectives = ([], "its process is stopped") if stopped else _flight_recorder(self.rank.files["server"])

    def sample(self) -> None:
        threads = self._spy.stacks(self.rank.pid, self.rank.files["asked"])
        for thread in threads:
            if thread["main"]:
                thread["frames"] = [[*frame, self._loops.around(frame[1], frame[2])] for frame in thread["frames"]]
        self._samples.append(threads)

    def end(self) -> dict[str, Any]:
        one = processes.process(self.rank.pid)
        took = max(time.monotonic() - self._since, 0.01)
        last = self._meter(self.rank.pid)
        share = {key: round((last[key] - value) / took, 3) for key, value in self._first.items() if key != "swap"}
        return {
            "pid": self.rank.pid, "state": _steady(self._state, one.state if one else "Z"), "took": round(took, 2),
            "cpu": share["cpu"], "main_cpu": share["main_cpu"],
            "waiting_for_core": share["delay"], "faults": share["faults"], "moved": share["moved"], "swap": last["swap"],
            "wchan": _wchan(self.rank.pid), "syscall": _syscall(self.rank.pid), "cpus": len(os.sched_getaffinity(self.rank.pid)) if one else 0,
            "samples": self._samples, "stacks_by": self._spy.how, "groups": self._collectives, "no_groups": self._no_collectives,
            "workers": [self._worker(pid, took) for pid in self._below if processes.process(pid)], **self._message(),
        }  # fmt: skip

    def _message(self) -> dict[str, Any]:
        """Where it is in a send or a receive, and with whom: gloo's recorder does not know these."""
        frames: list[Any] = next((thread["frames"] for thread in (self._samples[-1] if self._samples else ()) if thread["main"]), [])
        for name, file, *_ in frames:
            if name in ("recv", "send") and file.endswith("distributed_c10d.py"):
                return {"message": name, "peer": self._spy.argument(self.rank.pid, name, ("src", "dst"))}
        return {}

    def _worker(self, pid: int, took: float) -> dict[str, Any]:
        one = processes.process(pid)
        cpu = (processes.cpu_seconds(pid) or 0.0) - self._below_first[pid]
        return {
            "pid": pid, "name": one.name if one else "?", "state": one.state if one else "Z", "cpu": round(cpu / took, 3), "wchan": _wchan(pid),
            "syscall": _syscall(pid), "command": (processes.command(pid) or "")[:120],
            "threads": self._spy.stacks(pid, self.rank.files["asked"]) if _is_python(pid) else [],
        }  # fmt: skip

    @staticmethod
    def _meter(pid: int) -> dict[str, float]:
        faults, delay, swap = 0, 0.0, 0
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                faults = int(file.read().rpartition(b")")[2].split()[9])  # major ones: they went to the disk
            with open(f"/proc/{pid}/schedstat", "rb") as file:
                delay = int(file.read().split()[1]) / 1e9  # the main thread's, on the run queue and not running
            with open(f"/proc/{pid}/status", "rb") as file:
                swap = sum(int(line.split()[1]) * 1024 for line in file if line.startswith(b"VmSwap:"))
        except (OSError, IndexError, ValueError):
            pass  # gone, or a kernel without it: what was read counts
        return {
            "cpu": processes.cpu_seconds(pid) or 0.0, "main_cpu": processes.cpu_seconds(pid, pid) or 0.0, "delay": delay, "faults": faults,
            "moved": processes.bytes_moved(pid) or 0, "swap": swap,
        }  # fmt: skip


class _Spy:
    """Stacks by py-spy where it is installed and allowed, else by faulthandler."""

    def __init__(self) -> None:
        import shutil
        import sys

        beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
        found = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
        self._program = os.environ.get(names.PY_SPY, found)
        self.how = "py-spy" if self._program else "faulthandler (py-spy is not installed)"
        self.deadline = time.monotonic() + DEADLINE_S

    def stacks(self, pid: int, asked: str) -> list[dict[str, Any]]:
        """Nothing once the inspection's time is over: what was seen by then is the answer."""
        if time.monotonic() > self.deadline:
            return []
        if self._program:
            found = self._by_py_spy(pid)
            if found:
                return found
        return _by_faulthandler(pid, asked)

    def argument(self, pid: int, function: str, names_: tuple[str, ...]) -> int | None:
        """A whole number that was passed to a function on the main thread's stack."""
        if not self._program:
            return None
        import json
        import subprocess

        try:
            command = [self._program, "dump", "--json", "--locals", "--nonblocking", "--pid", str(pid)]
            done = subprocess.run(command, capture_output=True, timeout=SPY_S, check=True)
            threads = json.loads(done.stdout)
        except (subprocess.SubprocessError, ValueError):
            return None
        for thread in threads:
            for frame in thread.get("frames") or () if thread.get("os_thread_id") == pid else ():
                for local in frame.get("locals") or () if frame.get("name") == function else ():
                    if local.get("name") in names_ and str(local.get("repr")).isdigit():
                        return int(local["repr"])
        return None

    def _by_py_spy(self, pid: int) -> list[dict[str, Any]]:
        import json
        import subprocess

        assert self._program is not None
        try:
            done = subprocess.run([self._program, "dump", "--json", "--nonblocking", "--pid", str(pid)], capture_output=True, timeout=SPY_S, check=False)
        except (subprocess.TimeoutExpired, OSError) as problem:
            self._program = None
            self.how = f"faulthandler (py-spy: {'no answer' if isinstance(problem, subprocess.TimeoutExpired) else problem})"
            return []
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace")
            if "ermission" in said:  # PermissionDenied, or EPERM's text
                self._program = None
                self.how = "faulthandler (py-spy may not read the ranks: it needs CAP_SYS_PTRACE here)"
            return []
        try:
            return [_thread(one) for one in json.loads(done.stdout)][:THREADS]
        except ValueError:
            return []


class _Loops:
    """Which loops a line of the script is in: tells a rank that has left the loop from one that does something else in it."""

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[int, int]]] = {}

    def around(self, file: str, line: int) -> list[int]:
        """The first lines of the loops around this line, outermost first. Nothing for library code or a file that can't be read."""
        if "/lib/python" in file or not file.endswith(".py"):
            return []
        if file not in self._known:
            self._known[file] = self._parse(file)
        return [first for first, last in self._known[file] if first < line <= last]

    @staticmethod
    def _parse(file: str) -> list[tuple[int, int]]:
        import ast

        try:
            with open(file, encoding="utf-8") as source:
                tree = ast.parse(source.read(1 << 20))
        except (OSError, SyntaxError, ValueError):
            return []
        return sorted((node.lineno, node.end_lineno or node.lineno) for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While, ast.AsyncFor)))


def _thread(one: dict[str, Any]) -> dict[str, Any]:
    frames = [[frame.get("name") or "?", frame.get("filename") or "?", frame.get("line") or 0] for frame in one.get("frames") or ()]
    return {
        "name": one.get("thread_name") or "", "main": one.get("os_thread_id") == one.get("pid"), "active": bool(one.get("active")),
        "gil": bool(one.get("owns_gil")), "frames": frames[:FRAMES],
    }  # fmt: skip


def _by_faulthandler(pid: int, path: str) -> list[dict[str, Any]]:
    """Asks by signal, if the process catches it and is not stopped. What comes is text: threads of `File "x.py", line 3 in work`."""
    one = processes.process(pid)
    if one is None or one.state in "TtZ" or not _catches(pid, names.STACK_SIGNAL) or not _has_open(pid, path):
        return []
    before = _size(path)
    if not kernel.send(one, names.STACK_SIGNAL):
        return []
    deadline = time.monotonic() + ASK_S
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = _size(path)
        if now > before and now == size:
            break
        size = now
    try:
        with open(path, "rb") as file:
            file.seek(before)
            text = file.read(1 << 18).decode("utf-8", "replace")
    except OSError:
        return []
    return _threads_of(text)


def _threads_of(text: str) -> list[dict[str, Any]]:
    threads: list[dict[str, Any]] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            threads.append({"name": "", "main": False, "active": False, "gil": False, "frames": []})
        elif line.startswith('  File "') and threads:
            file, _, rest = line[len('  File "') :].rpartition('", line ')
            number, _, name = rest.partition(" in ")
            threads[-1]["frames"].append([name, file, int(number) if number.isdigit() else 0])
    if threads:
        threads[-1]["main"] = True  # faulthandler writes the newest thread first
    return threads[:THREADS] if len(threads) <= THREADS else [*threads[: THREADS - 1], threads[-1]]


def _catches(pid: int, signum: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    except OSError:
        return False
    return False


def _has_open(pid: int, path: str) -> bool:
    """A script that closed it may have a file of its own under that number by now: nothing is written into that."""
    folder = f"/proc/{pid}/fd"
    try:
        return any(os.readlink(f"{folder}/{fd}") == path for fd in os.listdir(folder))
    except OSError:
        return False


def _steady(before: str, after: str) -> str:
    """D for a moment is a disk at work: it counts only if it was so twice."""
    return "S" if after == "D" and before != "D" else after


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


def _wchan(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
            return file.read().strip().strip("0")
    except OSError:
        return ""


def _syscall(pid: int) -> str:
    """The system call its main thread is in, by name; "running" where it is in none."""
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii", errors="replace") as file:
            word = file.read().split(" ")[0].strip()
    except OSError:
        return ""
    return syscalls.NAMES.get(os.uname().machine, {}).get(int(word), f"system call {word}") if word.lstrip("-").isdigit() else word


def _flight_recorder(path: str) -> tuple[list[dict[str, Any]], str]:
    """(the digest of its collectives, why there is none)."""
    trace, why = _ask_server(path)
    return (collectives.digest(trace), "") if trace is not None else ([], why)


def _timings(rank: Rank) -> list[list[Any]]:
    """[group, number, when it was entered] of its newest collectives: who comes late, and how late."""
    trace, _ = _ask_server(rank.files["server"])
    found: dict[str, list[list[Any]]] = {}
    for entry in (trace or {}).get("entries") or []:
        group, seq = (entry.get("process_group") or ["?"])[0], entry.get("collective_seq_id") or 0
        mine = found.setdefault(group, [])
        if mine and seq < mine[-1][1]:
            mine.clear()  # made anew under its old name
        if not entry.get("is_p2p"):
            mine.append([group, seq, entry.get("time_created_ns") or 0, str(entry.get("profiling_name", "")).partition(":")[0]])
    return sorted((entry for entries in found.values() for entry in entries), key=lambda entry: entry[2])[-400:]


def _ask_server(path: str) -> tuple[dict[str, Any] | None, str]:
    if not os.path.exists(path):
        return None, "no worker server in this rank"
    answers = [_ask_handler(path, name) for name in collectives.HANDLERS]
    traces = [trace for trace, _ in answers if trace is not None]
    return (collectives.joined(traces), "") if traces else (None, answers[0][1])


def _ask_handler(path: str, name: str) -> tuple[dict[str, Any] | None, str]:
    import json
    import socket

    parts: list[bytes] = []
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(ASK_S)
        connection.connect(path)
        connection.sendall(f"POST /handler/{name} HTTP/1.1\r\nHost: rank\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
        while data := connection.recv(1 << 18):
            parts.append(data)
    except OSError as problem:
        return None, f"the worker server does not answer: {problem}"
    finally:
        connection.close()
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        return None, f"the worker server says {head.partition(chr(13).encode())[0].decode('ascii', 'replace')}"
    try:
        found = json.loads(body)
    except ValueError as problem:
        return None, f"the flight recorder's answer can't be read: {problem}"
    return (found, "") if isinstance(found, dict) else (None, "the flight recorder's answer is no trace")


_ASK_NVML = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
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
        done = subprocess.run([sys.executable, "-I", "-S", "-c", _ASK_NVML, json.dumps(sys.path), *set(uuids)], capture_output=True, timeout=SPY_S, check=True)
        found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError):
        return {}
    return found


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
