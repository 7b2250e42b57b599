"""Builds the graph of which rank waits for which, from the ranks' collectives and messages. It does no I/O.

A rank waits in the first unfinished operation of a group, for every member of that group that has not entered it, or has
entered another one under the same sequence number. A rank that others wait for and that waits for no rank is the culprit.
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
    waiters: Mapping[int, set[int]]  # rank -> ranks that wait directly for it

    @property
    def roots(self) -> tuple[int, ...]:
        """Return the ranks that others wait for and that wait for no rank, those with most waiting ranks first."""
        waiting = {edge.rank for edge in self.edges}
        free = {edge.target for edge in self.edges} - waiting
        return tuple(sorted(free, key=lambda rank: (-len(self.ranks_behind(rank)), rank)))

    def ranks_behind(self, rank: int) -> set[int]:
        """Return all ranks that wait for this one, directly or through others."""
        ranks: set[int] = set()
        queue = [rank]
        while queue:
            for waiter in self.waiters.get(queue.pop(), ()):
                if waiter not in ranks and waiter != rank:
                    ranks.add(waiter)
                    queue.append(waiter)
        return ranks


def build_wait_graph(inspections: InspectionSet, members: Members, world_size: int) -> WaitGraph:
    """Build the graph from inspections of living ranks, and from the state of failed ranks when they failed.

    A member of a group without an inspection counts as one that will never enter the operation.
    """
    groups: dict[tuple[str, str], dict[int, Group]] = {}  # (name, backend) -> rank -> the group as that rank sees it
    for rank, inspection in inspections.items():
        for group in inspection.groups:
            groups.setdefault((group.name, group.backend), {})[rank] = group
    edges: list[Wait] = []
    pending: dict[int, tuple[str, Op]] = {}
    for (name, _), by_rank in groups.items():
        ranks = _find_members(name, by_rank, members, world_size)
        for rank, group in by_rank.items():
            op = group.pending
            if op is None:
                continue
            if rank not in pending or op.order < pending[rank][1].order:
                pending[rank] = name, op
            if op.p2p:
                edges += _make_message_edges(rank, name, op, inspections, ranks)
                continue
            for other in ranks:
                if other != rank:
                    edge = _make_collective_edge(rank, other, name, op, by_rank.get(other))
                    if edge is not None:
                        edges.append(edge)
    for wait in call_paths.find_message_waits(inspections):
        edges.append(wait)
        pending.setdefault(wait.rank, (wait.group, wait.op))
    waiters: dict[int, set[int]] = {}
    for wait in edges:
        waiters.setdefault(wait.target, set()).add(wait.rank)
    return WaitGraph(tuple(edges), pending, waiters)


def _find_members(name: str, by_rank: Mapping[int, Group], members: Members, world_size: int) -> tuple[int, ...]:
    if name in members:
        return members[name]
    for group in by_rank.values():
        if group.ranks:
            return group.ranks
    if any(group.about == "default_pg" for group in by_rank.values()) or name == "0":
        return tuple(range(world_size))
    return tuple(by_rank)


def _make_collective_edge(rank: int, target: int, name: str, op: Op, group_of_target: Group | None) -> Wait | None:
    """Return why `rank` waits for `target` in a collective, or None if `target` has entered the same one."""
    ops = [other for other in group_of_target.ops if not other.p2p] if group_of_target else []
    same_seq = next((other for other in reversed(ops) if other.seq == op.seq), None)
    if same_seq is None:
        if ops and ops[0].seq > op.seq:
            return None  # the target has finished it, and newer operations have overwritten it in the flight recorder
        return Wait(rank, target, "absent", name, op, ops[-1] if ops else None)
    if operation_kind(same_seq.name) != operation_kind(op.name):
        return Wait(rank, target, "other-op", name, op, same_seq)
    if sizes_must_agree(op.name) and count_elements(same_seq.sizes) != count_elements(op.sizes):
        return Wait(rank, target, "other-shape", name, op, same_seq)
    return None


def _make_message_edges(rank: int, name: str, op: Op, inspections: InspectionSet, ranks: tuple[int, ...]) -> list[Wait]:
    """Return the edge from a send or receive to its peer, or [] if the peer is in the matching receive or send.

    The numbers in the operation's name ("0->1") are positions in the group.
    """
    match = _PEER.search(op.name)
    if not match or max(int(match[1]), int(match[3])) >= len(ranks):
        return []
    both_ranks = {ranks[int(match[1])], ranks[int(match[3])]}
    if rank not in both_ranks or len(both_ranks) != 2:
        return []
    (peer,) = both_ranks - {rank}
    peer_groups = inspections[peer].groups if peer in inspections else ()
    group = next((group for group in peer_groups if group.name == name), None)
    for other in group.ops if group else ():
        if (
            not other.done
            and other.p2p
            and _PEER.search(other.name)
            and operation_kind(other.name) != operation_kind(op.name)
        ):
            return []
    return [Wait(rank, peer, "peer", name, op)]
