"""Ranks that wait for each other: another operation, another size, another group. Says what each did, where, and who
left the common path. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.contract.collectives import kind_of, likeness
from stoker.contract.quantities import ranks_text
from stoker.contract.shapes import Stall
from stoker.control.watch import stacks
from stoker.control.watch.paths import Parting, Party, decided, from_silence, parting, place_of
from stoker.control.watch.snapshot import Frame, Snapshot
from stoker.control.watch.waits import Wait, Waits

Members = Mapping[str, tuple[int, ...]]


def mismatched(snapshots: Mapping[int, Snapshot], graph: Waits, members: Members, world: int) -> Stall | None:
    """Another operation, or another size, under the same number of the same group: proof, whoever else waits for whom."""
    edges = [edge for edge in graph.edges if edge.why in ("other-op", "other-shape")]
    if not edges:
        return None
    return _stall(parting(snapshots, members, world) or decided(_parties(edges)), snapshots, proof=True)


def at_odds(snapshots: Mapping[int, Snapshot], graph: Waits, members: Members, world: int) -> Stall:
    """Everybody waits for somebody: groups entered in another order, one left out, or messages that don't pair."""
    # An operation that is under way need not be waited in (async_op): it is a deadlock only if every one of them stands
    # in a collective.
    proof = all(stacks.in_collective(snapshots[rank].main) for rank in graph.pending)
    apart = parting(snapshots, members, world)
    if apart is not None:
        return _stall(apart, snapshots, proof, kind="diverged")
    parties: dict[str, list[int]] = {}
    for rank, (group, op) in graph.pending.items():
        parties.setdefault(group if not op.p2p else f"{group} {op.name}", []).append(rank)
    waiting = [Party(tuple(sorted(ranks)), *graph.pending[ranks[0]]) for ranks in parties.values()]
    return _stall(decided(waiting), snapshots, proof, kind="diverged")


def after_the_end(snapshots: Mapping[int, Snapshot], members: Members, world: int, sizes_differ: bool) -> Stall | None:
    """Of ranks that failed in a collective, as they said or as faulthandler saw them. `sizes_differ`: gloo ended one
    for that.
    """
    apart = parting(snapshots, members, world) or (from_silence(snapshots) if sizes_differ else None)
    return _stall(apart, snapshots, proof=True) if apart is not None else None


def _parties(edges: list[Wait]) -> list[Party]:
    """From what each waits for, where the ranks' paths can't be laid side by side."""
    entered: dict[tuple[object, ...], dict[int, Party]] = {}
    for edge in edges:
        for rank, op in ((edge.rank, edge.op), (edge.target, edge.other)):
            if op is not None:
                entered.setdefault(likeness(op.name, op.sizes), {})[rank] = Party((rank,), edge.group, op)
    return [
        Party(tuple(sorted(ranks)), next(iter(ranks.values())).group, next(iter(ranks.values())).op)
        for ranks in entered.values()
    ]


def _stall(apart: Parting, snapshots: Mapping[int, Snapshot], proof: bool, kind: str = "") -> Stall:
    kind = kind or _kind(apart.parties, snapshots)
    apart, fewer_batches = _by_loop(apart, snapshots) if kind == "op-mismatch" else (apart, False)
    kind = "unequal" if fewer_batches else kind
    odd, others = apart.odd, tuple(sorted({rank for party in apart.parties for rank in party.ranks} - set(apart.odd)))
    rank = odd[0] if odd else None
    told = tuple((party.ranks, _entered(party, apart.parties), _where(party, snapshots)) for party in apart.parties)
    usual = next((party for party in reversed(apart.parties) if party.op is not None), apart.parties[-1])
    frame = _frame(snapshots, rank) if rank is not None else None
    lines = [f"{ranks_text(party.ranks)} entered {_operation(party)}" for party in apart.parties]
    return Stall(
        kind,
        rank,
        odd,
        others,
        str(frame or ""),
        "",
        str(usual.op or ""),
        usual.op.name.partition(":")[0] if usual.op else "gloo",
        proof,
        evidence=(*lines, apart.how),
        parties=told,
    )


def _by_loop(apart: Parting, snapshots: Mapping[int, Snapshot]) -> tuple[Parting, bool]:
    """Who has left the loop that the others are still in had fewer batches, and is the odd one where nothing else
    tells.
    """
    for party in apart.parties:
        others = tuple(rank for other in apart.parties if other is not party for rank in other.ranks)
        if apart.odd in ((), party.ranks) and _left_the_loop(snapshots, party.ranks, others):
            rest = tuple(other for other in apart.parties if other is not party)
            how = (
                apart.how
                if apart.odd
                else f"{ranks_text(others)} are inside a loop that {ranks_text(party.ranks)} has left"
            )
            return Parting((party, *rest), party.ranks, how), True
    return apart, False


def _kind(parties: tuple[Party, ...], snapshots: Mapping[int, Snapshot]) -> str:
    """Different calls, or one call with different tensors? The line tells where both are all_reduce."""
    ops = [party.op for party in parties if party.op is not None]
    if len({kind_of(op.name) for op in ops}) > 1:
        return "op-mismatch"
    if len({party.group for party in parties if party.op is not None}) > 1:
        return "diverged"
    places = [{place_of(snapshots[rank]) for rank in party.ranks if rank in snapshots} - {None} for party in parties]
    return "diverged" if all(places) and not set.intersection(*places) else "shape-mismatch"


def _operation(party: Party) -> str:
    return (
        f"operation {party.op.seq} of group {party.group}: {party.op}"
        if party.op is not None
        else "an operation of another size"
    )


def _entered(party: Party, parties: tuple[Party, ...]) -> str:
    if party.op is None:
        return "an operation of another size"
    return (
        f"{party.op} of group {party.group}"
        if len({one.group for one in parties if one.op is not None}) > 1
        else str(party.op)
    )


def _frame(snapshots: Mapping[int, Snapshot], rank: int) -> Frame | None:
    return stacks.users_frame(snapshots[rank].main) if rank in snapshots else None


def _where(party: Party, snapshots: Mapping[int, Snapshot]) -> str:
    """The line of one that still waits in it: another one of the party may be done with it and somewhere else by now."""
    op = party.op
    there = [
        rank
        for rank in party.ranks
        if rank in snapshots and any(op == one for group in snapshots[rank].groups for one in group.ops if not one.done)
    ]
    for rank in (*there, *party.ranks):
        frame = _frame(snapshots, rank)
        if frame is not None:
            return str(frame)
    return ""


def _left_the_loop(snapshots: Mapping[int, Snapshot], guilty: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """The others are in a backward pass inside a loop that these, in the same function, are no longer in."""
    for rank in guilty:
        for other in others:
            if rank not in snapshots or other not in snapshots or not stacks.in_backward(snapshots[other].main):
                return False
            if not _outside(snapshots[rank].main, snapshots[other].main):
                return False
    return bool(guilty and others)


def _outside(mine: tuple[Frame, ...], theirs: tuple[Frame, ...]) -> bool:
    """From the outermost frame inward: the first one in which the two part. Before a loop, a rank has not left it: it
    may come to it in its next step.
    """
    for one, other in zip(reversed(mine), reversed(theirs), strict=False):
        if (one.file, one.name) != (other.file, other.name):
            return False
        if one.line != other.line:
            return any(one.line > first for first in set(other.loops) - set(one.loops))
    return False
