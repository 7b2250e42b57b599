"""GPT-2: learned positions, LayerNorm, an MLP without a gate, matrices stored transposed."""

from __future__ import annotations

from typing import Any, ClassVar

from stoker.training.model.config import ModelConfig
from stoker.training.model.families.family import ConfigJson, Family


class Gpt2(Family):
    name = "gpt2"
    architecture = "GPT2LMHeadModel"
    tied = True
    eps = 1e-5
    longest = "n_positions"
    counts: ClassVar = {
        "dim": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "ff": "n_inner",
        "vocab_size": "vocab_size",
    }
    outside: ClassVar = {
        "embed": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head",
    }  # fmt: skip
    layers = "transformer.h"
    prefix = "transformer."
    transposed = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    buffers = (".attn.bias", ".attn.masked_bias")
    inside: ClassVar = {
        "attention_norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.out": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "mlp.gate_up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
    }

    def ff(self, dim: int) -> int:
        return 4 * dim

    def options(self, told: ConfigJson) -> dict[str, Any]:
        told.fixed("scale_attn_by_inverse_layer_idx", False)
        told.fixed("add_cross_attention", False)
        return {
            "norm_kind": "layer",
            "norm_eps": told.number("layer_norm_epsilon", self.eps),
            "positions": "learned",
            "position_rows": told.count("n_positions", 1024),
            "unrotated": tuple(range(told.count("n_layer"))),
            "rope_theta": 10000.0,
            "gated": False,
            "activation": told.activation("activation_function", "gelu_new"),
            "attention_scale": 0.0 if told.yes("scale_attn_weights", True) else 1.0,
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
        }

    def common(self, c: ModelConfig, context_length: int) -> dict[str, Any]:
        return {
            "n_embd": c.dim,
            "n_layer": c.layers,
            "n_head": c.heads,
            "n_inner": None if c.ff == 4 * c.dim else c.ff,
            "n_positions": c.position_rows,
            "vocab_size": c.vocab_size,
            "activation_function": "gelu_new" if c.activation == "gelu_tanh" else c.activation,
            "layer_norm_epsilon": c.norm_eps,
            "scale_attn_weights": c.attention_scale != 1.0,
            "tie_word_embeddings": c.tied,
            "initializer_range": c.init_std,
        }

    def keys(self, c: ModelConfig) -> dict[str, Any]:
        return {}


FAMILY = Gpt2()
