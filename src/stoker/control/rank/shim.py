"""Runs in a rank before the user's script. Installs error reports, stacks on fatal signals, line-buffered output, beats.

It shares the process with the script, so it stays small, imports nothing heavy and never raises into the script.
"""

from __future__ import annotations

import os
import sys
import time

from stoker.contract import env_vars, layout

TYPE_CHECKING = False  # importing typing and collections costs every rank 8 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_pid = 0
_socket_path = ""
_files: dict[str, str] = {}
_beat_writer: Any = None
_call_log: Any = None
_exit_call: tuple[str, str, int, str] | None = None  # status, file, line and function of the last sys.exit()
_kept_open: list[Any] = []  # open for the life of the process: faulthandler's files, torch's worker server
_spare_descriptors: list[int] = []  # closed before the error report, which needs some
_script_steps = 0
_optimizers: dict[int, list[int]] = {}  # id -> [its number, its steps]
_reported = False
_world: Any = None  # torch's tables of process groups, once torch.distributed is loaded
_previous_hook: Callable[..., Any] = sys.__excepthook__


def is_rank_process() -> bool:
    """Return whether this is the rank itself, and not a forked worker, which inherits this module."""
    return bool(_pid) and os.getpid() == _pid


def install() -> None:
    """Install all hooks in a rank. Its parameters come from the agent in environment variables, which are removed."""
    global _pid, _socket_path, _files, _previous_hook
    _pid = os.getpid()
    _socket_path = os.environ.pop(env_vars.SHIM_SOCKET)
    _files = layout.scratch_files(os.environ.pop(env_vars.SHIM_FILES))
    is_gated = os.environ.pop(env_vars.SHIM_GATED, "") == "1"
    _open_beats(int(os.environ.pop(env_vars.SHIM_BEATS)))
    _enable_stack_dumps()
    _allow_tracing(os.environ.pop(env_vars.SHIM_TRACER, ""))
    for _ in range(4):  # for the error report's imports and file
        _spare_descriptors.append(os.open(os.devnull, os.O_RDONLY))
    _previous_hook = sys.excepthook
    sys.excepthook = _on_exception
    _record_exit_calls()
    import atexit

    # Registered first, so called last: it sees an exception even if the script replaced the hook.
    atexit.register(_at_exit)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    sys.meta_path.insert(0, _ImportHook(is_gated))
    os.register_at_fork(after_in_child=_after_fork)
    send("shim")


class _NoBeats:
    """Replaces the beats in a forked worker that trains: it shares its rank's memory and must not write to it."""

    def beat(self, *_: Any) -> None:
        return


def _after_fork() -> None:
    global _beat_writer
    _beat_writer = _NoBeats()
    if _call_log is not None:
        _call_log.is_active = False


def _open_beats(descriptor: int) -> None:
    """Map the memory that is shared with the agent: the beats, followed by the log of torch.distributed's calls."""
    global _beat_writer, _call_log
    from mmap import mmap

    from stoker.contract import beat
    from stoker.control.rank import call_log

    try:
        memory = mmap(descriptor, beat.PAGE_SIZE + call_log.SIZE)
        _beat_writer = beat.BeatWriter(memory, _pid)
        _call_log = call_log.CallLogWriter(memory, beat.PAGE_SIZE, time.time_ns)
    finally:
        os.close(descriptor)


def _enable_stack_dumps() -> None:
    """Write the Python stacks to the agent's files on a fatal signal, and when the agent asks with STACK_SIGNAL."""
    import faulthandler

    def open_dump_file(name: str) -> Any:
        _kept_open.append(open(_files[name], "wb", buffering=0))  # noqa: SIM115  open for the life of the process
        return _kept_open[-1]

    faulthandler.register(env_vars.STACK_SIGNAL, file=open_dump_file("asked"), all_threads=True, chain=False)
    if not faulthandler.is_enabled():  # with python -X faulthandler the user wants it on stderr
        faulthandler.enable(file=open_dump_file("stack"))


def _allow_tracing(tracer: str) -> None:
    """Let the agent read the stacks of forked workers: under Yama each process must allow that itself."""
    if not tracer:
        return

    def allow() -> None:
        import ctypes

        ctypes.CDLL(None).prctl(0x59616D61, int(tracer), 0, 0, 0)  # PR_SET_PTRACER

    os.register_at_fork(after_in_child=allow)


