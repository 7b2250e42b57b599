"""Processes, read from /proc: who they are, whose children, which run's."""

from __future__ import annotations

import os
import time

from stoker.contract import env_vars
from stoker.contract.masking import mask_argv
from stoker.contract.process import Process, find_process, kernel_lines, read_kernel_file, read_status

_PAGE = os.sysconf("SC_PAGE_SIZE")
_COMMAND = 4096  # bytes of a command line that are worth showing
_TICKS = os.sysconf("SC_CLK_TCK")
_EXEC_S = 0.2  # how long a look waits for a process within execve; that usually takes microseconds


def pids_here() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def open_files(pid: int) -> list[str]:
    found = []
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    except OSError:
        return found  # it ended, or is another user's
    return found


def all_processes() -> list[Process]:
    return [one for one in map(find_process, pids_here()) if one is not None]


def descendants(root: int, table: list[Process]) -> set[int]:
    children: dict[int, list[int]] = {}
    for one in table:
        children.setdefault(one.parent, []).append(one.pid)
    found: set[int] = set()
    queue = [root]
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in found:
                found.add(child)
                queue.append(child)
    return found


def read_descendants(pid: int) -> list[int]:
    """Return the pids of a process's children, and of theirs. Costs a read per process, and none of the others'."""
    children = [int(child) for child in read_kernel_file(f"/proc/{pid}/task/{pid}/children").split()]
    return children + [grandchild for child in children for grandchild in read_descendants(child)]


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for this signal; without one most signals kill it."""
    return bool(int(read_status(pid, "SigCgt:") or "0", 16) >> (signum - 1) & 1)


def command_line(pid: int) -> str | None:
    """Return the command line of a process, without secrets. A long one is cut after a word, and ends in "…"."""
    try:
        raw = _bytes(f"/proc/{pid}/cmdline")
    except OSError:
        return None
    cut = len(raw) > _COMMAND
    if cut:
        # Not within a word: half a secret has no known shape.
        raw = raw[: max(raw.rfind(b"\0", 0, _COMMAND), raw.rfind(b" ", 0, _COMMAND), 0)]
    words = raw.decode("utf-8", "replace").split("\0")
    # setproctitle writes one line.
    line = " ".join(mask_argv(words if len(words) > 2 else " ".join(words).split(" "))).strip()
    return f"{line} …".lstrip() if cut else line or None


def _bytes(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def environment(pid: int) -> dict[str, str]:
    """What the process was started with; empty when it is not ours to read or has overwritten it (setproctitle)."""
    deadline = time.monotonic() + _EXEC_S
    try:
        settled = False
        while not (raw := _bytes(f"/proc/{pid}/environ")) and not settled:
            # Looked at again when settled: it may have got its environment since the first look.
            settled = not _within_exec(pid) or time.monotonic() > deadline
            time.sleep(0 if settled else 0.0005)
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, _, value in pairs}


def _within_exec(pid: int) -> bool:
    """It has a new program's memory already, but not yet its environment: until then the kernel shows an empty one. Its
    parent may see this: execve closes the pipe that subprocess.Popen waits on before it copies the environment.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    memory, end_of_environment = int(fields[20]), int(fields[48])  # no memory: a zombie or a thread of the kernel
    return memory > 0 and end_of_environment == 0


def run_tag(pid: int) -> tuple[str, str] | None:
    found = environment(pid)
    run = found.get(env_vars.RUN_ID)
    return (run, found.get(env_vars.RUN_DIR, "")) if run else None


def resident_bytes(pid: int) -> int | None:
    pages = read_kernel_file(f"/proc/{pid}/statm").split()[1:2]
    return int(pages[0]) * _PAGE if pages else None


def peak_resident(pid: int) -> int | None:
    kilobytes = read_status(pid, "VmHWM:")
    return None if kilobytes is None else int(kilobytes) * 1024


def cpu_seconds(pid: int, thread: int | None = None) -> float | None:
    """User and system time of a process, or of one thread of it."""
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    ticks = read_kernel_file(path).rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / _TICKS if ticks else None


def main_thread_seconds(pid: int) -> tuple[float, float]:
    """Return the time that the main thread has run, and that it was ready to run but had no core.

    A kernel without scheduler statistics knows only the first, in steps of a clock tick.
    """
    fields = read_kernel_file(f"/proc/{pid}/schedstat").split()[:2]
    if len(fields) < 2:
        return cpu_seconds(pid, pid) or 0.0, 0.0
    return int(fields[0]) / 1e9, int(fields[1]) / 1e9


def bytes_moved(pid: int, thread: int | None = None) -> int | None:
    """Return the bytes a process, or one thread of it, has read and written by system calls, pipes and sockets included."""
    lines = kernel_lines(f"/proc/{pid}/io" if thread is None else f"/proc/{pid}/task/{thread}/io")
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar"))) if lines else None


def page_faults(pid: int, thread: int | None = None) -> int:
    """Return the page faults of a process, or of one thread of it: it touched memory it had not touched before."""
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    fields = read_kernel_file(path).rpartition(")")[2].split()[7:10:2]  # minor, major
    return sum(map(int, fields))


def user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def started_at(start_ticks: int) -> float:
    """Wall-clock time of a start in ticks since boot."""
    lines = kernel_lines("/proc/stat")
    return next((int(line.split()[1]) for line in lines if line.startswith("btime")), 0) + start_ticks / _TICKS
