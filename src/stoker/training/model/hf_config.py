"""config.json of a Llama or Qwen3 folder and the shape it stands for, both ways. What our decoder would compute
differently is refused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.untrusted import read_json
from stoker.training.model.config import ModelConfig

CONFIG = "config.json"
_LONGEST = 1 << 24  # bytes of it
_MOST, _MOST_LAYERS = 1 << 24, 10_000  # of anything it counts: beyond every model there is, and still quick to plan
_LLAMA3 = {
    "rope_factor": "factor", "rope_low": "low_freq_factor", "rope_high": "high_freq_factor", "rope_original": "original_max_position_embeddings",
}  # fmt: skip
FAMILIES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "MistralForCausalLM": "mistral"}


def shape_of(folder: str) -> ModelConfig:
    """The shape that the folder's weights have, both 4.x's and 5.x's way of writing it."""
    return _Told(folder).shape()


class _Told:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        path = os.path.join(folder, CONFIG)
        try:
            self.told: dict[str, Any] = read_json(path, _LONGEST)
        except FileNotFoundError as problem:
            found = ", ".join(sorted(os.listdir(folder))[:5]) if os.path.isdir(folder) else "no such folder"
            raise Refusal(
                f"model {folder}: there is no {CONFIG} in it; found {found or 'nothing'}", EX_NOINPUT
            ) from problem
        except OSError as problem:
            raise Refusal(f"{path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
        except ValueError as problem:
            raise Refusal(f"{path} is not JSON: {problem}", EX_DATAERR) from problem
        if not isinstance(self.told, dict):
            self.refuse(f"its {CONFIG} holds no keys")

    def refuse(self, why: str) -> NoReturn:
        raise Refusal(f"model {self.folder}: {why}", EX_DATAERR)

    def shape(self) -> ModelConfig:
        family = self._family()
        self._refuse_other_computations(family)
        dim, heads = self._count("hidden_size"), self._count("num_attention_heads")
        kv_heads = self._count("num_key_value_heads", heads)
        head_dim = self._count(
            "head_dim", 128 if family == "qwen3" else dim // heads
        )  # what transformers takes where the key is missing
        if heads % kv_heads:
            self.refuse(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
        if head_dim % 2:
            self.refuse(f"head_dim {head_dim} is odd: the rotary embedding turns pairs")
        return ModelConfig(
            load=self.folder,
            layers=self._count("num_hidden_layers"),
            dim=dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ff=self._count("intermediate_size"),
            vocab_size=self._count("vocab_size"),
            **self._rope(),
            norm_eps=self._number("rms_norm_eps", 1e-6),
            qk_norm=family == "qwen3",
            tied=self._yes("tie_word_embeddings"),
            init_std=self._number("initializer_range", 0.02),
        )

    def _family(self) -> str:
        named = self.told.get("architectures")
        known = ", ".join(FAMILIES)
        if named:
            if (
                not isinstance(named, list)
                or len(named) != 1
                or not isinstance(named[0], str)
                or named[0] not in FAMILIES
            ):
                self.refuse(f"its architecture is {_words(named)}; those that load are {known}")
            return FAMILIES[named[0]]
        family = self.told.get("model_type")
        if family not in FAMILIES.values():
            self.refuse(f"its model_type is {str(family)[:80]!r}; those that load are {known}")
        return str(family)

    def _refuse_other_computations(self, family: str) -> None:
        if self.told.get("quantization_config"):
            method = self.told["quantization_config"]
            kind = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method
            self.refuse(f"its weights are quantised ({kind}): load the folder they were made from")
        for key in ("attention_bias", "mlp_bias"):
            if self._yes(key):
                self.refuse(f"{key} is true, and our decoder has no biases")
        activation = self.told.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            self.refuse(f"hidden_act is {str(activation)[:80]!r}; ours is silu")
        window = self._window(family)
        if window:
            self.refuse(f"it attends within a sliding window of {window} tokens, ours over the whole context")

    def _window(self, family: str) -> Any:
        if family == "mistral":
            return self.told.get("sliding_window", 4096)  # transformers' default
        layers = self.told.get("layer_types")
        if isinstance(layers, list):
            return (
                self.told.get("sliding_window") or "some" if any(kind != "full_attention" for kind in layers) else None
            )
        slides = (
            family == "qwen3"
            and self._yes("use_sliding_window")
            and self._count("max_window_layers", 28) < self._count("num_hidden_layers")
        )
        return self.told.get("sliding_window", 4096) if slides else None

    def _rope(self) -> dict[str, Any]:
        theta = self.told.get("rope_theta", 10000.0)
        stretched: dict[str, Any] = {}
        for key in ("rope_parameters", "rope_scaling"):
            rope = self.told.get(key) or {}
            if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
                self.refuse(f"{key} {_words(rope)} is not one rotary embedding for all layers")
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind == "llama3":
                stretched = {
                    ours: self._positive(f"{key}.{theirs}", rope.get(theirs)) for ours, theirs in _LLAMA3.items()
                }
            elif kind != "default":
                self.refuse(
                    f"its rotary embedding is scaled ({key}: {kind}): ours knows plain and llama3, logits would differ"
                )
            if any(
                factor not in (None, 1)
                for factor in (rope.get("partial_rotary_factor"), self.told.get("partial_rotary_factor"))
            ):
                self.refuse("its rotary embedding turns a part of each head only (partial_rotary_factor)")
            theta = rope.get("rope_theta", theta)
        return {
            "rope_theta": self._positive("rope_theta", theta),
            **{key: int(value) if key == "rope_original" else value for key, value in stretched.items()},
        }

    def _yes(self, key: str) -> bool:
        value = self.told.get(key) or False
        if not isinstance(value, bool):
            self.refuse(f"{key} is {_words(value)}, not true or false")
        return value

    def _count(self, key: str, default: int | None = None) -> int:
        value = self.told.get(key)
        if value is None and default is not None:
            value = default
        most = _MOST_LAYERS if key == "num_hidden_layers" else _MOST
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            self.refuse(
                f"{key} in its {CONFIG} is {'missing' if value is None else _words(value)}: a whole number from 1 to"
                f" {most} is needed"
            )
        return value

    def _number(self, key: str, default: float) -> float:
        return self._positive(key, self.told.get(key, default))

    def _positive(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            self.refuse(f"{key} in its {CONFIG} is {_words(value)}: a number above 0 is needed")
        return float(value)


def _words(value: Any) -> str:
    return json.dumps(value)[:80]


def config_of(c: ModelConfig, context_length: int, dtype: str, end_ids: Sequence[int]) -> dict[str, Any]:
    """What `transformers` 4 and 5 open. `end_ids`: tokens that end a text; left out, Llama would take 2 for it."""
    # transformers refuses a Llama whose heads don't divide its width; Mistral without a window is the same computation
    # without that rule.
    architecture = (
        "Qwen3ForCausalLM" if c.qk_norm else "LlamaForCausalLM" if c.dim % c.heads == 0 else "MistralForCausalLM"
    )
    own: dict[str, dict[str, Any]] = {
        "LlamaForCausalLM": {"attention_bias": False, "mlp_bias": False},
        "Qwen3ForCausalLM": {"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
        "MistralForCausalLM": {"sliding_window": None},
    }
    scaling = (
        {"rope_type": "llama3", **{theirs: getattr(c, ours) for ours, theirs in _LLAMA3.items()}}
        if c.rope_factor != 1.0
        else None
    )
    return {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture],
        "hidden_size": c.dim,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ff,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": context_length,
        "rope_theta": c.rope_theta,
        "rope_scaling": scaling,
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": c.tied,
        "initializer_range": c.init_std,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": ends(end_ids),
        "pad_token_id": None,
        "use_cache": True,
        **own[architecture],
    }


def ends(end_ids: Sequence[int]) -> int | list[int] | None:
    return None if not end_ids else end_ids[0] if len(end_ids) == 1 else list(end_ids)
