"""The report's figures. matplotlib is imported here alone, and only when something is drawn.

They are narrow, with panels below each other: on a phone 13 cm become 7, and 11 pt must still be read there.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from stoker.contract.quantities import number_at, span
from stoker.contract.shape import shape
from stoker.speedrun.gather import Chain
from stoker.speedrun.report_results import MODELS
from stoker.training.stages.significance import Measured, measured, share

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


@shape
class Drawing:
    svg: str
    png: bytes


def draw(chain: Chain) -> dict[str, Drawing]:
    """What there is data for, by name."""
    import matplotlib

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
    found = {MODELS[name]: one.everything for name in MODELS if (one := chain.evaluation(name)) is not None}
    if not any(one.greedy.value is not None for one in found.values()):
        return None
    figure, (axes,) = _panels(1, 3.4)
    at = range(len(found))
    _bars(
        axes, [x - 0.07 for x in at], [one.greedy for one in found.values()], fmt="o", color=BLUE, label="greedy answer"
    )
    if any(one.sampled.value is not None for one in found.values()):
        _bars(
            axes,
            [x + 0.07 for x in at],
            [one.sampled for one in found.values()],
            fmt="s",
            color=ORANGE,
            label="sampled answers",
        )
    _by_model(axes, found)
    axes.set_ylabel("questions right (%)")
    axes.legend(loc="best")
    return figure


def kinds(chain: Chain) -> Figure | None:
    found = {MODELS[name]: one.kinds for name in MODELS if (one := chain.evaluation(name)) is not None}
    names = list(dict.fromkeys(kind for one in found.values() for kind in one))[:12]
    if len(names) < 2:
        return None
    rows = (len(names) + 1) // 2
    figure, panels = _panels(rows, 0.7 + 1.75 * rows, 2, sharey=True)
    short = {"Midtrain": "Mid", "GRPO uniform": "GRPO u", "GRPO density": "GRPO d"}
    for panel, kind in zip(panels, names, strict=False):
        _bars(
            panel,
            range(len(found)),
            [one[kind].greedy if kind in one else Measured() for one in found.values()],
            fmt="o",
            color=BLUE,
        )
        _by_model(panel, [short.get(title, title) for title in found])
        panel.set_title(kind if len(kind) < 24 else kind[:22] + "…")
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    figure.supylabel("questions right (%)", fontsize=11)
    return figure


def _whole_steps(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def losses(chain: Chain) -> Figure | None:
    trained = {
        MODELS[name]: chain.stages[name]
        for name in ("base", "midtrain", "sft")
        if name in chain.stages and chain.stages[name].curve("loss")[0]
    }
    if not trained:
        return None
    figure, panels = _panels(len(trained), 0.4 + 1.9 * len(trained))
    for panel, (title, stage) in zip(panels, trained.items(), strict=True):
        panel.plot(*_thinned(*stage.curve("loss")), color=BLUE, linewidth=1.2, label="training")
        steps, values = stage.curve("val_loss")
        if steps:
            panel.plot(steps, values, "o", color=ORANGE, markersize=5, label="held-out")
        panel.set_title(title)
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
    runs = {
        name: chain.stages[name]
        for name in ("grpo-uniform", "grpo-density")
        if name in chain.stages and chain.stages[name].curve("reward")[0]
    }
    if not runs:
        return None
    shown = [
        ("reward", "reward"),
        ("kl", "KL to SFT\n(nats/token)"),
        ("length", "length\n(tokens)"),
        ("entropy", "entropy\n(nats/token)"),
    ]
    shown += [("cut", "cut at the\nlimit (share)")] if any(stage.curve("cut")[0] for stage in runs.values()) else []
    figure, panels = _panels(len(shown), 1.9 * len(shown), sharex=True)
    looks = {"grpo-uniform": (BLUE, "-"), "grpo-density": (ORANGE, "--")}
    for panel, (key, label) in zip(panels, shown, strict=True):
        for name, stage in runs.items():
            steps, values = stage.curve(key)
            colour, line = looks[name]
            panel.plot(steps, values, color=colour, linewidth=0.7, alpha=0.45)
            panel.plot(
                steps,
                _running_mean(values),
                line,
                color=colour,
                linewidth=1.9,
                label=MODELS[name].removeprefix("GRPO "),
            )
        panel.set_ylabel(label)
        _whole_steps(panel)
    panels[0].legend(loc="best")
    panels[-1].set_xlabel("GRPO step")
    figure.align_ylabels()
    return figure


def _running_mean(values: Sequence[float]) -> list[float]:
    """Of the steps before: the first ones have fewer."""
    return [sum(values[max(0, at - SMOOTHED + 1) : at + 1]) / min(at + 1, SMOOTHED) for at in range(len(values))]


def calibration(chain: Chain) -> Figure | None:
    stage = chain.result("reward")
    rows = stage.metrics.get("calibration") if stage else None
    points = [
        (predicted, observed, number_at(row, "count") or 0)
        for row in (rows if isinstance(rows, list) else ())
        if (predicted := number_at(row, "predicted")) is not None
        and (observed := number_at(row, "observed")) is not None
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
    stage = chain.result("diversity")
    metrics = stage.metrics if stage else {}
    differences, rows = metrics.get("difference"), []
    for name in differences if isinstance(differences, dict) else ():
        own, found = measured(metrics.get("baseline"), name), measured(differences, name)
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
        axes.errorbar(
            [100 * value],
            [at],
            xerr=spread,
            fmt="D" if apart else "o",
            color=ORANGE if apart else GREY,
            markersize=6,
            linewidth=1.4,
        )
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
    axes.bar_label(bars, [span(seconds) for _, seconds in rows], padding=3, fontsize=10)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * longest / per)
    axes.set_xlabel(f"time ({unit})")
    axes.grid(visible=False, axis="y")
    return figure


FIGURES: dict[str, Callable[[Chain], Figure | None]] = {
    "accuracy": accuracy, "kinds": kinds, "losses": losses, "rewards": rewards, "calibration": calibration, "diversity": diversity, "time": time,
}  # fmt: skip
