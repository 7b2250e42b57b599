"""One lock per GPU, so that two launches never pick the same one. Agents, jobs and `stoker clean` use it.

A run holds a flock on a file named after the GPU's UUID for as long as it lives; the kernel frees it when the holder
dies. The files are never unlinked: a second launcher could otherwise lock a file that has no name any more.

All users of a machine share one folder, and any of them may create it first or put something else in its place. So no
symbolic link is followed, a lock must be a regular file with one name, and nothing that is opened can block. Where the
folder or a file in it is unusable, a run locks in a folder of its user's own: this still keeps that user's runs apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator

from stoker.contract import env_vars
from stoker.contract.frozen import frozen
from stoker.contract.process import find_process, kernel_lines, process_owner
from stoker.contract.safe_io import open_regular
from stoker.contract.text import escape, parse_json
from stoker.control.machine.procfs import user_name

_DEFAULT = "/tmp/stoker-gpu-locks"
_OWN_ONLY = "GPU locks keep out only your own runs"


class UnusableLockFolder(Exception):
    """A lock folder or a lock file can't be used. The text says why, for one line."""


class GpuLocks:
    """The GPU locks that this process holds for one run."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.notices: list[str] = []  # of the newest `take`: what could not be locked as it should be
        self._held: dict[str, int] = {}

    def take(self, uuids: list[str]) -> dict[str, str]:
        """Lock all of these GPUs or none. Return the holders of those that are taken, by UUID; empty means success."""
        taken: dict[str, int] = {}
        refused: dict[str, str] = {}
        with contextlib.closing(_Folders(make=True)) as folders:
            self.notices = folders.notices
            for uuid in uuids:
                handle = None if uuid in self._held else _open_first(folders, uuid)
                if handle is None:
                    continue
                taken[uuid] = handle
                if try_lock(handle, fcntl.LOCK_EX):
                    _write_holder(handle, self.run_id)
                else:
                    refused[uuid] = describe_holder(handle)
        if refused:
            for handle in taken.values():
                os.close(handle)
        else:
            self._held.update(taken)
        return refused

    @property
    def handles(self) -> tuple[int, ...]:
        """The open lock files. A child that inherits them keeps the locks for its own life, too."""
        return tuple(self._held.values())

    def release(self) -> None:
        for handle in self._held.values():
            os.close(handle)
        self._held.clear()


def held_gpus(uuids: list[str]) -> dict[str, str]:
    """Return who holds which of these GPUs, by UUID. What is unusable is passed over; `take` reports it."""
    holders: dict[str, str] = {}
    with contextlib.closing(_Folders(make=False)) as folders:
        for uuid in uuids:
            for folder in folders:
                handle = None
                with contextlib.suppress(UnusableLockFolder):
                    handle = open_to_look(folder, lock_name(uuid))
                if handle is None:
                    continue
                if not try_lock(handle, fcntl.LOCK_SH):
                    holders.setdefault(uuid, describe_holder(handle))
                os.close(handle)
    return holders


# ---- folders ----


@frozen
class LockFolder:
    path: str
    handle: int
    is_shared: bool  # by all users
    notice: str = ""  # why it is usable, but not as it should be


def open_folders(make: bool) -> Iterator[LockFolder | UnusableLockFolder]:
    """Yield the shared folder and then this user's own ones: each open, or why it is unusable. Missing ones are left out.

    `make` creates them. The caller closes the handles.
    """
    shared = os.environ.get(env_vars.GPU_LOCKS) or _DEFAULT
    # Another user may have taken the first of the own names in /tmp, too.
    own = (f"{shared}-{os.getuid()}", f"/run/user/{os.getuid()}/stoker-gpu-locks")
    for path in (shared, *own):
        try:
            folder = _open_folder(path, make, is_shared=path == shared)
        except UnusableLockFolder as problem:
            yield problem
        else:
            if folder is not None:
                yield folder


def _open_folder(path: str, make: bool, is_shared: bool) -> LockFolder | None:
    if make:
        _make_folder(path, 0o1777 if is_shared else 0o700)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise _cannot_open(path, problem) from problem
    try:
        notice = _check_shared(path, handle) if is_shared else _check_own(path, handle)
        return LockFolder(path, handle, is_shared, notice)
    except UnusableLockFolder:
        os.close(handle)
        raise


def _make_folder(path: str, mode: int) -> None:
    # The final mode from the first moment: a later chmod could be led to another folder.
    before = os.umask(0)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        pass
    except OSError as problem:
        raise UnusableLockFolder(f"{path} can't be made: {problem.strerror}") from problem
    finally:
        os.umask(before)


def _check_shared(path: str, handle: int) -> str:
    """Return a notice, or nothing. Raises Unusable if others could remove our lock files or we can't write there."""
    about = os.fstat(handle)
    mode = f"mode {stat.S_IMODE(about.st_mode):o}"
    is_open_to_all = about.st_mode & 0o1777 == 0o1777
    if not is_open_to_all and about.st_uid not in (0, os.getuid()):
        whose = f"{path} belongs to user {user_name(about.st_uid)}"
        raise UnusableLockFolder(f"{whose} and is not open to all (it needs mode 1777, and has {mode})")
    if about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX:
        raise UnusableLockFolder(f"{path} is not sticky ({mode}): others can remove its files; `chmod 1777 {path}` repairs it")
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=handle, effective_ids=True):
        raise UnusableLockFolder(f"{path} can't be written ({mode}); `chmod 1777 {path}` repairs it")
    if is_open_to_all:
        return ""
    return f"{path} is not open to all users ({mode}): its locks keep out only those who can write there"


