"""All stages by name: those of this folder, and those of the files that STOKER_STAGES names."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping

from stoker.contract.errors import EX_CONFIG, Refusal
from stoker.contract.frozen import replace
from stoker.training.config.derived import Learning
from stoker.training.config.schema import SECTIONS
from stoker.training.stages.stage import RUNS, Link, Stage

VARIABLE = "STOKER_STAGES"  # paths, separated as in PATH
RESERVED = ("all", "report", "world")  # the chain's own
_BUILT_IN = ("supervised", "reward", "density", "grpo", "evaluate", "diversity")
# Sections that stages read which train, and the keys people set most, first in --help.
_LEARNS = frozenset(("optim", "checkpoint", "nan"))
_RUN_KEYS = ("compute.dtype", "train.seed")
_LEARN_KEYS = (
    "train.max_steps", "train.epochs", "optim.learning_rate", "optim.schedule", "batch.tokens", "batch.micro",
    "data.context_length", "train.eval_every", "train.log_to", "checkpoint.every", "checkpoint.resume", "parallel.strategy",
)  # fmt: skip
_NEEDED = ("name", "about", "recipe", "sections")


class Registry(Mapping[str, Stage]):
    """Loaded when it is first asked: a stage that can't be is a refusal of the command, not of an import."""

    def __init__(self) -> None:
        self._found: dict[str, Stage] | None = None

    def __getitem__(self, name: str) -> Stage:
        return self._stages()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stages())

    def __len__(self) -> int:
        return len(self._stages())

    def _stages(self) -> dict[str, Stage]:
        if self._found is None:
            self._found = load(os.environ.get(VARIABLE, ""))
        return self._found


def load(paths: str) -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    for name in _BUILT_IN:
        module = importlib.import_module(f"stoker.training.stages.{name}")
        for stage in vars(module).get("STAGES") or (module.STAGE,):
            register(found, _completed(stage), module.__file__ or name)
    for path in (os.path.abspath(path) for path in paths.split(os.pathsep) if path):
        register(found, _from_file(path), path)
    return found


def _completed(stage: Stage) -> Stage:
    """With what all built-in stages share, or all of them that train."""
    sections, keys = stage.sections, (*stage.inputs, *stage.common)
    if not stage.one_process:
        sections |= RUNS | (_LEARNS if stage.learning else frozenset())
        asks = stage.learning is not None and stage.learning.prompts
        learns = [key for key in _LEARN_KEYS if key != "batch.tokens" or not asks] if stage.learning else []
        keys = (*keys, *learns, *_RUN_KEYS)
    return replace(stage, recipe=f"stoker.training.recipes.{stage.name}", sections=sections, common=keys)


def register(found: dict[str, Stage], stage: object, source: str) -> None:
    if not isinstance(stage, Stage):
        raise _wrong(source, "it defines no STAGE = Stage(...)")
    missing = [field for field in _NEEDED if not getattr(stage, field)]
    if missing:
        raise _wrong(source, f"its stage {stage.name or '(no name)'} lacks {', '.join(missing)}")
    if stage.name in RESERVED:
        raise _wrong(source, f"the name {stage.name} is reserved; give the stage another one")
    if stage.name in found:
        raise _wrong(
            source, f"there is a stage {stage.name} already, in {found[stage.name].source}; rename one of them"
        )
    unknown = sorted(stage.sections - set(SECTIONS))
    if unknown:
        raise _wrong(source, f"its stage {stage.name} reads sections that no configuration has: {', '.join(unknown)}")
    taken = {link.name: other for other in found.values() for link in other.links}
    for link in stage.links:
        if link.name in taken or link.name in RESERVED:
            raise _wrong(source, f"its link {link.name} of the chain is there already; give it another name")
    recipe = os.path.join(os.path.dirname(source), stage.recipe) if stage.is_script else stage.recipe
    found[stage.name] = replace(stage, recipe=recipe, source=source)


def _wrong(source: str, what: str) -> Refusal:
    return Refusal(f"stage file {source}: {what}", EX_CONFIG)


def _from_file(path: str) -> object:
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(f"stoker_stage_{name}", path)
    if spec is None or spec.loader is None:
        raise _wrong(path, "it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Refusal:
        raise
    except Exception as problem:  # whatever the user's file does
        raise _wrong(path, f"it can't be loaded: {type(problem).__name__}: {problem}") from problem
    return getattr(module, "STAGE", None)


STAGES = Registry()


def learning() -> dict[str, Learning]:
    """Of the stages that train."""
    return {name: stage.learning for name, stage in STAGES.items() if stage.learning is not None}


def links() -> list[tuple[Link, Stage]]:
    """The chain: each link behind the one that it follows, evaluations first."""
    known = [(link, stage) for stage in STAGES.values() for link in stage.links]
    names = {link.name for link, _ in known}
    for link, stage in known:
        if link.after and link.after not in names:
            raise _wrong(stage.source, f"its link {link.name} follows {link.after}, which is not in the chain")

    def behind(name: str) -> Iterator[tuple[Link, Stage]]:
        following = [(link, stage) for link, stage in known if link.after == name]
        for link, stage in sorted(following, key=lambda pair: not pair[1].measures):
            yield link, stage
            yield from behind(link.name)

    return list(behind(""))
