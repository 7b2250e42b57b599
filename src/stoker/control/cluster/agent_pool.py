"""The coordinator's connections to its agents: reads and writes without blocking, and detects lost agents and why."""

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

_CHUNK = (
    1 << 16
)  # bytes read at once: the capacity of a pipe. For larger buffers malloc maps and unmaps memory each time
GREETING_S = 20.0  # limit for the greeting, since a login may be slow; afterwards an agent pings every second
# With more agents than this, messages are gathered for 20 ms, because waking up costs more than handling a message.
_MANY_AGENTS = 8
_GATHER_S = 0.02
_MAX_PREAMBLE = 1 << 16  # characters kept of a login's output, of which a few lines are shown at most
QUIET_S = 1.5  # an agent pings every second; after this long without a message it may be lost


class AgentClient:
    """A connection to the agent of one host. A host that is lost and comes back gets a new connection."""

    def __init__(self, link: AgentLink) -> None:
        self.link = link
        self.host = link.host
        self.decoder = protocol.Decoder(expect_sentinel=True)
        self.outbox = bytearray(link.first_bytes)
        link.first_bytes = b""
        self.heard_at = time.monotonic()  # when it last sent a message
        self.gone: str = ""  # why it is lost, or "" if it is connected
        self._lock = threading.RLock()  # for the outbox: the ping thread writes too
        self.complaint = ""  # the last line of its stderr
        self.preamble = ""  # stderr before the greeting: a banner, or why the agent did not start
        self.answers: dict[str, protocol.Message] = {}  # the newest message of each awaited kind
        self.probed: dict[str, Any] = {}  # probe name -> answer, for a host that waits to join
        self.machine: Machine | None = None  # the newest report
        self.selves: list[list[int]] = []  # pid and start time of the guardian and of the agent

    @property
    def is_quiet(self) -> bool:
        """Return whether a connected agent has been silent for longer than usual."""
        return not self.gone and self.decoder.greeted and time.monotonic() - self.heard_at > QUIET_S

    def say(self, message: protocol.Message) -> None:
        """Send a message, unless the agent is lost."""
        with self._lock:
            if not self.gone:
                self.outbox += protocol.encode_message(message)
                self.flush()

    def flush(self) -> None:
        """Write as much of the outbox as fits into the pipe."""
        with self._lock:
            try:
                while self.outbox:
                    del self.outbox[: os.write(self.link.stdin, bytes(self.outbox[:65536]))]
            except BlockingIOError:
                return
            except OSError as problem:
                if self.decoder.greeted or self.link.local:
                    self.mark_lost(f"its pipe is closed ({problem.strerror})")
                else:
                    self.outbox.clear()  # ssh did not connect; its exit will give the reason

    def mark_lost(self, why: str) -> None:
        """Mark the agent as lost. Only the first reason counts."""
        with self._lock:
            if not self.gone:
                self.gone = why
                self.outbox.clear()

    def close_stdin(self) -> None:
        """Close our end of the agent's stdin. The lock keeps a ping from writing to a reused descriptor."""
        with self._lock:
            self.flush()
            self.mark_lost("closed")
            os.close(self.link.stdin)

    def disconnect(self) -> None:
        """Close the connection to a lost agent, so that no late message arrives. The agent ends after its silence limit."""
        self.close_stdin()
        if not self.link.local:  # the ssh client is our child; a local guardian must live to stop its ranks
            signal_child(self.link.pid, signal.SIGKILL)
            os.waitpid(self.link.pid, 0)
        os.close(self.link.stdout)
        os.close(self.link.stderr)


MessageHandler = Callable[[AgentClient, protocol.Message, bytes], object]
ComplaintHandler = Callable[[AgentClient, str], None]


