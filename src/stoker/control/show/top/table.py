"""Formats lines, values and tables of the terminal screen. A line consists of pieces of text, each with a style."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stoker.contract.frozen import frozen
from stoker.contract.text import escape
from stoker.control.show.charts import display_width, fit_width, sparkline
from stoker.control.show.snapshot import GpuGauges, Metric, RankView, RunView, Snapshot

# These are names of styles; app.py defines their colors.
PLAIN, DIM, BOLD, GOOD, WARN, BAD, ACCENT, HEAD, FOCUS, CURSOR = (
    "", "dim", "bold", "good", "warn", "bad", "accent", "head", "focus", "cursor",
)  # fmt: skip
Piece = tuple[str, str]  # text, style
Line = tuple[Piece, ...]
NONE = "n/a"  # shown for an unknown value
_MAX_FOREIGN = 4000  # characters shown of a text from a run or process
_LONG = 24  # columns; if a longer text does not fit, it is cut instead of omitted
_MIN_BEGINNING = 12  # columns that must be free for the beginning of a long text

# ---- lines ----


def escape_cell(text: object) -> str:
    """Escape control characters in a text from a run or process: command lines, names, errors."""
    return escape(str(text), _MAX_FOREIGN)


def cut(text: str, width: int) -> str:
    """Cut a text to at most `width` columns; an ellipsis marks the cut."""
    return text if display_width(text) <= width else fit_width(text, width)


def pad(text: str, width: int, right: bool = False) -> str:
    """Cut or pad a text to exactly `width` columns; `right` aligns it to the right."""
    return " " * (width - display_width(text)) + cut(text, width) if right else fit_width(text, width)


def fit(line: Iterable[Piece], width: int) -> Line:
    """Cut or pad a line to exactly `width` columns."""
    pieces: list[Piece] = []
    free = width
    for text, style in line:
        text = cut(text, free)
        if text:
            pieces.append((text, style))
            free -= display_width(text)
        if free <= 0:
            return tuple(pieces)
    return (*pieces, (" " * free, PLAIN)) if free else tuple(pieces)


def join_pieces(pieces: Iterable[Piece | None], separator: str = "  ") -> Line:
    """Join the pieces that are not empty."""
    line: list[Piece] = []
    for piece in pieces:
        if piece is not None and piece[0]:
            line += [(separator, PLAIN), piece] if line else [piece]
    return tuple(line)


def join_fitting(pieces: Iterable[Piece | None], width: int) -> Line:
    """Join pieces in exactly `width` columns. Short pieces that don't fit are omitted, a long one is cut."""
    fitting: list[Piece] = []
    free = width
    for piece in pieces:
        if piece is None or not piece[0]:
            continue
        columns, gap = display_width(piece[0]), 2 if fitting else 0
        if not fitting or columns + gap <= free or (columns > _LONG and free - gap >= _MIN_BEGINNING):
            fitting.append(piece)
            free -= min(columns + gap, free)
    return fit(join_pieces(fitting), width)


def pack_lines(pieces: Iterable[Piece | None], width: int) -> list[list[Piece]]:
    """Distribute pieces over as many lines as they need; join_pieces joins those of a line."""
    lines: list[list[Piece]] = []
    free = 0
    for piece in pieces:
        if piece is None or not piece[0]:
            continue
        columns = display_width(piece[0])
        if not lines or columns + 2 > free:
            lines.append([])
            free = width + 2
        lines[-1].append(piece)
        free -= columns + 2
    return lines


