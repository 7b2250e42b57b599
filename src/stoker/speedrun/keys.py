"""What makes a stage's result this one: its settings, the bytes it reads, the stages it builds on, the code it runs.
Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker.speedrun.stages import File, Stage
from stoker.training.config.lasting import PASSING
from stoker.training.stages.registry import STAGES
from stoker.training.stages.stage import From

SCHEMA = 1
MEASURED = ("train.eval_tokens",)  # passing where it is looked at on the way, not where it is what a stage is for
SHOWN = 8  # characters of a key in a run's name


def keys_of(stages: Sequence[Stage], code: Callable[[str], str]) -> dict[str, str]:
    """Stage -> key. `code`: a recipe's name -> digest of its source."""
    found: dict[str, str] = {}
    for stage in stages:
        told = {
            name: _meant(value, found)
            for name, value in stage.keys.items()
            if name not in PASSING or (name in MEASURED and stage.stage in STAGES and STAGES[stage.stage].measures)
        }
        text = json.dumps([SCHEMA, stage.stage, stage.below, told, code(stage.stage)], sort_keys=True)
        found[stage.name] = hashlib.sha256(text.encode()).hexdigest()
    return found


def run_name(stage: str, keys: Mapping[str, str]) -> str:
    return f"{stage}-{keys[stage][:SHOWN]}"


def _meant(value: Any, keys: Mapping[str, str]) -> Any:
    if isinstance(value, From):
        return {"from": keys[value.stage], "path": value.path}
    if isinstance(value, File):
        return {"bytes": value.digest, **({"name": value.name} if value.name else {})}
    return [_meant(item, keys) for item in value] if isinstance(value, tuple) else value
