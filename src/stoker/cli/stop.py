"""stoker stop [RUN] [--now]"""

from __future__ import annotations

import os
import time

from stoker.contract import layout
from stoker.contract.quantities import duration
from stoker.contract.settings import Parser
from stoker.control.launch.stopping import ask_to_stop
from stoker.control.record import reader


def parser() -> Parser:
    made = Parser(prog="stoker stop", description="Ends a run. Gracefully: the ranks get SIGTERM and their grace to save.")
    made.add_argument("run", nargs="?", metavar="RUN", help="id, name or path of a run (default: the newest)")
    made.add_argument("--now", action="store_true", help="without grace")
    made.add_argument("--wait", type=duration, default=60.0, metavar="TIME", help="wait for its end at most this long (default: 60s)")
    made.add_argument("--runs-dir", metavar="DIR", help="folder of the run directories (default: $STOKER_RUNS, else ./runs)")
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    run = reader.find(told.run, layout.runs_root(told.runs_dir, os.environ), exact=True)
    if reader.status(run) not in ("running", "unknown"):
        print(f"run {run.id} is not running: {reader.status(run)}")
        return 0
    ask_to_stop(run, now=told.now)
    deadline = time.monotonic() + told.wait
    while reader.alive(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    if reader.alive(run):
        print(f"run {run.id} is still stopping; `stoker stop --now {run.id}` ends it at once")
        return 75
    print(f"run {run.id} is stopped")
    return 0
