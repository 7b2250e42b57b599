"""Draws curves as sparklines, as charts of braille dots or letters, and as PNG files; formats numbers and fits text to a width."""

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
from stoker.contract.safe_io import AtomicFile, refuse_other_kind
from stoker.contract.text import escape
from stoker.control.show.curves import MetricsTail, average_curve, smooth_points
from stoker.control.show.snapshot import REWARD, RL_METRICS, SHARES, Metric, finite, headline_metric

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-~=+*#"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille cell: four rows of two
COLORS = ("cyan", "yellow", "magenta", "green", "blue", "red")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_GAP = "·"  # stands for an unknown value
MAX_DRAWN = 1e300  # larger values are drawn at the edge because their differences would overflow
# These characters are one column wide: Latin, arrows, lines, blocks, braille. One match is faster than a lookup for each.
_NARROW = re.compile("[ -\u02ff\u2010-\u2027\u2190-\u21ff\u2500-\u259f\u2800-\u28ff]*")
Cell = tuple[str, str]  # a character and its color


@frozen
class Series:
    """A line of a chart."""

    name: str
    points: tuple[tuple[float, float], ...]  # finite, sorted by x


# ---- text ----


def sparkline(
    values: Sequence[float | None],
    width: int = 40,
    ascii_only: bool = False,
    scale: tuple[float | None, float | None] = (None, None),
) -> str:
    """Draw values as one line of at most `width` bars; None is drawn as a gap.

    If there are more values than columns, each bar is a mean. `scale` has the values of the lowest and the highest bar; None
    stands for the lowest or highest value.
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    parts = [values[column * len(values) // count : (column + 1) * len(values) // count] for column in range(count)]
    means = [mean([value for value in part if value is not None and math.isfinite(value)]) for part in parts]
    known_means = [value for value in means if value is not None]
    bars, gap = (_ASCII_BARS, " ") if ascii_only else (_BARS, _GAP)
    if not known_means:
        return gap * count
    low = scale[0] if scale[0] is not None else min(known_means)
    high = scale[1] if scale[1] is not None else max(known_means)
    span = high - low

    def bar_of(value: float) -> str:
        if span <= 0:
            return bars[len(bars) // 2]
        share = (value - low) / span if math.isfinite(span) else 0.0
        return bars[min(int(max(0.0, min(share, 1.0)) * len(bars)), len(bars) - 1)]

    return "".join(gap if value is None else bar_of(value) for value in means)


def mean(values: Sequence[float]) -> float | None:
    try:
        return math.fsum(values) / len(values) if values else None
    except OverflowError:  # the sum of values near 1.7e308 overflows, but their mean does not
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
    """Return a chart with axes as rows of cells. Several lines differ by color, or by letter without color.

    With `log` the y axis is logarithmic and values that are not positive are omitted.
    """
    drawn = [
        [(x, math.log10(y) if log else max(-MAX_DRAWN, min(y, MAX_DRAWN))) for x, y in line.points if not log or y > 0]
        for line in lines
    ]
    points = [point for line in drawn for point in line]
    if not points:
        return []
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    if high == low:
        high, low = high + (abs(high) * 0.05 or 0.5), low - (abs(low) * 0.05 or 0.5)
    labels = _y_labels(low, high, height, log)
    margin = max(map(len, labels)) + 1
    inner = max(width - margin - 1, 4)
    use_letters = ascii_only or (len(lines) > 1 and not coloured)
    columns, rows = (inner, height) if use_letters else (inner * 2, height * 4)
    cells: list[list[Cell]] = [[(" ", "")] * inner for _ in range(height)]
    for index, line in enumerate(drawn):
        for x, y in _dots(line, (left, right), (low, high), columns, rows):
            row, column = (y, x) if use_letters else (y // 4, x // 2)
            if use_letters:
                character = LETTERS[index % len(LETTERS)] if len(lines) > 1 else "*"
            else:
                before = ord(cells[row][column][0]) if cells[row][column][0] != " " else 0x2800
                character = chr(before | _DOTS[y % 4][x % 2])
            cells[row][column] = character, COLORS[index % len(COLORS)]
    vertical, corner, horizontal = ("|", "+", "-") if ascii_only else ("│", "└", "─")
    chart = [[(f"{label:>{margin - 1}} {vertical}", ""), *row] for label, row in zip(labels, cells, strict=True)]
    chart.append([(" " * margin + corner + horizontal * inner, "")])
    chart.append([(" " * (margin + 1) + _x_labels(left, right, inner), "")])
    return chart


def _y_labels(low: float, high: float, height: int, log: bool) -> list[str]:
    """Return a label for each row; only the first, the last and every fourth row have one that is not empty."""
    labels = []
    for row in range(height):
        value = high - (high - low) * row / max(height - 1, 1)
        has_label = row in (0, height - 1) or (row % 4 == 0 and row < height - 2)
        labels.append(format_short(10 ** min(value, 308.0) if log else value) if has_label else "")
    return labels


def _x_labels(left: float, right: float, width: int) -> str:
    first, last = format_short(left), format_short(right)
    center = left + (right - left) / 2
    middle = format_short(math.floor(center) if right - left >= 10 else center)  # steps are integers
    if len(first) + len(middle) + len(last) + 4 > width:
        return (first + last.rjust(max(width - len(first), 0)))[:width]
    column = (width - len(middle)) // 2
    return (first.ljust(column) + middle).ljust(width - len(last)) + last


def _dots(
    points: Sequence[tuple[float, float]], xs: tuple[float, float], ys: tuple[float, float], columns: int, rows: int
) -> list[tuple[int, int]]:
    """Return the dots of a line through the points, as (column, row) from the top left."""
    dots: list[tuple[int, int]] = []
    previous: tuple[int, int] | None = None
    for x, y in points:
        column = round((x - xs[0]) / ((xs[1] - xs[0]) or 1.0) * (columns - 1))
        row = round((ys[1] - y) / (ys[1] - ys[0]) * (rows - 1))
        if previous is not None:
            across, down = column - previous[0], row - previous[1]
            steps = max(abs(across), abs(down))
            for step in range(1, steps):
                share = step / steps
                dots.append((round(previous[0] + across * share), round(previous[1] + down * share)))
        dots.append((column, row))
        previous = column, row
    return dots


def format_short(value: Metric) -> str:
    """Format a number in few characters: 3.214, 0.0021, 1.2e-05, 34.5K, 12M. A string such as "nan" is returned unchanged."""
    if value is None:
        return "n/a"
    if isinstance(value, str):
        return value
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and size < 10_000:
        return str(int(value))
    for limit, divisor, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "K")):
        if size >= limit:
            scaled = value / divisor
            return f"{scaled:.3g}{unit}" if abs(scaled) < 1000 else f"{value:.2e}"
    if size >= 100:
        return f"{value:.1f}"
    if size >= 0.001:
        return f"{value:.4g}"
    return f"{value:.1e}"


def metric_text(name: str, value: Metric) -> str:
    """Format the value of the metric `name`: shares in percent, others with `format_short`."""
    number = finite(value)
    return f"{number:.0%}" if name in SHARES and number is not None else format_short(value)


def display_width(text: str) -> int:
    """Return the terminal columns that a text takes: two for a Chinese character, none for a combining accent."""
    if text.isascii() or _NARROW.fullmatch(text):
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def fit_width(text: str, width: int) -> str:
    """Pad a text to exactly `width` columns, or cut it and end it with an ellipsis."""
    columns = display_width(text)
    if columns <= width:
        return text + " " * (width - columns)
    if width <= 0:
        return ""
    fitting, columns = "", 0
    for character in text:
        columns += display_width(character)
        if columns > width - 1:
            break
        fitting += character
    return fitting + "…" + " " * (width - display_width(fitting) - 1)


# ---- pictures ----

Panel = tuple[str, Sequence[Series]]  # label of the y axis and the lines

_PNG_COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
)  # Okabe and Ito's palette for color blindness
_PNG_MAX = 1e100  # larger values are drawn here, because matplotlib's margins and ticks would overflow
_PNG_STYLES = ("-", "--", "-.", ":")  # after six lines the colors repeat with another style
_PNG_SETTINGS: Any = {
    "axes.grid": True, "grid.color": "#d4d8dc", "grid.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "text.parse_math": False,  # the name of a run may contain $
    "font.size": 11, "savefig.dpi": 130,
}  # fmt: skip


def write_png(path: str, panels: Sequence[Panel], *, log: bool = False) -> None:
    """Draw the panels below each other into a PNG file.

    Raises Refusal if matplotlib is missing or the file can't be written.
    """
    try:
        import matplotlib.figure
    except ImportError as problem:
        reason = (
            f"can't draw a picture: importing matplotlib failed ({problem}); run pip install matplotlib, or omit --png"
        )
        raise Refusal(escape(reason), EX_UNAVAILABLE) from problem
    refuse_other_kind(path, b"\x89PNG", "a PNG picture")
    with matplotlib.rc_context(_PNG_SETTINGS):
        height = 4.5 if len(panels) == 1 else 1.2 + 1.7 * len(panels)
        figure = matplotlib.figure.Figure(figsize=(8, height), layout="constrained")
        grid = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
        for axes, (label, lines) in zip(grid, panels, strict=True):
            for index, line in enumerate(lines):
                ys = [max(-_PNG_MAX, min(y, _PNG_MAX)) for _, y in line.points]
                axes.plot(
                    [x for x, _ in line.points],
                    ys,
                    linewidth=1.4,
                    label=line.name,
                    color=_PNG_COLORS[index % len(_PNG_COLORS)],
                    linestyle=_PNG_STYLES[index // len(_PNG_COLORS) % len(_PNG_STYLES)],
                )
            axes.set_ylabel(label)
            if log:
                axes.set_yscale("log")
        grid[-1].set_xlabel("step")
        first_lines = panels[0][1]
        if len(first_lines) > 1:
            grid[0].legend()
        else:
            grid[0].set_title(first_lines[0].name, loc="left", fontsize=11)
        figure.align_ylabels()
        try:
            with AtomicFile(path, durable=False) as file:
                figure.savefig(file, format="png", metadata={"Software": None})
        except OSError as problem:
            raise Refusal(f"{escape(path)} can't be written: {problem.strerror}", EX_CANTCREAT) from problem


def show_loss(run_dir: str, log: Callable[[str], None]) -> None:
    """Log the loss of a finished training (its reward with GRPO) as one line, and draw it as a PNG if matplotlib is installed.

    Logs nothing for a run without a loss. If the picture can't be drawn, logs why; the exit code does not change.
    """
    import importlib.util

    metrics = MetricsTail(run_dir)
    metrics.read_new()
    headline = headline_metric(metrics.curves)
    curve = metrics.curves.get(headline)
    points = average_curve(curve, metrics.interval).points() if curve is not None else []
    values = [number for _, value in points if (number := finite(value)) is not None]
    if curve is None or len(values) < 2:
        return
    bad_count = len(curve.find_non_finite_steps())
    bad = f" ({bad_count} not finite)" if bad_count else ""
    summary = f"{headline} {sparkline(values)} {format_short(values[0])} to {format_short(values[-1])}{bad}"
    try:
        if os.environ.get(env_vars.PLOTS) != "0" and importlib.util.find_spec("matplotlib") is not None:
            names = [name for name in RL_METRICS if name in metrics.curves] if headline == REWARD else [headline]
            title = os.path.basename(run_dir)
            panels = [
                (RL_METRICS.get(name, name), [Series(title, smooth_points(metrics.curves[name], metrics.interval))])
                for name in names
            ]
            path = os.path.join(run_dir, f"{headline}.png")
            write_png(path, panels)
            summary += f"; {os.path.relpath(path)}"
    except Refusal as problem:
        log(f"stoker: {problem.line}")
    except Exception as problem:  # a broken installation of matplotlib must not fail a finished run
        log(f"stoker: {headline}.png could not be drawn: {escape(f'{type(problem).__name__}: {problem}', 200)}")
    log(summary)
