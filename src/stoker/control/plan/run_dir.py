"""Finds the run directory of an unfinished run of the same name and settings, or creates a new one."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Sequence

from stoker.contract import env_vars, layout, schedulers
from stoker.contract.env_vars import API_KEY
from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import as_json, frozen, replace
from stoker.contract.terminal import print_status
from stoker.contract.text import escape
from stoker.control.plan.request import Request
from stoker.control.plan.run_changes import describe_changed_settings, find_changed_files
from stoker.control.plan.run_plan import default_name
from stoker.control.record import run_index, run_record
from stoker.control.record.resume_command import host_of_files, resume_command, saved_state
from stoker.control.record.run_record import RunRecord
from stoker.control.record.run_writer import cannot_write, make_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    Environment = dict[str, str] | os._Environ[str]

# Options that may differ between two starts of one run.
_VOLATILE_OPTIONS = """
    again busy_timeout config debug_retry detach dry_run gpu gpus grace hang_timeout json ladder local_ranks_filter
    log_dir log_line_prefix_template master_port max_restarts metrics_port min_hosts name no_preflight notify
    on_hangup on_nan port_base prefix quiet redirects rejoin runs_dir show shutdown_timeout ssh_option stage sync
    tee wait
"""
# A recipe's run also continues on another number of ranks or other hosts.
_VOLATILE_FOR_RECIPES = "nproc_per_node nnodes hosts isolate share_gpus"

PREVIOUS_RUN_END_S = 40.0  # ranks have 30 s by default to save, and then exit within seconds
_IS_NEW = "this is a new run of that name"
_ID = re.compile(r"[0-9]{8}-[0-9]{6}-.+")


@frozen
class RunDir:
    dir: str
    id: str
    name: str
    first_attempt: int
    reopened: bool  # the run continues an unfinished one
    notice: str = ""
    location_notice: str = ""  # printed if the record is not in the working directory
    created: bool = False  # by this launch
    created_root: bool = False


class AlreadyEnded(Exception):
    """The run of this name and settings has ended, so the same command starts nothing."""


class AlreadyComplete(AlreadyEnded):
    """The run is complete, which is not an error: containers restart their command."""


class EndedByStopRule(AlreadyEnded):
    """A stop rule ended the run: a container that restarts its command must not resume it."""

    def __init__(self, run: RunRecord) -> None:
        super().__init__(run.id)
        self.run = run


def config_hash(request: Request) -> str:
    """Return a digest of the settings that distinguish one run from another."""
    import hashlib  # OpenSSL takes 4 ms to load, and only named runs need it before the start

    program, volatile = request.args if request.identity is None else request.identity, _volatile_options(request)
    options = {key: value for key, value in as_json(request.options).items() if key not in volatile}
    # A job generates a new API key at each start unless its user sets one, and a record must not hold a digest of a key.
    options["env"] = [API_KEY if setting.startswith(f"{API_KEY}=") else setting for setting in options["env"]]
    text = json.dumps([options, request.script, list(program)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _volatile_options(request: Request) -> frozenset[str]:
    volatile = _VOLATILE_OPTIONS.split()
    return frozenset(volatile if request.identity is None else volatile + _VOLATILE_FOR_RECIPES.split())


def find_run_with_other_settings(request: Request, environment: Environment) -> RunRecord | None:
    """Return the unfinished run that --name means if it was started with other settings, else None."""
    name = request.options.name
    if name is None or _is_unusable_name(name):
        return None
    root = os.path.abspath(layout.runs_root(request.options.runs_dir, environment))
    run = _find_by_id(root, name)
    run = run or next((run for run in reversed(run_index.list_runs(root).runs) if run.name == name), None)
    if run is None or _is_complete(run) or run.data.get("config_hash") in (None, config_hash(request)):
        return None
    return run


def _is_unusable_name(name: str) -> bool:
    return name in (layout.LATEST, ".", "..") or "/" in name or "\0" in name


def open_run_dir(request: Request, environment: Environment) -> RunDir:
    """Return the run directory for a request; a new one is created, except in a dry run.

    Raises AlreadyComplete or EndedByStopRule if there is nothing to start, and Refusal if the run can't be started.
    """
    root = os.path.abspath(layout.runs_root(request.options.runs_dir, environment, write=True))
    if root != layout.private_runs_root(environment):
        return _choose_run_dir(request, environment, root)
    if not request.options.dry_run:
        try:
            make_private(root)
        except OSError as problem:
            raise cannot_write(os.path.abspath("runs"), problem) from problem
    line = f"stoker: {os.getcwd()} can't be written, so the record goes to {root}; --runs-dir sets another folder"
    return replace(_choose_run_dir(request, environment, root), location_notice=line)


def _choose_run_dir(request: Request, environment: Environment, root: str) -> RunDir:
    options = request.options
    name, create = options.name or default_name(request), not options.dry_run
    unusable = _is_unusable_name(name)
    if options.name is not None and not unusable and (run := _find_by_id(root, name)) is not None:
        return _continue_by_id(run, request, environment)
    if unusable or len(name) > 100:
        raise Refusal(f"--name {name!r} can't be the name of a folder", EX_USAGE)
    if options.name is None:
        return _new_run_dir(root, name, "", create)
    listing = run_index.list_runs(root)  # only this user's: another user's run of this name is another run
    notice = listing.skipped
    same_name = [run for run in listing.runs if run.name == name]
    if same_name and env_vars.JOB in environment and run_record.is_alive(same_name[-1]):
        # The role's previous launcher was killed with its job; its ranks were told to save and end.
        print_status(f"the previous run of role {escape(name)} is still saving; waiting for its end")
        deadline = time.monotonic() + PREVIOUS_RUN_END_S
        while run_record.is_alive(same_name[-1]) and time.monotonic() < deadline:
            time.sleep(0.1)
        same_name = [run for run in run_index.list_runs(root).runs if run.name == name]
    if same_name:
        run_dir, line = _continue_by_name(same_name, request, environment)
        if run_dir is not None:
            return replace(run_dir, notice=_join_lines(notice, line, run_dir.notice))
        notice = _join_lines(notice, line)
    elif _ID.fullmatch(name):
        notice = _join_lines(notice, f"no run in {escape(os.path.relpath(root))} has the id {escape(name)}: {_IS_NEW}")
    return _new_run_dir(root, name, notice, create)


def _find_by_id(root: str, id: str) -> RunRecord | None:
    """Return this user's run with an id, or None."""
    path = os.path.join(root, id)
    run = run_record.load_run(path) if not os.path.islink(path) else None
    return run if run is not None and run.mine else None


