"""Starts one rank in its own session. It ends with the agent, writes its output to pipes, and loads the shim.

InitGate decides how many ranks may start at the same time.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import time
from collections import deque
from mmap import mmap
from typing import Any

from stoker.contract import beat, env_vars, layout
from stoker.contract.process import Process, find_process
from stoker.control.agent import prctl
from stoker.control.rank import call_log

INJECT_DIR = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "rank", "inject")
SOCKET_NAME = "s"  # of the agent's socket in its folder; the path of a Unix socket is limited to 107 bytes
_SHARED_BYTES = beat.PAGE_SIZE + call_log.SIZE
_PIPE_BYTES = 1 << 20
_RESET_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD)


class RankProcess:
    """Holds the state of a started rank in its agent."""

    def __init__(
        self, spec: dict[str, Any], process: Process, streams: dict[int, int], base: str, started: float
    ) -> None:
        self.rank = int(spec["rank"])
        self.pid = process.pid
        self.process = process
        self.streams = streams  # our read end -> 1 or 2, or 0 where both are one pipe
        self.reader: beat.BeatReader | None = None
        self.shared_memory: mmap | None = None  # beats and the log of torch.distributed's calls
        self.files = layout.scratch_files(base)
        self.gpu: str | None = spec.get("gpu")
        self.pci = (spec.get("pci") or "").lower()
        self.started = started
        self.is_signalled = False
        self.exception_at = 0.0  # when the shim reported an exception: the rank is about to exit
        self.error: Any = None  # the shim's report of that exception, without secrets
        self.exit_code: int | None = None  # None while it lives
        self.script_end: dict[str, Any] | None = None  # contract/evidence.py:ScriptEnd
        self.marks: set[str] = set()
        self.steps = 0
        self.last_beat_at = 0.0  # when its last beat was read
        self.last_beat_ns = 0
        self.state = "R"
        self.rss: deque[tuple[float, int]] = deque(maxlen=120)
        self.over_limit = 0  # bytes it had when it exceeded its memory limit
        port = spec["env"].get(env_vars.PORT, "")
        self.port = int(port) if port.isdecimal() else 0  # STOKER_PORT, or 0
        self.loader_workers = 0  # maximum number of torch's DataLoader workers at the same time
        self.is_listening = False  # whether it has ever listened on that port

    def read_calls(self, newest: int) -> list[dict[str, Any]]:
        """Return its newest calls of torch.distributed (control/rank/call_log.py), also after it has ended."""
        return call_log.read_calls(self.shared_memory, beat.PAGE_SIZE, newest) if self.shared_memory is not None else []


def spawn_rank(spec: dict[str, Any], agent_dir: str, stdin: int) -> RankProcess:
    """Start a rank. `spec` is an entry of the start message. Raises OSError if the rank can't be started.

    Call it in the agent's main thread: the kernel signals the child when the thread that forked it ends.
    """
    base = os.path.join(agent_dir, f"{spec['attempt']}-{spec['rank']}")
    env = {**os.environ, **spec["env"]}
    # STOKER_KEEP protects processes that a rank starts, never the rank itself.
    for name in (*spec.get("unset", ()), env_vars.RDZV_SECRET, env_vars.RDZV_SECRET_FILE, env_vars.KEEP):
        env.pop(name, None)
    env[env_vars.RUN_ORIGIN] = spec["origin"]
    env["TORCHELASTIC_ERROR_FILE"] = layout.scratch_files(base)["elastic"]
    fds: list[int] = []  # to close if one of the next calls fails
    try:
        memory = os.memfd_create(f"stoker-beats-{spec['rank']}", os.MFD_CLOEXEC)
        fds.append(memory)
        # Allocate the pages now: a page that can't be allocated later would kill the rank with SIGBUS.
        os.posix_fallocate(memory, 0, _SHARED_BYTES)
        out_read, out_write = _open_pipe()
        fds += (out_read, out_write)
        err_read, err_write = -1, out_write
        if spec["split"]:
            err_read, err_write = _open_pipe()
            fds += (err_read, err_write)
        error_read, error_write = os.pipe()  # closed by exec; if exec fails, the child writes the reason
        fds += (error_read, error_write)
        if spec["shim"]:
            if "PYTHONPATH" in env:
                env[env_vars.SHIM_PYTHONPATH] = env["PYTHONPATH"]
            env["PYTHONPATH"] = INJECT_DIR + (os.pathsep + env["PYTHONPATH"] if env.get("PYTHONPATH") else "")
            env[env_vars.SHIM_BEATS] = str(memory)
            env[env_vars.SHIM_SOCKET] = os.path.join(os.path.dirname(base), SOCKET_NAME)
            env[env_vars.SHIM_FILES] = base
            if prctl.is_tracing_restricted():
                env[env_vars.SHIM_TRACER] = str(os.getpid())
            env[env_vars.SHIM_GATED] = "1" if spec["gated"] else "0"
        agent = os.getpid()
        started = time.time()
        pid = os.fork()
    except OSError:
        for fd in fds:
            os.close(fd)
        raise
    if pid == 0:
        _exec_rank(spec, env, agent, (stdin, out_write, err_write), memory, error_write)
    os.close(out_write)
    if err_read >= 0:
        os.close(err_write)
    os.close(error_write)
    error = b""
    while data := os.read(error_read, 4096):
        error += data
    os.close(error_read)
    shared_memory = mmap(memory, _SHARED_BYTES)
    os.close(memory)
    streams = {out_read: 1 if spec["split"] else 0}
    if err_read >= 0:
        streams[err_read] = 2
    if error:
        os.waitpid(pid, 0)
        for fd in streams:
            os.close(fd)
        raise OSError(error.decode("utf-8", "replace"))
    process = find_process(pid) or Process(pid, agent, pid, pid, "Z", 0, "?")
    rank = RankProcess(spec, process, streams, base, started)
    if spec["shim"]:
        rank.reader = beat.BeatReader(shared_memory)
        rank.shared_memory = shared_memory
    return rank


def _exec_rank(
    spec: dict[str, Any], env: dict[str, str], agent: int, standard: tuple[int, int, int], memory: int, error_pipe: int
) -> None:
    """Become the rank's program. Runs in the forked child and never returns."""
    try:
        os.setsid()
        prctl.die_with_parent(agent)
        prctl.allow_tracing_by(agent)
        for number, fd in enumerate(standard):
            os.dup2(fd, number)
        if spec["shim"]:
            os.set_inheritable(memory, True)
        for signum in _RESET_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if spec["hup_ignored"] else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (spec["files"], hard_limit))
        if spec.get("cwd"):
            os.chdir(os.path.expanduser(spec["cwd"]))
        if spec.get("cpus"):
            os.sched_setaffinity(0, spec["cpus"])
        program = os.path.expanduser(spec["argv"][0])  # also as argv[0], by which Python finds its venv
        os.execvpe(program, [program, *spec["argv"][1:]], env)
    except BaseException as problem:
        os.write(error_pipe, f"{spec['argv'][0]}: {problem}".encode()[:4000])
    os._exit(127)


