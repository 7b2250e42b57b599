"""`--plan`: the chain as a table, or as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.contract.frozen import as_json
from stoker.contract.terminal import wrap_text
from stoker.contract.units import format_bytes, format_duration
from stoker.speedrun.course import Course
from stoker.speedrun.estimate import room
from stoker.speedrun.stages import REPORT, File, Stage

SCHEMA = 1
_LEFT_OUT = ("made from", "memory", "disk", "size")  # where the terminal is narrower, in this order


def as_data(course: Course) -> dict[str, Any]:
    rows = []
    for stage in course.stages:
        entry, about = course.entries[stage.name], course.estimates[stage.name]
        rows.append(
            {
                "name": stage.name,
                "stage": stage.stage,
                "key": course.keys[stage.name],
                "status": entry.status,
                "run": entry.run,
                "selected": stage.name in course.selected,
                "inputs": list(stage.inputs),
                "files": _files(stage),
                "outputs": list(stage.outputs),
                "about": as_json(about),
                "keys": as_json(dict(stage.keys)),
            }
        )
    all_of_it = {**_total(course), "hardware": course.estimated_for}
    return {
        "schema": SCHEMA,
        "folder": course.folder,
        **course.about(),
        "refused": course.refused or None,
        "about": all_of_it,
        "stages": rows,
    }


def _files(stage: Stage) -> list[str]:
    return [place.path for place in stage.places if isinstance(place, File)]


def _total(course: Course) -> dict[str, float]:
    found = [course.estimates[name] for name in course.waiting]
    return {
        "seconds": sum(one.seconds for one in found),
        "memory": max((one.memory for one in found), default=0.0),
        "disk": room(found),
    }


def as_text(course: Course, columns: int | None = None) -> str:
    """`columns`: the terminal's."""
    rows = [("", "stage", "made from", "size", "time", "memory", "disk", "state")]
    for stage in course.stages:
        about, entry = course.estimates[stage.name], course.entries[stage.name]
        files = (path.rsplit("/", 1)[-1] for path in _files(stage))
        made_from = "all stages" if stage.name == REPORT else ", ".join((*stage.inputs, *files)) or "-"
        sizes = (_count(about.parameters, "parameters"), _count(about.tokens, "tokens"))
        size, mark = ", ".join(part for part in sizes if part) or "-", "•" if stage.name in course.waiting else ""
        state = f"done in {format_duration(entry.seconds)}" if entry.done else entry.status
        costs = (format_duration(about.seconds), _bytes(about.memory), _bytes(about.disk))
        rows.append((mark, stage.name, made_from, size, *costs, state))
    lines = _table(rows, columns)
    total = _total(course)
    count = len(course.waiting)
    lines.append("")
    if count:
        lines.append(
            f"{count} of {len(course.stages)} stages to run (•): about {format_duration(total['seconds'])}"
            f" ({course.estimated_for}), about {format_bytes(total['memory'])} of {'GPU ' if course.gpus else ''}memory in each"
            f" rank, about {format_bytes(total['disk'])} of disk in {course.folder}"
        )
    else:
        lines.append(f"nothing to run: all is done in {course.folder}")
    return "\n".join((*lines[:-1], wrap_text(lines[-1], columns or 0)))


def _table(rows: Sequence[Sequence[str]], columns: int | None) -> list[str]:
    for left_out in range(len(_LEFT_OUT) + 1):
        kept = [column for column in zip(*rows, strict=True) if column[0] not in _LEFT_OUT[:left_out]]
        widths = [max(map(len, column)) for column in kept]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in zip(*kept, strict=True)
        ]
        if columns is None or max(map(len, lines)) <= columns:
            break
    return lines


def _count(number: int, what: str) -> str:
    if not number:
        return ""
    if number < 1e5:
        return f"{number:,} {what}"
    return f"{number / 1e9:.1f} G {what}" if number >= 1e9 else f"{number / 1e6:.1f} M {what}"


def _bytes(count: float) -> str:
    if not count:
        return "-"
    return format_bytes(count)