def _continue_by_id(run: RunRecord, request: Request, environment: Environment) -> RunDir:
    """Return the directory of this run, also if newer runs have its name, or a new one if the run is to run again."""
    _refuse_if_running(run, run.id, environment)
    recorded_hash = run.data.get("config_hash")  # missing if the run was killed during its start
    has_same_settings = recorded_hash is None or recorded_hash == config_hash(request)
    if not _is_complete(run):
        if has_same_settings:
            return _reopen(run, request)  # also after a stop rule: the command that its verdict prints has the id
    elif request.options.again or (has_same_settings and _is_changed_role(run, request)):
        notice = f"run {run.id} is complete: {_IS_NEW}"
        return _new_run_dir(os.path.dirname(run.dir), run.name or "run", notice, not request.options.dry_run)
    elif has_same_settings:
        raise AlreadyComplete(_describe_complete_run(f"run {run.id}", run, request))
    state = "is complete and " if _is_complete(run) else ""
    line = f"run {run.id} {state}was started with other settings{_describe_differences(run, request)}"
    line += f"; use its command, {resume_command(run)}, or another --name{_weights_hint(run, request)}"
    raise Refusal(line, EX_USAGE)


def _continue_by_name(
    runs: Sequence[RunRecord], request: Request, environment: Environment
) -> tuple[RunDir | None, str]:
    """Return (the directory of the run to continue, or None for a new one; a line to print).

    `runs` has all runs of the name, oldest first.
    """
    newest = runs[-1]
    title = f"run {newest.name} ({newest.id})"
    _refuse_if_running(newest, newest.name, environment)
    settings = config_hash(request)
    has_same_settings, is_complete = newest.data.get("config_hash") == settings, _is_complete(newest)
    if has_same_settings and not is_complete:
        # A role of a job is resumed even after a stop rule: its job has decided that.
        stopped = env_vars.JOB not in os.environ and newest.verdict is not None and newest.verdict.is_stop_rule
        if not stopped:
            return _reopen(newest, request), ""
        if not request.options.again:
            raise EndedByStopRule(newest)
        return None, f"{title} was ended by a stop rule: {_IS_NEW}"
    resumable = [
        run for run in runs[:-1] if not _is_complete(run) and run_record.is_alive(run) is False and saved_state(run)
    ]
    hint = ""
    if resumable:
        older = resumable[-1]
        hint = f"; an older run of that name, {older.id}, is unfinished; to continue it: {resume_command(older)}"
    if has_same_settings and not request.options.again and not _is_changed_role(newest, request):
        raise AlreadyComplete(f"{_describe_complete_run(title, newest, request)}{hint}")
    same_settings = [run for run in resumable if run.data.get("config_hash") == settings]
    if same_settings and not has_same_settings and not request.options.again:
        return _reopen(same_settings[-1], request), f"the newest {title} was started with other settings"
    if is_complete:
        return None, f"{title} is complete: {_IS_NEW}{hint}"
    line = (
        f"{title} is unfinished but was started with other settings{_describe_differences(newest, request)}; {_IS_NEW}"
    )
    return None, line + _weights_hint(newest, request)


