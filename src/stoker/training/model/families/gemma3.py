"""Gemma 3 (text): Gemma 2 without caps, with a norm of queries and keys and another rotary base under a window."""

from __future__ import annotations

from typing import Any, ClassVar

from stoker.training.model.config import ModelConfig
from stoker.training.model.families.family import ConfigJson
from stoker.training.model.families.gemma2 import Gemma2


class Gemma3(Gemma2):
    name = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    theta = 1e6
    pattern = 6
    caps: ClassVar[dict[str, float | None]] = {"attn_logit_softcapping": None, "final_logit_softcapping": None}

    def options(self, told: ConfigJson) -> dict[str, Any]:
        rope = told.get("rope_parameters") or {}
        local = rope.get("sliding_attention") if isinstance(rope, dict) else None
        if local is not None and (not isinstance(local, dict) or local.get("rope_type", "default") != "default"):
            told.refuse(f"its windowed layers' rotary embedding is {told.words(local)}; the block has default there")
        base = (local or {}).get("rope_theta", told.get("rope_local_base_freq", 1e4))
        full = told.rotary(self.theta, of="full_attention")
        return {
            **super().options(told),
            **full,
            "qk_norm": True,
            "window_theta": told.positive("rope_local_base_freq", base),
        }

    def keys(self, c: ModelConfig) -> dict[str, Any]:
        return {**super().keys(c), "rope_local_base_freq": c.window_theta}


FAMILY = Gemma3()
