"""The receiving side of control/cluster/file_sync.py: asks for the files it lacks, and removes what earlier copies brought.

Orders come as the protocol's messages on stdin:
  {"do": "offer", "root", "manifest", "origin", "silence"} + a JSON list of [path, kind, mode, size, sha256 or link's target] → {"is": "need"} + a JSON list
  {"do": "begin", "path", "mode"}, {"do": "data"} + bytes …, {"do": "end", "sha256"}                        (per file)
  {"do": "finish"}                                                                                          → {"is": "finished", "written", "removed", "others"}
It also sends {"is": "ping"} every second, because hashing the files that are there may take minutes.
No file is ever half written: each is written beside its place, checked by its hash, and then renamed.
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
_RESERVE = 16 << 20  # bytes to leave free: a full disk stops more than this copy

Entry = tuple[str, str, int, int, str]  # path, kind, mode, size, sha256 or link's target


class CopyError(Exception):
    """A reason why the copy can't go on, as one line for the user."""


class FileReceiver:
    """Receives one copy into one folder."""

    def __init__(self) -> None:
        self._hashes = FileHashes()
        self._root = ""
        self._manifest = ""
        self._offered: dict[str, tuple[str, str]] = {}  # path -> (kind, sha256 or target)
        self._copied: dict[str, str] = {}  # path -> hash of what this copy and earlier ones from its origin wrote
        self._others: dict[str, dict[str, str]] = {}  # origin -> what copies from there wrote
        self._origin = ""
        self._written = 0
        self._path = self._part = ""  # the file that is being received, and its temporary file
        self.silence_s = 60.0

    @property
    def current_path(self) -> str:
        return os.path.join(self._root, self._path)

    def offer(self, root: str, manifest: str, entries: list[Entry], origin: str = "") -> list[str]:
        """Return the paths of the offered files that are missing here or differ. Raises CopyError.

        The manifest, the list of what was copied, is in the folder itself if `manifest` is "inside". If it is "", it is
        below our cache: a script that lists its data must not find a file of ours there. `origin` is the folder that the
        copy comes from; files copied from another origin stay. With "", only the files of the newest copy stay.
        """
        self._root = os.path.abspath(os.path.expanduser(root))
        os.makedirs(self._root, exist_ok=True)
        if not os.access(self._root, os.W_OK | os.X_OK):
            raise CopyError(f"no permission to write in the folder {self._root}")
        if manifest == "inside":
            self._manifest = os.path.join(self._root, layout.SYNCED)
        else:
            name = hashlib.sha256(os.fsencode(self._root)).hexdigest()[:32]
            self._manifest = os.path.join(layout.cache_home(os.environ), "staged", f"{name}.json")
        self._origin = origin
        self._others = _read_manifest(self._manifest)
        self._copied = self._others.pop(origin, {})
        self._others.pop("", None)  # of a copy that named no origin
        needed, needed_bytes = [], 0
        for path, kind, mode, size, value in entries:
            self._offered[path] = (kind, value)
            if kind == "link":
                continue  # made at the end, when everything is there
            if self._has(path, size, value):
                self._set_executable(path, mode)
            else:
                needed.append(path)
                needed_bytes += size
        disk = os.statvfs(self._root)
        free = disk.f_bavail * disk.f_frsize
        if needed_bytes and needed_bytes + _RESERVE > free:
            raise CopyError(
                f"the disk of {self._root} is full: {format_bytes(needed_bytes)} to copy, {format_bytes(free)} free"
            )
        if needed:
            self._copied |= {path: self._offered[path][1] for path in needed}
            self._save_manifest()  # before the first byte, so that the files of an interrupted copy are known as ours
        return needed

    def begin(self, path: str, mode: int) -> None:
        """Begin to receive a file. Raises CopyError."""
        self._clear_way(path)
        self._path, self._mode = path, mode
        handle, self._part = tempfile.mkstemp(prefix=".stoker-part-", dir=os.path.dirname(self.current_path))
        self._file = os.fdopen(handle, "wb")
        self._digest = hashlib.sha256()

    def data(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)

    def end(self, sha256: str) -> None:
        """Put the received file in its place. Raises CopyError if its hash differs."""
        os.fchmod(self._file.fileno(), self._mode)
        self._file.close()
        if self._digest.hexdigest() != sha256:
            raise CopyError(f"{self._path} arrived damaged")
        os.replace(self._part, self.current_path)
        self._part = ""
        self._copied[self._path] = sha256
        self._written += 1

    def discard_part(self) -> None:
        """Remove the temporary file of a copy that was interrupted."""
        if self._part:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._part)

    def finish(self) -> dict[str, Any]:
        """Make the links, and remove what is no longer offered. Return what was done, for the message "finished"."""
        removed = 0
        for path, (kind, target) in self._offered.items():
            if kind == "link":
                self._make_link(path, target)
        for path in [path for path in self._copied if path not in self._offered]:
            value = self._copied.pop(path)
            if not any(path in files for files in self._others.values()):
                removed += self._remove(path, value)
        if self._copied or os.path.exists(self._manifest):
            self._save_manifest()
        self._hashes.save()
        others = {}  # origin -> how many files from there are left
        for origin, files in self._others.items():
            count = sum(os.path.lexists(self._full(path)) for path in files if path not in self._offered)
            if count:
                others[origin] = count
        return {"written": self._written, "removed": removed, "others": others}

    def _full(self, path: str) -> str:
        return os.path.join(self._root, path)

    def _link_above(self, path: str) -> str:
        """Return the first folder of the path that is a link, or "". What is behind it must not be changed."""
        return next((folder for folder in _parents(path) if os.path.islink(self._full(folder))), "")

    def _has(self, path: str, size: int, sha256: str) -> bool:
        """Return whether the file is here already."""
        if self._link_above(path) in self._copied:
            return False  # an earlier copy brought that link, and this one brings a folder
        full = self._full(path)
        try:
            status = os.lstat(full)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == size and self._hashes.of(full) == sha256

    def _set_executable(self, path: str, mode: int) -> None:
        """Make a file executable or not, as `mode` says. The rest of its mode is up to this host."""
        full = self._full(path)
        if (os.stat(full).st_mode ^ mode) & 0o111 and not self._link_above(path):
            os.chmod(full, mode)

    def _make_link(self, path: str, target: str) -> None:
        full = self._full(path)
        if os.path.islink(full) and os.readlink(full) == target:
            return
        self._clear_way(path)
        if os.path.lexists(full):
            os.unlink(full)
        os.symlink(target, full)
        self._copied[path] = "-> " + target
        self._written += 1

    def _clear_way(self, path: str) -> None:
        """Make the folder of a file. A link or file in its place is removed if an earlier copy brought it.

        Raises CopyError otherwise.
        """
        for folder in _parents(path):
            full_folder = self._full(folder)
            if os.path.islink(full_folder) or os.path.isfile(full_folder):
                if folder not in self._copied:
                    raise CopyError(f"{full_folder} is in the way: it is not a folder there")
                os.unlink(full_folder)
        full = self._full(path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        if os.path.isdir(full) and not os.path.islink(full):
            try:
                os.rmdir(full)
            except OSError as problem:
                raise CopyError(f"{full} is in the way: it is a folder that is not empty") from problem

    def _remove(self, path: str, value: str) -> int:
        """Remove a file if it is as an earlier copy left it, and the folders that are then empty. Return 1 if removed.

        `value` is its hash, or "-> " and the target of a link.
        """
        if self._link_above(path):
            return 0
        full = self._full(path)
        try:
            is_same = os.readlink(full) == value[3:] if os.path.islink(full) else sha256_of(full) == value
        except OSError:
            return 0
        if not is_same:  # somebody has changed it here
            return 0
        os.unlink(full)
        folder = os.path.dirname(full)
        while folder != self._root:
            try:
                os.rmdir(folder)
            except OSError:  # not empty
                break
            folder = os.path.dirname(folder)
        return 1

    def _save_manifest(self) -> None:
        os.makedirs(os.path.dirname(self._manifest), mode=0o700, exist_ok=True)
        origins = {**self._others, self._origin: self._copied}
        content = json.dumps({"schema": 2, "root": self._root, "origins": origins})
        with AtomicFile(self._manifest, mode=0o600, durable=False) as file:
            file.write(content.encode())


def _parents(path: str) -> list[str]:
    """Return the folders that a relative path is in, the outermost first."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _read_manifest(path: str) -> dict[str, dict[str, str]]:
    """Return origin -> path -> hash of what earlier copies brought. Raises CopyError if the file is damaged."""
    try:
        if not is_trusted(os.lstat(path).st_uid, os.path.dirname(path)):
            raise CopyError(f"{path} belongs to another user: remove it, or copy to another folder")
        manifest = read_json(path)
        origins = manifest["origins"] if manifest["schema"] == 2 else {"": manifest["files"]}
        copied: dict[str, dict[str, str]] = typed_values.read_value("dict[str, dict[str, str]]", origins)
        for name in (name for files in copied.values() for name in files):
            if os.path.isabs(name) or ".." in name.split("/"):
                raise ValueError(f"it names {name}, outside the folder")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CopyError(f"{path} can't be read ({problem}): remove it") from problem
    return copied


def serve(source: int, sink: int) -> int:
    """Obey the orders from `source` until the copy is finished. Return the exit code."""
    receiver = FileReceiver()
    decoder = protocol.Decoder()
    _send(sink, protocol.SENTINEL)
    is_over = threading.Event()
    threading.Thread(target=_ping, args=(sink, is_over), name="ping", daemon=True).start()
    try:
        while True:
            # A cut cable closes nothing, so silence means that the other side is gone, as it does for an agent.
            received = os.read(source, 1 << 20) if select.select([source], [], [], receiver.silence_s)[0] else b""
            if not received:
                return 1
            for order, payload in decoder.feed(received):
                if _obey(receiver, order, payload, sink):
                    return 0
    except (CopyError, protocol.ProtocolError) as refusal:
        _send(sink, protocol.encode_message({"is": "refused", "line": str(refusal)}))
    except OSError as problem:
        # The error of a write names no file.
        path = problem.filename if problem.filename is not None else receiver.current_path
        line = f"{os.fsdecode(path)}: {problem.strerror or problem}"
        _send(sink, protocol.encode_message({"is": "refused", "line": line}))
    finally:
        is_over.set()
        receiver.discard_part()
    return 1


def _obey(receiver: FileReceiver, order: protocol.Message, payload: bytes, sink: int) -> bool:
    """Carry out one order. Return whether it was the last."""
    action = order.get("do")
    if action not in _ORDERS:
        raise protocol.ProtocolError(f"unknown order {action!r}")
    try:
        order = typed_values.read_fields(_ORDERS[action], order)
    except ValueError as problem:
        raise protocol.ProtocolError(f"the order {action!r} can't be read: {problem}") from None
    if action == "offer":
        receiver.silence_s = float(order["silence"])
        entries = protocol.read_payload(_ENTRIES, payload, "the offer")
        needed = receiver.offer(order["root"], order["manifest"], entries, order["origin"])
        _send(sink, protocol.encode_message({"is": "need"}, json.dumps(needed).encode()))
    elif action == "begin":
        receiver.begin(order["path"], order["mode"])
    elif action == "data":
        receiver.data(payload)
    elif action == "end":
        receiver.end(order["sha256"])
    else:
        _send(sink, protocol.encode_message({"is": "finished", **receiver.finish()}))
    return bool(action == "finish")


def _ping(sink: int, is_over: threading.Event) -> None:
    with contextlib.suppress(OSError):  # the other side is gone; the thread that reads orders notices
        while not is_over.wait(protocol.PING_S):
            _send(sink, protocol.encode_message({"is": "ping"}))


_send_lock = threading.Lock()  # without it, a ping could come between the parts of a long message


def _send(sink: int, data: bytes) -> None:
    with _send_lock:
        while data:
            data = data[os.write(sink, data) :]


def boot(argv: list[str]) -> None:
    sys.stdout.flush()
    os._exit(serve(0, 1))
