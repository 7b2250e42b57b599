"""The coordinator's side of its agents: reads and writes without blocking, knows when one is gone, and says why."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from stoker.contract import protocol
from stoker.contract.errors import EX_UNAVAILABLE, Refusal
from stoker.contract.process import signal_child
from stoker.contract.text import escape
from stoker.control.cluster.transport import AgentLink
from stoker.control.machine.model import Machine

_CHUNK = 1 << 16  # what a pipe holds: asked for more, Python maps and unmaps a megabyte for every word
GREETING_S = 20.0  # a login may take its time; what has greeted once speaks every second
_CROWD = 8  # with more agents than this their words are gathered for a moment: a wake costs more than a word
_GATHER_S = 0.02
_PREAMBLE = 1 << 16  # characters kept of what a login prints: only a few lines are ever shown
QUIET_S = 1.5  # somebody who speaks every second and has not for this long may be lost


class AgentClient:
    """One life of one host's agent."""

    def __init__(self, link: AgentLink) -> None:
        self.link = link
        self.host = link.host
        self.decoder = protocol.Decoder(expect_sentinel=True)
        self.outbox = bytearray(link.first_bytes)
        link.first_bytes = b""
        self.heard = time.monotonic()
        self.gone: str = ""  # why we lost it
        self._lock = threading.RLock()  # the pinger writes too
        self.complaint = ""  # the last thing it wrote to stderr
        self.preamble = ""  # its stderr before the agent's first word: a banner, or why there is no agent
        self.answers: dict[str, protocol.Message] = {}  # the newest of each kind that is waited for
        self.probed: dict[str, Any] = {}  # of one that waits to join: what it answered, by the probe's name
        self.machine: Machine | None = None  # as it was last seen
        self.selves: list[list[int]] = []  # pid and start time of its guardian and agent, there

    @property
    def quiet(self) -> bool:
        """It lives as far as we know, and has not said a word for longer than usual."""
        return not self.gone and self.decoder.greeted and time.monotonic() - self.heard > QUIET_S

    def say(self, message: protocol.Message) -> None:
        with self._lock:
            if not self.gone:
                self.outbox += protocol.encode_message(message)
                self.flush()

    def flush(self) -> None:
        with self._lock:
            try:
                while self.outbox:
                    del self.outbox[: os.write(self.link.orders, bytes(self.outbox[:65536]))]
            except BlockingIOError:
                return
            except OSError as problem:
                if self.decoder.greeted or self.link.local:
                    self.lose(f"its pipe is closed ({problem.strerror})")
                else:
                    self.outbox.clear()  # ssh did not get there: its end says why

    def lose(self, why: str) -> None:
        with self._lock:
            if not self.gone:
                self.gone = why
                self.outbox.clear()

    def retire(self) -> None:
        """The last word is said. Under the lock: a ping must not go to a descriptor that is somebody else's by then."""
        with self._lock:
            self.flush()
            self.lose("closed")
            os.close(self.link.orders)

    def cut_off(self) -> None:
        """Closes a lost one's connection: no old words come later. Its agent ends by its own silence rule."""
        self.retire()
        if not self.link.local:  # our own child, the ssh client; a guardian on this machine is left to sweep
            signal_child(self.link.pid, signal.SIGKILL)
            os.waitpid(self.link.pid, 0)
        os.close(self.link.answers)
        os.close(self.link.errors)


Hear = Callable[[AgentClient, protocol.Message, bytes], object]
Complain = Callable[[AgentClient, str], None]


