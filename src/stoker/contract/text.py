"""Handles text from users, data, models and hosts: escapes control codes, parses JSON with one kind of exception."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import json
    from typing import Any

# Printable for Python, but they reverse or hide the text around them (CVE-2021-42574).
_HIDING = frozenset("\u061c\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff")
# Unprintable for Python, but needed: no-break spaces, and the joiners of Persian, Hindi and emoji.
_NEEDED = frozenset("\u00a0\u200c\u200d\u202f\u3000")


def escape(text: str, limit: int = 0) -> str:
    """Return the text as one harmless line: control codes, line ends and reversing marks become \\x1b and the like.

    A text above `limit` characters is cut.
    """
    if limit and len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character
        if (character.isprintable() or character in _NEEDED) and character not in _HIDING
        else _escape_character(character)
        for character in text
    )


def escape_lines(text: str) -> str:
    """Return a text of several lines with control codes escaped; line ends and tabs stay."""
    return "\n".join("\t".join(escape(cell) for cell in line.split("\t")) for line in text.split("\n"))


def _escape_character(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that isn't UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode() if code != 0x5C else character


_decoders: dict[bool, json.JSONDecoder] = {}


def parse_json(text: str | bytes | bytearray, unique: bool = False) -> Any:
    """Return the value of a JSON text. Raises ValueError for any bad input, also if it is nested too deeply.

    With `unique`, a repeated key is an error.
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
    """Return a decoder that is made once: json.loads makes one per call, which costs as much as a small text."""
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


def dump_json(value: Any) -> str:
    """Return indented JSON. Non-ASCII characters are escaped only if a terminal would act on one of them."""
    import json

    text = json.dumps(value, indent=1, ensure_ascii=False)
    return text if escape_lines(text) == text else json.dumps(value, indent=1)


def truncate_json(value: Any, max_chars: int) -> Any:
    """Return a JSON value cut to about this many characters, counting 64 more for each value and key."""
    remaining = max_chars

    def truncate(value: Any) -> Any:
        nonlocal remaining
        remaining -= 64
        if isinstance(value, str):
            text = value[: max(remaining, 0)]
            if len(text) < len(value):  # cut at a space: the masker does not recognize half a secret
                text = text[: max(text.rfind(" "), text.rfind("\n"), 0)] or text
            remaining -= len(text)
            return text
        if isinstance(value, dict):
            fitting: dict[str, Any] = {}
            for key, item in value.items():
                remaining -= 64 + len(key)
                if remaining <= 0:
                    break
                fitting[key[:max_chars]] = truncate(item)
            return fitting
        if isinstance(value, (list, tuple)):
            items = []
            for item in value:
                if remaining <= 0:
                    break
                items.append(truncate(item))
            return items
        return value

    return truncate(value)


def is_digits(text: str) -> bool:
    """Return whether int() can read the text. str.isdigit accepts `²` and ten thousand nines; int() fails on both."""
    return text.isascii() and text.isdigit() and len(text) <= 18
