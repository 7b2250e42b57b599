"""The reward model that GRPO's answers are scored with, by its folder alone."""

from __future__ import annotations

import os

from stoker.contract.frozen import replace
from stoker.contract.tensor_header import read_header
from stoker.training.fit.terms import StageNeeds
from stoker.training.model import hf_config, hf_hub

HEAD, TRUST = "score.safetensors", "trust"  # reward/model.py's own


def with_scorer(needs: StageNeeds, folder: str) -> StageNeeds:
    """`folder`: or a hub id. The recipe refuses what is no reward model."""
    here = hf_hub.folder_of(folder, lambda line: None)
    head = os.path.join(here, HEAD)
    try:
        likelihood = TRUST in read_header(head).tensors
    except (OSError, ValueError):
        likelihood = True  # more memory than without
    return replace(
        needs, reward_model=folder, scorer=hf_config.shape_of(hf_config.base_of(here)), scorer_likelihood=likelihood
    )
