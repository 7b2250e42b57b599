"""`stoker.launch`: a function instead of a script, from a script, a REPL or a notebook. `stoker run` in a child process
does the work.
"""

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
from stoker.control.launch.ladder import flag_words
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
from stoker.control.verdict.launch_failures import lost

# The program is the function, results come back through this machine's disk, and the caller waits.
_NOT_HERE = ("module", "no_python", "run_path", "python", "hosts", "min_hosts", "rejoin", "sync", "stage", "ssh_option", "nnodes", "node_rank", "detach",
             "dry_run", "json", "config", "ladder", "nproc_per_node", "env")  # fmt: skip
_LAUNCHER = (
    "import sys\nif not sys.flags.safe_path: del sys.path[0]\nsys.path.append({root!r})\nfrom stoker.cli.called import"
    " entry\nentry()"
)
_RANK = "import sys\nsys.path.append({root!r})\nfrom stoker.control.rank.function_call import main\nmain({folder!r})\n"


def launch(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    nproc: int | str | None,
    env: dict[str, str] | None,
    options: dict[str, Any],
) -> dict[int, Any]:
    """See stoker.launch, which has the words for people."""
    if function_call.importing_main:
        line = "stoker.launch runs while its ranks import this script"
        raise RuntimeError(f"{line}: put the call below  if __name__ == '__main__':")
    words, hidden = split_secret_options(_words(nproc, options))
    folder = tempfile.mkdtemp(prefix="stoker-launch-")  # 0700
    try:
        script = _write_call(folder, function, args)
        report = os.path.join(folder, "report.json")
        code = _run([str(os.getpid()), report, *words, "--", script], {**os.environ, **(env or {}), **hidden})
        if code == 0:
            return _results(folder, report)
        raise _failure(code, report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _words(nproc: int | str | None, options: dict[str, Any]) -> list[str]:
    known = [name for name in options_of(RunOptions) if name not in _NOT_HERE]
    for name in options:
        if name not in known:
            raise TypeError(f"stoker.launch has no option {name!r}{suggest(name, known)}")
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    return flag_words({**given, **({} if nproc is None else {"nproc_per_node": nproc})})


def _write_call(folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The call, and the script of the ranks: named after the function, and so is the run."""
    from multiprocessing import spawn

    caller = spawn.get_preparation_data("rank")
    main = {key: caller[key] for key in ("init_main_from_name", "init_main_from_path") if key in caller}
    if not os.path.exists(main.get("init_main_from_path", __file__)):  # `python - < script` calls it <stdin>
        main = {}
    data = dumps((function, args), bool(main))
    if b"__main__" not in data:  # nothing of the caller's script is needed: it is not imported
        main = {}
    with open(os.path.join(folder, function_call.MAIN), "w", encoding="utf-8") as file:
        json.dump({"sys_path": caller["sys_path"], "sys_argv": caller["sys_argv"], **main}, file)
    with open(os.path.join(folder, function_call.CALL), "wb") as pickled:
        pickled.write(data)
    name = "".join(char if char.isalnum() else "-" for char in getattr(function, "__name__", "call")).strip("-")
    script = os.path.join(folder, f"{name or 'call'}.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write(_RANK.format(root=ROOT, folder=folder))
    return script


def _run(words: list[str], environment: dict[str, str]) -> int:
    """To its end. Ctrl-C goes to the run, which ends its ranks, and then to the caller."""
    # They are of a torchrun command.
    env = {name: value for name, value in environment.items() if name not in TORCHRUN_VARIABLES}
    # A notebook's cell shows what is written to sys.stdout, which is no file there.
    captured = sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__
    stream = subprocess.PIPE if captured else None
    argv = [sys.executable, "-c", _LAUNCHER.format(root=ROOT), *words]
    for own in (sys.stdout, sys.stderr):
        own.flush()  # what the caller printed before comes before
    # stdin stays the caller's: it may be the very script that is being read. A session of its own: the terminal's
    # Ctrl-C comes here alone.
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
        if child.poll() is None:  # something else than Ctrl-C ends the caller
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


def _results(folder: str, report: str) -> dict[int, Any]:
    run = run_record.load_run(run_record.read_json(report)["run_dir"])
    assert run is not None
    kept = [name.removesuffix(".pickle") for name in os.listdir(folder) if name.startswith("result-")]
    found = [tuple(int(part) for part in name.split("-")[1:]) for name in kept]
    last = max((restarts for restarts, _ in found), default=0)
    # None of a rank that left with sys.exit(0).
    results: dict[int, Any] = dict.fromkeys(range(int(run.data["plan"]["world_size"])))
    for restarts, rank in found:
        if restarts == last:
            with open(function_call.result_file(folder, restarts, rank), "rb") as file:
                results[rank] = pickle.load(file)
    return dict(sorted(results.items()))


def _failure(code: int, report: str) -> LaunchFailed:
    told = run_record.read_json(report) or {}
    if told.get("refused"):
        return LaunchFailed(Verdict("refused", told["cause"], told["refused"], told["code"]), "", "")
    run = run_record.load_run(told["run_dir"]) if "run_dir" in told else None
    if run is None:
        what = f"the launcher ended with {code} before the run began; what it printed says why"
        return LaunchFailed(Verdict("failed", "launch.system", what, code if code > 0 else EX_SOFTWARE), "", "")
    verdict = run.verdict or lost(run.id)
    kept = None
    if verdict.rank is not None:
        kept = run_record.read_json(layout.rank_error(run.dir, verdict.attempt, verdict.rank))
    return LaunchFailed(verdict, run.dir, str((kept or {}).get("traceback") or ""))


# ---- pickles functions and classes no other process can import: of a notebook, a REPL, `python - < x`; lambdas; nested ----
#
# Everything that can be imported goes by its name, as pickle does it. The rest goes by its code and by what that uses
# (rank/call.py makes it again).

_GLOBAL = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME", "DELETE_GLOBAL")
_MADE_BY_PYTHON = ("__dict__", "__weakref__", "_abc_impl")


class NotSendable(ValueError):
    """It can't be made again in another process."""


def dumps(value: Any, main_has_a_file: bool) -> bytes:
    out = io.BytesIO()
    try:
        _Pickler(out, main_has_a_file).dump(value)
    except NotSendable:
        raise
    except Exception as problem:  # pickle raises whatever an object's own methods raise
        raise NotSendable(f"{problem}") from problem
    return out.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, main_has_a_file: bool) -> None:
        super().__init__(out)
        self._main_has_a_file = main_has_a_file

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return NotImplemented if self._importable(value) else self._function(value)
        if isinstance(value, type):
            return NotImplemented if self._importable(value) else self._class(value)
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, (staticmethod, classmethod)):
            return type(value), (value.__func__,)
        if isinstance(value, property):
            return property, (value.fget, value.fset, value.fdel, value.__doc__)
        if isinstance(value, types.MappingProxyType):
            return make_mapping, (dict(value),)
        if value is dataclasses.MISSING:  # compared by identity, as are the three kinds of fields
            return getattr, (dataclasses, "MISSING")
        if type(value).__module__ == "dataclasses" and type(value).__name__ == "_FIELD_BASE":
            return getattr, (dataclasses, value.name)
        return NotImplemented

    def _importable(self, value: types.FunctionType | type) -> bool:
        """By its name; what has no such place in a module at all (NoneType, say) is left to pickle, which knows a few."""
        if value.__module__ == "__main__" and not self._main_has_a_file:
            return False
        return not any(part.startswith("<") for part in value.__qualname__.split("."))  # <locals>, <lambda>

    def _function(self, function: types.FunctionType) -> Any:
        code, cells = function.__code__, function.__closure__ or ()
        home = function.__module__ if function.__module__ in sys.modules else "__main__"
        by_file = home != "__main__" or self._main_has_a_file  # its module has its globals there too
        wanted = {} if by_file else _globals(code)
        used = {name: function.__globals__[name] for name in wanted if name in function.__globals__}
        kept = ("__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__name__", "__qualname__")
        attributes = {name: getattr(function, name) for name in kept}
        state = {
            "globals": used,
            "imports": list(_submodules(code, used)),
            "closure": [_content(cell) for cell in cells],
            "attributes": attributes,
            "dict": dict(function.__dict__),
        }
        return make_function, (marshal.dumps(code), home, len(cells)), state, None, None, fill_function

    def _class(self, cls: type) -> Any:
        if isinstance(cls, enum.EnumMeta):
            line = f"{cls.__name__} is an Enum that other processes can't import: put it into a .py file and import it"
            raise NotSendable(line)
        slots = cls.__dict__.get("__slots__", ())
        slots = (slots,) if isinstance(slots, str) else tuple(slots)
        made = {"__module__": cls.__module__, "__qualname__": cls.__qualname__} | (
            {"__slots__": slots} if "__slots__" in cls.__dict__ else {}
        )
        rest = {name: value for name, value in cls.__dict__.items() if name not in (*_MADE_BY_PYTHON, *made, *slots)}
        return make_class, (type(cls), cls.__name__, cls.__bases__, made), rest, None, None, fill_class


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return NoValue


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _globals(code: types.CodeType) -> dict[str, None]:
    """Names of module variables that it or a function in it uses, in order."""
    return {step.argval: None for part in _codes(code) for step in dis.get_instructions(part) if step.opname in _GLOBAL}


def _submodules(code: types.CodeType, used: dict[str, Any]) -> Iterator[str]:
    """`import xml.dom.minidom` leaves only `xml` in the globals: which modules below it the code goes through."""
    names = {name for part in _codes(code) for name in part.co_names}
    for module in used.values():
        if isinstance(module, types.ModuleType):
            below = module.__name__ + "."
            yield from (
                name
                for name in list(sys.modules)
                if name.startswith(below) and names.issuperset(name[len(below) :].split("."))
            )
