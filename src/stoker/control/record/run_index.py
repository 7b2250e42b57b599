"""The runs of a folder: listing them, finding one by its path, id, name or beginning."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from stoker.contract import errors, layout, safe_io, terminal
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import open_below
from stoker.contract.spelling import suggest
from stoker.contract.text import escape
from stoker.control.record.run_record import Damaged, RunRecord, load_run, read_run
from stoker.control.record.speedrun_index import list_speedruns, speedrun_at


@frozen
class RunListing:
    runs: tuple[RunRecord, ...]  # oldest first
    damaged: tuple[tuple[str, str], ...]  # name of the folder, why
    others: int  # folders of other users that were left out: not asked for, or not readable

    @property
    def skipped(self) -> str:
        """One line; empty where nothing was skipped."""
        if not self.damaged:
            return ""
        told = "; ".join(f"{escape(name, 80)}: {why}" for name, why in self.damaged[:3])
        more = f"; and {len(self.damaged) - 3} more" if len(self.damaged) > 3 else ""
        return f"skipped {len(self.damaged)} damaged run record{'s' if len(self.damaged) > 1 else ''}: {told}{more}"


def list_runs(root: str, everybody: bool = False, read_run: Callable[[str], RunRecord | None] = read_run) -> RunListing:
    """List this user's runs; with `everybody` also those of other users that can be read.

    `read_run`: `read`, or one that remembers: a viewer lists a thousand runs every two seconds.
    """
    runs: list[RunRecord] = []
    damaged: list[tuple[str, str]] = []
    others = 0
    try:
        entries = sorted(os.listdir(root))
    except FileNotFoundError:
        entries = []
    except OSError as problem:
        line = f"the runs folder {escape(root)} can't be read: {problem.strerror}; name another with --runs-dir"
        raise errors.Refusal(line, errors.EX_NOINPUT) from problem
    for name in entries:
        run_dir = os.path.join(root, name)
        try:
            about = os.lstat(run_dir)
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError:
            others += 1  # a user's FUSE mount is closed to everybody else, even to root
            continue
        if not stat.S_ISDIR(about.st_mode):
            continue
        try:
            if not safe_io.is_own_uid(about.st_uid, root) and (not everybody or _is_closed(run_dir)):
                others += 1
                continue
            run = read_run(run_dir)
        except Damaged as problem:
            damaged.append((name, str(problem)))
        except OSError as problem:
            damaged.append((name, f"can't be read: {problem.strerror}"))
        else:
            if run is not None:
                runs.append(run)
    return RunListing(tuple(sorted(runs, key=lambda run: run.started)), tuple(damaged), others)


def _is_closed(run_dir: str) -> bool:
    """Return whether we are not permitted to read this run: run directories are their owners' alone by default."""
    try:
        os.close(open_below(run_dir, layout.RUN))
    except PermissionError:
        return True
    except OSError:
        return False  # no run, or a damaged one
    return False


def all_runs(root: str) -> list[RunRecord]:
    """One's own, oldest first."""
    return list(list_runs(root).runs)


def find_file(run_dir: str, name: str) -> str | None:
    """Return the path of a run's file below its directory, or None; of a job of roles that of the first role that has one."""
    if os.path.exists(os.path.join(run_dir, name)):
        return name
    for role in list_runs(os.path.join(run_dir, layout.ROLES)).runs:
        if os.path.exists(os.path.join(role.dir, name)):
            return os.path.join(layout.ROLES, os.path.basename(role.dir), name)
    return None


def is_only_one(root: str, name: str) -> bool:
    """Of one's own runs there, at most one has this name, as far as can be read."""
    try:
        return sum(run.name == name for run in list_runs(root).runs) <= 1
    except errors.Refusal:
        return False


