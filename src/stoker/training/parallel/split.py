"""Who computes which samples of a step. Pure.

Shares differ by one at most, or are as a plan says (balance/plan.py). Each rank pads its last micro-batch with samples
whose targets are masked: every micro-batch has one shape; the loss is weighted by tokens, of which padding has none.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.contract.names import EX_USAGE, Refusal
from stoker.contract.shape import shape


@shape
class Share:
    """One rank's part of a step: samples [begin, end) of the step's, in micro-batches of `micro`."""

    begin: int
    end: int
    micro: int
    micro_steps: int

    def rows(self, index: int) -> tuple[int, int]:
        """Of micro-step `index`, as offsets within the step; may be empty (all padding)."""
        begin = min(self.begin + index * self.micro, self.end)
        return begin, min(begin + self.micro, self.end)


def split(samples: int, ranks: int, rank: int, micro: int, equal_steps: bool) -> Share:
    """`equal_steps`: as many micro-steps on every rank, for FSDP. At least one on each: DDP's exchange needs all."""
    base, more = divmod(samples, ranks)
    begin = rank * base + min(rank, more)
    end = begin + base + (rank < more)
    most = base + (more > 0) if equal_steps else end - begin
    return Share(begin, end, micro, max(-(-most // micro), 1))


def cut(shares: Sequence[int], rank: int, micro: int) -> Share:
    """The same for shares that a plan gives."""
    begin = sum(shares[:rank])
    return Share(begin, begin + shares[rank], micro, max(-(-shares[rank] // micro), 1))


def largest_share(samples: int, ranks: int) -> int:
    """Samples of the rank that has most; refuses a batch that leaves ranks without any."""
    if samples < ranks:
        raise Refusal(
            f"a batch of {samples} sample{'s' if samples > 1 else ''} can't be split over {ranks} ranks: raise"
            f" batch.tokens to at least {ranks} × the context length, or use {samples}"
            f" rank{'s' if samples > 1 else ''}",
            EX_USAGE,
        )
    return -(-samples // ranks)


def even_micro(share: int, most: int) -> int:
    """The micro-batch up to `most` that wastes least: 12 samples with room for 8 are 2 × 6, not 8 + 4 and padding."""
    return -(-share // -(-share // most))
