"""The mistakes of the style_*.py programs: `python style_X.py MISTAKE GUILTY`. A comment `# line: NAME` marks the line that the verdict has to name.

Every program calls `at_step` before each of its steps, on all ranks, and makes its batches with `Samples`. Standard library and torch only.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from moment import AT_STEP, HANG_S, RANK, fault
from torch.utils.data import Dataset

MISTAKE, GUILTY = sys.argv[1], int(sys.argv[2])
STEPS = 400
WIDTH = 16
WORKERS = 2 if MISTAKE.startswith("worker") else 0
_groups: list[dist.ProcessGroup] = []


def guilty() -> bool:
    return RANK == GUILTY


def length() -> int:
    """Batches of this rank."""
    if MISTAKE == "fewer-batches" and guilty():
        return AT_STEP
    return STEPS


class Samples(Dataset[torch.Tensor]):
    """One batch per index: in the rank itself, or in a worker of it."""

    def __init__(self, count: int = STEPS) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        if index == AT_STEP and guilty() and MISTAKE.startswith("worker"):
            in_worker()
        batch = torch.randn(8, WIDTH)
        if index >= AT_STEP and guilty() and MISTAKE == "nan":
            if index == AT_STEP:
                fault()
            batch[0, 0] = float("nan")
        if index == AT_STEP and guilty() and MISTAKE == "shape":
            fault()
            return batch[:, 1:]
        return batch


def in_worker() -> None:
    fault()
    if MISTAKE == "worker-killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif MISTAKE == "worker-sleeps":
        time.sleep(HANG_S)  # line: worker-sleeps
    elif MISTAKE == "worker-raises":
        raise KeyError("no such sample")  # line: worker-raises


def at_step(step: int) -> None:
    """Before each step, on every rank."""
    if MISTAKE in _EVERY_STEP:
        _EVERY_STEP[MISTAKE](step)
    if step == AT_STEP and guilty() and MISTAKE in _ALONE:
        _ALONE[MISTAKE]()


# ---- what one rank does alone ----


def raises() -> None:
    fault()
    raise ValueError("boom")  # line: raises


def crashes() -> None:
    """Other threads are there, as with any logger or data prefetcher: the first one in faulthandler's report is not the one that crashed."""
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(HANG_S,), daemon=True).start()
    time.sleep(0.1)
    fault()
    ctypes.string_at(0)  # line: crashes


def crashes_in_thread() -> None:
    fault()
    crashing = threading.Thread(target=read_null, daemon=True)
    crashing.start()
    crashing.join()


def read_null() -> None:
    ctypes.string_at(0)  # line: crashes-in-thread


def is_killed() -> None:
    fault()
    os.kill(os.getpid(), signal.SIGKILL)


def leaves() -> None:
    fault()
    os._exit(0)


def exits() -> None:
    fault()
    print("no licence for this data set", flush=True)
    sys.exit(3)  # line: exits


def sleeps() -> None:
    fault()
    time.sleep(HANG_S)  # line: sleeps


def spins() -> None:
    fault()
    while True:
        sum(range(1000))  # line: spins


def waits_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    fault()
    lock.acquire()  # line: waits-for-lock


def stops() -> None:
    fault()
    os.kill(os.getpid(), signal.SIGSTOP)


def debugs() -> None:
    fault()
    breakpoint()  # line: debugs
    print("after the breakpoint", flush=True)


def loses_workers() -> None:
    """Killed from outside, with batches under way."""
    fault()
    for worker in multiprocessing.active_children():
        os.kill(worker.pid or 0, signal.SIGKILL)


def extra_reduce() -> None:
    """Logs a mean that the others don't ask for."""
    fault()
    dist.all_reduce(torch.ones(5))  # line: extra-reduce


def extra_barrier() -> None:
    """`if rank == 0: save(); barrier()`."""
    fault()
    dist.barrier()  # line: extra-barrier


_ALONE = {
    "raises": raises, "crashes": crashes, "crashes-in-thread": crashes_in_thread, "killed": is_killed, "leaves": leaves, "exits": exits, "sleeps": sleeps,
    "spins": spins, "waits-for-lock": waits_for_lock, "stops": stops, "debugs": debugs, "workers-lost": loses_workers, "extra-reduce": extra_reduce, "extra-barrier": extra_barrier,
}  # fmt: skip


# ---- what all ranks do in every step, and one of them does not do as the others ----


def skips_reduce(step: int) -> None:
    """A metric's mean over the ranks, in every step; the guilty rank leaves it out once."""
    if step == AT_STEP and guilty():
        fault()
        return
    dist.all_reduce(torch.ones(5))  # line: skips-reduce


def other_operation(step: int) -> None:
    if step == AT_STEP and guilty():
        fault()
        dist.broadcast(torch.ones(5), src=(GUILTY + 1) % dist.get_world_size())  # line: other-operation
    else:
        dist.all_reduce(torch.ones(5))


def first_time_apart(step: int) -> None:
    """Nothing like it before this step: of two ranks, nobody can say which is wrong."""
    if step == AT_STEP:
        if guilty():
            fault()
            dist.all_reduce(torch.ones(5))  # line: first-time-apart
        else:
            dist.broadcast(torch.ones(5), src=GUILTY)  # line: first-time-apart-others


def groups_swapped(step: int) -> None:
    """Two groups of all ranks, used in one order in every step; the guilty rank once in the other."""
    if not _groups:
        _groups.extend(dist.new_group(list(range(dist.get_world_size()))) for _ in range(2))
    if step == AT_STEP and guilty():
        fault()
        dist.all_reduce(torch.ones(3), group=_groups[1])  # line: groups-swapped
        dist.all_reduce(torch.ones(3), group=_groups[0])
    else:
        dist.all_reduce(torch.ones(3), group=_groups[0])
        dist.all_reduce(torch.ones(3), group=_groups[1])


def skips_pair(step: int) -> None:
    """Groups of two ranks; the guilty one leaves its pair's all_reduce out, and its partner waits there."""
    if not _groups:
        _groups.extend(dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2))
    if step == AT_STEP and guilty():
        fault()
        return
    dist.all_reduce(torch.ones(3), group=_groups[RANK // 2])  # line: skips-pair


def skips_pair_once(step: int) -> None:
    """The same, in a group that is used at one step only."""
    if step == 0:
        _groups.extend(dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2))
    if step == AT_STEP:
        if guilty():
            fault()
            return
        dist.all_reduce(torch.ones(3), group=_groups[RANK // 2])  # line: skips-pair-once


_EVERY_STEP = {
    "skips-reduce": skips_reduce, "other-operation": other_operation, "first-time-apart": first_time_apart, "groups-swapped": groups_swapped,
    "skips-pair": skips_pair, "skips-pair-once": skips_pair_once,
}  # fmt: skip
