"""Reads and writes files safely: regular files only, links that stay in a downloaded folder, atomic replacement.

Also finds out whether a file or folder belongs to another user of this machine.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from types import TracebackType
from typing import IO

from stoker.contract.errors import Refusal
from stoker.contract.text import escape, parse_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

# For growing logs. A named pipe without a reader is an error (ENXIO): no signal ends a launcher that waits in open().
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY

# The mode of files that hold private content, whatever the mode of their folder.
PRIVATE = 0o600

_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")
_own_uids: dict[str, int] = {}  # folder -> the uid of files that we create there


def open_regular(path: str | os.PathLike[str], dir_fd: int | None = None, follow: bool = True) -> int:
    """Open a regular file for reading. Raises OSError for others: a FIFO would block, and a device has no end."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags, dir_fd=dir_fd)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, f"is {file_kind(mode)}, not a regular file", os.fspath(path))
    return fd


def open_below(root: str, path: str) -> int:
    """Open a regular file below `root` like open_regular, without following links in any part of its path."""
    if "/" not in path:  # most calls: keeps a list of a thousand runs fast
        return open_regular(os.path.join(root, path), follow=False)
    folder = os.open(root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        *parents, name = path.split("/")
        for parent in parents:
            inner = os.open(parent, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        return open_regular(name, dir_fd=folder, follow=False)
    finally:
        os.close(folder)


# The hub's cache: ENTRY/snapshots/REVISION/FILE is a link to ../../blobs/DIGEST.
_HUB_ENTRIES = ("models--", "datasets--", "spaces--")


def find_hub_blobs(folder: str) -> Iterator[str]:
    """Yield the `blobs` folders to which links in a folder of the hub's cache may lead."""
    parts = folder.split(os.sep)
    for position, (name, inner) in enumerate(itertools.pairwise(parts)):
        if name.startswith(_HUB_ENTRIES) and inner == "snapshots":
            yield os.sep.join([*parts[: position + 1], "blobs"])


def open_inside(path: str | os.PathLike[str]) -> int:
    """Open a regular file of a downloaded folder, like open_regular.

    A link may only lead to a file of that folder or to a blob of the hub's cache. Otherwise it could lead to any file
    of the user, which would be copied for others to read.
    """
    folder, real = os.path.realpath(os.path.dirname(path)), os.path.realpath(path)
    if os.path.dirname(real) not in (folder, *find_hub_blobs(folder)):
        why = f"is a link that leads out of its folder, to {escape(real, 200)}; copy that file into the folder if it belongs there"
        raise OSError(errno.ELOOP, why, os.fspath(path))
    return open_regular(real, follow=False)


def open_lock_file(path: str) -> int:
    """Open or create a lock file that only its owner can open: any process that can open it could lock it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise OSError(errno.EINVAL, f"is {file_kind(mode)}, not a lock file", path)
    return fd


def file_kind(mode: int) -> str:
    """Return what kind of file has this mode, for a message."""
    kinds = {
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a block device",
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a symbolic link",
    }
    return kinds.get(stat.S_IFMT(mode), "no file")


def read_bytes(path: str | os.PathLike[str], *, inside: bool = False) -> bytes:
    """Return the content of a regular file, opened by `open_inside` if `inside` is set. Raises OSError."""
    with os.fdopen(open_inside(path) if inside else open_regular(path), "rb") as file:
        return file.read()


def read_text(path: str | os.PathLike[str], errors: str = "strict", *, inside: bool = False) -> str:
    """Return the content as text. Raises OSError, or ValueError if it is not UTF-8."""
    return read_bytes(path, inside=inside).decode("utf-8", errors)


def read_json(path: str | os.PathLike[str], *, inside: bool = False) -> Any:
    """Return the value of a JSON file. Raises OSError or ValueError."""
    return parse_json(read_bytes(path, inside=inside))


def read_lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the lines of a regular file, with their ends."""
    with os.fdopen(open_regular(path), "rb") as file:
        yield from file


def read_json_lines(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line that holds a JSON object, with the object.

    Skips lines that are incomplete, because of a crash or because they are being written. A missing file has no
    lines. Raises OSError if the path is a named pipe or a device.
    """
    if not os.path.exists(path):
        return
    for raw in read_lines(path):
        if raw.lstrip()[:1] != b"{":
            continue
        line = raw.decode("utf-8", "replace")
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield line, value


def read_text_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the lines as UTF-8 text without a byte-order mark, for csv.reader. Raises ValueError if it is not UTF-8."""
    for number, line in enumerate(read_lines(path)):
        yield (line if number else line.removeprefix(b"\xef\xbb\xbf")).decode()


def temporary_name(path: str) -> str:
    """Return a name next to `path` that no dead process with our pid and no other user can have created before."""
    return f"{path}.{os.getpid()}-{os.urandom(4).hex()}.tmp"


class AtomicFile:
    """A file that appears at its path after the `with` block, or not at all if the block raises.

    `durable` makes it survive a power cut, at the cost of a disk flush.
    """

    def __init__(self, path: str, mode: int = 0o666, durable: bool = True) -> None:
        self._path = path
        self._durable = durable
        self._temporary = temporary_name(path)
        fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        self._file: IO[bytes] = os.fdopen(fd, "wb")

    def __enter__(self) -> IO[bytes]:
        return self._file

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if kind is None and self._durable:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                os.replace(self._temporary, self._path)
        except BaseException:
            self._remove()
            raise
        if kind is not None:
            self._remove()

    def _remove(self) -> None:
        try:
            os.unlink(self._temporary)
        except FileNotFoundError:  # the interrupt came right after the rename
            pass


def refuse_other_kind(path: str, begins: bytes, kind: str) -> None:
    """Refuse to replace an existing file unless it begins like the new one: a mistyped name must not cost another file.

    Links, pipes and empty files may be replaced.
    """
    from stoker.contract.errors import EX_CANTCREAT

    if os.path.islink(path) or not os.path.isfile(path) or not os.path.getsize(path):
        return
    try:
        with os.fdopen(open_regular(path, follow=False), "rb") as file:
            is_same_kind = file.read(len(begins)).lower() == begins.lower()
    except OSError as problem:
        raise Refusal(f"{escape(path)} already exists and can't be read: {problem.strerror}", EX_CANTCREAT) from problem
    if not is_same_kind:
        line = f"{escape(path)} already exists and is not {kind}; choose another name, or remove it first"
        raise Refusal(line, EX_CANTCREAT)


def write_atomic(path: str, data: bytes | str, durable: bool = True) -> None:
    """Replace a file in one step, so that readers see either the old content or the new."""
    with AtomicFile(path, durable=durable) as file:
        # File names that aren't UTF-8 become \\udc80, which is valid JSON.
        file.write(data if isinstance(data, bytes) else data.encode("utf-8", "backslashreplace"))


def write_json(path: str, value: Any, durable: bool = True) -> None:
    import json

    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", durable)


def sync_folder(path: str) -> None:
    """Flush a folder to the disk, and with it the renames in it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---- owners: can another user of this machine change a file or folder? ----


def is_own_uid(uid: int, folder: str) -> bool:
    """Return whether files of this uid in `folder` are ours. A file system may map our uid: NFS maps root to nobody."""
    return uid == os.geteuid() or uid == _own_uid_in(folder or os.curdir)


def is_own(path: str) -> bool:
    """Return whether the file, or a link itself, is ours. A file that can't be examined isn't."""
    try:
        return is_own_uid(os.lstat(path).st_uid, os.path.dirname(path))
    except OSError:
        return False  # another user's FUSE mount is closed even to root


def is_trusted(uid: int, folder: str) -> bool:
    """Return whether a file of this uid is ours or root's.

    Root in a container also trusts the owner of the working folder: a bind mount shows files with their uid on the
    host.
    """
    if uid == 0 or is_own_uid(uid, folder):
        return True
    if os.geteuid() != 0 or not _owns_working_folder(uid):
        return False
    # A container without such a mark is recognized by a host user who has no account in it.
    return any(map(os.path.exists, _CONTAINER_MARKS)) or not _account(uid)


def why_shared(path: str, sticky: bool = False) -> str:
    """Return why another user can change `path`: they own it or may write there; "" if they can't.

    With `sticky`, a folder is accepted in which others may create files and remove only their own. Raises OSError if it
    is missing.
    """
    folder = os.path.dirname(os.path.abspath(path))
    link, target = os.lstat(path), os.stat(path)
    for uid in (link.st_uid, target.st_uid):  # the owner of a link decides where it leads
        if not is_trusted(uid, path if stat.S_ISDIR(target.st_mode) else folder):
            return f"it belongs to {user_name(uid)}"
    if sticky and target.st_mode & stat.S_ISVTX:
        return ""
    if target.st_mode & stat.S_IWOTH:
        return "all users can write there" if stat.S_ISDIR(target.st_mode) else "all users can write it"
    if target.st_mode & stat.S_IWGRP and not _is_own_group(target.st_gid):
        return f"its group ({_group_name(target.st_gid)}) can write it"
    return ""


def user_name(uid: int) -> str:
    return _account(uid) or f"uid {uid}"


def _account(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _own_uid_in(folder: str) -> int:
    if folder not in _own_uids:
        import tempfile

        _own_uids[folder] = os.geteuid()
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                _own_uids[folder] = os.fstat(file.fileno()).st_uid
        except OSError:
            pass  # we can't write there, so nothing there is ours under another uid
    return _own_uids[folder]


def _owns_working_folder(uid: int) -> bool:
    try:
        status = os.stat(os.curdir)
    except OSError:
        return False
    return status.st_uid == uid and not status.st_mode & (stat.S_IWOTH | stat.S_IWGRP)


def _is_own_group(gid: int) -> bool:
    """Return whether this is root's group, or our user's private group without other members."""
    import grp
    import pwd

    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and gid == user.pw_gid and not set(group.gr_mem) - {user.pw_name}


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"
