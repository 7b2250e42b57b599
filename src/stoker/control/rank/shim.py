"""Installed in a rank before its script: error report, stacks on a fatal signal, line-buffered output, beats.

Runs inside somebody else's process: it must be small, import nothing heavy and never raise into the script.
"""

from __future__ import annotations

import os
import sys
import time

from stoker.contract import env_vars, layout

TYPE_CHECKING = False  # typing and collections together cost every rank 8 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_pid = 0
_socket_path = ""
_files: dict[str, str] = {}
_writer: Any = None
_call_log: Any = None
_exit_call: tuple[str, str, int, str] | None = None  # of the last sys.exit(): its status, file, line, function
_kept_open: list[Any] = []  # files faulthandler writes to: open for the life of the process
_spare_descriptors: list[int] = []
_script_steps = 0
_optimizers: dict[int, list[int]] = {}  # id -> [number, steps]
_reported = False
_world: Any = None  # torch's tables of process groups, once its module is loaded
_previous_hook: Callable[..., Any] = sys.__excepthook__


def inside() -> bool:
    """In the rank itself: a forked worker inherits this module but is not the rank."""
    return bool(_pid) and os.getpid() == _pid


def install() -> None:
    global _pid, _socket_path, _files, _previous_hook
    _pid = os.getpid()
    _socket_path = os.environ.pop(env_vars.SHIM_SOCKET)
    _files = layout.scratch_files(os.environ.pop(env_vars.SHIM_FILES))
    gated = os.environ.pop(env_vars.SHIM_GATED, "") == "1"
    _open_beats(int(os.environ.pop(env_vars.SHIM_BEATS)))
    _keep_stacks()
    _allow_tracing(os.environ.pop(env_vars.SHIM_TRACER, ""))
    for _ in range(4):  # for the report's imports and its file
        _spare_descriptors.append(os.open(os.devnull, os.O_RDONLY))
    _previous_hook = sys.excepthook
    sys.excepthook = _on_exception
    _watch_exit()
    import atexit

    atexit.register(_at_exit)  # first in, last out: sees an exception even if the script replaced the hook
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    sys.meta_path.insert(0, _AfterImport(gated))
    os.register_at_fork(after_in_child=_in_a_fork)
    tell("shim")


class _Silent:
    """The beats of a forked worker that trains: it shares its rank's page, and must not write there."""

    def beat(self, *_: Any) -> None:
        return


def _in_a_fork() -> None:
    global _writer
    _writer = _Silent()
    if _call_log is not None:
        _call_log.active = False


def _open_beats(descriptor: int) -> None:
    """Map the memory shared with the agent: beats, and behind them the log of torch.distributed's calls."""
    global _writer, _call_log
    from mmap import mmap

    from stoker.contract import beat
    from stoker.control.rank import call_log

    try:
        memory = mmap(descriptor, beat.PAGE_SIZE + call_log.SIZE)
        _writer = beat.BeatWriter(memory, _pid)
        _call_log = call_log.Writer(memory, beat.PAGE_SIZE, time.time_ns)
    finally:
        os.close(descriptor)


def _keep_stacks() -> None:
    """A fatal signal, and the agent's question, write the Python stacks where the agent can find them."""
    import faulthandler

    def opened(name: str) -> Any:
        _kept_open.append(open(_files[name], "wb", buffering=0))  # noqa: SIM115  open for the life of the process
        return _kept_open[-1]

    faulthandler.register(env_vars.STACK_SIGNAL, file=opened("asked"), all_threads=True, chain=False)
    if not faulthandler.is_enabled():  # python -X faulthandler: the user wants it on stderr
        faulthandler.enable(file=opened("stack"))


def _allow_tracing(tracer: str) -> None:
    """Under Yama a forked worker must itself say that the agent may read its stack."""
    if not tracer:
        return

    def allow() -> None:
        import ctypes

        ctypes.CDLL(None).prctl(0x59616D61, int(tracer), 0, 0, 0)  # PR_SET_PTRACER

    os.register_at_fork(after_in_child=allow)


def tell(kind: str, text: str = "") -> None:
    """A word to the agent, now. Rare: beats go through memory. Tabs, not JSON: importing json costs every rank 10 ms."""
    import _socket

    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    try:
        connection.settimeout(1.0)
        connection.sendto(f"{_pid}\t{kind}\t{text}".encode("utf-8", "replace"), _socket_path)
    except OSError:
        return  # the agent is gone or its queue full for a second: it loses this word, the script loses nothing
    finally:
        connection.close()


