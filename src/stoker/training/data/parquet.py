"""Parquet files, in bounded memory. A small file can unfold to any size: pages of zeros, or a dictionary's one long
text in a million rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any

from stoker.contract.memory import ROOM, Bounded  # besides the compressed columns themselves
from stoker.contract.names import EX_DATAERR, Refusal
from stoker.contract.quantities import counted
from stoker.training.data.unpack import most_unfolded, unfolds

ROWS, BATCH = 1024, 64 << 20  # rows that are read at once, and their bytes as far as the file's metadata tells
_NOTHING = 64  # characters that an empty text, list or place counts as: it takes time and memory too
_LEAST = 8  # that any other value counts as: a list may hold one short text a million times
MOST_ROWS, MOST_ROWS_EACH = 100_000, 2  # that any file may have, and for each of its bytes: nothing takes none
FOOTER_ROOM = 1 << 30  # bytes that the list of row groups and their columns may take: 20 times what it has in the file
AT_ONCE = 64  # rows that become Python's at once


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
        with Bounded(FOOTER_ROOM):
            table = parquet.ParquetFile(path)
            groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
        if sum(group.num_rows for group in groups) != table.metadata.num_rows or any(
            min(group.num_rows, group.total_byte_size) < 0 for group in groups
        ):
            raise ValueError("its row groups do not add up")
        refuse_empty_rows(shown, table.metadata.num_rows, os.path.getsize(path))
        return table
    except (MemoryError, OSError, ValueError) as problem:  # pyarrow's ArrowInvalid is a ValueError
        if not isinstance(problem, MemoryError) and "bad_alloc" not in str(problem):
            raise Refusal(f"{shown} is not a parquet file: {first_line(problem)}", EX_DATAERR) from problem
        raise Refusal(
            f"{shown}: its list of row groups takes too much memory: it may be an attack", EX_DATAERR
        ) from problem


def refuse_empty_rows(shown: str, rows: int, size: int) -> None:
    """Of a file of `size` bytes."""
    if rows > MOST_ROWS + MOST_ROWS_EACH * size:
        line = (
            f"{shown} has {counted(rows, 'row')} in {counted(size, 'byte')}: rows without content, it may be an attack"
        )
        raise Refusal(line, EX_DATAERR)


class Unfolding:
    """What a file's rows hold, against its size: one long text can stand in any number of them."""

    def __init__(self, shown: str, size: int, parts: int = 1) -> None:
        """`parts`: how many are looked at apart, each with its own bytes."""
        self._shown, self._size, self._left = shown, size, most_unfolded(size, parts)

    def take(self, row: dict[str, Any]) -> None:
        self._left -= characters_of(row)
        if self._left < 0:
            raise unfolds(self._shown, self._size)


def bytes_of_group(table: Any, group: int, size: int, shown: str) -> int:
    """Of the file, which has `size`. Groups that share bytes would stand for these many times over."""
    begin, end = _extent(table, group)
    if group and begin < _extent(table, group - 1)[1]:
        raise Refusal(f"{shown}: its row groups {group} and {group + 1} overlap: it may be an attack", EX_DATAERR)
    return max(min(end - begin, size), 0)


def _extent(table: Any, group: int) -> tuple[int, int]:
    about = table.metadata.row_group(group)
    columns = [about.column(number) for number in range(about.num_columns)]
    begins = [
        min(offset for offset in (column.dictionary_page_offset, column.data_page_offset) if offset)
        for column in columns
        if column.dictionary_page_offset or column.data_page_offset
    ]
    sizes = [max(column.total_compressed_size, 0) for column in columns]
    return min(begins, default=0), min(begins, default=0) + sum(sizes)


def characters_of(value: Any) -> int:
    """What a row's value holds, however deep; nothing takes room, too."""
    if not isinstance(value, (dict, list)):
        return (
            max(_LEAST, len(value) if isinstance(value, (str, bytes)) else 0)
            if value not in ("", b"", None)
            else _NOTHING
        )
    return _NOTHING + sum(map(characters_of, value.values() if isinstance(value, dict) else value))


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
        line = f"{shown}, row group {group + 1}: {counted(count, 'row')} of {', '.join(columns)} unpack to more than {ROOM >> 20} MB"
        raise Refusal(f"{line}: leave them out, or cut them into shorter ones", EX_DATAERR) from problem
    except (OSError, ValueError, import_module("pyarrow").lib.ArrowException) as problem:
        raise Refusal(f"{shown}, row group {group + 1} can't be read: {first_line(problem)}", EX_DATAERR) from problem


def _columns_above(path: str) -> Iterator[str]:
    """a.list.element is part of a; a column's own name may have dots, too."""
    return accumulate(path.split("."), "{}.{}".format)


def first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0][:200]
