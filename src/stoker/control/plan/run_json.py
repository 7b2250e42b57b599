"""Makes the content of run.json: the run's request, plan, machines and versions."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from stoker.contract import layout
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import as_json, pick_fields
from stoker.contract.masking import allowed_environment
from stoker.contract.process import find_process
from stoker.contract.safe_io import read_text
from stoker.control.machine.model import Machine
from stoker.control.plan.request import Request
from stoker.control.plan.run_changes import digest_contents
from stoker.control.plan.run_dir import RunDir, config_hash
from stoker.control.plan.run_plan import RunPlan
from stoker.control.record.resume_command import command_with_name
from stoker.control.record.run_index import is_name_unique
from stoker.control.record.run_record import read_json

_RECORDED_PACKAGES = ("torch", "transformers", "numpy", "lightning", "accelerate")


def describe(
    request: Request,
    plan: RunPlan,
    run_dir: RunDir,
    machines: Mapping[str, Machine],
    started: float,
    copy_commands: Mapping[str, list[str]] | None = None,
) -> dict[str, Any]:
    """Return run.json as it is written before the ranks start; `enrich` adds what takes longer.

    `copy_commands` maps each host that does not share the run directory to the command that copies its files here.
    """
    from stoker import __version__

    launcher, host = find_process(os.getpid()), os.uname().nodename
    options = as_json(request.options)
    description = {
        "run": run_dir.id,
        "name": run_dir.name,
        "started": started,
        "cwd": os.getcwd(),
        "launcher": {
            "pid": os.getpid(),
            "start": launcher.start if launcher else 0,
            "host": host,
            "uid": os.getuid(),
        },
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "request": {key: options[key] for key in request.given},
        "script": request.script,
        "args": list(request.args),
        **({} if request.identity is None else {"identity": list(request.identity)}),
        "plan": _plan_json(plan),
        "hosts": {name or host: machine.to_json() for name, machine in machines.items()},
        "versions": {"stoker": __version__, "python": sys.version.split()[0]},
        "environment": allowed_environment(os.environ),
        **({"apart": dict(copy_commands)} if copy_commands else {}),
    }
    if request.options.name:  # written before `enrich`, whose write may fail on a full disk
        description |= {"config_hash": config_hash(request), "contents": digest_contents(request)}
    return description


def enrich(run_dir: str, request: Request, plan: RunPlan) -> dict[str, Any]:
    """Return run.json with package versions, the Git commit, digests and this attempt's plan.

    It is called while the ranks start up, so that nobody waits for it.
    """
    description: dict[str, Any] = read_json(os.path.join(run_dir, layout.RUN)) or {}
    description["plan"] = _plan_json(plan)
    description.setdefault("versions", {}).update(_read_package_versions())
    description["git"] = git_revision(os.getcwd())
    description["config_hash"] = config_hash(request)
    if "contents" not in description:
        description["contents"] = digest_contents(request)
    return description


def _plan_json(plan: RunPlan) -> dict[str, Any]:
    ranks = [
        {
            **pick_fields(rank, "rank", "role", "role_rank", "local_rank", "host", "label"),
            "gpu": rank.gpu and rank.gpu.uuid,
        }
        for rank in plan.places
    ]
    return {
        "world_size": plan.world_size,
        "isolate": plan.isolate,
        "init_slots": dict(plan.init_slots),
        "argv": plan.roles[0].argv,
        "roles": [{"name": role.name, "world_size": role.world, "argv": role.argv} for role in plan.roles],
        "ranks": ranks,
    }


def make_continue_command(request: Request, run_dir: RunDir, verdict: Verdict) -> str:
    """Return the command that continues this run, and still does when other runs have been started.

    It names the run by its id, or by --name if no other run has that name: a later run of the name has other settings or
    is this one. After a stop rule it takes the id, since the name alone would only repeat the verdict.
    """
    name = request.options.name
    is_unique = not verdict.is_stop_rule and is_name_unique(os.path.dirname(run_dir.dir), run_dir.name)
    by_name = name if name and (name == run_dir.id or is_unique) else None
    return command_with_name(list(request.typed) or sys.argv[1:], by_name or run_dir.id, name)


def _read_package_versions() -> dict[str, str]:
    """Return versions by the names of .dist-info folders: importing importlib.metadata takes longer than the launch."""
    versions: dict[str, str] = {}
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            package, dash, rest = entry.partition("-")
            if dash and rest.endswith(".dist-info") and package in _RECORDED_PACKAGES:
                versions.setdefault(package, rest[: -len(".dist-info")])
    return versions


def git_revision(folder: str) -> str | None:
    """Return the commit that is checked out in a folder, read from Git's files, or None."""
    while not os.path.exists(git_dir := os.path.join(folder, ".git")):
        parent = os.path.dirname(folder)
        if parent == folder:
            return None
        folder = parent
    try:
        if not os.path.isdir(git_dir):  # in a worktree .git is a file
            git_dir = os.path.join(folder, read_text(git_dir).partition("gitdir:")[2].strip())
        head = read_text(os.path.join(git_dir, "HEAD")).strip()
        commit = (_read_ref(git_dir, head[5:]) if head.startswith("ref: ") else head).partition(" ")[0].strip()
    except (OSError, ValueError):
        return None
    is_commit = len(commit) in (40, 64) and all(char in "0123456789abcdef" for char in commit)
    return commit if is_commit else None


def _read_ref(git_dir: str, ref: str) -> str:
    """Return the line with a ref's commit, from the ref's file or from packed-refs, or ""."""
    common_dir = git_dir.partition(f"{os.sep}worktrees{os.sep}")[0]
    for folder in (git_dir, common_dir):
        path = os.path.join(folder, ref)
        if os.path.exists(path):
            return read_text(path)
    packed = read_text(os.path.join(common_dir, "packed-refs")).splitlines()
    return next((line for line in packed if line.endswith(f" {ref}")), "")
