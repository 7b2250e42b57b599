"""Python stacks of another process: by py-spy, else by faulthandler; and which loops of the source a line is in.

py-spy reads memory without stopping its target, with the GIL held too. faulthandler is asked by a signal, and only a
process that catches it and still has the file it writes to.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
import zlib
from typing import Any

from stoker.contract import env_vars, flight_recorder, process
from stoker.contract.process import send_signal
from stoker.contract.stack_traces import parse_stacks
from stoker.contract.text import escape, parse_json
from stoker.control.machine import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

SPY_S = 2.0
ASK_S = 1.0
LOOK_S = 6.0  # all stacks of one look
FRAMES = 60  # per thread
THREADS = 24
LOCKS = 32  # per thread
CALLS = 48  # newest calls of torch.distributed that are sent
CALLS_WITH_SOURCE = 8


class StackDumper:
    """Stacks by py-spy where it is installed and allowed, else by faulthandler."""

    def __init__(self) -> None:
        import shutil
        import sys

        beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
        found = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
        self._program = os.environ.get(env_vars.PY_SPY, found)
        self.how = "py-spy" if self._program else "faulthandler (py-spy is not installed)"
        self.deadline = time.monotonic() + LOOK_S
        self.problems: dict[int, str] = {}  # pid -> why its stack could not be read

    def stacks(self, pid: int, asked: str) -> list[dict[str, Any]]:
        """Nothing once the inspection's time is over: what was seen by then is the answer."""
        if time.monotonic() > self.deadline:
            self.problems.setdefault(pid, f"the inspection took longer than {LOOK_S:g} s")
            return []
        refusal = self.how.partition("(")[2].rstrip(")")
        if self._program:
            found, refusal = self._by_py_spy(pid)
            if found:
                return found
        found, problem = _by_faulthandler(pid, asked)
        if not found:
            self.problems[pid] = f"{problem}; {refusal or 'py-spy saw no Python in it'}"
        return found

    def _dump(self, pid: int, *more: str) -> subprocess.CompletedProcess[bytes]:
        import subprocess

        assert self._program is not None
        command = [self._program, "dump", "--json", *more, "--nonblocking", "--pid", str(pid)]
        return subprocess.run(command, capture_output=True, timeout=SPY_S, check=False)

    def _by_py_spy(self, pid: int) -> tuple[list[dict[str, Any]], str]:
        """Return the threads, and why there are none."""
        import subprocess

        try:
            done = self._dump(pid, "--locals")
            if done.returncode != 0:
                done = self._dump(pid)
        except (subprocess.TimeoutExpired, OSError) as problem:
            why = "no answer" if isinstance(problem, subprocess.TimeoutExpired) else problem
            self._program, self.how = None, f"faulthandler (py-spy: {why})"
            return [], f"py-spy: {why}"
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace")
            if "ermission" in said:  # PermissionDenied, or EPERM's text
                self._program = None
                refusal = "py-spy may not read the ranks: it needs CAP_SYS_PTRACE here"
                self.how = f"faulthandler ({refusal})"
                return [], refusal
            return [], f"py-spy: {escape(' '.join(said.split()), 200)}"
        try:
            return [_thread(one) for one in json.loads(done.stdout)][:THREADS], ""
        except ValueError:
            return [], "py-spy's answer can't be read"


def loops_around(file: str, line: int) -> list[int]:
    """First lines of the script's loops a line is in, outermost first; none in library code or an unreadable file. Has a
    rank left the loop, or does it do something else in it?
    """
    return [first for first, last in _loops(file) if first < line <= last]


def conditions_around(file: str, line: int) -> list[list[Any]]:
    """[first line, text] of the script's conditions on the rank that a line depends on, outermost first."""
    return [[at, text] for begin, end, at, text in _conditions(file) if begin <= line <= end]


def locks_of(frames: list[list[Any]], variables: list[dict[str, int] | None]) -> list[list[Any]]:
    """Return the locks that a thread waits for or seems to hold, by the source around its lines, innermost first.

    Each is [text, key, held, function, file, line]: `with self.lock:` is held inside of its block, and waited for at its
    first line. `variables`: for each frame the addresses of its local variables, None where they can't be read. Two
    locks with the same key are the same object; without a key only the text can be compared.
    """
    found = []
    given_up: set[str] = set()  # the locks of conditions that the thread waits on
    innermost = True  # no frame of the script is inside this one
    for (name, file, line), addresses in zip(frames, variables):  # noqa: B905  an agent's Python may be 3.9
        for first, last, text, root, use in _lock_uses(file):
            if use == "gives up" and innermost and first <= line <= last:
                given_up.add(text)
            elif first <= line <= last and (innermost or use == "holds"):
                key = ""
                if addresses is not None and root in addresses:
                    key = f"{addresses[root]:x}{text[len(root) :]}"
                elif addresses is not None and root in _module_names(file):
                    key = f"{file}:{text}"
                found.append([text, key, use == "holds", name, file, line])
        innermost = innermost and file.endswith("/threading.py")
    return [one for one in found if one[0] not in given_up][:LOCKS]


