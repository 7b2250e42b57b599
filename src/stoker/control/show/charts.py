"""Curves in text: sparklines, charts in braille or letters, numbers and tables that fit a width. Pure."""

from __future__ import annotations

import math
import os
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from stoker.contract import env_vars
from stoker.contract.errors import EX_CANTCREAT, EX_UNAVAILABLE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import AtomicFile, refuse_other_extension
from stoker.contract.text import escape
from stoker.control.show.curves import MetricsTail, average_curve, finite_points, smooth_points
from stoker.control.show.snapshot import REWARD, RL_METRICS, SHARES, Metric, finite, headline_metric

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-~=+*#"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille cell: rows of two
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_GAP = "·"
MAX_DRAWN = 1e300
# Latin, and what is drawn with: arrows, lines, blocks, braille. In one look instead of sign by sign.
_NARROW = re.compile("[ -\u02ff\u2010-\u2027\u2190-\u21ff\u2500-\u259f\u2800-\u28ff]*")
Cell = tuple[str, str]  # a character, and its colour


@frozen
class Series:
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


def draw_chart(
    lines: Sequence[Series],
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
    return max(-MAX_DRAWN, min(value, MAX_DRAWN))


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


def display_width(text: str) -> int:
    """A terminal's columns for it: two for a Chinese character, none for an accent that joins the one before."""
    if text.isascii() or _NARROW.fullmatch(text):
        return len(text)
    wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in text)
    return len(text) + wide - sum(unicodedata.combining(sign) > 0 for sign in text)


def fit_width(text: str, width: int) -> str:
    """Exactly so many columns: padded, or cut with … in its place."""
    if display_width(text) <= width:
        return text + " " * (width - display_width(text))
    kept, used = "", 0
    for sign in text:
        used += display_width(sign)
        if used > width - 1:
            break
        kept += sign
    return kept + "…" + " " * (width - display_width(kept) - 1) if width > 0 else ""


pass

_WIDTH = 40


def show_loss(run_dir: str, say: Callable[[str], None]) -> None:
    """Nothing of a run without a loss. What goes wrong here is reported, and changes no exit code."""
    metrics = MetricsTail(run_dir)
    metrics.look()
    metric = headline_metric(metrics.curves)
    curve = metrics.curves.get(metric)
    points = finite_points(average_curve(curve, metrics.interval).points()) if curve is not None else []
    if curve is None or len(points) < 2:
        return
    values = [value for _, value in points]
    wrong = len(curve.not_finite())
    bad = f" ({wrong} not finite)" if wrong else ""
    drawn = f"{metric} {sparkline(values, _WIDTH)} {short(values[0])} to {short(values[-1])}{bad}"
    picture = ""
    try:
        if os.environ.get(env_vars.PLOTS) != "0":
            name, drawn_metrics = os.path.basename(run_dir), [metric]
            if metric == REWARD:
                drawn_metrics = [one for one in RL_METRICS if one in metrics.curves]
            panels = [
                (RL_METRICS.get(one, one), [Series(name, smooth_points(metrics.curves[one], metrics.interval))])
                for one in drawn_metrics
            ]
            picture = leave_picture(run_dir, panels, metric)
    except Refusal as problem:
        say(f"stoker: {problem.line}")
    except Exception as problem:  # a matplotlib that is there and does not work
        say(f"stoker: {metric}.png could not be drawn: {escape(f'{type(problem).__name__}: {problem}', 200)}")
    say(drawn + (f"; {os.path.relpath(picture)}" if picture else ""))


pass

# Okabe and Ito's: told apart without red and green.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_HIGHEST = 1e100  # what is beyond is drawn there: matplotlib's margins and ticks need powers of it
_STYLES = ("-", "--", "-.", ":")  # nothing is told by colour alone
_LOOK: Any = {
    "axes.grid": True, "grid.color": "#d4d8dc", "grid.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "text.parse_math": False,  # a run may be called a_$b
    "font.size": 11, "savefig.dpi": 130,
}  # fmt: skip


def there_is_matplotlib() -> bool:
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


Panel = tuple[str, Sequence[Series]]  # label of the values' axis, and the lines


def write_png(path: str, panels: Sequence[Panel], *, log: bool = False) -> None:
    """Draw the panels below each other and write the picture whole or not at all."""
    try:
        import matplotlib.figure
    except ImportError as problem:
        line = f"no picture: matplotlib can't be imported ({problem}); pip install matplotlib, or leave --png out"
        raise Refusal(escape(line), EX_UNAVAILABLE) from problem
    refuse_other_extension(path, b"\x89PNG", "a PNG picture")
    with matplotlib.rc_context(_LOOK):
        height = 4.5 if len(panels) == 1 else 1.2 + 1.7 * len(panels)
        figure = matplotlib.figure.Figure(figsize=(8, height), layout="constrained")
        grid = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
        for axes, (label, lines) in zip(grid, panels, strict=True):
            for number, one in enumerate(lines):
                look: Any = {
                    "color": _COLOURS[number % len(_COLOURS)],
                    "linestyle": _STYLES[number // len(_COLOURS) % len(_STYLES)],
                }
                heights = [max(-_HIGHEST, min(y, _HIGHEST)) for _, y in one.points]
                axes.plot([x for x, _ in one.points], heights, linewidth=1.4, label=one.name, **look)
            axes.set_ylabel(label)
            if log:
                axes.set_yscale("log")
        grid[-1].set_xlabel("step")
        first = panels[0][1]
        if len(first) > 1:
            grid[0].legend()
        else:
            grid[0].set_title(first[0].name, loc="left", fontsize=11)
        figure.align_ylabels()
        try:
            with AtomicFile(path, durable=False) as file:
                figure.savefig(file, format="png", metadata={"Software": None})
        except OSError as problem:
            raise Refusal(f"{escape(path)} can't be written: {problem.strerror}", EX_CANTCREAT) from problem


def leave_picture(run_dir: str, panels: Sequence[Panel], metric: str) -> str:
    """Write METRIC.png into a finished run's folder and return its path, or "" without matplotlib."""
    if not there_is_matplotlib():
        return ""
    path = os.path.join(run_dir, f"{metric}.png")
    write_png(path, panels)
    return path
