"""The lock files of GPUs: where they lie, whether a folder and a file in it can be trusted, and who holds a lock.

The folder is shared by all users of a machine, and any of them may get there first. So nothing in it is believed: a
symbolic link is never followed, only a regular file with one name is opened, nothing that is opened can block, and what
a file says of its holder is compared with the kernel's own list of locks.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator

from stoker.contract import names
from stoker.contract.safe_io import kind_of, open_regular
from stoker.contract.shape import shape
from stoker.contract.text import parse_json, printable
from stoker.control.machine.processes import owner, process, user_name

AGENT = "stoker-agent"  # what an agent calls itself: see agent/agent.py
CHAIN = "stoker-speedrun"  # a chain of runs that holds the locks between them: see speedrun/reserve.py
JOB = "stoker-job"  # a job of several roles, likewise: see control/roles/job.py
_DEFAULT = "/tmp/stoker-gpu-locks"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCKS = 4 << 20  # bytes of /proc/locks that are read


class Unusable(Exception):
    """Why a folder or a lock file can't be used, for one line: 'X is a named pipe of user bob'."""


@shape
class Folder:
    path: str
    handle: int
    notice: str = ""  # it can be used, but not as it should be


def shared_path() -> str:
    return os.environ.get(names.GPU_LOCKS) or _DEFAULT


def own_paths() -> tuple[str, ...]:
    """Where this user locks if the shared folder can't be used. Only the first is the same for all sessions."""
    uid = os.getuid()
    return f"{shared_path()}-{uid}", f"/run/user/{uid}/stoker-gpu-locks"


def lock_name(uuid: str) -> str:
    """A MIG device of an old driver has slashes in its name."""
    name = "".join(sign if sign.isalnum() or sign in "-_.:" else "_" for sign in uuid)[:200]
    if not name.strip("."):
        raise Unusable(f"GPU {printable(uuid, 60)!r} has no name for a lock file")
    return name


def open_shared(make: bool) -> Folder | None:
    """None: it is not there. With `make` it is created for all users, sticky: nobody can remove another's lock files."""
    path = shared_path()
    if make:
        # Its final mode from the first moment: there is nothing to chmod later, and so nothing to be led astray.
        before = os.umask(0)
        try:
            _make(path, 0o1777)
        finally:
            os.umask(before)
    return _opened(path, _shared_notice)


def open_own(path: str, make: bool) -> Folder | None:
    """A folder of this user that nobody else can write to."""

    if make:
        _make(path, 0o700)
    return _opened(path, _own_notice)


def _own_notice(path: str, handle: int) -> str:
    about = os.fstat(handle)
    if about.st_uid != os.getuid():
        raise Unusable(f"{path} belongs to user {user_name(about.st_uid)}")
    if about.st_mode & 0o022:
        raise Unusable(f"{path} can be written by others (mode {stat.S_IMODE(about.st_mode):o})")
    return ""


def _make(path: str, mode: int) -> None:
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    except OSError as problem:
        raise Unusable(f"{path} can't be made: {problem.strerror}") from problem


def _opened(path: str, check: Callable[[str, int], str]) -> Folder | None:
    try:
        handle = os.open(path, _FOLDER)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise Unusable(f"{path} {_what_is(path) or problem.strerror}") from problem
    try:
        return Folder(path, handle, check(path, handle))
    except Unusable:
        os.close(handle)
        raise


def _shared_notice(path: str, handle: int) -> str:
    """Any folder that is open to all and sticky will do. Its owner could remove lock files: that ends exclusion."""
    about = os.fstat(handle)
    mode = f"mode {stat.S_IMODE(about.st_mode):o}"
    open_to_all = about.st_mode & 0o1777 == 0o1777
    if not open_to_all and about.st_uid not in (0, os.getuid()):
        whose = f"{path} belongs to user {user_name(about.st_uid)}"
        raise Unusable(f"{whose} and is not open to all (it needs mode 1777, and has {mode})")
    if about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX:
        raise Unusable(f"{path} is not sticky ({mode}): others can remove its files; `chmod 1777 {path}` repairs it")
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=handle, effective_ids=True):
        raise Unusable(f"{path} can't be written ({mode}); `chmod 1777 {path}` repairs it")
    if open_to_all:
        return ""
    return f"{path} is not open to all users ({mode}): its locks keep out only those who can write there"


def _what_is(path: str) -> str:
    try:
        about = os.lstat(path)
    except OSError:
        return ""
    if stat.S_ISDIR(about.st_mode):
        return ""
    kind = "a plain file" if stat.S_ISREG(about.st_mode) else kind_of(about.st_mode)
    return f"is {kind} of user {user_name(about.st_uid)}, not a folder"


