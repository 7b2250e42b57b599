"""Makes a point of the run's history from an attempt: the state of its ranks, GPUs and hosts. Pure.

Loaded when an attempt has run for some seconds: no launch waits for it. The history of a run of weeks is in files
(control/record/history.py), not in memory.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

from stoker.contract.masking import mask_text
from stoker.contract.text import escape
from stoker.control.launch.attempt import Attempt
from stoker.control.record.history import HistoryColumns, HistoryPoint, Members

_RANK_COLUMNS = ("step", "step_s", "waiting", "phase", "state", "beat_age", "collective_age", "memory", "loss")
_GPU_COLUMNS = ("utilization", "memory_used", "memory_total", "temperature", "power", "throttle")
_HOST_COLUMNS = (
    "heard", "cores", "load", "cpu", "memory_total", "memory_available", "swap_used", "disk_free", "disk_total", "disk_read", "disk_written", "received",
    "sent", "link", "pressure_cpu", "pressure_io", "pressure_memory",
)  # fmt: skip
_INTEGERS = frozenset(("cores", "memory_used", "memory_total", "memory_available", "swap_used", "disk_free", "disk_total", "temperature"))  # fmt: skip
_MAX_PHASE = 40  # characters: a history of weeks has a phase for each rank and point


def make_history_point(attempt: Attempt, now: float) -> HistoryPoint:
    """Return the attempt's state at `now`, a time of the monotonic clock."""
    this_host = os.uname().nodename
    ranks = attempt.plan.places
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    gpus = list(dict.fromkeys((rank.host, rank.gpu.uuid) for rank in ranks if rank.gpu is not None))
    standings = attempt.watch.rank_statuses(now)
    return HistoryPoint(
        round(time.time(), 3),
        attempt.number,
        Members(
            tuple(rank.rank for rank in ranks),
            tuple((host or this_host, uuid) for host, uuid in gpus),
            tuple(host or this_host for host in hosts),
        ),
        _to_columns(_RANK_COLUMNS, [_rank_row(attempt, standings[rank.rank], rank.rank, rank.host) for rank in ranks]),
        _to_columns(_GPU_COLUMNS, [_gpu_row(attempt, host, uuid) for host, uuid in gpus]),
        _to_columns(_HOST_COLUMNS, [_host_row(attempt, host) for host in hosts]),
    )


def _to_columns(names: tuple[str, ...], rows: list[dict[str, Any]]) -> HistoryColumns:
    """Return the columns in which any row has a value."""
    columns = {name: tuple(row.get(name) for row in rows) for name in names}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def _rank_row(attempt: Attempt, standing: Any, rank: int, host: str) -> dict[str, Any]:
    memory = attempt.gauges[host][1]["ranks"].get(str(rank)) if host in attempt.gauges else None
    _, loss = attempt.losses.newest.get(rank, (0, None))
    return {
        "step": attempt.steps.get(rank, 0),
        "step_s": _round(standing.step_s, 4),
        "waiting": standing.waiting,
        "phase": escape(mask_text(standing.phase), _MAX_PHASE) or None,
        "state": standing.state if standing.state != "?" else None,
        "beat_age": _round(standing.beat_age, 2),
        "collective_age": _round(standing.collective_age, 2),
        "memory": memory,
        "loss": loss if loss is None or math.isfinite(loss) else str(loss),
    }


def _gpu_row(attempt: Attempt, host: str, uuid: str) -> dict[str, Any]:
    if host not in attempt.gauges:
        return {}
    gauges: dict[str, Any] = attempt.gauges[host][1]["gpus"].get(uuid, {})
    return {name: _to_number(name, value) for name, value in gauges.items()}


def _host_row(attempt: Attempt, host: str) -> dict[str, Any]:
    if host not in attempt.gauges:
        return {}
    received_at, gauges = attempt.gauges[host]
    return {"heard": round(received_at, 3), **{name: _to_number(name, value) for name, value in gauges["host"].items()}}


def _to_number(name: str, value: Any) -> Any:
    return int(value) if name in _INTEGERS and value is not None else value


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
