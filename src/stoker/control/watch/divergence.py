"""Finds which of the ranks that wait for each other diverged, and what each rank entered. It does no I/O.

The operations of all ranks are aligned up to the first that differs. The majority there counts as the common path. Without
a majority, earlier steps decide: training repeats itself, so the next operation is predictable. If neither decides, it is a
tie and no rank is blamed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from stoker.contract.evidence import Stall
from stoker.contract.flight_recorder import operation_kind, operation_signature
from stoker.contract.frozen import frozen, replace
from stoker.contract.units import format_ranks
from stoker.control.watch import call_paths, stack_frames
from stoker.control.watch.rank_inspection import (
    Call,
    Frame,
    Group,
    InspectionSet,
    Members,
    Op,
    Party,
    RankInspection,
    Wait,
)
from stoker.control.watch.rank_only import refine_as_rank_only
from stoker.control.watch.wait_graph import WaitGraph

SourceLine = tuple[str, int]  # (file, line) of the script


@frozen
class Divergence:
    parties: tuple[Party, ...]  # those that diverged first
    diverged: tuple[int, ...]  # ranks that diverged from the common path; () for a tie
    reason: str  # why these ranks are blamed, or none


@frozen
class PathStep:
    """An operation of a rank, with a key that can be compared between ranks."""

    key: tuple[object, ...]
    group: str
    op: Op


# ---- the first operation in which the ranks differ ----


def find_divergence(inspections: InspectionSet, members: Members, world_size: int) -> Divergence | None:
    """Return which ranks diverged, according to the call logs or else the flight recorders, or None.

    Compare the recorders of all ranks, then those of the members of each group: programs of different groups may differ by
    design (pipeline stages).
    """
    parties = call_paths.find_first_difference(inspections)
    if parties:
        return decide_divergence(parties)
    recorded = {
        rank: inspection for rank, inspection in inspections.items() if any(group.ops for group in inspection.groups)
    }
    unrecorded = {
        rank: inspection for rank, inspection in inspections.items() if rank not in recorded and inspection.main
    }
    candidates = [
        tuple(recorded),
        *(
            members_of(group, rank, members, world_size)
            for rank, inspection in recorded.items()
            for group in inspection.groups
        ),
    ]
    for ranks in dict.fromkeys(tuple(sorted(set(ranks) & recorded.keys())) for ranks in candidates):
        parties = _find_first_difference({rank: recorded[rank] for rank in ranks}, members, world_size)
        if parties:
            return decide_divergence(_add_unrecorded(parties, recorded, unrecorded))
    return None


def _find_divergence_of_ended(inspections: InspectionSet) -> Divergence | None:
    """Return which ranks diverged if gloo ended some ranks because sizes differ, or None if that is unknown.

    The flight recorders of the ended ranks are lost, and those of the others agree. The call log shows what the ended ranks
    did: the same call as the others, no call (they were in DDP's backward pass too), or another call. A rank without a log
    counts as one that made another call.
    """
    recorded = {
        rank: inspection for rank, inspection in inspections.items() if any(group.ops for group in inspection.groups)
    }
    in_progress = [
        (op.order, group.name, op)
        for rank in sorted(recorded)[:1]
        for group in recorded[rank].groups
        for op in group.ops
        if not op.done
    ]
    if not in_progress:
        return None
    _, group, op = min(in_progress, key=lambda entry: entry[0])
    agreeing = list(recorded)
    others: dict[object, Party] = {}
    for rank, inspection in inspections.items():
        if rank in recorded:
            continue
        calls = inspection.calls
        call = calls[-1] if calls and not calls[-1].returned else None
        same_phase = bool(calls) and call is None and not op.frames
        if same_phase or (call is not None and _made_call(call, recorded)):
            agreeing.append(rank)
            continue
        key = (call.group, call.count, call.name, call.elements) if call is not None else None
        ranks = (*others[key].ranks, rank) if key in others else (rank,)
        entered = call_paths.as_op(call, inspection) if call is not None else None
        others[key] = Party(tuple(sorted(ranks)), group, entered)
    return decide_divergence([Party(tuple(sorted(agreeing)), group, op), *others.values()]) if others else None


def _made_call(call: Call, inspections: InspectionSet) -> bool:
    calls = (other for inspection in inspections.values() for other in inspection.calls)
    return any(other.group == call.group and other.count == call.count for other in calls)


def members_of(group: Group, rank: int, members: Members, world_size: int) -> tuple[int, ...]:
    if group.name in members:
        return members[group.name]
    if group.ranks:
        return group.ranks
    return tuple(range(world_size)) if group.about == "default_pg" or group.name == "0" else (rank,)


def _find_first_difference(inspections: InspectionSet, members: Members, world_size: int) -> list[Party]:
    """Return the parties of the first operation in which the flight recorders differ, or []."""
    if len(inspections) < 2:
        return []
    names = {
        rank: _name_groups(inspection, inspections, members, world_size) for rank, inspection in inspections.items()
    }
    shared = set.intersection(*(set(own.values()) for own in names.values()))
    # Compare only groups that all these ranks are in, from an operation on that all recorders still hold.
    paths = {
        rank: [step for step in _collect_path(inspection, names[rank]) if step.key[0] in shared]
        for rank, inspection in inspections.items()
    }
    used = set.intersection(*({step.key[0] for step in path} for path in paths.values()))
    if not used:
        return []
    fewest_ops = {name: min(sum(step.key[0] == name for step in path) for path in paths.values()) for name in used}
    anchor = min(used, key=lambda name: (-fewest_ops[name], str(name)))
    start = max(next(step.op.seq for step in path if step.key[0] == anchor) for path in paths.values())
    aligned = {rank: _path_from(path, anchor, start) for rank, path in paths.items()}
    for number in range(max(len(path) for path in aligned.values())):
        steps = {rank: path[number] for rank, path in aligned.items() if len(path) > number}
        by_key: dict[tuple[object, ...], list[int]] = {}
        for rank, step in steps.items():
            by_key.setdefault(step.key, []).append(rank)
        if len(by_key) > 1:
            if all(step.op.done for step in steps.values()):
                return []  # every rank finished the operation, so the programs differ by design
            return [_make_party(steps, ranks) for ranks in by_key.values()]
    return []


def _make_party(steps: Mapping[int, PathStep], ranks: list[int]) -> Party:
    """Make a party with the operation of one of its ranks, preferably one that still waits in it and knows if it is usual."""
    step = max((steps[rank] for rank in ranks), key=lambda step: (not step.op.done, step.op.usual is not None))
    return Party(tuple(sorted(ranks)), step.group, step.op)


def _name_groups(
    inspection: RankInspection, inspections: InspectionSet, members: Members, world_size: int
) -> dict[str, tuple[object, ...]]:
    """Return names for a rank's groups that are the same on every rank: (description, size, number of such a group)."""
    sizes = {group.name: len(members_of(group, inspection.rank, members, world_size)) for group in inspection.groups}
    sizes |= {name: len(ranks) for name, ranks in members.items() if inspection.rank in ranks}
    about = {group.name: group.about for other in inspections.values() for group in other.groups}
    names: dict[str, tuple[object, ...]] = {}
    counts: dict[object, int] = {}
    for name in sorted(sizes, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name)):
        kind = (about.get(name, ""), sizes[name])
        counts[kind] = counts.get(kind, 0) + 1
        names[name] = (*kind, counts[kind])
    return names


