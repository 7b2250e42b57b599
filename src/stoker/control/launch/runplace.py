"""Where a run's record goes: a new directory, or that of an unfinished run of the same name."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Mapping

from stoker.contract import layout, schedulers
from stoker.contract.names import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.shape import as_json, replace, shape
from stoker.contract.terminal import say
from stoker.contract.untrusted import printable
from stoker.control.launch.plan import default_name
from stoker.control.launch.request import Request
from stoker.control.record import reader
from stoker.control.record.writer import cannot_write, make_private

# What may differ between two starts of one run without making it another run.
_VOLATILE = {"ladder", "detach", "notify", "show", "quiet", "dry_run", "json", "runs_dir", "name", "wait", "grace", "max_restarts", "no_preflight", "config",
             "master_port", "tee", "redirects", "log_dir", "local_ranks_filter", "gpus", "gpu", "shutdown_timeout", "hang_timeout", "on_nan", "debug_retry",
             "again", "on_hangup", "min_hosts", "rejoin", "sync", "stage", "ssh_option", "prefix", "log_line_prefix_template", "metrics_port", "port_base"}  # fmt: skip


@shape
class RunPlace:
    dir: str
    id: str
    name: str
    first_attempt: int
    reopened: bool
    notice: str = ""
    elsewhere: str = ""  # said where the record is not in the working directory
    made: bool = False  # by us, just now
    made_root: bool = False


class Complete(Exception):
    """A run of this name and settings is complete: nothing to do, no error (a container restarts its command)."""


def config_hash(request: Request) -> str:
    import hashlib  # loads OpenSSL: 8 ms, and only a named run needs it before the start

    passing, program = _VOLATILE, request.args
    if request.identity is not None:
        passing, program = passing | {"nproc_per_node", "nnodes", "hosts", "isolate", "share_gpus"}, request.identity
    told = {key: value for key, value in as_json(request.options).items() if key not in passing}
    text = json.dumps([told, request.script, list(program)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_place(request: Request, environment: dict[str, str] | os._Environ[str]) -> RunPlace:
    """Decides, and makes the folder of a new run."""
    root = os.path.abspath(layout.runs_root(request.options.runs_dir, environment, write=True))
    if root != layout.private_runs(environment):
        return _find(request, environment, root)
    if not request.options.dry_run:
        try:
            make_private(root)
        except OSError as problem:
            raise cannot_write(os.path.abspath("runs"), problem) from problem
    line = f"stoker: {os.getcwd()} can't be written: the record goes to {root} (--runs-dir names another folder)"
    return replace(_find(request, environment, root), elsewhere=line)


def _find(request: Request, environment: dict[str, str] | os._Environ[str], root: str) -> RunPlace:
    name = request.options.name or default_name(request)
    if name in (layout.LATEST, ".", "..") or "/" in name or "\0" in name or len(name) > 100:
        raise Refusal(f"--name {name!r} can't be the name of a folder", EX_USAGE)
    notice = ""
    if request.options.name is not None:
        listing = reader.look(root)  # one's own: another user's run of this name is another run
        same = [run for run in listing.runs if run.name == name]
        notice = listing.skipped
        if same:
            last = same[-1]
            if reader.alive(last) is None and last.verdict is None and not _requeued(last, environment):
                host = printable(last.launcher[2])
                line = f"run {name} was started on host {host} and may be running there: stop it there first"
                raise Refusal(line, EX_UNAVAILABLE)
            if reader.alive(last):
                import shlex

                word = shlex.quote(name)
                how = f"`stoker attach {word}` shows it, `stoker stop {word}` ends it"
                raise Refusal(f"run {name} is running (pid {last.launcher[0]}): {how}", EX_UNAVAILABLE)
            if last.verdict is not None and last.verdict.status == "completed":
                if not request.options.again and last.data.get("config_hash") == config_hash(request):
                    done = f"run {name} ({last.id}) is complete: {last.verdict.summary}"
                    raise Complete(f"{done}; nothing to do (--again runs it again)")
                notice = _joined(notice, f"run {name} ({last.id}) is complete: this is a new run of that name")
            elif last.data.get("config_hash") != config_hash(request):
                other = f"run {name} ({last.id}) is unfinished but was started with other settings"
                notice = _joined(notice, f"{other}: this is a new run of that name")
                if request.identity is not None and os.path.isdir(os.path.join(last.dir, layout.CHECKPOINTS)):
                    notice += f"; --checkpoint.resume {os.path.relpath(last.dir)} starts from its weights"
            else:
                attempts = last.attempts
                notice = _joined(notice, _reopening(last, request.identity is not None))
                return RunPlace(last.dir, last.id, name, attempts[-1] + 1 if attempts else 0, True, notice)
    return _new(root, name, notice, make=not request.options.dry_run)


def _reopening(last: reader.Run, recipe: bool) -> str:
    """ "Resuming" only where there is something to resume from."""
    from stoker.contract.checkpoints import newest

    saved = newest(last.dir)
    if saved is None:
        folder = os.path.relpath(os.path.join(last.dir, layout.CHECKPOINTS))
        return f"starting run {last.id} again from the beginning: it is unfinished and has no checkpoint in {folder}"
    if recipe:
        return f"resuming run {last.id} from {os.path.relpath(saved.path)}"
    given = f"{os.path.relpath(saved.path)}, is what stoker.resume() gives the script"
    return f"starting run {last.id} again; its newest checkpoint, {given}"


def _joined(*notices: str) -> str:
    return "\n".join(notice for notice in notices if notice)


def _requeued(last: reader.Run, environment: Mapping[str, str]) -> bool:
    """A scheduler's job that was requeued keeps its number and runs once at a time: its former start is over."""
    job = schedulers.job(environment)
    return bool(job) and schedulers.job(last.data.get("environment") or {}) == job


def _new(root: str, name: str, notice: str, make: bool) -> RunPlace:
    """The folder itself is made here: the only way to be sure that no other launch of the same second has the name."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    new_root = not os.path.isdir(root)
    for n in itertools.count(1):
        id = f"{stamp}-{name}" + (f"-{n}" if n > 1 else "")
        path = os.path.join(root, id)
        if not make:
            if os.path.exists(path):
                continue
            return RunPlace(path, id, name, 0, False, notice)
        try:
            os.makedirs(root, 0o700, exist_ok=True)
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(root):
                raise cannot_write(root, NotADirectoryError(20, "Not a directory")) from None
            continue
        except OSError as problem:
            raise cannot_write(root, problem) from problem
        return RunPlace(path, id, name, 0, False, notice, made=True, made_root=new_root)
    raise AssertionError("counting does not end")


def abandon(place: RunPlace) -> None:
    """Nothing was started: what was made for it goes again. What can't be removed is reported, and hides no error."""
    if not place.made:
        return
    try:
        shutil.rmtree(place.dir)
        if place.made_root and not os.listdir(os.path.dirname(place.dir)):
            os.rmdir(os.path.dirname(place.dir))
    except FileNotFoundError:
        pass  # gone already
    except OSError as problem:
        say(f"{problem.filename or place.dir} can't be removed: {problem.strerror}")
