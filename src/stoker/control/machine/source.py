"""The program's own source: which files a script or module brings along, and one hash of them."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping

from stoker.contract.untrusted import NOT_FROM_HERE
from stoker.control.machine.hashing import Hashes, sha256_of

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
    ask = (
        f"import importlib.util as u; s = u.find_spec({top!r}); print(); print((s and (s.submodule_search_locations or"
        " [s.origin])[0]) or '')"
    )
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
    return hashlib.sha256(
        "".join(f"{name}\0{one}\n" for name, one in sorted(named.items())).encode("utf-8", "surrogateescape")
    ).hexdigest()


def digest_of_paths(paths: Iterable[str]) -> dict[str, str]:
    """Path -> the hash of its content (a folder's: with names); "" for nothing. Big files are remembered."""
    memory = Hashes()
    found = {}
    for told in paths:
        path = os.path.expanduser(told)
        if os.path.isfile(path):
            found[told] = memory.of(path)
        elif os.path.isdir(path):
            inside = (
                os.path.join(folder, name) for folder, _, names in os.walk(path, followlinks=True) for name in names
            )
            found[told] = digest({os.path.relpath(one, path): memory.of(one) for one in inside if os.path.isfile(one)})
        else:
            found[told] = ""
    memory.save()
    return found
