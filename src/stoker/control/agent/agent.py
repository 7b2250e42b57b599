"""The node agent: one select loop that starts this host's ranks, carries their output home, watches and stops them.

It decides nothing about the run: the coordinator does. But it acts alone when the coordinator is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from typing import Any

from stoker.contract import protocol
from stoker.contract.names import EX_OSERR, Refusal
from stoker.control.agent import kernel, spawn
from stoker.control.agent.gate import Gate
from stoker.control.agent.ladder import StopLadder
from stoker.control.agent.locks import GpuLocks, held
from stoker.control.agent.memory import MemoryWatch, memory_now
from stoker.control.agent.port import reserve
from stoker.control.agent.spawn import Rank
from stoker.control.agent.sweep import Sweeper, ending, reap
from stoker.control.machine import host
from stoker.control.machine.host import cpus_near
from stoker.control.machine.observe import Observer

CHUNK = 1 << 18
BACKLOG = 8 << 20  # past this much unsent output the loop stops reading ranks: the flooding one waits, not the agent's memory
BEATS_S = 0.5
REST_S = 0.1
RESTLESS = 1 << 16  # a chunk this large is a flood: no rest for that


class Agent:
    def __init__(self, heart: int, life: int, guardian: int, stdin_fd: int) -> None:
        self._heart, self._life, self._stdin_fd = heart, life, stdin_fd
        if stdin_fd >= 0:
            os.set_inheritable(stdin_fd, False)  # for rank 0's own stdin only
        self._guardian = guardian
        self._sweeper = Sweeper(os.getpid(), {os.getpid(), guardian})
        self._locks = GpuLocks("")
        self._selector = selectors.DefaultSelector()
        self._decoder = protocol.Decoder()
        self._outbox = bytearray()
        self._ranks: dict[int, Rank] = {}
        self._by_pid: dict[int, Rank] = {}
        self._specs: dict[int, dict[str, Any]] = {}
        self._streams: dict[int, Rank] = {}
        self._gate: Gate | None = None
        self._ladder: StopLadder | None = None
        self._finish: dict[str, Any] | None = None
        self._memory: MemoryWatch | None = None
        self._port: socket.socket | None = None
        self._observer: Observer | None = None
        self._hup_ignored = False
        self._last_heard = self._last_ping = self._last_beats = time.monotonic()
        self._suspended = False
        self._closing = False
        self._paused = False
        self._resting: dict[int, float] = {}  # streams that were just read, and when to listen to them again
        self._kills_before = host.oom_kills()

    # ---- life ----

    def serve(self) -> int:
        kernel.become_subreaper()
        kernel.set_name(b"stoker-agent")
        self._files = host.raise_files_limit()  # two pipes a rank; the ranks themselves get the old limit back
        wake_read, wake_write = os.pipe()
        for handle in (wake_read, wake_write, 0, 1):
            os.set_blocking(handle, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        folder = "/tmp" if os.access("/tmp", os.W_OK) else None  # a Unix socket's path is limited to 107 bytes: TMPDIR may be long
        with tempfile.TemporaryDirectory(prefix="stoker-", dir=folder, ignore_cleanup_errors=True) as self._dir:
            self._mail = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._mail.bind(os.path.join(self._dir, "s"))
            self._mail.setblocking(False)
            for handle, what in ((0, "orders"), (wake_read, "child"), (self._life, "life"), (self._mail.fileno(), "mail")):
                self._selector.register(handle, selectors.EVENT_READ, what)
            self._outbox += protocol.SENTINEL
            try:
                self._loop(wake_read)
            finally:
                if self._sweeper.groups:  # ranks that have not been swept
                    self._sweeper.kill()
        return 0

    def _loop(self, wake: int) -> None:
        while not (self._closing and not self._outbox):
            for key, _ in self._selector.select(self._pause()):
                what = key.data
                if what == "orders":
                    if not self._read_orders():
                        return
                elif what == "child":
                    os.read(wake, 4096)
                    self._collect()
                elif what == "mail":
                    self._read_mail()
                elif what == "life":
                    return  # the guardian is gone: nobody would sweep after us
                elif what == "out":
                    self._flush()
                elif 0 < self._read_stream(key.fd) < RESTLESS:
                    self._rest(key.fd)
            if not self._tick():
                return

    def _pause(self) -> float:
        if self._resting:
            return max(0.0, min(self._resting.values()) - time.monotonic())
        if self._ladder or self._finish:
            return 0.02
        if self._memory and self._memory.limit:
            return 0.1
        return BEATS_S

    def _tick(self) -> bool:
        now = time.monotonic()
        self._wake(now)
        if now - self._last_ping >= protocol.PING_S:
            self._last_ping = now
            os.write(self._heart, b"\n")
            self._say({"is": "ping"})
        if now - self._last_heard > protocol.SILENCE_S and not self._suspended:
            return False  # the coordinator is gone
        if now - self._last_beats >= BEATS_S:
            self._last_beats = now
            self._look_at_beats()
        self._pass_gate(now)
        if self._memory:
            self._memory.check(self._ranks, self._say)
        if self._ladder:
            self._collect()
            self._ladder.step()
        if self._finish:
            self._finishing(now)
        self._flush()
        return True

    # ---- talking ----

    def _say(self, message: protocol.Message, payload: bytes = b"") -> None:
        self._outbox += protocol.encode(message, payload)

    def _flush(self) -> None:
        while self._outbox:
            try:
                sent = os.write(1, memoryview(self._outbox)[:CHUNK])
            except BlockingIOError:
                break
            except BrokenPipeError:
                self._outbox.clear()
                self._closing = True
                return
            del self._outbox[:sent]
        self._watch_out(bool(self._outbox))
        self._throttle(len(self._outbox) > BACKLOG)

    def _watch_out(self, wanted: bool) -> None:
        registered = 1 in self._selector.get_map()
        if wanted and not registered:
            self._selector.register(1, selectors.EVENT_WRITE, "out")
        elif registered and not wanted:
            self._selector.unregister(1)

    def _throttle(self, pause: bool) -> None:
        if pause != self._paused:
            self._paused = pause
            for handle in self._streams:
                if handle not in self._resting:
                    self._listen(handle, not pause)

    def _listen(self, handle: int, wanted: bool) -> None:
        if wanted:
            self._selector.register(handle, selectors.EVENT_READ, "stream")
        else:
            self._selector.unregister(handle)

    def _rest(self, handle: int) -> None:
        """A stream that was read rests a moment: a rank that prints 50 lines a second wakes us, and the coordinator, 10 times and not 50."""
        if handle in self._streams and handle not in self._resting and not self._paused:
            self._listen(handle, False)
            self._resting[handle] = (time.monotonic() // REST_S + 1) * REST_S  # all streams wake together

    def _wake(self, now: float) -> None:
        for handle in [handle for handle, until in self._resting.items() if now >= until]:
            del self._resting[handle]
            if not self._paused:
                self._listen(handle, True)

    def _read_orders(self) -> bool:
        try:
            data = os.read(0, CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False  # end of file: the coordinator is gone, or done with us
        self._last_heard = time.monotonic()
        for order, _ in self._decoder.feed(data):
            try:
                self._obey(order)
            except Refusal as refusal:
                self._say({"is": "refused", "line": refusal.line, "code": refusal.code})
            except OSError as problem:
                self._say({"is": "refused", "line": f"the agent could not {order['do']}: {problem}", "code": EX_OSERR})
        return True

    def _obey(self, order: protocol.Message) -> None:
        do = order["do"]
        if do == "ping":
            return
        if do == "open":
            run_id, run_dir = order["run"], order["dir"]
            os.write(self._heart, os.fsencode(f"{run_id}\0{run_dir}\0{self._dir}\n"))  # the guardian sweeps by the same tag, and our folder
            self._sweeper.run_id, self._sweeper.run_dir = run_id, run_dir
            self._locks.run_id = run_id
            self._hup_ignored = bool(order.get("hup_ignored"))
            if order.get("packages"):
                sys.path.append(order["packages"])  # where nvidia-ml-py lies: this interpreter runs without site-packages
            self._observer = Observer(order.get("recorded"))
            self._say({"is": "host", "machine": self._observer.look().to_json(), "held": held(), "pid": os.getpid(), "guardian": self._guardian})
        elif do == "look":
            assert self._observer is not None
            self._say({"is": "host", "machine": self._observer.look().to_json(), "held": held()})
        elif do == "lock":
            self._say({"is": "locked", "refused": self._locks.take(order["gpus"])})
        elif do == "reserve":
            if self._port is not None:
                self._port.close()
            self._port, answer = reserve(order["addr"], order["port"], order.get("soft", False))
            self._say({"is": "port", **answer})
        elif do == "start":
            self._start(order)
        elif do == "stop":
            self._stop(order)
        elif do == "signal":
            for rank in self._by_pid.values():
                kernel.send(rank.me, order["signal"])
        elif do == "finish":
            self._finish = {"begun": time.monotonic(), "grace": order["grace"], "asked": 0.0, "named": [], "said": False}
        elif do == "suspend":
            self._suspended = True
            self._to_all(signal.SIGSTOP)
            self._say({"is": "suspended"})
        elif do == "resume":
            self._to_all(signal.SIGCONT)
            self._suspended = False
        elif do == "close":
            self._closing = True
        else:
            raise protocol.ProtocolError(f"unknown order {do!r}")

    def _to_all(self, signum: int) -> None:
        for one in self._sweeper.leftovers():
            kernel.send(one, signum)

    # ---- ranks ----

    def _start(self, order: protocol.Message) -> None:
        now = time.monotonic()
        self._ranks, self._by_pid, self._ladder, self._finish = {}, {}, None, None
        self._specs = {spec["rank"]: {**order["common"], **spec, "env": {**order["common"]["env"], **spec["env"]}} for spec in order["ranks"]}
        gate = order["gate"]
        self._gate = Gate(tuple(self._specs), gate["slots"], gate["slot_s"], gate["total_s"], now)
        self._memory = MemoryWatch(order["ram_limit"])
        self._pass_gate(now)
        if self._gate.limited:
            for rank in self._gate.waiting:
                holders = self._gate.holding
                self._say({"is": "lock", "rank": rank, "what": "waiting", "holders": list(holders), "seconds": max(holders.values()) - now})

    def _pass_gate(self, now: float) -> None:
        gate = self._gate
        if gate is None or self._ladder is not None:
            return
        for rank in gate.overdue(now):
            self._release(rank, "deadline")
        for rank in gate.admit(now):
            if gate.limited:
                self._say({"is": "lock", "rank": rank, "what": "acquired"})
            self._spawn(rank, gate.limited)

    def _release(self, number: int, why: str) -> None:
        gate, rank = self._gate, self._ranks.get(number)
        if gate is None or number not in gate.holding:
            return
        if gate.slots == 0 and rank is not None:
            from stoker.control.machine.processes import peak_resident

            gate.measured(peak_resident(rank.pid) or 0, host.memory()[1])
        limited = gate.limited
        gate.release(number)
        if limited:
            self._say({"is": "lock", "rank": number, "what": "released", "why": why, "slots": gate.slots})

    def _spawn(self, number: int, gated: bool) -> None:
        spec = {**self._specs[number], "gated": gated}
        if spec.get("numa") and spec.get("pci"):
            spec["cpus"] = cpus_near(spec["pci"])
        null = os.open(os.devnull, os.O_RDONLY)
        stdin = self._stdin_fd if spec["rank"] == 0 and self._stdin_fd >= 0 else null
        try:
            rank = spawn.start(spec, self._dir, os.path.join(self._dir, "s"), stdin, self._hup_ignored, self._files)
        except OSError as problem:
            self._release(number, "not started")
            self._say({"is": "unstarted", "rank": number, "text": str(problem)})
            return
        finally:
            os.close(null)
        self._ranks[number] = self._by_pid[rank.pid] = rank
        self._sweeper.groups.add(rank.pid)
        for handle in rank.streams:
            self._streams[handle] = rank
            if not self._paused:
                self._listen(handle, True)
        self._say({"is": "up", "rank": number, "pid": rank.pid, "time": rank.started})

    def _read_stream(self, handle: int) -> int:
        """One chunk; how many bytes it had, 0 when there is nothing more for now."""
        rank = self._streams.get(handle)
        if rank is None:  # closed by an event of the same batch: its rank's end was collected first
            return 0
        try:
            data = os.read(handle, CHUNK)
        except BlockingIOError:
            return 0
        if not data:
            self._forget_stream(handle)
            return 0
        self._say({"is": "out", "rank": rank.rank, "fd": rank.streams[handle]}, data)
        return len(data)

    def _forget_stream(self, handle: int) -> None:
        del self._streams[handle]
        if self._resting.pop(handle, None) is None and not self._paused:
            self._listen(handle, False)
        os.close(handle)

    def _read_mail(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self._mail.recv(1 << 16)
                pid, _, rest = data.decode("utf-8", "replace").partition("\t")
                kind, _, text = rest.partition("\t")
                rank = self._by_pid.get(int(pid)) if pid.isdigit() else None
                if rank is not None:
                    self._hear(rank, kind, text)

    def _hear(self, rank: Rank, kind: str, name: str) -> None:
        if kind == "error":
            rank.reported = time.monotonic()
            self._say({"is": "error", "rank": rank.rank, "error": _read_json(rank.error_path)})
        elif kind == "shim":
            self._tell_memory(rank, "START")
        elif kind == "note":
            self._say({"is": "note", "rank": rank.rank, "text": name[:500]})
        elif kind == "phase":
            self._say({"is": "phase", "rank": rank.rank, "name": name})
        elif kind == "mark":
            if name not in ("POST-IMPORT", "INIT"):
                self._say({"is": "mark", "rank": rank.rank, "name": name})
            if name in ("POST-IMPORT", "POST-MODEL"):
                self._tell_memory(rank, name)
            if name in ("INIT", "POST-MODEL"):
                self._release(rank.rank, name)

    def _tell_memory(self, rank: Rank, where: str, note: str = "") -> None:
        if where not in rank.marks:
            rank.marks.add(where)
            nvml = self._observer.nvml if self._observer else None
            self._say({"is": "mem", "rank": rank.rank, "at": where, "note": note, **memory_now(rank.pid, rank.gpu, nvml)})

    def _look_at_beats(self) -> None:
        fresh: dict[str, list[Any]] = {}
        for rank in self._ranks.values():
            if rank.reader is None or rank.reader.written == rank.reader.seen:
                continue
            beats = rank.reader.new()
            first = rank.steps == 0
            # A step is one optimizer's count; the script's own word (optimizer 0) wins where there is one.
            lead = min(beat.optimizer for beat in beats)
            rank.steps = max(1, rank.steps, *(beat.step for beat in beats if beat.optimizer == lead))
            fresh[str(rank.rank)] = [rank.steps, beats[-1].time_ns]
            if first:
                self._say({"is": "first-step", "rank": rank.rank, "time": beats[0].time_ns / 1e9})
                self._tell_memory(rank, "POST-MODEL", "at its first step")
        if fresh:
            self._say({"is": "beats", "ranks": fresh})

    def _collect(self) -> None:
        """Ranks that ended, and orphans. A rank stays our zombie until it is swept: its process group's number can't be a stranger's."""
        reap(self._sweeper.groups)
        for rank in list(self._by_pid.values()):
            end = ending(rank.pid)
            if end is None:
                continue
            del self._by_pid[rank.pid]
            rank.ended = end[0]
            for handle in list(rank.streams):
                while handle in self._streams and self._read_stream(handle):
                    continue
            self._look_at_beats()
            self._release(rank.rank, "exit")
            kills = host.oom_kills()
            self._say({
                "is": "exit", "rank": rank.rank, "code": end[0], "time": time.time(), "ours": rank.signalled,
                "error": _read_json(rank.error_path), "elastic": _read_json(rank.elastic_path), "stack": _read_text(rank.stack_path),
                "steps": rank.steps, "core": end[1],
                "oom_killed": kills is not None and self._kills_before is not None and kills > self._kills_before,
            })  # fmt: skip

    # ---- stopping ----

    def _stop(self, order: protocol.Message) -> None:
        if self._gate is not None:
            self._gate.waiting.clear()
        if self._ladder is None:
            self._ladder = StopLadder(self._ranks, self._sweeper, order["signal"], order["grace"], set(order.get("at_once", ())))
        elif order["grace"] == 0:
            self._ladder.hurry()
        self._ladder.step()

    def _finishing(self, now: float) -> None:
        """All ranks have ended: what they left behind gets its own grace, then goes."""
        finish = self._finish
        assert finish is not None
        reap(self._sweeper.groups)
        left = self._sweeper.leftovers()
        if left and not finish["asked"]:
            if now - finish["begun"] < finish["grace"]:
                if not finish["said"] and now - finish["begun"] > 1.0:
                    finish["said"] = True
                    self._say({"is": "helpers", "names": [f"pid {one.pid} ({one.name})" for one in left], "seconds": finish["grace"]})
                return
            finish["asked"] = now
            finish["named"] = [f"pid {one.pid} ({one.name})" for one in left]
            self._sweeper.signal_all(signal.SIGTERM, left)
            return
        if left and now - finish["asked"] < 1.0:
            return
        stuck = self._sweeper.kill()
        self._sweeper.groups.clear()
        reap()
        for handle in list(self._streams):
            while handle in self._streams and self._read_stream(handle):
                continue
            if handle in self._streams:
                self._forget_stream(handle)
        held_back = self._wait_for_gpus()
        if self._port is not None:
            self._port.close()
            self._port = None
        self._finish = None
        self._gate = None
        self._say({
            "is": "finished", "stopped": finish["named"], "gpus_held": held_back,
            "stuck": [{"pid": one.pid, "name": one.name, "state": one.state} for one in stuck],
        })  # fmt: skip

    def _wait_for_gpus(self) -> list[str]:
        """Until NVML has our processes off the cards; 2 s at most. On an H200 it takes 0.15 s."""
        nvml = self._observer.nvml if self._observer else None
        if nvml is None:
            return []
        ours = {rank.pid for rank in self._ranks.values()}
        cards = {rank.gpu for rank in self._ranks.values() if rank.gpu}
        deadline = time.monotonic() + 2.0
        while True:
            busy = [card for card in cards if nvml.pids(card) & ours]
            if not busy or time.monotonic() > deadline:
                return busy
            time.sleep(0.02)


def _read_json(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(200_000)
    except OSError:
        return ""
