"""stoker cluster check|init: are these hosts fit to train together; a hosts file, written by asking them."""

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
from stoker.control.cluster.all_reduce import FORMULA, describe_step_costs, parse_count, step_costs
from stoker.control.cluster.hosts import Hosts, read_hosts_file

_USAGE = """usage: stoker cluster check --hosts cluster.yaml|a,b,c [SCRIPT] [options]
       stoker cluster init HOST ... [options]

  check      each host by itself, then what only shows between them
  init       write cluster.yaml by asking the hosts

`stoker cluster check --help` says more."""
_EXAMPLES = """exit codes: 0 fine, 1 warnings, 2 failures, 3 something could not be checked

examples:
  stoker cluster check --hosts cluster.yaml
  stoker cluster check --hosts gpu1,gpu2 train.py
  stoker cluster check --hosts gpu1,gpu2 --parameters 7B    what a step's gradients cost on this network
  stoker cluster check --hosts cluster.yaml --tune          measures transport settings, keeps what helps in the file"""
_INIT_EXAMPLES = """examples:
  stoker cluster init gpu1 gpu2 gpu3
  stoker cluster init ann@10.0.0.1 ann@10.0.0.2 --python '~/venv/bin/python'
  stoker run --hosts cluster.yaml train.py"""
_MARKS = {"fail": "✗", "warn": "!", "unknown": "?", "ok": "·"}
_WRITTEN = "cluster.yaml"  # by `stoker cluster init`. It can run commands, so it is only read where it is named


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else EX_USAGE
    if argv[0] == "check":
        return check(argv[1:])
    if argv[0] == "init":
        return init(argv[1:])
    near = suggest(argv[0], ("check", "init"))
    raise Refusal(f"no `stoker cluster {argv[0]}`{near}; there are check and init", EX_USAGE)


def parser() -> OptionParser:
    """For completion: both words, and check's flags."""
    made = OptionParser("stoker cluster")
    made.add_argument("what", choices=("check", "init"))
    made.take_over(check_parser())
    return made


def check_parser() -> OptionParser:
    about = "Checks whether these hosts can train together: what is wrong, how that is known, and what to type."
    made = OptionParser("stoker cluster check", about, _EXAMPLES)
    script = "a script that must be the same on all hosts, and its package"
    made.option("script", "SCRIPT", script, nargs="?", default="")
    hosts = "a hosts file, or a,b,c (default: the nodes of the scheduler's job we are in)"
    made.option("--hosts", "HOSTS", hosts, default="")
    made.option("--data", "PATH", "prepared data that must be the same on all hosts", action="append", default=[])
    model = "a model's folder, with its tokenizer, that must be the same on all hosts"
    made.option("--model", "PATH", model, default="")
    parameters = "parameters to compute the cost of a step's gradients for, e.g. 7B (default: --model's, else 1.1B)"
    made.option("--parameters", "N", parameters, parse_count, default=0.0)
    port = "the store's port, on the first host (default: a free one)"
    made.option("--master-port --master_port", "PORT", port, int, default=0)
    made.switch("--quick", "only the quick checks that every run begins with: no import of torch, no all-reduce")
    made.switch("--tune", "try transport settings and keep what measurably helps in the hosts file")
    _add_ssh_option(made)
    made.switch("--json", "everything as JSON")
    return made


def _add_ssh_option(made: OptionParser) -> None:
    made.option(
        "--ssh-option", "OPTION", "one more argument for ssh, e.g. --ssh-option=-p2222", action="append", default=[]
    )


def _hosts(told: argparse.Namespace) -> Hosts:
    scheduler = schedulers.find_scheduler(os.environ)
    if not told.hosts and scheduler is not None:  # as `stoker run` does
        from stoker.control.scheduler import engine

        given = engine(scheduler).allocation(os.environ)
        if given is not None:
            if told.tune:
                line = f"--tune writes what helps to a hosts file, and a {scheduler.title} job has none"
                raise Refusal(f"{line}: give one with --hosts", EX_USAGE)
            return given
    if not told.hosts:
        here = os.path.lexists(_WRITTEN)
        way = f"--hosts {_WRITTEN} takes the one here (it can run commands)" if here else "--hosts a,b,c names them"
        raise Refusal(f"no hosts given: {way}; `stoker cluster init a b c` writes a hosts file", EX_USAGE)
    found = read_hosts_file(told.hosts, tuple(told.ssh_option))
    if told.tune and found.path is None:
        line = "--tune writes what helps to a hosts file, and --hosts a,b,c is not one"
        raise Refusal(f"{line}: `stoker cluster init a b c` writes one", EX_USAGE)
    if told.tune and told.quick:
        raise Refusal("--tune measures and --quick does not: give one of them", EX_USAGE)
    return found


