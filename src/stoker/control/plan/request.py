"""What the user asked for: options and a program; refused here where it can't start."""

from __future__ import annotations

import os
import sys
from typing import Any

from stoker.contract.env_vars import RECIPES
from stoker.contract.errors import EX_DATAERR, EX_NOINPUT, EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen, options_of, replace
from stoker.contract.safe_io import open_regular
from stoker.contract.spelling import suggest_file
from stoker.contract.text import is_digits
from stoker.control.plan.options import RunOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

# Flags that are taken and change nothing, with the reason that is printed.
_HELPS = {name: spec.help.partition("not needed: ") for name, spec in options_of(RunOptions).items()}
_NO_EFFECT = {name: why for name, (_, not_needed, why) in _HELPS.items() if not_needed}
_NO_EFFECT["rdzv_conf"] = "ranks meet in torch's own store"
# The same, where there is one machine.
_ALONE = {"rdzv_backend": "ranks meet in torch's own store", "node_rank": "one machine has number 0"}


@frozen
class Request:
    options: RunOptions
    script: str
    args: tuple[str, ...]
    given: frozenset[str]  # options given as flags, in the config file or in PET_*: not defaults
    # Of a program that goes on with any number of ranks: what makes it the same run, instead of its arguments.
    identity: tuple[str, ...] | None = None
    # The words of `stoker train`, with `runs/latest` as the run that it was before this one; empty: as they were typed.
    typed: tuple[str, ...] = ()
    # (what it is, SHA-256) of the files that the result depends on; None: the program's own files.
    contents: tuple[tuple[str, str], ...] | None = None


def how_to_run(options: RunOptions) -> RunOptions:
    """Script, module or program: one of them. torchrun lets --run-path win over the other two."""
    if options.run_path:
        return replace(options, no_python=False, module=False)
    if options.no_python and options.module:
        line = "--no-python and --module contradict each other: a module is run by Python; leave one of them out"
        raise Refusal(line, EX_USAGE)
    return options


def by_hand(options: RunOptions) -> bool:
    """Other machines are started by hand beside this one."""
    low, _, high = options.nnodes.partition(":")
    return options.hosts is None and (
        low != "1" or (high not in ("", "1") and bool(options.rdzv_endpoint) and not options.standalone)
    )


def notices(request: Request) -> list[str]:
    options = request.options
    colon, several = ":" in options.nnodes, by_hand(options)
    useless = dict(_NO_EFFECT) if several else {**_NO_EFFECT, **_ALONE}
    if several and colon:
        del useless["rdzv_conf"]
    given = {name.replace("_", "-"): why for name, why in useless.items() if name in request.given}
    found = [f"--{flag} has no effect here: {why}" for flag, why in given.items()]
    if several and options.rdzv_backend not in (None, "c10d", "static"):
        found.append(f"--rdzv-backend {options.rdzv_backend} is taken as c10d: the machines meet at --rdzv-endpoint")
    if colon and not several:
        found.append(f"--nnodes {options.nnodes}: one machine here, so it runs with one")
    if options.numa_binding not in (None, "node"):
        node = "node: each rank on the CPUs of its GPU's NUMA node"
        found.append(f"--numa-binding {options.numa_binding} is taken as {node}")
    found += _misplaced(request)
    dropped = python_flags(sys.orig_argv)[1]
    if dropped:
        found.append(f"python -{dropped} is not passed on to the ranks: it would switch Stoker's part in them off")
    return found


def _misplaced(request: Request) -> list[str]:
    """Our flags after the script, which torchrun too leaves to it. Not those that the script's own text names."""
    if request.identity is not None:
        return []  # nobody typed its arguments
    ours = {
        spelling: name for name in options_of(RunOptions) for spelling in (f"--{name}", f"--{name.replace('_', '-')}")
    }
    text = None if request.options.module or request.options.no_python else _text(request.script)
    flags = dict.fromkeys(flag for word in request.args if (flag := word.partition("=")[0]) in ours)
    # Many programs have a --name or --config.
    meant = [flag for flag in flags if (ours[flag] not in text if text is not None else "_" in ours[flag])]
    script = os.path.basename(request.script)
    fix = f"put it before {script} if it is for stoker run"
    return [f"{flag} stands after {script}, so it is the script's: {fix}" for flag in meant]


def _text(path: str) -> str | None:
    """None where it can't be read here: a script of other hosts, or a folder."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def python_flags(typed: list[str]) -> tuple[list[str], str]:
    """Stoker's own interpreter options (`typed`: sys.orig_argv), for the ranks; and those that would switch the shim off."""
    flags: list[str] = []
    dropped = ""
    words = iter(typed[1:])
    for word in words:
        if not word.startswith("-") or word == "-" or word.startswith("--"):
            break
        if word[1] in "XW":
            flags += [word, next(words, "")] if len(word) == 2 else [word]
            continue
        letters = word[1:]
        end = min((letters.index(letter) for letter in "mc" if letter in letters), default=-1)
        if end >= 0:
            letters = letters[: end + 1]  # -mstoker: what follows is the module's name
        kept = "".join(letter for letter in letters if letter not in "EISmc")
        dropped += "".join(letter for letter in letters if letter in "EIS")
        if kept:
            flags.append("-" + kept)
        if "m" in letters or "c" in letters:
            break
    return flags, dropped