def _describe_differences(run: RunRecord, request: Request) -> str:
    """Return the settings that differ from the record, in parentheses, or "" if none does."""
    differences = describe_changed_settings(run.data, request, _volatile_options(request))
    return f" ({differences})" if differences else ""


def _weights_hint(run: RunRecord, request: Request) -> str:
    if request.identity is None or not os.path.isdir(os.path.join(run.dir, layout.CHECKPOINTS)):
        return ""
    return f"; --checkpoint.resume {os.path.relpath(run.dir)} starts from its weights"


def _is_complete(run: RunRecord) -> bool:
    return run.verdict is not None and run.verdict.status == "completed"


def _is_changed_role(run: RunRecord, request: Request) -> bool:
    """Return whether the files of a job's complete role changed: it then runs again, as if --again were given."""
    return env_vars.JOB in os.environ and bool(find_changed_files(run.data, request))


def _describe_complete_run(title: str, run: RunRecord, request: Request) -> str:
    """Return the line for a complete run whose files are unchanged. Raises Refusal if they changed since."""
    changed = find_changed_files(run.data, request)
    if changed:
        fix = "give another --name for a new run, or --again to run it again"
        line = f"{title} is complete, but {_join_labels(changed)} changed since it was last started: {fix}"
        raise Refusal(line, EX_USAGE)
    summary = run.verdict.summary if run.verdict is not None else ""
    unknown = " (its record has no digests of its files: whether they changed since is unknown)"
    line = f"{title} is complete: {summary}; nothing to do{unknown if changed is None else ''}"
    return f"{line}; --again runs it again"


