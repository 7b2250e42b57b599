"""Judges a burn-in: which replica computed something else, which card is slow, which link is wrong or slow. Pure.

Replicas are compared with their twins only: another card, or another torch, may round differently and be right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from stoker.contract.evidence import Finding
from stoker.contract.frozen import frozen
from stoker.contract.units import plural, rank_name

SLOW = 0.85  # of its twins, or of its own first measurement
LOW_TFLOPS = 0.4  # of the sheet: a healthy L4 holds half of it at its 72 W, an H200 four fifths
LOW_GBS = 0.6
LOW_LINK = 0.5  # of the other pairs: PCIe pairs across two sockets are legitimately a third slower than others

# NVIDIA's data sheets: dense bf16 TFLOP/s (fp32 sums), memory GB/s. The first name within the card's counts.
CARDS: dict[str, tuple[float, float]] = {
    "GH200": (989, 4000), "H200 NVL": (835, 4800), "H200": (989, 4800), "H100 PCIe": (756, 2000), "H100 NVL": (835, 3900), "H100": (989, 3350),
    "A100-SXM4-40GB": (312, 1555), "A100-PCIE-40GB": (312, 1555), "A100 80GB PCIe": (312, 1935), "A100": (312, 2039),
    "RTX A6000": (155, 768), "A40": (150, 696), "A10G": (70, 600), "A10": (125, 600), "L40S": (362, 864), "L40": (181, 864), "L4": (121, 300),
    "RTX 6000 Ada": (364, 960), "RTX 4090": (165, 1008), "RTX 3090": (71, 936), "RTX 5090": (210, 1792), "B200": (2250, 8000),
}  # fmt: skip


@frozen
class Speed:
    tflops: float
    gbs: float


@frozen
class Replica:
    rank: int
    label: str  # GPU0, CPU1
    card: str | None  # None on a CPU
    device: str | None  # the GPU's UUID
    twin: str  # replicas with the same word here must agree to the last bit
    round: int  # steps after which the training begins anew from the seed
    steps: tuple[tuple[int, str, str], ...]  # step, bits of the loss, checksum of the parameters
    start: Speed | None = None
    end: Speed | None = None
    step_s: float | None = None  # median

    @property
    def rounds(self) -> int:
        return len({step // self.round for step, _, _ in self.steps})


@frozen
class Link:
    ranks: tuple[int, ...]
    backend: str
    bus_gbs: float | None = None  # None: begun and never finished
    wrong: Mapping[str, int] = {}


@frozen
class Opinion:
    """What the comparison says of one replica. `agrees` is None where there was nothing to compare it with."""

    rank: int
    agrees: bool | None
    twins: int
    first: int | None = None  # first step that differs
    decided: bool = True  # False: it differs from a twin, and nobody can say which of them is wrong


@frozen
class Judgement:
    opinions: tuple[Opinion, ...]
    findings: tuple[Finding, ...]


def replica_from(records: Iterable[Mapping[str, Any]], label: str) -> Replica | None:
    """One rank's lines; None where it never came so far as to write its first."""
    head: Mapping[str, Any] | None = None
    speeds: dict[str, Speed] = {}
    steps: list[tuple[int, str, str]] = []
    seconds: list[float] = []
    for record in records:
        kind = record.get("is")
        if kind == "replica":
            head = record
        elif kind == "speed":
            speeds[record["when"]] = Speed(record["tflops"], record["gbs"])
        elif kind == "step":
            steps.append((record["step"], record["loss"], record["sum"]))
            seconds.append(record["seconds"])
    if head is None:
        return None
    twin = f"{head['card'] or 'CPU'}, {head['units']} units, torch {head['torch']}"
    return Replica(
        **{name: head[name] for name in ("rank", "card", "round")},
        label=label,
        device=head["uuid"],
        twin=twin,
        steps=tuple(steps),
        start=speeds.get("start"),
        end=speeds.get("end"),
        step_s=median(seconds) if seconds else None,
    )


def links_from(records: Iterable[Mapping[str, Any]]) -> list[Link]:
    found: dict[tuple[int, ...], Link] = {}
    for record in records:
        ranks = tuple(record["ranks"])
        found[ranks] = Link(ranks, record["backend"], record.get("bus_gbs"), record.get("wrong", {}))
    return list(found.values())


