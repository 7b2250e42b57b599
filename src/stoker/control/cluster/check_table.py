"""The table of `stoker cluster check`: one column per host, one row per fact, with a mark at values that differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from stoker.contract.frozen import frozen
from stoker.contract.text import escape
from stoker.contract.units import format_bytes
from stoker.control.cluster.check_facts import ClusterFacts, HostFacts, format_bandwidth
from stoker.control.cluster.check_rules import MAX_CLOCK_SKEW_S, find_outliers

DIFFERS = "≠ "  # before a value that differs from the other hosts'
NO_VALUE = "–"
_GAP = 2  # blanks between two columns
_SLOW_FACTOR = 3  # a host is marked if its slowest stream is slower than the best host's by more than this factor


@frozen
class TableRow:
    """One fact with a cell per host, in the order of the hosts."""

    label: str
    cells: tuple[str, ...]
    marked: tuple[bool, ...]  # whether the cell gets the mark


def format_table(facts: ClusterFacts, width: int = 120) -> list[str]:
    """Return the lines of the table. Hosts that don't fit into `width` follow below, with the labels repeated."""
    rows = make_rows(facts)
    labels = ["", *(row.label for row in rows)]
    label_width = max(map(len, labels))
    columns = []
    for index, host in enumerate(facts.hosts):
        cells = [(DIFFERS if row.marked[index] else "") + row.cells[index] for row in rows]
        columns.append([host.name + (" ✗" if host.error else ""), *cells])
    widths = [max(map(len, column)) for column in columns]
    lines: list[str] = []
    start = 0
    while start < len(columns):
        end, used = start + 1, label_width + _GAP + widths[start]
        while end < len(columns) and used + _GAP + widths[end] <= width:
            used += _GAP + widths[end]
            end += 1
        if lines:
            lines.append("")
        for number, label in enumerate(labels):
            cells = [columns[index][number].ljust(widths[index]) for index in range(start, end)]
            lines.append((" " * _GAP).join([label.ljust(label_width), *cells]).rstrip())
        start = end
    return lines


def make_rows(facts: ClusterFacts) -> list[TableRow]:
    """Return a row for each fact that at least one host has."""
    rows = []
    for label, format_cell, must_match in _FACTS:
        values = {host.name: format_cell(host) for host in facts.reachable}
        # A row is left out if it is empty, or if it only repeats the hosts' names, as addresses may do.
        if not any(values.values()) or all(value == name for name, value in values.items()):
            continue
        marked: Collection[str] = ()
        if label == "clock":
            marked = [host.name for host in facts.reachable if _has_wrong_clock(host)]
        elif must_match:
            marked = find_outliers({name: value for name, value in values.items() if value})
        rows.append(_make_row(facts, label, values, marked))
    for label in dict.fromkeys(name for host in facts.reachable for name in host.files or {}):
        digests = {host.name: (host.files or {}).get(label, "") for host in facts.reachable}
        values = {name: f"hash {digest[:8]}" if digest else "missing" for name, digest in digests.items()}
        missing = [name for name, digest in digests.items() if not digest]
        rows.append(_make_row(facts, label, values, {*find_outliers(values), *missing}))
    return rows + _make_network_rows(facts) if facts.pairs else rows


def _make_network_rows(facts: ClusterFacts) -> list[TableRow]:
    """Return the hosts that each host reaches, and the round trip and rate to its slowest peer."""
    reached, round_trips, rates = {}, {}, {}
    unreached: set[str] = set()
    for host in facts.reachable:
        pairs = [pair for pair in facts.pairs if pair.source == host.name]
        working = [pair for pair in pairs if not pair.closed and not pair.error and pair.big is not False]
        reached[host.name] = f"{len(working)} of {len(pairs)} others"
        if len(working) < len(pairs):
            unreached.add(host.name)
        seconds = [pair.rtt for pair in pairs if pair.rtt is not None]
        round_trips[host.name] = f"{max(seconds) * 1000:.2f} ms" if seconds else ""
        rates[host.name] = min((pair.rate for pair in pairs if pair.rate), default=0.0)
    rows = [
        _make_row(facts, "reaches hosts", reached, unreached),
        _make_row(facts, "round trip", round_trips, ()),
    ]
    best = max(rates.values(), default=0.0)
    if best:
        values = {name: format_bandwidth(rate) if rate else "" for name, rate in rates.items()}
        slow = [name for name, rate in rates.items() if rate < best / _SLOW_FACTOR]
        rows.append(_make_row(facts, "one stream", values, slow))
    return rows


