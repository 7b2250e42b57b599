"""Makes a run's plan of what its agents found: looks, chooses, locks, and looks again where another was quicker."""

from __future__ import annotations

import os
import time

from stoker.contract.names import EX_TEMPFAIL, EX_UNAVAILABLE, Refusal
from stoker.contract.quantities import span
from stoker.contract.untrusted import printable
from stoker.control.launch.gpus import NotFree, marked
from stoker.control.launch.members import Member
from stoker.control.launch.output import wants_split
from stoker.control.launch.plan import RunPlan, make_plan
from stoker.control.machine.model import Machine
from stoker.control.machine.origin import gpu_lender, run_we_are_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.launch.live import LiveRun

_MOST_RACES = 20  # lost for a GPU's lock


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
                    raise NotFree(f"the GPUs are in use: {who}", EX_UNAVAILABLE, cause="gpu.busy")
            except NotFree as busy:
                if not self._options.wait:
                    raise
                if time.monotonic() > deadline:
                    line = f"waited {span(self._options.wait)}: {busy.line}"
                    raise Refusal(line, EX_TEMPFAIL, cause="gpu.busy") from busy
                if busy.line != announced:
                    announced = busy.line
                    self._say(f"stoker: waiting for up to {span(deadline - time.monotonic())}: {busy.line}")
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

    def _lent(self, member: Member) -> list[str]:
        """GPUs held by ourselves, by the run we are a rank of or the chain we are a stage of: not to lock again."""
        ours = tuple(f"run {run} (agent pid " for run in (self._agents.run_id, run_we_are_in(os.environ)) if run)
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
            mine = {place.gpu.uuid for place in plan.places if place.gpu and place.host == member.host}
            member.say({"do": "lock", "gpus": sorted(mine - set(self._lent(member)))})
        self._agents.await_all("locked")
        for member in members:
            for notice in member.answers["locked"]["notices"]:
                line = f"stoker: {f'host {member.host}: ' if member.host else ''}{printable(notice, 1000)}"
                if line not in self._noticed:
                    self._noticed.add(line)
                    self._say(line)
        return {
            uuid: printable(who, 300) for member in members for uuid, who in member.answers["locked"]["refused"].items()
        }
