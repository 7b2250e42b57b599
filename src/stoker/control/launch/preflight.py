"""Runs the checks before a start: the doctor's fast checks of the planned machine, and tests of GPUs."""

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
from stoker.control.machine.examination import KNOWN_VARIABLES, Examination, GpuProbe, examination_from_json
from stoker.control.machine.host_limits import read_host_limits
from stoker.control.machine.model import Gpu, Machine
from stoker.control.plan.gpu_choice import with_gpu_errors
from stoker.control.plan.options import RunOptions
from stoker.control.plan.run_plan import RunPlan

# The plan has already refused or excluded the GPUs that these checks would find.
_DONE_BY_PLAN = ("gpu.driver", "gpu.count", "gpu.mig", "host.cores")
_BAD_OUTCOMES = ("dead", "hung", "wrong", "absent")


def check_machine(options: RunOptions, plan: RunPlan, machine: Machine) -> list[str]:
    """Run the fast checks on what the plan uses, and return warnings. Raises Refusal for a failure that would end the job."""
    uuids = {gpu.uuid for rank in plan.places for gpu in rank.all_gpus}
    used = replace(machine, gpus=tuple(gpu for gpu in machine.gpus if gpu.uuid in uuids))
    runs_dir = layout.runs_root(options.runs_dir, os.environ, write=True)
    environment = {name: os.environ[name] for name in KNOWN_VARIABLES if name in os.environ}
    examination = Examination(used, host=read_host_limits(runs_dir), environment=environment)
    checks = [entry for entry in check.load_checks().values() if entry.fast and entry.id not in _DONE_BY_PLAN]
    warnings = []
    for finding in check.run_checks(checks, examination, plan.world_size):
        line = f"{finding.id}: {finding.text}" + (f"; {finding.fix}" if finding.fix else "")
        if finding.level == "fail":
            code = EX_CANTCREAT if finding.id == "host.disk" else EX_UNAVAILABLE
            raise Refusal(f"{line} (use --no-preflight to start anyway)", code, cause=finding.id)
        warnings.append(f"! {line}")
    return warnings


def check_legal_ranks(options: RunOptions, plan: RunPlan) -> None:
    """Refuse a plan whose number of ranks is not among --legal-ranks."""
    if options.legal_ranks is None:
        return
    numbers = [number.strip() for number in options.legal_ranks.split(",")]
    if not all(is_digits(number) and int(number) for number in numbers):
        raise Refusal(f"--legal-ranks must be numbers like 1,2,4,8, got {options.legal_ranks}", EX_USAGE)
    legal = sorted(int(number) for number in numbers)
    if plan.world_size not in legal:
        smaller = [count for count in legal if count <= plan.world_size]
        hint = f"use --nproc-per-node {smaller[-1]}" if smaller else "there are too few GPUs for any of them"
        allowed = ", ".join(map(str, legal))
        line = f"the plan has {plural(plan.world_size, 'rank')}, but --legal-ranks allows {allowed}; {hint}"
        raise Refusal(line, EX_UNAVAILABLE, cause="gpu.legal")


# ---- tests of GPUs ----


def probe_gpu(machine: Machine, gpu: Gpu) -> str:
    """Test a GPU, and return how it fails, or "" if it passes."""
    probe = _probe([entry for entry in machine.gpus if entry.uuid == gpu.uuid]).get(gpu.uuid)
    return _describe_failure(probe) if probe is not None else ""


def mark_bad_gpus(machine: Machine) -> Machine:
    """Test all GPUs, and return the machine with an error set on those that fail."""
    probes = _probe([gpu for gpu in machine.gpus if not gpu.error])
    failures = {uuid: _describe_failure(probe) for uuid, probe in probes.items()}
    return with_gpu_errors(machine, {uuid: failure for uuid, failure in failures.items() if failure})


def diagnose_gpu(machine: Machine, gpu: Gpu) -> list[str]:
    """Return why a GPU may be "busy or unavailable": its mode, its processes, its free memory, and its test."""
    now = next((entry for entry in machine.gpus if entry.uuid == gpu.uuid), None)
    if now is None or now.error:
        error = f": {now.error}" if now and now.error else ""
        return [f"{gpu.label}: NVML no longer reports it{error}"]
    lines = []
    if now.compute_mode not in (None, "default"):
        fix = f"nvidia-smi -i {now.index} -c DEFAULT"
        lines.append(f"{gpu.label} is in {now.compute_mode} mode: a second process is refused; {fix}")
    for holder in now.holders or ():
        process = (holder.command or "outside this container") + (f", {holder.user}" if holder.user else "")
        lines.append(f"{gpu.label} is held by pid {holder.pid} ({process})")
    if now.memory_free is not None and now.memory_total is not None:
        lines.append(f"{gpu.label} has {format_bytes(now.memory_free)} of {format_bytes(now.memory_total)} free")
    failure = probe_gpu(machine, gpu)
    outcome = f"fails its test: {failure}" if failure else "passes its test now; it was busy only for a while"
    return [*lines, f"{gpu.label} {outcome}"]


def _probe(gpus: list[Gpu]) -> Mapping[str, GpuProbe]:
    """Return the outcome of a test of each GPU, by uuid. A recorded machine has recorded outcomes."""
    path = os.environ.get(env_vars.MACHINE)
    if path:
        data = read_json(path)
        recorded = examination_from_json(data).probes if "machine" in data else {}
        if recorded:
            return recorded
    from stoker.control.machine.examine import probe_gpus

    return probe_gpus(gpus)


def _describe_failure(probe: GpuProbe) -> str:
    return f"{probe.outcome}: {probe.detail}" if probe.outcome in _BAD_OUTCOMES else ""
