"""Finds a collective that only some ranks entered because the call depends on the rank: `if rank == 0: save()`.

The source and the stacks prove it: a line of these ranks is inside a condition on the rank, and the ranks they wait for are
in no branch of it. Those are in another collective or have ended, so they will not make the call. It does no I/O.
"""

from __future__ import annotations

from stoker.contract.evidence import Stall
from stoker.contract.frozen import replace
from stoker.contract.units import format_ranks
from stoker.control.watch import call_paths, stack_frames
from stoker.control.watch.rank_inspection import Condition, Frame, InspectionSet, RankInspection


def refine_as_rank_only(
    stall: Stall, inspections: InspectionSet, entered: tuple[int, ...], others: tuple[int, ...]
) -> Stall:
    """Return the stall with kind rank-only if that can be proved, else unchanged.

    `entered` are the ranks that wait in one operation, `others` the ranks they wait for.
    """
    match = _find_condition(inspections, entered, others)
    if match is None:
        return stall
    frame, condition = match
    are = "is" if len(others) == 1 else "are"
    line = (
        f"only {format_ranks(entered)} reached {frame}: it is inside `{condition.text}` (line {condition.line}),"
        f" and {format_ranks(others)} {are} not"
    )
    return replace(
        stall, kind="rank-only", rank=entered[0], ranks=entered, waiting=others, where=str(frame),
        detail=condition.text, proof=True, evidence=(line, *stall.evidence),
    )  # fmt: skip


def _find_condition(
    inspections: InspectionSet, entered: tuple[int, ...], others: tuple[int, ...]
) -> tuple[Frame, Condition] | None:
    """Return the innermost line inside a condition that all of `entered` and none of `others` are in, with it, or None."""
    if not entered or not others or any(rank not in inspections for rank in entered):
        return None
    first = inspections[entered[0]]
    call = call_paths.find_blocking_call(first)
    if call is not None and call.name in call_paths.MESSAGES:  # a send or receive is meant for one rank
        return None
    for frame in first.main:
        for condition in reversed(frame.conditions) if stack_frames.is_script(frame) else ():
            all_inside = all(_is_inside(inspections[rank], frame, condition) for rank in entered)
            if all_inside and not any(
                _is_inside(inspections[rank], frame, condition) for rank in others if rank in inspections
            ):
                return frame, condition
    return None


def _is_inside(inspection: RankInspection, frame: Frame, condition: Condition) -> bool:
    """Return whether the rank's main thread is in any branch of the condition."""
    return any(
        frame.file == other.file and any(condition.line == branch.line for branch in other.conditions)
        for other in inspection.main
    )
