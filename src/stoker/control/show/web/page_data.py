"""What the page asks about runs, as JSON: curves, sparklines, ranks over time, comparisons. Texts are in texts.py."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import IO, Any

from stoker.contract import layout
from stoker.contract.frozen import as_json
from stoker.contract.safe_io import open_below
from stoker.control.record import run_index
from stoker.control.show.charts import metric_text
from stoker.control.show.comparison import at_equal_step, differing_settings, measure_difference, settings_of
from stoker.control.show.curves import Curve, interval_of, smooth_points, thin_out
from stoker.control.show.run_tail import RunTail
from stoker.control.show.snapshot import (
    AVERAGED,
    LOSS,
    REWARD,
    RL_METRICS,
    GpuGauges,
    HostGauges,
    RankView,
    RunView,
    Snapshot,
    finite,
    headline_metric,
    parse_metric,
    sort_metrics,
)
from stoker.control.show.web.run_files import PageNotFound, RunFolders

POINTS = 600
MOST_POINTS = 4000
MOST_RUNS = 12  # compared at once
Steps = tuple[float, float]  # from, to
ALL: Steps = (-math.inf, math.inf)
SPARK = 32  # points of a sparkline
_MOST_AVERAGED = 16  # lines of a value of a sparkline
_LINE = 4096  # bytes within which a line of metrics.jsonl is looked for


def read_curves(
    folders: RunFolders,
    run: str,
    names: Sequence[str],
    *,
    since: int = 0,
    within: Steps = ALL,
    most: int,
    smooth: int = 1,
) -> dict[str, Any]:
    """`since`: points from this one on (a curve only grows at its end). `within`: of these steps."""
    folder, _ = folders.watched(run)
    made = {}
    for name in names:
        curve = folder.curve(name)
        # Over one logging interval only single steps are averaged: other curves have no noise, or are means already.
        window = smooth if name in AVERAGED or smooth != folder.interval else 1
        steps, values = _chosen(curve, since, within, window)
        picked = thin_out(values, max(30, min(most, MOST_POINTS)))
        made[name] = {
            "steps": [steps[at] for at in picked],
            "values": [_number(values[at]) for at in picked],
            "count": len(curve.steps),
            "bad": len(curve.not_finite()),
            "all": len(picked) == len(values),
        }
    metrics = folder.training.metrics
    problem = metrics.problem if metrics is not None else ""
    return {"names": metric_names(folder), "curves": made, "interval": folder.interval, "problem": problem}


def _chosen(curve: Curve, since: int, within: Steps, smooth: int) -> tuple[Sequence[int], Sequence[float]]:
    steps: Sequence[int] = curve.steps[since:] if since else curve.steps
    values: Sequence[float] = curve.values[since:] if since else curve.values
    if smooth > 1:
        points = smooth_points(curve, smooth)
        steps, values = [int(step) for step, _ in points], [value for _, value in points]
    first, last = within
    if within != ALL:
        # One more on each side, so that the line goes to the edge.
        inside = [at for at, step in enumerate(steps) if first <= step <= last]
        begin, end = (max(inside[0] - 1, 0), inside[-1] + 2) if inside else (0, 0)
        steps, values = steps[begin:end], values[begin:end]
    return steps, values


def _number(value: float) -> Any:
    kept = parse_metric(value)
    return float(f"{kept:.6g}") if isinstance(kept, float) else kept


def metric_names(folder: RunTail) -> list[str]:
    return sort_metrics(folder.curve_names())


def read_sparklines(folders: RunFolders, runs: Sequence[str]) -> dict[str, list[float | None]]:
    """Return a few points of each run's reward or loss, from places across the file: its length costs nothing."""
    found = {}
    for run in runs:
        try:
            found[run] = _spark(folders.place(run))
        except PageNotFound:
            found[run] = []
    return found


