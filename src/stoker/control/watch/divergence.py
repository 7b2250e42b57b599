"""Ranks that wait for each other: what each entered, where, and who left the common path. Pure.

The operations of all ranks are laid side by side, up to the first that differs. What decides, in this order: what most
ranks entered there, and then each rank's own past (training repeats itself, so the next operation is known before it is
entered). Where neither decides it is a tie, and nobody is accused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from stoker.contract.evidence import Stall
from stoker.contract.flight_recorder import operation_kind, operation_signature
from stoker.contract.frozen import frozen, replace
from stoker.contract.units import format_ranks
from stoker.control.watch import call_paths, rank_only, stack_frames
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
from stoker.control.watch.wait_graph import WaitGraph

Place = tuple[str, int]  # file and line of the script


@frozen
class Parting:
    parties: tuple[Party, ...]  # those that left the path first
    odd: tuple[int, ...]  # the ranks that left it; none: a tie
    how: str  # it is known


@frozen
class Step:
    """One operation of a rank, made comparable between ranks."""

    key: tuple[object, ...]
    group: str
    op: Op


def parting(snapshots: InspectionSet, members: Members, world: int) -> Parting | None:
    """Return who left the common path, or None: by the logs of calls, else by the flight recorders.

    The recorders of all ranks are compared; where their programs differ by design (stages of a pipeline), those of the
    members of one group.
    """
    parties = call_paths.first_difference(snapshots)
    if parties:
        return decided(parties)
    known = {rank: one for rank, one in snapshots.items() if any(group.ops for group in one.groups)}
    mute = {rank: one for rank, one in snapshots.items() if rank not in known and one.main}
    candidates = [
        tuple(known),
        *(members_of(group, rank, members, world) for rank, one in known.items() for group in one.groups),
    ]
    for ranks in dict.fromkeys(tuple(sorted(set(ranks) & known.keys())) for ranks in candidates):
        parties = _first_difference({rank: known[rank] for rank in ranks}, members, world)
        if parties:
            return decided(_with_mute(parties, known, mute))
    return None


def from_silence(snapshots: InspectionSet) -> Parting | None:
    """Return who left the common path if gloo ended some ranks because sizes differ, or None if that can't be seen.

    The recorders of the ended ranks are gone, and the others agree. The log of calls shows what the ended ones did: the
    same call as the others, nothing (they were in DDP's backward pass too), or another call. Without a log they did
    something else.
    """
    known = {rank: one for rank, one in snapshots.items() if any(group.ops for group in one.groups)}
    under_way = [
        (op.order, group.name, op)
        for rank in sorted(known)[:1]
        for group in known[rank].groups
        for op in group.ops
        if not op.done
    ]
    if not under_way:
        return None
    _, group, op = min(under_way, key=lambda entry: entry[0])
    agreeing = list(known)
    others: dict[object, Party] = {}
    for rank, one in snapshots.items():
        if rank in known:
            continue
        call = one.calls[-1] if one.calls and not one.calls[-1].returned else None
        same_phase = bool(one.calls) and call is None and not op.frames
        if same_phase or (call is not None and _made_call(call, known)):
            agreeing.append(rank)
            continue
        key = (call.group, call.count, call.name, call.elements) if call is not None else None
        ranks = (*others[key].ranks, rank) if key in others else (rank,)
        others[key] = Party(tuple(sorted(ranks)), group, call_paths.as_op(call, one) if call is not None else None)
    return decided([Party(tuple(sorted(agreeing)), group, op), *others.values()]) if others else None


def _made_call(call: Call, snapshots: InspectionSet) -> bool:
    theirs = (other for one in snapshots.values() for other in one.calls)
    return any(other.group == call.group and other.count == call.count for other in theirs)


def members_of(group: Group, rank: int, members: Members, world: int) -> tuple[int, ...]:
    if group.name in members:
        return members[group.name]
    if group.ranks:
        return group.ranks
    return tuple(range(world)) if group.about == "default_pg" or group.name == "0" else (rank,)


def _first_difference(snapshots: InspectionSet, members: Members, world: int) -> list[Party]:
    if len(snapshots) < 2:
        return []
    names = {rank: _group_names(one, snapshots, members, world) for rank, one in snapshots.items()}
    shared = set.intersection(*(set(own.values()) for own in names.values()))
    # Only groups that all these ranks are in, aligned by an operation that all recorders still hold.
    paths = {
        rank: [step for step in _path(one, names[rank]) if step.key[0] in shared] for rank, one in snapshots.items()
    }
    used = set.intersection(*({step.key[0] for step in path} for path in paths.values()))
    if not used:
        return []
    anchor = min(used, key=lambda which: (-_count(paths, which), str(which)))
    start = max(next(step.op.seq for step in path if step.key[0] == anchor) for path in paths.values())
    aligned = {rank: _from(path, anchor, start) for rank, path in paths.items()}
    for number in range(max(len(path) for path in aligned.values())):
        here = {rank: path[number] for rank, path in aligned.items() if len(path) > number}
        parties: dict[tuple[object, ...], list[int]] = {}
        for rank, step in here.items():
            parties.setdefault(step.key, []).append(rank)
        if len(parties) > 1:
            if all(step.op.done for step in here.values()):
                return []  # they differ and it held up nobody: programs that differ by design
            return [_party(here, ranks) for ranks in parties.values()]
    return []


def _party(here: Mapping[int, Step], ranks: list[int]) -> Party:
    """Shown by one that still waits in it, and whose past says whether it is the usual operation."""
    step = max((here[rank] for rank in ranks), key=lambda step: (not step.op.done, step.op.usual is not None))
    return Party(tuple(sorted(ranks)), step.group, step.op)


def _group_names(
    snapshot: RankInspection, snapshots: InspectionSet, members: Members, world: int
) -> dict[str, tuple[object, ...]]:
    """The groups a rank is in, used or not, by names that mean the same on every rank: its second group of four ranks."""
    sizes = {group.name: len(members_of(group, snapshot.rank, members, world)) for group in snapshot.groups}
    sizes |= {name: len(ranks) for name, ranks in members.items() if snapshot.rank in ranks}
    about = {group.name: group.about for one in snapshots.values() for group in one.groups}
    names: dict[str, tuple[object, ...]] = {}
    counted: dict[object, int] = {}
    for name in sorted(sizes, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name)):
        kind = (about.get(name, ""), sizes[name])
        counted[kind] = counted.get(kind, 0) + 1
        names[name] = (*kind, counted[kind])
    return names


def _path(snapshot: RankInspection, names: Mapping[str, tuple[object, ...]]) -> list[Step]:
    """All collectives of a rank in the order it made them."""
    steps = [
        Step((names[group.name], group.backend, *operation_signature(op.name, op.sizes)), group.name, op)
        for group in snapshot.groups
        for op in group.ops
        if not op.p2p
    ]
    return sorted(steps, key=lambda step: step.op.order)


def _count(paths: Mapping[int, list[Step]], which: object) -> int:
    return min(sum(step.key[0] == which for step in path) for path in paths.values())


def _from(path: list[Step], anchor: object, seq: int) -> list[Step]:
    numbers = (number for number, step in enumerate(path) if step.key[0] == anchor and step.op.seq >= seq)
    return path[next(numbers, len(path)) :]


def place_of(snapshot: RankInspection) -> Place | None:
    frame = stack_frames.users_frame(snapshot.main)
    return (frame.file, frame.line) if frame is not None else None


def _with_mute(parties: list[Party], known: InspectionSet, mute: InspectionSet) -> list[Party]:
    """A rank without a recorder belongs to those at whose line it was."""
    joined = [list(party.ranks) for party in parties]
    places = [{place_of(known[peer]) for peer in party.ranks} for party in parties]
    for rank, one in mute.items():
        there = [number for number, inside in enumerate(places) if place_of(one) in inside]
        if len(there) == 1:
            joined[there[0]].append(rank)
    return [Party(tuple(sorted(ranks)), party.group, party.op) for party, ranks in zip(parties, joined, strict=True)]


def decided(parties: list[Party], by_majority: bool = True) -> Parting:
    parties = sorted(parties, key=lambda party: (len(party.ranks), party.ranks))
    most = parties[-1]
    if by_majority and 2 * len(most.ranks) > sum(len(party.ranks) for party in parties):
        fewer = _ranks(parties[:-1])
        return Parting(tuple(parties), fewer, f"{format_ranks(most.ranks)} did the same, {format_ranks(fewer)} did not")
    usual = [party for party in parties if party.op is not None and party.op.usual]
    unusual = [party for party in parties if party.op is not None and party.op.usual is False]
    unknown = [party for party in parties if party.op is None]
    left = unknown if usual and len(usual) + len(unknown) == len(parties) else []
    if unusual and (usual or unknown):
        left = unusual
    if left and len(left) < len(parties):
        stayed = [party for party in parties if party not in left]
        never = f"what {format_ranks(_ranks(left))} entered never came next in them"
        return Parting((*left, *stayed), _ranks(left), f"the operations before repeat themselves, and {never}")
    parties.sort(key=lambda party: party.ranks)
    how = "as many ranks did one as the other, and nothing before shows which is the usual one"
    return Parting(tuple(parties), (), how)


def _ranks(parties: Iterable[Party]) -> tuple[int, ...]:
    return tuple(sorted(rank for party in parties for rank in party.ranks))


def mismatched(snapshots: InspectionSet, graph: WaitGraph, members: Members, world: int) -> Stall | None:
    """Another operation, or another size, under the same number of the same group: proof, whoever else waits for whom."""
    edges = [edge for edge in graph.edges if edge.why in ("other-op", "other-shape")]
    if not edges:
        return None
    return _stall(parting(snapshots, members, world) or decided(_parties(edges)), snapshots, proof=True)


def at_odds(snapshots: InspectionSet, graph: WaitGraph, members: Members, world: int) -> Stall:
    """Everybody waits for somebody: groups entered in another order, one left out, or messages that don't pair."""
    # With async_op an operation need not be waited in: a deadlock only if every one of them is in a collective.
    proof = all(_is_blocked(snapshots[rank]) for rank in graph.pending)
    apart = parting(snapshots, members, world)
    if apart is not None:
        return _stall(apart, snapshots, proof, kind="diverged")
    messages = any(op.p2p for _, op in graph.pending.values())
    parties: dict[object, list[int]] = {}
    pending = dict(graph.pending)
    for rank, (group, op) in graph.pending.items():
        call = call_paths.blocked_in(snapshots[rank])
        if messages and call is not None:  # the flight recorder's order of operations lacks messages
            pending[rank] = group, call_paths.as_op(call, snapshots[rank])
        op = pending[rank][1]
        parties.setdefault((group, op.name, op.usual) if messages else group, []).append(rank)
    waiting = [Party(tuple(sorted(ranks)), *pending[ranks[0]]) for ranks in parties.values()]
    # Ranks have different parts in sending and receiving: what most of them do says nothing then.
    stall = _stall(decided(waiting, by_majority=not messages), snapshots, proof, kind="diverged")
    only_messages = all(op.p2p for _, op in pending.values())
    return replace(stall, detail="messages") if only_messages and stall.rank is None else stall


def _is_blocked(snapshot: RankInspection) -> bool:
    """Is its main thread inside a collective, or asleep until a message has been sent or received?"""
    call = call_paths.blocked_in(snapshot)
    waits = call is not None and call.name in call_paths.MESSAGES and snapshot.main_cpu < 0.1
    return waits or stack_frames.in_collective(snapshot.main)


def after_the_end(snapshots: InspectionSet, members: Members, world: int, sizes_differ: bool) -> Stall | None:
    """Of ranks that failed in a collective. `sizes_differ`: gloo ended one for that."""
    apart = parting(snapshots, members, world) or (from_silence(snapshots) if sizes_differ else None)
    return _stall(apart, snapshots, proof=True) if apart is not None else None


def _parties(edges: list[Wait]) -> list[Party]:
    """From what each waits for, where the ranks' paths can't be laid side by side."""
    entered: dict[tuple[object, ...], dict[int, Party]] = {}
    for edge in edges:
        for rank, op in ((edge.rank, edge.op), (edge.target, edge.other)):
            if op is not None:
                entered.setdefault(operation_signature(op.name, op.sizes), {})[rank] = Party((rank,), edge.group, op)
    firsts = ((ranks, next(iter(ranks.values()))) for ranks in entered.values())
    return [Party(tuple(sorted(ranks)), first.group, first.op) for ranks, first in firsts]


def _stall(apart: Parting, snapshots: InspectionSet, proof: bool, kind: str = "") -> Stall:
    kind = kind or _kind(apart.parties, snapshots)
    apart, fewer_batches = _by_loop(apart, snapshots) if kind == "op-mismatch" else (apart, False)
    kind = "unequal" if fewer_batches else kind
    odd, others = apart.odd, tuple(sorted({rank for party in apart.parties for rank in party.ranks} - set(apart.odd)))
    rank = odd[0] if odd else None
    told = tuple(
        (party.ranks, _entered(party, apart.parties), str(_party_frame(party, apart.parties, snapshots) or ""))
        for party in apart.parties
    )
    usual = next((party for party in reversed(apart.parties) if party.op is not None), apart.parties[-1])
    same_sizes = len({str(party.op.sizes) for party in apart.parties if party.op is not None}) == 1
    odd_party = next((party for party in apart.parties if rank in party.ranks), None)
    frame = _party_frame(odd_party, apart.parties, snapshots) if odd_party is not None else None
    lines = [f"{format_ranks(party.ranks)} entered {_operation(party)}" for party in apart.parties]
    operation, backend = str(usual.op or ""), usual.op.name.partition(":")[0] if usual.op else "gloo"
    where, evidence = str(frame or ""), (*lines, apart.how)
    detail = "dtype" if kind == "shape-mismatch" and same_sizes else ""
    found = Stall(kind, rank, odd, others, where, detail, operation, backend, proof, evidence=evidence, parties=told)
    return _by_condition(found, apart, snapshots)


def _by_condition(found: Stall, apart: Parting, snapshots: InspectionSet) -> Stall:
    """Of parties that wait for each other, the one whose call depends on the rank and the others' do not."""
    for party in apart.parties:
        rest = tuple(rank for other in apart.parties if other is not party for rank in other.ranks)
        changed = rank_only.instead(found, snapshots, party.ranks, rest)
        if changed is not found:
            first = tuple(one for one in found.parties if one[0] == party.ranks)
            return replace(changed, parties=(*first, *(one for one in found.parties if one[0] != party.ranks)))
    return found


def _by_loop(apart: Parting, snapshots: InspectionSet) -> tuple[Parting, bool]:
    """Who left the loop the others are in had fewer batches, and is the odd one if nothing else tells."""
    for party in apart.parties:
        others = tuple(rank for other in apart.parties if other is not party for rank in other.ranks)
        if apart.odd in ((), party.ranks) and _left_the_loop(snapshots, party.ranks, others):
            rest = tuple(other for other in apart.parties if other is not party)
            left = f"{format_ranks(others)} are inside a loop that {format_ranks(party.ranks)} has left"
            how = apart.how if apart.odd else left
            return Parting((party, *rest), party.ranks, how), True
    return apart, False


def _kind(parties: tuple[Party, ...], snapshots: InspectionSet) -> str:
    """Different calls, or one call with different tensors? The line tells where both are all_reduce."""
    ops = [party.op for party in parties if party.op is not None]
    if len({operation_kind(op.name) for op in ops}) > 1:
        return "op-mismatch"
    if len({party.group for party in parties if party.op is not None}) > 1:
        return "diverged"
    places = [_places(party, snapshots) for party in parties]
    return "diverged" if all(places) and not set.intersection(*places) else "shape-mismatch"


def _operation(party: Party) -> str:
    if party.op is not None:
        number = f"operation {party.op.seq}" if party.op.seq else "a call"
        return f"{number} of group {party.group}: {party.op}"
    return "an operation of another size"


def _entered(party: Party, parties: tuple[Party, ...]) -> str:
    if party.op is None:
        return "an operation of another size"
    if len({one.group for one in parties if one.op is not None}) > 1:
        return f"{party.op} of group {party.group}"
    if _is_request(party.op) and party.op.frames:
        started = party.op.frames[0]
        return f"{party.op} (started at {os.path.basename(started.file)}:{started.line})"
    return str(party.op)


def _is_request(op: Op) -> bool:
    """Return whether this is a message whose end is waited for elsewhere, with Work.wait()."""
    return "isend" in op.name or "irecv" in op.name


def _places(party: Party, snapshots: InspectionSet) -> set[tuple[Place, ...]]:
    """Return the lines from which the ranks of a party made the call, each with its callers where they are known."""
    if party.op is not None and party.op.frames:
        return {tuple((frame.file, frame.line) for frame in party.op.frames)}
    places = (place_of(snapshots[rank]) for rank in party.ranks if rank in snapshots)
    return {(place,) for place in places if place is not None}


def _party_frame(party: Party, parties: tuple[Party, ...], snapshots: InspectionSet) -> Frame | None:
    """Return the line from which a party entered its operation, or None if that can't be known.

    Where all made the call from the same line of a helper function, that is the first caller's line in which they
    differ. A rank that is done with the operation is somewhere else by now: its present stack says nothing about it.
    """
    op = party.op
    if op is not None and _is_request(op):
        here = (stack_frames.users_frame(snapshots[rank].main) for rank in party.ranks if rank in snapshots)
        return next((frame for frame in here if frame is not None), None)
    if op is not None and op.frames:
        callers = [other.op.frames for other in parties if other.op is not None and other.op.frames]
        common = min(map(len, callers))
        differ = (depth for depth in range(common) if len({frames[depth] for frames in callers}) > 1)
        return op.frames[next(differ, 0)]
    for rank in party.ranks:
        groups = snapshots[rank].groups if rank in snapshots else ()
        waits = any(op == one for group in groups for one in group.ops if not one.done)
        if rank in snapshots and (waits or op is None or not groups):
            return stack_frames.users_frame(snapshots[rank].main)
    return None


def _left_the_loop(snapshots: InspectionSet, guilty: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """The others are in a backward pass inside a loop that these, in the same function, are no longer in."""
    for rank in guilty:
        for other in others:
            if rank not in snapshots or other not in snapshots or not stack_frames.in_backward(snapshots[other].main):
                return False
            if not _outside(snapshots[rank].main, snapshots[other].main):
                return False
    return bool(guilty and others)


def _outside(mine: tuple[Frame, ...], theirs: tuple[Frame, ...]) -> bool:
    """At the first frame from outside where the two part: is mine behind their loop? Before it, it may still come."""
    for one, other in zip(reversed(mine), reversed(theirs), strict=False):
        if (one.file, one.name) != (other.file, other.name):
            return False
        if one.line != other.line:
            return any(one.line > first for first in set(other.loops) - set(one.loops))
    return False
