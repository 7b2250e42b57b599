"""Sources to units of work, and what is held out. Pure but for a look at the places where a file is cut.

A unit depends on the bytes alone, never on the number of processes: the cuts are part of the format (`PACKING`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.contract.frozen import frozen
from stoker.training.data.parquet import open_parquet
from stoker.training.data.sources import Source

PACKING = 2  # raised when the same sources would give other tokens
UNIT = 1 << 20  # small: the last ones are done at the same time
LOOK = 1 << 18  # a text is cut at the first line end within so many bytes, else anywhere between characters
ROW_GROUP_UNIT = 64 << 20  # a part of a row group decodes what stands before it: larger than other units
_LINE = re.compile(rb"\n(?=\S)")


@frozen
class Span:
    """A stretch of a file. text: `begin` to `end`; jsonl: lines that begin there; parquet: rows of a row group."""

    path: str
    form: str
    begin: int
    end: int
    group: int = 0
    ends: bool = True  # a text's last stretch: its document ends here
    size: int = 0  # bytes of the file it stands for, for progress
    name: str = ""  # of the file that people know, where `path` is an unpacked copy
    format: str = ""  # of its rows, where they are conversations
    mixed: bool = False  # rows of other formats are left out, not refused
    entry: int = 0  # which of `data.path` it is of, where these are weighted

    @property
    def shown(self) -> str:
        return self.name or self.path


def span_from(told: dict[str, Any]) -> Span:
    return Span(**told)


def split(sources: Sequence[Source], share: float) -> tuple[list[Span], list[Span]]:
    """Train and validation: the last `share` of the bytes is held out."""
    total = sum(source.size for source in sources)
    border = int(total * (1 - share))
    train: list[Span] = []
    held: list[Span] = []
    place = 0
    for source in sources:
        within = min(max(border - place, 0), source.size)
        place += source.size
        if source.form == "parquet":
            early, late = _row_groups(source, within / max(source.size, 1))
            train += early
            held += late
            continue
        if source.form == "text" and 0 < within < source.size:
            # One text: the share of its bytes, exactly, as people split Shakespeare. Several: at a line's end.
            within = _cut(source, within, LOOK if len(sources) > 1 else 0)
        train += _spans(source, 0, within)
        held += _spans(source, within, source.size)
    return train, held


def split_each(sources: Sequence[Source], share: float) -> tuple[list[Span], list[Span]]:
    """The last `share` of each entry of `data.path`."""
    entries = [[source for source in sources if source.entry == entry] for entry in {one.entry: 0 for one in sources}]
    halves = [split(some, share) for some in entries]
    return [span for train, _ in halves for span in train], [span for _, held in halves for span in held]


def _spans(source: Source, begin: int, end: int) -> list[Span]:
    if begin >= end:
        return []
    places = list(range(begin, end, UNIT))
    if source.form == "text":
        places = [begin, *(min(_cut(source, place, LOOK), end) for place in places[1:])]
    ends = [*places[1:], end]
    return [
        Span(source.path, source.form, a, b, 0, b == source.size, b - a, **_of(source))
        for a, b in zip(places, ends, strict=True)
        if a < b
    ]


def _of(source: Source) -> dict[str, Any]:
    return {"name": source.name, "format": source.format, "mixed": source.mixed, "entry": source.entry}


def _cut(source: Source, place: int, look: int) -> int:
    """After the first line end from `place` on that a line without indent follows; else between two characters."""
    with open(source.path, "rb") as file:
        file.seek(place)
        data = file.read(look + 4)
    found = _LINE.search(data, 0, look)
    if found:
        return place + found.end()
    step = 0
    while step < min(4, len(data)) and data[step] & 0xC0 == 0x80:
        step += 1
    return place + step


def _row_groups(source: Source, share: float) -> tuple[list[Span], list[Span]]:
    table = open_parquet(source.path, source.name)
    rows = table.metadata.num_rows
    border = rows if share >= 1 else int(rows * share)
    train: list[Span] = []
    held: list[Span] = []
    before = 0
    for group in range(table.metadata.num_row_groups):
        about = table.metadata.row_group(group)
        parts = max(1, min(-(-about.total_byte_size // ROW_GROUP_UNIT), about.num_rows))
        marks = {about.num_rows * part // parts for part in range(parts + 1)} | {
            min(max(border - before, 0), about.num_rows)
        }
        places = sorted(marks)
        for begin, end in pairwise(places):
            size = source.size * (end - begin) // max(rows, 1)
            (train if before + begin < border else held).append(
                Span(source.path, "parquet", begin, end, group, True, size, **_of(source))
            )
        before += about.num_rows
    return train, held


def jobs_of(spans: Sequence[Span]) -> list[list[Span]]:
    """Small files together: a million texts of 1 KB are 1,000 jobs."""
    jobs: list[list[Span]] = []
    room = 0
    for span in spans:
        if not jobs or room < span.size or len(jobs[-1]) >= 4096 or jobs[-1][-1].entry != span.entry:
            jobs.append([])
            room = UNIT
        jobs[-1].append(span)
        room -= span.size
    return jobs


def check_unchanged(sources: Sequence[Source]) -> None:
    for source in sources:
        if os.path.getsize(source.path) != source.size:
            raise Refusal(
                f"{source.name or source.path} changed while it was read: it had {source.size} bytes", EX_DATAERR
            )
