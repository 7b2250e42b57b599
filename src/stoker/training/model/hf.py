"""Weights from and to folders as `transformers` writes them, one tensor at a time: the same logits on both sides. Shapes
are matched in hf_config, hf_files and families/, which need no torch; the hub is in hf_hub.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from stoker.contract.errors import EX_CANTCREAT, Refusal, parsing
from stoker.contract.frozen import replace
from stoker.contract.progress import BYTES, Progress
from stoker.contract.units import format_bytes, plural
from stoker.training.checkpoint.snapshot import local_block
from stoker.training.model import adapters, nf4, outside
from stoker.training.model.config import QLORA, AdapterConfig, ModelConfig, parameters
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import Stored, base_of, config_of, is_adapter, kept_of, shape_of
from stoker.training.model.hf_files import Part, places, refuse_beyond_memory
from stoker.training.model.hf_hub import TOKENIZER_FILES
from stoker.training.model.hf_read import Added, Source, added_by
from stoker.training.model.hf_write import DTYPES, Export, add_files, fresh_folder, size_of
from stoker.training.model.linear import Linear
from stoker.training.model.nf4_shards import Given
from stoker.training.model.pieces import collected, give_back

Say = Callable[[str], None]
_CODE = 0.5  # bytes of a weight in 4 bits
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # what compile and activation checkpointing put into names


def named(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Parameters by the names they have in an unwrapped decoder."""
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, parameter


def load(model: Decoder | outside.Outside, folder: str, say: Say) -> None:
    """Fills the model, sharded or not. Every rank reads for itself, of shards its own; nothing is exchanged."""
    if isinstance(model, outside.Outside):
        return outside.load(model, folder, say)
    added = added_by(folder, model.config, bool(model.own), say) if is_adapter(folder) else None
    load_named(model, named(model), folder, say, added)


@torch.no_grad()
def load_named(
    model: Decoder, some: Iterable[tuple[str, Tensor]], folder: str, say: Say, added: Added | None = None
) -> None:
    """`some`: the model's parameters; what is none of a decoder's stays as it is."""
    c, device = model.config, model.tables[0][0].device
    source, parameters = Source(folder, c, added, device), dict(some)
    assert not any(parameter.is_meta for parameter in parameters.values()), (
        "the model is on the meta device: to_empty() first"
    )
    stored = source.stored
    with closing(source), Progress("loading weights", _size(stored.values()), unit=BYTES) as progress:
        for place in places(c):
            parameter = parameters.get(place.name)
            if parameter is None:  # 4 bits: one tensor of the folder at a time has more
                layer = model.get_submodule(place.name.removesuffix(".weight"))
                assert isinstance(layer, Linear), f"{place.name} is no parameter"
                if layer.cut is not None:
                    layer.cut.fill([_piece_in_4_bits(source, part, model.dtype) for part in place.parts])
                else:
                    adapters.quantize(layer, (_in_4_bits(source, part, model.dtype) for part in place.parts))
            elif hasattr(parameter, "device_mesh"):
                block, _ = local_block(place.name, parameter)
                assert tuple(block.data.shape[1:]) == tuple(parameter.shape[1:]), f"{place.name} is not cut into rows"
                source.fill(place, block.data, block.offset[0])
            else:
                source.fill(place, parameter)
            progress.tick(_size(stored[part.name] for part in place.parts))
    rows = stored[next(iter(places(c))).parts[0].name].shape[0]  # the embedding comes first
    padded = (
        f"; rows {rows} to {c.vocab_size - 1} of the vocabulary are new: the mean of the others"
        if rows < c.vocab_size
        else ""
    )
    say(f"weights from {folder}: {plural(len(stored), 'tensor')}, {format_bytes(_size(stored.values()))}{padded}")


def _size(stored: Iterable[Stored]) -> int:
    return sum(one.size for one in stored)


def _in_4_bits(source: Source, part: Part, dtype: torch.dtype) -> Tensor | nf4.Quantized:
    """The folder's own codes, where it has some: quantizing twice would lose more."""
    codes = source.codes(part)
    if codes is None:
        return source.rows(part).to(dtype)
    # In fp16 not by way of bf16, which such a card computes slowly and rounds more.
    return replace(codes, dtype=dtype) if dtype == torch.float16 else codes


def _piece_in_4_bits(source: Source, part: Part, dtype: torch.dtype) -> Given:
    """The same of a weight in shards, whose elements are read when a rank knows which it needs."""
    codes = source.codes(part)
    if codes is not None:
        return codes
    return lambda begin, end: source.elements(part, begin, end).to(dtype)