def _open_pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    for size in (_PIPE_BYTES, _PIPE_BYTES // 4):
        try:
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, size)
            break
        except PermissionError:  # the user's pipe budget is spent: keep the kernel's default size
            continue
    return read, write


class InitGate:
    """Decides how many ranks may import and load their model at the same time. The agent starts them.

    A rank that may not start yet is not spawned at all: a waiting rank costs nothing, and programs without the shim are
    gated too. The slots are the agent's and not a flock, which forked workers would inherit and hold after a rank was
    killed.
    """

    def __init__(self, ranks: tuple[int, ...], slots: int, slot_s: float, total_s: float, started: float) -> None:
        self.ranks = ranks
        self.slots = slots  # 0: measure how much memory the first rank takes
        self._slot_s = slot_s  # seconds after which a rank loses its slot
        # Seconds after which all ranks start, because the first ones wait in torch's store, which has a timeout.
        self._total_s = total_s
        self._started = started
        self.waiting = list(ranks)
        self.holding: dict[int, float] = {}  # rank -> deadline

    @property
    def is_limiting(self) -> bool:
        """Return whether some rank has to wait. If not, the gate's decisions are not reported."""
        return self.slots == 0 or self.slots < len(self.ranks)

    def admit(self, now: float) -> list[int]:
        """Return the ranks that may start now. They hold a slot from here on."""
        allowed = max(1, self.slots)
        if now - self._started > self._total_s:
            allowed = len(self.ranks)
        admitted = []
        while self.waiting and len(self.holding) < allowed:
            rank = self.waiting.pop(0)
            self.holding[rank] = now + self._slot_s
            admitted.append(rank)
        return admitted

    def release(self, rank: int) -> bool:
        """Take back a rank's slot. Return whether it had one."""
        return self.holding.pop(rank, None) is not None

    def find_overdue(self, now: float) -> list[int]:
        """Return the ranks that have held their slot for too long."""
        return [rank for rank, deadline in self.holding.items() if now >= deadline]

    def measure(self, peak: int, available: int) -> None:
        """Set the number of slots from the peak memory of the first rank, which has started up, and the available memory."""
        if self.slots == 0:
            self.slots = max(1, min(len(self.ranks), available // max(peak, 1)))
