"""Plans a run: chooses GPUs of its machines and locks them, and tries again when another launch was faster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from stoker.contract.errors import EX_TEMPFAIL, EX_UNAVAILABLE, Refusal
from stoker.contract.text import escape
from stoker.contract.units import format_duration
from stoker.control.cluster.agent_pool import AgentClient
from stoker.control.launch.agents import Agents
from stoker.control.launch.rank_output import needs_separate_pipes
from stoker.control.machine.model import Machine
from stoker.control.machine.run_origin import find_current_run, find_gpu_lender
from stoker.control.plan.gpu_choice import GpusNotFree, with_gpu_errors
from stoker.control.plan.request import Request
from stoker.control.plan.run_plan import RunPlan, make_plan

MAX_LOST_RACES = 20  # for the lock of a GPU


class Planner:
    """Makes the plan of every attempt of a run and locks its GPUs."""

    def __init__(self, request: Request, agents: Agents, log: Callable[..., None]) -> None:
        self.excluded_gpus: dict[str, str] = {}  # uuid -> why: GPUs that failed their test in this run
        self._request = request
        self._options = request.options
        self._agents = agents
        self._log = log
        self._logged_notices: set[str] = set()
        self._argv: list[str] = []

    def plan(self, argv: list[str]) -> RunPlan:
        """Return a plan whose GPUs are locked. Tries again after a lost race for a lock, and with --wait until GPUs are free."""
        self._argv = argv
        deadline = time.monotonic() + self._options.wait
        reported_line = ""
        lost_races = 0
        while True:
            held = {client.host: self._find_held_gpus(client) for client in self._agents.clients}
            try:
                machines, split = self._usable_machines(), needs_separate_pipes(self._options)
                plan = make_plan(self._request, argv, os.environ, machines, held, split, self._agents.by_name)
                refused = {} if self._options.dry_run or self._options.share_gpus else self._lock(plan)
                if not refused:
                    return plan
                lost_races += 1
                if lost_races > MAX_LOST_RACES:
                    holders = "; ".join(f"GPU {uuid} by {holder}" for uuid, holder in refused.items())
                    raise GpusNotFree(f"the GPUs are in use: {holders}", EX_UNAVAILABLE, cause="gpu.busy")
            except GpusNotFree as busy:
                if not self._options.wait:
                    raise
                if time.monotonic() > deadline:
                    line = f"waited {format_duration(self._options.wait)}: {busy.line}"
                    raise Refusal(line, EX_TEMPFAIL, cause="gpu.busy") from busy
                if busy.line != reported_line:
                    reported_line = busy.line
                    self._log(f"stoker: waiting for up to {format_duration(deadline - time.monotonic())}: {busy.line}")
                self._agents.pause(1.0)
            self._agents.refresh_machines()

    def plan_again(self) -> RunPlan:
        """Examine the machines again and return a new plan, after a GPU was excluded or the hosts changed."""
        self._agents.refresh_machines()
        plan = self.plan(self._argv)
        if not self._options.no_preflight:
            from stoker.control.launch.preflight import check_legal_ranks

            check_legal_ranks(self._options, plan)
        return plan

    def _usable_machines(self) -> dict[str, Machine]:
        """Return the machines with bad GPUs marked. --exclude-bad tests those of this machine only."""
        machines = self._agents.machines
        if self._options.exclude_bad and "" in machines:
            from stoker.control.launch.preflight import mark_bad_gpus

            machines[""] = mark_bad_gpus(machines[""])
        if self.excluded_gpus:
            return {host: with_gpu_errors(machine, self.excluded_gpus) for host, machine in machines.items()}
        return machines

    def _find_lent_gpus(self, client: AgentClient) -> list[str]:
        """Return the GPUs that this run, its parent run or its job has locked. They are not locked again."""
        runs = tuple(f"run {run} (agent pid " for run in (self._agents.run_id, find_current_run(os.environ)) if run)
        lender = find_gpu_lender(os.environ)
        held = client.answers["host"]["held"]
        return [
            uuid
            for uuid, holder in held.items()
            if holder.startswith(runs) or (lender and holder.endswith(f" (agent pid {lender})"))
        ]

    def _find_held_gpus(self, client: AgentClient) -> dict[str, str]:
        lent = self._find_lent_gpus(client)
        return {uuid: holder for uuid, holder in client.answers["host"]["held"].items() if uuid not in lent}

    def _lock(self, plan: RunPlan) -> dict[str, str]:
        """Lock the plan's GPUs on all hosts and return those that were refused, with their holders."""
        if not any(rank.gpu for rank in plan.places):
            return {}
        clients = self._agents.clients
        for client in clients:
            gpus = {gpu.uuid for rank in plan.places if rank.host == client.host for gpu in rank.all_gpus}
            client.say({"do": "lock", "gpus": sorted(gpus - set(self._find_lent_gpus(client)))})
        self._agents.wait_for_all("locked")
        refused: dict[str, str] = {}
        for client in clients:
            answer = client.answers["locked"]
            refused |= {uuid: escape(holder, 300) for uuid, holder in answer["refused"].items()}
            for notice in answer["notices"]:
                line = f"stoker: {f'host {client.host}: ' if client.host else ''}{escape(notice, 1000)}"
                if line not in self._logged_notices:
                    self._logged_notices.add(line)
                    self._log(line)
        return refused
