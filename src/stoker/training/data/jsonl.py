"""Rows of a jsonl file, as publishers write them: with a byte-order mark, with U+2028 inside a text, with half of a
surrogate pair. No torch.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from stoker.contract.safe_io import read_lines
from stoker.contract.text import parse_json

HALF = re.compile(r"\\u[dD]")  # how JSON spells half a surrogate pair
Row = dict[str, Any]


def utf8(text: str) -> bytes:
    """JSON can spell half a surrogate pair, which is no character: U+FFFD stands for it, as everywhere."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def sound(value: Any) -> Any:
    """The same in all texts of a JSON value."""
    if isinstance(value, str):
        return utf8(value).decode()
    if isinstance(value, list):
        return [sound(item) for item in value]
    return {sound(key): sound(item) for key, item in value.items()} if isinstance(value, dict) else value


def _each_key_once(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice[:80]!r} appears twice")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_each_key_once)


def parse_row(line: bytes) -> Row:
    """ValueError says what is wrong with it."""
    try:
        found = DECODER.decode(line.decode())
    except RecursionError:
        raise ValueError("is not JSON that can be used: nested too deeply") from None
    except json.JSONDecodeError as problem:
        begins = line[:40].decode("utf-8", "replace")
        raise ValueError(f"is not JSON: {problem.msg}, column {problem.colno}; it begins {begins!r}") from problem
    except UnicodeDecodeError:
        raise
    except ValueError as problem:
        raise ValueError(f"is not JSON that can be used: {problem}") from problem
    if not isinstance(found, dict):
        raise ValueError(f"is a JSON {type(found).__name__}, not an object with keys")
    return sound(found) if b"\\ud" in line or b"\\uD" in line else found


def lines(path: str) -> Iterator[tuple[int, str]]:
    """(number, line) of those not blank, which end with newlines alone. ValueError: not UTF-8."""
    for number, line in enumerate(read_lines(path), 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.isspace():
            yield number, line.decode()


def row(line: str) -> Any:
    """Half a surrogate pair, which is legal JSON and no character, becomes U+FFFD. ValueError: not JSON."""
    try:
        found = parse_json(line, unique=True)
        return sound(found) if "\\ud" in line.lower() else found
    except RecursionError:
        raise ValueError("nested too deeply") from None
