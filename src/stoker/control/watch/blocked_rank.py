"""Describes what blocks a rank other than its peers: a thread's lock, a child, a file lock, a pipe or a socket.

Facts from the kernel are stated as such. Conclusions from the source around a thread's line say "seems". It does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stoker.contract.frozen import frozen
from stoker.control.watch import stack_frames
from stoker.control.watch.rank_inspection import (
    BlockedOn,
    Frame,
    InspectionSet,
    LockUse,
    OtherProcess,
    RankInspection,
    Thread,
    Worker,
)

_MAX_COMMAND = 60  # characters of a command line in a sentence
_STANDARD_STREAMS = ("its standard input", "its standard output", "its standard error")
_BUSY_CPU = 0.5  # cores


@frozen
class BlockedWait:
    kind: str  # of the stall: lock, io, child
    detail: str  # "it is waiting at train.py:12, in load, for …"
    waits_for: str  # becomes Stall.waits_for
    frame: Frame | None = None  # the line to look at; None for the main thread's


def explain_blocked(inspection: RankInspection, inspections: InspectionSet) -> BlockedWait | None:
    """Return what the main thread waits for, or None if only its system call is known."""
    if stack_frames.at_shutdown(inspection.main):
        return None
    frame = stack_frames.script_frame(inspection.main)
    at = f" at {frame}," if frame is not None and stack_frames.is_script(frame) else ""
    if inspection.syscall == "futex" or "futex" in inspection.wchan:
        return _explain_lock(inspection)
    if inspection.syscall in ("wait4", "waitid") or inspection.wchan == "do_wait":
        return _explain_child(inspection, at)
    known_waits = [wait for wait in inspection.blocked if wait.name or wait.kind == "pipe"]
    if not known_waits and any("/asyncio/" in frame.file for frame in inspection.main):
        return BlockedWait("io", f"it is waiting{at} in asyncio's event loop: nothing it awaits finishes", "coroutine")
    if not known_waits:
        return None
    # poll() may wait for several files: choose one whose other end is in another process.
    rank = inspection.rank
    wait = max(known_waits, key=lambda wait: any(not _is_rank_itself(other, rank) for other in wait.others))
    if wait.kind == "pipe" and not wait.writes:
        others = [other for other in wait.others if not _is_rank_itself(other, rank)]
        children = [other for other in wait.others if other.rank == rank and not other.is_rank]
        if children and len(children) == len(others):
            child = f"{_describe_process(children[0])}{_describe_activity(children[0].pid, inspection)}"
            return BlockedWait("child", f"it is waiting{at} for the output of its child {child}", "child-output")
    waits_for = {"lock": "file-lock", "file": ""}.get(wait.kind, wait.kind)
    return BlockedWait("io", f"it is waiting{at} {_describe_wait(wait, rank, inspections)}", waits_for)


def describe_unreadable(inspections: InspectionSet, accused: int | None) -> list[str]:
    """Return a line for each stack that could not be read, and for other unreadable state of the accused rank."""
    lines = [
        f"the stack of rank {rank} could not be read: {inspection.stacks_unseen}"
        for rank, inspection in sorted(inspections.items())
        if inspection.stacks_unseen and not inspection.main
    ]
    inspection = inspections.get(accused) if accused is not None else None
    if inspection is not None and inspection.wait_unseen and inspection.state not in "Z":
        lines.append(f"the system call of rank {accused} could not be read: {inspection.wait_unseen}")
    if inspection is not None and any(wait.hidden and not wait.others for wait in inspection.blocked):
        hidden = max(wait.hidden for wait in inspection.blocked)
        lines.append(f"the open files of {hidden} processes could not be read: one of them may have the other end")
    return lines


# ---- locks of threads ----


def _explain_lock(inspection: RankInspection) -> BlockedWait | None:
    """Follow the chain of locks and their holders from the main thread until it ends or closes a circle."""
    threads = _find_steady_threads(inspection)
    main = next((thread for thread in threads if thread.main), None)
    awaited = _find_awaited_lock(main) if main is not None else None
    if main is None or awaited is None:
        return _describe_threads(inspection, threads)
    held, holder = _find_holder(awaited, main, threads)
    if held is None or holder is None:
        return _describe_threads(inspection, threads)
    certain = bool(awaited.key) and awaited.key == held.key
    lock = f"it is waiting at {awaited.where}, for {awaited.text}, which"
    if holder is main:
        has = "already holds" if certain else "seems to hold already"
        return BlockedWait("lock", f"{lock} the same thread {has} at {held.where}", "own-lock")
    chain, links = [main], [(main, awaited)]
    current, all_certain = holder, certain
    while current not in chain:
        chain.append(current)
        next_awaited = _find_awaited_lock(current)
        if next_awaited is None:
            break
        links.append((current, next_awaited))
        next_held, next_holder = _find_holder(next_awaited, current, threads)
        if next_held is None or next_holder is None or next_holder is current:
            break
        all_certain = all_certain and bool(next_held.key) and next_held.key == next_awaited.key
        if next_holder in chain:
            circle = links[chain.index(next_holder) :]
            waits = "; ".join(
                f"{_name_thread(thread)} is waiting for {use.text} at {use.where}{_describe_held_lock(thread, use)}"
                for thread, use in circle
            )
            verb = "are waiting" if all_certain else "seem to be waiting"
            detail = f"{len(circle)} of its threads {verb} for each other's locks: {waits}"
            return BlockedWait("lock", detail, "lock-order")
        current = next_holder
    now = f", now at {stack_frames.script_frame(holder.frames)}" if holder.frames else ""
    holds = "holds" if certain else "seems to hold"
    return BlockedWait("lock", f"{lock} {_name_thread(holder)} {holds}{now}", "held-lock")


def _find_steady_threads(inspection: RankInspection) -> list[Thread]:
    """Return the threads that were at the same line in every sample. Other threads are not blocked."""
    if not inspection.samples:
        return []
    steady = set.intersection(*({_position(thread) for thread in threads} for threads in inspection.samples))
    return [thread for thread in inspection.samples[-1] if _position(thread) in steady]


def _position(thread: Thread) -> tuple[bool, str, tuple[tuple[str, int], ...]]:
    return thread.main, thread.name, tuple((frame.file, frame.line) for frame in thread.frames)


def _find_awaited_lock(thread: Thread) -> LockUse | None:
    return next((use for use in thread.locks if not use.held), None)


def _find_holder(awaited: LockUse, waiter: Thread, threads: Iterable[Thread]) -> tuple[LockUse | None, Thread | None]:
    """Return which thread holds a lock, and where. Compare the lock objects if they are known, else their names."""
    uses = [(use, thread) for thread in threads for use in thread.locks if use.held]
    for use, thread in uses:
        if use.key and use.key == awaited.key:
            return use, thread
    for use, thread in uses:
        unknown = not (use.key and awaited.key)
        if unknown and thread is not waiter and use.text.rpartition(".")[2] == awaited.text.rpartition(".")[2]:
            return use, thread
    # Within the waiting thread, equal names only count in the same function: elsewhere they may be another object's lock.
    for use, thread in uses:
        same = thread is waiter and (use.text, use.file, use.name) == (awaited.text, awaited.file, awaited.name)
        if same and not (use.key and awaited.key):
            return use, thread
    return None, None


def _describe_held_lock(thread: Thread, awaited: LockUse) -> str:
    held = next((use for use in thread.locks if use.held), None)
    return f", inside `with {held.text}`" if held is not None and held.text != awaited.text else ""


def _name_thread(thread: Thread) -> str:
    if thread.main:
        return "its main thread"
    return f"its thread {thread.name}" if thread.name else "another of its threads"


def _describe_threads(inspection: RankInspection, threads: list[Thread]) -> BlockedWait | None:
    """Return where the script's threads wait, for a lock whose holder is unknown, or None."""
    frame = stack_frames.script_frame(inspection.main)
    others = [thread for thread in threads if not thread.main and any(map(stack_frames.is_script, thread.frames))]
    in_threading = stack_frames.waits_for_threads(inspection)
    if frame is None or not (others or in_threading):
        return None
    positions = [f"{_name_thread(thread)} is at {stack_frames.script_frame(thread.frames)}" for thread in others[:3]]
    omitted = f", and {len(others) - 3} more" if len(others) > 3 else ""
    other_threads = f"; {', '.join(positions)}{omitted}" if positions else ""
    if not in_threading:
        return BlockedWait("lock", f"it is waiting at {frame}, for a lock or another thread{other_threads}", "")
    call = inspection.main[max(inspection.main.index(frame) - 1, 0)]
    return BlockedWait("lock", f"it is waiting in {call.name}(), called at {frame}{other_threads}", "event")


