"""Two runs side by side: settings that differ, results, and whether the difference of their losses is more than noise."""

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

CONFIG = "config.yaml"  # of a run that trains: every key
PART = 0.2  # of the steps both have made, at the end: what is compared
PARTS = 10  # it is cut into
FEWEST = 5  # of them that must hold points of both
# Student's t, two-sided 95 %, by degrees of freedom.
_T = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
_LARGEST = 1e150  # of a value that is compared: the squares of these are numbers, too
_RECIPES = "stoker.training.recipes."  # the module of a stage's program
_DIGEST = 12  # characters of a digest that are shown
# Where a run is, and what it derives from that: no settings.
_LEFT_OUT = ("checkpoint.folder", "run.name", "name")


@frozen
class Difference:
    """Of the difference second - first, over the last steps that both have made."""

    first_step: int
    last_step: int
    first: float  # mean of the first run's metric there
    second: float
    difference: float
    low: float | None = None  # 95 % interval; None: too few points to judge
    high: float | None = None
    parts: int = 0

    @property
    def tested(self) -> bool:
        return self.low is not None

    @property
    def beyond(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def measure_difference(first: Curve, second: Curve) -> Difference | None:
    """None where they have no steps in common.

    The last fifth of the steps that both have made is cut into ten parts of equal length. Each gives the difference of the
    two means; ten differences give a t interval. Means of parts, because neighbouring losses are not independent;
    differences, because the same data in the same order moves both runs alike.
    """
    known = [
        [(step, value) for step, value in zip(curve.steps, curve.values, strict=True) if abs(value) <= _LARGEST]
        for curve in (first, second)
    ]
    if not known[0] or not known[1]:
        return None
    last = min(known[0][-1][0], known[1][-1][0])
    begin = max(known[0][0][0], known[1][0][0])
    if last < begin:
        return None
    since = last - (last - begin) * PART
    chosen = [[(step, value) for step, value in points if since <= step <= last] for points in known]
    means = [mean([value for _, value in points]) for points in chosen]
    if means[0] is None or means[1] is None:
        return None
    differences = []
    for part in range(PARTS):
        low, high = (since + (last - since) * at / PARTS for at in (part, part + 1))
        inside = [
            mean([value for step, value in points if low <= step < high or (part == PARTS - 1 and step == last)])
            for points in chosen
        ]
        if inside[0] is not None and inside[1] is not None:
            differences.append(inside[1] - inside[0])
    found = Difference(math.ceil(since), last, means[0], means[1], means[1] - means[0], parts=len(differences))
    if len(differences) < FEWEST:
        return found
    centre = math.fsum(differences) / len(differences)
    spread = math.sqrt(math.fsum((one - centre) ** 2 for one in differences) / (len(differences) - 1))
    reach = _T[len(differences) - 1] * spread / math.sqrt(len(differences))
    return Difference(
        found.first_step, last, means[0], means[1], centre, centre - reach, centre + reach, len(differences)
    )


def at_equal_step(curves: Sequence[Curve]) -> tuple[int, list[float]] | None:
    """Return the last step for which all curves have a finite value, and these values; None if there is no such step."""
    known = [
        {step: value for step, value in zip(curve.steps, curve.values, strict=True) if math.isfinite(value)}
        for curve in curves
    ]
    steps = set.intersection(*map(set, known)) if known else set()
    return (max(steps), [values[max(steps)] for values in known]) if steps else None


def settings_of(run: run_record.RunRecord) -> dict[str, str]:
    """Return dotted name -> value as text: the keys of a run that trains, else its command; its files; its machine."""
    found = {name: value for name, value in _config(run.dir).items() if name not in _LEFT_OUT}
    data = run.data
    if found:
        found["stage"] = str(data.get("script")).removeprefix(_RECIPES)
    else:
        found["command"] = " ".join(map(str, [data.get("script"), *_listed(data.get("args"))]))
        request = data.get("request") or {}
        found |= {f"run.{name}": _text(value) for name, value in request.items() if name != "name"}
    found |= _digests(data, found)
    plan, versions = data.get("plan") or {}, data.get("versions") or {}
    found["ranks"] = _text(plan.get("world_size"))
    found |= {f"version.{name}": _text(value) for name, value in versions.items()}
    found["git"] = _text(data.get("git"))
    cards = [
        gpu.get("name")
        for machine in (data.get("hosts") or {}).values()
        if isinstance(machine, dict)
        for gpu in _listed(machine.get("gpus"))
        if isinstance(gpu, dict)
    ]
    found["gpus"] = ", ".join(sorted({f"{cards.count(name)}x {name}" for name in cards})) or "none"
    return {name: escape(value, 200) for name, value in found.items()}


def _digests(data: Mapping[str, Any], settings: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of the files that the run read, by the setting that names them: the file may have changed."""
    digests: dict[str, list[str]] = {}
    for pair in _listed(data.get("contents")):
        if not isinstance(pair, list) or len(pair) != 2:
            continue
        label = str(pair[0])
        name = label.partition(" ")[0]  # "dpo.pairs pairs.jsonl"
        if label == data.get("script"):
            name = "script"
        elif name not in settings:
            name = label.replace(f" that {data.get('script')} imports", "")
        digests.setdefault(f"digest of {name}", []).append(str(pair[1])[:_DIGEST])
    return {name: ", ".join(values) for name, values in digests.items()}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _config(run_dir: str) -> dict[str, str]:
    from stoker.contract.yaml_text import YamlError, parse_yaml

    try:
        with os.fdopen(open_below(run_dir, CONFIG), "rb") as file:
            data = parse_yaml(file.read().decode("utf-8", "replace"))
    except (OSError, YamlError):
        return {}
    return dict(_flat(data)) if isinstance(data, dict) else {}


def _flat(data: Mapping[Any, Any], before: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in data.items():
        if isinstance(value, dict):
            found += _flat(value, f"{before}{name}.")
        else:
            found.append((f"{before}{name}", _text(value)))
    return found


def _text(value: Any) -> str:
    if value is None:
        return "n/a"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def differing_settings(settings: Sequence[Mapping[str, str]]) -> list[tuple[str, tuple[str, ...]]]:
    """(name, value of each run), of those that are not the same in all."""
    names = dict.fromkeys(name for one in settings for name in one)
    rows = [(name, tuple(one.get(name, "n/a") for one in settings)) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]
