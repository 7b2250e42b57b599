"""Whether gradients of a model in shards wait whole for the last micro-batch of a step, or are exchanged with each. Pure."""

from __future__ import annotations

from stoker.contract.frozen import frozen, replace
from stoker.contract.units import format_bytes
from stoker.training.fit.block import WIDE
from stoker.training.fit.footprint import Footprint
from stoker.training.fit.plan import MOST, last
from stoker.training.fit.sharded import GATHERS, gathered
from stoker.training.fit.terms import Job, reserved


@frozen
class Accumulation:
    whole: bool
    why: str


def choose(footprint: Footprint, job: Job, room: int, share: int, micro: int) -> Accumulation:
    """What sends less. `room`: bytes that a rank can use; `share`: its samples between two updates; `micro`: how many at
    once, 0: as many as fit. Whole gradients may leave room for smaller micro-batches only, which gather more often."""
    assert footprint.described is not None
    needs = {}

    def fits(size: int, whole: bool) -> bool:
        planned = footprint.planned(replace(job, micro=size, whole=whole, accumulates=size < share))
        needs[whole] = reserved(planned.total)
        return needs[whole] <= room

    def largest(whole: bool) -> int:
        if not fits(micro or 1, whole):
            return 0
        return micro or last(1, min(share, MOST), lambda size: fits(size, whole))

    sizes = {whole: largest(whole) for whole in (False, True)}
    if not sizes[True]:
        return Accumulation(False, f"whole ones need {format_bytes(needs[True])}, and {format_bytes(room)} can be used")
    weights = gathered(footprint.described).every(footprint.config.layers)
    sent = {}
    for whole, size in sizes.items():
        steps = -(-share // max(size, 1))
        sent[whole] = steps * GATHERS * weights + (1 if whole else steps) * WIDE * footprint.described.trained
    if sent[True] >= sent[False]:
        return Accumulation(False, "exchanging them once a step would not send less")
    return Accumulation(True, f"they fit, and a step sends {1 - sent[True] / sent[False]:.0%} less")
