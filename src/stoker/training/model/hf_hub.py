"""`model.load` as a folder: the one that is named, or a hub's, fetched once by the launcher, so that ranks find it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from importlib import import_module

from stoker.contract.errors import EX_NOINPUT, EX_UNAVAILABLE, Refusal

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_WANTED = [*_MODEL_FILES, *_ADAPTER_FILES, *TOKENIZER_FILES]  # no pickles


def config_of(load: str, say: Callable[[str], None]) -> str:
    """A folder with at least config.json: who plans needs no weights."""
    return folder_of(load, say, wanted=["config.json"])


def folder_of(load: str, say: Callable[[str], None], code: bool = False, wanted: Sequence[str] = _WANTED) -> str:
    """A folder stays what it is; owner/name comes from the hub, or from its cache. `code`: Python files, too."""
    if os.path.isdir(load):
        return load
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", load):
        raise Refusal(
            f"model {load} does not exist; give a folder with config.json and safetensors, or a hub id (owner/name)",
            EX_NOINPUT,
        )
    try:
        hub, errors = import_module("huggingface_hub"), import_module("huggingface_hub.errors")
    except ImportError as problem:
        raise Refusal(
            f"model {load}: no such folder here; if it is a model of the hub: `pip install huggingface_hub`",
            EX_UNAVAILABLE,
        ) from problem
    say(f"{load}: no such folder here, asking the hub")
    try:
        folder = str(hub.snapshot_download(load, allow_patterns=[*wanted, *["*.py"] * code], ignore_patterns=["*/*"]))
    except (OSError, ValueError, RuntimeError, errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as problem:
        first = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise Refusal(
            f"model {load}: no such folder here, and it can't be fetched from the hub: {first[:200]}", EX_UNAVAILABLE
        ) from problem
    say(f"{load}: the copy in {folder} is used")
    return folder
