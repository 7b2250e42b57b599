"""Which tensors lie where in a folder's safetensors files, by their headers. No torch."""

from __future__ import annotations

import os

from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.shape import shape
from stoker.contract.tensorheader import read_header
from stoker.contract.untrusted import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@shape
class Stored:
    """A tensor in a file: `begin` counts from the file's start."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


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
        raise Refusal(f"{path} is missing: the folder is not complete; download it again", EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"{path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except ValueError as problem:
        raise Refusal(f"{path} is damaged: {problem}; download it again", EX_DATAERR) from problem
    return {name: Stored(path, one.dtype, one.shape, one.begin, one.end - one.begin) for name, one in found.items()}
