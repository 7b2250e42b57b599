"""Builds the page's data as JSON: the live state of runs, hosts and GPUs, curves, comparisons, and ranks over time.

run_files.py reads the texts and files of runs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import IO, Any

from stoker.contract import layout
from stoker.contract.frozen import as_json, pick_fields
from stoker.contract.safe_io import open_below
from stoker.control.record import run_index
from stoker.control.show.charts import metric_text
from stoker.control.show.comparison import (
    find_differing_settings,
    find_last_common_step,
    measure_difference,
    settings_of,
)
from stoker.control.show.curves import Curve, interval_of, smooth_points, thin_out
from stoker.control.show.run_tail import RunTail, planned_ranks
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
    headline_metric,
    parse_finite,
    parse_metric,
    sort_metrics,
)
from stoker.control.show.web.run_files import PageNotFound, RunFolders

# ---- live state: for each part (runs, hosts, gpus, ranks) its rows by key ----

Row = dict[str, Any]
State = dict[str, dict[str, Row]]

_RUN_FIELDS = (
    "name", "user", "mine", "state", "started", "updated", "seconds", "world", "attempts", "step", "total_steps", "headline",
    "headline_value", "loss", "tokens_per_s", "mfu", "grad_norm", "lr", "eta_s", "phase", "problem", "command", "hosts",
)  # fmt: skip
_HOST_FIELDS = (
    "state", "reason", "cores", "cpu", "memory_total", "memory_available", "disk_free", "disk_total", "received", "sent",
    "gpu_error",
)  # fmt: skip
_GPU_FIELDS = (
    "host", "name", "utilization", "memory_used", "memory_total", "temperature", "power", "power_limit", "clock",
    "clock_max", "throttle", "error",
)  # fmt: skip
_RANK_FIELDS = (
    "role", "label", "host", "gpu", "pid", "state", "exit_code", "step", "step_s", "waiting", "phase", "collective_age",
    "beat_age", "memory",
)  # fmt: skip
# The integers of these fields are not rounded.
_EXACT_FIELDS = frozenset((
    "requests", "tokens", "prompt_tokens", "weights_version", "step", "total_steps", "world", "attempts", "pid", "exit_code",
    "cores", "started", "updated",
))  # fmt: skip
_MAX_PROCESSES = 8  # shown of a GPU


def make_shared_state(snapshot: Snapshot) -> State:
    """Return the parts that are the same for every viewer. The fourth, ranks, depends on the run that a viewer watches."""
    return {
        "runs": {run.id: _make_run_row(run) for run in snapshot.runs},
        "hosts": {host.name: _make_row(host, _HOST_FIELDS) for host in snapshot.hosts},
        "gpus": {_gpu_key(gpu): _make_gpu_row(gpu) for gpu in snapshot.gpus},
    }


def make_rank_rows(run: RunView | None) -> dict[str, Row]:
    return {str(rank.rank): _make_row(rank, _RANK_FIELDS) for rank in run.ranks} if run is not None else {}


def collect_recent_utilization(snapshot: Snapshot) -> dict[str, list[float | None]]:
    """Return each GPU's utilization from before a viewer connected; the page collects later values."""
    return {
        _gpu_key(gpu): [None if value is None else round(value, 2) for value in gpu.recent.get("utilization", ())]
        for gpu in snapshot.gpus
    }


def diff_states(before: Mapping[str, Mapping[str, Row]], now: State) -> tuple[State, dict[str, list[str]]]:
    """Return (new rows and the changed fields of other rows, keys of removed rows)."""
    changed: State = {}
    removed: dict[str, list[str]] = {}
    for part, rows in now.items():
        old_rows = before.get(part, {})
        changed_rows = {}
        for key, row in rows.items():
            old = old_rows.get(key)
            if old is None:
                changed_rows[key] = row
            elif old != row:
                changed_rows[key] = {name: value for name, value in row.items() if old.get(name) != value}
        if changed_rows:
            changed[part] = changed_rows
        missing = [key for key in old_rows if key not in rows]
        if missing:
            removed[part] = missing
    return changed, removed


