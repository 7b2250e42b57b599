"""Weights of prompts by how crowded their neighbourhood is."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.shape import option, shape


@shape
class DensityConfig:
    prompts: str = option("jsonl rows with prompt", default="", metavar="PATH")
    neighbours: int = option("the k of the nearest neighbours", default=16, limit=limits.FROM_ONE)
    power: float = option(
        "a weight is (1 / density) to this power: 0 makes all alike", default=1.0, limit=limits.NOT_NEGATIVE
    )
    most: float = option("no weight above this multiple of the mean", default=5.0, limit=limits.FROM_ONE)
    clusters: int = option("clusters the report counts over", default=16, limit=limits.FROM_ONE)
