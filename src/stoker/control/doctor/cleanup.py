"""`stoker clean`: stops and removes what leftovers.py, debris.py and caches.py found. The doctor's only file that acts.

What may be signalled: a process of this uid whose run is proven to be over, or one the user has named; known by pid and
start time and held by a pidfd, so that a pid that was given away meanwhile is never hit. What may be removed: a file of
this uid that no process uses. What can't be told is left alone and said to be.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from typing import TypeVar

from stoker.contract import shared_weights
from stoker.contract.frozen import frozen
from stoker.contract.process import Process, find_process, send_signal
from stoker.control.doctor.leftovers import lives, untouchable
from stoker.control.doctor.stale_caches import Cache, own_folder
from stoker.control.doctor.stale_files import WEIGHTS, Debris, alone_with, folder_in_use, paths_in_use
from stoker.control.machine import procfs
from stoker.control.machine.model import Machine

GROUP_S = 1.0  # between a child's SIGTERM and SIGKILL, once its parent's grace is over
KILL_S = 10.0  # a killed process that held 100 GB of pinned memory takes seconds to end
BACK_S = 5.0
_POLL_S = 0.02

Thing = TypeVar("Thing")


@frozen
class Stopped:
    seconds: float
    killed: tuple[int, ...]  # those that SIGTERM did not end
    survivors: tuple[Process, ...]  # as they are now: state D waits in the kernel, and no signal reaches it


def stop_ladder(targets: list[Process], grace: float, more: Callable[[], list[Process]] = list) -> Stopped:
    """SIGCONT, SIGTERM, grace, SIGKILL, parents first: they save. `more`: asked when all are gone, what they started since."""
    spared = untouchable(procfs.all_processes())
    targets = [one for one in targets if one.pid not in spared]
    began = time.monotonic()
    asked: set[int] = set()
    killed: set[int] = set()
    kill_at = began + grace
    for one in targets:
        send_signal(one, signal.SIGCONT)
    while True:
        left = [one for one in targets if lives(one)]
        now = time.monotonic()
        if not left:
            left = [one for one in more() if one.pid not in spared and lives(one)]
            if not left:
                return Stopped(now - began, tuple(sorted(killed)), ())
            targets, kill_at = left, min(kill_at, now)
        if now - began > grace + GROUP_S + KILL_S:
            return Stopped(now - began, tuple(sorted(killed)), tuple(find_process(one.pid) or one for one in left))
        unasked = [one for one in left if one.pid not in asked]
        pids = {one.pid for one in left}
        due = [one for one in unasked if one.parent not in pids] if now < began + grace else unasked
        if due and now >= began + grace > began:
            kill_at = now + GROUP_S
        for one in due:
            asked.add(one.pid)
            send_signal(one, signal.SIGTERM)
        if now >= kill_at:
            for one in left:
                if send_signal(one, signal.SIGKILL):
                    killed.add(one.pid)
        time.sleep(_POLL_S)


@frozen
class Back:
    """What a GPU has got back."""

    gpu: str
    freed: int
    seconds: float
    whole: bool  # False: the time was over before all of it was seen


def wait_for_memory(
    before: Machine, pids: set[int], look: Callable[[], Machine | str], limit: float = BACK_S
) -> list[Back]:
    """Until NVML neither names these processes nor counts what they held."""
    began = time.monotonic()
    owed = {
        gpu.uuid: sum(holder.memory or 0 for holder in gpu.holders or () if holder.pid in pids) for gpu in before.gpus
    }
    waiting = {gpu.uuid: gpu for gpu in before.gpus if any(holder.pid in pids for holder in gpu.holders or ())}
    found: list[Back] = []
    while waiting:
        seen = look()
        seconds = time.monotonic() - began
        late = seconds > limit
        now = {gpu.uuid: gpu for gpu in seen.gpus} if isinstance(seen, Machine) else {}
        for uuid, old in list(waiting.items()):
            gpu = now.get(uuid)
            freed = (old.memory_used or 0) - (gpu.memory_used or 0) if gpu else 0
            # Nine tenths: others on the card may have taken some meanwhile.
            held = gpu is None or any(holder.pid in pids for holder in gpu.holders or ())
            whole = not held and freed >= 0.9 * owed[uuid]
            if whole or late:
                found.append(Back(old.label, max(0, freed), seconds, whole))
                del waiting[uuid]
        if waiting:
            time.sleep(_POLL_S)
    return found


def remove_debris(found: list[Debris]) -> list[tuple[Debris, str]]:
    """Looks once more, then removes. Returns what stays, and why."""
    folders = {os.path.dirname(one.path) for one in found}
    used = paths_in_use(tuple(folder + "/" for folder in folders)) if found else set()

    def remove(one: Debris) -> bool:
        if one.kind == "shared memory":
            return one.path not in used and unlink_alone(one.path, os.lstat(one.path))
        if one.kind == WEIGHTS:
            if not shared_weights.is_dead(one.path):
                return False
            shutil.rmtree(one.path)
            return True
        if folder_in_use(one.path, used):
            return False
        for name in os.listdir(one.path):
            os.unlink(os.path.join(one.path, name))
        os.rmdir(one.path)
        return True

    return _kept(found, remove)


def _kept(things: list[Thing], remove: Callable[[Thing], bool]) -> list[tuple[Thing, str]]:
    """What stays, and why. What is gone already is well."""
    kept: list[tuple[Thing, str]] = []
    for one in things:
        try:
            if not remove(one):
                kept.append((one, "it is in use now"))
        except FileNotFoundError:
            continue
        except OSError as problem:
            kept.append((one, problem.strerror or str(problem)))
    return kept


def unlink_alone(path: str, about: os.stat_result) -> bool:
    """Under the lease: who opens it in that instant waits until it is gone."""
    with alone_with(path, about) as alone:
        if alone:
            os.unlink(path)
    return alone


def prune(chosen: list[Cache]) -> list[tuple[Cache, str]]:
    """Remove caches; return what stays, and why."""

    def remove(one: Cache) -> bool:
        shutil.rmtree(one.path) if own_folder(one.path) else os.unlink(one.path)
        return True

    return _kept(chosen, remove)
