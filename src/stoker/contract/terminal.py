"""Stoker's own lines on their way to a terminal. They may quote anything: secrets are masked, control codes escaped.

A command's stdout and stderr are replaced once, by `own_lines`, so that no print can be forgotten. What ranks printed
goes out as bytes (`sys.stdout.buffer`, the launcher's console) and stays as it is. Our own codes, those of a progress
bar (contract/progress.py), go through `draw` and `wipe`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from stoker.contract import names
from stoker.contract.masking import mask_json, mask_text
from stoker.contract.text import json_text, printable, printable_lines
from stoker.contract.wrapping import wrapped


class OwnLines:
    """A text stream that masks secrets and escapes control codes. All else is the stream's own: fileno, isatty, encoding, buffer."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        wipe()
        self.stream.write(printable_lines(mask_text(text)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def _cleaning(stream: Any) -> Any:
    return stream if stream is None or isinstance(stream, OwnLines) else OwnLines(stream)


class own_lines:
    """Within it, sys.stdout and sys.stderr mask secrets and escape control codes."""

    def __enter__(self) -> None:
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _cleaning(sys.stdout), _cleaning(sys.stderr)

    def __exit__(self, *problem: object) -> None:
        sys.stdout, sys.stderr = self._before


def say(line: str, colour: str = "") -> None:
    """One line of ours to stderr."""
    line = f"stoker: {line}"
    if not colour or not in_colour(sys.stderr):
        tell(line, sys.stderr)
        return
    wipe()
    shown = wrapped(printable_lines(mask_text(line)), columns_of(sys.stderr))
    _codes(f"{coloured(shown, colour)}\n")


def tell(text: str, stream: Any = None) -> None:
    """Sentences to stdout, or to this stream. A terminal gets them broken between words, a file or a pipe whole lines."""
    stream = sys.stdout if stream is None else stream
    # Masked before it is broken into lines: a value must stand behind its name.
    print(wrapped(mask_text(text), columns_of(stream)), file=stream, flush=True)


def tell_secret(text: str) -> None:
    """Print a line on stdout that its reader needs with the secret in it: the address of a page with its token."""
    stream = getattr(sys.stdout, "stream", sys.stdout)
    stream.write(f"{printable(text)}\n")
    stream.flush()


def tell_json(value: Any) -> None:
    """Print a value as JSON on stdout. Secrets are masked in the value: masked text might be no JSON any more."""
    stream = getattr(sys.stdout, "stream", sys.stdout)
    stream.write(f"{json_text(mask_json(value))}\n")


def tell_completion(text: str) -> None:
    """Print a piece of what a model wrote on stdout, without control codes and otherwise as it is."""
    if isinstance(sys.stdout, OwnLines):
        sys.stdout.stream.write(printable_lines(text))
    else:
        sys.stdout.write(text)
    sys.stdout.flush()


def columns_of(stream: Any) -> int:
    """Of the terminal behind it; 0: it is none, or does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if _is_terminal(stream) else 0
    except (OSError, ValueError):
        return 0


# ---- one bar, at the bottom of the terminal ----

_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"  # a bar that is too long is cut by the terminal, and never has a second row
_COLUMNS, _PREFIX = 80, 12
_bar = {"drawn": False}


def is_first() -> bool:
    """Of the ranks of a job one draws; what is no rank is alone."""
    return os.environ.get("RANK", "0") == "0"


def for_bars() -> bool:
    """Whether somebody sees a bar on stderr: it is a terminal, or a launcher's terminal is behind it."""
    return is_first() and (_is_terminal(sys.stderr) or _through_launcher())


def room() -> int:
    """Columns for a bar. Of a launcher's terminal a rank knows none."""
    if _through_launcher():
        return _COLUMNS - _PREFIX
    from shutil import get_terminal_size  # 2 ms, which no launch has to pay

    return get_terminal_size((_COLUMNS, 24)).columns - 1


def _through_launcher() -> bool:
    """This is a rank, without a terminal of its own."""
    return "RANK" in os.environ and os.environ.get(names.TERMINAL) == "1" and not _is_terminal(sys.stderr)


def draw(line: str) -> None:
    """A bar on stderr, in the place of the one before, until `wipe` or the next line of ours.

    By way of a launcher it ends with \\r, which such bars are known by, twice: the last one could be half of \\r\\n.
    """
    line = in_one_row(line)
    _codes(f"\r\x1b[K{line}" if not _through_launcher() else f" {line}\x1b[K\r\r")
    _bar["drawn"] = True


def in_one_row(line: str) -> str:
    """With the codes by which a terminal cuts it where it is too long."""
    return f"{_NO_WRAP}{_encodable(printable(line))}{_WRAP}"


def wipe() -> None:
    """No bar is on the terminal's line any more, and the cursor at its start."""
    if _bar["drawn"]:
        _bar["drawn"] = False
        _codes("\r\x1b[K" if not _through_launcher() else "\r")


def fresh_line() -> None:
    """The same where the terminal itself has written ^C there."""
    _bar["drawn"] = False
    if _is_terminal(sys.stderr):
        _codes("\r\x1b[K")


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def _encodable(line: str) -> str:
    if (getattr(sys.stderr, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8":
        return line
    return line.replace("█", "#").replace("·", "-").encode("ascii", "replace").decode()


def highlighted(pieces: Iterable[tuple[str, bool]]) -> None:
    """Prints a text on stdout, those pieces in colour that are marked; without a terminal they stand in ⟦ ⟧."""
    stream = getattr(sys.stdout, "stream", sys.stdout)
    before, after = ("\x1b[32m", "\x1b[0m") if stream.isatty() else ("⟦", "⟧")
    for text, marked in pieces:
        clean = printable_lines(text)
        stream.write(f"{before}{clean}{after}" if marked else clean)
    stream.write("\n")
    stream.flush()


ERROR, WARNING, SUCCESS = "red", "yellow", "green"
COLOURS = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36, "grey": 90}


def in_colour(stream: Any = None) -> bool:
    """Whether stdout, or this stream, is a terminal whose user wants colours."""
    return _is_terminal(sys.stdout if stream is None else stream) and wants_colour()


def wants_colour() -> bool:
    """Where there is a terminal (no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str, colour: str) -> str:
    """`text` holds no control codes."""
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if colour else text


def paint(pieces: Iterable[tuple[str, str]]) -> None:
    """Prints one line on stdout: pieces of text, each with the name of its colour, or "" for none."""
    stream = getattr(sys.stdout, "stream", sys.stdout)
    colours, cleaned = in_colour(), [(printable(mask_text(text)), colour) for text, colour in pieces]
    shown = wrapped("".join(text for text, _ in cleaned), columns_of(stream))
    for text, colour in cleaned:
        end = _end_of(text, shown)
        stream.write(coloured(shown[:end], colour if colours else ""))
        shown = shown[end:]
    stream.write(f"{shown}\n")


def _end_of(piece: str, shown: str) -> int:
    """Where the piece that `shown` begins with ends in it: a line break is in the place of a space."""
    left, at = sum(not sign.isspace() for sign in piece), 0
    while at < len(shown) and (left or (shown[at].isspace() and piece[-1:].isspace())):
        left -= not shown[at].isspace()
        at += 1
    return at


def _codes(text: str) -> None:
    stream = getattr(sys.stderr, "stream", sys.stderr)
    stream.write(text)
    stream.flush()
