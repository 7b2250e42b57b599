"""Pairs of answers, one better than the other: stages reward and dpo."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.frozen import frozen, option
from stoker.contract.limits import choice, text_option


@frozen
class RewardConfig:
    pairs: str = text_option("PATH")(
        "rows with chosen and rejected, and prompt where these don't hold it: hh-rlhf's and UltraFeedback's files work; "
        "--data names it, too"
    )
    likelihood: bool = option(
        "the answer's own log-probability adds to its score, with a weight that is learned", default=True
    )
    held_out: str = text_option("PATH")("pairs to measure by; empty: the last tenth of `pairs`")


@frozen
class DpoConfig:
    pairs: str = text_option("PATH")(
        "rows with chosen and rejected, and prompt where these don't hold it: hh-rlhf's and UltraFeedback's files work; "
        "--data names it, too"
    )
    held_out: str = text_option("PATH")("pairs to measure by; empty: the last tenth of `pairs`")
    beta: float = limits.POSITIVE("how strongly the model is held to the one it began with: more stays closer", 0.1)
    loss: str = choice("sigmoid", "ipo")(
        "sigmoid: -log σ(margin); ipo: (margin / beta - 1 / 2 beta)², which keeps pairs that are already clear from growing for ever"
    )
    length_normalised: bool = option(
        "log-probabilities per token of the answer: longer answers are not preferred for their length", default=False
    )
