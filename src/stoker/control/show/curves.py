"""Reads metrics.jsonl into curves incrementally, and smooths and thins curves for drawing."""

from __future__ import annotations

import itertools
import math
import operator
import os
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stoker.contract import layout
from stoker.contract.safe_io import open_below
from stoker.control.show.metrics_columns import ColumnBlock, LineFormat, parse_line, parse_number, parse_numbers
from stoker.control.show.snapshot import AVERAGED, Metric, as_float, as_int64, finite, parse_metric

POINTS = 400  # a curve in a snapshot has about this many
_BLOCK = 4 << 20  # bytes read at once
NEWEST_BYTES = 1 << 15  # where only the newest values are needed, only this end of the file is read
# A reader of newest values starts over after this many bytes: a page that is open for weeks must not collect all curves.
_MAX_NEWEST = 32 << 20
_MAX_TIMES = 64  # the step time is the median over this many lines
_MAX_SUMMED = 1e300  # values are limited to this before they are summed, so that sums stay finite
_MAX_INTERVAL = 10_000
LOG_EVERY = "log_every"  # key of a line: the logging interval of a run whose metrics have every step
_NOT_DRAWN = ("schema", "time", "step", LOG_EVERY)


class Curve:
    """The values of one metric by step. Values may be NaN or infinite."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._values = array("d")
        self._texts: list[bytes] = []  # newest values, parsed when they are first read

    @property
    def values(self) -> array[float]:
        """The value at each step."""
        for text in self._texts:
            self._values.extend(parse_numbers(text))
        self._texts.clear()
        return self._values

    def add(self, step: int, value: float) -> None:
        """Append a point; a validation's line repeats the step of the training line, whose value it replaces."""
        if self.steps and self.steps[-1] == step:
            self.values[-1] = value
            return
        self.steps.append(step)
        self.values.append(value)

    def extend(self, steps: list[int], values: list[Any]) -> Metric:
        """Append points and return the newest value, or None if no value is a number."""
        all_numbers = {*map(type, values)} <= {float, int}
        rising = all(map(operator.lt, steps, steps[1:])) and (not self.steps or not steps or self.steps[-1] < steps[0])
        if all_numbers and rising and values:
            try:
                self.values.fromlist(values)
                self.steps.fromlist(steps)
                return parse_metric(values[-1])
            except OverflowError:
                pass  # one is an integer of 400 digits, so no value was added
        newest: Metric = None
        for step, value in zip(steps, values, strict=True):
            number = parse_metric(value)
            if number is not None:
                self.add(step, as_float(float(number) if isinstance(number, str) else number))
                newest = number
        return newest

    def extend_by_text(self, steps: array[int], text: bytes, rising: bool) -> None:
        """Append points whose values are comma-separated text. `rising` is True if the steps are strictly increasing."""
        if rising and (not self.steps or self.steps[-1] < steps[0]):
            self.steps.extend(steps)
            self._texts.append(text)
            return
        for step, value in zip(steps, parse_numbers(text), strict=True):
            self.add(step, value)

    def find_non_finite_steps(self) -> list[int]:
        """Return the steps whose values are NaN or infinite."""
        if math.isfinite(sum(self.values)):
            return []
        return [step for step, value in zip(self.steps, self.values, strict=True) if not math.isfinite(value)]

    def points(
        self, max_points: int = POINTS, first: float = -math.inf, last: float = math.inf
    ) -> list[tuple[int, Metric]]:
        """Return (step, value) from step `first` to step `last`, thinned to about `max_points`."""
        steps: Sequence[int] = self.steps
        values: Sequence[float] = self.values
        if first > -math.inf or last < math.inf:
            inside = [index for index, step in enumerate(self.steps) if first <= step <= last]
            steps, values = [self.steps[index] for index in inside], [self.values[index] for index in inside]
        return [(steps[index], parse_metric(values[index])) for index in thin_out(values, max_points)]


