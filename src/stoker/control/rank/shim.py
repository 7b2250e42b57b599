"""Installed in a rank before its script: error report, fatal-signal stacks, line-buffered output, beats once torch is there.

Runs inside somebody else's process: it must be small, import nothing heavy and never raise into the script.
"""

from __future__ import annotations

import os
import sys
import time

from stoker.contract import names

TYPE_CHECKING = False  # typing and collections together cost every rank 8 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_pid = 0
_socket_path = ""
_error_path = ""
_writer: Any = None
_stack_file: Any = None
_script_steps = 0
_optimizers: dict[int, list[int]] = {}  # id -> [number, steps]
_reported = False
_previous_hook: Callable[..., Any] = sys.__excepthook__


def inside() -> bool:
    """In the rank itself: a forked worker inherits this module but is not the rank."""
    return bool(_pid) and os.getpid() == _pid


def install() -> None:
    global _pid, _socket_path, _error_path, _previous_hook
    _pid = os.getpid()
    _socket_path = os.environ.pop(names.SHIM_SOCKET)
    _error_path = os.environ.pop(names.SHIM_ERROR)
    gated = os.environ.pop(names.SHIM_GATED, "") == "1"
    _open_beats(int(os.environ.pop(names.SHIM_BEATS)))
    _keep_stacks(os.environ.pop(names.SHIM_STACK))
    _previous_hook = sys.excepthook
    sys.excepthook = _on_exception
    import atexit

    atexit.register(_at_exit)  # first in, last out: sees an exception even if the script replaced the hook
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    sys.meta_path.insert(0, _AfterImport(gated))
    tell("shim")


def _open_beats(descriptor: int) -> None:
    global _writer
    from mmap import mmap

    from stoker.contract import beats

    try:
        _writer = beats.Writer(mmap(descriptor, beats.SIZE), _pid)
    finally:
        os.close(descriptor)


def _keep_stacks(path: str) -> None:
    """A fatal signal writes the Python stack where the agent can find it."""
    global _stack_file
    import faulthandler

    if faulthandler.is_enabled():  # python -X faulthandler: the user wants it on stderr
        return
    _stack_file = open(path, "wb", buffering=0)  # noqa: SIM115  open for the life of the process
    faulthandler.enable(file=_stack_file)


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


def script_beat(step: int | None, loss: float | None, tokens: int | None) -> None:
    global _script_steps
    from stoker.contract import beats

    _script_steps = _script_steps + 1 if step is None else int(step)
    flags = beats.FROM_SCRIPT
    if loss is not None:
        flags |= beats.HAS_LOSS
    if tokens is not None:
        flags |= beats.HAS_TOKENS
    _writer.beat(time.time_ns(), _script_steps, 0, flags, float(loss or 0.0), int(tokens or 0))


def script_phase(name: str) -> None:
    _writer.phase(name)
    tell("phase", name[:32])


def _on_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    known = _optimizers.get(id(optimizer))
    if known is None:
        if os.getpid() != _pid:  # a forked worker that trains something of its own
            return
        known = _optimizers[id(optimizer)] = [len(_optimizers) + 1, 0]
    known[1] += 1
    _writer.beat(time.time_ns(), known[1], known[0])


def _on_exception(kind: type[BaseException], value: BaseException, trace: Any) -> None:
    try:
        _report(kind, value, trace)
    finally:
        _previous_hook(kind, value, trace)
        if kind is KeyboardInterrupt:
            # The report's imports have cleared CPython's note that an interrupt is unhandled, by which it dies of SIGINT: set it again.
            try:
                exec("raise KeyboardInterrupt")
            except KeyboardInterrupt:
                return


def _at_exit() -> None:
    value = getattr(sys, "last_value", None)
    if value is not None and not _reported:
        _report(type(value), value, value.__traceback__, late=True)


def _report(kind: type[BaseException], value: BaseException, trace: Any, late: bool = False) -> None:
    global _reported
    if _reported or not inside():
        return
    _reported = True
    when = time.time_ns()
    import json
    import traceback

    frames = traceback.extract_tb(trace)
    theirs = (os.path.join(sys.prefix, "lib"), os.path.join(sys.base_prefix, "lib"), "<frozen")
    last = next((frame for frame in reversed(frames) if not frame.filename.startswith(theirs)), frames[-1] if frames else None)  # the user's own line
    file, line, function = (last.filename, last.lineno or 0, last.name) if last else ("", 0, "")
    if isinstance(value, SyntaxError):
        file, line = value.filename or file, value.lineno or line
    try:
        message = str(value)
    except Exception as problem:  # a __str__ that raises must not cost us the report
        message = f"<unprintable: {problem!r}>"
    report = {
        "schema": 1, "late": late, "type": kind.__qualname__, "module": kind.__module__, "message": message[:20000], "file": file, "line": line,
        "function": function, "traceback": "".join(traceback.format_exception(kind, value, trace))[-100000:], "time_ns": when,
        "import_name": (value.name or "") if isinstance(value, ImportError) else "",
    }  # fmt: skip
    try:
        with open(_error_path + ".tmp", "w", encoding="utf-8", errors="backslashreplace") as out:
            json.dump(report, out)
        os.replace(_error_path + ".tmp", _error_path)
    except OSError as problem:
        sys.stderr.write(f"stoker: could not keep the error report: {problem}\n")
    tell("error")


class _AfterImport:
    """A finder that finds nothing itself: it lets the others find torch's modules and acts when they are loaded."""

    def __init__(self, gated: bool) -> None:
        self.then: dict[str, Callable[[Any], None]] = {"torch": _torch_loaded, "torch.optim.optimizer": _optimizers_loaded}
        if gated:
            self.then["torch.distributed.distributed_c10d"] = _distributed_loaded

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
        self._real.exec_module(module)
        then = self._finder.then.pop(module.__name__, None)  # not in find_spec: somebody may only ask whether torch is there
        if not self._finder.then and self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        if then is not None and inside():
            then(module)


def _torch_loaded(_module: Any) -> None:
    tell("mark", "POST-IMPORT")


def _optimizers_loaded(module: Any) -> None:
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None:
        tell("note", "this torch has no global optimizer hook: no step beats from an unmodified script")
        return
    register(_on_step)


def _distributed_loaded(module: Any) -> None:
    """Only when start-up is gated: joining the process group gives the slot back."""
    import functools

    real = module.init_process_group

    @functools.wraps(real)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        tell("mark", "INIT")
        return real(*args, **kwargs)

    module.init_process_group = init_process_group
