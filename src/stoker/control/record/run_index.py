"""Lists the runs of a folder, and finds one by its path, id, name or a prefix of its id or name."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable

from stoker.contract import errors, layout, safe_io, terminal
from stoker.contract.frozen import frozen
from stoker.contract.process import process_owner
from stoker.contract.safe_io import open_below, read_text
from stoker.contract.spelling import suggest
from stoker.contract.text import escape, is_digits
from stoker.control.record.run_record import (
    DamagedRecord,
    RunRecord,
    has_open_for_writing,
    load_run,
    read_json,
    read_run,
)

CHAIN, STAGES, LOCK = "chain.json", "stages", ".lock"  # in the folder of a speedrun


@frozen
class RunListing:
    runs: tuple[RunRecord, ...]  # oldest first
    damaged: tuple[tuple[str, str], ...]  # (name of the folder, what is wrong)
    others: int  # number of folders of other users that were left out or can't be read

    @property
    def skipped(self) -> str:
        """A line about the damaged records, or ""."""
        if not self.damaged:
            return ""
        examples = "; ".join(f"{escape(name, 80)}: {why}" for name, why in self.damaged[:3])
        omitted = f"; and {len(self.damaged) - 3} more" if len(self.damaged) > 3 else ""
        plural = "s" if len(self.damaged) > 1 else ""
        return f"skipped {len(self.damaged)} damaged run record{plural}: {examples}{omitted}"


def list_runs(root: str, everybody: bool = False, read_run: Callable[[str], RunRecord | None] = read_run) -> RunListing:
    """List this user's runs; with `everybody` also those of other users that can be read.

    Viewers pass a `read_run` with a cache: they list a thousand runs every two seconds.
    """
    runs: list[RunRecord] = []
    damaged: list[tuple[str, str]] = []
    others = 0
    try:
        entries = sorted(os.listdir(root))
    except FileNotFoundError:
        entries = []
    except OSError as problem:
        line = f"the runs folder {escape(root)} can't be read: {problem.strerror}; choose another with --runs-dir"
        raise errors.Refusal(line, errors.EX_NOINPUT) from problem
    for name in entries:
        run_dir = os.path.join(root, name)
        try:
            status = os.lstat(run_dir)
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError:
            others += 1  # another user's FUSE mount, which even root can't read
            continue
        if not stat.S_ISDIR(status.st_mode):
            continue
        try:
            if not safe_io.is_own_uid(status.st_uid, root) and (not everybody or _is_unreadable(run_dir)):
                others += 1
                continue
            run = read_run(run_dir)
        except DamagedRecord as problem:
            damaged.append((name, str(problem)))
        except OSError as problem:
            damaged.append((name, f"can't be read: {problem.strerror}"))
        else:
            if run is not None:
                runs.append(run)
    return RunListing(tuple(sorted(runs, key=lambda run: run.started)), tuple(damaged), others)


def _is_unreadable(run_dir: str) -> bool:
    """Return whether we lack permission to read a run: by default only its owner has it."""
    try:
        os.close(open_below(run_dir, layout.RUN))
    except PermissionError:
        return True
    except OSError:
        return False  # not a run, or a damaged one
    return False


def own_runs(root: str) -> list[RunRecord]:
    """Return this user's runs, oldest first."""
    return list(list_runs(root).runs)


def find_file(run_dir: str, name: str) -> str | None:
    """Return the path of a run's file relative to the run directory, or None.

    A multi-role job has the file of its first role that has one.
    """
    if os.path.exists(os.path.join(run_dir, name)):
        return name
    for role in list_runs(os.path.join(run_dir, layout.ROLES)).runs:
        if os.path.exists(os.path.join(role.dir, name)):
            return os.path.join(layout.ROLES, os.path.basename(role.dir), name)
    return None


