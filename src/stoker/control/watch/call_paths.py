"""Compares the ranks' logs of torch.distributed calls: the first call of a group in which its members differ. Pure.

The n-th collective of a group must be the same call on all of its members. The log has the caller's line at the time of the
call and outlives an abort, so it also covers ranks whose flight recorder is gone. Operations that torch starts in C++
(DDP's gradients) are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from stoker.contract.flight_recorder import is_usual_next, sizes_must_agree
from stoker.control.watch.rank_inspection import Call, InspectionSet, Op, Party, RankInspection, Wait

_RECEIVES = ("irecv", "recv")
MESSAGES = ("irecv", "isend", "recv", "send")
_NOT_COLLECTIVE = (*MESSAGES, "new_group")


def first_difference(snapshots: InspectionSet) -> list[Party]:
    """Return the parties of the first call in which ranks differ and that held somebody up; empty if there is none."""
    groups = dict.fromkeys(call.group for one in snapshots.values() for call in _collectives(one) if call.group)
    for group in groups:
        by_rank = {
            rank: {call.count: call for call in _collectives(one) if call.group == group}
            for rank, one in snapshots.items()
        }
        parties = _compare(group, {rank: calls for rank, calls in by_rank.items() if calls}, snapshots)
        if parties:
            return parties
    return []


def _compare(group: str, by_rank: Mapping[int, Mapping[int, Call]], snapshots: InspectionSet) -> list[Party]:
    if len(by_rank) < 2:
        return []
    # Calls that have been written over on one rank are left out on all.
    first = max(min(calls) for calls in by_rank.values())
    last = max(max(calls) for calls in by_rank.values())
    for count in range(first, last + 1):
        here = {rank: calls[count] for rank, calls in by_rank.items() if count in calls}
        if all(call.returned for call in here.values()):
            continue  # they differ by design, or are the same
        failed = any(snapshots[rank].state == "Z" for rank in here)
        alike: dict[tuple[object, ...], list[int]] = {}
        for rank, call in here.items():
            alike.setdefault(_likeness(call, failed), []).append(rank)
        if len(alike) > 1:
            return [_party(group, here, ranks, snapshots) for ranks in alike.values()]
    return []


def _likeness(call: Call, failed: bool) -> tuple[object, ...]:
    """Return what the members of a group must have in common. `failed`: the call ended a rank, so any difference counts."""
    if failed or sizes_must_agree(call.name):
        return call.name, call.elements, call.dtype
    return (call.name,)


def _party(group: str, here: Mapping[int, Call], ranks: list[int], snapshots: InspectionSet) -> Party:
    rank = min(ranks, key=lambda rank: here[rank].returned)  # one that still waits in it, if there is one
    return Party(tuple(sorted(ranks)), group, as_op(here[rank], snapshots[rank]))


def as_op(call: Call, snapshot: RankInspection) -> Op:
    """Return the call in the form of a recorded operation."""
    backend = next((one.backend for one in snapshot.groups if one.name == call.group and one.backend), "gloo")
    sizes = ([call.elements],) if call.elements >= 0 else ()
    name, messages = f"{backend}:{call.name}", 0
    if call.name in MESSAGES:
        messages = call.count
        name += " from " if call.name in _RECEIVES else " to "
        name += f"rank {call.peer}" if call.peer is not None else "any rank"
    usual = _is_usual(call, snapshot)
    return Op(0, messages, name, sizes, call.returned, call.entered_ns, usual, call.frames, call.dtype)


def _is_usual(call: Call, snapshot: RankInspection) -> bool | None:
    """Is this call, from this line, what came next whenever the calls before were the same?"""
    path = [
        (one.group, _likeness(one, True), one.peer, one.where) for one in snapshot.calls if one.number <= call.number
    ]
    return is_usual_next(path[:-1], path[-1]) if path else None


def blocked_in(snapshot: RankInspection) -> Call | None:
    """Return the call that the rank is in, or the messages whose end it waits for; None if it is in none."""
    newest = snapshot.calls[-1] if snapshot.calls else None
    if newest is None or (newest.returned and newest.name not in ("isend", "irecv")):
        return None
    return newest


def message_waits(snapshots: InspectionSet) -> list[Wait]:
    """Return who waits for whose message: those that its peer has neither sent nor received.

    The n-th message from one rank to another pairs with the n-th that is received there. gloo's flight recorder knows no
    messages.
    """
    waits = []
    for rank, one in snapshots.items():
        if blocked_in(one) is None:
            continue
        newest = list(takewhile(lambda call: call.name in MESSAGES, reversed(one.calls)))
        missing = [call for call in newest if call.peer in snapshots and not _is_paired(rank, call, snapshots)]
        receives = [call for call in missing if call.name in _RECEIVES]
        for call in receives or missing:
            assert call.peer is not None
            waits.append(Wait(rank, call.peer, "peer", call.group, as_op(call, one)))
    return waits


def _is_paired(rank: int, call: Call, snapshots: InspectionSet) -> bool:
    assert call.peer is not None
    others = (other for other in snapshots[call.peer].calls if other.peer == rank and other.group == call.group)
    counts = (other.count for other in others if (other.name in _RECEIVES) != (call.name in _RECEIVES))
    return max(counts, default=0) >= call.count


def _collectives(snapshot: RankInspection) -> list[Call]:
    return [call for call in snapshot.calls if call.name not in _NOT_COLLECTIVE]
