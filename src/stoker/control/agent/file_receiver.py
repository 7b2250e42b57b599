"""Receives the files of --sync and --stage: requests those it lacks, and removes files that the sender no longer has.

Orders are protocol messages on stdin, answers on stdout:
  {"do": "offer", "root", "manifest", "origin", "silence"} + a JSON list of [path, kind, mode, size, sha256 or link's target] → {"is": "need"} + a JSON list
  {"do": "begin", "path", "mode"}, {"do": "data"} + bytes …, {"do": "end", "sha256"}                        (per file)
  {"do": "finish"}                                                                                          → {"is": "finished", "written", "removed", "others"}
It sends {"is": "ping"} every second, also while it hashes files, which may take minutes. A file is written to a temporary
file in its folder, verified by its hash, and then renamed, so an interrupted copy leaves no partial file.
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
from collections.abc import Iterator
from typing import Any

from stoker.contract import layout, protocol, typed_values
from stoker.contract.safe_io import AtomicFile, is_trusted, read_json
from stoker.contract.units import format_bytes
from stoker.control.machine.file_hash import FileHashes, sha256_of

_ENTRIES = "list[tuple[str, str, int, int, str]]"
_RESERVE = 16 << 20  # bytes that stay free, because a full disk stops other programs, too

Entry = tuple[str, str, int, int, str]  # path, kind, mode, size, sha256 or link's target


class CopyError(Exception):
    """Raised with a line for the user."""


class FileReceiver:
    """Receives one copy into one folder."""

    def __init__(self) -> None:
        self.silence_s = 60.0
        self._hashes = FileHashes()
        self._root = self._manifest = self._origin = ""
        self._offered: dict[str, tuple[str, str]] = {}  # path -> (kind, sha256 or target)
        self._ours: dict[str, str] = {}  # path -> hash of the files that this origin's copies wrote
        self._others: dict[str, dict[str, str]] = {}  # other origin -> the files that its copies wrote
        self._written = 0
        self._path = self._part = ""  # the file that is being written, and its temporary file

    def offer(self, root: str, manifest: str, entries: list[Entry], origin: str = "") -> list[str]:
        """Return the paths of the files that are missing here or differ.

        `manifest` says where the list of copied files is kept: "inside" the folder, or "" for our cache (a script that
        lists its data must not find a file of ours in it). Files from another origin are kept. Without an origin
        the newest copy decides which files there are.
        """
        self._root, self._origin = os.path.abspath(os.path.expanduser(root)), origin
        os.makedirs(self._root, exist_ok=True)
        if not os.access(self._root, os.W_OK | os.X_OK):
            raise CopyError(f"the folder {self._root} can't be written: permission denied")
        name = hashlib.sha256(os.fsencode(self._root)).hexdigest()[:32]
        self._manifest = os.path.join(layout.cache_home(os.environ), "staged", f"{name}.json")
        if manifest == "inside":
            self._manifest = os.path.join(self._root, layout.SYNCED)
        self._others = _read_manifest(self._manifest)
        self._ours = self._others.pop(origin, {})
        self._others.pop("", None)  # an old list that does not say where the files came from
        needed, needed_bytes = [], 0
        for path, kind, mode, size, value in entries:
            self._offered[path] = (kind, value)
            if kind == "link":
                continue  # links are made at the end, when all files are there
            if self._has_file(path, size, value):
                self._set_executable(path, mode)
            else:
                needed.append(path)
                needed_bytes += size
        disk = os.statvfs(self._root)
        free = disk.f_bavail * disk.f_frsize
        if needed_bytes and needed_bytes + _RESERVE > free:
            sizes = f"{format_bytes(needed_bytes)} to copy, {format_bytes(free)} free"
            raise CopyError(f"the disk of {self._root} is full: {sizes}")
        if needed:
            # Saved before the first byte, so that the files of an interrupted copy are known as ours.
            self._ours |= {path: self._offered[path][1] for path in needed}
            self._save_manifest()
        return needed

    def _full_path(self, path: str) -> str:
        return os.path.join(self._root, path)

    def _find_link_above(self, path: str) -> str:
        """Return the first folder of the path that is a link, or "". Nothing behind a link is ours to change."""
        return next((folder for folder in _list_parent_folders(path) if os.path.islink(self._full_path(folder))), "")

    def _has_file(self, path: str, size: int, sha256: str) -> bool:
        if self._find_link_above(path) in self._ours:
            return False  # a link of an earlier copy, which this copy replaces by a folder
        try:
            status = os.lstat(self._full_path(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        same_size = stat.S_ISREG(status.st_mode) and status.st_size == size
        return same_size and self._hashes.of(self._full_path(path)) == sha256

    def _set_executable(self, path: str, mode: int) -> None:
        """Set the mode of a file if its executable bits differ. The other bits are the host's choice."""
        full_path = self._full_path(path)
        if (os.stat(full_path).st_mode ^ mode) & 0o111 and not self._find_link_above(path):
            os.chmod(full_path, mode)

    def _clear_path(self, path: str) -> None:
        """Make the folder of a file. Raises CopyError if something is in the way that is not from an earlier copy."""
        for folder in _list_parent_folders(path):
            full_path = self._full_path(folder)
            if os.path.islink(full_path) or os.path.isfile(full_path):
                if folder not in self._ours:
                    raise CopyError(f"{full_path} is in the way: it is not a folder")
                os.unlink(full_path)
        full_path = self._full_path(path)
        os.makedirs(os.path.dirname(full_path), exist_ok=True)
        if os.path.isdir(full_path) and not os.path.islink(full_path):
            try:
                os.rmdir(full_path)
            except OSError as problem:
                raise CopyError(f"{full_path} is in the way: it is a folder that is not empty") from problem

    @property
    def current(self) -> str:
        """Return the path of the file that is being written."""
        return self._full_path(self._path)

    def start_file(self, path: str, mode: int) -> None:
        """Open a temporary file for a file of the copy."""
        self._clear_path(path)
        self._path, self._mode = path, mode
        fd, self._part = tempfile.mkstemp(prefix=".stoker-part-", dir=os.path.dirname(self.current))
        self._file = os.fdopen(fd, "wb")
        self._digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)

    def finish_file(self, sha256: str) -> None:
        """Verify the temporary file and rename it. Raises CopyError if its hash differs."""
        os.fchmod(self._file.fileno(), self._mode)
        self._file.close()
        if self._digest.hexdigest() != sha256:
            raise CopyError(f"{self._path} arrived damaged")
        os.replace(self._part, self.current)
        self._part = ""
        self._ours[self._path] = sha256
        self._written += 1

    def remove_part(self) -> None:
        """Remove the temporary file of an interrupted copy."""
        if self._part:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._part)

    def finish(self) -> dict[str, Any]:
        """Make the links, remove files that this origin no longer has, save the manifest, and return the counts."""
        for path, (kind, target) in self._offered.items():
            full_path = self._full_path(path)
            if kind != "link" or (os.path.islink(full_path) and os.readlink(full_path) == target):
                continue
            self._clear_path(path)
            if os.path.lexists(full_path):
                os.unlink(full_path)
            os.symlink(target, full_path)
            self._ours[path] = "-> " + target
            self._written += 1
        removed = 0
        for path in [path for path in self._ours if path not in self._offered]:
            digest = self._ours.pop(path)
            if not any(path in files for files in self._others.values()):
                removed += self._remove_unchanged(path, digest)
        if self._ours or os.path.exists(self._manifest):
            self._save_manifest()
        self._hashes.save()
        others = {}
        for origin, files in self._others.items():
            count = sum(path not in self._offered and os.path.lexists(self._full_path(path)) for path in files)
            if count:
                others[origin] = count
        return {"written": self._written, "removed": removed, "others": others}

    def _remove_unchanged(self, path: str, digest: str) -> bool:
        """Remove a file if it is unchanged since the copy, and folders that are empty then. Return whether it was removed."""
        full_path = self._full_path(path)
        if self._find_link_above(path):
            return False
        try:
            is_link = os.path.islink(full_path)
            unchanged = os.readlink(full_path) == digest[3:] if is_link else sha256_of(full_path) == digest
        except OSError:
            return False
        if not unchanged:  # it was edited here since
            return False
        os.unlink(full_path)
        for folder in reversed(_list_parent_folders(path)):
            try:
                os.rmdir(self._full_path(folder))
            except OSError:  # it is not empty
                break
        return True

    def _save_manifest(self) -> None:
        os.makedirs(os.path.dirname(self._manifest), mode=0o700, exist_ok=True)
        content = {"schema": 2, "root": self._root, "origins": {**self._others, self._origin: self._ours}}
        with AtomicFile(self._manifest, mode=0o600, durable=False) as file:
            file.write(json.dumps(content).encode())