def is_name_unique(root: str, name: str) -> bool:
    """Return whether at most one of this user's runs has this name, or False if the folder can't be read."""
    try:
        return sum(run.name == name for run in list_runs(root).runs) <= 1
    except errors.Refusal:
        return False


def find_run(
    which: str | None, root: str, exact: bool = False, say: Callable[[str], None] = terminal.print_status
) -> RunRecord:
    """Return the run with this path, id, name (the newest of that name) or unique prefix of an id or name.

    For None, return the newest run. Other users' runs are found by path only. With `exact`, a prefix is not enough.
    Raises Refusal if there is no such run.
    """
    if which is None or which == layout.LATEST:
        return _find_newest_run(root, say)
    latest = split_latest(which)
    if latest is not None and not latest[1]:
        return _find_newest_run(latest[0], say)
    is_path = os.sep in which
    for path in (which, os.path.join(root, which)):
        path = through_latest(path, say)
        is_link = os.path.islink(path) and not is_path
        if is_link and not safe_io.is_own_uid(os.lstat(path).st_uid, os.path.dirname(path) or "."):
            continue
        try:
            run = read_run(os.path.realpath(path))
        except DamagedRecord as problem:
            if is_path:
                line = f"the record of run {escape(which)} is damaged: {problem}"
                raise errors.Refusal(line, errors.EX_DATAERR) from problem
            continue  # another run may have this name
        if run is not None and (run.mine or is_path):
            return run
    if is_path and (role := find_role(which, root, exact, say)) is not None:
        return role
    listing = list_runs(root)
    if listing.skipped:
        say(listing.skipped)
    same_name = [run for run in listing.runs if run.name == which]
    if len(same_name) > 1:
        say(f"{len(same_name)} runs have the name {escape(which, 100)}; using the newest, {same_name[-1].id}")
    if same_name:
        return same_name[-1]
    prefix_matches = [run for run in listing.runs if run.id.startswith(which) or run.name.startswith(which)]
    is_other_users = os.path.isdir(os.path.join(root, which))  # then `which` names that run, and is not a prefix
    if len(prefix_matches) == 1 and not exact and not is_other_users:
        return prefix_matches[0]
    raise _explain_missing_run(which, root, listing)


def find_role(
    which: str, root: str, exact: bool = True, say: Callable[[str], None] = lambda line: None
) -> RunRecord | None:
    """Return the run of one role, named as JOB/ROLE, or None."""
    job, _, name = which.rpartition(os.sep)
    try:
        return role_of(find_run(job or None, root, exact, say), name)
    except errors.Refusal:
        return None


def list_roles(run: RunRecord) -> dict[str, RunRecord]:
    """Return the runs of a job's started roles by name, or {} for a plain run."""
    root = os.path.join(run.dir, layout.ROLES)
    if not os.path.isdir(root):
        return {}
    by_name = {role.name: role for role in list_runs(root, everybody=not run.mine).runs}
    return {name: by_name[name] for name in sorted(by_name)}


def role_of(run: RunRecord, name: str) -> RunRecord:
    """Return the run of a job's role. Raises Refusal if there is none."""
    roles = list_roles(run)
    if name not in roles:
        hint = f"; it has {', '.join(roles)}" if roles else "; it is not a multi-role job"
        raise errors.Refusal(f"run {run.id} has no role {escape(name, 60)!r}{hint}", errors.EX_NOINPUT)
    return roles[name]


