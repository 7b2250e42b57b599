"""stoker metrics [--port N] [--host ADDRESS] [--hosts FILE] [--dcgm WHICH] [--once]"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time

from stoker.contract import layout
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.options import OptionParser
from stoker.contract.terminal import print_status
from stoker.contract.text import escape
from stoker.contract.units import parse_duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.host_monitor import HostMonitor
    from stoker.control.show.snapshot import Snapshot

PORT = 9911
_LEAST_S = 0.25
_FIRST_S = 10.0  # that --once waits for other hosts
_EXAMPLES = """examples:
  stoker metrics                      http://127.0.0.1:9911/metrics, for a Prometheus on this machine
  stoker metrics --once | grep loss   print the metrics and end
  stoker metrics --hosts cluster.yaml     several machines from one endpoint, by ssh; nothing has to be installed there
  stoker metrics --dcgm 4.9           GPU metrics also under the names of dcgm-exporter 4.9
  stoker run --metrics-port 9912 train.py    those of one run, for as long as it runs

`stoker docs metrics` has every metric, a Prometheus configuration, alert rules and Grafana dashboards."""


def parser() -> OptionParser:
    made = OptionParser(
        "stoker metrics", "Serves runs, ranks, hosts and GPUs as Prometheus metrics, until Ctrl-C.", _EXAMPLES
    )
    made.option("--port", "N", f"port to listen on (default: {PORT}; 0: a free one)", int, default=PORT)
    made.option(
        "--host", "ADDRESS", "address to listen on (default: 127.0.0.1, this machine only)", default="127.0.0.1"
    )
    made.option("--hosts", "FILE|A,B", "these hosts instead of this machine: a hosts file, or a,b,c reached by ssh")
    made.option("--ssh-option", "OPT", "an option for the ssh client: --ssh-option=-p2222", action="append", default=[])
    made.add_argument(
        "--dcgm",
        choices=("classic", "4.9", "off"),
        default="classic",
        help="GPU metrics also under DCGM's names: classic (public dashboards; the default), 4.9 (renamed), or off",
    )
    made.option("--interval", "TIME", "collect this often (default: 2s)", parse_duration, default=2.0)
    made.switch("--once", "print the metrics and end")
    made.switch("--all", "other users' runs in the folder, too (default: your own)")
    made.runs_dir()
    # Given by `stoker run --metrics-port`: its run, the socket it listens on, and the process to end with.
    for flag, kind in (("--run", str), ("--listening", int), ("--parent", int)):
        made.add_argument(flag, type=kind, help=argparse.SUPPRESS)
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    if told.parent:
        from stoker.control.agent.prctl import die_with_parent

        die_with_parent(told.parent, signal.SIGTERM)
    if not 0 <= told.port <= 65535:
        raise Refusal(f"--port {told.port}: a port is a number from 0 to 65535", EX_USAGE)
    if told.interval < _LEAST_S:
        raise Refusal(f"--interval {told.interval:g} s: at least {_LEAST_S} s", EX_USAGE)
    from stoker.control.doctor.check import count_fast_findings
    from stoker.control.show import http_server
    from stoker.control.show.collector import SnapshotCollector
    from stoker.control.show.metrics import metrics_exporter
    from stoker.control.show.metrics.metrics_exporter import MetricsCollector
    from stoker.control.show.metrics.metrics_page import CONTENT_TYPE, DoctorFindings

    root = os.path.dirname(told.run) if told.run else layout.runs_root(told.runs_dir, os.environ)
    elsewhere: HostMonitor | None = None
    if told.hosts:
        from stoker.control.cluster.host_monitor import HostMonitor
        from stoker.control.cluster.hosts import read_hosts_file

        elsewhere = HostMonitor(read_hosts_file(told.hosts, tuple(told.ssh_option)), told.interval)
    gatherer = SnapshotCollector(root, everybody=told.all, machine=elsewhere is None)

    def gather() -> Snapshot:
        return gatherer.snapshot(elsewhere=elsewhere.readings() if elsewhere is not None else (), only=told.run)

    def checks() -> DoctorFindings:
        host, counts = count_fast_findings(root)
        return DoctorFindings(host, time.time(), counts)

    collector = MetricsCollector(gather, checks, told.dcgm, lambda line: print_status(escape(line)))
    if told.once:
        if elsewhere is not None:
            elsewhere.wait(_FIRST_S)
        collector.examine()
        collector.collect()
        if elsewhere is not None:
            elsewhere.close()
        sys.stdout.write((collector.page or b"").decode())
        return 0
    listening = socket.socket(fileno=told.listening) if told.listening else http_server.listen(told.host, told.port)
    listening.setblocking(False)
    over: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda number, _frame: over.append(number))
    collector.start(told.interval)
    if not told.run:
        print_status(f"metrics at {http_server.url(listening, '/metrics')}")
        if not http_server.is_loopback(listening):
            print_status(
                "anybody who can reach this port can read the names of runs, users and hosts, and their numbers"
            )
    metrics_exporter.MetricsServer(listening, lambda: collector.page, CONTENT_TYPE).serve(lambda: bool(over))
    collector.stop()
    if elsewhere is not None:
        elsewhere.close()
    return 0
