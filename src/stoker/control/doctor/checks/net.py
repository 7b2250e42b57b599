"""net.*: names, interfaces, the store's port."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from stoker.contract.evidence import Finding
from stoker.control.doctor.check import check, warn
from stoker.control.machine.examination import Net


@check("net.hostname")
def hostname(net: Net) -> Iterator[Finding]:
    """The host's own name resolves. torchrun and gloo look it up; Stoker passes addresses instead."""
    if (net.error or not net.addresses) and not net.slow_lookups:
        text = f"the host's name {net.hostname} does not resolve: {net.error or 'no address'}"
        yield warn(text, f"echo {shlex.quote(f'127.0.1.1 {net.hostname}')} >> /etc/hosts   # needs root")


@check("net.lookups")
def lookups(net: Net) -> Iterator[Finding]:
    """The host's own name and address are looked up within 1.5 s. torch looks up both for each connection."""
    if not net.slow_lookups:
        return
    count, listed = len(net.silent_servers), ", ".join(net.silent_servers)
    verb = "does" if count == 1 else "do"
    because = f": the name server{'s' * (count > 1)} {listed} {verb} not answer" if count else ""
    yield warn(
        f"looking up a name or an address takes longer than 1.5 s{because}; torch waits that long for each connection",
        "add the name and the address of each host to /etc/hosts, on every host, or name a server that answers in /etc/resolv.conf   # needs root",
    )


@check("net.port")
def port(net: Net) -> Iterator[Finding]:
    """The port that is asked for is free, or who holds it."""
    if net.port and net.port_holder:
        yield warn(f"port {net.port} is held by {net.port_holder}", "leave --master-port out: Stoker takes a free one")


@check("net.interfaces")
def interfaces(net: Net, environment: dict[str, str]) -> Iterator[Finding]:
    """NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names an interface that is there."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(name, "").lstrip("^=")
        words = [word for word in value.split(",") if word]
        there = (*net.interfaces, "lo")
        if (
            words
            and not environment[name].startswith("^")
            and not any(up.startswith(word) for word in words for up in there)
        ):
            text = f"{name}={value}: no such interface is up; there are {', '.join(net.interfaces) or 'none'}"
            yield warn(text, f"unset {name}")