def _find_newest_run(root: str, say: Callable[[str], None]) -> RunRecord:
    """Return the run that `latest` links to if link and run are ours, else the one that was started last."""
    link = os.path.join(root, layout.LATEST)
    try:
        target = os.readlink(link)
        if safe_io.is_own_uid(os.lstat(link).st_uid, root) and os.path.basename(target) == target:
            run = load_run(os.path.realpath(link))
            if run is not None and run.mine:
                return run
    except OSError:
        pass  # there is no link: the file system has none, or it is another user's folder
    listing = list_runs(root)
    if listing.skipped:
        say(listing.skipped)
    if not listing.runs:
        others = f" of yours ({listing.others} of other users: `stoker runs --all`)" if listing.others else ""
        hints = [
            f"{escape(speedrun.dir)} is a speedrun; name its runs with --runs-dir {escape(speedrun.runs_dir)}"
            for speedrun in list_speedruns(root)[:3]
        ]
        hint = "; ".join(hints) or "choose another folder with --runs-dir"
        raise errors.Refusal(f"there are no runs{others} in {escape(os.path.abspath(root))}; {hint}", errors.EX_NOINPUT)
    return listing.runs[-1]


def split_latest(path: str) -> tuple[str, str] | None:
    """Split a path through a runs folder's `latest`, such as runs/latest/hf, into ("runs", "hf"). Return None for other paths.

    The folder must have runs of ours, and `latest` must be a link, missing, or another user's: our own folder of that name
    is an ordinary folder.
    """
    for latest, root, suffix in _split_at_latest(path):
        if os.path.isdir(latest) and not os.path.islink(latest) and not _explain_other_owner(latest, root):
            continue
        if (root != "." or os.path.islink(latest)) and _find_newest_own_run(root) is not None:
            return root, "/".join(suffix)
    return None


def is_latest(which: str) -> bool:
    """Return whether a word is `latest`, or a path through a runs folder's `latest`."""
    return which == layout.LATEST or split_latest(which) is not None


def through_latest(path: str, say: Callable[[str], None] = terminal.print_status) -> str:
    """Replace `latest` in a path by the run that it links to now, because it may link to another run later.

    If `latest` is another user's (in a shared folder anybody may make it, as a link or a folder), our newest run there is
    used. Without runs of ours there, the path is returned unchanged.
    """
    for latest, root, suffix in _split_at_latest(path):
        problem = _explain_other_owner(latest, root)
        if not problem:
            if os.path.islink(latest):
                return os.path.join(os.path.dirname(latest), os.readlink(latest), *suffix)
            continue
        run = _find_newest_own_run(root)
        if run is not None:
            say(f"{escape(latest)} {problem}; using your newest run there, {escape(run.dir)}")
            return os.path.join(run.dir, *suffix)
    return path


def _split_at_latest(path: str) -> list[tuple[str, str, list[str]]]:
    """Return (path that ends with `latest`, its folder, the parts after it) for each part of a path that is `latest`."""
    parts = path.split("/")
    return [
        (
            "/".join(parts[: at + 1]),
            "/".join(parts[:at]) or ("/" if at else "."),
            [after for after in parts[at + 1 :] if after],
        )
        for at, part in enumerate(parts)
        if part == layout.LATEST
    ]


def _find_newest_own_run(root: str) -> RunRecord | None:
    try:
        runs = own_runs(root)
    except errors.Refusal:  # we have no runs in a folder that we can't list
        return None
    return runs[-1] if runs else None


def _explain_other_owner(latest: str, root: str) -> str:
    """Return why `latest` can't be followed: it is another user's, links to such a folder, or is broken. Else return ""."""
    try:
        status = os.lstat(latest)
    except OSError:
        return ""
    if not safe_io.is_own_uid(status.st_uid, root):
        kind = "link" if stat.S_ISLNK(status.st_mode) else "folder"
        return f"is a {kind} of {safe_io.user_name(status.st_uid)}"
    try:
        target_uid = os.stat(latest).st_uid
    except OSError:
        return "leads nowhere"
    return "" if safe_io.is_own_uid(target_uid, root) else f"leads to a folder of {safe_io.user_name(target_uid)}"


