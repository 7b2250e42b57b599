"""stoker runs [--filter WORD] [--sort COLUMN] [--limit N] [--json]"""

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
from stoker.control.show.charts import display_width, fit_width, metric_text, short
from stoker.control.show.collector import SnapshotCollector
from stoker.control.show.snapshot import REWARD, RL_METRICS, Metric, RunView, finite

_STATES = {"running": "cyan", "completed": "green", "failed": "red", "lost": "red", "stopped": "yellow"}
# Columns that go first where a line is too long.
_COMPANIONS = {name: title.upper() for name, title in RL_METRICS.items() if name != REWARD}  # of the reward
_SERVERS = {"SRV REQ/S": "requests_per_s", "SRV TOK/S": "tokens_per_s"}  # of a job's servers, or a server alone
_LEAST = (
    "CAUSE", "RANKS", "TRIES", "TIME", *reversed(_COMPANIONS.values()), *_SERVERS, "TOK/S", "DATE", "USER", "LOSS", "REWARD", "STEP",
)  # fmt: skip
_RIGHT = ("STEP", "REWARD", *_COMPANIONS.values(), *_SERVERS, "LOSS", "TOK/S", "RANKS", "TRIES", "TIME")
_SORTED: dict[str, Callable[[RunView], Any]] = {
    "date": lambda run: run.started,
    "name": lambda run: run.id,
    "state": lambda run: run.state,
    "step": lambda run: run.step,
    "loss": lambda run: finite(run.loss),
    "reward": lambda run: finite(_reward(run)),
    "tokens": lambda run: finite(run.tokens_per_s),
    "time": lambda run: run.seconds,
    "user": lambda run: run.user,
    "ranks": lambda run: run.world,
}
_EPILOG = f"""--filter takes a word that the run's id, name, state or cause holds, or COLUMN=VALUE (state=failed, user=ann, loss<2.5, step>1000); several must all match.
--sort takes {", ".join(_SORTED)}; with - in front the other way round (--sort=-loss).

  stoker runs --filter state=running
  stoker runs --sort loss --limit 5"""


def parser() -> OptionParser:
    made = OptionParser("stoker runs", "Lists the runs, newest last.", _EPILOG)
    made.runs_dir()
    made.switch("--all", "other users' runs in this folder, too (default: your own)")
    made.option("--filter", "WORD", "only runs that match; may be given several times", action="append", default=[])
    made.option("--sort", "COLUMN", "by this column, the largest last (default: date)", default="date")
    made.option("--limit", "N", "the last N of them", _count)
    made.switch("--json", "one JSON object with all of them")
    return made


def _count(text: str) -> int:
    if not is_digits(text) or not int(text):
        raise ValueError(f"{text!r} is not a number from 1 up")
    return int(text)


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    root = layout.runs_root(told.runs_dir, os.environ)
    fits, order = [_filter(word) for word in told.filter], _order(told.sort)
    runs, others, skipped = SnapshotCollector(root, told.all, machine=False).runs()
    if skipped:
        print_status(skipped)
    chosen = order([run for run in runs if all(one(run) for one in fits)])
    chosen = chosen[-told.limit :] if told.limit else chosen
    chains = list_speedruns(root) if not told.filter else []
    if told.json:
        rows = [_row(run) for run in chosen]
        made = [as_json(one) | {"runs_dir": one.runs_dir} for one in chains]
        print_json({"schema": 1, "runs": rows, "speedruns": made, "others_left_out": others})
        return 0
    left_out = plural(others, "folder")
    more = f"{left_out} of other users: `stoker runs --all`" if others else ""
    if others and told.all:
        more = f"{left_out} of other users can't be read"
    if chosen:
        _print_table(chosen, told.all)
    elif runs or not chains:
        none = f"none of {plural(len(runs), 'run')} matches" if runs else f"no runs in {escape(os.path.abspath(root))}"
        print(none + (f"; {more}" if more else ""))
        return 0
    for chain in chains:
        print_text(chain.line)
    if more:
        print(more)
    return 0


def _filter(word: str) -> Callable[[RunView], bool]:
    for sign in ("=", "<", ">"):
        name, found, value = word.partition(sign)
        if found:
            return _comparison(name.strip().lower(), sign, value.strip())
    wanted = word.lower()
    return lambda run: any(wanted in text.lower() for text in (run.id, run.name, run.state, _cause(run) or ""))


def _comparison(name: str, sign: str, value: str) -> Callable[[RunView], bool]:
    keys: dict[str, Callable[[RunView], Any]] = {**_SORTED, "cause": _cause}
    if name not in keys:
        line = f"--filter {name}{sign}{value}: no column {name!r}{suggest(name, keys)}; there is {', '.join(keys)}"
        raise Refusal(line, EX_USAGE)
    key = keys[name]
    if name in ("name", "state", "user", "cause"):
        if sign != "=":
            raise Refusal(f"--filter {name}{sign}{value}: {name} is a text; write {name}={value}", EX_USAGE)
        return lambda run: value.lower() in str(key(run) or "").lower()
    try:
        number = time.mktime(time.strptime(value, "%Y-%m-%d")) if name == "date" else float(value)
    except (ValueError, OverflowError):
        wanted = "a date like 2026-11-16" if name == "date" else "a number"
        raise Refusal(f"--filter {name}{sign}{value}: {value!r} is not {wanted}", EX_USAGE) from None

    def fits(run: RunView) -> bool:
        found = key(run)
        if found is None:
            return False
        if sign == "=":
            return number <= found < number + 86400 if name == "date" else bool(found == number)
        return bool(found < number if sign == "<" else found > number)

    return fits


