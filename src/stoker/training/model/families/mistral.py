"""Mistral: Llama's computation within a sliding window, or without one."""

from __future__ import annotations

from typing import Any

from stoker.training.model.config import ModelConfig, lacking
from stoker.training.model.families.family import ConfigJson, Family


class Mistral(Family):
    name = "mistral"
    architecture = "MistralForCausalLM"

    def options(self, told: ConfigJson) -> dict[str, Any]:
        # Of all layers or of none: transformers does not read layer_types here.
        windows = () if told.get("sliding_window") == 0 else told.same_windows(4096)
        return {"activation": told.activation(), "windows": windows}

    def keys(self, c: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": c.window(0) or None}

    def takes(self, c: ModelConfig) -> bool:
        """What is no Llama for its heads alone: transformers has no such rule for this one."""
        return not c.qk_norm and not lacking(c, ())


FAMILY = Mistral()
