"""stoker detach [RUN]"""

from __future__ import annotations

import os
import shlex

from stoker.contract import layout
from stoker.contract.names import DETACH_SIGNAL
from stoker.contract.settings import Parser
from stoker.contract.terminal import tell
from stoker.contract.text import printable
from stoker.control.launch.signals import tell_launcher
from stoker.control.record import finder, reader


def parser() -> Parser:
    made = Parser(
        "stoker detach", "Lets a run continue when its terminal closes. Ctrl-C in that terminal still stops it."
    )
    made.run_argument()
    made.runs_dir()
    return made


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    run = finder.find(options.run, layout.runs_root(options.runs_dir, os.environ), exact=True)
    if reader.status(run) not in ("running", "unknown"):
        print(f"run {printable(run.id)} is not running: {reader.status(run)}")
        return 0
    tell_launcher(run, DETACH_SIGNAL)
    name = shlex.quote(run.id)
    how = f"`stoker attach {name}` follows it, `stoker stop {name}` stops it"
    tell(f"run {run.id} continues when its terminal closes; {how}")
    return 0
