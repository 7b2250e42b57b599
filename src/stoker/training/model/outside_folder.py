"""Opens a model's weights for transformers' own modules, and shortens the exceptions they raise."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.contract.safe_io import write_atomic
from stoker.contract.text import escape
from stoker.training.model.hf_config import GENERATION, INDEX, WEIGHTS, stored_in


@contextmanager
def only_weights(folder: str) -> Iterator[str]:
    """Yield a temporary folder with links to the safetensors files: transformers finds no pickle, adapter or code in it."""
    paths = sorted({tensor.path for tensor in stored_in(folder).values()})
    if len(paths) == 1:
        links = {WEIGHTS: paths[0]}
    else:
        links = {os.path.basename(path): path for path in [*paths, os.path.join(folder, INDEX)]}
    with tempfile.TemporaryDirectory(prefix="stoker-") as fresh:
        for name, path in links.items():
            os.symlink(os.path.abspath(path), os.path.join(fresh, name))
        write_atomic(os.path.join(fresh, GENERATION), "{}", durable=False)  # transformers 5 fails without one
        yield fresh


def first_line(problem: Exception) -> str:
    """Return an exception's first line, with its class where the text alone says little."""
    text = escape(str(problem).strip().partition("\n")[0], 200)
    if text and isinstance(problem, (OSError, ValueError, RuntimeError)):
        return text
    return f"{type(problem).__name__} {text}"
