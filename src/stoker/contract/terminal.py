"""Stoker's own lines on their way to a terminal. They may quote anything: secrets are masked, control codes escaped.

A command's stdout and stderr are replaced once, by `own_lines`, so that no print can be forgotten. What ranks printed
goes out as bytes (`sys.stdout.buffer`, the launcher's console) and stays as it is. Our own codes, those of a progress
bar (contract/progress.py), go through `draw` and `wipe`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from stoker.contract import env_vars
from stoker.contract.masking import mask_json, mask_text
from stoker.contract.text import dump_json, escape, escape_lines


class OwnLines:
    """A text stream that masks secrets and escapes control codes. All else is the stream's own: fileno, isatty, encoding, buffer."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        clear_bar()
        self.stream.write(escape_lines(mask_text(text)))
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


def print_status(line: str, colour: str = "") -> None:
    """One line of ours to stderr."""
    line = f"stoker: {line}"
    if not colour or not uses_colour(sys.stderr):
        print_text(line, sys.stderr)
        return
    clear_bar()
    shown = wrap_text(escape_lines(mask_text(line)), terminal_width(sys.stderr))
    _codes(f"{colour_text(shown, colour)}\n")


def print_text(text: str, stream: Any = None) -> None:
    """Sentences to stdout, or to this stream. A terminal gets them broken between words, a file or a pipe whole lines."""
    stream = sys.stdout if stream is None else stream
    # Masked before it is broken into lines: a value must stand behind its name.
    print(wrap_text(mask_text(text), terminal_width(stream)), file=stream, flush=True)


def print_secret(text: str) -> None:
    """Print a line on stdout that its reader needs with the secret in it: the address of a page with its token."""
    stream = getattr(sys.stdout, "stream", sys.stdout)
    stream.write(f"{escape(text)}\n")
    stream.flush()


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout. Secrets are masked in the value: masked text might be no JSON any more."""
    stream = getattr(sys.stdout, "stream", sys.stdout)
    stream.write(f"{dump_json(mask_json(value))}\n")


def print_completion(text: str) -> None:
    """Print a piece of what a model wrote on stdout, without control codes and otherwise as it is."""
    if isinstance(sys.stdout, OwnLines):
        sys.stdout.stream.write(escape_lines(text))
    else:
        sys.stdout.write(text)
    sys.stdout.flush()


def terminal_width(stream: Any) -> int:
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


def shows_bars() -> bool:
    """Whether somebody sees a bar on stderr: it is a terminal, or a launcher's terminal is behind it."""
    return is_first() and (_is_terminal(sys.stderr) or _through_launcher())


def bar_width() -> int:
    """Columns for a bar. Of a launcher's terminal a rank knows none."""
    if _through_launcher():
        return _COLUMNS - _PREFIX
    from shutil import get_terminal_size  # 2 ms, which no launch has to pay

    return get_terminal_size((_COLUMNS, 24)).columns - 1


def _through_launcher() -> bool:
    """This is a rank, without a terminal of its own."""
    return "RANK" in os.environ and os.environ.get(env_vars.TERMINAL) == "1" and not _is_terminal(sys.stderr)


def draw_bar(line: str) -> None:
    """A bar on stderr, in the place of the one before, until `wipe` or the next line of ours.

    By way of a launcher it ends with \\r, which such bars are known by, twice: the last one could be half of \\r\\n.
    """
    line = without_wrapping(line)
    _codes(f"\r\x1b[K{line}" if not _through_launcher() else f" {line}\x1b[K\r\r")
    _bar["drawn"] = True


def without_wrapping(line: str) -> str:
    """With the codes by which a terminal cuts it where it is too long."""
    return f"{_NO_WRAP}{_encodable(escape(line))}{_WRAP}"


def clear_bar() -> None:
    """No bar is on the terminal's line any more, and the cursor at its start."""
    if _bar["drawn"]:
        _bar["drawn"] = False
        _codes("\r\x1b[K" if not _through_launcher() else "\r")


def start_line() -> None:
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


