"""A folder's config.json and the shape it stands for, both ways, by its family; what differs is refused. No torch."""

from __future__ import annotations

import glob
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stoker.contract import layout
from stoker.contract.errors import EX_CONFIG, EX_DATAERR, EX_NOINPUT, EX_UNAVAILABLE, Refusal, parsing
from stoker.contract.frozen import frozen, replace
from stoker.contract.safe_io import read_json
from stoker.contract.tensor_header import read_header
from stoker.training.model import hf_hub
from stoker.training.model.config import OFF, QLORA, ModelConfig, check_options
from stoker.training.model.families import family_in, family_of, known_family
from stoker.training.model.families.family import CONFIG, ConfigJson

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@frozen
class Stored:
    """A tensor in a file: `begin` counts from the file's start."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


def stored_in(folder: str) -> dict[str, Stored]:
    """All tensors of model.safetensors, of the files its index names, or of the only safetensors file there is. Of an
    adapter's folder: those of the model it is for.
    """
    folder = base_of(folder)
    try:
        names = sorted(os.listdir(folder))
    except OSError as problem:
        raise Refusal(f"model {folder}: {problem.strerror}", EX_NOINPUT) from problem
    files = [name for name in names if name.endswith(".safetensors")]
    with parsing(f"model {folder}: reading its weights' headers"):
        return _in_files(folder, names, files)


def _in_files(folder: str, names: list[str], files: list[str]) -> dict[str, Stored]:
    if WEIGHTS in files:
        files = [WEIGHTS]
    elif INDEX in names:
        return _indexed(folder)
    if not files:
        pickled = next((name for name in names if name.endswith(PICKLES)), None)
        if pickled:
            convert = (
                'python -c "import sys; from transformers import AutoModelForCausalLM as M;'
                f' M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])" {folder}'
            )
            raise Refusal(
                f"model {folder}: {pickled} is a pickle, which can run any code; if you trust it, convert it to"
                f" safetensors: {convert}",
                EX_NOINPUT,
            )
        raise Refusal(
            f"model {folder}: it has no weights: no {WEIGHTS} and no {INDEX}; download the folder again, or convert its .bin"
            " files to safetensors if it has no others",
            EX_NOINPUT,
        )
    if len(files) > 1:
        raise Refusal(
            f"model {folder}: {len(files)} safetensors files ({files[0]}, {files[1]} …) and no {INDEX} that says what"
            " is where",
            EX_DATAERR,
        )
    return header(os.path.join(folder, files[0]))


def _indexed(folder: str) -> dict[str, Stored]:
    path = os.path.join(folder, INDEX)
    try:
        index = read_json(path)
    except OSError as problem:
        raise Refusal(f"{path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except ValueError as problem:
        raise Refusal(f"{path} is not JSON: {problem}", EX_DATAERR) from problem
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise Refusal(f"{path} has no weight_map that says which tensor is in which file", EX_DATAERR)
    files = sorted(set(where.values()))
    outside = next(
        (name for name in files if os.path.basename(name) != name or not name.endswith(".safetensors") or "\0" in name),
        None,
    )
    if outside is not None:
        raise Refusal(f"{path} names {outside}, which is not a safetensors file in that folder", EX_DATAERR)
    headers = {name: header(os.path.join(folder, name)) for name in files}
    for name, shard in where.items():
        if name not in headers[shard]:
            raise Refusal(f"{path} says that {name} is in {shard}, and it is not", EX_DATAERR)
    return {name: headers[shard][name] for name, shard in where.items()}


def header(path: str) -> dict[str, Stored]:
    try:
        found = read_header(path).tensors
    except FileNotFoundError as problem:
        raise Refusal(f"{path} is missing: the folder is not complete; download it again", EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"{path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except ValueError as problem:
        raise Refusal(f"{path} is damaged: {problem}; download it again", EX_DATAERR) from problem
    return {name: Stored(path, one.dtype, one.shape, one.begin, one.end - one.begin) for name, one in found.items()}


ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's
_QUANTIZED = ("quant_config.json", "quantize_config.json")  # beside it, in folders of AWQ and GPTQ
_CAUSAL = ("ForCausalLM", "LMHeadModel")
# What plans and reports look at, by the names there are for it.
_COUNTS = {
    "dim": ("hidden_size", "n_embd", "d_model"), "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"), "ff": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab_size": ("vocab_size",), "longest": ("max_position_embeddings", "n_positions", "seq_length"),
}  # fmt: skip
# An export has no code of its own, another place, and 16 bits or more.
_NOT_KEPT = ("auto_map", "_name_or_path", "quantization_config")


def shape_of(folder: str) -> ModelConfig:
    """The shape that the folder's weights have, both 4.x's and 5.x's way of writing it."""
    folder = _described_in(folder)
    with parsing(f"model {folder}: its {CONFIG}"):
        return _shape_in(folder)


