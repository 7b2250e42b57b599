"""Llama 2, 3 and 3.x: the block as it is, with biases where the folder says so."""

from __future__ import annotations

from typing import Any

from stoker.training.model.config import ModelConfig, lacking
from stoker.training.model.families.family import ConfigJson, Family


class Llama(Family):
    name = "llama"
    architecture = "LlamaForCausalLM"
    gguf = "llama"
    gguf_turns_neighbours = True

    def options(self, told: ConfigJson) -> dict[str, Any]:
        if windows := told.windows(slides=lambda layer: False):
            told.refuse(
                f"it attends within a sliding window of {max(windows)} tokens, this family over the whole context"
            )
        return {**told.biases(), "mlp_bias": told.yes("mlp_bias"), "activation": told.activation()}

    def keys(self, c: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias}

    def takes(self, c: ModelConfig) -> bool:
        # transformers refuses a Llama whose heads don't divide its width.
        return not c.qk_norm and c.dim % c.heads == 0 and not lacking(c, ())


FAMILY = Llama()
