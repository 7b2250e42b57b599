"""Pairs of answers, one better than the other."""

from __future__ import annotations

from stoker.contract.shape import option, shape


@shape
class RewardConfig:
    pairs: str = option(
        "rows with chosen and rejected, and prompt where these don't hold it: hh-rlhf's and UltraFeedback's files work",
        default="",
        metavar="PATH",
    )
    likelihood: bool = option(
        "the answer's own log-probability adds to its score, with a weight that is learned", default=True
    )
    held_out: str = option("pairs to measure by; empty: the last tenth of `pairs`", default="", metavar="PATH")
