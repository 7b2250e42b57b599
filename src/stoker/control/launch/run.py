"""One training job from its request to its verdict: plans it, makes one attempt after the other, and closes its record.

`Run.execute` reads top to bottom: prepare, then per attempt start, supervise, judge and decide, then close. An attempt
is (hosts, ranks, a fresh port); a restart, a lost or returned host and an excluded GPU are each the next attempt.
"""

from __future__ import annotations

import os
import signal
import time

from stoker.contract import checkpoints, env_vars
from stoker.contract.errors import EX_OSERR, Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import frozen, pick_fields, replace
from stoker.contract.masking import learn_secrets
from stoker.contract.terminal import WARNING
from stoker.control.cluster import transport
from stoker.control.cluster.agent_pool import UnusableHosts
from stoker.control.launch import background
from stoker.control.launch.agents import Agents
from stoker.control.launch.attempt import Attempt
from stoker.control.launch.planner import Planner
from stoker.control.launch.rank_output import RankOutput
from stoker.control.launch.reports import ReportHandler
from stoker.control.launch.session import OnEnd, Session
from stoker.control.launch.signals import Interrupted
from stoker.control.machine.model import Gpu
from stoker.control.plan import run_json
from stoker.control.plan.rank_spec import HostTarget, make_common_environment, make_start_message
from stoker.control.plan.request import Request, check_ranges, is_started_by_hand, rank_command, read_store_port
from stoker.control.plan.run_dir import RunDir, discard_run_dir, open_run_dir
from stoker.control.plan.run_plan import RunPlan
from stoker.control.record.run_writer import RunWriter

TYPE_CHECKING = False
if TYPE_CHECKING:  # a run on one machine loads none of these
    from stoker.control.cluster.hosts import Hosts
    from stoker.control.launch.host_setup import HostSetup
    from stoker.control.launch.membership import Membership
    from stoker.control.launch.restart import Restart, RestartState


@frozen
class Endpoint:
    """The address of rank 0's store, at which the ranks of an attempt find each other."""

    address: str
    port: int
    interface: str = ""  # towards the other machines, if those are started by hand


def launch(
    request: Request,
    link: transport.AgentLink | None,
    report: background.StartReport | None,
    hosts: Hosts | None = None,
    on_end: OnEnd | None = None,
) -> int:
    """Run the request to its verdict and return the exit code. `on_end` is called if the run was started.

    `hosts` are set for a run on several hosts. Without them the run is on this machine, whose agent `link` connects to.
    """
    session = Session(request, report, on_end)
    return session.run(lambda: Run(request, session, link, hosts))


