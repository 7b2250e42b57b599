"""Escapes in a text: what repr, JSON, URLs, HTML and terminals put in place of a character. Behind one of them a word begins, which
its last letter hides: `\\nhf_...`, `%3Dhf_...`, and a colour before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from stoker.contract.secretnames import holds_any
from stoker.contract.valuetext import Span, compiled

if TYPE_CHECKING:
    import re

_SLASHES = r"(?:\\|%(?:25){0,3}5[Cc]){1,8}"
_ESC = rf"(?:\x1b|{_SLASHES}(?:x1[Bb]|u001[Bb]|033|e)|%(?:25){{0,3}}1[Bb])"
_HEX = "[0-9A-Fa-f]"
_AND, _END = rf"(?:&|{_SLASHES}u0026|%(?:25){{0,3}}26)", r"(?:;|%(?:25){0,3}3[Bb])"  # of HTML's entities
# Every part is bounded: a run of backslashes is not read again from each of them. Some logs lose the ESC of a colour.
_ALL = (
    rf"{_ESC}\[[0-?]{{0,32}}[ -/]{{0,4}}[@-~]|\[\d{{1,3}}(?:;\d{{1,3}}){{0,8}}m"
    rf"|{_SLASHES}(?:([nrtbfv0])|u({_HEX}{{4}})|x({_HEX}{{2}})|U({_HEX}{{8}}))"
    rf"|%(?:25){{0,3}}({_HEX}{{2}})|\\{{9,64}}([\"'])"  # JSON within JSON within JSON
)
_HTML = rf"{_AND}(?:(quot|apos|lt|gt|amp|nbsp)|#0{{0,4}}(\d{{1,6}})|#[xX]0{{0,4}}({_HEX}{{1,6}})){_END}"
_URL = rf"%({_HEX}{{2}})"
# What logs put before each line, and one blank: a value may begin on the line before.
_BEFORE = (
    r"(?:\[[^\[\]\n]{1,60}\]:?|\([^()\n]{1,60}\)|\d[\d:.,TZ/+\-]{5,30}|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b:?"
    r"|[\w./\-]{1,40} ?[|>]|[|>│]|\d{1,6}[:\t])"
)
_LINES = rf"(?:\A|\n)(?:{_BEFORE} ?){{1,6}}"
# What a text must hold for the pattern to be tried.
_MARKS = {
    _ALL: ("\\", "%", "\x1b", "["),
    _HTML: ("&quot", "&apos", "&lt", "&gt", "&amp", "&#", "u0026", "%26", "%2526"),
    _URL: ("%25",),
    _LINES: ("\n",),
}
_MOST_PAGES = 3
_FORMS = ("%22", "%27", "%3A", "%3D", "%3a", "%3d", "%0A", "%0a")
_ENTITIES = {"quot": '"', "apos": "'", "lt": "<", "gt": ">", "amp": "&", "nbsp": " "}
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_OTHER = "\ufffd"  # for all outside ASCII: no letter of a name, and of no token


class Unescaped:
    """`text`: the same with one character for each escape."""

    def __init__(self, of: Unescaped | str, pattern: str, meaning: Callable[[re.Match[str]], str]) -> None:
        self._of = of
        text = of if isinstance(of, str) else of.text
        if pattern == _ALL and "+" in text and holds_any(text, _FORMS):
            text = text.replace("+", " ")  # as forms write a blank
        self._escape_ends: list[int] = []
        self._places: list[int] = []  # of escapes in the new text
        pieces: list[str] = []
        done = place = 0
        for escape in compiled(pattern).finditer(text) if holds_any(text, _MARKS[pattern]) else ():
            place += escape.start() - done
            pieces += (text[done : escape.start()], meaning(escape))
            self._escape_ends.append(escape.end())
            self._places.append(place)
            place, done = place + 1, escape.end()
        self.escapes = len(self._places)
        self.text: str = "".join((*pieces, text[done:])) if pieces else text

    def before(self, span: Span) -> Span:
        """Where it was."""
        old = self._old(span[0]), self._old(span[1])
        return old if isinstance(self._of, str) else self._of.before(old)

    def _old(self, place: int) -> int:
        passed = bisect_left(self._places, place)  # escapes before it
        return place + (self._escape_ends[passed - 1] - self._places[passed - 1] - 1 if passed else 0)


def readings(text: str) -> Iterator[Unescaped]:
    """What a text may stand for besides itself: HTML may hold HTML, and a URL a URL."""
    bases: list[Unescaped | str] = [text]
    for _ in range(_MOST_PAGES):
        page = Unescaped(bases[-1], _HTML, _entity)
        if not page.escapes:
            break
        bases.append(page)
        yield page
    for base in bases:
        every = Unescaped(base, _ALL, _meaning)
        if every.escapes:
            yield every
        lines = Unescaped(every if every.escapes else base, _LINES, _line_begin)
        if lines.escapes > 1:
            yield lines
        outer = Unescaped(base, _URL, _meaning_in_url)
        if outer.escapes:
            yield outer
            yield Unescaped(outer, _ALL, _meaning)


def _line_begin(_: re.Match[str]) -> str:
    return "\n"


def _entity(escape: re.Match[str]) -> str:
    name, decimal, code = escape.groups()
    return _ENTITIES[name] if name else _sign(int(decimal) if decimal else int(code, 16))


def _meaning(escape: re.Match[str]) -> str:
    letter, *codes, quote = escape.groups()
    if quote or letter:
        return str(quote or _LETTERS[letter])
    return _sign(next((int(code, 16) for code in codes if code), 0x20))  # a colour


def _meaning_in_url(escape: re.Match[str]) -> str:
    return _sign(int(escape[1], 16))


def _sign(code: int) -> str:
    return chr(code) if code < 0x80 else _OTHER
