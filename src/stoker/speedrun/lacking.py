"""What a settled course lacks to be run here: a chain to report on, stages that others are built on, room on the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from stoker.contract.names import EX_CANTCREAT, EX_NOINPUT, Refusal
from stoker.contract.quantities import amount
from stoker.contract.shape import replace
from stoker.control.doctor.debris import walk
from stoker.speedrun.course import Course, command
from stoker.speedrun.estimate import room
from stoker.speedrun.stages import REPORT
from stoker.speedrun.state import CHAIN

ENOUGH = 0.8  # of an estimate: it may be a quarter too high


def lacking(course: Course, argv: Sequence[str]) -> Refusal | None:
    """The first thing, or None."""
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
