"""`stoker doctor [--only gpu.] [--json] [--watch] [--bundle FILE] [--record FILE] [--machine FILE]`: checks this machine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_CANTCREAT, EX_DATAERR, EX_NOINPUT, Refusal, parsing
from stoker.contract.evidence import Finding
from stoker.contract.frozen import as_json
from stoker.contract.masking import mask_json
from stoker.contract.options import OptionParser
from stoker.contract.safe_io import AtomicFile, read_json, refuse_other_kind
from stoker.contract.terminal import ERROR, SUCCESS, WARNING, print_coloured, print_json, print_text
from stoker.contract.text import dump_json, escape
from stoker.contract.units import format_used, parse_duration, plural
from stoker.control.doctor.check import Check, choose_checks, exit_code, run_checks
from stoker.control.machine.examination import Examination, examination_from_json
from stoker.control.machine.examine import NOT_ASKED, PARTS, examine

_EXAMPLES = """exit codes: 0 fine, 1 warnings, 2 failures, 3 something could not be checked

examples:
  stoker doctor
  stoker doctor --only gpu. --json
  stoker doctor --bundle ticket.tar.gz      for a support ticket; recognized secrets are removed
  stoker doctor --record box.json           record this machine; --machine box.json checks the recording"""
_MARKS = {"fail": "✗", "warn": "!", "unknown": "?"}
_COLOURS = {"fail": ERROR, "warn": WARNING, "unknown": ""}
_MIN_FREE = 10**9  # bytes: a GPU with less free memory has too little for a CUDA context


def build_parser() -> OptionParser:
    description = "Shows what is wrong with this machine, the evidence, and how to fix it."
    parser = OptionParser("stoker doctor", description, _EXAMPLES)
    repeated: dict[str, Any] = {"action": "append", "default": []}
    parser.option("--only", "ID", "only checks whose id starts with this, e.g. gpu. or host.disk", **repeated)
    parser.option("--skip", "ID", "skip checks whose id starts with this", **repeated)
    parser.option("--nproc-per-node --nproc_per_node", "N", "how many ranks you plan to run", int, default=0)
    parser.option("--master-port --master_port", "PORT", "a port to check", int, default=0)
    parser.switch("--no-probe", "create no CUDA context on the GPUs")
    parser.switch("--json", "print everything as JSON")
    watch = "check again at this interval (default: 10s) and print what changes"
    parser.option("--watch", "TIME", watch, parse_duration, nargs="?", const="10s")
    parser.option("--bundle", "FILE", "write a tar.gz for a support ticket")
    parser.option("--record", "FILE", "write the examination as JSON")
    parser.option("--machine", "FILE", "check a recorded machine instead of this one")
    parser.runs_dir()
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    checks = choose_checks(args.only, args.skip)
    runs_dir = layout.runs_root(args.runs_dir, os.environ)
    if args.no_probe:
        checks = [check for check in checks if "probes" not in check.needs]
    if args.record:
        refuse_other_kind(args.record, b"{", "a recorded machine")
    if args.bundle:
        refuse_other_kind(args.bundle, b"\x1f\x8b", "a bundle (tar.gz)")
    needs_all_parts = bool(args.record or args.bundle)
    needed_parts = frozenset(part for check in checks for part in check.needs if part in PARTS)
    parts = PARTS if needs_all_parts else needed_parts

    def examine_or_read() -> Examination:
        if args.machine:
            return _read_recorded(args.machine)
        return examine(runs_dir, args.master_port, parts - {"probes"} if args.no_probe else parts)

    if args.watch:
        return _watch(examine_or_read, checks, args.nproc_per_node, args.watch)
    with parsing(f"recorded machine {args.machine}") if args.machine else nullcontext():
        examination = examine_or_read()
        findings = run_checks(checks, examination, args.nproc_per_node)
    if args.record:
        _write_file(args.record, dump_json(mask_json(examination.to_json())) + "\n")
    if args.bundle:
        from stoker.control.doctor.support_bundle import write_bundle

        write_bundle(args.bundle, examination, findings, runs_dir)
    if args.json:
        print_json(
            {
                "schema": 1,
                "exit_code": exit_code(findings),
                "checks": [check.id for check in checks],
                "findings": as_json(findings),
                "advice": recommend_next_step(examination, findings),
                "examination": examination.to_json(),
            }
        )
    else:
        _print_report(examination, findings, len(checks))
        for label, path in (("bundle", args.bundle), ("recorded machine", args.record)):
            if path:
                print(f"{label}: {path}")
    return exit_code(findings)


def _print_report(examination: Examination, findings: list[Finding], count: int) -> None:
    machine = examination.machine
    gpus = f"{len(machine.gpus)} GPU(s)" + (f", driver {machine.driver}" if machine.driver else "")
    torch_skipped = (examination.missing or {}).get("torch") == NOT_ASKED
    torch = (examination.torch and examination.torch.version) or ("not checked" if torch_skipped else "none")
    memory = f"{format_used(machine.memory_available, machine.memory_total)} memory free"
    print_text(escape(f"{machine.hostname}: {gpus}; {machine.cores} cores, {memory}; torch {torch}"))
    for gpu in machine.gpus:
        used = "n/a"
        if gpu.memory_used is not None and gpu.memory_total is not None:
            used = format_used(gpu.memory_used, gpu.memory_total)
        health = (examination.health or {}).get(gpu.uuid)
        temperature = f"{health.temperature} °C" if health and health.temperature is not None else "n/a"
        print(escape(f"  GPU {gpu.label[3:]}  {gpu.name or 'n/a'}  {used}  {temperature}"))
    for finding in findings:
        print_coloured([(f"{_MARKS[finding.level]} {finding.id}", _COLOURS[finding.level]), (f": {finding.text}", "")])
        if finding.fix:
            print_text(escape(f"    → {finding.fix}"))
    if not findings:
        print_coloured([(f"✓ {plural(count, 'check')}, nothing wrong", SUCCESS)])
    print_text(recommend_next_step(examination, findings))


def _watch(examine: Callable[[], Examination], checks: list[Check], ranks: int, seconds: float) -> int:
    """Print findings that appear and disappear, until Ctrl-C. Return the exit code of the last state."""
    before: dict[tuple[str, str], Finding] = {}
    findings: list[Finding] = []
    first = True
    try:
        while True:
            findings = run_checks(checks, examine(), ranks)
            now = {(finding.id, finding.text): finding for finding in findings}
            clock = time.strftime("%H:%M:%S")
            for key in now.keys() - before.keys():
                print_text(escape(f"{clock} {_MARKS[now[key].level]} {key[0]}: {key[1]}"))
            for key in before.keys() - now.keys():
                print_text(escape(f"{clock} ✓ {key[0]}: resolved: {key[1]}"))
            if first and not now:
                print(f"{clock} ✓ {plural(len(checks), 'check')}, nothing wrong", flush=True)
            before, first = now, False
            time.sleep(seconds)
    except KeyboardInterrupt:
        return exit_code(findings)


def _read_recorded(path: str) -> Examination:
    try:
        return examination_from_json(read_json(path))
    except FileNotFoundError as problem:
        raise Refusal(f"recorded machine {path} does not exist", EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"recorded machine {path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        why = f"{type(problem).__name__}: {problem}"
        raise Refusal(f"{path} is not a recorded machine: {why}", EX_DATAERR) from problem


def _write_file(path: str, text: str) -> None:
    try:
        with AtomicFile(path, mode=0o600) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    except OSError as problem:
        raise Refusal(f"{path} can't be written: {problem.strerror}", EX_CANTCREAT) from problem
    sys.stdout.flush()


def recommend_next_step(examination: Examination, findings: list[Finding]) -> str:
    """Return what to fix first, or which GPUs to train on and the command for it."""
    failed_checks = {finding.id for finding in findings if finding.level == "fail" and finding.gpu is None}
    for id, line in (
        ("torch.installed", "torch can't be imported"),
        ("torch.cuda-build", "this torch can't use the GPUs"),
        ("gpu.count", "CUDA_VISIBLE_DEVICES is wrong"),
    ):
        if id in failed_checks:
            return f"{line}; fix that first"
    if examination.machine.gpu_error:
        return "the driver is not responding; `stoker run --nproc-per-node cpu train.py` runs without GPUs"
    gpus = list(dict.fromkeys(gpu.index for gpu in examination.machine.gpus))
    if not gpus:
        return f"this machine has no GPU; `stoker run train.py` runs one CPU rank ({examination.machine.cores} cores)"
    failed_gpus = {finding.gpu for finding in findings if finding.level == "fail"}
    free = [gpu for gpu in examination.machine.gpus if gpu.memory_free is None or gpu.memory_free > _MIN_FREE]
    usable = [index for index in dict.fromkeys(gpu.index for gpu in free) if index not in failed_gpus]
    if not usable:
        problem = "the GPU can't be used now" if len(gpus) == 1 else f"none of the {len(gpus)} GPUs can be used now"
        return f"{problem}; `stoker run --wait 10m train.py` waits for one"
    if usable == gpus:
        return f"use {'the GPU' if len(gpus) == 1 else f'all {len(gpus)} GPUs'}: `stoker run train.py`"
    return f"use {len(usable)} of {len(gpus)} GPUs: `stoker run --gpus {','.join(map(str, usable))} train.py`"