class AgentPool:
    """All agents of a run, in rank order; and those of hosts that are back and wait for the next attempt."""

    def __init__(self, links: list[AgentLink], hear: Hear, complain: Complain) -> None:
        self.all: list[AgentClient] = []
        self.waiting: list[AgentClient] = []
        self._hear = hear
        self._complain = complain
        self._selector = selectors.DefaultSelector()
        self._next_look = 0.0
        for link in links:
            self.add(AgentClient(link), self.all)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        # In a thread: a log file on a stalled NFS holds the main loop up, and the agents must not take that for death.
        self._closing = threading.Event()
        threading.Thread(target=self._ping, name="ping", daemon=True).start()

    def add(self, member: AgentClient, to: list[AgentClient]) -> None:
        self._selector.register(member.link.answers, selectors.EVENT_READ, (self._read, member))
        self._selector.register(member.link.errors, selectors.EVENT_READ, (self._read_errors, member))
        to.append(member)

    def drop(self, member: AgentClient) -> None:
        for handle in (member.link.answers, member.link.errors, member.link.orders):
            if handle in self._selector.get_map():
                self._selector.unregister(handle)
        for group in (self.all, self.waiting):
            if member in group:
                group.remove(member)
        member.cut_off()

    def join(self, ready: list[str], order: list[str]) -> list[str]:
        """Those waiting that are ready take part from now on. `order`: of the hosts. Returns who joined."""
        joined = [member for member in self.waiting if not member.gone and member.host in ready]
        self.waiting = [member for member in self.waiting if member not in joined]
        self.all = sorted([*self.all, *joined], key=lambda member: order.index(member.host))
        return [member.host for member in joined]

    def _ping(self) -> None:
        while not self._closing.wait(protocol.PING_S):
            for member in [*self.all, *self.waiting]:
                member.say({"do": "ping"})

    def say(self, message: protocol.Message) -> None:
        for member in self.all:
            member.say(message)

    def pump(self, seconds: float) -> None:
        """Waits for the next word, from agents or a signal, for at most so long, and delivers it."""
        for member in [*self.all, *self.waiting]:
            self._write(member)
        if len(self.all) > _CROWD:
            time.sleep(max(0.0, min(self._next_look - time.monotonic(), _GATHER_S)))
        ready = self._selector.select(min(seconds, protocol.PING_S))
        self._next_look = time.monotonic() + _GATHER_S
        now = time.monotonic()  # before the words are handled: time spent on those is not the agents' silence
        for key, events in ready:
            if key.data is None:
                os.read(self._wake_read, 4096)
                continue
            act, member = key.data
            act(member)
            if events & selectors.EVENT_READ:
                member.heard = now
        for member in [*self.all, *self.waiting]:
            patience = protocol.SILENCE_S if member.decoder.greeted else GREETING_S
            if not member.gone and now - member.heard > patience:
                met = member.decoder.greeted or member.link.local
                self._lose(member, f"silent for {patience:.0f} s" if met else _why_unmet(member))

    def _write(self, member: AgentClient) -> None:
        """What did not fit into its pipe goes on as soon as there is room: a remote agent's files are several pipes full."""
        if member.outbox:
            member.flush()
        waits = member.link.orders in self._selector.get_map()
        if member.outbox and not waits:
            self._selector.register(member.link.orders, selectors.EVENT_WRITE, (self._write, member))
        elif waits and not member.outbox:
            self._selector.unregister(member.link.orders)

    def _read(self, member: AgentClient) -> None:
        try:
            data = os.read(member.link.answers, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._read_errors(member)
            if not member.decoder.greeted and not member.link.local:
                # A shared connection's process writes its stderr by itself, perhaps after its stdout is closed.
                deadline = time.monotonic() + 0.5
                while member.link.errors in self._selector.get_map() and time.monotonic() < deadline:
                    self._read_errors(member)
                    time.sleep(0.002)
                self._lose(member, _why_unmet(member))
                return
            # A login's chatter is no agent's last word.
            before = b"" if member.decoder.greeted else member.decoder.greeting
            last = member.complaint or escape(before.decode("utf-8", "replace").strip().rpartition("\n")[2], 1000)
            self._lose(member, f"it ended: {last}" if last else _how_ended(member))
            return
        try:
            for message, payload in member.decoder.feed(data):
                self._hear(member, protocol.check_message(message), payload)
        except protocol.ProtocolError as problem:
            self._lose(member, f"it is broken: {problem}" if member.decoder.greeted else str(problem))

    def _read_errors(self, member: AgentClient) -> None:
        if member.link.errors not in self._selector.get_map():
            return
        try:
            data = os.read(member.link.errors, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(member.link.errors)
            return
        if not member.decoder.greeted and not member.link.local:
            member.preamble = (member.preamble + data.decode("utf-8", "replace"))[-_PREAMBLE:]
            return
        for line in data.decode("utf-8", "replace").splitlines():
            if line.strip():
                member.complaint = escape(line.strip(), 1000)
                self._complain(member, escape(line, 1000))

    def _lose(self, member: AgentClient, why: str) -> None:
        member.lose(why)
        if member.link.answers in self._selector.get_map():
            self._selector.unregister(member.link.answers)

    def close(self) -> None:
        """Tells every agent to end and waits. One that does not is left to its guardian, which sees the pipe close."""
        self._closing.set()
        everybody = [*self.all, *self.waiting]
        for member in everybody:
            member.say({"do": "close"})
        deadline = time.monotonic() + 3.0
        ending = {member.link.pid: member.link for member in everybody}
        for member in everybody:
            member.retire()
        while ending and time.monotonic() < deadline:
            for pid in list(ending):
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    del ending[pid]
            if ending:
                time.sleep(0.001)
        for pid, link in ending.items():
            if not link.local:  # an ssh client whose other side does not answer any more
                signal_child(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for member in everybody:
            os.close(member.link.answers)
            os.close(member.link.errors)
        signal.set_wakeup_fd(-1)


def _why_unmet(member: AgentClient) -> str:
    """ssh ended, or went silent, before any agent spoke."""
    from stoker.control.cluster.ssh import explain

    said = member.preamble + member.decoder.greeting.decode("utf-8", "replace")
    return explain(member.host, said, _exit_code(member))


def _how_ended(member: AgentClient) -> str:
    """Without a word. ssh's 255 is a broken connection, and a signal there."""
    if member.link.local:
        return "it ended"
    code = _exit_code(member)
    if code in (None, 0, 255):
        return "its agent ended, or the connection to it broke, without an error message"
    return f"its agent ended with exit code {code}"


def _exit_code(member: AgentClient) -> int | None:
    """Of the client that leads there. It stays for whoever waits for it."""
    deadline = time.monotonic() + 0.5
    while (ended := os.waitid(os.P_PID, member.link.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)  # its stdout is closed: it is on its way out
    return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status


class UnusableHosts(Refusal):
    """Hosts that do not answer, all of them: name -> why."""

    def __init__(self, hosts: dict[str, str], total: int, code: int = EX_UNAVAILABLE) -> None:
        self.hosts = {name: why.replace(f"is gone: host {name}: ", "is gone: ", 1) for name, why in hosts.items()}
        (first, why), *more = self.hosts.items()
        if total == 1 and not first:
            line = f"the agent on this machine {why}"
        elif not more:
            line = f"host {first} can't be used: {short(why)}"
        else:
            said = "; ".join(f"{name}: {short(told)}" for name, told in self.hosts.items())
            line = f"{len(hosts)} of {total} hosts can't be used: {said}"
        super().__init__(line, code, cause="host.agent" if total == 1 else "launch.hosts")


def short(why: str) -> str:
    """Why a host can't be used, after its name: ssh's own last words."""
    return why.removeprefix("is gone: ").removeprefix("it ended: ")
