"""All ranks' reports in, one line out: where it began, and on which rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.contract.shape import shape
from stoker.training.forensics import report as phases
from stoker.training.forensics.report import PHASES, Report, guilty
from stoker.training.forensics.wording import place, samples


class NonFinite(RuntimeError):
    """A step's loss or gradient is no number. Its message is the summary that all ranks agree on."""


@shape
class Culprits:
    ranks: tuple[int, ...]  # empty: nobody's replay went wrong
    summary: str


def decide(reports: Sequence[Report]) -> Culprits:
    """A bad forward comes before a bad backward, and that before what only came in through the reduction."""
    ordered = sorted(reports, key=lambda one: one.rank)
    step = ordered[0].step
    worst = min((PHASES.index(one.phase) for one in ordered if guilty(one)), default=None)
    if worst is None:
        return Culprits((), f"step {step}: {_nobody(ordered)}")
    first = [one for one in ordered if PHASES.index(one.phase) == worst]
    ranks = tuple(one.rank for one in first)
    return Culprits(
        ranks, f"step {step}: {_what(first[0])} {_ranks(ranks, ordered[0].world)}{_ids(first)}{_others(first)}"
    )


def _what(one: Report) -> str:
    if one.phase == phases.TARGETS:
        return "every target is masked, the loss is a mean over no tokens"
    if one.phase == phases.NORM:
        return f"the gradient norm overflows though every gradient is finite, the largest is in {one.parameter},"
    return f"{one.what} first in {place(one)}"


def _ranks(ranks: tuple[int, ...], world: int) -> str:
    if len(ranks) == world and world > 1:
        return f"on rank {ranks[0]} and all others"
    return f"on rank {ranks[0]}" if len(ranks) == 1 else f"on ranks {', '.join(str(rank) for rank in ranks)}"


def _ids(first: list[Report]) -> str:
    told = [(one.rank, samples(one.sample_ids)) for one in first if one.sample_ids]
    if len(first) == 1 and told:
        return f", {told[0][1]}"
    return "".join(f"{';' if number else ','} {words} (rank {rank})" for number, (rank, words) in enumerate(told[:4]))


def _others(first: list[Report]) -> str:
    """The same kind of failure elsewhere, on another rank: said once, for the first that differs."""
    other = next(
        (
            one
            for one in first[1:]
            if (one.op, one.module, one.parameter) != (first[0].op, first[0].module, first[0].parameter)
        ),
        None,
    )
    if other is None or other.phase in (phases.TARGETS, phases.NORM):
        return ""
    return f"; on rank {other.rank} in {place(other)}"


def _nobody(reports: list[Report]) -> str:
    one = reports[0]
    numbers = f"loss {one.loss:.6g}, gradient norm {one.grad_norm:.6g}"
    raised = [report for report in reports if report.phase == phases.FAILED]
    if raised:
        return (
            f"{numbers}, and the replay failed on rank {raised[0].rank}: {raised[0].problem.strip().splitlines()[-1]}"
        )
    return (
        f"{numbers}, not reproduced in the replay: a transient hardware error, a nondeterministic kernel or the"
        " compiled code"
    )
