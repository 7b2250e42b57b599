"""stoker plot RUN [RUN ...] [--metric NAME] [--log] [--smooth N] [--png FILE]"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_NOINPUT, EX_USAGE, Refusal, parsing
from stoker.contract.options import OptionParser, completes_run_names, suggest
from stoker.contract.terminal import print_coloured, print_json, print_status, print_text, uses_colour
from stoker.contract.text import escape, is_digits
from stoker.control.record import run_index, run_record
from stoker.control.show.charts import COLOURS, LETTERS, Series, draw_chart, fit_width, mean, short, sparkline
from stoker.control.show.curves import Curve, smooth_points
from stoker.control.show.job_view import open_run_tail
from stoker.control.show.run_tail import RunTail
from stoker.control.show.snapshot import AVERAGED, LOSS, REWARD, RL_METRICS, SERVER_METRICS

_EPILOG = """  stoker plot                                     the newest run's loss; of GRPO its reward, KL, entropy ...
  stoker plot exp1 exp2 --metric val_loss --log
  stoker plot exp1 --smooth 20 --png loss.png"""


def parser() -> OptionParser:
    made = OptionParser(
        "stoker plot", "Draws a metric of one or several runs in the terminal, or into a PNG file.", _EPILOG
    )
    completes_run_names(
        made.add_argument("runs", nargs="*", metavar="RUN", help="ids, names or paths of runs (default: the newest)")
    )
    made.option(
        "--metric", "NAME", "what to draw: any name in metrics.jsonl (default: reward with KL and the like, else loss)"
    )
    made.switch("--log", "a logarithmic axis for the values")
    made.option(
        "--smooth",
        "N",
        "the mean of the last N values (default: of GRPO one logging interval, else 1, as they are)",
        _count,
    )
    made.option("--width", "N", "columns (default: as wide as the terminal)", _count)
    made.option("--height", "N", "lines (default: 16)", _count, default=16)
    made.option("--png", "FILE", "write a picture; needs matplotlib")
    made.runs_dir()
    made.switch("--json", "the points as JSON")
    return made


def _count(text: str) -> int:
    if not is_digits(text) or not 0 < int(text) <= 100_000:
        raise ValueError(f"{text!r} is not a number from 1 to 100000")
    return int(text)


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    root = layout.runs_root(told.runs_dir, os.environ)
    found = [watched(run) for run in _once([run_index.find_run(which, root) for which in told.runs or [None]])]
    metric = told.metric or headline_of(found)
    curves = [(folder.record, _curve(folder, metric)) for folder in found]
    if told.json:
        runs = [{"run": run.id, "points": [list(one) for one in curve.points(1 << 40)]} for run, curve in curves]
        print_json({"schema": 1, "metric": metric, "runs": runs})
        return 0
    lines = [Series(_title(one.record), _means(one, metric, told.smooth)) for one in found]
    if not any(line.points for line in lines):
        raise Refusal(f"no finite value of {escape(metric)} to draw{_not_finite(curves[0][1])}", EX_NOINPUT)
    panels = [(metric, lines)]
    if not told.metric and metric == REWARD:
        panels = [(RL_METRICS[REWARD], lines), *_companions(found, told.smooth)]
    if told.png:
        from stoker.control.show.charts import write_png

        write_png(told.png, panels, log=told.log)
        print(f"wrote {escape(told.png)}")
        return 0
    _draw(metric, lines, told)
    _draw_companions(panels[1:])
    for (_, curve), line in zip(curves, lines, strict=True):
        wrong = _not_finite(curve)
        if wrong:
            print(f"{line.name}{wrong}")
    return 0


def _once(runs: list[run_record.RunRecord]) -> list[run_record.RunRecord]:
    """Each of them, in this order; one that was named twice is reported."""
    by_path: dict[str, run_record.RunRecord] = {}
    for run in runs:
        if by_path.setdefault(os.path.realpath(run.dir), run) is not run:
            print_status(f"run {escape(run.id, 100)} was named before; it is drawn once")
    return list(by_path.values())


def watched(run: run_record.RunRecord) -> RunTail:
    with parsing(f"run {run.id}"):
        folder = open_run_tail(run)
        folder.view(run.started, watched=True)
    return folder


def headline_of(folders: Sequence[RunTail]) -> str:
    """Return reward where all the runs have one, else loss."""
    have_rewards = all(folder.curve(REWARD).steps for folder in folders)
    return REWARD if have_rewards else LOSS


def _means(folder: RunTail, name: str, smooth: int | None) -> tuple[tuple[float, float], ...]:
    """Return the points to draw; without --smooth means over the logging interval of a run whose metrics have every step."""
    window = smooth or (folder.interval if name in AVERAGED else 1)
    return smooth_points(folder.curve(name), window)


def _companions(folders: Sequence[RunTail], smooth: int | None) -> list[tuple[str, list[Series]]]:
    """Return the curves of KL, entropy and the like, and of a job's servers, of all runs that have them."""
    panels = []
    for name, title in (RL_METRICS | SERVER_METRICS).items():
        lines = [Series(_title(folder.record), _means(folder, name, smooth)) for folder in folders]
        if name != REWARD and any(line.points for line in lines):
            panels.append((title, lines))
    return panels


