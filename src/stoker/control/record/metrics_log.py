"""metrics.jsonl: one line per logged step, appended whole. Rank 0 writes it; nobody else does."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import unreadable
from stoker.contract.safe_io import APPEND, AtomicFile, read_json_lines


def _number(value: Any) -> Any:
    """NaN and Infinity are not JSON: they are written as words."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class MetricsWriter:
    def __init__(self, run_dir: str, resumed_at: int = 0) -> None:
        """`resumed_at`: lines of that step and later are of an attempt that was lost; the steps are made again."""
        self._path = os.path.join(run_dir, layout.METRICS)
        if os.path.exists(self._path):
            self._forget(resumed_at)
        self._handle = os.open(self._path, APPEND, 0o644)

    def _forget(self, step: int) -> None:
        with AtomicFile(self._path, durable=False) as kept:
            for line, told in read_json_lines(self._path):
                if line.endswith("\n") and _step(told) < step:
                    kept.write(line.encode("utf-8", "backslashreplace"))

    def write(self, **values: Any) -> None:
        shown = {name: _number(value) for name, value in values.items()}
        line = json.dumps({"schema": layout.SCHEMA, "time": round(time.time(), 4), **shown})
        os.write(self._handle, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._handle)


def read_metrics(run_dir: str) -> list[dict[str, Any]]:
    """Return the complete lines, oldest first; none if there is no file yet. Raises Refusal if it can't be read."""
    return list(parse_metrics(run_dir))


def parse_metrics(run_dir: str) -> Iterator[dict[str, Any]]:
    """Yield the same lines one at a time: a run of weeks has a million of them."""
    path = os.path.join(run_dir, layout.METRICS)
    try:
        yield from (line for _, line in read_json_lines(path))
    except OSError as problem:
        raise unreadable(path, problem) from problem


def _step(told: dict[str, Any]) -> float:
    step = told.get("step")
    return step if isinstance(step, (int, float)) else math.inf
