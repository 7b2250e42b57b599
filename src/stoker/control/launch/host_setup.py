"""Prepares several hosts before any rank starts: copies files, finds addresses, and checks that each host is ready."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker.contract.errors import EX_UNAVAILABLE, Refusal
from stoker.contract.frozen import replace
from stoker.control.cluster import file_sync, ssh, transport
from stoker.control.cluster.agent_pool import UnusableHosts
from stoker.control.cluster.hosts import Host, Hosts, is_address
from stoker.control.launch.agents import Agents
from stoker.control.launch.preflight import check_legal_ranks
from stoker.control.launch.signals import STOPS, Interrupted, handled
from stoker.control.plan.rank_spec import HostTarget
from stoker.control.plan.request import Request
from stoker.control.plan.run_dir import RunDir
from stoker.control.plan.run_plan import RunPlan

ROUTE_S = 10.0
READY_S = 15.0
FILES_S = 30.0

Answers = Mapping[str, Mapping[str, Any]]  # of a probe, by host


class HostSetup:
    """Copies, addresses and checks of a run with several hosts."""

    def __init__(self, request: Request, agents: Agents, log: Callable[..., None]) -> None:
        assert agents.hosts is not None
        self.has_copies = bool(request.options.sync or request.options.stage)
        # For each host that does not share the run directory: the command that copies files from there.
        self.copy_commands: dict[str, list[str]] = {}
        self._request = request
        self._options = request.options
        self._agents = agents
        self._hosts: Hosts = agents.hosts
        self._log = log
        self._copy_jobs: list[file_sync.CopyJob] = []
        self._addresses: dict[str, str] = {}
        self._interfaces: dict[str, str] = {}
        self._run_dir_probe: dict[str, Any] = {}  # arguments of the probe of the run directory
        self._pythons: dict[str, str] = {}
        self._package_hash = ""  # of the user's program, the same on all hosts, or "" if it was not compared

    def prepare(self, plan: RunPlan, run_dir: RunDir) -> list[str]:
        """Copy, find addresses and check all hosts. Returns warnings; a Refusal names every problem of all hosts."""
        if self.has_copies:
            self._copy_to_all()
        self.find_addresses()
        warnings = self._warn_of_unshared_ssh() + self._check_ready(plan, run_dir)
        if self._options.no_preflight:
            return warnings
        check_legal_ranks(self._options, plan)
        self._check_same_program(plan)
        return warnings + self._check_network()

    # ---- --sync and --stage ----

    def _copy_to_all(self) -> None:
        """Copy to all hosts. With --min-hosts, UnusableHosts names those that failed: the run starts without them."""
        present = {client.host for client in self._agents.clients if not client.gone}
        hosts = replace(self._hosts, hosts=tuple(host for host in self._hosts.hosts if host.name in present))
        try:
            with handled(STOPS, _interrupt):  # a signal ends the copy immediately
                if not self._copy_jobs:  # for all hosts of the file: one that is missing now may join later
                    if self._options.sync:
                        self._copy_jobs.append(file_sync.plan_sync(self._hosts, os.getcwd(), self._log))
                    for stage in self._options.stage:
                        self._copy_jobs.append(file_sync.plan_stage(self._hosts, stage, self._log))
                for job in self._copy_jobs:
                    file_sync.copy_to_hosts(hosts, job, self._log)
        except file_sync.CopyFailed as failed:
            if not self._options.min_hosts:
                raise
            raise UnusableHosts(failed.hosts, len(self._agents.by_name)) from failed

    def start_late_copy(self, host: str) -> file_sync.LateCopy:
        """Start copying to a returned host, in a thread."""
        return file_sync.LateCopy(self._agents.by_name[host], self._agents.unshared_hosts, self._copy_jobs)

    # ---- addresses ----

    def find_addresses(self) -> None:
        """Find the addresses and interfaces of the hosts that take part now."""
        hosts = [self._agents.by_name[client.host] for client in self._agents.clients]
        if len(hosts) == 1:
            self._addresses, self._interfaces = {hosts[0].name: hosts[0].address or "127.0.0.1"}, {}
            return
        known = list_known_addresses(hosts)
        if len(known) + sum(host.here for host in hosts) < len(hosts):
            known = add_reached_addresses(known, self._probe_routes(known))
        routes = self._probe_routes(known)
        self._addresses = add_source_addresses(known, hosts, routes)
        if len(self._addresses) > len(known):
            routes = self._probe_routes(self._addresses)
        self._interfaces = choose_interfaces(hosts, routes, self._addresses)

    def _probe_routes(self, addresses: Mapping[str, str]) -> dict[str, Any]:
        args = {"to": list(addresses.values())}
        answers = self._agents.probe("route", {client.host: args for client in self._agents.clients}, ROUTE_S)
        _raise_for_errors(answers, self._agents)
        return answers

    @property
    def master_address(self) -> str:
        """Rank 0's address, as the other hosts reach it."""
        return self._options.master_addr or self._addresses[self._agents.clients[0].host]

    def target(self, host: str) -> HostTarget:
        """Return the properties of a host that its ranks need."""
        entry = self._agents.by_name[host]
        interface = self._interfaces.get(host, "")
        return HostTarget(host, entry.here, entry.workdir or os.getcwd(), interface, self._hosts.env)

    # ---- checks ----

    def _warn_of_unshared_ssh(self) -> list[str]:
        uses_ssh = any(transport.transport_for(host, self._hosts).name == "ssh" for host in self._hosts.hosts)
        reason = ssh.why_unshared() if uses_ssh else ""
        return [f"! ssh connections are not shared: {reason}; every command opens its own"] if reason else []

    def _check_ready(self, plan: RunPlan, run_dir: RunDir) -> list[str]:
        """Check workdir, interpreter and run directory on each host. Returns warnings."""
        token = f".shared-{os.urandom(8).hex()}"  # a file that a host sees only if it shares the run directory
        path = os.path.join(run_dir.dir, token)
        with open(path, "wb"):
            pass
        self._run_dir_probe = {"run_dir": run_dir.dir, "token": token}
        self._pythons = {host: plan.pythons.get(host, plan.roles[0].argv[0]) for host in self._agents.by_name}
        try:
            answers = self._agents.probe("ready", {host: self._ready_args(host) for host in plan.hosts}, READY_S)
        finally:
            os.unlink(path)
        _raise_for_errors(answers, self._agents)
        hosts_by_problem: dict[str, list[str]] = {}
        for host, answer in answers.items():
            for problem in answer["problems"]:
                hosts_by_problem.setdefault(problem, []).append(host)
        if hosts_by_problem:
            problems = (f"{_name_hosts(hosts)}: {problem}" for problem, hosts in hosts_by_problem.items())
            raise _refusal("; ".join(problems))
        warnings = []
        unwritable = [f"{host} ({answer['unwritable']})" for host, answer in answers.items() if answer["unwritable"]]
        if unwritable:
            effect = "logs are still collected here, checkpoints there are not"
            line = f"! the run directory {run_dir.dir} can't be created on {', '.join(unwritable)}: {effect}"
            warnings.append(line)
        unshared = [host for host, answer in answers.items() if not answer["shared"]]
        self.copy_commands = {host: ssh.copy_command(self._agents.by_name[host], self._hosts) for host in unshared}
        if unshared:
            effect = "checkpoints stay on the host that writes them (of `stoker train`, on rank 0's)"
            advice = "resuming needs a shared folder, or the same host for rank 0"
            names = ", ".join(unshared)
            warnings.append(f"! {names}: the run directory is not the same folder as here: {effect}; {advice}")
        return warnings

    def _check_same_program(self, plan: RunPlan) -> None:
        """Refuse a script or package that is not the same on all hosts."""
        if self._options.no_python or len(plan.hosts) < 2:
            return
        from stoker.control.cluster.check_rules import missing_program_fix, program_differences

        answers = self._agents.probe("files", {host: self._files_args(host) for host in plan.hosts}, FILES_S)
        _raise_for_lost(self._agents)
        script = self._request.script
        problems = program_differences(answers, script, missing_program_fix(script, os.getcwd(), self._options.sync))
        if problems:
            raise _refusal("; ".join(problems))
        self._package_hash = answers[plan.hosts[0]]["package"]

    def _check_network(self) -> list[str]:
        """Check builds, ports in both directions, names and clocks. Returns warnings; failures are refused together."""
        if len(self._agents.clients) < 2:
            return []
        from stoker.control.cluster.connectivity import quick_check

        findings = quick_check(self._agents.probe_batch(), self._hosts, self._addresses)
        _raise_for_lost(self._agents)
        lines = {
            level: [
                f"{finding.id}: {finding.text}" + (f"; {finding.fix}" if finding.fix else "")
                for finding in findings
                if finding.level == level
            ]
            for level in ("fail", "warn")
        }
        if lines["fail"]:
            advice = "(use --no-preflight to start anyway; `stoker cluster check` shows all of it)"
            raise _refusal(f"{'; '.join(lines['fail'])} {advice}")
        return [f"! {line}" for line in lines["warn"]]

    def _ready_args(self, host: str) -> dict[str, Any]:
        return {"workdir": self.target(host).workdir, "program": self._pythons[host], **self._run_dir_probe}

    def _files_args(self, host: str) -> dict[str, Any]:
        script = {"script": self._request.script, "module": self._options.module}
        return {"workdir": self.target(host).workdir, **script, "python": self._pythons[host]}

    # ---- a returned host ----

    def make_rejoin_probes(self, host: str) -> dict[str, dict[str, Any]]:
        """Return the probes, with their arguments, that a host must pass before it may join again."""
        probes = {"ready": self._ready_args(host)}
        if self._package_hash:
            probes["files"] = self._files_args(host)
        return probes

    def find_rejoin_problem(self, answers: dict[str, Any]) -> str:
        """Return why a host with these answers may not join, or "" if it may."""
        errors = [str(answer["error"]) for answer in answers.values() if "error" in answer]
        if errors:
            return errors[0]
        problems = list(answers["ready"]["problems"])
        if self._package_hash and answers["files"]["package"] != self._package_hash:
            if answers["files"]["names"]:
                hint = "; it may have changed here since the run began" if self._options.sync else ""
                problems.append(f"{self._request.script} differs from the other hosts{hint}")
            else:
                problems.append(f"{self._request.script} is missing there")
        return "; ".join(problems)


