"""Is this host ready for its ranks: workdir, interpreter, run directory; and is that the coordinator's own?"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stoker.contract import layout, safe_io
from stoker.contract.process import NOT_FROM_HERE
from stoker.contract.safe_io import file_kind
from stoker.control.machine.file_hash import FileHashes, sha256_of


def ready(workdir: str, program: str, run_dir: str, token: str) -> Any:
    """`token`: a randomly named file of the coordinator's in the run directory. Who sees it shares the disk."""
    problems = []
    where = os.path.expanduser(workdir)
    if not os.path.isdir(where):
        problems.append(
            f"no folder {workdir} for the ranks; --sync copies this folder there, workdir: in the hosts file names another"
        )
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
    return {"problems": problems, "shared": shared, "unwritable": unwritable}


def _make(run_dir: str) -> str:
    """Why it can't be used: another user made it first, and the ranks would resume from what they put there."""
    root = os.path.dirname(run_dir)
    try:
        os.makedirs(root, 0o700, exist_ok=True)
    except FileExistsError as problem:  # a file where a folder should be
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), root) from problem
    why = layout.why_unsafe_root(root)
    if why:
        return f"the runs folder {root} can't be used: {why}; choose another with --runs-dir"
    try:
        os.mkdir(run_dir, 0o700)
    except FileExistsError:
        about = os.lstat(run_dir)
        if not stat.S_ISDIR(about.st_mode):
            return f"the run directory {run_dir} is {file_kind(about.st_mode)} there; choose another name with --name"
        if not safe_io.is_own_uid(about.st_uid, root):
            name = safe_io.user_name(about.st_uid)
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


# ---- which files a script or module brings along, and one hash of them ----

_LEFT_OUT = ("runs", "cache", "__pycache__", "node_modules", "site-packages")
_DEPTH = 4  # folders below the script's own
_MOST = 2000  # files, and folders looked into: a script in a home directory is no reason to read all of it


def script_files(script: str) -> dict[str, str]:
    """Relative name -> path: the script and the Python files of its folder and below, which it can import."""
    if os.path.isdir(script):  # a folder with __main__.py
        return dict(_python_files(script))
    folder = os.path.dirname(os.path.abspath(script))
    return {**dict(_python_files(folder)), os.path.basename(script): script}


def module_files(module: str, workdir: str, python: str = "") -> dict[str, str]:
    """The files of a module's package: below the working directory (as for `python -m`), else in that Python."""
    top = module.split(".", 1)[0]
    for place in (os.path.join(workdir, top), _installed(top, python)):
        if place and os.path.isdir(place):
            return {f"{top}/{name}": path for name, path in _python_files(place)}
        if place and os.path.isfile(place):
            return {os.path.basename(place): place}
        if place and os.path.isfile(place + ".py"):
            return {f"{top}.py": place + ".py"}
    return {}


def _installed(top: str, python: str) -> str:
    if not python or not top.isidentifier():
        return ""
    place = "(s and (s.submodule_search_locations or [s.origin])[0]) or ''"
    ask = f"import importlib.util as u; s = u.find_spec({top!r}); print(); print({place})"
    argv = [python, "-c", NOT_FROM_HERE + ask]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=20)
    return done.stdout.splitlines()[-1].strip() if done.returncode == 0 and done.stdout else ""


def _python_files(top: str) -> Iterator[tuple[str, str]]:
    count = 0
    for folders, (folder, below, names) in enumerate(os.walk(top)):
        near = os.path.relpath(folder, top).count(os.sep) < _DEPTH
        below[:] = sorted(name for name in below if near and _may_import_from(os.path.join(folder, name)))
        for name in sorted(names):
            if name.endswith(".py"):
                count += 1
                yield os.path.relpath(os.path.join(folder, name), top), os.path.join(folder, name)
        if folders >= _MOST or count >= _MOST:
            return


def _may_import_from(folder: str) -> bool:
    name = os.path.basename(folder)
    return name not in _LEFT_OUT and name[0] != "." and not os.path.exists(os.path.join(folder, "pyvenv.cfg"))


def hashes_of(files: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name, path in sorted(files.items()):
        try:
            found[name] = sha256_of(path)
        except OSError as problem:
            found[name] = f"unreadable: {problem.strerror}"
    return found


def digest(named: Mapping[str, str]) -> str:
    """One hash of many: of names and contents."""
    text = "".join(f"{name}\0{one}\n" for name, one in sorted(named.items()))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def digest_of_paths(paths: Iterable[str]) -> dict[str, str]:
    """Path -> the hash of its content (a folder's: with names); "" for nothing. Big files are remembered."""
    memory = FileHashes()
    found = {}
    for told in paths:
        path = os.path.expanduser(told)
        if os.path.isfile(path):
            found[told] = memory.of(path)
        elif os.path.isdir(path):
            folders = os.walk(path, followlinks=True)
            inside = (os.path.join(folder, name) for folder, _, names in folders for name in names)
            found[told] = digest({os.path.relpath(one, path): memory.of(one) for one in inside if os.path.isfile(one)})
        else:
            found[told] = ""
    memory.save()
    return found