class AgentPool:
    """The agents of a run.

    `all` are those of the current attempt, in rank order. `waiting` are those of hosts that came back and will join the
    next attempt.
    """

    def __init__(self, links: list[AgentLink], on_message: MessageHandler, on_complaint: ComplaintHandler) -> None:
        self.all: list[AgentClient] = []
        self.waiting: list[AgentClient] = []
        self._on_message = on_message
        self._on_complaint = on_complaint
        self._selector = selectors.DefaultSelector()
        self._next_select = 0.0
        for link in links:
            self.add(AgentClient(link), self.all)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        # A log file on a stalled NFS blocks the main loop. A thread sends the pings, so that agents don't count us as dead.
        self._closing = threading.Event()
        threading.Thread(target=self._ping, name="ping", daemon=True).start()

    def add(self, client: AgentClient, to: list[AgentClient]) -> None:
        """Listen to an agent and append it to one of the two lists."""
        self._selector.register(client.link.stdout, selectors.EVENT_READ, (self._read, client))
        self._selector.register(client.link.stderr, selectors.EVENT_READ, (self._read_stderr, client))
        to.append(client)

    def drop(self, client: AgentClient) -> None:
        """Close the connection to a lost agent and forget it."""
        for fd in (client.link.stdout, client.link.stderr, client.link.stdin):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        for clients in (self.all, self.waiting):
            if client in clients:
                clients.remove(client)
        client.disconnect()

    def join(self, ready: list[str], order: list[str]) -> list[str]:
        """Move the waiting agents of `ready` hosts to `all`, sorted by `order`. Return the hosts that joined."""
        joined = [client for client in self.waiting if not client.gone and client.host in ready]
        self.waiting = [client for client in self.waiting if client not in joined]
        self.all = sorted([*self.all, *joined], key=lambda client: order.index(client.host))
        return [client.host for client in joined]

    def _ping(self) -> None:
        while not self._closing.wait(protocol.PING_S):
            for client in [*self.all, *self.waiting]:
                client.say({"do": "ping"})

    def say(self, message: protocol.Message) -> None:
        """Send a message to all agents of the run."""
        for client in self.all:
            client.say(message)

    def pump(self, seconds: float) -> None:
        """Wait up to `seconds` for a message or a signal, deliver what arrived, and mark silent agents as lost."""
        for client in [*self.all, *self.waiting]:
            self._write(client)
        if len(self.all) > _MANY_AGENTS:
            time.sleep(max(0.0, min(self._next_select - time.monotonic(), _GATHER_S)))
        ready = self._selector.select(min(seconds, protocol.PING_S))
        self._next_select = time.monotonic() + _GATHER_S
        now = time.monotonic()  # taken before messages are handled, so that the handling does not count as silence
        for key, events in ready:
            if key.data is None:
                os.read(self._wake_read, 4096)
                continue
            handler, client = key.data
            handler(client)
            if events & selectors.EVENT_READ:
                client.heard_at = now
        for client in [*self.all, *self.waiting]:
            limit = protocol.SILENCE_S if client.decoder.greeted else GREETING_S
            if not client.gone and now - client.heard_at > limit:
                connected = client.decoder.greeted or client.link.local
                self._lose(client, f"silent for {limit:.0f} s" if connected else _why_not_connected(client))

    def _write(self, client: AgentClient) -> None:
        """Flush the outbox. Register the pipe for writing if it is full: the agent's files are larger than a pipe."""
        if client.outbox:
            client.flush()
        registered = client.link.stdin in self._selector.get_map()
        if client.outbox and not registered:
            self._selector.register(client.link.stdin, selectors.EVENT_WRITE, (self._write, client))
        elif registered and not client.outbox:
            self._selector.unregister(client.link.stdin)

    def _read(self, client: AgentClient) -> None:
        try:
            data = os.read(client.link.stdout, _CHUNK)
        except BlockingIOError:
            return
        if data:
            try:
                for message, payload in client.decoder.feed(data):
                    self._on_message(client, protocol.check_message(message), payload)
            except protocol.ProtocolError as problem:
                self._lose(client, f"it sent an invalid message: {problem}" if client.decoder.greeted else str(problem))
            return
        self._read_stderr(client)
        if not client.decoder.greeted and not client.link.local:
            # With a shared ssh connection another process writes stderr, perhaps after stdout is closed.
            deadline = time.monotonic() + 0.5
            while client.link.stderr in self._selector.get_map() and time.monotonic() < deadline:
                self._read_stderr(client)
                time.sleep(0.002)
            self._lose(client, _why_not_connected(client))
            return
        # Text that a login prints before the greeting does not explain the end of an agent that has greeted.
        greeting = b"" if client.decoder.greeted else client.decoder.greeting
        last_line = client.complaint or escape(greeting.decode("utf-8", "replace").strip().rpartition("\n")[2], 1000)
        self._lose(client, f"it ended: {last_line}" if last_line else _why_ended(client))

    def _read_stderr(self, client: AgentClient) -> None:
        if client.link.stderr not in self._selector.get_map():
            return
        try:
            data = os.read(client.link.stderr, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(client.link.stderr)
            return
        text = data.decode("utf-8", "replace")
        if not client.decoder.greeted and not client.link.local:
            client.preamble = (client.preamble + text)[-_MAX_PREAMBLE:]
            return
        for line in text.splitlines():
            if line.strip():
                client.complaint = escape(line.strip(), 1000)
                self._on_complaint(client, escape(line, 1000))

    def _lose(self, client: AgentClient, why: str) -> None:
        client.mark_lost(why)
        if client.link.stdout in self._selector.get_map():
            self._selector.unregister(client.link.stdout)

    def close(self) -> None:
        """Tell every agent to end, and wait up to 3 s. The guardian of a slower agent ends it when the pipe closes."""
        self._closing.set()
        clients = [*self.all, *self.waiting]
        for client in clients:
            client.say({"do": "close"})
        deadline = time.monotonic() + 3.0
        ending = {client.link.pid: client.link for client in clients}
        for client in clients:
            client.close_stdin()
        while ending and time.monotonic() < deadline:
            for pid in list(ending):
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    del ending[pid]
            if ending:
                time.sleep(0.001)
        for pid, link in ending.items():
            if not link.local:  # an ssh client whose host is not responding
                signal_child(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for client in clients:
            os.close(client.link.stdout)
            os.close(client.link.stderr)
        signal.set_wakeup_fd(-1)


def _why_not_connected(client: AgentClient) -> str:
    """Return why ssh ended or fell silent before the agent greeted."""
    from stoker.control.cluster.ssh import explain_failure

    output = client.preamble + client.decoder.greeting.decode("utf-8", "replace")
    return explain_failure(client.host, output, _exit_code(client))


def _why_ended(client: AgentClient) -> str:
    """Return why an agent ended that wrote no error message."""
    if client.link.local:
        return "it ended"
    code = _exit_code(client)
    if code in (None, 0, 255):  # 255: ssh lost the connection or was ended by a signal
        return "its agent ended, or the connection to it broke, without an error message"
    return f"its agent ended with exit code {code}"


def _exit_code(client: AgentClient) -> int | None:
    """Return the exit code of the local client process without reaping it, or None if it still runs after 0.5 s."""
    deadline = time.monotonic() + 0.5
    while (status := os.waitid(os.P_PID, client.link.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)  # its stdout is closed, so it is about to exit
    return status.si_status if status.si_code == os.CLD_EXITED else 128 + status.si_status


class UnusableHosts(Refusal):
    """Raised if hosts can't be used. `hosts` maps each of them to the reason."""

    def __init__(self, hosts: dict[str, str], total: int, code: int = EX_UNAVAILABLE) -> None:
        self.hosts = {name: why.replace(f"is gone: host {name}: ", "is gone: ", 1) for name, why in hosts.items()}
        (first, why), *other_hosts = self.hosts.items()
        if total == 1 and not first:
            line = f"the agent on this machine {why}"
        elif not other_hosts:
            line = f"host {first} can't be used: {short_reason(why)}"
        else:
            reasons = "; ".join(f"{name}: {short_reason(why)}" for name, why in self.hosts.items())
            line = f"{len(hosts)} of {total} hosts can't be used: {reasons}"
        super().__init__(line, code, cause="host.agent" if total == 1 else "launch.hosts")


def short_reason(why: str) -> str:
    """Return the reason without "is gone:" or "it ended:", for lines that already state it."""
    return why.removeprefix("is gone: ").removeprefix("it ended: ")
