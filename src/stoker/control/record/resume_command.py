"""Finds what a run can resume from, and builds the command that continues it.

The command is the one that started the run, with the run's id or name as --name.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Sequence

from stoker.contract import checkpoints, layout
from stoker.contract.env_vars import CHECKPOINT, RECIPES
from stoker.contract.frozen import frozen
from stoker.contract.masking import MASK, mask_argv
from stoker.control.record.run_index import is_name_unique, list_roles
from stoker.control.record.run_record import RunRecord

# What a printed command does; it follows the command as a comment.
TO_CONTINUE, TO_START_AGAIN = "to continue", "to start it again"


@frozen
class SavedState:
    role: str  # of a multi-role job, or "" for a plain run
    path: str  # of the newest complete checkpoint; with `host`, of the folder of all checkpoints
    host: str = ""  # set if the files are on another host


def saved_state(run: RunRecord) -> tuple[SavedState, ...]:
    """Return the newest checkpoint of a run, or of each role of a job that is not complete."""
    unfinished = {
        name: role for name, role in list_roles(run).items() if not role.verdict or role.verdict.status != "completed"
    }
    states = [_find_newest_state(name, role) for name, role in {"": run, **unfinished}.items()]
    return tuple(state for state in states if state is not None)


def _find_newest_state(role: str, run: RunRecord) -> SavedState | None:
    checkpoint = checkpoints.find_newest_checkpoint(run.dir)
    if checkpoint is not None:
        return SavedState(role, checkpoint.path)
    host = host_of_files(run)
    if not host or not any(event["event"] == "mark" and event.get("name") == CHECKPOINT for event in run.events()):
        return None
    return SavedState(role, os.path.join(run.dir, layout.CHECKPOINTS), host)


def host_of_files(run: RunRecord) -> str:
    """Return rank 0's host if that host has its own run directory, or "" if the files are here."""
    ranks, apart = (run.data.get("plan") or {}).get("ranks"), run.data.get("apart")
    rank0 = ranks[0] if isinstance(ranks, list) and ranks else None
    host = rank0.get("host") if isinstance(rank0, dict) else None
    return host if isinstance(host, str) and isinstance(apart, dict) and host in apart else ""


def copy_command(run: RunRecord, name: str) -> str:
    """Return the command that copies a file or folder of the run here from the host that has its files.

    Returns "" if the record has no such command, or is another user's: people paste the commands that we print.
    """
    argv = run.data["apart"][host_of_files(run)]
    if not run.mine or not isinstance(argv, list) or not argv:
        return ""
    *copy_argv, target = map(str, argv)
    source = f"{target}{os.path.join(os.path.abspath(run.dir), name)}"
    return shlex.join([*copy_argv, source, f"{os.path.relpath(run.dir)}/"])


def list_files_elsewhere(run: RunRecord, completed: bool) -> tuple[tuple[str, str], ...]:
    """Return (line, command that copies the model here) for files that are on another host or in the directory of a role.

    The command is "" if the files are on this machine, or if there is no model yet.
    """
    lines = []
    for role, record in {"": run, **list_roles(run)}.items():
        if not str(record.data.get("script")).startswith(RECIPES):
            continue
        of_role, host = f" of role {role}" if role else "", host_of_files(record)
        model = os.path.join(record.dir, layout.MODEL)
        if host:
            files = f"{layout.METRICS}, config.yaml and {layout.CHECKPOINTS}/{of_role} are on host {host}"
            files = f"{layout.MODEL}/ (the model), {files}" if completed else files
            lines.append((f"{files}, in {record.dir}", copy_command(record, layout.MODEL) if completed else ""))
        elif role and completed and os.path.isdir(model):
            lines.append((f"the model{of_role} is {os.path.relpath(model)}", ""))
    return tuple(lines)


def describe_resume(run: RunRecord | None) -> str:
    """Return what the command of `resume_command` does, in words."""
    return TO_CONTINUE if run is not None and saved_state(run) else TO_START_AGAIN


def resume_command(run: RunRecord) -> str:
    """Return the command that continues a recorded run."""
    command, request = run.data.get("command"), run.data.get("request") or {}
    typed = [str(arg) for arg in command[1:]] if isinstance(command, list) else []
    if any(layout.LATEST in arg.split("/") for arg in typed):  # `latest` may be another run by now
        typed = []
    return command_with_name(typed, run.id, request["name"] if isinstance(request.get("name"), str) else None)


def command_with_name(typed: Sequence[str], run: str, name: str | None) -> str:
    """Return the typed command with `run` (an id or name) as --name. `name` is the --name that it has now, or None.

    Returns a description instead if a secret in the command was masked, so that it can't be repeated.
    """
    word_count = 1 if typed[:1] == ["run"] else 2  # stoker run [options]; stoker train STAGE [options]
    subcommand, options = list(typed[:word_count]), list(typed[word_count:])
    has_secrets = any(MASK in arg for arg in options) or mask_argv(options) != options
    if subcommand[:1] not in (["run"], ["train"]) or has_secrets:
        return "the same command again" if name == run else f"the same command with --name {shlex.quote(run)}"
    if name == run:
        return shlex.join(["stoker", *subcommand, *options])
    pairs = list(itertools.pairwise(options))
    if name is not None and ("--name", name) in pairs:
        options[pairs.index(("--name", name)) + 1] = run
    elif name is not None and f"--name={name}" in options:
        options[options.index(f"--name={name}")] = f"--name={run}"
    else:
        subcommand += ["--name", run]
    return shlex.join(["stoker", *subcommand, *options])


def is_resume_step(step: str) -> bool:
    """Return whether a fix step of a verdict is the command that continues the run."""
    return step.endswith((f"# {TO_CONTINUE}", f"# {TO_START_AGAIN}"))


def replace_name_by_id(step: str, run: RunRecord, root: str) -> str:
    """Replace the run's name by its id in a fix step of a verdict if another run has taken the name since."""
    if not is_resume_step(step) or is_name_unique(root, run.name):
        return step
    return step.replace(f"--name {shlex.quote(run.name)} ", f"--name {shlex.quote(run.id)} ", 1)
