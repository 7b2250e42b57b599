"""What the derived defaults look at, read from the model's folder and the data's files; then the settings with them,
and the block that says so. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from stoker.contract.shape import replace
from stoker.training.config import amount, summary
from stoker.training.config.derived import Learning, Situation, settled
from stoker.training.config.schema import Config
from stoker.training.data.prepared import Prepared
from stoker.training.model import hf_config, hf_hub
from stoker.training.model.config import ModelConfig
from stoker.training.model.rows import with_rows
from stoker.training.stages.registry import STAGES

BYTES_VOCABULARY = 272
UNKNOWN_VOCABULARY = 32_768  # of a tokenizer that is not read before the start


def situation(stage: str, config: Config, ranks: int | None, ready: Prepared | None = None) -> Situation:
    """`ready`: without it the amount is estimated."""
    model = _model(config, ready)
    learning = STAGES[stage].learning
    prompts = learning is not None and learning.prompts
    pairs = config.dpo if stage == "dpo" else config.reward
    source = config.grpo.prompts if prompts else pairs.pairs
    if ready is not None:
        return Situation(model, amount.of_prepared(ready, config), ranks)
    if STAGES[stage].prepares:
        return Situation(model, amount.estimated(config, model.vocab_size), ranks)
    if not os.path.isfile(source):  # the recipe refuses it, and says why
        return Situation(model, None, ranks)
    if prompts:
        return Situation(model, amount.of_prompts(config), ranks)
    return Situation(model, amount.of_pairs(config, model.vocab_size, pairs), ranks)


def with_defaults(
    stage: str, config: Config, given: Collection[str], at: Situation, on_cpu: bool
) -> tuple[Config, dict[str, Any], list[str]]:
    """The settings, the keys that were derived, and the block to print."""
    learning = STAGES[stage].learning
    assert isinstance(learning, Learning), f"stage {stage} does not train"
    config, derived = settled(learning, config, given, at)
    return config, derived, summary.block(stage, learning, config, given, derived, at, on_cpu)


def _model(config: Config, ready: Prepared | None) -> ModelConfig:
    if config.model.load:
        loaded = hf_config.shape_of(hf_hub.folder_of(config.model.load, _nothing))
        return replace(loaded, vocab_size=config.model.vocab_size or loaded.vocab_size)
    return with_rows(
        config.model, ready.vocab_size if ready is not None else config.model.vocab_size or _vocabulary(config)
    )


def _vocabulary(config: Config) -> int:
    if not config.tokenizer.path:
        return config.tokenizer.vocab_size
    return BYTES_VOCABULARY if config.tokenizer.path == "bytes" else UNKNOWN_VOCABULARY


def _nothing(line: str) -> None:
    """The launcher has said where the model comes from."""
