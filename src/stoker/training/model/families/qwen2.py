"""Qwen2 and Qwen2.5: biases on queries, keys and values; the upper layers may have a sliding window."""

from __future__ import annotations

from typing import Any

from stoker.training.model.config import ModelConfig
from stoker.training.model.families.family import ConfigJson, Family, upper_windows, window_keys


class Qwen2(Family):
    name = "qwen2"
    architecture = "Qwen2ForCausalLM"
    gguf = "qwen2"

    def options(self, told: ConfigJson) -> dict[str, Any]:
        return {"qkv_bias": True, "activation": told.activation(), "windows": upper_windows(told)}

    def keys(self, c: ModelConfig) -> dict[str, Any]:
        return window_keys(c)


FAMILY = Qwen2()
