"""Starts one rank: its own session, tied to the agent's life, its output in pipes, the shim on its path."""

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

INJECT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "rank", "inject")
MAIL = "s"  # the agent's socket in its folder; a Unix socket's path is limited to 107 bytes
_PIPE_BYTES = 1 << 20
_SET_PIPE_SIZE = 1031  # Linux's F_SETPIPE_SZ; Python's fcntl has it since 3.10
_RESET = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD)


class RankProcess:
    """A started rank, as its agent knows it."""

    def __init__(self, spec: dict[str, Any], me: Process, streams: dict[int, int], base: str, started: float) -> None:
        self.rank = int(spec["rank"])
        self.pid = me.pid
        self.me = me
        self.streams = streams  # our read end -> 1 or 2, or 0 where both are one pipe
        self.reader: beat.BeatReader | None = None
        self.shared_memory: mmap | None = None  # beats and the log of torch.distributed's calls
        self.files = layout.scratch_files(base)
        self.gpu: str | None = spec.get("gpu")
        self.pci = (spec.get("pci") or "").lower()
        self.started = started
        self.signalled = False
        self.reported = 0.0  # when the shim reported an exception: it is on its way out by itself
        self.error: Any = None  # the shim's report of an exception, without secrets
        self.ended: int | None = None
        self.script_end: dict[str, Any] | None = None  # contract/evidence.py:ScriptEnd
        self.marks: set[str] = set()
        self.steps = 0
        self.beaten = 0.0  # when its last beat was noticed
        self.beat_ns = 0
        self.state = "R"
        self.rss: deque[tuple[float, int]] = deque(maxlen=120)
        self.over = 0  # bytes, when it passed its memory limit
        port = spec["env"].get(env_vars.PORT, "")
        self.port = int(port) if port.isdecimal() else 0  # STOKER_PORT; 0: it has none
        self.loader_workers = 0  # of torch's DataLoader, the most that were seen at once
        self.is_listening = False  # on that port; set once and kept

    def calls(self, newest: int) -> list[dict[str, Any]]:
        """Return its newest calls of torch.distributed, also after its end (control/rank/call_log.py)."""
        return call_log.read_calls(self.shared_memory, beat.PAGE_SIZE, newest) if self.shared_memory is not None else []


def spawn_rank(spec: dict[str, Any], host_dir: str, stdin: int) -> RankProcess:
    """`spec`: an entry of the start message. In the agent's main thread: PDEATHSIG follows the thread."""
    base = os.path.join(host_dir, f"{spec['attempt']}-{spec['rank']}")
    env = {**os.environ, **spec["env"]}
    # A rank is never kept: only what it starts.
    for name in (*spec.get("unset", ()), env_vars.RDZV_SECRET, env_vars.RDZV_SECRET_FILE, env_vars.KEEP):
        env.pop(name, None)
    env[env_vars.RUN_ORIGIN] = spec["origin"]
    env["TORCHELASTIC_ERROR_FILE"] = layout.scratch_files(base)["elastic"]
    held: list[int] = []  # descriptors, for the case that the next one can't be had
    try:
        memory = os.memfd_create(f"stoker-beats-{spec['rank']}", os.MFD_CLOEXEC)
        held.append(memory)
        os.posix_fallocate(
            memory, 0, beat.PAGE_SIZE + call_log.SIZE
        )  # a page that can't be had later would be a SIGBUS in the rank
        held += (out := _pipe())
        err = (-1, out[1])
        if spec["split"]:
            held += (err := _pipe())
        held += (failed := os.pipe())
        if spec["shim"]:
            _tell_shim(spec, env, base, memory)
        agent = os.getpid()
        started = time.time()
        pid = os.fork()
    except OSError:
        for handle in held:
            os.close(handle)
        raise
    (out_read, out_write), (err_read, err_write), (failed_read, failed_write) = out, err, failed
    if pid == 0:
        _become(spec, env, agent, (stdin, out_write, err_write), memory, failed_write)
    os.close(out_write)
    if err_read >= 0:
        os.close(err_write)
    os.close(failed_write)
    problem = _read_all(failed_read)
    os.close(failed_read)
    page = mmap(memory, beat.PAGE_SIZE + call_log.SIZE)
    os.close(memory)
    streams = {out_read: 1 if spec["split"] else 0}
    if err_read >= 0:
        streams[err_read] = 2
    if problem:
        os.waitpid(pid, 0)
        for handle in streams:
            os.close(handle)
        raise OSError(problem)
    me = find_process(pid) or Process(pid, agent, pid, pid, "Z", 0, "?")
    made = RankProcess(spec, me, streams, base, started)
    if spec["shim"]:
        made.reader = beat.BeatReader(page)
        made.shared_memory = page
    return made