def send(kind: str, text: str = "") -> None:
    """Send a message to the agent. Messages are rare: beats go through shared memory.

    Fields are separated by tabs, since importing json would cost every rank 10 ms.
    """
    import _socket

    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    try:
        connection.settimeout(1.0)
        connection.sendto(f"{_pid}\t{kind}\t{text}".encode("utf-8", "replace"), _socket_path)
    except OSError:
        return  # the agent is gone, or its queue was full for 1 s: the message is lost, and the script continues
    finally:
        connection.close()


def script_beat(step: int | None, loss: float | None) -> None:
    """Record a step that the script reports (stoker.beat). Without a number, the calls are counted."""
    global _script_steps
    _script_steps = _script_steps + 1 if step is None else int(step)
    _beat_writer.beat(time.time_ns(), _script_steps, 0, None if loss is None else float(loss))


def _on_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    counter = _optimizers.get(id(optimizer))
    if counter is None:
        counter = _optimizers[id(optimizer)] = [len(_optimizers) + 1, 0]
    counter[1] = step = counter[1] + 1
    _beat_writer.beat(time.time_ns(), step, counter[0])


class _GroupTable(dict):  # type: ignore[type-arg]
    """Replaces torch's table of groups, and reports each new group to the agent: the flight recorder lacks gloo's ranks."""

    def __setitem__(self, group: Any, ranks: Any) -> None:
        super().__setitem__(group, ranks)
        # torch has no name for a group that this rank is not in.
        name = _world.pg_names.get(group) if is_rank_process() else None
        if name is not None:
            has_all_ranks = len(ranks) == int(os.environ.get("WORLD_SIZE", "0") or 0)
            send("groups", f"{name}={'*' if has_all_ranks else ','.join(str(rank) for rank in ranks)}")


def _record_exit_calls() -> None:
    """Remember the line that called sys.exit(): no excepthook is called for a SystemExit."""
    real = sys.exit

    def exit(status: Any = None, /) -> NoReturn:
        global _exit_call
        if is_rank_process():
            from stoker.contract.stack_traces import is_library

            caller: Any = sys._getframe(1)
            frame: Any = caller
            while caller is not None and is_library(caller.f_code.co_filename):  # such as argparse
                caller = caller.f_back
            frame = caller or frame
            _exit_call = str(status)[:200], frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        real(status)

    exit.__doc__ = real.__doc__
    sys.exit = exit


def _on_script_end() -> None:
    """Report how the main script ended, while its threads may still run: the process may die before it has shut down."""
    if not is_rank_process() or _reported:
        return
    status, file, line, function = _exit_call or ("", "", 0, "")
    send("ended", f"{'exit' if _exit_call else 'return'}\t{status}\t{file}\t{line}\t{function}")