def script_beat(step: int | None, loss: float | None) -> None:
    global _script_steps
    _script_steps = _script_steps + 1 if step is None else int(step)
    _writer.beat(time.time_ns(), _script_steps, 0, None if loss is None else float(loss))


def _on_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    known = _optimizers.get(id(optimizer))
    if known is None:
        known = _optimizers[id(optimizer)] = [len(_optimizers) + 1, 0]
    known[1] = step = known[1] + 1
    _writer.beat(time.time_ns(), step, known[0])


class _Groups(dict):  # type: ignore[type-arg]
    """torch's table of groups. It tells the agent of each new one: the flight recorder lacks gloo's ranks."""

    def __setitem__(self, group: Any, ranks: Any) -> None:
        super().__setitem__(group, ranks)
        name = _world.pg_names.get(group) if inside() else None  # no name: a group this rank is not in
        if name is not None:
            everybody = len(ranks) == int(os.environ.get("WORLD_SIZE", "0") or 0)
            tell("groups", f"{name}={'*' if everybody else ','.join(str(rank) for rank in ranks)}")


def _watch_exit() -> None:
    """Remember who called sys.exit(): a SystemExit reaches no excepthook."""
    real = sys.exit

    def exit(status: Any = None, /) -> NoReturn:
        global _exit_call
        if inside():
            from stoker.contract.stack_traces import is_library

            caller: Any = sys._getframe(1)
            frame: Any = caller
            while caller is not None and is_library(caller.f_code.co_filename):  # argparse's, for example
                caller = caller.f_back
            frame = caller or frame
            _exit_call = str(status)[:200], frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        real(status)

    exit.__doc__ = real.__doc__
    sys.exit = exit


def _on_script_end() -> None:
    """The main script has ended, its threads may live on: tell how, for a process that dies before it has shut down."""
    if not inside() or _reported:
        return
    status, file, line, function = _exit_call or ("", "", 0, "")
    tell("ended", f"{'exit' if _exit_call else 'return'}\t{status}\t{file}\t{line}\t{function}")


def _files_in_use(trace: Any) -> list[str]:
    """Return the files in the variables of the frames that failed: open ones, and names of files that exist.

    Messages of readers ("invalid load key") rarely name their file.
    """
    import io
    from pathlib import PurePath

    files: list[str] = []
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        for value in list(frame.f_locals.values())[:50]:
            path = value
            if isinstance(value, io.IOBase):
                path = getattr(value, "name", "")
            elif isinstance(value, PurePath):
                path = str(value)
            is_path = isinstance(path, str) and 0 < len(path) < 4096 and ("/" in path or "." in path)
            if is_path and path not in files and not path.endswith((".py", ".so")) and os.path.isfile(path):
                files.append(path)
    return files[:4]


def _module_file(value: BaseException) -> str:
    """Return the file of the module that an import or attribute error is about: it may hide another module of that name."""
    path = getattr(value, "path", None)  # of "cannot import name": the module itself may be gone from sys.modules
    if path:
        return str(path)
    module = getattr(value, "obj", None)
    if not isinstance(module, type(sys)):
        module = sys.modules.get((getattr(value, "name", "") or "").partition(".")[0])
    return getattr(module, "__file__", None) or ""


def _on_exception(kind: type[BaseException], value: BaseException, trace: Any) -> None:
    try:
        _report(kind, value, trace)
    finally:
        _previous_hook(kind, value, trace)
        if kind is KeyboardInterrupt:
            # The report's imports cleared CPython's note of an unhandled interrupt, by which it dies of SIGINT: set it.
            try:
                exec("raise KeyboardInterrupt")
            except KeyboardInterrupt:
                return


def _at_exit() -> None:
    value = getattr(sys, "last_value", None)
    if value is not None and not _reported:
        _report(type(value), value, value.__traceback__, late=True)


def _report(kind: type[BaseException], value: BaseException, trace: Any, late: bool = False) -> None:
    """A handler of the script's may raise meanwhile: torch's does when a data-loader worker dies."""
    global _reported
    if _reported or not inside():
        return
    _reported = True
    when = time.time_ns()
    while _spare_descriptors:  # the rank may have used up all others
        os.close(_spare_descriptors.pop())
    for _ in range(2):
        try:
            return _write_report(kind, value, trace, late, when)
        except Exception as problem:
            failure = problem
    # A file of the script's folder may hide a module that the report needs.
    _write_short_report(kind, value, trace, when)
    tell("note", f"the error report of this rank is short: {type(failure).__name__}: {failure}")


