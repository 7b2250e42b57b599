"""All ranks' snapshots in, one stall out: which rank, what it does, who waits, whether it can ever go on. Pure.

The order of evidence: a stopped process; who waits for whom; the stack that differs; the state of a process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from stoker.contract.evidence import Stall
from stoker.contract.frozen import replace
from stoker.contract.units import format_ranks
from stoker.control.watch import blocked_rank, call_paths, rank_only, stack_frames
from stoker.control.watch.divergence import at_odds, mismatched
from stoker.control.watch.rank_inspection import (
    Frame,
    InspectionSet,
    Members,
    RankInspection,
    Thread,
    Worker,
    main_thread,
)
from stoker.control.watch.wait_graph import WaitGraph, waits


def find_culprit(
    snapshots: InspectionSet,
    world: int,
    members: Members,
    ended: Mapping[int, int],
    silent: Mapping[int, float],
    steps: Mapping[int, int],
    busy: Collection[int] = (),
) -> Stall | None:
    """Return what holds the ranks up, or None if nothing does.

    `ended`: rank -> exit code. `silent`: seconds without progress, of overdue ranks. `busy`: ranks with evidence of work;
    a rank without it is accused first.
    """
    if not snapshots:
        return None
    found = _culprit(snapshots, world, members, ended, silent, steps, busy)
    if found is None:
        return None
    rank = found.rank
    lines = [*found.evidence, *stack_frames.told(one for one in snapshots.values() if one.state != "Z")]
    missing = sorted({one.no_groups for one in snapshots.values() if one.no_groups})
    lines += [f"no flight recorder: {why}" for why in missing[:1] if world > 1]
    lines += blocked_rank.unseen(snapshots, rank)
    how = {one.stacks_by for one in snapshots.values() if one.stacks_by.startswith("faulthandler")}
    lines += [f"stacks by {one}" for one in sorted(how)]
    if found.kind == "spin" and how:
        lines.append(
            "without py-spy local variables can't be read: a loop of native calls on one line may look like this, too"
        )
    quiet = max(silent.values(), default=0.0)
    if rank is None:
        parted = [steps.get(one, 0) for ranks, _, _ in found.parties for one in ranks]
        return replace(found, evidence=tuple(lines), silent_s=round(quiet, 1), step=min(parted, default=0))
    return replace(found, evidence=tuple(lines), silent_s=round(silent.get(rank, quiet), 1), step=steps.get(rank, 0))


def _culprit(
    snapshots: InspectionSet,
    world: int,
    members: Members,
    ended: Mapping[int, int],
    silent: Mapping[int, float],
    steps: Mapping[int, int],
    busy: Collection[int],
) -> Stall | None:
    graph = waits(snapshots, members, world)
    states = {rank: one.state for rank, one in snapshots.items()}
    stopped = [rank for rank in states if states[rank] == "T"] or [rank for rank in states if states[rank] == "t"]
    if stopped:
        return _alone(stopped, snapshots, graph)  # no proof: whoever stopped it may continue it
    if world == 1:  # it waits for no other rank, whatever its stack and its recorder look like
        living = [rank for rank, one in snapshots.items() if rank in silent and one.state != "Z"]
        return _alone(living, snapshots, WaitGraph((), {}, {})) if living else None
    odds = mismatched(snapshots, graph, members, world)
    if odds is not None:
        return odds
    gone = [rank for rank in graph.roots if ended.get(rank) == 0]
    if gone:
        return _left(gone, tuple(sorted(graph.behind(gone[0]))), ended, steps, graph, snapshots)
    roots = [rank for rank in graph.roots if rank in snapshots and snapshots[rank].state != "Z"]
    if roots:
        best = len(graph.behind(roots[0]))
        guilty = [rank for rank in roots if len(graph.behind(rank)) == best]
        return _alone(_idle_first(guilty, busy), snapshots, graph)
    if graph.roots:
        return None  # they wait for one that has failed: its own end says more
    if graph.edges:
        return at_odds(snapshots, graph, members, world)
    if graph.pending and len(graph.pending) == len(snapshots):
        return _together(snapshots, graph)
    return _by_stacks(snapshots, graph, silent, ended, steps, busy)


def _idle_first(ranks: list[int], busy: Collection[int]) -> list[int]:
    return [rank for rank in ranks if rank not in busy] or ranks


def _operation(graph: WaitGraph, rank: int) -> tuple[str, str]:
    """(what the others wait in, the backend)."""
    edge = next((edge for edge in graph.edges if edge.target == rank), None)
    if edge is None:
        return "", ""
    return str(edge.op), edge.op.name.partition(":")[0]


def _alone(guilty: list[int], snapshots: InspectionSet, graph: WaitGraph) -> Stall:
    rank = guilty[0]
    kind, frame, detail = reason(snapshots[rank])
    wait = blocked_rank.explain_blocked(snapshots[rank], snapshots) if kind in ("lock", "io", "child", "place") else None
    if wait is not None:
        kind, detail, frame = wait.kind, wait.detail, wait.frame or frame
    operation, backend = _operation(graph, rank)
    waiting = tuple(sorted(graph.behind(rank) - set(guilty)))
    lone = len(snapshots) == 1 and not waiting
    if kind in ("lock", "io", "place") and stack_frames.in_rendezvous(snapshots[rank].main):
        detail = _CONNECTING.format("it") if lone else "it waits for the others to join the process group"
    elif kind == "spin" and not lone:
        detail += " and enters no collective"
    one, proof = snapshots[rank], False
    call = call_paths.blocked_in(one)
    if call is not None and call.name in call_paths.MESSAGES and not call.returned and one.state not in "Tt":
        kind, proof = "diverged", call.peer in waiting
        detail = f"it waits in {call_paths.as_op(call, one).name.partition(':')[2]}"
        if proof:
            detail += f", which waits in {operation}"
    edge = next((edge for edge in graph.edges if edge.target == rank), None)
    lines = []
    if waiting and edge is not None:
        those = f"{format_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''}"
        lines.append(f"{those} in {operation}, which rank {rank} has not entered")
    if edge is not None and edge.other is not None:
        last = f"rank {rank}'s last operation there: number {edge.other.seq}, {edge.other}"
        lines.append(f"{last}; the others are at number {edge.op.seq}")
    return Stall(
        kind, rank, tuple(guilty), waiting, str(frame or ""), detail, operation, backend, proof, evidence=tuple(lines),
        waits_for=wait.about if wait is not None and detail == wait.detail else "",
    )  # fmt: skip


def _left(
    gone: list[int],
    waiting: tuple[int, ...],
    ended: Mapping[int, int],
    steps: Mapping[int, int],
    graph: WaitGraph,
    snapshots: InspectionSet,
) -> Stall:
    """Return the stall of `waiting` ranks, which wait for ranks that ended with exit code 0.

    The first rank that ended is blamed, with the line at which the first of the others waits, unless that call is one
    that only the waiting ranks make.
    """
    rank = gone[0]
    operation, backend = _operation(graph, rank)
    waiter = next((snapshots[other] for other in waiting or sorted(snapshots) if other in snapshots), None)
    frame = stack_frames.users_frame(waiter.main) if waiter is not None else None
    where = str(frame) if frame is not None and stack_frames.is_users(frame) else ""
    detail = f"it ended with exit code {ended[rank]} before the others were done"
    lines = []
    if waiting:
        wait = "waits" if len(waiting) == 1 else "wait"
        lines.append(f"{format_ranks(waiting)} {wait} in {operation or 'a collective'}; rank {rank} is gone")
    left = Stall("left", rank, (rank,), waiting, where, detail, operation, backend, proof=True, evidence=tuple(lines))
    if _came_too_often(gone, waiting, steps, snapshots):
        return _waits_alone(left, gone, snapshots)
    return rank_only.instead(left, snapshots, waiting, tuple(gone))


def _came_too_often(gone: list[int], waiting: tuple[int, ...], steps: Mapping[int, int], snapshots: InspectionSet) -> bool:
    """Is the call that ranks wait in one too many? Those that ended had made as many steps, and it is none of a loop's."""
    for rank in waiting:
        call = call_paths.blocked_in(snapshots[rank]) if rank in snapshots else None
        if call is None or any(other.where == call.where for other in snapshots[rank].calls[:-1]):
            return False
    made = [steps.get(rank, 0) for rank in waiting]
    return bool(made) and min(made) > 0 and all(steps.get(rank, 0) >= max(made) for rank in gone)