def _collect_path(inspection: RankInspection, names: Mapping[str, tuple[object, ...]]) -> list[PathStep]:
    """Return all collectives of a rank in the order in which it made them."""
    steps = [
        PathStep((names[group.name], group.backend, *operation_signature(op.name, op.sizes)), group.name, op)
        for group in inspection.groups
        for op in group.ops
        if not op.p2p
    ]
    return sorted(steps, key=lambda step: step.op.order)


def _path_from(path: list[PathStep], anchor: object, seq: int) -> list[PathStep]:
    numbers = (number for number, step in enumerate(path) if step.key[0] == anchor and step.op.seq >= seq)
    return path[next(numbers, len(path)) :]


def _current_line(inspection: RankInspection) -> SourceLine | None:
    frame = stack_frames.script_frame(inspection.main)
    return (frame.file, frame.line) if frame is not None else None


def _add_unrecorded(parties: list[Party], recorded: InspectionSet, unrecorded: InspectionSet) -> list[Party]:
    """Add each rank without a flight recorder to the party whose ranks are at the same line."""
    ranks_of = [list(party.ranks) for party in parties]
    lines_of = [{_current_line(recorded[rank]) for rank in party.ranks} for party in parties]
    for rank, inspection in unrecorded.items():
        matching = [number for number, lines in enumerate(lines_of) if _current_line(inspection) in lines]
        if len(matching) == 1:
            ranks_of[matching[0]].append(rank)
    return [Party(tuple(sorted(ranks)), party.group, party.op) for party, ranks in zip(parties, ranks_of, strict=True)]


