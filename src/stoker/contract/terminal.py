"""Prints Stoker's own lines: masked, without foreign control codes, wrapped at the terminal's width, in colour.

`own_lines` replaces a command's stdout and stderr once, so that no print can be forgotten. The output of ranks is
written as bytes (`sys.stdout.buffer`, the launcher's console) and stays as it is. Stoker's own control codes, for the
progress bar (contract/progress.py) and colours, are written past the replaced streams.
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


class MaskedStream:
    """A text stream that masks secrets and escapes control codes. Everything else is the original stream's."""

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


class masked_output:
    """Makes sys.stdout and sys.stderr mask secrets and escape control codes within a `with` block."""

    def __enter__(self) -> None:
        self._originals = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _mask_stream(sys.stdout), _mask_stream(sys.stderr)

    def __exit__(self, *problem: object) -> None:
        sys.stdout, sys.stderr = self._originals


def _mask_stream(stream: Any) -> Any:
    return stream if stream is None or isinstance(stream, MaskedStream) else MaskedStream(stream)


def _find_original_stream(stream: Any) -> Any:
    return getattr(stream, "stream", stream)


def print_status(line: str, colour: str = "") -> None:
    """Print a line of Stoker's to stderr, with its prefix."""
    line = f"stoker: {line}"
    if not colour or not uses_colour(sys.stderr):
        print_text(line, sys.stderr)
        return
    clear_bar()
    wrapped = wrap_text(escape_lines(mask_text(line)), terminal_width(sys.stderr))
    _write_codes(f"{colour_text(wrapped, colour)}\n")


def print_text(text: str, stream: Any = None) -> None:
    """Print sentences to stdout or another stream, wrapped if it is a terminal."""
    stream = sys.stdout if stream is None else stream
    # Mask first: a line break between a name and its value would hide the secret from the masker.
    print(wrap_text(mask_text(text), terminal_width(stream)), file=stream, flush=True)


def print_secret(text: str) -> None:
    """Print a line on stdout without masking, for a secret that the user needs, such as an address with its token."""
    stream = _find_original_stream(sys.stdout)
    stream.write(f"{escape(text)}\n")
    stream.flush()


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout. Masks the value, not the text, which might not be JSON afterwards."""
    stream = _find_original_stream(sys.stdout)
    stream.write(f"{dump_json(mask_json(value))}\n")


def print_completion(text: str) -> None:
    """Print a piece of a completion on stdout. Escapes control codes and changes nothing else."""
    if isinstance(sys.stdout, MaskedStream):
        sys.stdout.stream.write(escape_lines(text))
    else:
        sys.stdout.write(text)
    sys.stdout.flush()


def terminal_width(stream: Any) -> int:
    """Return the columns of the terminal behind a stream, or 0 if it is not a terminal or its width is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if _is_terminal(stream) else 0
    except (OSError, ValueError):
        return 0


# ---- one bar, at the bottom of the terminal ----

_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"  # the terminal cuts a bar that is too long instead of wrapping it
_COLUMNS, _PREFIX = 80, 12  # columns of a launcher's terminal, and of a rank's name there
_bar = {"drawn": False}


def may_draw() -> bool:
    """Return whether this process may draw a bar. Of the ranks of a job, only rank 0 may."""
    return os.environ.get("RANK", "0") == "0"


def shows_bars() -> bool:
    """Return whether stderr is a terminal, or a launcher's terminal is behind it, and this process may draw."""
    return may_draw() and (_is_terminal(sys.stderr) or _is_behind_launcher())


def bar_width() -> int:
    """Return the columns for a bar. A rank doesn't know the width of its launcher's terminal and assumes 80."""
    if _is_behind_launcher():
        return _COLUMNS - _PREFIX
    from shutil import get_terminal_size  # 2 ms, which no launch has to pay

    return get_terminal_size((_COLUMNS, 24)).columns - 1


def _is_behind_launcher() -> bool:
    """Return whether this is a rank without a terminal whose launcher has one."""
    return "RANK" in os.environ and os.environ.get(env_vars.TERMINAL) == "1" and not _is_terminal(sys.stderr)


def draw_bar(line: str) -> None:
    """Draw a bar on stderr in place of the one before, until `clear_bar` or the next line.

    A launcher recognizes a rank's bar by two \\r at its end: a single one could be half of \\r\\n.
    """
    line = cut_at_width(line)
    _write_codes(f" {line}\x1b[K\r\r" if _is_behind_launcher() else f"\r\x1b[K{line}")
    _bar["drawn"] = True


def cut_at_width(line: str) -> str:
    """Return a line with the codes that make a terminal cut it if it is too long. ASCII if stderr needs that."""
    line = escape(line)
    if (getattr(sys.stderr, "encoding", None) or "utf-8").lower().replace("-", "") != "utf8":
        line = line.replace("█", "#").replace("·", "-").encode("ascii", "replace").decode()
    return f"{_NO_WRAP}{line}{_WRAP}"


def clear_bar() -> None:
    """Remove the bar and leave the cursor at the start of its line."""
    if _bar["drawn"]:
        _bar["drawn"] = False
        _write_codes("\r" if _is_behind_launcher() else "\r\x1b[K")


