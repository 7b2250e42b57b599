"""Implements `stoker.launch`, which runs a function on every rank by starting `stoker run` in a child process."""

from __future__ import annotations

import dataclasses
import dis
import enum
import importlib
import io
import json
import marshal
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from typing import IO, Any

from stoker import LaunchFailed
from stoker.contract import layout
from stoker.contract.errors import EX_SOFTWARE
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import options_of
from stoker.contract.options import suggest
from stoker.control.cluster.transport import ROOT
from stoker.control.launch.children import split_secret_options
from stoker.control.launch.ladder import format_flags
from stoker.control.plan.options import TORCHRUN_VARIABLES, RunOptions
from stoker.control.rank import function_call
from stoker.control.rank.function_call import (
    NoValue,
    fill_class,
    fill_function,
    make_class,
    make_function,
    make_mapping,
)
from stoker.control.record import run_record
from stoker.control.verdict.launch_failures import make_lost_verdict

# These options of `stoker run` don't apply: the program is the function, results come back through this machine's disk, and
# the caller waits.
_EXCLUDED_OPTIONS = ("module", "no_python", "run_path", "python", "hosts", "min_hosts", "rejoin", "sync", "stage", "ssh_option", "nnodes", "node_rank", "detach",
             "dry_run", "json", "config", "ladder", "nproc_per_node", "env")  # fmt: skip
_LAUNCHER = (
    "import sys\nif not sys.flags.safe_path: del sys.path[0]\nsys.path.append({root!r})\nfrom stoker.cli.run import"
    " launch_entry\nlaunch_entry()"
)
_RANK_SCRIPT = (
    "import sys\nsys.path.append({root!r})\nfrom stoker.control.rank.function_call import main\nmain({folder!r})\n"
)


