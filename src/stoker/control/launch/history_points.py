"""One moment of an attempt for the run's history: how ranks, cards and hosts stand. Pure.

Loaded when an attempt has run for some seconds: no launch waits for it. Nothing is kept here: the past of a run of weeks
is in its history's files (control/record/history.py).
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

_RANK = ("step", "step_s", "waiting", "phase", "state", "beat_age", "collective_age", "memory", "loss")
_GPU = ("utilization", "memory_used", "memory_total", "temperature", "power", "throttle")
_HOST = (
    "heard", "cores", "load", "cpu", "memory_total", "memory_available", "swap_used", "disk_free", "disk_total", "disk_read", "disk_written", "received",
    "sent", "link", "pressure_cpu", "pressure_io", "pressure_memory",
)  # fmt: skip
_WHOLE = frozenset(("cores", "memory_used", "memory_total", "memory_available", "swap_used", "disk_free", "disk_total", "temperature"))  # fmt: skip
_MAX_PHASE = 40  # characters of a phase: the history of a run of weeks keeps one for each rank and moment


def history_point(attempt: Attempt, now: float) -> HistoryPoint:
    """`now`: of the monotonic clock."""
    here = os.uname().nodename
    places = attempt.plan.places
    hosts = tuple(dict.fromkeys(place.host for place in places))
    cards = dict.fromkeys((place.host, place.gpu.uuid) for place in places if place.gpu is not None)
    members = Members(
        tuple(place.rank for place in places),
        tuple((host or here, uuid) for host, uuid in cards),
        tuple(host or here for host in hosts),
    )
    standings = attempt.watch.standings(now)
    ranks = [_of_rank(attempt, standings[rank], rank, attempt.plan.place(rank).host) for rank in members.ranks]
    gpus = [_of_gpu(attempt, host, uuid) for host, uuid in cards]
    of_hosts = [_of_host(attempt, host) for host in hosts]
    columns = (_columns(_RANK, ranks), _columns(_GPU, gpus), _columns(_HOST, of_hosts))
    return HistoryPoint(round(time.time(), 3), attempt.number, members, *columns)


def _columns(names: tuple[str, ...], rows: list[dict[str, Any]]) -> HistoryColumns:
    """Those that anybody has a value for."""
    found = {name: tuple(row.get(name) for row in rows) for name in names}
    return {name: values for name, values in found.items() if any(value is not None for value in values)}


def _of_rank(attempt: Attempt, standing: Any, rank: int, host: str) -> dict[str, Any]:
    resident = attempt.gauges[host][1]["ranks"].get(str(rank)) if host in attempt.gauges else None
    _, loss = attempt.losses.newest.get(rank, (0, None))
    return {
        "step": standing.step,
        "step_s": _rounded(standing.step_s, 4),
        "waiting": standing.waiting,
        "phase": escape(mask_text(standing.phase), _MAX_PHASE) or None,
        "state": standing.state if standing.state != "?" else None,
        "beat_age": _rounded(standing.beat_age, 2),
        "collective_age": _rounded(standing.collective_age, 2),
        "memory": resident,
        "loss": loss if loss is None or math.isfinite(loss) else str(loss),
    }


def _of_gpu(attempt: Attempt, host: str, uuid: str) -> dict[str, Any]:
    told: dict[str, Any] = attempt.gauges[host][1]["gpus"].get(uuid, {}) if host in attempt.gauges else {}
    return {name: _number(name, value) for name, value in told.items()}


def _of_host(attempt: Attempt, host: str) -> dict[str, Any]:
    if host not in attempt.gauges:
        return {}
    heard, told = attempt.gauges[host]
    return {"heard": round(heard, 3), **{name: _number(name, value) for name, value in told["host"].items()}}


def _number(name: str, value: Any) -> Any:
    return int(value) if name in _WHOLE and value is not None else value


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