def find_run(which: str | None, root: str, exact: bool = False, say: Callable[[str], None] = terminal.print_status) -> RunRecord:
    """By path, id, name (the newest), a beginning that fits one run only, or the newest. Others' by path only."""
    if which is None or which == layout.LATEST:
        return _newest(root, say)
    latest = split_latest(which)
    if latest is not None and not latest[1]:
        return _newest(latest[0], say)
    by_path = os.sep in which
    for given in (which, os.path.join(root, which)):
        candidate = through_latest(given, say)
        folder = os.path.dirname(candidate) or "."
        link = os.path.islink(candidate) and not by_path
        if link and not safe_io.is_own_uid(os.lstat(candidate).st_uid, folder):
            continue
        try:
            run = read_run(os.path.realpath(candidate))
        except Damaged as problem:
            if by_path:
                line = f"the record of run {escape(which)} is damaged: {problem}"
                raise errors.Refusal(line, errors.EX_DATAERR) from problem
            continue  # perhaps another run has this name
        if run is not None and (run.mine or by_path):
            return run
    if by_path and (role := _role(which, root, exact, say)) is not None:
        return role
    listing = list_runs(root)
    if listing.skipped:
        say(listing.skipped)
    match = [run for run in listing.runs if run.name == which]
    if len(match) > 1:
        say(f"{escape(which, 100)} is the name of {len(match)} runs; the newest is taken: {match[-1].id}")
    if match:
        return match[-1]
    begins = [run for run in listing.runs if run.id.startswith(which) or run.name.startswith(which)]
    others = os.path.isdir(os.path.join(root, which))  # another user's, whatever of ours begins like it
    if len(begins) == 1 and not exact and not others:
        return begins[0]
    raise _no_run(which, root, listing)


def find_role(which: str, root: str) -> RunRecord | None:
    """Return the run that JOB/ROLE names, or None."""
    return _role(which, root, True, lambda line: None)


def _role(which: str, root: str, exact: bool, say: Callable[[str], None]) -> RunRecord | None:
    """JOB/ROLE: the run of one role of a job."""
    job, _, name = which.rpartition(os.sep)
    try:
        return role_of(find_run(job or None, root, exact, say), name)
    except errors.Refusal:
        return None


def list_roles(run: RunRecord) -> dict[str, RunRecord]:
    """Return the runs of a job's roles that have been started, by their names; none of a plain run."""
    root = os.path.join(run.dir, layout.ROLES)
    if not os.path.isdir(root):
        return {}
    by_name = {role.name: role for role in list_runs(root, everybody=not run.mine).runs}
    return {name: by_name[name] for name in sorted(by_name)}


def role_of(run: RunRecord, name: str) -> RunRecord:
    found = list_roles(run)
    if name not in found:
        there = f"; it has {', '.join(found)}" if found else ", but is a plain run"
        raise errors.Refusal(f"run {run.id} has no role {escape(name, 60)!r}{there}", errors.EX_NOINPUT)
    return found[name]


def _newest(root: str, say: Callable[[str], None]) -> RunRecord:
    """The link's where it is our own and leads to a run of ours in this folder; else the newest by its start."""
    link = os.path.join(root, layout.LATEST)
    try:
        target = os.readlink(link)
        if safe_io.is_own_uid(os.lstat(link).st_uid, root) and os.path.basename(target) == target:
            run = load_run(os.path.realpath(link))
            if run is not None and run.mine:
                return run
    except OSError:
        pass  # there is none: a file system without links, or another user's
    listing = list_runs(root)
    if listing.skipped:
        say(listing.skipped)
    if not listing.runs:
        others = f" of yours ({listing.others} of other users: `stoker runs --all`)" if listing.others else ""
        there = [f"{escape(one.dir)} is a speedrun: --runs-dir {escape(one.runs_dir)}" for one in list_speedruns(root)]
        hint = "; ".join(there[:3]) or "name another folder with --runs-dir"
        raise errors.Refusal(f"no runs{others} in {escape(os.path.abspath(root))}; {hint}", errors.EX_NOINPUT)
    return listing.runs[-1]


