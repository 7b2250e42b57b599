"""The weights of a folder, by their headers: which tensors lie where, and whether a model of some shape can be filled
with them. No torch: the launcher can say what does not fit before any rank starts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from stoker.contract import host_memory
from stoker.contract.errors import EX_CONFIG, EX_DATAERR, EX_UNAVAILABLE, Refusal, parsing
from stoker.contract.frozen import frozen
from stoker.contract.units import format_bytes, plural
from stoker.training.model.config import ModelConfig, tensors
from stoker.training.model.families import family_of
from stoker.training.model.hf_config import Stored, shape_of, stored_in
from stoker.training.model.nf4_size import NF4_PARTS, description, parts_of

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_COMPARED_AT_ONCE = 1 << 24
_GROW = ("embed.weight", "head.weight")  # with the vocabulary


@frozen
class Part:
    name: str  # theirs
    shape: tuple[int, ...]  # ours
    transposed: bool = False  # they store it the other way round

    @property
    def stored(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape


@frozen
class Place:
    name: str  # ours
    parts: tuple[Part, ...]


def places(c: ModelConfig) -> Iterator[Place]:
    """Every tensor once, by our name and its family's: a tied head is the embedding, what they join is one part."""
    family = family_of(c)
    for name, sizes in tensors(c):
        theirs, turned = family.tensor(name, c), family.turned(name)
        if len(theirs) != len(sizes):
            sizes = ((sum(size[0] for size in sizes), *sizes[0][1:]),)
        yield Place(name, tuple(Part(part, size, turned) for part, size in zip(theirs, sizes, strict=True)))


def refuse_beyond_memory(folder: str, numbers: int, width: float) -> None:
    """Refuse weights that don't fit in this machine's memory, before the kernel ends the process. `width`: bytes per parameter."""
    needed, total = int(numbers * width), host_memory.read_memory()[0]
    line = f"model {folder}: its {numbers:,} parameters take {format_bytes(needed)} of memory or more"
    if needed > total:
        raise Refusal(f"{line}, and this machine has {format_bytes(total)}", EX_UNAVAILABLE)
    if needed > (free := host_memory.read_usable_memory()):
        raise Refusal(f"{line}, and {format_bytes(free)} is free here", EX_UNAVAILABLE)


def check(folder: str, c: ModelConfig) -> dict[str, Stored]:
    """Name -> where it lies, of all tensors of this model; missing, left over or misshapen ones are refused."""
    with parsing(f"model {folder}"):
        return _check(folder, c)


def _check(folder: str, c: ModelConfig) -> dict[str, Stored]:
    family = family_of(c)
    wanted = {part.name: (part, place.name in _GROW) for place in places(c) for part in place.parts}
    found = _with_prefix(stored_in(folder), family.prefix, wanted)
    own = shape_of(folder).vocab_size
    for name, (part, grows) in wanted.items():
        if grows and name in found and found[name].shape[:1] != (own,):
            rows = found[name].shape[0] if found[name].shape else 0
            raise Refusal(f"model {folder}: {name} has {rows} rows and config.json a vocab_size of {own}", EX_DATAERR)
        if name not in found:
            raise Refusal(f"model {folder}: {name} is missing from its weights", EX_DATAERR)
        if f"{name}.{NF4_PARTS[-1]}" in found:
            _fits_in_4_bits(folder, found, part)
        else:
            _fits(folder, found[name], part, grows)
    codes = {f"{name}.{part}" for name in wanted for part in NF4_PARTS} & found.keys()
    left = [name for name in found.keys() - codes if name not in wanted and not name.endswith(tuple(family.buffers))]
    embedding, head = (family.tensor(name, c)[0] for name in _GROW)
    if c.tied and head in left:
        if not _equal(found[head], found[embedding]):
            line = (
                f"model {folder}: {head} differs from {embedding}, and its config.json says they are tied: set"
                " tie_word_embeddings to false"
            )
            raise Refusal(line, EX_DATAERR)
        left.remove(head)
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise Refusal(f"model {folder}: our decoder has no place for {left[0]}{more} of its weights", EX_DATAERR)
    return {name: found[name] for name in (*wanted, *sorted(codes))}


def _with_prefix(found: dict[str, Stored], prefix: str, wanted: Collection[str]) -> dict[str, Stored]:
    """Folders of a model without its head lack the prefix in all names."""
    if any(name in wanted for name in found) or not any(prefix + name in wanted for name in found):
        return found
    return {prefix + name: stored for name, stored in found.items()}


def _fits_in_4_bits(folder: str, found: dict[str, Stored], part: Part) -> None:
    numbers, stored = math.prod(part.shape), found[part.name]
    if part.transposed:
        raise Refusal(f"model {folder}: {part.name} has 4 bits and is transposed, which Stoker can't read", EX_DATAERR)
    if stored.size != numbers // 2 or numbers % 64:
        raise Refusal(
            f"model {folder}: {part.name} has {plural(stored.size, 'byte')} of codes, and {numbers / 2:,.0f} are needed for"
            f" {list(part.shape)}",
            EX_DATAERR,
        )
    where = f"model {folder}: {part.name} is not stored as NF4 weights are:"
    missing = next((name for name in NF4_PARTS if f"{part.name}.{name}" not in found), None)
    if missing:
        line = f"{where} {part.name}.{missing} is missing (only NF4 with double quantization is read)"
        raise Refusal(line, EX_DATAERR)
    for name, (dtype, count) in parts_of(numbers).items():
        own = found[f"{part.name}.{name}"]
        if (own.dtype, math.prod(own.shape)) != (dtype, count):
            theirs = f"{math.prod(own.shape):,} numbers of {own.dtype}"
            raise Refusal(f"{where} {name} has {theirs}, and {count:,} of {dtype} are needed", EX_DATAERR)
    try:
        about = description(_state(found[f"{part.name}.{NF4_PARTS[-1]}"]))
    except ValueError as problem:
        raise Refusal(f"{where} {problem}", EX_DATAERR) from problem
    if tuple(about["shape"]) != part.shape:
        line = f"model {folder}: {part.name} says it is {about['shape']}, and this model needs {list(part.shape)}"
        raise Refusal(line, EX_DATAERR)


def _state(stored: Stored) -> bytes:
    if stored.dtype != "U8":
        raise ValueError(f"its description has {plural(stored.size, 'byte')} of {stored.dtype}")
    with open(stored.path, "rb") as file:
        file.seek(stored.begin)
        return file.read(stored.size)


def _fits(folder: str, stored: Stored, part: Part, grows: bool) -> None:
    if stored.dtype not in BYTES:
        raise Refusal(
            f"model {folder}: {part.name} is {stored.dtype}; weights of {', '.join(BYTES)} load, quantised ones don't",
            EX_DATAERR,
        )
    if stored.shape == part.stored:
        return
    if not grows or stored.shape[1:] != part.shape[1:]:
        raise Refusal(
            f"model {folder}: {part.name} is {list(stored.shape)}, this model's is {list(part.stored)}: another model's"
            " weights",
            EX_DATAERR,
        )
    if stored.shape[0] > part.shape[0]:
        line = (
            f"model.vocab_size {part.shape[0]} is smaller than the {stored.shape[0]} rows of {part.name} in {folder}:"
            " leave it out, or give that many"
        )
        raise Refusal(line, EX_CONFIG)


def _equal(one: Stored, other: Stored) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open(one.path, "rb") as first, open(other.path, "rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        for place in range(0, one.size, _COMPARED_AT_ONCE):
            count = min(_COMPARED_AT_ONCE, one.size - place)
            if first.read(count) != second.read(count):
                return False
    return True
