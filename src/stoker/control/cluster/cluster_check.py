"""Collects the facts for `stoker cluster check`: probes all hosts in parallel and combines their answers.

Importing torch takes longest on every host, so it starts first, and the network is tested in the meantime.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stoker.contract.evidence import Finding
from stoker.contract.frozen import frozen, replace
from stoker.control.cluster import all_reduce, check_rules, connectivity, ssh
from stoker.control.cluster.check_facts import ClusterFacts, HostFacts, MtuHole
from stoker.control.cluster.hosts import Host, Hosts, is_address
from stoker.control.cluster.probes import TORCH, PendingProbe, ProbeBatch, check_answer, measure_clock_skew
from stoker.control.doctor import check as doctor
from stoker.control.machine.examination import TorchBuild, examination_from_json, read_part
from stoker.control.machine.examine import PARTS

FIRST_ANSWER_S = ssh.CONNECT_S + 2.0  # the login and the first probe
FILES_S = 600.0  # weights are hashed; the next check uses the remembered hashes
TORCH_S = 90.0  # the import of torch may read from a slow disk
WORKER_S = 1800.0  # --tune measures for minutes


@frozen
class CheckOptions:
    """What to check besides the hosts themselves."""

    script: str = ""
    data: tuple[str, ...] = ()
    model: str = ""
    store_port: int = 0
    quick: bool = False  # no import of torch, no streams, no all-reduce


class ClusterCheck:
    """One check of all hosts.

    `worker` is the probe that has torch imported on each host and runs all-reduces there. It is None with --quick.
    """

    def __init__(self, hosts: Hosts, options: CheckOptions, batch: ProbeBatch) -> None:
        self.hosts = hosts
        self.options = options
        self.batch = batch
        self._by_name = {host.name: host for host in hosts.hosts}
        self.worker: PendingProbe | None = None

    def collect(self) -> ClusterFacts:
        """Probe all hosts and return the facts. Leaves the worker running, for --tune."""
        batch, options = self.batch, self.options
        names = list(self._by_name)
        pythons = {name: {"python": host.python or ""} for name, host in self._by_name.items()}
        if not options.quick:
            self.worker = batch.ask("torch", pythons, WORKER_S)
        torch_probe = self.worker or batch.ask("builds", pythons, 20.0)
        parts = sorted(PARTS - {"torch"})  # the worker imports torch, so no other probe has to
        workdirs = {name: host.workdir or os.getcwd() for name, host in self._by_name.items()}
        examine_probe = batch.ask(
            "examine",
            {name: {"runs_dir": os.path.join(workdirs[name], "runs"), "port": 0, "parts": parts} for name in names},
            30.0,
        )
        paths = [*options.data, *([options.model] if options.model else [])]
        files_probe = None
        if options.script or paths:
            args = {name: {"workdir": workdirs[name], "script": options.script, "paths": paths} for name in names}
            files_probe = batch.ask("files", args, FILES_S)
        routes = batch.answers(batch.ask("route", {name: {"to": []} for name in names}, 10.0), FIRST_ANSWER_S)
        facts = {name: self._first_facts(name, answer) for name, answer in routes.items()}
        reachable = [name for name in names if not facts[name].error]
        for name, (error, skew) in measure_clock_skew(batch, reachable).items():
            facts[name] = replace(facts[name], skew=skew, skew_error=error)
        facts.update(self._add_network({name: facts[name] for name in reachable}))
        addresses = {name: address for name in reachable if (address := facts[name].address)}
        pairs, store_port, net_probe = connectivity.try_connections(batch, addresses, options.store_port)
        for name, answer in batch.answers(examine_probe, 20.0).items():
            if name in reachable and "error" not in answer:
                facts[name] = replace(facts[name], examination=examination_from_json(answer))
        if self.worker is not None:
            torches = batch.partial_answers(torch_probe, 1, TORCH_S)
        else:
            torches = {name: answer.get("torch", answer) for name, answer in batch.answers(torch_probe, 20.0).items()}
        for name, answer in torches.items():
            if name in reachable:
                facts[name] = _add_torch(facts[name], answer)
        if net_probe is not None:
            try:
                if not options.quick:  # not earlier: the import of torch would compete for the CPU
                    pairs = connectivity.measure_bandwidth(batch, net_probe, addresses, pairs)
            finally:
                connectivity.close_listeners(batch, net_probe)
        program: list[str] = []
        if files_probe is not None:
            answers = batch.answers(files_probe, FILES_S)
            answers = {name: answer for name, answer in answers.items() if name in reachable}
            for name, answer in answers.items():
                if "error" not in answer:
                    facts[name] = replace(facts[name], files=self._digests(answer))
            program = check_rules.program_differences(answers, options.script) if options.script else []
        cluster = ClusterFacts(
            tuple(facts[name] for name in names), tuple(pairs), None, store_port, tuple(program), options.quick
        )
        if self.worker is not None and all_reduce.may_reduce(cluster):
            env = all_reduce.run_env(cluster, self.hosts)
            cluster = replace(cluster, reduce=all_reduce.run_all_reduce(batch, self.worker, cluster, env))
        return cluster

    def _first_facts(self, name: str, answer: Mapping[str, Any]) -> HostFacts:
        """Return the address and hostname that a host answered, or the reason why it did not answer."""
        host = self._by_name[name]
        if "error" not in answer:
            return HostFacts(name, address=address_of(host, answer), hostname=answer["hostname"])
        agent = self.batch.agents[name]
        why, _, fix = agent.gone.removeprefix(f"host {name}: ").partition("; ")
        # These reasons mean that the host connected and then fell silent, as it does if full-size packets are lost.
        silent = ("timed out", "no data came back", "silent", "no agent answered")
        max_packet = None
        if not host.here and (not why or any(reason in why for reason in silent)):
            max_packet = ssh.find_largest_packet(host, self.hosts)
        complaint = f" ({agent.complaint})" if agent.complaint else ""
        error = why or f"no answer within {FIRST_ANSWER_S:.0f} s{complaint}"
        return HostFacts(name, error=error, fix=fix, hole=MtuHole(max_packet) if max_packet else None)

    def _digests(self, answer: Mapping[str, Any]) -> dict[str, str]:
        """Return label -> digest of each file that must be the same on all hosts. A missing file has the digest ""."""
        options, digests = self.options, {}
        if options.script:
            digests[f"script {options.script}"] = answer["script"] or ""
            digests["Python files there"] = answer["package"] or ""
        digests |= {f"data {path}": answer["paths"][path] or "" for path in options.data}
        if options.model:
            digests[f"model {options.model}"] = answer["paths"][options.model] or ""
        return digests

    def _add_network(self, facts: dict[str, HostFacts]) -> dict[str, HostFacts]:
        """Return the facts with each host's interface towards the others, and the addresses it resolves the hostnames to."""
        batch = self.batch
        addresses = {name: host.address for name, host in facts.items() if host.address}
        peers = {name: [address for other, address in addresses.items() if other != name] for name in facts}
        answers = batch.answers(batch.ask("route", {name: {"to": peers[name]} for name in facts}, 5.0), 6.0)
        facts = dict(facts)
        for name, host in facts.items():
            routes = [route for route in answers[name].get("routes", {}).values() if route.get("interface")]
            configured = self._by_name[name].interface
            route = next((route for route in routes if route["interface"] == configured), routes[0] if routes else {})
            interface, address = configured or route.get("interface"), host.address or route.get("source")
            facts[name] = replace(host, interface=interface, mtu=route.get("mtu"), address=address)
        hostnames = sorted({host.hostname for host in facts.values() if host.hostname})
        args = {
            name: {"of": hostnames, "interfaces": [host.interface] if host.interface else []}
            for name, host in facts.items()
        }
        for name, answer in batch.answers(batch.ask("names", args, 8.0), 9.0).items():
            link = next(iter(answer.get("links", {}).values()), {"speed": None, "physical": False})
            resolves = {hostname: tuple(resolved) for hostname, resolved in answer.get("resolves", {}).items()}
            facts[name] = replace(facts[name], resolves=resolves, speed=link["speed"], physical=link["physical"])
        return facts


def address_of(host: Host, answer: Mapping[str, Any]) -> str | None:
    """Return where the others reach a host: its `address:`, else the address that ssh reached.

    Return None for this machine without an `address:`. Its route to the others has the address.
    """
    if host.address or host.here:
        return host.address
    return host.target if is_address(host.target) else answer.get("reached_at")


def _add_torch(host: HostFacts, answer: Mapping[str, Any]) -> HostFacts:
    """Return the facts with the torch build. The doctor's checks read it from the examination, so it goes there too."""
    answer = check_answer(TORCH, answer, "torch")
    torch: TorchBuild = read_part(TorchBuild, {name: value for name, value in answer.items() if name != "python"})
    examination = host.examination
    if examination is not None:
        missing = {part: why for part, why in (examination.missing or {}).items() if part != "torch"}
        examination = replace(examination, torch=torch, missing=missing)
    return replace(host, torch=torch, python=answer.get("python"), examination=examination)


def doctor_findings(facts: ClusterFacts, hosts: Hosts) -> list[Finding]:
    """Run the doctor's checks on each host, and return one finding for all hosts that have the same one.

    The checks of hostnames and torch are left out, because the between.* rules cover them.
    """
    checks = [check for check in doctor.load_checks().values() if check.id not in ("net.hostname", "torch.installed")]
    slots = {host.name: host.slots or 0 for host in hosts.hosts}
    shared: dict[tuple[str, str, str, str], list[str]] = {}  # (id, level, text, fix) -> hosts
    for host in facts.reachable:
        if host.examination is None:
            shared.setdefault(("between.host", "unknown", "it could not be examined", ""), []).append(host.name)
            continue
        for finding in doctor.run_checks(checks, host.examination, slots[host.name]):
            shared.setdefault((finding.id, finding.level, finding.text, finding.fix), []).append(host.name)
    return [
        Finding(id, level, f"{check_rules.join_names(names)}: {text}", fix)
        for (id, level, text, fix), names in shared.items()
    ]
