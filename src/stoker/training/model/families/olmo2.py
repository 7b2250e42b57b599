"""OLMo 2: norms only behind attention and MLP; one norm over all heads of queries, one over those of keys."""

from __future__ import annotations

from typing import Any, ClassVar

from stoker.training.model.config import ModelConfig
from stoker.training.model.families.family import ConfigJson, Family


class Olmo2(Family):
    name = "olmo2"
    architecture = "Olmo2ForCausalLM"
    eps = 1e-5
    inside: ClassVar = {
        **{ours: theirs for ours, theirs in Family.inside.items() if ours not in ("attention_norm", "mlp_norm")},
        "attention_post_norm": ("post_attention_layernorm",),
        "mlp_post_norm": ("post_feedforward_layernorm",),
    }

    def options(self, told: ConfigJson) -> dict[str, Any]:
        whole = {"qk_norm": True, "qk_norm_whole": True}
        return {"norms": "post", **whole, **told.biases(), "activation": told.activation()}

    def keys(self, c: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": c.qkv_bias}


FAMILY = Olmo2()
