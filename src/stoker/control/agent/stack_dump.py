"""Python stacks of another process, with the loops, conditions and locks of the source around their lines.

py-spy reads the memory of its target without stopping it, also while the GIL is held. Where it can't be used,
faulthandler is asked by a signal, if the process catches that signal and still has open the file it writes to.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
import zlib
from typing import Any

from stoker.contract import env_vars, flight_recorder
from stoker.contract.process import find_process, send_signal
from stoker.contract.stack_traces import parse_stacks
from stoker.contract.text import escape, parse_json
from stoker.control.machine import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

PY_SPY_S = 2.0
FAULTHANDLER_S = 1.0
INSPECTION_S = 6.0  # for all stacks of one inspection
MAX_FRAMES = 60  # per thread
MAX_THREADS = 24
MAX_LOCKS = 32  # per thread
MAX_CALLS = 48  # newest calls of torch.distributed that are sent
CALLS_WITH_SOURCE = 8


class StackDumper:
    """Reads stacks with py-spy where it is installed and allowed, otherwise with faulthandler."""

    def __init__(self) -> None:
        import shutil
        import sys

        beside_python = os.path.join(os.path.dirname(sys.executable), "py-spy")
        program = beside_python if os.access(beside_python, os.X_OK) else shutil.which("py-spy")
        self._py_spy = os.environ.get(env_vars.PY_SPY, program)
        self.method = "py-spy" if self._py_spy else "faulthandler (py-spy is not installed)"
        self.deadline = time.monotonic() + INSPECTION_S
        self.problems: dict[int, str] = {}  # pid -> why its stack could not be read

    def dump_stacks(self, pid: int, dump_file: str) -> list[dict[str, Any]]:
        """Return the threads of a process. If that fails or the time is over, return [] and note why in `problems`."""
        if time.monotonic() > self.deadline:
            self.problems.setdefault(pid, f"the inspection took longer than {INSPECTION_S:g} s")
            return []
        py_spy_problem = self.method.partition("(")[2].rstrip(")")
        if self._py_spy:
            threads, py_spy_problem = self._dump_by_py_spy(pid)
            if threads:
                return threads
        threads, problem = _dump_by_faulthandler(pid, dump_file)
        if not threads:
            self.problems[pid] = f"{problem}; {py_spy_problem or 'py-spy found no Python in it'}"
        return threads

    def _dump_by_py_spy(self, pid: int) -> tuple[list[dict[str, Any]], str]:
        """Return the threads and "", or [] and why there are none."""
        import subprocess

        try:
            done = self._run_py_spy(pid, "--locals")
            if done.returncode != 0:
                done = self._run_py_spy(pid)
        except (subprocess.TimeoutExpired, OSError) as problem:
            why = f"it took longer than {PY_SPY_S:g} s" if isinstance(problem, subprocess.TimeoutExpired) else problem
            self._py_spy, self.method = None, f"faulthandler (py-spy: {why})"
            return [], f"py-spy: {why}"
        if done.returncode != 0:
            stderr = done.stderr.decode("utf-8", "replace")
            if "ermission" in stderr:  # PermissionDenied, or EPERM's text
                self._py_spy = None
                refusal = "py-spy may not read the ranks: it needs CAP_SYS_PTRACE here"
                self.method = f"faulthandler ({refusal})"
                return [], refusal
            return [], f"py-spy: {escape(' '.join(stderr.split()), 200)}"
        try:
            return [_read_py_spy_thread(thread) for thread in json.loads(done.stdout)][:MAX_THREADS], ""
        except ValueError:
            return [], "py-spy's answer can't be read"

    def _run_py_spy(self, pid: int, *options: str) -> subprocess.CompletedProcess[bytes]:
        import subprocess

        assert self._py_spy is not None
        command = [self._py_spy, "dump", "--json", *options, "--nonblocking", "--pid", str(pid)]
        return subprocess.run(command, capture_output=True, timeout=PY_SPY_S, check=False)


def _read_py_spy_thread(thread: dict[str, Any]) -> dict[str, Any]:
    py_spy_frames = thread.get("frames") or ()
    frames = [
        [frame.get("name") or "?", frame.get("filename") or "?", frame.get("line") or 0] for frame in py_spy_frames
    ]
    addresses = [
        None if frame.get("locals") is None else {local["name"]: local["addr"] for local in frame["locals"]}
        for frame in py_spy_frames
    ]
    is_main = thread.get("os_thread_id") == thread.get("pid")
    return {
        "name": thread.get("thread_name") or "",
        "main": is_main,
        "values": _digest_locals(py_spy_frames) if is_main else "",
        "active": bool(thread.get("active")),
        "gil": bool(thread.get("owns_gil")),
        "frames": frames[:MAX_FRAMES],
        "locks": _find_locks(frames[:MAX_FRAMES], addresses[:MAX_FRAMES]),
    }


def _digest_locals(py_spy_frames: Any) -> str:
    """Return a digest of the local variables of all frames. It changes while a loop advances on a single line.

    Only the digest leaves this host: the values themselves may be private.
    """
    values = [(local.get("name"), local.get("repr")) for frame in py_spy_frames for local in frame.get("locals") or ()]
    return format(zlib.crc32(repr(values).encode("utf-8", "replace")), "08x") if values else ""


def _dump_by_faulthandler(pid: int, path: str) -> tuple[list[dict[str, Any]], str]:
    """Signal a process, whose faulthandler then writes its stacks to `path`. Return the threads and "", or [] and why."""
    process = find_process(pid)
    if process is None or process.state == "Z":
        return [], "its process has ended"
    if process.state in "Tt":
        return [], "its process is stopped and can't handle a signal"
    # If the script closed the file, its descriptor may belong to another file, which must not be written to.
    if not procfs.catches_signal(pid, env_vars.STACK_SIGNAL) or path not in procfs.list_open_files(pid):
        return [], f"it has no handler for signal {env_vars.STACK_SIGNAL}"
    size_before = last_size = _file_size(path)
    if not send_signal(process, env_vars.STACK_SIGNAL):
        return [], "it may not be signalled (another user's process)"
    deadline = time.monotonic() + FAULTHANDLER_S
    while time.monotonic() < deadline:
        time.sleep(0.02)
        size = _file_size(path)
        if size > size_before and size == last_size:  # faulthandler has written, and has finished
            break
        last_size = size
    try:
        with open(path, "rb") as file:
            file.seek(size_before)
            text = file.read(1 << 18).decode("utf-8", "replace")
    except OSError as problem:
        return [], str(problem)
    threads = parse_stacks(text)
    if not threads:
        if process.state == "D":
            return [], "it is in uninterruptible sleep"
        return [], f"it did not respond to a signal within {FAULTHANDLER_S:g} s"
    for thread in threads:
        thread["locks"] = _find_locks(thread["frames"], [None] * len(thread["frames"]))
    if len(threads) > MAX_THREADS:
        threads = [*threads[: MAX_THREADS - 1], threads[-1]]  # faulthandler writes the main thread last
    return threads, ""


def _file_size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


# ---- the source around a line: loops, conditions on the rank, locks ----


def add_source(frame: list[Any]) -> list[Any]:
    """Return [function, file, line, first lines of the loops around the line, conditions on the rank around it].

    Both lists are outermost first. The loops tell whether a rank has left its loop or does something else in it.
    """
    file, line = frame[1], frame[2]
    loops = [first for first, last in _find_loops(file) if first < line <= last]
    return [*frame[:3], loops, find_conditions_around(file, line)]


def add_source_to_calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the source around their lines to the last CALLS_WITH_SOURCE of these calls. Return all of them."""
    for call in calls[-CALLS_WITH_SOURCE:]:
        call["frames"] = [add_source(frame) for frame in call["frames"]]
    return calls


