"""Starts and stops the `stoker run` of one role of a job, and shows its output with the role's name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence

from stoker.contract import env_vars, layout
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import frozen
from stoker.contract.progress import read_progress
from stoker.contract.terminal import cut_at_width
from stoker.contract.text import escape
from stoker.control.launch.children import stoker_command
from stoker.control.launch.console import Console, LineCutter
from stoker.control.launch.short_lines import LauncherLines, RoleLines
from stoker.control.record import run_index, run_record
from stoker.control.roles.placement import GpuSlot, Placement, RankSlot, number_on_hosts
from stoker.control.roles.ready_check import ReadyWatch, ServedCounts
from stoker.control.roles.role import RoleSpec, is_stoker_train, split_command

WAITING, STARTING, UP, ENDED = "waiting", "starting", "up", "ended"
SERVICE_MARK = "READY"
LAST_LINES = 20
_MAX_LINE = 1 << 16  # bytes of an unfinished line that are kept until its end comes


@frozen
class RoleSettings:
    """The settings that the job passes to a role."""

    port: int  # of its first replica on each host; 0: none
    max_restarts: int  # within its own run
    options: tuple[str, ...]  # flags that every role's run gets
    addresses: Mapping[str, str]  # host -> its address for other roles
    env: tuple[str, ...] = ()  # NAME=VALUE and NAME, the same for all roles
    hosts_file: str = ""  # empty: this machine


class RoleProcess:
    """The `stoker run` of a role, which the job may start several times."""

    def __init__(
        self, spec: RoleSpec, settings: RoleSettings, placement: Placement, roles_dir: str, console: Console
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.state = WAITING
        self.child: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.started_at = 0.0
        self.earliest_start = 0.0  # it is not started before this time
        self.ended_at = 0.0
        self.stop_signal = 0  # the signal that this job sent it
        self.stop_reason = ""  # why the job stopped it, if the user did not
        self.moved_dependency = ""  # role that has moved: this role is restarted with its new addresses
        self.stranded_reason = ""  # why it can't leave a lost host
        self.verdict: Verdict | None = None
        self.was_ready = False  # in this start
        self.quick_failures = 0  # in a row
        self.failures: list[tuple[float, Verdict]] = []  # time and verdict, newest last
        self.ready_watch: ReadyWatch | None = None
        self.served_counts: tuple[ServedCounts | None, ...] = ()  # as last recorded
        self.service_reason = ""  # why it turned out to be a service; kept when it is started again
        self._searched_bytes = 0  # size of its events file at the last search for a service
        self._placement = placement
        self._roles_dir = roles_dir
        self._console = console
        self._former_verdict: tuple[int, int] | None = None  # file identity of the previous start's verdict
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._cutters: dict[int, tuple[int, LineCutter]] = {}  # by pipe: stream and cutter
        self._unfinished: dict[int, bytes] = {}  # by pipe: a line without its end yet

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_service(self) -> bool:
        """Whether the job is complete without this role's end."""
        return self.spec.is_service or bool(self.service_reason)

    @property
    def is_ready(self) -> bool:
        if self.state == ENDED:
            return self.verdict is not None and self.verdict.status == "completed"
        return self.state == UP

    @property
    def slots(self) -> tuple[RankSlot, ...]:
        return self._placement.slots[self.name]

    @property
    def gpus(self) -> tuple[GpuSlot, ...]:
        return tuple(gpu for slot in self.slots for gpu in slot.gpus)

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each replica."""
        settings = self.settings
        if not settings.port:
            return ()
        return tuple((settings.addresses[slot.host], settings.port + n) for slot, n in number_on_hosts(self.slots))

    @property
    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._last_lines)

    def find_record(self) -> run_record.RunRecord | None:
        """Return the newest run of this role: the time of its first start is in its directory's name."""
        runs = [run for run in run_index.list_runs(self._roles_dir).runs if run.name == self.name]
        return runs[-1] if runs else None

    def find_service_reason(self) -> str:
        """Return why this role is a service although its description doesn't say so, or "".

        Its record shows it: a rank listens on STOKER_PORT, or called `stoker.mark("READY")`. An explicit `required` is
        never overridden.
        """
        if self.spec.required is not None or self.child is None or (run := self.find_record()) is None:
            return ""
        size = run_record.size_of(os.path.join(run.dir, layout.EVENTS))
        if size == self._searched_bytes:
            return ""
        self._searched_bytes = size
        for event in run_record.read_events(run.dir):
            if event["time"] < self.started_at:
                continue
            if event["event"] == "listening":
                return f"it listens on its port, {event.get('port')}"
            if event["event"] == "mark" and event.get("name") == SERVICE_MARK:
                return f"it called stoker.mark({SERVICE_MARK!r})"
        return ""

    # ---- starting ----

    def make_arguments(self) -> list[str]:
        """Return the arguments of its `stoker run` or `stoker train`."""
        spec, settings, slots = self.spec, self.settings, self.slots
        flags = ["--runs-dir", self._roles_dir, "--name", spec.name, "--role", spec.name, "--prefix", "always"]
        flags += ["--max-restarts", str(settings.max_restarts), *settings.options]
        if settings.hosts_file:
            flags += ["--hosts", settings.hosts_file]
            host_count = len({slot.host for slot in slots})  # fewer than at first if it has moved
            flags += ["--min-hosts", str(min(spec.min_hosts, host_count))] if spec.min_hosts else []
        else:
            flags += ["--nproc-per-node", str(spec.count)]
            flags += ["--gpus", ",".join(gpu.uuid for gpu in self.gpus)] if self.gpus else []
        if self.starts:
            flags.append("--again")  # a service that ended with exit code 0 is complete, but is started again
        if len(slots[0].gpus) > 1:
            flags += ["--gpus-per-rank", str(len(slots[0].gpus))]
        if settings.port:
            flags += ["--port-base", str(settings.port)]
        if is_stoker_train(spec.command):
            return [*spec.command[1:], *flags]
        program_flags, program = split_command(spec.command)
        return ["run", *flags, *program_flags, "--", *program]

    def start(self, environment: Mapping[str, str], pass_fds: Sequence[int]) -> None:
        """Start the role's run. Raises OSError if that fails."""
        variables = [*self.settings.env, *(f"{name}={value}" for name, value in self.spec.env.items())]
        env = {**environment, env_vars.JOB_PID: str(os.getpid()), env_vars.ROLE_ENV: json.dumps(variables)}
        if not self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ""
        self.started_at, self.state, self.verdict = time.time(), STARTING, None
        self.stop_signal, self.stop_reason, self.moved_dependency, self.was_ready = 0, "", "", False
        self._last_lines.clear()
        run = self.find_record()
        self._former_verdict = _verdict_identity(run.dir) if run is not None else None
        self.child = subprocess.Popen(
            stoker_command(self.make_arguments()),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C reaches the job alone, which passes it on
            pass_fds=tuple(pass_fds),
        )
        self.starts += 1
        assert self.child.stdout is not None and self.child.stderr is not None
        self._cutters, self._unfinished = {}, {}
        for stream, pipe in (1, self.child.stdout), (2, self.child.stderr):
            os.set_blocking(pipe.fileno(), False)
            self._cutters[pipe.fileno()] = stream, self._make_cutter(stream)
        if self.spec.ready is None:
            self.state = UP
            return
        here = not self.settings.hosts_file
        self.ready_watch = ReadyWatch(self.spec.ready, self.addresses, self.started_at, self.spec.count, here)

    # ---- output ----

    @property
    def pipes(self) -> list[int]:
        return list(self._cutters)

    @property
    def _prefix(self) -> bytes:
        return f"[{self.name}] ".encode()

    def _make_cutter(self, stream: int) -> LineCutter:
        """Return the cutter that makes console lines of its output, formatted as on a terminal if there is one."""
        prefix, console = self._prefix, self._console
        if not console.is_terminal(stream):
            return LineCutter(prefix)
        launcher_lines = LauncherLines(console.uses_colour(stream), lambda: console.columns(stream) - len(prefix))
        hosts = list(dict.fromkeys(slot.host for slot in self.slots))
        return LineCutter(prefix, RoleLines(prefix, launcher_lines, is_stoker_train(self.spec.command), hosts))

    def read(self, pipe: int) -> bool:
        """Show the output from a pipe. Returns False when that stream has ended."""
        stream, cutter = self._cutters[pipe]
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return True
        self._console.put(stream, cutter.feed(data) if data else cutter.flush())
        *lines, rest = (self._unfinished.get(pipe, b"") + data).split(b"\n")
        self._unfinished[pipe] = rest[-_MAX_LINE:]
        for line in lines if data else [rest]:
            self._last_lines.append(escape(line.decode("utf-8", "replace"), 300))
        if self.ready_watch is not None:
            for line in (*lines, rest):
                self.ready_watch.read_line(line)
        if not data:
            del self._cutters[pipe]
        return bool(data)

    def draw_progress(self) -> bool:
        """Draw a progress bar of its rank 0 below the lines. Returns False if there is no progress to show."""
        run = self.find_record() if self.child is not None else None
        progress = read_progress(run.dir) if run is not None else None
        if progress is None:
            return False
        prefix = self._prefix.decode()
        bar = cut_at_width(f"{prefix}{progress.bar(self._console.columns(2) - len(prefix) - 1)}")
        self._console.put(2, f"{bar}\x1b[K\r".encode())
        return True

    # ---- signals and the end ----

    def send(self, signum: int) -> None:
        """Signal its launcher. It is a child that is not reaped yet, so no other process can have its pid."""
        if self.child is not None and self.child.returncode is None:
            self.stop_signal = self.stop_signal or signum
            self.child.send_signal(signum)

    def kill_ranks(self) -> None:
        self.send(env_vars.STOP_NOW_SIGNAL)

    def suspend(self) -> None:
        """Pass Ctrl-Z on: its run suspends its ranks, then itself."""
        if self.child is not None:
            self.child.send_signal(signal.SIGTSTP)

    def resume(self) -> None:
        if self.child is not None:
            self.child.send_signal(signal.SIGCONT)

    def collect(self) -> bool:
        """Return whether its run has ended and all its output is read; then its verdict is known."""
        if self.child is None or self._cutters or self.child.poll() is None:
            return False
        code = self.child.returncode
        if self.ready_watch is not None:
            self.ready_watch.close()
            self.ready_watch = None
        for pipe in (self.child.stdout, self.child.stderr):
            if pipe is not None:
                pipe.close()
        self.child = None
        self.state, self.ended_at = ENDED, time.time()
        self.verdict = self._read_verdict(code if code >= 0 else 128 - code)
        return True

    def _read_verdict(self, code: int) -> Verdict:
        """Return the verdict of its run, or one made of its exit code and last message if it wrote none."""
        run = self.find_record()
        if run is not None and run.verdict is not None and _verdict_identity(run.dir) != self._former_verdict:
            return run.verdict
        message = next((line for line in reversed(self._last_lines) if line.startswith("stoker: ")), "")
        summary = message.removeprefix("stoker: ") or f"its launcher ended with exit code {code}"
        if code == 0:
            return Verdict("completed", "completed", summary, code)
        return Verdict("refused", "launch.refused", summary, code)


def _verdict_identity(run_dir: str) -> tuple[int, int] | None:
    """Return inode and mtime of a run's verdict, to tell it from that of an earlier start."""
    try:
        status = os.stat(os.path.join(run_dir, layout.VERDICT))
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
