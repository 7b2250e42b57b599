"""metrics.jsonl: one line per logged step, appended whole. Rank 0 writes it; nobody else does."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from typing import Any

from stoker.contract import layout
from stoker.contract.untrusted import parse_json
from stoker.contract.wholefile import APPEND, write_whole


def _number(value: Any) -> Any:
    """NaN and Infinity are not JSON: they are written as words."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    def __init__(self, run_dir: str, resumed_at: int = 0) -> None:
        """`resumed_at`: lines of that step and later are of an attempt that was lost; the steps are made again."""
        self._path = os.path.join(run_dir, layout.METRICS)
        if os.path.exists(self._path):
            self._forget(resumed_at)
        self._handle = os.open(self._path, APPEND, 0o644)

    def _forget(self, step: int) -> None:
        kept = [line for line, told in _lines(self._path) if line.endswith("\n") and _step(told) < step]
        write_whole(self._path, "".join(kept), durable=False)

    def write(self, **values: Any) -> None:
        shown = {name: _number(value) for name, value in values.items()}
        line = json.dumps({"schema": layout.SCHEMA, "time": round(time.time(), 4), **shown})
        os.write(self._handle, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._handle)


def read_metrics(run_dir: str) -> list[dict[str, Any]]:
    """The whole lines, oldest first; none where there is no file yet."""
    path = os.path.join(run_dir, layout.METRICS)
    if not os.path.exists(path):
        return []
    return [told for _, told in _lines(path)]


def _lines(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each with what it says; not one that is being written, or that a crash cut."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                told = parse_json(line)
                if isinstance(told, dict):
                    yield line, told


def _step(told: dict[str, Any]) -> float:
    step = told.get("step")
    return step if isinstance(step, (int, float)) else math.inf
