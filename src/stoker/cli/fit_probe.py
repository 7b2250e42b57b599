"""`stoker fit --probe`: five real steps with the planned settings, then planned against measured."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile

from stoker.contract import layout
from stoker.contract.errors import EX_SOFTWARE, EX_UNAVAILABLE, Refusal
from stoker.contract.safe_io import read_json
from stoker.contract.terminal import print_json, print_status
from stoker.contract.units import finite_number, format_bytes
from stoker.control.launch.children import stoker_command
from stoker.training.fit import text
from stoker.training.fit.plan import Plan
from stoker.training.fit.terms import GRPO

STEPS = 5


def probe(found: Plan, given: text.Command, as_json: bool) -> int:
    """0: it ran, and the plan held. The run's folder is a temporary one."""
    if any(share.card.host for share in found.shares):
        raise Refusal("--probe trains on this machine: leave --hosts out", EX_UNAVAILABLE)
    words = shlex.split(text.command(found, given))[1:]
    more = [
        "--max-steps",
        str(STEPS),
        "--eval-every",
        "0",
        "--checkpoint.export",
        "false",
        "--checkpoint.at_end",
        "false",
    ]
    if found.wish.samples and found.wish.needs.stage != GRPO:
        more += ["--batch.tokens", str(found.wish.samples * found.wish.context)]
    labels = [share.card.label.removeprefix("GPU ") for share in found.shares]
    with tempfile.TemporaryDirectory(prefix="stoker-probe-") as folder:
        more += ["--runs-dir", folder, "--gpus", ",".join(labels)]
        print_status(f"probe: {shlex.join(['stoker', *words, *more])}")
        done = subprocess.run(stoker_command([*words, *more]), check=False, stdout=sys.stderr.fileno())
        told = _measured(folder)
    if done.returncode:
        raise Refusal(f"the probe ended with {done.returncode}: see its lines above", done.returncode)
    return _report(found, told, as_json)


def _measured(folder: str) -> object:
    for run in sorted(os.listdir(folder), reverse=True):
        path = os.path.join(folder, run, layout.MEMORY)
        if os.path.isfile(path):
            return read_json(path)
    raise Refusal("the probe measured no GPU memory: `stoker doctor` shows whether there is a GPU", EX_SOFTWARE)


def _report(found: Plan, told: object, as_json: bool) -> int:
    planned = found.shares[0].planned.total
    peak, rate = finite_number(told, "peak_bytes"), finite_number(told, "tokens_per_s")
    if not peak:
        raise Refusal("the probe measured no GPU memory: `stoker doctor` shows whether there is a GPU", EX_SOFTWARE)
    if as_json:
        print_json({"schema": text.SCHEMA, "planned_bytes": planned, "measured": told})
        return 0
    share = peak / planned - 1
    print(
        f"planned {format_bytes(planned)}, measured {format_bytes(peak)} ({abs(share):.1%} {'above' if share > 0 else 'below'} the plan)"
    )
    if rate:
        print(f"speed: {rate:,.0f} tokens/s (measured over {STEPS} steps)")
    return 0
