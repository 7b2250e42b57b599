"""Files that are read and written safely: regular files only, links that stay in a downloaded folder, atomic replacement."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from types import TracebackType
from typing import IO

from stoker.contract.text import parse_json, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

# For logs that grow: no link is followed to a file elsewhere, and no pipe is waited for (ENXIO). Their folder may have come with a
# checkout, and no signal ends a launcher that waits in open().
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY

# For what was made of files that others may not read: a folder around it that came with a checkout is open to them.
PRIVATE = 0o600


def open_regular(path: str | os.PathLike[str], dir_fd: int | None = None, follow: bool = True) -> int:
    """A descriptor for reading, of a regular file only. A FIFO would block for ever, and a device has no end."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    handle = os.open(path, flags, dir_fd=dir_fd)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, f"is {kind_of(mode)}, not a regular file", os.fspath(path))
    return handle


def open_below(root: str, path: str) -> int:
    """As open_regular, of `path` below `root`: no link is followed, neither the file nor a folder on the way to it."""
    if "/" not in path:  # most calls: a thousand runs are listed in a fraction of a second
        return open_regular(os.path.join(root, path), follow=False)
    folder = os.open(root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        *folders, name = path.split("/")
        for step in folders:
            inner = os.open(step, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        return open_regular(name, dir_fd=folder, follow=False)
    finally:
        os.close(folder)


_HUB_ENTRIES = (
    "models--",
    "datasets--",
    "spaces--",
)  # in its cache: ENTRY/snapshots/REVISION/FILE -> ../../blobs/DIGEST


def hub_blobs(folder: str) -> Iterator[str]:
    """Where links of a folder of the hub's cache may lead. `blobs` that is a link itself leads elsewhere, and does not count."""
    parts = folder.split(os.sep)
    for place, (name, inner) in enumerate(itertools.pairwise(parts)):
        if name.startswith(_HUB_ENTRIES) and inner == "snapshots":
            yield os.sep.join([*parts[: place + 1], "blobs"])


def open_inside(path: str | os.PathLike[str]) -> int:
    """As open_regular, of a file in a folder that somebody else packed: a link may lead to another file of that very folder, or
    to one of the blobs of the hub's cache. Elsewhere it may lead to anything of our own (.git/config, say), which would
    then be copied for others to read.
    """
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        handle = open_regular(os.path.basename(path), dir_fd=folder)
        link = os.stat(os.path.basename(path), dir_fd=folder, follow_symlinks=False)
        # Of what is open, whatever the names mean by now.
        home, real = (os.readlink(f"/proc/self/fd/{number}") for number in (folder, handle))
        target = os.fstat(handle)
    finally:
        os.close(folder)
    same = os.path.dirname(real) == home and (not stat.S_ISLNK(link.st_mode) or link.st_uid == target.st_uid)
    if same or os.path.dirname(real) in hub_blobs(home):
        return handle
    os.close(handle)
    why = f"is a link that leads out of its folder, to {printable(real, 200)}: copy that file there if it belongs there"
    raise OSError(errno.ELOOP, why, os.fspath(path))


def open_lock_file(path: str) -> int:
    """A lock file, open for writing, made where there is none: regular, with one name. A link would lead elsewhere.

    For its owner alone: whoever can open a file, if only to read it, can lock it and keep its owner out.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file with one name", path)
    if about.st_mode & 0o077 and about.st_uid == os.geteuid():  # an earlier version's
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(handle, 0o600)
    return handle


def kind_of(mode: int) -> str:
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
    """Return the content of a regular file. With `inside`, open it by `open_inside`. Raises OSError."""
    with os.fdopen(open_inside(path) if inside else open_regular(path), "rb") as file:
        return file.read()


def read_text(path: str | os.PathLike[str], errors: str = "strict", *, inside: bool = False) -> str:
    """Return the content as text. Raises OSError, or ValueError if it is not UTF-8."""
    return read_bytes(path, inside=inside).decode("utf-8", errors)


def read_json(path: str | os.PathLike[str], *, inside: bool = False) -> Any:
    """Return the value of a JSON file. Raises OSError or ValueError."""
    return parse_json(read_bytes(path, inside=inside))


def lines_of(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the lines of a regular file, with their ends."""
    with os.fdopen(open_regular(path), "rb") as file:
        yield from file


def json_lines(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line that holds a JSON object, with the object.

    A line that is being written, or that a crash tore, is passed over. A missing file has no lines. Raises OSError if
    the path is a named pipe or a device.
    """
    if not os.path.exists(path):
        return
    for raw in lines_of(path):
        if raw.lstrip()[:1] != b"{":
            continue
        line = raw.decode("utf-8", "replace")
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield line, value


def text_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the lines as UTF-8 text without a byte-order mark, as csv.reader takes them. Raises ValueError if it is not UTF-8."""
    for number, line in enumerate(lines_of(path)):
        yield (line if number else line.removeprefix(b"\xef\xbb\xbf")).decode()


def temporary_name(path: str) -> str:
    """Beside `path`, and nobody can have made it before: neither a process of this number that died nor another user."""
    return f"{path}.{os.getpid()}-{os.urandom(4).hex()}.tmp"


class WholeFile:
    """In place after the `with` block, gone when it raises. `durable`: also after a power cut, for a disk's answer."""

    def __init__(self, path: str, mode: int = 0o666, durable: bool = True) -> None:
        self._path = path
        self._durable = durable
        self._temporary = temporary_name(path)
        handle = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        self._file: IO[bytes] = os.fdopen(handle, "wb")

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
        except FileNotFoundError:  # interrupted right after the rename
            pass


def refuse_other_kind(path: str, begins: bytes, kind: str) -> None:
    """A file that somebody named is replaced by one of the same kind alone: a mistyped name costs no other file. What
    holds nothing (a link, a pipe, an empty file) may go.
    """
    from stoker.contract.names import EX_CANTCREAT, Refusal

    if os.path.islink(path) or not os.path.isfile(path) or not os.path.getsize(path):
        return
    try:
        with os.fdopen(open_regular(path, follow=False), "rb") as file:
            same = file.read(len(begins)).lower() == begins.lower()
    except OSError as problem:
        raise Refusal(
            f"{printable(path)} already exists and can't be read: {problem.strerror}", EX_CANTCREAT
        ) from problem
    if not same:
        line = f"{printable(path)} already exists and is not {kind}: give another name, or remove it first"
        raise Refusal(line, EX_CANTCREAT)


def write_whole(path: str, data: bytes | str, durable: bool = True) -> None:
    with WholeFile(path, durable=durable) as file:
        # Names that aren't UTF-8: \\udc80 is JSON.
        file.write(data if isinstance(data, bytes) else data.encode("utf-8", "backslashreplace"))


def write_json(path: str, value: Any, durable: bool = True) -> None:
    import json

    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", durable)


def sync_folder(path: str) -> None:
    """A rename is on the disk when its folder is."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
