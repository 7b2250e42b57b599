"""stoker doctor [--only gpu.] [--skip host.disk] [--json] [--watch] [--bundle F] [--record F] [--machine F]"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_CANTCREAT, EX_DATAERR, EX_NOINPUT, Refusal, parsing
from stoker.contract.evidence import Finding
from stoker.contract.frozen import as_json
from stoker.contract.masking import mask_json
from stoker.contract.options import OptionParser
from stoker.contract.safe_io import AtomicFile, read_json, refuse_other_extension
from stoker.contract.terminal import ERROR, SUCCESS, WARNING, print_coloured, print_json, print_text
from stoker.contract.text import dump_json, escape
from stoker.contract.units import format_used, parse_duration, plural
from stoker.control.doctor import check
from stoker.control.machine.examination import Examination, examination_from_json
from stoker.control.machine.examine import NOT_ASKED, PARTS, examine

_EXAMPLES = """exit codes: 0 fine, 1 warnings, 2 failures, 3 something could not be checked

examples:
  stoker doctor
  stoker doctor --only gpu. --json
  stoker doctor --bundle ticket.tar.gz      for a support ticket; recognized secrets are taken out
  stoker doctor --record box.json           keep this machine; --machine box.json replays it"""
_MARKS = {"fail": "✗", "warn": "!", "unknown": "?"}
_COLOURS = {"fail": ERROR, "warn": WARNING, "unknown": ""}


def parser() -> OptionParser:
    made = OptionParser(
        "stoker doctor", "What is wrong with this machine, how that is known, and what to type.", _EXAMPLES
    )
    several: dict[str, Any] = {"action": "append", "default": []}
    made.option("--only", "ID", "only checks whose id starts with this, e.g. gpu. or host.disk", **several)
    made.option("--skip", "ID", "leave these checks out", **several)
    made.option("--nproc-per-node --nproc_per_node", "N", "how many ranks you plan to run", int, default=0)
    made.option("--master-port --master_port", "PORT", "a port to look at", int, default=0)
    made.switch("--no-probe", "create no CUDA context on the GPUs")
    made.switch("--json", "everything as JSON")
    watch = "check again at this interval (default: 10s) and print what changes"
    made.option("--watch", "TIME", watch, parse_duration, nargs="?", const="10s")
    made.option("--bundle", "FILE", "write a tar.gz for a support ticket")
    made.option("--record", "FILE", "write the examination as JSON")
    made.option("--machine", "FILE", "examine a recorded machine instead of this one")
    made.runs_dir()
    return made


def main(argv: list[str]) -> int:
    told = parser().parse_args(argv)
    checks = check.choose(told.only, told.skip)
    runs_dir = layout.runs_root(told.runs_dir, os.environ)
    if told.no_probe:
        checks = [one for one in checks if "probes" not in one.needs]
    if told.record:
        refuse_other_extension(told.record, b"{", "a recorded machine")
    if told.bundle:
        refuse_other_extension(told.bundle, b"\x1f\x8b", "a bundle (tar.gz)")
    whole = bool(told.record or told.bundle)
    parts = PARTS if whole else frozenset(part for one in checks for part in one.needs if part in PARTS)

    def look() -> Examination:
        if told.machine:
            return _read(told.machine)
        return examine(runs_dir, told.master_port, parts - {"probes"} if told.no_probe else parts)

    if told.watch:
        return _watch(look, checks, told.nproc_per_node, told.watch)
    with parsing(f"recorded machine {told.machine}") if told.machine else nullcontext():
        found = look()
        findings = check.run_checks(checks, found, told.nproc_per_node)
    if told.record:
        _write(told.record, dump_json(mask_json(found.to_json())) + "\n")
    if told.bundle:
        from stoker.control.doctor.support_bundle import write_bundle

        write_bundle(told.bundle, found, findings, runs_dir)
    if told.json:
        report = {"schema": 1, "exit_code": check.exit_code(findings), "checks": [one.id for one in checks]}
        report |= {"findings": as_json(findings)}
        print_json({**report, "advice": advice(found, findings), "examination": found.to_json()})
    else:
        _print(found, findings, len(checks))
        for word, path in (("bundle", told.bundle), ("recorded machine", told.record)):
            if path:
                print(f"{word}: {path}")
    return check.exit_code(findings)


def _print(found: Examination, findings: list[Finding], count: int) -> None:
    machine = found.machine
    cards = f"{len(machine.gpus)} GPU(s)" + (f", driver {machine.driver}" if machine.driver else "")
    unasked = (found.missing or {}).get("torch") == NOT_ASKED
    torch = (found.torch and found.torch.version) or ("not looked at" if unasked else "none")
    memory = f"{format_used(machine.memory_available, machine.memory_total)} memory free"
    print_text(escape(f"{machine.hostname}: {cards}; {machine.cores} cores, {memory}; torch {torch}"))
    for gpu in machine.gpus:
        used = "n/a"
        if gpu.memory_used is not None and gpu.memory_total is not None:
            used = format_used(gpu.memory_used, gpu.memory_total)
        health = (found.health or {}).get(gpu.uuid)
        heat = f"{health.temperature} °C" if health and health.temperature is not None else "n/a"
        print(escape(f"  GPU {gpu.label[3:]}  {gpu.name or 'n/a'}  {used}  {heat}"))
    for finding in findings:
        print_coloured([(f"{_MARKS[finding.level]} {finding.id}", _COLOURS[finding.level]), (f": {finding.text}", "")])
        if finding.fix:
            print_text(escape(f"    → {finding.fix}"))
    if not findings:
        print_coloured([(f"✓ {count} checks, nothing wrong", SUCCESS)])
    print_text(advice(found, findings))


def _watch(look: Any, checks: list[check.Check], ranks: int, seconds: float) -> int:
    """Prints what appears and what goes away, until Ctrl-C. Ends with the last state's exit code."""
    before: dict[tuple[str, str], Finding] = {}
    findings: list[Finding] = []
    first = True
    try:
        while True:
            findings = check.run_checks(checks, look(), ranks)
            now = {(finding.id, finding.text): finding for finding in findings}
            stamp = time.strftime("%H:%M:%S")
            for key in now.keys() - before.keys():
                print_text(escape(f"{stamp} {_MARKS[now[key].level]} {key[0]}: {key[1]}"))
            for key in before.keys() - now.keys():
                print_text(escape(f"{stamp} ✓ {key[0]}: no longer: {key[1]}"))
            if first and not now:
                print(f"{stamp} ✓ {plural(len(checks), 'check')}, nothing wrong", flush=True)
            before, first = now, False
            time.sleep(seconds)
    except KeyboardInterrupt:
        return check.exit_code(findings)


