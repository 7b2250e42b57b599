"""A model's folder as one GGUF file, through the package `gguf`: weights, sizes, tokenizer, chat template.

Which families there are in GGUF, and what they are called, is in model/families. What a reader of GGUF would compute
otherwise is refused. One tensor at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker import __version__
from stoker.contract.errors import EX_CANTCREAT, EX_DATAERR, EX_UNAVAILABLE, EX_USAGE, Refusal, parsing
from stoker.contract.frozen import frozen
from stoker.contract.progress import BYTES, Progress
from stoker.contract.safe_io import open_regular, sync_folder, temporary_name
from stoker.contract.units import format_bytes, plural
from stoker.training.model import hf_stream
from stoker.training.model.config import ModelConfig, lacking
from stoker.training.model.families import family_of
from stoker.training.model.hf_config import Stored, base_of, is_quantized, shape_of
from stoker.training.model.hf_files import check, places
from stoker.training.model.hf_write import refuse_existing
from stoker.training.tokenizer.definition import GGUF_BYTE_LEVEL, GGUF_SPLITTERS, GGUF_SPLITTERS_WHOLE_WORDS
from stoker.training.tokenizer.template import DEFAULT, templates_of
from stoker.training.tokenizer.tokenizer import Tokenizer
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

ENDING = ".gguf"
_MARK = "stoker.export"  # a key of every file that we write
_OPTIONS = ("qkv_bias", "out_bias", "mlp_bias", "rope_kind")
_HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}
Say = Callable[[str], None]


@frozen
class _Entry:
    name: str  # in GGUF
    stored: Stored
    heads: int  # of queries or keys whose rows change places; 0: as they are
    dtype: torch.dtype  # vectors are always fp32 there


def write(
    folder: str, out: str, dtype: str | None, tokenizer: str | None, say: Say, overwrite: bool = True
) -> None:  # fmt: skip
    """Write the model to the file `out`, which appears when it is complete.

    Without `overwrite` an earlier export there is refused; any other file always is.
    """
    if not out.endswith(ENDING):
        raise Refusal(f"{out}: a GGUF file's name ends in {ENDING}", EX_CANTCREAT)
    if os.path.isdir(out):
        raise Refusal(f"{out} is a folder: give a file", EX_CANTCREAT)
    if os.path.lexists(out) and not _is_ours(out):
        line = f"{out} already exists and was not written by stoker export: give another name, or remove it first"
        raise Refusal(line, EX_CANTCREAT)
    if not overwrite:
        refuse_existing(out)
    if base_of(folder) != folder or is_quantized(folder):
        what = "an adapter: export it with --merge first" if base_of(folder) != folder else "in 4 bits: export it first"
        raise Refusal(f"{folder} is {what}, then export that folder with --gguf", EX_USAGE)
    library = _library()
    c, words = shape_of(folder), load_tokenizer(tokenizer or folder)
    kind = _refuse(folder, c, words)
    entries = list(_entries(library, folder, c, dtype))
    fresh = temporary_name(os.path.abspath(out))
    try:
        os.makedirs(os.path.dirname(fresh), exist_ok=True)
        with parsing(f"model {folder}"):  # a number of its config.json that GGUF has no room for
            writer = library.GGUFWriter(fresh, kind)
            _describe(library, writer, folder, c)
            _add_words(library, writer, c, words)
            _put(library, writer, c, entries)
        with open(fresh, "rb") as file:
            os.fsync(file.fileno())
        os.replace(fresh, out)
        sync_folder(os.path.dirname(fresh))
    except OSError as problem:
        raise Refusal(f"{out}: the model can't be written: {problem.strerror or problem}", EX_CANTCREAT) from problem
    finally:
        if os.path.exists(fresh):
            os.unlink(fresh)
    say(f"wrote {out}: {format_bytes(os.path.getsize(out))} as {kind}, {plural(len(entries), 'tensor')}")


def _is_ours(path: str) -> bool:
    """A file that an earlier export wrote, not a link to one."""
    if os.path.islink(path):
        return False
    with os.fdopen(open_regular(path), "rb") as file:
        begin = file.read(1 << 16)
    return begin.startswith(b"GGUF") and _MARK.encode() in begin


def _library() -> Any:
    try:
        return import_module("gguf")
    except ImportError as problem:
        raise Refusal(
            "--gguf needs the package gguf, which is not installed: `pip install gguf`", EX_UNAVAILABLE
        ) from problem


def _refuse(folder: str, c: ModelConfig, words: Tokenizer) -> str:
    """What GGUF calls this family; or why it can't hold this model."""
    family = family_of(c)
    why = "" if family.gguf else f"Stoker can't write models of the family {family.name} as GGUF yet"
    if not why and (lacks := lacking(c, _OPTIONS)):
        why = f"a GGUF file of {family.gguf} has no {lacks}"
    if not why and c.rope_factor != 1.0 and c.rope_kind not in ("bands", "linear"):
        why = f"Stoker can't write its rotary scaling {c.rope_kind} as GGUF yet"
    told = words.told
    if not why and (told.kind != "BPE" or not told.decoding.byte_level or told.normalizer not in (None, "NFC")):
        why = "its tokenizer is not a byte-level BPE"
    if not why and words.vocab_size > c.vocab_size:
        why = f"its tokenizer has {plural(words.vocab_size, 'token')} and the model {c.vocab_size:,}"
    if not why and _splitter(words) is None:
        why = "GGUF has no name for how its tokenizer splits text into words"
    if why:
        raise Refusal(f"model {folder}: {why}; export a folder instead, without --gguf", EX_DATAERR)
    return family.gguf


