"""The part of the check that is cheap enough to run before every start: builds, ports, names, clocks. Well under 3 s
where all is well.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.contract.shape import replace
from stoker.contract.shapes import Finding
from stoker.control.cluster import between
from stoker.control.cluster.asking import Asking, skews
from stoker.control.cluster.facts import Facts, OneHost
from stoker.control.cluster.hosts import Hosts
from stoker.control.cluster.reaching import meet
from stoker.control.machine.facts import Torch, read

ONLY = (
    "between.port-blocked", "between.mtu", "between.hostname", "between.clock", "between.torch", "between.torch-missing", "between.python",
)  # fmt: skip
TWICE = "between.same-host"  # two ranks would share a card. Not of a job's nodes: its scheduler tells those apart


def quick(asking: Asking, hosts: Hosts, where: Mapping[str, str], store_port: int = 0) -> list[Finding]:
    """`where`: host -> the address the others use, as the run will. Findings of level "fail" mean: this can't work.

    Whoever owns the agents must pass what they say to `asking.hear(host, message, payload)` meanwhile.
    """
    names = [host.name for host in hosts.hosts if host.name in where and not asking.agents[host.name].gone]
    pythons = {host.name: {"python": host.python or ""} for host in hosts.hosts if host.name in names}
    builds = asking.ask("builds", pythons, 20.0)
    pairs, port, question = meet(asking, {name: where[name] for name in names}, store_port)
    if question is not None:
        asking.end(question)
    found = {name: OneHost(name, address=where[name]) for name in names}
    for name, answer in asking.answers(builds, 20.0).items():
        torch = answer.get("torch")
        if torch is None:
            continue
        known: Torch = read(Torch, {key: value for key, value in torch.items() if key != "python"})
        resolves = {word: tuple(addresses) for word, addresses in answer["resolves"].items()}
        found[name] = replace(
            found[name], hostname=answer["hostname"], resolves=resolves, torch=known, python=torch.get("python")
        )
    for name, (half, skew) in skews(asking, names, 2).items():
        found[name] = replace(found[name], skew=skew, skew_error=half)
    return between.findings(
        Facts(tuple(found.values()), tuple(pairs), None, port), ONLY if hosts.transports else (*ONLY, TWICE)
    )
