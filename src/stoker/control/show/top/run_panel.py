"""The run that is looked at: numbers, what is wrong with it, and the curve of its reward or loss."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

from stoker.contract.units import format_duration, plural
from stoker.control.show.charts import Series as Drawn
from stoker.control.show.charts import draw_chart, metric_text, short
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
    format_metric,
    format_percent,
    join_fitting,
    join_pieces,
    pack_lines,
    wrap_text,
)  # fmt: skip

pass

_AXIS = 2  # lines below the curve
_MOST = 1e300  # the difference of two values must be a number, too


def curve_lines(points: Sequence[tuple[int, Metric]], width: int, height: int) -> list[Line]:
    """Draw the curve in at most `height` lines. A step whose value is not finite is a × at the bottom."""
    known = [(step, max(-_MOST, min(_MOST, value))) for step, raw in points if (value := finite(raw)) is not None]
    rows = height - _AXIS
    if width < 20 or rows < 2 or not known:
        return []
    drawn = draw_chart([Drawn("", tuple(known))], width, rows)
    lost = [step for step, raw in points if isinstance(raw, str)]
    first, last = known[0][0], max(known[-1][0], known[0][0] + 1)
    inner = len(drawn[0]) - 1
    for step in lost:
        at = max(0, min(inner - 1, round((step - first) / (last - first) * (inner - 1))))
        drawn[rows - 1][at + 1] = ("×", "red")
    return [fit(_pieces(row), width) for row in drawn]


def _pieces(row: list[tuple[str, str]]) -> list[Piece]:
    """Cells of one colour together."""
    pieces: list[Piece] = []
    for sign, colour in row:
        style = {"": DIM, "red": BAD}.get(colour, ACCENT)
        if sign == " " or (pieces and pieces[-1][1] == style):
            before = pieces.pop() if pieces else ("", style)
            pieces.append((before[0] + sign, before[1]))
        else:
            pieces.append((sign, style))
    return pieces


CURVE = 8  # lines of a curve that has room
_LEAST_CURVE = 4
_MOST_SERVERS = 8
_SENTENCE = 3  # lines of one explanation


def run_head(run: RunView | None) -> str:
    return "RUN" if run is None else f"RUN {escape_cell(run.name or run.id)}"


def run_lines(run: RunView | None, width: int, height: int) -> list[Line]:
    """At most `height` lines. What is wrong comes before the curve."""
    if run is None:
        return [fit([("no run yet: `stoker run train.py` starts one", DIM)], width)][:height]
    lines = [*_numbers(run, width), *_troubles(run, width)][:height]
    room = height - len(lines)
    if room >= _LEAST_CURVE:
        lines += curve_lines(run.curve, width, room)
    return lines


def run_height(run: RunView | None, width: int) -> int:
    """What it takes to show all of it."""
    return run_words(run, width) + (CURVE if run is not None and run.curve else 0)


def run_words(run: RunView | None, width: int) -> int:
    """Lines without the curve."""
    return 1 if run is None else sum(1 for _ in (*_numbers(run, width), *_troubles(run, width)))


def _numbers(run: RunView, width: int) -> Iterator[Line]:
    restarts = plural(run.restarted, "restart")
    causes = ", ".join(f"{escape_cell(cause)} ×{count}" for cause, count in run.restarts.items())
    ranks = plural(run.world, "rank")
    where = f" on {plural(len(run.hosts), 'host')}" if len(run.hosts) > 1 else ""
    first: list[Piece | None] = [
        (escape_cell(run.state), state_style(run)),
        (format_duration(run.seconds), PLAIN) if run.seconds is not None else None,
        (f"{ranks}{where}", PLAIN),
        (f"{restarts} ({causes})", WARN) if run.restarted else None,
        (f"phase {escape_cell(run.phase)}", DIM) if run.phase and run.state in (RUNNING, UNKNOWN) else None,
        (f"of {escape_cell(run.user)}", DIM) if not run.mine else None,
        (escape_cell(run.command), DIM),
    ]
    yield join_fitting(first, width)
    done = f" {run.step / run.total_steps:.0%}" if run.step is not None and run.total_steps else ""
    rl = run.rl_metrics
    loss_style = DIM if rl else BOLD
    if isinstance(run.loss, str):
        loss_style = BAD
    step: Piece | None = (f"step {steps(run)}{done}", PLAIN) if run.step is not None else None
    values = ((f"{RL_METRICS[name]} {metric_text(name, value)}", _style(name, value)) for name, value in rl.items())
    optional = (("lr", run.lr), ("grad", run.grad_norm))
    rest: list[Piece | None] = [
        (f"loss {format_metric(run.loss)}", loss_style) if run.loss is not None else None,
        (f"{short(run.tokens_per_s)} tokens/s", PLAIN) if run.tokens_per_s is not None else None,
        (f"ETA {format_clock(run.eta_s)}", GOOD) if run.eta_s is not None else None,
        (f"MFU {format_percent(finite(run.mfu))}", PLAIN) if run.mfu is not None else None,
        *((f"{name} {_short(value)}", DIM) for name, value in optional if value is not None),
    ]
    # The reward and its companions take as many lines as they need; of the rest there is what fits.
    *full, last = pack_lines([step, *values], width) or [[]]
    for line in full:
        yield fit(join_pieces(line), width)
    if last or any(rest):
        yield join_fitting([*last, *rest], width)
    for server in run.servers[:_MOST_SERVERS]:
        for line in pack_lines(_server(server), width):
            yield fit(join_pieces(line), width)


def _server(server: ServerLoad) -> list[Piece | None]:
    """Describe the load of a server, a role of a job or a run alone."""
    name = escape_cell(server.role) or "server"
    speeds = ((server.requests_per_s, "requests/s"), (server.tokens_per_s, "tokens/s"))
    counts = ((server.running, "running"), (server.waiting, "waiting"))
    return [
        (f"{name}{f' ×{server.replicas}' if server.replicas > 1 else ''}", BOLD),
        *((f"{short(value)} {unit}", PLAIN) for value, unit in speeds if value is not None),
        *((f"{value} {what}", PLAIN) for value, what in counts if value is not None),
        (f"weights {server.weights_version}", PLAIN) if server.weights_version is not None else None,
        (f"{plural(server.requests, 'request')} and {plural(server.tokens, 'token')} so far", DIM),
    ]


def _style(name: str, value: Metric) -> str:
    if isinstance(value, str):
        return BAD
    return BOLD if name == REWARD else PLAIN


def _short(value: float | str) -> str:
    return escape_cell(value) if isinstance(value, str) else f"{value:.3g}"


def _troubles(run: RunView, width: int) -> Iterator[Line]:
    if run.problem:
        yield from _sentence(f"damaged: {run.problem}", width, BAD)
    for one in run.slow[:2]:
        yield from _sentence(one.summary, width, BAD)
    suspicion = run.suspicion
    # A straggler's suspicion says what `slow` says, with less.
    if suspicion is not None and not (run.slow and suspicion.kind == "straggler"):
        yield from _sentence(f"suspicion: {suspicion.summary}", width, WARN)
    if run.verdict is not None and run.state != RUNNING:
        style = PLAIN if run.verdict.status == "completed" else BAD
        yield from _sentence(run.verdict.summary, width, style)


def _sentence(text: str, width: int, style: str) -> list[Line]:
    return [fit(line, width) for line in wrap_text(escape_cell(text), width, style, _SENTENCE)]


RUN_ORDERS = {
    "d": Order("date", lambda run: run.started),
    "s": Order("step", lambda run: run.step),
    "r": Order("reward", lambda run: finite(run.rl_metrics.get(REWARD))),
    "l": Order("loss", lambda run: finite(run.loss), down=False),
    "k": Order("tokens/s", lambda run: finite(run.tokens_per_s)),
    "t": Order("time", lambda run: run.seconds),
    "e": Order("state", lambda run: run.state, down=False),
}
_BROKEN = ("failed", LOST, DAMAGED, "hang")


def runs_panel(index: SnapshotIndex, wish: PanelOptions, chosen: str) -> Panel:
    """Newest first. A name that several runs have tells nobody which is which: those have their ids."""
    found = reversed(index.snapshot.runs)
    names = Counter(run.name for run in index.snapshot.runs)

    def shown_name(run: RunView) -> str:
        return escape_cell(run.name if run.name and names[run.name] == 1 else run.id)

    of_rl = [name for name in RL_METRICS if any(name in run.rl_metrics for run in index.snapshot.runs)]
    kept, hidden = filter_and_sort((Row(run.id, run, _run_text(run)) for run in found), wish, RUN_ORDERS)
    columns = (
        Column("RUN", 26, lambda run, width: (shown_name(run), ACCENT if run.id == chosen else PLAIN)),
        Column("STATE", 10, _run_state, order=1),
        Column("STEP", 13, lambda run, width: (steps(run), PLAIN), 2, True),
        *(_rl_column(name) for name in of_rl),
        Column("LOSS", 9, lambda run, width: _loss(run), 3, True),
        Column("TOKENS/S", 8, lambda run, width: (short(run.tokens_per_s), PLAIN), 4, True),
        Column(
            "TIME",
            12,
            lambda run, width: (format_duration(run.seconds) if run.seconds is not None else NONE, PLAIN),
            5,
            True,
        ),
        Column("USER", 10, lambda run, width: (escape_cell(run.user), PLAIN if run.mine else DIM), 7),
        Column("DATE", 12, lambda run, width: (_date(run.started), DIM), 6),
        Column("WHAT", 0, _what, order=8, least=14),
    )
    folder = escape_cell(index.snapshot.root or "the folder of runs")
    return Panel(RUNS, columns, kept, f"no runs in {folder}", hidden)


def steps(run: RunView) -> str:
    if run.step is None:
        return NONE
    return f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)


def _run_text(run: RunView) -> str:
    cause = run.verdict.cause if run.verdict is not None else ""
    return escape_cell(" ".join((run.id, run.name, run.state, run.user, cause or "", *run.hosts))).lower()


def state_style(run: RunView) -> str:
    if run.state == RUNNING:
        return WARN if run.suspicion is not None else GOOD
    if run.state in _BROKEN:
        return BAD
    return WARN if run.state == UNKNOWN else PLAIN


def _run_state(run: RunView, width: int) -> Piece:
    return escape_cell(run.state), state_style(run)


def _rl_column(name: str) -> Column:
    """Make a column of a reinforcement-learning metric; it is empty for runs that have none."""
    title = RL_METRICS[name].upper()

    def draw(run: RunView, _width: int) -> Piece:
        value = run.rl_metrics.get(name)
        return "" if value is None else metric_text(name, value), BAD if isinstance(value, str) else PLAIN

    return Column(title, max(len(title), 7), draw, 2 if name == REWARD else 9, True)


def _loss(run: RunView) -> Piece:
    if run.headline == REWARD:
        return "", PLAIN
    return format_metric(run.loss), BAD if isinstance(run.loss, str) else PLAIN


def _what(run: RunView, width: int) -> Piece:
    if run.problem:
        return escape_cell(run.problem), BAD
    if run.suspicion is not None:
        return escape_cell(run.suspicion.summary), WARN
    cause = run.verdict.cause if run.verdict is not None and run.verdict.status != "completed" else ""
    return escape_cell(cause or ""), DIM


def _date(when: float) -> str:
    """A clock that was set wrong may have written any number."""
    try:
        return time.strftime("%d %b %H:%M", time.localtime(when)) if when else NONE
    except (OverflowError, OSError, ValueError):
        return NONE
