"""Reads processes from /proc: their memory, CPU time, open files, command line, environment and descendants."""

from __future__ import annotations

import os
import time

from stoker.contract import env_vars
from stoker.contract.masking import mask_argv
from stoker.contract.process import Process, find_process, read_kernel_file, read_kernel_lines, read_status

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MAX_COMMAND = 4096  # bytes of a command line that are read
_TICKS = os.sysconf("SC_CLK_TCK")
_EXEC_S = 0.2  # how long to wait for a process that is within execve, which usually takes microseconds


def list_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def list_open_files(pid: int) -> list[str]:
    """Return the targets of a process's descriptors, as far as we can read them before it ends."""
    targets = []
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            targets.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    except OSError:
        return targets
    return targets


def list_processes() -> list[Process]:
    return [process for process in map(find_process, list_pids()) if process is not None]


def descendants(root: int, table: list[Process]) -> set[int]:
    """Return the pids of the children of `root` in a table of processes, and of theirs."""
    children: dict[int, list[int]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process.pid)
    pids: set[int] = set()
    queue = [root]
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in pids:
                pids.add(child)
                queue.append(child)
    return pids


def read_descendants(pid: int) -> list[int]:
    """Return the pids of a process's children, and of theirs, without reading the other processes."""
    children = [int(child) for child in read_kernel_file(f"/proc/{pid}/task/{pid}/children").split()]
    return children + [grandchild for child in children for grandchild in read_descendants(child)]


def catches_signal(pid: int, signum: int) -> bool:
    """Return whether the process has a handler for this signal. Without one, most signals kill it."""
    return bool(int(read_status(pid, "SigCgt:") or "0", 16) >> (signum - 1) & 1)


def read_command_line(pid: int) -> str | None:
    """Return the command line of a process, without secrets. A long one is cut after a word and ends in "…"."""
    try:
        raw = _read_bytes(f"/proc/{pid}/cmdline")
    except OSError:
        return None
    is_cut = len(raw) > _MAX_COMMAND
    if is_cut:
        # Cut between words, because half a secret would not be recognized.
        raw = raw[: max(raw.rfind(b"\0", 0, _MAX_COMMAND), raw.rfind(b" ", 0, _MAX_COMMAND), 0)]
    argv = raw.decode("utf-8", "replace").split("\0")
    # A process that uses setproctitle has one line instead of arguments.
    line = " ".join(mask_argv(argv if len(argv) > 2 else " ".join(argv).split(" "))).strip()
    return f"{line} …".lstrip() if is_cut else line or None


def _read_bytes(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def read_environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with.

    It is empty if we may not read it, or if the process has overwritten it (setproctitle).
    """
    deadline = time.monotonic() + _EXEC_S
    try:
        is_settled = False
        while not (raw := _read_bytes(f"/proc/{pid}/environ")) and not is_settled:
            # Read once more when settled: the process may have got its environment since the last read.
            is_settled = not _is_within_exec(pid) or time.monotonic() > deadline
            time.sleep(0 if is_settled else 0.0005)
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, _, value in pairs}


def _is_within_exec(pid: int) -> bool:
    """Return whether a process has a new program's memory, but not yet its environment, which the kernel shows as empty.

    Its parent may see this: execve closes the pipe that subprocess.Popen waits on before it copies the environment.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    memory, end_of_environment = int(fields[20]), int(fields[48])  # a zombie or kernel thread has no memory
    return memory > 0 and end_of_environment == 0


def read_run_tag(pid: int) -> tuple[str, str] | None:
    """Return the id and the directory of the run in whose environment a process was started, or None."""
    variables = read_environment(pid)
    run = variables.get(env_vars.RUN_ID)
    return (run, variables.get(env_vars.RUN_DIR, "")) if run else None


def resident_bytes(pid: int) -> int | None:
    pages = read_kernel_file(f"/proc/{pid}/statm").split()[1:2]
    return int(pages[0]) * _PAGE if pages else None


def peak_resident(pid: int) -> int | None:
    """Return the most resident memory that a process has had, in bytes."""
    kilobytes = read_status(pid, "VmHWM:")
    return None if kilobytes is None else int(kilobytes) * 1024


def cpu_seconds(pid: int, thread: int | None = None) -> float | None:
    """Return the user and system time of a process, or of one thread of it."""
    ticks = _stat_fields(pid, thread)[11:13]
    return sum(map(int, ticks)) / _TICKS if ticks else None


def main_thread_seconds(pid: int) -> tuple[float, float]:
    """Return the time that the main thread has run, and the time that it was ready to run but had no core.

    A kernel without scheduler statistics knows only the first, in steps of a clock tick.
    """
    fields = read_kernel_file(f"/proc/{pid}/schedstat").split()[:2]
    if len(fields) < 2:
        return cpu_seconds(pid, pid) or 0.0, 0.0
    return int(fields[0]) / 1e9, int(fields[1]) / 1e9


def bytes_moved(pid: int, thread: int | None = None) -> int | None:
    """Return the bytes a process, or one thread of it, has read and written by system calls, pipes and sockets included."""
    lines = read_kernel_lines(f"/proc/{pid}/io" if thread is None else f"/proc/{pid}/task/{thread}/io")
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar"))) if lines else None


def page_faults(pid: int, thread: int | None = None) -> int:
    """Return the page faults of a process, or of one thread of it: how often it touched memory that was not mapped yet."""
    return sum(map(int, _stat_fields(pid, thread)[7:10:2]))  # minor, major


def _stat_fields(pid: int, thread: int | None) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, or [] once the process has ended."""
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    return read_kernel_file(path).rpartition(")")[2].split()


def user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def started_at(start_ticks: int) -> float:
    """Return the wall-clock time of a start that is given in ticks since boot."""
    lines = read_kernel_lines("/proc/stat")
    return next((int(line.split()[1]) for line in lines if line.startswith("btime")), 0) + start_ticks / _TICKS
