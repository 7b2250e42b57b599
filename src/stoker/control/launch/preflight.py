"""Before anything starts: the doctor's fast checks on what the plan will use, and, if asked for, a proof of each GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping

from stoker.contract import env_vars, layout
from stoker.contract.errors import EX_CANTCREAT, EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import replace
from stoker.contract.safe_io import read_json
from stoker.contract.text import is_digits
from stoker.contract.units import format_bytes, plural
from stoker.control.doctor import check
from stoker.control.machine.examination import KNOWN, Examination, Probe, examination_from_json
from stoker.control.machine.host_limits import quick_host
from stoker.control.machine.model import Gpu, Machine
from stoker.control.plan.gpu_choice import marked
from stoker.control.plan.options import RunOptions
from stoker.control.plan.run_plan import RunPlan

# The plan has already refused or left out what these would say of a card.
_PLANNED = ("gpu.driver", "gpu.count", "gpu.mig", "host.cores")


def preflight(options: RunOptions, plan: RunPlan, machine: Machine) -> list[str]:
    """Warnings, a line each. A failure that would end the job is a refusal."""
    cards = {gpu.uuid for place in plan.places for gpu in place.cards}
    used = replace(machine, gpus=tuple(gpu for gpu in machine.gpus if gpu.uuid in cards))
    runs_dir = layout.runs_root(options.runs_dir, os.environ, write=True)
    environment = {name: os.environ[name] for name in KNOWN if name in os.environ}
    found = Examination(used, host=quick_host(runs_dir), environment=environment)
    fast = [one for one in check.load_checks().values() if one.fast and one.id not in _PLANNED]
    lines = []
    for finding in check.run_checks(fast, found, plan.world_size):
        line = f"{finding.id}: {finding.text}" + (f"; {finding.fix}" if finding.fix else "")
        if finding.level == "fail":
            code = EX_CANTCREAT if finding.id == "host.disk" else EX_UNAVAILABLE
            raise Refusal(f"{line} (--no-preflight starts all the same)", code, cause=finding.id)
        lines.append(f"! {line}")
    return lines


_BAD = ("dead", "hung", "wrong", "absent")


def proof(machine: Machine, card: Gpu) -> str:
    """How this card fails its proof; empty if it does not."""
    from stoker.control.machine.examine import probe_cards

    found = (_recorded() or probe_cards([gpu for gpu in machine.gpus if gpu.uuid == card.uuid])).get(card.uuid)
    return f"{found.outcome}: {found.detail}" if found is not None and found.outcome in _BAD else ""


def diagnosis(machine: Machine, card: Gpu) -> list[str]:
    """Why a card may be "busy or unavailable": its mode, who is on it, what is left, and its proof."""
    now = next((gpu for gpu in machine.gpus if gpu.uuid == card.uuid), None)
    if now is None or now.error:
        return [f"{card.label}: NVML does not answer for it any more{': ' + now.error if now and now.error else ''}"]
    lines = []
    if now.compute_mode not in (None, "default"):
        fix = f"nvidia-smi -i {now.index} -c DEFAULT"
        lines.append(f"{card.label} is in {now.compute_mode} mode: a second process is refused; {fix}")
    for one in now.holders or ():
        who = (one.command or "outside this container") + (f", {one.user}" if one.user else "")
        lines.append(f"{card.label} is held by pid {one.pid} ({who})")
    if now.memory_free is not None and now.memory_total is not None:
        lines.append(f"{card.label} has {format_bytes(now.memory_free)} of {format_bytes(now.memory_total)} free")
    broken = proof(machine, card)
    outcome = f"fails its proof: {broken}" if broken else "passes its proof now: it was busy for a while"
    return [*lines, f"{card.label} {outcome}"]


def without_bad(machine: Machine) -> Machine:
    """The machine with every GPU that fails its proof marked as one that does not answer."""
    cards = [gpu for gpu in machine.gpus if not gpu.error]
    from stoker.control.machine.examine import probe_cards

    probes = _recorded() or probe_cards(cards)
    bad = {uuid: f"{probe.outcome}: {probe.detail}" for uuid, probe in probes.items() if probe.outcome in _BAD}
    return marked(machine, bad)


def _recorded() -> Mapping[str, Probe] | None:
    path = os.environ.get(env_vars.MACHINE)
    if not path:
        return None
    data = read_json(path)
    return examination_from_json(data).probes if "machine" in data else {}


def check_legal(options: RunOptions, plan: RunPlan) -> None:
    if options.legal_ranks is None:
        return
    words = [word.strip() for word in options.legal_ranks.split(",")]
    if not all(is_digits(word) and int(word) for word in words):
        raise Refusal(f"--legal-ranks {options.legal_ranks}: write numbers like 1,2,4,8", EX_USAGE)
    legal = sorted(int(word) for word in words)
    if plan.world_size not in legal:
        fits = [count for count in legal if count <= plan.world_size]
        hint = f"--nproc-per-node {fits[-1]} would do" if fits else "too few GPUs for any of them"
        line = f"{plural(plan.world_size, 'rank')}, and the job takes {', '.join(map(str, legal))}; {hint}"
        raise Refusal(line, EX_UNAVAILABLE, cause="gpu.legal")
