"""How answers are sampled."""

from __future__ import annotations

from typing import Any

from stoker.contract import limits
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.limits import choice, text_option
from stoker.training.model.config import ModelConfig, lacking

BLOCK = 16  # tokens of a batch's cache that are shared and given back together
TURN = 16  # tokens of each answer that a GPU writes before the host looks at them
BUCKET = 128  # slots: without our kernels a step attends over a multiple of this, and each multiple is a graph
TEMPERATURES = (1e-3, 1e3)  # beyond them, logits over a temperature are no 32-bit numbers any more
PREFILL_TOKENS = 1 << 15  # at once on a GPU: 400 MB of activations in a feed-forward layer of 3,072
# Options of the block that the Triton kernels compute, or that lie beside them.
KERNELS = (
    "qkv_bias", "out_bias", "mlp_bias", "norm_offset", "activation", "gated", "attention_scale", "embedding_scale", "final_cap", "rope_kind", "unrotated",
    "window_theta", "positions", "experts",
)  # fmt: skip


@frozen
class GenerateConfig:
    new_tokens: int = limits.FROM_ONE("an answer has at most this many tokens", 128)
    temperature: float = limits.NOT_NEGATIVE("0: greedy, always the most likely token", 1.0)
    top_k: int = limits.COUNT("sample only from the k most likely tokens (0: all)", 0)
    top_p: float = limits.FRACTION(
        "sample only from the most likely tokens that together have this probability (1: all)", 1.0
    )
    rows: int = limits.FROM_ONE("answers written at once", 64)
    bits: str = choice("auto", "16", "4")(
        "bits per weight while answers are written; 4: NF4, a quarter of the memory; auto: 4 only if 16 don't fit on the GPU"
    )
    system: str = text_option("TEXT")(
        "system message for chats that have none, for example the form of answer you want"
    )

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


@frozen
class Sampling:
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # 1: all

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Nothing is left out."""
        return self.top_k == 0 and self.top_p >= 1.0


def checked(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Sampling:
    low, high = TEMPERATURES
    if temperature and not low <= temperature <= high:
        raise Refusal(f"temperature {temperature:g} is out of range: use 0 (greedy), or {low:g} to {high:g}", EX_USAGE)
    if top_k < 0 or not 0.0 < top_p <= 1.0:
        raise Refusal(
            f"top_k {top_k}, top_p {top_p:g} is out of range: top_k is 0 (all) or more, top_p is above 0 and at most 1",
            EX_USAGE,
        )
    return Sampling(temperature, top_k, top_p)


def kernels_lack(c: ModelConfig, length: int) -> str:
    """What the Triton kernels don't compute of this model, in words; empty: nothing. `length`: of prompt and answer."""
    if all(not window or window >= length for window in c.windows):
        c = replace(c, windows=())  # none is ever left
    if c.head_dim < 16 or c.head_dim & (c.head_dim - 1):
        return f"heads of {c.head_dim}"
    return lacking(c, KERNELS)
