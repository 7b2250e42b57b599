"""Runs one host's ranks: a select loop that starts them, forwards their output, watches and stops them.

The coordinator decides everything about the run. The agent acts alone only when the coordinator is gone.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any

from stoker.contract import host_memory, protocol
from stoker.contract.errors import EX_OSERR, Refusal
from stoker.contract.masking import learn_secrets, mask_json
from stoker.contract.process import find_process, send_signal
from stoker.contract.safe_io import read_json, read_text
from stoker.contract.text import is_digits, parse_json, truncate_json
from stoker.control.agent import prctl
from stoker.control.agent.inspector import Inspector
from stoker.control.agent.relay import CHUNK, FLOOD_BYTES, Relay
from stoker.control.agent.spawn import SOCKET_NAME, InitGate, RankProcess, spawn_rank
from stoker.control.agent.stack_dump import MAX_CALLS, add_source_to_calls
from stoker.control.agent.sweep import FinalSweep, StopSequence, Sweeper, read_exit, reap, take_over
from stoker.control.agent.vitals import (
    BEATS_S,
    VITALS_S,
    Vitals,
    enforce_memory_limit,
    make_gauges_message,
    measure_memory,
)
from stoker.control.machine import host_limits, run_origin
from stoker.control.machine.gpu_lock import GpuLocks, find_held_gpus
from stoker.control.machine.host_limits import find_nearby_cpus
from stoker.control.machine.nvml import Nvml
from stoker.control.machine.observe import Observer
from stoker.control.machine.ports import reserve_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.machine.gauges import Gauges

_MAX_REPORT = 140_000  # maximum characters of a report that is sent: torch's reports may quote rows of data


class Agent:
    """Obeys the coordinator's orders on standard input and reports on standard output.

    The agent writes to `heartbeat_fd` every second, for the guardian. `guardian_fd` closes when the guardian ends.
    `stdin_fd` is the standard input of rank 0, or -1.
    """

    def __init__(self, heartbeat_fd: int, guardian_fd: int, guardian: int, stdin_fd: int) -> None:
        self._heartbeat_fd, self._guardian_fd, self._stdin_fd = heartbeat_fd, guardian_fd, stdin_fd
        if stdin_fd >= 0:
            os.set_inheritable(stdin_fd, False)  # only rank 0 gets it, as its stdin
        self._guardian = guardian
        self._sweeper = Sweeper(os.getpid(), {os.getpid(), guardian})
        self._run_id = ""  # set by the order "open"
        self._locks = GpuLocks("")
        self._selector = selectors.DefaultSelector()
        self._relay = Relay(self._selector)
        self._vitals = Vitals(self._relay.send)
        self._inspector = Inspector(self._selector, self._relay, self._sweeper)
        self._gauges: Gauges | None = None
        self._gauges_read_at = 0.0
        self._is_reading_gauges = False  # in a thread
        self._decoder = protocol.Decoder()
        self._specs: dict[int, dict[str, Any]] = {}
        self._ranks: dict[int, RankProcess] = {}
        self._living: dict[int, RankProcess] = {}  # by pid
        self._gate: InitGate | None = None
        self._stop_sequence: StopSequence | None = None
        self._final_sweep: FinalSweep | None = None
        self._ram_limit = 0
        self._port: socket.socket | None = None
        self._observer: Observer | None = None
        self._hup_ignored = False
        self._last_heard = self._last_ping = time.monotonic()
        self._is_suspended = False
        self._is_closing = False
        self._knows_secrets = False
        self._thread_messages: list[protocol.Message] = []  # from threads, for the loop to send
        self._oom_kills_before = host_limits.count_oom_kills()

    def serve(self) -> int:
        """Run until the coordinator closes the connection, falls silent, or the guardian ends."""
        prctl.become_subreaper()
        prctl.set_name(b"stoker-agent")
        self._origin = run_origin.find_own_origin(os.environ).text()
        self._files_limit = host_limits.raise_files_limit()  # for two pipes per rank; ranks get the old limit back
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write, 0, 1):
            os.set_blocking(fd, False)
        self._wake = wake_write
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        parent = "/tmp" if os.access("/tmp", os.W_OK) else None  # TMPDIR may be too long for a socket's path
        self._dir = tempfile.mkdtemp(prefix="stoker-", dir=parent)
        try:
            self._shim_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._shim_socket.bind(os.path.join(self._dir, SOCKET_NAME))
            self._shim_socket.setblocking(False)
            sources = {
                0: "orders",
                wake_read: "wake",
                self._guardian_fd: "guardian",
                self._shim_socket.fileno(): "shim",
            }
            for fd, source in sources.items():
                self._selector.register(fd, selectors.EVENT_READ, source)
            self._relay.outbox += protocol.SENTINEL
            try:
                self._loop(wake_read)
            finally:
                if self._sweeper.groups:  # ranks that have not been swept
                    self._sweeper.kill()
        finally:
            shutil.rmtree(self._dir, ignore_errors=True)
        return 0

    def _loop(self, wake_read: int) -> None:
        while not ((self._is_closing and not self._relay.outbox) or self._relay.is_broken):
            for key, _ in self._selector.select(self._compute_timeout()):
                source = key.data
                if source == "orders":
                    if not self._read_orders():
                        return
                elif source == "wake":  # a child ended, or a thread has a message
                    os.read(wake_read, 4096)
                    while self._thread_messages:
                        self._relay.send(self._thread_messages.pop(0))
                    self._collect_exits()
                elif source == "shim":
                    self._read_shim_messages()
                elif source == "guardian":
                    return  # the guardian has ended: nobody would sweep if the agent died
                elif source == "out":
                    self._relay.flush()
                elif source == "inspector":
                    self._inspector.read(key.fd)
                elif 0 < self._relay.read(key.fd) < FLOOD_BYTES:
                    self._relay.rest(key.fd)
            if not self._tick():
                return

    def _compute_timeout(self) -> float:
        next_wake = self._relay.next_wake
        if next_wake is not None:
            return max(0.0, next_wake - time.monotonic())
        if self._stop_sequence or self._final_sweep:
            return 0.02
        return 0.1 if self._ram_limit else BEATS_S

    def _tick(self) -> bool:
        """Do what is due. Return False if the coordinator is gone."""
        now = time.monotonic()
        self._relay.wake(now)
        if now - self._last_ping >= protocol.PING_S:
            self._last_ping = now
            os.write(self._heartbeat_fd, b"\n")
            self._relay.send({"is": "ping"})
        if now - self._last_heard > protocol.SILENCE_S and not self._is_suspended:
            return False
        if not self._is_suspended:
            self._vitals.report(self._ranks, now, self._on_first_step)
            self._read_gauges(now)
        self._start_admitted(now)
        enforce_memory_limit(self._ram_limit, self._ranks, self._relay.send)
        if self._stop_sequence:
            self._collect_exits()
            self._stop_sequence.step()
        if self._final_sweep and self._final_sweep.step(
            self._sweeper, self._relay, self._ranks, self._nvml, self._collect_exits
        ):
            self._final_sweep = self._gate = None
            self._living.clear()  # a rank that still lives can't be killed: don't wait for it
            if self._port is not None:
                self._port.close()
                self._port = None
        self._relay.flush()
        return True

    # ---- orders of the coordinator ----

    def _read_orders(self) -> bool:
        """Obey the orders that have come. Return False if the coordinator is gone."""
        try:
            data = os.read(0, CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        now = time.monotonic()
        if now - self._last_heard > protocol.SILENCE_S and not self._is_suspended:
            # The agent was stopped for longer than the coordinator waits: the run has gone on without this host.
            return False
        self._last_heard = now
        for order, _ in self._decoder.feed(data):
            try:
                self._obey(order)
            except Refusal as refusal:
                self._relay.send({"is": "refused", "line": refusal.line, "code": refusal.code})
            except OSError as problem:
                line = f"the agent could not {order['do']}: {problem}"
                self._relay.send({"is": "refused", "line": line, "code": EX_OSERR})
        self._last_heard = time.monotonic()  # time spent on the orders is not silence of the coordinator
        return True

    def _obey(self, order: protocol.Message) -> None:
        action = order["do"]
        if action == "ping":
            return
        if action == "open":
            self._open(order)
        elif action == "look":
            self._observe({})
        elif action == "lock":
            refused = self._locks.take(order["gpus"])
            self._relay.send({"is": "locked", "refused": refused, "notices": self._locks.notices})
        elif action == "reserve":
            if self._port is not None:
                self._port.close()
            self._port, answer = reserve_port(order["addr"], order["port"], order.get("soft", False))
            self._relay.send({"is": "port", **answer})
        elif action == "start":
            self._start(order)
        elif action == "stop":
            self._stop(order)
        elif action == "inspect":
            self._inspector.start_inspection(order, self._living.values())
        elif action == "probe":
            self._inspector.start_probe(order)
        elif action in ("tell", "unprobe"):
            self._inspector.forward_order(order)
        elif action == "finish":
            self._final_sweep = FinalSweep(order["grace"])
        elif action == "suspend":
            self._is_suspended = True
            self._signal_all(signal.SIGSTOP)
            self._relay.send({"is": "suspended"})
        elif action == "resume":
            self._signal_all(signal.SIGCONT)
            self._is_suspended = False
        elif action == "close":
            self._is_closing = True
        else:
            raise protocol.ProtocolError(f"unknown order {action!r}")

    def _open(self, order: protocol.Message) -> None:
        os.write(self._heartbeat_fd, os.fsencode(f"{self._dir}\n"))  # the guardian removes our folder if we are killed
        self._run_id = self._locks.run_id = order["run"]
        self._run_dir = order["dir"]
        self._hup_ignored = bool(order.get("hup_ignored"))
        if order.get("packages"):
            sys.path.append(order["packages"])  # has nvidia-ml-py: this interpreter runs without site-packages
        former = []
        if order.get("former"):
            former = take_over(order["former"], order["run"], order["dir"], order.get("host", ""))
        own = [process for process in (find_process(self._guardian), find_process(os.getpid())) if process is not None]
        details = {
            "selves": [(process.pid, process.start) for process in own],
            "found": former,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
        self._observe(details, order.get("recorded"))

    def _observe(self, details: protocol.Message, recorded: str | None = None) -> None:
        """Report the machine and its GPU locks, with `details`.

        This runs in a thread: a driver may take long to load, and the loop must send pings meanwhile.
        """

        def observe() -> None:
            try:
                if self._observer is None:
                    self._observer = Observer(recorded)
                machine = self._observer.observe()
                locked = find_held_gpus([gpu.uuid for gpu in machine.gpus])
                report: protocol.Message = {"is": "host", "machine": machine.to_json(), "held": locked, **details}
            except Refusal as refusal:
                report = {"is": "refused", "line": refusal.line, "code": refusal.code}
            except Exception as problem:
                line = f"the agent could not examine its host: {problem}"
                report = {"is": "refused", "line": line, "code": EX_OSERR}
            self._send_from_thread(report)

        _thread.start_new_thread(observe, ())

    def _send_from_thread(self, message: protocol.Message) -> None:
        self._thread_messages.append(message)
        os.write(self._wake, b"\0")

    def _read_gauges(self, now: float) -> None:
        """Report the gauges of this host and the ranks' GPUs every VITALS_S, the first time VITALS_S after the start.

        This runs in a thread: a driver may take long to answer, and the loop must not wait for it.
        """
        if self._is_reading_gauges or not self._living or now - self._gauges_read_at < VITALS_S:
            return
        self._gauges_read_at = now
        if self._gauges is None:
            # Import it here and not in the thread: a rank forked meanwhile would inherit the import lock.
            from stoker.control.machine.gauges import Gauges

            observer = self._observer
            self._gauges = Gauges(observer.recorded if observer else None, self._run_dir, observer)
        gauges, ranks = self._gauges, self._ranks.values()
        gpus = {rank.gpu for rank in ranks if rank.gpu}
        resident = {str(rank.rank): rank.rss[-1][1] for rank in ranks if rank.rss and rank.exit_code is None}
        self._is_reading_gauges = True

        def read() -> None:
            try:
                self._send_from_thread(make_gauges_message(*gauges.read(gpus), resident))
            except Exception as problem:  # report it once, and go on without gauges
                text = f"this host's gauges can't be read: {type(problem).__name__}: {problem}"
                self._send_from_thread({"is": "note", "rank": min(self._ranks), "text": text[:500]})
                return
            self._is_reading_gauges = False

        _thread.start_new_thread(read, ())

    def _signal_all(self, signum: int) -> None:
        for process in self._sweeper.find_leftovers():
            send_signal(process, signum)

    # ---- starting ranks ----

    def _start(self, order: protocol.Message) -> None:
        now = self._gauges_read_at = time.monotonic()
        self._ranks, self._living, self._stop_sequence, self._final_sweep = {}, {}, None, None
        common = order["common"]
        specs = [{**common, **spec, "env": {**common["env"], **spec["env"]}} for spec in order["ranks"]]
        self._specs = {spec["rank"]: spec for spec in specs}
        gate = order["gate"]
        self._gate = InitGate(tuple(self._specs), gate["slots"], gate["slot_s"], gate["total_s"], now)
        self._ram_limit = order["ram_limit"]
        self._oom_kills_before = host_limits.count_oom_kills()
        self._start_admitted(now)
        if self._gate.is_limiting:
            holders = self._gate.holding
            seconds = max(holders.values(), default=now) - now
            for rank in self._gate.waiting:
                wait = {"is": "lock", "rank": rank, "what": "waiting", "holders": list(holders), "seconds": seconds}
                self._relay.send(wait)

    def _start_admitted(self, now: float) -> None:
        """Start the ranks that the gate admits."""
        gate = self._gate
        if gate is None or self._stop_sequence is not None:
            return
        for rank in gate.find_overdue(now):
            self._release_slot(rank, "deadline")
        for rank in gate.admit(now):
            if gate.is_limiting:
                self._relay.send({"is": "lock", "rank": rank, "what": "acquired"})
            self._spawn(rank, gate.is_limiting)

    def _release_slot(self, number: int, why: str) -> None:
        gate, rank = self._gate, self._ranks.get(number)
        if gate is None or number not in gate.holding:
            return
        if gate.slots == 0 and rank is not None:
            from stoker.control.machine.procfs import peak_resident

            gate.measure(peak_resident(rank.pid) or 0, host_memory.read_memory()[1])
        gate.release(number)
        if gate.is_limiting:
            self._relay.send({"is": "lock", "rank": number, "what": "released", "why": why, "slots": gate.slots})

    def _spawn(self, number: int, is_gated: bool) -> None:
        spec = {
            **self._specs[number],
            "origin": self._origin,
            "hup_ignored": self._hup_ignored,
            "files": self._files_limit,
            "gated": is_gated,
        }
        if spec.get("numa") and spec.get("pci"):
            spec["cpus"] = find_nearby_cpus(spec["pci"])
        null = os.open(os.devnull, os.O_RDONLY)
        stdin = self._stdin_fd if spec["rank"] == 0 and self._stdin_fd >= 0 else null
        try:
            rank = spawn_rank(spec, self._dir, stdin)
        except OSError as problem:
            self._release_slot(number, "not started")
            self._relay.send({"is": "unstarted", "rank": number, "text": str(problem)})
            return
        finally:
            os.close(null)
        self._ranks[number] = self._living[rank.pid] = rank
        self._sweeper.groups.add(rank.pid)
        self._relay.add(rank)
        self._relay.send({"is": "up", "rank": number, "pid": rank.pid, "time": rank.started})

    # ---- what ranks report ----

    def _read_shim_messages(self) -> None:
        """Read the datagrams of the ranks' shims: PID, kind and text, separated by tabs."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self._shim_socket.recv(1 << 16)
                pid, _, message = data.decode("utf-8", "replace").partition("\t")
                kind, _, text = message.partition("\t")
                rank = self._living.get(int(pid)) if is_digits(pid) else None
                if rank is not None:
                    self._on_shim_message(rank, kind, text)

    def _on_shim_message(self, rank: RankProcess, kind: str, text: str) -> None:
        if kind == "error":
            rank.exception_at = time.monotonic()
            rank.error = self._mask_report(_parse_report(rank.files["error"], text))
            self._relay.send({"is": "error", "rank": rank.rank, "error": rank.error})
            self._vitals.note_gpu_holders(rank, self._nvml, self._run_id)
        elif kind == "shim":
            self._report_memory(rank, "START")
        elif kind == "ended":
            how, status, file, line, function = [*text.split("\t"), "", "", "", ""][:5]
            number = int(line) if is_digits(line) else 0
            rank.script_end = {"how": how, "status": status, "file": file, "line": number, "function": function}
        elif kind == "note":
            self._relay.send({"is": "note", "rank": rank.rank, "text": text[:500]})
        elif kind == "groups":
            self._relay.send({"is": "groups", "rank": rank.rank, "groups": text})
        elif kind == "phase":
            # First report the steps before the phase: three steps after it mean that the rank trains again.
            self._vitals.read_beats(self._ranks, self._on_first_step)
            self._relay.send({"is": "phase", "rank": rank.rank, "name": text})
        elif kind == "mark":
            if text not in ("POST-IMPORT", "INIT"):
                self._relay.send({"is": "mark", "rank": rank.rank, "name": text})
            if text in ("POST-IMPORT", "POST-MODEL"):
                self._report_memory(rank, text)
            if text in ("INIT", "POST-MODEL"):
                self._release_slot(rank.rank, text)

    def _report_memory(self, rank: RankProcess, mark: str, note: str = "") -> None:
        """Report the memory at a mark, once."""
        if mark not in rank.marks:
            rank.marks.add(mark)
            memory = measure_memory(rank.pid, rank.gpu, self._nvml)
            if not memory["rss"]:  # the rank has ended, so its memory is unknown, not 0.0 GB
                return
            self._relay.send({"is": "mem", "rank": rank.rank, "at": mark, "note": note, **memory})

    @property
    def _nvml(self) -> Nvml | None:
        return self._observer.nvml if self._observer else None

    def _on_first_step(self, rank: RankProcess, first_beat_at: float) -> None:
        self._relay.send({"is": "first-step", "rank": rank.rank, "time": first_beat_at})
        self._report_memory(rank, "POST-MODEL", "first step")

    def _collect_exits(self) -> None:
        """Report the ranks that ended, and reap orphans.

        An ended rank stays our zombie until the sweep, so that the number of its process group can't be reused.
        """
        reap(self._sweeper.groups)
        self._read_shim_messages()  # what a rank wrote before it ended
        for rank in list(self._living.values()):
            ended = read_exit(rank.pid)
            if ended is None:
                continue
            del self._living[rank.pid]
            rank.exit_code, has_core = ended
            for fd in list(rank.streams):
                self._relay.read_all(fd)
            self._vitals.read_beats(self._ranks, self._on_first_step)
            self._release_slot(rank.rank, "exit")
            oom_kills, before = host_limits.count_oom_kills(), self._oom_kills_before
            has_failed = rank.exit_code != 0 and not rank.is_signalled
            self._relay.send(
                {
                    "is": "exit",
                    "rank": rank.rank,
                    "code": rank.exit_code,
                    "time": time.time(),
                    "ours": rank.is_signalled,
                    "error": rank.error or self._mask_report(_parse_report(rank.files["error"])),
                    "elastic": self._mask_report(_parse_report(rank.files["elastic"])),
                    "stack": self._mask_report(_read_text(rank.files["stack"])),
                    "steps": rank.steps,
                    "core": has_core,
                    "oom_killed": oom_kills is not None and before is not None and oom_kills > before,
                    "script_end": rank.script_end,
                    "calls": add_source_to_calls(rank.read_calls(MAX_CALLS)),
                    "around": self._vitals.read_exit_context(rank, self._nvml, self._run_id) if has_failed else {},
                }
            )

    def _mask_report(self, report: Any) -> Any:
        """Return a rank's report without secrets. Only the agent knows the secrets in this host's environment variables."""
        if not report:
            return report
        if not self._knows_secrets:  # learned only now, because at the start the ranks would wait for it
            self._knows_secrets = True
            spec = next(iter(self._specs.values()))  # all ranks have the same secrets
            learn_secrets(spec["env"], spec["argv"])
        return mask_json(truncate_json(report, _MAX_REPORT))

    def _stop(self, order: protocol.Message) -> None:
        if self._gate is not None:
            self._gate.waiting.clear()
        if self._stop_sequence is None:
            signum, grace, without_grace = order["signal"], order["grace"], set(order.get("at_once", ()))
            self._stop_sequence = StopSequence(self._ranks, self._sweeper, signum, grace, without_grace)
        elif order["grace"] == 0:
            self._stop_sequence.skip_grace()
        self._relay.send({"is": "stopping"})  # sent after every "up": no more ranks will be started
        self._stop_sequence.step()


def _parse_report(path: str, text: str = "") -> Any:
    """Return the report in `text`, or else in a file, or None if it is incomplete: the rank may have died writing it."""
    try:
        return parse_json(text) if text else read_json(path)
    except (OSError, ValueError):
        return None


def _read_text(path: str) -> str:
    try:
        return read_text(path, "replace")
    except OSError:
        return ""
