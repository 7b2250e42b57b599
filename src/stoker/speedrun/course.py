"""A speedrun, settled: its stages and their keys, which of them are asked for, what is done. Made without starting
anything.
"""

from __future__ import annotations

import glob
import hashlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_CANTCREAT, EX_NOINPUT, EX_USAGE, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.options import suggest
from stoker.contract.terminal import print_text
from stoker.contract.text import is_digits
from stoker.contract.units import format_bytes
from stoker.control.doctor.stale_files import walk
from stoker.control.machine.model import Machine
from stoker.control.record.run_index import CHAIN
from stoker.control.record.run_writer import make_private
from stoker.speedrun.estimate import estimates, pace_of, room
from stoker.speedrun.keys import Code, keys_of
from stoker.speedrun.options import SpeedrunOptions, command
from stoker.speedrun.presets import Preset, choose, what_it_lacks
from stoker.speedrun.stages import OUR_WORLD, REPORT, WORLD, Data, File, Stage, chain, config_of_stage, selected
from stoker.speedrun.state import Entry, check_own, entries, recorded_otherwise
from stoker.training.config.check import check
from stoker.training.config.keys import BARE, KEYS
from stoker.training.config.layers import Origin
from stoker.training.data.ours import own_cache
from stoker.training.stages.estimate import Estimate
from stoker.training.stages.registry import STAGES

# `--set [STAGE:]KEY=VALUE`: which stages a setting reaches. Pure but for a look at files that are named.


# These differ from stage to stage: one value for all would cut the chain.
_OF_ONE_STAGE = ("model.load", "data.path", "data.validation", "data.kind", "tokenizer.path")
PATHS = (
    *(name for name, key in KEYS.items() if key.spec.metavar in ("PATH", "DIR", "WHERE") and name != "data.cache"),
    "data.validation",
)
_WORLD: dict[str, Callable[[str], Any]] = {"level": int, "size": float, "seed": int}


@frozen
class Override:
    said: str  # as it was typed
    stage: str  # a stage's or a recipe's name; empty: all that care
    key: str
    value: Any


def override_of(text: str, stages: Sequence[Stage]) -> Override:
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
        raise Refusal(
            f"--set {text}: the built-in data set has no setting {key!r}; it has {', '.join(_WORLD)}", EX_USAGE
        )
    try:
        return _WORLD[key](value)
    except ValueError as problem:
        raise Refusal(f"--set {text}: {value!r} is not a number", EX_USAGE) from problem


def overridden(
    stages: Sequence[Stage], overrides: Sequence[Override], digest: Callable[[str], str]
) -> tuple[Stage, ...]:
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
                f"--set {override.said}: no stage uses {override.key}; name the stage: STAGE:{override.key}=…",
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


CACHE = "cache"
ENOUGH = 0.8  # of an estimate of disk space: it may be a quarter too high
# for a model this small a second thread adds 60 % (9.2 to 14.6 K tok/s); a second rank should add more, which has not
# been timed
CPU_RANKS = 4
_OR_OF_THE_HUB = ("model.load", "tokenizer.path", "grpo.reward_model", "diversity.baseline", "diversity.compared")
_WRITTEN = ("checkpoint.resume", "checkpoint.folder")  # may be words, or folders that are made


@frozen
class Course:
    folder: str
    preset: Preset
    options: SpeedrunOptions
    machine: Machine
    stages: tuple[Stage, ...]
    keys: Mapping[str, str]
    selected: tuple[str, ...]
    entries: Mapping[str, Entry]
    estimates: Mapping[str, Estimate]
    estimated_for: str  # what hardware
    lines: tuple[str, ...]  # to be said
    prepare: Callable[[], None]  # writes what stages read and is not there yet
    gpus: bool = False  # stages train on them
    nproc_per_node: str | None = None  # of each stage; None: `stoker run` decides
    as_recorded: bool = False  # a report of the chain that chain.json tells of, whatever its settings were
    refused: str = ""  # why a plan could not be run here

    @property
    def finished(self) -> bool:
        return not self.waiting

    @property
    def waiting(self) -> tuple[str, ...]:
        """Asked for and not done."""
        return tuple(name for name in self.selected if not self.entries[name].done)

    def about(self) -> dict[str, Any]:
        """The head of chain.json."""
        cards = [{"index": gpu.index, "name": gpu.name, "memory_total": gpu.memory_total} for gpu in self.machine.gpus]
        box = self.machine
        hardware = {
            "hostname": box.hostname,
            "cores": box.cores,
            "memory_total": box.memory_total,
            "gpus": cards,
            "driver": box.driver,
            "platform": box.platform,
            "python": box.python,
        }
        return {
            "preset": self.preset.name,
            "seed": self.options.seed,
            "hardware": hardware,
            "price_per_hour": self.options.price_per_hour,
        }