def _list_parent_folders(path: str) -> list[str]:
    """Return the folders of a relative path, the outermost first."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _read_manifest(path: str) -> dict[str, dict[str, str]]:
    """Return origin -> path -> hash of the files of earlier copies. Raises CopyError if the manifest can't be used."""
    try:
        if not is_trusted(os.lstat(path).st_uid, os.path.dirname(path)):
            raise CopyError(f"{path} belongs to another user; remove it, or copy to another folder")
        manifest = read_json(path)
        origins = manifest["origins"] if manifest["schema"] == 2 else {"": manifest["files"]}
        brought: dict[str, dict[str, str]] = typed_values.read_value("dict[str, dict[str, str]]", origins)
        for name in (name for files in brought.values() for name in files):
            if os.path.isabs(name) or ".." in name.split("/"):
                raise ValueError(f"it names {name}, outside the folder")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CopyError(f"{path} can't be read ({problem}); remove it") from problem
    return brought


def serve(source: int, sink: int) -> int:
    """Receive one copy. Return 0 if it is complete, 1 if it was refused or the sender is lost."""
    receiver = FileReceiver()
    lock = threading.Lock()  # a ping must not come between the parts of a long answer
    closing = threading.Event()

    def send(message: bytes) -> None:
        with lock:
            while message:
                message = message[os.write(sink, message) :]

    def ping() -> None:
        with contextlib.suppress(OSError):  # the sender is gone, which the loop below notices
            while not closing.wait(protocol.PING_S):
                send(protocol.encode_message({"is": "ping"}))

    send(protocol.SENTINEL)
    threading.Thread(target=ping, name="ping", daemon=True).start()
    refusal = ""
    try:
        for order, payload in _read_orders(source, receiver):
            do = order.get("do")
            if do == "offer":
                receiver.silence_s = float(order["silence"])
                entries = protocol.read_payload(_ENTRIES, payload, "the offer")
                needed = receiver.offer(order["root"], order["manifest"], entries, order["origin"])
                send(protocol.encode_message({"is": "need"}, json.dumps(needed).encode()))
            elif do == "begin":
                receiver.start_file(order["path"], order["mode"])
            elif do == "data":
                receiver.write(payload)
            elif do == "end":
                receiver.finish_file(order["sha256"])
            elif do == "finish":
                send(protocol.encode_message({"is": "finished", **receiver.finish()}))
                return 0
            else:
                raise protocol.ProtocolError(f"unknown order {do!r}")
    except (CopyError, protocol.ProtocolError) as problem:
        refusal = str(problem)
    except OSError as problem:
        path = problem.filename if problem.filename is not None else receiver.current  # a write error has no file name
        refusal = f"{os.fsdecode(path)}: {problem.strerror or problem}"
    except Exception as problem:  # a bug: one line instead of a traceback
        refusal = f"{type(problem).__name__}: {problem}"
    finally:
        closing.set()
        receiver.remove_part()
    if refusal:
        send(protocol.encode_message({"is": "refused", "line": refusal}))
    return 1


def _read_orders(source: int, receiver: FileReceiver) -> Iterator[tuple[protocol.Message, bytes]]:
    """Yield orders with their payloads until the sender closes its end or is silent for too long."""
    decoder = protocol.Decoder()
    # A cut cable does not close the connection, so silence means that the sender is gone.
    while select.select([source], [], [], receiver.silence_s)[0]:
        received = os.read(source, 1 << 20)
        if not received:
            return
        yield from decoder.feed(received)


def boot(argv: list[str]) -> None:
    sys.stdout.flush()
    os._exit(serve(0, 1))
