"""Tracks the hosts of a run on several: which are lost, which have returned, and whether enough are left.

A lost host is tried again in the background, with a new connection each time. Once its agent responds it gets the files
of --sync and --stage, and it joins at the next attempt.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from stoker.contract import layout
from stoker.contract.checkpoints import find_newest_checkpoint
from stoker.contract.errors import Refusal
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import replace
from stoker.contract.terminal import WARNING
from stoker.contract.text import escape
from stoker.control.cluster.agent_pool import AgentClient, UnusableHosts, short_reason
from stoker.control.launch.agents import Agents
from stoker.control.launch.attempt import Attempt
from stoker.control.launch.host_setup import HostSetup
from stoker.control.launch.restart import Restart
from stoker.control.plan.options import RunOptions
from stoker.control.plan.run_dir import RunDir

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.file_sync import LateCopy

RETRY_S = 3.0
MAX_RETRY_S = 60.0
UNFIT_RETRY_S = 15.0
PROBE_S = 20.0
SLOW_COPY_S = 2.0  # a copy that takes longer is reported
MAX_FORMER = 64  # remembered processes, of 32 former agents: a host may come and go for weeks


class LostHost:
    """A lost host, and the attempts to get it back."""

    def __init__(self, reason: str, former: list[list[int]]) -> None:
        self.reason = reason
        self.former = former  # processes of its former agents that may still run
        self.next_try = 0.0
        self.client: AgentClient | None = None  # its new agent, starting or ready to join
        self.copy: LateCopy | None = None  # of the files of --sync and --stage
        self.report_copy_at = 0.0  # 0: reported
        self.is_probed = False
        self.is_fit = False  # it has passed its checks and may join
        self.unfit_reason = ""  # the last reason that was reported

    @property
    def is_ready(self) -> bool:
        return self.is_fit and self.client is not None and not self.client.gone

    def remember(self, processes: list[list[int]]) -> None:
        """Also remember the processes of its new agent. The oldest are dropped: they ended when their launcher was silent."""
        self.former = [*self.former, *processes][-MAX_FORMER:]

    def reset(self, next_try: float) -> None:
        """Forget its new agent and try again later."""
        if self.copy is not None:
            self.copy.stop()
        self.client, self.copy, self.is_fit, self.is_probed, self.next_try = None, None, False, False, next_try


class Membership:
    """Decides which hosts take part in the next attempt."""

    def __init__(
        self,
        options: RunOptions,
        agents: Agents,
        host_setup: HostSetup,
        log: Callable[..., None],
        record_event: Callable[..., None],
    ) -> None:
        self.lost: dict[str, LostHost] = {}
        self.joined: list[str] = []  # by the newest `update_agents`
        self.has_checkpoint = False  # rank 0 has reported one
        self._agents = agents
        self._host_setup = host_setup
        self._log = log
        self._record_event = record_event
        self._rank_order = list(agents.by_name)
        self._min_hosts = options.min_hosts
        self._rejoins = options.rejoin != "never"
        self._losses: dict[str, int] = {}  # by host: one that comes and goes is tried less and less often

    # ---- before the start ----

    def open_agents(self, run_dir: RunDir) -> None:
        """Wait for all agents. With --min-hosts that many are enough, and the others may join later."""
        try:
            self._agents.open_run(run_dir)
        except UnusableHosts as missing:
            if not self.start_without(missing):
                raise

    def start_without(self, missing: UnusableHosts) -> bool:
        """Leave unusable hosts out. Returns False if --min-hosts does not allow it."""
        self.mark_lost(missing)
        if not self._min_hosts or not self.has_enough_hosts:
            return False
        self.update_agents()
        for host, reason in missing.hosts.items():
            line = f"stoker: host {host} can't be used: {short_reason(reason)}; starting with {self.host_count_text}"
            self._log(line, color=WARNING)
        return True

    def mark_lost(self, gone: UnusableHosts) -> None:
        for client in self._agents.clients:
            if client.host in gone.hosts:
                client.mark_lost(short_reason(gone.hosts[client.host]))

    # ---- between attempts ----

    @property
    def has_enough_hosts(self) -> bool:
        present = sum(not client.gone for client in self._agents.clients)
        returned = sum(host.is_ready for host in self.lost.values())
        return present + returned >= (self._min_hosts or len(self._rank_order))

    @property
    def host_count_text(self) -> str:
        return f"{len(self._agents.clients)} of {len(self._rank_order)} hosts"

    def update_agents(self) -> bool:
        """Drop the lost hosts and add the returned ones (`joined`). Returns whether anything changed."""
        before = list(self._agents.clients)
        self.joined = []
        for client in before:
            if client.gone:
                self.drop(client)
        fit = [name for name, host in self.lost.items() if host.is_fit]
        for name in self._agents.pool.join(fit, self._rank_order):
            del self.lost[name]
            self.joined.append(name)
            self._record_event("host-joined", on=name)
        return before != self._agents.clients

    def drop(self, client: AgentClient) -> None:
        """Remove a lost host and schedule the first try to get it back."""
        reason = short_reason(client.gone)
        losses = self._losses[client.host] = self._losses.get(client.host, 0) + 1
        lost = self.lost[client.host] = LostHost(reason, client.selves)
        if losses > 1:
            lost.next_try = time.monotonic() + min(MAX_RETRY_S, RETRY_S * 2.0 ** min(losses - 2, 8))
        self._agents.pool.drop(client)
        self._record_event("host-lost", on=client.host, why=reason)

    def exclude_joined(self, reason: str) -> None:
        """Remove the hosts that joined just now: a returning host must not end a run that works without it."""
        for client in [client for client in self._agents.clients if client.host in self.joined]:
            lost = self.lost[client.host] = LostHost(reason, client.selves)
            lost.next_try = time.monotonic() + MAX_RETRY_S
            self._agents.pool.drop(client)
            self._report_unfit(client.host, reason)
        self.joined = []

    def decide_regroup(self, verdict: Verdict, attempt: Attempt, run_dir: str) -> Restart | None:
        """Return a restart that does not count: a host was lost and enough are left, or a returned host joins. Else None."""
        if attempt.stop_signal:
            return None
        if verdict.cause == "launch.regroup":
            return Restart(_describe_restart(run_dir, f"host {attempt.regrouping}"))
        if verdict.cause == "host.lost" and self.has_enough_hosts:
            remaining = sum(not client.gone for client in self._agents.clients)
            hosts = f"{remaining} of {len(self._rank_order)} hosts"
            return Restart(f"{verdict.summary}; {_describe_restart(run_dir, hosts)}")
        return None

    def make_too_few_verdict(self, verdict: Verdict) -> Verdict:
        """Return the final verdict of a run with too few hosts left."""
        rule = f"--min-hosts is {self._min_hosts}" if self._min_hosts else "without --min-hosts all are needed"
        shortage = f"{self.host_count_text} left, and {rule}"
        reasons = "; ".join(f"{name}: {host.reason}" for name, host in self.lost.items())
        fixes = tuple(fix for fix in verdict.fix if not (self._min_hosts and fix.startswith("--min-hosts ")))
        verdict = replace(verdict, retryable=False, evidence=(*verdict.evidence, reasons), fix=fixes)
        if verdict.cause != "host.lost":
            return replace(verdict, summary=f"{verdict.summary}; then {shortage}")
        if len(self.lost) == len(self._rank_order) > 1:
            summary = f"all {len(self._rank_order)} hosts are lost at the same time; check the network of this machine"
            return replace(verdict, host=None, summary=summary)
        return replace(verdict, summary=f"{verdict.summary}; {shortage}")

    # ---- lost hosts, while an attempt runs ----

    @property
    def returned_host(self) -> str:
        """A host that waits to join, or ""."""
        return next((name for name, host in self.lost.items() if host.is_ready), "")

    def update(self) -> None:
        """Connect to lost hosts and examine those that respond. It is called often and never waits."""
        if not self._rejoins:
            return
        now = time.monotonic()
        for name, lost in self.lost.items():
            client = lost.client
            if client is None:
                if now >= lost.next_try:
                    self._connect(name, lost)
            elif client.gone:
                lost.remember(client.selves)
                self._agents.pool.drop(client)
                if lost.is_fit:
                    self._log(f"stoker: host {name} is lost again: {short_reason(client.gone)}", color=WARNING)
                lost.reset(now + RETRY_S)
            elif not lost.is_fit and "host" in client.answers:
                self._examine(name, lost, client)

    def _connect(self, name: str, lost: LostHost) -> None:
        lost.next_try = time.monotonic() + RETRY_S
        try:
            lost.client = AgentClient(self._agents.connect(self._agents.by_name[name], unshared=True))
        except (OSError, Refusal):  # no process or file descriptor right now: the next try may have one
            return
        self._agents.pool.add(lost.client, self._agents.pool.waiting)
        lost.client.say(self._agents.make_open_order(name, lost.former))

    def _examine(self, name: str, lost: LostHost, client: AgentClient) -> None:
        """Check that a returned host has the others' files: one that lost its disk must not end the run."""
        if self._host_setup.has_copies and not self._is_copied(name, lost):
            return
        problem = lost.copy.failure if lost.copy is not None else ""
        probes = {} if problem else self._host_setup.make_rejoin_probes(name)
        if not lost.is_probed:
            lost.is_probed = True
            for what, args in probes.items():
                client.say({"do": "probe", "ask": f"join-{what}", "what": what, "args": args, "seconds": PROBE_S})
        if not set(probes) <= set(client.probed):
            return
        problem = problem or self._host_setup.find_rejoin_problem(client.probed)
        if not problem:
            lost.is_fit, lost.unfit_reason = True, ""
            self._report_return(name, client.answers["host"].get("found") or [])
            return
        if problem != lost.unfit_reason:
            lost.unfit_reason = problem
            self._report_unfit(name, problem)
        lost.remember(client.selves)
        self._agents.pool.drop(client)
        lost.reset(time.monotonic() + UNFIT_RETRY_S)

    def _is_copied(self, name: str, lost: LostHost) -> bool:
        """Start the copy to a returned host, and return whether it has ended, successfully or not."""
        if lost.copy is None:
            lost.copy, lost.report_copy_at = self._host_setup.start_late_copy(name), time.monotonic() + SLOW_COPY_S
        if not lost.copy.is_over:
            if lost.report_copy_at and time.monotonic() > lost.report_copy_at:
                lost.report_copy_at = 0.0
                self._log(f"stoker: host {name} is responding; copying the files of --sync and --stage to it")
            return False
        if lost.copy.summary and not lost.is_probed:
            self._log(f"stoker: {lost.copy.summary}")
        return True

    def _report_unfit(self, name: str, reason: str) -> None:
        self._log(f"stoker: host {name} is back and stays out: {reason}", color=WARNING)
        self._record_event("host-unfit", on=name, why=reason)

    def _report_return(self, name: str, ended: list[str]) -> None:
        """Report a returned host. `ended` describes the processes that its former agent had left running."""
        leftovers = f" (there, {' and '.join(ended)}: ended)" if ended else ""
        self._record_event("host-back", on=name, found=ended)
        when = "at the next checkpoint or attempt"
        if not self.has_checkpoint:
            mark = 'stoker.mark("CHECKPOINT")'
            when = f"at the next attempt, or once rank 0 has called {mark}, which it has not done so far"
        self._log(f"stoker: host {name} is back{leftovers}; it joins {when}")


def _describe_restart(run_dir: str, hosts: str) -> str:
    """Return how the next attempt starts, and from which checkpoint as far as this machine sees it."""
    newest = find_newest_checkpoint(run_dir)
    if newest is not None:
        return f"continuing with {hosts}; newest checkpoint: {escape(os.path.basename(newest.path))}"
    dir = escape(os.path.relpath(os.path.join(run_dir, layout.CHECKPOINTS)))
    start = f"starting again with {hosts}, from the beginning unless your script loads a file of its own"
    return f"{start}: no complete checkpoint in {dir} (how a script saves and resumes: `stoker docs python`)"
