"""Adapters in a decoder: put beside its frozen weights, read from and written to folders as peft has them, merged."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stoker.contract.errors import EX_CONFIG, EX_DATAERR, EX_NOINPUT, Refusal, parsing
from stoker.contract.frozen import as_json, frozen
from stoker.contract.safe_io import read_bytes, read_json
from stoker.contract.tensor_header import read_header
from stoker.contract.units import plural
from stoker.training.model import nf4
from stoker.training.model.config import QLORA, AdapterConfig, ModelConfig, tensors
from stoker.training.model.decoder import Decoder
from stoker.training.model.families import family_of
from stoker.training.model.families.family import CONFIG
from stoker.training.model.hf_config import ADAPTER, ADAPTER_WEIGHTS, Stored, base_of, header, is_adapter, stored_in
from stoker.training.model.hf_files import Part, places
from stoker.training.model.hf_hub import TOKENIZER_FILES
from stoker.training.model.hf_stream import read_stored
from stoker.training.model.hf_write import add_files, fresh_folder, write_json
from stoker.training.model.linear import Linear
from stoker.training.model.maps import Adapter
from stoker.training.model.nf4_shards import Codes
from stoker.training.model.nf4_size import BLOCK, storable
from stoker.training.model.pieces import collected, give_back, like, whole
from stoker.training.model.targets import Target, extra, targets
from stoker.training.optim.muon import local

SETTINGS, WEIGHTS = ADAPTER, ADAPTER_WEIGHTS
DIGEST = "base_digest"  # in the metadata of WEIGHTS
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
SCORE = "score"  # a reward model's head, as transformers' models for sequence classification call it
_SCORE_NAME, _SCORES = f"{_PREFIX}{SCORE}.weight", "SEQ_CLS"
_SAMPLE = 4096  # bytes of a tensor's beginning and of its end that make up a base's digest
Get = Callable[[str], Tensor]
Say = Callable[[str], None]
# Kinds of adapters that this does not compute, by peft's keys and what they have to be.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "use_dora": (False, None), "bias": ("none", None), "layers_to_transform": (None,),
    "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "trainable_token_indices": (None,),
    "target_parameters": (None, []), "layer_replication": (None,), "use_qalora": (False, None), "lora_bias": (False, None),
}  # fmt: skip


def freeze(model: Decoder, told: AdapterConfig) -> list[str]:
    """Of a model on the meta device: nothing learns but adapters, what `told.also_train` names and what a stage adds to the
    decoder; matrices that don't learn have 16 bits, or with qlora no place at all until `hf.load` quantizes them one by
    one. Gives lines to say: which can't have 4 bits.
    """
    learn = [*extra(model.config, told), *model.own]
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dtype = model.dtype if parameter.dim() == 2 else parameter.dtype
            empty = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
            module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
    for name in learn:
        path, _, leaf = name.rpartition(".")
        place = model.get_submodule(path)
        fresh = torch.empty(getattr(place, leaf).shape, device=getattr(place, leaf).device)
        place.register_parameter(leaf, nn.Parameter(fresh))
    odd_ones: list[str] = []
    for name, layer in _layers(model) if told.method == QLORA else ():
        odd = next((rows for rows in layer.parts if not storable((rows, layer.in_features))), None)
        if odd is not None:
            odd_ones.append(f"{name} ({odd} × {layer.in_features})")
        elif f"{name}.weight" not in learn:
            layer.register_parameter("weight", None)
    if not odd_ones:
        return []
    more = f" and {len(odd_ones) - 1} more" if len(odd_ones) > 1 else ""
    return [
        f"qlora: the elements of {odd_ones[0]}{more} are not a multiple of {BLOCK}: {'they stay' if more else 'it stays'} in 16 bits"
    ]


def _layers(model: Decoder) -> list[tuple[str, Linear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Linear) and name != "head"]


def attach(model: Decoder, told: AdapterConfig, seed: int) -> None:
    """On the model's device. B is zero: the model begins as it was."""
    add(model, told, model.device)
    start(model, told, seed)


def add(model: Decoder, told: AdapterConfig, device: torch.device) -> None:
    """Without numbers."""
    for target in targets(model.config, told):
        layer = _layer(model, target)
        with device:
            adapter = Adapter(target.inputs, layer.out_features, target.parts(), told.lora_rank, told.scale)
        adapter.dropout = told.lora_dropout
        layer.adapter = adapter
        layer.settle()


