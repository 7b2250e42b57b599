"""The check as one table: hosts as columns, what differs marked. Pure: facts in, lines out."""

from __future__ import annotations

from collections.abc import Callable

from stoker.contract.text import escape
from stoker.contract.units import format_bytes
from stoker.control.cluster.check_facts import ClusterFacts, HostFacts, PairFacts, format_bandwidth
from stoker.control.cluster.check_rules import MAX_CLOCK_SKEW_S, unusual

MARK = "≠"
NONE = "–"


def _gpus(one: HostFacts) -> str:
    if one.examination is None:
        return ""
    names = [gpu.name or "GPU" for gpu in one.examination.machine.gpus]
    return ", ".join(f"{names.count(name)} × {name.removeprefix('NVIDIA ')}" for name in dict.fromkeys(names)) or "none"


def _of_torch(part: str) -> Callable[[HostFacts], str]:
    def shown(one: HostFacts) -> str:
        if part == "version" and one.torch and one.torch.error:
            return "missing"
        return str(getattr(one.torch, part, None) or "")

    return shown


def _clock(one: HostFacts) -> str:
    if one.skew is None:
        return ""
    exact = max(one.skew_error or 0.0, 0.0005)
    if abs(one.skew) <= exact * 2:
        return f"within {1000 * exact:.0f} ms"
    return f"{one.skew:+.1f} s" if abs(one.skew) >= 0.5 else f"{1000 * one.skew:+.0f} ms"


def _link(one: HostFacts) -> str:
    parts = [
        one.interface or "",
        f"{one.speed} Mbit/s" if one.speed and one.physical else "",
        f"MTU {one.mtu}" if one.mtu else "",
    ]
    return ", ".join(part for part in parts if part)


def _machine(one: HostFacts) -> str:
    machine = one.examination.machine if one.examination else None
    return f"{machine.cores} cores, {format_bytes(machine.memory_available)} free" if machine else ""


def _disk(one: HostFacts) -> str:
    host = one.examination.host if one.examination else None
    return f"{format_bytes(host.disk_free)} free" if host and host.disk_free is not None else ""


# (label, cell, must it be the same everywhere). Cells that are empty on all hosts leave their row out.
_ROWS: tuple[tuple[str, Callable[[HostFacts], str], bool], ...] = (
    ("address", lambda one: one.address or "", False),
    ("hostname", lambda one: one.hostname or "", False),
    ("interface", _link, False),
    ("clock", _clock, False),
    ("GPUs", _gpus, True),
    ("driver", lambda one: one.examination.machine.driver or "" if one.examination else "", True),
    ("torch", _of_torch("version"), True),
    ("CUDA build", _of_torch("cuda"), True),
    ("NCCL", _of_torch("nccl"), True),
    ("arch list", lambda one: " ".join(one.torch.archs) if one.torch else "", True),
    ("Python", lambda one: one.python or "", True),
    ("CPU, memory", _machine, False),
    ("disk", _disk, False),
)


def _worst(pairs: list[PairFacts]) -> tuple[str, str]:
    """(round trip, rate) to the slowest peer."""
    times = [pair.rtt for pair in pairs if pair.rtt is not None]
    rates = [pair.rate for pair in pairs if pair.rate]
    return f"{max(times) * 1000:.2f} ms" if times else "", format_bandwidth(min(rates)) if rates else ""


def rows(facts: ClusterFacts) -> list[tuple[str, list[str], list[bool]]]:
    """(label, a cell per host, is it marked)."""
    made = []
    for label, cell, same in _ROWS:
        values = {one.name: cell(one) for one in facts.there}
        # An address that is the name says nothing new.
        if any(values.values()) and any(value != name for name, value in values.items()):
            made.append(_row(facts, label, values, _strange(facts, label, values, same)))
    for what in dict.fromkeys(name for one in facts.there for name in one.files or {}):
        digests = {one.name: (one.files or {}).get(what, "") for one in facts.there}
        shown = {name: f"hash {digest[:8]}" if digest else "missing" for name, digest in digests.items()}
        made.append(
            _row(facts, what, shown, {*unusual(shown), *(name for name, digest in digests.items() if not digest)})
        )
    if facts.pairs:
        worst = {one.name: _worst([pair for pair in facts.pairs if pair.source == one.name]) for one in facts.there}
        shut = {pair.source for pair in facts.pairs if pair.closed or pair.error or pair.big is False}
        reached = {one.name: _reached(facts, one) for one in facts.there}
        made.append(_row(facts, "reaches hosts", reached, shut))
        made.append(_row(facts, "round trip", {name: cells[0] for name, cells in worst.items()}, set()))
        if any(rate for _, rate in worst.values()):
            rates = {
                one.name: min((pair.rate for pair in facts.pairs if pair.source == one.name and pair.rate), default=0.0)
                for one in facts.there
            }
            top = max(rates.values())
            shown = {name: cells[1] for name, cells in worst.items()}
            made.append(_row(facts, "one stream", shown, {name for name, rate in rates.items() if rate < top / 3}))
    return made


def _strange(facts: ClusterFacts, label: str, values: dict[str, str], same: bool) -> set[str]:
    if label == "clock":
        known = [one for one in facts.there if one.skew is not None]
        return {one.name for one in known if abs(one.skew or 0.0) > MAX_CLOCK_SKEW_S + (one.skew_error or 0.0)}
    return set(unusual({name: value for name, value in values.items() if value})) if same else set()


def _reached(facts: ClusterFacts, one: HostFacts) -> str:
    mine = [pair for pair in facts.pairs if pair.source == one.name]
    good = [pair for pair in mine if not pair.closed and not pair.error and pair.big is not False]
    return f"{len(good)} of {len(mine)} others"


def _row(
    facts: ClusterFacts, label: str, values: dict[str, str], marked: set[str]
) -> tuple[str, list[str], list[bool]]:
    cells = [escape(values.get(one.name) or ("" if one.error else NONE)) for one in facts.hosts]
    return label, cells, [one.name in marked for one in facts.hosts]


def lines(facts: ClusterFacts, width: int = 120) -> list[str]:
    """As many hosts side by side as the width holds; the others below, with the labels again."""
    body = rows(facts)
    labels = max((len(label) for label, _, _ in body), default=0)
    heads = [one.name + (" ✗" if one.error else "") for one in facts.hosts]
    columns = [
        [head, *((f"{MARK} " if marks[n] else "") + cells[n] for _, cells, marks in body)]
        for n, head in enumerate(heads)
    ]
    widths = [max(len(cell) for cell in column) for column in columns]
    made: list[str] = []
    first = 0
    while first < len(columns):
        last = first + 1
        while last < len(columns) and labels + sum(widths[first : last + 1]) + 2 * (last + 1 - first) <= width:
            last += 1
        if made:
            made.append("")
        for number, label in enumerate(["", *(label for label, _, _ in body)]):
            cells = [columns[n][number].ljust(widths[n]) for n in range(first, last)]
            made.append("  ".join([label.ljust(labels), *cells]).rstrip())
        first = last
    return made
