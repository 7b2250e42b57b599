"""What a run is about: its description for run.json."""

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
from stoker.control.plan.run_changes import content_digests
from stoker.control.plan.run_dir import RunDir, config_hash
from stoker.control.plan.run_plan import RunPlan
from stoker.control.record.resume_command import command_for
from stoker.control.record.run_index import is_only_one
from stoker.control.record.run_record import read_json

_GIT_FILE = 16 << 20  # bytes: packed-refs of a repository with 200,000 branches


def describe(
    request: Request,
    plan: RunPlan,
    place: RunDir,
    machines: Mapping[str, Machine],
    began: float,
    apart: Mapping[str, list[str]] | None = None,
) -> dict[str, Any]:
    """`apart`: hosts with a run directory of their own -> the command that copies from there."""
    from stoker import __version__

    me, host = find_process(os.getpid()), os.uname().nodename
    options = as_json(request.options)
    return {
        "run": place.id,
        "name": place.name,
        "started": began,
        "cwd": os.getcwd(),
        "launcher": {"pid": os.getpid(), "start": me.start if me else 0, "host": host, "uid": os.getuid()},
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "request": {key: options[key] for key in request.given},
        "script": request.script,
        "args": list(request.args),
        **({} if request.identity is None else {"identity": list(request.identity)}),
        "plan": _planned(plan),
        "hosts": {name or host: machine.to_json() for name, machine in machines.items()},
        "versions": {"stoker": __version__, "python": sys.version.split()[0]},
        "environment": allowed_environment(os.environ),
        **({"apart": dict(apart)} if apart else {}),
        # A full disk may keep `enrich` from writing it.
        **({"config_hash": config_hash(request), "contents": content_digests(request)} if request.options.name else {}),
    }


def continue_command(request: Request, place: RunDir, verdict: Verdict) -> str:
    """The command that continues this run, whatever is started after it: by its id, unless its user gave it a name that no
    other run has. (One that is started later under that name has other settings, or it is this run.) After a stop rule it
    is by its id: the same command under the name only repeats the verdict.
    """
    given = request.options.name
    is_unique = not verdict.is_stop_rule and is_only_one(os.path.dirname(place.dir), place.name)
    by_name = given is not None and (given == place.id or is_unique)
    return command_for(list(request.typed) or sys.argv[1:], given if given and by_name else place.id, given)


def _planned(plan: RunPlan) -> dict[str, Any]:
    return {
        "world_size": plan.world_size,
        "isolate": plan.isolate,
        "init_slots": dict(plan.init_slots),
        "argv": plan.roles[0].argv,
        "roles": [{"name": role.name, "world_size": role.world, "argv": role.argv} for role in plan.roles],
        "ranks": [
            {**pick_fields(p, "rank", "role", "role_rank", "local_rank", "host", "label"), "gpu": p.gpu and p.gpu.uuid}
            for p in plan.places
        ],
    }


def enrich(run_dir: str, request: Request, plan: RunPlan) -> dict[str, Any]:
    """Versions, revision and this attempt's plan, looked up when the ranks are on their way: nobody waits."""
    data: dict[str, Any] = read_json(os.path.join(run_dir, layout.RUN)) or {}
    data["plan"] = _planned(plan)
    packages = ("torch", "transformers", "numpy", "lightning", "accelerate")
    data.setdefault("versions", {}).update(_package_versions(packages))
    data["git"] = git_revision(os.getcwd())
    data["config_hash"] = config_hash(request)
    if "contents" not in data:
        data["contents"] = content_digests(request)
    return data


def _package_versions(wanted: tuple[str, ...]) -> dict[str, str]:
    """From the folders' names: importing importlib.metadata costs more than the launch."""
    found: dict[str, str] = {}
    for entry in sys.path:
        try:
            names_ = os.listdir(entry or ".")
        except OSError:
            continue
        for name in names_:
            package, dash, rest = name.partition("-")
            if dash and rest.endswith(".dist-info") and package in wanted:
                found.setdefault(package, rest[: -len(".dist-info")])
    return found


def git_revision(folder: str) -> str | None:
    """Return the commit checked out here, read from the files, or None."""
    while not os.path.exists(dot := os.path.join(folder, ".git")):
        parent = os.path.dirname(folder)
        if parent == folder:
            return None
        folder = parent
    try:
        if not os.path.isdir(dot):  # a worktree
            dot = os.path.join(folder, read_text(dot).partition("gitdir:")[2].strip())
        head = read_text(os.path.join(dot, "HEAD")).strip()
        return _commit(_resolved(dot, head[5:]) if head.startswith("ref: ") else head)
    except (OSError, ValueError):
        return None


def _resolved(dot: str, ref: str) -> str:
    common = dot.partition(f"{os.sep}worktrees{os.sep}")[0]
    for base in (dot, common):
        path = os.path.join(base, ref)
        if os.path.exists(path):
            return read_text(path)
    packed = read_text(os.path.join(common, "packed-refs")).splitlines()
    return next((line for line in packed if line.endswith(f" {ref}")), "")


def _commit(text: str) -> str | None:
    """Its first word, if that is the name of a commit: 40 or 64 hexadecimal digits."""
    word = text.partition(" ")[0].strip()
    return word if len(word) in (40, 64) and all(sign in "0123456789abcdef" for sign in word) else None
