"""The node agent: one select loop that starts this host's ranks, carries their output home, watches and stops them.

It decides nothing about the run: the coordinator does. But it acts alone when the coordinator is gone.
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
from stoker.control.agent import prctl, spawn
from stoker.control.agent.inspector import Inspector
from stoker.control.agent.relay import CHUNK, RESTLESS, Relay
from stoker.control.agent.spawn import InitGate, RankProcess
from stoker.control.agent.stack_dump import CALLS, newest_calls
from stoker.control.agent.sweep import Finishing, StopSequence, Sweeper, ending, reap, take_over
from stoker.control.agent.vitals import BEATS_S, VITALS_S, Vitals, gauges_message, keep_below, memory_now
from stoker.control.machine import host_limits, run_origin
from stoker.control.machine.gpu_lock import GpuLocks, held_gpus
from stoker.control.machine.host_limits import cpus_near
from stoker.control.machine.nvml import Nvml
from stoker.control.machine.observe import Observer
from stoker.control.machine.ports import reserve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.machine.gauges import Gauges

_MAX_REPORT = 140_000  # characters of a report that are sent: torch's own may quote rows of data


class Agent:
    def __init__(self, heart: int, life: int, guardian: int, stdin_fd: int) -> None:
        self._heart, self._life, self._stdin_fd = heart, life, stdin_fd
        if stdin_fd >= 0:
            os.set_inheritable(stdin_fd, False)  # for rank 0's own stdin only
        self._guardian = guardian
        self._sweeper = Sweeper(os.getpid(), {os.getpid(), guardian})
        self._run_id = ""  # known once the coordinator has said it
        self._locks = GpuLocks("")
        self._selector = selectors.DefaultSelector()
        self._relay = Relay(self._selector)
        self._vitals = Vitals(self._relay.say)
        self._gauges: Gauges | None = None
        self._gauged_at = 0.0
        self._gauging = False  # a thread is at it
        self._questions = Inspector(self._selector, self._relay, self._sweeper)
        self._decoder = protocol.Decoder()
        self._ranks: dict[int, RankProcess] = {}
        self._by_pid: dict[int, RankProcess] = {}
        self._specs: dict[int, dict[str, Any]] = {}
        self._gate: InitGate | None = None
        self._stop_sequence: StopSequence | None = None
        self._finish: Finishing | None = None
        self._ram_limit = 0
        self._port: socket.socket | None = None
        self._observer: Observer | None = None
        self._hup_ignored = False
        self._last_heard = self._last_ping = time.monotonic()
        self._suspended = False
        self._closing = False
        self._learned = False
        self._seen: list[protocol.Message] = []  # answers a look has, for the loop to send
        self._kills_before = host_limits.oom_kills()

    def serve(self) -> int:
        prctl.become_subreaper()
        prctl.set_name(b"stoker-agent")
        self._origin = run_origin.own_origin(os.environ).text()
        self._files = host_limits.raise_files_limit()  # two pipes a rank; the ranks themselves get the old limit back
        wake_read, wake_write = os.pipe()
        for handle in (wake_read, wake_write, 0, 1):
            os.set_blocking(handle, False)
        self._wake = wake_write
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        folder = "/tmp" if os.access("/tmp", os.W_OK) else None  # TMPDIR may be too long for a socket's path
        self._dir = tempfile.mkdtemp(prefix="stoker-", dir=folder)
        try:
            self._mail = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._mail.bind(os.path.join(self._dir, spawn.MAIL))
            self._mail.setblocking(False)
            sources = {0: "orders", wake_read: "child", self._life: "life", self._mail.fileno(): "mail"}
            for handle, what in sources.items():
                self._selector.register(handle, selectors.EVENT_READ, what)
            self._relay.outbox += protocol.SENTINEL
            try:
                self._loop(wake_read)
            finally:
                if self._sweeper.groups:  # ranks that have not been swept
                    self._sweeper.kill()
        finally:
            shutil.rmtree(self._dir, ignore_errors=True)
        return 0

    def _loop(self, wake: int) -> None:
        while not ((self._closing and not self._relay.outbox) or self._relay.broken):
            for key, _ in self._selector.select(self._pause()):
                what = key.data
                if what == "orders":
                    if not self._read_orders():
                        return
                elif what == "child":
                    os.read(wake, 4096)
                    while self._seen:
                        self._relay.say(self._seen.pop(0))
                    self._collect()
                elif what == "mail":
                    self._read_mail()
                elif what == "life":
                    return  # the guardian is gone: nobody would sweep after us
                elif what == "out":
                    self._relay.flush()
                elif what == "look":
                    self._questions.read(key.fd)
                elif 0 < self._relay.read(key.fd) < RESTLESS:
                    self._relay.rest(key.fd)
            if not self._tick():
                return

    def _pause(self) -> float:
        waking = self._relay.next_wake
        if waking is not None:
            return max(0.0, waking - time.monotonic())
        if self._stop_sequence or self._finish:
            return 0.02
        return 0.1 if self._ram_limit else BEATS_S

    def _tick(self) -> bool:
        now = time.monotonic()
        self._relay.wake(now)
        self._ping(now)
        if now - self._last_heard > protocol.SILENCE_S and not self._suspended:
            return False  # the coordinator is gone
        if not self._suspended:
            self._vitals.look(self._ranks, now, self._first_step)
            self._gauge(now)
        self._pass_gate(now)
        keep_below(self._ram_limit, self._ranks, self._relay.say)
        if self._stop_sequence:
            self._collect()
            self._stop_sequence.step()
        if self._finish and self._finish.step(self._sweeper, self._relay, self._ranks, self._nvml, self._collect):
            self._finish = self._gate = None
            self._by_pid.clear()  # who is left can't be killed, and is nobody we wait for any more
            if self._port is not None:
                self._port.close()
                self._port = None
        self._relay.flush()
        return True

    def _ping(self, now: float) -> None:
        if now - self._last_ping >= protocol.PING_S:
            self._last_ping = now
            os.write(self._heart, b"\n")
            self._relay.say({"is": "ping"})

    def _read_orders(self) -> bool:
        try:
            data = os.read(0, CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False  # end of file: the coordinator is gone, or done with us
        now = time.monotonic()
        if now - self._last_heard > protocol.SILENCE_S and not self._suspended:
            # we were stopped for longer than the coordinator waits: these orders are for a run that goes on without us
            return False
        self._last_heard = now
        for order, _ in self._decoder.feed(data):
            try:
                self._obey(order)
            except Refusal as refusal:
                self._relay.say({"is": "refused", "line": refusal.line, "code": refusal.code})
            except OSError as problem:
                line = f"the agent could not {order['do']}: {problem}"
                self._relay.say({"is": "refused", "line": line, "code": EX_OSERR})
        self._last_heard = time.monotonic()  # what we took to obey was not the coordinator's silence
        return True

    def _obey(self, order: protocol.Message) -> None:
        do = order["do"]
        if do == "ping":
            return
        if do == "open":
            self._open(order)
        elif do == "look":
            self._look_aside({})
        elif do == "lock":
            refused = self._locks.take(order["gpus"])
            self._relay.say({"is": "locked", "refused": refused, "notices": self._locks.notices})
        elif do == "reserve":
            if self._port is not None:
                self._port.close()
            self._port, answer = reserve(order["addr"], order["port"], order.get("soft", False))
            self._relay.say({"is": "port", **answer})
        elif do == "start":
            self._start(order)
        elif do == "stop":
            self._stop(order)
        elif do == "inspect":
            self._questions.inspect(order, self._by_pid.values())
        elif do == "probe":
            self._questions.probe(order)
        elif do in ("tell", "unprobe"):
            self._questions.tell(order)
        elif do == "finish":
            self._finish = Finishing(order["grace"])
        elif do == "suspend":
            self._suspended = True
            self._to_all(signal.SIGSTOP)
            self._relay.say({"is": "suspended"})
        elif do == "resume":
            self._to_all(signal.SIGCONT)
            self._suspended = False
        elif do == "close":
            self._closing = True
        else:
            raise protocol.ProtocolError(f"unknown order {do!r}")

    def _open(self, order: protocol.Message) -> None:
        os.write(self._heart, os.fsencode(f"{self._dir}\n"))  # the guardian removes our folder where we can't
        self._run_id = self._locks.run_id = order["run"]
        self._run_dir = order["dir"]
        self._hup_ignored = bool(order.get("hup_ignored"))
        if order.get("packages"):
            sys.path.append(order["packages"])  # where nvidia-ml-py lies: this interpreter runs without site-packages
        found = []
        if order.get("former"):
            found = take_over(order["former"], order["run"], order["dir"], order.get("host", ""))
        selves = [
            (one.pid, one.start) for one in (find_process(self._guardian), find_process(os.getpid())) if one is not None
        ]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._look_aside({"selves": selves, "found": found, "visible": visible}, order.get("recorded"))

    def _look_aside(self, more: protocol.Message, recorded: str | None = None) -> None:
        """In a thread: a driver may take long to come up, and the loop must go on saying that we live."""

        def look() -> None:
            try:
                if self._observer is None:
                    self._observer = Observer(recorded)
                machine = self._observer.look()
                locked = held_gpus([gpu.uuid for gpu in machine.gpus])
                found: protocol.Message = {"is": "host", "machine": machine.to_json(), "held": locked, **more}
            except Refusal as refusal:
                found = {"is": "refused", "line": refusal.line, "code": refusal.code}
            except Exception as problem:
                line = f"the agent could not look at its machine: {problem}"
                found = {"is": "refused", "line": line, "code": EX_OSERR}
            self._seen.append(found)
            os.write(self._wake, b"\0")

        _thread.start_new_thread(look, ())

    def _gauge(self, now: float) -> None:
        """What this host and the ranks' cards are doing. In a thread, as a look: a driver may take long to answer, and then
        there are no gauges. Not before the ranks have run for a while: no launch waits for it.
        """
        if self._gauging or not self._by_pid or now - self._gauged_at < VITALS_S:
            return
        self._gauged_at = now
        if self._gauges is None:
            # Imported here, not in the thread: a fork meanwhile would inherit the lock on the import.
            from stoker.control.machine.gauges import Gauges

            observer = self._observer
            self._gauges = Gauges(observer.recorded if observer else None, self._run_dir, observer)
        gauges, cards = self._gauges, {rank.gpu for rank in self._ranks.values() if rank.gpu}
        resident = {str(rank.rank): rank.rss[-1][1] for rank in self._ranks.values() if rank.rss and rank.ended is None}
        self._gauging = True

        def read() -> None:
            try:
                self._seen.append(gauges_message(*gauges.read(cards), resident))
                os.write(self._wake, b"\0")
            except Exception as problem:  # reported once: gauges are not worth a rank
                text = f"this host's gauges can't be read: {type(problem).__name__}: {problem}"
                self._seen.append({"is": "note", "rank": min(self._ranks), "text": text[:500]})
                os.write(self._wake, b"\0")
                return
            self._gauging = False

        _thread.start_new_thread(read, ())

    def _to_all(self, signum: int) -> None:
        for one in self._sweeper.leftovers():
            send_signal(one, signum)

    def _start(self, order: protocol.Message) -> None:
        now = self._gauged_at = time.monotonic()
        self._ranks, self._by_pid, self._stop_sequence, self._finish = {}, {}, None, None
        common = order["common"]
        specs = [{**common, **spec, "env": {**common["env"], **spec["env"]}} for spec in order["ranks"]]
        self._specs = {spec["rank"]: spec for spec in specs}
        gate = order["gate"]
        self._gate = InitGate(tuple(self._specs), gate["slots"], gate["slot_s"], gate["total_s"], now)
        self._ram_limit = order["ram_limit"]
        self._kills_before = host_limits.oom_kills()
        self._pass_gate(now)
        if self._gate.limited:
            holders = self._gate.holding
            wait = {"holders": list(holders), "seconds": max(holders.values(), default=now) - now}
            for rank in self._gate.waiting:
                self._relay.say({"is": "lock", "rank": rank, "what": "waiting", **wait})

    def _pass_gate(self, now: float) -> None:
        gate = self._gate
        if gate is None or self._stop_sequence is not None:
            return
        for rank in gate.overdue(now):
            self._release(rank, "deadline")
        for rank in gate.admit(now):
            if gate.limited:
                self._relay.say({"is": "lock", "rank": rank, "what": "acquired"})
            self._spawn(rank, gate.limited)

    def _release(self, number: int, why: str) -> None:
        gate, rank = self._gate, self._ranks.get(number)
        if gate is None or number not in gate.holding:
            return
        if gate.slots == 0 and rank is not None:
            from stoker.control.machine.procfs import peak_resident

            gate.measured(peak_resident(rank.pid) or 0, host_memory.read_memory()[1])
        limited = gate.limited
        gate.release(number)
        if limited:
            self._relay.say({"is": "lock", "rank": number, "what": "released", "why": why, "slots": gate.slots})

    def _spawn(self, number: int, gated: bool) -> None:
        own = {"origin": self._origin, "hup_ignored": self._hup_ignored, "files": self._files}
        spec = {**self._specs[number], **own, "gated": gated}
        if spec.get("numa") and spec.get("pci"):
            spec["cpus"] = cpus_near(spec["pci"])
        null = os.open(os.devnull, os.O_RDONLY)
        stdin = self._stdin_fd if spec["rank"] == 0 and self._stdin_fd >= 0 else null
        try:
            rank = spawn.spawn_rank(spec, self._dir, stdin)
        except OSError as problem:
            self._release(number, "not started")
            self._relay.say({"is": "unstarted", "rank": number, "text": str(problem)})
            return
        finally:
            os.close(null)
        self._ranks[number] = self._by_pid[rank.pid] = rank
        self._sweeper.groups.add(rank.pid)
        self._relay.add(rank)
        self._relay.say({"is": "up", "rank": number, "pid": rank.pid, "time": rank.started})

    def _read_mail(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self._mail.recv(1 << 16)
                pid, _, rest = data.decode("utf-8", "replace").partition("\t")
                kind, _, text = rest.partition("\t")
                rank = self._by_pid.get(int(pid)) if is_digits(pid) else None
                if rank is not None:
                    self._hear(rank, kind, text)

    def _hear(self, rank: RankProcess, kind: str, name: str) -> None:
        if kind == "error":
            rank.reported = time.monotonic()
            rank.error = self._masked(_read_json(rank.files["error"], name))
            self._relay.say({"is": "error", "rank": rank.rank, "error": rank.error})
            self._vitals.note_holders(rank, self._nvml, self._run_id)
        elif kind == "shim":
            self._tell_memory(rank, "START")
        elif kind == "ended":
            how, status, file, line, function = [*name.split("\t"), "", "", "", ""][:5]
            number = int(line) if is_digits(line) else 0
            rank.script_end = {"how": how, "status": status, "file": file, "line": number, "function": function}
        elif kind == "note":
            self._relay.say({"is": "note", "rank": rank.rank, "text": name[:500]})
        elif kind == "groups":
            self._relay.say({"is": "groups", "rank": rank.rank, "groups": name})
        elif kind == "phase":
            # The steps before it first: three that come after it mean that it trains again.
            self._vitals.beats(self._ranks, self._first_step)
            self._relay.say({"is": "phase", "rank": rank.rank, "name": name})
        elif kind == "mark":
            if name not in ("POST-IMPORT", "INIT"):
                self._relay.say({"is": "mark", "rank": rank.rank, "name": name})
            if name in ("POST-IMPORT", "POST-MODEL"):
                self._tell_memory(rank, name)
            if name in ("INIT", "POST-MODEL"):
                self._release(rank.rank, name)

    def _tell_memory(self, rank: RankProcess, where: str, note: str = "") -> None:
        if where not in rank.marks:
            rank.marks.add(where)
            memory = memory_now(rank.pid, rank.gpu, self._nvml)
            if not memory["rss"]:  # it has ended since: what it took is not known, and is not 0.0 GB
                return
            self._relay.say({"is": "mem", "rank": rank.rank, "at": where, "note": note, **memory})

    @property
    def _nvml(self) -> Nvml | None:
        return self._observer.nvml if self._observer else None

    def _first_step(self, rank: RankProcess, when: float) -> None:
        self._relay.say({"is": "first-step", "rank": rank.rank, "time": when})
        self._tell_memory(rank, "POST-MODEL", "first step")

    def _collect(self) -> None:
        """Ranks that ended, and orphans. Unswept, a rank stays our zombie: its group's number can't be reused."""
        reap(self._sweeper.groups)
        self._read_mail()  # what a rank wrote before it ended
        for rank in list(self._by_pid.values()):
            end = ending(rank.pid)
            if end is None:
                continue
            del self._by_pid[rank.pid]
            rank.ended = end[0]
            for handle in list(rank.streams):
                self._relay.read_all(handle)
            self._vitals.beats(self._ranks, self._first_step)
            self._release(rank.rank, "exit")
            kills = host_limits.oom_kills()
            bad = end[0] != 0 and not rank.signalled
            self._relay.say(
                {
                    "is": "exit",
                    "rank": rank.rank,
                    "code": end[0],
                    "time": time.time(),
                    "ours": rank.signalled,
                    "error": rank.error or self._masked(_read_json(rank.files["error"])),
                    "elastic": self._masked(_read_json(rank.files["elastic"])),
                    "stack": self._masked(_read_text(rank.files["stack"])),
                    "steps": rank.steps,
                    "core": end[1],
                    "oom_killed": kills is not None and self._kills_before is not None and kills > self._kills_before,
                    "script_end": rank.script_end,
                    "calls": newest_calls(rank.calls(CALLS)),
                    "around": self._vitals.around(rank, self._nvml, self._run_id) if bad else {},
                }
            )

    def _masked(self, report: Any) -> Any:
        """Return a rank's report without secrets: those of this host's variables are known to no other process."""
        if not report:
            return report
        if not self._learned:  # not at the start, which ranks wait for
            self._learned = True
            spec = next(iter(self._specs.values()))  # the ranks' secrets are the same
            learn_secrets(spec["env"], spec["argv"])
        return mask_json(truncate_json(report, _MAX_REPORT))

    def _stop(self, order: protocol.Message) -> None:
        if self._gate is not None:
            self._gate.waiting.clear()
        if self._stop_sequence is None:
            told = order["signal"], order["grace"], set(order.get("at_once", ()))
            self._stop_sequence = StopSequence(self._ranks, self._sweeper, *told)
        elif order["grace"] == 0:
            self._stop_sequence.hurry()
        self._relay.say({"is": "stopping"})  # after every "up": the coordinator now knows all ranks there will be
        self._stop_sequence.step()


def _read_json(path: str, text: str = "") -> Any:
    """Return the report in a file, or None if it is cut off or no JSON: its rank may have died while it wrote."""
    try:
        return parse_json(text) if text else read_json(path)
    except (OSError, ValueError):
        return None


def _read_text(path: str) -> str:
    try:
        return read_text(path, "replace")
    except OSError:
        return ""
