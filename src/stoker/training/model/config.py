"""The model's shape, without torch: what a user sets, and which options of the block its family uses.

`depth` is the one dial; what is given besides wins over what it derives. The three executions (plain, fused, cached)
read this one description. A field without `option` is no setting: a family sets it (docs/families.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from stoker.contract import limits
from stoker.contract.errors import EX_CONFIG, Refusal
from stoker.contract.frozen import fields_of, frozen, option, replace
from stoker.contract.limits import choice, text_option


@frozen
class ModelConfig:
    load: str = text_option("DIR")(
        "the model to start from: a folder as transformers writes it, a run (name, id, latest) or a hub id"
    )
    engine: str = choice("auto", "native", "transformers")(
        "who computes: native (ours), transformers (its own module: slower, trains any causal model it has), auto (ours"
        " where the architecture is known)"
    )
    trust_remote_code: bool = option(
        "run Python code that comes with the model's folder (engine transformers); only for folders you trust",
        default=False,
    )
    depth: int = limits.COUNT(
        "the dial: layers, and 64 × as much width, heads of 64 or 128, ff 8/3 of the width (0: the keys below)", 0
    )
    layers: int = limits.FROM_ONE("decoder blocks", 12)
    dim: int = limits.FROM_ONE("width of the residual stream", 768)
    heads: int = limits.FROM_ONE("query heads", 12)
    kv_heads: int = limits.FROM_ONE("key and value heads (0: as many as query heads)", 0)
    head_dim: int = limits.COUNT("width of a head (0: dim / heads)", 0)
    ff: int = limits.FROM_ONE("width of the feed-forward layer (0: 8/3 of dim, rounded up to 64)", 0)
    vocab_size: int = limits.COUNT("rows of the embedding (0: the tokenizer's, rounded up to 64)", 0)
    rope_theta: float = limits.POSITIVE("base of the rotary embedding", 10000.0)
    rope_factor: float = limits.POSITIVE("how far low frequencies of the rotary embedding are stretched (1: not)", 1.0)
    rope_low: float = limits.POSITIVE(
        "frequencies with fewer turns than this in `rope_original` tokens are divided by the factor", 1.0
    )
    rope_high: float = limits.POSITIVE("frequencies with more turns than this stay as they are", 4.0)
    rope_original: int = limits.FROM_ONE("context length before the stretching", 8192)
    norm_eps: float = limits.POSITIVE("epsilon of RMSNorm", 1e-6)
    qk_norm: bool = option("normalise queries and keys, head by head", default=False)
    tied: bool = option("one matrix for embedding and head", default=True)
    init_std: float = limits.POSITIVE(
        "standard deviation of fresh weights; projections into the residual stream get 1/√(2 × layers) of it", 0.02
    )
    dropout: float = limits.FRACTION_BELOW_ONE(
        "share dropped in training: after the embedding, of the attention's weights, after each sub-layer", 0.0
    )

    family: str = ""  # of the folder it was loaded from: an export is written as that again
    stored: int = 0  # parameters in that folder, where transformers computes it: `rows` can't count those
    longest: int = 0  # max_position_embeddings of that folder: an export does not lower it
    kept: str = ""  # JSON of that config.json's keys that no field stands for: an export has them again
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm_whole: bool = False  # with qk_norm: over all heads together
    norm_kind: str = "rms"  # rms, or layer: mean and bias, too
    norms: str = "pre"  # pre: before attention and MLP; post: after each; both
    norm_offset: float = 0.0  # a norm multiplies by offset + weight
    activation: str = "silu"
    gated: bool = True  # activation(gate) · up, or activation(up) alone
    attention_scale: float = 0.0  # of the scores (0: 1/√head_dim)
    attention_cap: float = 0.0  # scores become cap · tanh(score / cap) (0: they stay)
    final_cap: float = 0.0  # the same for logits
    embedding_scale: float = 1.0
    windows: tuple[int, ...] = ()  # of each layer: how many tokens it sees, itself included; 0: all
    positions: str = "rotary"  # rotary, or learned: a row is added to the embedding
    position_rows: int = 0  # of a learned position embedding
    # What rope_factor stretches. bands: low frequencies, by turns from rope_low to rope_high; yarn: the same with a ramp
    # over dimensions; linear: all; longrope: each by its own number of rope_short or, beyond rope_original tokens, rope_long.
    rope_kind: str = "bands"
    rope_attention: float = 1.0  # cosines and sines are multiplied by it
    rope_truncate: bool = True  # yarn: the ramp begins and ends at whole dimensions
    rope_short: tuple[float, ...] = ()
    rope_long: tuple[float, ...] = ()
    rope_share: float = 1.0  # of each head that is turned, from its start
    unrotated: tuple[int, ...] = ()  # layers that turn nothing
    window_theta: float = 0.0  # rope_theta of layers with a window, unstretched (0: as elsewhere)
    experts: int = 0
    experts_per_token: int = 0
    expert_ff: int = 0
    shared_experts: int = 0
    dense: tuple[int, ...] = ()  # layers of a model with experts that have one MLP all the same
    router_sum: bool = True  # the chosen experts' shares are made to add up to 1
    router_aux: float = 0.0  # weight of the load-balancing loss in training

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def routed(self, layer: int) -> bool:
        """Whether the layer's MLP is a choice of experts."""
        return self.experts > 0 and layer not in self.dense