def decide_divergence(parties: list[Party], by_majority: bool = True) -> Divergence:
    """Decide which parties diverged: the minority, else those whose operation never came next in earlier steps."""
    parties = sorted(parties, key=lambda party: (len(party.ranks), party.ranks))
    largest = parties[-1]
    if by_majority and 2 * len(largest.ranks) > sum(len(party.ranks) for party in parties):
        minority = _ranks_of(parties[:-1])
        reason = f"{format_ranks(largest.ranks)} did the same, {format_ranks(minority)} did not"
        return Divergence(tuple(parties), minority, reason)
    usual = [party for party in parties if party.op is not None and party.op.usual]
    unusual = [party for party in parties if party.op is not None and party.op.usual is False]
    unknown = [party for party in parties if party.op is None]
    diverged = unknown if usual and len(usual) + len(unknown) == len(parties) else []
    if unusual and (usual or unknown):
        diverged = unusual
    if diverged and len(diverged) < len(parties):
        stayed = [party for party in parties if party not in diverged]
        reason = (
            f"the operations before it repeat, and what {format_ranks(_ranks_of(diverged))} entered never came next"
        )
        return Divergence((*diverged, *stayed), _ranks_of(diverged), reason)
    parties.sort(key=lambda party: party.ranks)
    return Divergence(tuple(parties), (), "it is a tie, and no earlier operation shows which one is usual")


def _ranks_of(parties: Iterable[Party]) -> tuple[int, ...]:
    return tuple(sorted(rank for party in parties for rank in party.ranks))


# ---- the stall ----


def find_mismatch(inspections: InspectionSet, graph: WaitGraph, members: Members, world_size: int) -> Stall | None:
    """Return the stall if ranks entered different operations or sizes under one sequence number, or None. It is a proof."""
    edges = [edge for edge in graph.edges if edge.reason in ("other-op", "other-shape")]
    if not edges:
        return None
    divergence = find_divergence(inspections, members, world_size) or decide_divergence(_collect_parties(edges))
    return _make_stall(divergence, inspections, proof=True)


def find_circular_wait(inspections: InspectionSet, graph: WaitGraph, members: Members, world_size: int) -> Stall:
    """Return the stall of ranks that wait for each other in a circle: in different groups, or in messages that don't pair."""
    # A rank may start an asynchronous operation and continue: it is only a deadlock if every rank is blocked in a call.
    proof = all(_is_blocked(inspections[rank]) for rank in graph.pending)
    divergence = find_divergence(inspections, members, world_size)
    if divergence is not None:
        return _make_stall(divergence, inspections, proof, kind="diverged")
    messages = any(op.p2p for _, op in graph.pending.values())
    parties: dict[object, list[int]] = {}
    pending = dict(graph.pending)
    for rank, (group, op) in graph.pending.items():
        call = call_paths.find_blocking_call(inspections[rank])
        if messages and call is not None:  # the flight recorder's order of operations lacks messages
            pending[rank] = group, call_paths.as_op(call, inspections[rank])
        op = pending[rank][1]
        parties.setdefault((group, op.name, op.usual) if messages else group, []).append(rank)
    waiting = [Party(tuple(sorted(ranks)), *pending[ranks[0]]) for ranks in parties.values()]
    # Senders and receivers make different calls by design, so the majority doesn't count for messages.
    stall = _make_stall(decide_divergence(waiting, by_majority=not messages), inspections, proof, kind="diverged")
    only_messages = all(op.p2p for _, op in pending.values())
    return replace(stall, detail="messages") if only_messages and stall.rank is None else stall


