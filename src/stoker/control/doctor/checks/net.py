"""net.*: names, interfaces, the store's port."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.shapes import Finding
from stoker.control.doctor.check import Asked, check, known, warn
from stoker.control.machine.facts import Examination


@check("net.hostname", "net")
def hostname(found: Examination, _asked: Asked) -> Iterator[Finding]:
    """The host's own name resolves. torchrun and gloo look it up; Stoker passes addresses instead."""
    net = known(found.net)
    if net.error or not net.addresses:
        yield warn(
            f"the host's name {net.hostname} does not resolve: {net.error or 'no address'}",
            f"echo '127.0.1.1 {net.hostname}' >> /etc/hosts   # needs root",
        )


@check("net.port", "net")
def port(found: Examination, _asked: Asked) -> Iterator[Finding]:
    """The port that is asked for is free, or who holds it."""
    net = known(found.net)
    if net.port and net.port_holder:
        yield warn(f"port {net.port} is held by {net.port_holder}", "leave --master-port out: Stoker takes a free one")


@check("net.interfaces", "net", "environment")
def interfaces(found: Examination, _asked: Asked) -> Iterator[Finding]:
    """NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names an interface that is there."""
    net = known(found.net)
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = (found.environment or {}).get(name, "").lstrip("^=")
        words = [word for word in value.split(",") if word]
        there = (*net.interfaces, "lo")
        if (
            words
            and not (found.environment or {})[name].startswith("^")
            and not any(up.startswith(word) for word in words for up in there)
        ):
            text = f"{name}={value}: no such interface is up; there are {', '.join(net.interfaces) or 'none'}"
            yield warn(text, f"unset {name}")
