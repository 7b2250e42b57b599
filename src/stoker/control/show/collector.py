"""Collects snapshots from run directories, this machine's gauges, and the hosts' gauges that running jobs record.

A `SnapshotCollector` lives as long as its viewer and caches what it has read, so later snapshots read only what changed.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from stoker.contract import safe_io
from stoker.contract.env_vars import MACHINE
from stoker.contract.errors import Refusal, parsing
from stoker.contract.frozen import fields_of, replace
from stoker.contract.text import escape
from stoker.contract.typed_values import read_known_fields
from stoker.control.machine.gauges import Gauges
from stoker.control.machine.model import OFFLINE, GpuGauges, HostGauges
from stoker.control.record import run_index, run_record
from stoker.control.record.history import EVERY_S, HistoryPoint, row_at
from stoker.control.show.job_view import open_run_tail
from stoker.control.show.run_tail import RECENT, RecordCache, RunTail
from stoker.control.show.slow_rank import find_slow_ranks
from stoker.control.show.snapshot import DAMAGED, RUNNING, UNKNOWN, RunView, Snapshot, parse_finite

OFFLINE_S = 10.0  # a host that has not reported for this long is OFFLINE
GPU_SERIES = ("utilization", "memory_used", "temperature", "power")
HOST_SERIES = ("cpu", "memory_available", "received", "sent")

HostReading = tuple[HostGauges, tuple[GpuGauges, ...]]


class SnapshotCollector:
    """Collects snapshots of the runs in the folder `root`.

    With `everybody` it includes other users' runs, with `machine` this machine's gauges. With `whole_curves` False the
    curves of watched runs have only their newest points.
    """

    def __init__(self, root: str, everybody: bool = False, machine: bool = True, whole_curves: bool = True) -> None:
        self.root = root
        self._everybody, self._whole_curves = everybody, whole_curves
        self._gauges = Gauges(os.environ.get(MACHINE), root) if machine else None
        self._read_record = RecordCache()
        self._tails: dict[str, RunTail] = {}  # by run id
        self._series: dict[tuple[str, ...], deque[float | None]] = {}
        self._previous_time: float | None = None

    def snapshot(
        self, watched: Collection[str] = (), elsewhere: Iterable[HostReading] = (), only: str | None = None
    ) -> Snapshot:
        """Take a snapshot of all runs, or of the single run whose path is `only`.

        Running runs and those in `watched` (ids) also have their ranks, a curve and their slow ranks. `elsewhere` are
        readings of other hosts.
        """
        now = time.time()
        listing, problem = self._list_runs(only)
        self._read_record.forget_others({record.dir for record in listing.runs})
        for deleted in self._tails.keys() - {record.id for record in listing.runs}:
            del self._tails[deleted]
        runs = [self._make_view(record, now, watched) for record in listing.runs]
        runs += [_make_damaged_view(self.root, name, reason) for name, reason in listing.damaged]
        hosts, gpus = self._read_machines(runs, elsewhere, now)
        runs = [replace(run, slow=find_slow_ranks(run, self._tails.get(run.id), hosts, gpus)) for run in runs]
        interval = now - self._previous_time if self._previous_time is not None else None
        self._previous_time = now
        return Snapshot(
            time=now,
            hosts=hosts,
            gpus=gpus,
            runs=tuple(sorted(runs, key=lambda run: run.started)),
            root=self.root,
            others=listing.others,
            problems=(problem,) if problem else (),
            interval=interval if interval is not None and interval > 0 else EVERY_S,
        )

    def runs(self) -> tuple[tuple[RunView, ...], int, str]:
        """Return (runs, number of skipped folders of other users, a line about unreadable folders); don't read any gauges."""
        now = time.time()
        listing = run_index.list_runs(self.root, self._everybody, self._read_record)
        runs = [self._make_view(record, now, None) for record in listing.runs]
        return tuple(runs), listing.others, listing.skipped

    def _list_runs(self, only: str | None) -> tuple[run_index.RunListing, str]:
        """Return the runs, and the reason why the runs folder can't be read, or ""."""
        try:
            if only is None:
                return run_index.list_runs(self.root, self._everybody, self._read_record), ""
            record = run_record.read_run(os.path.realpath(only))
            return run_index.RunListing((record,) if record is not None else (), (), 0), ""
        except run_record.DamagedRecord as problem:
            name = os.path.basename(str(only))
            return run_index.RunListing((), ((name, str(problem)),), 0), ""
        except Refusal as problem:
            return run_index.RunListing((), (), 0), problem.line

    def _make_view(self, record: run_record.RunRecord, now: float, watched: Collection[str] | None) -> RunView:
        """Return the run's view. Fill in ranks and curve if it is running or in `watched`, but not if `watched` is None."""
        tail = self._tails.get(record.id)
        if tail is None or tail.record.dir != record.dir:
            tail = self._tails[record.id] = open_run_tail(record, self._whole_curves)
        tail.record = record
        is_watched = watched is not None and (
            record.id in watched or run_record.run_status(record) in (RUNNING, UNKNOWN)
        )
        try:
            with parsing("it"):
                return tail.view(now, is_watched)
        except Refusal as problem:  # one damaged record must not hide the other runs
            return _make_damaged_view(self.root, record.id, problem.line)

    # ---- hosts and GPUs ----

    def _read_machines(
        self, runs: Iterable[RunView], elsewhere: Iterable[HostReading], now: float
    ) -> tuple[tuple[HostGauges, ...], tuple[GpuGauges, ...]]:
        """Read this machine's gauges, then add `elsewhere` and the gauges that running jobs recorded."""
        readings: dict[str, HostReading] = {}
        if self._gauges is not None:
            try:
                host, gpus = self._gauges.read()
            except (Refusal, OSError) as problem:
                reason = problem.line if isinstance(problem, Refusal) else str(problem)
                host, gpus = HostGauges(os.uname().nodename, now, OFFLINE, reason), ()
            readings[host.name] = host, gpus
        for reading in elsewhere:
            readings[reading[0].name] = reading
        for run in runs:
            tail = self._tails.get(run.id)
            if run.state not in (RUNNING, UNKNOWN) or tail is None:
                continue
            if self._previous_time is None:
                self._load_recorded_series(tail)
            for host, gpus in read_recorded_hosts(tail, now):
                known_host, known_gpus = readings.get(host.name, (host, ()))
                # Add the GPUs that this viewer can't see, for example because its container has none.
                uuids = {gpu.uuid for gpu in known_gpus}
                readings[host.name] = known_host, (*known_gpus, *(gpu for gpu in gpus if gpu.uuid not in uuids))
        return (
            tuple(self._add_recent_values(host, (host.name,), HOST_SERIES) for host, _ in readings.values()),
            tuple(
                self._add_recent_values(gpu, (gpu.host, gpu.uuid), GPU_SERIES)
                for _, gpus in readings.values()
                for gpu in gpus
            ),
        )

    def _load_recorded_series(self, tail: RunTail) -> None:
        """Add the GPU values that the job recorded before this viewer started, so that sparklines are not empty."""
        for point in tail.points:
            for index, key in enumerate(point.members.gpus):
                for name in GPU_SERIES:
                    value = point.gpus[name][index] if name in point.gpus else None
                    self._series_of((*key, name)).append(parse_finite(value))

    def _series_of(self, key: tuple[str, ...]) -> deque[float | None]:
        return self._series.setdefault(key, deque(maxlen=RECENT))

    def _add_recent_values(self, gauges: Any, key: tuple[str, ...], names: tuple[str, ...]) -> Any:
        for name in names:
            self._series_of((*key, name)).append(parse_finite(getattr(gauges, name)))
        return replace(gauges, recent={name: tuple(self._series_of((*key, name))) for name in names})


