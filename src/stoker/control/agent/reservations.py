"""One lock per GPU, flocked for the life of a run, so that two launches never pick the same card.

The kernel lets go of a flock when its holder dies, so a lock can't go stale. The files are never unlinked: a second
launcher could otherwise lock a file that has no name any more. Where the shared folder or a file in it can't be used,
whoever made it so must not stop everybody's runs: the lock is taken in a folder of this user's own, which still keeps
this user's runs apart, and that is announced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

from stoker.control.machine import lockfiles, ports
from stoker.control.machine.lockfiles import Folder, Unusable

_OWN_ONLY = "GPU locks keep out only your own runs"


class GpuLocks:
    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.notices: list[str] = []  # of the newest `take`: what could not be locked as it should be
        self._held: dict[str, int] = {}

    def take(self, uuids: list[str]) -> dict[str, str]:
        """All of them or none. Returns who holds the ones we could not have; empty means we have them all."""
        folders = _Folders(make=True)
        taken: dict[str, int] = {}
        refused: dict[str, str] = {}
        try:
            for uuid in uuids:
                if uuid in self._held:
                    continue
                handle = _lock_file(folders, uuid)
                if handle is None:
                    continue
                taken[uuid] = handle
                if lockfiles.taken(handle, fcntl.LOCK_EX):
                    _sign(handle, self.run_id)
                else:
                    refused[uuid] = lockfiles.describe_holder(handle)
        finally:
            folders.close()
            self.notices = folders.notices
            for uuid in list(taken):
                if refused or uuid in refused:
                    os.close(taken.pop(uuid))
        self._held.update(taken)
        return refused

    @property
    def handles(self) -> tuple[int, ...]:
        """A child that is given them keeps the locks for its own life, too."""
        return tuple(self._held.values())

    def release(self) -> None:
        for handle in self._held.values():
            os.close(handle)
        self._held.clear()


def _sign(handle: int, run_id: str) -> None:
    """Who holds it, for people. The lock is ours without it too: anybody can fill /tmp."""
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"run": run_id, "pid": os.getpid()}).encode(), 0)


def held(uuids: list[str]) -> dict[str, str]:
    """Which of these GPUs a run holds now: uuid -> who. What can't be used says nothing; `take` reports it."""
    found: dict[str, str] = {}
    with contextlib.closing(_Folders(make=False)) as folders:
        for uuid in uuids:
            for folder in folders:
                handle = None
                with contextlib.suppress(Unusable):
                    handle = lockfiles.peek(folder, lockfiles.lock_name(uuid))
                if handle is None:
                    continue
                if not lockfiles.taken(handle, fcntl.LOCK_SH):
                    found.setdefault(uuid, lockfiles.describe_holder(handle))
                os.close(handle)
    return found


def _lock_file(folders: _Folders, uuid: str) -> int | None:
    """Open and not locked yet; None where this GPU can't have a lock at all."""
    problem = ""
    for folder in folders:
        try:
            handle = lockfiles.open_lock(folder, lockfiles.lock_name(uuid))
        except Unusable as unusable:
            problem = problem or str(unusable)
            continue
        if problem:
            folders.note(f"{problem}; locking it in {folder.path}: {_OWN_ONLY}")
        return handle
    folders.note(f"GPU {uuid} has no lock: {problem or 'no folder can be used'}; another run may pick it too")
    return None


class _Folders:
    """The shared folder, then the user's own: each opened when it is asked for, once."""

    def __init__(self, make: bool) -> None:
        self.notices: list[str] = []
        self._make = make
        self._open: list[Folder] = []
        self._next = self._candidates()

    def note(self, line: str) -> None:
        if line not in self.notices:
            self.notices.append(line)

    def __iter__(self) -> Iterator[Folder]:
        yield from self._open
        for folder in self._next:
            self._open.append(folder)
            yield folder

    def _candidates(self) -> Iterator[Folder]:
        problem = ""
        try:
            shared = lockfiles.open_shared(self._make)
            if shared is not None:
                if shared.notice:
                    self.note(shared.notice)
                yield shared
        except Unusable as unusable:
            problem = str(unusable)
        for path in lockfiles.own_paths():
            try:
                own = lockfiles.open_own(path, self._make)
            except Unusable as unusable:
                problem = f"{problem}; {unusable}" if problem else str(unusable)
                continue
            if own is not None:
                if problem:
                    self.note(f"{problem}; locking in {path}: {_OWN_ONLY}")
                yield own
                if self._make:
                    return  # one of the user's own is enough
        if problem:
            self.note(problem)

    def close(self) -> None:
        for folder in self._open:
            os.close(folder.handle)


# ---- the store's port ----
#
# Bound and not listening, so that rank 0's store can bind it too, and no other launch and no program that takes any free
# port gets it meanwhile. It is not a lock: a program of any user that sets SO_REUSEADDR and asks for this very port gets
# it, and then the store's own bind fails.


def reserve(address: str, port: int, soft: bool) -> tuple[socket.socket | None, dict[str, Any]]:
    """(what to keep open, answer). `soft`: a wanted port that is taken is replaced by a free one, and its holder named."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return _bind(family, port)
    except OSError as problem:
        if problem.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        holder = ports.listener(port) or "another launch that has reserved it"
        if not soft:
            return None, {"port": 0, "wanted": port, "holder": holder}
        kept, answer = _bind(family, 0)
        return kept, {**answer, "wanted": port, "holder": holder}


def _bind(family: socket.AddressFamily, port: int) -> tuple[socket.socket, dict[str, Any]]:
    kept = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            _probe(family, port)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("", port))  # all addresses, as torch's store will
    except OSError:
        kept.close()
        raise
    return kept, {"port": kept.getsockname()[1]}


def _probe(family: socket.AddressFamily, port: int) -> None:
    """Without SO_REUSEADDR a bind fails where another launch has merely reserved the port: with it, both get it."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            if ports.listener(port) is None and ports.closing(port):
                return  # only connections of an earlier run in TIME_WAIT: the store's SO_REUSEADDR gets past those
            raise
