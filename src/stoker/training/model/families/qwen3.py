"""Qwen3: queries and keys are normalised head by head; the upper layers may have a sliding window."""

from __future__ import annotations

from typing import Any

from stoker.training.model.config import ModelConfig, lacking
from stoker.training.model.families.family import ConfigJson, Family


class Qwen3(Family):
    name = "qwen3"
    architecture = "Qwen3ForCausalLM"

    def head_dim(self, dim: int, heads: int) -> int:
        return 128

    def options(self, told: ConfigJson) -> dict[str, Any]:
        bias, slides = told.yes("attention_bias"), told.yes("use_sliding_window")
        windows = told.windows(slides, told.count("max_window_layers", 28) if slides else 0)
        if windows and not slides:
            told.refuse(
                f"layer_types has a sliding window of {max(windows)} tokens, and use_sliding_window is not true"
            )
        return {
            "qk_norm": True,
            "qkv_bias": bias,
            "out_bias": bias,
            "activation": told.activation(),
            "windows": windows,
        }

    def keys(self, c: ModelConfig) -> dict[str, Any]:
        own: dict[str, Any] = {"attention_bias": c.qkv_bias, "use_sliding_window": False, "sliding_window": None}
        if c.windows:
            kinds = ["sliding_attention" if window else "full_attention" for window in c.windows]
            own |= {"use_sliding_window": True, "sliding_window": max(c.windows), "layer_types": kinds}
        return own

    def takes(self, c: ModelConfig) -> bool:
        return c.qk_norm and not lacking(c, ())


FAMILY = Qwen3()