def thin_out(values: Sequence[float], max_points: int) -> list[int]:
    """Return the indices of about `max_points` values to draw.

    Each bucket keeps its first, lowest and highest value and one that is not finite, so that spikes stay visible.
    """
    count = len(values)
    if count <= max_points:
        return list(range(count))
    buckets = max(max_points // 3, 1)
    indices: list[int] = []
    for bucket in range(buckets):
        begin, end = bucket * count // buckets, (bucket + 1) * count // buckets
        part = values[begin:end]
        if math.isfinite(sum(part)):  # every value is finite
            indices += sorted({begin, begin + part.index(min(part)), begin + part.index(max(part))})
            continue
        finite_indices = [index for index in range(begin, end) if math.isfinite(values[index])]
        chosen = {begin}
        if finite_indices:
            chosen |= {min(finite_indices, key=values.__getitem__), max(finite_indices, key=values.__getitem__)}
        if len(finite_indices) < end - begin:
            chosen.add(next(index for index in range(begin, end) if not math.isfinite(values[index])))
        indices += sorted(chosen)
    if indices[-1] != count - 1:
        indices.append(count - 1)
    return indices


def smooth_points(curve: Curve, window: int) -> tuple[tuple[float, float], ...]:
    """Return the finite points, each averaged with up to `window` - 1 finite points before it."""
    points = [
        (float(step), value)
        for step, value in zip(curve.steps, curve.values, strict=True)
        if parse_metric(value) == value
    ]
    if window <= 1:
        return tuple(points)
    points = [(step, _summable(value)) for step, value in points]
    total, means = 0.0, []
    for index, (step, value) in enumerate(points):
        total += value - (points[index - window][1] if index >= window else 0.0)
        means.append((step, total / min(index + 1, window)))
    return tuple(means)


def average_curve(curve: Curve, window: int) -> Curve:
    """Return the curve with each finite value replaced by the mean of the finite values among the last `window` values."""
    if window <= 1:
        return curve
    means = Curve()
    recent: deque[float] = deque(maxlen=window)
    for step, value in zip(curve.steps, curve.values, strict=True):
        if math.isfinite(value):
            recent.append(_summable(value))
            value = sum(recent) / len(recent)
        means.add(step, value)
    return means


def _summable(value: float) -> float:
    """Limit a value so that a sum of many values stays finite."""
    return max(-_MAX_SUMMED, min(value, _MAX_SUMMED))


def mean_of_newest(values: Iterable[Metric], newest: Metric) -> Metric:
    """Return the mean of the finite values, but `newest` if that is not finite, so that a NaN stays visible."""
    numbers = [number for value in values if (number := finite(value)) is not None]
    return sum(numbers) / len(numbers) if numbers and finite(newest) is not None else newest


class MetricsTail:
    """Reads metrics.jsonl of one run incrementally. A file that a resumed run has replaced is read from its start.

    With `newest_only` each call reads at most the last NEWEST_BYTES, so the curves have gaps.
    """

    def __init__(self, run_dir: str, newest_only: bool = False) -> None:
        self._dir, self._newest_only = run_dir, newest_only
        self._format = LineFormat()
        self._clear()
        self.problem = ""

    def _clear(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.newest: dict[str, Metric] = {}
        self.step: int | None = None
        self.time: float | None = None  # time of the newest line
        self.clock = Curve()  # time at which each step was logged
        self.interval = 1  # steps over which viewers average
        self.times: list[tuple[int, float]] = []  # (step, time) of the newest lines
        self._inode = self._offset = self._bytes_read = 0

    def read_new(self) -> bool:
        """Read the lines that were appended since the last call. Return True if the curves may have changed."""
        try:
            with os.fdopen(open_below(self._dir, layout.METRICS), "rb") as file:
                status = os.fstat(file.fileno())
                is_full = self._newest_only and self._bytes_read > _MAX_NEWEST
                if status.st_ino != self._inode or status.st_size < self._offset or is_full:
                    self._clear()
                    self._inode = status.st_ino
                if self._newest_only:
                    self._offset = max(self._offset, status.st_size - NEWEST_BYTES)
                if status.st_size == self._offset:
                    return False
                self.problem = ""
                return self._read_to(file, status.st_size)
        except FileNotFoundError:
            had_curves = bool(self.curves)
            self._clear()
            self.problem = ""
            return had_curves
        except OSError as problem:
            self.problem = f"{layout.METRICS}: {problem.strerror or problem}"
            return False

    def _read_to(self, file: Any, size: int) -> bool:
        """Read complete lines from the current offset up to `size`. Return True if there were any."""
        file.seek(self._offset)
        before = self._offset
        while self._offset < size and (data := file.read(min(_BLOCK, size - self._offset))):
            end = data.rfind(b"\n") + 1
            if not end:
                data += file.readline()
                if not data.endswith(b"\n"):
                    break  # the line is still being written
                end = len(data)
            for block in self._format.read(data[:end]):
                if isinstance(block, ColumnBlock):
                    self._add_columns(block)
                else:
                    self._add_lines(block)
            self._offset += end
            self._bytes_read += end
            file.seek(self._offset)
        return self._offset > before

    def _add_lines(self, block: list[dict[str, Any]]) -> None:
        """Add parsed lines. Works on columns: 100,000 lines of ten metrics are a million values, at 0.1 µs each."""
        newest_time = next((line["time"] for line in reversed(block) if _is_time(line.get("time"))), None)
        self.time = self.time if newest_time is None else float(newest_time)
        lines = [line for line in block if _is_step(line.get("step"))]
        if not lines:
            return
        columns = _split_columns(lines)
        steps = columns.pop("step")
        times = columns.pop("time", [None] * len(steps))
        self.step = steps[-1]
        self.interval = interval_of(lines[-1])
        self.clock.extend(steps, [time if _is_time(time) else 0.0 for time in times])
        newest_lines = ((line["step"], line["time"]) for line in lines[-_MAX_TIMES:] if _is_time(line.get("time")))
        self._remember_times(newest_lines)
        for name, values in columns.items():
            if name in _NOT_DRAWN:
                continue
            curve, metric_steps = self.curves.get(name) or Curve(), steps
            if None in values:
                metric_steps = [step for step, value in zip(steps, values, strict=True) if value is not None]
                values = [value for value in values if value is not None]
            self._store(name, curve, curve.extend(metric_steps, values))

    def _add_columns(self, block: ColumnBlock) -> None:
        """Add a block of lines whose values are still text."""
        steps, time_text = block.steps, block.texts["time"]
        rising = all(map(operator.lt, steps, steps[1:]))
        times = [*parse_numbers(b",".join(time_text.rsplit(b",", _MAX_TIMES)[-_MAX_TIMES:]))]
        self.step, self.time = steps[-1], times[-1]
        log_every = block.texts.get(LOG_EVERY, b"").rpartition(b",")[2]
        self.interval = interval_of({LOG_EVERY: int(log_every) if log_every.isdigit() else None})
        self.clock.extend_by_text(steps, time_text, rising)
        self._remember_times(zip(steps[-len(times) :], times, strict=True))
        for name, text in block.texts.items():
            if name in _NOT_DRAWN:
                continue
            metric_steps = steps
            if b"null" in text:
                cells = text.split(b",")
                metric_steps = array("q", (step for step, cell in zip(steps, cells, strict=True) if cell != b"null"))
                text = b",".join(cell for cell in cells if cell != b"null")
            if metric_steps:
                curve = self.curves.get(name) or Curve()
                curve.extend_by_text(metric_steps, text, rising)
                self._store(name, curve, parse_metric(parse_number(text[text.rfind(b",") + 1 :])))

    def _remember_times(self, times: Iterable[tuple[int, float]]) -> None:
        for step, time in times:
            if not self.times or self.times[-1][0] != step:
                self.times.append((step, float(time)))
        del self.times[:-_MAX_TIMES]

    def _store(self, name: str, curve: Curve, newest: Metric) -> None:
        """Keep the curve unless none of its values is a number (`newest` is None)."""
        if newest is not None:
            self.curves[name] = curve
            self.newest[name] = newest

    @property
    def step_s(self) -> float | None:
        """The median of the seconds per step over the newest lines, which a pause or a changed clock hardly affects."""
        gaps = [
            (later - earlier) / (after - before)
            for (before, earlier), (after, later) in zip(self.times, self.times[1:], strict=False)
            if after > before and later > earlier
        ]
        return sorted(gaps)[len(gaps) // 2] if gaps else None


def _split_columns(lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return a column of values for each key, with None for lines without the key."""
    names = list(lines[0])
    if {*map(len, lines)} == {len(names)} and len(names) > 1:  # usually every line has the same keys
        try:
            return dict(zip(names, map(list, zip(*map(operator.itemgetter(*names), lines), strict=True)), strict=True))
        except KeyError:
            pass
    columns: dict[str, list[Any]] = {name: [None] * len(lines) for name in ("step", "time")}
    for index, line in enumerate(lines):
        for name, value in line.items():
            if name not in columns:
                columns[name] = [None] * len(lines)
            columns[name][index] = value
    return columns


def _is_step(value: Any) -> bool:
    return type(value) is int and -(1 << 62) < value < 1 << 62


def _is_time(value: Any) -> bool:
    return type(value) in (float, int) and 0 <= value <= 1e11


def interval_of(line: Mapping[str, Any]) -> int:
    """Return the number of steps over which viewers average: the logging interval in a line of metrics.jsonl, else 1."""
    every = as_int64(line.get(LOG_EVERY))
    return every if every is not None and 1 <= every <= _MAX_INTERVAL else 1


def read_newest_line(run_dir: str) -> dict[str, Any]:
    """Return the last complete line of metrics.jsonl that has a loss, else the last line, or {}.

    Reads only the last 32 KB. If the file has every step, AVERAGED metrics are means over the logging interval.
    """
    try:
        with os.fdopen(open_below(run_dir, layout.METRICS), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - NEWEST_BYTES))
            data = file.read(NEWEST_BYTES)
    except OSError:
        return {}
    last: dict[str, Any] = {}
    lines = (parse_line(line) for line in reversed(data[: data.rfind(b"\n") + 1].split(b"\n")) if line)
    for line in lines:
        if not isinstance(line, dict):
            continue
        if "loss" in line:
            interval = interval_of(line)
            if interval == 1:
                return line
            earlier = itertools.islice((other for other in lines if isinstance(other, dict)), interval - 1)
            window = [line, *earlier]
            return line | {
                name: mean_of_newest((parse_metric(other.get(name)) for other in window), parse_metric(line[name]))
                for name in line
                if name in AVERAGED
            }
        last = last or line
    return last
