"""The model's shape. `depth` is the one dial; what is given besides wins over what it derives."""

from __future__ import annotations

from stoker.contract import limits
from stoker.contract.shape import option, shape


@shape
class ModelConfig:
    load: str = option(
        "a folder (or hub id) with Llama or Qwen3 weights as transformers writes them: shape and weights come from"
        " there",
        default="",
        metavar="DIR",
    )
    depth: int = option(
        "the dial: layers, and 64 × as much width, heads of 64 or 128, ff 8/3 of the width (0: the keys below)",
        default=0,
        limit=limits.COUNT,
    )
    layers: int = option("decoder blocks", default=12, limit=limits.FROM_ONE)
    dim: int = option("width of the residual stream", default=768, limit=limits.FROM_ONE)
    heads: int = option("query heads", default=12, limit=limits.FROM_ONE)
    kv_heads: int = option("key and value heads (0: as many as query heads)", default=0, limit=limits.FROM_ONE)
    head_dim: int = option("width of a head (0: dim / heads)", default=0, limit=limits.COUNT)
    ff: int = option(
        "width of the feed-forward layer (0: 8/3 of dim, rounded up to 64)", default=0, limit=limits.FROM_ONE
    )
    vocab_size: int = option(
        "rows of the embedding (0: the tokenizer's, rounded up to 64)", default=0, limit=limits.COUNT
    )
    rope_theta: float = option("base of the rotary embedding", default=10000.0, limit=limits.POSITIVE)
    rope_factor: float = option(
        "Llama 3.1's stretching of low frequencies (1: none)", default=1.0, limit=limits.POSITIVE
    )
    rope_low: float = option(
        "frequencies with fewer turns than this in `rope_original` tokens are divided by the factor",
        default=1.0,
        limit=limits.POSITIVE,
    )
    rope_high: float = option(
        "frequencies with more turns than this stay as they are", default=4.0, limit=limits.POSITIVE
    )
    rope_original: int = option("context length before the stretching", default=8192, limit=limits.FROM_ONE)
    norm_eps: float = option("epsilon of RMSNorm", default=1e-6, limit=limits.POSITIVE)
    qk_norm: bool = option("normalise queries and keys, as Qwen3 does", default=False)
    tied: bool = option("one matrix for embedding and head", default=True)
    init_std: float = option(
        "standard deviation of fresh weights; projections into the residual stream get 1/√(2 × layers) of it",
        default=0.02,
        limit=limits.POSITIVE,
    )
    dropout: float = option(
        "share dropped in training: after the embedding, of the attention's weights, after each sub-layer",
        default=0.0,
        limit=limits.LESS_THAN_ALL,
    )
