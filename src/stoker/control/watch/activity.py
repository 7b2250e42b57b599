"""Evidence that a rank works although it finishes no step. Pure.

Evidence is something that changes: the stack or its local variables while the rank uses CPU, bytes read or written,
memory touched for the first time, or the same in the processes and threads the rank waits for. CPU time or a busy GPU
alone is no evidence: a loop that never ends has both.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.control.watch import stack_frames
from stoker.control.watch.rank_inspection import RankInspection, Thread, Worker, main_thread

MOVING_CPU = 0.1  # of a core: a loop that polls and sleeps uses less
NATIVE_CPU = 0.25  # of native threads whose stacks can't be read
MIN_BYTES = 65536  # between two looks
MIN_HELPER_RATE = 16384.0  # bytes a second: loggers and monitors of the system write less
MIN_FAULT_RATE = 100.0  # page faults a second

COMPUTES = "it computes"
READS_OR_WRITES = "it reads or writes files"
_SLEEPS = ("nanosleep", "clock_nanosleep")


def activity(before: RankInspection | None, now: RankInspection, elapsed_s: float) -> str:
    """Return what the rank does ("it computes"), or "" without evidence. `before`: `elapsed_s` ago, in the same stall."""
    if now.state in "TtZ" or stack_frames.in_collective(now.main) or stack_frames.in_rendezvous(now.main):
        return ""
    samples = [*(before.samples if before else ()), *now.samples]
    if now.main_cpu + now.waiting_for_core > MOVING_CPU and _moves(map(main_thread, samples)):
        return COMPUTES
    if before is not None and now.main_bytes - before.main_bytes >= MIN_BYTES:
        return READS_OR_WRITES
    if before is not None and _touches_memory(before, now, elapsed_s):
        return COMPUTES
    if before is not None and stack_frames.waits_for_processes(now) and _processes_work(before, now, elapsed_s):
        return "it waits for child processes that work"
    if stack_frames.waits_for_threads(now) and _threads_work(before, now, elapsed_s):
        return "it waits for threads that work"
    return ""


def _moves(mains: Iterable[Thread | None]) -> bool:
    """Return whether a thread was seen in different functions, with different variables, or at three lines or more.

    Two lines with the same variables are the head and the body of a loop that waits: `while not done: pass`.
    """
    stays, lines = set(), set()
    for main in mains:
        if main is not None and main.frames and not stack_frames.in_collective(main.frames):
            stays.add((tuple((frame.name, frame.file) for frame in main.frames), main.values))
            lines.add(tuple((frame.file, frame.line) for frame in main.frames))
    return len(stays) > 1 or len(lines) > 2


def _touches_memory(before: RankInspection, now: RankInspection, elapsed_s: float) -> bool:
    """Return whether the main thread, or native threads while it computes, touch memory for the first time.

    This is what can be seen of one long call into native code, and of a file that is mapped.
    """
    if now.main_faults - before.main_faults >= MIN_FAULT_RATE * elapsed_s:
        return True
    sleeps = now.syscall in _SLEEPS or "nanosleep" in now.wchan
    return not sleeps and now.cpu > NATIVE_CPU and now.all_faults - before.all_faults >= MIN_FAULT_RATE * elapsed_s


def _processes_work(before: RankInspection, now: RankInspection, elapsed_s: float) -> bool:
    if len({frozenset(before.children), frozenset(now.children_before), frozenset(now.children)}) > 1:
        return True  # one has ended, or another was started
    earlier = {worker.pid: worker for worker in before.workers}
    pairs = [(earlier[worker.pid], worker) for worker in now.workers if worker.pid in earlier]
    moved = sum(worker.moved - was.moved for was, worker in pairs)
    faults = sum(worker.faults - was.faults for was, worker in pairs)
    if moved >= max(MIN_BYTES, MIN_HELPER_RATE * elapsed_s) or faults >= MIN_FAULT_RATE * elapsed_s:
        return True
    return any(_moved_on(was, worker) for was, worker in pairs)


def _moved_on(before: Worker, now: Worker) -> bool:
    return now.cpu > MOVING_CPU and _moves((main_thread(before.threads), main_thread(now.threads)))


def _threads_work(before: RankInspection | None, now: RankInspection, elapsed_s: float) -> bool:
    if before is not None:
        ours = now.all_bytes - now.main_bytes
        if ours - (before.all_bytes - before.main_bytes) >= max(MIN_BYTES, MIN_HELPER_RATE * elapsed_s):
            return True
    samples = [*(before.samples if before is not None else ()), *now.samples]
    others = {frozenset(thread.frames for thread in threads if not thread.main) for threads in samples}
    return now.cpu > MOVING_CPU and len(others) > 1
