"""`pytest --gpu-shard I/N`: of the collected tests only the I-th of N shares, for processes side by side (gpu_gate.py)."""

from __future__ import annotations

import pytest

SECONDS = 3.0  # of a test whose mark does not say how long it takes
ALONE = "real"  # the fixture of tests that lock the GPU


def seconds_of(item: pytest.Item) -> float:
    marks = [mark.kwargs["seconds"] for mark in item.iter_markers("gpu") if "seconds" in mark.kwargs]
    return float(marks[0]) if marks else SECONDS


def share(costs: list[float], number: int, count: int) -> set[int]:
    """Return the places of one share: each test, the longest first, goes to the share with the least work so far."""
    loads, chosen = [0.0] * count, set[int]()
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        least = loads.index(min(loads))
        loads[least] += costs[place]
        if least == number:
            chosen.add(place)
    return chosen


def keep_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    given = config.getoption("--gpu-shard")
    if not given:
        return
    number, count = map(int, given.split("/"))
    together = [
        item for item in items if item.get_closest_marker("gpu") and ALONE not in getattr(item, "fixturenames", ())
    ]
    kept = share([seconds_of(item) for item in together], number, count)
    chosen = [item for place, item in enumerate(together) if place in kept]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = sorted(chosen, key=lambda item: -seconds_of(item))
