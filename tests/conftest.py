"""Drives the real `stoker` command, with real processes, in a folder of its own."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forked_commands
from interpreter import own_interpreter
from left_behind import leaves_nothing_behind  # noqa: F401  a fixture of all files
from order import slowest_first
from reruns import may_run_again, pytest_runtest_logreport, pytest_sessionfinish, pytest_terminal_summary  # noqa: F401  hooks
from shards import keep_share
from stoker.control.machine import procfs
from workers import pytest_addoption as add_workers
from workers import pytest_runtestloop  # noqa: F401  a hook

EVERYTHING = os.environ.get("STOKER_TEST_ALL") == "1"  # test.sh --all
GPU_HERE = os.path.exists("/dev/nvidiactl")
own_interpreter(lighter=not (EVERYTHING or GPU_HERE))
# Thousands of processes start here: each would compile Stoker's files anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A test run started with nohup or in the background ignores these, and so would every launcher under test.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

at_length = pytest.mark.skipif(not EVERYTHING, reason="runs with: bash test.sh --all")


def at_length_but(default: Collection[object], cases: Iterable[Any]) -> list[Any]:
    """All of `cases` for pytest.mark.parametrize; a run without --all takes those that are in `default`."""
    found = [pytest.param(case, marks=() if case in default else at_length) for case in cases]
    assert sum(not one.marks for one in found) == len(default), f"{default} are not all cases"
    return found


ID_LENGTH = 60


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A value of 64 KiB would be a test's name, and in every line that mentions it."""
    if not isinstance(val, str | bytes) or len(val) <= ID_LENGTH:
        return None
    data = val if isinstance(val, bytes) else val.encode("utf-8", "surrogatepass")
    start = data[:16].decode("ascii", "ignore")
    return f"{argname}-{start if start.isprintable() else ''}-{hashlib.sha256(data).hexdigest()[:8]}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports torch and all test files, in each worker: none of that is garbage, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        if {"lighter_torch", "torch"} <= sys.modules.keys():  # tests compute with tensors that have no data
            sys.modules["lighter_torch"].load("torch._meta_registrations")
        gc.freeze()
        gc.enable()


PLUGINS = {"timeout": "timeout", "flaky": "rerunfailures"}  # mark: the plugin that defines it


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    add_workers(parser)
    parser.addoption("--gpu-shard", default="", metavar="I/N", help="run the I-th of N shares of the tests marked gpu")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds for a test; without pytest-timeout nothing limits it")


def pytest_configure(config: pytest.Config) -> None:
    """Without their plugins these marks mean nothing, and are no mistakes: a GPU machine may have pytest alone."""
    for mark, plugin in PLUGINS.items():
        if not config.pluginmanager.hasplugin(plugin):
            config.addinivalue_line("markers", f"{mark}: without its plugin it does nothing")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slowest_first(items)
    keep_share(config, items)
    may_run_again(config, items)


