"""stoker stop [RUN] [--now]"""

from __future__ import annotations

import os
import shlex
import signal
import time

from stoker.contract import layout
from stoker.contract.env_vars import STOP_NOW_SIGNAL
from stoker.contract.errors import Refusal
from stoker.contract.options import OptionParser
from stoker.contract.terminal import print_status, print_text
from stoker.contract.text import escape
from stoker.contract.units import parse_duration
from stoker.control.launch.signals import signal_launcher
from stoker.control.record import run_index, run_record


def parser() -> OptionParser:
    made = OptionParser("stoker stop", "Ends a run. Gracefully: the ranks get SIGTERM and their grace to save.")
    made.run_argument(default="the newest that is running")
    made.switch("--now", "without grace")
    made.option("--wait", "TIME", "wait for its end at most this long (default: 60s)", parse_duration, default=60.0)
    made.runs_dir()
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    root = layout.runs_root(told.runs_dir, os.environ)
    run = run_index.find_run(told.run, root, exact=True) if told.run else _newest(root)
    status = run_record.run_status(run)
    if run.mine and status not in ("running", "unknown"):
        which = f"run {run.id} is not running" if told.run else f"no run in {root} is running; the newest, {run.id}"
        print(escape(f"{which}: {status}"))
        return 0
    signal_launcher(run, STOP_NOW_SIGNAL if told.now else signal.SIGTERM)
    deadline = time.monotonic() + told.wait
    while run_record.is_alive(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    if run_record.is_alive(run):
        print_text(f"run {run.id} is still stopping; `stoker stop --now {shlex.quote(run.id)}` ends it at once")
        return 75
    print(f"run {run.id} is stopped")
    return 0


def _newest(root: str) -> run_record.RunRecord:
    """One that runs here before one on another host, which may not run any more; else the newest of all."""
    listing = run_index.list_runs(root)
    runs = [(run_record.run_status(run), run) for run in reversed(listing.runs)]
    found = next((run for wanted in ("running", "unknown") for status, run in runs if status == wanted), None)
    if found is None:
        return run_index.find_run(None, root)
    if listing.skipped:
        print_status(listing.skipped)
    return found


def stop_run(run_dir: str) -> str:
    """As `stoker stop` does, without waiting for the end: a viewer shows it. One line says what was done."""
    try:
        run = run_record.read_run(run_dir)
        if run is None:
            return "this run is gone"
        signal_launcher(run, signal.SIGTERM)
    except (Refusal, run_record.Damaged) as problem:
        return problem.line if isinstance(problem, Refusal) else escape(str(problem))
    return f"stopping run {escape(run.id)}: its ranks get SIGTERM and their grace to save"
