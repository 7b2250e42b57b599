"""Finds the first call of a process group in which its members differ, in the ranks' logs of torch.distributed calls.

The n-th collective of a group must be the same call on all of its members. The log has the line of the caller and survives
an abort, so it also covers ranks whose flight recorder is lost. It lacks operations that torch starts in C++ (DDP's
gradients). It does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from stoker.contract.flight_recorder import is_usual_next, sizes_must_agree
from stoker.control.watch.rank_inspection import Call, InspectionSet, Op, Party, RankInspection, Wait

_RECEIVES = ("irecv", "recv")
MESSAGES = ("irecv", "isend", "recv", "send")
_NOT_COLLECTIVE = (*MESSAGES, "new_group")


def find_first_difference(inspections: InspectionSet) -> list[Party]:
    """Return the parties of the first call in which ranks differ and that blocked a rank, or []."""
    collectives = {
        rank: [call for call in inspection.calls if call.name not in _NOT_COLLECTIVE]
        for rank, inspection in inspections.items()
    }
    for group in dict.fromkeys(call.group for calls in collectives.values() for call in calls if call.group):
        by_rank = {
            rank: {call.count: call for call in calls if call.group == group} for rank, calls in collectives.items()
        }
        parties = _compare(group, {rank: calls for rank, calls in by_rank.items() if calls}, inspections)
        if parties:
            return parties
    return []


def _compare(group: str, by_rank: Mapping[int, Mapping[int, Call]], inspections: InspectionSet) -> list[Party]:
    """Compare the ranks' calls of one group, given as rank -> count -> call."""
    if len(by_rank) < 2:
        return []
    # Skip calls that newer ones have overwritten in the log of any rank.
    first = max(min(calls) for calls in by_rank.values())
    last = max(max(calls) for calls in by_rank.values())
    for count in range(first, last + 1):
        calls_now = {rank: calls[count] for rank, calls in by_rank.items() if count in calls}
        if all(call.returned for call in calls_now.values()):
            continue  # the calls are the same, or differ by design
        failed = any(inspections[rank].state == "Z" for rank in calls_now)
        by_call: dict[tuple[object, ...], list[int]] = {}
        for rank, call in calls_now.items():
            by_call.setdefault(_call_signature(call, failed), []).append(rank)
        if len(by_call) > 1:
            return [_make_party(group, calls_now, ranks, inspections) for ranks in by_call.values()]
    return []


def _call_signature(call: Call, failed: bool) -> tuple[object, ...]:
    """Return the properties of a call that must be equal on all ranks. If it `failed` on a rank, all of them are compared."""
    if failed or sizes_must_agree(call.name):
        return call.name, call.elements, call.dtype
    return (call.name,)


def _make_party(group: str, calls: Mapping[int, Call], ranks: list[int], inspections: InspectionSet) -> Party:
    rank = min(ranks, key=lambda rank: calls[rank].returned)  # a rank that still waits in the call, if there is one
    return Party(tuple(sorted(ranks)), group, as_op(calls[rank], inspections[rank]))


def as_op(call: Call, inspection: RankInspection) -> Op:
    """Return the call in the form of a recorded operation."""
    backend = next((group.backend for group in inspection.groups if group.name == call.group and group.backend), "gloo")
    sizes = ([call.elements],) if call.elements >= 0 else ()
    name, p2p = f"{backend}:{call.name}", 0
    if call.name in MESSAGES:
        p2p = call.count
        name += " from " if call.name in _RECEIVES else " to "
        name += f"rank {call.peer}" if call.peer is not None else "any rank"
    usual = _is_usual(call, inspection)
    return Op(0, p2p, name, sizes, call.returned, call.entered_ns, usual, call.frames, call.dtype)


def _is_usual(call: Call, inspection: RankInspection) -> bool | None:
    """Return whether this call from this line followed the same calls before, or None if no calls have repeated yet."""
    path = [
        (entry.group, _call_signature(entry, True), entry.peer, entry.where)
        for entry in inspection.calls
        if entry.number <= call.number
    ]
    return is_usual_next(path[:-1], path[-1]) if path else None


def find_blocking_call(inspection: RankInspection) -> Call | None:
    """Return the call that the rank is in, or the newest isend or irecv, which it may be waiting for, or None."""
    newest = inspection.calls[-1] if inspection.calls else None
    if newest is None or (newest.returned and newest.name not in ("isend", "irecv")):
        return None
    return newest


def find_message_waits(inspections: InspectionSet) -> list[Wait]:
    """Return an edge for each message that a blocked rank waits for and that its peer has neither sent nor received.

    The n-th message from one rank to another pairs with the n-th one received there. gloo's flight recorder does not
    record messages.
    """
    waits = []
    for rank, inspection in inspections.items():
        if find_blocking_call(inspection) is None:
            continue
        newest = list(takewhile(lambda call: call.name in MESSAGES, reversed(inspection.calls)))
        missing = [call for call in newest if call.peer in inspections and not _is_paired(rank, call, inspections)]
        receives = [call for call in missing if call.name in _RECEIVES]
        for call in receives or missing:
            assert call.peer is not None
            waits.append(Wait(rank, call.peer, "peer", call.group, as_op(call, inspection)))
    return waits


def _is_paired(rank: int, call: Call, inspections: InspectionSet) -> bool:
    assert call.peer is not None
    peer_calls = (other for other in inspections[call.peer].calls if other.peer == rank and other.group == call.group)
    counts = (other.count for other in peer_calls if (other.name in _RECEIVES) != (call.name in _RECEIVES))
    return max(counts, default=0) >= call.count
