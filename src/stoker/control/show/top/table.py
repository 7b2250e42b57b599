"""A panel: a table of one kind of thing, sorted and filtered; rows are drawn when they are seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stoker.contract.frozen import frozen
from stoker.contract.text import escape
from stoker.control.show.charts import display_width, fit_width, sparkline
from stoker.control.show.snapshot import GpuGauges, Metric, RankView, RunView, Snapshot

pass

GPUS, RUN, RANKS, PROCESSES, RUNS = "gpus", "run", "ranks", "processes", "runs"
PANELS = (GPUS, RUN, RANKS, PROCESSES, RUNS)
TITLES = {GPUS: "GPUs", RUN: "Run", RANKS: "Ranks", PROCESSES: "Processes", RUNS: "Runs"}


@frozen
class PanelOptions:
    """What the person at the keyboard wants of one panel."""

    sort: str = ""  # a letter of the panel's orders; empty: as they come
    reverse: bool = False
    filter: str = ""


@frozen
class Order:
    """`key`: of a row; None goes last, whichever way it is sorted."""

    title: str
    key: Callable[[Any], Any]
    down: bool = True  # the largest first


@frozen
class Row:
    key: str  # the same for the same thing in the next snapshot
    item: Any
    text: str  # what a filter looks into, in small letters
    draw: Callable[[Any, int], Line] | None = None  # where it is not drawn by the columns


@frozen
class Panel:
    name: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    empty: str  # what is shown where there are no rows
    hidden: int = 0  # rows that the filter leaves out

    def head(self, width: int) -> str:
        return draw_titles(choose_columns(self.columns, width))

    def lines(self, begin: int, end: int, width: int) -> list[Line]:
        if not self.rows:
            hidden = f"nothing matches the filter ({self.hidden} hidden)" if self.hidden else self.empty
            return [((hidden, DIM),)] if begin == 0 < end else []
        columns = choose_columns(self.columns, width)
        return [
            row.draw(row.item, width) if row.draw is not None else draw_row(columns, row.item)
            for row in self.rows[begin:end]
        ]


def filter_and_sort(
    rows: Iterable[Row], wish: PanelOptions, orders: Mapping[str, Order]
) -> tuple[tuple[Row, ...], int]:
    """(rows, how many the filter hides)."""
    every = list(rows)
    word = wish.filter.lower()
    kept = [row for row in every if word in row.text] if word else every
    order = orders.get(wish.sort)
    if order is not None:
        known = [(order.key(row.item), row) for row in kept]
        with_value = sorted(
            (pair for pair in known if pair[0] is not None),
            key=lambda pair: pair[0],
            reverse=order.down != wish.reverse,
        )
        kept = [row for _, row in with_value] + [row for value, row in known if value is None]
    elif wish.reverse:
        kept.reverse()
    return tuple(kept), len(every) - len(kept)


class SnapshotIndex:
    """What belongs together in a snapshot, looked up once a frame."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.ranks_on: dict[tuple[str, str], list[tuple[RunView, RankView]]] = {}
        self.cards: dict[str, list[GpuGauges]] = {}
        for run in snapshot.runs:
            for rank in run.ranks if run.state == "running" else ():
                if rank.gpu is not None:
                    self.ranks_on.setdefault((rank.host, rank.gpu), []).append((run, rank))
        for card in snapshot.gpus:
            self.cards.setdefault(card.host, []).append(card)

    def owners(self, card: GpuGauges) -> Sequence[tuple[RunView, RankView]]:
        return self.ranks_on.get((card.host, card.uuid), ())


# Names of styles; app.py says what they look like.
PLAIN, DIM, BOLD, GOOD, WARN, BAD, ACCENT, HEAD, FOCUS, CURSOR = (
    "", "dim", "bold", "good", "warn", "bad", "accent", "head", "focus", "cursor",
)  # fmt: skip
Piece = tuple[str, str]  # text, style
Line = tuple[Piece, ...]
NONE = "n/a"  # not known
_LONGEST = 4000  # characters of foreign text that are looked at


def escape_cell(text: object) -> str:
    """Text of others: command lines, names, errors. A terminal only prints it."""
    return escape(str(text), _LONGEST)


def cut(text: str, width: int) -> str:
    """At most so many columns; … where something is missing."""
    return text if display_width(text) <= width else fit_width(text, width)


def pad(text: str, width: int, right: bool = False) -> str:
    """Exactly so many columns."""
    return " " * (width - display_width(text)) + cut(text, width) if right else fit_width(text, width)


def fit(line: Iterable[Piece], width: int) -> Line:
    """Exactly so many columns."""
    made: list[Piece] = []
    left = width
    for text, style in line:
        text = cut(text, left)
        if text:
            made.append((text, style))
            left -= display_width(text)
        if left <= 0:
            return tuple(made)
    return (*made, (" " * left, PLAIN)) if left else tuple(made)


