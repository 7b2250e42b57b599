"""stoker runs [--runs-dir DIR] [--json]"""

from __future__ import annotations

import os
import time
from typing import Any

from stoker.contract import layout
from stoker.contract.names import Refusal
from stoker.contract.quantities import counted, span
from stoker.contract.settings import Parser
from stoker.contract.shape import pick
from stoker.contract.terminal import say
from stoker.contract.untrusted import json_text, printable
from stoker.control.record import reader


def parser() -> Parser:
    made = Parser("stoker runs", "Lists the runs, newest last.")
    made.runs_dir()
    made.switch("--all", "other users' runs in this folder, too (default: your own)")
    made.switch("--json", "one JSON object with all of them")
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    root = layout.runs_root(told.runs_dir, os.environ)
    listing = reader.look(root, everybody=told.all)
    rows = [row for run in listing.runs if (row := _row_or_why_not(run)) is not None]
    if listing.skipped:
        say(listing.skipped)
    if told.json:
        print(json_text({"schema": 1, "runs": rows, "others_left_out": listing.others}))
        return 0
    left_out = counted(listing.others, "folder")
    more = f"{left_out} of other users: `stoker runs --all`" if listing.others else ""
    if listing.others and told.all:
        more = f"{left_out} of other users left out: very many runs, very large records, or not readable"
    if not rows:
        print(f"no runs in {printable(root)}" + (f"; {more}" if more else ""))
        return 0
    users = f" {'USER':<12}" if told.all else ""
    print(f"{'RUN':<36}{users} {'STATUS':<10} {'RANKS':>5} {'TRIES':>5} {'TIME':>12}  CAUSE")
    for row in rows:
        took = span(row["seconds"]) if row["seconds"] is not None else ""
        user = f" {printable(row['user'], 12):<12}" if told.all else ""
        status, cause = printable(row["status"], 10), printable(row["cause"] or "", 60)
        numbers = f"{row['ranks']:>5} {row['attempts']:>5} {took:>12}"
        print(f"{printable(row['run'], 200):<36}{user} {status:<10} {numbers}  {cause}")
    if more:
        print(more)
    return 0


def _seconds(run: reader.Run, running: bool) -> float | None:
    """All starts of the run together, without the time between them. A start begins with the event "run"."""
    if not run.mine:  # no record of another user's is read from end to end
        last = reader.last_time(run.dir)
        return max(0.0, last - run.started) if last is not None and run.started else None
    starts: list[list[float]] = []
    for event in reader.events(run.dir):
        when = float(event["time"])
        if event["event"] == "run" or not starts:
            starts.append([when, when])
        starts[-1][1] = when
    if not starts:
        return time.time() - run.started if running and run.started else None
    if running:
        starts[-1][1] = time.time()
    return sum(end - begin for begin, end in starts)


def _row_or_why_not(run: reader.Run) -> dict[str, Any] | None:
    """Another user's record blocks nobody."""
    try:
        with reader.of_others(run):
            return _row(run)
    except Refusal as problem:
        say(problem.line)
        return None


def _row(run: reader.Run) -> dict[str, Any]:
    status = reader.status(run)
    seconds = _seconds(run, status == "running")
    return {
        "run": run.id,
        "status": status,
        **pick(run, "name", "ranks", "user", "started", "dir"),
        "attempts": len(run.attempts),
        "seconds": round(seconds, 3) if seconds is not None else None,
        "cause": run.verdict.cause if run.verdict and run.verdict.status not in ("completed",) else None,
        "exit_code": run.verdict.exit_code if run.verdict else None,
    }
