"""Draws the panel of hosts and their GPUs."""

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
    gpu_label,
    join_fitting,
    join_pieces,
)

_HOT_C, _WARM_C = 85, 75  # used for a GPU that does not report at which temperature it slows down
_NEAR_C = 5  # a GPU counts as hot from this many degrees below that temperature

GPU_ORDERS = {
    "u": Order("utilization", lambda gpu: gpu.utilization),
    "m": Order("memory", lambda gpu: gpu.memory_used),
    "t": Order("temperature", lambda gpu: gpu.temperature),
    "p": Order("power", lambda gpu: gpu.power),
    "h": Order("host", lambda gpu: (gpu.host, gpu.index), down=False),
}


# ---- hosts ----


def draw_host(host: HostGauges, width: int) -> Line:
    name: Piece = (escape_cell(host.name), BOLD)
    reason = escape_cell(host.reason)
    if host.state == OFFLINE:
        return fit(join_pieces([name, (OFFLINE, BAD), (reason, BAD)]), width)
    if host.state != "OK":
        return fit(join_pieces([name, (escape_cell(host.state), WARN), (reason, DIM)]), width)
    used = None
    if host.memory_total is not None and host.memory_available is not None:
        used = host.memory_total - host.memory_available
    is_busy = host.cpu is not None and host.cpu >= 0.95
    is_memory_short = used is not None and host.memory_total and used / host.memory_total > 0.95
    is_disk_full = (
        bool(host.disk_total) and host.disk_free is not None and host.disk_free / (host.disk_total or 1) < 0.05
    )
    load = f" load {host.load[0]:.1f}/{host.cores or NONE}" if host.load else ""
    driver_error: Piece | None = (escape_cell(host.gpu_error), BAD) if host.gpu_error else None
    pieces: list[Piece | None] = [
        name,
        driver_error,
        (f"CPU {format_percent(host.cpu)}{load}", WARN if is_busy else DIM),
        (f"mem {format_gib(used, host.memory_total)}", WARN if is_memory_short else DIM),
        (_format_rates("net", host.received, host.sent), DIM),
        (_format_rates("disk", host.disk_read, host.disk_written), DIM),
        (f"{_format_amount(host.disk_free)} free", BAD if is_disk_full else DIM)
        if host.disk_free is not None
        else None,
    ]
    return join_fitting(pieces, width)


def _format_rates(name: str, down: float | None, up: float | None) -> str:
    """Format two rates, or return "" while they are unknown: rates need two readings."""
    return "" if down is None or up is None else f"{name} ↓{_format_amount(down)}/s ↑{_format_amount(up)}/s"


def _format_amount(value: float) -> str:
    """Format bytes as 1.8 TB, 40 MB or 900 B."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.{1 if value < 10 * size else 0}f} {unit}B"
    return f"{value:.0f} B"


# ---- the panel ----


def make_gpus_panel(index: SnapshotIndex, options: PanelOptions) -> Panel:
    """List each host followed by its GPUs. In a sorted panel all hosts come first and the GPUs' labels include the host."""
    hosts, is_sorted = index.snapshot.hosts, bool(options.sort)
    gpu_rows, hidden = filter_and_sort(_make_gpu_rows(index), options, GPU_ORDERS)
    by_host: dict[str, list[Row]] = {}
    for row in gpu_rows:
        by_host.setdefault(row.item.host, []).append(row)
    rows: list[Row] = []
    for host in hosts:
        searched = f"{host.name} {host.state} {host.reason}".lower()
        if host.name in by_host or options.filter.lower() in searched:
            rows.append(Row(f"host {host.name}", host, host.name.lower(), draw_host))
            rows += [] if is_sorted else by_host.pop(host.name, [])
    rows += gpu_rows if is_sorted else [row for others in by_host.values() for row in others]
    columns = _make_columns(index, with_host=is_sorted and len(hosts) > 1)
    return Panel(GPUS, columns, tuple(rows), "no GPU on this machine", hidden if not rows else 0)