# ---- children ----


def _explain_child(inspection: RankInspection, at: str) -> BlockedWait | None:
    workers = {worker.pid: worker for worker in inspection.workers}
    direct = [worker for worker in inspection.workers if worker.parent not in workers and worker.state != "Z"]
    child = workers.get(inspection.awaited_pid) or (direct[0] if direct else None)
    if child is None:
        return None
    if child.pid != inspection.awaited_pid and len(direct) > 1:
        processes = ", ".join(f"process {worker.pid}{_format_command(worker.command)}" for worker in direct[:3])
        more = ", …" if len(direct) > 3 else ""
        detail = f"it is waiting{at} for a child process to exit; {len(direct)} are alive: {processes}{more}"
        return BlockedWait("child", detail, "")
    at_exit = stack_frames.in_exit_handlers(inspection.main)
    subject = "its script has ended, and Python" if at_exit else "it"
    detail = f"{subject} is waiting{at} for its child process {child.pid}{_format_command(child.command)}"
    for _ in range(3):
        grandchildren = [worker for worker in inspection.workers if worker.parent == child.pid and worker.state != "Z"]
        next_child = workers.get(child.awaited_pid) or (grandchildren[0] if len(grandchildren) == 1 else None)
        if next_child is None or child.syscall not in ("wait4", "waitid"):
            break
        child = next_child
        detail += f", which is waiting for process {child.pid}{_format_command(child.command)}"
    detail += _describe_activity(child.pid, inspection)
    if at_exit:
        return BlockedWait("child", detail, "child-at-exit", stack_frames.script_frame(child.frames))
    waits_for = ""
    for wait in child.blocked[:1]:
        if wait.kind in ("pipe", "fifo") and any(_is_rank_itself(other, inspection.rank) for other in wait.others):
            waits_for = "child-output" if wait.writes else "child-input"
    return BlockedWait("child", detail, waits_for)


