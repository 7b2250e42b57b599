"""Reading stacks: whose line it is, what kind of waiting, and which ranks look alike. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.contract.stack_traces import is_library
from stoker.contract.units import format_ranks
from stoker.control.watch.rank_inspection import Frame, RankInspection, main_thread

# Not all of torch/distributed: elastic's decorators and FSDP's forward are around the script's own code.
_COLLECTIVES = tuple(
    f"torch/distributed/{name}"
    for name in ("distributed_c10d.py", "_functional_collectives.py", "rendezvous.py", "nn/")
)
_PROCESSES = ("/subprocess.py", "/multiprocessing/", "/multiprocess/", "/concurrent/futures/", "/joblib/", "/torch/utils/data/dataloader.py")  # fmt: skip
_THREADS = ("/threading.py", "/queue.py", "/concurrent/futures/", "/multiprocessing/pool.py", "/asyncio/")
_LOADER = ("_try_get_data", "_get_data")  # waiting for a worker; with num_workers=0 there is none


def is_users(frame: Frame) -> bool:
    return not is_library(frame.file)


def users_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost line of the script's own; of a library where the script has none."""
    frames = tuple(frames)
    return next((frame for frame in frames if is_users(frame)), frames[0] if frames else None)


def in_collective(frames: Iterable[Frame]) -> bool:
    """Up to the script's own frames: a call of torch.distributed, or the backward pass, where DDP and FSDP wait."""
    for frame in frames:
        if any(part in frame.file for part in _COLLECTIVES) or (
            frame.function == "_engine_run_backward" and "torch/" in frame.file
        ):
            return True
        if is_users(frame):
            return False
    return False


def collective_name(frames: Iterable[Frame]) -> str:
    """Return the function of torch.distributed that the script called, "backward" inside of the backward pass, else ""."""
    name = ""
    for frame in frames:
        if is_users(frame):
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
    """Has the script ended, and does Python wait for its threads?"""
    return any(frame.function == "_shutdown" and frame.file.endswith("/threading.py") for frame in frames)


def in_exit_handlers(frames: Iterable[Frame]) -> bool:
    """Return whether the script has ended and multiprocessing waits for processes that are not daemons."""
    return any(frame.function == "_exit_function" and "/multiprocessing/" in frame.file for frame in frames)


def waits_for_processes(one: RankInspection) -> bool:
    """Return whether the main thread waits for processes it started: for their end, their output or their results."""
    if one.syscall in ("wait4", "waitid") or one.wchan == "do_wait" or "pipe" in one.wchan:
        return True
    return _calls_into(one, _PROCESSES)


def waits_for_threads(one: RankInspection) -> bool:
    """Return whether the main thread waits for another thread of the rank in Python's own library."""
    return _calls_into(one, _THREADS)


def _calls_into(one: RankInspection, files: tuple[str, ...]) -> bool:
    """Return whether the script was in a call into one of these library files in any of the samples."""
    for main in filter(None, map(main_thread, one.samples)):
        for frame in main.frames:
            if is_users(frame):
                break
            if any(part in frame.file for part in files):
                return True
    return False


def in_backward(frames: Iterable[Frame]) -> bool:
    return any(frame.function == "_engine_run_backward" for frame in frames)


def likeness(frames: Iterable[Frame]) -> tuple[tuple[str, str, int], ...]:
    """What makes two stacks alike: the script's own lines, and the innermost function."""
    frames = tuple(frames)
    own = tuple((frame.file, frame.name, frame.line) for frame in frames if is_users(frame))
    return ((frames[0].file, frames[0].name, 0), *own) if frames else ()


def grouped(snapshots: Iterable[RankInspection]) -> list[tuple[tuple[int, ...], RankInspection]]:
    """Ranks with the same stack together, the smallest group first: the one that differs is the one to look at."""
    alike: dict[tuple[tuple[str, str, int], ...], list[RankInspection]] = {}
    for one in snapshots:
        alike.setdefault(likeness(one.main), []).append(one)
    groups = [(tuple(one.rank for one in members), members[0]) for members in alike.values()]
    return sorted(groups, key=lambda group: (len(group[0]), group[0]))


def told(snapshots: Iterable[RankInspection], frames: int = 4) -> list[str]:
    """One line a group: ranks 0, 2-3: all_reduce (distributed_c10d.py:2955) < step (train.py:40) < main (train.py:60)."""
    lines = []
    for ranks, one in grouped(snapshots):
        shown = " < ".join(f"{frame.name} ({_short(frame.file)}:{frame.line})" for frame in _telling(one.main)[:frames])
        lines.append(f"{format_ranks(ranks)}: {shown or 'no Python stack'}")
    return lines


def _telling(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The innermost frame, then the script's own."""
    return (frames[0], *(frame for frame in frames[1:] if is_users(frame))) if frames else ()


def _short(path: str) -> str:
    return path.rpartition("/")[2]


def full(snapshot: RankInspection) -> str:
    """A rank's stacks and its workers', for the record."""
    doing = f"state {snapshot.state}, {snapshot.cpu:.2f} cores, in {snapshot.syscall or snapshot.wchan or '?'}"
    lines = [f"rank {snapshot.rank}: {doing}; by {snapshot.stacks_by}"]
    for thread in snapshot.samples[-1] if snapshot.samples else ():
        name = "main thread" if thread.main else f"thread {thread.name}".rstrip()
        lines.append(f"{name}{', holds the GIL' if thread.gil else ''}:")
        lines += [f'  File "{frame.file}", line {frame.line} in {frame.name}' for frame in thread.frames]
    for worker in snapshot.workers:
        doing = f"state {worker.state}, {worker.cpu:.2f} cores, in {worker.syscall or '?'}"
        lines.append(f"child {worker.pid} ({worker.name}): {doing}")
        lines += [f'  File "{frame.file}", line {frame.line} in {frame.name}' for frame in worker.frames]
    for group in snapshot.groups:
        for op in group.ops[-8:]:
            where = f"group {group.name or '?'}{' (' + group.about + ')' if group.about else ''}"
            lines.append(f"{where}, operation {op.seq}: {op}{'' if op.done else ' — not done'}")
    return "\n".join(lines) + "\n"
