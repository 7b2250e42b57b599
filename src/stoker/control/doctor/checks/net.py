"""net.*: host names, interfaces and the port of the store."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from stoker.contract.evidence import Finding
from stoker.control.doctor.check import check, warn
from stoker.control.machine.examination import NetworkState


@check("net.hostname")
def hostname(net: NetworkState) -> Iterator[Finding]:
    """Warns if the host's own name does not resolve. torchrun and gloo look it up; Stoker passes addresses instead."""
    if (net.error or not net.addresses) and not net.slow_lookups:
        text = f"the host's name {net.hostname} does not resolve: {net.error or 'no address'}"
        yield warn(text, f"echo {shlex.quote(f'127.0.1.1 {net.hostname}')} >> /etc/hosts   # needs root")


@check("net.lookups")
def lookups(net: NetworkState) -> Iterator[Finding]:
    """Warns if a lookup of the host's own name or address takes over 1.5 s. torch does both for each connection."""
    if not net.slow_lookups:
        return
    count, servers = len(net.silent_servers), ", ".join(net.silent_servers)
    verb = "does" if count == 1 else "do"
    because = f": the name server{'s' * (count > 1)} {servers} {verb} not respond" if count else ""
    yield warn(
        f"looking up a name or an address takes longer than 1.5 s{because}; torch waits that long for each connection",
        "add the name and the address of each host to /etc/hosts, on every host, or put a name server that responds"
        " into /etc/resolv.conf   # needs root",
    )


@check("net.port")
def port(net: NetworkState) -> Iterator[Finding]:
    """Warns if the requested port is in use, and names the process."""
    if net.port and net.port_holder:
        yield warn(
            f"port {net.port} is held by {net.port_holder}", "omit --master-port to let Stoker choose a free port"
        )


@check("net.interfaces")
def interfaces(net: NetworkState, environment: dict[str, str]) -> Iterator[Finding]:
    """Warns if NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names an interface that is not up."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(name, "").lstrip("^=")
        prefixes = [prefix for prefix in value.split(",") if prefix]
        is_exclusion = environment.get(name, "").startswith("^")
        is_up = any(interface.startswith(tuple(prefixes)) for interface in (*net.interfaces, "lo"))
        if prefixes and not is_exclusion and not is_up:
            text = f"{name}={value} names no interface that is up; interfaces that are up: {', '.join(net.interfaces) or 'none'}"
            yield warn(text, f"unset {name}")