def launch(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    nproc: int | str | None,
    env: dict[str, str] | None,
    options: dict[str, Any],
) -> dict[int, Any]:
    """Implement stoker.launch; see there."""
    if function_call.is_importing_main:
        line = "stoker.launch was called while its ranks import this script"
        raise RuntimeError(f"{line}; put the call below  if __name__ == '__main__':")
    argv, secrets = split_secret_options(_make_flags(nproc, options))
    folder = tempfile.mkdtemp(prefix="stoker-launch-")  # 0700
    try:
        script = _write_call(folder, function, args)
        report = os.path.join(folder, "report.json")
        code = _run_launcher([str(os.getpid()), report, *argv, "--", script], {**os.environ, **(env or {}), **secrets})
        if code == 0:
            return _read_results(folder, report)
        raise _make_failure(code, report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_flags(nproc: int | str | None, options: dict[str, Any]) -> list[str]:
    """Return the options as flags of `stoker run`. Raises TypeError for an option that does not exist."""
    names = [name for name in options_of(RunOptions) if name not in _EXCLUDED_OPTIONS]
    for name in options:
        if name not in names:
            raise TypeError(f"stoker.launch has no option {name!r}{suggest(name, names)}")
    set_options = {name: value for name, value in options.items() if value is not None and value is not False}
    return format_flags({**set_options, **({} if nproc is None else {"nproc_per_node": nproc})})


def _write_call(folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Write the pickled call and the script of the ranks into a folder. Return the script's path, which names the run."""
    from multiprocessing import spawn

    caller = spawn.get_preparation_data("rank")
    main = {key: caller[key] for key in ("init_main_from_name", "init_main_from_path") if key in caller}
    if not os.path.exists(main.get("init_main_from_path", __file__)):  # `python - < script` calls it <stdin>
        main = {}
    data = dumps((function, args), bool(main))
    if b"__main__" not in data:  # the call uses nothing of the caller's script, so ranks don't import it
        main = {}
    with open(os.path.join(folder, function_call.MAIN), "w", encoding="utf-8") as file:
        json.dump({"sys_path": caller["sys_path"], "sys_argv": caller["sys_argv"], **main}, file)
    with open(os.path.join(folder, function_call.CALL), "wb") as pickled:
        pickled.write(data)
    name = "".join(char if char.isalnum() else "-" for char in getattr(function, "__name__", "call")).strip("-")
    script = os.path.join(folder, f"{name or 'call'}.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write(_RANK_SCRIPT.format(root=ROOT, folder=folder))
    return script


def _run_launcher(launcher_args: list[str], environment: dict[str, str]) -> int:
    """Run the launcher until it exits; return its exit code.

    Ctrl-C is passed to the run, which stops its ranks, and then raised in the caller.
    """
    # Drop torchrun's variables: they belong to a torchrun that started the caller.
    env = {name: value for name, value in environment.items() if name not in TORCHRUN_VARIABLES}
    # A notebook replaces sys.stdout by an object that is not a file, so relay the output to it.
    captured = sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__
    stream = subprocess.PIPE if captured else None
    argv = [sys.executable, "-c", _LAUNCHER.format(root=ROOT), *launcher_args]
    for output in (sys.stdout, sys.stderr):
        output.flush()  # so that what the caller has printed comes first
    # The launcher gets no stdin, since the caller's may be the script that Python is reading. It runs in a new session,
    # since the terminal's Ctrl-C must reach only this process, which passes it on.
    child = subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
    )
    streams = ((child.stdout, sys.stdout), (child.stderr, sys.stderr)) if captured else ()
    relays = [threading.Thread(target=_relay, args=pair, daemon=True) for pair in streams]
    for thread in relays:
        thread.start()
    interrupted = False
    try:
        while True:
            try:
                code = child.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
                child.send_signal(signal.SIGINT)
    finally:
        if child.poll() is None:  # the caller ends because of something other than Ctrl-C
            child.terminate()
            child.wait()
        for thread in relays:
            thread.join()
    if interrupted:
        raise KeyboardInterrupt
    return code


def _relay(source: IO[bytes], target: IO[str]) -> None:
    for line in source:
        target.write(line.decode("utf-8", "replace"))
        target.flush()


def _read_results(folder: str, report: str) -> dict[int, Any]:
    """Return each rank's result in the last attempt."""
    run = run_record.load_run(run_record.read_json(report)["run_dir"])
    assert run is not None
    names = [name.removesuffix(".pickle") for name in os.listdir(folder) if name.startswith("result-")]
    files = [tuple(int(part) for part in name.split("-")[1:]) for name in names]
    last = max((restarts for restarts, _ in files), default=0)
    # A rank that called sys.exit(0) has no file; its result is None.
    results: dict[int, Any] = dict.fromkeys(range(int(run.data["plan"]["world_size"])))
    for restarts, rank in files:
        if restarts == last:
            with open(function_call.result_file(folder, restarts, rank), "rb") as file:
                results[rank] = pickle.load(file)
    return dict(sorted(results.items()))


def _make_failure(code: int, report: str) -> LaunchFailed:
    start = run_record.read_json(report) or {}  # written by cli.run.launch_entry
    if start.get("refused"):
        return LaunchFailed(Verdict("refused", start["cause"], start["refused"], start["code"]), "", "")
    run = run_record.load_run(start["run_dir"]) if "run_dir" in start else None
    if run is None:
        line = f"the launcher exited with {code} before the run began; its output explains why"
        return LaunchFailed(Verdict("failed", "launch.system", line, code if code > 0 else EX_SOFTWARE), "", "")
    verdict = run.verdict or make_lost_verdict(run.id)
    error = None
    if verdict.rank is not None:
        error = run_record.read_json(layout.rank_error(run.dir, verdict.attempt, verdict.rank))
    return LaunchFailed(verdict, run.dir, str((error or {}).get("traceback") or ""))


# The rest of this module pickles functions and classes that no other process can import: lambdas, nested functions, and
# those of a notebook, a REPL or `python - < script`. Like pickle, it sends importable ones by name. It sends the others
# as code, together with the globals that the code uses, and rank/function_call.py recreates them.

_GLOBAL_OPCODES = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME", "DELETE_GLOBAL")
_AUTOMATIC_ATTRIBUTES = ("__dict__", "__weakref__", "_abc_impl")


class NotSendable(ValueError):
    """Raised for a value that can't be recreated in another process."""


def dumps(value: Any, main_is_importable: bool) -> bytes:
    """Pickle a value for the ranks. `main_is_importable`: they can import the caller's __main__."""
    out = io.BytesIO()
    try:
        _Pickler(out, main_is_importable).dump(value)
    except NotSendable:
        raise
    except Exception as problem:  # pickle raises whatever an object's own methods raise
        raise NotSendable(f"{problem}") from problem
    return out.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, main_is_importable: bool) -> None:
        super().__init__(out)
        self._main_is_importable = main_is_importable

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return NotImplemented if self._is_importable(value) else self._reduce_function(value)
        if isinstance(value, type):
            return NotImplemented if self._is_importable(value) else self._reduce_class(value)
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, (staticmethod, classmethod)):
            return type(value), (value.__func__,)
        if isinstance(value, property):
            return property, (value.fget, value.fset, value.fdel, value.__doc__)
        if isinstance(value, types.MappingProxyType):
            return make_mapping, (dict(value),)
        if value is dataclasses.MISSING:  # dataclasses compares it by identity, like the three kinds of fields
            return getattr, (dataclasses, "MISSING")
        if type(value).__module__ == "dataclasses" and type(value).__name__ == "_FIELD_BASE":
            return getattr, (dataclasses, value.name)
        return NotImplemented

    def _is_importable(self, value: types.FunctionType | type) -> bool:
        """Return whether pickle can send the value by name. Pickle also decides about types without one, such as NoneType."""
        if value.__module__ == "__main__" and not self._main_is_importable:
            return False
        return not any(part.startswith("<") for part in value.__qualname__.split("."))  # <locals>, <lambda>

    def _reduce_function(self, function: types.FunctionType) -> Any:
        code, cells = function.__code__, function.__closure__ or ()
        module_name = function.__module__ if function.__module__ in sys.modules else "__main__"
        has_module = (
            module_name != "__main__" or self._main_is_importable
        )  # the ranks import its module, and so have its globals
        names = () if has_module else _find_global_names(code)
        used = {name: function.__globals__[name] for name in names if name in function.__globals__}
        attribute_names = ("__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__name__", "__qualname__")
        attributes = {name: getattr(function, name) for name in attribute_names}
        state = {
            "globals": used,
            "imports": list(_find_submodules(code, used)),
            "closure": [_read_cell(cell) for cell in cells],
            "attributes": attributes,
            "dict": dict(function.__dict__),
        }
        return make_function, (marshal.dumps(code), module_name, len(cells)), state, None, None, fill_function

    def _reduce_class(self, cls: type) -> Any:
        if isinstance(cls, enum.EnumMeta):
            line = f"{cls.__name__} is an Enum that other processes can't import: put it into a .py file and import it"
            raise NotSendable(line)
        slots = cls.__dict__.get("__slots__", ())
        slots = (slots,) if isinstance(slots, str) else tuple(slots)
        body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        if "__slots__" in cls.__dict__:
            body["__slots__"] = slots
        attributes = {
            name: value for name, value in cls.__dict__.items() if name not in (*_AUTOMATIC_ATTRIBUTES, *body, *slots)
        }
        return make_class, (type(cls), cls.__name__, cls.__bases__, body), attributes, None, None, fill_class


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return NoValue


def _walk_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Generate a code object and those of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _walk_code(constant)


def _find_global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the module variables that the code or a function in it uses, each once, in order."""
    instructions = (instruction for part in _walk_code(code) for instruction in dis.get_instructions(part))
    return tuple(
        dict.fromkeys(instruction.argval for instruction in instructions if instruction.opname in _GLOBAL_OPCODES)
    )


def _find_submodules(code: types.CodeType, used: dict[str, Any]) -> Iterator[str]:
    """Generate the submodules that the code uses: `import xml.dom.minidom` leaves only `xml` in the globals."""
    names = {name for part in _walk_code(code) for name in part.co_names}
    for module in used.values():
        if isinstance(module, types.ModuleType):
            prefix = module.__name__ + "."
            for name in list(sys.modules):
                if name.startswith(prefix) and names.issuperset(name.removeprefix(prefix).split(".")):
                    yield name
