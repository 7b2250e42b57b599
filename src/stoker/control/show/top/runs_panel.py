"""The table of runs."""

from __future__ import annotations

import time
from collections import Counter

from stoker.contract.units import format_duration
from stoker.control.show.charts import metric_text, short
from stoker.control.show.snapshot import DAMAGED, LOST, REWARD, RL_METRICS, RUNNING, UNKNOWN, RunView, finite
from stoker.control.show.top.cells import ACCENT, BAD, DIM, GOOD, NONE, PLAIN, WARN, Column, Piece, foreign, number
from stoker.control.show.top.table import RUNS, Index, Order, Panel, Row, Wish, ordered

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


def runs_panel(index: Index, wish: Wish, chosen: str) -> Panel:
    """Newest first. A name that several runs have tells nobody which is which: those have their ids."""
    found = reversed(index.snapshot.runs)
    names = Counter(run.name for run in index.snapshot.runs)

    def shown_name(run: RunView) -> str:
        return foreign(run.name if run.name and names[run.name] == 1 else run.id)

    of_rl = [name for name in RL_METRICS if any(name in run.rl_metrics for run in index.snapshot.runs)]
    kept, hidden = ordered((Row(run.id, run, _run_text(run)) for run in found), wish, RUN_ORDERS)
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
        Column("USER", 10, lambda run, width: (foreign(run.user), PLAIN if run.mine else DIM), 7),
        Column("DATE", 12, lambda run, width: (_date(run.started), DIM), 6),
        Column("WHAT", 0, _what, order=8, least=14),
    )
    folder = foreign(index.snapshot.root or "the folder of runs")
    return Panel(RUNS, columns, kept, f"no runs in {folder}", hidden)


def steps(run: RunView) -> str:
    if run.step is None:
        return NONE
    return f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)


def _run_text(run: RunView) -> str:
    cause = run.verdict.cause if run.verdict is not None else ""
    return foreign(" ".join((run.id, run.name, run.state, run.user, cause or "", *run.hosts))).lower()


def state_style(run: RunView) -> str:
    if run.state == RUNNING:
        return WARN if run.suspicion is not None else GOOD
    if run.state in _BROKEN:
        return BAD
    return WARN if run.state == UNKNOWN else PLAIN


def _run_state(run: RunView, width: int) -> Piece:
    return foreign(run.state), state_style(run)


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
    return number(run.loss), BAD if isinstance(run.loss, str) else PLAIN


def _what(run: RunView, width: int) -> Piece:
    if run.problem:
        return foreign(run.problem), BAD
    if run.suspicion is not None:
        return foreign(run.suspicion.summary), WARN
    cause = run.verdict.cause if run.verdict is not None and run.verdict.status != "completed" else ""
    return foreign(cause or ""), DIM


def _date(when: float) -> str:
    """A clock that was set wrong may have written any number."""
    try:
        return time.strftime("%d %b %H:%M", time.localtime(when)) if when else NONE
    except (OverflowError, OSError, ValueError):
        return NONE
