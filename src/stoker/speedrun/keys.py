"""What makes a stage's result this one: its settings, the bytes it reads, the stages it builds on, the code it runs."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import stoker
from stoker.speedrun.stages import REPORT, WORLD, File, Stage
from stoker.training.config.resolve import PASSING
from stoker.training.stages.registry import STAGES
from stoker.training.stages.stage import From

SCHEMA = 1
MEASURED = ("train.eval_tokens",)  # passing where it is looked at on the way, not where it is what a stage is for
SHOWN = 8  # characters of a key in a run's name
ROOT = os.path.dirname(os.path.abspath(stoker.__file__))
# Launching and recording change nothing of what is learned.
PACKAGES = ("training", "speedrun")
_NAMES = re.compile(r"\bstoker((?:\.[A-Za-z_]\w*)+)")
_IMPORTED = re.compile(r"\bfrom\s+stoker((?:\.\w+)*)\s+import\s+(\([^)]*\)|[^\n#]+)")
_OWN = {WORLD: "training.world.make", REPORT: "speedrun.report"}


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


def _module(stage: str) -> str:
    """Without the package's own name; empty of a script, whose own bytes are looked at."""
    known = STAGES.get(stage)
    if stage in _OWN or known is None:
        return _OWN.get(stage, f"training.recipes.{stage}")
    return "" if known.is_script else known.recipe.removeprefix("stoker.")


def _script(stage: str) -> str:
    """Of a stage that is a file of its own."""
    known = STAGES.get(stage)
    if known is None or not known.is_script:
        return ""
    with open(known.recipe, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


class Code:
    """The version of a stage's code: a digest of its recipe's source and of all of Stoker that this imports. Found by
    reading, not by importing: no torch. Everything is read once: a finished speedrun shall say so at once.
    """

    def __init__(self, root: str = ROOT) -> None:
        self._root = root
        self.digest, self._read, self._file = cache(self._digest), cache(self._read_file), cache(self._file_of)

    def _digest(self, recipe: str) -> str:
        """Everything of `training` where there is no such recipe: rather too much is run again than too little."""
        start = self._file(_module(recipe))
        found = self._reached(start) if start is not None else self._all("training")
        text = "".join(f"{path}\0{self._read(path)[0]}\n" for path in sorted(found)) + _script(recipe)
        return hashlib.sha256(text.encode()).hexdigest()

    def _reached(self, first: str) -> set[str]:
        found = {first}
        waiting = [first]
        while waiting:
            fresh = self._read(waiting.pop())[1] - found
            found |= fresh
            waiting += fresh
        return found

    def _read_file(self, path: str) -> tuple[str, set[str]]:
        """A file's digest, and the files that its imports name, wherever in it they stand."""
        with open(os.path.join(self._root, path), "rb") as file:
            data = file.read()
        text = data.decode("utf-8", "replace")
        names = {name[1:] for name in _NAMES.findall(text)}
        for package, words in _IMPORTED.findall(text):
            names |= {f"{package}.{word}"[1:] for word in re.findall(r"\w+", words)}
        return hashlib.sha256(data).hexdigest(), {found for name in names if (found := self._file(name)) is not None}

    def _all(self, package: str) -> set[str]:
        return {
            os.path.relpath(os.path.join(place, name), self._root)
            for place, _, names in os.walk(os.path.join(self._root, package))
            for name in names
            if name.endswith(".py")
        }

    def _file_of(self, module: str) -> str | None:
        """Of a module, or of the one that a name is inside of; None outside the packages that matter."""
        if not module or module.partition(".")[0] not in PACKAGES:
            return None
        base = module.replace(".", "/")
        own = (path for path in (f"{base}.py", f"{base}/__init__.py") if os.path.isfile(os.path.join(self._root, path)))
        return next(own, None) or self._file(module.rpartition(".")[0])
