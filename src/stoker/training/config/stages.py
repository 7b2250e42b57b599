"""The stages of `stoker train`: which recipe each is, what it must be given, and which keys begin otherwise than a preset says. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.contract.shape import shape

_RECIPES = "stoker.training.recipes"


@shape
class StageKind:
    about: str
    inputs: tuple[str, ...]  # keys that must name something
    prepares: bool = False  # `data.path` becomes tokens before ranks start
    defaults: Mapping[str, Any] = {}

    def files(self, values: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(key, path) of what must be there, data.path and a model's hub id aside."""
        return [(key, values[key]) for key in self.inputs if key not in ("data.path", "model.load") and isinstance(values[key], str)]


_CHAT = {"data.kind": "chat"}
STAGES: dict[str, StageKind] = {
    "tokenizer": StageKind("text becomes a tokenizer", ("data.path",)),
    "pretrain": StageKind("text becomes a base model", ("data.path",), True),
    "midtrain": StageKind("a base model learns what a conversation is", ("model.load", "data.path"), True, _CHAT),
    "sft": StageKind("it learns to answer: loss on the answers alone", ("model.load", "data.path"), True, _CHAT),
    "reward": StageKind("a model that scores answers, from pairs", ("model.load", "reward.pairs")),
    "density": StageKind("weights of prompts by how crowded their neighbourhood is", ("model.load", "density.prompts")),
    "grpo": StageKind("learning from rewards", ("model.load", "grpo.prompts")),
    "evaluate": StageKind("questions with answers", ("model.load",)),
    "diversity": StageKind("two models' answers compared", ("model.load", "diversity.prompts", "diversity.baseline", "diversity.compared")),
}


def module(stage: str) -> str:
    return f"{_RECIPES}.{stage}"
