"""Which format the rows of each source have: from the rows themselves, or as `data.format` says. Reported in one line."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from stoker.contract.names import EX_CONFIG, EX_DATAERR, Refusal
from stoker.contract.shape import replace
from stoker.contract.untrusted import printable
from stoker.training.data.config import DataConfig
from stoker.training.data.formats.format import Format
from stoker.training.data.formats.table import AUTO, FORMATS, TEXT, known, recognise
from stoker.training.data.read import at, key_names, rows
from stoker.training.data.sources import Source
from stoker.training.data.units import split

LOOK = 100  # rows: the first that any format recognises decides
_COLUMNS = tuple(dict.fromkeys(column for made in FORMATS.values() for column in made.columns))


def with_formats(sources: Sequence[Source], data: DataConfig, say: Callable[[str], None]) -> tuple[Source, ...]:
    """Of sources of conversations; a stream's rows have a text and no format."""
    if data.kind != "chat":
        if data.format not in (AUTO, TEXT):
            line = f"data.format {data.format} is for conversations: set data.kind chat, or leave data.format out"
            raise Refusal(line, EX_CONFIG)
        if any(source.form != "text" for source in sources):
            say(f"data format: text (the column {data.text_key})")
        return tuple(sources)
    if data.format == TEXT:
        raise Refusal(f"data.format text has no turns to learn from; a chat is one of {known()}", EX_CONFIG)
    if data.format != AUTO:
        return tuple(replace(source, format=data.format, mixed=True) for source in sources)
    found = [replace(source, format=_format(source).name) for source in sources]
    say(f"data format: {'; '.join(_named(found))}")
    return tuple(found)


def _format(source: Source) -> Format:
    if source.form == "text":
        shown = source.name or source.path
        raise Refusal(f"{shown} is plain text, and a chat is one of {known()}", EX_DATAERR)
    begin = next(iter(split([source], 0.0)[0]), None)
    first = None
    for row, place in itertools.islice(rows(begin, _COLUMNS), LOOK) if begin is not None else ():
        made = recognise(row)
        if made is not None:
            return made
        first = first or f"{at(place)}: no known format of conversations; its keys: {key_names(row)}; known: {known()}"
    if first is None:
        raise Refusal(f"{source.name or source.path} has no rows", EX_DATAERR)
    raise Refusal(printable(first, 1000), EX_DATAERR)


def _named(sources: Sequence[Source]) -> list[str]:
    by_format: dict[str, list[str]] = {}
    for source in sources:
        by_format.setdefault(source.format, []).append(source.name or source.path)
    return [
        f"{name} ({FORMATS[name].about}) in {files[0] if len(files) == 1 else f'{len(files):,} files'}"
        for name, files in by_format.items()
    ]
