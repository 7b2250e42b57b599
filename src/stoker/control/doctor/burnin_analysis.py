"""Judges a burn-in: which replicas computed different results, which GPUs and links are slow or wrong.

A replica is only compared with its twins, because another GPU model or torch version may round differently.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from stoker.contract.evidence import Finding
from stoker.contract.frozen import frozen
from stoker.contract.units import plural, rank_name

# Fractions below which a speed is reported.
SLOW = 0.85  # of the twins' speed, or of the GPU's first measurement
LOW_TFLOPS = 0.4  # of the data sheet; a healthy L4 reaches half of it at its 72 W, an H200 four fifths
LOW_GBS = 0.6  # of the data sheet
LOW_LINK = 0.5  # of the other pairs' bandwidth; healthy PCIe pairs across two sockets are a third slower than others

# NVIDIA's data sheets: dense bf16 TFLOP/s (fp32 sums), memory GB/s. The first key that a GPU's name contains counts.
DATA_SHEETS: dict[str, tuple[float, float]] = {
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
    twin: str  # replicas with the same value must agree to the last bit
    round: int  # number of steps after which the training restarts from the seed
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
    bus_gbs: float | None = None  # None if the all-reduce started and never finished
    wrong: Mapping[str, int] = {}  # rank -> number of wrong elements


@frozen
class Opinion:
    """The outcome of comparing one replica with its twins and with its other rounds.

    `agrees` is None if there was nothing to compare it with.
    """

    rank: int
    agrees: bool | None
    twins: int
    first: int | None = None  # the first step that differs
    decided: bool = True  # False if it differs from a twin and it is unknown which of them is wrong


@frozen
class Judgement:
    opinions: tuple[Opinion, ...]
    findings: tuple[Finding, ...]


def parse_replica(records: Iterable[Mapping[str, Any]], label: str) -> Replica | None:
    """Return the replica that these records of one rank describe, or None if they lack the first one."""
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


def parse_links(records: Iterable[Mapping[str, Any]]) -> list[Link]:
    """Return the links that these records describe; a later record of the same ranks replaces an earlier one."""
    links: dict[tuple[int, ...], Link] = {}
    for record in records:
        ranks = tuple(record["ranks"])
        links[ranks] = Link(ranks, record["backend"], record.get("bus_gbs"), record.get("wrong", {}))
    return list(links.values())


def judge(replicas: list[Replica], links: list[Link], stopped: bool = False) -> Judgement:
    """Compare the replicas and links. If the user `stopped` the run, an unfinished link means nothing."""
    opinions: list[Opinion] = []
    findings: list[Finding] = []
    for twin in dict.fromkeys(replica.twin for replica in replicas):
        twin_opinions, mismatches = _compare_twins([replica for replica in replicas if replica.twin == twin])
        opinions += twin_opinions
        findings += mismatches
    findings += _find_slow_gpus(replicas)
    findings += _judge_links(replicas, links, stopped)
    return Judgement(tuple(sorted(opinions, key=lambda opinion: opinion.rank)), tuple(findings))


def find_data_sheet(card: str | None) -> tuple[float, float] | None:
    """Return dense bf16 TFLOP/s and memory GB/s of the GPU's data sheet, or None for an unknown, MIG or laptop GPU."""
    if not card or any(part in card for part in ("MIG", "Laptop", "Max-Q")):
        return None
    words = card.replace("-", " ").split()
    for name, figures in DATA_SHEETS.items():
        if (name in words) if name.isalnum() else (name in card):
            return figures
    return None


Bits = tuple[str, str]


