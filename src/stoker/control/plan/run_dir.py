"""Where a run's record goes: a new directory, or that of an unfinished run of the same name."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence

from stoker.contract import env_vars, layout, schedulers
from stoker.contract.env_vars import API_KEY
from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import as_json, frozen, replace
from stoker.contract.terminal import print_status
from stoker.contract.text import escape
from stoker.control.plan.config_changes import differences
from stoker.control.plan.file_changes import changes
from stoker.control.plan.request import Request
from stoker.control.plan.run_plan import default_name
from stoker.control.record import run_index, run_record
from stoker.control.record.resume_command import SavedState, host_of_files, resume_command, saved_state
from stoker.control.record.run_writer import cannot_write, make_private

# What may differ between two starts of one run without making it another run.
_VOLATILE = {"ladder", "detach", "notify", "show", "quiet", "dry_run", "json", "runs_dir", "name", "wait", "grace", "max_restarts", "no_preflight", "config",
             "master_port", "tee", "redirects", "log_dir", "local_ranks_filter", "gpus", "gpu", "shutdown_timeout", "hang_timeout", "busy_timeout", "on_nan", "debug_retry",
             "again", "on_hangup", "min_hosts", "rejoin", "sync", "stage", "ssh_option", "prefix", "log_line_prefix_template", "metrics_port", "port_base"}  # fmt: skip

FORMER_S = 40.0  # ranks have 30 s to save, unless told otherwise, and seconds to end
_IS_NEW = "this is a new run of that name"
_LIKE_AN_ID = re.compile(r"[0-9]{8}-[0-9]{6}-.+")


@frozen
class RunDir:
    dir: str
    id: str
    name: str
    first_attempt: int
    reopened: bool
    notice: str = ""
    elsewhere: str = ""  # said where the record is not in the working directory
    made: bool = False  # by us, just now
    made_root: bool = False


class AlreadyEnded(Exception):
    """The run of this name and settings has ended, and the same command starts nothing."""


class AlreadyComplete(AlreadyEnded):
    """A run of this name and settings is complete: nothing to do, no error (a container restarts its command)."""


class EndedByStopRule(AlreadyEnded):
    """A stop rule ended the run of this name and settings: a container that restarts its command must not resume it."""

    def __init__(self, run: run_record.RunRecord) -> None:
        super().__init__(run.id)
        self.run = run


def config_hash(request: Request) -> str:
    import hashlib  # loads OpenSSL: 8 ms, and only a named run needs it before the start

    passing, program = _passing(request), request.args if request.identity is None else request.identity
    told = {key: value for key, value in as_json(request.options).items() if key not in passing}
    # A job makes a new key at each start where its user gave none. (And no record holds a digest of one.)
    told["env"] = [API_KEY if word.startswith(f"{API_KEY}=") else word for word in told["env"]]
    text = json.dumps([told, request.script, list(program)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _passing(request: Request) -> frozenset[str]:
    """Options that make no other run."""
    of_recipes = () if request.identity is None else ("nproc_per_node", "nnodes", "hosts", "isolate", "share_gpus")
    return frozenset((*_VOLATILE, *of_recipes))


def other_settings(request: Request, environment: dict[str, str] | os._Environ[str]) -> run_record.RunRecord | None:
    """The unfinished run that --name means, where its settings are others than these."""
    name = request.options.name
    if name is None or "/" in name or "\0" in name or name in (layout.LATEST, ".", ".."):
        return None
    root = os.path.abspath(layout.runs_root(request.options.runs_dir, environment))
    run = _by_id(root, name) or next((run for run in reversed(run_index.list_runs(root).runs) if run.name == name), None)
    if run is None or _is_complete(run) or run.data.get("config_hash") in (None, config_hash(request)):
        return None
    return run


def open_run_dir(request: Request, environment: dict[str, str] | os._Environ[str]) -> RunDir:
    """Decides, and makes the folder of a new run."""
    root = os.path.abspath(layout.runs_root(request.options.runs_dir, environment, write=True))
    if root != layout.private_runs_root(environment):
        return _find(request, environment, root)
    if not request.options.dry_run:
        try:
            make_private(root)
        except OSError as problem:
            raise cannot_write(os.path.abspath("runs"), problem) from problem
    line = f"stoker: {os.getcwd()} can't be written: the record goes to {root} (--runs-dir names another folder)"
    return replace(_find(request, environment, root), elsewhere=line)


def _find(request: Request, environment: dict[str, str] | os._Environ[str], root: str) -> RunDir:
    name = request.options.name or default_name(request)
    unusable = name in (layout.LATEST, ".", "..") or "/" in name or "\0" in name
    if request.options.name is not None and not unusable and (run := _by_id(root, name)) is not None:
        return _of_id(run, request, environment)
    if unusable or len(name) > 100:
        raise Refusal(f"--name {name!r} can't be the name of a folder", EX_USAGE)
    if request.options.name is None:
        return _new(root, name, "", make=not request.options.dry_run)
    listing = run_index.list_runs(root)  # one's own: another user's run of this name is another run
    notice = listing.skipped
    same = [run for run in listing.runs if run.name == name]
    if same and env_vars.JOB in environment and run_record.is_alive(same[-1]):
        _await_former(same[-1])
        same = [run for run in run_index.list_runs(root).runs if run.name == name]
    if same:
        place, line = _of_name(same, request, environment)
        if place is not None:
            return replace(place, notice=_joined(notice, line, place.notice))
        notice = _joined(notice, line)
    elif _LIKE_AN_ID.fullmatch(name):
        notice = _joined(notice, f"no run in {escape(os.path.relpath(root))} has the id {escape(name)}: {_IS_NEW}")
    return _new(root, name, notice, make=not request.options.dry_run)


def _by_id(root: str, name: str) -> run_record.RunRecord | None:
    path = os.path.join(root, name)
    run = run_record.load_run(path) if not os.path.islink(path) else None
    return run if run is not None and run.mine else None


def _of_id(run: run_record.RunRecord, request: Request, environment: Mapping[str, str]) -> RunDir:
    """--name with a run's id: that run and no other, whatever has taken its name since."""
    _refuse_running(run, run.id, environment)
    told = run.data.get("config_hash")  # missing: it was killed while it started
    same = told is None or told == config_hash(request)
    if not _is_complete(run) and same:
        return _reopened(run, request)  # after a stop rule, too: its printed command has the id
    if _is_complete(run) and (request.options.again or (same and _is_changed_role(run, request))):
        notice, make = f"run {run.id} is complete: {_IS_NEW}", not request.options.dry_run
        return _new(os.path.dirname(run.dir), run.name or "run", notice, make)
    if _is_complete(run) and same:
        raise AlreadyComplete(_nothing_to_do(f"run {run.id}", run, request))
    state = "is complete and " if _is_complete(run) else ""
    line = f"run {run.id} {state}was started with other settings{_which(run, request)}; its command: {resume_command(run)}"
    raise Refusal(f"{line}; for a new run give another --name{_weights_of(run, request)}", EX_USAGE)


