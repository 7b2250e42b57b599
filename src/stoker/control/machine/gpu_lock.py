"""One lock per GPU, so that two launches never pick the same one. Agents, jobs and `stoker clean` use it.

A run holds a flock on a file named after the GPU's UUID for as long as it lives; the kernel frees it when the holder
dies. The files are never unlinked, because another launch could then hold a lock on a file that no longer has a name.

All users of a machine share one folder, and any of them may create it first or put something else in its place. So
symbolic links are not followed, a lock must be a regular file with one name, and opening it can't block. If the folder or
a file in it can't be used, a run locks in a folder of its user's own, which still keeps that user's runs apart.
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
from stoker.contract.process import find_process, process_owner, read_kernel_lines
from stoker.contract.safe_io import open_regular
from stoker.contract.text import escape, parse_json
from stoker.control.machine.procfs import user_name

_DEFAULT_DIR = "/tmp/stoker-gpu-locks"
_OWN_ONLY = "only your own runs will respect the GPU locks"


class UnusableLockFolder(Exception):
    """A lock folder or a lock file can't be used. The text is one line that says why."""


class GpuLocks:
    """The GPU locks that this process holds for one run."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.notices: list[str] = []  # why the last `take` could not lock a GPU for all users
        self._held: dict[str, int] = {}

    def take(self, uuids: list[str]) -> dict[str, str]:
        """Lock all of these GPUs or none. Return UUID -> holder of those that were locked already, {} on success."""
        taken: dict[str, int] = {}
        refused: dict[str, str] = {}
        with contextlib.closing(_LockFolders(make=True)) as folders:
            self.notices = folders.notices
            for uuid in uuids:
                fd = None if uuid in self._held else _open_first(folders, uuid)
                if fd is None:
                    continue
                taken[uuid] = fd
                if try_lock(fd, fcntl.LOCK_EX):
                    _write_holder(fd, self.run_id)
                else:
                    refused[uuid] = describe_holder(fd)
        if refused:
            for fd in taken.values():
                os.close(fd)
        else:
            self._held.update(taken)
        return refused

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors of the lock files. A child that inherits them keeps the locks until it ends."""
        return tuple(self._held.values())

    def release(self) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()


def find_held_gpus(uuids: list[str]) -> dict[str, str]:
    """Return UUID -> holder of those GPUs that are locked. Unusable folders and files are skipped; `take` reports them."""
    holders: dict[str, str] = {}
    with contextlib.closing(_LockFolders(make=False)) as folders:
        for uuid in uuids:
            for folder in folders:
                fd = None
                with contextlib.suppress(UnusableLockFolder):
                    fd = open_for_reading(folder, lock_name(uuid))
                if fd is None:
                    continue
                if not try_lock(fd, fcntl.LOCK_SH):
                    holders.setdefault(uuid, describe_holder(fd))
                os.close(fd)
    return holders


# ---- folders ----


@frozen
class LockFolder:
    """An open lock folder."""

    path: str
    fd: int
    is_shared: bool  # whether it is the folder of all users
    notice: str = ""  # why some users can't use it


def open_folders(make: bool) -> Iterator[LockFolder | UnusableLockFolder]:
    """Yield the shared folder and then this user's own ones, or why one of them can't be used.

    With `make`, missing folders are created, else they are left out. The caller closes the fds.
    """
    shared = os.environ.get(env_vars.GPU_LOCKS) or _DEFAULT_DIR
    # Another user may also have taken the first of the own names, which is in /tmp.
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
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise _make_open_error(path, problem) from problem
    try:
        notice = _check_shared(path, fd) if is_shared else _check_own(path, fd)
        return LockFolder(path, fd, is_shared, notice)
    except UnusableLockFolder:
        os.close(fd)
        raise


def _make_folder(path: str, mode: int) -> None:
    # Created with the final mode: a later chmod could hit another folder that was put in its place.
    umask = os.umask(0)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        pass
    except OSError as problem:
        raise UnusableLockFolder(f"{path} can't be created: {problem.strerror}") from problem
    finally:
        os.umask(umask)


def _check_shared(path: str, fd: int) -> str:
    """Return a notice if the folder does not work for all users.

    Raises UnusableLockFolder if others could remove our lock files, or we can't write there.
    """
    status = os.fstat(fd)
    mode = f"mode {stat.S_IMODE(status.st_mode):o}"
    is_open_to_all = status.st_mode & 0o1777 == 0o1777
    if not is_open_to_all and status.st_uid not in (0, os.getuid()):
        owner = user_name(status.st_uid)
        raise UnusableLockFolder(
            f"{path} belongs to user {owner} and is not open to all (it needs mode 1777, and has {mode})"
        )
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise UnusableLockFolder(
            f"{path} is not sticky ({mode}): others can remove its files; repair it with `chmod 1777 {path}`"
        )
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True):
        raise UnusableLockFolder(f"{path} can't be written ({mode}); repair it with `chmod 1777 {path}`")
    if is_open_to_all:
        return ""
    return f"{path} is not open to all users ({mode}): only those who can write there respect its locks"


def _check_own(path: str, fd: int) -> str:
    status = os.fstat(fd)
    if status.st_uid != os.getuid():
        raise UnusableLockFolder(f"{path} belongs to user {user_name(status.st_uid)}")
    if status.st_mode & 0o022:
        raise UnusableLockFolder(f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o})")
    return ""


class _LockFolders:
    """The usable folders in their order. Each is opened once, when it is first needed."""

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
                self.note(f"{'; '.join(problems)}; using {folder.path}: {_OWN_ONLY}")
                problems = []
            yield folder
            if self._make and not folder.is_shared:
                return  # one folder of the user's own is enough
        if problems:
            self.note("; ".join(problems))

    def close(self) -> None:
        for folder in self._open:
            os.close(folder.fd)


