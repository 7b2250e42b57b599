"""One role of a job: its `stoker run`, started and ended here, its output shown with the role's name, how it ended."""

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
from stoker.contract.terminal import without_wrapping
from stoker.contract.text import escape
from stoker.control.launch.children import stoker_command
from stoker.control.launch.console import Console, LineCutter
from stoker.control.launch.short_lines import OwnLines, RoleLines
from stoker.control.record import run_index, run_record
from stoker.control.roles.gpu_sharing import GpuSharing
from stoker.control.roles.placement import GpuSlot, RankSlot, numbered
from stoker.control.roles.ready_check import ReadyWatch
from stoker.control.roles.role import RoleSpec, program, trains
from stoker.control.roles.service_address import Served

WAITING, STARTING, UP, ENDED = "waiting", "starting", "up", "ended"
_LONGEST_LINE = 1 << 16  # bytes of one that are kept until its end comes
SERVICE_MARK = "READY"
_LINES = 20  # of its last ones that are kept


@frozen
class RoleEnvironment:
    """What the plan gives a role."""

    port: int  # of its first replica on each host; 0: none
    max_restarts: int  # within its own run
    options: tuple[str, ...]  # of the job, that every role's run gets, too
    reached: Mapping[str, str]  # host -> where the others reach it
    env: tuple[str, ...] = ()  # NAME=VALUE and NAME, of all roles
    hosts_file: str = ""  # empty: this machine