@functools.cache
def _parse_source(file: str) -> list[Any]:
    """Return all nodes of a script's syntax tree, or [] for library code or an unreadable file."""
    import ast

    if "/lib/python" in file or not file.endswith(".py"):
        return []
    try:
        with open(file, encoding="utf-8") as source:
            return list(ast.walk(ast.parse(source.read(1 << 20))))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []


@functools.cache
def _find_loops(file: str) -> list[tuple[int, int]]:
    """Return the (first line, last line) of each loop."""
    import ast

    loops = [node for node in _parse_source(file) if isinstance(node, (ast.For, ast.While, ast.AsyncFor))]
    return sorted((loop.lineno, loop.end_lineno or loop.lineno) for loop in loops)


def find_conditions_around(file: str, line: int) -> list[list[Any]]:
    """Return [line, text] of the script's conditions on the rank that a line depends on, outermost first."""
    return [[at, text] for first, last, at, text in _find_conditions(file) if first <= line <= last]


@functools.cache
def _find_conditions(file: str) -> list[tuple[int, int, int, str]]:
    """Return (first and last line that depend on a condition on the rank, the condition's line, its text).

    After `if rank != 0: return`, the rest of the block depends on it.
    """
    import ast

    conditions: list[tuple[int, int, int, str]] = []
    for node in _parse_source(file):
        blocks = (getattr(node, name, None) for name in ("body", "orelse", "finalbody"))
        for block in (block for block in blocks if isinstance(block, list)):
            for statement in block:
                if not isinstance(statement, ast.If) or not _mentions_rank(statement.test):
                    continue
                try:
                    text = f"if {ast.unparse(statement.test)[:80]}"
                except RecursionError:  # hundreds of terms
                    continue
                body, orelse, at = statement.body, statement.orelse, statement.lineno
                last = statement.end_lineno or at
                conditions.append((body[0].lineno, body[-1].end_lineno or last, at, text))
                if orelse:
                    conditions.append((orelse[0].lineno, last, at, f"else of {text}"))
                block_end = block[-1].end_lineno or last
                if isinstance(body[-1], (ast.Return, ast.Continue, ast.Break)) and block_end > last:
                    keyword = ast.unparse(body[-1]).split()[0]
                    conditions.append((last + 1, block_end, at, f"{text}: {keyword}"))
    return sorted(conditions)


