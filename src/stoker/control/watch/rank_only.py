"""A collective that some ranks alone have entered, because the call depends on the rank: `if rank == 0: save_model()`. Pure.

Proof are the source and the stacks together: a line of these ranks is inside a condition on the rank, and no line of the
ranks they wait for is, in either branch of it. Those are in another collective, or have ended: they will not come.
"""

from __future__ import annotations

from stoker.contract.evidence import Stall
from stoker.contract.frozen import frozen, replace
from stoker.contract.units import format_ranks
from stoker.control.watch import call_paths, stack_frames
from stoker.control.watch.rank_inspection import Condition, Frame, InspectionSet, RankInspection


@frozen
class Found:
    ranks: tuple[int, ...]
    frame: Frame  # the line inside the condition
    condition: Condition


def instead(stall: Stall, snapshots: InspectionSet, entered: tuple[int, ...], others: tuple[int, ...]) -> Stall:
    """The stall as it is, or as this one. `entered`: ranks that wait in one operation; `others`: whom they wait for."""
    found = _found(snapshots, entered, others)
    if found is None:
        return stall
    where = f"it is inside `{found.condition.text}` (line {found.condition.line})"
    line = f"{format_ranks(found.ranks)} alone came to {found.frame}: {where}, and {format_ranks(others)} {'is' if len(others) == 1 else 'are'} not"
    return replace(
        stall, kind="rank-only", rank=found.ranks[0], ranks=found.ranks, waiting=others, where=str(found.frame),
        detail=found.condition.text, proof=True, evidence=(line, *stall.evidence),
    )  # fmt: skip


def _found(snapshots: InspectionSet, entered: tuple[int, ...], others: tuple[int, ...]) -> Found | None:
    if not entered or not others or any(rank not in snapshots for rank in entered):
        return None
    first = snapshots[entered[0]]
    call = call_paths.blocked_in(first)
    if call is not None and call.name in call_paths.MESSAGES:  # a send or receive is for one rank to make
        return None
    for frame in first.main:
        for condition in reversed(frame.conditions) if stack_frames.is_users(frame) else ():
            inside = all(_depends(snapshots[rank], frame, condition) for rank in entered)
            outside = not any(_depends(snapshots[rank], frame, condition) for rank in others if rank in snapshots)
            if inside and outside:
                return Found(entered, frame, condition)
    return None


def _depends(one: RankInspection, frame: Frame, condition: Condition) -> bool:
    """On the same condition, in any branch."""
    return any(
        frame.file == other.file and any(condition.line == theirs.line for theirs in other.conditions)
        for other in one.main
    )
