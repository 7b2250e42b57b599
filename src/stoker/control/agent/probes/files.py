"""Probe that compares this host's files with the coordinator's: hashes of the script, its imports, data and weights."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stoker.contract.process import NOT_FROM_HERE
from stoker.control.machine.file_hash import FileHashes, sha256_of

_SKIPPED_FOLDERS = ("runs", "cache", "__pycache__", "node_modules", "site-packages")
_MAX_DEPTH = 4  # folders below the script's own
_MAX_FILES = 2000  # also of folders: a script may be in a home folder, which must not be read whole


def files(
    workdir: str, script: str = "", module: bool = False, python: str = "", paths: list[str] | None = None
) -> Any:
    """Return hashes of a script or module, of the Python files it can import, and of `paths`.

    `script` is a path below `workdir`, or a module's name if `module` is set. A missing script has None for a hash, a
    missing path "".
    """
    folder = os.path.abspath(os.path.expanduser(workdir))
    script_path = os.path.join(folder, os.path.expanduser(script))
    if module:
        sources = _find_module_files(script, folder, os.path.expanduser(python))
    else:
        sources = _find_script_files(script_path) if os.path.exists(script_path) else {}
    hashes = _hash_files(sources) if script else {}
    main = "__main__.py" if os.path.isdir(script_path) else os.path.basename(script_path)
    full_paths = {path: os.path.join(folder, os.path.expanduser(path)) for path in paths or []}
    path_hashes = _hash_paths(full_paths.values())
    return {
        "script": None if module else hashes.get(main),
        "package": _combine_hashes(hashes) if hashes else None,
        "names": hashes,
        "paths": {path: path_hashes[full_path] for path, full_path in full_paths.items()},
    }


def _find_script_files(script: str) -> dict[str, str]:
    """Return name -> path of a script and of the Python files in and below its folder, which it can import."""
    if os.path.isdir(script):  # a folder with __main__.py
        return dict(_walk_python_files(script))
    folder = os.path.dirname(os.path.abspath(script))
    return {**dict(_walk_python_files(folder)), os.path.basename(script): script}


def _find_module_files(module: str, workdir: str, python: str) -> dict[str, str]:
    """Return name -> path of the files of a module's package, searched in `workdir` (as `python -m` does), then in `python`."""
    package = module.split(".", 1)[0]
    for path in (os.path.join(workdir, package), _find_installed_path(package, python)):
        if path and os.path.isdir(path):
            return {f"{package}/{name}": file for name, file in _walk_python_files(path)}
        if path and os.path.isfile(path):
            return {os.path.basename(path): path}
        if path and os.path.isfile(path + ".py"):
            return {f"{package}.py": path + ".py"}
    return {}


def _find_installed_path(package: str, python: str) -> str:
    if not python or not package.isidentifier():
        return ""
    code = (
        f"import importlib.util as u; s = u.find_spec({package!r}); "
        "print(); print((s and (s.submodule_search_locations or [s.origin])[0]) or '')"
    )
    argv = [python, "-c", NOT_FROM_HERE + code]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=20)
    return done.stdout.splitlines()[-1].strip() if done.returncode == 0 and done.stdout else ""


def _walk_python_files(top: str) -> Iterator[tuple[str, str]]:
    """Yield (name relative to `top`, path) of the Python files in and below a folder."""
    count = 0
    for walked, (folder, subfolders, names) in enumerate(os.walk(top)):
        is_near = os.path.relpath(folder, top).count(os.sep) < _MAX_DEPTH
        subfolders[:] = sorted(name for name in subfolders if is_near and _is_source_folder(os.path.join(folder, name)))
        for name in sorted(names):
            if name.endswith(".py"):
                count += 1
                path = os.path.join(folder, name)
                yield os.path.relpath(path, top), path
        if walked >= _MAX_FILES or count >= _MAX_FILES:
            return


def _is_source_folder(folder: str) -> bool:
    name = os.path.basename(folder)
    is_venv = os.path.exists(os.path.join(folder, "pyvenv.cfg"))
    return name not in _SKIPPED_FOLDERS and name[0] != "." and not is_venv


def _hash_files(sources: Mapping[str, str]) -> dict[str, str]:
    hashes = {}
    for name, path in sorted(sources.items()):
        try:
            hashes[name] = sha256_of(path)
        except OSError as problem:
            hashes[name] = f"unreadable: {problem.strerror}"
    return hashes


def _hash_paths(paths: Iterable[str]) -> dict[str, str]:
    """Return path -> hash of a file, or of a folder's names and contents, or "" if it is missing. Cache big files' hashes."""
    cache = FileHashes()
    hashes = {}
    for path in paths:
        expanded = os.path.expanduser(path)
        if os.path.isfile(expanded):
            hashes[path] = cache.of(expanded)
        elif os.path.isdir(expanded):
            walk = os.walk(expanded, followlinks=True)
            inside = (os.path.join(folder, name) for folder, _, names in walk for name in names)
            hashes[path] = _combine_hashes(
                {os.path.relpath(file, expanded): cache.of(file) for file in inside if os.path.isfile(file)}
            )
        else:
            hashes[path] = ""
    cache.save()
    return hashes


def _combine_hashes(hashes: Mapping[str, str]) -> str:
    """Return one hash of many names and their hashes."""
    text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(hashes.items()))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
