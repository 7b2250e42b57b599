"""The working directory, left for a while: libraries look there for settings of their own, and its files may be anybody's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def working_in(folder: str) -> Iterator[None]:
    """Of the whole process: where no other thread opens a file by a relative path meanwhile."""
    before = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(folder)
        yield
    finally:
        os.fchdir(before)
        os.close(before)