def _shape_in(folder: str) -> ModelConfig:
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


def shape_for(asked: ModelConfig, folder: str, *, planned: bool = False) -> ModelConfig:
    """As shape_of, by the engine that was asked for: what no family knows is computed by transformers' own module.
    `planned`: nothing is computed here, so neither transformers nor weights have to be.
    """
    own = _described_in(folder)
    with parsing(f"model {own}: its {CONFIG}"):
        told = _read(own)
        _refuse_quantized(told)
        if asked.engine != "native" and (asked.engine != "auto" or known_family(told) is None):
            return _computed_outside(asked, told, folder, planned)
    try:
        return shape_of(folder)
    except Refusal as refusal:
        hint = "; model.engine transformers may take it" if asked.engine == "auto" else ""
        raise Refusal(refusal.line + hint, refusal.code) from refusal


def _computed_outside(asked: ModelConfig, told: ConfigJson, folder: str, planned: bool) -> ModelConfig:
    if told.get("quantization_config"):
        told.refuse("its weights have 4 bits, which model.engine transformers does not read here")
    _refuse_unrunnable(told, asked.trust_remote_code, planned)
    kept = _without_code(told.keys())
    counts: dict[str, Any] = {
        ours: next(
            (kept[key] for key in keys if type(kept.get(key)) is int and kept[key] > 0), 0 if ours == "longest" else 1
        )
        for ours, keys in _COUNTS.items()
    }
    return ModelConfig(
        load=folder,
        engine="transformers",
        trust_remote_code=asked.trust_remote_code,
        kept=json.dumps(kept),
        stored=_stored(folder, counts, planned),
        kv_heads=counts["heads"],
        head_dim=max(counts["dim"] // counts["heads"], 1),
        **counts,
    )


def _stored(folder: str, counts: Mapping[str, int], planned: bool) -> int:
    """Parameters in the folder; where it has no weights and is only planned with, about what such a model has."""
    try:
        return sum(math.prod(one.shape) for one in stored_in(folder).values())
    except Refusal:
        if not planned:
            raise
        width = counts["dim"]
        return counts["layers"] * (4 * width**2 + 3 * width * counts["ff"]) + 2 * width * counts["vocab_size"]


def _is_code(key: str) -> bool:
    """attn_implementation and its like: transformers also takes a repository's name there, and runs a kernel from it."""
    if key == "attribute_map":  # another name for any of them
        return True
    return "implementation" in key and key != "cache_implementation"


def _without_code(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_code(inner) for key, inner in value.items() if not _is_code(key)}
    return [_without_code(inner) for inner in value] if isinstance(value, list) else value


def _under(value: Any, name: str) -> Iterator[Any]:
    """What stands under that key, however deep: a model's part may have a config of its own."""
    if isinstance(value, dict) and name in value:
        yield value[name]
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _under(inner, name)


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


def _refuse_unrunnable(told: ConfigJson, trusted: bool, planned: bool = False) -> None:
    named = told.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str) else ""
    if not name.endswith(_CAUSAL):
        told.refuse(f"its architecture is {told.words(named)}: not a causal language model that Stoker can train")
    other = next(_elsewhere(told.keys()), None)
    if other is not None:
        told.refuse(
            f"its {CONFIG} takes code from {told.words(other)}, not from this folder: copy that code into the folder, read"
            " it, and name it without the repository"
        )
    if planned:
        return
    if not trusted and any(_under(told.keys(), "auto_map")):
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
    """All but NF4 of bitsandbytes, which is read."""
    method = told.get("quantization_config") or told.get("compression_config")
    beside = next((name for name in _QUANTIZED if os.path.exists(os.path.join(told.folder, name))), None)
    if not method and not beside:
        return
    kind = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method or beside
    what = told.words(kind)
    if isinstance(method, dict) and kind == "bitsandbytes":
        what = f"bitsandbytes, {_bits(method)}"
        if what.endswith(_NF4):
            return
    told.refuse(
        f"its weights are quantized ({what}), and only {_NF4} of bitsandbytes is read: load the folder they were"
        " made from"
    )


_NF4 = "NF4 with double quantization"