_RANK_NAME = re.compile(
    r"(^|_)rank(s?$|_)|process_index|is_(world|local)_process_zero|is_(local_)?main(_process)?|(main|master)_process|is_(master|chief)"
)


def _mentions_rank(test: Any) -> bool:
    import ast

    for node in ast.walk(test):
        field = {ast.Name: "id", ast.Attribute: "attr", ast.Constant: "value"}.get(type(node))
        value = getattr(node, field) if field else None
        if isinstance(value, str) and _RANK_NAME.search(value.lower()):
            return True
    return False


def _find_locks(frames: list[list[Any]], variables: list[dict[str, int] | None]) -> list[list[Any]]:
    """Return the locks that a thread waits for or seems to hold, by the source around its lines, innermost first.

    Each is [text, key, is held, function, file, line]: the lock of `with self.lock:` is held inside the block, and waited
    for at the block's first line. `variables` has the addresses of each frame's local variables, or None where they can't
    be read. Two locks with the same key are the same object; without a key only the text can be compared.
    """
    locks = []
    given_up: set[str] = set()  # the locks of conditions that the thread waits on
    is_innermost = True  # no frame of the script is inside this one
    for (function, file, line), addresses in zip(frames, variables, strict=True):
        for first, last, text, root, use in _find_lock_uses(file):
            if use == "gives up" and is_innermost and first <= line <= last:
                given_up.add(text)
            elif first <= line <= last and (is_innermost or use == "holds"):
                key = ""
                if addresses is not None and root in addresses:
                    key = f"{addresses[root]:x}{text[len(root) :]}"
                elif addresses is not None and root in _find_module_variables(file):
                    key = f"{file}:{text}"
                locks.append([text, key, use == "holds", function, file, line])
        is_innermost = is_innermost and file.endswith("/threading.py")
    return [lock for lock in locks if lock[0] not in given_up][:MAX_LOCKS]


@functools.cache
def _find_module_variables(file: str) -> frozenset[str]:
    """Return the variables that the source assigns at its top level."""
    import ast

    module = next(iter(_parse_source(file)), None)
    body = getattr(module, "body", ())
    assignments = [statement for statement in body if isinstance(statement, (ast.Assign, ast.AnnAssign))]
    return frozenset(node.id for statement in assignments for node in ast.walk(statement) if isinstance(node, ast.Name))


