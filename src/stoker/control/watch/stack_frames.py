"""Reads stacks: which lines are the script's, what a thread waits for, and which ranks have the same stack. It does no I/O."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.contract.stack_traces import is_library
from stoker.contract.units import format_ranks
from stoker.control.watch.rank_inspection import Frame, RankInspection, main_thread

# Not all of torch/distributed is listed: elastic's decorators and FSDP's forward pass call the script's code.
_COLLECTIVES = tuple(
    f"torch/distributed/{name}"
    for name in ("distributed_c10d.py", "_functional_collectives.py", "rendezvous.py", "nn/")
)
_PROCESSES = ("/subprocess.py", "/multiprocessing/", "/multiprocess/", "/concurrent/futures/", "/joblib/", "/torch/utils/data/dataloader.py")  # fmt: skip
_THREADS = ("/threading.py", "/queue.py", "/concurrent/futures/", "/multiprocessing/pool.py", "/asyncio/")
_LOADER = ("_try_get_data", "_get_data")  # these wait for a worker; with num_workers=0 they are not called


def is_script(frame: Frame) -> bool:
    """Return whether a frame is in the user's code rather than in a library."""
    return not is_library(frame.file)


def script_frame(frames: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame in the user's code. Without one, return the innermost frame of all, or None."""
    frames = tuple(frames)
    return next((frame for frame in frames if is_script(frame)), frames[0] if frames else None)


def in_collective(frames: Iterable[Frame]) -> bool:
    """Return whether the script is in a call of torch.distributed, or in the backward pass, where DDP and FSDP wait."""
    for frame in frames:
        if any(part in frame.file for part in _COLLECTIVES) or (
            frame.function == "_engine_run_backward" and "torch/" in frame.file
        ):
            return True
        if is_script(frame):
            return False
    return False


def collective_name(frames: Iterable[Frame]) -> str:
    """Return the function of torch.distributed that the script called, "backward" in the backward pass, or ""."""
    name = ""
    for frame in frames:
        if is_script(frame):
            break
        if any(part in frame.file for part in _COLLECTIVES):
            name = frame.name
        elif frame.function == "_engine_run_backward":
            name = "backward"
    return name


def in_rendezvous(frames: Iterable[Frame]) -> bool:
    joining = ("init_process_group", "rendezvous", "_store_based_barrier", "_create_c10d_store")
    return any(frame.function in joining for frame in frames)


def in_loader(frames: Iterable[Frame]) -> bool:
    return any(frame.function in _LOADER and frame.file.endswith("torch/utils/data/dataloader.py") for frame in frames)


def at_shutdown(frames: Iterable[Frame]) -> bool:
    """Return whether the script has ended and Python waits for its threads."""
    return any(frame.function == "_shutdown" and frame.file.endswith("/threading.py") for frame in frames)


def in_exit_handlers(frames: Iterable[Frame]) -> bool:
    """Return whether the script has ended and multiprocessing waits for processes that are not daemons."""
    return any(frame.function == "_exit_function" and "/multiprocessing/" in frame.file for frame in frames)


def in_backward(frames: Iterable[Frame]) -> bool:
    return any(frame.function == "_engine_run_backward" for frame in frames)


def waits_for_processes(inspection: RankInspection) -> bool:
    """Return whether the main thread waits for the exit, output or results of processes that it started."""
    if inspection.syscall in ("wait4", "waitid") or inspection.wchan == "do_wait" or "pipe" in inspection.wchan:
        return True
    return _calls_into(inspection, _PROCESSES)


def waits_for_threads(inspection: RankInspection) -> bool:
    """Return whether the main thread waits for another thread of the rank in Python's standard library."""
    return _calls_into(inspection, _THREADS)


def _calls_into(inspection: RankInspection, files: tuple[str, ...]) -> bool:
    """Return whether the script was in a call into one of these library files in any sample."""
    for thread in filter(None, map(main_thread, inspection.samples)):
        for frame in thread.frames:
            if is_script(frame):
                break
            if any(part in frame.file for part in files):
                return True
    return False


def group_by_stack(inspections: Iterable[RankInspection]) -> list[tuple[tuple[int, ...], RankInspection]]:
    """Return (ranks, inspection of the first) for each distinct stack, the smallest group first.

    Two stacks are the same if the innermost function and all lines of the script are. The smallest group is the suspect.
    """
    by_stack: dict[tuple[tuple[str, str, int], ...], list[RankInspection]] = {}
    for inspection in inspections:
        frames = inspection.main
        script = tuple((frame.file, frame.name, frame.line) for frame in frames if is_script(frame))
        by_stack.setdefault(((frames[0].file, frames[0].name, 0), *script) if frames else (), []).append(inspection)
    groups = [(tuple(member.rank for member in members), members[0]) for members in by_stack.values()]
    return sorted(groups, key=lambda group: (len(group[0]), group[0]))


def summarize_stacks(inspections: Iterable[RankInspection], limit: int = 4) -> list[str]:
    """Return one line per distinct stack, with up to `limit` frames: the innermost one and the script's.

    ranks 0, 2-3: all_reduce (distributed_c10d.py:2955) < step (train.py:40) < main (train.py:60)
    """
    lines = []
    for ranks, inspection in group_by_stack(inspections):
        frames = [*inspection.main[:1], *(frame for frame in inspection.main[1:] if is_script(frame))][:limit]
        stack = " < ".join(f"{frame.name} ({frame.file.rpartition('/')[2]}:{frame.line})" for frame in frames)
        lines.append(f"{format_ranks(ranks)}: {stack or 'no Python stack'}")
    return lines


def format_stacks(inspection: RankInspection) -> str:
    """Return the text for stacks.txt: the stacks of a rank and its workers, and its newest collectives."""
    syscall = inspection.syscall or inspection.wchan or "?"
    state = f"state {inspection.state}, {inspection.cpu:.2f} cores, in {syscall}"
    lines = [f"rank {inspection.rank}: {state}; by {inspection.stacks_by}"]
    for thread in inspection.samples[-1] if inspection.samples else ():
        name = "main thread" if thread.main else f"thread {thread.name}".rstrip()
        lines.append(f"{name}{', holds the GIL' if thread.gil else ''}:")
        lines += [f'  File "{frame.file}", line {frame.line} in {frame.name}' for frame in thread.frames]
    for worker in inspection.workers:
        state = f"state {worker.state}, {worker.cpu:.2f} cores, in {worker.syscall or '?'}"
        lines.append(f"child {worker.pid} ({worker.name}): {state}")
        lines += [f'  File "{frame.file}", line {frame.line} in {frame.name}' for frame in worker.frames]
    for group in inspection.groups:
        name = f"group {group.name or '?'}{' (' + group.about + ')' if group.about else ''}"
        lines += [f"{name}, operation {op.seq}: {op}{'' if op.done else ' — not done'}" for op in group.ops[-8:]]
    return "\n".join(lines) + "\n"
