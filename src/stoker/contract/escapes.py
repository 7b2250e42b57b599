"""Escapes in a text: what repr, JSON, URLs and terminals put in place of a character. Behind one of them a word begins, which
its last letter hides: `\\nhf_...`, `%3Dhf_...`, and a colour before it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from stoker.contract.secretnames import holds_any
from stoker.contract.secretvalues import Span, compiled

if TYPE_CHECKING:
    import re

_SLASHES = r"(?:\\|%(?:25){0,3}5[Cc]){1,8}"
_ESC = rf"(?:\x1b|{_SLASHES}(?:x1[Bb]|u001[Bb]|033|e)|%(?:25){{0,3}}1[Bb])"
_HEX = "[0-9A-Fa-f]"
# Every part is bounded: a run of backslashes is not read again from each of them. Some logs lose the ESC of a colour.
_ESCAPE = (
    rf"{_ESC}\[[0-?]{{0,32}}[ -/]{{0,4}}[@-~]|\[\d{{1,3}}(?:;\d{{1,3}}){{0,8}}m"
    rf"|{_SLASHES}(?:([nrtbfv0])|u({_HEX}{{4}})|x({_HEX}{{2}})|U({_HEX}{{8}}))"
    rf"|%(?:25){{0,3}}({_HEX}{{2}})|\\{{9,64}}([\"'])"  # JSON within JSON within JSON
)
_MARKS = ("\\", "%", "\x1b", "[")  # what a text must hold for the pattern to be tried
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_OTHER = "\ufffd"  # for all outside ASCII: no letter of a name, and of no token


class Unescaped:
    """`text`: the same with one character for each escape."""

    def __init__(self, text: str) -> None:
        self._escape_ends: list[int] = []
        self._places: list[int] = []  # of escapes in the new text
        pieces: list[str] = []
        done = place = 0
        for escape in compiled(_ESCAPE).finditer(text) if holds_any(text, _MARKS) else ():
            place += escape.start() - done
            pieces += (text[done : escape.start()], _meaning(escape))
            self._escape_ends.append(escape.end())
            self._places.append(place)
            place, done = place + 1, escape.end()
        self.text = "".join((*pieces, text[done:])) if pieces else text
        if pieces and "+" in text and holds_any(text, ("%22", "%27", "%3A", "%3D", "%3a", "%3d", "%0A", "%0a")):
            self.text = self.text.replace("+", " ")  # as forms write a blank

    def before(self, span: Span) -> Span:
        """Where it was."""
        return self._old(span[0]), self._old(span[1])

    def _old(self, place: int) -> int:
        passed = bisect_left(self._places, place)  # escapes before it
        return place + (self._escape_ends[passed - 1] - self._places[passed - 1] - 1 if passed else 0)


def _meaning(escape: re.Match[str]) -> str:
    letter, *codes, quote = escape.groups()
    if quote:
        return str(quote)
    if letter:
        return _LETTERS[letter]
    code = next((int(code, 16) for code in codes if code), 0x20)  # a colour
    return chr(code) if code < 0x80 else _OTHER
