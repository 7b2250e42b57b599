"""Draws the panel of one run (numbers, problems, curve of its reward or loss) and the panel that lists all runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from stoker.contract.units import format_duration, plural
from stoker.control.show.charts import Series, draw_chart, format_short, metric_text
from stoker.control.show.snapshot import (
    DAMAGED,
    LOST,
    REWARD,
    RL_METRICS,
    RUNNING,
    UNKNOWN,
    Metric,
    RunView,
    ServerLoad,
    finite,
)
from stoker.control.show.top.table import (
    ACCENT,
    BAD,
    BOLD,
    DIM,
    GOOD,
    NONE,
    PLAIN,
    RUNS,
    WARN,
    Column,
    Line,
    Order,
    Panel,
    PanelOptions,
    Piece,
    Row,
    SnapshotIndex,
    escape_cell,
    filter_and_sort,
    fit,
    format_clock,
    format_local_time,
    format_metric,
    format_percent,
    join_fitting,
    join_pieces,
    pack_lines,
    wrap_text,
)

# ---- the curve ----

_AXIS_LINES = 2
_MAX_VALUE = 1e300  # larger values are drawn here, so that the difference of two values stays finite
_CURVE_LINES = 8  # height that a curve asks for, with its axis
_MIN_CURVE_LINES = 4


def draw_curve(points: Sequence[tuple[int, Metric]], width: int, height: int) -> list[Line]:
    """Draw the curve in at most `height` lines. Mark each step whose value is not finite with a × at the bottom."""
    finite_points = [
        (step, max(-_MAX_VALUE, min(_MAX_VALUE, number)))
        for step, value in points
        if (number := finite(value)) is not None
    ]
    rows = height - _AXIS_LINES
    if width < 20 or rows < 2 or not finite_points:
        return []
    chart = draw_chart([Series("", tuple(finite_points))], width, rows)
    first, last = finite_points[0][0], max(finite_points[-1][0], finite_points[0][0] + 1)
    inner = len(chart[0]) - 1
    for step, value in points:
        if isinstance(value, str):
            column = max(0, min(inner - 1, round((step - first) / (last - first) * (inner - 1))))
            chart[rows - 1][column + 1] = ("×", "red")
    return [fit(_merge_cells(row), width) for row in chart]


def _merge_cells(row: list[tuple[str, str]]) -> list[Piece]:
    """Join neighboring cells of the same style into pieces. Spaces get the style of the cell before them."""
    pieces: list[Piece] = []
    for character, color in row:
        style = {"": DIM, "red": BAD}.get(color, ACCENT)
        if character == " " or (pieces and pieces[-1][1] == style):
            text, style = pieces.pop() if pieces else ("", style)
            pieces.append((text + character, style))
        else:
            pieces.append((character, style))
    return pieces


# ---- one run ----

_MAX_SERVERS = 8
_MAX_SENTENCE_LINES = 3


def format_run_head(run: RunView | None) -> str:
    return "RUN" if run is None else f"RUN {escape_cell(run.name or run.id)}"


def draw_run(run: RunView | None, width: int, height: int) -> list[Line]:
    """Draw the run in at most `height` lines: numbers, then problems, then the curve."""
    if run is None:
        return [fit([("no run yet: start one with `stoker run train.py`", DIM)], width)][:height]
    lines = [*_draw_numbers(run, width), *_draw_problems(run, width)][:height]
    if height - len(lines) >= _MIN_CURVE_LINES:
        lines += draw_curve(run.curve, width, height - len(lines))
    return lines


def count_run_lines(run: RunView | None, width: int) -> int:
    """Return the number of lines that the run needs, with its curve."""
    return count_run_text_lines(run, width) + (_CURVE_LINES if run is not None and run.curve else 0)


def count_run_text_lines(run: RunView | None, width: int) -> int:
    """Return the number of lines that the run needs, without its curve."""
    return 1 if run is None else len([*_draw_numbers(run, width), *_draw_problems(run, width)])


def _draw_numbers(run: RunView, width: int) -> Iterator[Line]:
    causes = ", ".join(f"{escape_cell(cause)} ×{count}" for cause, count in run.restarts.items())
    on_hosts = f" on {plural(len(run.hosts), 'host')}" if len(run.hosts) > 1 else ""
    first_line: list[Piece | None] = [
        (escape_cell(run.state), state_style(run)),
        (format_duration(run.seconds), PLAIN) if run.seconds is not None else None,
        (f"{plural(run.world, 'rank')}{on_hosts}", PLAIN),
        (f"{plural(run.restarted, 'restart')} ({causes})", WARN) if run.restarted else None,
        (f"phase {escape_cell(run.phase)}", DIM) if run.phase and run.state in (RUNNING, UNKNOWN) else None,
        (f"user {escape_cell(run.user)}", DIM) if not run.mine else None,
        (escape_cell(run.command), DIM),
    ]
    yield join_fitting(first_line, width)
    done = f" {run.step / run.total_steps:.0%}" if run.step is not None and run.total_steps else ""
    step: Piece | None = (f"step {format_steps(run)}{done}", PLAIN) if run.step is not None else None
    rl_values = [
        (f"{RL_METRICS[name]} {metric_text(name, value)}", _metric_style(name, value))
        for name, value in run.rl_metrics.items()
    ]
    loss_style = DIM if rl_values else BOLD
    if isinstance(run.loss, str):
        loss_style = BAD
    other_values: list[Piece | None] = [
        (f"loss {format_metric(run.loss)}", loss_style) if run.loss is not None else None,
        (f"{format_short(run.tokens_per_s)} tokens/s", PLAIN) if run.tokens_per_s is not None else None,
        (f"ETA {format_clock(run.eta_s)}", GOOD) if run.eta_s is not None else None,
        (f"MFU {format_percent(finite(run.mfu))}", PLAIN) if run.mfu is not None else None,
    ]
    for name, value in (("lr", run.lr), ("grad", run.grad_norm)):
        if value is not None:
            text = escape_cell(value) if isinstance(value, str) else f"{value:.3g}"
            other_values.append((f"{name} {text}", DIM))
    # The reinforcement-learning metrics take as many lines as they need; the other values fill up the last one.
    *full_lines, last_line = pack_lines([step, *rl_values], width) or [[]]
    for line in full_lines:
        yield fit(join_pieces(line), width)
    if last_line or any(other_values):
        yield join_fitting([*last_line, *other_values], width)
    for server in run.servers[:_MAX_SERVERS]:
        for line in pack_lines(_format_server(server), width):
            yield fit(join_pieces(line), width)


def _format_server(server: ServerLoad) -> list[Piece | None]:
    name = escape_cell(server.role) or "server"
    speeds = ((server.requests_per_s, "requests/s"), (server.tokens_per_s, "tokens/s"))
    counts = ((server.running, "running"), (server.waiting, "waiting"))
    return [
        (f"{name}{f' ×{server.replicas}' if server.replicas > 1 else ''}", BOLD),
        *((f"{format_short(value)} {unit}", PLAIN) for value, unit in speeds if value is not None),
        *((f"{value} {label}", PLAIN) for value, label in counts if value is not None),
        (f"weights {server.weights_version}", PLAIN) if server.weights_version is not None else None,
        (f"{plural(server.requests, 'request')} and {plural(server.tokens, 'token')} so far", DIM),
    ]


def _metric_style(name: str, value: Metric) -> str:
    if isinstance(value, str):
        return BAD
    return BOLD if name == REWARD else PLAIN


def _draw_problems(run: RunView, width: int) -> Iterator[Line]:
    sentences: list[Piece] = []
    if run.problem:
        sentences.append((f"damaged: {run.problem}", BAD))
    sentences += [(slow.summary, BAD) for slow in run.slow[:2]]
    suspicion = run.suspicion
    # The suspicion about a straggler repeats part of `slow`.
    if suspicion is not None and not (run.slow and suspicion.kind == "straggler"):
        sentences.append((f"suspicion: {suspicion.summary}", WARN))
    if run.verdict is not None and run.state != RUNNING:
        sentences.append((run.verdict.summary, PLAIN if run.verdict.status == "completed" else BAD))
    for text, style in sentences:
        for line in wrap_text(escape_cell(text), width, style, _MAX_SENTENCE_LINES):
            yield fit(line, width)


# ---- the list of runs ----

RUN_ORDERS = {
    "d": Order("date", lambda run: run.started),
    "s": Order("step", lambda run: run.step),
    "r": Order("reward", lambda run: finite(run.rl_metrics.get(REWARD))),
    "l": Order("loss", lambda run: finite(run.loss), down=False),
    "k": Order("tokens/s", lambda run: finite(run.tokens_per_s)),
    "t": Order("time", lambda run: run.seconds),
    "e": Order("state", lambda run: run.state, down=False),
}
_BAD_STATES = ("failed", LOST, DAMAGED, "hang")


def make_runs_panel(index: SnapshotIndex, options: PanelOptions, chosen_id: str) -> Panel:
    """List the runs, newest first. Runs with the same name are shown by id."""
    runs = index.snapshot.runs
    name_counts = Counter(run.name for run in runs)

    def label(run: RunView) -> str:
        return escape_cell(run.name if run.name and name_counts[run.name] == 1 else run.id)

    rl_names = [name for name in RL_METRICS if any(name in run.rl_metrics for run in runs)]
    columns = (
        Column("RUN", 26, lambda run, width: (label(run), ACCENT if run.id == chosen_id else PLAIN)),
        Column("STATE", 10, lambda run, width: (escape_cell(run.state), state_style(run)), order=1),
        Column("STEP", 13, lambda run, width: (format_steps(run), PLAIN), 2, True),
        *(_make_rl_column(name) for name in rl_names),
        Column("LOSS", 9, _draw_loss, 3, True),
        Column("TOKENS/S", 8, lambda run, width: (format_short(run.tokens_per_s), PLAIN), 4, True),
        Column("TIME", 12, _draw_run_time, 5, True),
        Column("USER", 10, lambda run, width: (escape_cell(run.user), PLAIN if run.mine else DIM), 7),
        Column("DATE", 12, lambda run, width: (format_local_time(run.started, "%d %b %H:%M") or NONE, DIM), 6),
        Column("WHAT", 0, _draw_problem_or_cause, order=8, min_width=14),
    )
    rows, hidden = filter_and_sort(
        (Row(run.id, run, _searchable_text(run)) for run in reversed(runs)), options, RUN_ORDERS
    )
    folder = escape_cell(index.snapshot.root or "the runs folder")
    return Panel(RUNS, columns, rows, f"no runs in {folder}", hidden)


def format_steps(run: RunView) -> str:
    if run.step is None:
        return NONE
    return f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)


def state_style(run: RunView) -> str:
    if run.state == RUNNING:
        return WARN if run.suspicion is not None else GOOD
    if run.state in _BAD_STATES:
        return BAD
    return WARN if run.state == UNKNOWN else PLAIN


def _searchable_text(run: RunView) -> str:
    cause = run.verdict.cause if run.verdict is not None else ""
    return escape_cell(" ".join((run.id, run.name, run.state, run.user, cause or "", *run.hosts))).lower()


def _make_rl_column(name: str) -> Column:
    """Return the column of a reinforcement-learning metric; it is empty for runs without the metric."""
    title = RL_METRICS[name].upper()

    def draw(run: RunView, _width: int) -> Piece:
        value = run.rl_metrics.get(name)
        return "" if value is None else metric_text(name, value), BAD if isinstance(value, str) else PLAIN

    return Column(title, max(len(title), 7), draw, 2 if name == REWARD else 9, True)


def _draw_loss(run: RunView, width: int) -> Piece:
    if run.headline == REWARD:
        return "", PLAIN
    return format_metric(run.loss), BAD if isinstance(run.loss, str) else PLAIN


def _draw_run_time(run: RunView, width: int) -> Piece:
    return format_duration(run.seconds) if run.seconds is not None else NONE, PLAIN


def _draw_problem_or_cause(run: RunView, width: int) -> Piece:
    if run.problem:
        return escape_cell(run.problem), BAD
    if run.suspicion is not None:
        return escape_cell(run.suspicion.summary), WARN
    cause = run.verdict.cause if run.verdict is not None and run.verdict.status != "completed" else ""
    return escape_cell(cause or ""), DIM
