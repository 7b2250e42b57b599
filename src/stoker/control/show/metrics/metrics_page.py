"""A snapshot as Prometheus metrics, in the text format 0.0.4. Pure: nothing is asked here.

Written out here and not by prometheus-client: for 8 GPUs and 8 ranks (730 series) that takes 8 ms a page and this 1.4 ms, of
the 10 ms a second that an exporter may take of a core. The tests read the pages with prometheus-client and promtool.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from stoker import __version__
from stoker.contract.frozen import frozen
from stoker.contract.text import escape
from stoker.control.machine.nvml import THROTTLE_REASONS
from stoker.control.show.metrics import metric_table
from stoker.control.show.snapshot import (
    DAMAGED,
    LOST,
    OK,
    RUNNING,
    UNKNOWN,
    Metric,
    RankView,
    RunView,
    ServerLoad,
    Snapshot,
    as_float,
    ordered_metrics,
)
from stoker.control.show.snapshot import GpuGauges as Card
from stoker.control.show.snapshot import HostGauges as Host

CLASSIC, NEW, OFF = "classic", "4.9", "off"  # DCGM's dialects
STATES = (RUNNING, "completed", "failed", "stopped", "refused", LOST, UNKNOWN, DAMAGED)
ENDED_S = 900.0  # a run that ended is exported for so long: its verdict is scraped, and its series end
_MAX_LABEL = 200  # characters
# Of one run, besides those with a name of their own: Prometheus keeps each of these series for weeks.
MAX_METRICS = 100
_MIB = 1 << 20
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TRAINING = ("loss", "tokens", "tokens_per_s", "seconds_per_step", "mfu", "grad_norm", "lr", "total_steps")


@frozen
class Examined:
    """What the doctor's fast checks found, and when. `counts`: (check, level) -> findings."""

    host: str
    time: float
    counts: Mapping[tuple[str, str], int]


@frozen
class Collected:
    """How the newest collection went; `time`: of the snapshot that is served, which may be an older one."""

    success: bool
    time: float
    seconds: float


class _Page:
    """Series by name. The same one twice would make Prometheus refuse the page: the later one counts."""

    def __init__(self) -> None:
        self._series: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in metric_table.ALL}

    def put(self, name: str, value: Metric | bool, *labels: str) -> None:
        if value is not None:
            self._series[name][labels] = float(value) if isinstance(value, str) else as_float(value)

    def text(self) -> bytes:
        lines: list[str] = []
        for name, row in metric_table.ALL.items():
            series = self._series[name]
            if series:
                lines.append(_heads()[name])
                written = {name + _labels(row.labels, labels): _number(value) for labels, value in series.items()}
                lines += [f"{one} {value}\n" for one, value in written.items()]
        return "".join(lines).encode()


@functools.cache
def _heads() -> dict[str, str]:
    return {name: f"# HELP {name} {_escaped(row.text)}\n# TYPE {name} {row.kind}\n" for name, row in metric_table.ALL.items()}


