"""Lays out the panels and draws the lines of a whole screen. Depends only on its arguments."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.contract.frozen import frozen, replace
from stoker.contract.units import plural
from stoker.control.show.snapshot import OFFLINE, RUNNING, RunView, Snapshot
from stoker.control.show.top.run_panel import count_run_lines, count_run_text_lines, draw_run, format_run_head
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
    format_local_time,
    join_pieces,
    pad,
    plain_text,
)
from stoker.control.show.top.view import (
    CONFIRM,
    FILTER,
    HELP,
    ORDERS,
    SORT,
    View,
    build_panels,
    find_chosen_run,
    find_cursor_row,
)

# ---- layout ----

WIDE, TALL = 140, 30  # screens of at least this size have two columns
_MIN_HEIGHTS = {GPUS: 4, RUN: 2, RANKS: 3, PROCESSES: 2, RUNS: 2}  # lines with the head line
_EXTRA_CURVE = 8  # a curve gets up to this many lines that no other panel needs


@frozen
class Area:
    """A rectangle of the screen."""

    x: int
    y: int
    width: int
    height: int


def arrange_panels(
    panels: Mapping[str, Panel], run: RunView | None, focus: str, width: int, height: int
) -> dict[str, Area]:
    """Arrange the panels in one column, or in two on a wide screen. The first line is the header, the last one the footer."""
    inner_height = height - 2
    if width < WIDE or height < TALL:
        return _divide_height(PANELS, panels, run, focus, Area(0, 1, width, inner_height))
    left_width = min((width * 55) // 100, width - 70)
    right_area = Area(left_width + 1, 1, width - left_width - 1, inner_height)
    return {
        **_divide_height((GPUS, PROCESSES), panels, run, focus, Area(0, 1, left_width, inner_height)),
        **_divide_height((RUN, RANKS, RUNS), panels, run, focus, right_area),
    }


def _divide_height(
    names: tuple[str, ...], panels: Mapping[str, Panel], run: RunView | None, focus: str, area: Area
) -> dict[str, Area]:
    """Divide the lines of an area among panels.

    Each panel gets its minimum. The remaining lines go first to the focused panel, then to the others. If the minimums don't
    fit, the last panels are omitted, but never the focused one.
    """
    wanted_heights = {
        name: 1 + (count_run_lines(run, area.width) if name == RUN else len(panels[name].rows) or 1) for name in names
    }
    min_heights = {name: min(_MIN_HEIGHTS[name], wanted_heights[name]) for name in names}
    if RUN in names:
        min_heights[RUN] = 1 + count_run_text_lines(run, area.width)
    fitting = list(names)
    while len(fitting) > 1 and sum(min_heights[name] for name in fitting) > area.height:
        fitting.remove(next(name for name in reversed(fitting) if name != focus))
    heights = {name: min_heights[name] for name in fitting} if len(fitting) > 1 else {fitting[0]: area.height}
    free = area.height - sum(heights.values())
    for name in sorted(fitting, key=lambda name: name != focus):
        extra = max(0, min(free, wanted_heights[name] - heights[name]))
        heights[name] += extra
        free -= extra
    if RUN in fitting and run is not None and run.curve:
        extra = min(free, _EXTRA_CURVE)
        heights[RUN] += extra
        free -= extra
    heights[fitting[-1]] += max(0, free)
    areas, y = {}, area.y
    for name in fitting:
        if heights[name] > 0:
            areas[name] = Area(area.x, y, area.width, heights[name])
            y += heights[name]
    return areas


# ---- the frame ----

_STALE_S = 10.0  # the header shows the age of older data

KEYS = (
    ("q", "quit"),
    ("↑ ↓ PgUp PgDn Home End", "move"),
    ("Tab ← → 1-5", "go to another panel"),
    ("o + letter", "sort; again: reverse"),
    ("/", "filter all panels; Enter keeps the filter, Esc clears it"),
    ("Space", "pause, resume"),
    ("T", "stop your own run (asks first)"),
    ("h ?", "this help"),
    ("mouse", "click a row; the wheel moves"),
)
REPLAY_KEYS = (("← →", "back, forward"), ("+ -", "faster, slower"), ("Space", "pause, resume"))


@frozen
class Frame:
    """The lines of a screen, with the positions of panels and rows for the mouse."""

    lines: tuple[Line, ...]
    areas: Mapping[str, Area]
    rows: Mapping[str, tuple[str, ...]]  # panel -> keys of its visible rows, which begin below its head line
    view: View  # with panels scrolled so that their cursors are visible

    def find_row_at(self, x: int, y: int) -> tuple[str, str] | None:
        """Return (panel, key of the row) at a position, or None. The key is "" on the panel's head line."""
        for name, area in self.areas.items():
            if area.x <= x < area.x + area.width and area.y <= y < area.y + area.height:
                row = y - area.y - 1
                keys = self.rows.get(name, ())
                return name, keys[row] if 0 <= row < len(keys) else ""
        return None


