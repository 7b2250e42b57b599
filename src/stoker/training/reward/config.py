"""Pairs of answers, one better than the other: stages reward and dpo."""

from __future__ import annotations

from stoker.contract import limits
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


@shape
class DpoConfig:
    pairs: str = option(
        "rows with chosen and rejected, and prompt where these don't hold it: hh-rlhf's and UltraFeedback's files work",
        default="",
        metavar="PATH",
    )
    held_out: str = option("pairs to measure by; empty: the last tenth of `pairs`", default="", metavar="PATH")
    beta: float = option(
        "how strongly the model is held to the one it began with: more stays closer", default=0.1, limit=limits.POSITIVE
    )
    loss: str = option(
        "sigmoid: -log σ(margin); ipo: (margin / beta - 1 / 2 beta)², which keeps sure pairs from growing without end",
        default="sigmoid",
        choices=("sigmoid", "ipo"),
    )
    length_normalised: bool = option(
        "log-probabilities per token of the answer: longer answers are not preferred for their length", default=False
    )
