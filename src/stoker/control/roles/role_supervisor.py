"""Supervises the roles of a job: starts them in order, reacts to their ends, and decides when the job has ended."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from stoker.contract import env_vars
from stoker.contract.errors import EX_SOFTWARE, Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import replace
from stoker.contract.terminal import WARNING
from stoker.contract.units import format_duration
from stoker.control.launch.signals import SignalQueue
from stoker.control.record.run_writer import RunWriter
from stoker.control.roles.blame import HOST_GONE, Blame, is_echo
from stoker.control.roles.placement import Placement
from stoker.control.roles.role import ALWAYS, JOB, address_variable
from stoker.control.roles.role_process import ENDED, STARTING, UP, WAITING, RoleProcess
from stoker.control.verdict import launch_failures

TICK_S = 0.1
DRAW_S = 1.0  # between two progress bars: a rank writes its progress no more often
MAX_WAIT_S = 30.0
SERVICE_SEARCH_S = 1.0  # between two searches for roles that have become services
# Wait this long after a role has ended before reporting which roles still run: they may be ending or starting, too.
REPORT_DELAY_S = 10.0
HEALTHY_S = 60.0  # a role that ran this long is not in a crash loop
LOOP_FAILURES, LOOP_S = 5, 600.0  # the same failure this often within this time is a loop
_EXTERNAL_CAUSES = ("rank.killed", "rank.signal", "hang.stopped")  # these don't count towards a crash loop
_STOP_RULES = "grpo."  # a run that ended because of a stop rule is never started again


class RoleSupervisor:
    """Supervises the roles of one job until all have ended."""

    def __init__(
        self,
        roles: Sequence[RoleProcess],
        placement: Placement,
        record: RunWriter,
        run_id: str,
        signals: SignalQueue,
        log: Callable[..., None],
        max_restarts: int,
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
        draws_bars: bool = False,
    ) -> None:
        """`max_restarts` applies to the whole job. Each role is started with `environment` and `pass_fds`."""
        self._roles = {role.name: role for role in roles}
        self._placement = placement
        self._record = record
        self._run_id = run_id
        self._signals = signals
        self._log = log
        self._max_restarts = max_restarts
        self._environment = dict(environment)
        self._pass_fds = tuple(pass_fds)
        self._draws_bars = draws_bars
        self._selector = selectors.DefaultSelector()
        self._blame = Blame(self._roles, run_id)
        self._outcome: Verdict | None = None  # once it is known, the roles that still run are stopped
        self._is_restarting = False  # all roles are stopped to be started again
        self._restarts = 0  # of all roles
        self._stop_signal = 0  # the signal that this job received
        self._drawn_at = 0.0
        self._services_searched_at = 0.0
        self._unreported_ends: list[RoleProcess] = []  # completed roles, until the rest is reported
        self._report_rest_at = 0.0

    def run(self) -> Verdict:
        self._warn_if_all_are_services()
        while True:
            self._start_roles()
            for key, _ in self._selector.select(TICK_S):
                if not key.data.read(key.fd):
                    self._selector.unregister(key.fd)
            self._handle_signals()
            for role in self._roles.values():
                self._update(role)
            self._find_services()
            self._report_rest()
            self._draw_progress()
            self._outcome = self._outcome or self._blame.decide()
            if not self._running() and (self._outcome or self._is_restarting):
                if self._outcome is not None:
                    return replace(self._outcome, run=self._run_id)
                self._is_restarting = False
                for role in self._roles.values():
                    role.state, role.earliest_start = WAITING, 0.0
            if self._is_ending:
                self._stop_roles()

    def _running(self) -> list[RoleProcess]:
        return [role for role in self._roles.values() if role.child is not None]

    @property
    def _is_ending(self) -> bool:
        return self._outcome is not None or self._is_restarting or bool(self._stop_signal)

    def _draw_progress(self) -> None:
        """Draw one progress bar, of a role that is no service if possible."""
        if self._draws_bars and time.monotonic() - self._drawn_at >= DRAW_S:
            self._drawn_at = time.monotonic()
            any(role.draw_progress() for role in sorted(self._running(), key=lambda role: role.is_service))

    # ---- starting ----

    def _start_roles(self) -> None:
        """Start the waiting roles whose dependencies are ready."""
        if self._is_ending or self._blame.is_pending:
            return
        now = time.time()
        for role in self._roles.values():
            if role.state != WAITING or role.earliest_start > now:
                continue
            if all(self._roles[name].is_ready for name in role.spec.after):
                self._start(role)

    def _start(self, role: RoleProcess) -> None:
        environment = {**self._environment, env_vars.JOB: self._run_id}
        for other in self._roles.values():
            if other is not role and other.addresses:
                addresses = ",".join(f"{host}:{port}" for host, port in other.addresses)
                environment[address_variable(other.name)] = addresses
        if self._is_run_dir_replaced():
            return
        self._record.event("role-start", role=role.name, start=role.starts)
        try:
            role.start(environment, self._pass_fds)
        except OSError as problem:
            summary = f"it could not be started: {problem}"
            self._handle_failure(role, Verdict("failed", "launch.not-started", summary, EX_SOFTWARE))
            return
        for pipe in role.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, role)
        if role.spec.ready is not None:
            self._log(f"stoker: role {role.name} is started; waiting for {role.spec.ready.description}")

    def _is_run_dir_replaced(self) -> bool:
        """Return whether another directory has replaced the job's: then nothing is started, and its files are not trusted."""
        try:
            self._record.require_unmoved()
        except Refusal as refusal:
            self._outcome = self._outcome or replace(launch_failures.make_refusal_verdict(refusal), status="failed")
            return True
        return False

    # ---- running roles ----

    def _update(self, role: RoleProcess) -> None:
        """Read a role's health, and handle its end."""
        if role.child is None:
            return
        if role.ready_watch is not None:
            self._update_health(role)
        if role.collect():
            self._handle_end(role)

    def _update_health(self, role: RoleProcess) -> None:
        watch, rule = role.ready_watch, role.spec.ready
        assert watch is not None and rule is not None
        if not watch.run_dir and (run := role.find_record()) is not None:
            watch.run_dir = run.dir
        waited = time.time() - role.started_at
        if role.state == STARTING and watch.ready.is_set():
            role.state, role.was_ready = UP, True
            self._record.event("role-ready", role=role.name, seconds=round(waited, 3))
            self._log(f"✓ role {role.name} is ready after {format_duration(waited)}")
        if watch.served_counts != role.served_counts and any(watch.served_counts):
            role.served_counts = watch.served_counts
            replicas = [
                {"requests": counts.requests, "tokens": counts.tokens} if counts else None
                for counts in role.served_counts
            ]
            self._record.event("role-served", role=role.name, replicas=replicas)
        if role.state == STARTING and not role.stop_signal and waited > rule.ready_timeout_s:
            missing = rule.description.removeprefix("its ").removeprefix("an ").removeprefix("a ").removeprefix("the ")
            problem = f": {watch.problem}" if watch.problem else ""
            role.stop_reason = f"it was not ready after {format_duration(rule.ready_timeout_s)}: no {missing}{problem}"
            role.send(signal.SIGTERM)
        if watch.unhealthy and not role.stop_signal:
            role.stop_reason = f"it no longer responds: {watch.unhealthy}"
            role.send(signal.SIGTERM)

    def _find_services(self) -> None:
        """Find roles that have become services: the job doesn't wait for their end."""
        if self._outcome is not None or self._stop_signal:
            return
        if time.monotonic() - self._services_searched_at < SERVICE_SEARCH_S:
            return
        self._services_searched_at = time.monotonic()
        for role in self._running():
            if role.is_service or not (reason := role.find_service_reason()):
                continue
            role.service_reason = reason
            self._record.event("role-service", role=role.name, reason=reason)
            if not self._warn_if_all_are_services():
                required = [other.name for other in self._required() if other.state != ENDED]
                consequence = f"; the job is complete when {_have_ended(required)}" if required else ""
                self._log(f"stoker: role {role.name} is a service: {reason}{consequence}")
            self._update_outcome()

    def _warn_if_all_are_services(self) -> bool:
        if not all(role.is_service for role in self._roles.values()):
            return False
        line = "every role is a service, so the job runs until you stop it (Ctrl-C)"
        self._log(f"stoker: {line}; set `required: true` in a roles file for the role that the job should wait for")
        return True

    def _required(self) -> list[RoleProcess]:
        """Return the roles whose end completes the job: all that are no services, or all if every role is one."""
        return [role for role in self._roles.values() if not role.is_service] or list(self._roles.values())

    # ---- ended roles ----

    def _handle_end(self, role: RoleProcess) -> None:
        verdict = role.verdict
        assert verdict is not None
        if role.stop_reason and verdict.status != "failed":  # the job stopped it, unless its own failure came first
            cause = "role.unhealthy" if "no longer" in role.stop_reason else "role.not-ready"
            verdict = role.verdict = launch_failures.make_role_verdict(cause, role.stop_reason, role.last_lines)
        fields = {"cause": verdict.cause, "status": verdict.status, "exit_code": verdict.exit_code}
        self._record.event("role-end", role=role.name, **fields, summary=verdict.summary)
        if self._is_run_dir_replaced() or self._is_ending:
            self._update_outcome()
        elif role.moved_dependency and (
            verdict.status == "stopped" or (verdict.status == "failed" and is_echo(verdict))
        ):
            self._log(f"stoker: role {role.name} is started again: {role.moved_dependency} has other addresses now")
            self._record.event("role-restart", role=role.name, cause="host.lost", wait_s=0.0)
            role.state, role.earliest_start = WAITING, 0.0
        elif verdict.status == "completed" and role.spec.restart != ALWAYS:
            self._log(f"✓ role {role.name}: {verdict.summary}")
            self._update_outcome()
            if not self._unreported_ends:
                self._report_rest_at = time.monotonic() + REPORT_DELAY_S
            self._unreported_ends.append(role)
        else:
            self._handle_failure(role, verdict)

    def _report_rest(self) -> None:
        """Report which roles the job still waits for, some seconds after a role has completed.

        The clients of a server that ended with exit code 0 are left alone: they may have asked it to end.
        """
        if not self._unreported_ends or time.monotonic() < self._report_rest_at:
            return
        ended, self._unreported_ends = self._unreported_ends, []
        if self._is_ending:
            return
        for server in (role for role in ended if role.spec.is_server and role.state == ENDED):
            clients = [role.name for role in self._running() if server.name in role.spec.after]
            if clients:
                line = f"role {server.name} has ended with exit code 0 while {' and '.join(clients)} may still need it"
                self._log(f"stoker: {line}", color=WARNING)
        required = [role.name for role in self._required() if role.child is not None]
        if required:
            hint = "a server is not waited for if it listens on STOKER_PORT or calls stoker.mark('READY')"
            self._log(f"stoker: the job continues until {_have_ended(required)}, too; {hint} (`stoker docs roles`)")

    def _handle_failure(self, role: RoleProcess, verdict: Verdict) -> None:
        """Start the role or all roles again, or end the job, as the role's restart rule says."""
        now = time.time()
        verdict = self._note_lost_host(role, verdict)
        role.failures = [failure for failure in role.failures if now - failure[0] < LOOP_S] + [(now, verdict)]
        same = 0
        if verdict.cause not in _EXTERNAL_CAUSES:
            same = sum(failure.cause == verdict.cause for _, failure in role.failures)
        is_final = verdict.status == "refused" or verdict.cause.startswith(_STOP_RULES) or bool(role.stranded_reason)
        if role.spec.restart == ALWAYS:
            if not is_final and same < LOOP_FAILURES:
                self._restart(role, verdict, now)
                return
            if same >= LOOP_FAILURES:
                line = f"it failed {same} times within {format_duration(LOOP_S)}: {verdict.summary}"
                evidence = (f"cause of each: {verdict.cause}", *verdict.evidence)
                loop = Verdict(
                    "failed", "role.restart-loop", line, verdict.exit_code, evidence=evidence, fix=verdict.fix
                )
                verdict = loop
        if role.spec.restart == JOB and not is_final and self._restarts < self._max_restarts:
            obstacle = self._placement.move_all() if self._placement.is_on_lost_host(role.name) else ""
            if not obstacle:
                self._restarts += 1
                count = f"({self._restarts} of {self._max_restarts})"
                line = f"role {role.name}: {verdict.summary}; starting all roles again {count}"
                self._log(f"stoker: {line}", color=WARNING)
                self._record.event("restart", role=role.name, cause=verdict.cause, attempt=self._restarts)
                self._is_restarting = True
                return
            verdict = replace(verdict, summary=f"{verdict.summary}; without it: {obstacle}")
        self._outcome = self._blame.judge(role, verdict)

    def _restart(self, role: RoleProcess, verdict: Verdict, now: float) -> None:
        """Start one role again, immediately or after 1, 2, 4 ... s if its last starts did not work."""
        worked = role.was_ready if role.spec.ready is not None else now - role.started_at > HEALTHY_S
        role.quick_failures = 0 if worked else role.quick_failures + 1
        wait = 0.0 if role.quick_failures < 2 else min(MAX_WAIT_S, 2.0 ** (role.quick_failures - 2))
        delay = f" in {wait:.0f} s" if wait else ""
        self._log(f"stoker: role {role.name}: {verdict.summary}; starting it again{delay}", color=WARNING)
        self._record.event("role-restart", role=role.name, cause=verdict.cause, wait_s=wait)
        role.state, role.earliest_start = WAITING, now + wait
        if self._placement.is_on_lost_host(role.name):
            self._move(role, verdict)

    # ---- lost hosts ----

    def _note_lost_host(self, role: RoleProcess, verdict: Verdict) -> Verdict:
        """Note a host that a role has lost.

        A role that could be started before, and now can't because a host does not respond, has also lost that host.
        """
        host = (verdict.host or "") if verdict.cause in HOST_GONE else ""
        if verdict.status == "refused" and role.starts > 1:
            host = next((slot.host for slot in role.slots if slot.host and slot.host in verdict.summary), "")
            if host:
                summary = role.stranded_reason or f"host {host} is lost: {verdict.summary}"
                verdict = replace(
                    launch_failures.make_role_verdict("host.lost", summary, (verdict.summary,)), host=host
                )
        if host:
            self._placement.lose(host)
        elif verdict.status != "refused":
            role.stranded_reason = ""
            self._placement.regain(role.name)
        return verdict

    def _move(self, role: RoleProcess, verdict: Verdict) -> None:
        """Move a role to other hosts. If none fits, the old host is tried once more: maybe only its agent died."""
        addresses = role.addresses
        obstacle = self._placement.move(role.spec)
        role.stranded_reason = f"{verdict.summary}; {obstacle}" if obstacle else ""
        if obstacle:
            self._log(f"stoker: role {role.name} stays where it was: {obstacle}", color=WARNING)
            return
        hosts = list(dict.fromkeys(slot.host for slot in role.slots))
        self._record.event("role-moved", role=role.name, hosts=hosts)
        self._log(f"stoker: role {role.name} moves: it is on {' and '.join(hosts)} now")
        for client in self._running():
            if role.name in client.spec.after and role.addresses != addresses and not client.stop_signal:
                client.moved_dependency = role.name
                client.send(signal.SIGTERM)

    # ---- the end of the job ----

    def _update_outcome(self) -> None:
        """Set the outcome if the job is complete, or stopped with no role left."""
        if self._outcome is not None or self._is_restarting:
            return
        if self._stop_signal:
            if not self._running():
                self._outcome = self._stopped_verdict()
            return
        required = self._required()
        if all(role.state == ENDED and role.is_ready for role in required):
            ended = " and ".join(role.name for role in required)
            rest = [role.name for role in self._running()]
            stopped = f"; {' and '.join(rest)} stopped" if rest else ""
            self._outcome = Verdict("completed", "completed", f"{ended} ended with exit code 0{stopped}", 0)

    def _stopped_verdict(self) -> Verdict:
        stopped_by = f"stopped by {signal.Signals(self._stop_signal).name}"
        parts = [stopped_by]
        for role in self._required():
            if role.verdict:
                parts.append(f"{role.name}: {role.verdict.summary.removeprefix(stopped_by).lstrip('; ')}")
        fixes = launch_failures.terminal_advice(self._stop_signal)
        return Verdict("stopped", "launch.stopped", "; ".join(parts), 128 + self._stop_signal, fix=fixes)

    def _stop_roles(self) -> None:
        """Stop the roles. The services go last, unless there was a failure: the others may need them to save."""
        running = self._running()
        failed = self._outcome is not None and self._outcome.status == "failed"
        if not failed and not self._is_restarting:
            running = [role for role in running if not role.is_service] or running
        for role in running:
            if not role.stop_signal:
                role.send(self._stop_signal or signal.SIGTERM)

    def _handle_signals(self) -> None:
        while signum := self._signals.take():
            if signum == signal.SIGTSTP:
                self._suspend()
                continue
            name = signal.Signals(signum).name
            is_second = bool(self._stop_signal)
            self._stop_signal = self._stop_signal or signum
            self._record.event("stop", signal=name, now=is_second)
            if is_second or signum == signal.SIGKILL:
                self._log(f"stoker: {name}: killing the ranks now")
                for role in self._roles.values():
                    role.kill_ranks()
                continue
            self._log(f"stoker: {name}: asking the roles to save and end; a second signal kills them")
            self._update_outcome()

    def _suspend(self) -> None:
        for role in self._running():
            role.suspend()
        signal.raise_signal(signal.SIGSTOP)
        for role in self._running():
            role.resume()


def _have_ended(roles: Sequence[str]) -> str:
    return f"{' and '.join(roles)} {'has' if len(roles) == 1 else 'have'} ended"
