"""Weights of prompts by how crowded their neighbourhood is."""

from __future__ import annotations

from stoker.contract.shape import option, shape


@shape
class DensityConfig:
    prompts: str = option("jsonl rows with prompt", default="", metavar="PATH")
    neighbours: int = option("the k of the nearest neighbours", default=16)
    power: float = option("a weight is (1 / density) to this power: 0 makes all alike", default=1.0)
    most: float = option("no weight above this multiple of the mean", default=5.0)
    clusters: int = option("clusters the report counts over", default=16)
