"""A limit on what reading a stranger's file may allocate, whatever the file says of itself.

Every step of parsing data runs within one: a file that gets past all other bounds ends in a MemoryError, which the
reader makes a refusal with the file's name.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

ROOM = 512 << 20  # bytes, where nothing else is given
_AT_ONCE, _AT_ONCE_S = 64, 0.002
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Bounded:
    """Within it, allocating more than `room` bytes besides what the process already has is a MemoryError."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        limit_to(used_memory() + self._room)

    def __exit__(self, *problem: object) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._before)


def used_memory() -> int:
    """Bytes, as RLIMIT_DATA counts them."""
    handle = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(handle, 200).split()[5]) * _PAGE
    finally:
        os.close(handle)


def limit_to(size: int) -> None:
    """Of this process, from now on; never more than it may have already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [size, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


def bounded_steps(found: Iterator[T], room: int) -> Iterator[T]:
    """The same items; making one may allocate `room` bytes. Whoever takes them has no limit meanwhile. Some items are made
    at once, as far as they are small: setting a limit takes longer than parsing a row.
    """
    ended = False
    problem: Exception | None = None
    while not ended:
        items: list[T] = []
        with Bounded(room):
            until = time.monotonic() + _AT_ONCE_S
            try:
                while not ended and len(items) < _AT_ONCE and time.monotonic() < until:
                    items.append(next(found))
            except StopIteration:
                ended = True
            except Exception as failure:  # raised below, after the items before it
                ended, problem = True, failure
        yield from items
    if problem is not None:
        raise problem