def _tell_shim(spec: dict[str, Any], env: dict[str, str], base: str, memory: int) -> None:
    if "PYTHONPATH" in env:
        env[env_vars.SHIM_PYTHONPATH] = env["PYTHONPATH"]
    env["PYTHONPATH"] = INJECT + (os.pathsep + env["PYTHONPATH"] if env.get("PYTHONPATH") else "")
    env[env_vars.SHIM_BEATS] = str(memory)
    env[env_vars.SHIM_SOCKET] = os.path.join(os.path.dirname(base), MAIL)
    env[env_vars.SHIM_FILES] = base
    if prctl.tracing_is_restricted():
        env[env_vars.SHIM_TRACER] = str(os.getpid())
    env[env_vars.SHIM_GATED] = "1" if spec["gated"] else "0"


def _become(
    spec: dict[str, Any], env: dict[str, str], agent: int, standard: tuple[int, int, int], memory: int, failed: int
) -> None:
    """In the child, between fork and exec. Never returns."""
    try:
        os.setsid()
        prctl.die_with_parent(agent)
        prctl.allow_tracing_by(agent)
        for number, handle in enumerate(standard):
            os.dup2(handle, number)
        if spec["shim"]:
            os.set_inheritable(memory, True)
        for signum in _RESET:
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if spec["hup_ignored"] else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (spec["files"], hard))
        if spec.get("cwd"):
            os.chdir(os.path.expanduser(spec["cwd"]))
        if spec.get("cpus"):
            os.sched_setaffinity(0, spec["cpus"])
        program = os.path.expanduser(spec["argv"][0])  # as its own name, too: Python finds its venv by that
        os.execvpe(program, [program, *spec["argv"][1:]], env)
    except BaseException as problem:
        os.write(failed, f"{spec['argv'][0]}: {problem}".encode()[:4000])
    os._exit(127)


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    for room in (_PIPE_BYTES, _PIPE_BYTES // 4):
        try:
            fcntl.fcntl(write, _SET_PIPE_SIZE, room)
            break
        except PermissionError:  # the user's pipe budget is spent: the kernel's default will do
            continue
    return read, write


def _read_all(handle: int) -> str:
    """What the child said went wrong; empty once exec has closed its end."""
    parts = []
    while data := os.read(handle, 4096):
        parts.append(data)
    return b"".join(parts).decode("utf-8", "replace")


# ---- the start gate: how many ranks may import and load their model at the same time. Pure ----
#
# A rank that may not start yet is not spawned at all, so that a waiting rank costs nothing and programs without our shim
# are gated too. The agent owns the slots: a flock would be inherited by forked workers and outlive a killed rank.


class InitGate:
    def __init__(self, ranks: tuple[int, ...], slots: int, slot_s: float, total_s: float, started: float) -> None:
        self.ranks = ranks
        self.slots = slots  # 0: find out from what the first rank takes
        self._slot_s = slot_s  # a slot is given back after this long at the latest
        self._total_s = total_s  # after it everybody goes: the first ranks wait in the store, which has a timeout too
        self._started = started
        self.waiting = list(ranks)
        self.holding: dict[int, float] = {}  # rank -> deadline

    @property
    def limited(self) -> bool:
        """Does this gate hold anybody back? If not, nobody needs to hear of it."""
        return self.slots == 0 or self.slots < len(self.ranks)

    def admit(self, now: float) -> list[int]:
        """The ranks that may start now; they hold a slot from here on."""
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
        return self.holding.pop(rank, None) is not None

    def overdue(self, now: float) -> list[int]:
        return [rank for rank, deadline in self.holding.items() if now >= deadline]

    def measured(self, took: int, available: int) -> None:
        """The first rank is through and took this much memory at its peak: how many more fit side by side?"""
        if self.slots == 0:
            self.slots = max(1, min(len(self.ranks), available // max(took, 1)))
