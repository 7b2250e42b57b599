"""The receiving side of a copy: says which files it lacks, takes those, and removes what an earlier copy brought and is no more.

Orders come as the protocol's messages on stdin:
  {"do": "offer", "root", "manifest", "origin", "silence"} + a JSON list of [path, kind, mode, size, sha256 or link's target] → {"is": "need"} + a JSON list
  {"do": "begin", "path", "mode"}, {"do": "data"} + bytes …, {"do": "end", "sha256"}                        (per file)
  {"do": "finish"}                                                                                          → {"is": "finished", "written", "removed", "others"}
Besides it says {"is": "ping"} every second, whatever it is at: hashing what is there may take minutes.
Nothing is ever half there: a file is written beside its place, compared by hash, and then takes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import stat
import sys
import tempfile
import threading
from typing import Any

from stoker.contract import layout, protocol, typed_values
from stoker.contract.safe_io import AtomicFile, is_trusted, read_json
from stoker.contract.units import format_bytes
from stoker.control.machine.file_hash import FileHashes, sha256_of

_ORDERS: dict[str, dict[str, str]] = {
    "offer": {"root": "str", "manifest": "str", "origin": "str", "silence": "float"},
    "begin": {"path": "str", "mode": "int"},
    "data": {},
    "end": {"sha256": "str"},
    "finish": {},
}
_ENTRIES = "list[tuple[str, str, int, int, str]]"
_RESERVE = 16 << 20  # a disk filled to its last byte stops more than us

Entry = tuple[str, str, int, int, str]  # path, kind, mode, size, sha256 or link's target


class Refused(Exception):
    """One line for the user."""


class Receiver:
    """Takes one copy to one folder."""

    def __init__(self) -> None:
        self._hashes = FileHashes()
        self._root = ""
        self._manifest = ""
        self._offered: dict[str, tuple[str, str]] = {}  # path -> (kind, sha256 or target)
        self._ours: dict[str, str] = {}  # what earlier copies from there and this one wrote, with its hash
        self._others: dict[str, dict[str, str]] = {}  # origin -> what copies from elsewhere wrote
        self._origin = ""
        self._written = 0
        self._path = self._fresh = ""
        self.silence_s = 60.0

    @property
    def at(self) -> str:
        return os.path.join(self._root, self._path)

    def offer(self, root: str, manifest: str, entries: list[Entry], origin: str = "") -> list[str]:
        """Return the paths of the files that are not here, or differ.

        The list of what was copied lies in the folder itself if `manifest` is "inside"; if it is "", below our cache
        (data that a script lists is not to have a file of ours among it). `origin` is the folder the copy comes from:
        what came from another one stays. With "" the newest copy says what is to be there.
        """
        self._root = os.path.abspath(os.path.expanduser(root))
        os.makedirs(self._root, exist_ok=True)
        if not os.access(self._root, os.W_OK | os.X_OK):
            raise Refused(f"no permission to write in the folder {self._root}")
        name = hashlib.sha256(os.fsencode(self._root)).hexdigest()[:32]
        self._manifest = os.path.join(layout.cache_home(os.environ), "staged", f"{name}.json")
        if manifest == "inside":
            self._manifest = os.path.join(self._root, layout.SYNCED)
        self._origin = origin
        self._others = _read_manifest(self._manifest)
        self._ours = self._others.pop(origin, {})
        self._others.pop("", None)  # of a copy that did not say where it came from
        need, size_of_need = [], 0
        for path, kind, mode, size, value in entries:
            self._offered[path] = (kind, value)
            if kind == "link":
                continue  # at the end, with everything there
            if self._has(path, size, value):
                self._set_mode(path, mode)
            else:
                need.append(path)
                size_of_need += size
        disk = os.statvfs(self._root)
        free = disk.f_bavail * disk.f_frsize
        if size_of_need and size_of_need + _RESERVE > free:
            raise Refused(
                f"the disk of {self._root} is full: {format_bytes(size_of_need)} to copy, {format_bytes(free)} free"
            )
        if need:
            self._ours |= {path: self._offered[path][1] for path in need}
            self._save_manifest()  # before the first byte: a copy that breaks off is still known as ours
        return need

    def _place(self, path: str) -> str:
        return os.path.join(self._root, path)

    def _link_above(self, path: str) -> str:
        """Return the first folder of the path that is a link; empty if none is. What lies behind it is not ours to change."""
        return next((folder for folder in _folders_of(path) if os.path.islink(self._place(folder))), "")

    def _has(self, path: str, size: int, sha256: str) -> bool:
        if self._link_above(path) in self._ours:
            return False  # an earlier copy brought that link, and this one brings a folder
        try:
            about = os.lstat(self._place(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(about.st_mode) and about.st_size == size and self._hashes.of(self._place(path)) == sha256

    def _set_mode(self, path: str, mode: int) -> None:
        """Set whether a file is a program. The rest of its mode is this host's own affair."""
        place = self._place(path)
        if (os.stat(place).st_mode ^ mode) & 0o111 and not self._link_above(path):
            os.chmod(place, mode)

    def _link(self, path: str, target: str) -> None:
        place = self._place(path)
        if os.path.islink(place) and os.readlink(place) == target:
            return
        self._make_way(path)
        if os.path.lexists(place):
            os.unlink(place)
        os.symlink(target, place)
        self._ours[path] = "-> " + target
        self._written += 1

    def _make_way(self, path: str) -> None:
        """Make the folder of a file. A link or file in the way is removed if an earlier copy brought it. Raises Refused otherwise."""
        for folder in _folders_of(path):
            step = self._place(folder)
            if os.path.islink(step) or os.path.isfile(step):
                if folder not in self._ours:
                    raise Refused(f"{step} is in the way: it is not a folder there")
                os.unlink(step)
        place = self._place(path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.isdir(place) and not os.path.islink(place):
            try:
                os.rmdir(place)
            except OSError as problem:
                raise Refused(f"{place} is in the way: it is a folder with something in it") from problem

    def begin(self, path: str, mode: int) -> None:
        self._make_way(path)
        self._path, self._mode = path, mode
        handle, self._fresh = tempfile.mkstemp(prefix=".stoker-part-", dir=os.path.dirname(self.at))
        self._file = os.fdopen(handle, "wb")
        self._digest = hashlib.sha256()

    def data(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)

    def end(self, sha256: str) -> None:
        os.fchmod(self._file.fileno(), self._mode)
        self._file.close()
        if self._digest.hexdigest() != sha256:
            raise Refused(f"{self._path} arrived damaged")
        os.replace(self._fresh, self.at)
        self._fresh = ""
        self._ours[self._path] = sha256
        self._written += 1

    def drop_part(self) -> None:
        if self._fresh:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._fresh)

    def finish(self) -> dict[str, Any]:
        removed = 0
        for path, (kind, target) in self._offered.items():
            if kind == "link":
                self._link(path, target)
        for path in [path for path in self._ours if path not in self._offered]:
            was = self._ours.pop(path)
            removed += 0 if any(path in files for files in self._others.values()) else self._remove(path, was)
        if self._ours or os.path.exists(self._manifest):
            self._save_manifest()
        self._hashes.save()
        others = {origin: count for origin in self._others if (count := self._left_of(origin))}
        return {"written": self._written, "removed": removed, "others": others}

    def _left_of(self, origin: str) -> int:
        theirs = [path for path in self._others[origin] if path not in self._offered]
        return sum(os.path.lexists(self._place(path)) for path in theirs)

    def _remove(self, path: str, was: str) -> int:
        """Remove a file that is still as an earlier copy left it, and the folders that are empty then. Return how many files."""
        if self._link_above(path):
            return 0
        place = self._place(path)
        try:
            same = os.readlink(place) == was[3:] if os.path.islink(place) else sha256_of(place) == was
        except OSError:
            return 0
        if not same:  # somebody has gone on with it here
            return 0
        os.unlink(place)
        folder = os.path.dirname(place)
        while folder != self._root:
            try:
                os.rmdir(folder)
            except OSError:  # something is left in it
                break
            folder = os.path.dirname(folder)
        return 1

    def _save_manifest(self) -> None:
        folder = os.path.dirname(self._manifest)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        content = json.dumps({"schema": 2, "root": self._root, "origins": {**self._others, self._origin: self._ours}})
        with AtomicFile(self._manifest, mode=0o600, durable=False) as file:
            file.write(content.encode())