def _read(path: str) -> Examination:
    try:
        return examination_from_json(read_json(path))
    except FileNotFoundError as problem:
        raise Refusal(f"recorded machine {path} does not exist", EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"recorded machine {path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        why = f"{type(problem).__name__}: {problem}"
        raise Refusal(f"{path} is not a recorded machine: {why}", EX_DATAERR) from problem


def _write(path: str, text: str) -> None:
    try:
        with AtomicFile(path, mode=0o600) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    except OSError as problem:
        raise Refusal(f"{path} can't be written: {problem.strerror}", EX_CANTCREAT) from problem
    sys.stdout.flush()


def usable(found: Examination, findings: list[Finding]) -> list[int]:
    """Cards nothing failed on, with room for a context."""
    failed = {finding.gpu for finding in findings if finding.level == "fail"}
    cards = dict.fromkeys(gpu.index for gpu in found.machine.gpus if gpu.memory_free is None or gpu.memory_free > 10**9)
    return [index for index in cards if index not in failed]


def advice(found: Examination, findings: list[Finding]) -> str:
    failed = {finding.id for finding in findings if finding.level == "fail" and finding.gpu is None}
    for id, line in (
        ("torch.installed", "torch does not import"),
        ("torch.cuda-build", "this torch can't use the GPUs"),
        ("gpu.count", "CUDA_VISIBLE_DEVICES is wrong"),
    ):
        if id in failed:
            return f"{line}: fix that first"
    if found.machine.gpu_error:
        return "the driver does not answer: `stoker run --nproc-per-node cpu train.py` runs without GPUs"
    cards = list(dict.fromkeys(gpu.index for gpu in found.machine.gpus))
    if not cards:
        return f"no GPU: `stoker run train.py` runs one CPU rank ({found.machine.cores} cores)"
    good = usable(found, findings)
    if not good:
        return (
            f"none of the {plural(len(cards), 'GPU')} can be used now: `stoker run --wait 10m train.py` waits for one"
        )
    if good == cards:
        return f"use {'the GPU' if len(cards) == 1 else f'all {len(cards)} GPUs'}: `stoker run train.py`"
    return f"use {len(good)} of {len(cards)} GPUs: `stoker run --gpus {','.join(map(str, good))} train.py`"