def clear_line() -> None:
    """Clear the line, on which the terminal itself has written ^C, and forget the bar."""
    _bar["drawn"] = False
    if _is_terminal(sys.stderr):
        _write_codes("\r\x1b[K")


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def print_highlighted(pieces: Iterable[tuple[str, bool]]) -> None:
    """Print a text on stdout with its marked pieces in green, or in ⟦ ⟧ without a terminal."""
    stream = _find_original_stream(sys.stdout)
    before, after = ("\x1b[32m", "\x1b[0m") if stream.isatty() else ("⟦", "⟧")
    for text, marked in pieces:
        escaped = escape_lines(text)
        stream.write(f"{before}{escaped}{after}" if marked else escaped)
    stream.write("\n")
    stream.flush()


ERROR, WARNING, SUCCESS = "red", "yellow", "green"
COLOURS = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36, "grey": 90}


def uses_colour(stream: Any = None) -> bool:
    """Return whether stdout, or another stream, is a terminal whose user wants colours."""
    return _is_terminal(sys.stdout if stream is None else stream) and wants_colour()


def wants_colour() -> bool:
    """Return whether the user wants colours on a terminal (no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colour_text(text: str, colour: str) -> str:
    """Return a text in a colour. The text must not hold control codes."""
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if colour else text


def print_coloured(pieces: Iterable[tuple[str, str]]) -> None:
    """Print one line on stdout: pieces of text, each with the name of its colour or ""."""
    stream = _find_original_stream(sys.stdout)
    has_colours, cleaned = uses_colour(), [(escape(mask_text(text)), colour) for text, colour in pieces]
    wrapped = wrap_text("".join(text for text, _ in cleaned), terminal_width(stream))
    for text, colour in cleaned:
        end = _find_end_of_piece(text, wrapped)
        stream.write(colour_text(wrapped[:end], colour if has_colours else ""))
        wrapped = wrapped[end:]
    stream.write(f"{wrapped}\n")


def _find_end_of_piece(piece: str, wrapped: str) -> int:
    """Return where `piece` ends in the wrapped text that begins with it. Wrapping only changes white space."""
    remaining, end = sum(not character.isspace() for character in piece), 0
    while end < len(wrapped) and (remaining or (wrapped[end].isspace() and piece[-1:].isspace())):
        remaining -= not wrapped[end].isspace()
        end += 1
    return end


def _write_codes(text: str) -> None:
    """Write to stderr without escaping."""
    stream = _find_original_stream(sys.stderr)
    stream.write(text)
    stream.flush()


# ---- wrapping ----

MIN_COLUMNS = 40  # narrower terminals get unwrapped lines: more breaks would not help
# Not compiled here: `re` compiles them when a line is too long, not when every command starts.
_WORD = r"(?:`[^`]*`|\S)+"  # a command in backticks stays in one piece
_GAP = r"(?<=\S) {2,}(?=\S)"  # between columns, or before the comment on a command
_COMMAND = r"\s*(?:→ )?(?:[A-Z_]+=\S+ )*(?:stoker|pip|python3?|sudo|export|git|nvidia-smi|kill|ssh|scp|bash) "
# A command to copy at the end of a line gets its own line if both don't fit.
_FINAL_COMMAND = rf"\b(?:to continue|to start it again|to copy (?:the model|them)): (?={_COMMAND})"


def wrap_text(text: str, columns: int, hanging: int = 2) -> str:
    """Wrap a text at a width, unless `columns` is 0. Continued lines are indented by `hanging` more columns."""
    if columns < MIN_COLUMNS:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) > columns and (match := re.search(_FINAL_COMMAND, line)):
            lines += _wrap_columns(line[: match.end() - 1], columns, hanging)
            line = f"{' ' * hanging}{line[match.end() :]}"
        lines += _wrap_columns(line, columns, hanging)
    return "\n".join(lines)


def _wrap_columns(line: str, columns: int, hanging: int) -> list[str]:
    """Wrap a line between its columns, then between words. Not recursive: a line may have any length."""
    indent, end = len(line) - len(line.lstrip()), len(line)
    gaps = [gap for gap in re.finditer(_GAP, line) if gap.start() >= indent] if end > columns else []
    moved: list[list[str]] = []  # last columns that get their own lines, the last one first
    while gaps and end > columns:
        last = gaps.pop()
        second_column = gaps[0].end() if gaps else indent + 6
        moved.append(_wrap_words(" " * min(second_column, columns) + line[last.end() : end], columns, hanging))
        end = last.start()
    return [*_wrap_words(line[:end], columns, hanging), *(piece for pieces in reversed(moved) for piece in pieces)]


def _wrap_words(line: str, columns: int, hanging: int) -> list[str]:
    """Wrap a line between words. A command to copy stays one line."""
    indent = line[: len(line) - len(line.lstrip())]
    if len(line) <= columns or len(indent) > columns or re.match(_COMMAND, line):
        return [line]
    wrapped = [indent]
    for word in re.findall(_WORD, line):
        if wrapped[-1].strip() and len(wrapped[-1]) + 1 + len(word) > columns:
            wrapped.append(f"{indent}{' ' * hanging}{word}")
        else:
            wrapped[-1] += f" {word}" if wrapped[-1].strip() else word
    return wrapped