def _describe_activity(pid: int, inspection: RankInspection) -> str:
    """Return what a child is doing as a relative clause, or "" if it is unknown."""
    child: Worker | None = next((worker for worker in inspection.workers if worker.pid == pid), None)
    if child is None:
        return ""
    frame = stack_frames.script_frame(child.frames)
    at = f" at {frame}" if frame is not None else ""
    states = {"T": "is stopped", "t": "is held by a debugger", "D": "is in uninterruptible sleep", "Z": "has ended"}
    if child.state in states:
        channel = f" ({child.wchan})" if child.state == "D" and child.wchan else ""
        return f", which {states[child.state]}{channel}{at}"
    if child.blocked:
        return f", which is waiting{at} {_describe_wait(child.blocked[0], inspection.rank, {}, child.pid)}"
    if "nanosleep" in child.syscall or "nanosleep" in child.wchan:
        return f", which is sleeping{at}"
    if child.cpu > _BUSY_CPU:
        return f", which is computing{at} ({child.cpu:.1f} cores)"
    if child.syscall in ("wait4", "waitid"):
        return f", which is waiting{at} for its own child"
    inside = child.syscall if child.syscall not in ("", "running") else child.wchan
    return f", which is in {inside}{at}" if inside else ""


# ---- files, pipes and sockets ----