def _waits_alone(left: Stall, gone: list[int], snapshots: InspectionSet) -> Stall:
    ranks = tuple(rank for rank in left.waiting if rank in snapshots)
    if not ranks:
        return left
    frame = stack_frames.users_frame(snapshots[ranks[0]].main)
    condition = frame.conditions[-1].text if frame is not None and frame.conditions else ""
    return replace(
        left,
        kind="rank-only",
        rank=ranks[0],
        ranks=ranks,
        waiting=tuple(gone),
        where=str(frame or ""),
        detail=condition,
    )


def _together(snapshots: InspectionSet, graph: WaitGraph) -> Stall:
    """All have entered the same operation and it does not end: the way between them, or a card."""
    rank, (group, op) = min(graph.pending.items())
    frame = stack_frames.users_frame(snapshots[rank].main)
    waiting, backend = tuple(sorted(graph.pending)), op.name.partition(":")[0]
    detail = f"every rank has entered operation {op.seq} of group {group} and it does not end"
    found = Stall("together", None, (), waiting, str(frame or ""), detail, str(op), backend)
    for ranks, _ in stack_frames.grouped(snapshots.values()):  # one operation, by the recorder, from unlike lines
        changed = rank_only.instead(found, snapshots, ranks, tuple(sorted(set(waiting) - set(ranks))))
        if changed is not found:
            return changed
    return found


