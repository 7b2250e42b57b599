"""`--set [STAGE:]KEY=VALUE`: which stages a setting reaches. Pure but for a look at files that are named."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from stoker.contract.names import EX_USAGE, Refusal
from stoker.contract.settings import suggest
from stoker.contract.shape import replace, shape
from stoker.speedrun.stages import REPORT, WORLD, File, Stage
from stoker.training.config.keys import BARE, KEYS
from stoker.training.stages.registry import STAGES

# These differ from stage to stage: one value for all would cut the chain.
_OF_ONE_STAGE = ("model.load", "data.path", "data.validation", "data.kind", "tokenizer.path")
PATHS = (
    *(name for name, key in KEYS.items() if key.spec.metavar in ("PATH", "DIR", "WHERE") and name != "data.cache"),
    "data.validation",
)
_WORLD: dict[str, Callable[[str], Any]] = {"level": int, "size": float, "seed": int}


@shape
class Override:
    said: str  # as it was typed
    stage: str  # a stage's or a recipe's name; empty: all that care
    key: str
    value: Any


def parse(text: str, stages: Sequence[Stage]) -> Override:
    name, sign, value = text.partition("=")
    stage, colon, key = name.strip().rpartition(":")
    if not sign or not key:
        raise Refusal(f"--set {text}: write it KEY=VALUE or STAGE:KEY=VALUE", EX_USAGE)
    known = list(dict.fromkeys(word for one in stages if one.name != REPORT for word in (one.name, one.stage)))
    if colon and stage not in known:
        raise Refusal(
            f"--set {text}: no stage {stage!r}{suggest(stage, known)}; there are {', '.join(known)}", EX_USAGE
        )
    if stage == WORLD:
        return Override(text, stage, key, _of_world(text, key, value))
    dotted = BARE.get(key.replace("-", "_"), key)
    if dotted not in KEYS:
        raise Refusal(f"--set {text}: no key {key!r}{suggest(key, KEYS)}", EX_USAGE)
    if not stage and dotted in _OF_ONE_STAGE:
        raise Refusal(
            f"--set {text}: {dotted} is another one in each stage; say in which: --set sft:{dotted}={value}", EX_USAGE
        )
    try:
        many = KEYS[dotted].spec.many
        return Override(
            text, stage, dotted, KEYS[dotted].read([part for part in value.split(",") if part] if many else value)
        )
    except ValueError as problem:
        raise Refusal(f"--set {text}: {problem}", EX_USAGE) from problem


def _of_world(text: str, key: str, value: str) -> Any:
    if key not in _WORLD:
        raise Refusal(f"--set {text}: the world has {', '.join(_WORLD)}, no {key!r}", EX_USAGE)
    try:
        return _WORLD[key](value)
    except ValueError as problem:
        raise Refusal(f"--set {text}: {value!r} is not a number", EX_USAGE) from problem


def apply(stages: Sequence[Stage], overrides: Sequence[Override], digest: Callable[[str], str]) -> tuple[Stage, ...]:
    """`digest`: of a file or folder that a value names, so that other bytes make another stage."""

    def reaches(override: Override, stage: Stage) -> bool:
        if override.stage:
            return override.stage in (stage.name, stage.stage)
        kind = STAGES.get(stage.stage)
        return kind is not None and override.key.partition(".")[0] in kind.sections

    found = tuple(stages)
    for override in overrides:
        value = _known(override, digest)
        reached = [stage.name for stage in found if reaches(override, stage)]
        if not reached:
            raise Refusal(
                f"--set {override.said}: no stage has a use for {override.key}; say which one shall get it:"
                f" STAGE:{override.key}=…",
                EX_USAGE,
            )
        found = tuple(
            replace(stage, keys={**stage.keys, override.key: value}) if stage.name in reached else stage
            for stage in found
        )
    return found


def _known(override: Override, digest: Callable[[str], str]) -> Any:
    def one(item: Any) -> Any:
        if not isinstance(item, str):
            return item
        if os.path.exists(item):
            return File(os.path.abspath(item), digest(item))
        matching = sorted(glob.glob(item, recursive=True))
        return (
            File(
                os.path.abspath(item),
                hashlib.sha256(repr([(one, digest(one)) for one in matching]).encode()).hexdigest(),
            )
            if matching
            else item
        )

    if override.key not in PATHS:
        return override.value
    return tuple(one(item) for item in override.value) if isinstance(override.value, tuple) else one(override.value)
