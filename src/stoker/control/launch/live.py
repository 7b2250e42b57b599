"""The live run: the one owner of a run's agents, of the attempt under way and of its watch.

Attempt after attempt, until a verdict is final: starts the ranks, has them followed, judges, and decides whether and with
whom to start again. Membership is decided here and only here: an attempt is (members, world size, fresh port).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from stoker.contract import checkpoints, layout, protocol
from stoker.contract.errors import EX_TEMPFAIL, EX_UNAVAILABLE, Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import pick_fields, replace
from stoker.contract.terminal import WARNING
from stoker.contract.text import escape
from stoker.contract.units import format_duration
from stoker.control.cluster import transport
from stoker.control.cluster.agent_pool import AgentClient, UnusableHosts
from stoker.control.launch.agents import Agents
from stoker.control.launch.attempt import Attempt
from stoker.control.launch.rank_output import RankOutput, wants_split
from stoker.control.launch.reports import ReportHandler
from stoker.control.launch.signals import Interrupted, SignalQueue
from stoker.control.machine.model import Gpu, Machine
from stoker.control.machine.run_origin import current_run, gpu_lender
from stoker.control.plan import run_json
from stoker.control.plan.gpu_choice import GpusNotFree, marked
from stoker.control.plan.rank_spec import HostTarget, common_environment, start_order
from stoker.control.plan.request import Request, by_hand
from stoker.control.plan.run_dir import RunDir
from stoker.control.plan.run_plan import RolePlan, RunPlan, make_plan
from stoker.control.record.run_writer import RunWriter

TYPE_CHECKING = False
if TYPE_CHECKING:  # a run on one machine loads none of these
    from stoker.control.cluster.hosts import Hosts
    from stoker.control.launch.host_setup import HostSetup
    from stoker.control.launch.membership import Membership
    from stoker.control.launch.notify import Notifier

_MOST_RACES = 20  # lost for a GPU's lock


class LiveRun:
    """`hosts`: None on this machine, reached through `link`; then `membership` and `network` are None, too."""

    output: RankOutput
    record: RunWriter
    notifier: Notifier | None = None

    def __init__(
        self,
        request: Request,
        link: transport.AgentLink | None,
        hosts: Hosts | None,
        signals: SignalQueue,
        say: Callable[..., None],
        tell: Callable[..., None],
    ) -> None:
        self.request = request
        self.options = request.options
        self.signals = signals
        self.say = say
        self.tell = tell
        self.agents = Agents(self, link, hosts)
        self.planner = Planner(self)
        self.network: HostSetup | None = None
        self.membership: Membership | None = None
        if hosts is not None:
            from stoker.control.launch.host_setup import HostSetup
            from stoker.control.launch.membership import Membership

            self.network = HostSetup(self)
            self.membership = Membership(self, self.network)
        self._reports: ReportHandler | None = None  # of the attempt under way
        self._cwd = os.getcwd()
        self._endpoint: tuple[str, int] | None = None
        self._interface = ""  # towards the other machines, where those are started by hand
        self._common: dict[str, dict[str, dict[str, str]]] = {}  # by host and role

    def hear(self, host: str, message: protocol.Message, payload: bytes) -> None:
        if self._reports is not None:
            self._reports.hear(host, message, payload)

    def reserve(self, plan: RunPlan) -> RunPlan:
        """The next attempt's store address and port. With machines started by hand the plan gets its numbers here."""
        if by_hand(self.options):
            from stoker.control.plan.targets import join_nodes

            plan, self._endpoint, self._interface = join_nodes(self.agents, self.request, plan, self.say)
            self.output.replan(plan)
        else:
            here = self.options.master_addr or "127.0.0.1"
            self._endpoint = self.agents.reserve(self.network.master if self.network else here)
        return plan

    def equip(self, plan: RunPlan, place: RunDir) -> None:
        """What every rank of a role is given on a host."""

        def environment(role: RolePlan, host: str) -> dict[str, str]:
            cores = self.agents.machines[host].cores
            return common_environment(plan, role, self.options, os.environ, place, cores, host)

        self._common = {host: {role.name: environment(role, host) for role in plan.roles} for host in plan.hosts}

    def run(self, plan: RunPlan, place: RunDir) -> Verdict:
        from stoker.control.launch.restart import RestartState

        number = place.first_attempt
        restarts = RestartState(self.options)
        env: tuple[tuple[str, str], ...] = ()
        while True:
            attempt = Attempt(number, plan)
            began = time.monotonic()
            verdict = self._one_attempt(attempt, place, env)
            regroup = self.membership.regroup(verdict, attempt, place.dir) if self.membership is not None else None
            if regroup is not None:
                again, env = regroup, restarts.env()
            else:
                if self.membership is not None and verdict.cause == "host.lost":
                    self.membership.settle()
                    verdict = self.membership.too_few(verdict)
                verdict, decided = restarts.decide(verdict, attempt, time.monotonic() - began)
                alone_and_gone = self.membership is None and any(member.gone for member in self.agents.members.all)
                if decided is None or alone_and_gone:
                    return self._diagnosed(verdict, plan) if verdict.cause == "gpu.busy" else verdict
                again, env = decided, decided.env
            number += 1
            variables = [name for name, _ in env]
            why = pick_fields(verdict, "cause", "rank")
            self.record.event("restart", attempt=number, **why, wait_s=again.wait_s, env=variables)
            self.say(f"stoker: {again.line}", colour=WARNING)
            if self.notifier is not None:
                self.notifier.tell(verdict, "restarting", place.dir)
            try:
                self.agents.pause(again.wait_s)
                plan, bad = self._without_failed_card(plan, place, verdict) if again.probe else (plan, None)
                if self.membership is not None and bad is None:
                    plan, bad = self._with_those_there(plan, place, verdict)
                if self._endpoint is None and bad is None:  # a fresh port for every attempt
                    plan = self.reserve(plan)
            except Interrupted as stop:
                name = signal.Signals(stop.signum).name
                summary = f"stopped by {name} between two attempts; the last one: {verdict.summary}"
                stopped = Verdict("stopped", "launch.stopped", summary, 128 + stop.signum, evidence=verdict.evidence)
                return replace(stopped, run=place.id, attempt=verdict.attempt)
            if bad is not None:
                return bad

    def _with_those_there(self, plan: RunPlan, place: RunDir, verdict: Verdict) -> tuple[RunPlan, Verdict | None]:
        """The next attempt's plan, with the hosts that are there now. A verdict where they are too few."""
        membership, network = self.membership, self.network
        assert membership is not None and network is not None
        changed = False
        while True:
            changed = membership.settle() or changed
            if not membership.enough:
                return plan, membership.too_few(verdict)
            try:
                if changed:
                    fresh = self.planner.plan_again()
                    network.find_ways()
                    plan = self._adopt(fresh, place)
                return self.reserve(plan), None
            except UnusableHosts as gone:
                membership.lose(gone)
            except Refusal as refusal:
                if membership.joined:
                    membership.send_back(refusal.line)
                    changed = True
                    continue
                line = f"with {membership.here}: {refusal.line}"
                return plan, replace(verdict, retryable=False, evidence=(*verdict.evidence, line))

    def _adopt(self, plan: RunPlan, place: RunDir) -> RunPlan:
        """From the next attempt on."""
        self.output.replan(plan)
        self.equip(plan, place)
        for line in plan.lines:
            self.say(line)
        return plan

    def _card(self, verdict: Verdict, plan: RunPlan) -> Gpu | None:
        """The guilty rank's, on this machine."""
        return plan.place(verdict.rank).gpu if verdict.rank is not None and "" in self.agents.machines else None

    def _diagnosed(self, verdict: Verdict, plan: RunPlan) -> Verdict:
        card = self._card(verdict, plan)
        if card is None:
            return verdict
        from stoker.control.launch import preflight

        try:
            self.agents.look()
        except (Refusal, Interrupted) as problem:
            return replace(verdict, evidence=(*verdict.evidence, f"it could not be looked at again: {problem}"))
        return replace(verdict, evidence=(*verdict.evidence, *preflight.diagnosis(self.agents.machines[""], card)))

    def _without_failed_card(self, plan: RunPlan, place: RunDir, verdict: Verdict) -> tuple[RunPlan, Verdict | None]:
        """The guilty rank's card is proved; the next attempt omits a bad one. A verdict where too few are left."""
        card = self._card(verdict, plan)
        if card is None:
            return plan, None
        from stoker.control.launch import preflight

        broken = preflight.proof(self.agents.machines[""], card)
        if not broken:
            return plan, None
        self.planner.left_out[card.uuid] = broken
        self.record.event("gpu-left-out", gpu=card.uuid, label=card.label, why=broken)
        self.say(f"stoker: {card.label} ({card.uuid}) fails its test ({broken}): it is left out", colour=WARNING)
        try:
            fresh = self.planner.plan_again()
        except Refusal as refusal:
            lines = (f"{card.label} fails its proof: {broken}", f"without it: {refusal.line}")
            return plan, replace(verdict, retryable=False, evidence=(*verdict.evidence, *lines))
        return self._adopt(fresh, place), None

    def _one_attempt(self, attempt: Attempt, place: RunDir, env: tuple[tuple[str, str], ...]) -> Verdict:
        plan, number = attempt.plan, attempt.number
        self.record.attempt(number)
        self.output.begin(number)
        assert self._endpoint is not None
        (address, port), self._endpoint = self._endpoint, None
        # Not sooner: what an agent still says of the attempt before belongs to that one.
        self._reports = ReportHandler(self, attempt)
        store = {"master_addr": address, "master_port": port}
        self.record.event("attempt", attempt=number, world_size=plan.world_size, **store, hosts=list(plan.hosts))
        self._start(plan, place, number, address, port, dict(env))
        from stoker.control.launch.supervision import Supervision

        attempt.begin_watch(self.options.hang_timeout, self.options.busy_timeout)
        supervision = Supervision(self, attempt)
        supervision.follow()
        supervision.finish()
        self.record.close_logs()
        self.record.close_history()
        from stoker.control.verdict.judge import judge

        attempt.note_bad_numbers()
        verdict = judge(attempt.evidence(checkpoints.find_newest_checkpoint(place.dir)))
        seen = None if verdict.cause == "host.lost" else attempt.detected_s(verdict)  # when a host was lost nobody saw
        evidence = (*verdict.evidence, *attempt.notes)
        return replace(verdict, run=place.id, attempt=number, detected_s=seen, evidence=evidence)

    def all_up(self, plan: RunPlan) -> None:
        """Every rank is on its way: time for what nobody should wait for."""
        data = run_json.enrich(self.record.dir, self.request, plan)
        self.record.save(os.path.join(self.record.dir, layout.RUN), data, durable=False)

    def _start(self, plan: RunPlan, place: RunDir, number: int, address: str, port: int, more: dict[str, str]) -> None:
        own = {**more, "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        own["TORCHELASTIC_RESTART_COUNT"] = str(number - place.first_attempt)
        here = HostTarget(workdir=self._cwd, interface=self._interface)
        for member in self.agents.members.all:
            to = self.network.towards(member.host) if self.network else here
            member.say(start_order(plan, self.options, number, to, os.environ, self._common[member.host], own))


# ---- the plan, of what the agents found: look, choose, lock, and look again where another was quicker ----


class Planner:
    def __init__(self, run: LiveRun) -> None:
        self._request = run.request
        self._options = run.options
        self._agents = run.agents
        self._say = run.say
        self._noticed: set[str] = set()
        self._argv: list[str] = []
        self.left_out: dict[str, str] = {}  # GPUs that failed in this run: uuid -> how

    def plan(self, argv: list[str]) -> RunPlan:
        """With --wait it looks again until there is room; a lost race for a lock is a look again, too."""
        self._argv = argv
        deadline = time.monotonic() + self._options.wait
        announced = ""
        races = 0
        while True:
            held = {member.host: self._held(member) for member in self._agents.members.all}
            try:
                machines, split = self._sound_machines(), wants_split(self._options)
                plan = make_plan(self._request, argv, os.environ, machines, held, split, self._agents.by_name)
                lost = {} if self._options.dry_run or self._options.share_gpus else self._lock(plan)
                if not lost:
                    return plan
                races += 1
                if races > _MOST_RACES:
                    who = "; ".join(f"GPU {uuid} by {holder}" for uuid, holder in lost.items())
                    raise GpusNotFree(f"the GPUs are in use: {who}", EX_UNAVAILABLE, cause="gpu.busy")
            except GpusNotFree as busy:
                if not self._options.wait:
                    raise
                if time.monotonic() > deadline:
                    line = f"waited {format_duration(self._options.wait)}: {busy.line}"
                    raise Refusal(line, EX_TEMPFAIL, cause="gpu.busy") from busy
                if busy.line != announced:
                    announced = busy.line
                    self._say(f"stoker: waiting for up to {format_duration(deadline - time.monotonic())}: {busy.line}")
                self._agents.pause(1.0)
            self._agents.look()

    def plan_again(self) -> RunPlan:
        """With a fresh look: a card was left out, its holder may be gone, or other hosts take part."""
        self._agents.look()
        plan = self.plan(self._argv)
        if not self._options.no_preflight:
            from stoker.control.launch.preflight import check_legal

            check_legal(self._options, plan)
        return plan

    def _lent(self, member: AgentClient) -> list[str]:
        """GPUs held by ourselves, by the run we are a rank of or the chain we are a stage of: not to lock again."""
        ours = tuple(f"run {run} (agent pid " for run in (self._agents.run_id, current_run(os.environ)) if run)
        lender = gpu_lender(os.environ)
        lent = f" (agent pid {lender})"
        held = member.answers["host"]["held"]
        return [uuid for uuid, who in held.items() if who.startswith(ours) or (lender and who.endswith(lent))]

    def _held(self, member: AgentClient) -> dict[str, str]:
        lent = self._lent(member)
        return {uuid: who for uuid, who in member.answers["host"]["held"].items() if uuid not in lent}

    def _sound_machines(self) -> dict[str, Machine]:
        """With --exclude-bad a GPU that fails its proof does not answer. Here only: a probe does not travel yet."""
        machines = self._agents.machines
        if self._options.exclude_bad and "" in machines:
            from stoker.control.launch.preflight import without_bad

            machines[""] = without_bad(machines[""])
        if self.left_out:
            return {host: marked(machine, self.left_out) for host, machine in machines.items()}
        return machines

    def _lock(self, plan: RunPlan) -> dict[str, str]:
        if not any(place.gpu for place in plan.places):
            return {}
        members = self._agents.members.all
        for member in members:
            mine = {gpu.uuid for place in plan.places if place.host == member.host for gpu in place.cards}
            member.say({"do": "lock", "gpus": sorted(mine - set(self._lent(member)))})
        self._agents.await_all("locked")
        for member in members:
            for notice in member.answers["locked"]["notices"]:
                line = f"stoker: {f'host {member.host}: ' if member.host else ''}{escape(notice, 1000)}"
                if line not in self._noticed:
                    self._noticed.add(line)
                    self._say(line)
        return {
            uuid: escape(who, 300) for member in members for uuid, who in member.answers["locked"]["refused"].items()
        }
