"""How a snapshot is made: run directories, this machine's gauges, and what running jobs record of other machines.

A `Gatherer` lives as long as its viewer and remembers what it has read: the second snapshot costs what has changed.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

from stoker.contract import safe_io
from stoker.contract.env_vars import MACHINE
from stoker.contract.errors import Refusal, parsing
from stoker.contract.frozen import fields_of, replace
from stoker.contract.text import escape
from stoker.contract.typed_values import known_fields
from stoker.control.machine.gauges import Gauges
from stoker.control.machine.model import OFFLINE, GpuGauges, HostGauges
from stoker.control.record import run_index, run_record
from stoker.control.record.history import EVERY_S, HistoryPoint, row_at
from stoker.control.show.curves import Curve
from stoker.control.show.job_view import folder_of
from stoker.control.show.run_tail import RECENT, Remembering, RunTail
from stoker.control.show.slow_rank import slow_ranks
from stoker.control.show.snapshot import DAMAGED, RUNNING, UNKNOWN, RunView, Snapshot, finite, metric

OFFLINE_S = 10.0  # without a word
GPU_SERIES = ("utilization", "memory_used", "temperature", "power")
HOST_SERIES = ("cpu", "memory_available", "received", "sent")

HostReading = tuple[HostGauges, tuple[GpuGauges, ...]]


class SnapshotCollector:
    """`root`: the folder of the runs. `everybody`: other users' runs, too. `machine`: with this machine's gauges.

    `whole_curves`: of watched runs; else the curves of its snapshots hold the newest points only.
    """

    def __init__(self, root: str, everybody: bool = False, machine: bool = True, whole_curves: bool = True) -> None:
        self.root = root
        self._everybody, self._whole_curves = everybody, whole_curves
        self._gauges = Gauges(os.environ.get(MACHINE), root) if machine else None
        self._read = Remembering()
        self._folders: dict[str, RunTail] = {}
        self._series: dict[tuple[str, ...], deque[float | None]] = {}
        self._before: float | None = None

    def snapshot(
        self, watched: Collection[str] = (), elsewhere: Iterable[HostReading] = (), only: str | None = None
    ) -> Snapshot:
        """Of every run a row; of running ones, and of those in `watched` (ids), with ranks, curve and who is slow.

        `elsewhere`: readings of other hosts, whoever took them. `only`: this run and no other, by its path.
        """
        now = time.time()
        listing, problem = self._listing(only)
        self._forget(listing)
        runs = [self._run(record, now, watched) for record in listing.runs]
        runs += [_damaged(self.root, name, why) for name, why in listing.damaged]
        hosts, gpus = self._machines(runs, elsewhere, now)
        runs = [replace(run, slow=slow_ranks(run, self._folder(run), hosts, gpus)) for run in runs]
        interval = now - self._before if self._before is not None else None
        self._before = now
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
        """(rows, other users' folders left out, what could not be read) and nothing else: for a list."""
        now = time.time()
        listing = run_index.list_runs(self.root, self._everybody, self._read)
        rows = [self._run(record, now, None) for record in listing.runs]
        return tuple(rows), listing.others, listing.skipped

    def curve(self, run_id: str, metric_name: str = "loss") -> Curve:
        """All points of one metric, of a run that the last snapshot had watched."""
        folder = self._folders.get(run_id)
        return folder.curve(metric_name) if folder is not None else Curve()

    def metric_names(self, run_id: str) -> tuple[str, ...]:
        folder = self._folders.get(run_id)
        return tuple(folder.curve_names()) if folder is not None else ()

    def _listing(self, only: str | None) -> tuple[run_index.RunListing, str]:
        try:
            if only is None:
                return run_index.list_runs(self.root, self._everybody, self._read), ""
            run = run_record.read_run(os.path.realpath(only))
            return run_index.RunListing((run,) if run is not None else (), (), 0), ""
        except run_record.Damaged as problem:
            name = os.path.basename(str(only))
            return run_index.RunListing((), ((name, str(problem)),), 0), ""
        except Refusal as problem:  # the folder can't be read
            return run_index.RunListing((), (), 0), problem.line

    def _forget(self, listing: run_index.RunListing) -> None:
        """Runs that were deleted."""
        self._read.forget({record.dir for record in listing.runs})
        for gone in self._folders.keys() - {record.id for record in listing.runs}:
            del self._folders[gone]

    def _folder(self, run: RunView) -> RunTail | None:
        return self._folders.get(run.id)

    def _run(self, record: run_record.RunRecord, now: float, watched: Collection[str] | None) -> RunView:
        """Return the run's row, with ranks and curve while it runs or is watched; with `watched` None never."""
        folder = self._folders.get(record.id)
        if folder is None or folder.record.dir != record.dir:
            folder = self._folders[record.id] = folder_of(record, self._whole_curves)
        folder.record = record
        close = watched is not None and (record.id in watched or run_record.run_status(record) in (RUNNING, UNKNOWN))
        try:
            with parsing("it"):
                return folder.run(now, close)
        except Refusal as problem:  # a damaged record keeps no other run from being listed
            return _damaged(self.root, record.id, problem.line)

    # ---- hosts and GPUs ----

    def _machines(
        self, runs: Iterable[RunView], elsewhere: Iterable[HostReading], now: float
    ) -> tuple[tuple[HostGauges, ...], tuple[GpuGauges, ...]]:
        """This machine's own reading, then those given, then what running jobs recorded of the hosts they use."""
        found: dict[str, HostReading] = {}
        if self._gauges is not None:
            try:
                here = self._gauges.read()
                found[here[0].name] = here
            except (Refusal, OSError) as problem:
                name, why = os.uname().nodename, problem.line if isinstance(problem, Refusal) else str(problem)
                found[name] = HostGauges(name, now, OFFLINE, why), ()
        for host_reading in elsewhere:
            found[host_reading[0].name] = host_reading
        for run in runs:
            folder = self._folder(run)
            if run.state in (RUNNING, UNKNOWN) and folder is not None:
                self._remember(folder)
                for host, cards in recorded_hosts(folder, now):
                    known, seen = found.get(host.name, (host, ()))
                    # This viewer may not see a host's cards: in a container without them, say.
                    uuids = {card.uuid for card in seen}
                    found[host.name] = known, (*seen, *(card for card in cards if card.uuid not in uuids))
        hosts = tuple(self._with_recent(host, (host.name,), HOST_SERIES) for host, _ in found.values())
        seen_cards = (card for _, seen in found.values() for card in seen)
        gpus = tuple(self._with_recent(card, (card.host, card.uuid), GPU_SERIES) for card in seen_cards)
        return hosts, gpus

    def _remember(self, folder: RunTail) -> None:
        """What the job recorded before this viewer began."""
        for moment in folder.moments if self._before is None else ():
            for at, key in enumerate(moment.members.gpus):
                for name in GPU_SERIES:
                    value = moment.gpus[name][at] if name in moment.gpus else None
                    self._values((*key, name)).append(finite(metric(value)))

    def _values(self, key: tuple[str, ...]) -> deque[float | None]:
        return self._series.setdefault(key, deque(maxlen=RECENT))

    def _with_recent(self, gauges: Any, key: tuple[str, ...], names: tuple[str, ...]) -> Any:
        for name in names:
            self._values((*key, name)).append(finite(metric(getattr(gauges, name))))
        return replace(gauges, recent={name: tuple(self._values((*key, name))) for name in names})


def recorded_hosts(folder: RunTail, now: float) -> Iterable[HostReading]:
    """The hosts of a run, as its coordinator last heard of them; OFFLINE where that is long ago."""
    moment = folder.moment
    if moment is None:
        return
    machines = folder.record.data.get("hosts") or {}
    cards: dict[str, list[tuple[int, str]]] = {}
    for at, (host_name, uuid) in enumerate(moment.members.gpus):
        cards.setdefault(host_name, []).append((at, uuid))
    for place, name in enumerate(moment.members.hosts):
        row = {key: value for key, value in row_at(moment.hosts, place).items() if value is not None}
        heard = finite(metric(row.pop("heard", None)))
        if "load" in row:
            row["load"] = (row["load"],)
        silent = now - (heard if heard is not None else moment.time)
        host = HostGauges(**{**known_fields(HostGauges, row), "name": name, "time": moment.time})
        if silent > OFFLINE_S:
            host = replace(host, state=OFFLINE, reason=f"no word from it for {silent:.0f} s")
        yield host, tuple(_recorded_gpus(name, cards.get(name, ()), moment, machines.get(name)))


def _recorded_gpus(host: str, members: Iterable[tuple[int, str]], moment: HistoryPoint, machine: Any) -> Iterable[GpuGauges]:
    told = machine.get("gpus") if isinstance(machine, dict) else None
    cards = {one.get("uuid"): one for one in told or () if isinstance(one, dict)} if isinstance(told, list) else {}
    same = ("index", "name", "mig", "mig_parent", "pci", "memory_total")
    for at, uuid in members:
        fixed = {key: cards.get(uuid, {}).get(key) for key in same}
        row = {key: column[at] for key, column in moment.gpus.items() if column[at] is not None}
        if isinstance(row.get("throttle"), list):
            row["throttle"] = tuple(row["throttle"])
        known = known_fields(GpuGauges, {**fixed, **{key: row[key] for key in row if key in fields_of(GpuGauges)}})
        yield GpuGauges(**{"index": at, **known, "uuid": uuid, "host": host})


def _damaged(root: str, name: str, why: str) -> RunView:
    path = os.path.join(root, name)
    try:
        about = os.lstat(path)
        uid, when = about.st_uid, about.st_mtime
    except OSError:
        uid, when = os.getuid(), 0.0
    mine, user = safe_io.is_own_uid(uid, root), safe_io.user_name(uid)
    return RunView(id=name, name="", dir=path, user=user, mine=mine, state=DAMAGED, started=when, problem=escape(why, 200))
