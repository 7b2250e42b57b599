"""A run's metrics as curves: metrics.jsonl read once, then only what is new; and thinned out for drawing."""

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

POINTS = 400  # of a curve in a snapshot
_BLOCK = 4 << 20
NEWEST_BYTES = 1 << 15  # at the end of the file, for the newest values alone
# A page may be open for weeks: a reader of newest values starts again after so many bytes instead of keeping all curves.
_MAX_NEWEST = 32 << 20
_NEWEST = 64  # lines whose times are kept: the speed of the last steps
_MOST_SUMMED = 1e300
_LONGEST_INTERVAL = 10_000
LOG_EVERY = "log_every"  # of a line: the logging interval of a run whose metrics have every step
_NOT_DRAWN = ("schema", "time", "step", LOG_EVERY)


class Curve:
    """One metric: steps and values side by side. Values may be NaN or infinite."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._values = array("d")
        self._texts: list[bytes] = []  # the last of the values, which nobody has asked for yet

    @property
    def values(self) -> array[float]:
        for text in self._texts:
            self._values.extend(parse_numbers(text))
        self._texts.clear()
        return self._values

    def add(self, step: int, value: float) -> None:
        if self.steps and self.steps[-1] == step:  # a validation's line repeats the step's
            self.values[-1] = value
            return
        self.steps.append(step)
        self.values.append(value)

    def extend(self, steps: list[int], values: list[Any]) -> Metric:
        """The newest value; None where none of them is a number."""
        plain = {*map(type, values)} <= {float, int}
        rising = all(map(operator.lt, steps, steps[1:])) and (not self.steps or not steps or self.steps[-1] < steps[0])
        if plain and rising and values:
            try:
                self.values.fromlist(values)
                self.steps.fromlist(steps)
                return parse_metric(values[-1])
            except OverflowError:  # an integer of 400 digits: nothing was added
                pass
        newest: Metric = None
        for step, value in zip(steps, values, strict=True):
            kept = parse_metric(value)
            if kept is not None:
                self.add(step, as_float(float(kept) if isinstance(kept, str) else kept))
                newest = kept
        return newest

    def extend_by_text(self, steps: array[int], text: bytes, rising: bool) -> None:
        """`text`: as many values. `rising`: the steps do."""
        if rising and (not self.steps or self.steps[-1] < steps[0]):
            self.steps.extend(steps)
            self._texts.append(text)
            return
        for step, value in zip(steps, parse_numbers(text), strict=True):
            self.add(step, value)

    def not_finite(self) -> list[int]:
        """The steps whose values are no numbers."""
        if math.isfinite(sum(self.values)):
            return []
        return [step for step, value in zip(self.steps, self.values, strict=True) if not math.isfinite(value)]

    def points(self, most: int = POINTS, first: float = -math.inf, last: float = math.inf) -> list[tuple[int, Metric]]:
        """As a snapshot keeps them; `first` and `last`: of these steps."""
        steps: Sequence[int] = self.steps
        values: Sequence[float] = self.values
        if first > -math.inf or last < math.inf:
            chosen = [at for at, step in enumerate(self.steps) if first <= step <= last]
            steps, values = [self.steps[at] for at in chosen], [self.values[at] for at in chosen]
        return [(steps[at], parse_metric(values[at])) for at in thin_out(values, most)]


def thin_out(values: Sequence[float], most: int) -> list[int]:
    """Which of them to draw: of every bucket the first, the lowest, the highest and one that is no number. Spikes stay."""
    count = len(values)
    if count <= most:
        return list(range(count))
    buckets = max(most // 3, 1)
    chosen: list[int] = []
    for bucket in range(buckets):
        begin, end = bucket * count // buckets, (bucket + 1) * count // buckets
        part = values[begin:end]
        if math.isfinite(sum(part)):  # all of them are numbers
            chosen += sorted({begin, begin + part.index(min(part)), begin + part.index(max(part))})
            continue
        known = [at for at in range(begin, end) if math.isfinite(values[at])]
        wanted = {begin}
        if known:
            wanted |= {min(known, key=values.__getitem__), max(known, key=values.__getitem__)}
        if len(known) < end - begin:
            wanted.add(next(at for at in range(begin, end) if not math.isfinite(values[at])))
        chosen += sorted(wanted)
    if chosen[-1] != count - 1:
        chosen.append(count - 1)
    return chosen


def smooth_points(curve: Curve, window: int) -> tuple[tuple[float, float], ...]:
    """Finite ones, each the mean of it and those before."""
    known = [
        (float(step), value)
        for step, value in zip(curve.steps, curve.values, strict=True)
        if parse_metric(value) == value
    ]
    if window > 1:  # sums of larger ones are no numbers
        known = [(step, max(-_MOST_SUMMED, min(value, _MOST_SUMMED))) for step, value in known]
    if window <= 1:
        return tuple(known)
    total, made = 0.0, []
    for at, (step, value) in enumerate(known):
        total += value - (known[at - window][1] if at >= window else 0.0)
        made.append((step, total / min(at + 1, window)))
    return tuple(made)


def average_curve(curve: Curve, window: int) -> Curve:
    """Return the curve with each finite value replaced by the mean of it and of the finite ones among the `window` - 1 before."""
    if window <= 1:
        return curve
    means = Curve()
    recent: deque[float] = deque(maxlen=window)
    for step, value in zip(curve.steps, curve.values, strict=True):
        if math.isfinite(value):
            recent.append(max(-_MOST_SUMMED, min(value, _MOST_SUMMED)))
            value = sum(recent) / len(recent)
        means.add(step, value)
    return means


def mean_of_newest(values: Iterable[Metric], newest: Metric) -> Metric:
    """Return the mean of the finite ones; `newest` where it is not finite itself, as that must be seen."""
    known = [value for one in values if (value := finite(one)) is not None]
    return sum(known) / len(known) if known and finite(newest) is not None else newest


class MetricsTail:
    """metrics.jsonl of one run. `look` reads what is new; a file that was replaced (a resumed run) is read again.

    `newest_only`: each look reads no more than the last NEWEST_BYTES, so the curves have gaps.
    """

    def __init__(self, run_dir: str, newest_only: bool = False) -> None:
        self._dir, self._newest_only = run_dir, newest_only
        self._layout = LineFormat()
        self._clear()
        self.problem = ""

    def _clear(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.newest: dict[str, Metric] = {}
        self.step: int | None = None
        self.time: float | None = None  # of the newest line
        self.clock = Curve()  # when each step was written
        self.interval = 1  # steps over which viewers average
        self.times: list[tuple[int, float]] = []  # (step, time) of the newest lines
        self._inode = self._at = self._taken = 0

    def look(self) -> bool:
        """Whether there was anything new."""
        try:
            with os.fdopen(open_below(self._dir, layout.METRICS), "rb") as file:
                about = os.fstat(file.fileno())
                is_full = self._newest_only and self._taken > _MAX_NEWEST
                if about.st_ino != self._inode or about.st_size < self._at or is_full:
                    self._clear()
                    self._inode = about.st_ino
                if self._newest_only:
                    self._at = max(self._at, about.st_size - NEWEST_BYTES)
                if about.st_size == self._at:
                    return False
                self.problem = ""
                return self._take(file, about.st_size)
        except FileNotFoundError:
            fresh = bool(self.curves)
            self._clear()
            self.problem = ""
            return fresh
        except OSError as problem:
            self.problem = f"{layout.METRICS}: {problem.strerror or problem}"
            return False

    def _take(self, file: Any, size: int) -> bool:
        file.seek(self._at)
        before = self._at
        while self._at < size and (data := file.read(min(_BLOCK, size - self._at))):
            end = data.rfind(b"\n") + 1
            if not end:
                data += file.readline()
                if not data.endswith(b"\n"):
                    break  # half written
                end = len(data)
            for block in self._layout.read(data[:end]):
                if isinstance(block, ColumnBlock):
                    self._add_columns(block)
                else:
                    self._add(block)
            self._at += end
            self._taken += end
            file.seek(self._at)
        return self._at > before

    def _add(self, block: list[dict[str, Any]]) -> None:
        """Column by column: of 100,000 lines with ten metrics each value may cost a tenth of a microsecond."""
        when = next((line["time"] for line in reversed(block) if _is_time(line.get("time"))), None)
        self.time = self.time if when is None else float(when)
        lines = [line for line in block if _is_step(line.get("step"))]
        if not lines:
            return
        columns = _columns(lines)
        steps = columns.pop("step")
        times = columns.pop("time", [None] * len(steps))
        self.step = steps[-1]
        self.interval = interval_of(lines[-1])
        self.clock.extend(steps, [time if _is_time(time) else 0.0 for time in times])
        known = ((line["step"], line["time"]) for line in lines[-_NEWEST:] if _is_time(line.get("time")))
        self._remember_times(known)
        for name, values in columns.items():
            if name in _NOT_DRAWN:
                continue
            curve, at = self.curves.get(name) or Curve(), steps
            if None in values:
                at = [step for step, value in zip(steps, values, strict=True) if value is not None]
                values = [value for value in values if value is not None]
            self._keep(name, curve, curve.extend(at, values))

    def _add_columns(self, block: ColumnBlock) -> None:
        steps, when = block.steps, block.texts["time"]
        rising = all(map(operator.lt, steps, steps[1:]))
        times = [*parse_numbers(b",".join(when.rsplit(b",", _NEWEST)[-_NEWEST:]))]
        self.step, self.time = steps[-1], times[-1]
        self.interval = interval_of({LOG_EVERY: whole_number(block.texts.get(LOG_EVERY, b"").rpartition(b",")[2])})
        self.clock.extend_by_text(steps, when, rising)
        self._remember_times(zip(steps[-len(times) :], times, strict=True))
        for name, text in block.texts.items():
            if name in _NOT_DRAWN:
                continue
            at = steps
            if b"null" in text:
                cells = text.split(b",")
                at = array("q", (step for step, cell in zip(steps, cells, strict=True) if cell != b"null"))
                text = b",".join(cell for cell in cells if cell != b"null")
            if at:
                curve = self.curves.get(name) or Curve()
                curve.extend_by_text(at, text, rising)
                self._keep(name, curve, parse_metric(parse_number(text[text.rfind(b",") + 1 :])))

    def _remember_times(self, known: Iterable[tuple[int, float]]) -> None:
        for step, when in known:
            if not self.times or self.times[-1][0] != step:
                self.times.append((step, float(when)))
        del self.times[:-_NEWEST]

    def _keep(self, name: str, curve: Curve, newest: Metric) -> None:
        """`newest` is None where no value is a number."""
        if newest is not None:
            self.curves[name] = curve
            self.newest[name] = newest

    @property
    def step_s(self) -> float | None:
        """Seconds a step, over the newest lines. A clock that was set back, or a pause, spoils a part of them only."""
        gaps = [
            (later - sooner) / (after - before)
            for (before, sooner), (after, later) in zip(self.times, self.times[1:], strict=False)
            if after > before and later > sooner
        ]
        return sorted(gaps)[len(gaps) // 2] if gaps else None


def _columns(lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return for each name its values, one for each line, None where a line has none."""
    names = list(lines[0])
    if {*map(len, lines)} == {len(names)} and len(names) > 1:  # the usual case: every line has the same names
        try:
            return dict(zip(names, map(list, zip(*map(operator.itemgetter(*names), lines), strict=True)), strict=True))
        except KeyError:
            pass
    columns: dict[str, list[Any]] = {name: [None] * len(lines) for name in ("step", "time")}
    for at, line in enumerate(lines):
        for name, value in line.items():
            if name not in columns:
                columns[name] = [None] * len(lines)
            columns[name][at] = value
    return columns