def make_frame(snapshot: Snapshot, view: View, width: int, height: int, age: float = 0.0, status: str = "") -> Frame:
    """Draw the screen. `age` is the snapshot's age in seconds, `status` a text for the header."""
    width, height = max(width, 1), max(height, 1)
    run, panels = find_chosen_run(snapshot, view), build_panels(snapshot, view)
    areas = arrange_panels(panels, run, view.focus, width, height)
    canvas: list[list[Piece]] = [[] for _ in range(height)]
    canvas[0] = list(_draw_header(snapshot, view, width, age, status))
    visible_rows: dict[str, tuple[str, ...]] = {}
    for name, area in sorted(areas.items(), key=lambda item: item[1].x):
        panel_lines, view, visible_rows[name] = _draw_panel(name, panels.get(name), run, view, area)
        for row, line in enumerate(panel_lines):
            before = canvas[area.y + row]
            before[:] = [*(fit(before, area.x) if area.x else ()), *fit(line, area.width)]
    if height > 1:
        canvas[-1] = list(_draw_footer(snapshot, view, width))
    lines = [fit(line, width) for line in canvas]
    if view.mode == HELP:
        lines[1 : height - 1] = _draw_help(view, width, height - 2)
    return Frame(tuple(lines), areas, visible_rows, view)


def _draw_panel(
    name: str, panel: Panel | None, run: RunView | None, view: View, area: Area
) -> tuple[list[Line], View, tuple[str, ...]]:
    """Return the panel's lines, the view scrolled to its cursor, and the keys of its visible rows."""
    rows = area.height - 1
    keys: list[str] = []
    top = 0
    if panel is None:
        head, lines = format_run_head(run), draw_run(run, area.width, rows)
    else:
        keys = [row.key for row in panel.rows]
        cursor = find_cursor_row(view, name, keys)
        top = max(0, min(view.tops.get(name, 0), len(keys) - rows))
        if name in view.cursors:
            top = max(min(top, cursor), cursor - rows + 1)
        if top != view.tops.get(name, 0):
            view = replace(view, tops={**view.tops, name: top})
        head = _add_visible_range(panel.head(area.width), len(keys), top, rows, area.width)
        lines = [fit(line, area.width) for line in panel.lines(top, top + rows, area.width)]
        if name in view.cursors and view.focus == name and keys and top <= cursor < top + len(lines):
            lines[cursor - top] = tuple((text, f"{CURSOR} {style}") for text, style in lines[cursor - top])
    head_line: Line = ((pad(head, area.width), FOCUS if view.focus == name else HEAD),)
    return [head_line, *lines, *[()] * (rows - len(lines))], view, tuple(keys[top : top + rows])


def _add_visible_range(head: str, count: int, top: int, rows: int, width: int) -> str:
    """Add the range of visible rows at the right of a head line, unless all rows are visible."""
    if count <= rows or rows < 1:
        return head
    visible = f" {top + 1}-{min(top + rows, count)}/{count} "
    return pad(head, width - len(visible)) + visible if len(visible) < width else head


