"""The rows of a file, whatever its kind: jsonl, json, csv, arrow or parquet, packed or not. A stream in bounded memory;
what can't be read is refused with its file and row.
"""

from __future__ import annotations

import codecs
import csv
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, BinaryIO

from stoker.contract.diskroom import DiskRoom
from stoker.contract.errors import reading
from stoker.contract.memory import Bounded, bounded_steps
from stoker.contract.names import EX_DATAERR, Refusal
from stoker.contract.quantities import counted
from stoker.contract.safe_io import open_regular
from stoker.training.data.jsonl import DECODER, HALF, parse_row, sound, utf8
from stoker.training.data.looks import as_text
from stoker.training.data.parquet import Unfolding, first_line, open_parquet, read_rows, refuse_empty_rows
from stoker.training.data.unpack import open_unpacked, packing_of, unpacked_name

LONGEST_LINE = 64 << 20
ROW_ROOM = 2 << 30  # bytes that parsing a row may take: one of 64 MB with emoji takes a third of it
KINDS = {
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".tex": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json",
    ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip
IN_PLACE = ("text", "jsonl", "parquet")  # kinds that are read from any place in the file, by many processes
_CELL = 16 << 20  # characters of a csv cell: more is a quote that was never closed
_HEAD, _COLUMNS = 1 << 20, 10_000  # bytes of the row that names a csv's columns, and how many there may be
_READ = 1 << 20
_GAP = re.compile(r"[\s,]*")  # between the values of a JSON file
Row = dict[str, Any]


def kind_of(path: str) -> str:
    """By its name; what has none of these endings is text."""
    return KINDS.get(os.path.splitext(unpacked_name(path))[1].lower(), "text")


def is_known(path: str) -> bool:
    return os.path.splitext(unpacked_name(path))[1].lower() in KINDS


def counted_in(path: str) -> str:
    """What people count in such a file."""
    return "line" if kind_of(path) == "jsonl" else "row"


def rows(path: str, files: int = 1) -> Iterator[tuple[int, Row]]:
    """(number from 1, row); of jsonl the number of the line. Each within ROW_ROOM. `files`: how many are read together."""
    number = 0
    try:
        with reading(path):
            if kind_of(path) in ("parquet", "arrow"):  # these have limits of their own
                yield from _rows(path, files)
            else:
                for number, row in bounded_steps(_rows(path, files), ROW_ROOM):
                    yield number, row
    except MemoryError as problem:
        raise too_much_memory(f"{path}, after {counted_in(path)} {number}") from problem


def too_much_memory(where: str) -> Refusal:
    return Refusal(f"{where}: the next row takes too much memory to read", EX_DATAERR)


def _rows(path: str, files: int) -> Iterator[tuple[int, Row]]:
    kind = kind_of(path)
    if kind in ("parquet", "arrow"):
        with _on_disk(path, files) as place:
            unfolding = Unfolding(path, os.path.getsize(place), files)
            for number, row in enumerate(_parquet(path, place) if kind == "parquet" else _arrow(path, place), 1):
                unfolding.take(row)
                yield number, row
        return
    with open_unpacked(path, files) as stream:
        if kind == "jsonl":
            yield from _lines(path, stream)
        elif kind == "json":
            yield from enumerate(_values(path, stream), 1)
        elif kind == "csv":
            yield from enumerate(_cells(path, stream), 1)
        else:
            endings = ", ".join(ending for ending, kind in KINDS.items() if kind != "text")
            raise Refusal(f"{path} is plain text; rows come from files that end in {endings}", EX_DATAERR)


def as_line(row: Row) -> bytes:
    return utf8(json.dumps(row, ensure_ascii=False, default=str)) + b"\n"


def _lines(path: str, stream: BinaryIO) -> Iterator[tuple[int, Row]]:
    number = place = 0
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        where = f"{path}, line {number}"
        if len(line) > LONGEST_LINE:
            raise Refusal(
                f"{where} is longer than {LONGEST_LINE >> 20} MB: a jsonl file has one row per line", EX_DATAERR
            )
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not text.isspace() and text:
            try:
                yield number, parse_row(text)
            except UnicodeDecodeError as problem:
                as_text(path, line, place)
                raise Refusal(f"{where} is not UTF-8: {problem}", EX_DATAERR) from problem
            except ValueError as problem:
                raise Refusal(f"{where} {problem}", EX_DATAERR) from problem
        place += len(line)


def _values(path: str, stream: BinaryIO) -> Iterator[Row]:
    """One array, or values one after the other."""
    text_of = codecs.getincrementaldecoder("utf-8-sig")()
    text, at, size, number, array, ended = "", 0, _READ, 0, False, False
    while True:
        at = _GAP.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        if at < len(text) and not number and not array and text[at] == "[":
            array, at = True, at + 1
            continue
        if array and text.startswith("]", at):
            return
        where = f"{path}, row {number + 1}"
        if at < len(text):
            try:
                found, end = DECODER.raw_decode(text, at)
                if end - at > LONGEST_LINE:
                    raise Refusal(f"{where} is longer than {LONGEST_LINE >> 20} MB", EX_DATAERR)
                found = sound(found) if HALF.search(text, at, end) else found
                number, at, size = number + 1, end, _READ
            except json.JSONDecodeError as problem:
                if ended or len(text) - at > LONGEST_LINE:  # else the rest of the row is not read yet
                    line = f"{where} is not JSON: {problem.msg}; it begins {text[at : at + 40]!r}"
                    raise Refusal(line, EX_DATAERR) from problem
            except (ValueError, RecursionError) as problem:
                why = "nested too deeply" if isinstance(problem, RecursionError) else problem
                raise Refusal(f"{where} is not JSON that can be used: {why}", EX_DATAERR) from problem
            else:
                if not isinstance(found, dict):
                    raise Refusal(f"{where} is a JSON {type(found).__name__}, not an object with keys", EX_DATAERR)
                yield found
                continue
        if ended and array:
            raise Refusal(f"{path} ends in the middle, after row {number}", EX_DATAERR)
        if ended:
            return
        try:
            data = stream.read(min(size, max(LONGEST_LINE - (len(text) - at), 0) + _READ))
            text, at, ended, size = text[at:] + text_of.decode(data, not data), 0, not data, 2 * size
        except UnicodeDecodeError as problem:
            raise Refusal(f"{path}, after row {number}: not UTF-8 ({problem.reason})", EX_DATAERR) from problem


def _cells(path: str, stream: BinaryIO) -> Iterator[Row]:
    """The first row names the columns."""
    csv.field_size_limit(_CELL)
    separator = "\t" if unpacked_name(path).lower().endswith(".tsv") else ","
    number = 0
    try:
        row = _CsvRow(path, stream)
        reader = csv.reader(row.lines(), delimiter=separator)
        names = next(reader, [])
        if len(names) > _COLUMNS:
            raise Refusal(
                f"{path}: the first row names {counted(len(names), 'column')}; at most {_COLUMNS:,}", EX_DATAERR
            )
        if len(set(names)) < len(names) or not all(names):
            raise Refusal(
                f"{path}: the first row must name each column once; it is {', '.join(names)[:200]}", EX_DATAERR
            )
        row.begin(1)
        for cells in reader:
            number += 1
            row.begin(number + 1)
            if cells and len(cells) != len(names):
                line = f"{path}, row {number} has {counted(len(cells), 'cell')}, and the first row names {counted(len(names), 'column')}"
                raise Refusal(line, EX_DATAERR)
            if cells:
                yield dict(zip(names, cells, strict=True))
    except UnicodeDecodeError as problem:
        raise Refusal(f"{path}, row {number + 1} is not UTF-8: {problem}", EX_DATAERR) from problem
    except csv.Error as problem:
        line = f"{path}, row {number + 1} is not csv: {problem}"
        raise Refusal(f"{line}; a quote may be missing", EX_DATAERR) from problem


class _CsvRow:
    """The lines of a row: one whose quote is open goes on in the next line, and the reader keeps all of them."""

    def __init__(self, path: str, stream: BinaryIO) -> None:
        self._path, self._stream = path, stream
        self._number = self._size = 0

    def begin(self, number: int) -> None:
        self._number, self._size = number, 0

    def lines(self) -> Iterator[str]:
        first = True
        while line := self._stream.readline(_CELL + 1):
            if len(line) > _CELL:
                raise Refusal(f"{self._path} has a line of more than {_CELL >> 20} MB: is this csv?", EX_DATAERR)
            self._size += len(line)
            most = LONGEST_LINE if self._number else _HEAD
            if self._size > most:
                where = f"row {self._number}" if self._number else "the first row, which names the columns,"
                line_text = f"{self._path}: {where} is longer than {most >> 20} MB: a quote may be missing"
                raise Refusal(line_text, EX_DATAERR)
            yield (line.removeprefix(codecs.BOM_UTF8) if first else line).decode()
            first = False


@contextmanager
def _on_disk(path: str, files: int) -> Iterator[str]:
    """Parquet and arrow are read from their end: a packed one is unpacked first, and the copy is removed."""
    if not packing_of(path):
        yield path
        return
    with (
        tempfile.NamedTemporaryFile(prefix="stoker-", suffix=".unpacked") as file,
        open_unpacked(path, files) as stream,
    ):
        room = DiskRoom(os.path.dirname(file.name), "name another place in TMPDIR, or unpack the file yourself")
        while data := stream.read(_READ):
            room.take(len(data))
            file.write(data)
        file.flush()
        yield file.name


def _parquet(path: str, place: str) -> Iterator[Row]:
    table = open_parquet(place, path)
    for group in range(table.metadata.num_row_groups):
        for some in read_rows(place, table, group, table.schema_arrow.names, path):
            yield from some


def _arrow(path: str, place: str) -> Iterator[Row]:
    """Both layouts: the file's (feather), and the stream's, in which the `datasets` library keeps its cache."""
    try:
        arrow = import_module("pyarrow")
        ipc = import_module("pyarrow.ipc")
    except ImportError as problem:
        raise Refusal(f"{path} needs pyarrow: `pip install pyarrow`", EX_DATAERR) from problem
    number = 0
    try:
        with os.fdopen(open_regular(place), "rb") as begin:
            is_file = begin.read(6) == b"ARROW1"
        size = os.path.getsize(place)
        with arrow.OSFile(place) as source:
            try:
                with Bounded():
                    reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
            except MemoryError as problem:  # of any other file, the first bytes may be taken for a size
                line = f"{path} is not an arrow file, or its columns take too much memory"
                raise Refusal(line, EX_DATAERR) from problem
            batches = (reader.get_batch(at) for at in range(reader.num_record_batches)) if is_file else iter(reader)
            while True:
                with Bounded():
                    batch = next(batches, None)
                if batch is None:
                    return
                refuse_empty_rows(path, number + len(batch), size)
                for begins in range(0, len(batch), 64):
                    with Bounded():
                        some = batch.slice(begins, 64).to_pylist()
                    number += len(some)
                    yield from some
    except MemoryError as problem:
        raise Refusal(f"{path}, after row {number}: the rows take too much memory", EX_DATAERR) from problem
    except (OSError, ValueError, arrow.lib.ArrowException) as problem:
        line = f"{path} is not an arrow file, or is damaged after row {number}: {first_line(problem)}"
        raise Refusal(line, EX_DATAERR) from problem