def judge(replicas: list[Replica], links: list[Link], stopped: bool = False) -> Judgement:
    """`stopped`: the user ended the run, so a link that never finished says nothing."""
    opinions: list[Opinion] = []
    findings: list[Finding] = []
    for twin in dict.fromkeys(replica.twin for replica in replicas):
        told, found = _compare([replica for replica in replicas if replica.twin == twin])
        opinions += told
        findings += found
    findings += _slow(replicas)
    findings += _links(replicas, links, stopped)
    return Judgement(tuple(sorted(opinions, key=lambda opinion: opinion.rank)), tuple(findings))


def sheet(card: str | None) -> tuple[float, float] | None:
    """The card's dense bf16 TFLOP/s and memory GB/s. None for an unknown card, a MIG slice, a laptop's chip."""
    if not card or any(word in card for word in ("MIG", "Laptop", "Max-Q")):
        return None
    words = card.replace("-", " ").split()
    for name, figures in CARDS.items():
        if (name in words) if name.isalnum() else (name in card):
            return figures
    return None


Bits = tuple[str, str]


def _compare(twins: list[Replica]) -> tuple[list[Opinion], list[Finding]]:
    at: dict[int, dict[int, list[Bits]]] = defaultdict(dict)  # place in the round -> rank -> its value in each round
    for replica in twins:
        for step, loss, total in replica.steps:
            at[step % replica.round].setdefault(replica.rank, []).append((loss, total))
    expected = {place: _expected(values) for place, values in at.items()}
    opinions, findings, contested = [], [], []
    for replica in twins:
        others = sum(1 for other in twins if other is not replica and other.steps)
        bad = [
            (step, (loss, total))
            for step, loss, total in replica.steps
            if expected[step % replica.round] not in (None, (loss, total))
        ]
        open_steps = [step for step, _, _ in replica.steps if expected[step % replica.round] is None]
        if bad:
            opinions.append(Opinion(replica.rank, False, others, bad[0][0]))
            findings.append(_mismatch(replica, bad, expected, others))
        elif open_steps:
            opinions.append(Opinion(replica.rank, False, others, open_steps[0], decided=False))
            contested.append((open_steps[0], replica))
        else:
            compared = bool(replica.steps) and (others > 0 or replica.rounds > 1)
            opinions.append(Opinion(replica.rank, True if compared else None, others))
    if contested:
        findings.append(_disagree(contested))
    return opinions, findings


def _expected(values: Mapping[int, list[Bits]]) -> Bits | None:
    """One vote a replica. Without a majority, those that never contradicted themselves decide, if they agree."""
    votes = Counter(Counter(mine).most_common(1)[0][0] for mine in values.values())
    top, count = votes.most_common(1)[0]
    if 2 * count > len(values):
        return top
    steady = {mine[0] for mine in values.values() if len(set(mine)) == 1}
    if len(steady) == 1 and sum(1 for mine in values.values() if len(set(mine)) == 1) < len(values):
        return steady.pop()
    return None


