"""Parquet files, a batch of rows at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any

from stoker.contract.errors import EX_DATAERR, Refusal

ROWS, BATCH = 1024, 64 << 20  # rows that are read at once, and their bytes as far as the file's metadata tells


def open_parquet(path: str, name: str = "") -> Any:
    """`name`: what people call it, where `path` is an unpacked copy."""
    shown = name or path
    # Its own pool maps a gigabyte in advance, which the memory limit of a preparation worker would count.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as problem:
        raise Refusal(f"{shown} needs pyarrow: `pip install pyarrow`", EX_DATAERR) from problem
    try:
        if not os.path.isfile(path):
            raise ValueError("not a regular file")
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as problem:  # pyarrow's ArrowInvalid is a ValueError
        raise Refusal(f"{shown} is not a parquet file: {first_line(problem)}", EX_DATAERR) from problem


def read_rows(table: Any, group: int, columns: Sequence[str], shown: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of one row group, a few at once. `shown`: the file's name for messages."""
    about = table.metadata.row_group(group)
    parts = [about.column(number) for number in range(about.num_columns)]
    names = frozenset(columns)
    size = sum(
        part.total_uncompressed_size for part in parts if not names.isdisjoint(_columns_above(part.path_in_schema))
    )
    count = max(1, min(ROWS, BATCH * about.num_rows // max(size, 1)))
    try:
        for batch in table.iter_batches(batch_size=count, row_groups=[group], columns=list(columns), use_threads=False):
            yield batch.to_pylist()
    except (OSError, ValueError, import_module("pyarrow").lib.ArrowException) as problem:
        if isinstance(problem, MemoryError):  # ArrowMemoryError is both
            raise
        raise Refusal(f"{shown}, row group {group + 1} can't be read: {first_line(problem)}", EX_DATAERR) from problem


def _columns_above(path: str) -> Iterator[str]:
    """a.list.element is part of a; a column's own name may have dots, too."""
    return accumulate(path.split("."), "{}.{}".format)


def first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0][:200]