def _make_gpu_rows(index: SnapshotIndex) -> Iterator[Row]:
    for gpu in index.snapshot.gpus:
        runs = " ".join(f"{run.name} {run.id}" for run, _ in index.owners(gpu))
        searched = " ".join(map(str, (gpu.host, gpu.label, gpu.name, *(gpu.throttle or ()), runs)))
        yield Row(f"{gpu.host}/{gpu.uuid}", gpu, escape_cell(searched).lower())


def _make_columns(index: SnapshotIndex, with_host: bool) -> tuple[Column, ...]:
    label_width = max((len(gpu_label(gpu, with_host)) for gpu in index.snapshot.gpus), default=4)
    return (
        Column("GPU", max(6, min(label_width, 24) + 2), lambda gpu, width: (f"  {gpu_label(gpu, with_host)}", PLAIN)),
        Column("UTIL", 4, _draw_utilization, right=True, order=1),
        Column("", 10, lambda gpu, width: (draw_bar(gpu.utilization, width), _busy_style(gpu)), order=7),
        Column("MEMORY", 11, _draw_memory, right=True, order=2),
        Column("", 8, lambda gpu, width: (draw_bar(_memory_share(gpu), width), _draw_memory(gpu, width)[1]), order=8),
        Column("TEMP", 5, _draw_temperature, right=True, order=3),
        Column("POWER", 10, _draw_power, right=True, order=4),
        Column("THROTTLE", 16, _draw_throttle, order=2),
        Column("RUN", 12, lambda gpu, width: _draw_run_name(index, gpu), order=5),
        Column("HISTORY", 0, _draw_history, order=6),
        Column("NAME", 22, lambda gpu, width: (escape_cell(gpu.name or NONE), DIM), order=9),
    )


def _busy_style(gpu: GpuGauges) -> str:
    return GOOD if (gpu.utilization or 0) >= 0.5 else PLAIN


def _draw_utilization(gpu: GpuGauges, width: int) -> Piece:
    return ("ERR", BAD) if gpu.error else (format_percent(gpu.utilization), _busy_style(gpu))


def _memory_share(gpu: GpuGauges) -> float | None:
    return gpu.memory_used / gpu.memory_total if gpu.memory_used is not None and gpu.memory_total else None


def _draw_memory(gpu: GpuGauges, width: int) -> Piece:
    return format_gib(gpu.memory_used, gpu.memory_total), WARN if (_memory_share(gpu) or 0) > 0.95 else PLAIN


def _draw_temperature(gpu: GpuGauges, width: int) -> Piece:
    if gpu.temperature is None:
        return NONE, DIM
    hot = gpu.temperature_slowdown - _NEAR_C if gpu.temperature_slowdown else _HOT_C
    warm = hot - (_HOT_C - _WARM_C)
    style = WARN if gpu.temperature >= warm else PLAIN
    return f"{gpu.temperature}°C", BAD if gpu.temperature >= hot else style


def _draw_power(gpu: GpuGauges, width: int) -> Piece:
    if gpu.power is None:
        return NONE, DIM
    limit = "" if gpu.power_limit is None else f"/{gpu.power_limit:.0f}"
    return f"{gpu.power:.0f}{limit} W", PLAIN


def _draw_throttle(gpu: GpuGauges, width: int) -> Piece:
    if gpu.error:
        return escape_cell(gpu.error), BAD
    if gpu.throttle is None:
        return NONE, DIM
    return (escape_cell(", ".join(gpu.throttle)), BAD) if gpu.throttle else ("", PLAIN)


def _draw_run_name(index: SnapshotIndex, gpu: GpuGauges) -> Piece:
    """Return the first rank and run on the GPU, else the user of its first process, with the number of others."""
    owners = index.owners(gpu)
    if owners:
        run, rank = owners[0]
        others = f" +{len(owners) - 1}" if len(owners) > 1 else ""
        return f"r{rank.rank} {escape_cell(run.name or run.id)}{others}", ACCENT
    processes = gpu.processes or ()
    if not processes:
        return "", PLAIN
    user = escape_cell(processes[0].user or f"pid {processes[0].pid}")
    return user + (f" +{len(processes) - 1}" if len(processes) > 1 else ""), DIM


def _draw_history(gpu: GpuGauges, width: int) -> Piece:
    return draw_history(gpu.recent.get("utilization", ()), width, top=1.0), ACCENT