OFF, LORA, QLORA = "off", "lora", "qlora"
EVERY = "all-linear"


@frozen
class AdapterConfig:
    method: str = choice(OFF, LORA, QLORA)(
        "off: all weights learn; lora: small matrices beside frozen weights; qlora: frozen weights in 4 bits (NF4)"
    )
    lora_rank: int = limits.Range(1, 4096)("width of an adapter", 16)
    lora_alpha: float = limits.POSITIVE("an adapter's product counts alpha / rank times", 32.0)
    lora_targets: str = option(
        "which linear layers get one: all-linear, or names as in the model's folder: q_proj,v_proj", default=EVERY
    )
    lora_dropout: float = limits.FRACTION_BELOW_ONE("share of an adapter's inputs that is dropped in training", 0.0)
    rslora: bool = option("count alpha / √rank times instead (rank-stabilised LoRA)", default=False)
    also_train: str = text_option("NAMES")(
        "what else learns, as a whole: names as in the model's folder: embed_tokens,lm_head,norm"
    )
    continue_from: str = text_option("DIR")(
        "an adapter's folder (peft) to begin with; its rank, alpha and targets count"
    )

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.lora_rank) if self.rslora else self.lora_rank)


# What notices and refusals call the block's options.
OPTIONS = {
    "qkv_bias": "bias on queries, keys and values",
    "out_bias": "bias on the attention's output",
    "mlp_bias": "bias in the MLP",
    "qk_norm_whole": "norm over all heads of queries and keys",
    "norm_kind": "norm of another kind than RMS",
    "norms": "norm after attention and MLP",
    "norm_offset": "norm weight with an offset",
    "activation": "activation other than silu",
    "gated": "MLP without a gate",
    "attention_scale": "attention scale of its own",
    "attention_cap": "soft cap of attention scores",
    "final_cap": "soft cap of logits",
    "embedding_scale": "embedding scale",
    "windows": "sliding window",
    "positions": "position embedding other than rotary",
    "rope_kind": "rotary scaling of this kind",
    "rope_share": "partly turned heads",
    "unrotated": "layers without rotary embedding",
    "window_theta": "rotary base of its own for windowed layers",
    "experts": "experts",
}
_VALUES = {
    "norm_kind": ("rms", "layer"),
    "norms": ("pre", "post", "both"),
    "activation": ("silu", "gelu_tanh", "gelu"),
    "positions": ("rotary", "learned"),
    "rope_kind": ("bands", "linear", "yarn", "longrope"),
}  # that the block computes


def lacking(c: ModelConfig, supported: Collection[str]) -> str:
    """Options that this shape uses and an execution with only `supported` would ignore, in words; empty: none."""
    default = fields_of(ModelConfig)
    return ", ".join(
        words for name, words in OPTIONS.items() if name not in supported and getattr(c, name) != default[name]
    )


# Options of the block that fused.py computes, or that reach it as angles, mask or scale, or lie outside it.
FUSED = (
    "qkv_bias", "out_bias", "mlp_bias", "norms", "norm_offset", "activation", "gated", "attention_scale", "final_cap", "embedding_scale", "windows",
    "positions", "rope_kind", "unrotated", "window_theta", "experts",
)  # fmt: skip


def unfusable(model: ModelConfig) -> str:
    """Why the fused execution can't compute this model; empty: it can."""
    lacks = lacking(model, FUSED)
    if lacks:
        return f"the fused execution has no {lacks} yet"
    if model.norms == "post":
        return f"the fused execution has no {OPTIONS['norms']} alone yet"
    head_dim = model.head_dim
    return f"the fused execution has no heads of {head_dim}, a power of two alone" if head_dim & (head_dim - 1) else ""


def check_options(c: ModelConfig, where: str) -> None:
    """Refuses what the block can't compute at all."""
    for name, values in _VALUES.items():
        value = getattr(c, name)
        if value not in values:
            known = ", ".join(map(str, values))
            raise Refusal(
                f"{where}: the block has no {OPTIONS[name]} yet ({name} {value!r}; it has {known})", EX_CONFIG
            )
    if c.windows and len(c.windows) != c.layers:
        raise Refusal(f"{where}: {len(c.windows)} windows for {c.layers} layers", EX_CONFIG)
    if c.experts and not 1 <= c.experts_per_token <= c.experts:
        raise Refusal(f"{where}: {c.experts_per_token} of {c.experts} experts can't be chosen for a token", EX_CONFIG)
    if c.shared_experts:
        raise Refusal(f"{where}: the block has no shared experts yet", EX_CONFIG)
    if c.rope_kind == "yarn" and c.rope_theta <= 1:
        raise Refusal(f"{where}: yarn needs a rope_theta above 1, not {c.rope_theta:g}", EX_CONFIG)
    if c.rope_kind == "longrope":
        turned = int(c.head_dim * c.rope_share) // 2
        if {len(c.rope_short), len(c.rope_long)} != {turned}:
            counts = f"{len(c.rope_short)} and {len(c.rope_long)}"
            raise Refusal(f"{where}: longrope has {counts} factors for {turned} frequencies", EX_CONFIG)


