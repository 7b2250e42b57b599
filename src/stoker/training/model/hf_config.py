"""A folder's config.json and the shape it stands for, both ways, by its family. What the block would compute differently
is refused. No torch.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from stoker.contract.names import EX_DATAERR, EX_NOINPUT, EX_UNAVAILABLE, Refusal
from stoker.contract.shape import replace
from stoker.contract.untrusted import read_json
from stoker.training.model.config import ModelConfig, check_options
from stoker.training.model.families import family_in, family_of, known_family
from stoker.training.model.families.family import CONFIG, ConfigJson
from stoker.training.model.hf_stored import stored_in

__all__ = ["CONFIG", "config_of", "shape_for", "shape_of"]
_LONGEST = 1 << 20  # bytes of it: a checkpoint keeps it
_QUANTIZED = ("quant_config.json", "quantize_config.json")  # beside it, in folders of AWQ and GPTQ
_CAUSAL = ("ForCausalLM", "LMHeadModel")
# What plans and reports look at, by the names there are for it.
_COUNTS = {
    "dim": ("hidden_size", "n_embd", "d_model"), "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"), "ff": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab_size": ("vocab_size",), "longest": ("max_position_embeddings", "n_positions", "seq_length"),
}  # fmt: skip
_NOT_KEPT = ("auto_map", "_name_or_path")  # an export has no code of its own, and another place


def shape_of(folder: str) -> ModelConfig:
    """The shape that the folder's weights have, both 4.x's and 5.x's way of writing it."""
    told = _read(folder)
    _refuse_quantized(told)
    family = family_in(told)
    c = family.shape(told)
    check_options(c, f"model {folder}")
    longest = told.get(family.longest)
    return replace(c, kept=kept_text(told.keys()), longest=longest if type(longest) is int else 0)


def kept_text(keys: dict[str, Any]) -> str:
    """What an export keeps of a config.json."""
    return json.dumps({key: value for key, value in _without_code(keys).items() if key not in _NOT_KEPT})


def shape_for(asked: ModelConfig, folder: str) -> ModelConfig:
    """As shape_of, by the engine that was asked for: what no family knows is computed by transformers' own module."""
    told = _read(folder)
    _refuse_quantized(told)
    if asked.engine == "native" or (asked.engine == "auto" and known_family(told) is not None):
        try:
            return shape_of(folder)
        except Refusal as refusal:
            hint = "; model.engine transformers may take it" if asked.engine == "auto" else ""
            raise Refusal(refusal.line + hint, refusal.code) from refusal
    _refuse_unrunnable(told, asked.trust_remote_code)
    kept = _without_code(told.keys())

    def number(ours: str) -> int:
        return next((kept[key] for key in _COUNTS[ours] if type(kept.get(key)) is int and kept[key] > 0), 1)

    return ModelConfig(
        load=folder,
        engine="transformers",
        trust_remote_code=asked.trust_remote_code,
        kept=json.dumps(kept),
        longest=number("longest"),
        stored=sum(math.prod(one.shape) for one in stored_in(folder).values()),
        dim=number("dim"),
        layers=number("layers"),
        heads=number("heads"),
        kv_heads=number("heads"),
        head_dim=max(number("dim") // number("heads"), 1),
        ff=number("ff"),
        vocab_size=number("vocab_size"),
    )


def _is_code(key: str) -> bool:
    """attn_implementation and its like: transformers also takes a repository's name there, and runs a kernel from it."""
    return "implementation" in key and key != "cache_implementation"


def _without_code(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_code(inner) for key, inner in value.items() if not _is_code(key)}
    return [_without_code(inner) for inner in value] if isinstance(value, list) else value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _elsewhere(value: Any) -> Iterator[str]:
    """Names of other repositories whose code config.json asks for: owner/name--file.Class, or owner/name of a kernel."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key == "auto_map" or _is_code(key):
            yield from (text for text in _texts(inner) if "--" in text or "/" in text)
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _elsewhere(inner)


def _refuse_unrunnable(told: ConfigJson, trusted: bool) -> None:
    named = told.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str) else ""
    if not name.endswith(_CAUSAL):
        told.refuse(f"its architecture is {told.words(named)}: no causal language model that can be trained here")
    other = next(_elsewhere(told.keys()), None)
    if other is not None:
        told.refuse(
            f"its {CONFIG} takes code from {told.words(other)}, not from this folder: copy that code into the folder, read"
            " it, and name it without the repository"
        )
    if told.get("auto_map") and not trusted:
        told.refuse(
            f"{name} runs Python code that comes with the folder: read that code, and give --trust-remote-code if you"
            " trust it"
        )
    if importlib.util.find_spec("transformers") is None:
        raise Refusal(
            f"model {told.folder}: {name} needs transformers (model.engine), which is not installed here: pip install"
            " transformers",
            EX_UNAVAILABLE,
        )


def _refuse_quantized(told: ConfigJson) -> None:
    method = told.get("quantization_config") or told.get("compression_config")
    beside = next((name for name in _QUANTIZED if os.path.exists(os.path.join(told.folder, name))), None)
    if method or beside:
        kind = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method or beside
        told.refuse(f"its weights are quantized ({told.words(kind)}): load the folder they were made from")


def _read(folder: str) -> ConfigJson:
    path = os.path.join(folder, CONFIG)
    try:
        return ConfigJson(folder, read_json(path, _LONGEST))
    except FileNotFoundError as problem:
        held = ", ".join(sorted(os.listdir(folder))[:5]) if os.path.isdir(folder) else "no such folder"
        raise Refusal(f"model {folder}: there is no {CONFIG} in it; found {held or 'nothing'}", EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"{path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except ValueError as problem:
        raise Refusal(f"{path} is not JSON: {problem}", EX_DATAERR) from problem


def config_of(c: ModelConfig, context_length: int, dtype: str, end_ids: Sequence[int]) -> dict[str, Any]:
    """What `transformers` 4 and 5 open: of a model that was loaded, its own config.json with what changed. `end_ids`: tokens
    that end a text; left out, some families would take 2 for it.
    """
    ends = list(end_ids) if len(end_ids) > 1 else next(iter(end_ids), None)
    if c.kept:
        own = json.loads(c.kept)
        changed: dict[str, Any] = {"vocab_size": c.vocab_size, "dtype" if "dtype" in own else "torch_dtype": dtype}
        stops = own.get("eos_token_id")
        if any(end not in (stops if isinstance(stops, list) else [stops]) for end in end_ids):
            changed["eos_token_id"] = ends
        # longrope's scale follows from it
        if context_length > c.longest and "max_position_embeddings" in own and c.rope_kind != "longrope":
            changed["max_position_embeddings"] = context_length
        return {**own, "eos_token_id": stops, **changed}
    family = family_of(c)
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        **family.common(c, context_length),
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": ends,
        "pad_token_id": None,
        "use_cache": True,
        **family.keys(c),
    }
