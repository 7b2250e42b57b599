"""`stoker web [RUN] [--port N]` serves a live page of the runs; `stoker web --save [RUN] FILE` writes one run as a file."""

from __future__ import annotations

import argparse
import getpass
import os
import signal
import socket
import sys

from stoker.contract import layout
from stoker.contract.errors import EX_CANTCREAT, EX_USAGE, Refusal
from stoker.contract.options import OptionParser, check_port
from stoker.contract.terminal import print_secret, print_status, print_text
from stoker.contract.text import escape
from stoker.contract.units import format_bytes, parse_duration
from stoker.control.record import run_index

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.host_monitor import HostMonitor
    from stoker.control.show.snapshot import Snapshot

PORT = 9910
_MIN_INTERVAL_S = 0.25
_MAX_HOSTS_INTERVAL_S = 2.0  # other hosts are read at least this often
_MAX_ERRORS = 20  # different errors to print, so that a broken page does not flood the terminal
_EXAMPLES = """examples:
  stoker web                          a page with the runs in ./runs and this machine's GPUs; prints its address
  stoker web --hosts cluster.yaml     the hosts of a file, by ssh; nothing has to be installed there
  stoker web --save exp1 exp1.html    a finished run as one file that any browser opens

Only this machine can open the page; from another one use the `ssh -L` command that is printed. `stoker docs show` has more."""


def build_parser() -> OptionParser:
    parser = OptionParser(
        "stoker web",
        "Shows runs, curves, ranks, GPUs and logs as a live page in the browser, until Ctrl-C.",
        _EXAMPLES,
        usage="stoker web [RUN] [options]",
    )
    parser.run_argument("the run to open first", default="the list of runs")
    parser.option("--port", "N", f"port to listen on (default: {PORT}; 0: a free one)", int, default=PORT)
    host = "address to listen on (default: 127.0.0.1, this machine only)"
    parser.option("--host", "ADDRESS", host, default="127.0.0.1")
    hosts = "these hosts instead of this machine: a hosts file, or a,b,c reached by ssh"
    parser.option("--hosts", "FILE|A,B", hosts)
    ssh = "an option for the ssh client: --ssh-option=-p2222"
    parser.option("--ssh-option", "OPT", ssh, action="append", default=[])
    interval = "how often to update while a page is open (default: 2s)"
    parser.option("--interval", "TIME", interval, parse_duration, default=2.0)
    save = "write a run (default: the newest) as one HTML file, and exit"
    parser.add_argument("--save", nargs="+", metavar="[RUN] FILE", help=save)
    parser.switch("--all", "other users' runs in the folder, too (default: only yours)")
    parser.runs_dir()
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    check_port(args.port)
    if args.interval < _MIN_INTERVAL_S:
        raise Refusal(f"--interval must be at least {_MIN_INTERVAL_S}s, got {args.interval:g}s", EX_USAGE)
    root = os.path.abspath(layout.runs_root(args.runs_dir, os.environ))
    if args.save:
        *names, path = args.save
        if len(names) + bool(args.run) > 1:
            raise Refusal("--save takes one run and one file; type stoker web --save [RUN] FILE", EX_USAGE)
        return _save(root, names[0] if names else args.run, path)
    return _serve(args, root)


def _save(root: str, name: str | None, path: str) -> int:
    from stoker.cli.why import explain_run
    from stoker.contract.safe_io import refuse_other_kind, write_atomic
    from stoker.control.show.web.pages import render_saved_page

    refuse_other_kind(path, b"<!doctype html", "an HTML page")
    run = run_index.find_run(name, root)
    if name is None:
        print_status(f"the newest run: {escape(run.id)}")
    page = render_saved_page(run, explain_run)
    try:
        write_atomic(path, page)
    except OSError as problem:
        raise Refusal(f"{escape(path)} can't be written: {problem.strerror}", EX_CANTCREAT) from problem
    print(f"wrote {escape(path)} ({format_bytes(len(page))})")
    return 0


def _serve(args: argparse.Namespace, root: str) -> int:
    from stoker.cli.stop import stop_run
    from stoker.cli.why import explain_run
    from stoker.control.show import http_server
    from stoker.control.show.collector import SnapshotCollector
    from stoker.control.show.web.access import AccessGuard
    from stoker.control.show.web.event_stream import EventHub
    from stoker.control.show.web.pages import Pages
    from stoker.control.show.web.run_files import RunFolders

    run_id = ""
    if args.run:
        run = run_index.find_run(args.run, root)
        root, run_id = os.path.dirname(run.dir), run.id
    monitor: HostMonitor | None = None
    if args.hosts:
        from stoker.control.cluster.host_monitor import HostMonitor
        from stoker.control.cluster.hosts import read_hosts_file

        hosts = read_hosts_file(args.hosts, tuple(args.ssh_option))
    listening = http_server.listen(args.host, args.port)
    if args.hosts:  # after listening, so that a port in use is refused before hosts are contacted
        monitor = HostMonitor(hosts, min(args.interval, _MAX_HOSTS_INTERVAL_S))
    # Don't read whole curves: the list shows only their newest values, and a run's page fetches its curves.
    snapshots = SnapshotCollector(root, everybody=args.all, machine=monitor is None, whole_curves=False)

    def take_snapshot(watched: tuple[str, ...]) -> Snapshot:
        return snapshots.snapshot(watched, monitor.readings() if monitor is not None else ())

    guard, hub = AccessGuard(listening, run_id), EventHub(take_snapshot, args.interval)
    pages = Pages(guard, hub, RunFolders(root, args.all), stop_run, explain_run)
    signals: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda number, _frame: signals.append(number))
    hub.start()
    _print_address(listening, guard.token, http_server.server_url(listening, "/"), http_server.is_loopback(listening))
    printed: set[str] = set()

    def print_error(problem: Exception) -> None:
        line = f"stoker web: a request failed: {type(problem).__name__}: {problem}"
        if line not in printed and len(printed) < _MAX_ERRORS:
            printed.add(line)
            print_status(escape(line, 500))

    http_server.HttpServer(listening, pages.answer, print_error).serve(lambda: bool(signals))
    hub.stop()
    if monitor is not None:
        monitor.close()
    return 0


def _print_address(listening: socket.socket, token: str, address: str, is_local: bool) -> None:
    port = listening.getsockname()[1]
    print_secret(f"{address}?token={token}")
    if is_local:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # the user id has no name
            user = "USER"
        host = escape(f"{user}@{os.uname().nodename}")
        print_text(f"from another machine: ssh -N -L {port}:127.0.0.1:{port} {host}   and open the same address there")
    else:
        line = (
            "the connection is not encrypted: anyone on the network path can read the token and the page; use `ssh -L`"
        )
        print_text(line)
    print("press Ctrl-C to stop")
    sys.stdout.flush()
