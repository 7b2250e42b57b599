"""Writes and reads a run's history: what its ranks, GPUs and hosts did over time, in the folder history/ of the run directory.

There are three tiers of JSON lines: seconds.jsonl has a line every 2 s, minutes.jsonl every minute, hours.jsonl every
20 minutes. A file is full after an hour, a day or two weeks. It is then renamed (seconds.jsonl to seconds.1.jsonl, in place
of an older one), and a new file is started, so a tier has at most two files.

A "members" line lists the ranks, GPUs and hosts, and each file starts with one. Every other line is one point in time: it
has a column for each gauge, with the values in the order of the members line before it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stoker.contract import layout, typed_values
from stoker.contract.frozen import as_json, frozen
from stoker.contract.safe_io import APPEND, open_below

SCHEMA = 1
FOLDER = layout.HISTORY
EVERY_S = 2.0
# File name -> (seconds between lines, lines of a full file).
TIERS: dict[str, tuple[float, int]] = {"seconds": (EVERY_S, 1800), "minutes": (60.0, 1440), "hours": (1200.0, 1008)}
# Seconds between the points that a tier averages.
_SOURCE_INTERVALS = {"minutes": EVERY_S, "hours": TIERS["minutes"][0]}
MAX_BYTES = 64 << 20  # of one file; a line of 512 ranks on 64 hosts takes 30 KB
# Columns that have no mean: points are merged into the newest value (_NEWEST) or all values (_UNION).
_NEWEST = frozenset(("step", "memory", "memory_total", "loss", "collective_age", "beat_age", "heard"))
_UNION = frozenset(("throttle",))
PARTS = ("ranks", "gpus", "hosts")

HistoryColumns = dict[str, tuple[Any, ...]]


@frozen
class Members:
    ranks: tuple[int, ...] = ()
    gpus: tuple[tuple[str, str], ...] = ()  # (host, UUID)
    hosts: tuple[str, ...] = ()


@frozen
class HistoryPoint:
    time: float
    attempt: int
    members: Members
    ranks: HistoryColumns
    gpus: HistoryColumns
    hosts: HistoryColumns

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Return a rank's values by column, or {} if it is not a member. Ranks are numbered without gaps."""
        ranks = self.members.ranks
        index = rank - ranks[0] if ranks else -1
        return row_at(self.ranks, index) if 0 <= index < len(ranks) and ranks[index] == rank else {}

    def of_gpu(self, host: str, uuid: str) -> dict[str, Any]:
        """Return a GPU's values by column, or {} if it is not a member. To read all GPUs, call `row_at` with each index."""
        gpus = self.members.gpus
        return row_at(self.gpus, gpus.index((host, uuid))) if (host, uuid) in gpus else {}


def row_at(columns: HistoryColumns, index: int) -> dict[str, Any]:
    return {name: values[index] for name, values in columns.items()}


class HistoryWriter:
    """Writes the history of a running launcher to all tiers.

    `run_dir` is a descriptor of the run directory. `on_loss` is called for bytes that could not be written; the run
    continues.
    """

    def __init__(self, run_dir: int, on_loss: Callable[[str, int, OSError], None]) -> None:
        self._files = {name: _TierFile(run_dir, name, lines, on_loss) for name, (_, lines) in TIERS.items()}
        self._pending: dict[str, list[HistoryPoint]] = {"minutes": [], "hours": []}

    def write(self, point: HistoryPoint) -> None:
        self._files["seconds"].write(point)
        self._collect(point, "minutes", "hours")

    def _collect(self, point: HistoryPoint, tier: str, *coarser: str) -> None:
        """Add a point to the tier's pending points, and write them as one point once they fill its interval."""
        pending = self._pending[tier]
        if pending and (pending[0].members != point.members or pending[0].attempt != point.attempt):
            self._flush(tier, *coarser)
        pending = self._pending[tier]
        pending.append(point)
        # Write them if another point would exceed the interval, or if the clock was set back (a negative difference).
        if not 0 <= point.time - pending[0].time < TIERS[tier][0] - 1.5 * _SOURCE_INTERVALS[tier]:
            self._flush(tier, *coarser)

    def _flush(self, tier: str, *coarser: str) -> None:
        pending, self._pending[tier] = self._pending[tier], []
        if pending:
            point = merge_points(pending)
            self._files[tier].write(point)
            if coarser:
                self._collect(point, *coarser)

    def close(self) -> None:
        """Write the pending points and close the files."""
        self._flush("minutes", "hours")
        self._flush("hours")
        for file in self._files.values():
            file.close()