def _of_name(
    same: Sequence[run_record.RunRecord], request: Request, environment: Mapping[str, str]
) -> tuple[RunDir | None, str]:
    """(the run to continue, or None: a new one; a line to print). `same`: the runs of this name, oldest first."""
    last, name = same[-1], same[-1].name
    _refuse_running(last, name, environment)
    settings, complete = config_hash(request), _is_complete(last)
    if last.data.get("config_hash") == settings and not complete:
        if not _ended_by_stop_rule(last):
            return _reopened(last, request), ""
        if not request.options.again:
            raise EndedByStopRule(last)
        return None, f"run {name} ({last.id}) was ended by a stop rule: {_IS_NEW}"
    others = [run for run in same[:-1] if _can_continue(run)]
    older = f"; {_unfinished(others[-1])}" if others else ""
    same_settings = last.data.get("config_hash") == settings
    if same_settings and not request.options.again and not _is_changed_role(last, request):
        raise AlreadyComplete(f"{_nothing_to_do(f'run {name} ({last.id})', last, request)}{older}")
    mine = [run for run in others if run.data.get("config_hash") == settings]
    if mine and not same_settings and not request.options.again:
        return _reopened(mine[-1], request), f"the newest run {name} ({last.id}) was started with other settings"
    if complete:
        return None, f"run {name} ({last.id}) is complete: {_IS_NEW}{older}"
    line = f"run {name} ({last.id}) is unfinished but was started with other settings{_which(last, request)}; {_IS_NEW}"
    return None, line + _weights_of(last, request)


def _which(run: run_record.RunRecord, request: Request) -> str:
    """The settings that differ, where the record tells."""
    found = differences(run.data, request, _passing(request))
    return f" ({found})" if found else ""


def _is_complete(run: run_record.RunRecord) -> bool:
    return run.verdict is not None and run.verdict.status == "completed"


def _ended_by_stop_rule(run: run_record.RunRecord) -> bool:
    """Return whether a stop rule ended the run and nobody has decided yet to continue: for a job's roles, the job has."""
    return env_vars.JOB not in os.environ and run.verdict is not None and run.verdict.is_stop_rule


def _nothing_to_do(which: str, run: run_record.RunRecord, request: Request) -> str:
    """Return the line for a complete run whose files are unchanged. Raises Refusal where they changed since."""
    changed = changes(run.data, request)
    if changed:
        fix = "give another --name for a new run, or --again to run it again"
        raise Refusal(f"{which} is complete, but {_named(changed)} changed since it was last started: {fix}", EX_USAGE)
    ended = run.verdict.summary if run.verdict is not None else ""
    unknown = " (its record has no digests of its files: whether they changed since is unknown)"
    line = f"{which} is complete: {ended}; nothing to do{unknown if changed is None else ''}"
    return f"{line}; --again runs it again"


