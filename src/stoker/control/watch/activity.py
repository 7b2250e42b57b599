"""Finds evidence that a rank is working although it finishes no step. It does no I/O.

Evidence is something that changes: the stack or its local variables while the rank uses CPU, bytes read or written,
memory touched for the first time, or the same in the processes and threads that the rank waits for. CPU time or a busy
GPU alone is not evidence: an endless loop has both.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.control.watch import stack_frames
from stoker.control.watch.rank_inspection import RankInspection, Thread, Worker, main_thread

MIN_CPU = 0.1  # cores: a loop that polls and sleeps uses less
MIN_NATIVE_CPU = 0.25  # cores used by native threads, whose stacks can't be read
MIN_BYTES = 65536  # between two inspections
MIN_HELPER_RATE = 16384.0  # bytes per second of children or threads: loggers and system monitors write less
MIN_FAULT_RATE = 100.0  # page faults per second

COMPUTES = "it is computing"
READS_OR_WRITES = "it is reading or writing files"
_SLEEP_CALLS = ("nanosleep", "clock_nanosleep")


def describe_work(before: RankInspection | None, now: RankInspection, elapsed_s: float) -> str:
    """Return what the rank is doing ("it is computing"), or "" if there is no evidence of work.

    `before` is its inspection `elapsed_s` seconds ago in the same stall, or None.
    """
    if now.state in "TtZ" or stack_frames.in_collective(now.main) or stack_frames.in_rendezvous(now.main):
        return ""
    samples = [*(before.samples if before else ()), *now.samples]
    if now.main_cpu + now.waiting_for_core > MIN_CPU and _stack_changes(map(main_thread, samples)):
        return COMPUTES
    if before is not None and now.main_bytes - before.main_bytes >= MIN_BYTES:
        return READS_OR_WRITES
    if before is not None and _touches_memory(before, now, elapsed_s):
        return COMPUTES
    if before is not None and stack_frames.waits_for_processes(now) and _processes_work(before, now, elapsed_s):
        return "it is waiting for child processes that are working"
    if stack_frames.waits_for_threads(now) and _threads_work(before, now, elapsed_s):
        return "it is waiting for threads that are working"
    return ""


def _stack_changes(samples: Iterable[Thread | None]) -> bool:
    """Return whether a thread was seen in different functions, with different variables, or at three or more lines.

    Two lines with the same variables don't count: they may be a waiting loop such as `while not done: pass`.
    """
    functions, lines = set(), set()
    for thread in samples:
        if thread is not None and thread.frames and not stack_frames.in_collective(thread.frames):
            functions.add((tuple((frame.name, frame.file) for frame in thread.frames), thread.values))
            lines.add(tuple((frame.file, frame.line) for frame in thread.frames))
    return len(functions) > 1 or len(lines) > 2


def _touches_memory(before: RankInspection, now: RankInspection, elapsed_s: float) -> bool:
    """Return whether the main thread, or native threads that use CPU, touch memory for the first time.

    Nothing else shows that one long call into native code, or reading a memory-mapped file, makes progress.
    """
    if now.main_faults - before.main_faults >= MIN_FAULT_RATE * elapsed_s:
        return True
    sleeps = now.syscall in _SLEEP_CALLS or "nanosleep" in now.wchan
    return not sleeps and now.cpu > MIN_NATIVE_CPU and now.all_faults - before.all_faults >= MIN_FAULT_RATE * elapsed_s


def _processes_work(before: RankInspection, now: RankInspection, elapsed_s: float) -> bool:
    """Return whether child processes start, end, read, write, touch memory or compute."""
    if len({frozenset(before.children), frozenset(now.children_before), frozenset(now.children)}) > 1:
        return True
    workers_before = {worker.pid: worker for worker in before.workers}
    pairs = [(workers_before[worker.pid], worker) for worker in now.workers if worker.pid in workers_before]
    moved = sum(worker.moved - earlier.moved for earlier, worker in pairs)
    faults = sum(worker.faults - earlier.faults for earlier, worker in pairs)
    if moved >= max(MIN_BYTES, MIN_HELPER_RATE * elapsed_s) or faults >= MIN_FAULT_RATE * elapsed_s:
        return True
    return any(_is_computing(earlier, worker) for earlier, worker in pairs)


def _is_computing(before: Worker, now: Worker) -> bool:
    return now.cpu > MIN_CPU and _stack_changes((main_thread(before.threads), main_thread(now.threads)))


def _threads_work(before: RankInspection | None, now: RankInspection, elapsed_s: float) -> bool:
    """Return whether the rank's other threads read, write, or change their stacks while it uses CPU."""
    if before is not None:
        bytes_by_others = now.all_bytes - now.main_bytes
        if bytes_by_others - (before.all_bytes - before.main_bytes) >= max(MIN_BYTES, MIN_HELPER_RATE * elapsed_s):
            return True
    samples = [*(before.samples if before is not None else ()), *now.samples]
    stacks = {frozenset(thread.frames for thread in threads if not thread.main) for threads in samples}
    return now.cpu > MIN_CPU and len(stacks) > 1
