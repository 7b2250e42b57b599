"""Mixtral: Mistral with a choice of experts instead of each MLP."""

from __future__ import annotations

from typing import Any, ClassVar

from stoker.training.model.config import ModelConfig
from stoker.training.model.families.family import ConfigJson, Family


class Mixtral(Family):
    name = "mixtral"
    architecture = "MixtralForCausalLM"
    eps = 1e-5
    theta = 1e6
    inside: ClassVar = {
        **Family.inside,
        "experts.router": ("block_sparse_moe.gate",),
        "experts.gate_up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "experts.down": ("block_sparse_moe.experts.{}.w2",),
    }

    def options(self, told: ConfigJson) -> dict[str, Any]:
        return {
            "activation": told.activation(),
            "windows": told.same_windows(),
            "experts": told.count("num_local_experts", 8),
            "experts_per_token": told.count("num_experts_per_tok", 2),
            "expert_ff": told.count("intermediate_size"),
            "router_aux": told.optional("router_aux_loss_coef", 0.001),
        }

    def keys(self, c: ModelConfig) -> dict[str, Any]:
        return {
            "sliding_window": c.window(0) or None,
            "num_local_experts": c.experts,
            "num_experts_per_tok": c.experts_per_token,
            "router_aux_loss_coef": c.router_aux,
        }


FAMILY = Mixtral()