def _is_blocked(inspection: RankInspection) -> bool:
    """Return whether the main thread is inside a collective, or asleep until a message has been sent or received."""
    call = call_paths.find_blocking_call(inspection)
    waits = call is not None and call.name in call_paths.MESSAGES and inspection.main_cpu < 0.1
    return waits or stack_frames.in_collective(inspection.main)


def find_divergence_of_failed(
    inspections: InspectionSet, members: Members, world_size: int, sizes_differ: bool
) -> Stall | None:
    """Return the stall of ranks that failed in a collective, or None. `sizes_differ` means that gloo ended a rank for that."""
    divergence = find_divergence(inspections, members, world_size)
    if divergence is None and sizes_differ:
        divergence = _find_divergence_of_ended(inspections)
    return _make_stall(divergence, inspections, proof=True) if divergence is not None else None


def _collect_parties(edges: list[Wait]) -> list[Party]:
    """Group the ranks by the operation they wait in. This replaces the comparison of paths that can't be aligned."""
    entered: dict[tuple[object, ...], dict[int, Party]] = {}
    for edge in edges:
        for rank, op in ((edge.rank, edge.op), (edge.target, edge.target_op)):
            if op is not None:
                entered.setdefault(operation_signature(op.name, op.sizes), {})[rank] = Party((rank,), edge.group, op)
    firsts = ((ranks, next(iter(ranks.values()))) for ranks in entered.values())
    return [Party(tuple(sorted(ranks)), first.group, first.op) for ranks, first in firsts]


def _make_stall(divergence: Divergence, inspections: InspectionSet, proof: bool, kind: str = "") -> Stall:
    """Describe a divergence as a stall, with the kind that its operations and stacks show."""
    kind = kind or _classify(divergence.parties, inspections)
    if kind == "op-mismatch":
        divergence, fewer_batches = _check_left_loop(divergence, inspections)
        kind = "unequal" if fewer_batches else kind
    parties, diverged = divergence.parties, divergence.diverged
    others = tuple(sorted({rank for party in parties for rank in party.ranks} - set(diverged)))
    rank = diverged[0] if diverged else None
    entered = tuple(
        (party.ranks, _describe_entered(party, parties), str(_find_party_frame(party, parties, inspections) or ""))
        for party in parties
    )
    usual = next((party for party in reversed(parties) if party.op is not None), parties[-1])
    same_sizes = len({str(party.op.sizes) for party in parties if party.op is not None}) == 1
    guilty_party = next((party for party in parties if rank in party.ranks), None)
    frame = _find_party_frame(guilty_party, parties, inspections) if guilty_party is not None else None
    lines = [f"{format_ranks(party.ranks)} entered {_describe_operation(party)}" for party in parties]
    stall = Stall(
        kind, rank, diverged, others, where=str(frame or ""),
        detail="dtype" if kind == "shape-mismatch" and same_sizes else "",
        operation=str(usual.op or ""), backend=usual.op.name.partition(":")[0] if usual.op else "gloo",
        proof=proof, evidence=(*lines, divergence.reason), parties=entered,
    )  # fmt: skip
    # A party whose call is inside a condition on the rank is to blame if the calls of the others are not.
    for party in parties:
        rest = tuple(rank for other in parties if other is not party for rank in other.ranks)
        refined = refine_as_rank_only(stall, inspections, party.ranks, rest)
        if refined is not stall:
            first = [entry for entry in entered if entry[0] == party.ranks]
            return replace(refined, parties=(*first, *(entry for entry in entered if entry[0] != party.ranks)))
    return stall


def _check_left_loop(divergence: Divergence, inspections: InspectionSet) -> tuple[Divergence, bool]:
    """Return the divergence, and whether a party left the loop that the others are in because it had fewer batches.

    In a tie, that party is blamed.
    """
    for party in divergence.parties:
        others = tuple(rank for other in divergence.parties if other is not party for rank in other.ranks)
        if divergence.diverged in ((), party.ranks) and _left_loop(inspections, party.ranks, others):
            rest = tuple(other for other in divergence.parties if other is not party)
            left = f"{format_ranks(others)} are inside a loop that {format_ranks(party.ranks)} left"
            reason = divergence.reason if divergence.diverged else left
            return Divergence((party, *rest), party.ranks, reason), True
    return divergence, False


