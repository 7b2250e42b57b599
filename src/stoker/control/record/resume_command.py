"""What a run can continue from, and the command that continues it: the one that was typed, with the run's id or name."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Sequence

from stoker.contract import checkpoints, layout
from stoker.contract.env_vars import CHECKPOINT, RECIPES
from stoker.contract.frozen import frozen
from stoker.contract.masking import MASK, mask_argv
from stoker.control.record.run_index import is_only_one, list_roles
from stoker.control.record.run_record import RunRecord

TO_CONTINUE, TO_START_AGAIN = "to continue", "to start it again"  # what it is for: behind it, as a comment


@frozen
class SavedState:
    role: str  # of a job; empty: the run's own
    path: str  # of the newest complete checkpoint; on another host, of the folder of all
    host: str = ""  # it is there, and not seen from here


def saved_state(run: RunRecord) -> tuple[SavedState, ...]:
    """What it continues from: its own newest checkpoint; of a job, that of each role that is not complete."""
    unfinished = {role: one for role, one in list_roles(run).items() if not one.verdict or one.verdict.status != "completed"}
    newest = [_saved(role, one) for role, one in {"": run, **unfinished}.items()]
    return tuple(one for one in newest if one is not None)


def _saved(role: str, run: RunRecord) -> SavedState | None:
    newest = checkpoints.find_newest_checkpoint(run.dir)
    if newest is not None:
        return SavedState(role, newest.path)
    host = host_of_files(run)
    if not host or not any(event["event"] == "mark" and event.get("name") == CHECKPOINT for event in run.events()):
        return None
    return SavedState(role, os.path.join(run.dir, layout.CHECKPOINTS), host)


def host_of_files(run: RunRecord) -> str:
    """Rank 0's, where that host has a run directory of its own; empty: it is this one."""
    ranks, apart = (run.data.get("plan") or {}).get("ranks"), run.data.get("apart")
    first = ranks[0] if isinstance(ranks, list) and ranks else None
    host = first.get("host") if isinstance(first, dict) else None
    return host if isinstance(host, str) and isinstance(apart, dict) and host in apart else ""


def copy_command(run: RunRecord, name: str) -> str:
    """Return the command that copies a file or folder of the run here from the host that has its files.

    Empty if the record has no such command, or is another user's: a command is run as it is printed.
    """
    words = run.data["apart"][host_of_files(run)]
    if not run.mine or not isinstance(words, list) or not words:
        return ""
    *options, target = map(str, words)
    source = f"{target}{os.path.join(os.path.abspath(run.dir), name)}"
    return shlex.join([*options, source, f"{os.path.relpath(run.dir)}/"])


def files_elsewhere(run: RunRecord, completed: bool) -> tuple[tuple[str, str], ...]:
    """(what is where, the command that brings the model here): what a user would look for in the run's own directory. Without a
    command it is on this machine, or there is no model yet.
    """
    found = []
    for role, one in {"": run, **list_roles(run)}.items():
        if not str(one.data.get("script")).startswith(RECIPES):
            continue
        of_role, host = f" of role {role}" if role else "", host_of_files(one)
        model = os.path.join(one.dir, layout.MODEL)
        if host:
            files = f"{layout.METRICS}, config.yaml and {layout.CHECKPOINTS}/{of_role} are on host {host}"
            files = f"{layout.MODEL}/ (the model), {files}" if completed else files
            found.append((f"{files}, in {one.dir}", copy_command(one, layout.MODEL) if completed else ""))
        elif role and completed and os.path.isdir(model):
            found.append((f"the model{of_role} is {os.path.relpath(model)}", ""))
    return tuple(found)


def describe_resume(run: RunRecord | None) -> str:
    """What the command is for."""
    return TO_CONTINUE if run is not None and saved_state(run) else TO_START_AGAIN


def resume_command(run: RunRecord) -> str:
    """The command that continues it, from its record."""
    command, told = run.data.get("command"), run.data.get("request") or {}
    words = [str(word) for word in command[1:]] if isinstance(command, list) else []
    if any(layout.LATEST in word.split("/") for word in words):  # another run by now
        words = []
    return command_for(words, run.id, told["name"] if isinstance(told.get("name"), str) else None)


def command_for(typed: Sequence[str], run: str, named: str | None) -> str:
    """What was typed, with this run's id (or name) as --name. `named`: the --name that it was started with."""
    words = 1 if typed[:1] == ["run"] else 2  # stoker run [options]; stoker train STAGE [options]
    kept, rest = list(typed[:words]), list(typed[words:])
    hidden = any(MASK in word for word in rest) or mask_argv(rest) != rest
    if kept[:1] not in (["run"], ["train"]) or hidden:
        return "the same command again" if named == run else f"the same command with --name {shlex.quote(run)}"
    if named == run:
        return shlex.join(["stoker", *kept, *rest])
    pairs = list(itertools.pairwise(rest))
    if named is not None and ("--name", named) in pairs:
        rest[pairs.index(("--name", named)) + 1] = run
    elif named is not None and f"--name={named}" in rest:
        rest[rest.index(f"--name={named}")] = f"--name={run}"
    else:
        kept += ["--name", run]
    return shlex.join(["stoker", *kept, *rest])


def starts_again(step: str) -> bool:
    """Is this line of a verdict the command?"""
    return step.endswith((f"# {TO_CONTINUE}", f"# {TO_START_AGAIN}"))


def by_id(step: str, run: RunRecord, root: str) -> str:
    """A line of a verdict, read later: where another run has the name by now, the command takes the id."""
    if not starts_again(step) or is_only_one(root, run.name):
        return step
    return step.replace(f"--name {shlex.quote(run.name)} ", f"--name {shlex.quote(run.id)} ", 1)