class _TierFile:
    """Appends to the current file of a tier, and starts a new one when it is full."""

    def __init__(self, run_dir: int, name: str, max_lines: int, on_loss: Callable[[str, int, OSError], None]) -> None:
        self._run_dir, self._name, self._max_lines, self._on_loss = run_dir, name, max_lines, on_loss
        self._path = f"{FOLDER}/{name}.jsonl"
        self._fd = -1
        self._lines = self._bytes = 0
        self._members: Members | None = None

    def write(self, point: HistoryPoint) -> None:
        data = b""
        try:
            if self._lines >= self._max_lines or self._bytes >= MAX_BYTES:
                self._rotate()
            if self._fd < 0:
                self._open()
            if point.members != self._members:
                data = _json_line({"time": point.time, "members": as_json(point.members)})
            columns = {part: as_json(getattr(point, part)) for part in PARTS}
            data += _json_line({"time": point.time, "attempt": point.attempt, **columns})
            os.write(self._fd, data)
        except OSError as problem:
            self._on_loss(self._path, len(data), problem)
            return
        self._members = point.members
        self._lines += 1
        self._bytes += len(data)

    def _open(self) -> None:
        """Open the file to append to what an earlier start of the run wrote, after ending a line it did not finish."""
        try:
            os.mkdir(FOLDER, 0o755, dir_fd=self._run_dir)
        except FileExistsError:
            pass
        flags = (APPEND & ~os.O_WRONLY) | os.O_RDWR
        self._fd = os.open(self._path, flags, 0o644, dir_fd=self._run_dir)
        self._bytes = os.fstat(self._fd).st_size
        self._lines = offset = 0
        last = b"\n"
        while block := os.pread(self._fd, 1 << 20, offset):
            self._lines += block.count(b"\n")
            offset, last = offset + len(block), block[-1:]
        if last != b"\n":
            os.write(self._fd, b"\n")

    def _rotate(self) -> None:
        self.close()
        previous = f"{FOLDER}/{self._name}.1.jsonl"
        os.rename(self._path, previous, src_dir_fd=self._run_dir, dst_dir_fd=self._run_dir)
        self._lines = self._bytes = 0
        self._members = None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._members = None


