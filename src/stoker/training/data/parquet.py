"""Parquet files, in bounded memory. A small file can unfold to any size: pages of zeros, or a dictionary's one long
text in a million rows.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any

from stoker.contract.names import EX_DATAERR, Refusal

ROWS, BATCH = 1024, 64 << 20  # rows that are read at once, and their bytes as far as the file's metadata tells
AT_ONCE = 64  # rows that become Python's at once
ROOM = 512 << 20  # bytes that reading a batch may allocate, besides the compressed columns themselves
_PAGE = os.sysconf("SC_PAGE_SIZE")


def open_parquet(path: str, name: str = "") -> Any:
    """`name`: what people call it, where `path` is an unpacked copy."""
    shown = name or path
    os.environ.setdefault(
        "ARROW_DEFAULT_MEMORY_POOL", "system"
    )  # its mimalloc maps a gigabyte in advance, within which no limit is seen
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as problem:
        raise Refusal(f"{shown} needs pyarrow: `pip install pyarrow`", EX_DATAERR) from problem
    try:
        if not os.path.isfile(path):
            raise ValueError("not a regular file")
        table = parquet.ParquetFile(path)
        groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        if sum(group.num_rows for group in groups) != table.metadata.num_rows or any(
            min(group.num_rows, group.total_byte_size) < 0 for group in groups
        ):
            raise ValueError("its row groups do not add up")
        return table
    except (OSError, ValueError) as problem:  # pyarrow's ArrowInvalid is a ValueError
        raise Refusal(f"{shown} is not a parquet file: {first_line(problem)}", EX_DATAERR) from problem


def read_rows(
    path: str, table: Any, group: int, columns: Sequence[str], name: str = ""
) -> Iterator[list[dict[str, Any]]]:
    """Of one row group, a few at once. `name`: as above."""
    shown = name or path
    about = table.metadata.row_group(group)
    parts = [about.column(number) for number in range(about.num_columns)]
    wanted = frozenset(columns)
    parts = [part for part in parts if not wanted.isdisjoint(_columns_above(part.path_in_schema))]
    unfolded = sum(max(part.total_uncompressed_size, 0) for part in parts)
    compressed = min(sum(max(part.total_compressed_size, 0) for part in parts), os.path.getsize(path))
    count = max(1, min(ROWS, BATCH * about.num_rows // max(unfolded, 1)))
    try:
        batches = table.iter_batches(batch_size=count, row_groups=[group], columns=list(columns), use_threads=False)
        while True:
            with Bounded(ROOM + 2 * compressed):
                batch = next(batches, None)
            if batch is None:
                return
            step = (
                1 if "dictionary" in str(batch.schema) else AT_ONCE
            )  # a text that many rows share is there once, and becomes many
            for place in range(0, len(batch), step):
                with Bounded():
                    some = batch.slice(place, step).to_pylist()
                yield some
    except MemoryError as problem:
        line = f"{shown}, row group {group + 1}: {count:,} rows of {', '.join(columns)} unfold to more than {ROOM >> 20} MB"
        raise Refusal(f"{line}: leave them out, or cut them into shorter ones", EX_DATAERR) from problem
    except (OSError, ValueError, import_module("pyarrow").lib.ArrowException) as problem:
        raise Refusal(f"{shown}, row group {group + 1} can't be read: {first_line(problem)}", EX_DATAERR) from problem


def _columns_above(path: str) -> Iterator[str]:
    """a.list.element is part of a; a column's own name may have dots, too."""
    return accumulate(path.split("."), "{}.{}".format)


def first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0][:200]


class Bounded:
    """Within it, allocating more than `room` fails, and the metadata may say what it likes."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        with open("/proc/self/statm", "rb") as file:
            used = int(file.read().split()[5]) * _PAGE
        limits = [used + self._room, *(limit for limit in self._before if limit != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), self._before[1]))

    def __exit__(self, *problem: object) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._before)
