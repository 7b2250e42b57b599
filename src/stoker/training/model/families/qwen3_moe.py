"""Qwen3 with experts: Qwen3's attention; some layers may have one MLP."""

from __future__ import annotations

from typing import Any, ClassVar

from stoker.training.model.config import ModelConfig
from stoker.training.model.families.family import ConfigJson, Family


class Qwen3Moe(Family):
    name = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    inside: ClassVar = {
        **Family.inside,
        "experts.router": ("mlp.gate",),
        "experts.gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "experts.down": ("mlp.experts.{}.down_proj",),
    }

    def options(self, told: ConfigJson) -> dict[str, Any]:
        layers, every = told.count("num_hidden_layers"), told.count("decoder_sparse_step", 1)
        alone = frozenset(told.whole_numbers("mlp_only_layers"))
        return {
            "qk_norm": True,
            **told.biases(),
            "activation": told.activation(),
            "windows": told.same_windows(4096) if told.yes("use_sliding_window") else (),
            "experts": told.count("num_experts" if told.get("num_experts") else "num_local_experts", 128),
            "experts_per_token": told.count("num_experts_per_tok", 8),
            "expert_ff": told.count("moe_intermediate_size", 768),
            "dense": tuple(layer for layer in range(layers) if layer in alone or (layer + 1) % every),
            "router_sum": told.yes("norm_topk_prob"),
            "router_aux": told.optional("router_aux_loss_coef", 0.001),
        }

    def keys(self, c: ModelConfig) -> dict[str, Any]:
        return {
            "attention_bias": c.qkv_bias,
            "use_sliding_window": bool(c.windows),
            "sliding_window": c.window(0) or None,
            "num_experts": c.experts,
            "num_experts_per_tok": c.experts_per_token,
            "moe_intermediate_size": c.expert_ff,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(c.dense),
            "norm_topk_prob": c.router_sum,
            "router_aux_loss_coef": c.router_aux,
        }


FAMILY = Qwen3Moe()
