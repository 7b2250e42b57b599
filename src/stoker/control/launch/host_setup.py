"""A run with several hosts before any rank starts: do they reach each other, has each what its ranks need?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract.errors import EX_UNAVAILABLE, Refusal
from stoker.contract.frozen import replace
from stoker.control.cluster import file_sync, ssh, transport
from stoker.control.cluster.agent_pool import UnusableHosts
from stoker.control.cluster.hosts import Host, is_address
from stoker.control.launch.agents import Agents
from stoker.control.launch.preflight import check_legal
from stoker.control.launch.signals import STOPS, Interrupted, handled
from stoker.control.plan.rank_spec import HostTarget
from stoker.control.plan.run_dir import RunDir
from stoker.control.plan.run_plan import RunPlan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.launch.live import LiveRun

ROUTE_S = 10.0
READY_S = 15.0
FILES_S = 30.0


class HostSetup:
    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._agents = run.agents
        self._options = run.options
        self.copies = bool(run.options.sync or run.options.stage)
        self._loads: list[file_sync.CopyJob] = []
        self._addresses: dict[str, str] = {}
        self._interfaces: dict[str, str] = {}
        self._ready: dict[str, Any] = {}  # what the hosts were asked, but for what is each one's own
        self._pythons: dict[str, str] = {}
        self._program = ""  # the hash they agreed on
        self.apart: dict[
            str, list[str]
        ] = {}  # hosts with a run directory of their own: the command that copies from there

    def prepare(self, plan: RunPlan, place: RunDir) -> list[str]:
        """Before any rank starts: lines to say. What can't work is refused, all hosts together."""
        if self.copies:
            self._copy_to_all()
        self.find_ways()
        lines = [*self._unshared(), *self.check_ready(plan, place)]
        if self._options.no_preflight:
            return lines
        check_legal(self._options, plan)
        self.check_program(plan)
        return lines + self.check_each_other()

    def _copy_to_all(self) -> None:
        """--sync and --stage. Hosts that can't take it are Unusable: with --min-hosts the run may begin without them."""
        agents, options, say = self._agents, self._options, self._run.say
        assert agents.hosts is not None
        there = {member.host for member in agents.members.all if not member.gone}
        hosts = replace(agents.hosts, hosts=tuple(host for host in agents.hosts.hosts if host.name in there))
        try:
            with handled(STOPS, _interrupt):  # a signal ends it at once
                if not self._loads:  # for all hosts of the file, those that are not there included
                    working = [file_sync.plan_sync(agents.hosts, os.getcwd(), say)] if options.sync else []
                    self._loads = working + [file_sync.plan_stage(agents.hosts, told, say) for told in options.stage]
                for load in self._loads:
                    file_sync.copy_to_hosts(hosts, load, say)
        except file_sync.CopyFailed as failed:
            if not options.min_hosts:
                raise
            raise UnusableHosts(failed.hosts, len(agents.by_name)) from failed

    def copy_late(self, host: str) -> file_sync.LateCopy:
        """To one that is back."""
        return file_sync.LateCopy(self._agents.by_name[host], self._agents.afresh, self._loads)

    def _unshared(self) -> list[str]:
        hosts = self._agents.hosts
        assert hosts is not None
        by_ssh = [host for host in hosts.hosts if transport.transport_for(host, hosts).name == "ssh"]
        why = ssh.why_unshared() if by_ssh else ""
        return [f"! ssh connections are not shared: {why}; every command makes its own"] if why else []

    def find_ways(self) -> None:
        """Addresses and interfaces of those that take part now."""
        agents = self._agents
        hosts = [agents.by_name[member.host] for member in agents.members.all]
        if len(hosts) == 1:
            self._addresses, self._interfaces = {hosts[0].name: hosts[0].address or "127.0.0.1"}, {}
            return
        found = known(hosts)
        if len(found) + sum(host.here for host in hosts) < len(hosts):
            found = reached(self._routes(list(found.values())), found)
        routes = self._routes(list(found.values()))
        whole = complete(hosts, routes, found)
        if len(whole) > len(found):
            routes = self._routes(list(whole.values()))
        self._addresses, self._interfaces = whole, interfaces(hosts, routes, whole)

    def _routes(self, to: list[str]) -> dict[str, Any]:
        answers = self._agents.probe("route", {member.host: {"to": to} for member in self._agents.members.all}, ROUTE_S)
        _refuse_errors(answers, self._agents)
        return answers

    @property
    def master(self) -> str:
        """Rank 0's address, as the others reach it."""
        return self._options.master_addr or self._addresses[self._agents.members.all[0].host]

    def towards(self, host: str) -> HostTarget:
        agents = self._agents
        one = agents.by_name[host]
        assert agents.hosts is not None
        return HostTarget(host, one.here, one.workdir or os.getcwd(), self._interfaces.get(host, ""), agents.hosts.env)

    def check_ready(self, plan: RunPlan, place: RunDir) -> list[str]:
        """Workdir, interpreter and run directory on each host: problems are refused together; else lines to print."""
        agents = self._agents
        token = f".shared-{os.urandom(8).hex()}"  # a name that no other folder has
        path = os.path.join(place.dir, token)
        with open(path, "wb"):
            pass
        self._ready = {"run_dir": place.dir, "token": token}
        self._pythons = {host: plan.pythons.get(host, plan.roles[0].argv[0]) for host in agents.by_name}
        try:
            answers = agents.probe("ready", {host: self._ask_ready(host) for host in plan.hosts}, READY_S)
        finally:
            os.unlink(path)
        _refuse_errors(answers, agents)
        wrong: dict[str, list[str]] = {}  # what -> the hosts that have it
        for host, answer in answers.items():
            for problem in answer["problems"]:
                wrong.setdefault(problem, []).append(host)
        if wrong:
            raise _refusal("; ".join(f"{_hosts(names)}: {problem}" for problem, names in wrong.items()))
        lines = []
        unwritable = [f"{host} ({answer['unwritable']})" for host, answer in answers.items() if answer["unwritable"]]
        if unwritable:
            home = "logs come home all the same, checkpoints there don't"
            lines.append(f"! the run directory {place.dir} can't be made on {', '.join(unwritable)}: {home}")
        apart = [host for host, answer in answers.items() if not answer["shared"]]
        assert agents.hosts is not None
        self.apart = {host: ssh.copy_command(agents.by_name[host], agents.hosts) for host in apart}
        if apart:
            stay = "checkpoints stay on the host that writes them (of `stoker train`, on rank 0's)"
            need = "resuming needs a shared folder, or the same host for rank 0"
            lines.append(f"! {', '.join(apart)}: the run directory is not the same folder as here: {stay}; {need}")
        return lines

    def check_program(self, plan: RunPlan) -> None:
        """Script and package must be the same on all hosts. Those that differ are named together."""
        agents = self._agents
        request, options = self._run.request, self._options
        if options.no_python or len(plan.hosts) < 2:
            return
        from stoker.control.cluster.check_rules import missing_program_fix, program_differences

        answers = agents.probe("files", {host: self._ask_files(host) for host in plan.hosts}, FILES_S)
        _refuse_lost(agents)
        wrong = program_differences(
            answers, request.script, missing_program_fix(request.script, os.getcwd(), options.sync)
        )
        if wrong:
            raise _refusal("; ".join(wrong))
        self._program = answers[plan.hosts[0]]["package"]

    def _ask_ready(self, host: str) -> dict[str, Any]:
        return {"workdir": self.towards(host).workdir, "program": self._pythons[host], **self._ready}

    def _ask_files(self, host: str) -> dict[str, Any]:
        program = {"script": self._run.request.script, "module": self._options.module, "python": self._pythons[host]}
        return {"workdir": self.towards(host).workdir, **program}

    def fitness(self, host: str) -> dict[str, dict[str, Any]]:
        """What a host that is back must show before it may join."""
        return {"ready": self._ask_ready(host), **({"files": self._ask_files(host)} if self._program else {})}

    def unfit(self, answers: dict[str, Any]) -> str:
        broken = [str(answer["error"]) for answer in answers.values() if "error" in answer]
        if broken:
            return broken[0]
        wrong = list(answers["ready"]["problems"])
        if self._program and answers["files"]["package"] != self._program:
            named = self._run.request.script
            changed = ": has it changed here since the run began?" if self._options.sync else ""
            differs = f"is not the same there as on the others{changed}"
            wrong.append(f"{named} {differs if answers['files']['names'] else 'is missing there'}")
        return "; ".join(wrong)

    def check_each_other(self) -> list[str]:
        """Builds, ports both ways, names, clocks: what can't work is refused, all together; else lines to print."""
        agents = self._agents
        if len(agents.members.all) < 2:
            return []
        from stoker.control.cluster.connectivity import quick_check

        assert agents.hosts is not None
        found = quick_check(agents.asking(), agents.hosts, self._addresses)
        _refuse_lost(agents)
        said = [(one, f"{one.id}: {one.text}" + (f"; {one.fix}" if one.fix else "")) for one in found]
        bad = [line for one, line in said if one.level == "fail"]
        if bad:
            more = "(--no-preflight starts all the same; `stoker cluster check` shows all of it)"
            raise _refusal(f"{'; '.join(bad)} {more}")
        return [f"! {line}" for one, line in said if one.level == "warn"]


