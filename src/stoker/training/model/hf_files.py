"""The weights of a folder, seen from their headers alone: which tensors lie where, and whether a model of some shape
can be filled with them.

No torch here: the launcher can say what does not fit before any rank starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from stoker.contract.names import EX_CONFIG, EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.shape import shape
from stoker.contract.tensorheader import read_header
from stoker.contract.untrusted import read_json
from stoker.training.model.config import ModelConfig
from stoker.training.model.families import family_of
from stoker.training.model.hf_config import shape_of
from stoker.training.model.rows import tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_COMPARED_AT_ONCE = 1 << 24
_GROW = ("embed.weight", "head.weight")  # with the vocabulary


@shape
class Part:
    name: str  # theirs
    shape: tuple[int, ...]


@shape
class Place:
    name: str  # ours
    parts: tuple[Part, ...]


def places(c: ModelConfig) -> Iterator[Place]:
    """Every tensor of the model once, by our name and its family's: a tied head is the embedding. What the family stores
    as one is one part.
    """
    family = family_of(c)
    for name, sizes in tensors(c):
        theirs = family.tensor(name)
        if len(theirs) != len(sizes):
            sizes = ((sum(size[0] for size in sizes), *sizes[0][1:]),)
        yield Place(name, tuple(Part(part, size) for part, size in zip(theirs, sizes, strict=True)))


@shape
class Stored:
    """A tensor in a file: `begin` counts from the file's start."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


def check(folder: str, c: ModelConfig) -> dict[str, Stored]:
    """Name -> where it lies, of all the tensors this model needs. Whatever is missing, left over or of another shape is
    refused by name.
    """
    found = stored_in(folder)
    wanted = {part.name: (part, place.name in _GROW) for place in places(c) for part in place.parts}
    own = shape_of(folder).vocab_size
    for name, (part, grows) in wanted.items():
        if grows and name in found and found[name].shape[:1] != (own,):
            # Else 36 KB of a stranger's would ask for any number of new rows.
            rows = found[name].shape[0] if found[name].shape else 0
            raise Refusal(f"model {folder}: {name} has {rows} rows and config.json a vocab_size of {own}", EX_DATAERR)
        if name not in found:
            raise Refusal(f"model {folder}: {name} is missing from its weights", EX_DATAERR)
        _fits(folder, found[name], part, grows)
    left = [
        name for name in found if name not in wanted and not name.endswith(".rotary_emb.inv_freq")
    ]  # older folders keep what follows from rope_theta
    embedding, head = (family_of(c).tensor(name)[0] for name in _GROW)
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
    return {name: found[name] for name in wanted}


def _fits(folder: str, stored: Stored, part: Part, grows: bool) -> None:
    if stored.dtype not in BYTES:
        raise Refusal(
            f"model {folder}: {part.name} is {stored.dtype}; weights of {', '.join(BYTES)} load, quantised ones don't",
            EX_DATAERR,
        )
    if stored.shape == part.shape:
        return
    if not grows or stored.shape[1:] != part.shape[1:]:
        raise Refusal(
            f"model {folder}: {part.name} is {list(stored.shape)}, this model's is {list(part.shape)}: another model's"
            " weights",
            EX_DATAERR,
        )
    if stored.shape[0] > part.shape[0]:
        line = (
            f"model.vocab_size {part.shape[0]} is smaller than the {stored.shape[0]} rows of {part.name} in {folder}:"
            " leave it out, or give that many"
        )
        raise Refusal(line, EX_CONFIG)


def stored_in(folder: str) -> dict[str, Stored]:
    """All tensors of model.safetensors, of the files its index names, or of the only safetensors file there is."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as problem:
        raise Refusal(f"model {folder}: {problem.strerror}", EX_NOINPUT) from problem
    files = [name for name in names if name.endswith(".safetensors")]
    if WEIGHTS in files:
        files = [WEIGHTS]
    elif INDEX in names:
        return _indexed(folder)
    if not files:
        pickled = next((name for name in names if name.endswith(PICKLES)), None)
        why = (
            f"{pickled} is a pickle, which can run any code: save it as safetensors first"
            if pickled
            else f"no {WEIGHTS} in it"
        )
        raise Refusal(f"model {folder}: {why}", EX_NOINPUT)
    if len(files) > 1:
        raise Refusal(
            f"model {folder}: {len(files)} safetensors files ({files[0]}, {files[1]} …) and no {INDEX} that says what"
            " is where",
            EX_DATAERR,
        )
    return _header(os.path.join(folder, files[0]))


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
        raise Refusal(f"{path} names {outside}, which is no safetensors file of that folder", EX_DATAERR)
    headers = {name: _header(os.path.join(folder, name)) for name in files}
    for name, shard in where.items():
        if name not in headers[shard]:
            raise Refusal(f"{path} says that {name} is in {shard}, and it is not", EX_DATAERR)
    return {name: headers[shard][name] for name, shard in where.items()}


def _header(path: str) -> dict[str, Stored]:
    try:
        found = read_header(path).tensors
    except FileNotFoundError as problem:
        raise Refusal(f"{path} is missing: the folder is not complete", EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"{path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except ValueError as problem:
        raise Refusal(f"{path} is damaged: {problem}", EX_DATAERR) from problem
    return {name: Stored(path, one.dtype, one.shape, one.begin, one.end - one.begin) for name, one in found.items()}


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
