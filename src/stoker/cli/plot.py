"""`stoker plot RUN ...` draws a metric of runs; `stoker compare A B` compares two runs."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_NOINPUT, EX_USAGE, Refusal, parsing
from stoker.contract.frozen import as_json
from stoker.contract.options import OptionParser, offer_run_names, suggest
from stoker.contract.terminal import print_coloured, print_json, print_status, print_text, uses_colour
from stoker.contract.text import escape, is_digits
from stoker.contract.units import format_bytes, format_duration
from stoker.control.record import run_index, run_record
from stoker.control.show.charts import (
    COLORS,
    LETTERS,
    Series,
    draw_chart,
    fit_width,
    format_short,
    mean,
    metric_text,
    sparkline,
)
from stoker.control.show.comparison import (
    COMPARED_SHARE,
    PART_COUNT,
    Difference,
    find_differing_settings,
    find_last_common_step,
    measure_difference,
    settings_of,
)
from stoker.control.show.curves import Curve, smooth_points
from stoker.control.show.job_view import open_run_tail
from stoker.control.show.run_tail import RunTail
from stoker.control.show.snapshot import AVERAGED, LOSS, REWARD, RL_METRICS, SERVER_METRICS

_PLOT_EXAMPLES = """  stoker plot                                     the newest run's loss; for GRPO its reward, KL, entropy ...
  stoker plot exp1 exp2 --metric val_loss --log
  stoker plot exp1 --smooth 20 --png loss.png"""
_COMPARE_EPILOG = (
    f"How noise is judged: the last {COMPARED_SHARE:.0%} of the steps that both runs have made is cut into {PART_COUNT} parts. Each part gives"
    f" the difference of the two means, and the {PART_COUNT} differences give a 95 % t interval. A difference is more than noise if"
    " the interval does not contain 0.\n\nThis is the noise of batches within the two runs. Another seed changes a run, too: only"
    " runs with several seeds show by how much."
)
_MAX_SETTINGS = 60  # differing settings that are printed
_FIRST_ROWS = 3  # the values at equal steps are inserted after state, steps and time


def build_parser() -> OptionParser:
    parser = OptionParser(
        "stoker plot", "Plots a metric of one or more runs in the terminal, or as a PNG file.", _PLOT_EXAMPLES
    )
    offer_run_names(
        parser.add_argument("runs", nargs="*", metavar="RUN", help="ids, names or paths of runs (default: the newest)")
    )
    metric = "any name in metrics.jsonl (default: loss; for GRPO reward, with KL, entropy and the like)"
    parser.option("--metric", "NAME", metric)
    parser.switch("--log", "use a logarithmic axis for the values")
    smooth = "average the last N values (default: one logging interval for GRPO, else 1, no smoothing)"
    parser.option("--smooth", "N", smooth, _parse_count)
    parser.option("--width", "N", "columns (default: as wide as the terminal)", _parse_count)
    parser.option("--height", "N", "lines (default: 16)", _parse_count, default=16)
    parser.option("--png", "FILE", "write a picture; needs matplotlib")
    parser.runs_dir()
    parser.switch("--json", "print the points as JSON")
    return parser


def _parse_count(text: str) -> int:
    if not is_digits(text) or not 0 < int(text) <= 100_000:
        raise ValueError(f"{text!r} is not a whole number from 1 to 100000")
    return int(text)


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    root = layout.runs_root(args.runs_dir, os.environ)
    tails = [
        _read_tail(run) for run in _drop_repeated_runs([run_index.find_run(name, root) for name in args.runs or [None]])
    ]
    metric = args.metric or _choose_metric(tails)
    curves = [(tail.record, _require_curve(tail, metric)) for tail in tails]
    if args.json:
        runs = [{"run": run.id, "points": [list(point) for point in curve.points(1 << 40)]} for run, curve in curves]
        print_json({"schema": 1, "metric": metric, "runs": runs})
        return 0
    lines = [Series(_format_title(tail.record), _read_points(tail, metric, args.smooth)) for tail in tails]
    if not any(line.points for line in lines):
        raise Refusal(f"{escape(metric)} has no finite value to plot{_describe_non_finite(curves[0][1])}", EX_NOINPUT)
    panels = [(metric, lines)]
    if not args.metric and metric == REWARD:
        panels = [(RL_METRICS[REWARD], lines), *_make_other_panels(tails, args.smooth)]
    if args.png:
        from stoker.control.show.charts import write_png

        write_png(args.png, panels, log=args.log)
        print(f"wrote {escape(args.png)}")
        return 0
    _print_chart(metric, lines, args)
    _print_sparklines(panels[1:])
    for (_, curve), line in zip(curves, lines, strict=True):
        if non_finite := _describe_non_finite(curve):
            print(f"{line.name}{non_finite}")
    return 0


def _drop_repeated_runs(runs: list[run_record.RunRecord]) -> list[run_record.RunRecord]:
    """Return the runs in their order without repetitions, and report each run that was named twice."""
    by_path: dict[str, run_record.RunRecord] = {}
    for run in runs:
        if by_path.setdefault(os.path.realpath(run.dir), run) is not run:
            print_status(f"run {escape(run.id, 100)} is named twice; plotting it once")
    return list(by_path.values())


def _read_tail(run: run_record.RunRecord) -> RunTail:
    with parsing(f"run {run.id}"):
        tail = open_run_tail(run)
        tail.view(run.started, watched=True)
    return tail


def _choose_metric(tails: Sequence[RunTail]) -> str:
    """Return reward if all the runs have one, else loss."""
    return REWARD if all(tail.curve(REWARD).steps for tail in tails) else LOSS


def _read_points(tail: RunTail, metric: str, smooth: int | None) -> tuple[tuple[float, float], ...]:
    """Return the points to draw, averaged over --smooth values.

    Without --smooth, metrics that are logged at every step are averaged over a logging interval, and others are not.
    """
    return smooth_points(tail.curve(metric), smooth or (tail.interval if metric in AVERAGED else 1))


def _make_other_panels(tails: Sequence[RunTail], smooth: int | None) -> list[tuple[str, list[Series]]]:
    """Return the panels of KL, entropy and the other RL and server metrics, with the runs that have them."""
    panels = []
    for name, title in (RL_METRICS | SERVER_METRICS).items():
        lines = [Series(_format_title(tail.record), _read_points(tail, name, smooth)) for tail in tails]
        if name != REWARD and any(line.points for line in lines):
            panels.append((title, lines))
    return panels


def _print_sparklines(panels: Sequence[tuple[str, Sequence[Series]]]) -> None:
    """Print a sparkline for each metric of each run."""
    ascii_only = "utf" not in (sys.stdout.encoding or "").lower()
    width = max((len(title) for title, _ in panels), default=0)
    for title, lines in panels:
        for line in lines:
            values = [value for _, value in line.points]
            if not values:
                continue
            spark = sparkline(values, 40, ascii_only=ascii_only)
            name = f"  {line.name}" if len(lines) > 1 else ""
            print(f"{title:<{width}} {spark} {format_short(values[0])} to {format_short(values[-1])}{name}")


def _require_curve(tail: RunTail, metric: str) -> Curve:
    """Return the curve of a metric. Raises Refusal if the run has no such metric."""
    curve = tail.curve(metric)
    if curve.steps:
        return curve
    metrics = tail.training.metrics
    assert metrics is not None
    run, names = escape(tail.record.id, 100), sorted(tail.curve_names())
    if metrics.problem:
        raise Refusal(f"run {run}: {metrics.problem}", EX_NOINPUT)
    if not names:
        why = "it has no metrics.jsonl, and its script neither printed a loss nor passed one to stoker.beat"
        raise Refusal(f"run {run} has no metrics: {why}", EX_NOINPUT)
    line = f"run {run} has no metric {metric!r}{suggest(metric, names)}; it has {', '.join(names)}"
    raise Refusal(escape(line), EX_USAGE)


def _format_title(run: run_record.RunRecord) -> str:
    return escape(run.id if not run.name or run.name in run.id else f"{run.name} ({run.id})", 100)


def _describe_non_finite(curve: Curve) -> str:
    steps = curve.find_non_finite_steps()
    if not steps:
        return ""
    listed = ", ".join(map(str, steps[:5])) + (" …" if len(steps) > 5 else "")
    return f": {len(steps)} of {len(curve.steps)} values are not finite (step {listed})"


def _print_chart(metric: str, lines: Sequence[Series], args: argparse.Namespace) -> None:
    columns = args.width or shutil.get_terminal_size((80, 24)).columns
    ascii_only = "utf" not in (sys.stdout.encoding or "").lower()
    coloured = uses_colour()
    print(fit_width(f"{metric}{', logarithmic' if args.log else ''}", columns).rstrip())
    rows = draw_chart(lines, max(columns, 20), args.height, log=args.log, coloured=coloured, ascii_only=ascii_only)
    for row in rows:
        print_coloured(row)
    if not rows:
        print_text("there is nothing to plot: --log skips values that are not positive")
    for number, line in enumerate(lines):
        if not line.points:
            continue
        values = [value for _, value in line.points]
        mark = LETTERS[number % len(LETTERS)] if len(lines) > 1 and not coloured else "──"
        best = f"highest {format_short(max(values))}" if metric == REWARD else f"lowest {format_short(min(values))}"
        figures = f"last {format_short(values[-1])}, {best}, mean of the last tenth {format_short(_average_last_tenth(values))}"
        step = int(line.points[-1][0])
        print_coloured([(mark, COLORS[number % len(COLORS)]), (f" {line.name}: {figures}; step {step}", "")])


def _average_last_tenth(values: Sequence[float]) -> float | None:
    return mean(values[-max(len(values) // 10, 1) :]) if values else None


def build_compare_parser() -> OptionParser:
    parser = OptionParser(
        "stoker compare",
        "Compares two runs: settings that differ, results side by side, and whether the difference is more than noise.",
        _COMPARE_EPILOG,
    )
    offer_run_names(parser.add_argument("first", metavar="A", help="id, name or path of a run"))
    offer_run_names(parser.add_argument("second", metavar="B", help="id, name or path of the run to compare it with"))
    parser.option("--metric", "NAME", "metric to compare (default: reward if both runs have one, else loss)")
    parser.runs_dir()
    parser.switch("--json", "print the comparison as JSON")
    return parser


def compare_main(argv: list[str]) -> int:
    args = build_compare_parser().parse_args(argv)
    root = layout.runs_root(args.runs_dir, os.environ)
    runs = [run_index.find_run(name, root) for name in (args.first, args.second)]
    if os.path.realpath(runs[0].dir) == os.path.realpath(runs[1].dir):
        line = f"{args.first} and {args.second} are the same run, {runs[0].id}; `stoker runs` lists the others"
        raise Refusal(escape(line), EX_USAGE)
    tails = [_read_tail(run) for run in runs]
    settings = find_differing_settings([settings_of(tail.training.record) for tail in tails])
    results = [_read_results(tail) for tail in tails]
    metric = args.metric or _choose_metric(tails)
    difference = measure_difference(tails[0].curve(metric), tails[1].curve(metric))
    at_equal_steps = _read_values_at_equal_steps(tails, metric)
    if args.json:
        print_json(
            {
                "schema": 1,
                "runs": [run.id for run in runs],
                "metric": metric,
                "at_equal_step": {
                    name: {"step": step, "values": values} for name, (step, values) in at_equal_steps.items()
                },
                "settings": {name: list(values) for name, values in settings},
                "results": [{name: value for name, (value, _) in result.items()} for result in results],
                "noise": as_json(difference) | {"beyond": difference.is_beyond_noise}
                if difference is not None
                else None,
            }
        )
        return 0
    columns = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else 120
    header = ("", *(escape(run.id, 60) for run in runs))
    rows = [(name, *(result[name][1] for result in results)) for name in results[0]]
    rows[_FIRST_ROWS:_FIRST_ROWS] = [
        (f"{RL_METRICS.get(name, name)}, both at step {step}", *(metric_text(name, value) for value in values))
        for name, (step, values) in at_equal_steps.items()
    ]
    _print_table([header, *(row for row in rows if set(row[1:]) != {"n/a"})], columns)
    print()
    if settings:
        print("settings that differ:")
        _print_table([(f"  {name}", *values) for name, values in settings[:_MAX_SETTINGS]], columns)
        if len(settings) > _MAX_SETTINGS:
            print(f"  and {len(settings) - _MAX_SETTINGS} more; --json lists them all")
    else:
        print("settings that differ: none")
    print()
    print_coloured([_judge_difference(difference, metric, [run.id for run in runs])])
    return 0


def _read_values_at_equal_steps(tails: Sequence[RunTail], metric: str) -> dict[str, tuple[int, list[float]]]:
    """Return, for each metric, the last step that both runs have logged and the two values at it.

    Runs of different lengths can be compared only at equal steps, since the longer one has trained more at its end.
    """
    values = {}
    for name in dict.fromkeys((metric, *RL_METRICS, LOSS, "val_loss")):
        at_step = find_last_common_step([tail.mean_curve(name) for tail in tails])
        if at_step is not None:
            values[name] = at_step
    return values


def _read_results(tail: RunTail) -> dict[str, tuple[Any, str]]:
    """Return the results of a run by name, each as the number and its text."""

    def finite_values(metric: str) -> list[float]:
        return [value for value in tail.curve(metric).values if value - value == 0]

    run = tail.view(tail.record.started, watched=True)
    lowest_val_loss = min(finite_values("val_loss"), default=None)
    tokens_per_s = _average_last_tenth(finite_values("tokens_per_s"))
    loss = _average_last_tenth(finite_values("loss"))
    peak_bytes = max(finite_values("peak_bytes"), default=None)
    mfu = _average_last_tenth(finite_values("mfu"))
    last = {name: run.rl_metrics.get(name) for name in RL_METRICS}
    reward = _average_last_tenth(finite_values(REWARD))
    return {
        "state": (run.state, run.state + (f" ({run.verdict.cause})" if run.verdict and run.state == "failed" else "")),
        "steps": (run.step, "n/a" if run.step is None else str(run.step)),
        "time": (run.seconds, format_duration(run.seconds) if run.seconds is not None else "n/a"),
        **{f"last {RL_METRICS[name]}": (value, metric_text(name, value)) for name, value in last.items()},
        "reward, mean of the last tenth": (reward, format_short(reward)),
        "last loss": (run.loss, format_short(run.loss)),
        "loss, mean of the last tenth": (loss, format_short(loss)),
        "lowest val_loss": (lowest_val_loss, format_short(lowest_val_loss)),
        "tokens/s": (tokens_per_s, format_short(tokens_per_s)),
        "MFU": (mfu, "n/a" if mfu is None else f"{mfu:.1%}"),
        "peak GPU memory": (peak_bytes, "n/a" if peak_bytes is None else format_bytes(peak_bytes)),
        "restarts": (run.restarted, str(run.restarted)),
    }


def _print_table(rows: list[tuple[str, ...]], columns: int) -> None:
    first, *widths = (max(len(row[column]) for row in rows) for column in range(len(rows[0])))
    if first + sum(widths) + 2 * len(widths) > columns:
        first = min(first, max(columns // 3, 8))
        max_width = max((columns - first - 4) // len(widths), 8)
        widths = [min(width, max_width) for width in widths]
    for row in rows:
        cells = [
            fit_width(row[0], first),
            *(fit_width(text, width) for text, width in zip(row[1:], widths, strict=True)),
        ]
        print("  ".join(cells).rstrip())


def _judge_difference(difference: Difference | None, metric: str, names: list[str]) -> tuple[str, str]:
    """Return a sentence that says whether the difference is more than noise, and its colour."""
    if difference is None:
        return f"{metric}: the runs have too few values at equal steps to judge the difference", "yellow"
    steps = f"steps {difference.first_step} to {difference.last_step}"
    means = f"{metric} over {steps}: {format_short(difference.first)} and {format_short(difference.second)}"
    if difference.low is None or difference.high is None:
        parts = f"only {difference.parts} of {PART_COUNT} parts have values of both runs"
        return f"{means}; too few values to judge the difference ({parts})", "yellow"
    interval = f"difference {difference.difference:+.4g}, 95 % interval {difference.low:+.4g} to {difference.high:+.4g}"
    if not difference.is_beyond_noise:
        return f"{means}; {interval}: within the noise", ""
    is_better = difference.difference > 0 if metric == REWARD else difference.difference < 0
    better, direction = escape(names[1] if is_better else names[0], 60), "higher" if metric == REWARD else "lower"
    caution = "noise of batches only: another seed may change a run by more"
    return f"{means}; {interval}: more than noise; {better} is {direction} ({caution})", "green"