def _by_stacks(
    snapshots: InspectionSet,
    graph: WaitGraph,
    silent: Mapping[int, float],
    ended: Mapping[int, int],
    steps: Mapping[int, int],
    busy: Collection[int],
) -> Stall | None:
    """No word from the collectives: those that are not in one are what the others wait for."""
    waiters = {rank for rank, one in snapshots.items() if rank in graph.pending or stack_frames.in_collective(one.main)}
    others = [rank for rank, one in snapshots.items() if rank not in waiters and one.state != "Z"]
    if waiters and not others:
        gone = [rank for rank, code in ended.items() if code == 0]
        if gone:
            return replace(_left(gone, tuple(sorted(waiters)), ended, steps, graph, snapshots), proof=False)
        return _outlier(snapshots, waiters)
    guilty = [rank for rank in others if rank in silent] or (others if waiters else [])
    if not guilty:
        return None
    found = _alone(_idle_first(sorted(guilty), busy), snapshots, graph)
    return replace(found, waiting=tuple(sorted(waiters))) if waiters else found


def _outlier(snapshots: InspectionSet, waiters: set[int]) -> Stall:
    """All are in a collective and only their stacks say in which: the lines most ranks share are the right ones."""
    groups = stack_frames.grouped(snapshots.values())
    ranks, one = groups[0]
    frame: Frame | None = stack_frames.users_frame(one.main)
    everybody, where = tuple(sorted(waiters)), str(frame or "")
    own_lines = {stack_frames.users_frame(snapshot.main) for snapshot in snapshots.values()}
    if len(own_lines) == 1 and all(stack_frames.in_rendezvous(snapshot.main) for snapshot in snapshots.values()):
        return Stall("together", None, (), everybody, where, _CONNECTING.format("every rank"))
    if len(groups) == 1 and all(computes(snapshot) for snapshot in snapshots.values()):
        place = " in the backward pass" if stack_frames.in_backward(one.main) else ""
        return Stall("spin", None, (), (), where, f"every rank computes{place}")
    if len(groups) == 1:
        return Stall("together", None, (), everybody, where, "every rank waits in a collective")
    parties = tuple(
        (members, stack_frames.collective_name(first.main) or "a collective", str(stack_frames.users_frame(first.main) or ""))
        for members, first in groups
    )
    if 2 * len(groups[-1][0]) <= len(snapshots):
        return Stall("diverged", None, (), tuple(sorted(waiters)), parties=parties)
    others = tuple(sorted(waiters - set(ranks)))
    return Stall("diverged", ranks[0], ranks, others, str(frame or ""), parties=parties)


# ---- what a rank that stopped is doing, from its own process alone ----

BUSY = 0.5  # of a core: computing, not waiting
_CONNECTING = "{} is still connecting, waiting for a name lookup, a port or another rank"
_SLEEPS = ("nanosleep", "clock_nanosleep")
_CHILD = ("wait4", "waitid")
_IO = ("read", "write", "poll", "ppoll", "select", "pselect6", "connect", "accept", "recvfrom", "recvmsg", "epoll_wait", "epoll_pwait", "openat", "fsync",
       "flock", "fcntl", "open", "readv", "writev", "sendto", "sendmsg", "accept4")  # fmt: skip


