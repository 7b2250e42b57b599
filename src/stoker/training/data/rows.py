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

from stoker.contract.disk_space import DiskSpace
from stoker.contract.errors import EX_DATAERR, EX_OSERR, Refusal, parsing
from stoker.contract.safe_io import open_regular
from stoker.contract.units import plural
from stoker.training.data.jsonl import DECODER, HALF, parse_row, sound, utf8
from stoker.training.data.looks import as_text
from stoker.training.data.parquet import first_line, open_parquet, read_rows
from stoker.training.data.unpack import open_unpacked, packing_of, unpacked_name

KINDS = {
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".tex": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json",
    ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip
IN_PLACE = ("text", "jsonl", "parquet")  # kinds that are read from any place in the file, by many processes
# Characters of a csv cell: behind a quote that was never closed, the rest of the file would be one cell.
_CELL = 256 << 20
_READ = 1 << 20
_AT_ONCE = 64  # rows of arrow that become Python's at once
_CUT = 16  # characters before the end of a text within which a JSON error may only mean that the rest is not read yet
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


def rows(path: str) -> Iterator[tuple[int, Row]]:
    """(number from 1, row); of jsonl the number of the line."""
    number = 0
    try:
        with parsing(path):
            for number, row in _rows(path):
                yield number, row
    except MemoryError as problem:
        where = f"{path}, after {counted_in(path)} {number}"
        raise Refusal(f"{where}: the next row takes more memory than there is", EX_OSERR) from problem


def _rows(path: str) -> Iterator[tuple[int, Row]]:
    kind = kind_of(path)
    if kind in ("parquet", "arrow"):
        with _on_disk(path) as place:
            yield from enumerate(_parquet(path, place) if kind == "parquet" else _arrow(path, place), 1)
        return
    with open_unpacked(path) as stream:
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
    place = 0
    for number, line in enumerate(stream, 1):
        where = f"{path}, line {number}"
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
                found = sound(found) if HALF.search(text, at, end) else found
                number, at, size = number + 1, end, _READ
            except json.JSONDecodeError as problem:
                is_cut = problem.pos > len(text) - _CUT or problem.msg.startswith("Unterminated string")
                if ended or not is_cut:  # else the rest of the row is not read yet
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
            data = stream.read(size)
            text, at, ended, size = text[at:] + text_of.decode(data, not data), 0, not data, 2 * size
        except UnicodeDecodeError as problem:
            raise Refusal(f"{path}, after row {number}: not UTF-8 ({problem.reason})", EX_DATAERR) from problem


def _cells(path: str, stream: BinaryIO) -> Iterator[Row]:
    """The first row names the columns."""
    csv.field_size_limit(_CELL)
    separator = "\t" if unpacked_name(path).lower().endswith(".tsv") else ","
    number = 0
    try:
        reader = csv.reader(_text_lines(stream), delimiter=separator)
        names = next(reader, [])
        if len(set(names)) < len(names) or not all(names):
            raise Refusal(
                f"{path}: the first row must name each column once; it is {', '.join(names)[:200]}", EX_DATAERR
            )
        for cells in reader:
            number += 1
            if cells and len(cells) != len(names):
                line = f"{path}, row {number} has {plural(len(cells), 'cell')}, and the first row names {plural(len(names), 'column')}"
                raise Refusal(line, EX_DATAERR)
            if cells:
                yield dict(zip(names, cells, strict=True))
    except UnicodeDecodeError as problem:
        raise Refusal(f"{path}, row {number + 1} is not UTF-8: {problem}", EX_DATAERR) from problem
    except csv.Error as problem:
        line = f"{path}, row {number + 1} is not csv: {problem}"
        raise Refusal(f"{line}; a quote may be missing", EX_DATAERR) from problem


def _text_lines(stream: BinaryIO) -> Iterator[str]:
    for number, line in enumerate(stream):
        yield (line if number else line.removeprefix(codecs.BOM_UTF8)).decode()


@contextmanager
def _on_disk(path: str) -> Iterator[str]:
    """Parquet and arrow are read from their end: a packed one is unpacked first, and the copy is removed."""
    if not packing_of(path):
        yield path
        return
    with (
        tempfile.NamedTemporaryFile(prefix="stoker-", suffix=".unpacked") as file,
        open_unpacked(path) as stream,
    ):
        room = DiskSpace(os.path.dirname(file.name), "name another place in TMPDIR, or unpack the file yourself")
        while data := stream.read(_READ):
            room.take(len(data))
            file.write(data)
        file.flush()
        yield file.name


def _parquet(path: str, place: str) -> Iterator[Row]:
    table = open_parquet(place, path)
    for group in range(table.metadata.num_row_groups):
        for some in read_rows(table, group, table.schema_arrow.names, path):
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
        with os.fdopen(open_regular(place), "rb") as file:
            is_file = file.read(6) == b"ARROW1"
        with arrow.OSFile(place) as source:
            try:
                reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
            except MemoryError as problem:  # of any other file, the first bytes are taken for a size
                raise Refusal(f"{path} is not an arrow file", EX_DATAERR) from problem
            batches = (reader.get_batch(at) for at in range(reader.num_record_batches)) if is_file else iter(reader)
            for batch in batches:
                for begin in range(0, len(batch), _AT_ONCE):
                    some = batch.slice(begin, _AT_ONCE).to_pylist()
                    number += len(some)
                    yield from some
    except (OSError, ValueError, arrow.lib.ArrowException) as problem:
        if isinstance(problem, MemoryError):  # ArrowMemoryError is both
            raise
        line = f"{path} is not an arrow file, or is damaged after row {number}: {first_line(problem)}"
        raise Refusal(line, EX_DATAERR) from problem