def pytest_runtest_setup() -> None:
    """One thread for torch in this process: other processes need the cores, and threads that wait for each other spin."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


class Done:
    """A finished `stoker` command."""

    def __init__(self, code: int, out: bytes, err: bytes, cwd: Path) -> None:
        self.code, self.out_bytes, self.err_bytes, self.cwd = code, out, err, cwd
        self.out = out.decode("utf-8", "replace")
        self.err = err.decode("utf-8", "replace")

    @property
    def run_dir(self) -> Path:
        return (self.cwd / "runs" / "latest").resolve()

    @property
    def verdict(self) -> dict[str, Any]:
        path = self.run_dir / "verdict.json"
        assert path.exists(), f"no verdict, exit code {self.code}:\n{self.err[-2000:]}"
        return json.loads(path.read_text())

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]

    def log(self, rank: int, attempt: int = 0) -> bytes:
        return (self.run_dir / f"attempt-{attempt}" / f"rank-{rank}.log").read_bytes()


@contextlib.contextmanager
def alone_on_the_card() -> Iterator[None]:
    """One test at a time, of all workers: a run locks the card, and refuses one that another run has."""
    with open(os.path.join(tempfile.gettempdir(), f"stoker-tests-card-{os.getuid()}"), "w") as card:
        fcntl.flock(card, fcntl.LOCK_EX)
        yield


class Stoker:
    def __init__(self, cwd: Path, env: dict[str, str]) -> None:
        self.cwd, self.env = cwd, env

    def environment(self, env: dict[str, str] | None = None) -> dict[str, str]:
        """With no GPU in the recorded machine, torch must see none either: a recipe in a rank asks torch. A real one's lock is the
        machine's: a test in another process may use it.
        """
        merged = {**self.env, **(env or {})}
        if "STOKER_MACHINE" not in merged and merged.get("STOKER_GPU_LOCKS") == own_locks(self.cwd):
            del merged["STOKER_GPU_LOCKS"]
        if GPU_HERE and merged.get("STOKER_MACHINE") == str(self.cwd / "machine.json"):
            merged.setdefault("CUDA_VISIBLE_DEVICES", "")
        return merged

    def script(self, name: str, text: str) -> str:
        (self.cwd / name).write_text(text)
        return name

    def __call__(
        self,
        *args: str,
        env: dict[str, str] | None = None,
        timeout: float = 120,
        stdin: Any = subprocess.DEVNULL,
        **more: Any,
    ) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "stoker", *args],
            cwd=self.cwd,
            env=self.environment(env),
            capture_output=True,
            timeout=timeout,
            stdin=stdin,
            check=False,
            **more,
        )
        return Done(done.returncode, done.stdout, done.stderr, self.cwd)

    def torch(self, *args: str, env: dict[str, str] | None = None, **more: Any) -> Done:
        """Ranks that use gloo, and commands that use torch: one thread each, whatever the test took out of `env`."""
        env = {"OMP_NUM_THREADS": "1", **(env or {})}
        if args[0] in forked_commands.COMMANDS and not more and not EVERYTHING:
            return Done(*forked_commands.run(args, self.cwd, self.environment(env)), self.cwd)
        return self(*args, env=env, **more)

    def start(self, *args: str, env: dict[str, str] | None = None, **more: Any) -> subprocess.Popen[bytes]:
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, **more}
        return subprocess.Popen(
            [sys.executable, "-m", "stoker", *args], cwd=self.cwd, env=self.environment(env), **given
        )

    @property
    def latest(self) -> Path:
        return (self.cwd / "runs" / "latest").resolve()

    def result(self, code: int = 0) -> Done:
        return Done(code, b"", b"", self.cwd)


def screen_of(shown: bytes) -> list[bytes]:
    """What a terminal has on its lines in the end: \\r goes to the start of the line, ESC [K clears to its end."""
    lines, at = [bytearray()], 0
    for token in re.findall(rb"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\xff]", shown):
        if token == b"\n":
            lines.append(bytearray())
            at = 0
        elif token == b"\r":
            at = 0
        elif token == b"\x1b[K":
            del lines[-1][at:]
        elif not token.startswith(b"\x1b"):
            lines[-1][at : at + 1] = token
            at += 1
    return [bytes(line) for line in lines]


def on_terminal(
    stoker: Stoker, argv: list[str], size: tuple[int, int] = (80, 24), env: dict[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], int]:
    """Python in a session with a terminal of its own: closing our end, which is returned, is closing the window."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    made = {**stoker.environment(), "TERM": "xterm-256color", **(env or {})}
    made.pop("COLUMNS", None)
    begin = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    program = [sys.executable, "-c", begin, *argv]
    run = subprocess.Popen(
        program, cwd=stoker.cwd, env=made, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    return run, ours


class Terminal:
    """Python on a terminal. `shown`: every byte that came there."""

    def __init__(
        self, stoker: Stoker, argv: list[str], size: tuple[int, int], env: dict[str, str] | None = None
    ) -> None:
        self.process, self._ours = on_terminal(stoker, argv, size, env)
        self.shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # its last user is gone
            while data := os.read(self._ours, 1 << 16):
                self.shown += data

    def keys(self, text: bytes) -> None:
        os.write(self._ours, text)

    def wait(self, seconds: float = 60.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(10)
        os.close(self._ours)
        return code

    @property
    def lines(self) -> list[str]:
        return [line.decode("utf-8", "replace").rstrip() for line in screen_of(self.shown)]


def forget_verdict(run_dir: Path) -> Path:
    """As if the launcher had died before it: no verdict event, and verdict.json under the name that is returned."""
    events = run_dir / "events.jsonl"
    events.write_text(
        "".join(line for line in events.read_text().splitlines(keepends=True) if '"event": "verdict"' not in line)
    )
    return (run_dir / "verdict.json").rename(run_dir / "verdict-kept.json")


_CLEAR = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NPROC_PER_NODE",
    "NUM_GPUS",
    "COLUMNS",
    "CUDA_VISIBLE_DEVICES",
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
    "STOKER_",
    "PET_",
)


def own_locks(cwd: Path) -> str:
    """Recorded GPUs have the same names in all tests. Beside the folder, not in it: some tests look at all that is there."""
    return str(cwd.parent / f"{cwd.name}-gpu-locks")


@pytest.fixture
def stoker(tmp_path: Path) -> Iterator[Stoker]:
    """Runs in tmp_path as on a machine without GPUs, whatever this one has; afterwards nothing of its runs may be left.

    Ranks have one thread each: the recorded machine has more cores than this one, and threads that wait for each other spin.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(_CLEAR)}
    bare = tmp_path / "machine.json"
    bare.write_text(json.dumps(machine_json(0)))
    env |= {"STOKER_MACHINE": str(bare), "STOKER_GPU_LOCKS": own_locks(tmp_path), "OMP_NUM_THREADS": "1"}
    env["STOKER_PICTURES"] = "0"  # importing matplotlib at the end of every training takes a second
    yield Stoker(tmp_path, env)
    left = wait_for(lambda: [] if not tagged(tmp_path) else None, 3.0)
    assert left == [], f"left running: {tagged(tmp_path)}"


def tagged(root: Path) -> list[str]:
    """Processes that carry the tag of a run below this folder."""
    found = []
    for one in procfs.list_processes():
        tag = procfs.read_run_tag(one.pid)
        if tag and tag[1].startswith(str(root)) and one.state != "Z":
            found.append(f"{one.pid} {procfs.read_command_line(one.pid)}")
    return found


PATIENCE = 2.0  # a busy machine may take longer than `seconds`, which is what a test thinks is plenty


def wait_for(look: Callable[[], Any], seconds: float) -> Any:
    """Polls until `look` gives something that is not None; None when the time is over."""
    deadline = time.monotonic() + PATIENCE * seconds
    while True:
        found = look()
        if found is not None or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def gpu_json(index: int, **more: Any) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": f"GPU-{index}{index}{index}{index}0000-aaaa-bbbb-cccc-00000000000{index}",
        "name": "NVIDIA A40",
        "memory_total": 48 * 10**9,
        "memory_used": 10**8,
        "utilization": 0,
        "compute_mode": "default",
        "pci": f"00000000:0{index}:00.0",
        "holders": [],
        **more,
    }


def machine_json(gpus: int | list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    cards = [gpu_json(n) for n in range(gpus)] if isinstance(gpus, int) else gpus
    return {
        "schema": 1,
        "hostname": "box",
        "cores": 8,
        "memory_total": 512 * 10**9,
        "memory_available": 500 * 10**9,
        "gpus": cards,
        "driver": "580.65" if cards else None,
        "max_processes": 30000,
        "max_files": 1_000_000,
        **more,
    }


@pytest.fixture
def box(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """A recorded machine as environment: box(4), or box([gpu_json(0, memory_used=...)])."""

    def make(gpus: int | list[dict[str, Any]], **more: Any) -> dict[str, str]:
        path = tmp_path / "box.json"
        path.write_text(json.dumps(machine_json(gpus, **more)))
        return {"STOKER_MACHINE": str(path)}

    return make


from localuser import public  # noqa: E402, F401
from netcluster import netcluster  # noqa: E402, F401  a fixture of its own file; at the end: it waits with `wait_for`
from slurmcluster import slurm, slurm_cluster  # noqa: E402, F401