def _find_files_in_use(trace: Any) -> list[str]:
    """Return up to four files that the variables of the failed frames name or hold open.

    Error messages of readers ("invalid load key") rarely name their file.
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


def _find_module_file(value: BaseException) -> str:
    """Return the file of the module that an import or attribute error is about, or "". It may shadow another module."""
    path = getattr(value, "path", None)  # set by "cannot import name", whose module may be gone from sys.modules
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
            # The report's imports cleared CPython's flag of an unhandled interrupt, which makes it die of SIGINT: set it.
            try:
                exec("raise KeyboardInterrupt")
            except KeyboardInterrupt:
                return


def _at_exit() -> None:
    value = getattr(sys, "last_value", None)
    if value is not None and not _reported:
        _report(type(value), value, value.__traceback__, late=True)


def _report(kind: type[BaseException], value: BaseException, trace: Any, late: bool = False) -> None:
    """Write the error report and notify the agent, once.

    It tries twice: a signal handler may raise meanwhile, as torch's does when a data-loader worker dies.
    """
    global _reported
    if _reported or not is_rank_process():
        return
    _reported = True
    time_ns = time.time_ns()
    while _spare_descriptors:  # the script may have used up all others
        os.close(_spare_descriptors.pop())
    for _ in range(2):
        try:
            return _write_report(kind, value, trace, late, time_ns)
        except Exception as problem:
            failure = problem
    # A file in the script's folder may shadow a module that the report needs.
    _write_short_report(kind, value, trace, time_ns)
    send("note", f"the error report of this rank is short: {type(failure).__name__}: {failure}")


def _write_short_report(kind: type[BaseException], value: BaseException, trace: Any, time_ns: int) -> None:
    """Send the exception and its frames without using the traceback module, and without texts that may hold secrets."""
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
        "time_ns": time_ns,
        "import_name": (value.name or "") if isinstance(value, ImportError) else "",
        "module_file": _find_module_file(value) if isinstance(value, (ImportError, AttributeError)) else "",
    }
    send("error", json.dumps(report))


def _write_report(kind: type[BaseException], value: BaseException, trace: Any, late: bool, time_ns: int) -> None:
    import json
    import traceback

    from stoker.contract.stack_traces import is_library

    frames = traceback.extract_tb(trace)
    library_prefixes = (os.path.join(sys.prefix, "lib"), os.path.join(sys.base_prefix, "lib"), "<frozen")
    library_suffixes = (".pyx", ".pxi")  # the source of a Cython package
    user_frames = [
        frame
        for frame in frames
        if not frame.filename.startswith(library_prefixes)
        and not frame.filename.endswith(library_suffixes)
        and not is_library(frame.filename)
    ]
    last = next(reversed(user_frames), frames[-1] if frames else None)
    file, line, function = (last.filename, last.lineno or 0, last.name) if last else ("", 0, "")
    if isinstance(value, SyntaxError):
        file, line = value.filename or file, value.lineno or line
    elif kind.__name__ == "BdbQuit":
        line = _find_breakpoint_line(file, line)
    try:
        message = str(value)
    except Exception as problem:  # the exception's own __str__ raises
        message = f"<unprintable: {problem!r}>"
    trace_text = "".join(traceback.format_exception(kind, value, trace))
    report = {
        "schema": 1,
        "late": late,
        "type": kind.__qualname__,
        "module": kind.__module__,
        "message": message[:20000],
        "file": file,
        "line": line,
        "function": function,
        "traceback": trace_text[-100000:],
        "time_ns": time_ns,
        "import_name": (value.name or "") if isinstance(value, ImportError) else "",
        "module_file": _find_module_file(value) if isinstance(value, (ImportError, AttributeError)) else "",
        "files": _find_files_in_use(trace),
        "collectives": _summarize_collectives(value),
    }
    try:
        with open(_files["error"] + ".tmp", "w", encoding="utf-8", errors="backslashreplace") as out:
            json.dump(report, out)
        os.replace(_files["error"] + ".tmp", _files["error"])
    except OSError as problem:  # a full disk: the message has the report itself, shortened to fit one datagram
        # The verdict skips lines that begin with "stoker: could not".
        sys.stderr.write(f"stoker: could not write the error report: {problem}\n")
        short = {**report, "message": message[:4000], "traceback": str(report["traceback"])[-8000:], "collectives": []}
        send("error", json.dumps(short))
        return
    send("error")


def _find_breakpoint_line(file: str, line: int) -> int:
    """Return the line of the call that started the debugger, which stops at a later line."""
    import linecache

    lines = (
        number
        for number in range(line, max(0, line - 10), -1)
        if "breakpoint(" in (text := linecache.getline(file, number)) or "set_trace(" in text
    )
    return next(lines, line)


def _summarize_collectives(value: BaseException) -> list[Any]:
    """Return the state of this rank's process groups for an error that they may have caused."""
    if _world is None or not isinstance(value, RuntimeError):
        return []
    try:
        import json

        from stoker.contract import flight_recorder

        c10d = sys.modules["torch._C._distributed_c10d"]
        dumps = [json.loads(getattr(c10d, name)()) for name in flight_recorder.DUMPS if hasattr(c10d, name)]
        return flight_recorder.summarize_trace(flight_recorder.merge_traces(dumps))
    except Exception as problem:  # another version of torch, or one that is damaged by now
        return [
            {"name": "", "about": f"the flight recorder can't be read: {type(problem).__name__}: {problem}", "ops": []}
        ]


