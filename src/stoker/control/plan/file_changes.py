"""Digests of the files that a run's result depends on: a finished run must not stand for one of changed files."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker.contract.digests import combined_digest, file_digest
from stoker.contract.safe_io import open_regular
from stoker.control.plan.request import Request, module_file

# Arguments with these endings are what a script reads, not what it writes, if they exist before it starts.
_CONFIG_SUFFIXES = (".yaml", ".yml", ".toml", ".json", ".ini", ".cfg", ".py", ".sh")
_MAX_CONFIG_BYTES = 16 << 20  # a larger one is data, which takes long to read at each start


def contents_of(request: Request) -> list[tuple[str, str]]:
    """Return (what it is, SHA-256) of the files a run depends on: what the request says, else its program's files.

    Files that are not on this machine (a script of other hosts) are left out.
    """
    return list(_program_contents(request).items() if request.contents is None else request.contents)


def changes(record: Mapping[str, Any], request: Request) -> tuple[str, ...] | None:
    """Return the labels whose files differ from those of a recorded run; None where its record has no digests.

    A file that is missing in one of the two is not compared: a script may make it.
    """
    pairs = record.get("contents")
    if not isinstance(pairs, list):
        return None
    recorded = {str(pair[0]): pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2}
    if not recorded:
        return None
    return tuple(label for label, digest in contents_of(request) if recorded.get(label, digest) != digest)


def _program_contents(request: Request) -> dict[str, str]:
    options, script = request.options, request.script
    file, folder = script, ""  # modules are looked for in `folder`; empty: no Python file, or an installed one
    if options.no_python:
        file = script if os.sep in script else ""  # a program of the PATH is the system's
    elif options.module:
        file = module_file(script) or ""
        folder = _import_root(script, file)
    else:
        file = os.path.join(script, "__main__.py") if os.path.isdir(script) else script
        folder = os.path.dirname(os.path.realpath(file))
    contents: dict[str, str] = {}
    if os.path.isfile(file):
        contents[script] = file_digest(file)
        modules = sorted(_local_imports(file, folder)) if folder else []
        if modules:
            digests = ((os.path.relpath(path, folder), file_digest(path)) for path in modules)
            contents[f"a module that {script} imports"] = combined_digest(digests)
    for path in _files_in(request.args):
        contents.setdefault(path, file_digest(path))
    return contents


def _import_root(module: str, file: str) -> str:
    """Return the folder that holds a module's outermost package; empty for installed ones and the standard library."""
    depth = len(module.split(".")) + (os.path.basename(file) == "__main__.py")
    root = os.path.realpath(file)
    for _ in range(depth):
        root = os.path.dirname(root)
    installed = os.path.basename(root) in ("site-packages", "dist-packages") or root == os.path.dirname(os.__file__)
    return "" if installed else root


def _files_in(args: Sequence[str]) -> Iterator[str]:
    """Yield the existing config files and scripts among a program's arguments (FILE or --flag=FILE)."""
    for arg in args:
        path = arg.partition("=")[2] if arg.startswith("-") else arg
        if path.endswith(_CONFIG_SUFFIXES) and os.path.isfile(path) and os.path.getsize(path) <= _MAX_CONFIG_BYTES:
            yield path


def _local_imports(file: str, folder: str) -> set[str]:
    """Return the files below `folder` that a program imports, directly or through each other, as far as `import`
    statements tell: nothing is executed, and installed packages are left out.
    """
    found: set[str] = set()
    queue = [file]
    seen = {os.path.realpath(file)}
    while queue:
        path = queue.pop()
        for name in _imported_names(path, folder):
            for source in _source_files(name, folder):
                real = os.path.realpath(source)
                if real not in seen:
                    seen.add(real)
                    found.add(source)
                    queue.append(source)
    return found


def _imported_names(path: str, folder: str) -> Iterator[str]:
    """Yield the dotted names that a file's import statements may load; none of a file that does not parse."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            tree = ast.parse(file.read())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # the start of the run reports it
    package = os.path.relpath(os.path.dirname(os.path.realpath(path)), os.path.realpath(folder)).split(os.sep)
    package = [] if package == ["."] else package
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            if base:
                yield base
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)


def _source_files(name: str, folder: str) -> Iterator[str]:
    """Yield the files that importing a dotted name reads, from its outermost package down."""
    path = folder
    for part in name.split("."):
        path = os.path.join(path, part)
        for source in (f"{path}.py", os.path.join(path, "__init__.py")):
            if os.path.isfile(source):
                yield source
