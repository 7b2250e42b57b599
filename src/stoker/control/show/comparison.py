"""Compares runs: which settings differ, what they reached at the same step, and whether a difference is more than noise."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract.frozen import frozen
from stoker.contract.safe_io import open_below
from stoker.contract.text import escape
from stoker.control.record import run_record
from stoker.control.show.charts import mean
from stoker.control.show.curves import Curve

_CONFIG = "config.yaml"  # every config key of a run that trains
COMPARED_SHARE = 0.2  # only the last fifth of the steps that both runs have made is compared
PART_COUNT = 10  # these steps are cut into ten parts of equal length
_MIN_PART_COUNT = 5  # noise is judged only if at least five parts hold points of both runs
# Quantiles of Student's t for a two-sided 95 % interval, by degrees of freedom (parts - 1).
_T_95 = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
_MAX_COMPARED_VALUE = 1e150  # larger values are omitted because their squares would overflow
_RECIPES = "stoker.training.recipes."  # run.json has a stage as this package and its name
_DIGEST_CHARACTERS = 12  # shown of a digest
_NOT_SETTINGS = ("checkpoint.folder", "run.name", "name")  # keys that name or locate a run do not affect training


@frozen
class Difference:
    """The mean of the second run minus that of the first, over the last steps that both have made."""

    first_step: int
    last_step: int
    first: float  # mean of the first run's metric over these steps
    second: float
    difference: float
    low: float | None = None  # 95 % interval; None if there are too few points to judge
    high: float | None = None
    parts: int = 0  # number of parts that hold points of both runs

    @property
    def is_beyond_noise(self) -> bool:
        """True if the difference is more than noise: 0 lies outside the interval."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def measure_difference(first: Curve, second: Curve) -> Difference | None:
    """Return the difference of two runs in a metric, or None if their ranges of steps don't overlap.

    The last fifth of the steps that both have made is cut into ten parts, and the ten differences between the runs' means
    give a t interval. Means of parts are compared because neighboring losses are not independent, and part by part because
    the same data in the same order moves both runs alike.
    """
    points = [
        [
            (step, value)
            for step, value in zip(curve.steps, curve.values, strict=True)
            if abs(value) <= _MAX_COMPARED_VALUE
        ]
        for curve in (first, second)
    ]
    if not points[0] or not points[1]:
        return None
    last = min(points[0][-1][0], points[1][-1][0])
    begin = max(points[0][0][0], points[1][0][0])
    if last < begin:
        return None
    since = last - (last - begin) * COMPARED_SHARE
    compared = [[(step, value) for step, value in run if since <= step <= last] for run in points]
    first_mean, second_mean = (mean([value for _, value in run]) for run in compared)
    if first_mean is None or second_mean is None:
        return None
    differences = []
    for part in range(PART_COUNT):
        low, high = (since + (last - since) * edge / PART_COUNT for edge in (part, part + 1))
        is_last = part == PART_COUNT - 1
        part_means = [
            mean([value for step, value in run if low <= step < high or (is_last and step == last)]) for run in compared
        ]
        if part_means[0] is not None and part_means[1] is not None:
            differences.append(part_means[1] - part_means[0])
    first_step, count = math.ceil(since), len(differences)
    if count < _MIN_PART_COUNT:
        return Difference(first_step, last, first_mean, second_mean, second_mean - first_mean, parts=count)
    center = math.fsum(differences) / count
    deviation = math.sqrt(math.fsum((difference - center) ** 2 for difference in differences) / (count - 1))
    margin = _T_95[count - 1] * deviation / math.sqrt(count)
    return Difference(first_step, last, first_mean, second_mean, center, center - margin, center + margin, count)


def find_last_common_step(curves: Sequence[Curve]) -> tuple[int, list[float]] | None:
    """Return the last step at which all curves have a finite value, with these values, or None."""
    by_step = [
        {step: value for step, value in zip(curve.steps, curve.values, strict=True) if math.isfinite(value)}
        for curve in curves
    ]
    steps = set.intersection(*map(set, by_step)) if by_step else set()
    return (max(steps), [values[max(steps)] for values in by_step]) if steps else None


def settings_of(run: run_record.RunRecord) -> dict[str, str]:
    """Return a run's settings as text, by dotted name: its config or command, digests of its files, versions, and GPUs."""
    settings = {name: value for name, value in _read_config(run.dir).items() if name not in _NOT_SETTINGS}
    data = run.data
    if settings:
        settings["stage"] = str(data.get("script")).removeprefix(_RECIPES)
    else:
        settings["command"] = " ".join(map(str, [data.get("script"), *_as_list(data.get("args"))]))
        request = data.get("request") or {}
        settings |= {f"run.{name}": _as_text(value) for name, value in request.items() if name != "name"}
    settings |= _read_digests(data, settings)
    plan, versions = data.get("plan") or {}, data.get("versions") or {}
    settings["ranks"] = _as_text(plan.get("world_size"))
    settings |= {f"version.{name}": _as_text(value) for name, value in versions.items()}
    settings["git"] = _as_text(data.get("git"))
    gpu_names = [
        gpu.get("name")
        for machine in (data.get("hosts") or {}).values()
        if isinstance(machine, dict)
        for gpu in _as_list(machine.get("gpus"))
        if isinstance(gpu, dict)
    ]
    settings["gpus"] = ", ".join(sorted({f"{gpu_names.count(name)}x {name}" for name in gpu_names})) or "none"
    return {name: escape(value, 200) for name, value in settings.items()}


def _read_digests(data: Mapping[str, Any], settings: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of the files that the run read, by setting, because a file may change while its name does not."""
    digests: dict[str, list[str]] = {}
    for pair in _as_list(data.get("contents")):
        if not isinstance(pair, list) or len(pair) != 2:
            continue
        label = str(pair[0])
        name = label.partition(" ")[0]  # "dpo.pairs pairs.jsonl"
        if label == data.get("script"):
            name = "script"
        elif name not in settings:
            name = label.replace(f" that {data.get('script')} imports", "")
        digests.setdefault(f"digest of {name}", []).append(str(pair[1])[:_DIGEST_CHARACTERS])
    return {name: ", ".join(values) for name, values in digests.items()}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read_config(run_dir: str) -> dict[str, str]:
    """Return the run's config by dotted name, or {} if it has no readable config."""
    from stoker.contract.yaml_text import YamlError, parse_yaml

    try:
        with os.fdopen(open_below(run_dir, _CONFIG), "rb") as file:
            data = parse_yaml(file.read().decode("utf-8", "replace"))
    except (OSError, YamlError):
        return {}
    return _flatten(data) if isinstance(data, dict) else {}


def _flatten(data: Mapping[Any, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in data.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = _as_text(value)
    return flat


def _as_text(value: Any) -> str:
    if value is None:
        return "n/a"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def find_differing_settings(settings: Sequence[Mapping[str, str]]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the settings that are not the same in all runs, as (name, value in each run)."""
    names = dict.fromkeys(name for run in settings for name in run)
    rows = [(name, tuple(run.get(name, "n/a") for run in settings)) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]