def read_recorded_hosts(tail: RunTail, now: float) -> Iterator[HostReading]:
    """Yield the hosts of a run with the gauges that its launcher last received; a host is OFFLINE after OFFLINE_S."""
    point = tail.newest_point
    if point is None:
        return
    machines = tail.record.data.get("hosts") or {}
    gpus_by_host: dict[str, list[tuple[int, str]]] = {}
    for index, (host_name, uuid) in enumerate(point.members.gpus):
        gpus_by_host.setdefault(host_name, []).append((index, uuid))
    for index, name in enumerate(point.members.hosts):
        row = {key: value for key, value in row_at(point.hosts, index).items() if value is not None}
        reported_at = parse_finite(row.pop("heard", None))
        if "load" in row:
            row["load"] = (row["load"],)
        silent_s = now - (reported_at if reported_at is not None else point.time)
        host = HostGauges(**{**read_known_fields(HostGauges, row), "name": name, "time": point.time})
        if silent_s > OFFLINE_S:
            host = replace(host, state=OFFLINE, reason=f"it has not reported for {silent_s:.0f} s")
        yield host, tuple(_read_recorded_gpus(name, gpus_by_host.get(name, ()), point, machines.get(name)))


def _read_recorded_gpus(
    host: str, columns: Iterable[tuple[int, str]], point: HistoryPoint, machine: Any
) -> Iterator[GpuGauges]:
    """Yield a host's GPUs with the gauges of `point` and the fixed properties of `machine`, an entry of run.json."""
    listed = machine.get("gpus") if isinstance(machine, dict) else None
    described = {gpu.get("uuid"): gpu for gpu in listed if isinstance(gpu, dict)} if isinstance(listed, list) else {}
    for column, uuid in columns:
        fixed = {
            key: described.get(uuid, {}).get(key)
            for key in ("index", "name", "mig", "mig_parent", "pci", "memory_total")
        }
        row = {key: values[column] for key, values in point.gpus.items() if values[column] is not None}
        if isinstance(row.get("throttle"), list):
            row["throttle"] = tuple(row["throttle"])
        gauges = {key: value for key, value in row.items() if key in fields_of(GpuGauges)}
        fields = read_known_fields(GpuGauges, {**fixed, **gauges})
        yield GpuGauges(**{"index": column, **fields, "uuid": uuid, "host": host})


def _make_damaged_view(root: str, name: str, reason: str) -> RunView:
    path = os.path.join(root, name)
    try:
        status = os.lstat(path)
        uid, started = status.st_uid, status.st_mtime
    except OSError:
        uid, started = os.getuid(), 0.0
    return RunView(
        id=name,
        name="",
        dir=path,
        user=safe_io.user_name(uid),
        mine=safe_io.is_own_uid(uid, root),
        state=DAMAGED,
        started=started,
        problem=escape(reason, 200),
    )
