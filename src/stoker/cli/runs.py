"""`stoker runs [--filter WORD] [--sort COLUMN] [--limit N]`: lists the runs of a folder."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import as_json, pick_fields
from stoker.contract.options import OptionParser, suggest
from stoker.contract.terminal import print_coloured, print_json, print_status, print_text
from stoker.contract.text import escape, is_digits
from stoker.contract.units import format_duration, plural
from stoker.control.record.run_index import list_speedruns
from stoker.control.show.charts import display_width, fit_width, format_short, metric_text
from stoker.control.show.collector import SnapshotCollector
from stoker.control.show.snapshot import REWARD, RL_METRICS, RunView, finite

_STATE_COLOURS = {"running": "cyan", "completed": "green", "failed": "red", "lost": "red", "stopped": "yellow"}
_RL_COLUMNS = {name: title.upper() for name, title in RL_METRICS.items() if name != REWARD}
_SERVER_COLUMNS = {"SRV REQ/S": "requests_per_s", "SRV TOK/S": "tokens_per_s"}  # of a job's servers, or a single server
# If a line is too long for the terminal, columns are dropped in this order.
_DROP_ORDER = (
    "CAUSE", "RANKS", "TRIES", "TIME", *reversed(_RL_COLUMNS.values()), *_SERVER_COLUMNS, "TOK/S", "DATE", "USER", "LOSS", "REWARD", "STEP",
)  # fmt: skip
_RIGHT_ALIGNED = ("STEP", "REWARD", *_RL_COLUMNS.values(), *_SERVER_COLUMNS, "LOSS", "TOK/S", "RANKS", "TRIES", "TIME")
_SORT_KEYS: dict[str, Callable[[RunView], Any]] = {
    "date": lambda run: run.started,
    "name": lambda run: run.id,
    "state": lambda run: run.state,
    "step": lambda run: run.step,
    "loss": lambda run: finite(run.loss),
    "reward": lambda run: finite(run.rl_metrics.get(REWARD)),
    "tokens": lambda run: finite(run.tokens_per_s),
    "time": lambda run: run.seconds,
    "user": lambda run: run.user,
    "ranks": lambda run: run.world,
}
_EPILOG = f"""--filter takes a part of the run's id, name, state or cause, or COLUMN=VALUE (state=failed, user=ann, loss<2.5, step>1000). A run must match all filters.
--sort takes {", ".join(_SORT_KEYS)}, with a - before it for the reverse order (--sort=-loss).

  stoker runs --filter state=running
  stoker runs --sort loss --limit 5"""


def build_parser() -> OptionParser:
    parser = OptionParser("stoker runs", "Lists the runs, newest last.", _EPILOG)
    parser.runs_dir()
    parser.switch("--all", "other users' runs in this folder, too (default: only yours)")
    parser.option("--filter", "WORD", "only runs that match; may be given several times", action="append", default=[])
    parser.option("--sort", "COLUMN", "sort by this column, the largest last (default: date)", default="date")
    parser.option("--limit", "N", "only the last N of them", _parse_limit)
    parser.switch("--json", "print one JSON object with all of them")
    return parser


def _parse_limit(text: str) -> int:
    if not is_digits(text) or not int(text):
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    root = layout.runs_root(args.runs_dir, os.environ)
    filters, sort = [_parse_filter(text) for text in args.filter], _parse_sort(args.sort)
    runs, others, skipped = SnapshotCollector(root, args.all, machine=False).runs()
    if skipped:
        print_status(skipped)
    chosen = sort([run for run in runs if all(matches(run) for matches in filters)])
    chosen = chosen[-args.limit :] if args.limit else chosen
    speedruns = list_speedruns(root) if not args.filter else []
    if args.json:
        print_json(
            {
                "schema": 1,
                "runs": [_run_to_json(run) for run in chosen],
                "speedruns": [as_json(speedrun) | {"runs_dir": speedrun.runs_dir} for speedrun in speedruns],
                "others_left_out": others,
            }
        )
        return 0
    left_out = plural(others, "folder")
    hint = f"{left_out} of other users: `stoker runs --all`" if others else ""
    if others and args.all:
        hint = f"{left_out} of other users can't be read"
    if chosen:
        _print_table(chosen, args.all)
    elif runs or not speedruns:
        line = (
            f"no run matches the filter ({plural(len(runs), 'run')} in all)"
            if runs
            else f"no runs in {escape(os.path.abspath(root))}"
        )
        print(line + (f"; {hint}" if hint else ""))
        return 0
    for speedrun in speedruns:
        print_text(speedrun.line)
    if hint:
        print(hint)
    return 0


def _parse_filter(text: str) -> Callable[[RunView], bool]:
    for sign in ("=", "<", ">"):
        name, separator, value = text.partition(sign)
        if separator:
            return _parse_comparison(name.strip().lower(), sign, value.strip())
    word = text.lower()
    return lambda run: any(word in field.lower() for field in (run.id, run.name, run.state, _cause_of(run) or ""))


def _parse_comparison(name: str, sign: str, value: str) -> Callable[[RunView], bool]:
    keys: dict[str, Callable[[RunView], Any]] = {**_SORT_KEYS, "cause": _cause_of}
    comparison = f"--filter {name}{sign}{value}"
    if name not in keys:
        raise Refusal(
            f"{comparison}: unknown column {name!r}{suggest(name, keys)}; the columns are {', '.join(keys)}", EX_USAGE
        )
    key = keys[name]
    if name in ("name", "state", "user", "cause"):
        if sign != "=":
            raise Refusal(f"{comparison}: {name} is text and can't be compared; write {name}={value}", EX_USAGE)
        return lambda run: value.lower() in str(key(run) or "").lower()
    try:
        number = time.mktime(time.strptime(value, "%Y-%m-%d")) if name == "date" else float(value)
    except (ValueError, OverflowError):
        expected = "a date like 2026-11-16" if name == "date" else "a number"
        raise Refusal(f"{comparison}: {value!r} is not {expected}", EX_USAGE) from None

    def matches(run: RunView) -> bool:
        actual = key(run)
        if actual is None:
            return False
        if sign == "=":
            return number <= actual < number + 86400 if name == "date" else bool(actual == number)
        return bool(actual < number if sign == "<" else actual > number)

    return matches


def _parse_sort(text: str) -> Callable[[list[RunView]], list[RunView]]:
    """Return the function that sorts runs as --sort asks. Runs without a value come first in either direction."""
    name = text.removeprefix("-").lower()
    if name not in _SORT_KEYS:
        line = f"--sort {text}: unknown column {name!r}{suggest(name, _SORT_KEYS)}; the columns are {', '.join(_SORT_KEYS)}"
        raise Refusal(line, EX_USAGE)
    key = _SORT_KEYS[name]

    def sort(runs: list[RunView]) -> list[RunView]:
        with_value = sorted((run for run in runs if key(run) is not None), key=key, reverse=text.startswith("-"))
        return [*(run for run in runs if key(run) is None), *with_value]

    return sort


def _cause_of(run: RunView) -> str | None:
    return run.verdict.cause if run.verdict and run.verdict.status != "completed" else None


def _format_metric(run: RunView, name: str) -> str:
    value = run.rl_metrics.get(name)
    return "" if value is None else metric_text(name, value)


def _format_server_total(run: RunView, rate: str) -> str:
    rates = [value for server in run.servers if (value := getattr(server, rate)) is not None]
    return format_short(sum(rates)) if rates else ""


def _make_row(run: RunView) -> dict[str, str]:
    """Return the cells of a run by column, with "" for values that it does not have."""
    total = f"/{run.total_steps}" if run.total_steps else ""
    reward = run.rl_metrics.get(REWARD)
    return {
        "RUN": escape(run.id, 200),
        "USER": escape(run.user, 12),
        "DATE": time.strftime("%m-%d %H:%M", time.localtime(run.started)) if run.started else "",
        "STATE": escape(run.state, 10),
        "STEP": f"{run.step}{total}" if run.step is not None else "",
        "REWARD": format_short(reward) if reward is not None else "",
        **{title: _format_metric(run, name) for name, title in _RL_COLUMNS.items()},
        "LOSS": format_short(run.loss) if run.loss is not None and reward is None else "",
        "TOK/S": format_short(run.tokens_per_s) if run.tokens_per_s is not None else "",
        **{title: _format_server_total(run, rate) for title, rate in _SERVER_COLUMNS.items()},
        "RANKS": str(run.world),
        "TRIES": str(run.attempts),
        "TIME": format_duration(run.seconds) if run.seconds is not None else "",
        "CAUSE": escape(_cause_of(run) or "", 60),
    }


def _print_table(runs: list[RunView], shows_users: bool) -> None:
    """Print the runs. On a narrow terminal, drop columns, then shorten the run's name; a pipe gets the full table."""
    rows = [_make_row(run) for run in runs]
    columns = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else 0
    widths = {
        name: max(len(name), *(display_width(row[name]) for row in rows))
        for name in rows[0]
        if any(row[name] for row in rows) and (shows_users or name != "USER")
    }
    if columns:
        for name in _DROP_ORDER:
            if sum(widths.values()) + 2 * (len(widths) - 1) > columns and len(widths) > 2:
                widths.pop(name, None)
        excess = sum(widths.values()) + 2 * (len(widths) - 1) - columns
        widths["RUN"] = max(widths["RUN"] - max(excess, 0), 4)
    header = {name: name for name in widths}
    for run, row in [(None, header), *zip(runs, rows, strict=True)]:
        pieces: list[tuple[str, str]] = []
        for name, width in widths.items():
            if name in _RIGHT_ALIGNED and display_width(row[name]) <= width:
                text = row[name].rjust(width)
            else:
                text = fit_width(row[name], width)
            colour = _STATE_COLOURS.get(run.state, "") if run is not None and name == "STATE" else ""
            pieces += [(text, colour), ("  ", "")]
        while pieces and not pieces[-1][0].strip():
            pieces.pop()
        pieces[-1] = pieces[-1][0].rstrip(), pieces[-1][1]
        print_coloured(pieces)


def _run_to_json(run: RunView) -> dict[str, Any]:
    return {
        "run": run.id,
        "status": run.state,
        **pick_fields(run, "name"),
        "ranks": run.world,
        **pick_fields(run, "user", "started", "dir", "attempts"),
        "seconds": round(run.seconds, 3) if run.seconds is not None else None,
        "cause": _cause_of(run),
        "exit_code": run.verdict.exit_code if run.verdict else None,
        **pick_fields(run, "step", "total_steps", "loss"),
        "reward": run.rl_metrics.get(REWARD),
        **{name: run.rl_metrics.get(name) for name in _RL_COLUMNS},
        **pick_fields(run, "tokens_per_s", "mfu", "restarts", "updated"),
        "servers": [as_json(server) for server in run.servers],
    }