def settle(options: SpeedrunOptions, machine: Machine, gpus: bool, environment: Mapping[str, str]) -> Course:
    preset, line = choose(options.preset, gpus)
    lacking = what_it_lacks(preset, gpus, options.data is not None)
    if lacking is not None and not options.plan:  # a plan for another machine may be made anywhere
        raise lacking
    check_options(options)
    if "/" in options.name or options.name in (".", ".."):
        raise Refusal(f"--name {options.name!r} can't be part of a folder's name", EX_USAGE)
    root = layout.runs_root(options.runs_dir, dict(environment), write=True)
    if root == layout.private_runs_root(dict(environment)):
        make_private(root)
    folder = os.path.abspath(os.path.join(root, f"speedrun-{preset.name}{f'-{options.name}' if options.name else ''}"))
    check_own(folder)
    data, prepare = _data(options, folder)
    lacking = what_it_lacks(preset, gpus, any(isinstance(place, File) for place in data.places["base"]))
    if lacking is not None and not options.plan:
        raise lacking
    stages = _with_settings(chain(preset, data, options.seed), options)
    keys = keys_of(stages, Code().digest)
    on_cpu = not (gpus or preset.gpus)
    ranks = _ranks(options.nproc_per_node, min(machine.cores, CPU_RANKS) if on_cpu else len(machine.gpus))
    wanted = selected(stages, options.begin, options.until, options.only)
    found = entries(folder, stages, keys)
    check_stages([stage for stage in stages if stage.name in wanted and not found[stage.name].done], on_cpu)
    pace = pace_of([gpu.name for gpu in machine.gpus], machine.cores, ranks, not on_cpu)
    return Course(
        folder=folder,
        preset=preset,
        options=options,
        machine=machine,
        stages=stages,
        keys=keys,
        selected=wanted,
        entries=found,
        estimates=estimates(stages, pace, ranks),
        estimated_for=f"{ranks} rank{'s' if ranks > 1 else ''}, {pace.words}",
        lines=(line, *data.lines),
        prepare=prepare,
        gpus=not on_cpu,
        nproc_per_node=str(ranks) if on_cpu and options.nproc_per_node is None else options.nproc_per_node,
        as_recorded=options.only == REPORT and not options.says_what and recorded_otherwise(folder, keys),
        refused=lacking.line if lacking else "",
    )


def _data(options: SpeedrunOptions, folder: str) -> tuple[Data, Callable[[], None]]:
    if options.data is None:
        return OUR_WORLD, lambda: None
    from stoker.speedrun.material import material

    return material(options.data, folder, own_cache(CACHE, _say))


def _with_settings(stages: Sequence[Stage], options: SpeedrunOptions) -> tuple[Stage, ...]:
    if not options.set:
        return tuple(stages)
    from stoker.speedrun.material import digest_of

    digest = partial(digest_of, cache=own_cache(CACHE, _say))
    return overridden(stages, [override_of(text, stages) for text in options.set], digest)


def _say(line: str) -> None:
    print_text(line, sys.stderr)


def _ranks(asked: str | None, usual: int) -> int:
    return int(asked) if asked is not None and is_digits(asked) and int(asked) > 0 else max(usual, 1)


def check_options(options: SpeedrunOptions) -> None:
    ranks, price = options.nproc_per_node, options.price_per_hour
    if (
        ranks is not None
        and ranks.strip().lower() not in ("gpu", "cpu", "auto")
        and not (is_digits(ranks) and int(ranks) > 0)
    ):
        raise Refusal(f"--nproc-per-node {ranks}: give a whole number of ranks from 1 up, or gpu, cpu, auto", EX_USAGE)
    if price is not None and not 0 <= price < math.inf:
        raise Refusal(f"--price-per-hour {price:g}: give what an hour costs, from 0 up", EX_USAGE)