def _named(labels: Sequence[str]) -> str:
    shown = [escape(label, 100) for label in labels[:3]]
    if len(labels) > 3:
        shown.append(f"{len(labels) - 3} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _is_changed_role(run: run_record.RunRecord, request: Request) -> bool:
    """Return whether a complete role of a resumed job is run again: its files changed, and nobody can give it --again."""
    return env_vars.JOB in os.environ and bool(changes(run.data, request))


def _await_former(run: run_record.RunRecord) -> None:
    """Wait for a role of a job whose launcher was killed: its ranks were told to save and end when the launcher died."""
    print_status(f"the former run of role {escape(run.name)} is still saving; waiting for its end")
    deadline = time.monotonic() + FORMER_S
    while run_record.is_alive(run) and time.monotonic() < deadline:
        time.sleep(0.1)


def _refuse_running(run: run_record.RunRecord, name: str, environment: Mapping[str, str]) -> None:
    living = run_record.is_alive(run)
    if living is None and run.verdict is None and not _requeued(run, environment):
        host = escape(run.launcher[2])
        line = f"run {name} was started on host {host} and may be running there: stop it there first"
        raise Refusal(line, EX_UNAVAILABLE)
    if living:
        import shlex

        word = shlex.quote(name)
        how = f"`stoker attach {word}` shows it, `stoker stop {word}` ends it"
        raise Refusal(f"run {name} is running (pid {run.launcher[0]}): {how}", EX_UNAVAILABLE)


def _can_continue(run: run_record.RunRecord) -> bool:
    """It is unfinished, and there is something to resume from."""
    return not _is_complete(run) and run_record.is_alive(run) is False and bool(saved_state(run))


def _unfinished(run: run_record.RunRecord) -> str:
    return f"an older run of that name, {run.id}, is unfinished; to continue it: {resume_command(run)}"


def _weights_of(run: run_record.RunRecord, request: Request) -> str:
    if request.identity is None or not os.path.isdir(os.path.join(run.dir, layout.CHECKPOINTS)):
        return ""
    return f"; --checkpoint.resume {os.path.relpath(run.dir)} starts from its weights"


def _reopened(run: run_record.RunRecord, request: Request) -> RunDir:
    attempts = run.attempts
    first = attempts[-1] + 1 if attempts else 0
    notice = _reopening(run, request.identity is not None)
    changed = changes(run.data, request)
    if changed:
        notice += f"\n{_named(changed)} changed since run {run.id} was last started: it continues with the new contents"
    return RunDir(run.dir, run.id, run.name or run.id, first, True, notice)


def _reopening(last: run_record.RunRecord, recipe: bool) -> str:
    """ "Resuming" only where there is something to resume from."""
    checkpoints, host = saved_state(last), host_of_files(last)
    if not checkpoints and host:
        there = f"what it saved is on host {host}, and it resumes there if there is a checkpoint"
        return f"starting run {last.id} again: {there}"
    if not checkpoints:
        folder = os.path.relpath(os.path.join(last.dir, layout.CHECKPOINTS))
        return f"starting run {last.id} again from the beginning: it is unfinished and has no checkpoint in {folder}"
    if checkpoints[0].role:
        newest = ", ".join(f"of role {one.role} {_place(one)}" for one in checkpoints)
        return f"starting run {last.id} again; its newest checkpoint{'s' * (len(checkpoints) > 1)}: {newest}"
    if checkpoints[0].host:
        there = f"its checkpoints are on host {host}, and it resumes from the newest if rank 0 is there again"
        return f"starting run {last.id} again: {there}"
    path = os.path.relpath(checkpoints[0].path)
    if recipe:
        return f"resuming run {last.id} from {path}"
    return f"starting run {last.id} again; its newest checkpoint, {path}, is what stoker.resume() gives the script"


def _place(one: SavedState) -> str:
    path = os.path.relpath(one.path)
    return f"in {path} on host {one.host}" if one.host else path


def _joined(*notices: str) -> str:
    return "\n".join(notice for notice in notices if notice)


def _requeued(last: run_record.RunRecord, environment: Mapping[str, str]) -> bool:
    """A scheduler's job that was requeued keeps its number and runs once at a time: its former start is over."""
    job = schedulers.job_id(environment)
    return bool(job) and schedulers.job_id(last.data.get("environment") or {}) == job


def _new(root: str, name: str, notice: str, make: bool) -> RunDir:
    """The folder itself is made here: the only way to be sure that no other launch of the same second has the name."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    new_root = not os.path.isdir(root)
    for n in itertools.count(1):
        id = f"{stamp}-{name}" + (f"-{n}" if n > 1 else "")
        path = os.path.join(root, id)
        if not make:
            if os.path.exists(path):
                continue
            return RunDir(path, id, name, 0, False, notice)
        try:
            os.makedirs(root, 0o700, exist_ok=True)
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(root):
                raise cannot_write(root, NotADirectoryError(20, "Not a directory")) from None
            continue
        except OSError as problem:
            raise cannot_write(root, problem) from problem
        return RunDir(path, id, name, 0, False, notice, made=True, made_root=new_root)
    raise AssertionError("counting does not end")


def discard_run_dir(place: RunDir) -> None:
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
        print_status(f"{problem.filename or place.dir} can't be removed: {problem.strerror}")
