"""`stoker cluster check` tests whether hosts can train together; `stoker cluster init` examines hosts and writes a hosts file."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from typing import Any

from stoker.contract import schedulers
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.evidence import Finding
from stoker.contract.frozen import as_json
from stoker.contract.options import OptionParser, suggest
from stoker.contract.terminal import print_json, print_status, print_text
from stoker.contract.text import escape
from stoker.contract.units import plural
from stoker.control.cluster.all_reduce import FORMULA, compute_step_costs, describe_step_costs, parse_count
from stoker.control.cluster.hosts import Hosts, read_hosts_file

_USAGE = """usage: stoker cluster check --hosts cluster.yaml|a,b,c [SCRIPT] [options]
       stoker cluster init HOST ... [options]

  check      check each host, then the links between them
  init       examine the hosts and write cluster.yaml

`stoker cluster check --help` lists the options."""
_CHECK_EXAMPLES = """exit codes: 0 fine, 1 warnings, 2 failures, 3 something could not be checked

examples:
  stoker cluster check --hosts cluster.yaml
  stoker cluster check --hosts gpu1,gpu2 train.py
  stoker cluster check --hosts gpu1,gpu2 --parameters 7B    time to exchange a step's gradients on this network
  stoker cluster check --hosts cluster.yaml --tune          measure transport settings, write those that help to the file"""
_INIT_EXAMPLES = """examples:
  stoker cluster init gpu1 gpu2 gpu3
  stoker cluster init ann@10.0.0.1 ann@10.0.0.2 --python '~/venv/bin/python'
  stoker run --hosts cluster.yaml train.py"""
_MARKS = {"fail": "✗", "warn": "!", "unknown": "?", "ok": "·"}
# `stoker cluster init` writes this file. It can run commands, so it is read only if the user names it.
_HOSTS_FILE = "cluster.yaml"


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else EX_USAGE
    if argv[0] == "check":
        return check(argv[1:])
    if argv[0] == "init":
        return init(argv[1:])
    near = suggest(argv[0], ("check", "init"))
    raise Refusal(f"unknown command `stoker cluster {argv[0]}`{near}; use check or init", EX_USAGE)


def build_parser() -> OptionParser:
    """Build the parser for completion, with both subcommands and the flags of check."""
    parser = OptionParser("stoker cluster")
    parser.add_argument("what", choices=("check", "init"))
    parser.take_over(build_check_parser())
    return parser


def build_check_parser() -> OptionParser:
    description = "Checks whether hosts can train together: what is wrong, the evidence, and how to fix it."
    parser = OptionParser("stoker cluster check", description, _CHECK_EXAMPLES)
    script = "a script that must be the same on all hosts, and its package"
    parser.option("script", "SCRIPT", script, nargs="?", default="")
    hosts = "a hosts file, or a,b,c (default: the nodes of the scheduler's job, inside one)"
    parser.option("--hosts", "HOSTS", hosts, default="")
    data = "prepared data that must be the same on all hosts"
    parser.option("--data", "PATH", data, action="append", default=[])
    model = "a model's folder, with its tokenizer, that must be the same on all hosts"
    parser.option("--model", "PATH", model, default="")
    parameters = "number of parameters whose gradients are exchanged in a step, e.g. 7B (default: --model's, else 1.1B)"
    parser.option("--parameters", "N", parameters, parse_count, default=0.0)
    port = "port of the store on the first host (default: a free one)"
    parser.option("--master-port --master_port", "PORT", port, int, default=0)
    parser.switch(
        "--quick", "only the quick checks that every run begins with, without importing torch or an all-reduce"
    )
    parser.switch("--tune", "try transport settings and write those that measurably help to the hosts file")
    _add_ssh_option(parser)
    parser.switch("--json", "print everything as JSON")
    return parser


def _add_ssh_option(parser: OptionParser) -> None:
    option = "one more argument for ssh, e.g. --ssh-option=-p2222"
    parser.option("--ssh-option", "OPTION", option, action="append", default=[])


def check(argv: list[str]) -> int:
    args = build_check_parser().parse_args(argv)
    hosts = _select_hosts(args)
    from stoker.control.cluster import check_rules
    from stoker.control.cluster.all_reduce import count_parameters
    from stoker.control.cluster.cluster_check import CheckOptions, ClusterCheck, doctor_findings
    from stoker.control.cluster.probes import open_probe_batch
    from stoker.control.doctor.check import exit_code

    check_options = CheckOptions(args.script, tuple(args.data), args.model, args.master_port, args.quick)
    start = time.monotonic()
    if sys.stderr.isatty():
        print_status(f"checking {plural(len(hosts.hosts), 'host')}; this takes a few seconds")
    tuned: list[str] = []
    with open_probe_batch(hosts) as batch:
        cluster_check = ClusterCheck(hosts, check_options, batch)
        facts = cluster_check.collect()
        findings = [*check_rules.run_rules(facts), *doctor_findings(facts, hosts)]
        if args.tune:
            from stoker.control.cluster.all_reduce import tune

            assert cluster_check.worker is not None
            tuned = tune(batch, cluster_check.worker, facts, hosts, print_status)
    report: dict[str, Any] = {
        "schema": 1,
        "exit_code": exit_code(findings),
        "seconds": round(time.monotonic() - start, 2),
        "findings": as_json(findings),
        "price": _estimate_gradient_cost(facts, args.parameters or count_parameters(args.model) or 1.1e9),
        "tuned": tuned,
        "facts": facts.to_json(),
    }
    if args.json:
        print_json(report)
    else:
        _print_report(facts, findings, report)
    return int(report["exit_code"])


def _select_hosts(args: argparse.Namespace) -> Hosts:
    """Return the hosts of --hosts or of the scheduler's job. Raises Refusal if there are none or --tune can't work."""
    scheduler = schedulers.find_scheduler(os.environ)
    if not args.hosts and scheduler is not None:  # as `stoker run` does
        from stoker.control.scheduler import load_engine

        nodes = load_engine(scheduler).find_allocation(os.environ)
        if nodes is not None:
            if args.tune:
                line = f"--tune writes to a hosts file, and a {scheduler.title} job has none"
                raise Refusal(f"{line}; give one with --hosts", EX_USAGE)
            return nodes
    if not args.hosts:
        exists = os.path.lexists(_HOSTS_FILE)
        fix = f"--hosts {_HOSTS_FILE} to use the one here (it can run commands)" if exists else "--hosts a,b,c"
        raise Refusal(
            f"--hosts is missing; give {fix}, or write a hosts file with `stoker cluster init a b c`", EX_USAGE
        )
    hosts = read_hosts_file(args.hosts, tuple(args.ssh_option))
    if args.tune and hosts.path is None:
        line = "--tune writes to a hosts file, and --hosts a,b,c is not one"
        raise Refusal(f"{line}; `stoker cluster init a b c` writes one", EX_USAGE)
    if args.tune and args.quick:
        raise Refusal("--tune can't be combined with --quick, which skips the measurements", EX_USAGE)
    return hosts


def _estimate_gradient_cost(facts: Any, parameters: float) -> dict[str, Any] | None:
    """Return the cost of exchanging a step's gradients, from the slowest link measured, or None without a measurement."""
    rates = [pair.rate for pair in facts.pairs if pair.rate]
    if facts.reduce is not None and facts.reduce.bus:
        bandwidth, measured_by = facts.reduce.bus, f"{facts.reduce.backend} all-reduce"
    elif rates:
        bandwidth, measured_by = min(rates), "one TCP stream, the slowest"
    else:
        return None
    hosts = len(facts.reachable)
    return {
        "bandwidth": bandwidth,  # bytes per second
        "measured_by": measured_by,
        "hosts": hosts,
        "formula": FORMULA,
        "prices": as_json(compute_step_costs(parameters, hosts, bandwidth)),
        "sentence": describe_step_costs(parameters, hosts, bandwidth),
    }


