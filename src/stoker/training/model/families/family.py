"""What a family says: how config.json, read key by key, maps to our shape and back, and what its tensors are called."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NoReturn

from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.training.model.config import ModelConfig

CONFIG = "config.json"
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
        if (
            isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 53
        ):  # a float holds it exactly
            state = "missing" if value is None else self.words(value)
            self.refuse(f"{key} in its {CONFIG} is {state}: a whole number above 0 is needed")
        return value

    def number(self, key: str, default: float) -> float:
        return self.positive(key, self.get(key, default))

    def optional(self, key: str, default: float | None = None) -> float:
        """0 where the key is null or 0: the option is off."""
        value = self.get(key, default)
        off = value is None or (type(value) in (int, float) and value == 0)
        return 0.0 if off else self.positive(key, value)

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
    gguf = ""  # what a GGUF file calls it; empty: none is written
    gguf_turns_neighbours = (
        False  # there, the rotary embedding turns neighbours, not a head's first half with its second
    )
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
