"""A line of a terminal: pieces of text, each with the name of a style, cut and padded to a number of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stoker.contract.frozen import frozen
from stoker.contract.text import escape
from stoker.control.show.charts import columns_of, fitted, sparkline
from stoker.control.show.snapshot import Metric

# Names of styles; app.py says what they look like.
PLAIN, DIM, BOLD, GOOD, WARN, BAD, ACCENT, HEAD, FOCUS, CURSOR = (
    "", "dim", "bold", "good", "warn", "bad", "accent", "head", "focus", "cursor",
)  # fmt: skip
Piece = tuple[str, str]  # text, style
Line = tuple[Piece, ...]
NONE = "n/a"  # not known
_LONGEST = 4000  # characters of foreign text that are looked at


def foreign(text: object) -> str:
    """Text of others: command lines, names, errors. A terminal only prints it."""
    return escape(str(text), _LONGEST)


def cut(text: str, width: int) -> str:
    """At most so many columns; … where something is missing."""
    return text if columns_of(text) <= width else fitted(text, width)


def pad(text: str, width: int, right: bool = False) -> str:
    """Exactly so many columns."""
    return " " * (width - columns_of(text)) + cut(text, width) if right else fitted(text, width)


def fit(line: Iterable[Piece], width: int) -> Line:
    """Exactly so many columns."""
    made: list[Piece] = []
    left = width
    for text, style in line:
        text = cut(text, left)
        if text:
            made.append((text, style))
            left -= columns_of(text)
        if left <= 0:
            return tuple(made)
    return (*made, (" " * left, PLAIN)) if left else tuple(made)


def joined(pieces: Iterable[Piece | None], between: str = "  ") -> Line:
    made: list[Piece] = []
    for piece in pieces:
        if piece is not None and piece[0]:
            made += [(between, PLAIN), piece] if made else [piece]
    return tuple(made)


_SHORT = 24  # columns: a text that is longer is a sentence or a command, whose beginning is worth showing
_LEAST = 12  # columns of that


def whole(pieces: Iterable[Piece | None], width: int) -> Line:
    """Joined, in exactly so many columns: short ones that don't fit are left out, a long one is cut."""
    kept: list[Piece] = []
    left = width
    for piece in pieces:
        if piece is None or not piece[0]:
            continue
        takes, gap = columns_of(piece[0]), 2 if kept else 0
        if not kept or takes + gap <= left or (takes > _SHORT and left - gap >= _LEAST):
            kept.append(piece)
            left -= min(takes + gap, left)
    return fit(joined(kept), width)


def packed(pieces: Iterable[Piece | None], width: int) -> list[list[Piece]]:
    """Return the pieces that are joined in each of as many lines as they need."""
    lines: list[list[Piece]] = []
    left = 0
    for piece in pieces:
        if piece is None or not piece[0]:
            continue
        takes = columns_of(piece[0])
        if not lines or takes + 2 > left:
            lines.append([])
            left = width + 2
        lines[-1].append(piece)
        left -= takes + 2
    return lines


def wrapped(text: str, width: int, style: str, most: int) -> list[Line]:
    """A sentence over several lines; the last one is cut."""
    lines: list[str] = []
    for word in text.split():
        if lines and columns_of(lines[-1]) + 1 + columns_of(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    if len(lines) > most:
        lines[most - 1 :] = [" ".join(lines[most - 1 :])]
    return [((cut(line, width), style),) for line in lines]


# ---- columns of a table ----


@frozen
class Column:
    """`width` 0: takes what is left (at least `least`). Columns of a higher `order` are the first to be left out."""

    title: str
    width: int
    draw: Callable[[Any, int], Piece]
    order: int = 0
    right: bool = False
    least: int = 8


def choose(columns: Sequence[Column], width: int) -> tuple[tuple[Column, int], ...]:
    """Those that fit, with their widths; the first one always."""
    widths = [column.width or column.least for column in columns]
    kept = list(range(len(columns)))
    while len(kept) > 1 and sum(widths[at] + 1 for at in kept) - 1 > width:
        kept.remove(max(reversed(kept[1:]), key=lambda at: columns[at].order))
    left = max(0, width - sum(widths[at] + 1 for at in kept) + 1)
    flexible = next((at for at in kept if not columns[at].width), None)
    return tuple((columns[at], min(widths[at] + (left if at == flexible else 0), width)) for at in kept)


def titles(columns: Iterable[tuple[Column, int]]) -> str:
    return " ".join(pad(column.title, width, column.right) for column, width in columns)


def drawn(columns: Iterable[tuple[Column, int]], row: Any) -> Line:
    made: list[Piece] = []
    for column, width in columns:
        text, style = column.draw(row, width)
        if made:
            made.append((" ", PLAIN))
        made.append((pad(text, width, column.right), style))
    return tuple(made)


# ---- values ----


def newest(values: Sequence[float | None], width: int, top: float | None = None) -> str:
    """A sparkline from 0 up, with one sign a value and the newest at the right. `top`: of the scale."""
    shown = values[-width:] if width > 0 else ()
    return sparkline(shown, width, scale=(0.0, top)).replace("·", " ").rjust(width)


def bar(share: float | None, width: int) -> str:
    if share is None or width < 1:
        return " " * max(width, 0)
    full = max(0.0, min(1.0, share)) * width
    whole = int(full)
    part = "" if whole == width else " ▏▎▍▌▋▊▉"[int((full - whole) * 8)]
    return ("█" * whole + part).ljust(width)


def percent(share: float | None) -> str:
    return NONE if share is None else f"{max(-9.99, min(share, 9.99)) * 100:.0f}%"


def number(value: Metric, digits: int = 4) -> str:
    """A metric; one that is not finite is the word it was written as."""
    if value is None or isinstance(value, str):
        return NONE if value is None else foreign(value)
    return f"{value:.{digits}f}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.2e}"


def gigabytes(used: float | None, total: float | None) -> str:
    if used is None and total is None:
        return NONE
    return f"{NONE if used is None else f'{used / 2**30:.1f}'}/{NONE if total is None else f'{total / 2**30:.0f}'} GiB"


def seconds(value: float | None) -> str:
    """A step's time: 12 ms, 0.52 s, 3.1 s, 2 min."""
    if value is None:
        return NONE
    if value < 0.1:
        return f"{value * 1000:.0f} ms"
    if value < 100:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    return clock(value)


def clock(value: float | None) -> str:
    """0:42, 12:05, 3:10:00, 2d 04:00."""
    if value is None:
        return NONE
    whole = int(min(max(value, 0.0), 1e9))
    days, rest = divmod(whole, 86400)
    hours, minutes, secs = rest // 3600, rest % 3600 // 60, rest % 60
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def plain(line: Iterable[Piece]) -> str:
    return "".join(text for text, _ in line).rstrip()
