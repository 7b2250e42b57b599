"""What a run can continue from, and the command that continues it: the one that was typed, with the run's id or name."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence

from stoker.contract import checkpoints, layout, redact
from stoker.contract.shape import shape
from stoker.control.record.reader import Run, is_only_one, roles

TO_CONTINUE, TO_START_AGAIN = "to continue", "to start it again"  # what it is for: behind it, as a comment


@shape
class Saved:
    role: str  # of a job; empty: the run's own
    path: str  # of the newest complete checkpoint


def saved(run: Run) -> tuple[Saved, ...]:
    """What it continues from: its own newest checkpoint; of a job, that of each role that is not complete."""
    unfinished = {role: one for role, one in roles(run).items() if not one.verdict or one.verdict.status != "completed"}
    newest = {role: checkpoints.newest(one.dir) for role, one in {"": run, **unfinished}.items()}
    return tuple(Saved(role, one.path) for role, one in newest.items() if one is not None)


def purpose(run: Run | None) -> str:
    """What the command is for."""
    return TO_CONTINUE if run is not None and saved(run) else TO_START_AGAIN


def command_of(run: Run) -> str:
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
    hidden = any(redact.HIDDEN in word for word in rest) or redact.arguments(rest) != rest
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


def by_id(step: str, run: Run, root: str) -> str:
    """A line of a verdict, read later: where another run has the name by now, the command takes the id."""
    if not step.endswith((f"# {TO_CONTINUE}", f"# {TO_START_AGAIN}")) or is_only_one(root, run.name):
        return step
    return step.replace(f"--name {shlex.quote(run.name)} ", f"--name {shlex.quote(run.id)} ", 1)