def _mismatch(
    replica: Replica, bad: list[tuple[int, Bits]], expected: Mapping[int, Bits | None], others: int
) -> Finding:
    first, (loss, total) = bad[0]
    right = expected[first % replica.round]
    assert right is not None
    pairs = (("loss", loss, right[0]), ("parameters", total, right[1]))
    what = " and ".join(name for name, mine, wanted in pairs if mine != wanted)
    whom = f"those of its {others} twin{'s' if others > 1 else ''}" if others else "those of its other rounds"
    rounds = len({step // replica.round for step, _ in bad})
    often = f"in {len(bad)} of {len(replica.steps)} steps"
    if replica.rounds > 1:
        often = f"in {rounds} of {replica.rounds} rounds"
    text = f"{_name(replica)} computes something else: from step {first} its bits of {what} are not {whom}, {often}"
    if replica.card is None:
        fix = "test the machine's memory (memtest86+); machine-check errors: journalctl -k | grep -i mce"
        return Finding("burnin.mismatch", "fail", text, fix)
    errors = "`stoker doctor --only gpu.` shows ECC and Xid errors; if it comes back: exchange it"
    fix = f"leave it out (stoker run --gpus with the others); {errors}"
    return Finding("burnin.mismatch", "fail", text, fix)


def _disagree(contested: list[tuple[int, Replica]]) -> Finding:
    first = min(step for step, _ in contested)
    names = " and ".join(_name(replica) for _, replica in contested)
    return Finding(
        "burnin.mismatch",
        "fail",
        f"{names} disagree from step {first}; {len(contested)} replicas can't show which of them is wrong",
        "run it again with a longer --minutes: the GPU that contradicts itself is faulty; or with a third replica: the"
        " majority is right",
    )


def hot(replica: Replica) -> Speed | None:
    """After the load: what a long run gets."""
    return replica.end or replica.start


def _slow(replicas: list[Replica]) -> Iterator[Finding]:
    """GPUs only, and not those that several ranks share: a CPU rank is as fast as the scheduler lets it be."""
    shared = Counter(replica.device for replica in replicas)
    fair = [replica for replica in replicas if replica.device and shared[replica.device] == 1 and hot(replica)]
    for replica in fair:
        twins = [other for other in fair if other.twin == replica.twin and other is not replica]
        own = sheet(replica.card)
        for unit, field, low in (("TFLOP/s", "tflops", LOW_TFLOPS), ("GB/s", "gbs", LOW_GBS)):
            mine = getattr(hot(replica), field)
            others = median([getattr(hot(other), field) for other in twins]) if twins else None
            full = getattr(Speed(*own), field) if own else None
            begun = getattr(replica.start, field, 0.0)
            if others and mine < SLOW * others:
                makers = f"its {len(twins)} twins make" if len(twins) > 1 else "its twin makes"
                whose = f"{makers} {others:.0f}"
            elif full and mine < low * full:
                whose = "that is less than such a card should make"
            elif begun and mine < SLOW * begun:
                whose = f"before the load it made {begun:.0f}"
            else:
                continue
            figure = f"{full:.0f}" if full else "n/a"
            text = f"{_name(replica)} is slow: {mine:.0f} {unit}; {whose} (data sheet: {figure})"
            yield Finding("burnin.slow", "warn", text, _why_slow(replica.label))


def _why_slow(label: str) -> str:
    command = f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER,CLOCK -i {label[3:]}"
    return f"{command}   # heat, a power cap, or other work on it"


def _links(replicas: list[Replica], links: list[Link], stopped: bool) -> Iterator[Finding]:
    of = {replica.rank: replica for replica in replicas}
    for link in links:
        if link.wrong:
            whose = ", ".join(f"{_label(of, int(rank))} {count}" for rank, count in link.wrong.items())
            text = f"all-reduce over {between(link, of)} gives wrong sums (elements: {whose}; {link.backend})"
            yield Finding("burnin.link", "fail", text, _why_link(link))
        elif link.bus_gbs is None and not stopped:
            text = f"all-reduce over {between(link, of)} did not finish ({link.backend})"
            yield Finding("burnin.link", "fail", text, _why_link(link))
    pairs = [link for link in links if len(link.ranks) == 2 and link.backend == "nccl" and link.bus_gbs is not None]
    alike: dict[tuple[str, ...], list[Link]] = defaultdict(list)
    for link in pairs:
        alike[tuple(sorted(of[rank].twin if rank in of else "" for rank in link.ranks))].append(link)
    for group in alike.values():
        for link in group:
            others = [other.bus_gbs or 0.0 for other in group if other is not link]
            if len(others) >= 2 and (link.bus_gbs or 0.0) < LOW_LINK * median(others):
                text = f"the link {between(link, of)} is slow: {link.bus_gbs:.1f} GB/s"
                text += f", the other pairs make {median(others):.1f}"
                yield Finding("burnin.link", "warn", text, _why_link(link))


def between(link: Link, of: Mapping[int, Replica]) -> str:
    return (
        "–".join(_label(of, rank) for rank in link.ranks)
        if len(link.ranks) == 2
        else f"all {plural(len(link.ranks), 'rank')}"
    )


def _label(of: Mapping[int, Replica], rank: int) -> str:
    return of[rank].label if rank in of else f"rank {rank}"


def _why_link(link: Link) -> str:
    if link.backend != "nccl":
        return "gloo goes through the network interface: ip link, and the machine's memory"
    trial = "NCCL_P2P_DISABLE=1 for one run tells the link from the card"
    return f"nvidia-smi topo -m; nvidia-smi nvlink -e; PCIe errors: dmesg | grep -i aer. {trial}"


def _name(replica: Replica) -> str:
    return rank_name(replica.rank, replica.label + (f", {replica.card}" if replica.card else ""))
