"""Qwen3: queries and keys are normalised head by head; the upper layers may have a sliding window."""

from __future__ import annotations

from typing import Any

from stoker.training.model.config import ModelConfig, lacking
from stoker.training.model.families.family import ConfigJson, Family, upper_windows, window_keys


class Qwen3(Family):
    name = "qwen3"
    architecture = "Qwen3ForCausalLM"
    gguf = "qwen3"

    def head_dim(self, dim: int, heads: int) -> int:
        return 128

    def options(self, told: ConfigJson) -> dict[str, Any]:
        windows = upper_windows(told)
        return {"qk_norm": True, **told.biases(), "activation": told.activation(), "windows": windows}

    def keys(self, c: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": c.qkv_bias, **window_keys(c)}

    def takes(self, c: ModelConfig) -> bool:
        return c.qk_norm and not lacking(c, ())


FAMILY = Qwen3()
