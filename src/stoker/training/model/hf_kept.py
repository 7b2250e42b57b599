"""What an export keeps of the folder that its model was loaded from: how long a context it is made for, the tokens that
end a text, how it generates, how its numbers are stored. No torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker.contract.names import EX_DATAERR, Refusal
from stoker.contract.shape import shape
from stoker.contract.untrusted import read_json
from stoker.training.model.config import ModelConfig
from stoker.training.model.hf_config import CONFIG

GENERATION = "generation_config.json"
_AS_LOADED = ("bos_token_id", "pad_token_id")


@shape
class Kept:
    config: Mapping[str, Any]
    generation: Mapping[str, Any]

    @property
    def is_half(self) -> bool:
        """Its numbers have 16 bits."""
        return (self.config.get("dtype") or self.config.get("torch_dtype")) in ("bfloat16", "float16")

    def context(self, trained: int) -> int:
        """Fine-tuning on shorter texts does not shorten what the model can read."""
        longest = self.config.get("max_position_embeddings")
        return max(trained, longest) if type(longest) is int and longest < 1 << 24 else trained

    def changed(
        self, config: Mapping[str, Any], end_ids: Sequence[int], tokenizer_folder: str | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """config.json and generation_config.json of the export. `end_ids`: what training taught; without them and the
        loaded model's, the tokenizer's.
        """
        if not end_ids and self.config.get("eos_token_id") is None:
            end_ids = end_ids_of(tokenizer_folder)
        known = {key: self.config[key] for key in (*_AS_LOADED, "eos_token_id") if self.config.get(key) is not None}
        whole = {**config, **known, "eos_token_id": _with(self.config.get("eos_token_id"), end_ids)}
        ends = _with(self.generation.get("eos_token_id", self.config.get("eos_token_id")), end_ids)
        return whole, ({**self.generation, "eos_token_id": ends} if ends is not None else dict(self.generation))


def _with(loaded: Any, more: Sequence[int]) -> Any:
    """As it was loaded where nothing is new."""
    listed = loaded if isinstance(loaded, list) else [loaded]
    before = [number for number in listed if type(number) is int]
    if before and set(more) <= set(before):
        return loaded
    ids = list(dict.fromkeys((*more, *before)))
    return ids if len(ids) > 1 else next(iter(ids), None)


def kept_of(c: ModelConfig, say: Callable[[str], None]) -> Kept:
    """Nothing, where the model was not loaded."""
    if not c.load:
        return Kept({}, {})
    config = json.loads(c.kept) if c.kept else None
    if not os.path.isfile(os.path.join(c.load, CONFIG)):
        lost = GENERATION if config else f"{CONFIG} and {GENERATION}"
        say(f"{c.load}, which the model was loaded from, is gone: nothing of its {lost} is kept in the export")
        return Kept(config or {}, {})
    return Kept(config or _read(os.path.join(c.load, CONFIG)), _read(os.path.join(c.load, GENERATION)))


def _read(path: str) -> Mapping[str, Any]:
    try:
        told = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise Refusal(f"{path} can't be read: {getattr(problem, 'strerror', None) or problem}", EX_DATAERR) from problem
    return told if isinstance(told, dict) else {}


def end_ids_of(tokenizer_folder: str | None) -> tuple[int, ...]:
    """The id of the eos_token that tokenizer_config.json names; none where nothing does."""
    if tokenizer_folder is None:
        return ()
    paths = [os.path.join(tokenizer_folder, name) for name in ("tokenizer_config.json", "tokenizer.json")]
    if not all(os.path.isfile(path) for path in paths):
        return ()
    try:
        config, tokenizer = (read_json(path) for path in paths)
        eos = config.get("eos_token")
        text = eos["content"] if isinstance(eos, dict) else eos
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
        return (int(added[text]),) if text in added else ()
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError) as problem:
        raise Refusal(
            f"tokenizer {tokenizer_folder}: its eos_token can't be read: {type(problem).__name__}: {problem}",
            EX_DATAERR,
        ) from problem