def _compare_twins(twins: list[Replica]) -> tuple[list[Opinion], list[Finding]]:
    # step within its round -> rank -> the rank's bits in each round
    bits: dict[int, dict[int, list[Bits]]] = defaultdict(dict)
    for replica in twins:
        for step, loss, checksum in replica.steps:
            bits[step % replica.round].setdefault(replica.rank, []).append((loss, checksum))
    expected = {step: _expected_bits(by_rank) for step, by_rank in bits.items()}
    opinions, findings, contested = [], [], []
    for replica in twins:
        others = sum(1 for other in twins if other is not replica and other.steps)
        bad = [
            (step, (loss, checksum))
            for step, loss, checksum in replica.steps
            if expected[step % replica.round] not in (None, (loss, checksum))
        ]
        undecided = [step for step, _, _ in replica.steps if expected[step % replica.round] is None]
        if bad:
            opinions.append(Opinion(replica.rank, False, others, bad[0][0]))
            findings.append(_make_mismatch(replica, bad, expected, others))
        elif undecided:
            opinions.append(Opinion(replica.rank, False, others, undecided[0], decided=False))
            contested.append((undecided[0], replica))
        else:
            is_compared = bool(replica.steps) and (others > 0 or replica.rounds > 1)
            opinions.append(Opinion(replica.rank, True if is_compared else None, others))
    if contested:
        first = min(step for step, _ in contested)
        names = " and ".join(_name(replica) for _, replica in contested)
        text = f"{names} disagree from step {first}; {len(contested)} replicas can't show which of them is wrong"
        fix = (
            "run it again with a longer --minutes to see which GPU contradicts itself, or with a third replica to get a"
            " majority"
        )
        findings.append(Finding("burnin.mismatch", "fail", text, fix))
    return opinions, findings


def _expected_bits(by_rank: Mapping[int, list[Bits]]) -> Bits | None:
    """Return the correct bits of a step, or None if that can't be decided.

    Each replica has one vote. Without a majority, the replicas that never contradicted themselves decide, if they
    agree.
    """
    votes = Counter(Counter(rounds).most_common(1)[0][0] for rounds in by_rank.values())
    top, count = votes.most_common(1)[0]
    if 2 * count > len(by_rank):
        return top
    steady = [rounds[0] for rounds in by_rank.values() if len(set(rounds)) == 1]
    if len(set(steady)) == 1 and len(steady) < len(by_rank):
        return steady[0]
    return None


def _make_mismatch(
    replica: Replica, bad: list[tuple[int, Bits]], expected: Mapping[int, Bits | None], others: int
) -> Finding:
    first, (loss, checksum) = bad[0]
    right = expected[first % replica.round]
    assert right is not None
    pairs = (("loss", loss, right[0]), ("parameters", checksum, right[1]))
    differing = " and ".join(name for name, actual, correct in pairs if actual != correct)
    reference = f"those of its {others} twin{'s' if others > 1 else ''}" if others else "those of its other rounds"
    frequency = f"in {len(bad)} of {len(replica.steps)} steps"
    if replica.rounds > 1:
        frequency = f"in {len({step // replica.round for step, _ in bad})} of {replica.rounds} rounds"
    text = f"{_name(replica)} computes different results: from step {first} its bits of {differing} differ from {reference}, {frequency}"
    if replica.card is None:
        fix = "test the machine's memory (memtest86+); `journalctl -k | grep -i mce` shows machine-check errors"
    else:
        errors = "`stoker doctor --only gpu.` shows ECC and Xid errors; if it happens again, replace the GPU"
        fix = f"leave it out (stoker run --gpus with the others). {errors}"
    return Finding("burnin.mismatch", "fail", text, fix)


def hot_speed(replica: Replica) -> Speed | None:
    """Return the speed after the load, which is what a long run gets."""
    return replica.end or replica.start