def check_stages(stages: Sequence[Stage], on_cpu: bool) -> None:
    """Refuse before the first stage starts what a later one would refuse when its turn comes."""
    for stage in stages:
        if stage.stage in (WORLD, REPORT):
            continue
        config, given = config_of_stage(stage), dict.fromkeys(stage.keys, Origin(f"stage {stage.name}", EX_USAGE))
        check(config, given, True if on_cpu else None)
        try:
            STAGES[stage.stage].check(config)
            for key, value in stage.keys.items():
                _there(key, value)
        except Refusal as refusal:
            raise Refusal(f"stage {stage.name}: {refusal.line}", refusal.code) from refusal


def _there(key: str, value: Any) -> None:
    """Places are there, or will be made; a text is what `--set` gave and is no file."""
    texts = [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, str) and item]
    if key in _WRITTEN or key not in PATHS or not texts:
        return
    if key in ("data.path", "data.validation"):
        if key == "data.path" or not _is_number(texts[0]):
            from stoker.training.data.sources import check_there

            check_there(texts)
        return
    missing = next(
        (text for text in texts if key not in _OR_OF_THE_HUB or text.startswith(("/", "./", "../", "~"))), None
    )
    if missing is not None and not os.path.exists(os.path.expanduser(missing)):
        raise Refusal(f"{key} {missing}: no such file or folder", EX_NOINPUT)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def lacking(course: Course, argv: Sequence[str]) -> Refusal | None:
    """The first thing that a settled course lacks to be run here: a chain to report on, stages that others are built
    on, room on the disk.
    """
    return nothing_to_report(course, argv) or missing_inputs(course, argv) or too_little_room(course)


def nothing_to_report(course: Course, argv: Sequence[str]) -> Refusal | None:
    if (
        course.selected != (REPORT,)
        or os.path.exists(os.path.join(course.folder, CHAIN))
        or any(entry.run for entry in course.entries.values())
    ):
        return None
    return Refusal(f"no speedrun in {os.path.relpath(course.folder)}: `{command(argv)}` makes one", EX_NOINPUT)


def missing_inputs(course: Course, argv: Sequence[str]) -> Refusal | None:
    """A stage that is asked for, whose inputs neither are there nor will be made first."""
    there = {name for name, entry in course.entries.items() if entry.done} | set(course.selected)
    asked = [stage for stage in course.stages if stage.name in course.waiting and stage.stage != REPORT]
    needing = [stage.name for stage in asked if not there.issuperset(stage.inputs)]
    if not needing:
        return None
    needed = {name for stage in asked for name in stage.inputs} - there
    missing = [stage.name for stage in course.stages if stage.name in needed]
    who = f"stage {needing[0]} needs" if len(needing) == 1 else f"stages {', '.join(needing)} need"
    line = (
        f"{who} what {', '.join(missing)} make{'s' if len(missing) == 1 else ''}, and with these settings that is not"
        " there"
    )
    return Refusal(f"{line}: `{command(argv, '--until', missing[-1])}` makes it", EX_NOINPUT)


def too_little_room(course: Course) -> Refusal | None:
    about = {name: course.estimates[name] for name in course.waiting}
    needed = room([replace(one, disk=max(0.0, one.disk - _written(course, name))) for name, one in about.items()])
    place = course.folder
    while not os.path.exists(place):
        place = os.path.dirname(place)
    free = shutil.disk_usage(place).free
    if free >= ENOUGH * needed:
        return None
    found = f"about {format_bytes(needed)} of disk are needed, {format_bytes(free)} are free in {place}"
    return Refusal(f"{found}: make room, or choose another place with --runs-dir", EX_CANTCREAT)


def _written(course: Course, name: str) -> int:
    """What a stage that was stopped has on the disk already."""
    run = course.entries[name].run
    return sum(about.st_blocks * 512 for _, about in walk(os.path.join(course.folder, run))) if run else 0