def _draw_companions(panels: Sequence[tuple[str, Sequence[Series]]]) -> None:
    """Print a sparkline for each metric of each run."""
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    width = max((len(title) for title, _ in panels), default=0)
    for title, lines in panels:
        for line in lines:
            values = [value for _, value in line.points]
            if not values:
                continue
            spark = sparkline(values, 40, ascii_only=plain)
            of = f"  {line.name}" if len(lines) > 1 else ""
            print(f"{title:<{width}} {spark} {short(values[0])} to {short(values[-1])}{of}")


def _curve(folder: RunTail, name: str) -> Curve:
    curve = folder.curve(name)
    if curve.steps:
        return curve
    metrics = folder.training.metrics
    assert metrics is not None
    shown, names = escape(folder.record.id, 100), sorted(folder.curve_names())
    if metrics.problem:
        raise Refusal(f"run {shown}: {metrics.problem}", EX_NOINPUT)
    if not names:
        line = f"run {shown} has no metrics: neither metrics.jsonl, nor a loss that it told by stoker.beat or printed"
        raise Refusal(line, EX_NOINPUT)
    line = f"run {shown} has no metric {name!r}{suggest(name, names)}; it has {', '.join(names)}"
    raise Refusal(escape(line), EX_USAGE)


def _title(run: run_record.RunRecord) -> str:
    return escape(run.id if not run.name or run.name in run.id else f"{run.name} ({run.id})", 100)


def _not_finite(curve: Curve) -> str:
    bad = curve.not_finite()
    if not bad:
        return ""
    shown = ", ".join(map(str, bad[:5])) + (" …" if len(bad) > 5 else "")
    return f": {len(bad)} of {len(curve.steps)} values are not finite (step {shown})"


def _draw(metric: str, lines: Sequence[Series], told: Any) -> None:
    columns = told.width or shutil.get_terminal_size((80, 24)).columns
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    coloured = uses_colour()
    print(fit_width(f"{metric}{', logarithmic' if told.log else ''}", columns).rstrip())
    rows = draw_chart(lines, max(columns, 20), told.height, log=told.log, coloured=coloured, ascii_only=plain)
    for row in rows:
        print_coloured(row)
    if not rows:
        print_text("nothing to draw: --log leaves out values that are not positive")
    for number, line in enumerate(lines):
        if not line.points:
            continue
        values = [value for _, value in line.points]
        mark = LETTERS[number % len(LETTERS)] if len(lines) > 1 and not coloured else "──"
        tail = mean(values[-max(len(values) // 10, 1) :])
        best = f"highest {short(max(values))}" if metric == REWARD else f"lowest {short(min(values))}"
        about = f"last {short(values[-1])}, {best}, mean of the last tenth {short(tail)}"
        steps = f"step {int(line.points[-1][0])}"
        print_coloured([(mark, COLOURS[number % len(COLOURS)]), (f" {line.name}: {about}; {steps}", "")])
