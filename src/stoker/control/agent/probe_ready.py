"""Is this host ready for its ranks: workdir, interpreter, run directory; and is that the coordinator's own?"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from typing import Any

from stoker.contract import layout, owners
from stoker.contract.untrusted import kind_of
from stoker.control.machine.source import digest, digest_of_paths, hashes_of, module_files, script_files


def ready(workdir: str, program: str, run_dir: str, token: str) -> Any:
    """`token`: a randomly named file of the coordinator's in the run directory. Who sees it shares the disk."""
    problems = []
    where = os.path.expanduser(workdir)
    if not os.path.isdir(where):
        problems.append(f"no folder {workdir} for the ranks (workdir: in the hosts file, or --sync)")
    elif not os.access(where, os.R_OK | os.X_OK):
        problems.append(f"the folder {workdir} may not be entered")
    found = shutil.which(os.path.expanduser(program), path=os.environ.get("PATH", os.defpath))
    if found is None and not os.access(os.path.join(where, program), os.X_OK):
        problems.append(f"no program {program} (python: in the hosts file, or --python)")
    shared = os.path.exists(os.path.join(run_dir, token))
    unwritable = ""
    try:
        if not shared:
            theirs = _make(run_dir)
            problems += [theirs] if theirs else []
        if not os.access(run_dir, os.W_OK):
            unwritable = "not writable"
    except OSError as problem:
        unwritable = problem.strerror or str(problem)
    return {"problems": problems, "shared": shared, "unwritable": unwritable, "stranger": _stranger_of(where)}


def _stranger_of(workdir: str) -> str:
    """Whose the workdir is, where that is neither ours nor root's; else empty."""
    try:
        uids = [about(workdir).st_uid for about in (os.lstat, os.stat)]  # of a link, and of what it leads to
    except OSError:
        return ""  # one of the problems already
    return next((owners.user_name(uid) for uid in uids if not owners.is_trusted(uid, workdir)), "")


def _make(run_dir: str) -> str:
    """Why it can't be used: another user made it first, and the ranks would resume from what they put there."""
    root = os.path.dirname(run_dir)
    try:
        os.makedirs(root, 0o700, exist_ok=True)
    except FileExistsError as problem:  # a file where a folder should be
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), root) from problem
    why = layout.why_not_for_runs(root)
    if why:
        return f"the runs folder {root} can't be used: {why}; choose another with --runs-dir"
    try:
        os.mkdir(run_dir, 0o700)
    except FileExistsError:
        about = os.lstat(run_dir)
        if not stat.S_ISDIR(about.st_mode):
            return f"the run directory {run_dir} is {kind_of(about.st_mode)} there; choose another name with --name"
        if not owners.is_mine(about.st_uid, root):
            name = owners.user_name(about.st_uid)
            return f"the run directory {run_dir} belongs to {name} there; choose another name with --name"
    return ""


# ---- is the program here the one that is there: hashes of script, of what it can import, of data and weights ----


def files(
    workdir: str, script: str = "", module: bool = False, python: str = "", paths: list[str] | None = None
) -> Any:
    """`script`: a path below the working directory, or a module. A hash is None where there is none of it here."""
    where = os.path.abspath(os.path.expanduser(workdir))
    at = os.path.join(where, os.path.expanduser(script))
    found = script_files(at) if os.path.exists(at) and not module else {}
    if module:
        found = module_files(script, where, os.path.expanduser(python))
    names = hashes_of(found) if script else {}
    own = "__main__.py" if os.path.isdir(at) else os.path.basename(at)
    data = {path: os.path.join(where, os.path.expanduser(path)) for path in paths or []}
    hashed = digest_of_paths(data.values())
    return {
        "script": None if module else names.get(own),
        "package": digest(names) if names else None,
        "names": names,
        "paths": {path: hashed[place] for path, place in data.items()},
    }
