"""Words what a rank is blocked on inside itself: a lock of another thread, a child, a file lock, a pipe or a socket. Pure.

What the kernel says is worded as a fact. What is only read from the source around a thread's line is worded as likely.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stoker.contract.frozen import frozen
from stoker.control.watch import stack_frames
from stoker.control.watch.rank_inspection import BlockedOn, Frame, LockUse, OtherProcess, RankInspection, Thread, Worker

_COMMAND = 60  # characters of a command line in a sentence
_STANDARD = ("its standard input", "its standard output", "its standard error")
_BUSY = 0.5  # of a core


@frozen
class InnerWait:
    kind: str  # of the stall: lock, io, child
    detail: str  # it waits at train.py:12, in load, for …
    about: str  # Stall.waits_for
    frame: Frame | None = None  # the line to look at, where it is not the main thread's


def explain_blocked(one: RankInspection, snapshots: Mapping[int, RankInspection]) -> InnerWait | None:
    """Return what the main thread waits for, or None if no more is known than its system call."""
    if stack_frames.at_shutdown(one.main):
        return None
    frame = stack_frames.users_frame(one.main)
    at = f" at {frame}," if frame is not None and stack_frames.is_users(frame) else ""
    if one.syscall == "futex" or "futex" in one.wchan:
        return _lock(one)
    if one.syscall in ("wait4", "waitid") or one.wchan == "do_wait":
        return _child(one, at)
    named = [wait for wait in one.blocked if wait.name or wait.kind == "pipe"]
    if not named and any("/asyncio/" in frame.file for frame in one.main):
        return InnerWait("io", f"it waits{at} in the event loop of asyncio: nothing it awaits finishes", "coroutine")
    if not named:
        return None
    # poll() may name several; one whose other end is in another process says most
    wait = max(named, key=lambda wait: any(not _is_self(other, one.rank) for other in wait.others))
    if wait.kind == "pipe" and not wait.writes:
        children = [other for other in wait.others if other.rank == one.rank and not other.is_rank]
        if children and len(children) == len([other for other in wait.others if not _is_self(other, one.rank)]):
            doing = _doing(children[0].pid, one)
            return InnerWait(
                "child", f"it waits{at} for the output of its child {_process(children[0])}{doing}", "child-output"
            )
    about = {"lock": "file-lock", "file": ""}.get(wait.kind, wait.kind)
    return InnerWait("io", f"it waits{at} {_purpose(wait, one.rank, snapshots)}", about)


def unseen(snapshots: Mapping[int, RankInspection], accused: int | None) -> list[str]:
    """Return one line for each thing about the accused rank that could not be read, and for each rank without a stack."""
    lines = [
        f"the stack of rank {rank} could not be read: {one.stacks_unseen}"
        for rank, one in sorted(snapshots.items())
        if one.stacks_unseen and not one.main
    ]
    one = snapshots.get(accused) if accused is not None else None
    if one is not None and one.wait_unseen and one.state not in "Z":
        lines.append(f"the system call of rank {accused} could not be read: {one.wait_unseen}")
    if one is not None and any(wait.hidden and not wait.others for wait in one.blocked):
        hidden = max(wait.hidden for wait in one.blocked)
        lines.append(f"the open files of {hidden} processes could not be read: the other end may be in one of them")
    return lines


# ---- locks of threads ----


def _lock(one: RankInspection) -> InnerWait | None:
    threads = _steady_threads(one)
    main = next((thread for thread in threads if thread.main), None)
    wanted = _wanted(main) if main is not None else None
    if main is None or wanted is None:
        return _waiting_threads(one, threads)
    held, holder = _holder(wanted, main, threads)
    if held is None or holder is None:
        return _waiting_threads(one, threads)
    certain = bool(wanted.key) and wanted.key == held.key
    if holder is main:
        has = "already holds" if certain else "seems to hold already"
        taken = f"at {held.where}"
        return InnerWait(
            "lock", f"it waits at {wanted.where}, for {wanted.text}, which the same thread {has} {taken}", "own-lock"
        )
    chain, links = [main], [(main, wanted)]
    current, proven = holder, certain
    while current not in chain:
        chain.append(current)
        next_wanted = _wanted(current)
        if next_wanted is None:
            break
        links.append((current, next_wanted))
        next_held, next_holder = _holder(next_wanted, current, threads)
        if next_held is None or next_holder is None or next_holder is current:
            break
        proven = proven and bool(next_held.key) and next_held.key == next_wanted.key
        if next_holder in chain:
            circle = links[chain.index(next_holder) :]
            each = "; ".join(
                f"{_name(thread)} waits for {use.text} at {use.where}{_inside(thread, use)}" for thread, use in circle
            )
            verb = "wait" if proven else "seem to wait"
            return InnerWait(
                "lock", f"{len(circle)} of its threads {verb} for each other's locks: {each}", "lock-order"
            )
        current = next_holder
    now = f", now at {stack_frames.users_frame(holder.frames)}" if holder.frames else ""
    holds = "holds" if certain else "seems to hold"
    return InnerWait(
        "lock", f"it waits at {wanted.where}, for {wanted.text}, which {_name(holder)} {holds}{now}", "held-lock"
    )


def _steady_threads(one: RankInspection) -> list[Thread]:
    """Return the threads that were at the same line in every sample: the others are not blocked."""
    if not one.samples:
        return []
    always = set.intersection(*({_line(thread) for thread in threads} for threads in one.samples))
    return [thread for thread in one.samples[-1] if _line(thread) in always]


def _line(thread: Thread) -> tuple[bool, str, tuple[tuple[str, int], ...]]:
    return thread.main, thread.name, tuple((frame.file, frame.line) for frame in thread.frames)


def _wanted(thread: Thread) -> LockUse | None:
    return next((use for use in thread.locks if not use.held), None)


def _holder(wanted: LockUse, waiter: Thread, threads: Iterable[Thread]) -> tuple[LockUse | None, Thread | None]:
    """Return who holds a lock: best by the object itself, else by its name."""
    uses = [(use, thread) for thread in threads for use in thread.locks if use.held]
    for use, thread in uses:
        if use.key and use.key == wanted.key:
            return use, thread
    for use, thread in uses:
        unknown = not (use.key and wanted.key)
        if unknown and thread is not waiter and _last_name(use.text) == _last_name(wanted.text):
            return use, thread
    # The same text in another frame of the waiter may be another object's lock: only in the same function is it likely.
    for use, thread in uses:
        same = thread is waiter and (use.text, use.file, use.name) == (wanted.text, wanted.file, wanted.name)
        if same and not (use.key and wanted.key):
            return use, thread
    return None, None


def _last_name(text: str) -> str:
    return text.rpartition(".")[2]


def _inside(thread: Thread, wanted: LockUse) -> str:
    held = next((use for use in thread.locks if use.held), None)
    return f", inside `with {held.text}`" if held is not None and held.text != wanted.text else ""


def _name(thread: Thread) -> str:
    if thread.main:
        return "its main thread"
    return f"its thread {thread.name}" if thread.name else "another of its threads"


def _waiting_threads(one: RankInspection, threads: list[Thread]) -> InnerWait | None:
    """Describe where the script's threads wait, when no holder is known."""
    frame = stack_frames.users_frame(one.main)
    others = [thread for thread in threads if not thread.main and any(map(stack_frames.is_users, thread.frames))]
    inside = stack_frames.waits_for_threads(one)
    if frame is None or not (others or inside):
        return None
    each = [f"{_name(thread)} is at {stack_frames.users_frame(thread.frames)}" for thread in others[:3]]
    more = f", and {len(others) - 3} more" if len(others) > 3 else ""
    there = f"; {', '.join(each)}{more}" if each else ""
    if not inside:
        return InnerWait("lock", f"it waits at {frame}, for a lock or another thread{there}", "")
    call = one.main[max(one.main.index(frame) - 1, 0)]
    return InnerWait("lock", f"it waits in {call.name}(), called at {frame}{there}", "event")


