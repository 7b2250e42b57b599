"""A job under way: who starts when, what happens when a role ends, and when the job is over."""

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
from stoker.control.roles.gpu_sharing import GpuSharing
from stoker.control.roles.role import ALWAYS, JOB, variable
from stoker.control.roles.role_process import ENDED, STARTING, UP, WAITING, RoleRun
from stoker.control.verdict import launch_failures

TICK_S = 0.1
REDRAW_S = 1.0  # a rank writes no sooner down where it is
LONGEST_WAIT_S = 30.0
SERVICES_S = 1.0  # between two searches for roles that have become services
REPORT_LEFT_S = 10.0  # after a role has ended: the others may be ending, too, or be servers that don't listen yet
LIVED_S = 60.0  # one that lived as long was no crash loop
LOOP, LOOP_S = 5, 600.0  # the same failure so often within this time is a loop
_CHANCE = ("rank.killed", "rank.signal", "hang.stopped")  # somebody's doing from outside: no sign of a loop
_STOP_RULES = "grpo."  # a run that ended itself for a reason that stays: nobody starts it again


class RunningJob:
    """The job under way."""

    def __init__(
        self,
        roles: Sequence[RoleRun],
        seating: GpuSharing,
        record: RunWriter,
        run_id: str,
        signals: SignalQueue,
        say: Callable[..., None],
        max_restarts: int,
        environment: Mapping[str, str],
        handles: Sequence[int],
        watched: bool = False,
    ) -> None:
        """`watched`: there is a terminal to draw bars on. `environment` and `handles`: what each role is started with. `max_restarts`: of the whole job."""
        self._roles = {role.name: role for role in roles}
        self._seating = seating
        self._record, self._id = record, run_id
        self._say, self._signals = say, signals
        self._most_restarts = max_restarts
        self._environment, self._handles = dict(environment), tuple(handles)
        self._selector = selectors.DefaultSelector()
        self._restarts = 0  # of the whole job
        self._outcome: Verdict | None = None  # known; what still runs is being stopped
        self._again = ""  # the role for whose failure all are started again
        self._blame = Blame(self._roles, run_id)
        self._stop = 0  # a signal that we got
        self._watched, self._drawn = watched, 0.0
        self._searched_services = 0.0
        self._ended_unreported: list[RoleRun] = []  # completed roles, until it is reported what the job waits for
        self._report_left_at = 0.0

    def run(self) -> Verdict:
        self._warn_if_all_are_services()
        while True:
            self._start_those_that_can()
            for key, _ in self._selector.select(TICK_S):
                if not key.data.read(key.fd):
                    self._selector.unregister(key.fd)
            self._heed_signals()
            for role in self._roles.values():
                self._look_at(role)
            self._find_services()
            self._report_what_is_left()
            self._draw()
            self._outcome = self._outcome or self._blame.decided()
            if all(role.child is None for role in self._roles.values()) and (self._outcome or self._again):
                if self._outcome is not None:
                    return replace(self._outcome, run=self._id)
                self._begin_again()
            if self._outcome is not None or self._again or self._stop:
                self._stop_the_rest()

    def _draw(self) -> None:
        """One bar, of the role that the job is about."""
        if not self._watched or time.monotonic() - self._drawn < REDRAW_S:
            return
        self._drawn = time.monotonic()
        any(role.draw() for role in sorted(self._living(), key=lambda role: role.is_service))

    # ---- starting ----

    def _start_those_that_can(self) -> None:
        if self._outcome is not None or self._again or self._stop or self._blame.in_doubt:
            return
        now = time.time()
        for role in self._roles.values():
            if role.state != WAITING or role.start_at > now:
                continue
            if all(self._roles[name].is_ready for name in role.spec.after):
                self._start(role)

    def _start(self, role: RoleRun) -> None:
        environment = {**self._environment, env_vars.JOB: self._id}
        for other in self._roles.values():
            if other is not role and other.addresses:
                environment[variable(other.name)] = ",".join(f"{host}:{port}" for host, port in other.addresses)
        if self._exchanged():
            return
        self._record.event("role-start", role=role.name, start=role.starts)
        try:
            role.start(environment, self._handles)
        except OSError as problem:
            self._fail(
                role, Verdict("failed", "launch.not-started", f"it could not be started: {problem}", EX_SOFTWARE)
            )
            return
        for pipe in role.pipes:
            self._selector.register(pipe, selectors.EVENT_READ, role)
        if role.spec.ready is not None:
            self._say(f"stoker: role {role.name} is started; waiting for {role.spec.ready.words}")

    def _exchanged(self) -> bool:
        """Somebody has put another folder in the place of the job's: nothing is started or believed there."""
        try:
            self._record.require_place()
        except Refusal as refusal:
            self._outcome = self._outcome or replace(launch_failures.refused(refusal), status="failed")
            return True
        return False

    # ---- following ----

    def _look_at(self, role: RoleRun) -> None:
        if role.child is None:
            return
        watching = role.watching
        if watching is not None:
            if not watching.run_dir and (run := role.find_record()) is not None:
                watching.run_dir = run.dir
            if role.state == STARTING and watching.ready.is_set():
                role.state, role.was_ready = UP, True
                took = time.time() - role.began
                self._record.event("role-ready", role=role.name, seconds=round(took, 3))
                self._say(f"✓ role {role.name} is ready after {format_duration(took)}")
            if watching.served != role.served and any(watching.served):
                role.served = watching.served
                counts = [{"requests": one.requests, "tokens": one.tokens} if one else None for one in role.served]
                self._record.event("role-served", role=role.name, replicas=counts)
            rule = role.spec.ready
            assert rule is not None
            if role.state == STARTING and not role.stopping and time.time() - role.began > rule.timeout:
                found = f": {watching.newest}" if watching.newest else ""
                role.why = f"it was not ready after {format_duration(rule.timeout)}: no {_short(rule.words)}{found}"
                role.send(signal.SIGTERM)
            if watching.unhealthy and not role.stopping:
                role.why = f"it no longer answers: {watching.unhealthy}"
                role.send(signal.SIGTERM)
        if role.collect():
            self._ended(role)

    def _find_services(self) -> None:
        """Look for roles that have turned out to be services: the job doesn't wait for their end."""
        if self._outcome is not None or self._stop or time.monotonic() - self._searched_services < SERVICES_S:
            return
        self._searched_services = time.monotonic()
        for role in self._living():
            if role.is_service or not (reason := role.find_service_reason()):
                continue
            role.service_reason = reason
            self._record.event("role-service", role=role.name, reason=reason)
            if not self._warn_if_all_are_services():
                ends = [other.name for other in self._required() if other.state != ENDED]
                complete = f"; the job is complete when {' and '.join(ends)} {_has(ends)} ended" if ends else ""
                self._say(f"stoker: role {role.name} is a service: {reason}{complete}")
            self._settle()

    def _warn_if_all_are_services(self) -> bool:
        if not all(role.is_service for role in self._roles.values()):
            return False
        line = "every role is a service, so the job has no end of its own: it runs until you stop it (Ctrl-C)"
        self._say(f"stoker: {line}; set `required: true` in a roles file for a role whose end is the job's")
        return True

    def _required(self) -> list[RoleRun]:
        """Return the roles whose end completes the job: all that are no services, or all if every role is one."""
        return [role for role in self._roles.values() if not role.is_service] or list(self._roles.values())

    def _ended(self, role: RoleRun) -> None:
        verdict = role.verdict
        assert verdict is not None
        if role.why and verdict.status != "failed":  # it had not ended by itself
            cause = "role.unhealthy" if "no longer" in role.why else "role.not-ready"
            verdict = role.verdict = launch_failures.of_role(cause, role.why, role.last_lines)
        told = {"cause": verdict.cause, "status": verdict.status, "exit_code": verdict.exit_code}
        self._record.event("role-end", role=role.name, **told, summary=verdict.summary)
        if self._exchanged() or self._outcome is not None or self._again or self._stop:
            self._settle()
            return
        if role.follows and (verdict.status == "stopped" or (verdict.status == "failed" and is_echo(verdict))):
            self._say(f"stoker: role {role.name} is started again: {role.follows} has other addresses now")
            self._record.event("role-restart", role=role.name, cause="host.lost", wait_s=0.0)
            role.state, role.start_at = WAITING, 0.0
            return
        if verdict.status == "completed" and role.spec.restart != ALWAYS:
            self._say(f"✓ role {role.name}: {verdict.summary}")
            self._settle()
            if not self._ended_unreported:
                self._report_left_at = time.monotonic() + REPORT_LEFT_S
            self._ended_unreported.append(role)
            return
        self._fail(role, verdict)

    def _report_what_is_left(self) -> None:
        """Report which roles the job still waits for some seconds after a role has completed.

        The clients of a server that ended with exit code 0 are left alone: they may have told it to end.
        """
        if not self._ended_unreported or time.monotonic() < self._report_left_at:
            return
        ended, self._ended_unreported = self._ended_unreported, []
        if self._outcome is not None or self._again or self._stop:
            return
        for server in (role for role in ended if role.spec.serves and role.state == ENDED):
            clients = [role.name for role in self._living() if server.name in role.spec.after]
            if clients:
                line = f"role {server.name} has ended with exit code 0 while {' and '.join(clients)} may still need it"
                self._say(f"stoker: {line}", colour=WARNING)
        left = [role.name for role in self._required() if role.child is not None]
        if left:
            hint = "a server is not waited for if it listens on STOKER_PORT or calls stoker.mark('READY')"
            line = f"the job continues until {' and '.join(left)} {_has(left)} ended, too"
            self._say(f"stoker: {line}; {hint} (`stoker docs roles`)")

    def _settle(self) -> None:
        """Is the job over?"""
        if self._outcome is not None or self._again:
            return
        needed = self._required()
        if self._stop:
            if all(role.child is None for role in self._roles.values()):
                self._outcome = self._stopped_verdict()
            return
        if all(role.state == ENDED and role.is_ready for role in needed):
            ended = " and ".join(role.name for role in needed)
            others = [role.name for role in self._living()]
            rest = f"; {' and '.join(others)} stopped" if others else ""
            self._outcome = Verdict("completed", "completed", f"{ended} ended with exit code 0{rest}", 0)

    def _fail(self, role: RoleRun, verdict: Verdict) -> None:
        rule, now = role.spec.restart, time.time()
        verdict = self._without_lost_host(role, verdict)
        role.failures = [one for one in role.failures if now - one[0] < LOOP_S] + [(now, verdict)]
        same = 0 if verdict.cause in _CHANCE else sum(one.cause == verdict.cause for _, one in role.failures)
        final = verdict.status == "refused" or verdict.cause.startswith(_STOP_RULES) or bool(role.stranded)
        if rule == ALWAYS and not final and same < LOOP:
            worked = role.was_ready if role.spec.ready is not None else now - role.began > LIVED_S
            role.quick = 0 if worked else role.quick + 1
            wait = 0.0 if role.quick < 2 else min(LONGEST_WAIT_S, 2.0 ** (role.quick - 2))
            then = f" in {wait:.0f} s" if wait else ""
            self._say(f"stoker: role {role.name}: {verdict.summary}; starting it again{then}", colour=WARNING)
            self._record.event("role-restart", role=role.name, cause=verdict.cause, wait_s=wait)
            role.state, role.start_at = WAITING, now + wait
            self._leave_lost_hosts(role, verdict)
            return
        if rule == JOB and not final and self._restarts < self._most_restarts:
            why = self._seating.move_all() if self._seating.sits_on_lost(role.name) else ""
            if not why:
                self._restarts += 1
                times = f"({self._restarts} of {self._most_restarts})"
                line = f"role {role.name}: {verdict.summary}; starting all roles again {times}"
                self._say(f"stoker: {line}", colour=WARNING)
                self._record.event("restart", role=role.name, cause=verdict.cause, attempt=self._restarts)
                self._again = role.name
                return
            verdict = replace(verdict, summary=f"{verdict.summary}; without it: {why}")
        self._outcome = self._blame.judge(role, self._as_loop(verdict, same) if rule == ALWAYS else verdict)

    def _as_loop(self, verdict: Verdict, same: int) -> Verdict:
        """`same`: failures of this cause."""
        if same < LOOP:
            return verdict
        line = f"it failed {same} times within {format_duration(LOOP_S)}: {verdict.summary}"
        evidence = (f"cause of each: {verdict.cause}", *verdict.evidence)
        return Verdict("failed", "role.restart-loop", line, verdict.exit_code, evidence=evidence, fix=verdict.fix)

    def _without_lost_host(self, role: RoleRun, verdict: Verdict) -> Verdict:
        """Notes a host that is lost. A role that could be started once, and now can't since a host does not answer, has lost
        it, too.
        """
        gone = (verdict.host or "") if verdict.cause in HOST_GONE else ""
        if verdict.status == "refused" and role.starts > 1:
            gone = next((seat.host for seat in role.seats if seat.host and seat.host in verdict.summary), "")
            if gone:
                summary = role.stranded or f"host {gone} is lost: {verdict.summary}"
                verdict = replace(launch_failures.of_role("host.lost", summary, (verdict.summary,)), host=gone)
        if gone:
            self._seating.lose(gone)
        elif verdict.status != "refused":
            role.stranded = ""
            self._seating.regain(role.name)
        return verdict

    def _leave_lost_hosts(self, role: RoleRun, verdict: Verdict) -> None:
        """Its processes there go to other hosts. Where they have no place it is tried once more where it was: an agent may
        have died on a host that lives.
        """
        if not self._seating.sits_on_lost(role.name):
            return
        before = role.addresses
        why = self._seating.move(role.spec)
        role.stranded = f"{verdict.summary}; {why}" if why else ""
        if why:
            self._say(f"stoker: role {role.name} stays where it was: {why}", colour=WARNING)
            return
        hosts = list(dict.fromkeys(seat.host for seat in role.seats))
        self._record.event("role-moved", role=role.name, hosts=hosts)
        self._say(f"stoker: role {role.name} moves: it is on {' and '.join(hosts)} now")
        for other in self._living():
            if role.name in other.spec.after and role.addresses != before and not other.stopping:
                other.follows = role.name
                other.send(signal.SIGTERM)

    # ---- stopping ----

    def _heed_signals(self) -> None:
        while signum := self._signals.take():
            if signum == signal.SIGTSTP:
                self._suspend()
                continue
            name = signal.Signals(signum).name
            again = bool(self._stop)
            self._stop = self._stop or signum
            self._record.event("stop", signal=name, now=again)
            if again or signum == signal.SIGKILL:
                self._say(f"stoker: {name}: killing the ranks now")
                for role in self._roles.values():
                    role.hurry()
                continue
            self._say(f"stoker: {name}: asking the roles to save and end; a second signal kills them")
            self._settle()

    def _suspend(self) -> None:
        for role in self._living():
            role.pause()
        signal.raise_signal(signal.SIGSTOP)
        for role in self._living():
            role.resume()

    def _living(self, required: bool | None = None) -> list[RoleRun]:
        found = [role for role in self._roles.values() if role.child is not None]
        return found if required is None else [role for role in found if role.is_service != required]

    def _stop_the_rest(self) -> None:
        """Those that the job is about first: they may need the others to save."""
        failed = self._outcome is not None and self._outcome.status == "failed"
        mine = self._living() if failed or self._again else self._living(required=True) or self._living()
        for role in mine:
            if not role.stopping:
                role.send(self._stop or signal.SIGTERM)

    def _begin_again(self) -> None:
        self._again = ""
        for role in self._roles.values():
            role.state, role.start_at = WAITING, 0.0

    def _stopped_verdict(self) -> Verdict:
        name = signal.Signals(self._stop).name
        told = {role.name: role.verdict.summary for role in self._required() if role.verdict}
        parts = [f"{role}: {text.removeprefix(f'stopped by {name}').lstrip('; ')}" for role, text in told.items()]
        summary = "; ".join([f"stopped by {name}", *parts])
        fix = launch_failures.outlive_terminal(self._stop)
        return Verdict("stopped", "launch.stopped", summary, 128 + self._stop, fix=fix)


def _has(role_names: Sequence[str]) -> str:
    return "has" if len(role_names) == 1 else "have"


def _short(words: str) -> str:
    return words.removeprefix("its ").removeprefix("an ").removeprefix("a ").removeprefix("the ")
