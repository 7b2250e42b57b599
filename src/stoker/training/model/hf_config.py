"""A folder's config.json and the shape it stands for, both ways, by its family. What the block would compute differently
is refused. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.untrusted import read_json
from stoker.training.model.config import ModelConfig, check_options
from stoker.training.model.families import family_in, family_of
from stoker.training.model.families.family import CONFIG, ConfigJson

__all__ = ["CONFIG", "config_of", "shape_of"]
_LONGEST = 1 << 24  # bytes of it


def shape_of(folder: str) -> ModelConfig:
    """The shape that the folder's weights have, both 4.x's and 5.x's way of writing it."""
    told = _read(folder)
    family = family_in(told)
    if told.get("quantization_config"):
        method = told.get("quantization_config")
        kind = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method
        told.refuse(f"its weights are quantised ({kind}): load the folder they were made from")
    c = family.shape(told)
    check_options(c, f"model {folder}")
    return c


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
    """What `transformers` 4 and 5 open. `end_ids`: tokens that end a text; left out, some families would take 2 for it."""
    family = family_of(c)
    ends = list(end_ids) if len(end_ids) > 1 else next(iter(end_ids), None)
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