def opened(
    folder: str, context: int, dtype: torch.dtype, device: torch.device, say: Say, kind: type[Decoder] = Decoder,
    load: Callable[[Decoder, str, Say], None] = load,
) -> Decoder:  # fmt: skip
    """The folder's model. Built without numbers: drawing some first would take longer than reading the folder's."""
    c = shape_of(folder)
    if device.type == "cpu":
        refuse_beyond_memory(folder, parameters(c), dtype.itemsize)
    with torch.device("meta"):
        model = kind(c, context, dtype)
    model.place(device)
    load(model, folder, say)
    return model


def opened_in_4_bits(folder: str, context: int, dtype: torch.dtype, device: torch.device, say: Say) -> Decoder:
    """To answer: matrices as NF4 codes. An adapter stays beside them: rounded to 4 bits, what it adds would be lost."""
    told, base = AdapterConfig(method=QLORA), folder
    if is_adapter(folder):
        adapters.check_base(folder)
        told, base = adapters.settings_of(folder, QLORA)[0], base_of(folder)
    c = shape_of(base)
    if device.type == "cpu":
        refuse_beyond_memory(folder, parameters(c), _CODE)
    with torch.device("meta"):
        model = Decoder(c, context, dtype)
    for line in adapters.freeze(model, told):
        say(line)
    model.place(device)
    load_named(model, named(model), base, say)
    if told.continue_from:
        adapters.attach(model, told, seed=0)
        adapters.load(model, told, folder, say)
    return model


def save(model: Decoder | outside.Outside, folder: str, *, say: Say, without: Sequence[str] = (), **how: Any) -> None:
    """Of a sharded model all ranks call this, one with `write`. `without`: no decoder's; `how`: of `save_from`."""
    if isinstance(model, outside.Outside):
        return outside.save(model, folder, say=say, **how)
    give_back(model)
    tensors = ((name, tensor) for name, tensor in named(model) if name not in without)
    save_from(tensors, model.config, folder, context_length=model.context_length, say=say, **how)


@torch.no_grad()
def save_from(
    tensors: Iterable[tuple[str, Tensor]],
    c: ModelConfig,
    folder: str,
    *,
    context_length: int,
    say: Say,
    dtype: torch.dtype | None = None,
    tokenizer_folder: str | None = None,
    end_ids: Sequence[int] = (),
    write: bool = True,
    more: Callable[[str], None] | None = None,
) -> None:
    """A folder for `transformers`, there when it is complete. What the folder that the model was loaded from says
    stays. `end_ids`: tokens that end a text, besides those; `dtype`: else bf16 where the loaded weights have 16 bits.
    `more` puts files of its own beside.
    """
    kept = kept_of(c, say if write else lambda line: None)
    dtype = dtype or (torch.bfloat16 if kept.is_half else torch.float32)
    gathered = (_gathered(name, tensor, dtype) for name, tensor in tensors)
    try:
        if write:
            with parsing(f"model {c.load}: what it says of itself"):
                config = config_of(c, kept.context(context_length), DTYPES[dtype][1])
                config, generation = kept.changed(config, end_ids, tokenizer_folder)
            size = sum(size_of(part, dtype) for place in places(c) for part in place.parts)
            with fresh_folder(folder, size) as fresh:
                export = Export(fresh, os.path.abspath(folder), c, dtype)
                with Progress("writing weights", size, unit=BYTES) as progress:
                    for name, tensor in gathered:
                        export.put(name, tensor)
                        progress.tick(tensor.numel() * dtype.itemsize)
                    export.finish()
                add_files(fresh, config, generation, ((tokenizer_folder, name) for name in TOKENIZER_FILES))
                if more is not None:
                    more(fresh)
            say(f"wrote {folder}: {format_bytes(size)} of {DTYPES[dtype][1]} as {config['architectures'][0]}")
    except OSError as problem:
        raise Refusal(f"{folder}: the model can't be written: {problem.strerror or problem}", EX_CANTCREAT) from problem
    finally:
        for _ in gathered:  # whatever became of the writing: the other ranks gather all of it, and wait for this one
            pass


def _gathered(name: str, tensor: Tensor, dtype: torch.dtype) -> tuple[str, Tensor]:
    return name, collected(tensor.detach().to(dtype))  # cast before it travels
