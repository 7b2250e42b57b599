"""`stoker cluster init`: writes a hosts file by asking the hosts for their cards, torch and routes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from stoker.contract.errors import EX_CANTCREAT, EX_UNAVAILABLE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.safe_io import write_atomic
from stoker.contract.text import escape
from stoker.contract.units import plural
from stoker.contract.yaml_text import YamlError, parse_yaml
from stoker.control.cluster.hosts import Hosts, from_mapping, is_address
from stoker.control.cluster.probes import meeting
from stoker.control.cluster.ssh import CONNECT_S

MEET_S = CONNECT_S + 12.0  # the login, then a look at its cards and Pythons
ROUTE_S = 10.0
_PYTHONS = ("~/venv/bin/python", "~/.venv/bin/python", "python3", "python")

Say = Callable[[str], None]


@frozen
class Answer:
    """One host, as it will stand in the file."""

    name: str
    user: str | None
    gpus: tuple[str, ...]  # their names
    gpu_error: str | None
    python: str | None
    python_version: str | None
    torch: str | None
    interface: str | None
    address: str | None  # only where its name is none

    @property
    def about(self) -> str:
        """For people: what was found."""
        cards = " + ".join(f"{self.gpus.count(kind)} × {kind}" for kind in sorted(set(self.gpus)))
        if not cards:
            cards = f"GPUs unknown: {self.gpu_error}" if self.gpu_error else "no GPU: one CPU rank"
        torch = f"no torch in {self.python}" if self.python else "no Python"
        if self.torch:
            torch = f"torch {self.torch} (Python {self.python_version})"
        return " ".join(f"{cards}, {torch}".split())


def main_part(
    names: list[str], out: str, defaults: Mapping[str, Any], more: Mapping[str, Any], force: bool, say: Say
) -> None:
    """`defaults`: user, python … as in the file; `more`: its ssh_config and ssh_options. Asks, then writes `out`; all or nothing."""
    if os.path.lexists(out) and not force:
        raise Refusal(f"{out} is there already: --force overwrites it, --out FILE writes another one", EX_CANTCREAT)
    folder = os.path.dirname(os.path.abspath(out))
    if not os.access(folder, os.W_OK):
        line = f"{out} can't be written: {'no permission' if os.path.isdir(folder) else 'no folder ' + folder}"
        raise Refusal(line, EX_CANTCREAT)
    hosts = from_mapping({**more, "defaults": dict(defaults), "hosts": list(names)}, out, written=False)
    answers = _ask(hosts)
    for answer in answers:
        say(f"{answer.name}: {answer.about}{', reached through ' + answer.interface if answer.interface else ''}")
    _write(out, text(answers, defaults, more))
    ranks = sum(max(1, len(answer.gpus)) for answer in answers)
    without = [answer.name for answer in answers if not answer.torch]
    if without:
        looked = f"looked at {defaults.get('python') or ', '.join(_PYTHONS)}"
        say(
            f"no torch on {', '.join(without)} ({looked}): name a Python that has it, with --python or python: in {out}"
        )
    wrote = f"wrote {out}: {plural(len(answers), 'host')}, {plural(ranks, 'rank')}"
    say(f"{wrote}; `stoker cluster check --hosts {out}` looks closer")


def _ask(hosts: Hosts) -> list[Answer]:
    by_name = {host.name: host for host in hosts.hosts}
    pythons = {name: [host.python] if host.python else list(_PYTHONS) for name, host in by_name.items()}
    with meeting(hosts) as asking:
        setups = asking.ask("setup", {name: {"pythons": pythons[name]} for name in by_name}, 60.0)
        first = asking.ask("route", {name: {"to": []} for name in by_name}, ROUTE_S)
        found, ways = asking.answers(setups, MEET_S + 60.0), asking.answers(first, MEET_S)
        _refuse_failed({name: {**ways[name], **found[name]} for name in by_name})
        addresses = {name: name if is_address(name) else ways[name].get("reached_at") for name in by_name}
        peers = {name: [one for other, one in addresses.items() if other != name and one] for name in by_name}
        towards = asking.ask("route", {name: {"to": peers[name]} for name in by_name}, ROUTE_S)
        routes = asking.answers(towards, ROUTE_S + 1)
        _refuse_failed(routes)
    return [_answer(host.user, name, found[name], routes[name], addresses[name]) for name, host in by_name.items()]


def _refuse_failed(answers: Mapping[str, Mapping[str, Any]]) -> None:
    failed = {name: answer["error"] for name, answer in answers.items() if "error" in answer}
    if failed:
        lines = [why if why.startswith(f"host {name}: ") else f"host {name}: {why}" for name, why in failed.items()]
        raise Refusal(lines[0], EX_UNAVAILABLE, cause="host.agent", more=lines[1:])


def _answer(
    user: str | None, name: str, found: Mapping[str, Any], way: Mapping[str, Any], address: str | None
) -> Answer:
    """Put together what one host answered: the first Python that has torch, and the interface that leads to the others."""
    pythons = found["pythons"]
    best = next((one for one in pythons if one.get("torch")), pythons[0] if pythons else {})
    ways = [one for one in way["routes"].values() if one.get("interface")]
    interfaces = {one["interface"] for one in ways}
    here = address or next((one["source"] for one in ways if "source" in one), None)
    cards = tuple(kind or "unknown GPU" for kind in found["gpus"])
    python = (best.get("python"), best.get("version"), best.get("torch"))
    interface = interfaces.pop() if len(interfaces) == 1 else None
    return Answer(name, user, cards, found["gpu_error"], *python, interface, None if is_address(name) else here)


def text(answers: list[Answer], defaults: Mapping[str, Any], more: Mapping[str, Any]) -> str:
    """The file. What all hosts have in common is a default; each line ends with what its host said."""
    common = dict(defaults)
    pythons = {answer.python for answer in answers}
    if len(pythons) == 1 and None not in pythons:
        common["python"] = pythons.pop()
    lines = ["# Written by `stoker cluster init`. Ranks are numbered in this order; slots are the ranks of a host."]
    lines += [f"{key}: {_flow(value)}" for key, value in more.items()]
    if common:
        lines.append(f"defaults: {_flow(common)}")
    lines.append("hosts:")
    for answer in answers:
        entry: dict[str, Any] = {"host": answer.name, "slots": max(1, len(answer.gpus))}
        mine = {"user": answer.user, "python": answer.python, "interface": answer.interface, "address": answer.address}
        entry |= {key: value for key, value in mine.items() if value is not None and value != common.get(key)}
        lines.append(f"  - {_flow(entry)}  # {escape(answer.about)}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """One line of YAML; a text is quoted where YAML would read it as something else."""
    import json

    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_flow(one) for one in value) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        same = value.isprintable() and parse_yaml(f"{{k: {value}}}") == {"k": value}
    except YamlError:
        same = False
    return value if same else json.dumps(value)


def _write(out: str, content: str) -> None:
    try:
        write_atomic(out, content)
    except OSError as problem:
        raise Refusal(f"{out} can't be written: {problem.strerror}", EX_CANTCREAT) from problem