def _refusal(line: str) -> Refusal:
    return Refusal(line, EX_UNAVAILABLE, cause="launch.hosts")


def _name_hosts(names: list[str]) -> str:
    return f"host {names[0]}" if len(names) == 1 else f"hosts {', '.join(names)}"


def _raise_for_lost(agents: Agents) -> None:
    """Raise UnusableHosts if a host is lost: its missing answer says nothing about the program or the network."""
    gone = {client.host: f"is gone: {client.gone}" for client in agents.clients if client.gone}
    if gone:
        raise UnusableHosts(gone, len(agents.by_name))


def _raise_for_errors(answers: Answers, agents: Agents) -> None:
    errors = {host: str(answer["error"]) for host, answer in answers.items() if "error" in answer}
    if errors:
        raise UnusableHosts(errors, len(agents.by_name))


def _interrupt(signum: int, _frame: object) -> None:
    raise Interrupted(signum)


# ---- addresses and interfaces; pure ----
#
# Without an interface gloo takes the address of the host's own name, and NCCL the first interface that is up. Both are
# wrong if hosts share a name, if the name means loopback, or if a bridge of Docker comes first.


def list_known_addresses(hosts: Sequence[Host]) -> dict[str, str]:
    """Return the addresses that are known without a probe. This machine's loopback address is left out: other hosts can't use it."""
    addresses = {host.name: host.address for host in hosts if host.address}
    for host in hosts:
        if host.name not in addresses and is_address(host.target) and not host.here:
            addresses[host.name] = host.target
    return addresses


