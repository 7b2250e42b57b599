"""Lines of metrics.jsonl, by column. 100,000 lines of seven numbers are 17 MB: json.loads and a dict for each line take half a
second of them. Lines that a run writes look alike, so one regular expression cuts a megabyte of them into columns, in a
fifth of that; a column stays text until somebody draws it. Whatever looks different is read as JSON, with the same result.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from stoker.contract.frozen import frozen
from stoker.contract.text import parse_json

_FEWEST = 1 << 16  # bytes: fewer are read as JSON at once
_BLOCK = 1 << 20
_MOST_NAMES = 64  # of a line: groups of the expression
_STRANGERS = 50  # one line of so many may look different, as that of a validation does
# Signs of a number: a stricter expression takes twice the time. What is none all the same becomes NaN (numbers_in).
_NUMBER = rb"([-+.0-9eE]{1,40}+|null)"
_OWN = {"step": rb"(-?[0-9]{1,18}+)", "time": rb"([0-9]{1,10}+(?:\.[0-9]{1,20}+)?)"}

Lines = list[dict[str, Any]]


@frozen
class ColumnBlock:
    """Lines with the same names. `texts`: of each name its values, as JSON without the brackets; null is one of them."""

    steps: array[int]
    texts: dict[str, bytes]


class LineFormat:
    """How the lines of a file look."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._line = re.compile(rb"(?!)")

    def read(self, data: bytes) -> Iterator[ColumnBlock | Lines]:
        """Of whole lines."""
        if len(data) < _FEWEST:
            yield from parse_lines(data)
            return
        begin = 0
        while begin < len(data):
            end = data.rfind(b"\n", begin, begin + _BLOCK) + 1 or data.find(b"\n", begin) + 1 or len(data)
            yield from self._block(data[begin:end])
            begin = end

    def _block(self, block: bytes) -> Iterator[ColumnBlock | Lines]:
        pieces = self._cut(block)
        if pieces is None:
            self._learn(block)
            pieces = self._cut(block)
        if pieces is None:
            yield from parse_lines(block)
            return
        wide, begin = len(self._names) + 1, 0
        others = pieces[::wide]  # what is between the lines that fit, and after the last
        for at, other in enumerate(others):
            if other or at == len(others) - 1:
                if at > begin:
                    columns = enumerate(self._names, begin * wide + 1)
                    texts = {name: b",".join(pieces[first : at * wide : wide]) for first, name in columns}
                    yield ColumnBlock(array("q", map(int, texts.pop("step").split(b","))), texts)
                yield from parse_lines(other)
                begin = at

    def _cut(self, block: bytes) -> list[bytes] | None:
        """(other text, its values) of each line that fits, one after the other, and other text. None: too few lines fit."""
        if not self._names:
            return None
        pieces = self._line.split(block)
        others = pieces[:: len(self._names) + 1]
        strangers = len(others) - others.count(b"")
        return pieces if strangers <= len(others) // _STRANGERS else None

    def _learn(self, block: bytes) -> None:
        """From a line in the middle."""
        begin = block.rfind(b"\n", 0, len(block) // 2) + 1
        told = parse_line(block[begin : block.find(b"\n", begin)])
        self._names = ()
        if isinstance(told, dict) and {"step", "time"} <= told.keys() and len(told) <= _MOST_NAMES:
            self._names = tuple(told)
            named = [re.escape(json.dumps(name)).encode() + rb": " + _OWN.get(name, _NUMBER) for name in told]
            self._line = re.compile(rb"^\{" + rb", ".join(named) + rb"\}\n", re.M)


def parse_numbers(text: bytes) -> Iterable[float]:
    """Of a column without null."""
    cells = text.split(b",")
    try:
        return [*map(float, cells)]
    except ValueError:
        return [parse_number(cell) for cell in cells]


def parse_number(cell: bytes) -> float:
    try:
        return int(cell) if cell.isdigit() else float(cell)
    except ValueError:
        return math.nan


def parse_lines(data: bytes) -> Iterator[Lines]:
    """Yield the objects among complete lines, in blocks.

    A block is parsed at once, which is what makes 100,000 lines take a fraction of a second; one with a damaged line is
    parsed again line by line.
    """
    lines = [line for line in data.split(b"\n") if line.endswith((b"}", b"\r", b" ", b"\t"))]
    for at in range(0, len(lines), 1000):
        block = lines[at : at + 1000]
        try:
            found = json.loads(b"[" + b",".join(block) + b"]")
        except (ValueError, RecursionError):
            found = []
        if len(found) != len(block):  # `1,2` is no JSON, but two of a list
            found = [parse_line(line) for line in block]
        yield [one for one in found if isinstance(one, dict)]


def parse_line(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None  # torn by a crash
