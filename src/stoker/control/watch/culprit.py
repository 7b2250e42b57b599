"""Turns the inspections of all ranks into one stall: which rank is stuck, what it does, who waits for it. It does no I/O.

The evidence is tried in this order: a stopped process, the graph of waiting ranks, a stack that differs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from stoker.contract.evidence import Stall
from stoker.contract.frozen import replace
from stoker.contract.units import format_ranks
from stoker.control.watch import blocked_rank, call_paths, stack_frames
from stoker.control.watch.divergence import find_circular_wait, find_mismatch
from stoker.control.watch.rank_inspection import (
    Frame,
    InspectionSet,
    Members,
    RankInspection,
    Thread,
    Worker,
    main_thread,
)
from stoker.control.watch.rank_only import refine_as_rank_only
from stoker.control.watch.wait_graph import WaitGraph, build_wait_graph


def find_culprit(
    inspections: InspectionSet,
    world_size: int,
    members: Members,
    ended: Mapping[int, int],
    silent: Mapping[int, float],
    steps: Mapping[int, int],
    busy: Collection[int] = (),
) -> Stall | None:
    """Return what blocks the ranks, or None if nothing does.

    `ended` maps ranks to exit codes, `silent` maps overdue ranks to seconds without progress. Ranks in `busy` have shown
    evidence of work: other ranks are blamed first.
    """
    if not inspections:
        return None
    stall = _find_stall(inspections, world_size, members, ended, silent, steps, busy)
    if stall is None:
        return None
    rank = stall.rank
    living = (inspection for inspection in inspections.values() if inspection.state != "Z")
    lines = [*stall.evidence, *stack_frames.summarize_stacks(living)]
    reasons = sorted({inspection.no_groups for inspection in inspections.values() if inspection.no_groups})
    lines += [f"no flight recorder: {reason}" for reason in reasons[:1] if world_size > 1]
    lines += blocked_rank.describe_unreadable(inspections, rank)
    dumpers = {inspection.stacks_by for inspection in inspections.values()}
    without_py_spy = sorted(dumper for dumper in dumpers if dumper.startswith("faulthandler"))
    lines += [f"stacks by {dumper}" for dumper in without_py_spy]
    if stall.kind == "spin" and without_py_spy:
        lines.append(
            "without py-spy local variables can't be read: a loop of native calls on one line may look the same"
        )
    longest = max(silent.values(), default=0.0)
    if rank is None:
        steps_of_parties = [steps.get(member, 0) for ranks, _, _ in stall.parties for member in ranks]
        return replace(stall, evidence=tuple(lines), silent_s=round(longest, 1), step=min(steps_of_parties, default=0))
    return replace(stall, evidence=tuple(lines), silent_s=round(silent.get(rank, longest), 1), step=steps.get(rank, 0))


def _find_stall(
    inspections: InspectionSet,
    world_size: int,
    members: Members,
    ended: Mapping[int, int],
    silent: Mapping[int, float],
    steps: Mapping[int, int],
    busy: Collection[int],
) -> Stall | None:
    graph = build_wait_graph(inspections, members, world_size)
    states = {rank: inspection.state for rank, inspection in inspections.items()}
    stopped = [rank for rank in states if states[rank] == "T"] or [rank for rank in states if states[rank] == "t"]
    if stopped:
        return _make_stuck_stall(stopped, inspections, graph)  # not a proof: the user who stopped it may continue it
    if world_size == 1:  # a single rank can't wait for another one, even if its stack is in a collective
        living = [rank for rank, state in states.items() if rank in silent and state != "Z"]
        return _make_stuck_stall(living, inspections, WaitGraph((), {}, {})) if living else None
    mismatch = find_mismatch(inspections, graph, members, world_size)
    if mismatch is not None:
        return mismatch
    exited = [rank for rank in graph.roots if ended.get(rank) == 0]
    if exited:
        return _make_left_stall(exited, tuple(sorted(graph.ranks_behind(exited[0]))), ended, steps, graph, inspections)
    roots = [rank for rank in graph.roots if states.get(rank, "Z") != "Z"]
    if roots:
        most_waiting = len(graph.ranks_behind(roots[0]))
        guilty = [rank for rank in roots if len(graph.ranks_behind(rank)) == most_waiting]
        return _make_stuck_stall(_prefer_idle(guilty, busy), inspections, graph)
    if graph.roots:
        return None  # they wait for a rank that has failed, and its exit is the cause
    if graph.edges:
        return find_circular_wait(inspections, graph, members, world_size)
    if graph.pending and len(graph.pending) == len(inspections):
        return _make_together_stall(inspections, graph)
    return _judge_by_stacks(inspections, graph, silent, ended, steps, busy)


def _prefer_idle(ranks: list[int], busy: Collection[int]) -> list[int]:
    return [rank for rank in ranks if rank not in busy] or ranks


def _find_awaited_operation(graph: WaitGraph, rank: int) -> tuple[str, str]:
    """Return (the operation in which other ranks wait for this one, its backend)."""
    edge = next((edge for edge in graph.edges if edge.target == rank), None)
    if edge is None:
        return "", ""
    return str(edge.op), edge.op.name.partition(":")[0]


def _make_stuck_stall(guilty: list[int], inspections: InspectionSet, graph: WaitGraph) -> Stall:
    """Return the stall of ranks that are not waiting for another rank, with the description of the first of them."""
    rank = guilty[0]
    inspection = inspections[rank]
    kind, frame, detail = describe_stuck_rank(inspection)
    wait = blocked_rank.explain_blocked(inspection, inspections) if kind in ("lock", "io", "child", "place") else None
    if wait is not None:
        kind, detail, frame = wait.kind, wait.detail, wait.frame or frame
    operation, backend = _find_awaited_operation(graph, rank)
    waiting = tuple(sorted(graph.ranks_behind(rank) - set(guilty)))
    is_alone = len(inspections) == 1 and not waiting
    if kind in ("lock", "io", "place") and stack_frames.in_rendezvous(inspection.main):
        detail = _CONNECTING.format("it") if is_alone else "it is waiting for the others to join the process group"
    elif kind == "spin" and not is_alone:
        detail += " and enters no collective"
    proof = False
    call = call_paths.find_blocking_call(inspection)
    if call is not None and call.name in call_paths.MESSAGES and not call.returned and inspection.state not in "Tt":
        kind, proof = "diverged", call.peer in waiting
        detail = f"it is waiting in {call_paths.as_op(call, inspection).name.partition(':')[2]}"
        if proof:
            detail += f", which is waiting in {operation}"
    edge = next((edge for edge in graph.edges if edge.target == rank), None)
    lines = []
    if waiting and edge is not None:
        are = "is" if len(waiting) == 1 else "are"
        lines.append(f"{format_ranks(waiting)} {are} waiting in {operation}, which rank {rank} has not entered")
    if edge is not None and edge.target_op is not None:
        last = f"rank {rank}'s last operation in that group is number {edge.target_op.seq}, {edge.target_op}"
        lines.append(f"{last}; the others are at number {edge.op.seq}")
    return Stall(
        kind, rank, tuple(guilty), waiting, str(frame or ""), detail, operation, backend, proof, evidence=tuple(lines),
        waits_for=wait.waits_for if wait is not None and detail == wait.detail else "",
    )  # fmt: skip


def _make_left_stall(
    left: list[int],
    waiting: tuple[int, ...],
    ended: Mapping[int, int],
    steps: Mapping[int, int],
    graph: WaitGraph,
    inspections: InspectionSet,
) -> Stall:
    """Return the stall of the `waiting` ranks, whose peers in `left` ended with exit code 0.

    The first rank that left is blamed, with the line at which the first of the others waits. If only the waiting ranks
    make that call, they are blamed instead.
    """
    rank = left[0]
    operation, backend = _find_awaited_operation(graph, rank)
    waiter = next((inspections[other] for other in waiting or sorted(inspections) if other in inspections), None)
    frame = stack_frames.script_frame(waiter.main) if waiter is not None else None
    where = str(frame) if frame is not None and stack_frames.is_script(frame) else ""
    detail = f"it ended with exit code {ended[rank]} before the others were done"
    lines = []
    if waiting:
        are = "is" if len(waiting) == 1 else "are"
        lines.append(f"{format_ranks(waiting)} {are} waiting in {operation or 'a collective'}; rank {rank} has ended")
    stall = Stall("left", rank, (rank,), waiting, where, detail, operation, backend, proof=True, evidence=tuple(lines))
    if not _made_extra_call(left, waiting, steps, inspections):
        return refine_as_rank_only(stall, inspections, waiting, tuple(left))
    ranks = tuple(rank for rank in waiting if rank in inspections)
    if not ranks:
        return stall
    frame = stack_frames.script_frame(inspections[ranks[0]].main)
    condition = frame.conditions[-1].text if frame is not None and frame.conditions else ""
    return replace(
        stall, kind="rank-only", rank=ranks[0], ranks=ranks, waiting=tuple(left), where=str(frame or ""),
        detail=condition,
    )  # fmt: skip


def _made_extra_call(
    left: list[int], waiting: tuple[int, ...], steps: Mapping[int, int], inspections: InspectionSet
) -> bool:
    """Return whether the waiting ranks made one call too many: one outside of any loop, after as many steps as the others."""
    for rank in waiting:
        call = call_paths.find_blocking_call(inspections[rank]) if rank in inspections else None
        if call is None or any(other.where == call.where for other in inspections[rank].calls[:-1]):
            return False
    steps_made = [steps.get(rank, 0) for rank in waiting]
    return bool(steps_made) and min(steps_made) > 0 and all(steps.get(rank, 0) >= max(steps_made) for rank in left)


def _make_together_stall(inspections: InspectionSet, graph: WaitGraph) -> Stall:
    """Return the stall of ranks that have all entered one operation that does not finish, so that none of them is to blame."""
    rank, (group, op) = min(graph.pending.items())
    frame = stack_frames.script_frame(inspections[rank].main)
    waiting, backend = tuple(sorted(graph.pending)), op.name.partition(":")[0]
    detail = f"every rank has entered operation {op.seq} of group {group} and it does not finish"
    stall = Stall("together", None, (), waiting, str(frame or ""), detail, str(op), backend)
    # The flight recorder may show the same operation although the ranks called it from different lines.
    for ranks, _ in stack_frames.group_by_stack(inspections.values()):
        refined = refine_as_rank_only(stall, inspections, ranks, tuple(sorted(set(waiting) - set(ranks))))
        if refined is not stall:
            return refined
    return stall


def _judge_by_stacks(
    inspections: InspectionSet,
    graph: WaitGraph,
    silent: Mapping[int, float],
    ended: Mapping[int, int],
    steps: Mapping[int, int],
    busy: Collection[int],
) -> Stall | None:
    """Return the stall if the flight recorders show none: ranks in a collective wait for those that are in none."""
    waiters = {
        rank
        for rank, inspection in inspections.items()
        if rank in graph.pending or stack_frames.in_collective(inspection.main)
    }
    others = [rank for rank, inspection in inspections.items() if rank not in waiters and inspection.state != "Z"]
    if waiters and not others:
        exited = [rank for rank, code in ended.items() if code == 0]
        if exited:
            return replace(
                _make_left_stall(exited, tuple(sorted(waiters)), ended, steps, graph, inspections), proof=False
            )
        return _compare_stacks(inspections, waiters)
    guilty = [rank for rank in others if rank in silent] or (others if waiters else [])
    if not guilty:
        return None
    stall = _make_stuck_stall(_prefer_idle(sorted(guilty), busy), inspections, graph)
    return replace(stall, waiting=tuple(sorted(waiters))) if waiters else stall


def _compare_stacks(inspections: InspectionSet, waiters: set[int]) -> Stall:
    """Return the stall of ranks that are all in a collective: those whose stack differs from that of most ranks are blamed."""
    groups = stack_frames.group_by_stack(inspections.values())
    ranks, first = groups[0]
    frame: Frame | None = stack_frames.script_frame(first.main)
    waiting, where = tuple(sorted(waiters)), str(frame or "")
    lines = {stack_frames.script_frame(inspection.main) for inspection in inspections.values()}
    if len(lines) == 1 and all(stack_frames.in_rendezvous(inspection.main) for inspection in inspections.values()):
        return Stall("together", None, (), waiting, where, _CONNECTING.format("every rank"))
    if len(groups) == 1 and all(is_computing(inspection) for inspection in inspections.values()):
        phase = " in the backward pass" if stack_frames.in_backward(first.main) else ""
        return Stall("spin", None, (), (), where, f"every rank is computing{phase}")
    if len(groups) == 1:
        return Stall("together", None, (), waiting, where, "every rank is waiting in a collective")
    parties = tuple(
        (
            members,
            stack_frames.collective_name(member.main) or "a collective",
            str(stack_frames.script_frame(member.main) or ""),
        )
        for members, member in groups
    )
    if 2 * len(groups[-1][0]) <= len(inspections):
        return Stall("diverged", None, (), waiting, parties=parties)
    return Stall("diverged", ranks[0], ranks, tuple(sorted(waiters - set(ranks))), where, parties=parties)


# ---- what a stuck rank is doing, as its process shows ----

BUSY_CPU = 0.5  # cores: a thread that uses more is computing, not waiting
_CONNECTING = "{} is still connecting, waiting for a name lookup, a port or another rank"
_SLEEP_CALLS = ("nanosleep", "clock_nanosleep")
_CHILD_CALLS = ("wait4", "waitid")
_IO_CALLS = ("read", "write", "poll", "ppoll", "select", "pselect6", "connect", "accept", "recvfrom", "recvmsg", "epoll_wait", "epoll_pwait", "openat", "fsync",
             "flock", "fcntl", "open", "readv", "writev", "sendto", "sendmsg", "accept4")  # fmt: skip
_IO_CHANNELS = ("pipe", "sk_wait", "wait_woken", "partner", "poll")


def describe_stuck_rank(inspection: RankInspection) -> tuple[str, Frame | None, str]:
    """Return why a rank makes no progress: (kind of the stall, frame to look at, detail)."""
    frame = stack_frames.script_frame(inspection.main)
    syscall, wchan = inspection.syscall, inspection.wchan
    if inspection.state == "T":
        return "stopped", frame, "its process is stopped (SIGSTOP, or a suspended shell)"
    if inspection.state == "t":
        return "debugged", frame, "its process is held by a debugger or tracer"
    if inspection.state == "D":
        detail = f"its process is in uninterruptible sleep ({wchan or 'D state'})"
        return "disk", frame, f"{detail}: a disk, network file system or driver is not responding"
    worker = _find_stuck_worker(inspection)
    if worker is not None:
        worker_frame = stack_frames.script_frame(worker.frames)
        doing = "is computing" if worker.cpu > BUSY_CPU else "is stuck"
        doing = {"T": "is stopped", "t": "is stopped", "D": "is in uninterruptible sleep"}.get(worker.state, doing)
        at = f" at {worker_frame}" if worker_frame else ""
        detail = f"it is waiting for its data-loader worker {worker.pid}, which {doing}{at}"
        return "worker", worker_frame or frame, detail
    thread = _find_script_thread(inspection) if stack_frames.at_shutdown(inspection.main) else None
    if thread is not None:
        name = f" {thread.name}" if thread.name else ""
        detail = f"its script has ended, and Python is waiting for its thread{name}, which is still running"
        return "lock", stack_frames.script_frame(thread.frames), detail
    if stack_frames.in_loader(inspection.main):
        return "worker", frame, "it is waiting for data that none of its data-loader workers is preparing"
    is_on_one_line, is_running, holds_gil = _measure_steadiness(inspection)
    waits = syscall in (*_SLEEP_CALLS, *_CHILD_CALLS, *_IO_CALLS) or "nanosleep" in wchan
    # The rank makes no progress although its GPU is busy: the kernel on it does not finish.
    if inspection.gpu_use is not None and inspection.gpu_use >= 90 and not waits:
        return (
            "kernel",
            frame,
            f"it is waiting for a GPU kernel that does not finish (its GPU is at {inspection.gpu_use} %)",
        )
    if is_computing(inspection):
        how = (", holding the GIL" if holds_gil else "") + (", always on this line" if is_on_one_line else "")
        no_stack = "" if inspection.main else ", no Python stack seen"
        return "spin", frame, f"it is computing ({inspection.cpu:.1f} cores{how}{no_stack})"
    if holds_gil and not is_running:
        inside = f" in {syscall}" if syscall else ""
        return "gil", frame, f"native code called there holds the GIL and is waiting{inside}"
    if syscall in _SLEEP_CALLS or "nanosleep" in wchan:
        return "sleep", frame, "it is sleeping"
    if syscall in _CHILD_CALLS or wchan == "do_wait":
        child = next((worker for worker in inspection.workers if worker.state != "Z"), None)
        command = f": {child.command[:60]} (pid {child.pid})" if child else ""
        return "child", frame, f"it is waiting for a process it started{command}"
    if syscall in _IO_CALLS or any(channel in wchan for channel in _IO_CHANNELS):
        return "io", frame, f"it is waiting in {syscall or wchan}"
    if syscall == "futex" or "futex" in wchan:
        return "lock", frame, "it is waiting for a lock or another thread"
    inside = syscall if syscall.isidentifier() and syscall != "running" else wchan
    return "place", frame, f"it is in {inside}" if inside else "it runs now and then"


def _find_script_thread(inspection: RankInspection) -> Thread | None:
    """Return a thread other than the main one that is in the script's own code."""
    threads = inspection.samples[-1] if inspection.samples else ()
    return next(
        (thread for thread in threads if not thread.main and any(map(stack_frames.is_script, thread.frames))), None
    )