def _refusal(line: str) -> Refusal:
    return Refusal(line, EX_UNAVAILABLE, cause="launch.hosts")


def _hosts(names: list[str]) -> str:
    return f"host {names[0]}" if len(names) == 1 else f"hosts {', '.join(names)}"


def _refuse_lost(agents: Agents) -> None:
    """Hosts that went away meanwhile: what they did not answer says nothing of the program, or of the network."""
    gone = {member.host: f"is gone: {member.gone}" for member in agents.members.all if member.gone}
    if gone:
        raise UnusableHosts(gone, len(agents.by_name))


def _refuse_errors(answers: dict[str, Any], agents: Agents) -> None:
    broken = {host: str(answer["error"]) for host, answer in answers.items() if "error" in answer}
    if broken:
        raise UnusableHosts(broken, len(agents.by_name))


# ---- addresses and interfaces; pure ----
#
# gloo takes the address of the host's own name unless it is told an interface, and NCCL the first interface that is up:
# both are wrong where hosts share a name, where it means loopback, or where a bridge of Docker comes first.


def known(hosts: Sequence[Host]) -> dict[str, str]:
    """What can be said of a host before anybody is asked. Not of `here`: its own loopback is no address for others."""
    found = {host.name: host.address for host in hosts if host.address}
    return found | {
        host.name: host.target for host in hosts if host.name not in found and is_address(host.target) and not host.here
    }


