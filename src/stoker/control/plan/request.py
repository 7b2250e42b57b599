"""Request holds the options and program of a run. What is wrong with them is refused before a machine is examined."""

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

# Maps each flag that is accepted without effect to the reason, which is printed.
_HELPS = {name: spec.help.partition("not needed: ") for name, spec in options_of(RunOptions).items()}
_NO_EFFECT = {name: why for name, (_, not_needed, why) in _HELPS.items() if not_needed}
_NO_EFFECT["rdzv_conf"] = "ranks use torch's own store"
# Flags that have no effect on one machine.
_NO_EFFECT_ALONE = {"rdzv_backend": "ranks use torch's own store", "node_rank": "one machine has number 0"}


@frozen
class Request:
    options: RunOptions
    script: str
    args: tuple[str, ...]
    given: frozenset[str]  # options that the user set: as flags, in the config file or in PET_*
    # The settings that identify a recipe's run, used in place of its arguments: a recipe continues on any number of ranks.
    identity: tuple[str, ...] | None = None
    # The arguments of `stoker train`, with `runs/latest` replaced by the run it pointed to, or () if sys.argv has them.
    typed: tuple[str, ...] = ()
    # (label, SHA-256) of the files that the result depends on, or None for the program's own files.
    contents: tuple[tuple[str, str], ...] | None = None


def resolve_launch_mode(options: RunOptions) -> RunOptions:
    """Return the options with at most one of -m and --no-python. As in torchrun, --run-path overrides both."""
    if options.run_path:
        return replace(options, no_python=False, module=False)
    if options.no_python and options.module:
        line = "--no-python and --module contradict each other: a module is run by Python; leave one of them out"
        raise Refusal(line, EX_USAGE)
    return options


def is_started_by_hand(options: RunOptions) -> bool:
    """Return whether the run is also started by hand on other machines (torchrun's --nnodes)."""
    low, _, high = options.nnodes.partition(":")
    return options.hosts is None and (
        low != "1" or (high not in ("", "1") and bool(options.rdzv_endpoint) and not options.standalone)
    )


def list_notices(request: Request) -> list[str]:
    """Return a line for each flag that has no effect, is treated as another value, or comes after the script."""
    options = request.options
    is_range, is_multi_machine = ":" in options.nnodes, is_started_by_hand(options)
    no_effect = dict(_NO_EFFECT) if is_multi_machine else {**_NO_EFFECT, **_NO_EFFECT_ALONE}
    if is_multi_machine and is_range:
        del no_effect["rdzv_conf"]
    flags = {name.replace("_", "-"): why for name, why in no_effect.items() if name in request.given}
    lines = [f"--{flag} has no effect here: {why}" for flag, why in flags.items()]
    if is_multi_machine and options.rdzv_backend not in (None, "c10d", "static"):
        lines.append(f"--rdzv-backend {options.rdzv_backend} is treated as c10d: the rendezvous is at --rdzv-endpoint")
    if is_range and not is_multi_machine:
        lines.append(f"--nnodes {options.nnodes}: there is one machine here, so the run uses one")
    if options.numa_binding not in (None, "node"):
        node = "node: each rank on the CPUs of its GPU's NUMA node"
        lines.append(f"--numa-binding {options.numa_binding} is treated as {node}")
    lines += _describe_misplaced_flags(request)
    dropped = python_flags(sys.orig_argv)[1]
    if dropped:
        lines.append(f"python -{dropped} is not passed on to the ranks: it would disable Stoker's code in them")
    return lines


def _describe_misplaced_flags(request: Request) -> list[str]:
    """Return a line for each flag of `stoker run` after the script that the script's source does not mention.

    As in torchrun, such a flag is passed to the script.
    """
    if request.identity is not None:
        return []  # the user did not type a recipe's arguments
    names = {flag: name for name in options_of(RunOptions) for flag in (f"--{name}", f"--{name.replace('_', '-')}")}
    source: str | None = None
    if not request.options.module and not request.options.no_python:
        try:
            with open(request.script, encoding="utf-8", errors="replace") as file:
                source = file.read()
        except OSError:
            pass  # the script is on other hosts, or it is a folder
    flags = dict.fromkeys(flag for arg in request.args if (flag := arg.partition("=")[0]) in names)
    # Without the source only names with an underscore are Stoker's for sure: many programs have a --name or --config.
    misplaced = [flag for flag in flags if (names[flag] not in source if source is not None else "_" in names[flag])]
    script = os.path.basename(request.script)
    fix = f"put it before {script} if it is for stoker run"
    return [f"{flag} comes after {script}, so it is passed to the script; {fix}" for flag in misplaced]


def python_flags(argv: list[str]) -> tuple[list[str], str]:
    """Return the interpreter options in sys.orig_argv that ranks get too, and the letters that would disable the shim."""
    flags: list[str] = []
    dropped = ""
    args = iter(argv[1:])
    for arg in args:
        if not arg.startswith("-") or arg == "-" or arg.startswith("--"):
            break
        if arg[1] in "XW":
            flags += [arg, next(args, "")] if len(arg) == 2 else [arg]
            continue
        letters = arg[1:]
        end = min((letters.index(letter) for letter in "mc" if letter in letters), default=-1)
        if end >= 0:
            letters = letters[: end + 1]  # -mstoker: the rest is the module's name
        passed_on = "".join(letter for letter in letters if letter not in "EISmc")
        dropped += "".join(letter for letter in letters if letter in "EIS")
        if passed_on:
            flags.append("-" + passed_on)
        if "m" in letters or "c" in letters:
            break
    return flags, dropped