def is_computing(inspection: RankInspection) -> bool:
    """Return whether the rank uses a CPU or is ready to run: a busy loop on an overloaded machine rarely gets a CPU."""
    if inspection.main_cpu + inspection.waiting_for_core > BUSY_CPU:
        return True
    return inspection.main_cpu == 0.0 and inspection.cpu > BUSY_CPU


def _measure_steadiness(inspection: RankInspection) -> tuple[bool, bool, bool]:
    """Return whether the main thread was (on one line in all samples, running in any, holding the GIL in all)."""
    threads = [thread for thread in map(main_thread, inspection.samples) if thread is not None]
    lines = {thread.frames[:1] for thread in threads}
    return (
        len(lines) == 1 and len(threads) > 1 and lines != {()},
        any(thread.active for thread in threads),
        bool(threads) and all(thread.gil for thread in threads),
    )


def _find_stuck_worker(inspection: RankInspection) -> Worker | None:
    """Return a data-loader worker that blocks the main thread: one that is stopped or busy, or None."""
    if not stack_frames.in_loader(inspection.main):
        return None
    workers = [worker for worker in inspection.workers if worker.frames or worker.state in "TtD"]
    stopped = [worker for worker in workers if worker.state in "TtD"]
    stuck = stopped + [worker for worker in workers if not _is_idle_worker(worker)]
    return stuck[0] if stuck else None


def _is_idle_worker(worker: Worker) -> bool:
    """Return whether a process waits for the next index, or is not a data-loader worker (multiprocessing's tracker)."""
    functions = [frame.function for frame in worker.frames]
    return "fetch" not in functions and (
        "_worker_loop" in functions or "resource_tracker" in worker.command or not functions
    )
