"""Who waits for whom, from the ranks' collectives. Pure.

A rank waits in the first operation of a group that is not done. It waits for every member of that group that has not
entered the operation, or has entered another one under the same number. Somebody many wait for, who waits for nobody,
is the culprit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from stoker.contract.flight_recorder import count_elements, operation_kind, sizes_must_agree
from stoker.contract.frozen import frozen
from stoker.control.watch import call_paths
from stoker.control.watch.rank_inspection import Group, InspectionSet, Members, Op, Wait

_PEER = re.compile(r"(?<!\d)(\d{1,9})\s{0,9}(->|<-)\s{0,9}(\d{1,9})")


@frozen
class WaitGraph:
    edges: tuple[Wait, ...]
    pending: Mapping[int, tuple[str, Op]]  # rank -> (group, the operation it waits in)
    sources: Mapping[int, set[int]]  # rank -> those that wait for it

    @property
    def roots(self) -> tuple[int, ...]:
        """Ranks others wait for, who wait for nobody; those most are waiting for, directly or through others, first."""
        sources = {edge.rank for edge in self.edges}
        free = {edge.target for edge in self.edges} - sources
        return tuple(sorted(free, key=lambda rank: (-len(self.behind(rank)), rank)))

    def behind(self, rank: int) -> set[int]:
        """All ranks that wait for this one, through others too."""
        found: set[int] = set()
        queue = [rank]
        while queue:
            for source in self.sources.get(queue.pop(), ()):
                if source not in found and source != rank:
                    found.add(source)
                    queue.append(source)
        return found


def waits(snapshots: InspectionSet, members: Members, world: int) -> WaitGraph:
    """`snapshots` of living ranks, and of failed ones as they were. A member without one will enter nothing."""
    table: dict[tuple[str, str], dict[int, Group]] = {}
    for rank, one in snapshots.items():
        for group in one.groups:
            table.setdefault((group.name, group.backend), {})[rank] = group
    edges: list[Wait] = []
    pending: dict[int, tuple[str, Op]] = {}
    for (name, _), seen in table.items():
        everybody = _members(name, seen, members, world)
        for rank, group in seen.items():
            op = group.pending
            if op is None:
                continue
            if rank not in pending or op.order < pending[rank][1].order:
                pending[rank] = name, op
            if op.p2p:
                edges += _peer(rank, name, op, snapshots, everybody)
                continue
            for other in everybody:
                if other != rank:
                    edge = _edge(rank, other, name, op, seen.get(other))
                    if edge is not None:
                        edges.append(edge)
    for wait in call_paths.message_waits(snapshots):
        edges.append(wait)
        pending.setdefault(wait.rank, (wait.group, wait.op))
    sources: dict[int, set[int]] = {}
    for one_edge in edges:
        sources.setdefault(one_edge.target, set()).add(one_edge.rank)
    return WaitGraph(tuple(edges), pending, sources)


def _members(name: str, seen: Mapping[int, Group], told: Members, world: int) -> tuple[int, ...]:
    if name in told:
        return told[name]
    for group in seen.values():
        if group.ranks:
            return group.ranks
    if any(group.about == "default_pg" for group in seen.values()) or name == "0":
        return tuple(range(world))
    return tuple(seen)


def _edge(rank: int, other: int, name: str, op: Op, theirs: Group | None) -> Wait | None:
    ops = [one for one in theirs.ops if not one.p2p] if theirs else []
    same = next((one for one in reversed(ops) if one.seq == op.seq), None)
    if same is None:
        if ops and ops[0].seq > op.seq:
            return None  # they have been past it: its entry has rolled out of their recorder
        return Wait(rank, other, "absent", name, op, ops[-1] if ops else None)
    if operation_kind(same.name) != operation_kind(op.name):
        return Wait(rank, other, "other-op", name, op, same)
    if sizes_must_agree(op.name) and count_elements(same.sizes) != count_elements(op.sizes):
        return Wait(rank, other, "other-shape", name, op, same)
    return None


def _peer(rank: int, name: str, op: Op, snapshots: InspectionSet, everybody: tuple[int, ...]) -> list[Wait]:
    """A send or receive waits for its peer, unless that is at the other end of it. Names count within the group."""
    found = _PEER.search(op.name)
    if not found or max(int(found[1]), int(found[3])) >= len(everybody):
        return []
    ends = {everybody[int(found[1])], everybody[int(found[3])]}
    if rank not in ends or len(ends) != 2:
        return []
    (peer,) = ends - {rank}
    theirs = (
        next((group for group in snapshots[peer].groups if group.name == name), None) if peer in snapshots else None
    )
    for one in theirs.ops if theirs else ():
        if not one.done and one.p2p and _PEER.search(one.name) and operation_kind(one.name) != operation_kind(op.name):
            return []
    return [Wait(rank, peer, "peer", name, op)]
