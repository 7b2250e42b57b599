"""Stoker's own lines on their way to a terminal. They may quote anything, so control codes are escaped.

A command's stdout and stderr are replaced once, by `own_lines`, so that no print can be forgotten. What ranks printed
goes out as bytes (`sys.stdout.buffer`, the launcher's console) and stays as it is. Our own codes, those of a progress
bar, go through `draw` and `wipe`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from stoker.contract.untrusted import printable, printable_lines


class OwnLines:
    """A text stream that escapes control codes. All else is the stream's own: fileno, isatty, encoding, buffer."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self.stream.write(printable_lines(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def _cleaning(stream: Any) -> Any:
    return stream if stream is None or isinstance(stream, OwnLines) else OwnLines(stream)


class own_lines:
    """Within it, sys.stdout and sys.stderr escape control codes."""

    def __enter__(self) -> None:
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _cleaning(sys.stdout), _cleaning(sys.stderr)

    def __exit__(self, *problem: object) -> None:
        sys.stdout, sys.stderr = self._before


def say(line: str) -> None:
    """One line of ours to stderr."""
    print(f"stoker: {line}", file=sys.stderr, flush=True)


def draw(line: str, after: str = "") -> None:
    """A progress bar on stderr: in the place of the one before, or with `after` "\\r" so that the next one takes its place."""
    _codes(f"{printable(line)}\x1b[K{after}" if after else f"\r{printable(line)}\x1b[K")


def wipe() -> None:
    """The terminal's line is empty again, and the cursor at its start."""
    _codes("\r\x1b[K")


def highlighted(pieces: Iterable[tuple[str, bool]]) -> None:
    """Prints a text on stdout, those pieces in colour that are marked; without a terminal they stand in ⟦ ⟧."""
    stream = getattr(sys.stdout, "stream", sys.stdout)
    before, after = ("\x1b[32m", "\x1b[0m") if stream.isatty() else ("⟦", "⟧")
    for text, marked in pieces:
        clean = printable_lines(text)
        stream.write(f"{before}{clean}{after}" if marked else clean)
    stream.write("\n")
    stream.flush()


COLOURS = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36, "grey": 90}


def in_colour() -> bool:
    """Whether stdout is a terminal whose user has not asked for none (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(pieces: Iterable[tuple[str, str]]) -> None:
    """Prints one line on stdout: pieces of text, each with the name of its colour, or "" for none."""
    stream = getattr(sys.stdout, "stream", sys.stdout)
    coloured = in_colour()
    for text, colour in pieces:
        clean = printable(text)
        stream.write(f"\x1b[{COLOURS[colour]}m{clean}\x1b[0m" if coloured and colour else clean)
    stream.write("\n")


def _codes(text: str) -> None:
    stream = getattr(sys.stderr, "stream", sys.stderr)
    stream.write(text)
    stream.flush()