def _print_report(facts: Any, findings: list[Finding], report: dict[str, Any]) -> None:
    from stoker.control.cluster import check_table
    from stoker.control.cluster.check_facts import format_bandwidth

    for line in check_table.format_table(facts, max(80, shutil.get_terminal_size((160, 24)).columns)):
        print(line)
    print()
    if facts.reduce is not None and facts.reduce.bus:
        rates = [pair.rate for pair in facts.pairs if pair.rate]
        links = [host.speed * 125_000 for host in facts.there if host.speed and host.physical]
        details = f"; rated link speed {format_bandwidth(min(links))}" if links else ""
        details += f"; one TCP stream reaches {format_bandwidth(min(rates))}" if rates else ""
        bandwidth = f"{format_bandwidth(facts.reduce.bus)} bus bandwidth{details}"
        print_text(f"all-reduce ({facts.reduce.backend}, one rank per host): {bandwidth}")
    if report["price"]:
        print_text(f"a step's gradients: {report['price']['sentence']}   ({FORMULA}, n = {report['price']['hosts']})")
    for finding in sorted(findings, key=lambda finding: list(_MARKS).index(finding.level)):
        print_text(escape(f"{_MARKS[finding.level]} {finding.id}: {finding.text}"))
        if finding.fix:
            print_text(escape(f"    → {finding.fix}"))
    if all(finding.level == "ok" for finding in findings):
        print(f"✓ {plural(len(facts.hosts), 'host')}, nothing wrong")
    for line in report["tuned"]:
        print(line)
    print(f"checked in {report['seconds']:.1f} s")


def build_init_parser() -> OptionParser:
    description = "Examines each host (GPUs, a Python with torch, a route to the others) and writes a hosts file."
    parser = OptionParser("stoker cluster init", description, _INIT_EXAMPLES)
    hosts = "name, address or ~/.ssh/config alias, in rank order; may be user@host"
    parser.option("hosts", "HOST", hosts, nargs="+")
    parser.option("--out", "FILE", "the file to write (default: ./cluster.yaml)", default=_HOSTS_FILE)
    parser.switch("--force", "overwrite the file")
    parser.option("--user", "NAME", "user to log in as")
    parser.option("--port", "PORT", "port of ssh", int)
    parser.option("--identity", "FILE", "a private key")
    python = "the ranks' Python on the hosts (default: the first with torch of ~/venv, ~/.venv and python3)"
    parser.option("--python", "PATH", python)
    parser.option("--workdir", "DIR", "the ranks' working directory on the hosts (default: that of `stoker run`)")
    parser.option("--ssh-config", "FILE", "the ssh configuration to use (default: ~/.ssh/config)")
    _add_ssh_option(parser)
    return parser


def init(argv: list[str]) -> int:
    args = build_init_parser().parse_args(argv)
    from stoker.control.cluster.hosts_writer import write_hosts_file

    args.identity, args.ssh_config = _make_absolute(args.identity), _make_absolute(args.ssh_config)
    host_keys = {key: getattr(args, key) for key in ("user", "port", "identity", "python", "workdir")}
    defaults = {key: value for key, value in host_keys.items() if value is not None}
    ssh = {key: value for key, value in (("ssh_config", args.ssh_config), ("ssh_options", args.ssh_option)) if value}
    write_hosts_file(args.hosts, args.out, defaults, ssh, args.force, print_status)
    return 0


def _make_absolute(path: str | None) -> str | None:
    """Make a flag's path absolute, since a path in the hosts file is relative to that file. ~ stays."""
    return os.path.abspath(path) if path and not path.startswith("~") else path
