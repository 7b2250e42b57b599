"""Stops and removes what leftovers.py, stale_files.py and stale_caches.py found. The doctor's only module that acts.

It signals only processes of this user whose run is proven to be over or that the user has named, identified by pid
and start time through a pidfd, so that a reused pid is never hit. It removes only files of this user that no process
uses. Uncertain cases are reported and left alone.
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
from stoker.control.doctor.leftovers import is_running, protected_pids
from stoker.control.doctor.stale_caches import Cache, is_own_folder
from stoker.control.doctor.stale_files import WEIGHTS, Debris, find_paths_in_use, hold_exclusively, is_folder_in_use
from stoker.control.machine import procfs
from stoker.control.machine.model import Machine

GROUP_S = 1.0  # time between a child's SIGTERM and SIGKILL, once its parent's grace period is over
KILL_S = 10.0  # time for a killed process to end; one with 100 GB of pinned memory takes seconds
FREED_S = 5.0  # time for the driver to free the memory of processes that have ended
_POLL_S = 0.02

Item = TypeVar("Item")


@frozen
class StopResult:
    seconds: float
    killed: tuple[int, ...]  # pids that SIGTERM did not end
    survivors: tuple[Process, ...]  # with their current state; in state D, a process receives no signal


def stop_processes(targets: list[Process], grace: float, find_more: Callable[[], list[Process]] = list) -> StopResult:
    """Send SIGCONT and SIGTERM, wait for the grace period, then send SIGKILL.

    Parents get SIGTERM first, because they save; their children get it when the parents have ended or their grace period is over.
    When all targets have ended, `find_more` returns what they have started since.
    """
    protected = protected_pids(procfs.list_processes())
    targets = [target for target in targets if target.pid not in protected]
    started_at = time.monotonic()
    terminated: set[int] = set()
    killed: set[int] = set()
    kill_at = started_at + grace
    for target in targets:
        send_signal(target, signal.SIGCONT)
    while True:
        running = [target for target in targets if is_running(target)]
        now = time.monotonic()
        if not running:
            running = [target for target in find_more() if target.pid not in protected and is_running(target)]
            if not running:
                return StopResult(now - started_at, tuple(sorted(killed)), ())
            targets, kill_at = running, min(kill_at, now)
        is_grace_over = now - started_at >= grace
        if now - started_at > grace + GROUP_S + KILL_S:
            survivors = tuple(find_process(target.pid) or target for target in running)
            return StopResult(now - started_at, tuple(sorted(killed)), survivors)
        pids = {target.pid for target in running}
        due = [target for target in running if target.pid not in terminated]
        if not is_grace_over:
            due = [target for target in due if target.parent not in pids]
        elif due and grace > 0:
            kill_at = now + GROUP_S
        for target in due:
            terminated.add(target.pid)
            send_signal(target, signal.SIGTERM)
        if now >= kill_at:
            for target in running:
                if send_signal(target, signal.SIGKILL):
                    killed.add(target.pid)
        time.sleep(_POLL_S)


@frozen
class FreedMemory:
    """The memory that a GPU has got back."""

    gpu: str
    freed: int
    seconds: float
    whole: bool  # False: the time limit came before all of it was free


def wait_for_memory(
    before: Machine, pids: set[int], observe: Callable[[], Machine | str], limit: float = FREED_S
) -> list[FreedMemory]:
    """Wait until NVML neither lists these stopped processes nor counts the memory that they held."""
    started_at = time.monotonic()
    waiting = {gpu.uuid: gpu for gpu in before.gpus if any(holder.pid in pids for holder in gpu.holders or ())}
    results: list[FreedMemory] = []
    while waiting:
        machine = observe()
        seconds = time.monotonic() - started_at
        gpus = {gpu.uuid: gpu for gpu in machine.gpus} if isinstance(machine, Machine) else {}
        for uuid, gpu_before in list(waiting.items()):
            gpu = gpus.get(uuid)
            expected = sum(holder.memory or 0 for holder in gpu_before.holders or () if holder.pid in pids)
            freed = (gpu_before.memory_used or 0) - (gpu.memory_used or 0) if gpu else 0
            is_held = gpu is None or any(holder.pid in pids for holder in gpu.holders or ())
            # Nine tenths: other processes may have taken some of it meanwhile.
            is_complete = not is_held and freed >= 0.9 * expected
            if is_complete or seconds > limit:
                results.append(FreedMemory(gpu_before.label, max(0, freed), seconds, is_complete))
                del waiting[uuid]
        if waiting:
            time.sleep(_POLL_S)
    return results


def remove_debris(debris: list[Debris]) -> list[tuple[Debris, str]]:
    """Check again that nothing is in use, then remove it. Returns the items that were not removed, each with the reason."""
    folders = {os.path.dirname(item.path) for item in debris}
    used = find_paths_in_use(tuple(folder + "/" for folder in folders)) if debris else set()

    def remove(item: Debris) -> bool:
        if item.kind == "shared memory":
            return item.path not in used and unlink_unused(item.path, os.lstat(item.path))
        if item.kind == WEIGHTS:
            if not shared_weights.is_dead(item.path):
                return False
            shutil.rmtree(item.path)
            return True
        if is_folder_in_use(item.path, used):
            return False
        for name in os.listdir(item.path):
            os.unlink(os.path.join(item.path, name))
        os.rmdir(item.path)
        return True

    return _remove_all(debris, remove)


def _remove_all(items: list[Item], remove: Callable[[Item], bool]) -> list[tuple[Item, str]]:
    """Return the items that were not removed, each with the reason. A missing item counts as removed."""
    not_removed: list[tuple[Item, str]] = []
    for item in items:
        try:
            if not remove(item):
                not_removed.append((item, "it is in use now"))
        except FileNotFoundError:
            continue
        except OSError as problem:
            not_removed.append((item, problem.strerror or str(problem)))
    return not_removed


def unlink_unused(path: str, expected: os.stat_result) -> bool:
    """Remove a file that no process uses. A process that opens it at this moment waits until it is removed."""
    with hold_exclusively(path, expected) as is_alone:
        if is_alone:
            os.unlink(path)
    return is_alone


def remove_caches(caches: list[Cache]) -> list[tuple[Cache, str]]:
    """Remove caches. Returns the items that were not removed, each with the reason."""

    def remove(cache: Cache) -> bool:
        shutil.rmtree(cache.path) if is_own_folder(cache.path) else os.unlink(cache.path)
        return True

    return _remove_all(caches, remove)