def _check_own(path: str, handle: int) -> str:
    about = os.fstat(handle)
    if about.st_uid != os.getuid():
        raise UnusableLockFolder(f"{path} belongs to user {user_name(about.st_uid)}")
    if about.st_mode & 0o022:
        raise UnusableLockFolder(f"{path} can be written by others (mode {stat.S_IMODE(about.st_mode):o})")
    return ""


class _Folders:
    """The usable folders in their order, each opened once and when it is first needed."""

    def __init__(self, make: bool) -> None:
        self.notices: list[str] = []
        self._make = make
        self._open: list[LockFolder] = []
        self._next = self._open_usable()

    def note(self, line: str) -> None:
        if line not in self.notices:
            self.notices.append(line)

    def __iter__(self) -> Iterator[LockFolder]:
        yield from self._open
        for folder in self._next:
            self._open.append(folder)
            yield folder

    def _open_usable(self) -> Iterator[LockFolder]:
        problems: list[str] = []
        for folder in open_folders(self._make):
            if isinstance(folder, UnusableLockFolder):
                problems.append(str(folder))
                continue
            if folder.notice:
                self.note(folder.notice)
            if problems:
                self.note(f"{'; '.join(problems)}; locking in {folder.path}: {_OWN_ONLY}")
                problems = []
            yield folder
            if self._make and not folder.is_shared:
                return  # one of the user's own is enough
        if problems:
            self.note("; ".join(problems))

    def close(self) -> None:
        for folder in self._open:
            os.close(folder.handle)


# ---- lock files ----


def lock_name(uuid: str) -> str:
    """Return the file name of a GPU's lock. A MIG device of an old driver has slashes in its name."""
    name = "".join(sign if sign.isalnum() or sign in "-_.:" else "_" for sign in uuid)[:200]
    if not name.strip("."):
        raise UnusableLockFolder(f"GPU {escape(uuid, 60)!r} has no name for a lock file")
    return name


def _open_first(folders: _Folders, uuid: str) -> int | None:
    """Open a GPU's lock file in the first folder where that works. None: this GPU can't have a lock at all."""
    problem = ""
    for folder in folders:
        try:
            handle = _open_to_lock(folder, lock_name(uuid))
        except UnusableLockFolder as unusable:
            problem = problem or str(unusable)
            continue
        if problem:
            folders.note(f"{problem}; locking it in {folder.path}: {_OWN_ONLY}")
        return handle
    folders.note(f"GPU {uuid} has no lock: {problem or 'no folder can be used'}; another run may pick it too")
    return None


