"""The chain as data: what each stage is given, and by that what it depends on. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker.contract.names import EX_USAGE, Refusal
from stoker.contract.settings import suggest
from stoker.contract.shape import replace, shape
from stoker.speedrun.presets import Preset
from stoker.training.config.keys import KEYS


@shape
class From:
    """A path in another stage's run directory."""

    stage: str
    path: str


@shape
class File:
    """A file or folder of the user's, known by its bytes."""

    path: str
    digest: str
    name: str = ""  # of the task it is, where the path does not say it

    @property
    def word(self) -> str:
        return f"{self.name}={self.path}" if self.name else self.path


Place = From | File


@shape
class Data:
    """Where each role's rows come from: base, midtrain, sft, pairs, prompts, questions, and their `-held-out`."""

    places: Mapping[str, tuple[Place, ...]]
    lines: tuple[str, ...] = ()  # to be said

    def one(self, role: str) -> Place | None:
        found = self.places.get(role, ())
        return found[0] if found else None

    @property
    def uses_world(self) -> bool:
        return any(isinstance(place, From) for found in self.places.values() for place in found)


@shape
class Stage:
    name: str
    stage: str  # the recipe: `stoker train STAGE`; world and report are the speedrun's own
    keys: Mapping[str, Any]  # values may be places
    outputs: tuple[str, ...] = ()  # what others may take from its run directory
    below: str = ""  # the preset of `stoker train` it lies on

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(_places(self.keys.values()))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The stages it depends on, in the order they are named."""
        return tuple(dict.fromkeys(place.stage for place in self.places if isinstance(place, From)))


WORLD, REPORT = "world", "report"
FILES = {
    "base": "base.jsonl", "base-held-out": "base-held-out.jsonl", "midtrain": "midtrain.jsonl", "midtrain-held-out": "midtrain-held-out.jsonl",
    "sft": "sft.jsonl", "sft-held-out": "sft-held-out.jsonl", "pairs": "pairs.jsonl", "pairs-held-out": "pairs-held-out.jsonl", "prompts": "prompts.jsonl",
    "prompts-held-out": "prompts-held-out.jsonl", "questions": "questions.jsonl",
}  # fmt: skip
OUR_WORLD = Data({role: (From(WORLD, file),) for role, file in FILES.items()})
SHARE_HELD_OUT = "0.01"
PROMPTS = "prompts-held-out"  # the task that GRPO is measured by

_RUNS = frozenset(("data", "batch", "parallel", "compute", "train"))
_LEARNS = _RUNS | {"optim", "checkpoint", "nan"}
# The sections of the config that a recipe has a use for: what is set for all stages reaches these, and re-runs no
# other.
CARES: dict[str, frozenset[str]] = {
    "tokenizer": frozenset(("tokenizer",)), "pretrain": _LEARNS | {"model"}, "midtrain": _LEARNS, "sft": _LEARNS, "reward": _LEARNS | {"reward"},
    "density": _RUNS | {"density"}, "grpo": _LEARNS | {"generate", "grpo"}, "evaluate": _RUNS | {"generate", "evaluate"},
    "diversity": _RUNS | {"generate", "diversity"},
}  # fmt: skip


def chain(preset: Preset, data: Data, seed: int) -> tuple[Stage, ...]:
    """In the order they run; each stage's inputs stand before it."""

    def stage(name: str, recipe: str, given: Mapping[str, Any], *outputs: str) -> Stage:
        keys: dict[str, Any] = {
            key: value for key, value in preset.keys.get("all", {}).items() if key.partition(".")[0] in CARES[recipe]
        }
        keys |= {**preset.keys.get(recipe, {}), **preset.keys.get(name, {})}
        if "train" in CARES[recipe]:
            keys |= {"train.seed": seed, "data.seed": seed}
        keys |= {key: value for key, value in given.items() if value not in (None, ())}
        return Stage(name, recipe, {key: canonical(key, value) for key, value in keys.items()}, outputs, preset.below)

    def evaluation(of: str) -> Stage:
        tasks = (
            *data.places.get("questions", ()),
            *(_called(PROMPTS, place) for place in data.places.get(PROMPTS, ())),
        )
        asked = {"model.load": From(of, "hf"), "evaluate.tasks": tasks, "evaluate.texts": data.one("base-held-out")}
        return stage(f"eval-{of}", "evaluate", asked, "completions.jsonl")

    def chats(role: str) -> dict[str, Any]:
        return {
            "data.kind": "chat",
            "data.path": data.places[role],
            "data.validation": data.one(f"{role}-held-out") or SHARE_HELD_OUT,
        }

    text = {"data.path": data.places["base"], "data.validation": data.one("base-held-out") or SHARE_HELD_OUT}
    prompts = data.one("prompts")
    learned = {"model.load": From("sft", "hf"), "grpo.prompts": prompts, "grpo.reward_model": From("reward", "hf")}
    world = Stage(WORLD, WORLD, {"level": preset.level, "size": preset.size, "seed": seed}, tuple(FILES.values()))
    found = [
        *([world] if data.uses_world else []),
        stage("tokenizer", "tokenizer", text, "tokenizer"),
        stage("base", "pretrain", {**text, "tokenizer.path": From("tokenizer", "tokenizer")}, "hf"),
        evaluation("base"),
        stage("midtrain", "midtrain", {"model.load": From("base", "hf"), **chats("midtrain")}, "hf"),
        evaluation("midtrain"),
        stage("sft", "sft", {"model.load": From("midtrain", "hf"), **chats("sft")}, "hf"),
        evaluation("sft"),
        stage(
            "reward",
            "reward",
            {
                "model.load": From("sft", "hf"),
                "reward.pairs": data.one("pairs"),
                "reward.held_out": data.one("pairs-held-out"),
            },
            "hf",
        ),
        stage("density", "density", {"model.load": From("sft", "hf"), "density.prompts": prompts}, "weights.jsonl"),
        stage("grpo-uniform", "grpo", learned, "hf"),
        evaluation("grpo-uniform"),
        stage("grpo-density", "grpo", {**learned, "grpo.weights": From("density", "weights.jsonl")}, "hf"),
        evaluation("grpo-density"),
        stage(
            "diversity",
            "diversity",
            {
                "model.load": From("sft", "hf"),
                "diversity.prompts": prompts,
                "diversity.baseline": From("grpo-uniform", "hf"),
                "diversity.compared": From("grpo-density", "hf"),
            },
            "diversity_report.md",
        ),
    ]
    return (
        *found,
        Stage(
            REPORT,
            REPORT,
            {"stages": tuple(From(one.name, "result.json") for one in found)},
            ("report.md", "report.html"),
        ),
    )


