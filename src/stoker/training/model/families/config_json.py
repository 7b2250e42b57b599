"""A folder's config.json, read key by key as transformers 4.x and 5.x write it. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from stoker.contract.names import EX_DATAERR, Refusal

CONFIG = "config.json"
_MOST, _MOST_LAYERS = 1 << 24, 10_000  # of anything it counts: beyond every model there is, and still quick to plan
BANDS = {
    "rope_factor": "factor", "rope_low": "low_freq_factor", "rope_high": "high_freq_factor", "rope_original": "original_max_position_embeddings",
}  # fmt: skip
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu",
}  # fmt: skip


class ConfigJson:
    """A folder's config.json. What is asked for and is not of its kind is refused, with the key's name."""

    def __init__(self, folder: str, keys: Any) -> None:
        self.folder, self._keys = folder, keys
        if not isinstance(keys, dict):
            self.refuse(f"its {CONFIG} holds no keys")

    def refuse(self, why: str) -> NoReturn:
        raise Refusal(f"model {self.folder}: {why}", EX_DATAERR)

    @staticmethod
    def words(value: Any) -> str:
        return json.dumps(value)[:80]

    def get(self, key: str, default: Any = None) -> Any:
        return self._keys.get(key, default)

    def keys(self) -> dict[str, Any]:
        found: dict[str, Any] = self._keys
        return found

    def yes(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(f"{key} is {self.words(value)}, not true or false")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            value = default
        most = _MOST_LAYERS if "layer" in key else _MOST
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            self.refuse(
                f"{key} in its {CONFIG} is {'missing' if value is None else self.words(value)}: a whole number from 1 to"
                f" {most} is needed"
            )
        return value

    def number(self, key: str, default: float) -> float:
        return self.positive(key, self.get(key, default))

    def optional(self, key: str, default: float | None = None) -> float:
        """0 where the key is null: the option is off."""
        value = self.get(key, default)
        return 0.0 if value is None else self.positive(key, value)

    def fixed(self, key: str, value: Any) -> None:
        """Refuses another value than the one that the block computes."""
        own = self.get(key, value)
        if own is not None and own != value:
            self.refuse(f"{key} is {self.words(own)}; the block computes {self.words(value)} alone")

    def whole_numbers(self, key: str) -> tuple[int, ...]:
        values = self.get(key) or []
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            self.refuse(f"{key} is {self.words(values)}, not a list of whole numbers")
        return tuple(values)

    def positive(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            self.refuse(f"{key} in its {CONFIG} is {self.words(value)}: a number above 0 is needed")
        return float(value)

    def activation(self, key: str = "hidden_act", default: str = "silu") -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            self.refuse(f"{key} is {str(value)[:80]!r}; the block has {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def biases(self) -> dict[str, bool]:
        """Of the attention: all, or none."""
        bias = self.yes("attention_bias")
        return {"qkv_bias": bias, "out_bias": bias}

    def same_windows(self, default: int | None = None) -> tuple[int, ...]:
        """Of families with one window for all layers, or none."""
        if self.get("sliding_window", default) is None:
            return ()
        return (self.count("sliding_window", default),) * self.count("num_hidden_layers")

    def windows(self, slides: Callable[[int], bool]) -> tuple[int, ...]:
        """Of each layer: by layer_types, or, where the folder has none, of those layers that `slides` says."""
        layers, kinds = self.count("num_hidden_layers"), self.get("layer_types")
        if kinds is None:
            has = self.get("sliding_window", 4096) not in (None, 0)
            kinds = ["sliding_attention" if has and slides(layer) else "full_attention" for layer in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers:
            self.refuse(f"layer_types {self.words(kinds)} does not name {layers} layers")
        for kind in kinds:
            if kind not in ("sliding_attention", "full_attention"):
                self.refuse(f"layer_types has {self.words(kind)}; the block has sliding_attention and full_attention")
        if "sliding_attention" not in kinds:
            return ()
        size = self.count("sliding_window", 4096)  # transformers' default where the key is missing
        return tuple(size if kind == "sliding_attention" else 0 for kind in kinds)

    def rope(self, of: str = "") -> dict[str, Any]:
        """rope_parameters (5.x, `of` a kind of layers where it has one for each) or rope_scaling (4.x), as one."""
        merged: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            rope = self.get(key) or {}
            if isinstance(rope, dict) and of:
                rope = rope.get(of, rope)
            if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
                self.refuse(f"{key} {self.words(rope)} is not one rotary embedding for all layers")
            merged |= rope
        return merged

    def rotary(
        self, theta: float = 10000.0, partial: bool = False, of: str = "", renamed: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The rope_ fields. `theta`: where the folder names none; `partial`: the family turns a part of each head where
        the folder says so; `renamed`: kinds of scaling that the family knows by another name.
        """
        rope = self.rope(of)
        kind = rope.get("rope_type", rope.get("type", "default"))
        rope["rope_type"] = (renamed or {}).get(str(kind), kind)
        share = rope.get("partial_rotary_factor") or self.get("partial_rotary_factor")
        fields = self._scaling(rope)
        if share not in (None, 1):
            if not partial:
                self.refuse("its rotary embedding turns a part of each head only (partial_rotary_factor)")
            fields["rope_share"] = self.positive("partial_rotary_factor", share)
        base = rope.get("rope_theta", self.get("rope_theta"))
        return {"rope_theta": self.positive("rope_theta", theta if base is None else base), **fields}

    def _scaling(self, rope: dict[str, Any]) -> dict[str, Any]:
        kind, where = rope["rope_type"], "rope_parameters" if self.get("rope_parameters") else "rope_scaling"

        def number(name: str, default: float | None = None) -> float:
            value = rope.get(name)
            return self.positive(f"{where}.{name}", default if value is None else value)

        if kind == "default":
            return {}
        if kind == "linear":
            return {"rope_kind": kind, "rope_factor": number("factor")}
        if kind == "llama3":
            bands = {ours: number(name) for ours, name in BANDS.items()}
            return {**bands, "rope_original": int(bands["rope_original"])}
        if kind not in ("yarn", "longrope"):
            self.refuse(
                f"its rotary embedding is scaled ({self.words(kind)}): the block knows default, linear, llama3, yarn and"
                " longrope; logits would differ"
            )
        longest = self.count("max_position_embeddings", 2048)
        known = self.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or longest
        original = int(self.positive("original_max_position_embeddings", known))
        fields: dict[str, Any] = {"rope_kind": kind, "rope_original": original}
        if kind == "longrope":
            factor = number("factor", longest / original)
            scale = math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0
            for ours, theirs in (("rope_short", "short_factor"), ("rope_long", "long_factor")):
                numbers = rope.get(theirs)
                if not isinstance(numbers, list):
                    self.refuse(f"its rotary embedding is scaled by longrope without {theirs}")
                fields[ours] = tuple(self.positive(theirs, value) for value in numbers)
            return {**fields, "rope_attention": number("attention_factor", scale)}
        factor = number("factor")
        fields |= {"rope_low": number("beta_slow", 1.0), "rope_high": number("beta_fast", 32.0), "rope_factor": factor}
        fields["rope_truncate"] = bool(rope.get("truncate", True))
        grown = 0.1 * math.log(max(factor, 1.0))
        scale = grown + 1.0
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            scale = (grown * number("mscale") + 1.0) / (grown * number("mscale_all_dim") + 1.0)
        return {**fields, "rope_attention": number("attention_factor", scale)}
