"""The hosts and their GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.control.show.snapshot import OFFLINE, GpuGauges, HostGauges
from stoker.control.show.top.table import (
    ACCENT,
    BAD,
    BOLD,
    DIM,
    GOOD,
    GPUS,
    NONE,
    PLAIN,
    WARN,
    Column,
    Line,
    Order,
    Panel,
    PanelOptions,
    Piece,
    Row,
    SnapshotIndex,
    draw_bar,
    draw_history,
    escape_cell,
    filter_and_sort,
    fit,
    format_gib,
    format_percent,
    join_fitting,
    join_pieces,
)  # fmt: skip


def draw_host(host: HostGauges, width: int) -> Line:
    name: Piece = (escape_cell(host.name), BOLD)
    if host.state == OFFLINE:
        return fit(join_pieces([name, (OFFLINE, BAD), (escape_cell(host.reason), BAD)]), width)
    if host.state != "OK":
        return fit(join_pieces([name, (escape_cell(host.state), WARN), (escape_cell(host.reason), DIM)]), width)
    used = None
    if host.memory_total is not None and host.memory_available is not None:
        used = host.memory_total - host.memory_available
    busy = host.cpu is not None and host.cpu >= 0.95
    tight = used is not None and host.memory_total and used / host.memory_total > 0.95
    full = bool(host.disk_total) and host.disk_free is not None and host.disk_free / (host.disk_total or 1) < 0.05
    load = f" load {host.load[0]:.1f}/{host.cores or NONE}" if host.load else ""
    parts: list[Piece | None] = [
        name,
        (f"CPU {format_percent(host.cpu)}{load}", WARN if busy else DIM),
        (f"mem {format_gib(used, host.memory_total)}", WARN if tight else DIM),
        (_rates("net", host.received, host.sent), DIM),
        (_rates("disk", host.disk_read, host.disk_written), DIM),
        (f"{_rate(host.disk_free)} free", BAD if full else DIM) if host.disk_free is not None else None,
        (escape_cell(host.gpu_error), BAD) if host.gpu_error else None,
    ]
    if host.gpu_error:  # before what is cut off
        parts.insert(1, parts.pop())
    return join_fitting(parts, width)


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


_HOT_C, _WARM_C = 85, 75  # where the card does not say where its own limit is
_NEAR_C = 5  # degrees below its limit

ORDERS = {
    "u": Order("utilisation", lambda card: card.utilization),
    "m": Order("memory", lambda card: card.memory_used),
    "t": Order("temperature", lambda card: card.temperature),
    "p": Order("power", lambda card: card.power),
    "h": Order("host", lambda card: (card.host, card.index), down=False),
}


def gpus_panel(index: SnapshotIndex, wish: PanelOptions) -> Panel:
    """Each host, then its cards; sorted, the hosts come first and the cards' names include the host's."""
    hosts = index.snapshot.hosts
    kept, hidden = filter_and_sort(_cards(index), wish, ORDERS)
    if wish.sort:
        rows = (*(_host_row(host) for host in hosts if _shown(host, wish, kept)), *kept)
    else:
        rows = tuple(_grouped(hosts, kept, wish))
    many = len(hosts) > 1 and bool(wish.sort)
    return Panel(GPUS, _columns(index, many), rows, "no GPU here", hidden if not rows else 0)


def _grouped(hosts: tuple[HostGauges, ...], kept: tuple[Row, ...], wish: PanelOptions) -> Iterator[Row]:
    by_host: dict[str, list[Row]] = {}
    for row in kept:
        by_host.setdefault(row.item.host, []).append(row)
    for host in hosts:
        mine = by_host.pop(host.name, [])
        if mine or _shown(host, wish, ()):
            yield _host_row(host)
            yield from mine
    for others in by_host.values():
        yield from others


def _shown(host: HostGauges, wish: PanelOptions, kept: tuple[Row, ...]) -> bool:
    mine = any(row.item.host == host.name for row in kept)
    return mine or not wish.filter or wish.filter.lower() in f"{host.name} {host.state} {host.reason}".lower()


def _cards(index: SnapshotIndex) -> Iterator[Row]:
    for card in index.snapshot.gpus:
        runs = " ".join(f"{run.name} {run.id}" for run, _ in index.owners(card))
        words = " ".join(map(str, (card.host, card.label, card.name, *(card.throttle or ()), runs)))
        yield Row(f"{card.host}/{card.uuid}", card, escape_cell(words).lower())


def _host_row(host: HostGauges) -> Row:
    return Row(f"host {host.name}", host, host.name.lower(), draw_host)


def _columns(index: SnapshotIndex, with_host: bool) -> tuple[Column, ...]:
    longest = max((len(_label(card, with_host)) for card in index.snapshot.gpus), default=4)
    return (
        Column("GPU", max(6, min(longest, 24) + 2), lambda card, width: (f"  {_label(card, with_host)}", PLAIN)),
        Column("UTIL", 4, _utilization, right=True, order=1),
        Column("", 10, lambda card, width: (draw_bar(card.utilization, width), _busy(card)), order=7),
        Column("MEMORY", 11, _memory, right=True, order=2),
        Column("", 8, lambda card, width: (draw_bar(_filled(card), width), _memory(card, width)[1]), order=8),
        Column("TEMP", 5, _temperature, right=True, order=3),
        Column("POWER", 10, _power, right=True, order=4),
        Column("THROTTLE", 16, _throttle, order=2),
        Column("RUN", 12, lambda card, width: _run(index, card), order=5),
        Column("HISTORY", 0, _history, order=6),
        Column("NAME", 22, lambda card, width: (escape_cell(card.name or NONE), DIM), order=9),
    )


def _label(card: GpuGauges, with_host: bool) -> str:
    return escape_cell(f"{card.host}/{card.label}" if with_host else card.label)


def _busy(card: GpuGauges) -> str:
    return GOOD if (card.utilization or 0) >= 0.5 else PLAIN


def _utilization(card: GpuGauges, width: int) -> Piece:
    return ("ERR", BAD) if card.error else (format_percent(card.utilization), _busy(card))


def _filled(card: GpuGauges) -> float | None:
    return card.memory_used / card.memory_total if card.memory_used is not None and card.memory_total else None


def _memory(card: GpuGauges, width: int) -> Piece:
    return format_gib(card.memory_used, card.memory_total), WARN if (_filled(card) or 0) > 0.95 else PLAIN


def _temperature(card: GpuGauges, width: int) -> Piece:
    if card.temperature is None:
        return NONE, DIM
    hot = card.temperature_slowdown - _NEAR_C if card.temperature_slowdown else _HOT_C
    warm = hot - (_HOT_C - _WARM_C)
    style = WARN if card.temperature >= warm else PLAIN
    return f"{card.temperature}°C", BAD if card.temperature >= hot else style


def _power(card: GpuGauges, width: int) -> Piece:
    if card.power is None:
        return NONE, DIM
    limit = "" if card.power_limit is None else f"/{card.power_limit:.0f}"
    return f"{card.power:.0f}{limit} W", PLAIN


def _throttle(card: GpuGauges, width: int) -> Piece:
    if card.error:
        return escape_cell(card.error), BAD
    if card.throttle is None:
        return NONE, DIM
    return (escape_cell(", ".join(card.throttle)), BAD) if card.throttle else ("", PLAIN)


def _run(index: SnapshotIndex, card: GpuGauges) -> Piece:
    owners = index.owners(card)
    if owners:
        run, rank = owners[0]
        more = f" +{len(owners) - 1}" if len(owners) > 1 else ""
        return f"r{rank.rank} {escape_cell(run.name or run.id)}{more}", ACCENT
    holders = card.processes or ()
    if not holders:
        return "", PLAIN
    user = holders[0].user or f"pid {holders[0].pid}"
    return escape_cell(user) + (f" +{len(holders) - 1}" if len(holders) > 1 else ""), DIM


def _history(card: GpuGauges, width: int) -> Piece:
    return draw_history(card.recent.get("utilization", ()), width, top=1.0), ACCENT
