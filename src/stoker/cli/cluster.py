"""stoker cluster check|init: are these hosts fit to train together; a hosts file, written by asking them."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from typing import Any

from stoker.contract import schedulers
from stoker.contract.names import EX_USAGE, Refusal
from stoker.contract.quantities import counted
from stoker.contract.settings import Parser, suggest
from stoker.contract.shape import as_json
from stoker.contract.shapes import Finding
from stoker.contract.untrusted import json_text, printable
from stoker.control.cluster.hosts import Hosts, read
from stoker.control.cluster.price import FORMULA, parse_count, prices, sentence

_USAGE = """usage: stoker cluster check --hosts cluster.yaml|a,b,c [SCRIPT] [options]
       stoker cluster init HOST ... [options]

  check      side by side on all hosts: each by itself, and what only shows between them
  init       write cluster.yaml by asking the hosts

`stoker cluster check --help` says more."""
_EXAMPLES = """exit codes: 0 fine, 1 warnings, 2 failures, 3 something could not be checked

examples:
  stoker cluster check --hosts cluster.yaml
  stoker cluster check --hosts gpu1,gpu2 train.py
  stoker cluster check --hosts gpu1,gpu2 --parameters 7B    what a step's gradients cost on this network
  stoker cluster check --hosts cluster.yaml --tune          measures transport settings, keeps what helps in the file"""
_MARKS = {"fail": "✗", "warn": "!", "unknown": "?", "ok": "·"}
_WRITTEN = "cluster.yaml"  # by `stoker cluster init`. Never read unasked: anybody may have put one into this folder


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else EX_USAGE
    if argv[0] == "check":
        return check(argv[1:])
    if argv[0] == "init":
        from stoker.cli.cluster_init import main as init

        return init(argv[1:])
    raise Refusal(
        f"no `stoker cluster {argv[0]}`{suggest(argv[0], ('check', 'init'))}; there are check and init", EX_USAGE
    )


def parser() -> Parser:
    """For completion: both words, and check's flags."""
    made = Parser(prog="stoker cluster")
    made.add_argument("what", choices=("check", "init"))
    for action in check_parser()._actions:
        if "-h" not in action.option_strings:
            made._add_action(action)
    return made


def check_parser() -> Parser:
    made = Parser(
        prog="stoker cluster check",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLES,
        description="Are these hosts fit to train together: what is wrong, how that is known, and what to type.",
    )
    made.add_argument(
        "script",
        nargs="?",
        default="",
        metavar="SCRIPT",
        help="a script that must be the same on all hosts, and its package",
    )
    made.add_argument(
        "--hosts",
        default="",
        metavar="HOSTS",
        help="a hosts file, or a,b,c (default: the nodes of the scheduler's job we are in)",
    )
    made.add_argument(
        "--data", action="append", default=[], metavar="PATH", help="prepared data that must be the same on all hosts"
    )
    made.add_argument(
        "--model",
        default="",
        metavar="PATH",
        help="a model's folder, with its tokenizer, that must be the same on all hosts",
    )
    made.add_argument(
        "--parameters",
        type=_count,
        default=0.0,
        metavar="N",
        help="how many to say a step's price for, e.g. 7B (default: --model's, else 1.1B)",
    )
    made.add_argument(
        "--master-port",
        "--master_port",
        type=int,
        default=0,
        metavar="PORT",
        help="the store's port, on the first host (default: a free one)",
    )
    made.add_argument(
        "--quick",
        action="store_true",
        help="only what takes no time, as before every run: no import of torch, no all-reduce",
    )
    made.add_argument(
        "--tune", action="store_true", help="try transport settings and keep what measurably helps in the hosts file"
    )
    made.add_argument(
        "--ssh-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="one more word for ssh, e.g. --ssh-option=-p2222",
    )
    made.add_argument("--json", action="store_true", help="everything as JSON")
    return made


