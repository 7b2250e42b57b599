"""stoker web [RUN] [--port N] [--host ADDRESS] [--hosts FILE]; stoker web --save [RUN] FILE.html"""

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
_LEAST_S = 0.25
_HOSTS_S = 2.0  # between two readings of another host, at most
_EXAMPLES = """examples:
  stoker web                          a page with the runs in ./runs and this machine's GPUs; it prints the address
  stoker web --hosts cluster.yaml     the hosts of a file, by ssh; nothing has to be installed there
  stoker web --save exp1 exp1.html    a finished run as one file that any browser opens

The page is for this machine only; from elsewhere use the `ssh -L` line that it prints. `stoker docs show` has more."""


def parser() -> OptionParser:
    made = OptionParser(
        "stoker web",
        "Runs, curves, ranks, GPUs and logs as a live page in the browser, until Ctrl-C.",
        _EXAMPLES,
        usage="stoker web [RUN] [options]",
    )
    made.run_argument("a run to open at once", default="the list of runs")
    made.option("--port", "N", f"port to listen on (default: {PORT}; 0: a free one)", int, default=PORT)
    made.option(
        "--host", "ADDRESS", "address to listen on (default: 127.0.0.1, this machine only)", default="127.0.0.1"
    )
    made.option("--hosts", "FILE|A,B", "these hosts instead of this machine: a hosts file, or a,b,c reached by ssh")
    made.option("--ssh-option", "OPT", "an option for the ssh client: --ssh-option=-p2222", action="append", default=[])
    made.option("--interval", "TIME", "look this often while a page is open (default: 2s)", parse_duration, default=2.0)
    made.add_argument(
        "--save", nargs="+", metavar="[RUN] FILE", help="write a run (default: the newest) as one HTML file, and end"
    )
    made.switch("--all", "other users' runs in the folder, too (default: your own)")
    made.runs_dir()
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    check_port(told.port)
    if told.interval < _LEAST_S:
        raise Refusal(f"--interval {told.interval:g}s is too short: at least {_LEAST_S}s", EX_USAGE)
    root = os.path.abspath(layout.runs_root(told.runs_dir, os.environ))
    if told.save:
        *named, path = told.save
        if len(named) + bool(told.run) > 1:
            raise Refusal("--save takes one run and one file: stoker web --save [RUN] FILE", EX_USAGE)
        return _save(root, named[0] if named else told.run, path)
    return _serve(told, root)


def _save(root: str, which: str | None, path: str) -> int:
    from stoker.cli.why import verdict_of
    from stoker.contract.safe_io import refuse_other_extension, write_atomic
    from stoker.control.show.web.pages import render_saved_page

    refuse_other_extension(path, b"<!doctype html", "an HTML page")
    run = run_index.find_run(which, root)
    if which is None:
        print_status(f"the newest run: {escape(run.id)}")
    data = render_saved_page(run, verdict_of)
    try:
        write_atomic(path, data)
    except OSError as problem:
        raise Refusal(f"{escape(path)} can't be written: {problem.strerror}", EX_CANTCREAT) from problem
    print(f"wrote {escape(path)} ({format_bytes(len(data))})")
    return 0


def _serve(told: argparse.Namespace, root: str) -> int:
    from stoker.cli.stop import stop_run
    from stoker.cli.why import verdict_of
    from stoker.control.show import http_server
    from stoker.control.show.collector import SnapshotCollector
    from stoker.control.show.web.access import AccessGuard
    from stoker.control.show.web.event_stream import EventHub
    from stoker.control.show.web.pages import Pages
    from stoker.control.show.web.run_files import RunFolders

    chosen = ""
    if told.run:
        run = run_index.find_run(told.run, root)
        root, chosen = os.path.dirname(run.dir), run.id
    elsewhere: HostMonitor | None = None
    if told.hosts:
        from stoker.control.cluster.host_monitor import HostMonitor
        from stoker.control.cluster.hosts import read_hosts_file

        hosts = read_hosts_file(told.hosts, tuple(told.ssh_option))
    listening = http_server.listen(told.host, told.port)
    if told.hosts:
        elsewhere = HostMonitor(hosts, min(told.interval, _HOSTS_S))
    # A page asks for its curves by itself (page_data.py): the list needs their newest values.
    gatherer = SnapshotCollector(root, everybody=told.all, machine=elsewhere is None, whole_curves=False)

    def look(watched: tuple[str, ...]) -> Snapshot:
        return gatherer.snapshot(watched, elsewhere.readings() if elsewhere is not None else ())

    guard, hub = AccessGuard(listening, chosen), EventHub(look, told.interval)
    pages = Pages(guard, hub, RunFolders(root, told.all), stop_run, verdict_of)
    over: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda number, _frame: over.append(number))
    hub.start()
    _announce(listening, guard.token, http_server.url(listening, "/"), http_server.is_loopback(listening))
    complained: set[str] = set()

    def failed(problem: Exception) -> None:
        line = f"stoker web: an answer failed: {type(problem).__name__}: {problem}"
        if line not in complained and len(complained) < 20:
            complained.add(line)
            print_status(escape(line, 500))

    http_server.HttpServer(listening, pages.answer, failed).serve(lambda: bool(over))
    hub.stop()
    if elsewhere is not None:
        elsewhere.close()
    return 0


def _announce(listening: socket.socket, token: str, address: str, local: bool) -> None:
    port = listening.getsockname()[1]
    print_secret(f"{address}?token={token}")
    if local:
        print_text(f"from another machine: ssh -N -L {port}:127.0.0.1:{port} {_me()}   and open the same address there")
    else:
        print_text("anybody who sees the traffic sees the token and the page: it is not encrypted. `ssh -L` is")
    print("Ctrl-C ends it")
    sys.stdout.flush()


def _me() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name
        user = "USER"
    return escape(f"{user}@{os.uname().nodename}")
