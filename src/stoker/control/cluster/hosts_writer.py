"""`stoker cluster init`: probes the hosts for their GPUs, torch and routes, and writes a hosts file."""

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
from stoker.control.cluster.hosts import Hosts, is_address, parse_hosts
from stoker.control.cluster.probes import open_probe_batch
from stoker.control.cluster.ssh import CONNECT_S

CONNECT_TIMEOUT_S = CONNECT_S + 12.0  # the login, then the probe of GPUs and Pythons
ROUTE_S = 10.0
_PYTHONS = ("~/venv/bin/python", "~/.venv/bin/python", "python3", "python")

Say = Callable[[str], None]


@frozen
class HostEntry:
    """The answers of one host."""

    name: str
    user: str | None
    gpus: tuple[str, ...]  # names
    gpu_error: str | None
    python: str | None
    python_version: str | None
    torch: str | None
    interface: str | None
    address: str | None  # None if the name is an address

    @property
    def description(self) -> str:
        """Return the GPUs and the torch of the host, for messages and comments."""
        gpus = " + ".join(f"{self.gpus.count(kind)} × {kind}" for kind in sorted(set(self.gpus)))
        if not gpus:
            gpus = f"GPUs unknown: {self.gpu_error}" if self.gpu_error else "no GPU, one CPU rank"
        torch = f"no torch in {self.python}" if self.python else "no Python"
        if self.torch:
            torch = f"torch {self.torch} (Python {self.python_version})"
        return " ".join(f"{gpus}, {torch}".split())


def write_hosts_file(
    names: list[str], out: str, defaults: Mapping[str, Any], ssh: Mapping[str, Any], force: bool, say: Say
) -> None:
    """Probe all hosts and write `out`. Raises Refusal, and writes nothing, if a host can't be probed.

    `defaults` and `ssh` (ssh_config, ssh_options) are written to the file.
    """
    if os.path.lexists(out) and not force:
        raise Refusal(f"{out} already exists; use --force to overwrite it, or --out FILE", EX_CANTCREAT)
    folder = os.path.dirname(os.path.abspath(out))
    if not os.access(folder, os.W_OK):
        why = f"you have no write permission for {folder}" if os.path.isdir(folder) else f"{folder} does not exist"
        raise Refusal(f"{out} can't be written: {why}", EX_CANTCREAT)
    entries = _probe_hosts(parse_hosts({**ssh, "defaults": dict(defaults), "hosts": list(names)}, out, written=False))
    for entry in entries:
        say(f"{entry.name}: {entry.description}{', interface ' + entry.interface if entry.interface else ''}")
    try:
        write_atomic(out, format_hosts_file(entries, defaults, ssh))
    except OSError as problem:
        raise Refusal(f"{out} can't be written: {problem.strerror}", EX_CANTCREAT) from problem
    without_torch = [entry.name for entry in entries if not entry.torch]
    if without_torch:
        tried = f"tried {defaults.get('python') or ', '.join(_PYTHONS)}"
        fix = f"give a Python that has it with --python, or with python: in {out}"
        say(f"found no torch on {', '.join(without_torch)} ({tried}); {fix}")
    ranks = sum(max(1, len(entry.gpus)) for entry in entries)
    wrote = f"wrote {out}: {plural(len(entries), 'host')}, {plural(ranks, 'rank')}"
    say(f"{wrote}; `stoker cluster check --hosts {out}` checks them")


def _probe_hosts(hosts: Hosts) -> list[HostEntry]:
    """Probe each host: first its setup and the address that ssh reached, then its routes to the other addresses."""
    by_name = {host.name: host for host in hosts.hosts}
    pythons = {name: [host.python] if host.python else list(_PYTHONS) for name, host in by_name.items()}
    with open_probe_batch(hosts) as batch:
        setup_probe = batch.ask("setup", {name: {"pythons": pythons[name]} for name in by_name}, 60.0)
        address_probe = batch.ask("route", {name: {"to": []} for name in by_name}, ROUTE_S)
        setups = batch.answers(setup_probe, CONNECT_TIMEOUT_S + 60.0)
        own_routes = batch.answers(address_probe, CONNECT_TIMEOUT_S)
        _refuse_failed({name: {**own_routes[name], **setups[name]} for name in by_name})
        addresses = {name: name if is_address(name) else own_routes[name].get("reached_at") for name in by_name}
        peers = {
            name: [addresses[other] for other in by_name if other != name and addresses[other]] for name in by_name
        }
        route_probe = batch.ask("route", {name: {"to": peers[name]} for name in by_name}, ROUTE_S)
        routes = batch.answers(route_probe, ROUTE_S + 1)
        _refuse_failed(routes)
    return [_make_entry(name, host.user, setups[name], routes[name], addresses[name]) for name, host in by_name.items()]


def _refuse_failed(answers: Mapping[str, Mapping[str, Any]]) -> None:
    errors = {name: answer["error"] for name, answer in answers.items() if "error" in answer}
    if errors:
        lines = [why if why.startswith(f"host {name}: ") else f"host {name}: {why}" for name, why in errors.items()]
        raise Refusal(lines[0], EX_UNAVAILABLE, cause="host.agent", more=lines[1:])


def _make_entry(
    name: str, user: str | None, setup: Mapping[str, Any], route: Mapping[str, Any], address: str | None
) -> HostEntry:
    """Return the host's entry, with the first Python that has torch and the interface that all its routes use, if any."""
    pythons = setup["pythons"]
    python = next((candidate for candidate in pythons if candidate.get("torch")), pythons[0] if pythons else {})
    peer_routes = [peer_route for peer_route in route["routes"].values() if peer_route.get("interface")]
    interfaces = {peer_route["interface"] for peer_route in peer_routes}
    source = address or next((peer_route["source"] for peer_route in peer_routes if "source" in peer_route), None)
    return HostEntry(
        name,
        user,
        gpus=tuple(gpu or "unknown GPU" for gpu in setup["gpus"]),
        gpu_error=setup["gpu_error"],
        python=python.get("python"),
        python_version=python.get("version"),
        torch=python.get("torch"),
        interface=interfaces.pop() if len(interfaces) == 1 else None,
        address=None if is_address(name) else source,
    )


def format_hosts_file(entries: list[HostEntry], defaults: Mapping[str, Any], ssh: Mapping[str, Any]) -> str:
    """Return the text of the file. A Python that all hosts share becomes a default. Comments describe each host."""
    common = dict(defaults)
    pythons = {entry.python for entry in entries}
    if len(pythons) == 1 and None not in pythons:
        common["python"] = pythons.pop()
    lines = [
        "# Written by `stoker cluster init`. Ranks are numbered in this order; slots: is the number of ranks on a host."
    ]
    lines += [f"{key}: {_yaml(value)}" for key, value in ssh.items()]
    if common:
        lines.append(f"defaults: {_yaml(common)}")
    lines.append("hosts:")
    for entry in entries:
        keys: dict[str, Any] = {"host": entry.name, "slots": max(1, len(entry.gpus))}
        for key in ("user", "python", "interface", "address"):
            value = getattr(entry, key)
            if value is not None and value != common.get(key):
                keys[key] = value
        lines.append(f"  - {_yaml(keys)}  # {escape(entry.description)}")
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    """Return a value as one line of YAML. Text that YAML would parse as something else is quoted."""
    import json

    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_yaml(item) for item in value) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        is_plain = value.isprintable() and parse_yaml(f"{{k: {value}}}") == {"k": value}
    except YamlError:
        is_plain = False
    return value if is_plain else json.dumps(value)