def _classify(parties: tuple[Party, ...], inspections: InspectionSet) -> str:
    """Return the kind of the stall: different calls, or one call with different tensors.

    If all parties are in the same operation, the lines of the calls decide.
    """
    ops = [party.op for party in parties if party.op is not None]
    if len({operation_kind(op.name) for op in ops}) > 1:
        return "op-mismatch"
    if len({party.group for party in parties if party.op is not None}) > 1:
        return "diverged"
    lines = [_call_lines(party, inspections) for party in parties]
    return "diverged" if all(lines) and not set.intersection(*lines) else "shape-mismatch"


def _describe_operation(party: Party) -> str:
    if party.op is None:
        return "an operation of another size"
    number = f"operation {party.op.seq}" if party.op.seq else "a call"
    return f"{number} of group {party.group}: {party.op}"


def _describe_entered(party: Party, parties: tuple[Party, ...]) -> str:
    if party.op is None:
        return "an operation of another size"
    if len({other.group for other in parties if other.op is not None}) > 1:
        return f"{party.op} of group {party.group}"
    if _is_asynchronous(party.op) and party.op.frames:
        started = party.op.frames[0]
        return f"{party.op} (started at {os.path.basename(started.file)}:{started.line})"
    return str(party.op)


def _is_asynchronous(op: Op) -> bool:
    """Return whether this is an isend or irecv, which the script waits for at another line, with Work.wait()."""
    return "isend" in op.name or "irecv" in op.name


def _call_lines(party: Party, inspections: InspectionSet) -> set[tuple[SourceLine, ...]]:
    """Return the lines from which the ranks of a party made the call, with their callers where these are known."""
    if party.op is not None and party.op.frames:
        return {tuple((frame.file, frame.line) for frame in party.op.frames)}
    lines = (_current_line(inspections[rank]) for rank in party.ranks if rank in inspections)
    return {(line,) for line in lines if line is not None}


def _find_party_frame(party: Party, parties: tuple[Party, ...], inspections: InspectionSet) -> Frame | None:
    """Return the line from which a party entered its operation, or None if it is unknown.

    If all parties made the call in the same line of a helper function, return the innermost caller's line that differs. The
    current stack of a rank that has finished the operation doesn't show where it was called.
    """
    op = party.op
    if op is not None and _is_asynchronous(op):
        frames = (stack_frames.script_frame(inspections[rank].main) for rank in party.ranks if rank in inspections)
        return next((frame for frame in frames if frame is not None), None)
    if op is not None and op.frames:
        callers = [other.op.frames for other in parties if other.op is not None and other.op.frames]
        depths = range(min(map(len, callers)))
        differing = (depth for depth in depths if len({frames[depth] for frames in callers}) > 1)
        return op.frames[next(differing, 0)]
    for rank in party.ranks:
        groups = inspections[rank].groups if rank in inspections else ()
        waits = any(op == other for group in groups for other in group.ops if not other.done)
        if rank in inspections and (waits or op is None or not groups):
            return stack_frames.script_frame(inspections[rank].main)
    return None


def _left_loop(inspections: InspectionSet, ranks: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Return whether `others` are in a backward pass inside a loop that `ranks`, in the same function, have left."""
    for rank in ranks:
        for other in others:
            if rank not in inspections or other not in inspections:
                return False
            if not stack_frames.in_backward(inspections[other].main):
                return False
            if not _is_after_loop(inspections[rank].main, inspections[other].main):
                return False
    return bool(ranks and others)


def _is_after_loop(frames: tuple[Frame, ...], other_frames: tuple[Frame, ...]) -> bool:
    """Return whether a stack is after the loop that another stack is in, at the outermost line in which the two differ.

    A stack before the loop doesn't count, because that rank may still enter it.
    """
    for frame, other in zip(reversed(frames), reversed(other_frames), strict=False):
        if (frame.file, frame.name) != (other.file, other.name):
            return False
        if frame.line != other.line:
            return any(frame.line > first for first in set(other.loops) - set(frame.loops))
    return False
