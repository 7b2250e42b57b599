"""What a model is asked: stages evaluate, density and diversity."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.frozen import frozen, option
from stoker.contract.limits import text_option


@frozen
class EvaluateConfig:
    tasks: tuple[str, ...] = option(
        "files of questions: jsonl with prompt and answer (and kind, alternatives), GSM8K's jsonl, ARC's jsonl or"
        " parquet, MMLU's csv or parquet",
        default=(),
        metavar="PATH",
        many=True,
    )
    most: int = limits.COUNT("most questions of each file, spread evenly over it (0: all)", 0)
    draws: int = limits.COUNT(
        "answers sampled per question at generate.temperature, besides the greedy one (0: greedy only)", 0
    )
    texts: str = text_option("PATH")("a text to measure bits per byte on (empty: none)")
    chat: bool = option("ask as a chat; off: the question as plain text, for base models", default=True)
    shots: int = limits.COUNT("examples before a plain question", 0)


@frozen
class DensityConfig:
    prompts: str = text_option("PATH")("jsonl rows with prompt")
    neighbours: int = limits.FROM_ONE("k of the k nearest neighbours", 16)
    power: float = limits.NOT_NEGATIVE("a weight is (1 / density) to this power: 0 makes all equal", 1.0)
    most: float = limits.FROM_ONE("no weight above this multiple of the mean", 5.0)
    clusters: int = limits.FROM_ONE("clusters for the report", 16)


@frozen
class DiversityConfig:
    prompts: str = text_option("PATH")("jsonl rows with prompt")
    baseline: str = text_option("DIR")("folder of the baseline model")
    compared: str = text_option("DIR")("folder of the model trained with density weights")
    most: int = limits.FROM_ONE("prompts to answer", 64)
    answers: int = limits.FROM_TWO("answers per prompt and model", 8)
    clusters: int = limits.FROM_ONE("clusters of answers for Gini and entropy", 16)
    rounds: int = limits.FROM_ONE("bootstrap rounds", 500)