def print_highlighted(pieces: Iterable[tuple[str, bool]]) -> None:
    """Prints a text on stdout, those pieces in colour that are marked; without a terminal they stand in ⟦ ⟧."""
    stream = getattr(sys.stdout, "stream", sys.stdout)
    before, after = ("\x1b[32m", "\x1b[0m") if stream.isatty() else ("⟦", "⟧")
    for text, marked in pieces:
        clean = escape_lines(text)
        stream.write(f"{before}{clean}{after}" if marked else clean)
    stream.write("\n")
    stream.flush()


ERROR, WARNING, SUCCESS = "red", "yellow", "green"
COLOURS = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36, "grey": 90}


def uses_colour(stream: Any = None) -> bool:
    """Whether stdout, or this stream, is a terminal whose user wants colours."""
    return _is_terminal(sys.stdout if stream is None else stream) and wants_colour()


def wants_colour() -> bool:
    """Where there is a terminal (no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colour_text(text: str, colour: str) -> str:
    """`text` holds no control codes."""
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if colour else text


def print_coloured(pieces: Iterable[tuple[str, str]]) -> None:
    """Prints one line on stdout: pieces of text, each with the name of its colour, or "" for none."""
    stream = getattr(sys.stdout, "stream", sys.stdout)
    colours, cleaned = uses_colour(), [(escape(mask_text(text)), colour) for text, colour in pieces]
    shown = wrap_text("".join(text for text, _ in cleaned), terminal_width(stream))
    for text, colour in cleaned:
        end = _end_of(text, shown)
        stream.write(colour_text(shown[:end], colour if colours else ""))
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


MIN_COLUMNS = 40  # columns: below, more breaks would not help
# Texts: `re` compiles them when a line is long, and not when every command starts.
_WORD = r"(?:`[^`]*`|\S)+"  # a command in backticks stays whole
_GAP = r"(?<=\S) {2,}(?=\S)"  # between columns, or before the comment on a command
_COMMAND = r"\s*(?:→ )?(?:[A-Z_]+=\S+ )*(?:stoker|pip|python3?|sudo|export|git|nvidia-smi|kill|ssh|scp|bash) "
# A command that ends a line, and that somebody is about to paste: it gets a line of its own where both don't fit.
_AT_THE_END = rf"\b(?:to continue|to start it again|to copy (?:the model|them)): (?={_COMMAND})"


def wrap_text(text: str, columns: int, hanging: int = 2) -> str:
    """`columns`: 0 where they are not known, which changes nothing. `hanging`: how much further in a line continues."""
    if columns < MIN_COLUMNS:
        return text
    return "\n".join(piece for line in text.split("\n") for piece in _wrap_line(line, columns, hanging))


def _wrap_line(line: str, columns: int, hanging: int) -> list[str]:
    """Split a line without recursion: it may have any length."""
    if len(line) > columns and (found := re.search(_AT_THE_END, line)):
        command = f"{' ' * hanging}{line[found.end() :]}"
        return [*_wrap_columns(line[: found.end() - 1], columns, hanging), *_wrap_columns(command, columns, hanging)]
    return _wrap_columns(line, columns, hanging)


def _wrap_columns(line: str, columns: int, hanging: int) -> list[str]:
    """Between columns, then between words, with no indent beyond the terminal."""
    lead, end = len(line) - len(line.lstrip()), len(line)
    gaps = [gap for gap in re.finditer(_GAP, line) if gap.start() >= lead] if end > columns else []
    behind: list[list[str]] = []
    while gaps and end > columns:  # what stands behind the last one gets a line of its own
        last = gaps.pop()
        second = gaps[0].end() if gaps else lead + 6
        behind.append(_wrap_words(" " * min(second, columns) + line[last.end() : end], columns, hanging))
        end = last.start()
    return [*_wrap_words(line[:end], columns, hanging), *(piece for pieces in reversed(behind) for piece in pieces)]


def _wrap_words(line: str, columns: int, hanging: int) -> list[str]:
    """Between words alone."""
    lead = line[: len(line) - len(line.lstrip())]
    if len(line) <= columns or len(lead) > columns or re.match(_COMMAND, line):  # what is copied must stay one line
        return [line]
    found = [lead]
    for word in re.findall(_WORD, line):
        if found[-1].strip() and len(found[-1]) + 1 + len(word) > columns:
            found.append(f"{lead}{' ' * hanging}{word}")
        else:
            found[-1] += f" {word}" if found[-1].strip() else word
    return found