def _order(word: str) -> Callable[[list[RunView]], list[RunView]]:
    name = word.removeprefix("-").lower()
    if name not in _SORTED:
        line = f"--sort {word}: no column {name!r}{suggest(name, _SORTED)}; there is {', '.join(_SORTED)}"
        raise Refusal(line, EX_USAGE)
    key = _SORTED[name]

    def ordered(runs: list[RunView]) -> list[RunView]:
        """Those without a value first, either way."""
        known = sorted((run for run in runs if key(run) is not None), key=key, reverse=word.startswith("-"))
        return [*(run for run in runs if key(run) is None), *known]

    return ordered


def _cause(run: RunView) -> str | None:
    return run.verdict.cause if run.verdict and run.verdict.status != "completed" else None


def _reward(run: RunView) -> Metric:
    return run.rl_metrics.get(REWARD)


def _companion(run: RunView, name: str) -> str:
    value = run.rl_metrics.get(name)
    return "" if value is None else metric_text(name, value)


def _of_servers(run: RunView, rate: str) -> str:
    known = [value for server in run.servers if (value := getattr(server, rate)) is not None]
    return short(sum(known)) if known else ""


def _cells(run: RunView, everybody: bool) -> dict[str, str]:
    of = f"/{run.total_steps}" if run.total_steps else ""
    step = f"{run.step}{of}" if run.step is not None else ""
    cells = {
        "RUN": escape(run.id, 200),
        "USER": escape(run.user, 12),
        "DATE": time.strftime("%m-%d %H:%M", time.localtime(run.started)) if run.started else "",
        "STATE": escape(run.state, 10),
        "STEP": step,
        "REWARD": short(reward) if (reward := _reward(run)) is not None else "",
        **{title: _companion(run, name) for name, title in _COMPANIONS.items()},
        "LOSS": short(run.loss) if run.loss is not None and reward is None else "",
        "TOK/S": short(run.tokens_per_s) if run.tokens_per_s is not None else "",
        **{title: _of_servers(run, rate) for title, rate in _SERVERS.items()},
        "RANKS": str(run.world),
        "TRIES": str(run.attempts),
        "TIME": format_duration(run.seconds) if run.seconds is not None else "",
        "CAUSE": escape(_cause(run) or "", 60),
    }
    return cells if everybody else {name: text for name, text in cells.items() if name != "USER"}


def _print_table(runs: list[RunView], everybody: bool) -> None:
    """As wide as the terminal: columns go, least needed first, and then the run's name is cut. In a pipe it is not cut."""
    rows = [_cells(run, everybody) for run in runs]
    terminal = sys.stdout.isatty()
    room = shutil.get_terminal_size((80, 24)).columns if terminal or os.environ.get("COLUMNS") else 0
    widths = {name: max(len(name), *(display_width(row[name]) for row in rows)) for name in rows[0]}
    widths = {name: width for name, width in widths.items() if any(row[name] for row in rows)}
    for name in _LEAST if room else ():
        if sum(widths.values()) + 2 * (len(widths) - 1) > room and len(widths) > 2:
            widths.pop(name, None)
    if room:
        over = sum(widths.values()) + 2 * (len(widths) - 1) - room
        widths["RUN"] = max(widths["RUN"] - max(over, 0), 4)
    header = {name: name for name in widths}
    for run, row in [(None, header), *zip(runs, rows, strict=True)]:
        pieces: list[tuple[str, str]] = []
        for name, width in widths.items():
            text = (
                row[name].rjust(width)
                if name in _RIGHT and display_width(row[name]) <= width
                else fit_width(row[name], width)
            )
            colour = _STATES.get(run.state, "") if run is not None and name == "STATE" else ""
            pieces += [(text, colour), ("  ", "")]
        while pieces and not pieces[-1][0].strip():
            pieces.pop()
        pieces[-1] = pieces[-1][0].rstrip(), pieces[-1][1]
        print_coloured(pieces)


def _row(run: RunView) -> dict[str, Any]:
    return {
        "run": run.id,
        "status": run.state,
        **pick_fields(run, "name"),
        "ranks": run.world,
        **pick_fields(run, "user", "started", "dir", "attempts"),
        "seconds": round(run.seconds, 3) if run.seconds is not None else None,
        "cause": _cause(run),
        "exit_code": run.verdict.exit_code if run.verdict else None,
        **pick_fields(run, "step", "total_steps", "loss"),
        "reward": _reward(run),
        **{name: run.rl_metrics.get(name) for name in _COMPANIONS},
        **pick_fields(run, "tokens_per_s", "mfu", "restarts", "updated"),
        "servers": [as_json(server) for server in run.servers],
    }