def check(argv: list[str]) -> int:
    told = check_parser().parse_args(argv)
    hosts = _hosts(told)
    from stoker.control.cluster import check_rules
    from stoker.control.cluster.all_reduce import count_parameters
    from stoker.control.cluster.cluster_check import CheckOptions, ClusterCheck, doctor_findings
    from stoker.control.cluster.probes import open_probe_batch
    from stoker.control.doctor.check import exit_code

    asked = CheckOptions(told.script, tuple(told.data), told.model, told.master_port, told.quick)
    began = time.monotonic()
    if sys.stderr.isatty():
        print_status(f"asking {plural(len(hosts.hosts), 'host')}, some seconds")
    tuned: list[str] = []
    with open_probe_batch(hosts) as asking:
        checking = ClusterCheck(hosts, asked, asking)
        facts = checking.collect()
        findings = [*check_rules.run_rules(facts), *doctor_findings(facts, hosts)]
        if told.tune:
            from stoker.control.cluster.all_reduce import tune

            assert checking.worker is not None
            tuned = tune(asking, checking.worker, facts, hosts, print_status)
    report: dict[str, Any] = {
        "schema": 1,
        "exit_code": exit_code(findings),
        "seconds": round(time.monotonic() - began, 2),
        "findings": as_json(findings),
        "price": _price(facts, told.parameters or count_parameters(told.model) or 1.1e9),
        "tuned": tuned,
        "facts": facts.to_json(),
    }
    if told.json:
        print_json(report)
    else:
        _print(facts, findings, report)
    return int(report["exit_code"])


def _bandwidth(facts: Any) -> tuple[float, str] | None:
    """(bytes a second of the slowest link, how that is known)."""
    if facts.reduce is not None and facts.reduce.bus:
        return facts.reduce.bus, f"{facts.reduce.backend} all-reduce"
    rates = [pair.rate for pair in facts.pairs if pair.rate]
    return (min(rates), "one TCP stream, the slowest") if rates else None


def _price(facts: Any, parameters: float) -> dict[str, Any] | None:
    known = _bandwidth(facts)
    if known is None:
        return None
    world = len(facts.there)
    return {
        "bandwidth": known[0],
        "measured_by": known[1],
        "hosts": world,
        "formula": FORMULA,
        "prices": as_json(step_costs(parameters, world, known[0])),
        "sentence": describe_step_costs(parameters, world, known[0]),
    }


def _print(facts: Any, findings: list[Finding], report: dict[str, Any]) -> None:
    from stoker.control.cluster import check_table
    from stoker.control.cluster.check_facts import format_bandwidth

    for line in check_table.lines(facts, max(80, shutil.get_terminal_size((160, 24)).columns)):
        print(line)
    print()
    if facts.reduce is not None and facts.reduce.bus:
        rates = [pair.rate for pair in facts.pairs if pair.rate]
        wires = [one.speed * 125_000 for one in facts.there if one.speed and one.physical]
        of = f"; the link: {format_bandwidth(min(wires))} stated" if wires else ""
        of += f"; one TCP stream reaches {format_bandwidth(min(rates))}" if rates else ""
        print_text(
            f"all-reduce ({facts.reduce.backend}, one rank a host): {format_bandwidth(facts.reduce.bus)} bus bandwidth{of}"
        )
    if report["price"]:
        print_text(f"a step's gradients: {report['price']['sentence']}   ({FORMULA}, n = {report['price']['hosts']})")
    for finding in sorted(findings, key=lambda one: list(_MARKS).index(one.level)):
        print_text(escape(f"{_MARKS[finding.level]} {finding.id}: {finding.text}"))
        if finding.fix:
            print_text(escape(f"    → {finding.fix}"))
    if all(finding.level == "ok" for finding in findings):
        print(f"✓ {plural(len(facts.hosts), 'host')}, nothing wrong")
    for line in report["tuned"]:
        print(line)
    print(f"checked in {report['seconds']:.1f} s")


def init_parser() -> OptionParser:
    about = "Asks each host for its GPUs, a Python with torch and its way to the others, and writes a hosts file."
    made = OptionParser("stoker cluster init", about, _INIT_EXAMPLES)
    hosts = "name, address or ~/.ssh/config alias, in rank order; user@host is fine"
    made.option("hosts", "HOST", hosts, nargs="+")
    made.option("--out", "FILE", "the file to write (default: ./cluster.yaml)", default=_WRITTEN)
    made.switch("--force", "overwrite it")
    made.option("--user", "NAME", "user to log in as")
    made.option("--port", "PORT", "ssh's port", int)
    made.option("--identity", "FILE", "a private key")
    python = "the Python of the ranks there (default: the first with torch of ~/venv, ~/.venv and python3)"
    made.option("--python", "PATH", python)
    made.option("--workdir", "DIR", "the ranks' working directory there (default: that of `stoker run`)")
    made.option("--ssh-config", "FILE", "instead of ~/.ssh/config")
    _add_ssh_option(made)
    return made


def init(argv: list[str]) -> int:
    told = init_parser().parse_args(argv)
    from stoker.control.cluster.hosts_writer import write_hosts_file

    told.identity, told.ssh_config = _from_here(told.identity), _from_here(told.ssh_config)
    of_all = {key: getattr(told, key) for key in ("user", "port", "identity", "python", "workdir")}
    defaults = {key: value for key, value in of_all.items() if value is not None}
    more = {key: value for key, value in (("ssh_config", told.ssh_config), ("ssh_options", told.ssh_option)) if value}
    write_hosts_file(told.hosts, told.out, defaults, more, told.force, print_status)
    return 0


def _from_here(path: str | None) -> str | None:
    """A path in the file counts from the file; a flag's counts from here. A home stays a ~."""
    return os.path.abspath(path) if path and not path.startswith("~") else path