def _make_row(facts: ClusterFacts, label: str, values: Mapping[str, str], marked: Collection[str]) -> TableRow:
    """Return a row from host -> value. A host that could not be checked has an empty cell."""
    cells = [escape(values.get(host.name) or ("" if host.error else NO_VALUE)) for host in facts.hosts]
    return TableRow(label, tuple(cells), tuple(host.name in marked for host in facts.hosts))


# ---- the cells: each function returns the text of one fact of a host, or "" if it is unknown ----


def _has_wrong_clock(host: HostFacts) -> bool:
    return host.skew is not None and abs(host.skew) > MAX_CLOCK_SKEW_S + (host.skew_error or 0.0)


def _format_clock(host: HostFacts) -> str:
    if host.skew is None:
        return ""
    error = max(host.skew_error or 0.0, 0.0005)
    if abs(host.skew) <= error * 2:
        return f"within {1000 * error:.0f} ms"
    return f"{host.skew:+.1f} s" if abs(host.skew) >= 0.5 else f"{1000 * host.skew:+.0f} ms"


def _format_interface(host: HostFacts) -> str:
    parts = [
        host.interface or "",
        f"{host.speed} Mbit/s" if host.speed and host.physical else "",
        f"MTU {host.mtu}" if host.mtu else "",
    ]
    return ", ".join(part for part in parts if part)


def _format_gpus(host: HostFacts) -> str:
    if host.examination is None:
        return ""
    names = [gpu.name or "GPU" for gpu in host.examination.machine.gpus]
    return ", ".join(f"{names.count(name)} × {name.removeprefix('NVIDIA ')}" for name in dict.fromkeys(names)) or "none"


def _format_driver(host: HostFacts) -> str:
    return (host.examination.machine.driver or "") if host.examination else ""


def _format_torch_version(host: HostFacts) -> str:
    if host.torch is None:
        return ""
    return "missing" if host.torch.error else host.torch.version or ""


def _format_cpu_and_memory(host: HostFacts) -> str:
    machine = host.examination.machine if host.examination else None
    return f"{machine.cores} cores, {format_bytes(machine.memory_available)} free" if machine else ""


def _format_disk(host: HostFacts) -> str:
    machine = host.examination.host if host.examination else None
    return f"{format_bytes(machine.disk_free)} free" if machine and machine.disk_free is not None else ""


# (label, function that returns a host's cell, whether the value must be the same on all hosts)
_FACTS: Sequence[tuple[str, Callable[[HostFacts], str], bool]] = (
    ("address", lambda host: host.address or "", False),
    ("hostname", lambda host: host.hostname or "", False),
    ("interface", _format_interface, False),
    ("clock", _format_clock, False),
    ("GPUs", _format_gpus, True),
    ("driver", _format_driver, True),
    ("torch", _format_torch_version, True),
    ("CUDA build", lambda host: (host.torch.cuda if host.torch else None) or "", True),
    ("NCCL", lambda host: (host.torch.nccl if host.torch else None) or "", True),
    ("arch list", lambda host: " ".join(host.torch.archs) if host.torch else "", True),
    ("Python", lambda host: host.python or "", True),
    ("CPU, memory", _format_cpu_and_memory, False),
    ("disk", _format_disk, False),
)
