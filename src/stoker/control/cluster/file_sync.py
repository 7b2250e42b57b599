"""--sync and --stage: the working directory, data or weights to every host's disk. Only what differs by hash travels.

All hosts side by side, each over the connection that its agent will use; the far end is control/agent/file_receiver.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence

from stoker.contract import protocol, typed_values
from stoker.contract.errors import EX_NOINPUT, EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen, pick_fields
from stoker.contract.progress import BYTES, Progress
from stoker.contract.safe_io import open_regular
from stoker.contract.text import escape
from stoker.contract.units import format_bytes, format_duration, plural
from stoker.control.cluster import file_list
from stoker.control.cluster.hosts import Host, Hosts
from stoker.control.cluster.sync_target import SyncRefused, SyncTarget, SyncTimeout
from stoker.control.machine.file_hash import FileHashes

_CHUNK = 1 << 18
SILENCE_S = 20.0  # nothing heard for so long: each side takes the other for gone. A sick disk here may be slow to read
_LONG = 2 * 10**9  # bytes that take seconds to hash
_RECEIVER = "stoker.control.agent.file_receiver"
_COUNTS = {"written": "int", "removed": "int", "others": "dict[str, int]"}
Say = Callable[[str], None]


@frozen
class Load:
    """What goes to one place on each host. Read once: who comes later gets what the others got."""

    what: str  # for people: "the working directory", or the path
    listing: file_list.FileList
    entries: bytes  # the offer, hashes included
    manifest: str
    origin: str  # the folder it comes from, where copies from others must stay
    places: dict[str, str]  # host -> the folder there; a host whose own folder it is has none


def sync(hosts: Hosts, source: str, say: Say) -> None:
    copy(hosts, sync_load(hosts, source, say), say)


def stage(hosts: Hosts, what: Sequence[str], say: Say) -> None:
    for told in what:
        copy(hosts, stage_load(hosts, told, say), say)


def sync_load(hosts: Hosts, source: str, say: Say) -> Load:
    """`source`, as git knows it, to each host's workdir; the same path where it has none."""
    source = os.path.abspath(source)
    places = {host.name: host.workdir or source for host in hosts.hosts}
    load = _load("the working directory", file_list.working_directory(source), "inside", hosts, places, say)
    skipped = load.listing.skipped
    for path, why in skipped[:3]:
        say(f"{escape(path)} is not copied: {why}")
    if len(skipped) > 3:
        say(f"{len(skipped) - 3} more are not copied")
    return load


def stage_load(hosts: Hosts, told: str, say: Say) -> Load:
    """PATH to the same path on every host, or PATH=REMOTE; links that stay in it are followed."""
    path, remote = split(told)
    one_file = os.path.isfile(path)
    places = {}
    for host in hosts.hosts:
        where = remote if remote.startswith(("/", "~")) else os.path.join(host.workdir or os.getcwd(), remote)
        if one_file and os.path.basename(where) != os.path.basename(path):
            raise Refusal(f"--stage {told}: a file keeps its name; end REMOTE with /{os.path.basename(path)}", EX_USAGE)
        places[host.name] = os.path.dirname(where) if one_file else where
    return _load(path, file_list.tree(path), "", hosts, places, say)


def split(told: str) -> tuple[str, str]:
    """(local path, remote path). A path with '=' in it that is there is one path."""
    path, equals, remote = told.rpartition("=")
    if not equals or os.path.exists(os.path.expanduser(told)):
        path, remote = told, ""
    path = os.path.abspath(os.path.expanduser(path))
    if not os.path.exists(path):
        raise Refusal(f"--stage {told}: no file or folder {path}", EX_NOINPUT)
    return path, remote.rstrip("/") or path


def _own(host: Host, where: str, source: str) -> bool:
    return host.here and os.path.realpath(os.path.expanduser(where)) == os.path.realpath(source)


