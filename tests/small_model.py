"""A model of one small layer with a tokenizer, written without torch: what tests damage, export and chat with."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from stoker.training.model.config import ModelConfig
from stoker.training.model.hf_config import config_of
from stoker.training.model.hf_files import places
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

SHAPE = ModelConfig(layers=1, dim=16, heads=2, kv_heads=1, head_dim=8, ff=16, vocab_size=260, tied=True)


def header_of_model() -> tuple[dict[str, Any], int]:
    """Return the header of its weights' file, and how many bytes of data follow."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in (part for place in places(SHAPE) for part in place.parts):
        begin, end = end, end + 4 * math.prod(part.shape)
        header[part.name] = {"dtype": "F32", "shape": list(part.shape), "data_offsets": [begin, end]}
    return header, end


def write_weights(path: Path, header: bytes, data: int, length: int | None = None) -> None:
    """Write a safetensors file of zeros. `length`: what it says of its header's length; None: the truth."""
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + bytes(data))


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(SHAPE, 64, "float32")))
    header, data = header_of_model()
    write_weights(folder / "model.safetensors", json.dumps(header).encode(), data)
    bytes_tokenizer().save(str(folder))