def wrap_text(text: str, width: int, style: str, max_lines: int) -> list[Line]:
    """Wrap a sentence to at most `max_lines` lines; the last one is cut if the text is longer."""
    lines: list[str] = []
    for word in text.split():
        if lines and display_width(lines[-1]) + 1 + display_width(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    if len(lines) > max_lines:
        lines[max_lines - 1 :] = [" ".join(lines[max_lines - 1 :])]
    return [((cut(line, width), style),) for line in lines]


def plain_text(line: Iterable[Piece]) -> str:
    return "".join(text for text, _ in line).rstrip()


# ---- values ----


def draw_history(values: Sequence[float | None], width: int, top: float | None = None) -> str:
    """Draw values as a sparkline with the newest at the right. Its scale goes from 0 to `top`, or to the highest value."""
    newest = values[-width:] if width > 0 else ()
    return sparkline(newest, width, scale=(0.0, top)).replace("·", " ").rjust(width)


def draw_bar(share: float | None, width: int) -> str:
    if share is None or width < 1:
        return " " * max(width, 0)
    length = max(0.0, min(1.0, share)) * width
    full = int(length)
    part = "" if full == width else " ▏▎▍▌▋▊▉"[int((length - full) * 8)]
    return ("█" * full + part).ljust(width)


def format_percent(share: float | None) -> str:
    return NONE if share is None else f"{max(-9.99, min(share, 9.99)) * 100:.0f}%"


def format_metric(value: Metric, digits: int = 4) -> str:
    """Format a metric with `digits` decimals; very small and very large values get an exponent."""
    if value is None:
        return NONE
    if isinstance(value, str):
        return escape_cell(value)
    return f"{value:.{digits}f}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.2e}"


def format_gib(used: float | None, total: float | None) -> str:
    if used is None and total is None:
        return NONE
    return f"{NONE if used is None else f'{used / 2**30:.1f}'}/{NONE if total is None else f'{total / 2**30:.0f}'} GiB"


def format_step_time(seconds: float | None) -> str:
    """Format the time of a step: 12 ms, 0.52 s, 3.1 s, 2:00."""
    if seconds is None:
        return NONE
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 100 else format_clock(seconds)


def format_clock(seconds: float | None) -> str:
    """Format a time as 0:42, 12:05, 3:10:00 or 2d 04:00."""
    if seconds is None:
        return NONE
    minutes, seconds = divmod(int(min(max(seconds, 0.0), 1e9)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def format_local_time(seconds: float, pattern: str) -> str:
    """Format a time since 1970, or return "" for 0 and for times out of range, which a wrong clock may have written."""
    try:
        return time.strftime(pattern, time.localtime(seconds)) if seconds else ""
    except (OverflowError, OSError, ValueError):
        return ""


def gpu_label(gpu: GpuGauges, with_host: bool) -> str:
    return escape_cell(f"{gpu.host}/{gpu.label}" if with_host else gpu.label)


# ---- columns ----


@frozen
class Column:
    """A column of a table. With width 0 it takes the remaining width, at least `min_width`.

    Columns with a higher `order` are omitted first if the screen is narrow.
    """

    title: str
    width: int
    draw: Callable[[Any, int], Piece]
    order: int = 0
    right: bool = False
    min_width: int = 8


def choose_columns(columns: Sequence[Column], width: int) -> tuple[tuple[Column, int], ...]:
    """Return the columns that fit, with their widths. The first column is always among them."""
    widths = [column.width or column.min_width for column in columns]
    chosen = list(range(len(columns)))
    while len(chosen) > 1 and sum(widths[index] + 1 for index in chosen) - 1 > width:
        chosen.remove(max(reversed(chosen[1:]), key=lambda index: columns[index].order))
    free = max(0, width - sum(widths[index] + 1 for index in chosen) + 1)
    flexible = next((index for index in chosen if not columns[index].width), None)
    return tuple((columns[index], min(widths[index] + (free if index == flexible else 0), width)) for index in chosen)


def draw_titles(columns: Iterable[tuple[Column, int]]) -> str:
    return " ".join(pad(column.title, width, column.right) for column, width in columns)


def draw_row(columns: Iterable[tuple[Column, int]], item: Any) -> Line:
    line: list[Piece] = []
    for column, width in columns:
        text, style = column.draw(item, width)
        if line:
            line.append((" ", PLAIN))
        line.append((pad(text, width, column.right), style))
    return tuple(line)


# ---- panels ----

GPUS, RUN, RANKS, PROCESSES, RUNS = "gpus", "run", "ranks", "processes", "runs"
PANELS = (GPUS, RUN, RANKS, PROCESSES, RUNS)
TITLES = {GPUS: "GPUs", RUN: "Run", RANKS: "Ranks", PROCESSES: "Processes", RUNS: "Runs"}


@frozen
class PanelOptions:
    """How the user sorts and filters a panel."""

    sort: str = ""  # a letter of the panel's orders, or "" for unsorted
    reverse: bool = False
    filter: str = ""


@frozen
class Order:
    """A sort order of a panel. Rows whose `key` is None come last, also in reverse."""

    title: str
    key: Callable[[Any], Any]
    down: bool = True  # largest first


@frozen
class Row:
    """A row of a panel; `key` identifies the same item in the next snapshot."""

    key: str
    item: Any
    text: str  # the text that a filter searches, in lower case
    draw: Callable[[Any, int], Line] | None = None  # draws a row without columns, such as a host's


@frozen
class Panel:
    """A table of items of one kind, sorted and filtered. Only its visible rows are drawn."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    empty: str  # text to show if there are no rows
    hidden: int = 0  # number of rows that the filter hides

    def head(self, width: int) -> str:
        return draw_titles(choose_columns(self.columns, width))

    def lines(self, begin: int, end: int, width: int) -> list[Line]:
        if not self.rows:
            text = f"nothing matches the filter ({self.hidden} hidden)" if self.hidden else self.empty
            return [((text, DIM),)] if begin == 0 < end else []
        columns = choose_columns(self.columns, width)
        return [
            row.draw(row.item, width) if row.draw is not None else draw_row(columns, row.item)
            for row in self.rows[begin:end]
        ]


def filter_and_sort(
    rows: Iterable[Row], options: PanelOptions, orders: Mapping[str, Order]
) -> tuple[tuple[Row, ...], int]:
    """Return the rows to show and the number of rows that the filter hides."""
    all_rows = list(rows)
    searched = options.filter.lower()
    rows_shown = [row for row in all_rows if searched in row.text] if searched else all_rows[:]
    order = orders.get(options.sort)
    if order is not None:
        keyed = [(order.key(row.item), row) for row in rows_shown]
        with_key = [pair for pair in keyed if pair[0] is not None]
        with_key.sort(key=lambda pair: pair[0], reverse=order.down != options.reverse)
        rows_shown = [row for _, row in with_key] + [row for key, row in keyed if key is None]
    elif options.reverse:
        rows_shown.reverse()
    return tuple(rows_shown), len(all_rows) - len(rows_shown)


class SnapshotIndex:
    """Finds the ranks on a GPU; built once per frame."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._ranks_on: dict[tuple[str, str], list[tuple[RunView, RankView]]] = {}
        for run in snapshot.runs:
            for rank in run.ranks if run.state == "running" else ():
                if rank.gpu is not None:
                    self._ranks_on.setdefault((rank.host, rank.gpu), []).append((run, rank))

    def owners(self, gpu: GpuGauges) -> Sequence[tuple[RunView, RankView]]:
        return self._ranks_on.get((gpu.host, gpu.uuid), ())