@functools.cache
def _module_names(file: str) -> frozenset[str]:
    """Return the variables that the source assigns at its top level."""
    import ast

    module = next(iter(_nodes(file)), None)
    assigned = [one for one in getattr(module, "body", ()) if isinstance(one, (ast.Assign, ast.AnnAssign))]
    names = (node.id for one in assigned for node in ast.walk(one) if isinstance(node, ast.Name))
    return frozenset(names)


@functools.cache
def _lock_uses(file: str) -> list[tuple[int, int, str, str, str]]:
    """Return (first line, last line, expression, its first name, what a thread at these lines does with the lock).

    A lock is what `with` is given without a call, what `.acquire()` is called on, and what a `finally` releases. A
    thread "waits" for it or "holds" it; in `.wait()` it "gives up" the lock of the condition.
    """
    import ast

    found = []

    def add(first: int, last: int, lock: Any, use: str) -> None:
        root = lock
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name):
            found.append((first, last, ast.unparse(lock), root.id, use))

    for node in _nodes(file):
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                lock, begins = item.context_expr, node.body[0].lineno
                add(lock.lineno, lock.end_lineno or lock.lineno, lock, "waits")
                if begins > lock.lineno:
                    add(begins, node.end_lineno or begins, lock, "holds")
        elif isinstance(node, ast.Try):
            for call in (one.value for one in node.finalbody if isinstance(one, ast.Expr)):
                if _method(call) == "release":
                    add(node.lineno, node.body[-1].end_lineno or node.lineno, call.func.value, "holds")  # type: ignore[attr-defined]
        elif _method(node) in ("acquire", "wait", "wait_for"):
            use = "waits" if node.func.attr == "acquire" else "gives up"
            add(node.lineno, node.end_lineno or node.lineno, node.func.value, use)
    return found


def _method(node: Any) -> str:
    """Return the name of the method that an expression calls; empty if it calls none."""
    import ast

    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def with_source(frame: list[Any]) -> list[Any]:
    """Return [function, file, line] with the loops and the conditions on the rank that are around that line."""
    return [*frame[:3], loops_around(frame[1], frame[2]), conditions_around(frame[1], frame[2])]


def newest_calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls (control/rank/call_log.py) with the source around the lines of the last ones."""
    for call in calls[-CALLS_WITH_SOURCE:]:
        call["frames"] = [with_source(frame) for frame in call["frames"]]
    return calls


@functools.cache
def _nodes(file: str) -> list[Any]:
    """Of the script's source; none of library code or an unreadable file."""
    import ast

    if "/lib/python" in file or not file.endswith(".py"):
        return []
    try:
        with open(file, encoding="utf-8") as source:
            return list(ast.walk(ast.parse(source.read(1 << 20))))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []


@functools.cache
def _loops(file: str) -> list[tuple[int, int]]:
    import ast

    found = [node for node in _nodes(file) if isinstance(node, (ast.For, ast.While, ast.AsyncFor))]
    return sorted((node.lineno, node.end_lineno or node.lineno) for node in found)


@functools.cache
def _conditions(file: str) -> list[tuple[int, int, int, str]]:
    """(first line, last line that depends on it, its own line, its text). Behind `if rank != 0: return` is the rest of the
    block.
    """
    import ast

    found: list[tuple[int, int, int, str]] = []
    for node in _nodes(file):
        blocks = (getattr(node, name, None) for name in ("body", "orelse", "finalbody"))
        for block in (block for block in blocks if isinstance(block, list)):
            for one in block:
                if not isinstance(one, ast.If) or not _asks_for_rank(one.test):
                    continue
                try:
                    text, last = f"if {ast.unparse(one.test)[:80]}", one.end_lineno or one.lineno
                except RecursionError:  # hundreds of terms
                    continue
                found.append((one.body[0].lineno, one.body[-1].end_lineno or last, one.lineno, text))
                if one.orelse:
                    found.append((one.orelse[0].lineno, last, one.lineno, f"else of {text}"))
                behind = block[-1].end_lineno or last
                if isinstance(one.body[-1], (ast.Return, ast.Continue, ast.Break)) and behind > last:
                    leaves = ast.unparse(one.body[-1]).split()[0]
                    found.append((last + 1, behind, one.lineno, f"{text}: {leaves}"))
    return sorted(found)


_RANK = re.compile(
    r"(^|_)rank(s?$|_)|process_index|is_(world|local)_process_zero|is_(local_)?main(_process)?|(main|master)_process|is_(master|chief)"
)


def _asks_for_rank(test: Any) -> bool:
    import ast

    for node in ast.walk(test):
        name = {ast.Name: "id", ast.Attribute: "attr", ast.Constant: "value"}.get(type(node))
        value = getattr(node, name) if name else None
        if isinstance(value, str) and _RANK.search(value.lower()):
            return True
    return False


