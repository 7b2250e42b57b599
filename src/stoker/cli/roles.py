"""Starts multi-role jobs: `stoker run --role NAME:COUNT:COMMAND ...`, `--roles FILE` or `--allocation TEXT --role NAME:COMMAND ...`.

`stoker run` imports this module only for such a job.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.cli import run
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import options_of, replace
from stoker.contract.options import OptionParser, add_flags, build_options
from stoker.contract.units import plural
from stoker.control.launch.children import stoker_command
from stoker.control.plan.options import RANK_VARIABLES, TORCHRUN_VARIABLES, RunOptions
from stoker.control.plan.request import Request
from stoker.control.plan.targets import resolve_hosts
from stoker.control.roles import allocation, role
from stoker.control.roles.job_plan import JobPlan, JobResources
from stoker.control.roles.placement import GpuSlot
from stoker.control.roles.role import RoleSpec

# A multi-role job takes these options; any other belongs to the command of a role.
_JOB_OPTIONS = {
    "again", "allocation", "busy_timeout", "detach", "dry_run", "env", "gpu", "gpus", "grace", "hang_timeout", "hosts", "isolate", "json", "max_restarts", "min_free_memory", "name",
    "no_preflight", "notify", "on_hangup", "on_nan", "python", "quiet", "role", "roles", "runs_dir", "share_gpus", "show", "ssh_option", "stage", "sync", "wait",
}  # fmt: skip
_GPU_OPTIONS = ("gpu", "gpus", "hosts", "min_free_memory", "python", "share_gpus", "wait")  # options that select GPUs


def build_parser() -> OptionParser:
    """Build the parser of `stoker run`, in which --role may be given several times."""
    parser = OptionParser("stoker run", usage="stoker run --role NAME:COUNT:'COMMAND' ...")
    add_flags(parser, RunOptions, without=("role",))
    role_help = options_of(RunOptions)["role"].help
    parser.add_argument("--role", action="append", default=argparse.SUPPRESS, help=role_help)
    run.add_script_arguments(parser)
    return parser


def start_job(argv: list[str]) -> int:
    return start_plan(*parse(argv))


def parse(argv: list[str]) -> tuple[Request, JobPlan]:
    """Return the request and the plan of a job. Raises Refusal for errors that show without examining any machine."""
    options, script, _ = run.split(argv, build_parser())
    if script is not None:
        fix = "each role has a command, --role NAME:COUNT:'COMMAND'"
        raise Refusal(f"a multi-role job takes no script, got {script}; {fix}", EX_USAGE)
    refuse_unused_options(options)
    role_flags = options.pop("role", [])
    plan = make_plan(role_flags, options.get("roles"), options.get("allocation"))
    return make_request(options, plan.specs, role_flags), plan


def refuse_unused_options(options: Mapping[str, Any]) -> None:
    unused = sorted(set(options) - _JOB_OPTIONS)
    if unused:
        fix = "give it to a `stoker run` in the command of a role"
        raise Refusal(f"--{unused[0].replace('_', '-')} does not apply to a multi-role job; {fix}", EX_USAGE)


def make_plan(role_flags: Sequence[str], path: str | None, allocation_text: str | None) -> JobPlan:
    """Make the plan of a job from its --role flags or the file of --roles, and from --allocation."""
    if path is not None:
        if role_flags:
            raise Refusal("--roles FILE can't be combined with --role", EX_USAGE)
        specs = role.read_roles_file(path)
        if allocation_text is not None:
            return apply_allocation(specs, allocation_text)
        for spec in specs:
            role.check_batch(spec, spec.count)
        return JobPlan(specs)
    if allocation_text is None:
        return JobPlan(role.parse_role_flags(role_flags))
    counts = {flag.partition(":")[0]: 1 for flag in role_flags}
    return apply_allocation(role.parse_role_flags(role_flags, counts), allocation_text)


def apply_allocation(specs: Sequence[RoleSpec], text: str) -> JobPlan:
    """Return a plan with the counts and GPUs of an allocation: named parts go to the roles of their names, others in order."""
    parts = allocation.parse_allocation(text)
    parts_by_name = {part.name: part for part in parts if part.name}
    roles = [spec.name for spec in specs]
    for name in parts_by_name:
        if name not in roles:
            raise Refusal(f"--allocation {text}: unknown role {name!r}; the roles are {', '.join(roles)}", EX_USAGE)
    if len(parts) != len(specs):
        counts = f"one part per role ({', '.join(roles)}), got {plural(len(parts), 'part')}"
        raise Refusal(f"--allocation {text} must have {counts}", EX_USAGE)
    unnamed = iter(part for part in parts if not part.name)
    chosen = {spec.name: parts_by_name.get(spec.name) or next(unnamed) for spec in specs}
    for spec in specs:
        role.check_batch(spec, chosen[spec.name].size("d"))
    allocated = tuple(
        replace(spec, count=chosen[spec.name].replicas, gpus=chosen[spec.name].gpus_per_process) for spec in specs
    )
    first_of_group: dict[int, str] = {}
    shares_gpus_of = {}
    for name, part in chosen.items():
        if first_of_group.setdefault(part.group, name) != name:
            shares_gpus_of[name] = first_of_group[part.group]
    return JobPlan(allocated, shares_gpus_of)


def make_request(options: dict[str, Any], specs: Sequence[RoleSpec], role_flags: Sequence[str]) -> Request:
    name = "-".join(spec.name for spec in specs)[:40]
    # The commands take the place of the script's arguments, so a run with another command is another run.
    commands = tuple(f"{spec.name}:{spec.count}:{' '.join(spec.command)}" for spec in specs)
    given = frozenset((*options, *(("role",) if role_flags else ())))
    return Request(build_options(RunOptions, options), name, commands, given)


def start_plan(request: Request, plan: JobPlan) -> int:
    from stoker.control.launch import background

    inputs = _find_gpus(request, plan.specs)
    text = request.options.allocation
    if text:
        allocation.check_fit(text, allocation.parse_allocation(text), len(inputs.gpus) or 1 << 16)
    report = background.start_detached() if request.options.detach and not request.options.dry_run else None

    from stoker.control.roles.job import launch_job

    return launch_job(request, plan, inputs, report)


def _find_gpus(request: Request, specs: Sequence[RoleSpec]) -> JobResources:
    """Return the hosts and the GPUs that can be used now, as `stoker run --dry-run` chooses them for these options."""
    options = request.options
    _, hosts = resolve_hosts(request, os.environ)
    uses_no_gpu = all(spec.gpus == 0 for spec in specs)
    if uses_no_gpu and hosts is None:
        return JobResources((), ())
    argv = ["run", "--dry-run", "--json"]
    for name in _GPU_OPTIONS:
        value = getattr(options, name)
        if value:
            argv += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    argv += [f"--ssh-option={option}" for option in options.ssh_option]
    env = {name: value for name, value in os.environ.items() if name not in (*TORCHRUN_VARIABLES, *RANK_VARIABLES)}
    command = stoker_command([*argv, "--no-python", "true"])
    dry_run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if dry_run.returncode:
        line = dry_run.stderr.strip().removeprefix("stoker: ")
        raise Refusal(line or f"selecting the GPUs failed with exit code {dry_run.returncode}", dry_run.returncode)
    plan = json.loads(dry_run.stdout)
    slots = tuple(
        GpuSlot(rank["gpu"]["uuid"], rank["label"], rank["gpu"]["index"], rank["host"], rank["gpu"].get("name"))
        for rank in plan["places"]
        if rank["gpu"] and not uses_no_gpu
    )
    lines = plan["lines"] if slots else ["✓ No GPU is used: the roles run on the CPU"]
    return JobResources(slots, tuple(lines), tuple(plan["hosts"]), hosts)