@functools.lru_cache(1 << 16)
def _labels(keys: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Of a page most are those of the page before. Names of runs, metrics and phases are anybody's texts, and whoever can
    reach the port reads them.
    """
    shown = [escape(text, _MAX_LABEL) for text in values]
    pairs = [f'{key}="{_escaped(text, quoted=True)}"' for key, text in zip(keys, shown, strict=True)]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def _number(value: float) -> str:
    if value - value == 0:
        return repr(value)
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}[repr(value)]


def render(snapshot: Snapshot, collected: Collected, examined: Examined | None = None, dcgm: str = CLASSIC) -> bytes:
    """The text that a scrape gets."""
    page = _Page()
    page.put("stoker_build_info", 1, __version__)
    page.put("stoker_last_collect_success", collected.success)
    page.put("stoker_last_collect_timestamp_seconds", collected.time)
    page.put("stoker_last_collect_duration_seconds", collected.seconds)
    page.put("stoker_run_folders_left_out", snapshot.others)
    for state in STATES:
        page.put("stoker_runs", sum(run.state == state for run in snapshot.runs), state)
    for run in snapshot.runs:
        if exported(run, snapshot.time):
            _run(page, run)
            _training(page, run)
            for server in run.servers:
                _server(page, run, server)
            for rank in run.ranks:
                _rank(page, run, rank)
            for slow in run.slow:
                page.put("stoker_rank_slow_wait_seconds", slow.wait_s or 0.0, run.id, str(slow.rank), slow.cause)
    cards = Counter(card.host for card in snapshot.gpus if not card.error)
    for host in snapshot.hosts:
        _host(page, host, cards[host.name])
    drivers = {host.name: host.driver or "" for host in snapshot.hosts}
    for card in snapshot.gpus:
        _card(page, card)
        if dcgm != OFF:
            _dcgm(page, card, drivers.get(card.host, ""), dcgm)
    if examined is not None:
        page.put("stoker_doctor_check_timestamp_seconds", examined.time, examined.host)
        for (check, level), count in examined.counts.items():
            page.put("stoker_doctor_findings", count, examined.host, check, level)
    return page.text()


def exported(run: RunView, now: float) -> bool:
    """Under way, or ended a short while ago."""
    if run.state in (RUNNING, UNKNOWN):
        return True
    return run.state != DAMAGED and now - (run.updated or run.started) <= ENDED_S


def _run(page: _Page, run: RunView) -> None:
    page.put("stoker_run_info", 1, run.id, run.name, run.user)
    for state in STATES:
        page.put("stoker_run_state", run.state == state, run.id, state)
    page.put("stoker_run_started_timestamp_seconds", run.started, run.id)
    page.put("stoker_run_updated_timestamp_seconds", run.updated, run.id)
    page.put("stoker_run_ranks", run.world, run.id)
    page.put("stoker_run_attempts", run.attempts, run.id)
    for cause, count in run.restarts.items():
        page.put("stoker_run_restarts_total", count, run.id, cause)
    if run.verdict is not None and run.state not in (RUNNING, UNKNOWN):
        page.put("stoker_run_verdict_info", 1, run.id, run.verdict.status, run.verdict.cause)
        page.put("stoker_run_exit_code", run.verdict.exit_code, run.id)
    if run.suspicion is not None:
        page.put("stoker_run_suspicion_info", 1, run.id, run.suspicion.kind, run.suspicion.cause)
        when = run.suspicion.time
        page.put("stoker_run_suspicion_timestamp_seconds", when, run.id, run.suspicion.kind, run.suspicion.cause)


def _training(page: _Page, run: RunView) -> None:
    steps = sorted(rank.step_s for rank in run.ranks if rank.step_s is not None)
    seconds = run.metrics.get("seconds_per_step")
    if seconds is None and steps:
        seconds = steps[len(steps) // 2]
    for name, value in {
        "loss": run.loss,
        "step": run.step,
        "planned_steps": run.total_steps,
        "tokens_total": run.metrics.get("tokens"),
        "tokens_per_second": run.tokens_per_s,
        "step_seconds": seconds,
        "mfu_ratio": run.mfu,
        "gradient_norm": run.grad_norm,
        "learning_rate": run.lr,
        "eta_seconds": run.eta_s,
    }.items():
        page.put(f"stoker_training_{name}", value, run.id)
    others = [name for name in ordered_metrics(run.metrics) if name not in _TRAINING]
    for name in others[:MAX_METRICS]:
        page.put("stoker_training_metric", run.metrics[name], run.id, name)


def _server(page: _Page, run: RunView, server: ServerLoad) -> None:
    for name, value in {
        "requests_total": server.requests,
        "generated_tokens_total": server.tokens,
        "prompt_tokens_total": server.prompt_tokens,
        "requests_per_second": server.requests_per_s,
        "tokens_per_second": server.tokens_per_s,
        "running": server.running,
        "waiting": server.waiting,
        "weights_version": server.weights_version,
    }.items():
        page.put(f"stoker_server_{name}", value, run.id, server.role)


def _rank(page: _Page, run: RunView, rank: RankView) -> None:
    who = (run.id, str(rank.rank))
    page.put("stoker_rank_info", 1, *who, rank.role, rank.host, rank.label, rank.gpu or "")
    if rank.state == "running":
        page.put("stoker_rank_phase_info", 1, *who, rank.phase or "train")
    page.put("stoker_rank_up", rank.state == "running", *who)
    for name, value in {
        "step": rank.step,
        "step_seconds": rank.step_s,
        "waiting_ratio": rank.waiting,
        "collective_age_seconds": rank.collective_age,
        "beat_age_seconds": rank.beat_age,
        "memory_bytes": rank.memory,
    }.items():
        page.put(f"stoker_rank_{name}", value, *who)
    loss = rank.loss
    if loss is None and rank.rank == 0:
        loss = run.loss
    page.put("training_loss", loss, str(rank.rank), run.id)


def _host(page: _Page, host: Host, cards: int) -> None:
    page.put("stoker_host_up", host.state == OK, host.name)
    if host.state != OK:
        return  # what it was doing when it was last heard of is not what it does
    page.put("stoker_host_info", 1, host.name, host.driver or "")
    page.put("stoker_host_gpu_driver_failed", host.gpu_error is not None, host.name)
    for name, value in {
        "gpus": cards,
        "cpu_cores": host.cores,
        "cpu_busy_ratio": host.cpu,
        "memory_size_bytes": host.memory_total,
        "memory_available_bytes": host.memory_available,
        "swap_used_bytes": host.swap_used,
        "disk_read_bytes_per_second": host.disk_read,
        "disk_written_bytes_per_second": host.disk_written,
        "network_receive_bytes_per_second": host.received,
        "network_transmit_bytes_per_second": host.sent,
        "network_link_bytes_per_second": host.link,
    }.items():
        page.put(f"stoker_host_{name}", value, host.name)
    for minutes, load in zip(("1", "5", "15"), host.load or (), strict=False):
        page.put("stoker_host_load", load, host.name, minutes)
    page.put("stoker_host_disk_free_bytes", host.disk_free, host.name, host.disk_path or "")
    page.put("stoker_host_disk_size_bytes", host.disk_total, host.name, host.disk_path or "")
    for resource in ("cpu", "io", "memory"):
        page.put("stoker_host_pressure_ratio", getattr(host, f"pressure_{resource}"), host.name, resource)


def _card(page: _Page, card: Card) -> None:
    who = (card.host, card.label[3:], card.uuid)
    page.put("stoker_gpu_up", not card.error, *who)
    if card.error:
        return
    page.put("stoker_gpu_info", 1, *who, card.name or "", card.pci or "")
    for name, value in {
        "utilization_ratio": card.utilization,
        "memory_used_bytes": card.memory_used,
        "memory_size_bytes": card.memory_total,
        "temperature_celsius": card.temperature,
        "temperature_slowdown_celsius": card.temperature_slowdown,
        "power_watts": card.power,
        "power_limit_watts": card.power_limit,
        "clock_hertz": card.clock,
        "clock_max_hertz": card.clock_max,
        "memory_clock_hertz": card.memory_clock,
        "pcie_lanes": card.pcie_width,
        "pcie_max_lanes": card.pcie_width_max,
        "energy_joules_total": card.energy,
        "processes": None if card.processes is None else len(card.processes),
        "last_xid": last_xid(card),
    }.items():
        page.put(f"stoker_gpu_{name}", value, *who)
    if card.throttle is not None:
        for reason in dict.fromkeys((*THROTTLE_REASONS, *card.throttle)):
            page.put("stoker_gpu_throttled", reason in card.throttle, *who, reason)
    page.put("stoker_gpu_ecc_errors_total", card.ecc_corrected, *who, "corrected")
    page.put("stoker_gpu_ecc_errors_total", card.ecc_uncorrected, *who, "uncorrected")
    for when, number in card.xids:  # newest last
        page.put("stoker_gpu_xid_timestamp_seconds", when, *who, str(number))
    note = (card.host, card.label[3:])
    page.put("gpu_memory_used_mb", _times(card.memory_used, 1 / _MIB), *note)
    page.put("gpu_utilization_percent", _times(card.utilization, 100), *note)


def last_xid(card: Card) -> int:
    return card.xids[-1][1] if card.xids else 0


def _dcgm(page: _Page, card: Card, driver: str, dialect: str) -> None:
    if card.error:
        return
    who = (card.label[3:], card.uuid, card.pci or "", f"nvidia{card.index}", card.name or "", card.host, driver)
    free = None
    if card.memory_total is not None and card.memory_used is not None:
        free = card.memory_total - card.memory_used
    classic: dict[str, Any] = {
        "GPU_UTIL": _times(card.utilization, 100),
        "FB_USED": _times(card.memory_used, 1 / _MIB),
        "FB_FREE": _times(free, 1 / _MIB),
        "GPU_TEMP": card.temperature,
        "POWER_USAGE": card.power,
        "SM_CLOCK": _times(card.clock, 1e-6),
        "MEM_CLOCK": _times(card.memory_clock, 1e-6),
        "XID_ERRORS": last_xid(card),
        "TOTAL_ENERGY_CONSUMPTION": _times(card.energy, 1000),
    }
    new: dict[str, Any] = {
        "GPU_UTIL_RATIO": card.utilization,
        "FB_USED_BYTES": card.memory_used,
        "FB_FREE_BYTES": free,
        "FB_CAPACITY_BYTES": card.memory_total,
        "GPU_TEMP_CELSIUS": card.temperature,
        "BOARD_POWER_WATTS": card.power,
        "SM_CLOCK_HERTZ": card.clock,
        "MEMORY_CLOCK_HERTZ": card.memory_clock,
        "XID_ERROR": last_xid(card),
        "GPU_ENERGY_JOULES_TOTAL": card.energy,
    }
    for name, value in (classic if dialect == CLASSIC else new).items():
        page.put(f"DCGM_FI_DEV_{name}", value, *who)


def _times(value: float | None, factor: float) -> float | None:
    """Not 34.00000000000001 for what was 0.34."""
    return None if value is None else round(value * factor, 6)