# ---- lock files ----


def lock_name(uuid: str) -> str:
    """Return the file name of a GPU's lock. Old drivers have slashes in the UUIDs of MIG instances."""
    name = "".join(character if character.isalnum() or character in "-_.:" else "_" for character in uuid)[:200]
    if not name.strip("."):
        raise UnusableLockFolder(f"GPU {escape(uuid, 60)!r} has no name for a lock file")
    return name


def _open_first(folders: _LockFolders, uuid: str) -> int | None:
    """Open a GPU's lock file in the first folder where that works. Return None if it works nowhere."""
    problem = ""
    for folder in folders:
        try:
            fd = _open_to_lock(folder, lock_name(uuid))
        except UnusableLockFolder as unusable:
            problem = problem or str(unusable)
            continue
        if problem:
            folders.note(f"{problem}; using {folder.path}: {_OWN_ONLY}")
        return fd
    folders.note(f"GPU {uuid} has no lock: {problem or 'no folder can be used'}; another run may pick it too")
    return None


def _open_to_lock(folder: LockFolder, name: str) -> int:
    """Open a lock file for writing; create it if it is missing.

    It first tries without O_CREAT, which the kernel may refuse for other users' files in a sticky folder
    (fs.protected_regular).
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        try:
            return _check_lock_file(os.open(name, flags, dir_fd=folder.fd), folder, name)
        except FileNotFoundError:
            pass
        try:
            fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder.fd)
        except FileExistsError:  # another launch was faster
            return _check_lock_file(os.open(name, flags, dir_fd=folder.fd), folder, name)
    except OSError as problem:
        raise _make_open_error(name, problem, folder) from problem
    os.fchmod(fd, 0o666)  # the next user's run must be able to lock it
    return fd


def open_for_reading(folder: LockFolder, name: str) -> int | None:
    """Open a lock file for reading. Return None if there is none."""
    try:
        return _check_lock_file(open_regular(name, dir_fd=folder.fd, follow=False), folder, name)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise _make_open_error(name, problem, folder) from problem


def _check_lock_file(fd: int, folder: LockFolder, name: str) -> int:
    """Return the descriptor if it is a regular file with one name; else close it and raise UnusableLockFolder.

    A second name could be that of another file of the user, which we would overwrite.
    """
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return fd
    os.close(fd)
    kind = "has several names" if stat.S_ISREG(status.st_mode) else "is not a regular file"
    raise UnusableLockFolder(
        f"{folder.path}/{escape(name, 80)} of user {user_name(status.st_uid)} {kind}: not a lock file"
    )


def _make_open_error(name: str, problem: OSError, folder: LockFolder | None = None) -> UnusableLockFolder:
    """Return the error for a lock file that can't be opened, or for the folder `name`. It names the owner."""
    path = escape(f"{folder.path}/{name[:80]}" if folder else name)
    try:
        status = os.stat(name, dir_fd=folder.fd if folder else None, follow_symlinks=False)
    except OSError:
        return UnusableLockFolder(f"{path} can't be opened: {problem.strerror}")
    owner = f"of user {user_name(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode):
        return UnusableLockFolder(f"{path} is a symbolic link {owner}")
    return UnusableLockFolder(
        f"{path} {owner} can't be opened: {problem.strerror} (mode {stat.S_IMODE(status.st_mode):o})"
    )


def try_lock(fd: int, operation: int) -> bool:
    """Lock an open file (LOCK_EX or LOCK_SH) without waiting. Returns whether that worked."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_holder(fd: int, run_id: str) -> None:
    """Write who holds the lock, for messages. The lock is ours even if this fails, as it does on a full /tmp."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"run": run_id, "pid": os.getpid()}).encode(), 0)


def describe_holder(fd: int) -> str:
    """Return who has locked this file. Any user can write the file, so its text counts only if the kernel agrees."""
    run, pid = _read_holder(fd)
    status = os.fstat(fd)
    holder_pid = _find_lock_owner(status)
    if not holder_pid:
        if run:
            return f"run {run} (agent pid {pid}, not visible from here)"
        hidden = f"a process that is not visible from here (lock file of user {user_name(status.st_uid)})"
        return f"{hidden}; use --share-gpus to start without GPU locks"
    uid = process_owner(holder_pid)
    user = f", user {user_name(uid)}" if uid is not None and uid != os.getuid() else ""
    if run and holder_pid == pid:
        return f"run {run} (agent pid {pid}{user})"
    holder = find_process(holder_pid)
    name = f" ({escape(holder.name, 40)}{user})" if holder is not None else ""
    return f"pid {holder_pid}{name}, which is not a Stoker run; use --share-gpus to start without GPU locks"


def read_last_holder(fd: int) -> str:
    """Return the last holder of a free lock, according to its file."""
    run, pid = _read_holder(fd)
    return f"run {run} (agent pid {pid})" if run else "unknown"


def _read_holder(fd: int) -> tuple[str, int]:
    try:
        holder = parse_json(os.pread(fd, 4096, 0))
        run, pid = holder["run"], holder["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        return "", 0
    if not isinstance(run, str) or not run or type(pid) is not int:
        return "", 0
    return escape(run, 200), pid


def _find_lock_owner(status: os.stat_result) -> int:
    """Return the pid that holds this file's flock, or 0 if the kernel shows none, as in a container."""
    file_id = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    rows = [line.split() for line in read_kernel_lines("/proc/locks")]
    same_inode = [row for row in rows if row[1:2] == ["FLOCK"] and row[5].endswith(f":{status.st_ino}")]
    # On an overlay, the device of stat differs from that of the lock.
    exact = [row for row in same_inode if row[5] == file_id] or same_inode
    return max(int(exact[0][4]), 0) if exact else 0
