"""What makes a stage's result this one: its settings, the bytes it reads, the stages it builds on, the code it runs.
Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker.speedrun.stages import File, From, Stage
from stoker.training.config.lasting import PASSING

SCHEMA = 1
_MEASURED = {
    ("evaluate", "train.eval_tokens")
}  # passing where it is looked at on the way, not where it is what a stage is for
SHOWN = 8  # characters of a key in a run's name


def keys_of(stages: Sequence[Stage], code: Callable[[str], str]) -> dict[str, str]:
    """Stage -> key. `code`: a recipe's name -> digest of its source."""
    found: dict[str, str] = {}
    for stage in stages:
        told = {
            name: _meant(value, found)
            for name, value in stage.keys.items()
            if name not in PASSING or (stage.stage, name) in _MEASURED
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