@functools.cache
def _find_lock_uses(file: str) -> list[tuple[int, int, str, str, str]]:
    """Return (first line, last line, expression, its first name, what a thread at these lines does with the lock).

    A lock is the subject of a `with` without a call, of `.acquire()`, or of `.release()` in a `finally`. A thread "waits"
    for it or "holds" it. In `.wait()` it "gives up" the lock of the condition.
    """
    import ast

    uses = []

    def add(first: int, last: int, lock: Any, use: str) -> None:
        root = lock
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name):
            uses.append((first, last, ast.unparse(lock), root.id, use))

    for node in _parse_source(file):
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                lock, body_line = item.context_expr, node.body[0].lineno
                add(lock.lineno, lock.end_lineno or lock.lineno, lock, "waits")
                if body_line > lock.lineno:
                    add(body_line, node.end_lineno or body_line, lock, "holds")
        elif isinstance(node, ast.Try):
            for statement in node.finalbody:
                if isinstance(statement, ast.Expr) and _called_method(statement.value) == "release":
                    lock = statement.value.func.value  # type: ignore[attr-defined]
                    add(node.lineno, node.body[-1].end_lineno or node.lineno, lock, "holds")
        elif _called_method(node) in ("acquire", "wait", "wait_for"):
            use = "waits" if node.func.attr == "acquire" else "gives up"
            add(node.lineno, node.end_lineno or node.lineno, node.func.value, use)
    return uses


def _called_method(node: Any) -> str:
    """Return the name of the method that an expression calls, or ""."""
    import ast

    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


# ---- torch's flight recorder. A rank's worker server sends it from its own thread, also while the GIL is held ----

SERVER_S = 1.0


def read_flight_recorder(socket_path: str) -> tuple[list[dict[str, Any]], str]:
    """Return the summary of a rank's collectives and "", or [] and why there is none."""
    trace, problem = _read_trace(socket_path)
    return (flight_recorder.summarize_trace(trace), "") if trace is not None else ([], problem)


def read_collective_times(socket_path: str) -> list[list[Any]]:
    """Return [group, number, time of entry in ns, backend] of a rank's newest collectives, which show which rank is late."""
    trace, _ = _read_trace(socket_path)
    by_group: dict[str, list[list[Any]]] = {}
    for entry in (trace or {}).get("entries") or []:
        group, number = (entry.get("process_group") or ["?"])[0], entry.get("collective_seq_id") or 0
        collectives = by_group.setdefault(group, [])
        if collectives and number < collectives[-1][1]:
            collectives.clear()  # the group was made again under the same name
        if not entry.get("is_p2p"):
            backend = str(entry.get("profiling_name", "")).partition(":")[0]
            collectives.append([group, number, entry.get("time_created_ns") or 0, backend])
    entries = (collective for collectives in by_group.values() for collective in collectives)
    return sorted(entries, key=lambda collective: collective[2])[-400:]


def _read_trace(socket_path: str) -> tuple[dict[str, Any] | None, str]:
    if not os.path.exists(socket_path):
        return None, "this rank has no worker server"
    answers = [_request_trace(socket_path, handler) for handler in flight_recorder.HANDLERS]
    traces = [trace for trace, _ in answers if trace is not None]
    return (flight_recorder.merge_traces(traces), "") if traces else (None, answers[0][1])


def _request_trace(socket_path: str, handler: str) -> tuple[dict[str, Any] | None, str]:
    import socket

    parts: list[bytes] = []
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(SERVER_S)
        connection.connect(socket_path)
        headers = "Host: rank\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        connection.sendall(f"POST /handler/{handler} HTTP/1.1\r\n{headers}".encode())
        while data := connection.recv(1 << 18):
            parts.append(data)
    except OSError as problem:
        return None, f"the worker server is not responding: {problem}"
    finally:
        connection.close()
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    status = head.partition(b"\r")[0]
    if b" 200 " not in status:
        return None, f"the worker server answered {status.decode('ascii', 'replace')}"
    try:
        trace = parse_json(body)
    except ValueError as problem:
        return None, f"the flight recorder's answer can't be read: {problem}"
    return (trace, "") if isinstance(trace, dict) else (None, "the flight recorder's answer is not a trace")