class _ImportHook:
    """Acts when torch's modules have been loaded. It is an import finder that lets the other finders find them."""

    def __init__(self, is_gated: bool) -> None:
        self.actions: dict[str, Callable[[Any], None]] = {
            "torch": _on_torch_loaded,
            "torch.optim.optimizer": _on_optimizers_loaded,
            "torch._dynamo": _do_nothing,  # loaded without garbage collection; DDP and every optimizer import it
        }
        self.actions["torch.distributed.distributed_c10d"] = (
            _on_distributed_loaded_gated if is_gated else _on_distributed_loaded
        )

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.actions:
            return None
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _HookedLoader(spec.loader, self)  # type: ignore[assignment]
                    return spec
        return None


class _HookedLoader:
    def __init__(self, real: Any, finder: _ImportHook) -> None:
        self._real = real
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: Any) -> Any:
        return self._real.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._real
        _load_without_gc(lambda: self._real.exec_module(module))
        # Not in find_spec: a script may call that only to see whether torch is installed.
        action = self._finder.actions.pop(module.__name__, None)
        if not self._finder.actions and self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        if action is not None and is_rank_process():
            action(module)


def _load_without_gc(load: Callable[[], None]) -> None:
    """Load a module with garbage collection off: scanning the 290,000 objects that torch creates takes 1/6 of its time."""
    import gc

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        load()
    finally:
        if was_enabled:
            gc.enable()


def _do_nothing(_module: Any) -> None:
    """Do nothing after the load of a module that is only hooked to be loaded without garbage collection."""


def _on_torch_loaded(_module: Any) -> None:
    send("mark", "POST-IMPORT")
    import threading  # free: torch has loaded it

    # Python calls these functions when the main script has ended, before it joins threads; concurrent.futures uses them.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_on_script_end)


def _on_optimizers_loaded(module: Any) -> None:
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None:
        send("note", "this torch has no global optimizer hook, so an unmodified script sends no beats")
        return
    register(_on_step)


def _on_distributed_loaded(module: Any) -> None:
    """Record the groups and calls of torch.distributed, and start torch's worker server.

    The server answers requests for the flight recorder in its own thread, without the GIL.
    """
    global _world
    if os.environ.get("WORLD_SIZE", "1") in ("", "0", "1"):
        return
    _world = getattr(module, "_world", None)
    if isinstance(getattr(module, "_pg_group_ranks", None), dict) and hasattr(_world, "pg_names"):
        module._pg_group_ranks = _GroupTable(module._pg_group_ranks)
    else:
        missing = "this torch does not show the ranks of its process groups"
        send("note", f"{missing}, so a hang within one is explained from stacks alone")
    try:
        _call_log.wrap(module)
    except Exception as problem:
        send("note", f"the calls of torch.distributed are not recorded ({type(problem).__name__}: {problem})")
    server = getattr(sys.modules.get("torch._C._distributed_c10d"), "_WorkerServer", None)
    if server is None:
        send("note", "this torch has no worker server, so a hang is explained from stacks alone")
        return
    try:
        _kept_open.append(_start_quietly(lambda: server(_files["server"])))
        # Never free it: the destructor in a forked child that ends would shut down the listener that it shares with us.
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept_open[-1]))
    except Exception as problem:
        send("note", f"torch's worker server does not start ({problem}), so a hang is explained from stacks alone")


def _start_quietly(start: Callable[[], Any]) -> Any:
    """Start torch's server without the line that it prints to stderr. Other output to stderr is passed on."""
    read, write = os.pipe()
    real = os.dup(2)
    os.dup2(write, 2)
    try:
        server = start()
    finally:
        os.dup2(real, 2, inheritable=True)
        os.close(real)
        os.close(write)
        os.set_blocking(read, False)  # a child forked meanwhile keeps the other end open
        try:
            captured = os.read(read, 1 << 16)
        except BlockingIOError:
            captured = b""
        os.close(read)
        other_lines = [line for line in captured.splitlines(keepends=True) if b"Server listening to UNIX" not in line]
        if other_lines:
            os.write(2, b"".join(other_lines))
    return server


def _on_distributed_loaded_gated(module: Any) -> None:
    """Hook init_process_group as well, because a rank whose start-up is gated returns its slot when it joins the group."""
    import functools

    _on_distributed_loaded(module)
    real = module.init_process_group

    @functools.wraps(real)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        send("mark", "INIT")
        return real(*args, **kwargs)

    module.init_process_group = init_process_group
