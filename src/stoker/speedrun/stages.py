"""The chain as data: what each stage is given, and by that what it depends on. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.options import suggest
from stoker.speedrun.presets import Preset
from stoker.training.config.keys import KEYS, config_of
from stoker.training.config.resolve import combine
from stoker.training.config.schema import Config
from stoker.training.stages.registry import STAGES, links
from stoker.training.stages.stage import From, Link, Rows
from stoker.training.stages.stage import Stage as Kind


@frozen
class File:
    """A file or folder of the user's, known by its bytes."""

    path: str
    digest: str
    name: str = ""  # of the task it is, where the path does not say it

    @property
    def word(self) -> str:
        return f"{self.name}={self.path}" if self.name else self.path


Place = From | File


@frozen
class Data:
    """Where each role's rows come from: base, midtrain, sft, pairs, prompts, questions, and their `-held-out`."""

    places: Mapping[str, tuple[Place, ...]]
    lines: tuple[str, ...] = ()  # to be said

    def given(self, value: Any) -> Any:
        """What a link's value is with this data; None or nothing where there is none."""
        if isinstance(value, tuple):
            return tuple(place for item in value for place in (self.given(item) or ()))
        if not isinstance(value, Rows):
            return value
        found = tuple(_called(value.task, place) if value.task else place for place in self.places.get(value.role, ()))
        return found if value.many else next(iter(found), value.otherwise)

    @property
    def uses_world(self) -> bool:
        return any(isinstance(place, From) for found in self.places.values() for place in found)


@frozen
class Stage:
    name: str
    stage: str  # as in `stoker train STAGE`; world and report are the chain's own
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
_HALVED = ("base", "midtrain", "sft", "pairs", "prompts")  # roles that have a held-out half
FILES = {role: f"{role}.jsonl" for kind in _HALVED for role in (kind, f"{kind}-held-out")}
FILES["questions"] = "questions.jsonl"
OUR_WORLD = Data({role: (From(WORLD, file),) for role, file in FILES.items()})


def chain(preset: Preset, data: Data, seed: int) -> tuple[Stage, ...]:
    """In the order they run; each stage's inputs stand before it."""
    world = Stage(WORLD, WORLD, {"level": preset.level, "size": preset.size, "seed": seed}, tuple(FILES.values()))
    found = [
        *([world] if data.uses_world else []),
        *(_linked(link, kind, preset, data, seed) for link, kind in links()),
    ]
    results = tuple(From(stage.name, "result.json") for stage in found)
    return (*found, Stage(REPORT, REPORT, {"stages": results}, ("report.md", "report.html")))


def _linked(link: Link, kind: Kind, preset: Preset, data: Data, seed: int) -> Stage:
    """Later wins: the preset's keys for all, for this kind of stage, for this link; what the link is given."""
    keys: dict[str, Any] = {
        key: value for key, value in preset.keys.get("all", {}).items() if key.partition(".")[0] in kind.sections
    }
    keys |= {**preset.keys.get(kind.name, {}), **preset.keys.get(link.name, {})}
    if "train" in kind.sections:
        keys |= {"train.seed": seed, "data.seed": seed}
    keys |= {key: given for key, value in link.keys.items() if (given := data.given(value)) not in (None, ())}
    told = {key: canonical(key, value) for key, value in keys.items()}
    return Stage(link.name, kind.name, told, kind.outputs, preset.below)


def config_of_stage(
    stage: Stage, path: Callable[[Place], str] = lambda place: place.word if isinstance(place, File) else place.path
) -> Config:
    """The configuration that its recipe will have. `path`: where a place is."""

    def plain(value: Any) -> Any:
        if isinstance(value, (From, File)):
            return path(value)
        return tuple(plain(item) for item in value) if isinstance(value, tuple) else value

    given = {key: plain(value) for key, value in stage.keys.items()}
    return config_of(stage.below, combine(stage.below, [STAGES[stage.stage].defaults, given]))


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
