"""What a stage would refuse when its turn comes, refused before the first one starts. Pure but for a look whether files
are there.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stoker.contract.names import EX_CANTCREAT, EX_NOINPUT, EX_USAGE, Refusal
from stoker.contract.quantities import amount
from stoker.contract.shape import replace
from stoker.contract.untrusted import is_count
from stoker.control.doctor.debris import walk
from stoker.speedrun.estimate import room
from stoker.speedrun.options import SpeedrunOptions, command
from stoker.speedrun.overrides import PATHS
from stoker.speedrun.stages import REPORT, WORLD, Stage, config_of_stage
from stoker.speedrun.state import CHAIN
from stoker.training.config.check import check, check_ranks
from stoker.training.config.layers import Origin
from stoker.training.stages.registry import STAGES

if TYPE_CHECKING:
    from stoker.speedrun.course import Course

ENOUGH = 0.8  # of an estimate of disk space: it may be a quarter too high
_OR_OF_THE_HUB = ("model.load", "tokenizer.path", "grpo.reward_model", "diversity.baseline", "diversity.compared")
_WRITTEN = ("checkpoint.resume", "checkpoint.folder")  # may be words, or folders that are made


def check_options(options: SpeedrunOptions) -> None:
    ranks, price = options.nproc_per_node, options.price_per_hour
    if (
        ranks is not None
        and ranks.strip().lower() not in ("gpu", "cpu", "auto")
        and not (is_count(ranks) and int(ranks) > 0)
    ):
        raise Refusal(f"--nproc-per-node {ranks}: give a whole number of ranks from 1 up, or gpu, cpu, auto", EX_USAGE)
    if price is not None and not 0 <= price < math.inf:
        raise Refusal(f"--price-per-hour {price:g}: give what an hour costs, from 0 up", EX_USAGE)


def check_stages(stages: Sequence[Stage], ranks: int | None, on_cpu: bool) -> None:
    """`ranks`: of each stage; None where nobody knows yet."""
    for stage in stages:
        if stage.stage in (WORLD, REPORT):
            continue
        config, given = config_of_stage(stage), dict.fromkeys(stage.keys, Origin(f"stage {stage.name}", EX_USAGE))
        check(config, given, True if on_cpu else None)
        if ranks is not None and not STAGES[stage.stage].one_process:
            check_ranks(config, ranks, given)
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
        raise Refusal(f"{key} {missing}: there is no such file or folder", EX_NOINPUT)


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
    found = f"about {amount(needed)} of disk are needed, {amount(free)} are free in {place}"
    return Refusal(f"{found}: make room, or choose another place with --runs-dir", EX_CANTCREAT)


def _written(course: Course, name: str) -> int:
    """What a stage that was stopped has on the disk already."""
    run = course.entries[name].run
    return sum(about.st_blocks * 512 for _, about in walk(os.path.join(course.folder, run))) if run else 0
