"""Text from users, data, models and hosts: JSON parsed with one kind of exception, and printing without control codes."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import json
    from typing import Any

# Besides what Python calls unprintable: marks that reverse or hide the text around them (CVE-2021-42574).
_HIDING = frozenset("\u061c\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff")
# Called unprintable, yet needed: spaces that don't break a line, and the joiners of Persian, Hindi and emoji.
_NEEDED = frozenset("\u00a0\u200c\u200d\u202f\u3000")


def escape(text: str, limit: int = 0) -> str:
    """Return the text as one line that a terminal only prints: control codes, line ends and text-reversing characters become \\x1b and the like."""
    if limit and len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        sign if (sign.isprintable() or sign in _NEEDED) and sign not in _HIDING else _escape_character(sign)
        for sign in text
    )


def escape_lines(text: str) -> str:
    """Return a text of several lines without control codes; ends of line and tabs stay."""
    return "\n".join("\t".join(escape(cell) for cell in line.split("\t")) for line in text.split("\n"))


def _escape_character(sign: str) -> str:
    code = ord(sign)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that isn't UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return sign.encode("unicode_escape").decode() if code != 0x5C else sign


_decoders: dict[bool, json.JSONDecoder] = {}


def parse_json(text: str | bytes | bytearray, unique: bool = False) -> Any:
    """Return the value of a JSON text. Raises ValueError for every bad input, also for one that is nested too deeply.

    With `unique`, an object that has a key twice is an error.
    """
    if not isinstance(text, str):
        text = text.decode("utf-8")  # UnicodeDecodeError is a ValueError
    if text.startswith("\ufeff"):
        raise ValueError("it begins with a byte order mark")
    try:
        return _decoder(unique).decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _decoder(unique: bool) -> json.JSONDecoder:
    """Return a decoder made once: json.loads makes one at every call, which takes as long as a small text."""
    decoder = _decoders.get(unique)
    if decoder is None:
        import json

        decoder = _decoders[unique] = json.JSONDecoder(object_pairs_hook=_refuse_repeated_keys if unique else None)
    return decoder


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {escape(name, 80)} appears twice")
            seen.add(name)
    return values


def dump_json(found: Any) -> str:
    """Indented JSON: characters as they are, but escaped where a terminal would act on one of them."""
    import json

    text = json.dumps(found, indent=1, ensure_ascii=False)
    return text if escape_lines(text) == text else json.dumps(found, indent=1)


def truncate_json(found: Any, room: int, longest: int = 0) -> Any:
    """A JSON value cut to about so many characters (64 more per value and key): the rest is left out. `longest`: of a text."""
    return _truncate(found, [room], longest or room)


def _truncate(found: Any, room: list[int], longest: int) -> Any:
    room[0] -= 64
    if isinstance(found, str):
        kept = found[: max(min(room[0], longest), 0)]
        if len(kept) < len(found):  # not within a word: half a secret is not recognized as one
            kept = kept[: max(kept.rfind(" "), kept.rfind("\n"), 0)] or kept
        room[0] -= len(kept)
        return kept
    if isinstance(found, dict):
        fitting: dict[str, Any] = {}
        for key, value in found.items():
            room[0] -= 64 + len(key)
            if room[0] <= 0:
                break
            fitting[key[:longest]] = _truncate(value, room, longest)
        return fitting
    if isinstance(found, (list, tuple)):
        items = []
        for item in found:
            if room[0] <= 0:
                break
            items.append(_truncate(item, room, longest))
        return items
    return found


def is_digits(text: str) -> bool:
    """Return whether int() can read the text. str.isdigit is true of `²` and of ten thousand nines, and int() fails on both."""
    return text.isascii() and text.isdigit() and len(text) <= 18
