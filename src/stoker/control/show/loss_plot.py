"""A curve as a PNG. matplotlib is loaded here alone, and only when a picture is wanted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from stoker.contract.errors import EX_CANTCREAT, EX_UNAVAILABLE, Refusal
from stoker.contract.safe_io import AtomicFile, refuse_other_extension
from stoker.contract.text import escape
from stoker.control.show.charts import Line

# Okabe and Ito's: told apart without red and green.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_HIGHEST = 1e100  # what is beyond is drawn there: matplotlib's margins and ticks need powers of it
_STYLES = ("-", "--", "-.", ":")  # nothing is told by colour alone
_LOOK: Any = {
    "axes.grid": True, "grid.color": "#d4d8dc", "grid.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "text.parse_math": False,  # a run may be called a_$b
    "font.size": 11, "savefig.dpi": 130,
}  # fmt: skip


def there_is_matplotlib() -> bool:
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


Panel = tuple[str, Sequence[Line]]  # label of the values' axis, and the lines


def write_png(path: str, panels: Sequence[Panel], *, log: bool = False) -> None:
    """Draw the panels below each other and write the picture whole or not at all."""
    try:
        import matplotlib.figure
    except ImportError as problem:
        line = f"no picture: matplotlib can't be imported ({problem}); pip install matplotlib, or leave --png out"
        raise Refusal(escape(line), EX_UNAVAILABLE) from problem
    refuse_other_extension(path, b"\x89PNG", "a PNG picture")
    with matplotlib.rc_context(_LOOK):
        height = 4.5 if len(panels) == 1 else 1.2 + 1.7 * len(panels)
        figure = matplotlib.figure.Figure(figsize=(8, height), layout="constrained")
        grid = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
        for axes, (label, lines) in zip(grid, panels, strict=True):
            for number, one in enumerate(lines):
                look: Any = {
                    "color": _COLOURS[number % len(_COLOURS)],
                    "linestyle": _STYLES[number // len(_COLOURS) % len(_STYLES)],
                }
                heights = [max(-_HIGHEST, min(y, _HIGHEST)) for _, y in one.points]
                axes.plot([x for x, _ in one.points], heights, linewidth=1.4, label=one.name, **look)
            axes.set_ylabel(label)
            if log:
                axes.set_yscale("log")
        grid[-1].set_xlabel("step")
        first = panels[0][1]
        if len(first) > 1:
            grid[0].legend()
        else:
            grid[0].set_title(first[0].name, loc="left", fontsize=11)
        figure.align_ylabels()
        try:
            with AtomicFile(path, durable=False) as file:
                figure.savefig(file, format="png", metadata={"Software": None})
        except OSError as problem:
            raise Refusal(f"{escape(path)} can't be written: {problem.strerror}", EX_CANTCREAT) from problem


def leave_picture(run_dir: str, panels: Sequence[Panel], metric: str) -> str:
    """Write METRIC.png into a finished run's folder and return its path, or "" without matplotlib."""
    if not there_is_matplotlib():
        return ""
    path = os.path.join(run_dir, f"{metric}.png")
    write_png(path, panels)
    return path
