"""Finds GPU locks and files that no process uses any more. Only cleanup.py removes anything."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.contract import layout, shared_weights
from stoker.contract.frozen import frozen
from stoker.contract.process import find_process
from stoker.contract.text import escape
from stoker.control.machine import gpu_lock
from stoker.control.machine.gpu_lock import LockFolder, UnusableLockFolder
from stoker.control.machine.procfs import list_open_files, list_pids

FRESH_S = 60.0  # a process may be about to open a younger file
WEIGHTS = "weights in shared memory"
_SHM = re.compile(r"torch_(\d+)_\d+_\d+|pym-(\d+)-\w+|nccl-\w+")
_AGENT_FOLDER = re.compile(r"stoker-[a-z0-9_]{8}")  # tempfile appends eight random characters
_AGENT_FILE = re.compile(r"s|\d+-\d+(" + "|".join(map(re.escape, layout.scratch_files("").values())) + r")(\.tmp)?")


@frozen
class Lock:
    """A GPU's lock file. The kernel frees the lock when its holder dies; the file stays (machine/gpu_lock.py)."""

    gpu: str
    held: bool
    who: str


@frozen
class Debris:
    """A file or folder that a dead process left behind."""

    kind: str  # shared memory | agent's folder | WEIGHTS
    path: str
    size: int
    age: float  # seconds


def find_locks() -> tuple[list[Lock], list[str]]:
    """Return the GPUs' lock files, and a line about each other entry of the lock folders and each unusable folder."""
    locks: list[Lock] = []
    unusable: list[str] = []
    for folder in gpu_lock.open_folders(make=False):
        if isinstance(folder, UnusableLockFolder):
            unusable.append(str(folder))
            continue
        try:
            if folder.notice:
                unusable.append(folder.notice)
            for name in sorted(os.listdir(folder.fd)):
                try:
                    lock = _read_lock(folder, name)
                except UnusableLockFolder as problem:
                    unusable.append(str(problem))
                    continue
                if lock is not None:
                    locks.append(lock)
        finally:
            os.close(folder.fd)
    return locks, unusable


def _read_lock(folder: LockFolder, name: str) -> Lock | None:
    fd = gpu_lock.open_for_reading(folder, name)
    if fd is None:
        return None
    try:
        is_held = not gpu_lock.try_lock(fd, fcntl.LOCK_SH)
        who = gpu_lock.describe_holder(fd) if is_held else gpu_lock.read_last_holder(fd)
        return Lock(escape(name, 200), is_held, who)
    finally:
        os.close(fd)


def find_debris(tmp: str = "/tmp", shm: str = "/dev/shm") -> list[Debris]:
    """Return the agents' folders, shared memory and published weights of dead processes of this user."""
    tmp, shm = os.path.realpath(tmp), os.path.realpath(shm)  # as /proc spells them
    used = find_paths_in_use((tmp + "/stoker-", shm + "/"))
    return [*_find_agent_folders(tmp, used), *_find_shared_memory(shm, used), *_find_weights(shm)]


def _list_own_entries(folder: str, pattern: re.Pattern[str]) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Yield this user's entries with matching names that are older than FRESH_S, with their status. Follows no links."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if pattern.fullmatch(entry.name):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # removed meanwhile, or another user's mount, which even root can't examine
            if status.st_uid == os.getuid() and time.time() - max(status.st_mtime, status.st_ctime) > FRESH_S:
                yield entry, status


def _find_agent_folders(tmp: str, used: set[str]) -> Iterator[Debris]:
    for entry, status in _list_own_entries(tmp, _AGENT_FOLDER):
        try:
            if stat.S_ISDIR(status.st_mode) and not is_folder_in_use(entry.path, used):
                size = sum(status.st_blocks * 512 for _, status in walk(entry.path))
                yield Debris("agent's folder", entry.path, size, time.time() - status.st_mtime)
        except FileNotFoundError:
            continue  # its agent has just ended normally


def _find_shared_memory(shm: str, used: set[str]) -> Iterator[Debris]:
    for entry, status in _list_own_entries(shm, _SHM):
        match = _SHM.fullmatch(entry.name)
        creator = match and (match[1] or match[2])
        if not stat.S_ISREG(status.st_mode) or entry.path in used or (creator and find_process(int(creator))):
            continue
        with hold_exclusively(entry.path, status) as is_alone:
            pass
        if is_alone:
            yield Debris("shared memory", entry.path, status.st_blocks * 512, time.time() - status.st_mtime)


def _find_weights(shm: str) -> Iterator[Debris]:
    """Yield weights that a dead trainer published. The kernel has freed its lock on them."""
    for path in shared_weights.find_dead_folders(shm):
        statuses = [status for _, status in walk(path)]
        if statuses:
            size = sum(status.st_blocks * 512 for status in statuses)
            yield Debris(WEIGHTS, path, size, time.time() - statuses[0].st_mtime)


def is_folder_in_use(path: str, used: set[str]) -> bool:
    """Return whether an agent uses this folder, or whether it holds files that no agent creates."""
    names = os.listdir(path)
    if not all(_AGENT_FILE.fullmatch(name) for name in names):
        return True
    if any(used_path == path or used_path.startswith(path + "/") for used_path in used):
        return True
    if "s" not in names:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:  # a datagram socket sends nothing when it connects
        try:
            probe.connect(os.path.join(path, "s"))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def find_paths_in_use(prefixes: tuple[str, ...]) -> set[str]:
    """Return the paths with these prefixes that a process has open, mapped, or as its program or working folder.

    Only covers the processes that we may examine.
    """
    used: set[str] = set()
    for pid in list_pids():
        paths = list_open_files(pid)
        for link in ("cwd", "exe"):
            try:
                paths.append(os.readlink(f"/proc/{pid}/{link}"))
            except OSError:
                continue
        try:
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
                for line in file:
                    if any(prefix in line for prefix in prefixes):
                        paths.append(line.rstrip("\n").split(None, 5)[5])
        except OSError:  # it has ended, or we may not examine it
            pass
        used |= {path for path in paths if path.startswith(prefixes)}
    return used


@contextmanager
def hold_exclusively(path: str, expected: os.stat_result) -> Iterator[bool]:
    """Yield whether this is the expected file and no process in any container has it open or mapped.

    Takes a write lease, which the kernel grants only then. A process that opens the file waits until the block ends.
    A file system without leases counts as free of users; callers have checked /proc before.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield False
        return
    try:
        status = os.fstat(fd)
        identity = (status.st_dev, status.st_ino, status.st_uid)
        yield identity == (expected.st_dev, expected.st_ino, os.getuid()) and _take_lease(fd)
    finally:
        os.close(fd)


def _take_lease(fd: int) -> bool:
    try:
        # The kernel recalls a lease with SIGIO, which would kill us; SIGURG is ignored.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as problem:
        return problem.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
    return True


def walk(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield a path and everything below it with its status. Follows no links and enters no mounted file systems."""
    pending = [path]
    device: int | None = None
    while pending:
        current = pending.pop()
        try:
            status = os.lstat(current)
            yield current, status
            device = status.st_dev if device is None else device
            if stat.S_ISDIR(status.st_mode) and status.st_dev == device:
                pending += [entry.path for entry in os.scandir(current)]
        except OSError:
            continue  # removed meanwhile
