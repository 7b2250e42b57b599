"""A whole screen: where each panel goes, and its lines. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping

from stoker.contract.frozen import frozen, replace
from stoker.contract.units import plural
from stoker.control.show.snapshot import OFFLINE, RUNNING, RunView, Snapshot
from stoker.control.show.top.run_panel import run_head, run_height, run_lines, run_words
from stoker.control.show.top.table import (
    ACCENT,
    BAD,
    BOLD,
    CURSOR,
    DIM,
    FOCUS,
    GPUS,
    HEAD,
    PANELS,
    PLAIN,
    PROCESSES,
    RANKS,
    RUN,
    RUNS,
    TITLES,
    WARN,
    Line,
    Panel,
    Piece,
    cut,
    escape_cell,
    fit,
    join_pieces,
    pad,
    plain_text,
)  # fmt: skip
from stoker.control.show.top.view import CONFIRM, FILTER, HELP, ORDERS, SORT, View, build_panels, chosen_run, cursor_at

WIDE, TALL = 140, 30  # from here on there are two columns
_LEAST = {GPUS: 4, RUN: 2, RANKS: 3, PROCESSES: 2, RUNS: 2}  # lines, with the head
_CURVE_MORE = 8  # lines that a curve gets where nobody else needs them


@frozen
class Area:
    x: int
    y: int
    width: int
    height: int


def arrange_panels(
    tables: Mapping[str, Panel], run: RunView | None, focus: str, width: int, height: int
) -> dict[str, Area]:
    """One below the other; on a wide screen in two columns. The first and the last line are not the panels'."""
    inside = height - 2
    if width < WIDE or height < TALL:
        return _stacked(PANELS, tables, run, focus, Area(0, 1, width, inside))
    left = min((width * 55) // 100, width - 70)
    columns = (
        ((GPUS, PROCESSES), Area(0, 1, left, inside)),
        ((RUN, RANKS, RUNS), Area(left + 1, 1, width - left - 1, inside)),
    )
    places: dict[str, Area] = {}
    for names, area in columns:
        places |= _stacked(names, tables, run, focus, area)
    return places


def _stacked(
    names: tuple[str, ...], tables: Mapping[str, Panel], run: RunView | None, focus: str, area: Area
) -> dict[str, Area]:
    wants = {name: run_height(run, area.width) if name == RUN else len(tables[name].rows) or 1 for name in names}
    wants = {name: want + 1 for name, want in wants.items()}
    kept = list(names)
    least = {name: min(_LEAST[name], wants[name]) for name in kept}
    if RUN in kept:
        least[RUN] = 1 + run_words(run, area.width)
    while len(kept) > 1 and sum(least[name] for name in kept) > area.height:
        kept.remove(next(name for name in reversed(kept) if name != focus))
    given = {name: least[name] for name in kept}
    if len(kept) == 1:
        given = {kept[0]: area.height}
    left = area.height - sum(given.values())
    for name in sorted(kept, key=lambda name: name != focus):
        more = min(left, wants[name] - given[name])
        given[name] += max(0, more)
        left -= max(0, more)
    if RUN in kept and run is not None and run.curve:
        given[RUN] += min(left, _CURVE_MORE)
        left -= min(left, _CURVE_MORE)
    given[kept[-1]] += max(0, left)
    places, y = {}, area.y
    for name in kept:
        if given[name] > 0:
            places[name] = Area(area.x, y, area.width, given[name])
            y += given[name]
    return places


_STALE_S = 10.0

KEYS = (
    ("q", "quit"), ("↑ ↓ PgUp PgDn Home End", "move"), ("Tab ← → 1-5", "go to another panel"), ("o + letter", "sort; again: the other way round"),
    ("/", "filter all panels; Enter keeps it, Esc clears it"), ("Space", "hold the picture, and go on"), ("T", "stop your own run, after a question"),
    ("h ?", "this help"), ("mouse", "click a row; the wheel moves"),
)  # fmt: skip
REPLAY_KEYS = (("← →", "back, forward"), ("+ -", "faster, slower"), ("Space", "hold, go on"))


@frozen
class Frame:
    lines: tuple[Line, ...]
    places: Mapping[str, Area]
    rows: Mapping[str, tuple[str, ...]]  # panel -> keys of the rows that are seen, from the line below its head
    view: View  # with its panels scrolled so that their cursors are seen

    def at(self, x: int, y: int) -> tuple[str, str] | None:
        """(panel, key of the row) at a point; the key is empty on its head."""
        for name, place in self.places.items():
            if place.x <= x < place.x + place.width and place.y <= y < place.y + place.height:
                row = y - place.y - 1
                keys = self.rows.get(name, ())
                return name, keys[row] if 0 <= row < len(keys) else ""
        return None


def make_frame(snapshot: Snapshot, view: View, width: int, height: int, age: float = 0.0, status: str = "") -> Frame:
    """`age`: seconds since the snapshot was taken. `status`: what its source has to say."""
    width, height = max(width, 1), max(height, 1)
    run, tables = chosen_run(snapshot, view), build_panels(snapshot, view)
    places = arrange_panels(tables, run, view.focus, width, height)
    canvas: list[list[Piece]] = [[] for _ in range(height)]
    canvas[0] = list(_header(snapshot, view, width, age, status))
    seen: dict[str, tuple[str, ...]] = {}
    for name, place in sorted(places.items(), key=lambda item: item[1].x):
        drawn, view, keys = _panel(name, tables.get(name), run, view, place)
        seen[name] = keys
        for row, line in enumerate(drawn):
            before = canvas[place.y + row]
            before[:] = [*(fit(before, place.x) if place.x else ()), *fit(line, place.width)]
    if height > 1:
        canvas[-1] = list(_footer(snapshot, view, width))
    lines = [fit(line, width) for line in canvas]
    if view.mode == HELP:
        lines[1 : height - 1] = _help(view, width, height - 2)
    return Frame(tuple(lines), places, seen, view)


def _panel(
    name: str, table: Panel | None, run: RunView | None, view: View, place: Area
) -> tuple[list[Line], View, tuple[str, ...]]:
    style = FOCUS if view.focus == name else HEAD
    rows = place.height - 1
    if table is None:
        lines = run_lines(run, place.width, rows)
        return [((pad(run_head(run), place.width), style),), *lines, *[()] * (rows - len(lines))], view, ()
    keys = [row.key for row in table.rows]
    at = cursor_at(view, name, keys)
    top = max(0, min(view.tops.get(name, 0), len(keys) - rows))
    if name in view.cursors:
        top = max(min(top, at), at - rows + 1)
    if top != view.tops.get(name, 0):
        view = replace(view, tops={**view.tops, name: top})
    head = _more(table.head(place.width), len(keys), top, rows, place.width)
    lines = [fit(line, place.width) for line in table.lines(top, top + rows, place.width)]
    if name in view.cursors and view.focus == name and keys and top <= at < top + len(lines):
        lines[at - top] = tuple((text, f"{CURSOR} {piece_style}") for text, piece_style in lines[at - top])
    return (
        [((pad(head, place.width), style),), *lines, *[()] * (rows - len(lines))],
        view,
        tuple(keys[top : top + rows]),
    )


def _more(head: str, count: int, top: int, rows: int, width: int) -> str:
    """At the right of the head: which of the rows are seen."""
    if count <= rows or rows < 1:
        return head
    mark = f" {top + 1}-{min(top + rows, count)}/{count} "
    return pad(head, width - len(mark)) + mark if len(mark) < width else head


def _header(snapshot: Snapshot, view: View, width: int, age: float, status: str) -> Line:
    offline = sum(host.state == OFFLINE for host in snapshot.hosts)
    running = sum(run.state == RUNNING for run in snapshot.runs)
    watts = [card.power for card in snapshot.gpus if card.power is not None]
    parts: list[Piece | None] = [
        ("stoker top", BOLD),
        (_clock(snapshot.time), DIM),
        (status, ACCENT),
        ("HELD", WARN) if view.paused else None,
        (f"last data {age:.0f} s ago", BAD) if age > _STALE_S and not view.paused and not view.replay else None,
        (plural(len(snapshot.hosts), "host"), PLAIN),
        (f"{offline} {OFFLINE}", BAD) if offline else None,
        (plural(len(snapshot.gpus), "GPU"), PLAIN),
        (f"{sum(watts):.0f} W", PLAIN) if watts else None,
        (f"{running} of {plural(len(snapshot.runs), 'run')} running", PLAIN),
        (f"filter: {escape_cell(view.filter)}", WARN) if view.filter else None,
    ]
    return fit(join_pieces(parts), width)


def _clock(when: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(when))
    except (OverflowError, OSError, ValueError):
        return ""


def _footer(snapshot: Snapshot, view: View, width: int) -> Line:
    if view.mode == FILTER:
        return fit(
            [("filter: ", BOLD), (escape_cell(view.typed), PLAIN), ("▏", PLAIN), ("  Enter keeps, Esc drops", DIM)],
            width,
        )
    if view.mode == SORT:
        orders = "  ".join(f"{letter} {order.title}" for letter, order in ORDERS[view.focus].items())
        return fit([(f"sort {TITLES[view.focus]} by: ", BOLD), (f"n none  {orders}", PLAIN)], width)
    if view.mode == CONFIRM:
        question = f"stop run {escape_cell(view.asked)}? Its ranks get SIGTERM and their grace to save."
        return fit([("y/n ", BAD), (question, BOLD)], width)
    if view.note:
        return fit([(escape_cell(view.note), WARN)], width)
    if snapshot.problems:
        return fit([(escape_cell(snapshot.problems[0]), BAD)], width)
    keys = "q quit  h help  o sort  / filter  T stop run  Tab panel"
    if view.replay:
        keys = "replay: ← → seek  + - speed  Space hold  q quit  h help"
    return fit([(cut(keys, width), DIM)], width)


def _help(view: View, width: int, height: int) -> list[Line]:
    rows = [*KEYS, *((key, f"replay: {what}") for key, what in REPLAY_KEYS if view.replay)]
    wide = max(len(key) for key, _ in rows)
    lines: list[Line] = [(("Keys", BOLD),), *[((f"  {key:<{wide}}  ", PLAIN), (what, DIM)) for key, what in rows]]
    panel_letters = [(name, orders) for name, orders in ORDERS.items() if orders]
    lines += [(), (("Sorting, after o", BOLD),)]
    for name, orders in panel_letters:
        words = ", ".join(f"{letter} {order.title}" for letter, order in orders.items())
        lines.append(((f"  {TITLES[name]:<{wide}}  ", PLAIN), (words, DIM)))
    lines += [(), (("WAIT is the share of its time in which a rank waits for others in collectives.", DIM),)]
    return [fit(line, width) for line in [*lines, *[()] * height][: max(height, 0)]]


def draw_text(snapshot: Snapshot, width: int, view: View | None = None) -> str:
    """All of it as plain text, once: no row is left out."""
    view = view or View()
    run, tables = chosen_run(snapshot, view), build_panels(snapshot, view)
    lines = [plain_text(_header(snapshot, view, width, 0.0, ""))]
    for name in PANELS:
        if name == RUN:
            body = run_lines(run, width, run_height(run, width))
            head = run_head(run)
        else:
            body, head = tables[name].lines(0, max(1, len(tables[name].rows)), width), tables[name].head(width)
        lines += ["", cut(head, width).rstrip(), *(plain_text(fit(line, width)) for line in body)]
    lines += [escape_cell(problem) for problem in snapshot.problems]
    return "\n".join(lines)