def _make_run_row(run: RunView) -> Row:
    suspicion, verdict = run.suspicion, run.verdict
    return {
        **_make_row(run, _RUN_FIELDS),
        "rl": {RL_METRICS[name]: metric_text(name, value) for name, value in run.rl_metrics.items()},
        "servers": [{name: _round(value, name) for name, value in as_json(load).items()} for load in run.servers],
        "restarts": dict(run.restarts),
        "slow": [pick_fields(slow, "rank", "summary") for slow in run.slow],
        "suspicion": suspicion and pick_fields(suspicion, "time", "cause", "summary", "rank", "waiting"),
        "verdict": verdict and {"cause": verdict.cause, "summary": verdict.summary[:500], "rank": verdict.rank},
    }


def _gpu_key(gpu: GpuGauges) -> str:
    return f"{gpu.host}/{gpu.label}/{gpu.uuid}"


def _make_gpu_row(gpu: GpuGauges) -> Row:
    processes = [
        {"pid": process.pid, "user": process.user, "run": process.run, "command": (process.command or "")[:120]}
        for process in (gpu.processes or ())[:_MAX_PROCESSES]
    ]
    return {**_make_row(gpu, _GPU_FIELDS), "label": gpu.label, "uuid": gpu.uuid, "processes": processes}


def _make_row(view: RunView | HostGauges | GpuGauges | RankView, names: tuple[str, ...]) -> Row:
    return {name: _round(getattr(view, name), name) for name in names}


def _round(value: Any, name: str) -> Any:
    """Round numbers to four digits, so that changes that are too small to see are not sent."""
    if isinstance(value, tuple):
        return [_round(item, name) for item in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, int) and (name in _EXACT_FIELDS or abs(value) < 10_000):
        return value
    if name in _EXACT_FIELDS:
        return round(value, 1)
    if name in ("seconds", "eta_s", "beat_age", "collective_age"):
        return round(value, 1) if value < 10 else round(value)
    if value == 0 or not math.isfinite(value):
        return 0
    return round(value, 3 - math.floor(math.log10(abs(value))))


# ---- curves ----

POINTS = 600
_MIN_POINTS, _MAX_POINTS = 30, 4000
StepRange = tuple[float, float]  # first, last
ALL_STEPS: StepRange = (-math.inf, math.inf)


def read_curves(
    folders: RunFolders,
    run: str,
    names: Sequence[str],
    *,
    since: int = 0,
    step_range: StepRange = ALL_STEPS,
    max_points: int,
    smooth: int = 1,
) -> dict[str, Any]:
    """Return curves of a run, thinned to about `max_points`: the points in `step_range` from index `since` on.

    A page that has the first points asks only for newer ones, because a curve only grows at its end.
    """
    tail, _ = folders.open(run)
    curves = {}
    for name in names:
        curve = tail.curve(name)
        # Smoothing over one logging interval applies only to AVERAGED metrics: the others have no noise or are means.
        window = smooth if name in AVERAGED or smooth != tail.interval else 1
        steps, values = _select_points(curve, since, step_range, window)
        indices = thin_out(values, max(_MIN_POINTS, min(max_points, _MAX_POINTS)))
        curves[name] = {
            "steps": [steps[index] for index in indices],
            "values": [_round_value(values[index]) for index in indices],
            "count": len(curve.steps),
            "bad": len(curve.find_non_finite_steps()),
            "all": len(indices) == len(values),
        }
    metrics = tail.training.metrics
    problem = metrics.problem if metrics is not None else ""
    return {"names": list_metric_names(tail), "curves": curves, "interval": tail.interval, "problem": problem}


def _select_points(
    curve: Curve, since: int, step_range: StepRange, window: int
) -> tuple[Sequence[int], Sequence[float]]:
    steps: Sequence[int] = curve.steps[since:] if since else curve.steps
    values: Sequence[float] = curve.values[since:] if since else curve.values
    if window > 1:
        points = smooth_points(curve, window)
        steps, values = [int(step) for step, _ in points], [value for _, value in points]
    first, last = step_range
    if step_range != ALL_STEPS:
        inside = [index for index, step in enumerate(steps) if first <= step <= last]
        # Add one point on each side, so that the line reaches the edges of the chart.
        begin, end = (max(inside[0] - 1, 0), inside[-1] + 2) if inside else (0, 0)
        steps, values = steps[begin:end], values[begin:end]
    return steps, values


def _round_value(value: float) -> Any:
    metric = parse_metric(value)
    return float(f"{metric:.6g}") if isinstance(metric, float) else metric