def _draw_header(snapshot: Snapshot, view: View, width: int, age: float, status: str) -> Line:
    offline = sum(host.state == OFFLINE for host in snapshot.hosts)
    running = sum(run.state == RUNNING for run in snapshot.runs)
    watts = [gpu.power for gpu in snapshot.gpus if gpu.power is not None]
    pieces: list[Piece | None] = [
        ("stoker top", BOLD),
        (format_local_time(snapshot.time, "%H:%M:%S"), DIM),
        (status, ACCENT),
        ("PAUSED", WARN) if view.paused else None,
        (f"last data {age:.0f} s ago", BAD) if age > _STALE_S and not view.paused and not view.replay else None,
        (plural(len(snapshot.hosts), "host"), PLAIN),
        (f"{offline} {OFFLINE}", BAD) if offline else None,
        (plural(len(snapshot.gpus), "GPU"), PLAIN),
        (f"{sum(watts):.0f} W", PLAIN) if watts else None,
        (f"{running} of {plural(len(snapshot.runs), 'run')} running", PLAIN),
        (f"filter: {escape_cell(view.filter)}", WARN) if view.filter else None,
    ]
    return fit(join_pieces(pieces), width)


def _draw_footer(snapshot: Snapshot, view: View, width: int) -> Line:
    keys = "q quit  h help  o sort  / filter  T stop run  Tab panel"
    if view.replay:
        keys = "replay: ← → seek  + - speed  Space pause  q quit  h help"
    pieces: list[Piece] = [(cut(keys, width), DIM)]
    if view.mode == FILTER:
        typed = (escape_cell(view.typed), PLAIN)
        pieces = [("filter: ", BOLD), typed, ("▏", PLAIN), ("  Enter keeps it, Esc cancels", DIM)]
    elif view.mode == SORT:
        orders = "  ".join(f"{letter} {order.title}" for letter, order in ORDERS[view.focus].items())
        pieces = [(f"sort {TITLES[view.focus]} by: ", BOLD), (f"n none  {orders}", PLAIN)]
    elif view.mode == CONFIRM:
        question = f"stop run {escape_cell(view.run_to_stop)}? Its ranks get SIGTERM and time to save a checkpoint."
        pieces = [("y/n ", BAD), (question, BOLD)]
    elif view.note:
        pieces = [(escape_cell(view.note), WARN)]
    elif snapshot.problems:
        pieces = [(escape_cell(snapshot.problems[0]), BAD)]
    return fit(pieces, width)


def _draw_help(view: View, width: int, height: int) -> list[Line]:
    rows = [*KEYS, *((key, f"replay: {meaning}") for key, meaning in REPLAY_KEYS if view.replay)]
    key_width = max(len(key) for key, _ in rows)
    lines: list[Line] = [
        (("Keys", BOLD),),
        *[((f"  {key:<{key_width}}  ", PLAIN), (meaning, DIM)) for key, meaning in rows],
        (),
        (("Sorting, after o", BOLD),),
    ]
    for name, orders in ORDERS.items():
        if orders:
            letters = ", ".join(f"{letter} {order.title}" for letter, order in orders.items())
            lines.append(((f"  {TITLES[name]:<{key_width}}  ", PLAIN), (letters, DIM)))
    lines += [(), (("WAIT is the share of its time that a rank waits for others in collectives.", DIM),)]
    return [fit(line, width) for line in [*lines, *[()] * height][: max(height, 0)]]


def draw_text(snapshot: Snapshot, width: int, view: View | None = None) -> str:
    """Return all panels with all rows as plain text, for `stoker top --once`."""
    view = view or View()
    run, panels = find_chosen_run(snapshot, view), build_panels(snapshot, view)
    lines = [plain_text(_draw_header(snapshot, view, width, 0.0, ""))]
    for name in PANELS:
        if name == RUN:
            head, body = format_run_head(run), draw_run(run, width, count_run_lines(run, width))
        else:
            panel = panels[name]
            head, body = panel.head(width), panel.lines(0, max(1, len(panel.rows)), width)
        lines += ["", cut(head, width).rstrip(), *(plain_text(fit(line, width)) for line in body)]
    lines += [escape_cell(problem) for problem in snapshot.problems]
    return "\n".join(lines)