# ---- children ----


def _child(one: RankInspection, at: str) -> InnerWait | None:
    below = {worker.pid: worker for worker in one.workers}
    direct = [worker for worker in one.workers if worker.parent not in below and worker.state != "Z"]
    child = below.get(one.awaited_pid) or (direct[0] if direct else None)
    if child is None:
        return None
    if child.pid != one.awaited_pid and len(direct) > 1:
        each = ", ".join(f"process {worker.pid}{_command(worker.command)}" for worker in direct[:3])
        more = ", …" if len(direct) > 3 else ""
        return InnerWait(
            "child", f"it waits{at} for the end of a child process; {len(direct)} are alive: {each}{more}", ""
        )
    ended = "its script has ended, and Python" if stack_frames.in_exit_handlers(one.main) else "it"
    detail, about = f"{ended} waits{at} for its child process {child.pid}{_command(child.command)}", ""
    for _ in range(3):
        own = [worker for worker in one.workers if worker.parent == child.pid and worker.state != "Z"]
        next_child = below.get(child.awaited_pid) or (own[0] if len(own) == 1 else None)
        if next_child is None or child.syscall not in ("wait4", "waitid"):
            break
        child = next_child
        detail += f", which waits for process {child.pid}{_command(child.command)}"
    wait = child.blocked[0] if child.blocked else None
    if wait is not None and wait.kind in ("pipe", "fifo") and any(_is_self(other, one.rank) for other in wait.others):
        about = "child-output" if wait.writes else "child-input"
    at_exit = stack_frames.in_exit_handlers(one.main)
    return InnerWait(
        "child",
        detail + _doing(child.pid, one),
        "child-at-exit" if at_exit else about,
        stack_frames.users_frame(child.frames) if at_exit else None,
    )