def add_reached_addresses(known: Mapping[str, str], answers: Answers) -> dict[str, str]:
    """Add the address that ssh reached, for hosts without another address."""
    reached = {name: answer.get("reached_at") for name, answer in answers.items()}
    return {**known, **{name: address for name, address in reached.items() if name not in known and address}}


def add_source_addresses(known: Mapping[str, str], hosts: Sequence[Host], routes: Answers) -> dict[str, str]:
    """Add the source address of a host's route to the others, for hosts without another address."""
    addresses = dict(known)
    for host in hosts:
        if host.name in addresses:
            continue
        sources = [route["source"] for route in routes[host.name].get("routes", {}).values() if route.get("source")]
        if not sources:
            line = f"the address of host {host.name} for the other hosts is unknown; add address: to the hosts file"
            raise _refusal(line)
        addresses[host.name] = sources[0]
    return addresses


def choose_interfaces(hosts: Sequence[Host], routes: Answers, addresses: Mapping[str, str]) -> dict[str, str]:
    """Return each host's interface towards the first of its peers. Hosts without one are refused together."""
    interfaces: dict[str, str] = {}
    unreachable: list[str] = []
    for host in hosts:
        peer = addresses[next(other.name for other in hosts if other.name != host.name)]
        route = routes[host.name].get("routes", {}).get(peer, {})
        interface = host.interface or route.get("interface")
        if interface:
            interfaces[host.name] = interface
        else:
            why = route.get("error", "no interface has its address")
            unreachable.append(f"{host.name} has no route to {peer} ({why})")
    if unreachable:
        raise _refusal(f"hosts can't reach each other: {'; '.join(unreachable)}")
    return interfaces
