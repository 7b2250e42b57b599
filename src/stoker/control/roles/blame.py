"""Whose failure ended a job: a role may have failed only because a server that it asks was gone."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from stoker.contract.errors import EX_SOFTWARE
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import frozen, replace
from stoker.contract.units import format_duration
from stoker.control.roles.role import AUTO
from stoker.control.roles.role_process import ENDED, UP, RoleRun
from stoker.control.verdict import launch_failures

_LOST = re.compile(
    r"(?i)connect|connrefused|reset by peer|timed? ?out|unreachable|broken pipe|max retries|\beof\b|disconnected"
)
BEFORE_S = 60.0  # a role that failed this long before one that waits for it is the cause
# Rewards that teach nothing may be those of a dead server: a reward of the user's own often makes 0 of a lost connection.
_TAUGHT_NOTHING = ("grpo.no-signal", "grpo.identical")
HOST_GONE = ("host.lost", "host.agent-lost")
DOUBT_S = 2.0  # a server's end is known so much later than what its clients make of it


def is_echo(verdict: Verdict) -> bool:
    """It may be what a role makes of another's end."""
    if verdict.cause in HOST_GONE:
        return False
    return verdict.cause in _TAUGHT_NOTHING or _LOST.search(verdict.summary) is not None


@frozen
class Doubt:
    """A role's failure that may be only the echo of another's: decided when that is known, or is not."""

    role: RoleRun
    verdict: Verdict
    when: float
    looks: Mapping[str, int]  # role it waits for -> looks at its health until then


class Blame:
    def __init__(self, roles: Mapping[str, RoleRun], run_id: str) -> None:
        self._roles, self._id = roles, run_id
        self._doubt: Doubt | None = None

    @property
    def in_doubt(self) -> bool:
        return self._doubt is not None

    def judge(self, role: RoleRun, verdict: Verdict) -> Verdict | None:
        """The job's verdict, for a failure that ends it. None: in doubt, and `decided` will have it."""
        doubt = Doubt(role, verdict, time.time(), self._look_again(role) if is_echo(verdict) else {})
        if doubt.looks and self._doubt is None:
            self._doubt = doubt
            return None
        return self._verdict(doubt)

    def decided(self) -> Verdict | None:
        """Once the servers that the failed role asks have been looked at."""
        doubt = self._doubt
        if doubt is None:
            return None
        waited = time.time() - doubt.when
        guilty = any(self._trouble(name, doubt) is not None for name in doubt.looks)
        if guilty or (waited > DOUBT_S and all(self._is_looked_at(*look, waited) for look in doubt.looks.items())):
            self._doubt = None
            return self._verdict(doubt)
        return None

    def _look_again(self, role: RoleRun) -> dict[str, int]:
        """At the servers that it asks: each with the number of looks before."""
        found = {}
        for name in role.spec.after:
            watching = self._roles[name].watching
            if watching is not None and watching.goes_on:
                found[name] = watching.looks
                watching.look_now()
        return found

    def _is_looked_at(self, name: str, before: int, waited: float) -> bool:
        watching = self._roles[name].watching
        return watching is None or watching.looks > before or waited > watching.longest_look_s

    def _trouble(self, name: str, doubt: Doubt) -> tuple[float, Verdict] | None:
        """What is wrong with a role that this one waits for, or was just before, and since when."""
        other = self._roles[name]
        if other.state == ENDED and other.is_ready and other.spec.serves:
            if not is_echo(doubt.verdict):
                return None  # its clients may have told it to end
            line = f"it ended with exit code 0 while {doubt.role.name} still needed it"
            return other.ended, launch_failures.of_role("role.ended", line, other.last_lines)
        if other.failures and (not other.is_ready or doubt.when - other.failures[-1][0] < BEFORE_S):
            return other.failures[-1]
        watching = other.watching
        if watching is not None and other.state == UP and watching.newest:
            line = f"it no longer answers: {watching.newest}"
            return watching.wrong_since, launch_failures.of_role("role.unhealthy", line, other.last_lines)
        return None

    def _verdict(self, doubt: Doubt) -> Verdict:
        """Of the role that is to blame: one that failed before, and that this one waits for, comes first."""
        role, verdict = doubt.role, doubt.verdict
        for name in role.spec.after:
            trouble = self._trouble(name, doubt)
            if trouble is None:
                continue
            when, cause = trouble
            down = not self._roles[name].is_ready or cause.cause.startswith("role.")
            if is_echo(verdict) and (down or verdict.cause not in _TAUGHT_NOTHING):
                echo = f"then role {role.name}: {verdict.summary}"
                return self._of_role(name, replace(cause, evidence=(*cause.evidence, echo)))
            before = f"role {name} had failed {format_duration(max(doubt.when - when, 0.0))} before: {cause.summary}"
            verdict = replace(verdict, evidence=(*verdict.evidence, before))
        return self._of_role(role.name, verdict)

    def _of_role(self, name: str, verdict: Verdict) -> Verdict:
        code, log = verdict.exit_code or EX_SOFTWARE, f"stoker logs {self._id} --role {name}"
        fix = tuple(line.replace("stoker logs RUN --role NAME", "stoker logs") for line in verdict.fix)
        fix = tuple(line.replace("stoker logs", log) for line in fix)
        port = self._roles[name].given.port if verdict.cause == "net.port-in-use" else 0
        fixed = self._roles[name].spec.port != AUTO
        other = "port: auto takes a free one" if fixed else "it was free on this machine; write a number for port"
        known = (f"its port is {port}; {other}",) if port else ()
        evidence = (*verdict.evidence, *known, f"the role's own record: `stoker why {self._id}/{name}`")
        summary = f"role {name}: {verdict.summary}"
        return replace(verdict, status="failed", summary=summary, exit_code=code, rank=None, evidence=evidence, fix=fix)