def _folders_of(path: str) -> list[str]:
    """Return the folders that a relative path is in, the outermost first."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _read_manifest(path: str) -> dict[str, dict[str, str]]:
    """Return origin -> path -> hash of what earlier copies brought. Raises Refused if the file is damaged."""
    try:
        if not is_trusted(os.lstat(path).st_uid, os.path.dirname(path)):
            raise Refused(f"{path} belongs to another user: remove it, or copy to another folder")
        manifest = read_json(path)
        origins = manifest["origins"] if manifest["schema"] == 2 else {"": manifest["files"]}
        brought: dict[str, dict[str, str]] = typed_values.read_value("dict[str, dict[str, str]]", origins)
        for name in (name for files in brought.values() for name in files):
            if os.path.isabs(name) or ".." in name.split("/"):
                raise ValueError(f"it names {name}, outside the folder")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise Refused(f"{path} can't be read ({problem}): remove it") from problem
    return brought


def serve(source: int, sink: int) -> int:
    receiver = Receiver()
    decoder = protocol.Decoder()
    _say(sink, protocol.SENTINEL)
    over = threading.Event()
    threading.Thread(target=_ping, args=(sink, over), name="ping", daemon=True).start()
    try:
        while True:
            # A cut cable closes nothing: silence means gone, as it does for an agent.
            received = os.read(source, 1 << 20) if select.select([source], [], [], receiver.silence_s)[0] else b""
            if not received:
                return 1  # whoever copied is gone
            for order, payload in decoder.feed(received):
                if _obey(receiver, order, payload, sink):
                    return 0
    except (Refused, protocol.ProtocolError) as refusal:
        _say(sink, protocol.encode_message({"is": "refused", "line": str(refusal)}))
    except OSError as problem:
        where = problem.filename if problem.filename is not None else receiver.at  # a write names no file
        _say(
            sink,
            protocol.encode_message({"is": "refused", "line": f"{os.fsdecode(where)}: {problem.strerror or problem}"}),
        )
    finally:
        over.set()
        receiver.drop_part()
    return 1


def _obey(receiver: Receiver, order: protocol.Message, payload: bytes, sink: int) -> bool:
    """Carry out one order. Return whether it was the last."""
    do = order.get("do")
    if do not in _ORDERS:
        raise protocol.ProtocolError(f"unknown order {do!r}")
    try:
        order = typed_values.read_fields(_ORDERS[do], order)
    except ValueError as problem:
        raise protocol.ProtocolError(f"the order {do!r} can't be read: {problem}") from None
    if do == "offer":
        receiver.silence_s = float(order["silence"])
        entries = protocol.read_payload(_ENTRIES, payload, "the offer")
        need = receiver.offer(order["root"], order["manifest"], entries, order["origin"])
        _say(sink, protocol.encode_message({"is": "need"}, json.dumps(need).encode()))
    elif do == "begin":
        receiver.begin(order["path"], order["mode"])
    elif do == "data":
        receiver.data(payload)
    elif do == "end":
        receiver.end(order["sha256"])
    else:
        _say(sink, protocol.encode_message({"is": "finished", **receiver.finish()}))
    return bool(do == "finish")


def _ping(sink: int, over: threading.Event) -> None:
    with contextlib.suppress(OSError):  # nobody hears us: who reads the orders notices
        while not over.wait(protocol.PING_S):
            _say(sink, protocol.encode_message({"is": "ping"}))


_saying = threading.Lock()  # a ping between the parts of a long answer would break it


def _say(sink: int, data: bytes) -> None:
    with _saying:
        while data:
            data = data[os.write(sink, data) :]


def boot(argv: list[str]) -> None:
    sys.stdout.flush()
    os._exit(serve(0, 1))