def _json_line(values: dict[str, Any]) -> bytes:
    return json.dumps({"schema": SCHEMA, **values}, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def merge_points(points: list[HistoryPoint]) -> HistoryPoint:
    """Merge points of the same members into one, with means, the newest values of _NEWEST and all throttle reasons."""
    newest = points[-1]
    parts: dict[str, HistoryColumns] = {}
    for part in PARTS:
        parts[part] = {}
        for name, values in getattr(newest, part).items():
            columns = [getattr(point, part).get(name, ()) for point in points]
            rows = (
                [column[index] if index < len(column) else None for column in columns] for index in range(len(values))
            )
            parts[part][name] = tuple(_merge_values(name, row) for row in rows)
    return HistoryPoint(newest.time, newest.attempt, newest.members, parts["ranks"], parts["gpus"], parts["hosts"])


def _merge_values(name: str, values: list[Any]) -> Any:
    """Merge one member's values of a column, given oldest first. None is an unknown value."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    if name in _UNION:
        return tuple(dict.fromkeys(reason for reasons in present for reason in reasons))
    if name in _NEWEST:
        return values[-1]
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in present):
        return present[-1]
    mean = math.fsum(present) / len(present)
    return round(mean) if all(isinstance(value, int) for value in present) else round(mean, 6)


class HistoryTail:
    """Follows one tier of a history while it is written."""

    def __init__(self, run_dir: str, tier: str = "seconds") -> None:
        self._dir, self._tier = run_dir, tier
        self._inode, self._offset = 0, 0
        self._members: Members | None = None

    def read_new(self) -> list[HistoryPoint]:
        """Return the points since the last call, oldest first; the first call also returns those of the previous file."""
        points: list[HistoryPoint] = []
        current, previous = f"{self._tier}.jsonl", f"{self._tier}.1.jsonl"
        inode = self._inode_of(current)
        if inode is None:
            return points
        if inode != self._inode:
            if self._inode == 0 or self._inode_of(previous) == self._inode:
                points += self._read(previous, self._offset)
            self._inode, self._offset, self._members = inode, 0, None
        return points + self._read(current, self._offset, remember=True)

    def _inode_of(self, name: str) -> int | None:
        try:
            return os.stat(os.path.join(self._dir, FOLDER, name), follow_symlinks=False).st_ino
        except OSError:
            return None

    def _read(self, name: str, offset: int, remember: bool = False) -> list[HistoryPoint]:
        """Return the points of the complete lines from an offset; `remember` sets where the next call continues."""
        try:
            with os.fdopen(open_below(self._dir, f"{FOLDER}/{name}"), "rb") as file:
                if os.fstat(file.fileno()).st_size < offset:  # the file was truncated
                    offset, self._members = 0, None
                file.seek(offset)
                data = file.read()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        if remember:
            self._offset = offset + end
        return list(self._parse_points(data[:end].split(b"\n")))

    def _parse_points(self, lines: Iterable[bytes]) -> Iterator[HistoryPoint]:
        for line in lines:
            values = _parse_line(line)
            if values is None:
                continue
            if "members" in values:
                self._members = _parse_members(values["members"]) or self._members
            elif self._members is not None:
                point = _parse_point(values, self._members)
                if point is not None:
                    yield point


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)  # parse_json takes three times as long, and an hour of 128 ranks has 17 MB
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and values.get("schema") == SCHEMA else None


def _parse_members(value: Any) -> Members | None:
    try:
        return typed_values.read_frozen(Members, value)
    except ValueError:
        return None


_POINT_FIELDS = {"time": "float", "attempt": "int", **dict.fromkeys(PARTS, "dict[str, tuple[Any, ...]]")}


def _parse_point(values: dict[str, Any], members: Members) -> HistoryPoint | None:
    try:
        fields = typed_values.read_fields(_POINT_FIELDS, values)
    except ValueError:
        return None
    for part in PARTS:
        if any(len(column) != len(getattr(members, part)) for column in fields[part].values()):
            return None
    return HistoryPoint(fields["time"], fields["attempt"], members, *(fields[part] for part in PARTS))


def read_newest_columns(run_dir: str, part: str = "ranks") -> HistoryColumns:
    """Return a part's columns in the newest complete line, or {}. It reads only the last 64 KB of the file."""
    try:
        with os.fdopen(open_below(run_dir, f"{FOLDER}/seconds.jsonl"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            data = file.read(1 << 16)
    except OSError:
        return {}
    for line in reversed(data[: data.rfind(b"\n") + 1].split(b"\n")):
        values = _parse_line(line)
        columns = values.get(part) if values is not None else None
        if isinstance(columns, dict):
            return {name: tuple(column) for name, column in columns.items() if isinstance(column, list)}
    return {}


def read_history(run_dir: str, tier: str = "seconds") -> list[HistoryPoint]:
    """Return all points of one tier, oldest first."""
    return HistoryTail(run_dir, tier).read_new()


def read_full_history(run_dir: str) -> list[HistoryPoint]:
    """Return the points of the whole run, oldest first, each part at the finest resolution that was kept."""
    points: list[HistoryPoint] = []
    for tier in reversed(TIERS):
        finer = read_history(run_dir, tier)
        if finer:
            points = [point for point in points if point.time < finer[0].time] + finer
    return points
