"""Digests of the files that a stage reads: a finished run must not stand for one of other data or another model. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator

from stoker.contract.digests import digest_file, digest_path
from stoker.training.config.keys import KEYS, values_of
from stoker.training.config.resolve import MODEL_KEYS
from stoker.training.config.schema import Config
from stoker.training.data.ours import own_cache
from stoker.training.data.sources import find_sources
from stoker.training.rl.parts import CODE, parts_of, rollout_function
from stoker.training.stages.stage import Stage


def input_digests(stage: Stage, config: Config, prepared: str | None) -> tuple[tuple[str, str], ...]:
    """Return (what it is, digest) of every file and folder that the stage reads. `prepared`: the prepared data's digest."""
    digests = [("the prepared data", prepared)] if prepared is not None else []
    digests += [(f"{key} {path}", digest_path(path)) for key, path in _paths(stage, config) if os.path.exists(path)]
    if stage.is_script:
        digests.append((stage.recipe, digest_file(stage.recipe)))
    return tuple(digests)


def _paths(stage: Stage, config: Config) -> Iterator[tuple[str, str]]:
    values = values_of(config)
    for key, about in KEYS.items():
        is_read = about.section in stage.sections or key in stage.inputs
        is_rows = about.spec.metavar == "PATH" and is_read and about.section != "data"
        is_model = key in MODEL_KEYS and is_read
        is_tokenizer = key == "tokenizer.path" and values[key] != config.model.load
        if is_rows or is_model or is_tokenizer:
            value = values[key]
            yield from ((key, path) for path in (value if isinstance(value, tuple) else (value,)) if path)
    if "data.path" in stage.inputs and not stage.prepares:
        sources = find_sources(config.data.path, own_cache(config.data.cache, _ignore), _ignore)
        yield from (("data.path", source.path) for source in sources)
    if "grpo" in stage.sections:
        yield from (("grpo.reward", part.file) for part in parts_of(config.grpo) if part.kind == CODE)
        if config.grpo.rollout:
            yield "grpo.rollout", rollout_function(config.grpo)[0]


def _ignore(line: str) -> None:
    """The stage prints these lines itself."""