def _open_to_lock(folder: LockFolder, name: str) -> int:
    """Open a lock file for writing; create it if it is missing.

    First without O_CREAT: the kernel may forbid it on other users' files in a sticky folder (fs.protected_regular).
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        try:
            return _checked(os.open(name, flags, dir_fd=folder.handle), folder, name)
        except FileNotFoundError:
            pass
        try:
            handle = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder.handle)
        except FileExistsError:  # another launch was faster
            return _checked(os.open(name, flags, dir_fd=folder.handle), folder, name)
    except OSError as problem:
        raise _cannot_open(name, problem, folder) from problem
    os.fchmod(handle, 0o666)  # the next user's run must be able to lock it
    return handle


def open_to_look(folder: LockFolder, name: str) -> int | None:
    """Open a lock file for reading; None: it is missing."""
    try:
        return _checked(open_regular(name, dir_fd=folder.handle, follow=False), folder, name)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise _cannot_open(name, problem, folder) from problem


def _checked(handle: int, folder: LockFolder, name: str) -> int:
    """Return the handle of a regular file with one name: writing to a second name would write over some other file."""
    about = os.fstat(handle)
    if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
        return handle
    os.close(handle)
    kind = "has several names" if stat.S_ISREG(about.st_mode) else "is not a regular file"
    raise UnusableLockFolder(f"{folder.path}/{escape(name, 80)} of user {user_name(about.st_uid)} {kind}: not a lock file")


def _cannot_open(name: str, problem: OSError, folder: LockFolder | None = None) -> UnusableLockFolder:
    """Return why a lock file, or without `folder` the folder `name`, can't be opened, and whose it is."""
    where = escape(f"{folder.path}/{name[:80]}" if folder else name)
    try:
        about = os.stat(name, dir_fd=folder.handle if folder else None, follow_symlinks=False)
    except OSError:
        return UnusableLockFolder(f"{where} can't be opened: {problem.strerror}")
    whose = f"of user {user_name(about.st_uid)}"
    if stat.S_ISLNK(about.st_mode):
        return UnusableLockFolder(f"{where} is a symbolic link {whose}")
    return UnusableLockFolder(f"{where} {whose} can't be opened: {problem.strerror} (mode {stat.S_IMODE(about.st_mode):o})")


def try_lock(handle: int, how: int) -> bool:
    """Try to lock an open file; never wait."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_holder(handle: int, run_id: str) -> None:
    """Write who holds the lock, for messages. On a full /tmp this fails, and the lock is ours without it."""
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"run": run_id, "pid": os.getpid()}).encode(), 0)


def describe_holder(handle: int) -> str:
    """Return who has this file locked. Anybody can write the file, so its text counts only as far as the kernel agrees."""
    run, pid = _read_holder(handle)
    about = os.fstat(handle)
    holder_pid = _locked_by(about)
    if not holder_pid:
        if run:
            return f"run {run} (agent pid {pid}, not visible from here)"
        hidden = f"a process that is not visible from here (lock file of user {user_name(about.st_uid)})"
        return f"{hidden}; --share-gpus starts without GPU locks"
    uid = process_owner(holder_pid)
    whose = f", user {user_name(uid)}" if uid is not None and uid != os.getuid() else ""
    if run and holder_pid == pid:
        return f"run {run} (agent pid {pid}{whose})"
    holder = find_process(holder_pid)
    name = f" ({escape(holder.name, 40)}{whose})" if holder is not None else ""
    return f"pid {holder_pid}{name}, which is not a Stoker run; --share-gpus starts without GPU locks"


def last_holder(handle: int) -> str:
    """Return what the file of a free lock says about its last holder."""
    run, pid = _read_holder(handle)
    return f"run {run} (agent pid {pid})" if run else "unknown"


def _read_holder(handle: int) -> tuple[str, int]:
    try:
        holder = parse_json(os.pread(handle, 4096, 0))
        run, pid = holder["run"], holder["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        return "", 0
    if not isinstance(run, str) or not run or type(pid) is not int:
        return "", 0
    return escape(run, 200), pid


def _locked_by(about: os.stat_result) -> int:
    """Return the pid that the kernel has for this file's flock; 0 if it shows none, as from within a container."""
    there = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    rows = [line.split() for line in kernel_lines("/proc/locks")]
    same_inode = [row for row in rows if row[1:2] == ["FLOCK"] and row[5].endswith(f":{about.st_ino}")]
    # An overlay's stat has another device than its locks.
    exact = [row for row in same_inode if row[5] == there] or same_inode
    return max(int(exact[0][4]), 0) if exact else 0