def _thread(one: dict[str, Any]) -> dict[str, Any]:
    frames = [
        [frame.get("name") or "?", frame.get("filename") or "?", frame.get("line") or 0]
        for frame in one.get("frames") or ()
    ]
    main = one.get("os_thread_id") == one.get("pid")
    variables = [
        None if frame.get("locals") is None else {local["name"]: local["addr"] for local in frame["locals"]}
        for frame in one.get("frames") or ()
    ]
    return {
        "name": one.get("thread_name") or "",
        "main": main,
        "values": _digest_of_locals(one) if main else "",
        "active": bool(one.get("active")),
        "gil": bool(one.get("owns_gil")),
        "frames": frames[:FRAMES],
        "locks": locks_of(frames[:FRAMES], variables),
    }


def _digest_of_locals(thread: dict[str, Any]) -> str:
    """Return a digest of the local variables of all frames. It changes while a loop advances on a single line.

    Only the digest leaves this host: the values themselves may be private.
    """
    shown = [
        (local.get("name"), local.get("repr"))
        for frame in thread.get("frames") or ()
        for local in frame.get("locals") or ()
    ]
    return format(zlib.crc32(repr(shown).encode("utf-8", "replace")), "08x") if shown else ""


def _by_faulthandler(pid: int, path: str) -> tuple[list[dict[str, Any]], str]:
    """Return the threads, and why there are none. By a signal that the process catches, unless it is stopped."""
    one = process.find_process(pid)
    if one is None or one.state == "Z":
        return [], "its process has ended"
    if one.state in "Tt":
        return [], "its process is stopped and can't answer a signal"
    if not procfs.catches(pid, env_vars.STACK_SIGNAL) or not _has_open(pid, path):
        return [], f"it has no handler for signal {env_vars.STACK_SIGNAL}"
    before = _size(path)
    if not send_signal(one, env_vars.STACK_SIGNAL):
        return [], "it may not be signalled (another user's process)"
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
    except OSError as problem:
        return [], str(problem)
    threads = parse_stacks(text)
    if not threads:
        state = (
            "it is in uninterruptible sleep" if one.state == "D" else f"it did not answer a signal within {ASK_S:g} s"
        )
        return [], state
    for thread in threads:  # File "x.py", line 3 in work
        thread["locks"] = locks_of(thread["frames"], [None] * len(thread["frames"]))
    return (threads[:THREADS] if len(threads) <= THREADS else [*threads[: THREADS - 1], threads[-1]]), ""


def _has_open(pid: int, path: str) -> bool:
    """A script that closed it may have a file of its own under that number by now: nothing is written into that."""
    return path in procfs.open_files(pid)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


# ---- torch's flight recorders, asked of a rank's worker server: it answers in a thread of its own, with the GIL held too ----

SERVER_S = 1.0


def read_flight_recorder(path: str) -> tuple[list[dict[str, Any]], str]:
    """(the digest of its collectives, why there is none)."""
    trace, why = _ask_server(path)
    return (flight_recorder.summarize_trace(trace), "") if trace is not None else ([], why)


def timings(path: str) -> list[list[Any]]:
    """[group, number, when it was entered] of its newest collectives: who comes late, and how late."""
    trace, _ = _ask_server(path)
    found: dict[str, list[list[Any]]] = {}
    for entry in (trace or {}).get("entries") or []:
        group, seq = (entry.get("process_group") or ["?"])[0], entry.get("collective_seq_id") or 0
        mine = found.setdefault(group, [])
        if mine and seq < mine[-1][1]:
            mine.clear()  # made anew under its old name
        if not entry.get("is_p2p"):
            backend = str(entry.get("profiling_name", "")).partition(":")[0]
            mine.append([group, seq, entry.get("time_created_ns") or 0, backend])
    return sorted((entry for entries in found.values() for entry in entries), key=lambda entry: entry[2])[-400:]


def _ask_server(path: str) -> tuple[dict[str, Any] | None, str]:
    if not os.path.exists(path):
        return None, "no worker server in this rank"
    answers = [_ask_handler(path, name) for name in flight_recorder.HANDLERS]
    traces = [trace for trace, _ in answers if trace is not None]
    return (flight_recorder.merge_traces(traces), "") if traces else (None, answers[0][1])


def _ask_handler(path: str, name: str) -> tuple[dict[str, Any] | None, str]:
    import socket

    parts: list[bytes] = []
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(SERVER_S)
        connection.connect(path)
        heads = "Host: rank\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        connection.sendall(f"POST /handler/{name} HTTP/1.1\r\n{heads}".encode())
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
        found = parse_json(body)
    except ValueError as problem:
        return None, f"the flight recorder's answer can't be read: {problem}"
    return (found, "") if isinstance(found, dict) else (None, "the flight recorder's answer is not a trace")
