"""Before the start: meets the agents, looks at their machines, makes the plan, takes the GPUs' locks and the store's
port.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from stoker.contract import names, protocol
from stoker.contract.names import DETACH_SIGNAL, EX_OSERR, EX_TEMPFAIL, EX_UNAVAILABLE, Refusal
from stoker.contract.quantities import span
from stoker.contract.shape import replace
from stoker.contract.untrusted import printable
from stoker.control.cluster import transport
from stoker.control.launch.gpus import NotFree
from stoker.control.launch.members import Member, Members
from stoker.control.launch.output import wants_split
from stoker.control.launch.plan import RunPlan, make_plan
from stoker.control.launch.request import Request
from stoker.control.launch.runplace import RunPlace
from stoker.control.launch.storeport import taken, wanted_port
from stoker.control.launch.unusable import Unusable
from stoker.control.machine.model import Machine, machine_from_json
from stoker.control.machine.observe import packages_dir
from stoker.control.machine.origin import gpu_lender, run_we_are_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.hosts import Host, Hosts

MEET_S = 30.0
_MOST_PROBES = 64  # different ones that a host which waits to join is asked
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # the signals that stop a run
Listener = Callable[[str, protocol.Message, bytes], None]


class Interrupted(Exception):
    """A signal came before anything was started."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Muster:
    """The agents of a run and what they have answered. `link`: the local agent, already on its way; None where `hosts`
    are reached.
    """

    def __init__(
        self,
        request: Request,
        link: transport.Link | None,
        signals: list[int],
        say: Callable[[str], None],
        hosts: Hosts | None = None,
    ) -> None:
        self.request = request
        self.options = request.options
        self._signals = signals
        self._say = say
        self.stays_after_hangup = request.options.on_hangup == "detach"
        self.listener: Listener | None = None  # who hears of the ranks
        self._place: RunPlace | None = None
        self.left_out: dict[str, str] = {}  # GPUs that failed in this run: uuid -> how
        self.hosts = hosts
        self.by_name: dict[str, Host] = {host.name: host for host in hosts.hosts} if hosts else {}
        self._asked = 0
        self._said: set[str] = set()
        self._probed: dict[str, dict[str, Any]] = {}  # answers of probes, by question and host
        links = [link] if link is not None else [self.reach(host) for host in self.by_name.values()]
        self.members = Members([Member(one) for one in links], self._hear, self._complain)

    def reach(self, host: Host, again: bool = False) -> transport.Link:
        """`again`: by a connection of its own, and soon given up: a shared one may be as dead as the agent that was
        lost.
        """
        assert self.hosts is not None
        try:
            return transport.reach(host, self.afresh if again else self.hosts)
        except FileNotFoundError as problem:
            raise Refusal(
                f"several hosts need the program {problem.filename or 'ssh'}, and there is none on the PATH",
                EX_UNAVAILABLE,
            ) from problem

    @property
    def afresh(self) -> Hosts:
        """The hosts, by connections that nothing shares."""
        assert self.hosts is not None
        return replace(
            self.hosts,
            ssh_options=("-oControlMaster=no", "-oControlPath=none", "-oConnectTimeout=4", *self.hosts.ssh_options),
        )

    @property
    def _run_id(self) -> str:
        return self._place.id if self._place else ""

    # ---- meeting ----

    def open_order(self, host: str, former: list[Any] | None = None) -> protocol.Message:
        """`former`: who ran there for this run before, and must be gone first."""
        assert self._place is not None
        return {
            "do": "open",
            "run": self._place.id,
            "dir": self._place.dir,
            "hup_ignored": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
            "recorded": os.environ.get(names.MACHINE),
            "packages": packages_dir(),
            "host": host,
            "former": former or [],
        }

    def meet(self, place: RunPlace) -> None:
        self._place = place
        for member in self.members.all:
            member.say(self.open_order(member.host))
        self._await("host", MEET_S)

    def _take_share(self, host: str, visible: str | None) -> None:
        """In a Slurm job each node's step is told which of the node's GPUs are the job's: those, and no others."""
        if visible and self.hosts is not None and host in self.hosts.srun and not self.by_name[host].here:
            self.by_name[host] = replace(self.by_name[host], gpus=visible)

    def _meet(self, member: Member, message: protocol.Message) -> None:
        try:
            member.machine = machine_from_json(message["machine"])
        except ValueError as problem:
            raise protocol.ProtocolError(f"what it says of its machine is {problem}") from None
        message["held"] = {uuid: printable(who, 300) for uuid, who in message["held"].items()}
        if "selves" in message:
            message["found"] = [printable(line, 200) for line in message.get("found", [])]
            member.selves = [pair for pair in message["selves"] if len(pair) == 2]
            self._take_share(member.host, message.get("visible"))

    def answered(self, kind: str) -> bool:
        """Has every agent that is still there said this since it was last forgotten?"""
        return all(kind in member.answers for member in self.members.all if not member.gone)

    def forget(self, kind: str) -> None:
        for member in self.members.all:
            member.answers.pop(kind, None)
            member.answers.pop("refused", None)

    def _await(self, kind: str, seconds: float) -> None:
        """Until every agent has answered in this kind; those that can't are named together."""
        self.forget(kind)
        deadline = time.monotonic() + seconds
        while True:
            waiting = [member for member in self.members.all if kind not in member.answers]
            late = time.monotonic() > deadline
            if all(member.gone or "refused" in member.answers or late for member in waiting):
                break
            self.members.pump(0.5)
            self._heed_signals()
        if waiting:
            raise self._unusable(waiting, seconds)

    def _unusable(self, waiting: list[Member], seconds: float) -> Refusal:
        refused = [member for member in waiting if "refused" in member.answers]
        if len(waiting) == 1 and refused:
            told = refused[0].answers["refused"]
            return Refusal(
                told["line"] if not refused[0].host else f"host {refused[0].host}: {told['line']}",
                _exit_code(told["code"]),
            )
        slow = f"does not answer within {seconds:.0f} s: a sick driver, or a machine without memory"
        why = {
            one.host: one.answers["refused"]["line"] if one in refused else f"is gone: {one.gone}" if one.gone else slow
            for one in waiting
        }
        return Unusable(why, max(len(self.by_name), 1))

    def probe(self, what: str, args: Mapping[str, dict[str, Any]], seconds: float) -> dict[str, Any]:
        """Asks several hosts at once. One that does not answer in time, or is gone, has {"error": ...} as its answer."""
        self._asked += 1
        ask = f"muster-{self._asked}"
        found = self._probed[ask] = {}
        asked = [member for member in self.members.all if member.host in args]
        for member in asked:
            member.say({"do": "probe", "ask": ask, "what": what, "args": args[member.host], "seconds": seconds})
        deadline = time.monotonic() + seconds + 1.0
        while any(member.host not in found and not member.gone for member in asked) and time.monotonic() < deadline:
            self.members.pump(0.5)
            self._heed_signals()
        del self._probed[ask]
        return {
            member.host: found.get(member.host, {"error": member.gone or f"no answer within {seconds:.0f} s"})
            for member in asked
        }

    # ---- planning ----

    @property
    def machines(self) -> dict[str, Machine]:
        return {member.host: member.machine for member in self.members.all if member.machine is not None}

    def plan(self, argv: list[str]) -> RunPlan:
        """Looks, chooses, locks. With --wait it looks again until there is room; a lost race for a lock is a look
        again, too.
        """
        deadline = time.monotonic() + self.options.wait
        said = ""
        races = 0
        while True:
            held = {member.host: self._held(member) for member in self.members.all}
            try:
                plan = make_plan(
                    self.request,
                    argv,
                    os.environ,
                    self._sound_machines(),
                    held,
                    wants_split(self.options),
                    self.by_name,
                )
                lost = {} if self.options.dry_run or self.options.share_gpus else self._lock(plan)
                if not lost:
                    return plan
                races += 1
                if races > 20:
                    who = "; ".join(f"GPU {uuid} by {holder}" for uuid, holder in lost.items())
                    raise NotFree(f"the GPUs are in use: {who}", EX_UNAVAILABLE, cause="gpu.busy")
            except NotFree as busy:
                if not self.options.wait:
                    raise
                if time.monotonic() > deadline:
                    raise Refusal(
                        f"waited {span(self.options.wait)}: {busy.line}", EX_TEMPFAIL, cause="gpu.busy"
                    ) from busy
                if busy.line != said:
                    said = busy.line
                    self._say(f"stoker: waiting for up to {span(deadline - time.monotonic())}: {busy.line}")
                self.pause(1.0)
            self.look()

    def _lent(self, member: Member) -> list[str]:
        """GPUs held by ourselves, by the run whose rank we are started in, or by the chain we are a stage of: ours to
        use, and not to lock again.
        """
        ours = tuple(f"run {run} (agent pid " for run in (self._run_id, run_we_are_in(os.environ)) if run)
        lender = gpu_lender(os.environ)
        lent = f" (agent pid {lender})"
        return [
            uuid
            for uuid, who in member.answers["host"]["held"].items()
            if (ours and who.startswith(ours)) or (lender and who.endswith(lent))
        ]

    def _held(self, member: Member) -> dict[str, str]:
        lent = self._lent(member)
        return {uuid: who for uuid, who in member.answers["host"]["held"].items() if uuid not in lent}

    def _sound_machines(self) -> dict[str, Machine]:
        """With --exclude-bad, GPUs that fail their proof do not answer. On this machine only: a probe does not travel
        yet.
        """
        machines = self.machines
        if self.options.exclude_bad and "" in machines:
            from stoker.control.launch.preflight import without_bad

            machines[""] = without_bad(machines[""])
        if self.left_out:
            for host, machine in machines.items():
                gpus = tuple(
                    replace(gpu, error=self.left_out[gpu.uuid]) if gpu.uuid in self.left_out else gpu
                    for gpu in machine.gpus
                )
                machines[host] = replace(machine, gpus=gpus)
        return machines

    def plan_again(self, argv: list[str]) -> RunPlan:
        """With a fresh look: a card was left out, or its holder may be gone."""
        self.look()
        return self.plan(argv)

    def look(self) -> None:
        self.members.say({"do": "look"})
        self._await("host", MEET_S)

    def _lock(self, plan: RunPlan) -> dict[str, str]:
        if not any(place.gpu for place in plan.places):
            return {}
        for member in self.members.all:
            mine = {place.gpu.uuid for place in plan.places if place.gpu and place.host == member.host}
            member.say({"do": "lock", "gpus": sorted(mine - set(self._lent(member)))})
        self._await("locked", MEET_S)
        for member in self.members.all:
            for notice in member.answers["locked"]["notices"]:
                self._say_once(f"stoker: {f'host {member.host}: ' if member.host else ''}{printable(notice, 1000)}")
        return {
            uuid: printable(who, 300)
            for member in self.members.all
            for uuid, who in member.answers["locked"]["refused"].items()
        }

    def pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.members.pump(left)
            self._heed_signals()

    def listen(self, seconds: float) -> None:
        """Until the next word of anybody, for at most so long."""
        self.members.pump(seconds)
        self._heed_signals()

    def _heed_signals(self) -> None:
        """Before the start: a stop signal ends the launch, Ctrl-Z suspends it."""
        while self._signals:
            signum = self._signals.pop(0)
            if signum == DETACH_SIGNAL:
                self.stay_after_hangup()
            elif signum == signal.SIGHUP and self.stays_after_hangup:
                self._say("stoker: the terminal is closed; the run continues in the background")
            elif signum != signal.SIGTSTP:
                raise Interrupted(signum)
            else:
                self.suspend()

    def stay_after_hangup(self) -> None:
        """`stoker detach`: from now on the end of the terminal is not the end of the run."""
        self.stays_after_hangup = True
        self._say("stoker: detached: the run continues when this terminal closes")

    def reserve(self, address: str, port: int | None = None) -> tuple[str, int]:
        """The store's, on the first host. `port`: that one and no other; None: what the options say."""
        first = self.members.all[0]
        wanted, asked = wanted_port(self.request) if port is None else (port, bool(port))
        for kind in ("port", "refused"):
            first.answers.pop(kind, None)
        first.say({"do": "reserve", "addr": address, "port": wanted, "soft": not asked})
        deadline = time.monotonic() + 10.0
        while "port" not in first.answers:
            if first.gone and self.by_name:
                raise Unusable({first.host: f"is gone: {first.gone}"}, len(self.by_name))
            if first.gone or "refused" in first.answers or time.monotonic() > deadline:
                why = first.gone or first.answers.get("refused", {}).get("line", "no answer")
                raise Refusal(f"the agent did not reserve a port: {why}", EX_OSERR, cause="launch.port")
            self.members.pump(0.5)
            self._heed_signals()
        answer = {"holder": "another program", **first.answers["port"]}
        if not 0 < answer["port"] < 1 << 16:
            raise taken({"wanted": 0, **answer})
        if answer.get("wanted"):
            self._say(
                f"stoker: MASTER_PORT={answer['wanted']} is in use by {printable(answer['holder'], 200)}; using port"
                f" {answer['port']}"
            )
        return address, answer["port"]

    def suspend(self) -> None:
        """Ctrl-Z: the ranks stop too, and nobody takes the silence for death."""
        self.forget("suspended")
        self.members.say({"do": "suspend"})
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not self.answered("suspended"):
            self.members.pump(0.1)
        os.kill(os.getpid(), signal.SIGSTOP)
        now = time.monotonic()
        for member in [*self.members.all, *self.members.waiting]:
            member.heard = now
        self.members.say({"do": "resume"})

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _complain(self, member: Member, line: str) -> None:
        if member not in self.members.waiting:  # a host that is tried again every few seconds has said it once
            self._say(f"{member.host + ': ' if member.host else ''}{line}")

    def _hear(self, member: Member, message: protocol.Message, payload: bytes) -> None:
        kind = message["is"]
        if kind == "ping":
            return
        if kind == "probe" and (message["ask"] in self._probed or member in self.members.waiting):
            from stoker.control.cluster.answers import read_answer

            if len(member.probed) > _MOST_PROBES:
                raise protocol.ProtocolError("it answers what nobody asked")
            into, name = (
                (member.probed, message["what"])
                if member in self.members.waiting
                else (self._probed[message["ask"]], member.host)
            )
            into[name] = read_answer(message["what"], payload)
            return
        if kind == "host":
            self._meet(member, message)
        if kind == "refused":
            message["line"] = printable(message["line"], 2000)
        if kind != "out":
            member.answers[kind] = message
        if self.listener is not None and member not in self.members.waiting:
            self.listener(member.host, message, payload)


def _exit_code(code: int) -> int:
    """An agent's own word, within what a process can end with. 0 would be success."""
    return code if 0 < code < 128 else EX_OSERR