def split_latest(path: str) -> tuple[str, str] | None:
    """Return (runs folder, what follows) of a path through a runs folder's `latest`, such as runs/latest/hf, else None.

    It is one where we have runs there and `latest` is a link, is missing, or is another user's. A folder of that name that is
    ours is an ordinary folder.
    """
    parts = path.split("/")
    for at in (at for at, part in enumerate(parts) if part == layout.LATEST):
        latest, root = _split(parts, at)
        if os.path.isdir(latest) and not os.path.islink(latest) and not _whose(latest, root):
            continue
        if root != "." or os.path.islink(latest):
            try:
                runs = all_runs(root)
            except errors.Refusal:  # a folder that we can't list has no runs of ours
                continue
            if runs:
                return root, "/".join(filter(None, parts[at + 1 :]))
    return None


def is_latest(which: str) -> bool:
    """Return whether a word is `latest`, or a path through a runs folder's `latest`."""
    return which == layout.LATEST or split_latest(which) is not None


def _split(parts: list[str], at: int) -> tuple[str, str]:
    """(the path up to `latest`, the folder that it is in)."""
    return "/".join(parts[: at + 1]), "/".join(parts[:at]) or ("/" if at else ".")


def through_latest(path: str, say: Callable[[str], None] = terminal.print_status) -> str:
    """Return the path with the run instead of a link `latest`, which may lead to another run later.

    Where `latest` is another user's (in a shared folder anybody may make it, as a link or a folder), it is our newest run
    there; without runs of ours there, the path stays what it is.
    """
    parts = path.split("/")
    for at in (at for at, part in enumerate(parts) if part == layout.LATEST):
        latest, root = _split(parts, at)
        whose = _whose(latest, root)
        if not whose:
            if os.path.islink(latest):
                return os.path.join(os.path.dirname(latest), os.readlink(latest), *filter(None, parts[at + 1 :]))
            continue
        try:
            runs = all_runs(root)
        except errors.Refusal:  # a folder that we can't list has no runs of ours
            continue
        if runs:
            say(f"{escape(latest)} {whose}: your newest run there is used, {escape(runs[-1].dir)}")
            return os.path.join(runs[-1].dir, *filter(None, parts[at + 1 :]))
    return path


def _whose(latest: str, root: str) -> str:
    """Who else has made it, or what it leads to. Empty: there is none, or all of it is ours."""
    try:
        link = os.lstat(latest)
    except OSError:
        return ""
    is_link = stat.S_ISLNK(link.st_mode)
    if not safe_io.is_own_uid(link.st_uid, root):
        return f"is a {'link' if is_link else 'folder'} of {safe_io.user_name(link.st_uid)}"
    try:
        target = os.stat(latest).st_uid
    except OSError:
        return "leads nowhere"
    return "" if safe_io.is_own_uid(target, root) else f"leads to a folder of {safe_io.user_name(target)}"


def _no_run(which: str, root: str, listing: RunListing) -> errors.Refusal:
    shown = escape(which, 100)
    path = os.path.join(root, which)
    broken = dict(listing.damaged).get(which)
    if broken:
        return errors.Refusal(f"the record of run {shown} is damaged: {broken}", errors.EX_DATAERR)
    if os.sep not in which and os.path.isdir(path):
        uid = os.lstat(path).st_uid
        if not safe_io.is_own_uid(uid, root):
            user = safe_io.user_name(uid)
            line = f"run {shown} in {escape(root)} belongs to {user}: to read it give its path, {escape(path)}"
            return errors.Refusal(line, errors.EX_NOPERM)
    for place in (which, path):
        if (speedrun := speedrun_at(place.rstrip(os.sep))) is not None:
            line = f"{shown} is a speedrun: name a run of its stages, with --runs-dir {escape(speedrun.runs_dir)}"
            return errors.Refusal(line, errors.EX_NOINPUT)
    hint = suggest(
        os.path.basename(which.rstrip(os.sep)), [*(run.name for run in listing.runs), *(run.id for run in listing.runs)]
    )
    if not hint and listing.runs:
        hint = f"; `stoker runs` lists the {len(listing.runs)} there"
    return errors.Refusal(f"no run {shown!r} in {escape(os.path.abspath(root))}{escape(hint)}", errors.EX_NOINPUT)
