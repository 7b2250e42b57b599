"""A stranger's folder for transformers' own modules: no larger than its stored weights, and nothing but these is opened."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as modules

from stoker.contract.errors import reading
from stoker.contract.names import EX_DATAERR, Refusal
from stoker.contract.quantities import counted
from stoker.contract.safe_io import write_whole
from stoker.contract.text import printable
from stoker.training.model.hf_config import GENERATION, INDEX, WEIGHTS, stored_in

# A module is compared with what its folder stores while it grows: whichever number of config.json makes it grow.
_PARTS, _PARTS_EACH = 20_000, 64  # modules and tensors that any model may have, and for each tensor that is stored
_TIMES = 4  # numbers, for each that is stored: a head that is tied to the embedding is made twice
_NUMBERS, _BUFFERS = 1 << 24, 1 << 28  # that any model may have besides: parameters, tables of angles and masks
_MOST_LAYERS, _MOST_COUNT = 10_000, 1 << 40
_LAYERED = ("layer", "depth", "period")
_ROOM = 1 << 30  # bytes of the host while modules without numbers are made
_TENSORS_A_SECOND, _NUMBERS_A_SECOND = 500, 20_000_000


def refuse_counts(keys: Any, folder: str, name: str = "") -> None:
    """Whole numbers that no model has: transformers goes through as many layers before any module is there."""
    if isinstance(keys, dict):
        for key, value in keys.items():
            refuse_counts(value, folder, str(key))
    elif isinstance(keys, list):
        for value in keys:
            refuse_counts(value, folder, name)
    elif type(keys) is int:
        most = _MOST_LAYERS if any(word in name.lower() for word in _LAYERED) else _MOST_COUNT
        if abs(keys) > most:
            line = f"model {folder}: {printable(name, 80)} in its config.json is {keys}: at most {most:,} is believed"
            raise Refusal(line, EX_DATAERR)


@contextmanager
def bounded(folder: str) -> Iterator[None]:
    """Within it modules are made without numbers; one that is much larger than the folder's weights is refused."""
    stored = stored_in(folder)
    numbers = sum(math.prod(one.shape) for one in stored.values())
    left = {
        "modules": _PARTS + _PARTS_EACH * len(stored),
        "parameters": _NUMBERS + _TIMES * numbers,
        "buffers": _BUFFERS + _TIMES * numbers,
    }

    def take(what: str, size: int) -> None:
        left[what] -= size
        if left[what] < 0:
            line = (
                f"model {folder}: its config.json makes many more {what} than its {len(stored):,} stored tensors have"
            )
            raise Refusal(f"{line} ({counted(numbers, 'number')}): they don't belong together", EX_DATAERR)

    def count(what: str) -> Any:
        def of(owner: Any, name: str, part: Any) -> None:
            take("modules", 1)
            take(what, part.numel() if isinstance(part, torch.Tensor) else 0)

        return of

    hooks = (
        modules.register_module_module_registration_hook(count("modules")),
        modules.register_module_parameter_registration_hook(count("parameters")),
        modules.register_module_buffer_registration_hook(count("buffers")),
    )
    try:
        with reading(f"model {folder}: its config.json", Exception):
            with torch.device("meta"):
                yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def only_weights(folder: str) -> Iterator[str]:
    """A folder with links to its safetensors files: no pickle, adapter or code that lies beside them is found there."""
    files = {one.path for one in stored_in(folder).values()}
    named = {os.path.basename(path): path for path in files}
    if len(files) == 1:
        named = {WEIGHTS: files.pop()}
    else:
        named[INDEX] = os.path.join(folder, INDEX)
    with tempfile.TemporaryDirectory(prefix="stoker-") as fresh:
        for name, path in named.items():
            os.symlink(os.path.abspath(path), os.path.join(fresh, name))
        write_whole(os.path.join(fresh, GENERATION), "{}", durable=False)  # transformers 5 fails without one
        yield fresh


def first_line(problem: Exception) -> str:
    text = printable(str(problem).strip().partition("\n")[0], 200)
    return (
        text
        if isinstance(problem, (OSError, ValueError, RuntimeError)) and text
        else f"{type(problem).__name__} {text}"
    )
