"""Identifies processes and signals them by pidfd.

A process that is not our child is identified by its start time and user. The pid of a child that nobody has waited for
can't be reused.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable

from stoker.contract.errors import EX_OSERR, Refusal
from stoker.contract.frozen import frozen


@frozen
class Process:
    pid: int
    parent: int
    group: int
    session: int
    state: str
    start: int  # clock ticks since boot: with the pid, the identity of a process
    name: str


def find_process(pid: int) -> Process | None:
    """Return the process with this pid, or None if there is none or /proc hides it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    close = text.rindex(b")")  # the name may hold spaces and brackets
    fields = text[close + 2 :].split()
    parent, group, session, start = (int(fields[number]) for number in (1, 2, 3, 19))
    name = text[text.index(b"(") + 1 : close].decode("utf-8", "replace")
    return Process(pid, parent, group, session, fields[0].decode(), start, name)


def read_kernel_file(path: str) -> str:
    """Return a small file of /proc or /sys, or "" if it is missing or can't be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            return file.read()
    except OSError:
        return ""


def read_kernel_lines(path: str) -> list[str]:
    """Return the non-empty lines of such a file. Doesn't use splitlines: a process may have a carriage return in its name."""
    return [line for line in read_kernel_file(path).split("\n") if line]


def process_owner(pid: int) -> int | None:
    """Return the real uid. The owner of /proc/PID is root for a process that may not be dumped, such as ssh-agent."""
    uid = read_status(pid, "Uid:")
    return None if uid is None else int(uid)


def read_status(pid: int, key: str) -> str | None:
    """Return the first word behind this key in /proc/PID/status, or None."""
    lines = read_kernel_lines(f"/proc/{pid}/status")
    return next((line.split()[1] for line in lines if line.startswith(key)), None)


def send_signal(process: Process, signum: int, condition: Callable[[], bool] | None = None) -> bool:
    """Signal exactly this process if it belongs to our user, and if `condition` holds while the pidfd is open."""

    def is_same() -> bool:
        now = find_process(process.pid)
        if now is None or now.start != process.start or process_owner(process.pid) != os.getuid():
            return False
        return condition is None or condition()

    return _signal(process.pid, signum, is_same)


def signal_child(pid: int, signum: int) -> bool:
    """Signal a child of ours that nobody has waited for, so that its pid can't be another process's."""
    return _signal(pid, signum, lambda: True)


def signal_group(leader: int, signum: int) -> bool:
    """Signal the process group that a child of ours leads. Uses killpg: pidfds reach groups only since Linux 6.9."""
    try:
        os.killpg(leader, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _signal(pid: int, signum: int, is_expected: Callable[[], bool]) -> bool:
    """Send a signal by pidfd. Returns False if the process has ended or is not the expected one."""
    try:
        fd = os.pidfd_open(pid)
    except OSError as problem:
        if problem.errno == errno.ENOSYS:
            line = "this kernel has no pidfd, so a signal could hit a process with a reused pid; use Linux 5.3 or newer"
            raise Refusal(line, EX_OSERR) from problem
        return False
    try:
        if not is_expected():
            return False
        signal.pidfd_send_signal(fd, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(fd)
    return True


# The first lines of a program for `python -c`. They remove the working directory from sys.path, so that a json.py or
# torch.py there isn't imported. Python 3.10 lacks the flag -P, which does the same. An empty entry of PYTHONPATH has become
# the directory's full path by then. Uses posix, which is built in, instead of os.
NOT_FROM_HERE = """import sys, posix
try: _here = posix.getcwd()
except OSError: _here = ""
sys.path[:] = [entry for entry in sys.path if entry and entry.rstrip("/") != _here.rstrip("/")]
"""
