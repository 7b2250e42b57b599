"""Phi-3 and Phi-4: joined projections, partly turned heads, longrope."""

from __future__ import annotations

from typing import Any, ClassVar

from stoker.training.model.config import ModelConfig
from stoker.training.model.families.family import ConfigJson, Family


class Phi3(Family):
    name = "phi3"
    architecture = "Phi3ForCausalLM"
    eps = 1e-5
    inside: ClassVar = {**Family.inside, "attention.qkv": ("self_attn.qkv_proj",), "mlp.gate_up": ("mlp.gate_up_proj",)}

    def options(self, told: ConfigJson) -> dict[str, Any]:
        # Older folders call longrope su or yarn.
        rotary = told.rotary(partial=True, renamed={"su": "longrope", "yarn": "longrope"})
        return {"activation": told.activation(), "windows": told.same_windows(), **rotary}

    def keys(self, c: ModelConfig) -> dict[str, Any]:
        original = c.rope_original if c.rope_kind == "longrope" else max(c.longest, 4096)
        return {
            "partial_rotary_factor": c.rope_share,
            "sliding_window": c.window(0) or None,
            "original_max_position_embeddings": original,
        }


FAMILY = Phi3()