def open_lock(folder: Folder, name: str) -> int:
    """For writing; made if missing. Without O_CREAT first: a sticky folder may forbid that on others' files."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    for _ in range(3):
        try:
            return _plain(os.open(name, flags, dir_fd=folder.handle), folder, name)
        except FileNotFoundError:
            pass
        except OSError as problem:
            raise Unusable(_why(folder, name, problem)) from problem
        try:
            handle = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder.handle)
        except FileExistsError:
            continue
        except OSError as problem:
            raise Unusable(_why(folder, name, problem)) from problem
        os.fchmod(handle, 0o666)  # ours, made just now: the next user's run must be able to lock it
        return _plain(handle, folder, name)
    raise Unusable(f"{folder.path}/{name} appears and vanishes again")


def peek(folder: Folder, name: str) -> int | None:
    """For looking who holds it; None: there is none."""
    try:
        return _plain(open_regular(name, dir_fd=folder.handle, follow=False), folder, name)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise Unusable(_why(folder, name, problem)) from problem


def _plain(handle: int, folder: Folder, name: str) -> int:
    """A second name would be a file of somebody's that we write over."""
    about = os.fstat(handle)
    if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
        return handle
    os.close(handle)
    kind = "a file with several names" if stat.S_ISREG(about.st_mode) else kind_of(about.st_mode)
    raise Unusable(f"{folder.path}/{printable(name, 80)} is {kind} of user {user_name(about.st_uid)}, not a lock file")


def _why(folder: Folder, name: str, problem: OSError) -> str:
    where = f"{folder.path}/{printable(name, 80)}"
    try:
        about = os.stat(name, dir_fd=folder.handle, follow_symlinks=False)
    except OSError:
        return f"{where} can't be opened: {problem.strerror}"
    of = f"of user {user_name(about.st_uid)}"
    if stat.S_ISREG(about.st_mode):
        return f"{where} {of} can't be opened: {problem.strerror} (mode {stat.S_IMODE(about.st_mode):o})"
    return f"{where} is {kind_of(about.st_mode)} {of}, not a lock file"


def taken(handle: int, how: int) -> bool:
    """Tries to lock it; never waits."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def describe_holder(handle: int) -> str:
    """Who has this file locked. The file's own words count where the kernel names the same process, or can't see any."""
    run, pid = _written(handle)
    about = os.fstat(handle)
    actual = _locked_by(about)
    if not actual:
        if run:
            return f"run {run} (agent pid {pid}, not visible from here)"
        hidden = f"a process that is not visible from here (lock file of user {user_name(about.st_uid)})"
        return f"{hidden}; --share-gpus starts without GPU locks"
    holder = process(actual)
    uid = owner(actual)
    whose = f", user {user_name(uid)}" if uid is not None and uid != os.getuid() else ""
    if run and actual == pid and holder is not None and holder.name in (AGENT, CHAIN, JOB):
        return f"run {run} (agent pid {pid}{whose})"
    name = f" ({printable(holder.name, 40)}{whose})" if holder is not None else ""
    return f"pid {actual}{name}, which is not a Stoker run; --share-gpus starts without GPU locks"


def last_holder(handle: int) -> str:
    """What the file says, of a lock that nobody holds."""
    run, pid = _written(handle)
    return f"run {run} (agent pid {pid})" if run else "unknown"


def _written(handle: int) -> tuple[str, int]:
    try:
        found = parse_json(os.pread(handle, 4096, 0))
        run, pid = found["run"], found["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        return "", 0
    if not isinstance(run, str) or not run or type(pid) is not int or not 0 < pid < 1 << 31:
        return "", 0
    return printable(run, 200), pid


def _locked_by(about: os.stat_result) -> int:
    """The pid the kernel has for this file's flock; 0: none that this process may see, as from within a container."""
    try:
        with open("/proc/locks", "rb") as file:
            lines = file.read(_LOCKS).splitlines()
    except OSError:
        return 0
    there = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}".encode()
    same_inode = b":%d" % about.st_ino
    rows = (line.split() for line in lines)
    found = [row for row in rows if len(row) >= 6 and row[1] == b"FLOCK" and row[5].endswith(same_inode)]
    # An overlay's stat has another device than its locks.
    exact = [words for words in found if words[5] == there] or found
    return int(exact[0][4]) if exact and exact[0][4].isdigit() else 0


def names_in(folder: Folder, most: int) -> Iterator[str]:
    """Sorted; at most so many: anybody can fill the folder."""
    found: list[str] = []
    with os.scandir(folder.handle) as entries:
        for entry in entries:
            found.append(entry.name)
            if len(found) >= most:
                break
    yield from sorted(found)
