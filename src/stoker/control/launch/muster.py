"""Before the start: meets the agents, looks at their machines, makes the plan, takes the GPUs' locks and the store's port."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from stoker.contract import names, protocol
from stoker.contract.names import EX_OSERR, EX_TEMPFAIL, EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.quantities import span
from stoker.contract.shape import replace
from stoker.control.cluster import transport
from stoker.control.launch.gpus import NotFree
from stoker.control.launch.members import Member, Members
from stoker.control.launch.output import wants_split
from stoker.control.launch.plan import RunPlan, make_plan
from stoker.control.launch.request import Request
from stoker.control.launch.runplace import RunPlace
from stoker.control.machine.model import Machine, machine_from_json
from stoker.control.machine.observe import packages_dir

MEET_S = 30.0
Listener = Callable[[str, protocol.Message, bytes], None]


class Interrupted(Exception):
    """A signal came before anything was started."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Muster:
    """The agents of a run and what they have answered. `link`: the local agent, already on its way; None where ssh reaches them."""

    def __init__(self, request: Request, link: transport.Link | None, signals: list[int], say: Callable[[str], None]) -> None:
        self.request = request
        self.options = request.options
        self._signals = signals
        self._say = say
        self._answers: dict[str, dict[str, Any]] = {}  # the newest answer of each kind, by host and kind
        self.listener: Listener | None = None  # who hears of the ranks
        self._run_id = ""
        self.left_out: dict[str, str] = {}  # GPUs that failed in this run: uuid -> how
        links = [link] if link is not None else [self._reach(host) for host in self._hosts()]
        self.members = Members([Member(one) for one in links], self._hear, self._complain)

    def _hosts(self) -> list[str]:
        told = self.options.hosts or ""
        hosts = [host.strip() for host in told.split(",") if host.strip()]
        if not hosts or len(set(hosts)) < len(hosts):
            raise Refusal(f"--hosts {told}: name each host once, separated by commas", EX_USAGE)
        if any(host.startswith("-") for host in hosts):
            raise Refusal(f"--hosts {told}: a host name does not begin with '-'", EX_USAGE)
        return hosts

    def _reach(self, host: str) -> transport.Link:
        try:
            return transport.ssh(host, self.options.ssh_option, self.options.python or "python3")
        except FileNotFoundError as problem:
            raise Refusal("--hosts needs the ssh client, and there is none on the PATH", EX_UNAVAILABLE) from problem

    def meet(self, place: RunPlace) -> None:
        self._run_id = place.id
        self.members.say({
            "do": "open", "run": place.id, "dir": place.dir, "hup_ignored": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
            "recorded": os.environ.get(names.MACHINE), "packages": packages_dir(),
        })  # fmt: skip
        self._await("host", MEET_S)

    def answered(self, kind: str) -> bool:
        """Has every agent that is still there said this since it was last forgotten?"""
        return all(kind in self._answers[member.host] for member in self.members.all if not member.gone)

    def forget(self, kind: str) -> None:
        for member in self.members.all:
            self._answers.setdefault(member.host, {}).pop(kind, None)

    def _await(self, kind: str, seconds: float) -> None:
        """Until every agent has answered in this kind."""
        self.forget(kind)
        deadline = time.monotonic() + seconds
        while True:
            waiting = [member for member in self.members.all if kind not in self._answers[member.host]]
            if not waiting:
                return
            for member in waiting:
                refused = self._answers[member.host].get("refused")
                if refused:
                    raise Refusal(refused["line"], refused["code"])
                where = f"host {member.host}" if member.host else "this machine"
                if member.gone:
                    raise Refusal(f"the agent on {where} is gone: {member.gone}", EX_UNAVAILABLE, cause="host.agent")
                if time.monotonic() > deadline:
                    raise Refusal(f"the agent on {where} does not answer within {seconds:.0f} s: a sick driver, or a machine without memory",
                                  EX_UNAVAILABLE, cause="host.agent")  # fmt: skip
            self.members.pump(0.5)
            self._heed_signals()

    @property
    def machines(self) -> dict[str, Machine]:
        return {member.host: machine_from_json(self._answers[member.host]["host"]["machine"]) for member in self.members.all}

    def plan(self, argv: list[str]) -> RunPlan:
        """Looks, chooses, locks. With --wait it looks again until there is room; a lost race for a lock is a look again, too."""
        deadline = time.monotonic() + self.options.wait
        said = ""
        races = 0
        while True:
            held = {member.host: self._held(member) for member in self.members.all}
            try:
                plan = make_plan(self.request, argv, os.environ, self._sound_machines(), held, wants_split(self.options))
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
                    raise Refusal(f"waited {span(self.options.wait)}: {busy.line}", EX_TEMPFAIL, cause="gpu.busy") from busy
                if busy.line != said:
                    said = busy.line
                    self._say(f"stoker: waiting for up to {span(deadline - time.monotonic())}: {busy.line}")
                self.pause(1.0)
            self.look()

    def _lent(self, member: Member) -> list[str]:
        """GPUs held by ourselves, or by the run whose rank we are started in: ours to use, and not to lock again."""
        ours = [f"run {run} " for run in (self._run_id, os.environ.get(names.RUN_ID)) if run]
        return [uuid for uuid, who in self._answers[member.host]["host"]["held"].items() if any(run in who for run in ours)]

    def _held(self, member: Member) -> dict[str, str]:
        lent = self._lent(member)
        return {uuid: who for uuid, who in self._answers[member.host]["host"]["held"].items() if uuid not in lent}

    def _sound_machines(self) -> dict[str, Machine]:
        """With --exclude-bad, GPUs that fail their proof do not answer. On this machine only: a probe does not travel yet."""
        machines = self.machines
        if self.options.exclude_bad and "" in machines:
            from stoker.control.launch.preflight import without_bad

            machines[""] = without_bad(machines[""])
        if self.left_out:
            for host, machine in machines.items():
                gpus = tuple(replace(gpu, error=self.left_out[gpu.uuid]) if gpu.uuid in self.left_out else gpu for gpu in machine.gpus)
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
        return {uuid: who for member in self.members.all for uuid, who in self._answers[member.host]["locked"]["refused"].items()}

    def pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.members.pump(left)
            self._heed_signals()

    def _heed_signals(self) -> None:
        """Before the start: a stop signal ends the launch, Ctrl-Z suspends it."""
        while self._signals:
            signum = self._signals.pop(0)
            if signum != signal.SIGTSTP:
                raise Interrupted(signum)
            self.suspend()

    def reserve(self) -> tuple[str, int]:
        first = self.members.all[0]
        port, asked = wanted_port(self.request)
        address = self.options.master_addr or ("127.0.0.1" if len(self.members.all) == 1 else first.host.rpartition("@")[2])
        self._answers[first.host].pop("port", None)
        first.say({"do": "reserve", "addr": address, "port": port, "soft": not asked})
        deadline = time.monotonic() + 10.0
        while "port" not in self._answers[first.host]:
            if first.gone or time.monotonic() > deadline:
                raise Refusal(f"the agent did not reserve a port: {first.gone or 'no answer'}", EX_OSERR, cause="launch.port")
            self.members.pump(0.5)
        answer = self._answers[first.host]["port"]
        if not answer["port"]:
            raise Refusal(f"port {answer['wanted']} is in use by {answer['holder']}; leave --master-port out for a free one", EX_UNAVAILABLE,
                          cause="launch.port-in-use")  # fmt: skip
        if answer.get("wanted"):
            self._say(f"stoker: MASTER_PORT={answer['wanted']} is in use by {answer['holder']}; using port {answer['port']}")
        return address, int(answer["port"])

    def suspend(self) -> None:
        """Ctrl-Z: the ranks stop too, and nobody takes the silence for death."""
        self.forget("suspended")
        self.members.say({"do": "suspend"})
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not self.answered("suspended"):
            self.members.pump(0.1)
        os.kill(os.getpid(), signal.SIGSTOP)
        now = time.monotonic()
        for member in self.members.all:
            member.heard = now
        self.members.say({"do": "resume"})

    def _complain(self, member: Member, line: str) -> None:
        self._say(f"{member.host + ': ' if member.host else ''}{line}")

    def _hear(self, member: Member, message: protocol.Message, payload: bytes) -> None:
        if message["is"] == "ping":
            return
        if message["is"] != "out":
            self._answers.setdefault(member.host, {})[message["is"]] = message
        if self.listener is not None:
            self.listener(member.host, message, payload)


def check_numbers(request: Request) -> None:
    options = request.options
    if options.max_restarts < 0:
        raise Refusal(f"--max-restarts {options.max_restarts}: give a number from 0 up", EX_USAGE)
    port = wanted_port(request)[0]
    if port and not 1024 <= port <= 65535:
        raise Refusal(f"--master-port {port}: ports from 1024 to 65535 can be used; 0 or no flag takes a free one", EX_USAGE, cause="launch.port")


def wanted_port(request: Request) -> tuple[int, bool]:
    """(port or 0 for a free one, was it asked for as a flag)."""
    options = request.options
    if options.standalone:
        return 0, False
    if options.master_port is not None:
        return options.master_port, True
    if options.rdzv_endpoint:
        _, colon, port = options.rdzv_endpoint.rpartition(":")
        if colon and not port.isdigit():
            raise Refusal(f"--rdzv-endpoint {options.rdzv_endpoint}: write HOST:PORT", EX_USAGE)
        return (int(port), True) if colon else (0, False)
    asked = os.environ.get("MASTER_PORT", "")
    return (int(asked), False) if asked.isdigit() and 1024 <= int(asked) <= 65535 else (0, False)
