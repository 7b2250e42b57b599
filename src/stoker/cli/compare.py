"""stoker compare A B"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from stoker.cli.plot import headline_of, watched
from stoker.contract import layout
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import as_json
from stoker.contract.options import OptionParser, completes_run_names
from stoker.contract.terminal import print_coloured, print_json
from stoker.contract.text import escape
from stoker.contract.units import format_bytes, format_duration
from stoker.control.record import run_index
from stoker.control.show.charts import fit_width, mean, metric_text, short
from stoker.control.show.comparison import (
    PART,
    PARTS,
    Difference,
    at_equal_step,
    differing_settings,
    measure_difference,
    settings_of,
)
from stoker.control.show.curves import Curve
from stoker.control.show.run_tail import RunTail
from stoker.control.show.snapshot import LOSS, REWARD, RL_METRICS

_EPILOG = (
    f"How noise is judged: the last {PART:.0%} of the steps both runs have made is cut into {PARTS} parts; each part gives the"
    f" difference of the two means, and {PARTS} differences give a 95 % t interval. A difference is called more than noise if"
    " 0 is outside of it.\n\nThat is the noise of batches within these two runs. Another seed moves a run, too: only runs with"
    " several seeds show by how much."
)
_SHOWN = 60  # settings that differ
_FIRST_ROWS = 3  # state, steps and time come before the values at equal steps


def parser() -> OptionParser:
    made = OptionParser(
        "stoker compare",
        "Two runs: settings that differ, results side by side, and whether the difference is more than noise.",
        _EPILOG,
    )
    completes_run_names(made.add_argument("first", metavar="A", help="id, name or path of a run"))
    completes_run_names(made.add_argument("second", metavar="B", help="id, name or path of the run to compare it with"))
    made.option("--metric", "NAME", "what is compared (default: reward if both runs have one, else loss)")
    made.runs_dir()
    made.switch("--json", "the comparison as JSON")
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    root = layout.runs_root(told.runs_dir, os.environ)
    records = [run_index.find_run(which, root) for which in (told.first, told.second)]
    if os.path.realpath(records[0].dir) == os.path.realpath(records[1].dir):
        line = f"{told.first} and {told.second} are one run, {records[0].id}: name two; `stoker runs` lists them"
        raise Refusal(escape(line), EX_USAGE)
    folders = [watched(record) for record in records]
    settings = differing_settings([settings_of(folder.training.record) for folder in folders])
    results = [_results(folder) for folder in folders]
    metric = told.metric or headline_of(folders)
    judged = measure_difference(folders[0].curve(metric), folders[1].curve(metric))
    equal = _at_equal_steps(folders, metric)
    if told.json:
        names = [folder.record.id for folder in folders]
        made = {
            "schema": 1,
            "runs": names,
            "metric": metric,
            "at_equal_step": {name: {"step": step, "values": values} for name, (step, values) in equal.items()},
            "settings": {name: list(values) for name, values in settings},
            "results": [{name: value for name, (value, _) in one.items()} for one in results],
            "noise": as_json(judged) | {"beyond": judged.beyond} if judged is not None else None,
        }
        print_json(made)
        return 0
    columns = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else 120
    heads = ("", *(escape(folder.record.id, 60) for folder in folders))
    rows = [(name, *(one[name][1] for one in results)) for name in results[0]]
    at_equal = [
        (f"{RL_METRICS.get(name, name)}, both at step {step}", *(metric_text(name, one) for one in values))
        for name, (step, values) in equal.items()
    ]
    rows[_FIRST_ROWS:_FIRST_ROWS] = at_equal
    _table([heads, *(row for row in rows if set(row[1:]) != {"n/a"})], columns)
    print()
    if settings:
        print("settings that differ:")
        _table([(f"  {name}", *values) for name, values in settings[:_SHOWN]], columns)
        if len(settings) > _SHOWN:
            print(f"  and {len(settings) - _SHOWN} more: --json has them")
    else:
        print("settings that differ: none")
    print()
    for line, colour in _judgement(judged, metric, [folder.record.id for folder in folders]):
        print_coloured([(line, colour)])
    return 0


def _at_equal_steps(folders: Sequence[RunTail], metric: str) -> dict[str, tuple[int, list[float]]]:
    """Return for each metric the last step that both runs have logged and the two values there.

    Runs of different length are at different points at their ends: only equal steps compare them.
    """
    found = {}
    for name in dict.fromkeys((metric, *RL_METRICS, LOSS, "val_loss")):
        equal = at_equal_step([folder.mean_curve(name) for folder in folders])
        if equal is not None:
            found[name] = equal
    return found


def _results(folder: RunTail) -> dict[str, tuple[Any, str]]:
    """Name -> (number, as it is shown)."""
    run = folder.view(folder.record.started, watched=True)
    lowest = _lowest(folder.curve("val_loss"))
    fast = _tail(folder.curve("tokens_per_s"))
    loss = _tail(folder.curve("loss"))
    memory = _lowest(folder.curve("peak_bytes"), most=True)
    mfu = _tail(folder.curve("mfu"))
    newest = {name: run.rl_metrics.get(name) for name in RL_METRICS}
    reward = _tail(folder.curve(REWARD))
    return {
        "state": (run.state, run.state + (f" ({run.verdict.cause})" if run.verdict and run.state == "failed" else "")),
        "steps": (run.step, "n/a" if run.step is None else str(run.step)),
        "time": (run.seconds, format_duration(run.seconds) if run.seconds is not None else "n/a"),
        **{f"last {RL_METRICS[name]}": (value, metric_text(name, value)) for name, value in newest.items()},
        "reward, mean of the last tenth": (reward, short(reward)),
        "last loss": (run.loss, short(run.loss)),
        "loss, mean of the last tenth": (loss, short(loss)),
        "lowest val_loss": (lowest, short(lowest)),
        "tokens/s": (fast, short(fast)),
        "MFU": (mfu, "n/a" if mfu is None else f"{mfu:.1%}"),
        "peak GPU memory": (memory, "n/a" if memory is None else format_bytes(memory)),
        "restarts": (run.restarted, str(run.restarted)),
    }


def _finite(curve: Curve) -> list[float]:
    return [value for value in curve.values if value - value == 0]


def _tail(curve: Curve) -> float | None:
    values = _finite(curve)
    return mean(values[-max(len(values) // 10, 1) :]) if values else None


def _lowest(curve: Curve, most: bool = False) -> float | None:
    values = _finite(curve)
    if not values:
        return None
    return max(values) if most else min(values)


def _table(rows: list[tuple[str, ...]], columns: int) -> None:
    first, *widths = (max(len(row[at]) for row in rows) for at in range(len(rows[0])))
    if first + sum(widths) + 2 * len(widths) > columns:
        first = min(first, max(columns // 3, 8))
        room = max((columns - first - 4) // len(widths), 8)
        widths = [min(width, room) for width in widths]
    for row in rows:
        cells = [
            fit_width(row[0], first),
            *(fit_width(text, width) for text, width in zip(row[1:], widths, strict=True)),
        ]
        print("  ".join(cells).rstrip())


def _judgement(judged: Difference | None, metric: str, names: list[str]) -> list[tuple[str, str]]:
    if judged is None:
        return [(f"{metric}: too few values at equal steps to judge the difference", "yellow")]
    where = f"steps {judged.first_step} to {judged.last_step}"
    means = f"{metric} over {where}: {short(judged.first)} and {short(judged.second)}"
    if judged.low is None or judged.high is None:
        return [
            (f"{means}; too few points there to judge ({judged.parts} of {PARTS} parts have some of both)", "yellow")
        ]
    interval = f"difference {judged.difference:+.4g}, 95 % interval {judged.low:+.4g} to {judged.high:+.4g}"
    if not judged.beyond:
        return [(f"{means}; {interval}: within the noise", "")]
    is_better = judged.difference > 0 if metric == REWARD else judged.difference < 0
    better, word = escape(names[1] if is_better else names[0], 60), "higher" if metric == REWARD else "lower"
    caution = "noise of batches only: another seed may move a run by more"
    return [(f"{means}; {interval}: more than noise; {better} is {word} ({caution})", "green")]