def program(request: Request) -> list[str]:
    """The command of a rank. Refuses what can't start, before anything does."""
    options, script = request.options, request.script
    other_python = options.python or os.environ.get("PYTHON_EXEC")  # torchrun's variable
    python = other_python or sys.executable
    remote = options.hosts is not None
    flags, _ = python_flags(sys.orig_argv)
    if options.no_python:
        import shutil

        if not remote and shutil.which(script) is None:
            raise _missing(f"--no-python: no program {script!r} on the PATH")
        return [script, *request.args]
    if options.module:
        if not remote and not options.no_preflight and other_python is None:  # another Python has other modules
            _check_module(script)
        # Our recipes import nothing from the working directory: not the json.py of a downloaded model's folder.
        closed = ["-P"] if script.startswith(RECIPES) else []
        return [python, *flags, *closed, "-m", script, *request.args]
    if not remote and not options.no_preflight:
        _check_script(script, own_python=other_python is None)
    return [python, *flags, script, *request.args]


def _missing(line: str) -> Refusal:
    return Refusal(line, EX_NOINPUT, cause="launch.script-missing")


def _check_script(path: str, own_python: bool) -> None:
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        raise _missing(f"{path} is a folder, not a script")
    if not os.path.exists(path):
        raise _missing(f"no script {path}{_near(path)}")
    if os.path.isdir(path) or not path.endswith(".py") or not own_python:
        return
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            source = file.read()
    except OSError as problem:
        raise _missing(f"{path} can't be read: {problem.strerror}") from problem
    try:
        compile(source, path, "exec", dont_inherit=True)
    # The last two: nested too deeply for Python's own parser.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        import traceback

        shown = "".join(traceback.format_exception_only(problem)).rstrip().splitlines()
        line = f"{path} does not parse; nothing was started"
        raise Refusal(line, EX_DATAERR, cause="launch.syntax-error", more=shown) from problem


def _near(path: str) -> str:
    folder = os.path.dirname(path) or "."
    try:
        return suggest_file(path, [name for name in os.listdir(folder) if name.endswith(".py")])
    except OSError:
        return f"; the folder {folder} does not exist either"


def _check_module(name: str) -> None:
    parts = name.split(".")
    if name.startswith(RECIPES):
        return  # ours, and not looked for here
    if "" in parts:
        raise Refusal(f"-m {name}: not a module name", EX_USAGE, cause="launch.script-missing")
    if _module_spec(name) is None:
        raise _missing(f"no module {name} (looked in {os.getcwd()} and in {sys.prefix})")


def module_file(name: str) -> str | None:
    """Return the source file that `python -m NAME` would run, or None where there is no such module or no source."""
    spec = _module_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _module_spec(f"{name}.__main__")
    return spec.origin if spec is not None and spec.has_location else None


def _module_spec(name: str) -> ModuleSpec | None:
    """Find a module as `python -m` will, the working directory first, without importing anything of it."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    here = os.getcwd()
    parts = name.split(".")
    sys.path.insert(0, here)
    try:
        for count in range(1, len(parts) + 1):
            full = ".".join(parts[:count])
            specs = (finder.find_spec(full, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec = next((found for found in specs if found is not None), None)
            if spec is None:
                return None
            path = list(spec.submodule_search_locations or [])
    finally:
        sys.path.remove(here)
    return spec


# ---- the port of rank 0's store ----


def endpoint(text: str) -> tuple[str, int | None]:
    """--rdzv-endpoint's address and port; None: it has none."""
    address, colon, port = text.rpartition(":")
    if colon and not is_digits(port):
        raise Refusal(f"--rdzv-endpoint {text}: write HOST:PORT", EX_USAGE)
    return (address.strip("[]"), int(port)) if colon else (port, None)


def wanted_port(request: Request) -> tuple[int, bool]:
    """(port or 0 for a free one, was it asked for as a flag)."""
    options = request.options
    if options.standalone:
        return 0, False
    if options.master_port is not None:
        return options.master_port, True
    if options.rdzv_endpoint:
        port = endpoint(options.rdzv_endpoint)[1]
        return (port, True) if port is not None else (0, False)
    asked = os.environ.get("MASTER_PORT", "")
    return (int(asked), False) if is_digits(asked) and 1024 <= int(asked) <= 65535 else (0, False)


def check_numbers(request: Request) -> None:
    options = request.options
    if options.max_restarts < 0:
        raise Refusal(f"--max-restarts {options.max_restarts}: give a number from 0 up", EX_USAGE)
    if options.gpus_per_rank < 1:
        raise Refusal(f"--gpus-per-rank {options.gpus_per_rank}: give a number from 1 up", EX_USAGE)
    if options.port_base is not None and not 1 <= options.port_base <= 65535:
        raise Refusal(f"--port-base {options.port_base}: give a port from 1 to 65535", EX_USAGE)
    port = wanted_port(request)[0]
    if port and not 1024 <= port <= 65535:
        endpoint = f"--rdzv-endpoint {options.rdzv_endpoint}"
        flag = f"--master-port {port}" if options.master_port is not None else endpoint
        line = f"{flag}: ports from 1024 to 65535 can be used; 0 or no flag takes a free one"
        raise Refusal(line, EX_USAGE, cause="launch.port")


def taken(answer: dict[str, Any]) -> Refusal:
    line = f"port {answer['wanted']} is in use by {answer['holder']}; leave --master-port out for a free one"
    return Refusal(line, EX_UNAVAILABLE, cause="launch.port-in-use")