def _is_step(value: Any) -> bool:
    return type(value) is int and -(1 << 62) < value < 1 << 62


def _is_time(value: Any) -> bool:
    return type(value) in (float, int) and 0 <= value <= 1e11


def interval_of(line: Mapping[str, Any]) -> int:
    """Return the steps over which viewers average, by a line of metrics.jsonl."""
    every = as_int64(line.get(LOG_EVERY))
    return every if every is not None and 1 <= every <= _LONGEST_INTERVAL else 1


def whole_number(text: bytes) -> int | None:
    return int(text) if text.isdigit() else None


def read_newest_line(run_dir: str) -> dict[str, Any]:
    """Return the last whole line of metrics.jsonl that has a loss, else the last; empty where there is none. Reads 32 KB.

    Where lines come more often than the logging interval, its AVERAGED metrics are means over the interval.
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
        if isinstance(line, dict):
            if "loss" in line:
                before = itertools.islice((one for one in lines if isinstance(one, dict)), interval_of(line) - 1)
                return _with_means(line, [line, *before]) if interval_of(line) > 1 else line
            last = last or line
    return last


def _with_means(newest: dict[str, Any], lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    means = {
        name: mean_of_newest((parse_metric(line.get(name)) for line in lines), parse_metric(newest[name]))
        for name in newest
        if name in AVERAGED
    }
    return {**newest, **means}


def finite_points(points: Iterable[tuple[int, Metric]]) -> list[tuple[int, float]]:
    return [(step, float(value)) for step, value in points if value is not None and not isinstance(value, str)]