def _count(text: str) -> float:
    try:
        return parse_count(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem


def _hosts(told: argparse.Namespace) -> Hosts:
    scheduler = schedulers.found(os.environ)
    if not told.hosts and scheduler is not None:  # as `stoker run` does
        from stoker.control.scheduler import engine

        given = engine(scheduler).allocation(os.environ)
        if given is not None:
            if told.tune:
                raise Refusal(
                    f"--tune keeps what helps in a hosts file, and a {scheduler.title} job has none: --hosts names one",
                    EX_USAGE,
                )
            return given
    if not told.hosts:
        here = os.path.lexists(_WRITTEN)
        way = f"--hosts {_WRITTEN} takes the one here (it can run commands)" if here else "--hosts a,b,c names them"
        raise Refusal(f"no hosts given: {way}; `stoker cluster init a b c` writes a hosts file", EX_USAGE)
    found = read(told.hosts, tuple(told.ssh_option))
    if told.tune and found.path is None:
        raise Refusal(
            "--tune keeps what helps in a hosts file, and --hosts a,b,c is none: `stoker cluster init a b c`"
            " writes one",
            EX_USAGE,
        )
    if told.tune and told.quick:
        raise Refusal("--tune measures and --quick does not: give one of them", EX_USAGE)
    return found


def check(argv: list[str]) -> int:
    told = check_parser().parse_args(argv)
    hosts = _hosts(told)
    from stoker.control.cluster import between
    from stoker.control.cluster.check import Asked, Checking, doctor_findings
    from stoker.control.cluster.price import parameters
    from stoker.control.doctor.check import exit_code
    from stoker.control.launch.members import Member, Members

    asked = Asked(told.script, tuple(told.data), told.model, told.master_port, told.quick)
    began = time.monotonic()
    if sys.stderr.isatty():
        _progress(f"asking {len(hosts.hosts)} host{'s' if len(hosts.hosts) > 1 else ''}, some seconds")
    tuned: list[str] = []
    with Checking(
        hosts, asked, lambda links, hear, complain: Members([Member(link) for link in links], hear, complain)
    ) as checking:
        facts = checking.look()
        findings = [*between.findings(facts), *doctor_findings(facts, hosts)]
        if told.tune:
            from stoker.control.cluster.reducing import tune

            assert checking.worker is not None
            tuned = tune(checking.asking, checking.worker, facts, hosts, _progress)
    report: dict[str, Any] = {
        "schema": 1,
        "exit_code": exit_code(findings),
        "seconds": round(time.monotonic() - began, 2),
        "findings": as_json(findings),
        "price": _price(facts, told.parameters or parameters(told.model) or 1.1e9),
        "tuned": tuned,
        "facts": facts.to_json(),
    }
    if told.json:
        print(json_text(report))
    else:
        _print(facts, findings, report)
    return int(report["exit_code"])


def _progress(line: str) -> None:
    print(f"stoker: {line}", file=sys.stderr, flush=True)


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
        "prices": as_json(prices(parameters, world, known[0])),
        "sentence": sentence(parameters, world, known[0]),
    }


def _print(facts: Any, findings: list[Finding], report: dict[str, Any]) -> None:
    from stoker.control.cluster import table
    from stoker.control.cluster.price import gigabits

    for line in table.lines(facts, max(80, shutil.get_terminal_size((160, 24)).columns)):
        print(line)
    print()
    if facts.reduce is not None and facts.reduce.bus:
        rates = [pair.rate for pair in facts.pairs if pair.rate]
        wires = [one.speed * 125_000 for one in facts.there if one.speed and one.physical]
        of = f"; the link: {gigabits(min(wires))} stated" if wires else ""
        of += f"; one TCP stream reaches {gigabits(min(rates))}" if rates else ""
        print(f"all-reduce ({facts.reduce.backend}, one rank a host): {gigabits(facts.reduce.bus)} bus bandwidth{of}")
    if report["price"]:
        print(f"a step's gradients: {report['price']['sentence']}   ({FORMULA}, n = {report['price']['hosts']})")
    for finding in sorted(findings, key=lambda one: list(_MARKS).index(one.level)):
        print(printable(f"{_MARKS[finding.level]} {finding.id}: {finding.text}"))
        if finding.fix:
            print(printable(f"    → {finding.fix}"))
    if all(finding.level == "ok" for finding in findings):
        print(f"✓ {counted(len(facts.hosts), 'host')}, nothing wrong")
    for line in report["tuned"]:
        print(line)
    print(f"checked in {report['seconds']:.1f} s")
