"""metrics.jsonl: one line per logged step, written by rank 0 only."""

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


class MetricsWriter:
    """Appends whole lines. Lines of step `resumed_at` and later are removed first: the resumed run repeats those steps."""

    def __init__(self, run_dir: str, resumed_at: int = 0) -> None:
        self._path = os.path.join(run_dir, layout.METRICS)
        if os.path.exists(self._path):
            self._remove_steps(resumed_at)
        self._fd = os.open(self._path, APPEND, 0o644)

    def _remove_steps(self, first: int) -> None:
        with AtomicFile(self._path, durable=False) as file:
            for line, values in read_json_lines(self._path):
                step = values.get("step")
                if line.endswith("\n") and isinstance(step, (int, float)) and step < first:
                    file.write(line.encode("utf-8", "backslashreplace"))

    def write(self, **values: Any) -> None:
        # JSON has no NaN and Infinity: they are written as strings.
        finite = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        line = json.dumps({"schema": layout.SCHEMA, "time": round(time.time(), 4), **finite})
        os.write(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._fd)


def read_metrics(run_dir: str) -> Iterator[dict[str, Any]]:
    """Yield the complete lines, oldest first, if there is a file. Raises Refusal if it can't be read."""
    path = os.path.join(run_dir, layout.METRICS)
    try:
        yield from (values for _, values in read_json_lines(path))
    except OSError as problem:
        raise unreadable(path, problem) from problem
