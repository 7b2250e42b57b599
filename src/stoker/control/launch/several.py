"""What a run with several hosts has beyond one machine's: who takes part, where they reach each other, and when it goes
on without one.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.contract.shape import replace
from stoker.contract.shapes import Verdict
from stoker.control.cluster import transport
from stoker.control.launch.attempt import Attempt
from stoker.control.launch.members import Unusable, short
from stoker.control.launch.membership import Membership, Tell
from stoker.control.launch.muster import Muster
from stoker.control.launch.network import BetweenHosts
from stoker.control.launch.orders import Towards
from stoker.control.launch.plan import RunPlan
from stoker.control.launch.preflight import check_legal
from stoker.control.launch.restarts import Again
from stoker.control.launch.runplace import RunPlace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.launch.carrying import Carrying


class Several:
    def __init__(self, muster: Muster, say: Callable[[str], None], tell: Tell) -> None:
        self._muster = muster
        self._say = say
        self._between = BetweenHosts(muster)
        self._carrying: Carrying | None = None
        if muster.options.sync or muster.options.stage:
            from stoker.control.launch.carrying import Carrying

            self._carrying = Carrying(muster, say)
        bring = self._carrying.to_late if self._carrying is not None else None
        self.membership = Membership(muster, say, tell, self._between.fitness, self._between.unfit, bring)

    def meet(self, place: RunPlace) -> None:
        """All must answer; with --min-hosts so many, and the others may come later."""
        try:
            self._muster.meet(place)
        except Unusable as missing:
            if not self.start_without(missing):
                raise

    def start_without(self, missing: Unusable) -> bool:
        """False: too few would be left, or all are wanted."""
        self.lose(missing)
        if not self._muster.options.min_hosts or not self.membership.enough:
            return False
        self.membership.settle()
        for host, why in missing.hosts.items():
            self._say(f"stoker: host {host} can't be used: {short(why)}; starting with {self.membership.here}")
        return True

    def prepare(self, plan: RunPlan, place: RunPlace) -> list[str]:
        """Before any rank starts: lines to say. What can't work is refused, all hosts together."""
        options = self._muster.options
        if self._carrying is not None:
            self._carrying.to_all()
        self._between.find_ways()
        lines = [*self._unshared(), *self._between.check_ready(plan, place)]
        if options.no_preflight:
            return lines
        check_legal(options, plan)
        self._between.check_program(plan)
        return lines + self._between.check_each_other()

    def _unshared(self) -> list[str]:
        assert self._muster.hosts is not None
        by_ssh = [
            host for host in self._muster.by_name.values() if not host.here and host.name not in self._muster.hosts.srun
        ]
        why = transport.unshared() if by_ssh else ""
        return [f"! ssh connections are not shared: {why}; every command makes its own"] if why else []

    def plan_again(self, plan: RunPlan) -> RunPlan:
        """For those that take part now."""
        made = self._muster.plan_again(list(plan.argv))
        if not self._muster.options.no_preflight:
            check_legal(self._muster.options, made)
        self._between.find_ways()
        return made

    @property
    def master(self) -> str:
        return self._between.master

    def towards(self, host: str) -> Towards:
        return self._between.towards(host)

    def lose(self, gone: Unusable) -> None:
        for member in self._muster.members.all:
            if member.host in gone.hosts:
                member.lose(short(gone.hosts[member.host]))

    def regroup(self, verdict: Verdict, attempt: Attempt) -> Again | None:
        """The next attempt costs no restart where a host was lost and enough are left, or where one is to join."""
        if attempt.stop_signal:
            return None
        if verdict.cause == "launch.regroup":
            return Again(f"starting again with host {attempt.regrouping}")
        if verdict.cause == "host.lost" and self.membership.enough:
            gone = sum(1 for member in self._muster.members.all if member.gone)
            left = f"{len(self._muster.members.all) - gone} of {len(self._muster.by_name)} hosts"
            return Again(f"{verdict.summary}; going on with {left}, from the last checkpoint")
        return None

    def too_few(self, verdict: Verdict) -> Verdict:
        least = self._muster.options.min_hosts
        said = (
            f"{self.membership.here} left, and"
            f" {f'--min-hosts is {least}' if least else 'without --min-hosts all are needed'}"
        )
        lost = "; ".join(f"{name}: {one.why}" for name, one in self.membership.lost.items())
        if verdict.cause == "host.lost" and len(self.membership.lost) == len(self._muster.by_name) > 1:
            summary = f"all {len(self._muster.by_name)} hosts are lost at once: is this machine's own network down?"
            return replace(verdict, retryable=False, host=None, summary=summary, evidence=(*verdict.evidence, lost))
        if verdict.cause == "host.lost":
            return replace(
                verdict, retryable=False, summary=f"{verdict.summary}; {said}", evidence=(*verdict.evidence, lost)
            )
        return replace(
            verdict, retryable=False, summary=f"{verdict.summary}; then {said}", evidence=(*verdict.evidence, lost)
        )
