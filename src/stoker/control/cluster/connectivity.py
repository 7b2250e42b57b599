"""The network between the hosts, tried by themselves: all listen, all connect, then they stream."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

from stoker.contract.evidence import Finding
from stoker.contract.frozen import replace
from stoker.control.cluster import check_rules
from stoker.control.cluster.check_facts import Facts, OneHost, Pair
from stoker.control.cluster.hosts import Hosts
from stoker.control.cluster.probes import PAIR, PORTS, RATE, ProbeBatch, Question, fitting, skews
from stoker.control.machine.examination import Torch, read_examination

NET_S = 14.0
STREAM_S = 14.0
ROUNDS = 4  # of streams: each host to its k-th neighbour
DOUBTFUL = 0.5  # of the median rate: measured once more, alone
AGAIN = 6


def meet(asking: ProbeBatch, addresses: Mapping[str, str], store_port: int = 0) -> tuple[list[Pair], int, Question | None]:
    """(pairs, the store's port, the question). That one is still open: the listeners stay until it is told to end.

    `store_port`: the first host must have this one free; elsewhere, and where it is 0, any of the usual range will do.
    """
    if len(addresses) < 2:
        return [], 0, None
    token = secrets.token_hex(16)
    wanted = dict.fromkeys(addresses, 0) | {next(iter(addresses)): store_port}
    told = {name: {"address": one, "token": token, "store_port": wanted[name]} for name, one in addresses.items()}
    question = asking.ask("net", told, 120.0)
    first = {name: fitting(PORTS, word, "its ports") for name, word in asking.words(question, 1, NET_S).items()}
    ports = {name: word["ports"] for name, word in first.items() if "ports" in word}
    peers = {
        name: {other: {"address": addresses[other], "ports": ports[other]} for other in ports if other != name}
        for name in ports
    }
    asking.tell(question, {name: {"do": "meet", "peers": one} for name, one in peers.items()})
    pairs = []
    for source, word in asking.words(question, 2, NET_S).items():
        if source not in ports:
            continue
        for target in peers[source]:
            one = fitting(PAIR, word.get(target, {"error": word.get("error") or "no answer"}), target)
            tried = one["ports"] if "ports" in one else dict.fromkeys(map(str, ports[target]), one["error"])
            closed = {port: tried[str(port)] for port in ports[target] if str(port) in tried}
            pairs.append(
                Pair(source, target, closed, one.get("rtt"), one.get("segment"), one.get("big"), one.get("passes"))
            )
    unheard = [name for name in addresses if name not in ports]
    for name in unheard:
        error = first[name].get("error", "no answer")
        pairs += [Pair(name, other, {}, error=error) for other in addresses if other != name]
    return pairs, next((one[0] for one in ports.values()), 0), question


def streams(asking: ProbeBatch, question: Question, addresses: Mapping[str, str], pairs: list[Pair]) -> list[Pair]:
    """All hosts at the same time, each to its k-th neighbour, as a ring does; slow pairs once more, alone."""
    names = list(addresses)
    good = {(pair.source, pair.target): pair for pair in pairs if pair.big and pair.ports and not pair.closed}
    rates: dict[tuple[str, str], float] = {}
    for distance in range(1, min(len(names), ROUNDS + 1)):
        ring = ((names[n], names[(n + distance) % len(names)]) for n in range(len(names)))
        rates.update(_round(asking, question, addresses, [good[ends] for ends in ring if ends in good]))
    middle = sorted(rates.values())[len(rates) // 2] if rates else 0.0
    doubtful = sorted((rate, ends) for ends, rate in rates.items() if rate < DOUBTFUL * middle)
    for rate, ends in doubtful[:AGAIN]:
        rates[ends] = max(rate, *_round(asking, question, addresses, [good[ends]]).values(), 0.0)
    return [replace(pair, rate=rates.get((pair.source, pair.target))) for pair in pairs]


def _round(
    asking: ProbeBatch, question: Question, addresses: Mapping[str, str], pairs: Iterable[Pair]
) -> dict[tuple[str, str], float]:
    mine = {pair.source: pair for pair in pairs}
    said = {name: len(question.more[name]) for name in mine}
    for name, pair in mine.items():
        order = {"do": "stream", "address": addresses[pair.target], "port": next(iter(pair.ports))}
        asking.tell(question, {name: order})
    late = asking.wait(
        STREAM_S, lambda name: len(question.more[name]) > said[name] or name in question.answers, list(mine)
    )
    fresh = [name for name in mine if name not in late and len(question.more[name]) > said[name]]
    words = {name: question.more[name][said[name]] for name in fresh}
    rates = {name: fitting(RATE, word, "its rate") for name, word in words.items()}
    return {(name, mine[name].target): word["rate"] for name, word in rates.items() if "rate" in word}


def part(asking: ProbeBatch, question: Question) -> None:
    """The listeners close."""
    asking.tell(question, {name: {"do": "end"} for name in question.hosts})
    asking.answers(question, 3.0)


# ---- what is cheap enough to check before every start ----

ONLY = (
    "between.port-blocked", "between.mtu", "between.hostname", "between.clock", "between.torch", "between.torch-missing", "between.python",
)  # fmt: skip
TWICE = "between.same-host"  # two ranks would share a card. Not of a job's nodes: its scheduler tells those apart


def quick(asking: ProbeBatch, hosts: Hosts, where: Mapping[str, str], store_port: int = 0) -> list[Finding]:
    """`where`: host -> the address the run will use. Findings of level "fail" mean: this can't work."""
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
        known: Torch = read_examination(Torch, {key: value for key, value in torch.items() if key != "python"})
        resolves = {word: tuple(addresses) for word, addresses in answer["resolves"].items()}
        told = {"hostname": answer["hostname"], "resolves": resolves, "torch": known, "python": torch.get("python")}
        found[name] = replace(found[name], **told)
    for name, (half, skew) in skews(asking, names, 2).items():
        found[name] = replace(found[name], skew=skew, skew_error=half)
    facts = Facts(tuple(found.values()), tuple(pairs), None, port)
    return check_rules.findings(facts, ONLY if hosts.transports else (*ONLY, TWICE))
