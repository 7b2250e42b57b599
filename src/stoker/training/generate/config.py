"""How answers are sampled."""

from __future__ import annotations

from stoker.contract.shape import option, shape


@shape
class GenerateConfig:
    new_tokens: int = option("an answer is cut after so many tokens; the report counts the cut ones", default=128)
    temperature: float = option("0: greedy, always the most likely token", default=1.0)
    top_k: int = option("sample only from the k most likely tokens (0: all)", default=0)
    top_p: float = option(
        "sample only from the most likely tokens that together have this probability (1: all)", default=1.0
    )
    rows: int = option("answers that are written at once", default=64)
    system: str = option(
        "a system message before each chat that has none: what form of answer is wanted, say",
        default="",
        metavar="TEXT",
    )
