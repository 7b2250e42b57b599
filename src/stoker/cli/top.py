"""stoker top [RUN] [--once|--json] [--hosts FILE] [--replay RUN] [--demo]"""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from stoker.cli.stop import stop_run
from stoker.contract import layout
from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.options import OptionParser
from stoker.contract.terminal import print_json
from stoker.contract.units import parse_duration
from stoker.control.record import run_index
from stoker.control.show.top.frame import draw_text
from stoker.control.show.top.replay import Player
from stoker.control.show.top.sources import DemoSource, LiveSource
from stoker.control.show.top.view import View

_LEAST_S = 0.25
_HOSTS_S = 2.0  # between two readings of another host, at most: one that is silent for longer is OFFLINE
_TEXT_COLUMNS = 120  # of --once where there is no terminal

_USE = """  stoker top                           this machine and the runs in ./runs
  stoker top --hosts cluster.yaml      the hosts of a file, by ssh; nothing has to be installed there
  stoker top --replay RUN              a run from its beginning: space holds it, arrows seek, + and - change the speed
  stoker top --once                    one picture as text; --json: as data

Keys: q quit, arrows move, Tab goes to another panel, o and a letter sort, / filters, T stops your own run, h shows them all."""


def parser() -> OptionParser:
    made = OptionParser("stoker top", "Hosts, GPUs, processes, ranks and the run's loss, live.", _USE)
    made.run_argument(default="the newest that is running")
    made.option("--hosts", "HOSTS", "a hosts file, or a,b,c: these hosts instead of this machine")
    made.option("--ssh-option", "OPTION", "for the ssh client, such as -oProxyJump=gate", action="append", default=[])
    made.option("--replay", "RUN", "play what this run recorded: its id, name or path")
    made.switch("--demo", "a made-up cluster with a throttled GPU")
    made.option("--interval", "TIME", "between two looks, at least 0.25s (default: 2s)", parse_duration, default=2.0)
    made.switch("--once", "print one picture as text")
    made.switch("--json", "print one snapshot as a JSON object")
    made.switch("--all", "other users' runs in this folder, too")
    made.runs_dir()
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    if told.interval < _LEAST_S:
        raise Refusal(f"--interval {told.interval:g}s is too short: at least {_LEAST_S}s", EX_USAGE)
    if sum(map(bool, (told.demo, told.replay, told.hosts))) > 1:
        raise Refusal("--demo, --replay and --hosts exclude each other", EX_USAGE)
    once = told.once or told.json
    if not once:
        _needs_terminal()
    source, view = _source(told)
    try:
        if not once:
            return _show(source, view)
        snapshot = source.look_once((view.run,) if view.run else ())
    finally:
        source.close()
    if told.json:
        print_json(snapshot.to_json())
    else:
        width = shutil.get_terminal_size((_TEXT_COLUMNS, 24)).columns
        print(draw_text(snapshot, max(width, 20), view))
    return 0


def _needs_terminal() -> None:
    streams = (sys.stdin, sys.stdout, sys.stderr)  # Textual draws on stderr
    if not all(stream is not None and stream.isatty() for stream in streams) or os.environ.get("TERM") == "dumb":
        raise Refusal("no terminal to draw on: `stoker top --once` prints one picture, --json the data", EX_UNAVAILABLE)


def _source(told: argparse.Namespace) -> tuple[LiveSource | DemoSource | Player, View]:
    root = layout.runs_root(told.runs_dir, os.environ)
    if told.demo:
        return DemoSource(told.interval), View()
    if told.replay:
        run = run_index.find_run(told.replay, root)
        return Player(run, told.interval), View(run=run.id, replay=True)
    elsewhere = None
    if told.hosts:
        from stoker.control.cluster.host_monitor import HostMonitor
        from stoker.control.cluster.hosts import read_hosts_file

        elsewhere = HostMonitor(read_hosts_file(told.hosts, tuple(told.ssh_option)), min(told.interval, _HOSTS_S))
    chosen = ""
    if told.run:
        run = run_index.find_run(told.run, root)
        root, chosen = os.path.dirname(run.dir), run.id
    return LiveSource(root, told.interval, told.all, elsewhere), View(run=chosen)


def _show(source: LiveSource | DemoSource | Player, view: View) -> int:
    try:
        from stoker.control.show.top.app import TopApp
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] not in ("textual", "rich"):
            raise
        line = "no package textual, which draws the screen; pip install textual (`stoker top --once` works without)"
        raise Refusal(line, EX_UNAVAILABLE) from None
    for name in (
        "COLUMNS",
        "LINES",
    ):  # where they are exported they hide the terminal's own size, and every change of it
        os.environ.pop(name, None)
    app = TopApp(source, view, stop_run)
    app.run()
    return app.return_code or 0