def _join_labels(labels: Sequence[str]) -> str:
    """Return "a", "a and b", "a, b and c" or "a, b, c and 2 more"."""
    texts = [escape(label, 100) for label in labels[:3]]
    if len(labels) > 3:
        texts.append(f"{len(labels) - 3} more")
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _refuse_if_running(run: RunRecord, name: str, environment: Environment) -> None:
    alive = run_record.is_alive(run)
    # A scheduler's job that was requeued keeps its number, and its previous start is over.
    job = schedulers.job_id(environment)
    is_requeued = bool(job) and schedulers.job_id(run.data.get("environment") or {}) == job
    if alive is None and run.verdict is None and not is_requeued:
        host = escape(run.launcher[2])
        line = f"run {name} was started on host {host} and may be running there: stop it there first"
        raise Refusal(line, EX_UNAVAILABLE)
    if alive:
        arg = shlex.quote(name)
        commands = f"`stoker attach {arg}` shows it, `stoker stop {arg}` ends it"
        raise Refusal(f"run {name} is running (pid {run.launcher[0]}): {commands}", EX_UNAVAILABLE)


def _reopen(run: RunRecord, request: Request) -> RunDir:
    """Return the directory of an unfinished run, with a notice about what it resumes from."""
    attempts = run.attempts
    first_attempt = attempts[-1] + 1 if attempts else 0
    notice = _make_resume_notice(run, request.identity is not None)
    changed = find_changed_files(run.data, request)
    if changed:
        files = _join_labels(changed)
        notice += f"\n{files} changed since run {run.id} was last started: it continues with the new contents"
    return RunDir(run.dir, run.id, run.name or run.id, first_attempt, True, notice)


def _make_resume_notice(run: RunRecord, is_recipe: bool) -> str:
    """Return a line that says "resuming" only if the run's own program resumes from a checkpoint."""
    checkpoints, host = saved_state(run), host_of_files(run)
    starting = f"starting run {run.id} again"
    if not checkpoints and host:
        return f"{starting}: its files are on host {host}, and it resumes there if there is a checkpoint"
    if not checkpoints:
        folder = os.path.relpath(os.path.join(run.dir, layout.CHECKPOINTS))
        return f"{starting} from the beginning: it is unfinished and has no checkpoint in {folder}"
    if checkpoints[0].role:
        newest = []
        for saved in checkpoints:
            path = os.path.relpath(saved.path)
            on_host = f"in {path} on host {saved.host}" if saved.host else path
            newest.append(f"of role {saved.role} {on_host}")
        return f"{starting}; its newest checkpoint{'s' * (len(checkpoints) > 1)}: {', '.join(newest)}"
    if checkpoints[0].host:
        on_host = f"its checkpoints are on host {host}, and it resumes from the newest if rank 0 is there again"
        return f"{starting}: {on_host}"
    path = os.path.relpath(checkpoints[0].path)
    if is_recipe:
        return f"resuming run {run.id} from {path}"
    return f"{starting}; its newest checkpoint is {path}, which stoker.resume() returns to the script"


def _join_lines(*lines: str) -> str:
    return "\n".join(line for line in lines if line)


def _new_run_dir(root: str, name: str, notice: str, create: bool) -> RunDir:
    """Return a new run directory. With `create` it is created: only mkdir ensures that no other launch has its id."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    new_root = not os.path.isdir(root)
    for n in itertools.count(1):
        id = f"{stamp}-{name}" + (f"-{n}" if n > 1 else "")
        path = os.path.join(root, id)
        if not create:
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
        return RunDir(path, id, name, 0, False, notice, created=True, created_root=new_root)
    raise AssertionError("itertools.count() does not end")


def discard_run_dir(run_dir: RunDir) -> None:
    """Remove what was created for a run that did not start. A failure is only printed, so that it can't hide an error."""
    if not run_dir.created:
        return
    try:
        shutil.rmtree(run_dir.dir)
        if run_dir.created_root and not os.listdir(os.path.dirname(run_dir.dir)):
            os.rmdir(os.path.dirname(run_dir.dir))
    except FileNotFoundError:
        pass
    except OSError as problem:
        print_status(f"{problem.filename or run_dir.dir} can't be removed: {problem.strerror}")