def list_metric_names(tail: RunTail) -> list[str]:
    return sort_metrics(tail.curve_names())


# ---- sparklines of the list ----

_SPARK_POINTS = 32
_MAX_AVERAGED = 16  # a value is a mean over at most this many lines
_MAX_LINE = 4096  # bytes of a line of metrics.jsonl


def read_sparklines(folders: RunFolders, runs: Sequence[str]) -> dict[str, list[float | None]]:
    """Return about 32 values of each run's reward or loss.

    Reads lines at 32 evenly spaced offsets of metrics.jsonl, so the time does not depend on its length.
    """
    sparklines = {}
    for run in runs:
        try:
            sparklines[run] = _read_sparkline(folders.path(run))
        except PageNotFound:
            sparklines[run] = []
    return sparklines


def _read_sparkline(run_dir: str) -> list[float | None]:
    path = run_index.find_file(run_dir, layout.METRICS)
    if path is None:
        return []
    values: list[float | None] = []
    try:
        with os.fdopen(open_below(run_dir, path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            for index in range(_SPARK_POINTS):
                file.seek(max(0, size * index // _SPARK_POINTS - 1))
                if index:
                    file.readline(_MAX_LINE)
                value = _next_headline_value(file)
                if value is not None:
                    values.append(float(f"{value:.4g}"))
            file.seek(max(0, size - _MAX_LINE))
            last_values = [_headline_value(_parse_object(line)) for line in file.read(_MAX_LINE).split(b"\n")]
            values += [value for value in last_values if value is not None][-1:]
    except OSError:
        return []
    return values


def _next_headline_value(file: IO[bytes]) -> float | None:
    """Return the next reward or loss in the file, or None. If the file has every step, return the mean over a few lines."""
    for _ in range(3):
        line = _parse_object(file.readline(_MAX_LINE))
        if (value := _headline_value(line)) is None:
            continue
        count = min(interval_of(line), _MAX_AVERAGED) - 1
        window = [value, *(_headline_value(_parse_object(file.readline(_MAX_LINE))) for _ in range(count))]
        numbers = [value for value in window if value is not None]
        return sum(numbers) / len(numbers)
    return None


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _headline_value(line: dict[str, Any]) -> float | None:
    return parse_finite(line.get(headline_metric(line)))


# ---- comparison, settings, ranks over time ----

_MAX_COMPARED = 12  # runs


def compare_runs(folders: RunFolders, runs: Sequence[str], name: str) -> dict[str, Any]:
    """Return the differing settings and the values at the last common step; for two runs, judge whether they differ by more than noise.

    `name` is the metric to judge. If it is empty, judge the reward if all runs have one, else the loss.
    """
    tails = [folders.open(run)[0] for run in runs[:_MAX_COMPARED]]
    settings = [settings_of(tail.training.record) for tail in tails]
    name = name or (REWARD if all(tail.curve(REWARD).steps for tail in tails) else LOSS)
    equal = []
    for metric in dict.fromkeys((name, *RL_METRICS, LOSS, "val_loss")):
        point = find_last_common_step([tail.mean_curve(metric) for tail in tails])
        if point is not None:
            step, values = point
            equal.append([RL_METRICS.get(metric, metric), step, [metric_text(metric, value) for value in values]])
    difference = measure_difference(tails[0].curve(name), tails[1].curve(name)) if len(tails) == 2 else None
    return {
        "runs": list(runs[:_MAX_COMPARED]),
        "settings": [[key, list(values)] for key, values in find_differing_settings(settings)],
        "metric": name,
        "equal": equal,
        "noise": {**as_json(difference), "beyond": difference.is_beyond_noise} if difference is not None else None,
    }


def read_settings(folders: RunFolders, run: str) -> dict[str, Any]:
    return {"settings": [list(pair) for pair in settings_of(folders.open(run)[0].training.record).items()]}


def read_timeline(
    folders: RunFolders, run: str, since: float, time_range: tuple[float, float] = (-math.inf, math.inf)
) -> dict[str, Any]:
    """Return the ranks over time, newer than `since` and between the two times of `time_range`."""
    tail, timeline = folders.open(run)
    labels = {
        str(rank["rank"]): str(rank.get("label") or "")[:80]
        for rank in planned_ranks(tail.record)
        if type(rank.get("rank")) is int
    }
    return {**timeline.to_json(since, time_range), "labels": labels}
