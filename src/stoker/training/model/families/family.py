"""What a family says: how config.json maps to our shape and back, and what its tensors are called."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from stoker.contract.names import EX_DATAERR, Refusal
from stoker.training.model.config import ModelConfig

CONFIG = "config.json"
_MOST, _MOST_LAYERS = 1 << 24, 10_000  # of anything it counts: beyond every model there is, and still quick to plan
_BANDS = {
    "rope_factor": "factor", "rope_low": "low_freq_factor", "rope_high": "high_freq_factor", "rope_original": "original_max_position_embeddings",
}  # fmt: skip
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


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

    def yes(self, key: str) -> bool:
        value = self.get(key) or False
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

    def positive(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            self.refuse(f"{key} in its {CONFIG} is {self.words(value)}: a number above 0 is needed")
        return float(value)

    def activation(self, key: str = "hidden_act", default: str = "silu") -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            self.refuse(f"{key} is {str(value)[:80]!r}; the block has {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def windows(self, slides: bool, from_layer: int = 0) -> tuple[int, ...]:
        """Of each layer: by layer_types, or, where it `slides`, all layers from `from_layer` on."""
        layers, kinds = self.count("num_hidden_layers"), self.get("layer_types")
        slides = slides and self.get("sliding_window", 4096) not in (None, 0)
        if kinds is None:
            kinds = ["sliding_attention" if slides and at >= from_layer else "full_attention" for at in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers:
            self.refuse(f"layer_types {self.words(kinds)} does not name {layers} layers")
        for kind in kinds:
            if kind not in ("sliding_attention", "full_attention"):
                self.refuse(f"layer_types has {self.words(kind)}; the block has sliding_attention and full_attention")
        if "sliding_attention" not in kinds:
            return ()
        size = self.count("sliding_window", 4096)  # transformers' default where the key is missing
        return tuple(size if kind == "sliding_attention" else 0 for kind in kinds)

    def rotary(self, partial: bool = False) -> dict[str, Any]:
        """The rope_ fields. `partial`: the family turns a part of each head where the folder says so."""
        theta, share = self.get("rope_theta", 10000.0), self.get("partial_rotary_factor")
        stretched: dict[str, Any] = {}
        for key in ("rope_parameters", "rope_scaling"):
            rope = self.get(key) or {}
            if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
                self.refuse(f"{key} {self.words(rope)} is not one rotary embedding for all layers")
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind == "llama3":
                stretched = {ours: self.positive(f"{key}.{name}", rope.get(name)) for ours, name in _BANDS.items()}
                stretched["rope_original"] = int(stretched["rope_original"])
            elif kind == "linear":
                stretched = {"rope_kind": kind, "rope_factor": self.positive(f"{key}.factor", rope.get("factor"))}
            elif kind != "default":
                self.refuse(
                    f"its rotary embedding is scaled ({key}: {kind}): the block knows default, linear and llama3,"
                    " logits would differ"
                )
            share = rope.get("partial_rotary_factor") or share
            theta = rope.get("rope_theta", theta)
        if share not in (None, 1):
            if not partial:
                self.refuse("its rotary embedding turns a part of each head only (partial_rotary_factor)")
            stretched["rope_share"] = self.positive("partial_rotary_factor", share)
        return {"rope_theta": self.positive("rope_theta", theta), **stretched}


class Family:
    """Derive from it, put an object of it into FAMILY. A method here is what most families share: replace what yours
    does otherwise.
    """

    name = ""  # model_type in config.json
    architecture = ""  # the class in `architectures`
    counts: Mapping[str, str] = {
        "dim": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim", "ff": "intermediate_size", "vocab_size": "vocab_size",
    }  # fmt: skip
    # Ours -> theirs, without .weight and .bias. As many names as they store: one for joined projections.
    outside: Mapping[str, str] = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    layers = "model.layers"
    inside: Mapping[str, tuple[str, ...]] = {
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",),
        "attention.q_norm": ("self_attn.q_norm",),
        "attention.k_norm": ("self_attn.k_norm",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    }

    def options(self, told: ConfigJson) -> dict[str, Any]:
        """Fields of ModelConfig that this family sets, besides those of `shape`."""
        raise NotImplementedError

    def keys(self, c: ModelConfig) -> dict[str, Any]:
        """The way back: keys of config.json besides those of `common`."""
        raise NotImplementedError

    def takes(self, c: ModelConfig) -> bool:
        """Whether a model that was not loaded from a folder is written as this family."""
        return False

    def head_dim(self, dim: int, heads: int) -> int:
        """What transformers takes where the key is missing."""
        return dim // heads

    def missing(self) -> str:
        """What it takes to be a family and is not there; empty: nothing."""
        own = type(self)
        lacks = [name for name in ("name", "architecture") if not getattr(self, name)]
        lacks += [name for name in ("options", "keys") if getattr(own, name) is getattr(Family, name)]
        lacks += [f"name for {name}" for name in Family.outside if name not in self.outside]
        needed = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
        return ", ".join([*lacks, *(f"name for {name}" for name in needed if name not in self.inside)])

    def shape(self, told: ConfigJson) -> ModelConfig:
        keys, fields = self.counts, dict[str, Any]()
        for name in keys:  # what transformers takes where a key is missing: in their order, one follows from another
            default = None
            if name == "kv_heads":
                default = fields["heads"]
            elif name == "head_dim":
                default = self.head_dim(fields["dim"], fields["heads"])
            fields[name] = told.count(keys[name], default)
        if fields["heads"] % fields["kv_heads"]:
            told.refuse(f"{keys['kv_heads']} {fields['kv_heads']} does not divide {keys['heads']} {fields['heads']}")
        if fields["head_dim"] % 2:
            told.refuse(f"head_dim {fields['head_dim']} is odd: the rotary embedding turns pairs")
        fields["norm_eps"] = told.number("rms_norm_eps", 1e-6)
        fields["tied"] = told.yes("tie_word_embeddings")
        fields["init_std"] = told.number("initializer_range", 0.02)
        own = self.options(told)
        rotary = {} if "rope_theta" in own else told.rotary()
        return ModelConfig(**{**fields, **rotary, **own, "load": told.folder, "family": self.name})

    def common(self, c: ModelConfig, context_length: int) -> dict[str, Any]:
        scaling: dict[str, Any] | None = None
        if c.rope_factor != 1.0 and c.rope_kind == "linear":
            scaling = {"rope_type": "linear", "factor": c.rope_factor}
        elif c.rope_factor != 1.0:
            scaling = {"rope_type": "llama3", **{theirs: getattr(c, ours) for ours, theirs in _BANDS.items()}}
        return {
            **{theirs: getattr(c, ours) for ours, theirs in self.counts.items()},
            "max_position_embeddings": context_length,
            "rope_theta": c.rope_theta,
            "rope_scaling": scaling,
            "rms_norm_eps": c.norm_eps,
            "hidden_act": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == c.activation),
            "tie_word_embeddings": c.tied,
            "initializer_range": c.init_std,
        }

    def tensor(self, ours: str) -> tuple[str, ...]:
        """Their names for our parameter."""
        path, _, kind = ours.rpartition(".")
        if not path.startswith("layers."):
            return (f"{self.outside[path]}.{kind}",)
        _, layer, name = path.split(".", 2)
        return tuple(f"{self.layers}.{layer}.{theirs}.{kind}" for theirs in self.inside[name])
