"""Folders of weights in this machine's shared memory: made by trainers, read by servers of the same user, gone with their owner.

A folder is for its owner alone (mode 0700), directly in /dev/shm, where the sticky bit keeps others from renaming it. The
process that made it holds a lock on a file in it: the kernel frees that lock however the process ends, so anybody of the
same user knows what a killed one left behind, in other containers that see this memory, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator

from stoker.contract.host_memory import read_memory
from stoker.contract.process import read_kernel_file
from stoker.contract.units import format_bytes

SHM = "/dev/shm"
PREFIX, LOCK = "stoker-weights-", ".owner"
FRESH_S = 60.0  # a folder younger than this may be about to be locked


class SharedFolder:
    """One of ours, until `remove` or until this process ends. OSError: it can't be made."""

    def __init__(self) -> None:
        remove_dead_folders()
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=SHM)
        _own.add(self.path)
        fresh, final = (os.path.join(self.path, name) for name in (f"{LOCK}.tmp", LOCK))
        self._handle = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # A POSIX lock: forked workers don't inherit it, so it goes with the process that took it.
        fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(fresh, final)  # nobody ever sees it unlocked while this process lives

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        _own.discard(self.path)
        os.close(self._handle)


_own: set[str] = set()  # of this process: opening and closing their locks would free them


def shm_identity() -> str:
    """The same for two processes that see the same /dev/shm as the same user, and for no others. Empty: there is none."""
    try:
        about = os.stat(SHM)
    except OSError:
        return ""
    told = f"{read_kernel_file('/proc/sys/kernel/random/boot_id').strip()} {about.st_dev} {about.st_ino} {os.geteuid()}"
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def why_too_large(size: int) -> str:
    """Empty: so many bytes more fit. Its pages are memory of this host, and of this container."""
    try:
        disk = os.statvfs(SHM)
    except OSError as problem:
        return f"{SHM}: {problem.strerror}"
    if disk.f_bavail * disk.f_frsize < size:
        return f"{SHM} has {format_bytes(disk.f_bavail * disk.f_frsize)} free, and {format_bytes(size)} are needed"
    available = read_memory()[1]
    if available // 2 < size:  # the rest is for the trainers themselves
        return f"{format_bytes(size)} are needed, and of this host's memory {format_bytes(available)} are free"
    return ""


def is_shared_folder(path: str, place: str = "") -> bool:
    """Whether it is in such a folder of our own user. No link is followed to it, and nobody else can write to it."""
    place = place or SHM
    top, _, rest = path.removeprefix(f"{place}/").partition("/")
    if not path.startswith(f"{place}/{PREFIX}") or not rest or ".." in rest.split("/"):
        return False
    try:
        above, about = os.lstat(place), os.lstat(os.path.join(place, top))
    except OSError:
        return False
    closed = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077
    kept = above.st_uid in (0, os.geteuid()) and (above.st_mode & stat.S_ISVTX or not above.st_mode & 0o022)
    return bool(closed and kept)


def find_dead_folders(place: str = "") -> Iterator[str]:
    """Folders of this user whose process has ended. `place`: empty: PLACE."""
    place = place or SHM
    try:
        names = sorted(os.listdir(place))
    except OSError:
        return
    for name in names:
        path = os.path.join(place, name)
        if (
            name.startswith(PREFIX)
            and path not in _own
            and is_shared_folder(os.path.join(path, LOCK), place)
            and is_dead(path)
        ):
            yield path


def is_dead(path: str) -> bool:
    try:
        handle = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _is_old(path)  # killed before it had the lock, or while it removed the folder
    except OSError:
        return False
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(handle)


def _is_old(path: str) -> bool:
    try:
        return time.time() - os.lstat(path).st_mtime > FRESH_S
    except OSError:
        return False


def remove_dead_folders() -> None:
    """What killed trainers of this user left behind."""
    for path in find_dead_folders():
        shutil.rmtree(path, ignore_errors=True)
