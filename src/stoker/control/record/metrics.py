"""metrics.jsonl: one line per logged step, appended whole. Rank 0 writes it; nobody else does."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from typing import Any

from stoker.contract import layout
from stoker.contract.names import EX_DATAERR, Refusal
from stoker.contract.safe_io import APPEND, WholeFile, json_lines, last_lines
from stoker.contract.text import parse_json

LONGEST = 1 << 20  # bytes of a line
LAST_BYTES, LAST_LINES = 16 << 20, 100_000  # that last_metrics reads: about two seconds at worst


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
        # Line by line: a file that came with a folder may have any number of them.
        with WholeFile(self._path, durable=False) as kept:
            for line, told in json_lines(self._path):
                if line.endswith("\n") and _step(told) < step:
                    kept.write(line.encode("utf-8", "backslashreplace"))

    def write(self, **values: Any) -> None:
        shown = {name: _number(value) for name, value in values.items()}
        line = json.dumps({"schema": layout.SCHEMA, "time": round(time.time(), 4), **shown})
        os.write(self._handle, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._handle)


def read_metrics(run_dir: str) -> list[dict[str, Any]]:
    """The whole lines, oldest first; none where there is no file yet."""
    return list(metrics_in(run_dir))


def metrics_in(run_dir: str) -> Iterator[dict[str, Any]]:
    """The same, one at a time: a run that comes from elsewhere may have any number of them."""
    path = os.path.join(run_dir, layout.METRICS)
    try:
        yield from (told for _, told in json_lines(path))
    except (OSError, ValueError) as problem:  # a named pipe, or a line without end
        why = getattr(problem, "strerror", None) or problem
        raise Refusal(f"{path}: {why}; no run writes such a file: remove it", EX_DATAERR) from problem


def last_metrics(run_dir: str) -> tuple[Iterator[dict[str, Any]], bool]:
    """Of a run that may be a stranger's: the last of them, in bounded time, and whether those are all."""
    path = os.path.join(run_dir, layout.METRICS)
    try:
        lines, whole = last_lines(path, LAST_BYTES, LAST_LINES)
    except FileNotFoundError:
        return iter(()), True
    except OSError as problem:  # a named pipe
        raise Refusal(f"{path}: {problem.strerror}; no run writes such a file: remove it", EX_DATAERR) from problem
    if any(len(line) > LONGEST for line in lines):
        why = f"a line is longer than {LONGEST >> 20} MB"
        raise Refusal(f"{path}: {why}; no run writes such a file: remove it", EX_DATAERR)
    return (metrics for line in lines if (metrics := _object(line)) is not None), whole


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        data = parse_json(line.decode("utf-8", "replace"))
    except ValueError:
        return None  # half written
    return data if isinstance(data, dict) else None


def _step(told: dict[str, Any]) -> float:
    step = told.get("step")
    return step if isinstance(step, (int, float)) else math.inf
