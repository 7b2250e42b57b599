"""A snapshot as the page keeps it: parts (runs, hosts, gpus, ranks) of rows by key, and what of them has changed. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stoker.contract.frozen import as_json
from stoker.control.show.charts import metric_text
from stoker.control.show.snapshot import RL_METRICS, GpuGauges, HostGauges, RankView, RunView, Snapshot

Row = dict[str, Any]
State = dict[str, dict[str, Row]]

_RUN = (
    "name", "user", "mine", "state", "started", "updated", "seconds", "world", "attempts", "step", "total_steps", "headline",
    "headline_value", "loss",
    "tokens_per_s", "mfu", "grad_norm", "lr", "eta_s", "phase", "problem", "command", "hosts",
)  # fmt: skip
_HOST = (
    "state", "reason", "cores", "cpu", "memory_total", "memory_available", "disk_free", "disk_total", "received", "sent",
    "gpu_error",
)  # fmt: skip
_GPU = (
    "host", "name", "utilization", "memory_used", "memory_total", "temperature", "power", "power_limit", "clock",
    "clock_max", "throttle", "error",
)  # fmt: skip
_RANK = (
    "role", "label", "host", "gpu", "pid", "state", "exit_code", "step", "step_s", "waiting", "phase", "collective_age",
    "beat_age", "memory",
)  # fmt: skip
_WHOLE = frozenset(
    (
        "requests",
        "tokens",
        "prompt_tokens",
        "weights_version",
        "step",
        "total_steps",
        "world",
        "attempts",
        "pid",
        "exit_code",
        "cores",
        "started",
        "updated",
    )
)


def shared(snapshot: Snapshot) -> State:
    """What every viewer gets."""
    return {
        "runs": {run.id: _run(run) for run in snapshot.runs},
        "hosts": {host.name: _row(host, _HOST) for host in snapshot.hosts},
        "gpus": {f"{card.host}/{card.label}/{card.uuid}": _gpu(card) for card in snapshot.gpus},
    }


def ranks_of(run: RunView | None) -> dict[str, Row]:
    return {str(rank.rank): _row(rank, _RANK) for rank in run.ranks} if run is not None else {}


def recent(snapshot: Snapshot) -> dict[str, list[float | None]]:
    """Of each card its utilisation before this viewer came; later ones it keeps itself."""
    found = {f"{card.host}/{card.label}/{card.uuid}": card.recent.get("utilization", ()) for card in snapshot.gpus}
    return {key: [None if one is None else round(one, 2) for one in values] for key, values in found.items()}


def difference(before: Mapping[str, Mapping[str, Row]], now: State) -> tuple[State, dict[str, list[str]]]:
    """(rows that are new, or of those that are not the fields that changed; keys that are gone)"""
    changed: State = {}
    gone: dict[str, list[str]] = {}
    for part, rows in now.items():
        old = before.get(part, {})
        made = {}
        for key, row in rows.items():
            known = old.get(key)
            if known is None:
                made[key] = row
            elif known != row:
                made[key] = {name: value for name, value in row.items() if known.get(name) != value}
        if made:
            changed[part] = made
        left = [key for key in old if key not in rows]
        if left:
            gone[part] = left
    return changed, gone


def _run(run: RunView) -> Row:
    row = _row(run, _RUN)
    row["rl"] = {RL_METRICS[name]: metric_text(name, value) for name, value in run.rl_metrics.items()}
    row["servers"] = [{name: _plain(value, name) for name, value in as_json(one).items()} for one in run.servers]
    row["restarts"] = dict(run.restarts)
    row["slow"] = [{"rank": one.rank, "summary": one.summary} for one in run.slow]
    suspicion, verdict = run.suspicion, run.verdict
    row["suspicion"] = None
    if suspicion is not None:
        told = (
            suspicion.time,
            suspicion.cause,
            suspicion.summary,
            suspicion.rank,
            list(suspicion.waiting),
        )
        row["suspicion"] = dict(zip(("time", "cause", "summary", "rank", "waiting"), told, strict=True))
    row["verdict"] = None
    if verdict is not None:
        row["verdict"] = {"cause": verdict.cause, "summary": verdict.summary[:500], "rank": verdict.rank}
    return row


def _gpu(card: GpuGauges) -> Row:
    row = _row(card, _GPU)
    row["label"], row["uuid"] = card.label, card.uuid
    row["processes"] = [
        {"pid": one.pid, "user": one.user, "run": one.run, "command": (one.command or "")[:120]}
        for one in (card.processes or ())[:8]
    ]
    return row


def _row(thing: RunView | HostGauges | GpuGauges | RankView, names: tuple[str, ...]) -> Row:
    return {name: _plain(getattr(thing, name), name) for name in names}


def _plain(value: Any, name: str) -> Any:
    """Numbers with four digits: what nobody sees need not travel, and what is only noise has not changed."""
    if isinstance(value, tuple):
        return [_plain(one, name) for one in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, int) and (name in _WHOLE or abs(value) < 10_000):
        return value
    if name in _WHOLE:
        return round(value, 1)
    if name in ("seconds", "eta_s", "beat_age", "collective_age"):
        return round(value, 1) if value < 10 else round(value)
    if value == 0 or not math.isfinite(value):
        return 0
    digits = 3 - math.floor(math.log10(abs(value)))
    return round(value, digits)
