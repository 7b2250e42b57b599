"""How answers are drawn."""

from __future__ import annotations

from stoker.contract.shape import option, shape


@shape
class GenerateConfig:
    new_tokens: int = option("an answer is cut after so many tokens", default=64)
    temperature: float = option("0: always the likeliest token", default=1.0)
    top_k: int = option("only the k likeliest tokens are drawn from (0: all)", default=0)
    top_p: float = option("only the likeliest tokens that together have this probability (1: all)", default=1.0)
    rows: int = option("answers that are written at once", default=64)
    system: str = option("a system message before each chat that has none: what form of answer is wanted, say", default="", metavar="TEXT")
