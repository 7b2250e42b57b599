"""Gemma 2: norms before and after, soft caps, scaled embedding, every other layer with a sliding window."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from stoker.training.model.config import ModelConfig
from stoker.training.model.families.family import ConfigJson, Family, kinds_of


class Gemma2(Family):
    name = "gemma2"
    architecture = "Gemma2ForCausalLM"
    tied = True
    pattern = 2  # one layer in so many sees the whole context
    caps: ClassVar[dict[str, float | None]] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    inside: ClassVar = {
        **Family.inside,
        "attention_post_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_post_norm": ("post_feedforward_layernorm",),
    }

    def head_dim(self, dim: int, heads: int) -> int:
        return 256

    def options(self, told: ConfigJson) -> dict[str, Any]:
        told.fixed("use_bidirectional_attention", False)
        pattern = told.count("sliding_window_pattern", self.pattern)
        return {
            "norms": "both",
            "norm_offset": 1.0,
            **told.biases(),
            "activation": told.activation("hidden_activation", "gelu_pytorch_tanh"),
            "embedding_scale": math.sqrt(told.count("hidden_size")),
            "attention_scale": told.number("query_pre_attn_scalar", 256) ** -0.5,
            "attention_cap": told.optional("attn_logit_softcapping", self.caps["attn_logit_softcapping"]),
            "final_cap": told.optional("final_logit_softcapping", self.caps["final_logit_softcapping"]),
            "windows": told.windows(lambda layer: (layer + 1) % pattern != 0),
        }

    def keys(self, c: ModelConfig) -> dict[str, Any]:
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": c.qkv_bias,
            "query_pre_attn_scalar": round(c.attention_scale**-2),
            "attn_logit_softcapping": c.attention_cap or None,
            "final_logit_softcapping": c.final_cap or None,
            "sliding_window": max(c.windows, default=4096),
            "layer_types": kinds_of(c.windows or (0,) * c.layers),
        }


FAMILY = Gemma2()