def _write_short_report(kind: type[BaseException], value: BaseException, trace: Any, when: int) -> None:
    """Write the exception and its frames without Python's traceback module, and without texts that may hold secrets."""
    import json

    from stoker.contract.stack_traces import is_library

    frames = []
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name))
        trace = trace.tb_next
    file, line, function = next((frame for frame in reversed(frames) if not is_library(frame[0])), ("", 0, ""))
    message = str(value)[:1000] if isinstance(value, (ImportError, AttributeError)) else ""
    report = {
        "schema": 1,
        "type": kind.__qualname__,
        "module": kind.__module__,
        "message": message,
        "file": file,
        "line": line,
        "function": function,
        "traceback": "".join(f'  File "{file}", line {line}, in {name}\n' for file, line, name in frames)[-8000:],
        "time_ns": when,
        "import_name": (value.name or "") if isinstance(value, ImportError) else "",
        "module_file": _module_file(value) if isinstance(value, (ImportError, AttributeError)) else "",
    }
    tell("error", json.dumps(report))


def _write_report(kind: type[BaseException], value: BaseException, trace: Any, late: bool, when: int) -> None:
    import json
    import traceback

    from stoker.contract.stack_traces import is_library

    frames = traceback.extract_tb(trace)
    theirs = (os.path.join(sys.prefix, "lib"), os.path.join(sys.base_prefix, "lib"), "<frozen")
    theirs_ends = (".pyx", ".pxi")  # Cython's name for a package's own source
    own = [
        frame
        for frame in frames
        if not (frame.filename.startswith(theirs) or frame.filename.endswith(theirs_ends) or is_library(frame.filename))
    ]
    last = next(reversed(own), frames[-1] if frames else None)  # the user's own line
    file, line, function = (last.filename, last.lineno or 0, last.name) if last else ("", 0, "")
    if isinstance(value, SyntaxError):
        file, line = value.filename or file, value.lineno or line
    elif kind.__name__ == "BdbQuit":
        line = _breakpoint_before(file, line)
    try:
        message = str(value)
    except Exception as problem:  # a __str__ that raises must not cost us the report
        message = f"<unprintable: {problem!r}>"
    whole = "".join(traceback.format_exception(kind, value, trace))
    report = {
        "schema": 1,
        "late": late,
        "type": kind.__qualname__,
        "module": kind.__module__,
        "message": message[:20000],
        "file": file,
        "line": line,
        "function": function,
        "traceback": whole[-100000:],
        "time_ns": when,
        "import_name": (value.name or "") if isinstance(value, ImportError) else "",
        "module_file": _module_file(value) if isinstance(value, (ImportError, AttributeError)) else "",
        "files": _files_in_use(trace),
        "collectives": _collectives(value),
    }
    try:
        with open(_files["error"] + ".tmp", "w", encoding="utf-8", errors="backslashreplace") as out:
            json.dump(report, out)
        os.replace(_files["error"] + ".tmp", _files["error"])
    except OSError as problem:  # a full disk: the agent gets the report itself, cut to what one datagram holds
        sys.stderr.write(f"stoker: could not keep the error report: {problem}\n")
        short = {**report, "message": message[:4000], "traceback": str(report["traceback"])[-8000:], "collectives": []}
        tell("error", json.dumps(short))
        return
    tell("error")


def _breakpoint_before(file: str, line: int) -> int:
    """The debugger stops at the line after its call."""
    import linecache

    near = (
        number
        for number in range(line, max(0, line - 10), -1)
        if "breakpoint(" in (text := linecache.getline(file, number)) or "set_trace(" in text
    )
    return next(near, line)


def _collectives(value: BaseException) -> list[Any]:
    """Where this rank was in its process groups, if it may be these that failed."""
    if _world is None or not isinstance(value, RuntimeError):
        return []
    try:
        import json

        from stoker.contract import flight_recorder

        c10d = sys.modules["torch._C._distributed_c10d"]
        dumps = [json.loads(getattr(c10d, name)()) for name in flight_recorder.DUMPS if hasattr(c10d, name)]
        return flight_recorder.summarize_trace(flight_recorder.merge_traces(dumps))
    except Exception as problem:  # another torch, or one that is broken by now: less evidence
        return [{"name": "", "about": f"no flight recorder: {type(problem).__name__}: {problem}", "ops": []}]