ROUND = 64  # rows of the embedding: products with odd sizes are slow
Size = tuple[int, ...]


def with_rows(told: ModelConfig, vocab_size: int) -> ModelConfig:
    rows = told.vocab_size or -(-vocab_size // ROUND) * ROUND
    if rows < vocab_size:
        raise Refusal(
            f"the tokenizer has {vocab_size} tokens and the model only {rows}: they don't belong together",
            EX_CONFIG,
        )
    return replace(told, vocab_size=rows)


def tensors(c: ModelConfig) -> Iterator[tuple[str, tuple[Size, ...]]]:
    """Name and size of every parameter; several sizes: the maps that are joined in it, one below the other."""
    yield "embed.weight", ((c.vocab_size, c.dim),)
    if c.positions == "learned":
        yield "positions.weight", ((c.position_rows, c.dim),)
    blocks = {routed: tuple(_of_block(c, routed)) for routed in (False, True) if c.experts or not routed}
    for layer in range(c.layers):
        for name, sizes in blocks[c.routed(layer)]:
            yield f"layers.{layer}.{name}", sizes
    yield from _norm(c, "norm", c.dim)
    if not c.tied:
        yield "head.weight", ((c.vocab_size, c.dim),)


def _norm(c: ModelConfig, name: str, width: int) -> Iterator[tuple[str, tuple[Size, ...]]]:
    yield f"{name}.weight", ((width,),)
    if c.norm_kind == "layer":
        yield f"{name}.bias", ((width,),)


def _linear(name: str, inputs: int, outputs: tuple[int, ...], bias: bool) -> Iterator[tuple[str, tuple[Size, ...]]]:
    yield f"{name}.weight", tuple((rows, inputs) for rows in outputs)
    if bias:
        yield f"{name}.bias", tuple((rows,) for rows in outputs)


def _of_block(c: ModelConfig, routed: bool) -> Iterator[tuple[str, tuple[Size, ...]]]:
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    if c.norms != "post":
        yield from _norm(c, "attention_norm", c.dim)
    yield from _linear("attention.qkv", c.dim, (queries, keys, keys), c.qkv_bias)
    yield from _linear("attention.out", queries, (c.dim,), c.out_bias)
    if c.qk_norm:
        yield "attention.q_norm.weight", ((queries if c.qk_norm_whole else c.head_dim,),)
        yield "attention.k_norm.weight", ((keys if c.qk_norm_whole else c.head_dim,),)
    if c.norms != "pre":
        yield from _norm(c, "attention_post_norm", c.dim)
    if c.norms != "post":
        yield from _norm(c, "mlp_norm", c.dim)
    if routed:
        yield "experts.router.weight", ((c.experts, c.dim),)
        yield from _linear("experts.gate_up", c.dim, gate_up_rows(c, c.expert_ff) * c.experts, False)
        yield from _linear("experts.down", c.expert_ff, (c.dim,) * c.experts, False)
    else:
        yield from _linear("mlp.gate_up", c.dim, gate_up_rows(c, c.ff), c.mlp_bias)
        yield from _linear("mlp.down", c.ff, (c.dim,), c.mlp_bias)
    if c.norms != "pre":
        yield from _norm(c, "mlp_post_norm", c.dim)


def gate_up_rows(c: ModelConfig, ff: int) -> tuple[int, ...]:
    return (ff, ff) if c.gated else (ff,)


def parameters(c: ModelConfig) -> int:
    """Of a decoder with this shape, `vocab_size` included."""
    if c.stored:
        return c.stored
    return sum(math.prod(size) for _, sizes in tensors(c) for size in sizes)


def matmul_parameters(c: ModelConfig) -> int:
    """Weights in a product for every token: the head, not the embedding, and of experts those that are chosen."""
    if c.stored:
        return c.stored
    routed = sum(c.routed(layer) for layer in range(c.layers)) if c.experts else 0
    total = c.dim * c.vocab_size
    for layers, kind in ((c.layers - routed, False), (routed, True)):
        for name, sizes in _of_block(c, kind) if layers else ():
            matrices = sum(math.prod(size) for size in sizes if len(size) == 2)
            chosen = name.startswith("experts.") and name != "experts.router.weight"
            total += layers * (matrices * c.experts_per_token // c.experts if chosen else matrices)
    return total


def flops_per_token(c: ModelConfig, context_length: int) -> int:
    """Forward and backward, attention counted in full as everybody does: 6·N + 12·L·heads·head_dim·T."""
    return 6 * matmul_parameters(c) + 12 * c.layers * c.heads * c.head_dim * context_length
