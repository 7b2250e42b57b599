"""Talks to the agents of a run: sends orders, waits for the answers, and passes on reports about ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from stoker.contract import env_vars, protocol
from stoker.contract.errors import EX_OSERR, EX_UNAVAILABLE, Refusal
from stoker.contract.frozen import replace
from stoker.contract.text import escape
from stoker.control.cluster import transport
from stoker.control.cluster.agent_pool import AgentClient, AgentPool, UnusableHosts
from stoker.control.launch.signals import Interrupted, SignalQueue
from stoker.control.machine.model import Machine, machine_from_json
from stoker.control.machine.observe import find_packages_dir
from stoker.control.plan.request import make_port_in_use_refusal
from stoker.control.plan.run_dir import RunDir

TYPE_CHECKING = False
if TYPE_CHECKING:  # a run on one machine loads neither
    from stoker.control.cluster.hosts import Host, Hosts
    from stoker.control.cluster.probes import ProbeBatch

# Longest waits for the answers to orders.
ANSWER_S = 30.0
RESERVE_S = 10.0
SUSPEND_S = 2.0
# Kinds of messages that answer an order. Only the newest of each kind is kept.
_ANSWERS = frozenset(("host", "locked", "port", "refused", "suspended"))

OnReport = Callable[[str, protocol.Message, bytes], None]  # host, message, payload


class Agents:
    """The agents of a run, one for each host. While it waits for them, a stop signal raises Interrupted."""

    def __init__(
        self, link: transport.AgentLink | None, hosts: Hosts | None, signals: SignalQueue, log: Callable[..., None]
    ) -> None:
        """`link` is the connection to the local agent, which is already starting, or None for a run on several `hosts`."""
        self.hosts = hosts
        self.by_name: dict[str, Host] = {host.name: host for host in hosts.hosts} if hosts else {}
        self.on_report: OnReport | None = None  # gets the reports about the ranks of an attempt
        self._signals = signals
        self._log = log
        self._run_dir: RunDir | None = None
        self._probes: ProbeBatch | None = None
        links = [link] if link is not None else [self.connect(host) for host in self.by_name.values()]
        self.pool = AgentPool(links, self._receive, self._print_error)

    @property
    def clients(self) -> list[AgentClient]:
        """The agents that take part, in rank order."""
        return self.pool.all

    @property
    def machines(self) -> dict[str, Machine]:
        """The newest description of each host's machine."""
        return {client.host: client.machine for client in self.clients if client.machine is not None}

    @property
    def run_id(self) -> str:
        return self._run_dir.id if self._run_dir else ""

    @property
    def unshared_hosts(self) -> Hosts:
        """The hosts, with a separate ssh connection for each command."""
        from stoker.control.cluster.ssh import with_unshared_connections

        assert self.hosts is not None
        return with_unshared_connections(self.hosts)

    # ---- connecting ----

    def connect(self, host: Host, unshared: bool = False) -> transport.AgentLink:
        """Start the agent of a host. `unshared` opens a new ssh connection: a shared one may be as dead as the last agent."""
        assert self.hosts is not None
        try:
            return transport.connect(host, self.unshared_hosts if unshared else self.hosts)
        except FileNotFoundError as problem:
            line = f"several hosts need the program {problem.filename or 'ssh'}, which is not on the PATH"
            raise Refusal(line, EX_UNAVAILABLE) from problem

    def open_run(self, run_dir: RunDir) -> None:
        """Tell every agent which run it works for, and wait until each has described its machine."""
        self._run_dir = run_dir
        for client in self.clients:
            client.say(self.make_open_order(client.host))
        self.wait_for_all("host")

    def make_open_order(self, host: str, former: list[Any] | None = None) -> protocol.Message:
        """Return the first order to an agent. It first ends the processes in `former`, which earlier agents left."""
        assert self._run_dir is not None
        return {
            "do": "open",
            "run": self._run_dir.id,
            "dir": self._run_dir.dir,
            "hup_ignored": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
            "recorded": os.environ.get(env_vars.MACHINE),
            "packages": find_packages_dir(),
            "host": host,
            "former": former or [],
        }

    # ---- orders and their answers ----

    def refresh_machines(self) -> None:
        """Have every agent examine its machine again."""
        self.pool.say({"do": "look"})
        self.wait_for_all("host")

    def wait_for_all(self, kind: str, seconds: float = ANSWER_S) -> None:
        """Wait until every agent has answered with this kind of message. Raises a Refusal that names all that did not."""
        self._forget(kind)
        self._listen_until(lambda: all(_has_answered(client, kind) for client in self.clients), seconds)
        missing = [client for client in self.clients if kind not in client.answers]
        if not missing:
            return
        refused = {client.host: client.answers["refused"] for client in missing if "refused" in client.answers}
        if len(missing) == 1 and refused:
            ((host, answer),) = refused.items()
            raise Refusal(f"host {host}: {answer['line']}" if host else answer["line"], answer["code"])
        slow = f"did not respond within {seconds:.0f} s; its driver may hang, or it has no free memory"
        reasons = {client.host: f"is gone: {client.gone}" if client.gone else slow for client in missing}
        reasons |= {host: answer["line"] for host, answer in refused.items()}
        raise UnusableHosts(reasons, max(len(self.by_name), 1))

    def reserve(self, address: str, port: int, required: bool) -> tuple[str, int]:
        """Reserve a port for the store on the first host and return its address and number.

        Port 0 means any free port. If the port is in use, Refusal is raised if it is `required`, else a free one is used.
        """
        first = self.clients[0]
        for kind in ("port", "refused"):
            first.answers.pop(kind, None)
        first.say({"do": "reserve", "addr": address, "port": port, "soft": not required})
        self._listen_until(lambda: _has_answered(first, "port"), RESERVE_S)
        if "port" not in first.answers:
            if first.gone and self.by_name:
                raise UnusableHosts({first.host: f"is gone: {first.gone}"}, len(self.by_name))
            why = first.gone or first.answers.get("refused", {}).get("line", "no answer")
            raise Refusal(f"the agent did not reserve a port: {why}", EX_OSERR, cause="launch.port")
        answer = {"holder": "another program", **first.answers["port"]}
        if not answer["port"]:
            raise make_port_in_use_refusal(answer)
        if answer.get("wanted"):
            holder = escape(answer["holder"])
            self._log(f"stoker: MASTER_PORT={answer['wanted']} is in use by {holder}; using port {answer['port']}")
        return address, answer["port"]

    def probe_batch(self) -> ProbeBatch:
        """Return a batch of probes to the hosts that take part now."""
        from stoker.control.cluster.probes import ProbeBatch

        self._probes = ProbeBatch(list(self.clients), self.listen)
        return self._probes

    def probe(self, what: str, args: Mapping[str, dict[str, Any]], seconds: float) -> dict[str, Any]:
        """Probe several hosts at once. The answer of one that is gone or too slow is {"error": ...}."""
        probes = self.probe_batch()
        return probes.answers(probes.ask(what, args, seconds), seconds + 1.0)

    def suspend(self) -> None:
        """Suspend all ranks and this process for Ctrl-Z, and resume the ranks afterwards."""
        self._forget("suspended")
        self.pool.say({"do": "suspend"})
        deadline = time.monotonic() + SUSPEND_S
        while any("suspended" not in client.answers and not client.gone for client in self.clients):
            if time.monotonic() > deadline:
                break
            self.pool.pump(0.1)
        signal.raise_signal(signal.SIGSTOP)
        now = time.monotonic()
        for client in [*self.clients, *self.pool.waiting]:
            client.heard_at = now  # the agents were not silent while this process was suspended
        self.pool.say({"do": "resume"})

    # ---- waiting ----

    def pause(self, seconds: float) -> None:
        """Listen to the agents for this time."""
        self._listen_until(lambda: False, seconds)

    def listen(self, seconds: float) -> None:
        """Deliver the next messages, waiting for at most `seconds`. Ctrl-Z suspends, a stop signal raises Interrupted."""
        self.pool.pump(seconds)
        while signum := self._signals.take():
            if signum != signal.SIGTSTP:
                raise Interrupted(signum)
            self.suspend()

    def _listen_until(self, is_done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_done() and (remaining_s := deadline - time.monotonic()) > 0:
            self.listen(min(remaining_s, 0.5))

    def _forget(self, kind: str) -> None:
        for client in self.clients:
            client.answers.pop(kind, None)
            client.answers.pop("refused", None)

    # ---- messages from the agents ----

    def _receive(self, client: AgentClient, message: protocol.Message, payload: bytes) -> None:
        kind = message["is"]
        if kind == "ping":
            return
        is_waiting = client in self.pool.waiting
        if kind == "probe" and is_waiting:
            from stoker.control.cluster.probes import read_answer

            client.probed[message["what"]] = read_answer(message["what"], payload)
            return
        if kind == "probe" and self._probes is not None and self._probes.on_message(client.host, message, payload):
            return
        if kind == "host":
            self._read_machine(client, message)
        if kind == "refused":
            message["line"] = escape(message["line"])
        if kind in _ANSWERS:
            client.answers[kind] = message
        if not is_waiting and self.on_report is not None:
            self.on_report(client.host, message, payload)

    def _read_machine(self, client: AgentClient, message: protocol.Message) -> None:
        try:
            client.machine = machine_from_json(message.pop("machine"))
        except ValueError as problem:
            raise protocol.ProtocolError(f"its description of the machine is {problem}") from None
        message["held"] = {uuid: escape(holder) for uuid, holder in message["held"].items()}
        if "selves" in message:
            message["found"] = [escape(line) for line in message.get("found", [])]
            client.selves = message.pop("selves")
            self._limit_gpus(client.host, message.get("visible"))

    def _limit_gpus(self, host: str, visible: str | None) -> None:
        """Use only the GPUs that a scheduler gives the job on a host, unless the hosts file names some."""
        if not visible or self.hosts is None or self.by_name[host].gpus is not None:
            return
        if transport.transport_for(self.by_name[host], self.hosts).shows_share:
            self.by_name[host] = replace(self.by_name[host], gpus=visible)

    def _print_error(self, client: AgentClient, line: str) -> None:
        if client not in self.pool.waiting:  # a lost host is tried again every few seconds and would repeat the line
            self._log(f"{client.host + ': ' if client.host else ''}{line}")


def _has_answered(client: AgentClient, kind: str) -> bool:
    return kind in client.answers or bool(client.gone) or "refused" in client.answers