def _doing(pid: int, one: RankInspection) -> str:
    """Return what a child does, as a relative clause; empty if it was not seen."""
    child: Worker | None = next((worker for worker in one.workers if worker.pid == pid), None)
    if child is None:
        return ""
    frame = stack_frames.users_frame(child.frames)
    at = f" at {frame}" if frame is not None else ""
    states = {"T": "is stopped", "t": "is held by a debugger", "D": "is in uninterruptible sleep", "Z": "has ended"}
    if child.state in states:
        return f", which {states[child.state]}{f' ({child.wchan})' if child.state == 'D' and child.wchan else ''}{at}"
    if child.blocked:
        return f", which waits{at} {_purpose(child.blocked[0], one.rank, {}, child.pid)}"
    if "nanosleep" in child.syscall or "nanosleep" in child.wchan:
        return f", which sleeps{at}"
    if child.cpu > _BUSY:
        return f", which computes{at} ({child.cpu:.1f} cores)"
    if child.syscall in ("wait4", "waitid"):
        return f", which waits{at} for a child of its own"
    inside = child.syscall if child.syscall not in ("", "running") else child.wchan
    return f", which is in {inside}{at}" if inside else ""


# ---- files, pipes and sockets ----


def _purpose(wait: BlockedOn, rank: int, snapshots: Mapping[int, RankInspection], waiter: int = 0) -> str:
    """Return what a process waits for: "to read from the named pipe /tmp/a, which process 7 (cat) has open for writing"."""
    owners = _others(wait, rank, snapshots, waiter)
    if wait.kind == "lock":
        holds = f"which {owners} {_verb(wait, 'holds', 'hold')}" if owners else "whose holder could not be seen"
        return f"for the lock on {wait.name}, {holds}"
    if wait.kind == "socket":
        return _for_socket(wait, owners)
    if wait.kind == "file":
        return f"in {wait.call} on {wait.name}"
    kind = f"the named pipe {wait.name}" if wait.kind == "fifo" else _pipe(wait.fd)
    if wait.call == "open":
        other = "reading" if wait.writes else "writing"
        return f"to open {kind}: no process on this host has it open for {other}"
    has = _verb(wait, "has", "have")
    if wait.writes:
        reads = f"{owners} {has} it open for reading" if owners else "its reader could not be seen"
        return f"to write to {kind}: the pipe is full, and {reads}"
    if not owners:
        return f"to read from {kind}, whose writer could not be seen"
    which = ", which" if wait.kind == "fifo" else " that"
    return f"to read from {kind}{which} {owners} {has} open for writing"


def _pipe(fd: int) -> str:
    return f"{_STANDARD[fd]}, a pipe" if 0 <= fd < 3 else "a pipe"


def _for_socket(wait: BlockedOn, owners: str) -> str:
    has = _verb(wait, "has", "have")
    there = f", whose other end {owners} {has} open" if owners else ""
    if wait.state == "listening":
        return f"for a client to connect to {wait.name}"
    if wait.state == "connecting":
        return f"for a connection to {wait.name}, which does not answer"
    if wait.state == "not accepted":
        listener = f"where {owners} listens and" if owners else "which"
        return f"for {wait.name}, {listener} has not accepted the connection"
    if wait.state == "closed":
        return f"for {wait.name}, which has closed the connection"
    return f"{'to send data to' if wait.writes else 'for data from'} {wait.name}{there}"


def _others(wait: BlockedOn, rank: int, snapshots: Mapping[int, RankInspection], waiter: int) -> str:
    if [other.pid for other in wait.others] == [waiter]:
        return "only the process itself"
    shown = [_other(other, rank, snapshots) for other in wait.others[:2]]
    if len(wait.others) > 2:
        shown = [*shown[:1], "others"]
    if len(wait.others) == 1 and _is_self(wait.others[0], rank):
        return "only the rank itself"
    return " and ".join(shown)


def _other(other: OtherProcess, rank: int, snapshots: Mapping[int, RankInspection]) -> str:
    if _is_self(other, rank):
        return "the rank itself"
    if other.is_rank and other.rank is not None:
        seen = snapshots.get(other.rank)
        frame = stack_frames.users_frame(seen.main) if seen is not None else None
        return f"rank {other.rank} (process {other.pid}{f', now at {frame}' if frame is not None else ''})"
    if other.rank is None:
        return _process(other)
    return f"its child {_process(other)}" if other.rank == rank else f"{_process(other)} of rank {other.rank}"


def _process(other: OtherProcess) -> str:
    return f"process {other.pid}{_command(other.command)}"


def _command(command: str) -> str:
    cut = f"{command[: _COMMAND - 1]}…" if len(command) > _COMMAND else command
    return f" ({cut})" if cut else ""


def _verb(wait: BlockedOn, singular: str, plural: str) -> str:
    return singular if len(wait.others) == 1 else plural


def _is_self(other: OtherProcess, rank: int) -> bool:
    return other.is_rank and other.rank == rank
