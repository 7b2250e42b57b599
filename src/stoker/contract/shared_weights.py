"""Folders of weights in this machine's shared memory: trainers write them, servers of the same user read them.

A folder lies directly in /dev/shm and has mode 0700; the sticky bit of /dev/shm keeps others from renaming it. The
process that created it locks a file in it. The kernel frees the lock however the process ends, so any process of the
same user, even in another container with the same memory, can tell which folders a killed process left behind.
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
FRESH_S = 60.0  # the process that created a younger folder may not have locked it yet

_own_folders: set[str] = set()  # created by this process; opening and closing their lock files would free the locks


class SharedFolder:
    """A folder of this process, which lasts until `remove` or the end of the process. Raises OSError."""

    def __init__(self) -> None:
        remove_dead_folders()
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=SHM)
        _own_folders.add(self.path)
        temporary, final = (os.path.join(self.path, name) for name in (f"{LOCK}.tmp", LOCK))
        self._fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # A POSIX lock ends with the process that took it: forked workers don't inherit it.
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(temporary, final)  # so that nobody ever sees it unlocked while this process lives

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        _own_folders.discard(self.path)
        os.close(self._fd)


def shm_identity() -> str:
    """Return an id that is equal for two processes of one user that see the same /dev/shm, or "" without one."""
    try:
        status = os.stat(SHM)
    except OSError:
        return ""
    boot_id = read_kernel_file("/proc/sys/kernel/random/boot_id").strip()
    identity = f"{boot_id} {status.st_dev} {status.st_ino} {os.geteuid()}"
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def why_too_large(size: int) -> str:
    """Return why this many more bytes don't fit, or "". Shared memory counts as memory of the host and container."""
    try:
        disk = os.statvfs(SHM)
    except OSError as problem:
        return f"{SHM}: {problem.strerror}"
    if disk.f_bavail * disk.f_frsize < size:
        return f"{SHM} has {format_bytes(disk.f_bavail * disk.f_frsize)} free, and {format_bytes(size)} are needed"
    available = read_memory()[1]
    if available // 2 < size:  # the trainers need the other half
        return f"{format_bytes(size)} are needed, and {format_bytes(available)} of this host's memory are free"
    return ""


def is_shared_folder(path: str, shm: str = "") -> bool:
    """Return whether a path is in such a folder of our user that nobody else can write to. Doesn't follow links."""
    shm = shm or SHM
    name, _, inner = path.removeprefix(f"{shm}/").partition("/")
    if not path.startswith(f"{shm}/{PREFIX}") or not inner or ".." in inner.split("/"):
        return False
    try:
        parent, folder = os.lstat(shm), os.lstat(os.path.join(shm, name))
    except OSError:
        return False
    is_private = stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.geteuid() and not folder.st_mode & 0o077
    is_safe_parent = parent.st_mode & stat.S_ISVTX or not parent.st_mode & 0o022
    return bool(is_private and parent.st_uid in (0, os.geteuid()) and is_safe_parent)


def find_dead_folders(shm: str = "") -> Iterator[str]:
    """Yield the folders of this user whose process has ended."""
    shm = shm or SHM
    try:
        names = sorted(os.listdir(shm))
    except OSError:
        return
    for name in names:
        path = os.path.join(shm, name)
        if not name.startswith(PREFIX) or path in _own_folders:
            continue
        if is_shared_folder(os.path.join(path, LOCK), shm) and is_dead(path):
            yield path


def is_dead(path: str) -> bool:
    """Return whether the process that created this folder has ended."""
    try:
        fd = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # killed before it had the lock, or while it removed the folder
        try:
            return time.time() - os.lstat(path).st_mtime > FRESH_S
        except OSError:
            return False
    except OSError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)


def remove_dead_folders() -> None:
    """Remove what killed trainers of this user left behind."""
    for path in find_dead_folders():
        shutil.rmtree(path, ignore_errors=True)
