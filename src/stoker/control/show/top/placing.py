"""Where each panel goes on a screen. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.contract.shape import shape
from stoker.control.show.snapshot import Run
from stoker.control.show.top.panel import GPUS, PANELS, PROCESSES, RANKS, RUN, RUNS, Panel
from stoker.control.show.top.run import run_height, run_words

WIDE, TALL = 140, 30  # from here on there are two columns
_LEAST = {GPUS: 4, RUN: 2, RANKS: 3, PROCESSES: 2, RUNS: 2}  # lines, with the head
_CURVE_MORE = 8  # lines that a curve gets where nobody else needs them


@shape
class Place:
    x: int
    y: int
    width: int
    height: int


def arrange(tables: Mapping[str, Panel], run: Run | None, focus: str, width: int, height: int) -> dict[str, Place]:
    """One below the other; on a wide screen in two columns. The first and the last line are not the panels'."""
    inside = height - 2
    if width < WIDE or height < TALL:
        return _stacked(PANELS, tables, run, focus, Place(0, 1, width, inside))
    left = min((width * 55) // 100, width - 70)
    columns = (
        ((GPUS, PROCESSES), Place(0, 1, left, inside)),
        ((RUN, RANKS, RUNS), Place(left + 1, 1, width - left - 1, inside)),
    )
    places: dict[str, Place] = {}
    for names, area in columns:
        places |= _stacked(names, tables, run, focus, area)
    return places


def _stacked(
    names: tuple[str, ...], tables: Mapping[str, Panel], run: Run | None, focus: str, area: Place
) -> dict[str, Place]:
    wants = {name: run_height(run, area.width) if name == RUN else len(tables[name].rows) or 1 for name in names}
    wants = {name: want + 1 for name, want in wants.items()}
    kept = list(names)
    least = {name: min(_LEAST[name], wants[name]) for name in kept}
    if RUN in kept:
        least[RUN] = 1 + run_words(run, area.width)
    while len(kept) > 1 and sum(least[name] for name in kept) > area.height:
        kept.remove(next(name for name in reversed(kept) if name != focus))
    given = {name: least[name] for name in kept}
    if len(kept) == 1:
        given = {kept[0]: area.height}
    left = area.height - sum(given.values())
    for name in sorted(kept, key=lambda name: name != focus):
        more = min(left, wants[name] - given[name])
        given[name] += max(0, more)
        left -= max(0, more)
    if RUN in kept and run is not None and run.curve:
        given[RUN] += min(left, _CURVE_MORE)
        left -= min(left, _CURVE_MORE)
    given[kept[-1]] += max(0, left)
    places, y = {}, area.y
    for name in kept:
        if given[name] > 0:
            places[name] = Place(area.x, y, area.width, given[name])
            y += given[name]
    return places
