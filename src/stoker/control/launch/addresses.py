"""Where hosts reach each other: an explicit address of each, and the interface towards the others. Names need not
resolve anywhere. Pure.

gloo takes the address of the host's own name unless it is told an interface, and NCCL the first interface that is up:
both are wrong where hosts share a name, where it means loopback, or where a bridge of Docker comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract.names import EX_UNAVAILABLE, Refusal
from stoker.control.cluster.hosts import Host

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def known(hosts: Sequence[Host]) -> dict[str, str]:
    """What can be said of a host before anybody is asked. Not of `here`: its own loopback is no address for others."""
    found = {host.name: host.address for host in hosts if host.address}
    return found | {
        host.name: host.target for host in hosts if host.name not in found and _literal(host.target) and not host.here
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
        ways = [
            way
            for target, way in routes[host.name].get("routes", {}).items()
            if way.get("source") and target != whole.get(host.name)
        ]
        if not ways:
            raise Refusal(
                f"no address is known by which the others reach host {host.name}: say it in the hosts file (address:)",
                EX_UNAVAILABLE,
                cause="launch.hosts",
            )
        whole[host.name] = ways[0]["source"]
    return whole


def interfaces(
    hosts: Sequence[Host], routes: Mapping[str, Mapping[str, Any]], where: Mapping[str, str]
) -> dict[str, str]:
    """Host -> the interface towards the first of its peers: rank 0's host for all but that one. One without a way is
    refused, all such together.
    """
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
        raise Refusal(f"hosts can't reach each other: {'; '.join(cut)}", EX_UNAVAILABLE, cause="launch.hosts")
    return found


def _literal(text: str) -> bool:
    """An address, not a name."""
    return ":" in text or (text.count(".") == 3 and text.replace(".", "").isdigit())