def _bits(method: Mapping[str, Any]) -> str:
    if not method.get("load_in_4bit"):
        return "8 bits"
    if method.get("bnb_4bit_quant_type", "fp4") != "nf4":
        return "FP4"
    return _NF4 if method.get("bnb_4bit_use_double_quant") else "NF4 without double quantization"


def is_quantized(folder: str) -> bool:
    """Its base's weights have 4 bits that can be read; others are refused."""
    folder = _described_in(base_of(folder))
    with parsing(f"model {folder}: its {CONFIG}"):
        told = _read(folder)
        _refuse_quantized(told)
        return bool(told.get("quantization_config"))


def check_adapters_outside(method: str) -> None:
    """Where transformers' own module learns."""
    if method == QLORA:
        raise Refusal(
            "adapter.method qlora needs a model of a family (`stoker docs families`): with model.engine transformers the"
            " frozen weights stay whole; use --lora",
            EX_CONFIG,
        )
    if method != OFF and importlib.util.find_spec("peft") is None:
        raise Refusal(
            f"adapter.method {method} with model.engine transformers goes through peft, which is not installed here: pip"
            " install peft",
            EX_UNAVAILABLE,
        )


def check_trainable(folder: str, method: str) -> None:
    """`method`: of adapter.method."""
    if method != QLORA and is_quantized(folder):
        raise Refusal(
            f"model {folder}: its weights have 4 bits and can't learn: train an adapter beside them with --qlora, or load"
            " the folder they were made from",
            EX_CONFIG,
        )


def is_adapter(folder: str) -> bool:
    """By its settings and its weights: a whole model stays one, whatever file of settings lies in its folder."""
    if not os.path.isfile(os.path.join(folder, ADAPTER)):
        return False
    weights = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
    return not weights or ADAPTER_WEIGHTS in weights


def base_of(folder: str) -> str:
    """The model that an adapter's folder is for; another folder is its own."""
    path = os.path.join(folder, ADAPTER)
    if not is_adapter(folder):
        return folder
    try:
        told = read_json(path, inside=True)
    except (OSError, ValueError) as problem:
        raise Refusal(f"adapter {path} can't be read: {problem}", EX_DATAERR) from problem
    base = told.get("base_model_name_or_path") if isinstance(told, dict) else None
    if not isinstance(base, str) or not base:
        raise Refusal(f"adapter {path} does not say which model it is for (base_model_name_or_path)", EX_DATAERR)
    found = hf_hub.folder_of(base, lambda line: None)
    if os.path.isfile(os.path.join(found, ADAPTER)):
        raise Refusal(f"adapter {folder} is for {base}, which is an adapter itself: merge that one first", EX_DATAERR)
    return found


def tokenizer_in(folder: str) -> str:
    """The folder whose tokenizer the model has: its own, or that of the model which an adapter is for."""
    return folder if os.path.isfile(os.path.join(folder, hf_hub.TOKENIZER_FILES[0])) else base_of(folder)


def tokenizer_of(load: str, say: Callable[[str], None]) -> str:
    """The tokenizer that belongs to weights: a new one would give every row of the embedding another meaning."""
    folder = tokenizer_in(hf_hub.folder_of(load, say))
    if not os.path.exists(os.path.join(folder, hf_hub.TOKENIZER_FILES[0])):
        line = f"model.load {load} has no {hf_hub.TOKENIZER_FILES[0]}: name the tokenizer it was trained with (tokenizer.path)"
        raise Refusal(line, EX_NOINPUT)
    say(f"the tokenizer is that of model.load: {folder}")
    return folder


def _described_in(folder: str) -> str:
    """Where its config.json is: there, or with the model that it is an adapter for."""
    return folder if os.path.isfile(os.path.join(folder, CONFIG)) else base_of(folder)