def _explain_missing_run(which: str, root: str, listing: RunListing) -> errors.Refusal:
    name = escape(which, 100)
    path = os.path.join(root, which)
    damage = dict(listing.damaged).get(which)
    if damage:
        return errors.Refusal(f"the record of run {name} is damaged: {damage}", errors.EX_DATAERR)
    if os.sep not in which and os.path.isdir(path):
        uid = os.lstat(path).st_uid
        if not safe_io.is_own_uid(uid, root):
            user = safe_io.user_name(uid)
            line = f"run {name} in {escape(root)} belongs to {user}; to read it, name it by its path: {escape(path)}"
            return errors.Refusal(line, errors.EX_NOPERM)
    for folder in (which, path):
        if (speedrun := read_speedrun(folder.rstrip(os.sep))) is not None:
            line = f"{name} is a speedrun; name a run of its stages, with --runs-dir {escape(speedrun.runs_dir)}"
            return errors.Refusal(line, errors.EX_NOINPUT)
    names = [*(run.name for run in listing.runs), *(run.id for run in listing.runs)]
    hint = suggest(os.path.basename(which.rstrip(os.sep)), names)
    if not hint and listing.runs:
        hint = f"; `stoker runs` lists the {len(listing.runs)} there"
    return errors.Refusal(
        f"there is no run {name!r} in {escape(os.path.abspath(root))}{escape(hint)}", errors.EX_NOINPUT
    )


@frozen
class Speedrun:
    """The state of a speedrun, which is a folder with the runs of its stages (stages/) and their states (chain.json)."""

    dir: str
    state: str  # completed, running, failed or unfinished
    stages: int  # number of all stages
    done: int  # number of finished stages
    stage: str  # name of the stage that is running, has failed or is next, or "" if all are done

    @property
    def runs_dir(self) -> str:
        return os.path.join(self.dir, STAGES)

    @property
    def line(self) -> str:
        at = f" at stage {self.stage}" if self.stage else ""
        count = f"{self.done} of {self.stages} stages done" if self.stages else "no stage has started"
        command = f"`stoker runs --runs-dir {escape(shlex.quote(self.runs_dir))}` lists the runs of its stages"
        return f"{escape(self.dir)} is a speedrun, {self.state}{at}: {count}; {command}"


def list_speedruns(root: str) -> list[Speedrun]:
    """Return this user's speedruns, by name."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    speedruns = (read_speedrun(os.path.join(root, name)) for name in names)
    return [speedrun for speedrun in speedruns if speedrun is not None]


def read_speedrun(path: str) -> Speedrun | None:
    """Return the speedrun in a folder, or None if the folder is not a speedrun of this user."""
    try:
        folder, stages_folder = os.lstat(path), os.lstat(os.path.join(path, STAGES))
    except OSError:
        return None
    is_speedrun = stat.S_ISDIR(folder.st_mode) and stat.S_ISDIR(stages_folder.st_mode)
    if not is_speedrun or not safe_io.is_own_uid(folder.st_uid, os.path.dirname(path) or "."):
        return None
    chain = read_json(os.path.join(path, CHAIN))
    rows = chain.get("stages") if isinstance(chain, dict) else None
    rows = rows if isinstance(rows, list) else []
    stages = [(str(row.get("name")), row.get("status")) for row in rows if isinstance(row, dict)]
    unfinished = [(escape(name, 60), status) for name, status in stages if status != "done"]
    state, stage = "completed" if stages else "unfinished", ""
    if unfinished:
        failed = [name for name, status in unfinished if status == "failed"]
        state, stage = ("failed", failed[0]) if failed else ("unfinished", unfinished[0][0])
    lock = os.path.join(path, LOCK)
    try:
        pid = read_text(lock).strip()
    except (OSError, ValueError):
        pid = ""
    # It is running if the process that its lock file names is ours and has that file open.
    if is_digits(pid) and process_owner(int(pid)) == os.getuid() and has_open_for_writing(int(pid), lock):
        state, stage = "running", next((name for name, status in unfinished if status == "running"), stage)
    return Speedrun(path, state, len(stages), len(stages) - len(unfinished), stage)
