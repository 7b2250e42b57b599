"""The report's figures. matplotlib is loaded only when something is drawn.

They are narrow, with panels below each other: on a phone 13 cm become 7, and 11 pt must still be read there.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from stoker.contract.frozen import frozen
from stoker.contract.units import finite_number, format_duration
from stoker.speedrun.gather import MODELS, Chain, StageRecord
from stoker.training.stages.registry import links
from stoker.training.stages.significance import Measured, measured, share
from stoker.training.stages.stage import Link, variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's: told apart without red and green. Nothing is told by colour alone. html.py changes them for dark
# pages.
COLOURS = {
    "ink": "#1f2328",
    "paper": "#ffffff",
    "grid": "#d4d8dc",
    "blue": "#0072b2",
    "orange": "#d55e00",
    "grey": "#7a828a",
}
INK, GRID, BLUE, ORANGE, GREY = (COLOURS[name] for name in ("ink", "grid", "blue", "orange", "grey"))
WIDTH = 5.2  # inches
SMOOTHED = 5  # steps of GRPO that the thick line is the mean of
MOST_POINTS = 400
STYLE: Any = {
    "font.size": 11, "font.family": "DejaVu Sans", "axes.titlesize": 11.5, "axes.labelsize": 11, "xtick.labelsize": 10, "ytick.labelsize": 10,
    "legend.fontsize": 10, "text.parse_math": False,  # a kind of question may be called a_$b
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.6, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "axes.titlelocation": "left",
    "xtick.color": INK, "ytick.color": INK, "text.color": INK,
    "legend.frameon": False, "lines.linewidth": 1.6, "errorbar.capsize": 3, "figure.facecolor": COLOURS["paper"], "axes.facecolor": COLOURS["paper"],
    "svg.fonttype": "path", "svg.hashsalt": "stoker", "savefig.dpi": 160,
}  # fmt: skip


@frozen
class Drawing:
    svg: str
    png: bytes


def draw(chain: Chain) -> dict[str, Drawing]:
    """What there is data for, by name."""
    import matplotlib.figure

    with matplotlib.rc_context(STYLE):
        figures = {name: make(chain) for name, make in FIGURES.items()}
        return {name: _saved(figure) for name, figure in figures.items() if figure is not None}


def _saved(figure: Figure) -> Drawing:
    """Without date and version: the same numbers give the same bytes."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # it is laid out now: each saving would do it again, which is half of the time
    svg, png = io.StringIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", metadata={"Software": None})
    return Drawing(svg.getvalue(), png.getvalue())


def _panels(rows: int, height: float, columns: int = 1, **more: Any) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **more)
    return figure, list(grid.flat)


def _bars(axes: Axes, at: Sequence[float], values: Sequence[Measured], **look: Any) -> None:
    """Points with their intervals, where there are any."""
    known = [(x, one.value, one.low, one.high) for x, one in zip(at, values, strict=True) if one.value is not None]
    middle = [100 * value for _, value, _, _ in known]
    below = [0.0 if low is None else max(0.0, 100 * (value - low)) for _, value, low, _ in known]
    above = [0.0 if high is None else max(0.0, 100 * (high - value)) for _, value, _, high in known]
    axes.errorbar([x for x, *_ in known], middle, yerr=[below, above], linewidth=1.2, markersize=6, **look)


def _by_model(axes: Axes, titles: Iterable[str]) -> None:
    names = list(titles)
    axes.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(-3, 103)
    axes.grid(visible=False, axis="x")


def accuracy(chain: Chain) -> Figure | None:
    # The questions of the report's first line: prompts of GRPO's own kinds are held out in a file of their own.
    found = {MODELS[name]: one.questions for name, one in chain.evaluations.items()}
    if not any(one.greedy.value is not None for one in found.values()):
        return None
    figure, (axes,) = _panels(1, 3.4)
    at = range(len(found))
    greedy, sampled = [one.greedy for one in found.values()], [one.sampled for one in found.values()]
    _bars(axes, [x - 0.07 for x in at], greedy, fmt="o", color=BLUE, label="greedy answer")
    if any(one.value is not None for one in sampled):
        _bars(axes, [x + 0.07 for x in at], sampled, fmt="s", color=ORANGE, label="sampled answers")
    _by_model(axes, found)
    axes.set_ylabel("questions right (%)")
    axes.legend(loc="best")
    return figure


