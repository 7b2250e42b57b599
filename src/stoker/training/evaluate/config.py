"""What a model is asked."""

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