def _load(what: str, found: file_list.FileList, manifest: str, hosts: Hosts, places: dict[str, str], say: Say) -> Load:
    total = sum(entry.size for entry in found.entries)
    if total > _LONG:
        say(f"reading {what}, {format_bytes(total)}, for its hashes; those of big files are remembered")
    hashes = FileHashes()
    rows = []
    with Progress(f"hashing {what}", total, unit=BYTES) as progress:
        for entry in found.entries:
            try:
                place = os.path.join(found.root, entry.path)
                value = entry.target if entry.kind == "link" else hashes.of(place, progress.tick)
            except OSError as problem:
                line = f"{os.path.join(found.root, entry.path)} can't be read: {problem.strerror}"
                raise Refusal(line, EX_NOINPUT) from problem
            rows.append([entry.path, entry.kind, entry.mode, entry.size, value])
    hashes.save()
    others = {host.name: places[host.name] for host in hosts.hosts if not _own(host, places[host.name], found.root)}
    origin = f"{os.uname().nodename}:{found.root}" if manifest else ""
    return Load(what, found, json.dumps(rows).encode(), manifest, origin, others)


def copy(hosts: Hosts, load: Load, say: Say) -> None:
    """To these hosts, side by side. Refuses with a line per host that could not take it."""
    copies = [_Copy(host, hosts, load, load.places[host.name]) for host in hosts.hosts if host.name in load.places]
    threads = [threading.Thread(target=copy.run, name=f"copy to {copy.host.name}", daemon=True) for copy in copies]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    progress = Progress(f"copying {load.what} to {plural(len(copies), 'host')}", 0, unit=BYTES, say=say)
    try:
        while any(thread.is_alive() for thread in threads):
            next(thread for thread in threads if thread.is_alive()).join(0.1)
            progress.total = sum(copy.needed for copy in copies)
            progress.at(sum(copy.sent for copy in copies), "" if progress.total else "comparing")
    finally:
        progress.end()
        for copy in copies:
            copy.stop()
    failed = {copy.host.name: copy.failure for copy in copies if copy.failure}
    if failed:
        raise NotCopied(failed)
    for copy in copies:
        for origin, count in copy.others.items():
            more = f"{copy.where} also holds {count} files that --sync brought from {origin}"
            say(f"host {copy.host.name}: {more}: they stay; give each its own workdir:")
    took = [copy for copy in copies if copy.written or copy.removed]
    if took:
        names = ", ".join(f"{copy.host.name} ({_count(copy)})" for copy in took)
        had = f"; {len(copies) - len(took)} had it" if len(took) < len(copies) else ""
        say(f"copied {load.what} to {names} in {format_duration(time.monotonic() - began)}{had}")
    elif copies:
        say(f"{load.what} is the same on all hosts, nothing to copy")


def _count(copy: _Copy) -> str:
    parts = [f"{plural(copy.written, 'file')}, {format_bytes(copy.sent)}"] if copy.written else []
    return ", ".join([*parts, *([f"{copy.removed} removed"] if copy.removed else [])])


class NotCopied(Refusal):
    """host -> why it does not have it now."""

    def __init__(self, hosts: dict[str, str]) -> None:
        self.hosts = hosts
        first, *more = (f"host {name}: {why}" for name, why in hosts.items())
        super().__init__(first, EX_UNAVAILABLE, cause="host.copy", more=more)


class CopyTimeout:
    """To one host that came when the run had begun, in a thread: the others' ranks go on. It is offered what they were.

    Staged data that is another by now does not travel. Of a working directory it does (a log may grow there): the
    program is compared afterwards.
    """

    def __init__(self, host: Host, hosts: Hosts, loads: Sequence[Load]) -> None:
        mine = ((load, load.places[host.name]) for load in loads if host.name in load.places)
        self._copies = [_Copy(host, hosts, load, place, as_offered=not load.manifest) for load, place in mine]
        self._stopped = False
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name=f"copy to {host.name}", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def brought(self) -> str:
        took = [copy for copy in self._copies if copy.written or copy.removed]
        return "; ".join(f"copied {copy.load.what} to {copy.host.name} ({_count(copy)})" for copy in took)

    def _run(self) -> None:
        for copy in self._copies:
            if not self._stopped and not self.failure:
                copy.run()
                self.failure = f"{copy.load.what} could not be copied: {copy.failure}" if copy.failure else ""

    def stop(self) -> None:
        self._stopped = True
        for copy in self._copies:
            copy.stop()


