"""A run's history: what its ranks, GPUs and hosts did over time, in the folder history/ of the run directory.

Three files of JSON lines, appended whole: every 2 s for the last hour, every minute for the last day, every 20 minutes for
the last two weeks. A file that is full is renamed (seconds.jsonl becomes seconds.1.jsonl, in the place of the one before)
and begun anew, so no more than two lengths of each are kept. A line says who takes part ("members"), or is one moment
with a column for each gauge, in the order of the members line before it. Every file begins with a members line.
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
# Name of the file -> seconds between its lines, and lines of a full one.
TIERS: dict[str, tuple[float, int]] = {"seconds": (EVERY_S, 1800), "minutes": (60.0, 1440), "hours": (1200.0, 1008)}
_FED = {"minutes": EVERY_S, "hours": TIERS["minutes"][0]}  # what each is made from
MAX_BYTES = 64 << 20  # of one file: 512 ranks on 64 hosts take 30 KB a line
_NEWEST = frozenset(
    ("step", "memory", "memory_total", "loss", "collective_age", "beat_age", "heard")
)  # not a mean of them
_UNION = frozenset(("throttle",))
PARTS = ("ranks", "gpus", "hosts")

HistoryColumns = dict[str, tuple[Any, ...]]


@frozen
class Members:
    ranks: tuple[int, ...] = ()
    gpus: tuple[tuple[str, str], ...] = ()  # (host, uuid)
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
        """Column -> its value; empty where it does not take part. The ranks of a job are numbered without gaps."""
        ranks = self.members.ranks
        at = rank - ranks[0] if ranks else -1
        return row_at(self.ranks, at) if 0 <= at < len(ranks) and ranks[at] == rank else {}

    def of_gpu(self, host: str, uuid: str) -> dict[str, Any]:
        """Of one; of all of them `row_at`, one after the other."""
        keys = self.members.gpus
        return row_at(self.gpus, keys.index((host, uuid))) if (host, uuid) in keys else {}


def row_at(columns: HistoryColumns, at: int) -> dict[str, Any]:
    return {name: values[at] for name, values in columns.items()}


# ---- writing: the coordinator's ----


class HistoryWriter:
    """`folder`: a descriptor of the run directory. `lose`: told of bytes that could not be written; the run goes on."""

    def __init__(self, folder: int, lose: Callable[[str, int, OSError], None]) -> None:
        self._files = {name: _File(folder, name, lines, lose) for name, (_, lines) in TIERS.items()}
        self._gathered: dict[str, list[HistoryPoint]] = {"minutes": [], "hours": []}

    def write(self, moment: HistoryPoint) -> None:
        self._files["seconds"].write(moment)
        self._thin(moment, "minutes", "hours")

    def _thin(self, moment: HistoryPoint, tier: str, *coarser: str) -> None:
        """Into this file once its time is full, as one moment."""
        kept = self._gathered[tier]
        if kept and (kept[0].members != moment.members or kept[0].attempt != moment.attempt):
            self._settle(tier, *coarser)
        kept = self._gathered[tier]
        kept.append(moment)
        # One more would be too many; the clock may have been set back.
        if not 0 <= moment.time - kept[0].time < TIERS[tier][0] - 1.5 * _FED[tier]:
            self._settle(tier, *coarser)

    def _settle(self, tier: str, *coarser: str) -> None:
        kept, self._gathered[tier] = self._gathered[tier], []
        if kept:
            thinned = thin(kept)
            self._files[tier].write(thinned)
            if coarser:
                self._thin(thinned, *coarser)

    def close(self) -> None:
        """What has not filled its time is written, too."""
        self._settle("minutes", "hours")
        self._settle("hours")
        for file in self._files.values():
            file.close()


class _File:
    def __init__(self, folder: int, name: str, lines: int, lose: Callable[[str, int, OSError], None]) -> None:
        self._folder, self._name, self._limit, self._lose = folder, name, lines, lose
        self._path = f"{FOLDER}/{name}.jsonl"
        self._handle = -1
        self._lines = self._bytes = 0
        self._members: Members | None = None

    def write(self, moment: HistoryPoint) -> None:
        data = b""
        try:
            if self._lines >= self._limit or self._bytes >= MAX_BYTES:
                self._turn()
            if self._handle < 0:
                self._open()
            if moment.members != self._members:
                data = _line({"time": moment.time, "members": as_json(moment.members)})
            columns = {part: as_json(getattr(moment, part)) for part in PARTS}
            data += _line({"time": moment.time, "attempt": moment.attempt, **columns})
            os.write(self._handle, data)
        except OSError as problem:
            self._lose(self._path, len(data), problem)
            return
        self._members = moment.members
        self._lines += 1
        self._bytes += len(data)

    def _open(self) -> None:
        """What an earlier start of the run wrote stays; a line that it did not finish is ended."""
        try:
            os.mkdir(FOLDER, 0o755, dir_fd=self._folder)
        except FileExistsError:
            pass
        flags = (APPEND & ~os.O_WRONLY) | os.O_RDWR
        self._handle = os.open(self._path, flags, 0o644, dir_fd=self._folder)
        self._bytes = os.fstat(self._handle).st_size
        self._lines = at = 0
        last = b"\n"
        while block := os.pread(self._handle, 1 << 20, at):
            self._lines += block.count(b"\n")
            at, last = at + len(block), block[-1:]
        if last != b"\n":
            os.write(self._handle, b"\n")

    def _turn(self) -> None:
        self.close()
        before = f"{FOLDER}/{self._name}.1.jsonl"
        os.rename(self._path, before, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._lines = self._bytes = 0
        self._members = None

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
            self._members = None


def _line(data: dict[str, Any]) -> bytes:
    return json.dumps({"schema": SCHEMA, **data}, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def thin(moments: list[HistoryPoint]) -> HistoryPoint:
    """One for several of the same members: means, the newest of what only grows, all throttle reasons."""
    last = moments[-1]
    made = {
        part: {
            name: tuple(
                _thinned(name, [_at(getattr(moment, part), name, at) for moment in moments])
                for at in range(len(values))
            )
            for name, values in getattr(last, part).items()
        }
        for part in PARTS
    }
    return HistoryPoint(last.time, last.attempt, last.members, made["ranks"], made["gpus"], made["hosts"])


def _at(columns: HistoryColumns, name: str, at: int) -> Any:
    values = columns.get(name, ())
    return values[at] if at < len(values) else None


def _thinned(name: str, values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if name in _UNION:
        words: list[Any] = []
        for value in known:
            words += [word for word in value if word not in words]
        return tuple(words)
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known)
    if name in _NEWEST or not numbers:
        return values[-1] if name in _NEWEST else known[-1]
    mean = math.fsum(known) / len(known)
    return round(mean) if all(isinstance(value, int) for value in known) else round(mean, 6)


# ---- reading: while it is written ----


class HistoryTail:
    """New moments of one of the files since the last look."""

    def __init__(self, run_dir: str, tier: str = "seconds") -> None:
        self._dir, self._name = run_dir, tier
        self._inode, self._at = 0, 0
        self._members: Members | None = None

    def new(self) -> list[HistoryPoint]:
        """Oldest first; at the first look those of the file before, too."""
        found: list[HistoryPoint] = []
        inode = self._look(f"{self._name}.jsonl")
        if inode is None:
            return found
        if inode != self._inode:
            older = f"{self._name}.1.jsonl"
            if self._inode == 0 or self._look(older) == self._inode:
                found += self._read(older, self._at)
            self._inode, self._at, self._members = inode, 0, None
        return found + self._read(f"{self._name}.jsonl", self._at, remember=True)

    def _look(self, name: str) -> int | None:
        try:
            return os.stat(os.path.join(self._dir, FOLDER, name), follow_symlinks=False).st_ino
        except OSError:
            return None

    def _read(self, name: str, at: int, remember: bool = False) -> list[HistoryPoint]:
        try:
            with os.fdopen(open_below(self._dir, f"{FOLDER}/{name}"), "rb") as file:
                if os.fstat(file.fileno()).st_size < at:  # somebody cut it
                    at, self._members = 0, None
                file.seek(at)
                data = file.read()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        if remember:
            self._at = at + end
        return list(self._moments(data[:end].split(b"\n")))

    def _moments(self, lines: Iterable[bytes]) -> Iterator[HistoryPoint]:
        for line in lines:
            data = _parsed(line)
            if data is None:
                continue
            if "members" in data:
                self._members = _members(data["members"]) or self._members
            elif self._members is not None:
                moment = _moment(data, self._members)
                if moment is not None:
                    yield moment


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(line)  # not parse_json, which is three times as slow: an hour of 128 ranks has 17 MB
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and data.get("schema") == SCHEMA else None


def _members(data: Any) -> Members | None:
    try:
        return typed_values.read_frozen(Members, data)
    except ValueError:
        return None


_FIELDS = {"time": "float", "attempt": "int", **dict.fromkeys(PARTS, "dict[str, tuple[Any, ...]]")}


def _moment(data: dict[str, Any], members: Members) -> HistoryPoint | None:
    try:
        told = typed_values.read_fields(_FIELDS, data)
    except ValueError:
        return None
    for part in PARTS:
        if any(len(column) != len(getattr(members, part)) for column in told[part].values()):
            return None
    return HistoryPoint(told["time"], told["attempt"], members, *(told[part] for part in PARTS))


def newest_columns(run_dir: str, part: str = "ranks") -> HistoryColumns:
    """Of the last whole line, without its members: 64 KB are read, whatever the file's length."""
    try:
        with os.fdopen(open_below(run_dir, f"{FOLDER}/seconds.jsonl"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            data = file.read(1 << 16)
    except OSError:
        return {}
    for line in reversed(data[: data.rfind(b"\n") + 1].split(b"\n")):
        found = _parsed(line)
        columns = found.get(part) if found is not None else None
        if isinstance(columns, dict):
            return {name: tuple(values) for name, values in columns.items() if isinstance(values, list)}
    return {}


def read_history(run_dir: str, tier: str = "seconds") -> list[HistoryPoint]:
    """All that one of the files holds, oldest first."""
    return HistoryTail(run_dir, tier).new()


def whole_history(run_dir: str) -> list[HistoryPoint]:
    """Return all moments, oldest first, as fine as they are still known: of hours, then of minutes, then of seconds."""
    found: list[HistoryPoint] = []
    for tier in reversed(TIERS):
        moments = read_history(run_dir, tier)
        if moments:
            found = [moment for moment in found if moment.time < moments[0].time] + moments
    return found