def _splitter(words: Tokenizer) -> str | None:
    names = GGUF_SPLITTERS_WHOLE_WORDS if words.told.whole_words_first else GGUF_SPLITTERS
    return names.get(words.told.pattern or "")


def _entries(library: Any, folder: str, c: ModelConfig, dtype: str | None) -> Iterator[_Entry]:
    family = family_of(c)
    names = library.get_tensor_name_map(
        next(number for number, name in library.MODEL_ARCH_NAMES.items() if name == family.gguf), c.layers
    )
    stored = check(folder, c)
    turned = {"attention.qkv": (c.heads, c.kv_heads, 0)} if family.gguf_turns_neighbours else {}
    for place in places(c):
        inner = place.name.split(".", 2)[-1].rpartition(".")[0]
        for number, part in enumerate(place.parts):
            name = names.get_name(part.name, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise Refusal(f"model {folder}: GGUF has no name for {part.name}", EX_DATAERR)
            asked = {"bf16": torch.bfloat16, "fp32": torch.float32, None: _HALVES.get(stored[part.name].dtype)}[dtype]
            kind = torch.float32 if len(part.shape) == 1 else asked or torch.float32
            yield _Entry(name, stored[part.name], turned.get(inner, (0, 0, 0))[number % 3], kind)


def _describe(library: Any, writer: Any, folder: str, c: ModelConfig) -> None:
    writer.add_string(_MARK, __version__)
    writer.add_name(os.path.basename(os.path.abspath(folder)))
    writer.add_context_length(c.longest or 2048)
    writer.add_embedding_length(c.dim)
    writer.add_block_count(c.layers)
    writer.add_feed_forward_length(c.ff)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_vocab_size(c.vocab_size)
    if c.rope_factor != 1.0 and c.rope_kind == "linear":
        writer.add_rope_scaling_type(library.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(c.rope_factor)


def _add_words(library: Any, writer: Any, c: ModelConfig, words: Tokenizer) -> None:
    """Rows of the embedding without a token are named as unused."""
    told, kinds = words.told, library.TokenType
    tokens = [f"[PAD{number}]" for number in range(c.vocab_size)]
    types = [kinds.UNUSED] * c.vocab_size
    for some, kind in (
        (told.vocabulary, kinds.NORMAL),
        (told.added, kinds.USER_DEFINED),
        (told.special, kinds.CONTROL),
    ):
        for text, number in some.items():
            tokens[number], types[number] = text, kind
    writer.add_tokenizer_model(GGUF_BYTE_LEVEL)
    writer.add_tokenizer_pre(_splitter(words))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in told.merges])
    writer.add_add_bos_token(bool(words.begin))
    if words.begin:
        writer.add_bos_token_id(words.begin[0])
    ends = json.loads(c.kept).get("eos_token_id") if c.kept else None
    first = ends[0] if isinstance(ends, list) and ends else ends
    writer.add_eos_token_id(first if type(first) is int and 0 <= first < c.vocab_size else words.end_id)
    template = templates_of(words.config, words.files, words.where).get(DEFAULT)
    if template:
        writer.add_chat_template(template)


def _put(library: Any, writer: Any, c: ModelConfig, entries: list[_Entry]) -> None:
    factors = _factors(c)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for entry in entries:
        size = int(np.prod(entry.stored.shape)) * entry.dtype.itemsize
        raw = library.GGMLQuantizationType.BF16 if entry.dtype == torch.bfloat16 else None
        kind = np.dtype(np.float16 if entry.dtype == torch.float16 else np.float32)
        writer.add_tensor_info(entry.name, entry.stored.shape, kind, size, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    total = sum(entry.stored.size for entry in entries)
    with Progress("writing weights", total, unit=BYTES) as progress:
        for entry in entries:
            _put_tensor(writer, entry)
            progress.tick(entry.stored.size)
    writer.close()


def _put_tensor(writer: Any, entry: _Entry) -> None:
    whole = hf_stream.read_stored(entry.stored).to(entry.dtype)
    writer.write_tensor_data(_bytes(_neighbours(whole, entry.heads) if entry.heads else whole))


def _neighbours(rows: Tensor, heads: int) -> Tensor:
    """Of each head, row i and row i + half come to stand side by side: there, neighbours are turned together."""
    halves = rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _factors(c: ModelConfig) -> NDArray[np.float32] | None:
    """Scaling by bands is a divisor for each frequency."""
    if c.rope_kind != "bands" or c.rope_factor == 1.0:
        return None
    frequency = 1.0 / c.rope_theta ** (np.arange(0, c.head_dim, 2, dtype=np.float64) / c.head_dim)
    turns = c.rope_original * frequency / (2 * np.pi)
    kept = ((turns - c.rope_low) / (c.rope_high - c.rope_low)).clip(0, 1)
    found: NDArray[np.float32] = (1 / ((1 - kept) / c.rope_factor + kept)).astype(np.float32)
    return found
