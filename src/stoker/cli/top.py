"""`stoker top [RUN] [--once|--json] [--hosts FILE] [--replay RUN]`: shows hosts, GPUs, ranks and the loss live."""

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

_MIN_INTERVAL_S = 0.25
_MAX_HOSTS_INTERVAL_S = 2.0  # other hosts are read at least this often, so that a silent one soon shows as OFFLINE
_TEXT_COLUMNS = 120  # width of --once without a terminal

_EPILOG = """  stoker top                           this machine and the runs in ./runs
  stoker top --hosts cluster.yaml      the hosts of a file, by ssh; nothing has to be installed there
  stoker top --replay RUN              a run from its beginning: space pauses, arrows seek, + and - change the speed
  stoker top --once                    print one view as text; --json: as data

Keys: q quits, arrows move, Tab goes to another panel, o and a letter sort, / filters, T stops your own run, h lists them all."""


def build_parser() -> OptionParser:
    parser = OptionParser("stoker top", "Shows hosts, GPUs, processes, ranks and the run's loss, live.", _EPILOG)
    parser.run_argument(default="the newest that is running")
    parser.option("--hosts", "HOSTS", "a hosts file, or a,b,c: these hosts instead of this machine")
    ssh = "an option for the ssh client, such as -oProxyJump=gate"
    parser.option("--ssh-option", "OPTION", ssh, action="append", default=[])
    parser.option("--replay", "RUN", "replay the record of this run: its id, name or path")
    parser.switch("--demo", "show a made-up cluster with a throttled GPU")
    interval = "time between two updates, at least 0.25s (default: 2s)"
    parser.option("--interval", "TIME", interval, parse_duration, default=2.0)
    parser.switch("--once", "print one view as text")
    parser.switch("--json", "print one snapshot as a JSON object")
    parser.switch("--all", "other users' runs in this folder, too (default: only yours)")
    parser.runs_dir()
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if args.interval < _MIN_INTERVAL_S:
        raise Refusal(f"--interval must be at least {_MIN_INTERVAL_S}s, got {args.interval:g}s", EX_USAGE)
    if sum(map(bool, (args.demo, args.replay, args.hosts))) > 1:
        raise Refusal("--demo, --replay and --hosts can't be combined", EX_USAGE)
    once = args.once or args.json
    if not once:
        streams = (sys.stdin, sys.stdout, sys.stderr)  # Textual draws on stderr
        if not all(stream is not None and stream.isatty() for stream in streams) or os.environ.get("TERM") == "dumb":
            line = "stoker top needs a terminal; `stoker top --once` prints one view, --json the data"
            raise Refusal(line, EX_UNAVAILABLE)
    source, view = _open_source(args)
    try:
        if not once:
            return _run_app(source, view)
        snapshot = source.take_single_snapshot((view.run,) if view.run else ())
    finally:
        source.close()
    if args.json:
        print_json(snapshot.to_json())
    else:
        width = shutil.get_terminal_size((_TEXT_COLUMNS, 24)).columns
        print(draw_text(snapshot, max(width, 20), view))
    return 0


def _open_source(args: argparse.Namespace) -> tuple[LiveSource | DemoSource | Player, View]:
    root = layout.runs_root(args.runs_dir, os.environ)
    if args.demo:
        return DemoSource(args.interval), View()
    if args.replay:
        run = run_index.find_run(args.replay, root)
        return Player(run, args.interval), View(run=run.id, replay=True)
    monitor = None
    if args.hosts:
        from stoker.control.cluster.host_monitor import HostMonitor
        from stoker.control.cluster.hosts import read_hosts_file

        hosts = read_hosts_file(args.hosts, tuple(args.ssh_option))
        monitor = HostMonitor(hosts, min(args.interval, _MAX_HOSTS_INTERVAL_S))
    run_id = ""
    if args.run:
        run = run_index.find_run(args.run, root)
        root, run_id = os.path.dirname(run.dir), run.id
    return LiveSource(root, args.interval, args.all, monitor), View(run=run_id)


def _run_app(source: LiveSource | DemoSource | Player, view: View) -> int:
    try:
        from stoker.control.show.top.app import TopApp
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] not in ("textual", "rich"):
            raise
        line = (
            "stoker top needs the package textual, which is not installed; pip install textual (--once works without)"
        )
        raise Refusal(line, EX_UNAVAILABLE) from None
    for name in ("COLUMNS", "LINES"):  # if exported, these would hide the terminal's size and its changes
        os.environ.pop(name, None)
    app = TopApp(source, view, stop_run)
    app.run()
    return app.return_code or 0
