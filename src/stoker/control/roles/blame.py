"""Decides which role's failure ended a job: a role may have failed only because its server was gone."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from stoker.contract.errors import EX_SOFTWARE
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import frozen, replace
from stoker.contract.units import format_duration
from stoker.control.roles.role import AUTO
from stoker.control.roles.role_process import ENDED, UP, RoleProcess
from stoker.control.verdict import launch_failures

_LOST_CONNECTION = re.compile(
    r"(?i)connect|connrefused|reset by peer|timed? ?out|unreachable|broken pipe|max retries|\beof\b|disconnected"
)
RECENT_FAILURE_S = 60.0  # a server that failed this long before its client is the cause
# Rewards without a signal may be those of a dead server: a user's reward function often turns a lost connection into 0.
_NO_SIGNAL = ("grpo.no-signal", "grpo.identical")
HOST_GONE = ("host.lost", "host.agent-lost")
PENDING_S = 2.0  # the end of a server may be noticed this much later than the failure of its clients


def is_echo(verdict: Verdict) -> bool:
    """Return whether a failure may be the consequence of another role's end."""
    if verdict.cause in HOST_GONE:
        return False
    return verdict.cause in _NO_SIGNAL or _LOST_CONNECTION.search(verdict.summary) is not None


@frozen
class PendingFailure:
    """A failure that may be the echo of a server's. It is decided when the servers have been checked."""

    role: RoleProcess
    verdict: Verdict
    time: float
    checks: Mapping[str, int]  # server -> number of its health checks before the failure


class Blame:
    """Finds the role that is to blame for the end of a job."""

    def __init__(self, roles: Mapping[str, RoleProcess], run_id: str) -> None:
        self._roles = roles
        self._run_id = run_id
        self._pending: PendingFailure | None = None

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def judge(self, role: RoleProcess, verdict: Verdict) -> Verdict | None:
        """Return the job's verdict for a failure that ends it, or None while it is pending: `decide` will return it."""
        failure = PendingFailure(role, verdict, time.time(), self._check_servers(role) if is_echo(verdict) else {})
        if failure.checks and self._pending is None:
            self._pending = failure
            return None
        return self._decide(failure)

    def decide(self) -> Verdict | None:
        """Return the verdict of the pending failure once the servers of the failed role have been checked, else None."""
        failure = self._pending
        if failure is None:
            return None
        waited = time.time() - failure.time
        is_found = any(self._find_server_failure(name, failure) is not None for name in failure.checks)
        is_checked = all(self._is_checked(name, before, waited) for name, before in failure.checks.items())
        if is_found or (waited > PENDING_S and is_checked):
            self._pending = None
            return self._decide(failure)
        return None

    def _check_servers(self, role: RoleProcess) -> dict[str, int]:
        """Start a health check of a role's servers. Returns the number of earlier checks of each."""
        checks = {}
        for name in role.spec.after:
            watch = self._roles[name].ready_watch
            if watch is not None and watch.repeats:
                checks[name] = watch.checks
                watch.check_now()
        return checks

    def _is_checked(self, name: str, checks_before: int, waited: float) -> bool:
        watch = self._roles[name].ready_watch
        return watch is None or watch.checks > checks_before or waited > watch.max_check_s

    def _find_server_failure(self, name: str, failure: PendingFailure) -> tuple[float, Verdict] | None:
        """Return when and how a server of the failed role failed, if it did shortly before or is failing now."""
        server = self._roles[name]
        if server.state == ENDED and server.is_ready and server.spec.is_server:
            if not is_echo(failure.verdict):
                return None  # its clients may have asked it to end
            line = f"it ended with exit code 0 while {failure.role.name} still needed it"
            return server.ended_at, launch_failures.make_role_verdict("role.ended", line, server.last_lines)
        if server.failures and (not server.is_ready or failure.time - server.failures[-1][0] < RECENT_FAILURE_S):
            return server.failures[-1]
        watch = server.ready_watch
        if watch is not None and server.state == UP and watch.problem:
            line = f"it no longer responds: {watch.problem}"
            return watch.problem_since, launch_failures.make_role_verdict("role.unhealthy", line, server.last_lines)
        return None

    def _decide(self, failure: PendingFailure) -> Verdict:
        """Return the verdict of the role to blame: of a server that failed before the role that needs it, if there is one."""
        role, verdict = failure.role, failure.verdict
        for name in role.spec.after:
            trouble = self._find_server_failure(name, failure)
            if trouble is None:
                continue
            failed_at, cause = trouble
            is_down = not self._roles[name].is_ready or cause.cause.startswith("role.")
            if is_echo(verdict) and (is_down or verdict.cause not in _NO_SIGNAL):
                echo = f"then role {role.name}: {verdict.summary}"
                return self._describe(name, replace(cause, evidence=(*cause.evidence, echo)))
            before = format_duration(max(failure.time - failed_at, 0.0))
            line = f"role {name} had failed {before} before: {cause.summary}"
            verdict = replace(verdict, evidence=(*verdict.evidence, line))
        return self._describe(role.name, verdict)

    def _describe(self, name: str, verdict: Verdict) -> Verdict:
        """Return a role's verdict as that of the job: it names the role, and its fixes show the role's logs."""
        role = self._roles[name]
        log_command = f"stoker logs {self._run_id} --role {name}"
        fixes = (fix.replace("stoker logs RUN --role NAME", "stoker logs") for fix in verdict.fix)
        fixes = (fix.replace("stoker logs", log_command) for fix in fixes)
        evidence = list(verdict.evidence)
        if verdict.cause == "net.port-in-use" and role.settings.port:
            advice = "it was free on this machine; set port to a number"
            if role.spec.port != AUTO:
                advice = "set port: auto for a free one"
            evidence.append(f"its port is {role.settings.port}; {advice}")
        evidence.append(f"the role's own record: `stoker why {self._run_id}/{name}`")
        return replace(
            verdict,
            status="failed",
            summary=f"role {name}: {verdict.summary}",
            exit_code=verdict.exit_code or EX_SOFTWARE,
            rank=None,
            evidence=tuple(evidence),
            fix=tuple(fixes),
        )