def start(model: Decoder, told: AdapterConfig, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for target in targets(model.config, told):
        adapter = _layer(model, target).adapter
        assert adapter is not None
        adapter.start(generator)


def cut_codes(model: Decoder) -> None:
    """Of a model on the meta device, after `freeze`: weights that will have 4 bits become parameters that can be cut."""
    for place in places(model.config):
        path, _, leaf = place.name.rpartition(".")
        layer = model.get_submodule(path)
        if leaf == "weight" and isinstance(layer, Linear) and getattr(layer, "weight", None) is None:
            with torch.device("meta"):
                layer.cut = Codes([(part.shape[0], part.shape[1]) for part in place.parts], model.dtype)
            layer.settle()


def _layer(model: Decoder, target: Target) -> Linear:
    layer = model.get_submodule(target.name)
    assert isinstance(layer, Linear)
    return layer


def quantize(layer: Linear, parts: Iterable[Tensor | nf4.Quantized]) -> None:
    """`parts`: what the folder stores apart, on their device, in the dtype that the model computes in; or its own codes."""
    layer.quantized = tuple(part if isinstance(part, nf4.Quantized) else nf4.quantize(part) for part in parts)
    layer.settle()


def learned(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def merged(layer: Linear, out: Tensor) -> Tensor:
    """Into `out`: the weight with its adapter added. Of shards all ranks ask for it."""
    out.copy_(layer.whole_matrix(out.dtype))
    adapter = layer.adapter
    if adapter is not None:
        downs = torch.split(whole(adapter.a), adapter.rank)
        ups = torch.split(whole(adapter.up), [end - begin for begin, end in adapter.parts])
        for (begin, end), a, b in zip(adapter.parts, downs, ups, strict=True):
            out[begin:end] = out[begin:end].float() + adapter.scale * (b.float() @ a.float()).to(out.device)
    return out


def merge(model: Decoder) -> None:
    """Adapters become part of their weights, which then have 16 bits or more."""
    for _, layer in _layers(model):
        adapter = layer.adapter
        if adapter is None:
            continue
        size = (layer.out_features, layer.in_features)
        together = merged(layer, torch.empty(size, dtype=model.dtype, device=adapter.a.device))
        layer.register_parameter("weight", nn.Parameter(together, requires_grad=False))
        layer.adapter, layer.quantized = None, ()
        layer.settle()


@frozen
class Beside:
    """The adapters of a run, and the weights they stand beside."""

    settings: AdapterConfig
    base: str  # folder
    about: dict[str, Any]  # what a checkpoint says of them; another adapter or another base can't resume from it

    @property
    def loaded(self) -> bool:
        """They begin with an adapter's folder, not as nothing."""
        return bool(self.settings.continue_from)


def beside(told: AdapterConfig, folder: str) -> Beside:
    """`folder`: of model.load; an adapter's is trained on, with its own rank, scale and targets."""
    begins = told.continue_from or (folder if is_adapter(folder) else "")
    settings = settings_of(begins, told.method, told.lora_dropout)[0] if begins else told
    base = os.path.abspath(base_of(folder))
    about = {**as_json(settings), "continue_from": "", "base": base_digest(base)}
    return Beside(settings, base, about)


def check_same(found: Any, run: Beside | None, where: str) -> None:
    """`found`: what the checkpoint `where` says of its adapters."""
    own = None if run is None else run.about
    if found == own:
        return
    if not isinstance(found, dict) or own is None:
        theirs, mine = ("all weights" if one is None else "an adapter" for one in (found, own))
        raise Refusal(f"checkpoint {where} holds {theirs}, and this run trains {mine}", EX_CONFIG)
    if found.get("base") != own["base"]:
        raise Refusal(f"checkpoint {where} belongs to an adapter of other weights than those of model.load", EX_CONFIG)
    key = next(key for key in (*own, *found) if found.get(key) != own.get(key))
    raise Refusal(f"checkpoint {where}: adapter.{key} is {found.get(key)!r} there and {own.get(key)!r} here", EX_CONFIG)


def base_digest(folder: str) -> str:
    """Of a model's folder: names, shapes and some bytes of every tensor. Another fine-tune of the same shape differs."""
    return _digest(stored_in(folder))


def weights_digest(folder: str, base: str = "") -> str:
    """Of the weights that a model has which is filled from the folder. `base`: of an adapter's; empty: the one it names."""
    if not is_adapter(folder):
        return base_digest(folder)
    both = base_digest(base or base_of(folder)) + _digest(stored_tensors(folder))
    settings = read_bytes(os.path.join(folder, SETTINGS), inside=True)
    return hashlib.sha256(both.encode() + settings).hexdigest()[:32]


def _digest(tensors: Mapping[str, Stored]) -> str:
    digest = hashlib.sha256()
    for name, stored in sorted(tensors.items()):
        digest.update(f"{name} {stored.dtype} {stored.shape}\n".encode())
        with open(stored.path, "rb") as file:
            for place in (stored.begin, stored.begin + max(stored.size - _SAMPLE, 0)):
                file.seek(place)
                digest.update(file.read(min(_SAMPLE, stored.size)))
    return digest.hexdigest()[:32]


class Files(Protocol):
    """What lies beside the weights."""

    @property
    def tokenizer(self) -> str: ...

    def write(self, folder: str) -> None: ...


def save(
    model: Decoder, told: AdapterConfig, base: str, folder: str, files: Files | None, say: Say, writes: bool = True
) -> None:
    """A folder for peft, there when it is complete. `base`: the folder of the model under it. Of a sharded model all ranks
    call this, one `writes`."""
    parts = gathered(model, told)
    own = {name: parts[name] for name in model.own}

    def more(fresh: str) -> None:
        model.write_own(fresh, own)

    if writes:
        found = peft_tensors(model.config, told, parts.__getitem__, model.own)
        write(model.config, told, base, folder, files, say, found=found, own=model.own, more=more)


def gathered(model: Decoder, told: AdapterConfig) -> dict[str, Tensor]:
    """What learned, whole on rank 0; others only send."""
    give_back(model)
    pairs = (f"{target.name}.adapter.{part}" for target in targets(model.config, told) for part in ("a", "up"))
    needed = (*pairs, *extra(model.config, told), *model.own)
    return {name: collected(model.get_parameter(name)) for name in needed}


def peft_tensors(c: ModelConfig, told: AdapterConfig, get: Get, own: Collection[str] = ()) -> dict[str, Tensor]:
    """By peft's names."""
    found: dict[str, Tensor] = {}
    for target in targets(c, told):
        rows = [end - begin for begin, end in target.parts()]
        pieces = torch.split(get(f"{target.name}.adapter.a"), told.lora_rank)
        ups = torch.split(get(f"{target.name}.adapter.up"), rows)
        for name, a, b in zip(target.names, pieces, ups, strict=True):
            found |= dict(zip(pair_names(name), (_plain(a), _plain(b)), strict=True))
    family = family_of(c)
    for name in extra(c, told):
        pieces = torch.split(get(name).detach(), [size[0] for size in _sizes(name, c)])
        for one, piece in zip(family.tensor(name, c), pieces, strict=True):
            found[extra_name(one)] = _plain(piece.t() if family.turned(name) else piece)
    if SCORE in own:
        found[_SCORE_NAME] = _plain(get(SCORE)[None])
    return found


def write(
    c: ModelConfig, told: AdapterConfig, base: str, folder: str, files: Files | None, say: Say, *,
    found: dict[str, Tensor], own: Collection[str] = (), more: Say = lambda fresh: None,
) -> None:  # fmt: skip
    """`found`: `peft_tensors`; `own`: what the stage adds to a decoder; `more` writes files of its own."""
    write_folder(found, settings_for(c, told, base, own), base, folder, files, say, more)


def settings_for(c: ModelConfig, told: AdapterConfig, base: str, own: Collection[str] = ()) -> dict[str, Any]:
    """adapter_config.json of an adapter in our decoder."""
    family = family_of(c)
    saved = [one.rpartition(".")[0].rsplit(".", 1)[-1] for name in extra(c, told) for one in family.tensor(name, c)]
    saved += [SCORE] * (SCORE in own)
    own_keys = {
        "task_type": _SCORES if SCORE in own else "CAUSAL_LM", "fan_in_fan_out": bool(family.transposed),
        "target_modules": sorted({name.rsplit(".", 1)[-1] for target in targets(c, told) for name in target.names}),
        "modules_to_save": sorted(set(saved)) or None,
    }  # fmt: skip
    return settings_json(told, base, **own_keys)


def settings_json(told: AdapterConfig, base: str, **more: Any) -> dict[str, Any]:
    """adapter_config.json."""
    alpha = int(told.lora_alpha) if told.lora_alpha == int(told.lora_alpha) else told.lora_alpha
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": told.lora_rank, "lora_alpha": alpha, "lora_dropout": told.lora_dropout, "use_rslora": told.rslora,
        "bias": "none", **more,
    }  # fmt: skip


def write_folder(
    tensors: dict[str, Tensor], settings: Mapping[str, Any], base: str, folder: str, files: Files | None, say: Say,
    more: Say = lambda fresh: None,
) -> None:  # fmt: skip
    with fresh_folder(folder, sum(tensor.nbytes for tensor in tensors.values())) as fresh:
        save_file(tensors, os.path.join(fresh, WEIGHTS), {"format": "pt", DIGEST: base_digest(base)})
        write_json(fresh, SETTINGS, settings)
        more(fresh)
        if files is not None:
            config = read_json(os.path.join(base, CONFIG), inside=True)
            add_files(fresh, config, {}, ((files.tokenizer, name) for name in TOKENIZER_FILES))
            files.write(fresh)
    say(f"wrote {folder}: an adapter of {sum(tensor.numel() for tensor in tensors.values()):,} numbers for {base}")


def _sizes(name: str, c: ModelConfig) -> tuple[tuple[int, ...], ...]:
    return next(sizes for own, sizes in tensors(c) if own == name)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu().contiguous()


def check_base(folder: str, base: str = "") -> None:
    """Refuses an adapter of other weights than `base`, or than its own base has now. Peft's folders don't say which it was."""
    path = os.path.join(folder, WEIGHTS)
    with parsing(f"adapter {folder}"):
        stored_tensors(folder)
        wanted = read_header(path).metadata.get(DIGEST)
    base = base or base_of(folder)
    if wanted and wanted != base_digest(base):
        raise Refusal(
            f"adapter {folder} was trained on other weights than those in {base}: its answers would be wrong; give it"
            " the model it was trained with",
            EX_CONFIG,
        )


def settings_of(folder: str, method: str, dropout: float = 0.0) -> tuple[AdapterConfig, str]:
    """(what peft's file says, the base it is for)."""
    path = os.path.join(folder, SETTINGS)
    with parsing(f"adapter {path}"):
        return _settings_in(folder, path, method, dropout)


def _settings_in(folder: str, path: str, method: str, dropout: float) -> tuple[AdapterConfig, str]:
    try:
        told = read_json(path, inside=True)
    except OSError as problem:
        raise Refusal(f"adapter {path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except ValueError as problem:
        raise Refusal(f"adapter {path} is not JSON: {problem}", EX_DATAERR) from problem
    if not isinstance(told, dict):
        raise Refusal(f"adapter {path} holds no settings (not a JSON object)", EX_DATAERR)
    return settings_from(told, path, method, folder, dropout)


def settings_from(
    told: Mapping[str, Any], path: str, method: str, folder: str = "", dropout: float = 0.0
) -> tuple[AdapterConfig, str]:
    """`path`: where they are from, in words."""
    for key, allowed in _PLAIN.items():
        if told.get(key, allowed[0]) not in allowed:
            raise Refusal(
                f"adapter {folder or path}: {key} is {str(told[key])[:60]!r}, which Stoker does not support", EX_CONFIG
            )
    rank, alpha = told.get("r"), told.get("lora_alpha")
    if type(rank) is not int or not isinstance(alpha, (int, float)) or not (rank >= 1 and 0 < alpha < math.inf):
        raise Refusal(f"adapter {path}: r is {str(rank)[:20]}, lora_alpha {str(alpha)[:20]}", EX_DATAERR)
    names = {key: _names(told.get(key), f"adapter {path}: {key}") for key in ("target_modules", "modules_to_save")}
    if (
        told.get("task_type") == _SCORES
    ):  # no layer of the decoder; peft names a head `classifier` too, and keeps one of them
        names["modules_to_save"] = [name for name in names["modules_to_save"] if name not in (SCORE, "classifier")]
    config = AdapterConfig(
        method=method, lora_rank=rank, lora_alpha=float(alpha), lora_targets=",".join(names["target_modules"]),
        lora_dropout=dropout, rslora=told.get("use_rslora") is True, also_train=",".join(names["modules_to_save"]),
        continue_from=folder,
    )  # fmt: skip
    base = told.get("base_model_name_or_path")
    return config, base if isinstance(base, str) else ""


def _names(value: Any, where: str) -> list[str]:
    if value is None:
        return []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Refusal(f"{where} is not a list of names", EX_DATAERR)
    return sorted(set(names))  # peft itself writes some twice


@torch.no_grad()
def load(model: Decoder, told: AdapterConfig, folder: str, say: Say) -> None:
    """Fills the adapters that `attach` made from a folder of peft's."""
    stored = checked(model.config, told, folder, scored=bool(model.own))
    for target in targets(model.config, told):
        adapter = _layer(model, target).adapter
        assert adapter is not None
        pairs = [[read_stored(stored[one]) for one in pair_names(name)] for name in target.names]
        for parameter, pieces in zip((adapter.a, adapter.up), zip(*pairs, strict=True), strict=True):
            together = torch.cat([piece.float() for piece in pieces])
            parameter.copy_(like(together.to(parameter.device), parameter))
    c, family = model.config, family_of(model.config)
    for name in extra(c, told):
        extras = [read_stored(stored[extra_name(one)]) for one in family.tensor(name, c)]
        together = torch.cat([piece.t() if family.turned(name) else piece for piece in extras]).float()
        parameter = model.get_parameter(name)
        parameter.copy_(like(together.to(parameter.device), parameter))
    say(f"adapter from {folder}: rank {told.lora_rank}, {plural(len(stored), 'tensor')}")


def pair_names(name: str) -> tuple[str, str]:
    """Of A and B beside the layer that the model's folder calls so."""
    return f"{_PREFIX}{name}{_A}", f"{_PREFIX}{name}{_B}"


def extra_name(name: str) -> str:
    """Of a tensor that learned as a whole."""
    return f"{_PREFIX}{name}"


def checked(c: ModelConfig, told: AdapterConfig, folder: str, *, scored: bool) -> dict[str, Stored]:
    """The folder's tensors, all that this model needs and no others. `scored`: it may have a reward model's head."""
    with parsing(f"adapter {folder}"):
        return _checked(c, told, folder, scored)


def shapes_of(c: ModelConfig, told: AdapterConfig) -> dict[str, tuple[int, ...]]:
    """Of its tensors, by peft's names, as they are stored."""
    wanted: dict[str, tuple[int, ...]] = {}
    for target in targets(c, told):
        for name, (begin, end) in zip(target.names, target.parts(), strict=True):
            a, b = pair_names(name)
            wanted |= {a: (told.lora_rank, target.inputs), b: (end - begin, told.lora_rank)}
    family, sizes = family_of(c), dict(tensors(c))
    for name in extra(c, told):
        for one, size in zip(family.tensor(name, c), sizes[name], strict=True):
            wanted[extra_name(one)] = Part(one, size, family.turned(name)).stored
    return wanted


def _checked(c: ModelConfig, told: AdapterConfig, folder: str, scored: bool) -> dict[str, Stored]:
    wanted, stored = shapes_of(c, told), stored_tensors(folder)
    for name, size in wanted.items():
        refuse_misfit(stored.get(name), name, size, folder)
    left = sorted(stored.keys() - wanted.keys() - ({_SCORE_NAME} if scored else set()))
    if left == [_SCORE_NAME]:
        raise Refusal(f"adapter {folder} is a reward model's: it gives scores, not answers", EX_CONFIG)
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise Refusal(f"adapter {folder}: this model has no place for {left[0]}{more}", EX_CONFIG)
    return {name: stored[name] for name in wanted}


def refuse_misfit(one: Stored | None, name: str, shape: tuple[int, ...], folder: str) -> None:
    if one is None:
        raise Refusal(f"adapter {folder}: {name} is missing from its weights", EX_DATAERR)
    if one.shape != shape:
        raise Refusal(
            f"adapter {folder}: {name} is {list(one.shape)}, and this model needs {list(shape)}: an adapter for another"
            " model",
            EX_CONFIG,
        )


def score_in(folder: str) -> Stored | None:
    """The head of an adapter that scores."""
    if not is_adapter(folder) or not os.path.exists(os.path.join(folder, WEIGHTS)):
        return None
    with parsing(f"adapter {folder}"):
        score = stored_tensors(folder).get(_SCORE_NAME)
    if score is not None and (len(score.shape) != 2 or score.shape[0] != 1):
        raise Refusal(f"adapter {folder}: its score is {list(score.shape)}: only one number is read", EX_DATAERR)
    return score


def stored_tensors(folder: str) -> dict[str, Stored]:
    path = os.path.join(folder, WEIGHTS)
    if not os.path.exists(path):
        pickled = os.path.exists(os.path.join(folder, "adapter_model.bin"))
        why = (
            "; adapter_model.bin is a pickle, which can run any code: save it with peft as safetensors"
            if pickled
            else ""
        )
        raise Refusal(f"adapter {folder}: it has no {WEIGHTS}{why}", EX_NOINPUT)
    return header(path)


def held(model: nn.Module) -> Mapping[str, int]:
    """Bytes of what learns, of frozen parameters, and of codes."""
    found = {"learned": 0, "frozen": 0, "codes": 0}
    for parameter in model.parameters():
        found["learned" if parameter.requires_grad else "frozen"] += local(parameter).nbytes
    for module in model.modules():
        for part in getattr(module, "quantized", ()):
            found["codes"] += part.codes.nbytes + part.scales.nbytes + part.second.nbytes + part.offset.nbytes
    return found
