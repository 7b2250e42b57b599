"""Finding GPU locks, and files that no process uses any more. Looks only; clean.py acts."""

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
from stoker.control.machine.procfs import open_files, pids_here

FRESH_S = 60.0  # a file younger than this may be about to be opened
WEIGHTS = "weights in shared memory"
_SHM = re.compile(r"torch_(\d+)_\d+_\d+|pym-(\d+)-\w+|nccl-\w+")
_AGENT_FOLDER = re.compile(r"stoker-[a-z0-9_]{8}")  # tempfile's eight random characters
_AGENT_FILE = re.compile(r"s|\d+-\d+(" + "|".join(map(re.escape, layout.scratch_files("").values())) + r")(\.tmp)?")


@frozen
class Lock:
    """A lock file of a GPU. The kernel frees it when its holder dies, and it is never unlinked: see machine/gpu_lock.py."""

    gpu: str
    held: bool
    who: str


@frozen
class Debris:
    kind: str  # shared memory | agent's folder | WEIGHTS
    path: str
    size: int
    age: float


def find_locks() -> tuple[list[Lock], list[str]]:
    """Return the GPUs' lock files, and a line for each thing in the lock folders that is none."""
    locks: list[Lock] = []
    strange: list[str] = []
    for folder in gpu_lock.open_folders(make=False):
        if isinstance(folder, UnusableLockFolder):
            strange.append(str(folder))
            continue
        try:
            if folder.notice:
                strange.append(folder.notice)
            for name in sorted(os.listdir(folder.handle)):
                try:
                    locks += _lock(folder, name)
                except UnusableLockFolder as problem:
                    strange.append(str(problem))
        finally:
            os.close(folder.handle)
    return locks, strange


def _lock(folder: LockFolder, name: str) -> list[Lock]:
    handle = gpu_lock.open_to_look(folder, name)
    if handle is None:
        return []
    try:
        is_held = not gpu_lock.try_lock(handle, fcntl.LOCK_SH)
        who = gpu_lock.describe_holder if is_held else gpu_lock.last_holder
        return [Lock(escape(name, 200), is_held, who(handle))]
    finally:
        os.close(handle)


def find_debris(tmp: str = "/tmp", shm: str = "/dev/shm") -> list[Debris]:
    tmp, shm = os.path.realpath(tmp), os.path.realpath(shm)  # as /proc spells them
    used = paths_in_use((tmp + "/stoker-", shm + "/"))
    return [*_dead_folders(tmp, used), *_dead_shared_memory(shm, used), *_dead_weights(shm)]


def _own_entries(folder: str, pattern: re.Pattern[str]) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Entries of this uid with such a name, old enough, and no links."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if pattern.fullmatch(entry.name):
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # gone meanwhile, or another user's mount, which is closed even to root
            if found.st_uid == os.getuid() and time.time() - max(found.st_mtime, found.st_ctime) > FRESH_S:
                yield entry, found


def _dead_shared_memory(folder: str, used: set[str]) -> Iterator[Debris]:
    for entry, about in _own_entries(folder, _SHM):
        match = _SHM.fullmatch(entry.name)
        maker = match and (match[1] or match[2])
        if not stat.S_ISREG(about.st_mode) or entry.path in used or (maker and find_process(int(maker)) is not None):
            continue
        with alone_with(entry.path, about) as alone:
            pass  # asked only
        if alone:
            yield Debris("shared memory", entry.path, about.st_blocks * 512, time.time() - about.st_mtime)


def _dead_folders(folder: str, used: set[str]) -> Iterator[Debris]:
    for entry, about in _own_entries(folder, _AGENT_FOLDER):
        try:
            if stat.S_ISDIR(about.st_mode) and not folder_in_use(entry.path, used):
                size = sum(about.st_blocks * 512 for _, about in walk(entry.path))
                yield Debris("agent's folder", entry.path, size, time.time() - about.st_mtime)
        except FileNotFoundError:
            continue  # its agent has just ended in good order


def _dead_weights(folder: str) -> Iterator[Debris]:
    """What trainers published there; a lock that died with them tells it."""
    for path in shared_weights.find_dead_folders(folder):
        found = list(walk(path))
        if found:
            size = sum(about.st_blocks * 512 for _, about in found)
            yield Debris(WEIGHTS, path, size, time.time() - found[0][1].st_mtime)


def folder_in_use(path: str, used: set[str]) -> bool:
    """An agent's folder holds its socket and its ranks' reports. One with anything else in it is not an agent's."""
    inside = os.listdir(path)
    if not all(_AGENT_FILE.fullmatch(name) for name in inside) or any(
        one == path or one.startswith(path + "/") for one in used
    ):
        return True
    if "s" not in inside:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as letter:  # sends nothing
        try:
            letter.connect(os.path.join(path, "s"))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def paths_in_use(prefixes: tuple[str, ...]) -> set[str]:
    """Paths that begin so and that some process has open, mapped, or stands in; of the processes we may look into."""
    found: set[str] = set()
    for pid in pids_here():
        links = open_files(pid)
        for what in ("cwd", "exe"):
            try:
                links.append(os.readlink(f"/proc/{pid}/{what}"))
            except OSError:
                continue
        links += _mapped(pid, prefixes)
        found |= {link for link in links if link.startswith(prefixes)}
    return found


def _mapped(pid: int, prefixes: tuple[str, ...]) -> set[str]:
    """Return the paths among a process's mappings that begin so."""
    found: set[str] = set()
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            for line in file:
                if any(prefix in line for prefix in prefixes):
                    found.add(line.rstrip("\n").split(None, 5)[5])
    except OSError:  # it has ended, or is not ours to look into
        pass
    return found


@contextmanager
def alone_with(path: str, about: os.stat_result) -> Iterator[bool]:
    """Nobody else has this file open or mapped, in any container: the kernel gives a write lease only then.

    Held until the block's end: who opens the file in it waits. Where a file system knows no leases, /proc has spoken.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield False
        return
    try:
        yield _same_file(handle, about) and _lease(handle)
    finally:
        os.close(handle)


def _same_file(handle: int, about: os.stat_result) -> bool:
    now = os.fstat(handle)
    return (now.st_dev, now.st_ino, now.st_uid) == (about.st_dev, about.st_ino, os.getuid())


def _lease(handle: int) -> bool:
    try:
        # A lease is called back by SIGIO, which would kill us; this one is ignored.
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as problem:
        return problem.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
    return True


def walk(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """The thing itself and all below it; links are looked at, never followed, and what is mounted in it is not entered."""
    todo = [path]
    top: int | None = None
    while todo:
        here = todo.pop()
        try:
            about = os.lstat(here)
            yield here, about
            top = about.st_dev if top is None else top
            if stat.S_ISDIR(about.st_mode) and about.st_dev == top:
                todo += [entry.path for entry in os.scandir(here)]
        except OSError:
            continue  # gone meanwhile
