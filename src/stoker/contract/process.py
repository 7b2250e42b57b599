"""Who a process is, and the one way in which Stoker signals a process: by pidfd. Of one that is not our child its start
time and its user are compared; the number of a child that nobody has waited for can't be given to anybody else.
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
    """A small file of /proc or /sys; empty where there is none, or it is not ours to read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            return file.read()
    except OSError:
        return ""


def kernel_lines(path: str) -> list[str]:
    """Its lines that hold anything. Not by splitlines: a process may have a carriage return in its name."""
    return [line for line in read_kernel_file(path).split("\n") if line]


def process_owner(pid: int) -> int | None:
    """The real uid. Not the owner of /proc/PID: that is root for a process that may not be dumped, such as ssh-agent."""
    uid = read_status(pid, "Uid:")
    return None if uid is None else int(uid)


def read_status(pid: int, key: str) -> str | None:
    """The first word behind this key in the kernel's /proc/PID/status; None where there is none."""
    lines = kernel_lines(f"/proc/{pid}/status")
    return next((line.split()[1] for line in lines if line.startswith(key)), None)


def send_signal(who: Process, signum: int, if_still: Callable[[], bool] | None = None) -> bool:
    """Signals exactly this process, and only one of our user. `if_still`: asked while the pidfd is held."""

    def the_same() -> bool:
        now = find_process(who.pid)
        if now is None or now.start != who.start or process_owner(who.pid) != os.getuid():
            return False
        return if_still is None or if_still()

    return _signal(who.pid, signum, the_same)


def signal_child(pid: int, signum: int) -> bool:
    """To a child of ours that nobody has waited for: its number can't be another's."""
    return _signal(pid, signum, lambda: True)


def signal_group(leader: int, signum: int) -> bool:
    """To the group of such a child, and what it forks meanwhile. A pidfd reaches groups since Linux 6.9 only."""
    try:
        os.killpg(leader, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _signal(pid: int, signum: int, is_meant: Callable[[], bool]) -> bool:
    """The one place that signals. False: it is gone, or not the one that is meant."""
    try:
        handle = os.pidfd_open(pid)
    except OSError as problem:
        if problem.errno == errno.ENOSYS:
            line = (
                "this kernel has no pidfd (Linux 5.3 has): without it a reused pid could be hit, so nothing is stopped"
            )
            raise Refusal(line, EX_OSERR) from problem
        return False
    try:
        if not is_meant():
            return False
        signal.pidfd_send_signal(handle, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


# The first lines of a program for `python -c`: they keep the working directory off sys.path, so that a json.py or torch.py
# there isn't imported. The flag -P would do it, but Python 3.10 doesn't have it; and an empty entry of PYTHONPATH has
# become the directory's full path by now. Uses posix, which is built in, instead of os.
NOT_FROM_HERE = """import sys, posix
try: _here = posix.getcwd()
except OSError: _here = ""
sys.path[:] = [entry for entry in sys.path if entry and entry.rstrip("/") != _here.rstrip("/")]
"""
