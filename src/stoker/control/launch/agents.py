"""A run's agents: meets them, asks them, and delivers what they say of their ranks."""

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
from stoker.control.launch.signals import Interrupted
from stoker.control.machine.model import Machine, machine_from_json
from stoker.control.machine.observe import packages_dir
from stoker.control.plan.request import taken, wanted_port
from stoker.control.plan.run_dir import RunDir

TYPE_CHECKING = False
if TYPE_CHECKING:  # a run on one machine loads neither
    from stoker.control.cluster.hosts import Host, Hosts
    from stoker.control.cluster.probes import ProbeBatch
    from stoker.control.launch.live import LiveRun

MEET_S = 30.0
_AWAITED = frozenset(("host", "locked", "port", "refused", "suspended"))  # answers to an order: the newest is kept


class Agents:
    """`link`: the local agent, already on its way; None where `hosts` are reached."""

    def __init__(self, run: LiveRun, link: transport.AgentLink | None, hosts: Hosts | None) -> None:
        self._run = run
        self._say = run.say
        self._place: RunDir | None = None
        self._asking: ProbeBatch | None = None
        self.hosts = hosts
        self.by_name: dict[str, Host] = {host.name: host for host in hosts.hosts} if hosts else {}
        links = [link] if link is not None else [self.reach(host) for host in self.by_name.values()]
        self.members = AgentPool(links, self._hear, self._complain)

    def reach(self, host: Host, again: bool = False) -> transport.AgentLink:
        """`again`: by a connection of its own, soon given up: a shared one may be as dead as the lost agent."""
        assert self.hosts is not None
        try:
            return transport.connect(host, self.afresh if again else self.hosts)
        except FileNotFoundError as problem:
            line = f"several hosts need the program {problem.filename or 'ssh'}, and there is none on the PATH"
            raise Refusal(line, EX_UNAVAILABLE) from problem

    @property
    def afresh(self) -> Hosts:
        """The hosts, by connections that nothing shares."""
        from stoker.control.cluster.ssh import with_unshared_connections

        assert self.hosts is not None
        return with_unshared_connections(self.hosts)

    @property
    def run_id(self) -> str:
        return self._place.id if self._place else ""

    def open_order(self, host: str, former: list[Any] | None = None) -> protocol.Message:
        """`former`: who ran there for this run before, and must be gone first."""
        assert self._place is not None
        return {
            "do": "open",
            "run": self._place.id,
            "dir": self._place.dir,
            "hup_ignored": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
            "recorded": os.environ.get(env_vars.MACHINE),
            "packages": packages_dir(),
            "host": host,
            "former": former or [],
        }

    def meet(self, place: RunDir) -> None:
        self._place = place
        for member in self.members.all:
            member.say(self.open_order(member.host))
        self.await_all("host")

    def _take_share(self, host: str, visible: str | None) -> None:
        """Where a scheduler tells which of a node's GPUs are the job's: those, and no others. A role has its share of them."""
        if not visible or self.hosts is None or self.by_name[host].gpus is not None:
            return
        if transport.transport_for(self.by_name[host], self.hosts).shows_share:
            self.by_name[host] = replace(self.by_name[host], gpus=visible)

    def _note_machine(self, member: AgentClient, message: protocol.Message) -> None:
        try:
            member.machine = machine_from_json(message.pop("machine"))
        except ValueError as problem:
            raise protocol.ProtocolError(f"what it says of its machine is {problem}") from None
        message["held"] = {uuid: escape(holder) for uuid, holder in message["held"].items()}
        if "selves" in message:
            message["found"] = [escape(line) for line in message.get("found", [])]
            member.selves = message.pop("selves")
            self._take_share(member.host, message.get("visible"))

    def _forget(self, kind: str) -> None:
        for member in self.members.all:
            member.answers.pop(kind, None)
            member.answers.pop("refused", None)

    def await_all(self, kind: str, seconds: float = MEET_S) -> None:
        """Until every agent has answered in this kind; those that can't are named together."""
        self._forget(kind)
        self._until(lambda: all(_answered(member, kind) for member in self.members.all), seconds)
        waiting = [member for member in self.members.all if kind not in member.answers]
        if waiting:
            raise self._unusable(waiting, seconds)

    def _until(self, done: Callable[[], bool], seconds: float) -> None:
        """Or until the time is over."""
        deadline = time.monotonic() + seconds
        while not done() and (left := deadline - time.monotonic()) > 0:
            self.listen(min(left, 0.5))

    def _unusable(self, waiting: list[AgentClient], seconds: float) -> Refusal:
        refused = [member for member in waiting if "refused" in member.answers]
        if len(waiting) == 1 and refused:
            told, host = refused[0].answers["refused"], refused[0].host
            return Refusal(f"host {host}: {told['line']}" if host else told["line"], told["code"])
        slow = f"does not answer within {seconds:.0f} s: a driver that hangs, or a machine without free memory"
        why = {one.host: f"is gone: {one.gone}" if one.gone else slow for one in waiting}
        why |= {one.host: one.answers["refused"]["line"] for one in waiting if one in refused}
        return UnusableHosts(why, max(len(self.by_name), 1))

    def probe(self, what: str, args: Mapping[str, dict[str, Any]], seconds: float) -> dict[str, Any]:
        """Asks several hosts at once. One that does not answer in time, or is gone, has {"error": ...} as its answer."""
        asking = self.asking()
        return asking.answers(asking.ask(what, args, seconds), seconds + 1.0)

    def asking(self) -> ProbeBatch:
        """For questions to those that take part now. Signals are heeded while it waits."""
        from stoker.control.cluster.probes import ProbeBatch

        self._asking = ProbeBatch(list(self.members.all), self.listen)
        return self._asking

    @property
    def machines(self) -> dict[str, Machine]:
        return {member.host: member.machine for member in self.members.all if member.machine is not None}

    def look(self) -> None:
        self.members.say({"do": "look"})
        self.await_all("host")

    def pause(self, seconds: float) -> None:
        self._until(lambda: False, seconds)

    def listen(self, seconds: float) -> None:
        """Until the next word of anybody, for at most so long. Signals are heeded."""
        self.members.pump(seconds)
        self._heed_signals()

    def _heed_signals(self) -> None:
        """Before the start: a stop signal ends the launch, Ctrl-Z suspends it."""
        while signum := self._run.signals.take():
            if signum != signal.SIGTSTP:
                raise Interrupted(signum)
            self.suspend()

    def reserve(self, address: str, port: int | None = None) -> tuple[str, int]:
        """The store's, on the first host. `port`: that one and no other; None: what the options say."""
        first = self.members.all[0]
        wanted, asked = wanted_port(self._run.request) if port is None else (port, bool(port))
        for kind in ("port", "refused"):
            first.answers.pop(kind, None)
        first.say({"do": "reserve", "addr": address, "port": wanted, "soft": not asked})
        self._until(lambda: _answered(first, "port"), 10.0)
        if "port" not in first.answers:
            if first.gone and self.by_name:
                raise UnusableHosts({first.host: f"is gone: {first.gone}"}, len(self.by_name))
            why = first.gone or first.answers.get("refused", {}).get("line", "no answer")
            raise Refusal(f"the agent did not reserve a port: {why}", EX_OSERR, cause="launch.port")
        answer = {"holder": "another program", **first.answers["port"]}
        if not answer["port"]:
            raise taken(answer)
        if answer.get("wanted"):
            holder = escape(answer["holder"])
            self._say(f"stoker: MASTER_PORT={answer['wanted']} is in use by {holder}; using port {answer['port']}")
        return address, answer["port"]

    def suspend(self) -> None:
        """Ctrl-Z: the ranks stop too, and nobody takes the silence for death."""
        self._forget("suspended")
        self.members.say({"do": "suspend"})
        deadline = time.monotonic() + 2.0
        while any("suspended" not in one.answers and not one.gone for one in self.members.all):
            if time.monotonic() > deadline:
                break
            self.members.pump(0.1)
        signal.raise_signal(signal.SIGSTOP)
        now = time.monotonic()
        for member in [*self.members.all, *self.members.waiting]:
            member.heard = now
        self.members.say({"do": "resume"})

    def _complain(self, member: AgentClient, line: str) -> None:
        if member not in self.members.waiting:  # a host that is tried again every few seconds has said it once
            self._say(f"{member.host + ': ' if member.host else ''}{line}")

    def _hear(self, member: AgentClient, message: protocol.Message, payload: bytes) -> None:
        kind = message["is"]
        if kind == "ping":
            return
        waiting = member in self.members.waiting
        if kind == "probe" and waiting:
            from stoker.control.cluster.probes import read_answer

            member.probed[message["what"]] = read_answer(message["what"], payload)
            return
        if kind == "probe" and self._asking is not None and self._asking.on_message(member.host, message, payload):
            return
        if kind == "host":
            self._note_machine(member, message)
        if kind == "refused":
            message["line"] = escape(message["line"])
        if kind in _AWAITED:
            member.answers[kind] = message
        if not waiting:
            self._run.hear(member.host, message, payload)


def _answered(member: AgentClient, kind: str) -> bool:
    return kind in member.answers or bool(member.gone) or "refused" in member.answers
