"""A line of a terminal: pieces of text, each with the name of a style, cut and padded to a number of columns."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stoker.contract.shape import shape
from stoker.contract.untrusted import printable
from stoker.control.show.snapshot import Metric

# Names of styles; app.py says what they look like.
PLAIN, DIM, BOLD, GOOD, WARN, BAD, ACCENT, HEAD, FOCUS, CURSOR = (
    "", "dim", "bold", "good", "warn", "bad", "accent", "head", "focus", "cursor",
)  # fmt: skip
Piece = tuple[str, str]  # text, style
Line = tuple[Piece, ...]
NONE = "-"  # not known
_BARS = "▁▂▃▄▅▆▇█"
# Latin, and what is drawn with: arrows, lines, blocks, braille. In one look instead of sign by sign.
_NARROW = re.compile("[ -\u02ff\u2010-\u2027\u2190-\u21ff\u2500-\u259f\u2800-\u28ff]*")
_LONGEST = 4000  # characters of foreign text that are looked at


def cell_width(text: str) -> int:
    if text.isascii() or _NARROW.fullmatch(text):
        return len(text)
    return sum(_width(sign) for sign in text)


def _width(sign: str) -> int:
    if sign < "\u0300":
        return 1
    if unicodedata.category(sign) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in ("W", "F") else 1


def foreign(text: object) -> str:
    """Text of others: command lines, names, errors. A terminal only prints it."""
    return printable(str(text), _LONGEST)


def cut(text: str, width: int) -> str:
    """At most so many columns; … where something is missing."""
    if cell_width(text) <= width:
        return text
    if width < 1:
        return ""
    kept, used = [], 0
    for sign in text:
        used += _width(sign)
        if used > width - 1:
            break
        kept.append(sign)
    return "".join(kept) + "…"


def pad(text: str, width: int, right: bool = False) -> str:
    text = cut(text, width)
    space = " " * (width - cell_width(text))
    return space + text if right else text + space


def fit(line: Iterable[Piece], width: int) -> Line:
    """Exactly so many columns."""
    made: list[Piece] = []
    left = width
    for text, style in line:
        text = cut(text, left)
        if text:
            made.append((text, style))
            left -= cell_width(text)
        if left <= 0:
            return tuple(made)
    return (*made, (" " * left, PLAIN)) if left else tuple(made)


def joined(pieces: Iterable[Piece | None], between: str = "  ") -> Line:
    made: list[Piece] = []
    for piece in pieces:
        if piece is not None and piece[0]:
            made += [(between, PLAIN), piece] if made else [piece]
    return tuple(made)


def wrapped(text: str, width: int, style: str, most: int) -> list[Line]:
    """A sentence over several lines; the last one is cut."""
    lines: list[str] = []
    for word in text.split():
        if lines and cell_width(lines[-1]) + 1 + cell_width(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    if len(lines) > most:
        lines[most - 1 :] = [" ".join(lines[most - 1 :])]
    return [((cut(line, width), style),) for line in lines]


# ---- columns of a table ----


@shape
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
    kept = list(columns)
    while len(kept) > 1 and sum((one.width or one.least) + 1 for one in kept) - 1 > width:
        kept.remove(max(reversed(kept[1:]), key=lambda one: one.order))
    left = width - sum((one.width or one.least) + 1 for one in kept) + 1
    flexible = [one for one in kept if not one.width]
    made = []
    for one in kept:
        share = 0
        if one in flexible and left > 0:
            share = left // len(flexible)
            flexible, left = flexible[1:], left - share
        made.append((one, min((one.width or one.least) + share, width)))
    return tuple(made)


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


def sparkline(values: Sequence[float | None], width: int, top: float | None = None, bottom: float = 0.0) -> str:
    """The newest values at the right. `top`: of the scale; None: the largest of those shown."""
    shown = list(values[-width:]) if width > 0 else []
    known = [value for value in shown if value is not None and math.isfinite(value)]
    high = top if top is not None else max(known, default=0.0)
    size = high - bottom
    signs = []
    for value in shown:
        if value is None or not math.isfinite(value):
            signs.append(" ")
        else:
            share = (value - bottom) / size if size > 0 else 0.0
            signs.append(_BARS[max(0, min(len(_BARS) - 1, int(share * len(_BARS))))])
    return "".join(signs).rjust(max(width, 0))


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


def short(value: Metric) -> str:
    """12.3k, 4.5M: tokens a second, steps."""
    if value is None or isinstance(value, str):
        return NONE if value is None else foreign(value)
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            size = value / {"k": 1e3}.get(unit, limit)
            return f"{size:.3g}{unit}" if abs(size) < 1000 else f"{size:.0f}{unit}"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"


def gigabytes(used: float | None, total: float | None) -> str:
    if used is None and total is None:
        return NONE
    return f"{NONE if used is None else f'{used / 1e9:.1f}'}/{NONE if total is None else f'{total / 1e9:.0f}'} GB"


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
