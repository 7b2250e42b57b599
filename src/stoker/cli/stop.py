"""`stoker stop [RUN] [--now]` and `stoker detach [RUN]`: send a signal to the launcher of a run."""

from __future__ import annotations

import os
import shlex
import signal
import time

from stoker.contract import layout
from stoker.contract.env_vars import DETACH_SIGNAL, STOP_NOW_SIGNAL
from stoker.contract.errors import Refusal
from stoker.contract.options import OptionParser
from stoker.contract.terminal import print_status, print_text
from stoker.contract.text import escape
from stoker.contract.units import parse_duration
from stoker.control.launch.signals import signal_launcher
from stoker.control.record import run_index, run_record


def build_parser() -> OptionParser:
    parser = OptionParser("stoker stop", "Stops a run: its ranks get SIGTERM, and time to save (--grace of the run).")
    parser.run_argument(default="the newest that is running")
    parser.switch("--now", "stop it without time to save")
    parser.option(
        "--wait", "TIME", "wait at most this long for it to stop (default: 60s)", parse_duration, default=60.0
    )
    parser.runs_dir()
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    root = layout.runs_root(args.runs_dir, os.environ)
    run = run_index.find_run(args.run, root, exact=True) if args.run else _find_newest_running(root)
    status = run_record.run_status(run)
    if run.mine and status not in ("running", "unknown"):
        line = f"run {run.id} is not running" if args.run else f"no run in {root} is running; the newest is {run.id}"
        print(escape(f"{line}: {status}"))
        return 0
    signal_launcher(run, STOP_NOW_SIGNAL if args.now else signal.SIGTERM)
    deadline = time.monotonic() + args.wait
    while run_record.is_alive(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    if run_record.is_alive(run):
        print_text(f"run {run.id} is still stopping; `stoker stop --now {shlex.quote(run.id)}` stops it immediately")
        return 75
    print(f"run {run.id} is stopped")
    return 0


def _find_newest_running(root: str) -> run_record.RunRecord:
    """Return the newest run that is running here, else the newest on another host that may be running, else the newest."""
    listing = run_index.list_runs(root)
    runs = [(run_record.run_status(run), run) for run in reversed(listing.runs)]
    newest = next((run for state in ("running", "unknown") for status, run in runs if status == state), None)
    if newest is None:
        return run_index.find_run(None, root)
    if listing.skipped:
        print_status(listing.skipped)
    return newest


def stop_run(run_dir: str) -> str:
    """Stop a run for a viewer, without waiting until it has stopped. Return a line that describes what was done."""
    try:
        run = run_record.read_run(run_dir)
        if run is None:
            return "this run no longer exists"
        signal_launcher(run, signal.SIGTERM)
    except (Refusal, run_record.DamagedRecord) as problem:
        return problem.line if isinstance(problem, Refusal) else escape(str(problem))
    return f"stopping run {escape(run.id)}: its ranks get SIGTERM, and time to save"


def build_detach_parser() -> OptionParser:
    parser = OptionParser(
        "stoker detach", "Keeps a run going when its terminal closes. Ctrl-C in that terminal still stops the run."
    )
    parser.run_argument()
    parser.runs_dir()
    return parser


def detach_main(argv: list[str]) -> int:
    args = build_detach_parser().parse_args(argv)
    run = run_index.find_run(args.run, layout.runs_root(args.runs_dir, os.environ), exact=True)
    status = run_record.run_status(run)
    if status not in ("running", "unknown"):
        print(f"run {escape(run.id)} is not running: {status}")
        return 0
    signal_launcher(run, DETACH_SIGNAL)
    name = shlex.quote(run.id)
    hint = f"`stoker attach {name}` follows it, `stoker stop {name}` stops it"
    print_text(f"run {run.id} continues when its terminal closes; {hint}")
    return 0
