"""SmolLM3: every fourth layer turns nothing; those may have a sliding window."""

from __future__ import annotations

from typing import Any

from stoker.contract.units import plural
from stoker.training.model.config import ModelConfig
from stoker.training.model.families.family import ConfigJson, Family, kinds_of


class SmolLM3(Family):
    name = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    tied = True
    theta = 2e6

    def options(self, told: ConfigJson) -> dict[str, Any]:
        layers, every = told.count("num_hidden_layers"), told.count("no_rope_layer_interval", 4)
        turned = told.whole_numbers("no_rope_layers") or tuple(int((at + 1) % every != 0) for at in range(layers))
        if len(turned) != layers:
            told.refuse(f"no_rope_layers has {plural(len(turned), 'entry')} for {layers} layers")
        slides = told.yes("use_sliding_window") and told.get("sliding_window")
        return {
            "unrotated": tuple(layer for layer in range(layers) if not turned[layer]),
            "windows": told.windows(lambda layer: bool(slides) and not turned[layer]),
            **told.biases(),
            "mlp_bias": told.yes("mlp_bias"),
            "activation": told.activation(),
        }

    def keys(self, c: ModelConfig) -> dict[str, Any]:
        return {
            "no_rope_layers": [int(layer not in c.unrotated) for layer in range(c.layers)],
            "use_sliding_window": bool(c.windows),
            "sliding_window": max(c.windows, default=None),
            "layer_types": kinds_of(c.windows or (0,) * c.layers),
            "attention_bias": c.qkv_bias,
            "mlp_bias": c.mlp_bias,
        }


FAMILY = SmolLM3()
