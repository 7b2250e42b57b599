"""What a family says: how config.json maps to our shape and back, and what its tensors are called."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from stoker.training.model.config import ModelConfig
from stoker.training.model.families.config_json import ACTIVATIONS, BANDS, CONFIG, ConfigJson

__all__ = ["CONFIG", "ConfigJson", "Family", "kinds_of", "upper_windows", "window_keys"]


class Family:
    """Derive from it and put an object into FAMILY. Replace what your family does otherwise than most."""

    name = ""  # model_type in config.json
    architecture = ""  # the class in `architectures`
    # What transformers takes where config.json has no such key.
    tied = False
    eps = 1e-6
    theta = 10000.0
    longest = "max_position_embeddings"  # the key that says how many tokens it was trained for
    counts: ClassVar[Mapping[str, str]] = {
        "dim": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim", "ff": "intermediate_size", "vocab_size": "vocab_size",
    }  # fmt: skip
    # Ours -> theirs, without .weight and .bias. As many names as they store: one for joined projections.
    outside: ClassVar[Mapping[str, str]] = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    layers = "model.layers"
    prefix = "model."  # that names lack in folders of the model without its head
    transposed: Collection[str] = ()  # of `inside`: matrices that they store the other way round
    # Ends of names that older folders have, and that hold no weight.
    buffers: Collection[str] = (".rotary_emb.inv_freq",)
    # Names with {} are of each expert.
    inside: ClassVar[Mapping[str, tuple[str, ...]]] = {
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

    def ff(self, dim: int) -> int | None:
        """The same; None: the key has to be there."""
        return None

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
        for name in ("dim", "layers", "heads", "kv_heads", "head_dim", "ff", "vocab_size"):
            default = None  # what transformers takes where a key is missing: in their order, one follows from another
            if name == "kv_heads":
                default = fields["heads"]
            elif name == "head_dim":
                default = self.head_dim(fields["dim"], fields["heads"])
            elif name == "ff":
                default = self.ff(fields["dim"])
            fields[name] = told.count(keys[name], default) if name in keys else default
        if fields["heads"] % fields["kv_heads"]:
            told.refuse(f"{keys['kv_heads']} {fields['kv_heads']} does not divide {keys['heads']} {fields['heads']}")
        if fields["head_dim"] % 2:
            told.refuse(f"head_dim {fields['head_dim']} is odd: the rotary embedding turns pairs")
        fields["norm_eps"] = told.number("rms_norm_eps", self.eps)
        fields["tied"] = told.yes("tie_word_embeddings", self.tied)
        fields["init_std"] = told.number("initializer_range", 0.02)
        own = self.options(told)
        rotary = {} if "rope_theta" in own else told.rotary(self.theta)
        return ModelConfig(**{**fields, **rotary, **own, "load": told.folder, "family": self.name})

    def common(self, c: ModelConfig, context_length: int) -> dict[str, Any]:
        return {
            **{theirs: getattr(c, ours) for ours, theirs in self.counts.items()},
            "max_position_embeddings": max(context_length, c.longest),
            "rope_theta": c.rope_theta,
            "rope_scaling": _scaling(c),
            "rms_norm_eps": c.norm_eps,
            "hidden_act": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == c.activation),
            "tie_word_embeddings": c.tied,
            "initializer_range": c.init_std,
        }

    def tensor(self, ours: str, c: ModelConfig) -> tuple[str, ...]:
        """Their names for our parameter."""
        path, _, kind = ours.rpartition(".")
        if not path.startswith("layers."):
            return (f"{self.outside[path]}.{kind}",)
        _, layer, name = path.split(".", 2)
        theirs = self.inside[name]
        if any("{}" in one for one in theirs):
            theirs = tuple(one.format(expert) for expert in range(c.experts) for one in theirs)
        return tuple(f"{self.layers}.{layer}.{one}.{kind}" for one in theirs)

    def turned(self, ours: str) -> bool:
        """Whether they store our parameter transposed."""
        return ours.endswith(".weight") and ours.removesuffix(".weight").split(".", 2)[-1] in self.transposed


def kinds_of(windows: Collection[int]) -> list[str]:
    """layer_types of these windows."""
    return ["sliding_attention" if window else "full_attention" for window in windows]


def upper_windows(told: ConfigJson) -> tuple[int, ...]:
    """Windows of families that have them in the upper layers, and only with use_sliding_window."""
    slides = told.yes("use_sliding_window")
    first = told.count("max_window_layers", 28) if slides else 0
    windows = told.windows(lambda layer: slides and layer >= first)
    if windows and not slides:
        told.refuse(f"layer_types has a sliding window of {max(windows)} tokens, and use_sliding_window is not true")
    return windows


def window_keys(c: ModelConfig) -> dict[str, Any]:
    if not c.windows:
        return {"use_sliding_window": False, "sliding_window": None}
    return {"use_sliding_window": True, "sliding_window": max(c.windows), "layer_types": kinds_of(c.windows)}


def _scaling(c: ModelConfig) -> dict[str, Any] | None:
    """rope_scaling of these rope_ fields."""
    if c.rope_kind == "longrope":
        numbers = {"short_factor": list(c.rope_short), "long_factor": list(c.rope_long)}
        about = {"original_max_position_embeddings": c.rope_original, "attention_factor": c.rope_attention}
        return {"rope_type": "longrope", **numbers, **about}
    if c.rope_factor == 1.0:
        return None
    if c.rope_kind == "linear":
        return {"rope_type": "linear", "factor": c.rope_factor}
    if c.rope_kind == "yarn":
        ramp = {"beta_slow": c.rope_low, "beta_fast": c.rope_high, "truncate": c.rope_truncate}
        about = {"original_max_position_embeddings": c.rope_original, "attention_factor": c.rope_attention}
        return {"rope_type": "yarn", "factor": c.rope_factor, **about, **ramp}
    return {"rope_type": "llama3", **{theirs: getattr(c, ours) for ours, theirs in BANDS.items()}}