def kinds(chain: Chain) -> Figure | None:
    short = {link.name: link.short or link.title for link, _ in links()}
    found = {short[name]: one.kinds for name, one in chain.evaluations.items()}
    names = list(dict.fromkeys(kind for one in found.values() for kind in one))[:12]
    if len(names) < 2:
        return None
    rows = (len(names) + 1) // 2
    figure, panels = _panels(rows, 0.7 + 1.75 * rows, 2, sharey=True)
    for panel, kind in zip(panels, names, strict=False):
        right = [one[kind].greedy if kind in one else Measured() for one in found.values()]
        _bars(panel, range(len(found)), right, fmt="o", color=BLUE)
        _by_model(panel, found)
        panel.set_title(kind if len(kind) < 24 else kind[:22] + "…")
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    figure.supylabel("questions right (%)", fontsize=11)
    return figure


def _whole_steps(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def _logged(chain: Chain, figure: str, metric: str) -> list[tuple[Link, StageRecord]]:
    """Links that have this figure and logged this metric."""
    shown = [link for link, kind in links() if kind.curves is not None and kind.curves.figure == figure]
    stages = [(link, chain.stages[link.name]) for link in shown if link.name in chain.stages]
    return [(link, stage) for link, stage in stages if stage.curve(metric)[0]]


def losses(chain: Chain) -> Figure | None:
    trained = _logged(chain, "losses", "loss")
    if not trained:
        return None
    figure, panels = _panels(len(trained), 0.4 + 1.9 * len(trained))
    for panel, (link, stage) in zip(panels, trained, strict=True):
        panel.plot(*_thinned(*stage.curve("loss")), color=BLUE, linewidth=1.2, label="training")
        steps, values = stage.curve("val_loss")
        if steps:
            panel.plot(steps, values, "o", color=ORANGE, markersize=5, label="held-out")
        panel.set_title(link.title)
        panel.set_ylabel("loss (nats/token)")
        _whole_steps(panel)
    panels[0].legend(loc="upper right")
    panels[-1].set_xlabel("step")
    return figure


def _thinned(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Means of neighbours where there are more points than a figure can show."""
    width = max(1, -(-len(values) // MOST_POINTS))
    cuts = range(0, len(values), width)
    return [steps[min(at + width, len(steps)) - 1] for at in cuts], [
        sum(values[at : at + width]) / len(values[at : at + width]) for at in cuts
    ]


def rewards(chain: Chain) -> Figure | None:
    runs = _logged(chain, "rewards", "reward")
    kind = next((kind for link, kind in links() if runs and link is runs[0][0]), None)
    if kind is None or kind.curves is None:
        return None
    metric, label, _ = kind.curves.optional
    shown = {**kind.curves.panels, **({metric: label} if any(stage.curve(metric)[0] for _, stage in runs) else {})}
    figure, panels = _panels(len(shown), 1.9 * len(shown), sharex=True)
    for panel, (key, label) in zip(panels, shown.items(), strict=True):
        for (link, stage), (colour, line) in zip(runs, cycle(((BLUE, "-"), (ORANGE, "--")))):
            steps, values = stage.curve(key)
            panel.plot(steps, values, color=colour, linewidth=0.7, alpha=0.45)
            mean, title = _running_mean(values), variant(link, kind)
            panel.plot(steps, mean, line, color=colour, linewidth=1.9, label=title)
        panel.set_ylabel(label)
        _whole_steps(panel)
    panels[0].legend(loc="best")
    panels[-1].set_xlabel(f"{kind.curves.heading} step")
    figure.align_ylabels()
    return figure


def _running_mean(values: Sequence[float]) -> list[float]:
    """Of the steps before: the first ones have fewer."""
    return [sum(values[max(0, at - SMOOTHED + 1) : at + 1]) / min(at + 1, SMOOTHED) for at in range(len(values))]


def _first(chain: Chain, metric: str) -> Any:
    """Of the first done stage that has it."""
    return next(
        (found.metrics[metric] for found in chain.stages.values() if found.done and metric in found.metrics), None
    )


def calibration(chain: Chain) -> Figure | None:
    rows = _first(chain, "calibration")
    points = [
        (predicted, observed, finite_number(row, "count") or 0)
        for row in (rows if isinstance(rows, list) else ())
        if (predicted := finite_number(row, "predicted")) is not None
        and (observed := finite_number(row, "observed")) is not None
    ]
    if not points:
        return None
    figure, (axes,) = _panels(1, 4.2)
    axes.plot([0, 100], [0, 100], "--", color=GREY, linewidth=1, label="perfect calibration")
    seen = [share(observed * count, count) if count else Measured(observed) for _, observed, count in points]
    _bars(axes, [100 * predicted for predicted, _, _ in points], seen, fmt="o", color=BLUE, label="held-out pairs")
    for (predicted, observed, count), one in zip(points, seen, strict=True):
        top = 100 * (one.high if one.high is not None else observed)
        many = f"{count:.0f}" if count < 1000 else f"{count / 1000:.1f}k"
        axes.annotate(many, (100 * predicted, top), textcoords="offset points", xytext=(0, 3), ha="center", fontsize=10)
    axes.set_xlim(min(48.0, 100 * min(predicted for predicted, _, _ in points) - 3), 102)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylim(-3, 109)
    axes.set_xlabel("confidence (%)")
    axes.set_ylabel("right (%)")
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2
    )  # above: points may lie anywhere inside
    return figure


def diversity(chain: Chain) -> Figure | None:
    """Measures have different units, so each difference is shown in percent of uniform's value."""
    differences, baseline, rows = _first(chain, "difference"), _first(chain, "baseline"), []
    for name in differences if isinstance(differences, dict) else ():
        own, found = measured(baseline, name), measured(differences, name)
        if own.value and found.value is not None and found.low is not None and found.high is not None:
            rows.append(
                (name.replace("_", " "), *(value / abs(own.value) for value in (found.value, found.low, found.high)))
            )
    if not rows:
        return None
    figure, (axes,) = _panels(1, 0.9 + 0.36 * len(rows))
    axes.axvline(0, color=INK, linewidth=1)
    for at, (_, value, low, high) in enumerate(rows):
        apart = low > 0 or high < 0
        spread = [[100 * max(0.0, value - low)], [100 * max(0.0, high - value)]]
        mark, colour = ("D", ORANGE) if apart else ("o", GREY)
        axes.errorbar([100 * value], [at], xerr=spread, fmt=mark, color=colour, markersize=6, linewidth=1.4)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("density compared with uniform (%)")
    axes.grid(visible=False, axis="y")
    return figure


def time(chain: Chain) -> Figure | None:
    rows = [(found.name, found.seconds) for found in chain.stages.values() if found.seconds]
    if not rows:
        return None
    figure, (axes,) = _panels(1, 0.9 + 0.3 * len(rows))
    longest = max(seconds for _, seconds in rows)
    units = (("hours", 3600), ("minutes", 60), ("seconds", 1))
    unit, per = next((unit, per) for unit, per in units if longest >= 2 * per or per == 1)
    bars = axes.barh(range(len(rows)), [seconds / per for _, seconds in rows], color=BLUE, height=0.65)
    axes.bar_label(bars, [format_duration(seconds) for _, seconds in rows], padding=3, fontsize=10)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * longest / per)
    axes.set_xlabel(f"time ({unit})")
    axes.grid(visible=False, axis="y")
    return figure


FIGURES: dict[str, Callable[[Chain], Figure | None]] = {
    "accuracy": accuracy, "kinds": kinds, "losses": losses, "rewards": rewards, "calibration": calibration, "diversity": diversity, "time": time,
}  # fmt: skip
