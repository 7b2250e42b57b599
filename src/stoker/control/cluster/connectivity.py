"""Tests the network between the hosts: all listen, connect to each other, and stream. Also has the quick check of a run."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

from stoker.contract.evidence import Finding
from stoker.contract.frozen import replace
from stoker.control.cluster import check_rules
from stoker.control.cluster.check_facts import ClusterFacts, HostFacts, PairFacts
from stoker.control.cluster.hosts import Hosts
from stoker.control.cluster.probes import PAIR, PORTS, RATE, PendingProbe, ProbeBatch, check_answer, measure_clock_skew
from stoker.control.machine.examination import TorchBuild, read_part

NET_S = 14.0
STREAM_S = 14.0
MAX_ROUNDS = 4  # rounds of streams; in round k each host streams to its k-th neighbor
REPEAT_BELOW = 0.5  # pairs below this share of the median rate are measured again, one at a time
MAX_REPEATS = 6


def try_connections(
    batch: ProbeBatch, addresses: Mapping[str, str], store_port: int = 0
) -> tuple[list[PairFacts], int, PendingProbe | None]:
    """Connect every host to every other. Return the pairs, the store's port, and the probe (None for fewer than two hosts).

    The probe keeps running, with its listeners open, until `close_listeners`. `store_port` must be free on the first host.
    If it is 0, and on the other hosts, any free port of the usual range is used.
    """
    if len(addresses) < 2:
        return [], 0, None
    token = secrets.token_hex(16)
    store_ports = dict.fromkeys(addresses, 0) | {next(iter(addresses)): store_port}
    args = {
        name: {"address": address, "token": token, "store_port": store_ports[name]}
        for name, address in addresses.items()
    }
    probe = batch.ask("net", args, 120.0)
    listening = batch.partial_answers(probe, 1, NET_S)
    listening = {name: check_answer(PORTS, answer, "its ports") for name, answer in listening.items()}
    ports = {name: answer["ports"] for name, answer in listening.items() if "ports" in answer}
    peers = {
        name: {other: {"address": addresses[other], "ports": ports[other]} for other in ports if other != name}
        for name in ports
    }
    batch.send(probe, {name: {"do": "meet", "peers": others} for name, others in peers.items()})
    pairs = []
    for source, answer in batch.partial_answers(probe, 2, NET_S).items():
        if source not in ports:
            error = listening[source].get("error", "it did not answer")
            pairs += [PairFacts(source, target, {}, error=error) for target in addresses if target != source]
            continue
        for target in peers[source]:
            connection = check_answer(
                PAIR, answer.get(target, {"error": answer.get("error") or "it did not answer"}), target
            )
            if "ports" in connection:
                states = connection["ports"]
            else:
                states = dict.fromkeys(map(str, ports[target]), connection["error"])
            by_port = {port: states[str(port)] for port in ports[target] if str(port) in states}
            pairs.append(
                PairFacts(
                    source,
                    target,
                    by_port,
                    rtt=connection.get("rtt"),
                    segment=connection.get("segment"),
                    big=connection.get("big"),
                    passes=connection.get("passes"),
                )
            )
    return pairs, next((answer[0] for answer in ports.values()), 0), probe


def measure_bandwidth(
    batch: ProbeBatch, probe: PendingProbe, addresses: Mapping[str, str], pairs: list[PairFacts]
) -> list[PairFacts]:
    """Return the pairs with their rates. All hosts stream at the same time, as in a ring. Slow pairs are then repeated alone."""
    names = list(addresses)
    usable = {(pair.source, pair.target): pair for pair in pairs if pair.big and pair.ports and not pair.closed}
    rates: dict[tuple[str, str], float] = {}
    for distance in range(1, min(len(names), MAX_ROUNDS + 1)):
        ring = ((name, names[(index + distance) % len(names)]) for index, name in enumerate(names))
        rates.update(_stream(batch, probe, addresses, [usable[ends] for ends in ring if ends in usable]))
    median = sorted(rates.values())[len(rates) // 2] if rates else 0.0
    slow = sorted((rate, ends) for ends, rate in rates.items() if rate < REPEAT_BELOW * median)
    for rate, ends in slow[:MAX_REPEATS]:
        rates[ends] = max(rate, *_stream(batch, probe, addresses, [usable[ends]]).values(), 0.0)
    return [replace(pair, rate=rates.get((pair.source, pair.target))) for pair in pairs]


def _stream(
    batch: ProbeBatch, probe: PendingProbe, addresses: Mapping[str, str], pairs: Iterable[PairFacts]
) -> dict[tuple[str, str], float]:
    """Stream over these pairs at the same time. No two have the same source. Return (source, target) -> bytes per second."""
    by_source = {pair.source: pair for pair in pairs}
    counts = {name: len(probe.partial[name]) for name in by_source}
    for name, pair in by_source.items():
        order = {"do": "stream", "address": addresses[pair.target], "port": next(iter(pair.ports))}
        batch.send(probe, {name: order})
    batch.wait(STREAM_S, lambda name: len(probe.partial[name]) > counts[name] or name in probe.answers, list(by_source))
    rates = {}
    for name, pair in by_source.items():
        if len(probe.partial[name]) > counts[name]:
            answer = check_answer(RATE, probe.partial[name][counts[name]], "its rate")
            if "rate" in answer:
                rates[name, pair.target] = answer["rate"]
    return rates


def close_listeners(batch: ProbeBatch, probe: PendingProbe) -> None:
    """End the probe that `try_connections` left running."""
    batch.send(probe, {name: {"do": "end"} for name in probe.hosts})
    batch.answers(probe, 3.0)


# ---- the rules that are fast enough to check before every run ----

_QUICK_RULES = (
    "between.port-blocked", "between.mtu", "between.hostname", "between.clock", "between.torch", "between.torch-missing", "between.python",
)  # fmt: skip
_SAME_HOST = "between.same-host"  # skipped for a scheduler's nodes, which are always different hosts


def quick_check(batch: ProbeBatch, hosts: Hosts, addresses: Mapping[str, str], store_port: int = 0) -> list[Finding]:
    """Check builds, ports, names and clocks. `addresses` maps hosts to the addresses that the run will use."""
    names = [host.name for host in hosts.hosts if host.name in addresses and not batch.agents[host.name].gone]
    pythons = {host.name: {"python": host.python or ""} for host in hosts.hosts if host.name in names}
    builds = batch.ask("builds", pythons, 20.0)
    pairs, port, probe = try_connections(batch, {name: addresses[name] for name in names}, store_port)
    if probe is not None:
        batch.cancel(probe)
    facts = {name: HostFacts(name, address=addresses[name]) for name in names}
    for name, answer in batch.answers(builds, 20.0).items():
        torch = answer.get("torch")
        if torch is None:
            continue
        facts[name] = replace(
            facts[name],
            hostname=answer["hostname"],
            resolves={hostname: tuple(resolved) for hostname, resolved in answer["resolves"].items()},
            torch=read_part(TorchBuild, {key: value for key, value in torch.items() if key != "python"}),
            python=torch.get("python"),
        )
    for name, (error, skew) in measure_clock_skew(batch, names, 2).items():
        facts[name] = replace(facts[name], skew=skew, skew_error=error)
    rules = _QUICK_RULES if hosts.transports else (*_QUICK_RULES, _SAME_HOST)
    return check_rules.run_rules(ClusterFacts(tuple(facts.values()), tuple(pairs), None, port), rules)