class RoleRun:
    def __init__(
        self, spec: RoleSpec, given: RoleEnvironment, seating: GpuSharing, root: str, console: Console
    ) -> None:
        """`root`: the folder of the job's roles."""
        self.spec, self.given = spec, given
        self._seating = seating
        self.state = WAITING
        self.child: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.began = 0.0
        self.start_at = 0.0  # not sooner
        self.ended = 0.0
        self.stopping = 0  # a signal that we sent
        self.why = ""  # why we ended it, where nobody asked for that
        self.follows = ""  # another that has moved: it is ended, and started again with that one's new addresses
        self.stranded = ""  # why it can't leave a lost host
        self.verdict: Verdict | None = None
        self.was_ready = False  # this start of it
        self.quick = 0  # failures in a row of starts that got nowhere
        self.failures: list[tuple[float, Verdict]] = []  # newest last
        self.watching: ReadyWatch | None = None
        self.served: tuple[Served | None, ...] = ()  # as it was last recorded
        self.service_reason = ""  # why this role turned out to be a service; stays when it is started again
        self._searched = 0  # bytes of its events when they were last searched for that
        self._root, self._console = root, console
        self._former: tuple[int, int] | None = None  # the verdict of the start before
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._cutters: dict[int, tuple[int, LineCutter]] = {}
        self._begun: dict[int, bytes] = {}  # by pipe: a line without its end yet

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_service(self) -> bool:
        """Return whether the job is complete without this role's end."""
        return self.spec.is_service or bool(self.service_reason)

    def find_service_reason(self) -> str:
        """Return why this role is a service although its description doesn't say so; empty if nothing shows it.

        Its own record has the evidence: a rank that listens on STOKER_PORT, or `stoker.mark("READY")`. An explicit
        `required` is never overridden.
        """
        if self.spec.required is not None or self.child is None or (run := self.find_record()) is None:
            return ""
        size = run_record.size_of(os.path.join(run.dir, layout.EVENTS))
        if size == self._searched:
            return ""
        self._searched = size
        for event in run_record.read_events(run.dir):
            if event["time"] < self.began:
                continue
            if event["event"] == "listening":
                return f"it listens on its port, {event.get('port')}"
            if event["event"] == "mark" and event.get("name") == SERVICE_MARK:
                return f"it called stoker.mark({SERVICE_MARK!r})"
        return ""

    @property
    def seats(self) -> tuple[RankSlot, ...]:
        return self._seating.seats[self.name]

    @property
    def cards(self) -> tuple[GpuSlot, ...]:
        return tuple(card for seat in self.seats for card in seat.cards)

    @property
    def is_ready(self) -> bool:
        if self.state == ENDED:
            return self.verdict is not None and self.verdict.status == "completed"
        return self.state == UP

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        if not self.given.port:
            return ()
        given = self.given
        return tuple((given.reached[seat.host], given.port + number) for seat, number in numbered(self.seats))

    @property
    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def words(self) -> list[str]:
        """Of its `stoker run`, or `stoker train`."""
        spec, given = self.spec, self.given
        found = ["--runs-dir", self._root, "--name", spec.name, "--role", spec.name, "--prefix", "always"]
        found += ["--max-restarts", str(given.max_restarts), *given.options]
        if given.hosts_file:
            found += ["--hosts", given.hosts_file]
            hosts = len({seat.host for seat in self.seats})  # fewer than at first, where it has moved
            found += ["--min-hosts", str(min(spec.min_hosts, hosts))] if spec.min_hosts else []
        else:
            found += ["--nproc-per-node", str(spec.count)]
            found += ["--gpus", ",".join(card.uuid for card in self.cards)] if self.cards else []
        if self.starts:
            found.append("--again")  # a service that ended with exit code 0 is started again
        each = len(self.seats[0].cards)
        if each > 1:
            found += ["--gpus-per-rank", str(each)]
        if given.port:
            found += ["--port-base", str(given.port)]
        if trains(spec.command):
            return [*spec.command[1:], *found]
        flags, command = program(spec.command)
        return ["run", *found, *flags, "--", *command]

    def start(self, environment: Mapping[str, str], handles: Sequence[int]) -> None:
        variables = [*self.given.env, *(f"{name}={value}" for name, value in self.spec.env.items())]
        own = {**environment, env_vars.JOB_PID: str(os.getpid()), env_vars.ROLE_ENV: json.dumps(variables)}
        if not self.cards:
            own["CUDA_VISIBLE_DEVICES"] = ""
        self.began, self.state, self.verdict, self.why, self.stopping = time.time(), STARTING, None, "", 0
        self.was_ready, self.follows = False, ""
        self._lines.clear()
        run = self.find_record()
        self._former = _written(run.dir) if run is not None else None
        self.child = subprocess.Popen(
            stoker_command(self.words()),
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C reaches the job alone, which passes it on
            pass_fds=tuple(handles),
        )
        self.starts += 1
        assert self.child.stdout is not None and self.child.stderr is not None
        self._cutters, self._begun = {}, {}
        for stream, pipe in (1, self.child.stdout), (2, self.child.stderr):
            os.set_blocking(pipe.fileno(), False)
            self._cutters[pipe.fileno()] = stream, self._cutter(stream)
        if self.spec.ready is None:
            self.state = UP
            return
        here = not self.given.hosts_file
        self.watching = ReadyWatch(self.spec.ready, self.addresses, self.began, self.spec.count, here)

    def _cutter(self, stream: int) -> LineCutter:
        """A terminal gets its lines as it would get those of that run alone."""
        prefix, console = self._prefix, self._console
        if not console.terminal(stream):
            return LineCutter(prefix)
        own = OwnLines(console.in_colour(stream), lambda: console.columns(stream) - len(prefix))
        hosts = list(dict.fromkeys(seat.host for seat in self.seats))
        return LineCutter(prefix, RoleLines(prefix, own, trains(self.spec.command), hosts))

    def draw(self) -> bool:
        """A bar of what its rank 0 is at, below the lines, as far as that is known here."""
        run = self.find_record() if self.child is not None else None
        state = read_progress(run.dir) if run is not None else None
        if state is None:
            return False
        prefix = self._prefix.decode()
        bar = without_wrapping(f"{prefix}{state.bar(self._console.columns(2) - len(prefix) - 1)}")
        self._console.put(2, f"{bar}\x1b[K\r".encode())
        return True

    @property
    def _prefix(self) -> bytes:
        return f"[{self.name}] ".encode()

    @property
    def pipes(self) -> list[int]:
        return list(self._cutters)

    def read(self, pipe: int) -> bool:
        """What it printed, to the console. False: that stream is over."""
        stream, cutter = self._cutters[pipe]
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return True
        self._console.put(stream, cutter.feed(data) if data else cutter.flush())
        *whole, rest = (self._begun.get(pipe, b"") + data).split(b"\n")  # a line may come in pieces
        self._begun[pipe] = rest[-_LONGEST_LINE:]
        for line in whole if data else [rest]:
            self._lines.append(escape(line.decode("utf-8", "replace"), 300))
        if self.watching is not None:
            for line in (*whole, rest):
                self.watching.printed(line)
        if not data:
            del self._cutters[pipe]
        return bool(data)

    def find_record(self) -> run_record.RunRecord | None:
        """The newest of its name. Its folder has the time of its first start in its name."""
        runs = [run for run in run_index.list_runs(self._root).runs if run.name == self.name]
        return runs[-1] if runs else None

    def send(self, signum: int) -> None:
        """It is our child and not waited for yet: the number is nobody else's."""
        if self.child is not None and self.child.returncode is None:
            self.stopping = self.stopping or signum
            self.child.send_signal(signum)

    def hurry(self) -> None:
        self.send(env_vars.STOP_NOW_SIGNAL)

    def pause(self) -> None:
        """Ctrl-Z: its run stops its ranks, then itself."""
        if self.child is not None:
            self.child.send_signal(signal.SIGTSTP)

    def resume(self) -> None:
        if self.child is not None:
            self.child.send_signal(signal.SIGCONT)

    def collect(self) -> bool:
        """Has it ended? Then how is known."""
        if self.child is None or self._cutters or self.child.poll() is None:
            return False
        code = self.child.returncode
        code = code if code >= 0 else 128 - code
        if self.watching is not None:
            self.watching.close()
            self.watching = None
        for pipe in (self.child.stdout, self.child.stderr):
            if pipe is not None:
                pipe.close()
        self.child = None
        self.state, self.ended = ENDED, time.time()
        self.verdict = self._verdict(code)
        return True

    def _verdict(self, code: int) -> Verdict:
        run = self.find_record()
        if run is not None and run.verdict is not None and _written(run.dir) != self._former:
            return run.verdict
        said = next((line for line in reversed(self._lines) if line.startswith("stoker: ")), "")
        summary = said.removeprefix("stoker: ") or f"its launcher ended with {code}"
        status = "completed" if code == 0 else "refused"
        return Verdict(status, "completed" if code == 0 else "launch.refused", summary, code)


def _written(run_dir: str) -> tuple[int, int] | None:
    """Which verdict that is."""
    try:
        about = os.stat(os.path.join(run_dir, layout.VERDICT))
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns
