"""Asks all hosts side by side and puts their answers together.

torch's import is the longest part on every host, so it begins first; the network is looked at meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stoker.contract.evidence import Finding
from stoker.contract.frozen import frozen, replace
from stoker.control.cluster import all_reduce, check_rules, connectivity, path_mtu
from stoker.control.cluster.agreement import disagreements
from stoker.control.cluster.check_facts import Facts, OneHost, Pair
from stoker.control.cluster.hosts import Host, Hosts, is_address
from stoker.control.cluster.probes import TORCH, ProbeBatch, Question, fitting, skews
from stoker.control.cluster.ssh import CONNECT_S
from stoker.control.doctor import check as doctor
from stoker.control.machine.examination import Torch, examination_from_json, read_examination
from stoker.control.machine.examine import PARTS

MEET_S = CONNECT_S + 2.0
FILES_S = 600.0  # weights are hashed once, then remembered
TORCH_S = 90.0  # a cold disk
WORKER_S = 1800.0  # with --tune it measures for minutes


@frozen
class HostAnswers:
    """What the user wants to know of; empty where not told."""

    script: str = ""
    data: tuple[str, ...] = ()
    model: str = ""
    store_port: int = 0
    quick: bool = False  # no import of torch, no streams, no all-reduce


class ClusterCheck:
    def __init__(self, hosts: Hosts, asked: HostAnswers, asking: ProbeBatch) -> None:
        self.hosts = hosts
        self.asked = asked
        self.asking = asking
        self._by_name = {host.name: host for host in hosts.hosts}
        self.worker: Question | None = None

    def look(self) -> Facts:
        asking = self.asking
        everybody = list(self._by_name)
        pythons = {name: {"python": host.python or ""} for name, host in self._by_name.items()}
        builds = asking.ask("builds", pythons, 20.0) if self.asked.quick else None
        self.worker = None if self.asked.quick else asking.ask("torch", pythons, WORKER_S)
        parts = sorted(PARTS - {"torch"})  # torch is imported once, by the worker
        told = {name: {"runs_dir": _runs_dir(host), "port": 0, "parts": parts} for name, host in self._by_name.items()}
        examinations = asking.ask("examine", told, 30.0)
        files = self._ask_files()
        first = asking.answers(asking.ask("route", {name: {"to": []} for name in everybody}, 10.0), MEET_S)
        found = {name: self._met(name, answer) for name, answer in first.items()}
        present = [name for name, one in found.items() if not one.error]
        for name, (half, skew) in skews(asking, present).items():
            found[name] = replace(found[name], skew=skew, skew_error=half)
        found.update(self._ways({name: found[name] for name in present}))
        addresses = {name: address for name in present if (address := found[name].address)}
        pairs, store_port, question = connectivity.meet(asking, addresses, self.asked.store_port)
        for name, answer in asking.answers(examinations, 20.0).items():
            if name in present and "error" not in answer:
                found[name] = replace(found[name], examination=examination_from_json(answer))
        for name, word in self._torch(builds).items():
            if name in present:
                found[name] = _with_torch(found[name], word)
        if question is not None:
            # Now that torch's import is over: it would share the processor.
            pairs = self._stream(question, addresses, pairs)
        program: list[str] = []
        if files is not None:
            answers = {name: answer for name, answer in asking.answers(files, FILES_S).items() if name in present}
            for name, answer in answers.items():
                if "error" not in answer:
                    found[name] = replace(found[name], files=self._digests(answer))
            program = disagreements(answers, self.asked.script) if self.asked.script else []
        hosts = tuple(found[name] for name in everybody)
        facts = Facts(hosts, tuple(pairs), None, store_port, tuple(program), self.asked.quick)
        if self.worker is not None and all_reduce.may_reduce(facts):
            env = all_reduce.run_env(facts, self.hosts)
            facts = replace(facts, reduce=all_reduce.reduce(asking, self.worker, facts, env))
        return facts

    def _ask_files(self) -> Question | None:
        asked = self.asked
        paths = [*asked.data, *([asked.model] if asked.model else [])]
        if not asked.script and not paths:
            return None
        more = {"script": asked.script, "paths": paths}
        told = {name: {"workdir": host.workdir or os.getcwd(), **more} for name, host in self._by_name.items()}
        return self.asking.ask("files", told, FILES_S)

    def _digests(self, answer: Mapping[str, Any]) -> dict[str, str]:
        """What must be the same -> its digest; "" where it is not there."""
        found = {f"data {path}": answer["paths"][path] or "" for path in self.asked.data}
        if self.asked.script:
            own = {f"script {self.asked.script}": answer["script"] or "", "Python files there": answer["package"] or ""}
            found = {**own, **found}
        if self.asked.model:
            found[f"model {self.asked.model}"] = answer["paths"][self.asked.model] or ""
        return found

    def _torch(self, builds: Question | None) -> dict[str, Any]:
        if self.worker is not None:
            return self.asking.words(self.worker, 1, TORCH_S)
        assert builds is not None
        return {name: answer.get("torch", answer) for name, answer in self.asking.answers(builds, 20.0).items()}

    def _stream(self, question: Question, addresses: Mapping[str, str], pairs: list[Pair]) -> list[Pair]:
        try:
            return pairs if self.asked.quick else connectivity.streams(self.asking, question, addresses, pairs)
        finally:
            connectivity.part(self.asking, question)

    def _met(self, name: str, answer: Mapping[str, Any]) -> OneHost:
        if "error" in answer:
            agent = self.asking.agents[name]
            why, _, fix = agent.gone.removeprefix(f"host {name}: ").partition("; ")
            host = self._by_name[name]
            hole = path_mtu.hole(host, self.hosts) if not host.here and _is_stuck(why) else None
            said = f" ({agent.complaint})" if agent.complaint else ""
            return OneHost(name, error=why or f"no answer within {MEET_S:.0f} s{said}", fix=fix, hole=hole)
        return OneHost(name, address=address_of(self._by_name[name], answer), hostname=answer["hostname"])

    def _ways(self, present: dict[str, OneHost]) -> dict[str, OneHost]:
        """The interface that leads to the others, and what everybody makes of everybody's name."""
        asking = self.asking
        addresses = {name: one.address for name, one in present.items() if one.address}
        peers = {name: [address for other, address in addresses.items() if other != name] for name in present}
        routes = asking.answers(asking.ask("route", {name: {"to": peers[name]} for name in present}, 5.0), 6.0)
        found = {}
        for name, one in present.items():
            ways = [way for way in routes[name].get("routes", {}).values() if way.get("interface")]
            told = self._by_name[name].interface
            way = next((way for way in ways if way["interface"] == told), ways[0] if ways else {})
            interface, address = told or way.get("interface"), one.address or way.get("source")
            found[name] = replace(one, interface=interface, mtu=way.get("mtu"), address=address)
        names = sorted({one.hostname for one in found.values() if one.hostname})
        args = {
            name: {"of": names, "interfaces": [one.interface] if one.interface else []} for name, one in found.items()
        }
        for name, answer in asking.answers(asking.ask("names", args, 8.0), 9.0).items():
            link = next(iter(answer.get("links", {}).values()), {"speed": None, "physical": False})
            resolves = {word: tuple(addresses) for word, addresses in answer.get("resolves", {}).items()}
            found[name] = replace(found[name], resolves=resolves, speed=link["speed"], physical=link["physical"])
        return found


def _is_stuck(why: str) -> bool:
    """It connected and then fell silent, as far as the words tell."""
    return not why or "timed out" in why or "no data came back" in why or "silent" in why or "no agent answered" in why


def _runs_dir(host: Host) -> str:
    return os.path.join(host.workdir or os.getcwd(), "runs")


def address_of(host: Host, answer: Mapping[str, Any]) -> str | None:
    """Where the others reach it: as told, else where ssh came to. None on this machine: its route will show."""
    if host.address or host.here:
        return host.address
    return host.target if is_address(host.target) else answer.get("reached_at")


def _with_torch(one: OneHost, word: Mapping[str, Any]) -> OneHost:
    word = fitting(TORCH, word, "torch")
    torch: Torch = read_examination(Torch, {name: value for name, value in word.items() if name != "python"})
    examination = one.examination
    if examination is not None:
        missing = {part: why for part, why in (examination.missing or {}).items() if part != "torch"}
        examination = replace(examination, torch=torch, missing=missing)
    return replace(one, torch=torch, python=word.get("python"), examination=examination)


def doctor_findings(facts: Facts, hosts: Hosts) -> list[Finding]:
    """The doctor's checks on each host, once for those that share a finding. between.* covers names and torch."""
    checks = [one for one in doctor.load_checks().values() if one.id not in ("net.hostname", "torch.installed")]
    found: dict[tuple[str, str, str, str], list[str]] = {}
    slots = {host.name: host.slots or 0 for host in hosts.hosts}
    for one in facts.there:
        if one.examination is None:
            found.setdefault(("between.host", "unknown", "it could not be examined", ""), []).append(one.name)
            continue
        for finding in doctor.run_checks(checks, one.examination, slots[one.name]):
            found.setdefault((finding.id, finding.level, finding.text, finding.fix), []).append(one.name)
    return [
        Finding(id, level, f"{check_rules.listed(names)}: {text}", fix) for (id, level, text, fix), names in found.items()
    ]