def rank_command(request: Request) -> list[str]:
    """Return the command of a rank. Raises Refusal if the program is missing or does not parse."""
    options, script = request.options, request.script
    other_python = options.python or os.environ.get("PYTHON_EXEC")  # torchrun's variable
    python = other_python or sys.executable
    is_remote = options.hosts is not None
    flags, _ = python_flags(sys.orig_argv)
    if options.no_python:
        import shutil

        if not is_remote and shutil.which(script) is None:
            raise _missing(f"--no-python: the program {script!r} is not on the PATH")
        return [script, *request.args]
    if options.module:
        is_recipe = script.startswith(RECIPES)
        # Another Python has other modules, and recipes are part of Stoker.
        if not is_remote and not options.no_preflight and other_python is None and not is_recipe:
            if "" in script.split("."):
                raise Refusal(f"-m {script} is not a module name", EX_USAGE, cause="launch.script-missing")
            if _find_module(script) is None:
                raise _missing(f"module {script} does not exist in {os.getcwd()} or {sys.prefix}")
        # -P: a recipe must not import the json.py of a downloaded model's folder.
        safe_path = ["-P"] if is_recipe else []
        return [python, *flags, *safe_path, "-m", script, *request.args]
    if not is_remote and not options.no_preflight:
        _check_script(script, own_python=other_python is None)
    return [python, *flags, script, *request.args]


def _missing(line: str) -> Refusal:
    return Refusal(line, EX_NOINPUT, cause="launch.script-missing")


def _check_script(path: str, own_python: bool) -> None:
    """Raises Refusal if a script is missing, or if it does not parse and the ranks use this Python."""
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        raise _missing(f"{path} is a folder, not a script")
    if not os.path.exists(path):
        folder = os.path.dirname(path) or "."
        try:
            hint = suggest_file(path, [name for name in os.listdir(folder) if name.endswith(".py")])
        except OSError:
            hint = f"; the folder {folder} does not exist either"
        raise _missing(f"script {path} does not exist{hint}")
    if os.path.isdir(path) or not path.endswith(".py") or not own_python:
        return
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            source = file.read()
    except OSError as problem:
        raise _missing(f"{path} can't be read: {problem.strerror}") from problem
    try:
        compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:  # the last two: nested too deeply
        import traceback

        error_lines = "".join(traceback.format_exception_only(problem)).rstrip().splitlines()
        line = f"{path} does not parse; nothing was started"
        raise Refusal(line, EX_DATAERR, cause="launch.syntax-error", more=error_lines) from problem


def module_file(name: str) -> str | None:
    """Return the source file that `python -m NAME` would run, or None if there is no such module or source."""
    spec = _find_module(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_module(f"{name}.__main__")
    return spec.origin if spec is not None and spec.has_location else None


def _find_module(name: str) -> ModuleSpec | None:
    """Find a module as `python -m` does, the working directory first, without importing any of its packages."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    cwd = os.getcwd()
    parts = name.split(".")
    sys.path.insert(0, cwd)
    try:
        for count in range(1, len(parts) + 1):
            full_name = ".".join(parts[:count])
            specs = (finder.find_spec(full_name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec = next((candidate for candidate in specs if candidate is not None), None)
            if spec is None:
                return None
            path = list(spec.submodule_search_locations or [])
    finally:
        sys.path.remove(cwd)
    return spec


def parse_endpoint(text: str) -> tuple[str, int | None]:
    """Return the address and the port of --rdzv-endpoint. The port is None if it is left out."""
    address, colon, port = text.rpartition(":")
    if colon and not is_digits(port):
        raise Refusal(f"--rdzv-endpoint must be HOST:PORT, got {text}", EX_USAGE)
    return (address.strip("[]"), int(port)) if colon else (port, None)


def read_store_port(request: Request) -> tuple[int, bool]:
    """Return the port of rank 0's store (0 for a free one) and whether a flag sets it."""
    options = request.options
    if options.standalone:
        return 0, False
    if options.master_port is not None:
        return options.master_port, True
    if options.rdzv_endpoint:
        port = parse_endpoint(options.rdzv_endpoint)[1]
        return (port, True) if port is not None else (0, False)
    variable = os.environ.get("MASTER_PORT", "")
    return (int(variable), False) if is_digits(variable) and 1024 <= int(variable) <= 65535 else (0, False)


def check_ranges(request: Request) -> None:
    """Raises Refusal for a number or port that is out of range."""
    options = request.options
    if options.max_restarts < 0:
        raise Refusal(f"--max-restarts must be 0 or more, got {options.max_restarts}", EX_USAGE)
    if options.gpus_per_rank < 1:
        raise Refusal(f"--gpus-per-rank must be 1 or more, got {options.gpus_per_rank}", EX_USAGE)
    if options.port_base is not None and not 1 <= options.port_base <= 65535:
        raise Refusal(f"--port-base must be from 1 to 65535, got {options.port_base}", EX_USAGE)
    port = read_store_port(request)[0]
    if port and not 1024 <= port <= 65535:
        endpoint = f"--rdzv-endpoint {options.rdzv_endpoint}"
        flag = f"--master-port {port}" if options.master_port is not None else endpoint
        line = f"{flag}: the port must be from 1024 to 65535; use 0 or leave it out for a free one"
        raise Refusal(line, EX_USAGE, cause="launch.port")


def make_port_in_use_refusal(answer: dict[str, Any]) -> Refusal:
    """Return the refusal for an agent's answer that the port is in use."""
    line = f"port {answer['wanted']} is in use by {answer['holder']}; leave --master-port out for a free one"
    return Refusal(line, EX_UNAVAILABLE, cause="launch.port-in-use")