class _AfterImport:
    """A finder that finds nothing itself: it lets the others find torch's modules and acts when they are loaded."""

    def __init__(self, gated: bool) -> None:
        self.then: dict[str, Callable[[Any], None]] = {
            "torch": _torch_loaded,
            "torch.optim.optimizer": _optimizers_loaded,
            "torch._dynamo": _nothing_more,  # DDP and every optimizer import it when they are made
        }
        self.then["torch.distributed.distributed_c10d"] = _give_slot_back if gated else _distributed_loaded

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.then:
            return None
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
                    return spec
        return None


class _Loader:
    def __init__(self, real: Any, finder: _AfterImport) -> None:
        self._real = real
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: Any) -> Any:
        return self._real.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._real
        _without_collector(lambda: self._real.exec_module(module))
        # Not in find_spec: somebody may only ask whether torch is there.
        then = self._finder.then.pop(module.__name__, None)
        if not self._finder.then and self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        if then is not None and inside():
            then(module)


def _without_collector(load: Callable[[], None]) -> None:
    """torch and what it imports make 290,000 objects that stay: looking through them for garbage takes a sixth of the time."""
    import gc

    collects = gc.isenabled()
    gc.disable()
    try:
        load()
    finally:
        if collects:
            gc.enable()


def _nothing_more(_module: Any) -> None:
    """Of interest only while it is loaded."""


def _torch_loaded(_module: Any) -> None:
    tell("mark", "POST-IMPORT")
    import threading  # torch has loaded it

    # Python's own hook at the end of the main script, before it joins threads; concurrent.futures uses it.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_on_script_end)


def _optimizers_loaded(module: Any) -> None:
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None:
        tell("note", "this torch has no global optimizer hook: no step beats from an unmodified script")
        return
    register(_on_step)


def _distributed_loaded(module: Any) -> None:
    """torch's worker server answers what the flight recorder knows, in a thread of its own and without the GIL."""
    global _world
    if os.environ.get("WORLD_SIZE", "1") in ("", "0", "1"):
        return
    _world = getattr(module, "_world", None)
    if isinstance(getattr(module, "_pg_group_ranks", None), dict) and hasattr(_world, "pg_names"):
        module._pg_group_ranks = _Groups(module._pg_group_ranks)
    else:
        lacks = "this torch does not show the ranks of its process groups"
        tell("note", f"{lacks}: a hang within one is explained from stacks")
    try:
        _call_log.wrap(module)
    except Exception as problem:
        tell("note", f"the calls of torch.distributed are not recorded ({type(problem).__name__}: {problem})")
    server = getattr(sys.modules.get("torch._C._distributed_c10d"), "_WorkerServer", None)
    if server is None:
        tell("note", "this torch has no worker server: a hang is explained from stacks alone")
        return
    try:
        _kept_open.append(_without_its_greeting(lambda: server(_files["server"])))
        # One reference more than anybody can drop: a forked child's end would shut the listener it shares with us.
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept_open[-1]))
    except Exception as problem:
        tell("note", f"torch's worker server does not start ({problem}): a hang is explained from stacks alone")


def _without_its_greeting(start: Callable[[], Any]) -> Any:
    """The server greets on stderr, which is the script's. Whatever else is written meanwhile is passed on."""
    read, write = os.pipe()
    real = os.dup(2)
    os.dup2(write, 2)
    try:
        made = start()
    finally:
        os.dup2(real, 2, inheritable=True)
        os.close(real)
        os.close(write)
        os.set_blocking(read, False)  # a child forked meanwhile may hold the other end open for as long as it lives
        try:
            caught = os.read(read, 1 << 16)
        except BlockingIOError:
            caught = b""
        os.close(read)
        others = [line for line in caught.splitlines(keepends=True) if b"Server listening to UNIX" not in line]
        if others:
            os.write(2, b"".join(others))
    return made


def _give_slot_back(module: Any) -> None:
    """When start-up is gated, joining the process group gives the slot back."""
    import functools

    _distributed_loaded(module)
    real = module.init_process_group

    @functools.wraps(real)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        tell("mark", "INIT")
        return real(*args, **kwargs)

    module.init_process_group = init_process_group