def _describe_wait(wait: BlockedOn, rank: int, inspections: Mapping[int, RankInspection], waiter: int = 0) -> str:
    """Describe what a process waits for: "to read from the named pipe /tmp/a, which process 7 (cat) has open for writing".

    `waiter` is the pid of the process if it is a child of the rank, else 0.
    """
    others = _describe_others(wait, rank, inspections, waiter)
    if wait.kind == "lock":
        holder = f"which {others} {_choose_verb(wait, 'holds', 'hold')}" if others else "whose holder could not be seen"
        return f"for the lock on {wait.name}, {holder}"
    if wait.kind == "socket":
        return _describe_socket(wait, others)
    if wait.kind == "file":
        return f"in {wait.call} on {wait.name}"
    pipe = f"the named pipe {wait.name}"
    if wait.kind != "fifo":
        pipe = f"{_STANDARD_STREAMS[wait.fd]}, a pipe" if 0 <= wait.fd < 3 else "a pipe"
    if wait.call == "open":
        missing = "reading" if wait.writes else "writing"
        return f"to open {pipe}: no process on this host has it open for {missing}"
    has = _choose_verb(wait, "has", "have")
    if wait.writes:
        reader = f"{others} {has} it open for reading" if others else "its reader could not be seen"
        return f"to write to {pipe}: the pipe is full, and {reader}"
    if not others:
        return f"to read from {pipe}, whose writer could not be seen"
    which = ", which" if wait.kind == "fifo" else " that"
    return f"to read from {pipe}{which} {others} {has} open for writing"


def _describe_socket(wait: BlockedOn, others: str) -> str:
    if wait.state == "listening":
        return f"for a client to connect to {wait.name}"
    if wait.state == "connecting":
        return f"for a connection to {wait.name}, which is not responding"
    if wait.state == "not accepted":
        listener = f"where {others} listens and" if others else "which"
        return f"for {wait.name}, {listener} has not accepted the connection"
    if wait.state == "closed":
        return f"for {wait.name}, which has closed the connection"
    other_end = f", whose other end {others} {_choose_verb(wait, 'has', 'have')} open" if others else ""
    return f"{'to send data to' if wait.writes else 'for data from'} {wait.name}{other_end}"


def _describe_others(wait: BlockedOn, rank: int, inspections: Mapping[int, RankInspection], waiter: int) -> str:
    """Name the processes that hold the lock or have the other end open. Return "" if none was found."""
    if [other.pid for other in wait.others] == [waiter]:
        return "only the process itself"
    if len(wait.others) == 1 and _is_rank_itself(wait.others[0], rank):
        return "only the rank itself"
    names = [_describe_other(other, rank, inspections) for other in wait.others[:2]]
    if len(wait.others) > 2:
        names = [*names[:1], "others"]
    return " and ".join(names)


def _describe_other(other: OtherProcess, rank: int, inspections: Mapping[int, RankInspection]) -> str:
    if _is_rank_itself(other, rank):
        return "the rank itself"
    if other.is_rank and other.rank is not None:
        inspection = inspections.get(other.rank)
        frame = stack_frames.script_frame(inspection.main) if inspection is not None else None
        return f"rank {other.rank} (process {other.pid}{f', now at {frame}' if frame is not None else ''})"
    if other.rank is None:
        return _describe_process(other)
    return (
        f"its child {_describe_process(other)}"
        if other.rank == rank
        else f"{_describe_process(other)} of rank {other.rank}"
    )


def _describe_process(other: OtherProcess) -> str:
    return f"process {other.pid}{_format_command(other.command)}"


def _format_command(command: str) -> str:
    short = f"{command[: _MAX_COMMAND - 1]}…" if len(command) > _MAX_COMMAND else command
    return f" ({short})" if short else ""


def _choose_verb(wait: BlockedOn, singular: str, plural: str) -> str:
    return singular if len(wait.others) == 1 else plural


def _is_rank_itself(other: OtherProcess, rank: int) -> bool:
    return other.is_rank and other.rank == rank
