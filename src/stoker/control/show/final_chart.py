"""What a training that is over leaves to look at: its loss, of GRPO its reward, in one line, and as a PNG where matplotlib is
installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from stoker.contract import env_vars
from stoker.contract.errors import Refusal
from stoker.contract.text import escape
from stoker.control.show.charts import Line, short, sparkline
from stoker.control.show.curves import MetricsTail, averaged, finite_points, smoothed
from stoker.control.show.loss_plot import leave_picture
from stoker.control.show.snapshot import REWARD, RL_METRICS, headline_metric

_WIDTH = 40


def show_loss(run_dir: str, say: Callable[[str], None]) -> None:
    """Nothing of a run without a loss. What goes wrong here is reported, and changes no exit code."""
    metrics = MetricsTail(run_dir)
    metrics.look()
    metric = headline_metric(metrics.curves)
    curve = metrics.curves.get(metric)
    points = finite_points(averaged(curve, metrics.interval).points()) if curve is not None else []
    if curve is None or len(points) < 2:
        return
    values = [value for _, value in points]
    wrong = len(curve.not_finite())
    bad = f" ({wrong} not finite)" if wrong else ""
    drawn = f"{metric} {sparkline(values, _WIDTH)} {short(values[0])} to {short(values[-1])}{bad}"
    picture = ""
    try:
        if os.environ.get(env_vars.PLOTS) != "0":
            name, drawn_metrics = os.path.basename(run_dir), [metric]
            if metric == REWARD:
                drawn_metrics = [one for one in RL_METRICS if one in metrics.curves]
            panels = [
                (RL_METRICS.get(one, one), [Line(name, smoothed(metrics.curves[one], metrics.interval))])
                for one in drawn_metrics
            ]
            picture = leave_picture(run_dir, panels, metric)
    except Refusal as problem:
        say(f"stoker: {problem.line}")
    except Exception as problem:  # a matplotlib that is there and does not work
        say(f"stoker: {metric}.png could not be drawn: {escape(f'{type(problem).__name__}: {problem}', 200)}")
    say(drawn + (f"; {os.path.relpath(picture)}" if picture else ""))
