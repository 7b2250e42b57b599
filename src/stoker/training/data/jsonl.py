"""Rows of a jsonl file, as publishers write them: with a byte-order mark, with U+2028 inside a text, with half of a
surrogate pair. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stoker.contract.untrusted import lines_of, parse_json
from stoker.training.data.rows import sound


def lines(path: str) -> Iterator[tuple[int, str]]:
    """(number, line) of those that are not blank. A line ends with a newline and nothing else. ValueError: not UTF-8,
    or an endless line.
    """
    for number, line in enumerate(lines_of(path), 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.isspace():
            yield number, line.decode()


def row(line: str) -> Any:
    """Half a surrogate pair is legal JSON and no character: it becomes U+FFFD here, before something that writes UTF-8
    meets it. ValueError: not JSON.
    """
    try:
        found = parse_json(line, unique=True)
        return sound(found) if "\\ud" in line.lower() else found
    except RecursionError:
        raise ValueError("nested too deeply") from None
