"""Two models compared by how varied their answers are."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.shape import option, shape


@shape
class DiversityConfig:
    prompts: str = option("jsonl rows with prompt", default="", metavar="PATH")
    baseline: str = option("folder of the model that is compared with", default="", metavar="DIR")
    compared: str = option("folder of the model trained with density weights", default="", metavar="DIR")
    most: int = option("prompts that are answered", default=64, limit=limits.FROM_ONE)
    answers: int = option("answers per prompt and model", default=8, limit=limits.FROM_TWO)
    clusters: int = option(
        "clusters of answers that Gini and entropy are counted over", default=16, limit=limits.FROM_ONE
    )
    rounds: int = option("bootstrap rounds", default=500, limit=limits.FROM_ONE)
