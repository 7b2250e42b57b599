"""A host, as one line above its GPUs."""

from __future__ import annotations

from stoker.control.show.snapshot import OFFLINE, HostGauges
from stoker.control.show.top.cells import (
    BAD,
    BOLD,
    DIM,
    NONE,
    WARN,
    Line,
    Piece,
    fit,
    foreign,
    gigabytes,
    joined,
    percent,
    whole,
)


def draw_host(host: HostGauges, width: int) -> Line:
    name: Piece = (foreign(host.name), BOLD)
    if host.state == OFFLINE:
        return fit(joined([name, (OFFLINE, BAD), (foreign(host.reason), BAD)]), width)
    if host.state != "OK":
        return fit(joined([name, (foreign(host.state), WARN), (foreign(host.reason), DIM)]), width)
    used = None
    if host.memory_total is not None and host.memory_available is not None:
        used = host.memory_total - host.memory_available
    busy = host.cpu is not None and host.cpu >= 0.95
    tight = used is not None and host.memory_total and used / host.memory_total > 0.95
    full = bool(host.disk_total) and host.disk_free is not None and host.disk_free / (host.disk_total or 1) < 0.05
    load = f" load {host.load[0]:.1f}/{host.cores or NONE}" if host.load else ""
    parts: list[Piece | None] = [
        name,
        (f"CPU {percent(host.cpu)}{load}", WARN if busy else DIM),
        (f"mem {gigabytes(used, host.memory_total)}", WARN if tight else DIM),
        (_rates("net", host.received, host.sent), DIM),
        (_rates("disk", host.disk_read, host.disk_written), DIM),
        (f"{_rate(host.disk_free)} free", BAD if full else DIM) if host.disk_free is not None else None,
        (foreign(host.gpu_error), BAD) if host.gpu_error else None,
    ]
    if host.gpu_error:  # before what is cut off
        parts.insert(1, parts.pop())
    return whole(parts, width)


def _rates(name: str, down: float | None, up: float | None) -> str:
    """Not known before the second look."""
    return "" if down is None or up is None else f"{name} ↓{_rate(down)}/s ↑{_rate(up)}/s"


def _rate(value: float | None) -> str:
    """1.8 TB, 40 MB, 900 B."""
    if value is None:
        return NONE
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.{1 if value < 10 * size else 0}f} {unit}B"
    return f"{value:.0f} B"