class Run:
    """One training job. Owns the agents, the record and the output; collaborators are given what they need."""

    output: RankOutput  # from the first plan on
    record: RunWriter  # from the end of `_prepare` on

    def __init__(
        self, request: Request, session: Session, link: transport.AgentLink | None, hosts: Hosts | None
    ) -> None:
        self.request = request
        self.options = request.options
        self.session = session
        self.log = session.log
        if hosts is not None:
            learn_secrets(hosts.env)
        self.agents = Agents(link, hosts, session.signals, session.log)
        self.planner = Planner(request, self.agents, session.log)
        self.host_setup: HostSetup | None = None
        self.membership: Membership | None = None
        if hosts is not None:
            from stoker.control.launch.host_setup import HostSetup
            from stoker.control.launch.membership import Membership

            self.host_setup = HostSetup(request, self.agents, session.log)
            self.membership = Membership(self.options, self.agents, self.host_setup, session.log, session.record_event)
        self._cwd = os.getcwd()

    def execute(self) -> Verdict | None:
        """Return the verdict, or None for a dry run. Raises Refusal or Interrupted while nothing has been started."""
        argv = rank_command(self.request)
        check_ranges(self.request)
        run_dir = open_run_dir(self.request, os.environ)
        try:
            if self.options.dry_run:
                plan = self._plan_dry_run(argv, run_dir)
            else:
                plan, endpoint = self._prepare(argv, run_dir)
        except BaseException:
            discard_run_dir(run_dir)
            raise
        if self.options.dry_run:
            self.session.print_run_dir(run_dir)
            self.session.print_plan(plan, run_dir)
            return None
        try:
            verdict = self._run_attempts(plan, endpoint, run_dir)
        except (Refusal, OSError) as problem:
            from stoker.control.verdict import launch_failures

            if isinstance(problem, Refusal):
                verdict = replace(launch_failures.make_refusal_verdict(problem), status="failed", run=run_dir.id)
            else:
                verdict = launch_failures.make_failure_verdict("launch.system", f"system error: {problem}", EX_OSERR)
        self.session.close_record(verdict, self.request, run_dir)
        return verdict

    def close(self) -> None:
        self.agents.pool.close()

    # ---- before anything is started ----

    def _plan_dry_run(self, argv: list[str], run_dir: RunDir) -> RunPlan:
        self._open_agents(run_dir)
        while True:
            try:
                return self.planner.plan(argv)
            except UnusableHosts as missing:
                if self.membership is None or not self.membership.start_without(missing):
                    raise

    def _prepare(self, argv: list[str], run_dir: RunDir) -> tuple[RunPlan, Endpoint]:
        """Plan, check and reserve everything that may be refused, then open the record. Starts no rank."""
        if self.options.metrics_port is not None:
            self.session.open_metrics_port(self.options.metrics_port)
        self._open_agents(run_dir)
        while True:
            try:
                plan = self.planner.plan(argv)
                warnings = self._check(plan, run_dir)
                is_recipe = self.options.module and self.request.script.startswith(env_vars.RECIPES)
                self.output = RankOutput(self.options, plan, run_dir.id, self.session.console, is_recipe)
                # Before the record is opened: a port that can't be reserved leaves no run directory behind.
                plan, endpoint = self._reserve(plan)
                break
            except UnusableHosts as missing:
                if self.membership is None or not self.membership.start_without(missing):
                    raise
        notice = self._open_record(plan, run_dir)
        if run_dir.location_notice:
            self.log(run_dir.location_notice)
        if self.options.quiet is False:
            # A role that continues prints no notice, because its job has printed it.
            run_notice = "" if env_vars.JOB in os.environ and run_dir.reopened else run_dir.notice
            for line in filter(None, (*run_notice.splitlines(), notice, *plan.lines)):
                self.log(line)
            for line in warnings:
                self.log(line, color=WARNING)
        self.session.report_start(run_dir)
        return plan, endpoint

    def _open_agents(self, run_dir: RunDir) -> None:
        if self.membership is not None:
            self.membership.open_agents(run_dir)
        else:
            self.agents.open_run(run_dir)

    def _check(self, plan: RunPlan, run_dir: RunDir) -> list[str]:
        """Return the warnings of the checks before the start. Raises Refusal if a rank could not work."""
        machine = self.agents.machines.get("")
        warnings: list[str] = []
        if not self.options.no_preflight and machine is not None:
            from stoker.control.launch import preflight

            preflight.check_legal_ranks(self.options, plan)
            warnings = preflight.check_machine(self.options, plan, machine)
        if self.host_setup is not None:
            warnings = self.host_setup.prepare(plan, run_dir)
        return warnings

    def _reserve(self, plan: RunPlan) -> tuple[RunPlan, Endpoint]:
        """Reserve the store's port for the next attempt. Machines started by hand get their rank numbers here."""
        if is_started_by_hand(self.options):
            from stoker.control.plan.targets import join_nodes

            plan, (address, port), interface = join_nodes(self.agents, self.request, plan, self.log)
            self.output.replan(plan)
            return plan, Endpoint(address, port, interface)
        address = self.host_setup.master_address if self.host_setup else self.options.master_addr or "127.0.0.1"
        return plan, Endpoint(*self.agents.reserve(address, *read_store_port(self.request)))

    def _open_record(self, plan: RunPlan, run_dir: RunDir) -> str:
        """Open the record and return its notice for the console, or ""."""
        self.record = RunWriter(run_dir.dir, os.uname().nodename, run_dir.reopened)
        copy_commands = self.host_setup.copy_commands if self.host_setup is not None else None
        machines, start_time = self.agents.machines, self.session.start_time
        description = run_json.describe(self.request, plan, run_dir, machines, start_time, copy_commands)
        notice = self.record.record_start(description, run_dir.first_attempt)
        self.session.record = self.record
        return notice

    # ---- attempts ----

    def _run_attempts(self, plan: RunPlan, endpoint: Endpoint, run_dir: RunDir) -> Verdict:
        """Make attempts until a verdict is final, and return it."""
        from stoker.control.launch.restart import RestartState

        number = run_dir.first_attempt
        restarts = RestartState(self.options)
        env: tuple[tuple[str, str], ...] = ()
        while True:
            attempt = Attempt(number, plan)
            self._start(attempt, endpoint, run_dir, dict(env))
            self._supervise(attempt)
            verdict = self._judge(attempt, run_dir)
            verdict, restart = self._decide(verdict, attempt, restarts, run_dir)
            if restart is None:
                return self._diagnose_gpu(verdict, plan) if verdict.cause == "gpu.busy" else verdict
            number += 1
            env = restart.env
            variables = [name for name, _ in env]
            failure = pick_fields(verdict, "cause", "rank")
            self.record.event("restart", attempt=number, **failure, wait_s=restart.wait_s, env=variables)
            self.log(f"stoker: {restart.line}", color=WARNING)
            if self.session.notifier is not None:
                self.session.notifier.send(verdict, "restarting", run_dir.dir)
            try:
                next_attempt = self._plan_next(plan, verdict, restart)
            except Interrupted as stop:
                name = signal.Signals(stop.signum).name
                summary = f"stopped by {name} between two attempts; the last one: {verdict.summary}"
                stopped = Verdict("stopped", "launch.stopped", summary, 128 + stop.signum, evidence=verdict.evidence)
                return replace(stopped, run=run_dir.id, attempt=verdict.attempt)
            if isinstance(next_attempt, Verdict):
                return next_attempt
            plan, endpoint = next_attempt

    def _start(self, attempt: Attempt, endpoint: Endpoint, run_dir: RunDir, restart_env: dict[str, str]) -> None:
        """Send every host the ranks it starts, without waiting for answers."""
        plan, number = attempt.plan, attempt.number
        self.record.create_attempt_dir(number)
        self.output.begin(number)
        # Not set earlier: until now the agents' reports belong to the previous attempt.
        self.agents.on_report = ReportHandler(attempt, self.request, self.record, self.output, self.log).handle
        store = {"master_addr": endpoint.address, "master_port": endpoint.port}
        self.record.event("attempt", attempt=number, world_size=plan.world_size, **store, hosts=list(plan.hosts))
        env = {**restart_env, "MASTER_ADDR": endpoint.address, "MASTER_PORT": str(endpoint.port)}
        env["TORCHELASTIC_RESTART_COUNT"] = str(number - run_dir.first_attempt)
        for client in self.agents.clients:
            host, machine = client.host, client.machine
            assert machine is not None
            by_role = {
                role.name: make_common_environment(plan, role, self.options, os.environ, run_dir, machine.cores, host)
                for role in plan.roles
            }
            if self.host_setup is not None:
                target = self.host_setup.target(host)
            else:
                target = HostTarget(workdir=self._cwd, interface=endpoint.interface)
            client.say(make_start_message(plan, self.options, number, target, os.environ, by_role, env))

    def _supervise(self, attempt: Attempt) -> None:
        # Imported while the ranks start: no launch waits for it.
        from stoker.control.launch.supervise import Supervisor

        attempt.begin_watch(self.options.hang_timeout, self.options.busy_timeout)
        supervisor = Supervisor(
            attempt,
            self.options,
            self.agents,
            self.membership,
            self.session.signals,
            self.record,
            self.output,
            self.log,
        )
        supervisor.follow()
        supervisor.finish()
        self.record.close_logs()
        self.record.close_history()

    def _judge(self, attempt: Attempt, run_dir: RunDir) -> Verdict:
        from stoker.control.verdict.judge import judge

        attempt.note_bad_numbers()
        verdict = judge(attempt.evidence(checkpoints.find_newest_checkpoint(run_dir.dir)))
        # The time at which a host was lost is unknown.
        detected_s = None if verdict.cause == "host.lost" else attempt.compute_detection_s(verdict)
        evidence = (*verdict.evidence, *attempt.notes)
        return replace(verdict, run=run_dir.id, attempt=attempt.number, detected_s=detected_s, evidence=evidence)

    def _decide(
        self, verdict: Verdict, attempt: Attempt, restarts: RestartState, run_dir: RunDir
    ) -> tuple[Verdict, Restart | None]:
        """Return the verdict with the evidence of this attempt, and the restart, or None if the verdict is final."""
        if self.membership is not None:
            restart = self.membership.decide_regroup(verdict, attempt, run_dir.dir)
            if restart is not None:
                return verdict, replace(restart, env=restarts.make_env())
            if verdict.cause == "host.lost":
                self.membership.update_agents()
                verdict = self.membership.make_too_few_verdict(verdict)
        verdict, restart = restarts.decide(verdict, attempt, time.monotonic() - attempt.start_time)
        if self.membership is None and any(client.gone for client in self.agents.clients):
            restart = None  # the only agent is gone
        return verdict, restart

    # ---- between attempts ----

    def _plan_next(self, plan: RunPlan, verdict: Verdict, restart: Restart) -> tuple[RunPlan, Endpoint] | Verdict:
        """Wait, and return the next attempt's plan with a fresh port, or the final verdict if it can't be planned."""
        self.agents.pause(restart.wait_s)
        if restart.probe:
            tested = self._test_failed_gpu(plan, verdict)
            if isinstance(tested, Verdict):
                return tested
            plan = tested
        if self.membership is not None and self.host_setup is not None:
            return self._plan_with_current_hosts(plan, verdict, self.membership, self.host_setup)
        return self._reserve(plan)

    def _test_failed_gpu(self, plan: RunPlan, verdict: Verdict) -> RunPlan | Verdict:
        """Test the GPU of the rank that failed. Return a plan without it if it is bad, or a verdict if too few are left."""
        gpu = self._gpu_of(verdict, plan)
        if gpu is None:
            return plan
        from stoker.control.launch import preflight

        failure = preflight.probe_gpu(self.agents.machines[""], gpu)
        if not failure:
            return plan
        self.planner.excluded_gpus[gpu.uuid] = failure
        self.record.event("gpu-left-out", gpu=gpu.uuid, label=gpu.label, why=failure)
        self.log(f"stoker: {gpu.label} ({gpu.uuid}) fails its test ({failure}): it is excluded", color=WARNING)
        try:
            return self._adopt(self.planner.plan_again())
        except Refusal as refusal:
            lines = (f"{gpu.label} fails its test: {failure}", f"without it: {refusal.line}")
            return replace(verdict, retryable=False, evidence=(*verdict.evidence, *lines))

    def _plan_with_current_hosts(
        self, plan: RunPlan, verdict: Verdict, membership: Membership, host_setup: HostSetup
    ) -> tuple[RunPlan, Endpoint] | Verdict:
        """Plan for the hosts that are present now. Returns a verdict if they are too few."""
        changed = False
        while True:
            changed = membership.update_agents() or changed
            if not membership.has_enough_hosts:
                return membership.make_too_few_verdict(verdict)
            try:
                if changed:
                    new_plan = self.planner.plan_again()
                    host_setup.find_addresses()
                    plan = self._adopt(new_plan)
                return self._reserve(plan)
            except UnusableHosts as gone:
                membership.mark_lost(gone)
            except Refusal as refusal:
                if membership.joined:
                    membership.exclude_joined(refusal.line)
                    changed = True
                    continue
                line = f"with {membership.host_count_text}: {refusal.line}"
                return replace(verdict, retryable=False, evidence=(*verdict.evidence, line))

    def _adopt(self, plan: RunPlan) -> RunPlan:
        self.output.replan(plan)
        for line in plan.lines:
            self.log(line)
        return plan

    def _gpu_of(self, verdict: Verdict, plan: RunPlan) -> Gpu | None:
        """Return the GPU of the rank that failed, if it is on this machine."""
        return plan.place(verdict.rank).gpu if verdict.rank is not None and "" in self.agents.machines else None

    def _diagnose_gpu(self, verdict: Verdict, plan: RunPlan) -> Verdict:
        """Add to the verdict why the GPU may have been busy: its mode, its holders, its free memory and its test."""
        gpu = self._gpu_of(verdict, plan)
        if gpu is None:
            return verdict
        from stoker.control.launch import preflight

        try:
            self.agents.refresh_machines()
        except (Refusal, Interrupted) as problem:
            return replace(verdict, evidence=(*verdict.evidence, f"the GPU could not be examined again: {problem}"))
        return replace(verdict, evidence=(*verdict.evidence, *preflight.diagnose_gpu(self.agents.machines[""], gpu)))
