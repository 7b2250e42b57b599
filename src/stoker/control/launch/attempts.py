"""Attempt after attempt, until a verdict is final: starts the ranks, follows them, judges, and decides whether and with
whom to start again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from stoker.contract import checkpoints, layout
from stoker.contract.names import Refusal
from stoker.contract.shape import replace
from stoker.contract.shapes import Verdict
from stoker.control.launch import description, orders
from stoker.control.launch.attempt import Attempt
from stoker.control.launch.members import Unusable
from stoker.control.launch.muster import Interrupted, Muster
from stoker.control.launch.output import Output
from stoker.control.launch.plan import RunPlan, common_environment
from stoker.control.launch.reports import Hearing
from stoker.control.launch.request import Request, by_hand
from stoker.control.launch.runplace import RunPlace
from stoker.control.launch.supervision import Following
from stoker.control.record.writer import RunRecord

TYPE_CHECKING = False
if TYPE_CHECKING:  # a run on one machine does not load it
    from stoker.control.launch.several import Several


class Attempts:
    """`several`: None on one machine."""

    _record: RunRecord

    def __init__(
        self,
        request: Request,
        muster: Muster,
        several: Several | None,
        output: Output,
        signals: list[int],
        say: Callable[[str], None],
    ) -> None:
        self.request = request
        self.options = request.options
        self._muster = muster
        self._several = several
        self._output = output
        self._signals = signals
        self._say = say
        self._cwd = os.getcwd()
        self._endpoint: tuple[str, int] | None = None
        self._interface = ""  # towards the other machines, where those are started by hand
        self._common: dict[str, dict[str, str]] = {}

    # ---- before each ----

    def reserve(self, plan: RunPlan) -> RunPlan:
        """The store's address and port, for the attempt to come. Where other machines are started by hand, the plan
        gets its numbers here.
        """
        if by_hand(self.options):
            from stoker.control.launch.nodes import join

            plan, self._endpoint, self._interface = join(self._muster, self.request, plan, self._say)
            self._output.replan(plan)
        else:
            self._endpoint = self._muster.reserve(
                self._several.master if self._several else self.options.master_addr or "127.0.0.1"
            )
        return plan

    def equip(self, plan: RunPlan, place: RunPlace) -> None:
        """What every rank of a host is given."""
        machines = self._muster.machines
        self._common = {
            host: common_environment(plan, self.request, os.environ, place.id, place.dir, machines[host].cores, host)
            for host in plan.hosts
        }

    # ---- all of them ----

    def run(self, plan: RunPlan, place: RunPlace, record: RunRecord) -> Verdict:
        from stoker.control.launch.restarts import Restarts

        self._record = record
        number = place.first_attempt
        restarts = Restarts(self.options)
        env: tuple[tuple[str, str], ...] = ()
        while True:
            attempt = Attempt(number, plan)
            began = time.monotonic()
            verdict = self._one_attempt(attempt, place, env)
            regroup = self._several.regroup(verdict, attempt) if self._several is not None else None
            if regroup is not None:
                again, env = regroup, restarts.env()
            else:
                if self._several is not None and verdict.cause == "host.lost":
                    self._several.membership.settle()
                    verdict = self._several.too_few(verdict)
                verdict, decided = restarts.decide(verdict, attempt, time.monotonic() - began)
                if decided is None or (
                    self._several is None and any(member.gone for member in self._muster.members.all)
                ):
                    return self._diagnosed(verdict, plan) if verdict.cause == "gpu.busy" else verdict
                again, env = decided, decided.env
            number += 1
            self._record.event(
                "restart",
                attempt=number,
                cause=verdict.cause,
                rank=verdict.rank,
                wait_s=again.wait_s,
                env=[name for name, _ in env],
            )
            self._say(f"stoker: {again.line}")
            description.notify(self.options.notify, verdict, "restarting", self._say, wait=False)
            try:
                self._muster.pause(again.wait_s)
                plan, bad = self._without_failed_card(plan, place, verdict) if again.probe else (plan, None)
                if self._several is not None and bad is None:
                    plan, bad = self._with_those_there(plan, place, verdict)
                if self._endpoint is None and bad is None:  # a fresh port for every attempt
                    plan = self.reserve(plan)
            except Interrupted as stop:
                name = signal.Signals(stop.signum).name
                said = f"stopped by {name} between two attempts; the last one: {verdict.summary}"
                return Verdict(
                    "stopped",
                    "launch.stopped",
                    said,
                    128 + stop.signum,
                    evidence=verdict.evidence,
                    run=place.id,
                    attempt=verdict.attempt,
                )
            if bad is not None:
                return bad

    def _with_those_there(self, plan: RunPlan, place: RunPlace, verdict: Verdict) -> tuple[RunPlan, Verdict | None]:
        """The next attempt's plan, with the hosts that are there now. A verdict where they are too few."""
        assert self._several is not None
        changed = False
        while True:
            changed = self._several.membership.settle() or changed
            if not self._several.membership.enough:
                return plan, self._several.too_few(verdict)
            try:
                if changed:
                    plan = self._several.plan_again(plan)
                    self._output.replan(plan)
                    self.equip(plan, place)
                    for line in plan.lines:
                        self._say(line)
                plan = self.reserve(plan)
                return plan, None
            except Unusable as gone:
                self._several.lose(gone)
            except Refusal as refusal:
                if self._several.membership.joined:
                    self._several.membership.send_back(refusal.line)
                    changed = True
                    continue
                said = f"with {self._several.membership.here}: {refusal.line}"
                return plan, replace(verdict, retryable=False, evidence=(*verdict.evidence, said))

    def _diagnosed(self, verdict: Verdict, plan: RunPlan) -> Verdict:
        card = plan.place(verdict.rank).gpu if verdict.rank is not None else None
        if card is None or "" not in self._muster.machines:
            return verdict
        from stoker.control.launch import preflight

        try:
            self._muster.look()
        except (Refusal, Interrupted) as problem:
            return replace(verdict, evidence=(*verdict.evidence, f"it could not be looked at again: {problem}"))
        return replace(verdict, evidence=(*verdict.evidence, *preflight.diagnosis(self._muster.machines[""], card)))

    def _without_failed_card(self, plan: RunPlan, place: RunPlace, verdict: Verdict) -> tuple[RunPlan, Verdict | None]:
        """The guilty rank's card is proved; a bad one is left out of the next attempt. A verdict where that leaves too
        few.
        """
        card = plan.place(verdict.rank).gpu if verdict.rank is not None else None
        if card is None or "" not in self._muster.machines:
            return plan, None
        from stoker.control.launch import preflight

        broken = preflight.proof(self._muster.machines[""], card)
        if not broken:
            return plan, None
        self._muster.left_out[card.uuid] = broken
        self._record.event("gpu-left-out", gpu=card.uuid, label=card.label, why=broken)
        self._say(f"stoker: {card.label} ({card.uuid}) fails its proof ({broken}): it is left out")
        try:
            again = self._muster.plan_again(list(plan.argv))
            if not self.options.no_preflight:
                preflight.check_legal(self.options, again)
        except Refusal as refusal:
            said = (f"{card.label} fails its proof: {broken}", f"without it: {refusal.line}")
            return plan, replace(verdict, retryable=False, evidence=(*verdict.evidence, *said))
        self._output.replan(again)
        self.equip(again, place)
        for line in again.lines:
            self._say(line)
        return again, None

    # ---- one attempt ----

    def _one_attempt(self, attempt: Attempt, place: RunPlace, env: tuple[tuple[str, str], ...]) -> Verdict:
        plan, number = attempt.plan, attempt.number
        self._record.attempt(number)
        self._output.begin(number)
        assert self._endpoint is not None
        (address, port), self._endpoint = self._endpoint, None
        # Not sooner: what an agent still says of the attempt before belongs to that one.
        self._muster.listener = Hearing(
            attempt, self._record, self._output, self.options, self._say, lambda: self._all_up(plan)
        ).hear
        self._record.event(
            "attempt",
            attempt=number,
            world_size=plan.world_size,
            master_addr=address,
            master_port=port,
            hosts=list(plan.hosts),
        )
        self._start(plan, place, number, address, port, dict(env))
        attempt.begin_watch(self.options.hang_timeout)
        membership = self._several.membership if self._several else None
        following = Following(attempt, self._muster, self._record, self._output, self._signals, self._say, membership)
        following.follow()
        following.finish()
        self._record.close_logs()
        from stoker.control.verdict.judge import judge

        attempt.note_bad_numbers()
        verdict = judge(attempt.evidence(checkpoints.newest(place.dir)))
        if verdict.cause == "host.lost":  # when it happened nobody saw
            return replace(verdict, run=place.id, attempt=number, evidence=(*verdict.evidence, *attempt.notes))
        detected = round(
            attempt.first_failure
            - min(
                (end.time for end in attempt.ends.values() if end.rank == verdict.rank), default=attempt.first_failure
            ),
            3,
        )
        seen = (
            attempt.suspected_s
            if attempt.suspected_s is not None and _is_stall(verdict)
            else max(detected, 0.0)
            if attempt.first_failure
            else None
        )
        return replace(
            verdict, run=place.id, attempt=number, detected_s=seen, evidence=(*verdict.evidence, *attempt.notes)
        )

    def _all_up(self, plan: RunPlan) -> None:
        """Every rank is on its way: time for what nobody should wait for."""
        self._record.save(
            os.path.join(self._record.dir, layout.RUN),
            description.enrich(self._record.dir, self.request, plan),
            durable=False,
        )

    def _start(
        self, plan: RunPlan, place: RunPlace, number: int, address: str, port: int, more: dict[str, str]
    ) -> None:
        told = {
            **more,
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(number - place.first_attempt),
        }
        for member in self._muster.members.all:
            here = orders.Towards(workdir=self._cwd, interface=self._interface)
            to = self._several.towards(member.host) if self._several else here
            member.say(orders.start(plan, self.options, number, to, os.environ, self._common[member.host], told))


def _is_stall(verdict: Verdict) -> bool:
    return verdict.cause.startswith("hang.") or verdict.cause.endswith((".diverged", ".unequal-batches"))