def reason(one: RankInspection) -> tuple[str, Frame | None, str]:
    """(kind, the guilty frame, detail)."""
    frame = stack_frames.users_frame(one.main)
    if one.state == "T":
        return "stopped", frame, "its process is stopped (SIGSTOP, or a suspended shell)"
    if one.state == "t":
        return "debugged", frame, "a debugger or tracer holds its process"
    if one.state == "D":
        detail = f"its process is in uninterruptible sleep ({one.wchan or 'D state'})"
        return "disk", frame, f"{detail}: a disk, network file system or driver does not answer"
    worker = _stuck_worker(one)
    if worker is not None:
        inner = stack_frames.users_frame(worker.frames)
        how = "spins" if worker.cpu > BUSY else "is stuck"
        how = {"T": "is stopped", "t": "is stopped", "D": "is in uninterruptible sleep"}.get(worker.state, how)
        detail = f"it waits for its data-loader worker {worker.pid}, which {how}{f' at {inner}' if inner else ''}"
        return "worker", inner or frame, detail
    thread = _thread_of_script(one) if stack_frames.at_shutdown(one.main) else None
    if thread is not None:
        holder = f"its script has ended, and Python waits for its thread{f' {thread.name}' if thread.name else ''}"
        return "lock", stack_frames.users_frame(thread.frames), f"{holder}, which is still running"
    if stack_frames.in_loader(one.main):
        return "worker", frame, "it waits for data that none of its data-loader workers is making"
    same_line, active, gil = _steady(one)
    waits = one.syscall in (*_SLEEPS, *_CHILD, *_IO) or "nanosleep" in one.wchan
    # It makes no step, and its card is busy all the same.
    if one.gpu_use is not None and one.gpu_use >= 90 and not waits:
        return "kernel", frame, f"it waits for a GPU kernel that does not end (its GPU is at {one.gpu_use} %)"
    if computes(one):
        how = (", holding the GIL" if gil else "") + (", always on this line" if same_line else "")
        unseen = "" if one.main else ", no Python stack seen"
        return "spin", frame, f"it computes ({one.cpu:.1f} cores{how}{unseen})"
    if gil and not active:
        detail = f"native code called there holds the GIL and waits{f' in {one.syscall}' if one.syscall else ''}"
        return "gil", frame, detail
    if one.syscall in _SLEEPS or "nanosleep" in one.wchan:
        return "sleep", frame, "it sleeps"
    if one.syscall in _CHILD or one.wchan == "do_wait":
        below = next((worker for worker in one.workers if worker.state != "Z"), None)
        detail = f"it waits for a process it started{f': {below.command[:60]} (pid {below.pid})' if below else ''}"
        return "child", frame, detail
    if one.syscall in _IO or any(word in one.wchan for word in ("pipe", "sk_wait", "wait_woken", "partner", "poll")):
        return "io", frame, f"it waits in {one.syscall or one.wchan}"
    if one.syscall == "futex" or "futex" in one.wchan:
        return "lock", frame, "it waits for a lock or another thread"
    inside = one.syscall if one.syscall.isidentifier() and one.syscall != "running" else one.wchan
    return "place", frame, f"it is in {inside}" if inside else "it runs now and then"


def _thread_of_script(one: RankInspection) -> Thread | None:
    """Return a thread beside the main one that is in the script's own code."""
    threads = one.samples[-1] if one.samples else ()
    return next((thread for thread in threads if not thread.main and any(map(stack_frames.is_users, thread.frames))), None)


def computes(one: RankInspection) -> bool:
    """Ready to run counts: a loop that spins on a machine with more work than cores is not waiting for anything."""
    return one.main_cpu + one.waiting_for_core > BUSY or (one.main_cpu == 0.0 and one.cpu > BUSY)


def _steady(one: RankInspection) -> tuple[bool, bool, bool]:
    """(on the same line in every sample, ever seen running, holding the GIL in every sample)."""
    mains = [main for main in (main_thread(threads) for threads in one.samples) if main is not None]
    lines = {main.frames[:1] for main in mains}
    return (
        len(lines) == 1 and len(mains) > 1 and lines != {()},
        any(main.active for main in mains),
        bool(mains) and all(main.gil for main in mains),
    )


def _stuck_worker(one: RankInspection) -> Worker | None:
    """The worker the main thread waits for in its data loader: one that is not waiting for work itself."""
    if not stack_frames.in_loader(one.main):
        return None
    own = [worker for worker in one.workers if worker.frames or worker.state in "TtD"]
    stuck = [worker for worker in own if worker.state in "TtD"] + [one for one in own if not _idle_worker(one)]
    return stuck[0] if stuck else None


def _idle_worker(worker: Worker) -> bool:
    """In the loop that waits for the next index, or no data worker at all (multiprocessing's tracker)."""
    inside = [frame.function for frame in worker.frames]
    return "fetch" not in inside and ("_worker_loop" in inside or "resource_tracker" in worker.command or not inside)
