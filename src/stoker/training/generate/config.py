"""How answers are sampled."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.shape import option, shape


@shape
class GenerateConfig:
    new_tokens: int = option(
        "an answer is cut after so many tokens; the report counts the cut ones", default=128, limit=limits.FROM_ONE
    )
    temperature: float = option("0: greedy, always the most likely token", default=1.0, limit=limits.NOT_NEGATIVE)
    top_k: int = option("sample only from the k most likely tokens (0: all)", default=0, limit=limits.COUNT)
    top_p: float = option(
        "sample only from the most likely tokens that together have this probability (1: all)",
        default=1.0,
        limit=limits.SHARE,
    )
    rows: int = option("answers that are written at once", default=64, limit=limits.FROM_ONE)
    system: str = option(
        "a system message before each chat that has none: what form of answer is wanted, say",
        default="",
        metavar="TEXT",
    )
