"""What a rank that stopped is doing, from its own process alone. Pure."""

from __future__ import annotations

from stoker.control.watch import stacks
from stoker.control.watch.snapshot import Frame, Snapshot, Worker, main_thread

BUSY = 0.5  # of a core: computing, not waiting
_SLEEPS = ("nanosleep", "clock_nanosleep")
_CHILD = ("wait4", "waitid")
_IO = ("read", "write", "poll", "ppoll", "select", "pselect6", "connect", "accept", "recvfrom", "recvmsg", "epoll_wait", "epoll_pwait", "openat", "fsync",
       "flock")  # fmt: skip


def reason(one: Snapshot) -> tuple[str, Frame | None, str]:
    """(kind, the guilty frame, detail)."""
    frame = stacks.users_frame(one.main)
    if one.state == "T":
        return "stopped", frame, "its process is stopped (SIGSTOP, or a suspended shell)"
    if one.state == "t":
        return "debugged", frame, "a debugger or tracer holds its process"
    if one.state == "D":
        return (
            "disk",
            frame,
            (
                f"its process is in uninterruptible sleep ({one.wchan or 'D state'}): a disk, network file system or"
                " driver does not answer"
            ),
        )
    worker = _stuck_worker(one)
    if worker is not None:
        inner = stacks.users_frame(worker.frames)
        how = "spins" if worker.cpu > BUSY else "is stuck"
        how = {"T": "is stopped", "t": "is stopped", "D": "is in uninterruptible sleep"}.get(worker.state, how)
        return (
            "worker",
            inner or frame,
            f"it waits for its data-loader worker {worker.pid}, which {how}{f' at {inner}' if inner else ''}",
        )
    if stacks.in_loader(one.main):
        return "worker", frame, "it waits for data that none of its data-loader workers is making"
    same_line, active, gil = _steady(one)
    # Ready to run counts: a loop that spins on a machine with more work than cores is not waiting for anything.
    computes = one.main_cpu + one.waiting_for_core > BUSY or (one.main_cpu == 0.0 and one.cpu > BUSY)
    waits = one.syscall in (*_SLEEPS, *_CHILD, *_IO) or "nanosleep" in one.wchan
    # It makes no step, and its card is busy all the same.
    if one.gpu_use is not None and one.gpu_use >= 90 and not waits:
        return "kernel", frame, f"it waits for a GPU kernel that does not end (its GPU is at {one.gpu_use} %)"
    if computes:
        held = ", holding the GIL" if gil else ""
        return (
            "spin",
            frame,
            (
                f"it computes ({one.cpu:.1f} cores{held}{', always on this line' if same_line else ''}) and enters no"
                " collective"
            ),
        )
    if gil and not active:
        return (
            "gil",
            frame,
            f"native code called there holds the GIL and waits{f' in {one.syscall}' if one.syscall else ''}",
        )
    if one.syscall in _SLEEPS or "nanosleep" in one.wchan:
        return "sleep", frame, "it sleeps"
    if one.syscall in _CHILD or one.wchan == "do_wait":
        below = next((worker for worker in one.workers if worker.state != "Z"), None)
        return (
            "child",
            frame,
            f"it waits for a process it started{f': {below.command[:60]} (pid {below.pid})' if below else ''}",
        )
    if one.syscall in _IO or any(word in one.wchan for word in ("pipe", "sk_wait", "wait_woken", "partner", "poll")):
        return "io", frame, f"it waits in {one.syscall or one.wchan}"
    if one.syscall == "futex" or "futex" in one.wchan:
        return "lock", frame, "it waits for a lock or another thread"
    inside = one.syscall if one.syscall.isidentifier() and one.syscall != "running" else one.wchan
    return "place", frame, f"it is in {inside}" if inside else "it runs now and then"


def _steady(one: Snapshot) -> tuple[bool, bool, bool]:
    """(on the same line in every sample, ever seen running, holding the GIL in every sample)."""
    mains = [main for main in (main_thread(threads) for threads in one.samples) if main is not None]
    lines = {main.frames[:1] for main in mains}
    return (
        len(lines) == 1 and len(mains) > 1,
        any(main.active for main in mains),
        bool(mains) and all(main.gil for main in mains),
    )


def _stuck_worker(one: Snapshot) -> Worker | None:
    """The worker the main thread waits for: it is in its data loader, and one of the workers is not waiting for work
    itself.
    """
    if not stacks.in_loader(one.main):
        return None
    own = [worker for worker in one.workers if worker.frames or worker.state in "TtD"]
    stuck = [worker for worker in own if worker.state in "TtD"] or [
        worker for worker in own if not _idle_worker(worker)
    ]
    return stuck[0] if stuck else None


def _idle_worker(worker: Worker) -> bool:
    """In the loop that waits for the next index, or no data worker at all (multiprocessing's tracker)."""
    inside = [frame.function for frame in worker.frames]
    return "fetch" not in inside and ("_worker_loop" in inside or "resource_tracker" in worker.command or not inside)
