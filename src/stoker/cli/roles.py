"""stoker run --role NAME:COUNT:COMMAND ... | --roles FILE | --allocation TEXT --role NAME:COMMAND ..."""

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

# What a job of several roles takes besides --role, --roles and --allocation; the rest is each role's own.
_TAKEN = {
    "again", "allocation", "busy_timeout", "detach", "dry_run", "env", "gpu", "gpus", "grace", "hang_timeout", "hosts", "isolate", "json", "max_restarts", "min_free_memory", "name",
    "no_preflight", "notify", "on_hangup", "on_nan", "python", "quiet", "role", "roles", "runs_dir", "share_gpus", "show", "ssh_option", "stage", "sync", "wait",
}  # fmt: skip
_OF_LOOK = ("gpu", "gpus", "hosts", "min_free_memory", "python", "share_gpus", "wait")


def parser() -> OptionParser:
    """As `stoker run`'s, but for --role, which may be given several times."""
    made = OptionParser("stoker run", usage="stoker run --role NAME:COUNT:'COMMAND' ...")
    add_flags(made, RunOptions, without=("role",))
    made.add_argument("--role", action="append", default=argparse.SUPPRESS, help=options_of(RunOptions)["role"].help)
    run.add_script(made)
    return made


def request_of(argv: list[str]) -> tuple[Request, JobPlan]:
    """Refuses what can't be, before anything is looked at."""
    told, script, _ = run.split(argv, parser())
    if script is not None:
        line = (
            f"a job of roles has no script of its own ({script}): each role has a command, --role NAME:COUNT:'COMMAND'"
        )
        raise Refusal(line, EX_USAGE)
    refuse_useless(told)
    words = told.pop("role", [])
    plan = make_plan(words, told.get("roles"), told.get("allocation"))
    return request_for(told, plan.specs, words), plan


def refuse_useless(told: Mapping[str, Any]) -> None:
    useless = sorted(set(told) - _TAKEN)
    if useless:
        flag = useless[0].replace("_", "-")
        raise Refusal(
            f"--{flag} can't be given to a job of roles; a role's command may be a `stoker run` of its own", EX_USAGE
        )


def start_job(argv: list[str]) -> int:
    return start_plan(*request_of(argv))


def start_plan(request: Request, plan: JobPlan) -> int:
    from stoker.control.launch import background

    resources = look(request, plan.specs)
    text = request.options.allocation
    if text:
        allocation.check(text, allocation.parse_allocation(text), len(resources.gpus) or 1 << 16)
    report = background.start_detached() if request.options.detach and not request.options.dry_run else None
    from stoker.control.roles.job import launch_job

    return launch_job(request, plan, resources, report)


def request_for(told: dict[str, Any], specs: Sequence[RoleSpec], words: Sequence[str]) -> Request:
    options = build_options(RunOptions, told)
    name = "-".join(spec.name for spec in specs)[:40]
    # The commands make it the same run, or another.
    commands = tuple(f"{spec.name}:{spec.count}:{' '.join(spec.command)}" for spec in specs)
    return Request(options, name, commands, frozenset((*told, *(("role",) if words else ()))))


def make_plan(words: Sequence[str], path: str | None, text: str | None) -> JobPlan:
    if path is not None:
        if words:
            raise Refusal("--roles FILE and --role: give one of them", EX_USAGE)
        specs = role.read_roles_file(path)
        if text is not None:
            return by_allocation(specs, text)
        for spec in specs:
            role.check_batch(spec, spec.count)
        return JobPlan(specs)
    if text is None:
        return JobPlan(role.parse_role_flags(words))
    names = {word.partition(":")[0]: 1 for word in words}
    return by_allocation(role.parse_role_flags(words, names), text)


def by_allocation(specs: Sequence[RoleSpec], text: str) -> JobPlan:
    """Counts and GPUs as the allocation says: by name where its parts have names, else in order."""
    parts = allocation.parse_allocation(text)
    named = {part.name: part for part in parts if part.name}
    known = [spec.name for spec in specs]
    for name in named:
        if name not in known:
            raise Refusal(f"--allocation {text}: there is no role {name!r}; the roles are {', '.join(known)}", EX_USAGE)
    if len(parts) != len(specs):
        raise Refusal(
            f"--allocation {text} has {plural(len(parts), 'part')}, and there are {len(specs)} roles: {', '.join(known)}",
            EX_USAGE,
        )
    rest = iter(part for part in parts if not part.name)
    chosen = {spec.name: named.get(spec.name) or next(rest) for spec in specs}
    for spec in specs:
        role.check_batch(spec, chosen[spec.name].size("d"))
    made = tuple(replace(spec, count=chosen[spec.name].replicas, gpus=chosen[spec.name].gpus) for spec in specs)
    first: dict[int, str] = {}
    share = {}
    for name, part in chosen.items():
        if first.setdefault(part.group, name) != name:
            share[name] = first[part.group]
    return JobPlan(made, share)


def look(request: Request, specs: Sequence[RoleSpec]) -> JobResources:
    """The hosts, and the GPUs that can be used now, as `stoker run` itself would choose them."""
    options = request.options
    _, hosts = resolve_hosts(request, os.environ)
    no_gpus = all(spec.gpus == 0 for spec in specs)
    if no_gpus and hosts is None:
        return JobResources((), ())
    words = ["run", "--dry-run", "--json"]
    for name in _OF_LOOK:
        value = getattr(options, name)
        if value:
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    words += [f"--ssh-option={word}" for word in options.ssh_option]
    env = {name: value for name, value in os.environ.items() if name not in (*TORCHRUN_VARIABLES, *RANK_VARIABLES)}
    said = subprocess.run(
        stoker_command([*words, "--no-python", "true"]), env=env, capture_output=True, text=True, check=False
    )
    if said.returncode:
        line = said.stderr.strip().removeprefix("stoker: ") or f"looking at the GPUs failed with {said.returncode}"
        raise Refusal(line, said.returncode)
    told = json.loads(said.stdout)
    cards = tuple(
        GpuSlot(place["gpu"]["uuid"], place["label"], place["gpu"]["index"], place["host"], place["gpu"].get("name"))
        for place in told["places"]
        if place["gpu"] and not no_gpus
    )
    lines = told["lines"] if cards else ["✓ No GPU is used: the roles run on the CPU"]
    return JobResources(cards, tuple(lines), tuple(told["hosts"]), hosts)
