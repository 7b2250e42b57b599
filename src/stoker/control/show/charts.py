"""Curves in text: sparklines, charts in braille or letters, numbers and tables that fit a width. Pure."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

from stoker.contract.frozen import frozen
from stoker.control.show.snapshot import SHARES, Metric, finite

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-~=+*#"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille cell: rows of two
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_GAP = "·"
MOST_DRAWN = 1e300
# Latin, and what is drawn with: arrows, lines, blocks, braille. In one look instead of sign by sign.
_NARROW = re.compile("[ -\u02ff\u2010-\u2027\u2190-\u21ff\u2500-\u259f\u2800-\u28ff]*")
Cell = tuple[str, str]  # a character, and its colour


@frozen
class Line:
    name: str
    points: tuple[tuple[float, float], ...]  # finite, by x


def sparkline(
    values: Sequence[float | None],
    width: int = 40,
    ascii_only: bool = False,
    scale: tuple[float | None, float | None] = (None, None),
) -> str:
    """As wide as there are values, and no wider than asked: then each sign is the mean of its part. None is a gap.

    `scale`: the lowest and the highest sign's value; None: those of the values.
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    parts = [values[at * len(values) // count : (at + 1) * len(values) // count] for at in range(count)]
    means = [mean([one for one in part if one is not None and math.isfinite(one)]) for part in parts]
    known = [one for one in means if one is not None]
    signs, gap = (_ASCII_BARS, " ") if ascii_only else (_BARS, _GAP)
    if not known:
        return gap * count
    low, high = (given if given is not None else end(known) for given, end in zip(scale, (min, max), strict=True))
    room = high - low

    def sign(value: float) -> str:
        if room <= 0:
            return signs[len(signs) // 2]
        share = (value - low) / room if math.isfinite(room) else 0.0
        return signs[min(int(max(0.0, min(share, 1.0)) * len(signs)), len(signs) - 1)]

    return "".join(gap if one is None else sign(one) for one in means)


def mean(values: Sequence[float]) -> float | None:
    try:
        return math.fsum(values) / len(values) if values else None
    except OverflowError:  # of 1.7e308 and its like the sum is no number, the mean is
        return math.fsum(value / len(values) for value in values)


def chart(
    lines: Sequence[Line],
    width: int,
    height: int,
    *,
    log: bool = False,
    coloured: bool = False,
    ascii_only: bool = False,
) -> list[list[Cell]]:
    """Rows of cells, with axes. Several lines are told apart by colour; without colour each is drawn in a letter.

    `log`: the values' axis is logarithmic; values that are not positive are left out.
    """
    drawn = [[(x, math.log10(y) if log else _drawable(y)) for x, y in one.points if not log or y > 0] for one in lines]
    everything = [point for points in drawn for point in points]
    if not everything:
        return []
    left, right = min(x for x, _ in everything), max(x for x, _ in everything)
    low, high = min(y for _, y in everything), max(y for _, y in everything)
    if high == low:
        high, low = high + (abs(high) * 0.05 or 0.5), low - (abs(low) * 0.05 or 0.5)
    labels = _labels(low, high, height, log)
    margin = max(map(len, labels)) + 1
    inner = max(width - margin - 1, 4)
    letters = ascii_only or (len(lines) > 1 and not coloured)
    across, down = (inner, height) if letters else (inner * 2, height * 4)
    cells: list[list[Cell]] = [[(" ", "")] * inner for _ in range(height)]
    for number, points in enumerate(drawn):
        colour = COLOURS[number % len(COLOURS)]
        dots = _dots(points, (left, right), (low, high), across, down)
        for x, y in dots:
            row, column = (y, x) if letters else (y // 4, x // 2)
            if letters:
                sign = LETTERS[number % len(LETTERS)] if len(lines) > 1 else "*"
            else:
                before = ord(cells[row][column][0]) if cells[row][column][0] != " " else 0x2800
                sign = chr(before | _DOTS[y % 4][x % 2])
            cells[row][column] = sign, colour
    upright, corner, flat = ("|", "+", "-") if ascii_only else ("│", "└", "─")
    rows = [[(f"{label:>{margin - 1}} {upright}", ""), *row] for label, row in zip(labels, cells, strict=True)]
    rows.append([(" " * margin + corner + flat * inner, "")])
    rows.append([(" " * (margin + 1) + _axis(left, right, inner), "")])
    return rows


def _drawable(value: float) -> float:
    """Differences of larger ones are no numbers: they are drawn at the edge."""
    return max(-MOST_DRAWN, min(value, MOST_DRAWN))


def _labels(low: float, high: float, height: int, log: bool) -> list[str]:
    """Of every fourth row, the first and the last."""
    found = []
    for row in range(height):
        value = high - (high - low) * row / max(height - 1, 1)
        wanted = row in (0, height - 1) or (row % 4 == 0 and row < height - 2)
        shown = 10 ** min(value, 308.0) if log and wanted else value
        found.append(short(shown) if wanted else "")
    return found


def _axis(left: float, right: float, width: int) -> str:
    begin, end = short(left), short(right)
    half = left + (right - left) / 2
    middle = short(math.floor(half) if right - left >= 10 else half)  # no half steps
    if len(begin) + len(middle) + len(end) + 4 > width:
        return (begin + end.rjust(max(width - len(begin), 0)))[:width]
    at = (width - len(middle)) // 2
    return (begin.ljust(at) + middle).ljust(width - len(end)) + end


def _dots(
    points: Sequence[tuple[float, float]], xs: tuple[float, float], ys: tuple[float, float], across: int, down: int
) -> list[tuple[int, int]]:
    """Points and the lines between them, on a grid with its origin at the top left."""

    def place(x: float, y: float) -> tuple[int, int]:
        column = round((x - xs[0]) / ((xs[1] - xs[0]) or 1.0) * (across - 1))
        row = round((ys[1] - y) / (ys[1] - ys[0]) * (down - 1))
        return column, row

    found: list[tuple[int, int]] = []
    before: tuple[int, int] | None = None
    for x, y in points:
        here = place(x, y)
        if before is not None and here != before:
            steps = max(abs(here[0] - before[0]), abs(here[1] - before[1]))
            for at in range(1, steps):
                part = at / steps
                found.append(
                    (round(before[0] + (here[0] - before[0]) * part), round(before[1] + (here[1] - before[1]) * part))
                )
        found.append(here)
        before = here
    return found


def short(value: Metric) -> str:
    """A number in few characters: 3.214, 0.0021, 1.2e-05, 34.5K, 12M; a word as it is."""
    if value is None:
        return "n/a"
    if isinstance(value, str):
        return value
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and size < 10_000:
        return str(int(value))
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "K")):
        if size >= limit:
            shown = value / {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3}[unit]
            return f"{shown:.3g}{unit}" if abs(shown) < 1000 else f"{value:.2e}"
    if size >= 100:
        return f"{value:.1f}"
    if size >= 0.001:
        return f"{value:.4g}"
    return f"{value:.1e}"


def metric_text(name: str, value: Metric) -> str:
    """Format the value of the metric `name`: shares in percent, others as `short` does."""
    number = finite(value)
    return f"{number:.0%}" if name in SHARES and number is not None else short(value)


def columns_of(text: str) -> int:
    """A terminal's columns for it: two for a Chinese character, none for an accent that joins the one before."""
    if text.isascii() or _NARROW.fullmatch(text):
        return len(text)
    wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in text)
    return len(text) + wide - sum(unicodedata.combining(sign) > 0 for sign in text)


def fitted(text: str, width: int) -> str:
    """Exactly so many columns: padded, or cut with … in its place."""
    if columns_of(text) <= width:
        return text + " " * (width - columns_of(text))
    kept, used = "", 0
    for sign in text:
        used += columns_of(sign)
        if used > width - 1:
            break
        kept += sign
    return kept + "…" + " " * (width - columns_of(kept) - 1) if width > 0 else ""
