"""Files that are there whole or not at all: written under a name nobody can have made before, then renamed."""

from __future__ import annotations

import os
from types import TracebackType
from typing import IO, Any

# For logs that grow: no link is followed to a file elsewhere, and no pipe is waited for (ENXIO). Their folder may have come with a
# checkout, and no signal ends a launcher that waits in open().
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY

# For what was made of files that others may not read: a folder around it that came with a checkout is open to them.
PRIVATE = 0o600


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
    from stoker.contract.untrusted import open_regular, printable

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