def _read(folder: str) -> ConfigJson:
    path = os.path.join(folder, CONFIG)
    try:
        return ConfigJson(folder, read_json(path, inside=True))
    except FileNotFoundError as problem:
        held = ", ".join(sorted(os.listdir(folder))[:5]) if os.path.isdir(folder) else "no such folder"
        of_run, of_roles = (layout.MODEL,), (layout.ROLES, "*", layout.MODEL)
        models = [path for part in (of_run, of_roles) for path in glob.glob(os.path.join(glob.escape(folder), *part))]
        there = f"use {' or '.join(models)}" if models else f"found {held or 'nothing'}"
        raise Refusal(f"model {folder}: it has no {CONFIG}; {there}", EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"{path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except ValueError as problem:
        raise Refusal(f"{path} is not JSON: {problem}", EX_DATAERR) from problem


def config_of(c: ModelConfig, context_length: int, dtype: str) -> dict[str, Any]:
    """What `transformers` 4 and 5 open: of a model that was loaded, its own config.json with what changed."""
    if c.kept:
        own = json.loads(c.kept)
        changed: dict[str, Any] = {"vocab_size": c.vocab_size, "dtype" if "dtype" in own else "torch_dtype": dtype}
        # longrope's scale follows from it
        if context_length > c.longest and "max_position_embeddings" in own and c.rope_kind != "longrope":
            changed["max_position_embeddings"] = context_length
        named = own.get("architectures")
        if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
            changed["architectures"] = [family_of(c).architecture]  # families are known by model_type, too
        return {**own, "eos_token_id": own.get("eos_token_id"), **changed}
    family = family_of(c)
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        **family.common(c, context_length),
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,  # left out, some families would take 2 for it
        "pad_token_id": None,
        "use_cache": True,
        **family.keys(c),
    }


GENERATION = "generation_config.json"
_AS_LOADED = ("bos_token_id", "pad_token_id")


@frozen
class Kept:
    config: Mapping[str, Any]
    generation: Mapping[str, Any]

    @property
    def is_half(self) -> bool:
        """Its numbers have 16 bits."""
        return (self.config.get("dtype") or self.config.get("torch_dtype")) in ("bfloat16", "float16")

    def context(self, trained: int) -> int:
        """Fine-tuning on shorter texts does not shorten what the model can read."""
        longest = self.config.get("max_position_embeddings")
        return max(trained, longest) if type(longest) is int else trained

    def changed(
        self, config: Mapping[str, Any], end_ids: Sequence[int], tokenizer_folder: str | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """config.json and generation_config.json of the export. `end_ids`: what training taught."""
        if not end_ids and self.config.get("eos_token_id") is None:
            end_ids = end_ids_of(tokenizer_folder)
        known = {key: self.config[key] for key in (*_AS_LOADED, "eos_token_id") if self.config.get(key) is not None}
        whole = {**config, **known, "eos_token_id": _with(self.config.get("eos_token_id"), end_ids)}
        ends = _with(self.generation.get("eos_token_id", self.config.get("eos_token_id")), end_ids)
        return whole, ({**self.generation, "eos_token_id": ends} if ends is not None else dict(self.generation))


def _with(loaded: Any, more: Sequence[int]) -> Any:
    """As it was loaded where nothing is new."""
    listed = loaded if isinstance(loaded, list) else [loaded]
    before = [number for number in listed if type(number) is int]
    if before and set(more) <= set(before):
        return loaded
    ids = list(dict.fromkeys((*more, *before)))
    return ids if len(ids) > 1 else next(iter(ids), None)


def kept_of(c: ModelConfig, say: Callable[[str], None]) -> Kept:
    """Nothing, where the model was not loaded."""
    if not c.load:
        return Kept({}, {})
    config = json.loads(c.kept) if c.kept else None
    if not os.path.isfile(os.path.join(c.load, CONFIG)):
        lost = GENERATION if config else f"{CONFIG} and {GENERATION}"
        say(f"{c.load}, which the model was loaded from, no longer exists: nothing of its {lost} is kept in the export")
        return Kept(config or {}, {})
    return Kept(
        config or _optional_json(os.path.join(c.load, CONFIG)), _optional_json(os.path.join(c.load, GENERATION))
    )


def _optional_json(path: str) -> Mapping[str, Any]:
    try:
        told = read_json(path, inside=True)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise Refusal(f"{path} can't be read: {getattr(problem, 'strerror', None) or problem}", EX_DATAERR) from problem
    return told if isinstance(told, dict) else {}


def end_ids_of(tokenizer_folder: str | None) -> tuple[int, ...]:
    """The id of the eos_token that tokenizer_config.json names; none where nothing does."""
    if tokenizer_folder is None:
        return ()
    paths = [os.path.join(tokenizer_folder, name) for name in ("tokenizer_config.json", "tokenizer.json")]
    if not all(os.path.isfile(path) for path in paths):
        return ()
    try:
        config, tokenizer = (read_json(path, inside=True) for path in paths)
        eos = config.get("eos_token")
        text = eos["content"] if isinstance(eos, dict) else eos
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
        return (int(added[text]),) if text in added else ()
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError) as problem:
        raise Refusal(
            f"tokenizer {tokenizer_folder}: its eos_token can't be read: {type(problem).__name__}: {problem}",
            EX_DATAERR,
        ) from problem
