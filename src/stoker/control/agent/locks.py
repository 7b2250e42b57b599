"""One lock file per GPU, flocked for the life of a run, so that two launches never pick the same card.

The kernel lets go of a flock when its holder dies, so a lock can't go stale. The files are never unlinked: a second
launcher could otherwise lock a file that has no name any more.
"""

from __future__ import annotations

import fcntl
import json
import os

FOLDER = "/tmp/stoker-gpu-locks"


def _open(uuid: str) -> int:
    """Usable by several users: opened without O_CREAT first, because a sticky folder forbids that on another user's file."""
    os.makedirs(FOLDER, exist_ok=True)
    if os.stat(FOLDER).st_uid == os.getuid():
        os.chmod(FOLDER, 0o1777)
    path = os.path.join(FOLDER, uuid.replace("/", "_"))
    for _ in range(2):
        try:
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            pass
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            os.fchmod(handle, 0o666)
            return handle
        except FileExistsError:
            continue
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW)


class GpuLocks:
    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._held: dict[str, int] = {}

    def take(self, uuids: list[str]) -> dict[str, str]:
        """All of them or none. Returns who holds the ones we could not have; empty means we have them all."""
        taken: dict[str, int] = {}
        refused: dict[str, str] = {}
        for uuid in uuids:
            if uuid in self._held:
                continue
            handle = _open(uuid)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refused[uuid] = _holder(handle)
                os.close(handle)
                continue
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps({"run": self.run_id, "pid": os.getpid()}).encode(), 0)
            taken[uuid] = handle
        if refused:
            for handle in taken.values():
                os.close(handle)
            return refused
        self._held.update(taken)
        return {}


def held() -> dict[str, str]:
    """GPUs that some run holds right now: uuid -> who."""
    found: dict[str, str] = {}
    try:
        entries = os.listdir(FOLDER)
    except FileNotFoundError:
        return found
    for name in entries:
        try:
            handle = os.open(os.path.join(FOLDER, name), os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found[name] = _holder(handle)
        finally:
            os.close(handle)
    return found


def _holder(handle: int) -> str:
    try:
        who = json.loads(os.pread(handle, 4096, 0))
        return f"run {who['run']} (agent pid {who['pid']})"
    except (ValueError, KeyError, TypeError):
        return "another run"
