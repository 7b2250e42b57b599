"""stoker detach [RUN]"""

from __future__ import annotations

import os
import shlex

from stoker.contract import layout
from stoker.contract.env_vars import DETACH_SIGNAL
from stoker.contract.options import OptionParser
from stoker.contract.terminal import print_text
from stoker.contract.text import escape
from stoker.control.launch.signals import signal_launcher
from stoker.control.record import run_index, run_record


def parser() -> OptionParser:
    made = OptionParser(
        "stoker detach", "Lets a run continue when its terminal closes. Ctrl-C in that terminal still stops it."
    )
    made.run_argument()
    made.runs_dir()
    return made


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    run = run_index.find_run(options.run, layout.runs_root(options.runs_dir, os.environ), exact=True)
    if run_record.run_status(run) not in ("running", "unknown"):
        print(f"run {escape(run.id)} is not running: {run_record.run_status(run)}")
        return 0
    signal_launcher(run, DETACH_SIGNAL)
    name = shlex.quote(run.id)
    how = f"`stoker attach {name}` follows it, `stoker stop {name}` stops it"
    print_text(f"run {run.id} continues when its terminal closes; {how}")
    return 0
