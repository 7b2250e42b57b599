"""`stoker metrics [--port N] [--hosts FILE] [--once]`: serves runs, ranks, hosts and GPUs as Prometheus metrics."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time

from stoker.contract import layout
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.options import OptionParser, check_port
from stoker.contract.terminal import print_status
from stoker.contract.text import escape
from stoker.contract.units import parse_duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.host_monitor import HostMonitor
    from stoker.control.show.snapshot import Snapshot

PORT = 9911
_MIN_INTERVAL_S = 0.25
_HOSTS_WAIT_S = 10.0  # --once waits this long for other hosts
_EXAMPLES = """examples:
  stoker metrics                      http://127.0.0.1:9911/metrics, for a Prometheus on this machine
  stoker metrics --once | grep loss   print the metrics and exit
  stoker metrics --hosts cluster.yaml     several hosts at one endpoint, by ssh; nothing has to be installed there
  stoker metrics --dcgm 4.9           GPU metrics also under the names of dcgm-exporter 4.9
  stoker run --metrics-port 9912 train.py    the metrics of one run, while it runs

`stoker docs metrics` lists all metrics, a Prometheus configuration, alert rules and Grafana dashboards."""


def build_parser() -> OptionParser:
    description = "Serves runs, ranks, hosts and GPUs as Prometheus metrics, until Ctrl-C."
    parser = OptionParser("stoker metrics", description, _EXAMPLES)
    parser.option("--port", "N", f"port to listen on (default: {PORT}; 0: a free one)", int, default=PORT)
    host = "address to listen on (default: 127.0.0.1, this machine only)"
    parser.option("--host", "ADDRESS", host, default="127.0.0.1")
    hosts = "these hosts instead of this machine: a hosts file, or a,b,c reached by ssh"
    parser.option("--hosts", "FILE|A,B", hosts)
    ssh = "an option for the ssh client: --ssh-option=-p2222"
    parser.option("--ssh-option", "OPT", ssh, action="append", default=[])
    dcgm = "GPU metrics also under DCGM's names: classic (public dashboards; the default), 4.9 (renamed), or off"
    parser.add_argument("--dcgm", choices=("classic", "4.9", "off"), default="classic", help=dcgm)
    parser.option("--interval", "TIME", "how often to collect (default: 2s)", parse_duration, default=2.0)
    parser.switch("--once", "print the metrics and exit")
    parser.switch("--all", "other users' runs in the folder, too (default: only yours)")
    parser.runs_dir()
    # `stoker run --metrics-port` sets these: its run, the socket to serve, and the pid of the process to exit with.
    for flag, kind in (("--run", str), ("--listening", int), ("--parent", int)):
        parser.add_argument(flag, type=kind, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if args.parent:
        from stoker.control.agent.prctl import die_with_parent

        die_with_parent(args.parent, signal.SIGTERM)
    check_port(args.port)
    if args.interval < _MIN_INTERVAL_S:
        raise Refusal(f"--interval must be at least {_MIN_INTERVAL_S}s, got {args.interval:g}s", EX_USAGE)
    from stoker.control.doctor.check import count_fast_findings
    from stoker.control.show import http_server
    from stoker.control.show.collector import SnapshotCollector
    from stoker.control.show.metrics import metrics_exporter
    from stoker.control.show.metrics.metrics_exporter import MetricsCollector
    from stoker.control.show.metrics.metrics_page import CONTENT_TYPE, DoctorFindings

    root = os.path.dirname(args.run) if args.run else layout.runs_root(args.runs_dir, os.environ)
    monitor: HostMonitor | None = None
    if args.hosts:
        from stoker.control.cluster.host_monitor import HostMonitor
        from stoker.control.cluster.hosts import read_hosts_file

        monitor = HostMonitor(read_hosts_file(args.hosts, tuple(args.ssh_option)), args.interval)
    snapshots = SnapshotCollector(root, everybody=args.all, machine=monitor is None)

    def take_snapshot() -> Snapshot:
        return snapshots.snapshot(elsewhere=monitor.readings() if monitor is not None else (), only=args.run)

    def run_checks() -> DoctorFindings:
        host, counts = count_fast_findings(root)
        return DoctorFindings(host, time.time(), counts)

    collector = MetricsCollector(take_snapshot, run_checks, args.dcgm, lambda line: print_status(escape(line)))
    if args.once:
        if monitor is not None:
            monitor.wait(_HOSTS_WAIT_S)
        collector.examine()
        collector.collect()
        if monitor is not None:
            monitor.close()
        sys.stdout.write((collector.page or b"").decode())
        return 0
    listening = socket.socket(fileno=args.listening) if args.listening else http_server.listen(args.host, args.port)
    listening.setblocking(False)
    signals: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda number, _frame: signals.append(number))
    collector.start(args.interval)
    if not args.run:
        print_status(f"metrics at {http_server.server_url(listening, '/metrics')}")
        if not http_server.is_loopback(listening):
            print_status(
                "anyone who can reach this port can read the names of runs, users and hosts, and their metrics"
            )
    metrics_exporter.MetricsServer(listening, lambda: collector.page, CONTENT_TYPE).serve(lambda: bool(signals))
    collector.stop()
    if monitor is not None:
        monitor.close()
    return 0