def _called(name: str, place: Place) -> Place:
    """A task's name is its file's, which may be any that plays the role."""
    own = os.path.splitext(os.path.basename(place.path))[0]
    return place if isinstance(place, From) or own == name else replace(place, name=name)


def canonical(key: str, value: Any) -> Any:
    """1e-3 and 0.001 are one value, whoever wrote it; places stay what they are."""
    if isinstance(value, (From, File)) or (
        isinstance(value, tuple) and any(isinstance(item, (From, File)) for item in value)
    ):
        return value
    return KEYS[key].read(value)


def selected(stages: Sequence[Stage], begin: str | None, until: str | None, only: str | None) -> tuple[str, ...]:
    names = [stage.name for stage in stages]
    for flag, name in (("--from", begin), ("--until", until), ("--only", only)):
        if name is not None and name not in names:
            raise Refusal(
                f"{flag}: no stage {name!r}{suggest(name, names)}; the stages are {', '.join(names)}", EX_USAGE
            )
    if only is not None:
        if begin is not None or until is not None:
            raise Refusal(
                f"--only {only} and {'--from' if begin is not None else '--until'} exclude each other: leave one of"
                " them out",
                EX_USAGE,
            )
        return (only,)
    low, high = names.index(begin) if begin else 0, names.index(until) if until else len(names) - 1
    if low > high:
        raise Refusal(f"--from {begin} comes after --until {until}; the order is {', '.join(names)}", EX_USAGE)
    return tuple(names[low : high + 1])


def dependents(stages: Sequence[Stage], name: str) -> set[str]:
    """All that can't be without it; the report can."""
    found = {name}
    for stage in stages:
        if stage.name != REPORT and found & set(stage.inputs):
            found.add(stage.name)
    return found - {name}


def _places(values: Any) -> Iterator[Place]:
    for value in values:
        if isinstance(value, (From, File)):
            yield value
        elif isinstance(value, tuple):
            yield from _places(value)
