"""Finds what changed between a recorded run and a new request for it: settings, and files that its result depends on."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from stoker.contract.frozen import as_json
from stoker.contract.masking import mask_argv
from stoker.contract.safe_io import open_regular
from stoker.contract.text import escape
from stoker.control.plan.options import RunOptions
from stoker.control.plan.request import Request, module_file

_MAX_CHANGES = 4  # in one message
_MAX_VALUE_CHARS = 80
_DEFAULT = "its default"

# Existing arguments with these endings are files that a script reads, not ones that it writes.
_CONFIG_SUFFIXES = (".yaml", ".yml", ".toml", ".json", ".ini", ".cfg", ".py", ".sh")
_MAX_CONFIG_BYTES = 16 << 20  # a larger file is data: reading it at each start takes too long


def describe_changed_settings(record: Mapping[str, Any], request: Request, ignored: frozenset[str]) -> str:
    """Return each setting that differs from the record, with both values, or "" if there is no difference.

    `ignored` names the options that don't make another run.
    """
    defaults, options = as_json(RunOptions()), as_json(request.options)
    recorded = {**defaults, **(record.get("request") or {})}
    pairs = [
        (f"--{name.replace('_', '-')}", _option_text(recorded[name]), _option_text(options[name]))
        for name in sorted({*defaults} - ignored)
    ]
    if record.get("script") != request.script:
        pairs.append(("program", str(record.get("script")), request.script))
    args = mask_argv(request.args)
    if request.identity is None:
        pairs.append(("arguments", shlex.join(_strings(record.get("args"))), shlex.join(args)))
    else:
        then, now = parse_key_values(record.get("args")), parse_key_values(args)
        identity = {*parse_key_values(record.get("identity")), *parse_key_values(mask_argv(request.identity))}
        pairs += [(name, then.get(name, _DEFAULT), now.get(name, _DEFAULT)) for name in sorted(identity)]
    changes = [f"{name}: {_value_text(old)} then, {_value_text(new)} now" for name, old, new in pairs if old != new]
    omitted = f"; and {len(changes) - _MAX_CHANGES} more" if len(changes) > _MAX_CHANGES else ""
    return "; ".join(changes[:_MAX_CHANGES]) + omitted


def parse_key_values(argv: Any) -> dict[str, str]:
    """Return a recipe's settings (config key -> value) from the command line in its record."""
    values: dict[str, list[str]] = {}
    args = iter(_strings(argv))
    for arg in args:
        name, equals, value = arg.removeprefix("--").partition("=")
        values.setdefault(name, []).append(value if equals else next(args, ""))
    return {name: shlex.join(texts) if len(texts) > 1 else texts[0] for name, texts in values.items()}


def _strings(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _option_text(value: Any) -> str:
    if isinstance(value, list):
        return shlex.join(mask_argv(map(str, value)))
    return "not set" if value is None else str(value)


def _value_text(value: str) -> str:
    return escape(value, _MAX_VALUE_CHARS) or "empty"


def digest_contents(request: Request) -> list[tuple[str, str]]:
    """Return (label, SHA-256) of the files that a run's result depends on: those the request names, else its program's.

    Files that are not on this machine (a script of other hosts) are left out.
    """
    return list(_digest_program(request).items() if request.contents is None else request.contents)


def find_changed_files(record: Mapping[str, Any], request: Request) -> tuple[str, ...] | None:
    """Return the labels of the files that changed since a recorded run, or None if its record has no digests.

    A file that only one of the two has is not compared, because a script may create it.
    """
    pairs = record.get("contents")
    if not isinstance(pairs, list):
        return None
    recorded = {str(pair[0]): pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2}
    if not recorded:
        return None
    return tuple(label for label, digest in digest_contents(request) if recorded.get(label, digest) != digest)


def _digest_program(request: Request) -> dict[str, str]:
    """Return the digests of a program, of the modules beside it that it imports, and of the config files it is given."""
    from stoker.contract.digests import combine_digests, digest_file  # OpenSSL takes 4 ms to load

    options, script = request.options, request.script
    file, import_root = script, ""  # local modules are looked for in `import_root`, unless it is empty
    if options.no_python:
        file = script if os.sep in script else ""  # a program found on the PATH belongs to the system
    elif options.module:
        file = module_file(script) or ""
        import_root = _find_import_root(script, file)
    else:
        file = os.path.join(script, "__main__.py") if os.path.isdir(script) else script
        import_root = os.path.dirname(os.path.realpath(file))
    digests: dict[str, str] = {}
    if os.path.isfile(file):
        digests[script] = digest_file(file)
        modules = sorted(_find_local_imports(file, import_root)) if import_root else []
        if modules:
            module_digests = ((os.path.relpath(path, import_root), digest_file(path)) for path in modules)
            digests[f"a module that {script} imports"] = combine_digests(module_digests)
    for arg in request.args:
        path = arg.partition("=")[2] if arg.startswith("-") else arg  # FILE or --flag=FILE
        if path.endswith(_CONFIG_SUFFIXES) and os.path.isfile(path) and os.path.getsize(path) <= _MAX_CONFIG_BYTES:
            digests.setdefault(path, digest_file(path))
    return digests


def _find_import_root(module: str, file: str) -> str:
    """Return the folder of a module's outermost package, or "" for installed modules and the standard library."""
    depth = len(module.split(".")) + (os.path.basename(file) == "__main__.py")
    root = os.path.realpath(file)
    for _ in range(depth):
        root = os.path.dirname(root)
    installed = os.path.basename(root) in ("site-packages", "dist-packages") or root == os.path.dirname(os.__file__)
    return "" if installed else root


def _find_local_imports(file: str, root: str) -> set[str]:
    """Return the files below `root` that a program imports, directly or through each other.

    Only `import` statements are read: nothing is executed, and installed packages are left out.
    """
    modules: set[str] = set()
    queue = [file]
    seen = {os.path.realpath(file)}
    while queue:
        path = queue.pop()
        for name in _read_imported_names(path, root):
            for source in _find_source_files(name, root):
                real = os.path.realpath(source)
                if real not in seen:
                    seen.add(real)
                    modules.add(source)
                    queue.append(source)
    return modules


def _read_imported_names(path: str, root: str) -> Iterator[str]:
    """Yield the dotted names that a file's import statements may load. A file that does not parse has none."""
    import ast

    try:
        with os.fdopen(open_regular(path), "rb") as file:
            tree = ast.parse(file.read())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # the launcher reports a script that does not parse
    package = os.path.relpath(os.path.dirname(os.path.realpath(path)), os.path.realpath(root)).split(os.sep)
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


def _find_source_files(name: str, root: str) -> Iterator[str]:
    """Yield the files that importing a dotted name reads, from its outermost package down."""
    path = root
    for part in name.split("."):
        path = os.path.join(path, part)
        for source in (f"{path}.py", os.path.join(path, "__init__.py")):
            if os.path.isfile(source):
                yield source
