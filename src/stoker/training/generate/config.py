"""How answers are sampled."""

from __future__ import annotations

from typing import Any

from stoker.contract import limits
from stoker.contract.limits import one_of, text
from stoker.contract.shape import shape


@shape
class GenerateConfig:
    new_tokens: int = limits.FROM_ONE("an answer is cut after so many tokens; the report counts the cut ones", 128)
    temperature: float = limits.NOT_NEGATIVE("0: greedy, always the most likely token", 1.0)
    top_k: int = limits.COUNT("sample only from the k most likely tokens (0: all)", 0)
    top_p: float = limits.SHARE(
        "sample only from the most likely tokens that together have this probability (1: all)", 1.0
    )
    rows: int = limits.FROM_ONE("answers that are written at once", 64)
    bits: str = one_of("auto", "16", "4")(
        "of a weight while answers are written; 4: NF4, a quarter of the memory; auto: 4 only where 16 don't fit on the GPU"
    )
    system: str = text("TEXT")("a system message before each chat that has none: what form of answer is wanted, say")

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