def _spark(run_dir: str) -> list[float | None]:
    path = run_index.find_file(run_dir, layout.METRICS)
    if path is None:
        return []
    values: list[float | None] = []
    try:
        with os.fdopen(open_below(run_dir, path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            for number in range(SPARK):
                file.seek(max(0, size * number // SPARK - 1))
                if number:
                    file.readline(_LINE)
                value = _next_headline_value(file)
                if value is not None:
                    values.append(float(f"{value:.4g}"))
            file.seek(max(0, size - _LINE))
            last = [_headline_value(_object(line)) for line in file.read(_LINE).split(b"\n")]
            values += [one for one in last if one is not None][-1:]
    except OSError:
        return []
    return values


def _next_headline_value(file: IO[bytes]) -> float | None:
    """Return the next reward or loss in the file; of a run whose metrics have every step the mean over some of them."""
    for _ in range(3):
        line = _object(file.readline(_LINE))
        if (value := _headline_value(line)) is None:
            continue
        more = min(interval_of(line), _MOST_AVERAGED) - 1
        known = [value, *(_headline_value(_object(file.readline(_LINE))) for _ in range(more))]
        finite_ones = [one for one in known if one is not None]
        return sum(finite_ones) / len(finite_ones)
    return None


def _object(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _headline_value(line: dict[str, Any]) -> float | None:
    return finite(parse_metric(line.get(headline_metric(line))))


def compare_runs(folders: RunFolders, runs: Sequence[str], name: str) -> dict[str, Any]:
    """Return settings that differ, values at equal steps, and of two runs whether the difference is more than noise.

    `name` is the metric that is judged; empty: reward if all the runs have one, else loss.
    """
    watched = [folders.watched(run)[0] for run in runs[:MOST_RUNS]]
    settings = [settings_of(folder.training.record) for folder in watched]
    name = name or (REWARD if all(folder.curve(REWARD).steps for folder in watched) else LOSS)
    equal = []
    for one in dict.fromkeys((name, *RL_METRICS, LOSS, "val_loss")):
        found = at_equal_step([folder.mean_curve(one) for folder in watched])
        if found is not None:
            equal.append([RL_METRICS.get(one, one), found[0], [metric_text(one, value) for value in found[1]]])
    judged = measure_difference(watched[0].curve(name), watched[1].curve(name)) if len(watched) == 2 else None
    return {
        "runs": list(runs[:MOST_RUNS]),
        "settings": [[key, list(values)] for key, values in differing_settings(settings)],
        "metric": name,
        "equal": equal,
        "noise": {**as_json(judged), "beyond": judged.beyond} if judged is not None else None,
    }


def read_settings(folders: RunFolders, run: str) -> dict[str, Any]:
    return {"settings": [list(pair) for pair in settings_of(folders.watched(run)[0].training.record).items()]}


def read_timeline(folders: RunFolders, run: str, since: float, within: Steps = ALL) -> dict[str, Any]:
    """`since`: only what is newer. `within`: of these times."""
    folder, timeline = folders.watched(run)
    plan = folder.record.data.get("plan") or {}
    ranks = plan.get("ranks") if isinstance(plan.get("ranks"), list) else []
    labels = {str(one["rank"]): str(one.get("label") or "")[:80] for one in ranks or () if _has_rank(one)}
    return {**timeline.to_json(since, within), "labels": labels}


def _has_rank(one: Any) -> bool:
    return isinstance(one, dict) and type(one.get("rank")) is int


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


def shared_state(snapshot: Snapshot) -> State:
    """What every viewer gets."""
    return {
        "runs": {run.id: _run(run) for run in snapshot.runs},
        "hosts": {host.name: _row(host, _HOST) for host in snapshot.hosts},
        "gpus": {f"{card.host}/{card.label}/{card.uuid}": _gpu(card) for card in snapshot.gpus},
    }


def rank_rows(run: RunView | None) -> dict[str, Row]:
    return {str(rank.rank): _row(rank, _RANK) for rank in run.ranks} if run is not None else {}


def recent_utilization(snapshot: Snapshot) -> dict[str, list[float | None]]:
    """Of each card its utilisation before this viewer came; later ones it keeps itself."""
    found = {f"{card.host}/{card.label}/{card.uuid}": card.recent.get("utilization", ()) for card in snapshot.gpus}
    return {key: [None if one is None else round(one, 2) for one in values] for key, values in found.items()}


def diff_states(before: Mapping[str, Mapping[str, Row]], now: State) -> tuple[State, dict[str, list[str]]]:
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
