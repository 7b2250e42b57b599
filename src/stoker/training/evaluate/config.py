"""What a model is asked: stages evaluate, density and diversity."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.shape import option, shape


@shape
class EvaluateConfig:
    tasks: tuple[str, ...] = option(
        "files of questions: jsonl with prompt and answer (and kind, alternatives), GSM8K's jsonl, ARC's jsonl or"
        " parquet, MMLU's csv or parquet",
        default=(),
        metavar="PATH",
        many=True,
    )
    most: int = option("questions of each file at most, spread evenly over it (0: all)", default=0, limit=limits.COUNT)
    draws: int = option(
        "answers sampled per question at generate.temperature, beside the greedy one (0: only that)",
        default=0,
        limit=limits.COUNT,
    )
    texts: str = option("text whose bits per byte are measured (empty: none)", default="", metavar="PATH")
    chat: bool = option("ask as a chat; off: the question as plain text, for base models", default=True)
    shots: int = option("examples before a plain question", default=0, limit=limits.COUNT)


@shape
class DensityConfig:
    prompts: str = option("jsonl rows with prompt", default="", metavar="PATH")
    neighbours: int = option("the k of the nearest neighbours", default=16, limit=limits.FROM_ONE)
    power: float = option(
        "a weight is (1 / density) to this power: 0 makes all alike", default=1.0, limit=limits.NOT_NEGATIVE
    )
    most: float = option("no weight above this multiple of the mean", default=5.0, limit=limits.FROM_ONE)
    clusters: int = option("clusters the report counts over", default=16, limit=limits.FROM_ONE)


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