def reached(answers: Mapping[str, Mapping[str, Any]], found: Mapping[str, str]) -> dict[str, str]:
    """With the address ssh came to, for those of whom nothing else is known."""
    more = {
        name: answer["reached_at"] for name, answer in answers.items() if name not in found and answer.get("reached_at")
    }
    return {**found, **more}


def complete(
    hosts: Sequence[Host], routes: Mapping[str, Mapping[str, Any]], found: Mapping[str, str]
) -> dict[str, str]:
    """The rest: the source address of a host's own route towards the others."""
    whole = dict(found)
    for host in hosts:
        if host.name in whole:
            continue
        ways = [way for way in routes[host.name].get("routes", {}).values() if way.get("source")]
        if not ways:
            where = "say it in the hosts file (address:)"
            raise _refusal(f"no address is known by which the others reach host {host.name}: {where}")
        whole[host.name] = ways[0]["source"]
    return whole


def interfaces(
    hosts: Sequence[Host], routes: Mapping[str, Mapping[str, Any]], where: Mapping[str, str]
) -> dict[str, str]:
    """Host -> the interface towards the first of its peers. Hosts without one are refused, all together."""
    found: dict[str, str] = {}
    cut: list[str] = []
    for host in hosts:
        peer = next(one.name for one in hosts if one.name != host.name)
        way = routes[host.name].get("routes", {}).get(where[peer], {})
        if host.interface:
            found[host.name] = host.interface
        elif way.get("interface"):
            found[host.name] = way["interface"]
        else:
            cut.append(f"{host.name} has no way to {where[peer]} ({way.get('error', 'no interface has its address')})")
    if cut:
        raise _refusal(f"hosts can't reach each other: {'; '.join(cut)}")
    return found


def _interrupt(signum: int, _frame: object) -> None:
    raise Interrupted(signum)