def _find_slow_gpus(replicas: list[Replica]) -> Iterator[Finding]:
    """Find slow GPUs. Skips GPUs shared by several ranks, and CPU ranks, whose speed depends on the scheduler."""
    users = Counter(replica.device for replica in replicas)
    measured = [replica for replica in replicas if replica.device and users[replica.device] == 1 and hot_speed(replica)]
    for replica in measured:
        twins = [other for other in measured if other.twin == replica.twin and other is not replica]
        data_sheet = find_data_sheet(replica.card)
        for unit, field, low in (("TFLOP/s", "tflops", LOW_TFLOPS), ("GB/s", "gbs", LOW_GBS)):
            speed = getattr(hot_speed(replica), field)
            twins_speed = median([getattr(hot_speed(other), field) for other in twins]) if twins else None
            nominal = getattr(Speed(*data_sheet), field) if data_sheet else None
            cold = getattr(replica.start, field, 0.0)
            if twins_speed and speed < SLOW * twins_speed:
                reference = f"its {len(twins)} twins reach" if len(twins) > 1 else "its twin reaches"
                reference = f"{reference} {twins_speed:.0f}"
            elif nominal and speed < low * nominal:
                reference = "such a GPU should reach more"
            elif cold and speed < SLOW * cold:
                reference = f"before the load it reached {cold:.0f}"
            else:
                continue
            figure = f"{nominal:.0f}" if nominal else "n/a"
            text = f"{_name(replica)} is slow: {speed:.0f} {unit}; {reference} (data sheet: {figure})"
            command = f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER,CLOCK -i {replica.label[3:]}"
            yield Finding("burnin.slow", "warn", text, f"{command}   # heat, a power cap, or other work on it")


def _judge_links(replicas: list[Replica], links: list[Link], stopped: bool) -> Iterator[Finding]:
    by_rank = {replica.rank: replica for replica in replicas}
    for link in links:
        if link.wrong:
            counts = ", ".join(f"{_label(by_rank, int(rank))} {count}" for rank, count in link.wrong.items())
            text = f"all-reduce over {link_name(link, by_rank)} gives wrong sums (elements: {counts}; {link.backend})"
            yield Finding("burnin.link", "fail", text, _choose_link_fix(link))
        elif link.bus_gbs is None and not stopped:
            text = f"all-reduce over {link_name(link, by_rank)} did not finish ({link.backend})"
            yield Finding("burnin.link", "fail", text, _choose_link_fix(link))
    # Compare the bandwidth of pairs with the same kinds of replicas at both ends.
    groups: dict[tuple[str, ...], list[tuple[Link, float]]] = defaultdict(list)
    for link in links:
        if len(link.ranks) == 2 and link.backend == "nccl" and link.bus_gbs is not None:
            kinds = sorted(by_rank[rank].twin if rank in by_rank else "" for rank in link.ranks)
            groups[tuple(kinds)].append((link, link.bus_gbs))
    for group in groups.values():
        for link, speed in group:
            others = [other_speed for other, other_speed in group if other is not link]
            if len(others) >= 2 and speed < LOW_LINK * median(others):
                text = f"the link {link_name(link, by_rank)} is slow: {speed:.1f} GB/s"
                text += f"; the other pairs reach {median(others):.1f}"
                yield Finding("burnin.link", "warn", text, _choose_link_fix(link))


def link_name(link: Link, by_rank: Mapping[int, Replica]) -> str:
    """Return the two ends of a link, or how many ranks it joins."""
    if len(link.ranks) == 2:
        return "–".join(_label(by_rank, rank) for rank in link.ranks)
    return f"all {plural(len(link.ranks), 'rank')}"


def _label(by_rank: Mapping[int, Replica], rank: int) -> str:
    return by_rank[rank].label if rank in by_rank else f"rank {rank}"


def _choose_link_fix(link: Link) -> str:
    if link.backend != "nccl":
        return "check the network interface that gloo uses (ip link), and the machine's memory"
    trial = "NCCL_P2P_DISABLE=1 for one run shows whether the link or the GPU is faulty"
    return f"nvidia-smi topo -m; nvidia-smi nvlink -e; dmesg | grep -i aer (PCIe errors). {trial}"


def _name(replica: Replica) -> str:
    return rank_name(replica.rank, replica.label + (f", {replica.card}" if replica.card else ""))
