"""Group-relative policy optimisation. train.max_steps counts batches of answers."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.shape import option, shape


@shape
class GrpoConfig:
    prompts: str = option(
        "jsonl rows with prompt (a text, or messages) and answer; GSM8K's question and answer work too",
        default="",
        metavar="PATH",
    )
    weights: str = option(
        "how often each prompt is sampled: weights.jsonl of the density stage (empty: all alike)",
        default="",
        metavar="PATH",
    )
    reward_model: str = option(
        "folder of the reward stage's model (empty: only the answer counts)", default="", metavar="DIR"
    )
    reward_weight: float = option(
        "how much the reward model's score adds to a right answer's 1", default=0.1, limit=limits.NOT_NEGATIVE
    )
    prompts_per_step: int = option(
        "prompts a step, all ranks together; any number of ranks may share them", default=32, limit=limits.FROM_ONE
    )
    group: int = option("answers per prompt", default=8, limit=limits.FROM_TWO)
    updates: int = option("optimizer steps per batch of answers", default=1, limit=limits.FROM_ONE)
    clip_ratio: float = option(
        "the ratio of new to old probability counts up to 1 ± this", default=0.2, limit=limits.POSITIVE
    )
    kl: float = option("weight of the divergence from the model it began with", default=0.02, limit=limits.NOT_NEGATIVE)
    scale_by_deviation: bool = option("advantages are divided by the group's standard deviation", default=True)
    breaker_steps: int = option(
        "stop after so many steps of a constant reward, with no answer right, or with every answer cut; all right for"
        " so long ends it as done (0: never)",
        default=10,
        limit=limits.COUNT,
    )
    breaker_kl: float = option("stop where the divergence stays above this", default=10.0, limit=limits.NOT_NEGATIVE)
    breaker_entropy: float = option(
        "stop where the entropy per token stays below this", default=0.001, limit=limits.NOT_NEGATIVE
    )
    breaker_length: float = option(
        "stop where answers stay shorter than this share of those at the beginning", default=0.1, limit=limits.SHARE
    )