def join_pieces(pieces: Iterable[Piece | None], between: str = "  ") -> Line:
    made: list[Piece] = []
    for piece in pieces:
        if piece is not None and piece[0]:
            made += [(between, PLAIN), piece] if made else [piece]
    return tuple(made)


_SHORT = 24  # columns: a text that is longer is a sentence or a command, whose beginning is worth showing
_LEAST = 12  # columns of that


def join_fitting(pieces: Iterable[Piece | None], width: int) -> Line:
    """Joined, in exactly so many columns: short ones that don't fit are left out, a long one is cut."""
    kept: list[Piece] = []
    left = width
    for piece in pieces:
        if piece is None or not piece[0]:
            continue
        takes, gap = display_width(piece[0]), 2 if kept else 0
        if not kept or takes + gap <= left or (takes > _SHORT and left - gap >= _LEAST):
            kept.append(piece)
            left -= min(takes + gap, left)
    return fit(join_pieces(kept), width)


def pack_lines(pieces: Iterable[Piece | None], width: int) -> list[list[Piece]]:
    """Return the pieces that are joined in each of as many lines as they need."""
    lines: list[list[Piece]] = []
    left = 0
    for piece in pieces:
        if piece is None or not piece[0]:
            continue
        takes = display_width(piece[0])
        if not lines or takes + 2 > left:
            lines.append([])
            left = width + 2
        lines[-1].append(piece)
        left -= takes + 2
    return lines


def wrap_text(text: str, width: int, style: str, most: int) -> list[Line]:
    """A sentence over several lines; the last one is cut."""
    lines: list[str] = []
    for word in text.split():
        if lines and display_width(lines[-1]) + 1 + display_width(word) <= width:
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


def choose_columns(columns: Sequence[Column], width: int) -> tuple[tuple[Column, int], ...]:
    """Those that fit, with their widths; the first one always."""
    widths = [column.width or column.least for column in columns]
    kept = list(range(len(columns)))
    while len(kept) > 1 and sum(widths[at] + 1 for at in kept) - 1 > width:
        kept.remove(max(reversed(kept[1:]), key=lambda at: columns[at].order))
    left = max(0, width - sum(widths[at] + 1 for at in kept) + 1)
    flexible = next((at for at in kept if not columns[at].width), None)
    return tuple((columns[at], min(widths[at] + (left if at == flexible else 0), width)) for at in kept)


def draw_titles(columns: Iterable[tuple[Column, int]]) -> str:
    return " ".join(pad(column.title, width, column.right) for column, width in columns)


def draw_row(columns: Iterable[tuple[Column, int]], row: Any) -> Line:
    made: list[Piece] = []
    for column, width in columns:
        text, style = column.draw(row, width)
        if made:
            made.append((" ", PLAIN))
        made.append((pad(text, width, column.right), style))
    return tuple(made)


# ---- values ----


def draw_history(values: Sequence[float | None], width: int, top: float | None = None) -> str:
    """A sparkline from 0 up, with one sign a value and the newest at the right. `top`: of the scale."""
    shown = values[-width:] if width > 0 else ()
    return sparkline(shown, width, scale=(0.0, top)).replace("·", " ").rjust(width)


def draw_bar(share: float | None, width: int) -> str:
    if share is None or width < 1:
        return " " * max(width, 0)
    full = max(0.0, min(1.0, share)) * width
    whole = int(full)
    part = "" if whole == width else " ▏▎▍▌▋▊▉"[int((full - whole) * 8)]
    return ("█" * whole + part).ljust(width)


def format_percent(share: float | None) -> str:
    return NONE if share is None else f"{max(-9.99, min(share, 9.99)) * 100:.0f}%"


def format_metric(value: Metric, digits: int = 4) -> str:
    """A metric; one that is not finite is the word it was written as."""
    if value is None or isinstance(value, str):
        return NONE if value is None else escape_cell(value)
    return f"{value:.{digits}f}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.2e}"


def format_gib(used: float | None, total: float | None) -> str:
    if used is None and total is None:
        return NONE
    return f"{NONE if used is None else f'{used / 2**30:.1f}'}/{NONE if total is None else f'{total / 2**30:.0f}'} GiB"


def format_step_time(value: float | None) -> str:
    """A step's time: 12 ms, 0.52 s, 3.1 s, 2 min."""
    if value is None:
        return NONE
    if value < 0.1:
        return f"{value * 1000:.0f} ms"
    if value < 100:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    return format_clock(value)


def format_clock(value: float | None) -> str:
    """0:42, 12:05, 3:10:00, 2d 04:00."""
    if value is None:
        return NONE
    whole = int(min(max(value, 0.0), 1e9))
    days, rest = divmod(whole, 86400)
    hours, minutes, secs = rest // 3600, rest % 3600 // 60, rest % 60
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def plain_text(line: Iterable[Piece]) -> str:
    return "".join(text for text, _ in line).rstrip()