class _Copy:
    """One host's, in a thread of its own."""

    def __init__(self, host: Host, hosts: Hosts, load: Load, where: str, as_offered: bool = False) -> None:
        self.host, self._hosts, self.load, self.where, self._as_offered = host, hosts, load, where, as_offered
        self.needed = self.sent = self.written = self.removed = 0
        self.others: dict[str, int] = {}  # folders that were copied to the same place -> files of theirs that are there
        self.failure = ""
        self._far: SyncTarget | None = None

    def run(self) -> None:
        self.failure = "the copy was broken off"  # until it is known to be whole
        try:
            self._talk()
            self.failure = ""
        except (SyncRefused, SyncTimeout, protocol.ProtocolError, OSError, EOFError) as problem:
            self.failure = self._why(problem)
        except Exception as problem:  # of a thread nobody would hear of it
            self.failure = f"{type(problem).__name__}: {problem}"
        finally:
            self.stop()

    def stop(self) -> None:
        if self._far is not None:
            self._far.stop()

    def _why(self, problem: Exception) -> str:
        if self._far is None:
            return "there is no ssh client on the PATH" if isinstance(problem, FileNotFoundError) else str(problem)
        why = self._far.why(problem)
        if not self._far.greeted or isinstance(problem, (SyncRefused, protocol.ProtocolError)):
            return why
        lost = f"the connection was lost in the middle of the copy, after {format_bytes(self.sent)}"
        return f"{lost}: {why}" if why else lost

    def _talk(self) -> None:
        far = self._far = SyncTarget(self.host, self._hosts, _RECEIVER, SILENCE_S)
        far.start()
        order = {
            "do": "offer",
            "root": self.where,
            "silence": SILENCE_S,
            **pick_fields(self.load, "manifest", "origin"),
        }
        far.send(protocol.encode_message(order, self.load.entries))
        need = set(protocol.read_payload("list[str]", far.answer()[1], "its list of missing files"))
        missing = [entry for entry in self.load.listing.entries if entry.path in need]
        offered = {row[0]: row[4] for row in json.loads(self.load.entries)} if self._as_offered else {}
        self.needed = sum(entry.size for entry in missing)
        for entry in missing:
            self._send_file(far, entry, offered.get(entry.path))
        far.send(protocol.encode_message({"do": "finish"}))
        finished, _ = far.answer()
        try:
            counts = typed_values.read_fields(_COUNTS, finished)
        except ValueError as problem:
            raise protocol.ProtocolError(f"its last message can't be read: {problem}") from None
        self.written, self.removed = counts["written"], counts["removed"]
        self.others = {escape(origin): count for origin, count in counts["others"].items()}

    def _send_file(self, far: SyncTarget, entry: file_list.FileEntry, offered: str | None) -> None:
        """Hashes what it sends: a file may have changed since it was offered. `offered`: it must not have."""
        digest = hashlib.sha256()
        far.send(protocol.encode_message({"do": "begin", "path": entry.path, "mode": entry.mode}))
        place = os.path.join(self.load.listing.root, entry.path)
        try:
            handle = open_regular(place)
        except OSError as problem:
            raise SyncRefused(f"{place} can no longer be read: {problem.strerror}") from problem
        with os.fdopen(handle, "rb", buffering=0) as file:
            while data := file.read(_CHUNK):
                digest.update(data)
                far.send(protocol.encode_message({"do": "data"}, data))
                self.sent += len(data)
        if offered not in (None, digest.hexdigest()):
            raise SyncRefused(f"{place} has changed here since the run began")
        far.send(protocol.encode_message({"do": "end", "sha256": digest.hexdigest()}))
