"""The stages of `stoker train`: which recipe each is, what it must be given, and which keys begin otherwise than a
preset says. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.contract.shape import shape
from stoker.training.config.derived import CONTINUED, Learning

_RECIPES = "stoker.training.recipes"


@shape
class StageKind:
    about: str
    inputs: tuple[str, ...]  # keys that must name something
    prepares: bool = False  # `data.path` becomes tokens before ranks start
    defaults: Mapping[str, Any] = {}
    learning: Learning | None = None  # how it trains where nobody says otherwise; None: it does not

    def files(self, values: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(key, path) of what must be there, data.path and a model's hub id aside."""
        return [
            (key, values[key])
            for key in self.inputs
            if key not in ("data.path", "model.load") and isinstance(values[key], str)
        ]


_CHAT = {"data.kind": "chat"}
# Text may be read four times before that is worth much less than new text (Muennighoff and others, 2023, arXiv
# 2305.16264).
_PRETRAIN = Learning(rate=0, passes=4, steps_a_pass=50, most_steps=True)
_MIDTRAIN = Learning(rate=CONTINUED, passes=1, samples=128, steps_a_pass=50)
_SFT = Learning(
    rate=1, passes=3, samples=32, steps_a_pass=32, power=0.25
)  # 0.5 and 0.4 made a small model forget the rest (docs/pipeline.md)
_REWARD = Learning(rate=0.5, passes=1, samples=32, steps_a_pass=32)
_GRPO = Learning(rate=0.05, passes=1, prompts=True)  # 1e-6 for a billion parameters
STAGES: dict[str, StageKind] = {
    "tokenizer": StageKind("text becomes a tokenizer", ("data.path",)),
    "pretrain": StageKind("text becomes a base model", ("data.path",), True, learning=_PRETRAIN),
    "midtrain": StageKind(
        "a base model learns what a conversation is", ("model.load", "data.path"), True, _CHAT, _MIDTRAIN
    ),
    "sft": StageKind("it learns to answer: loss on the answers alone", ("model.load", "data.path"), True, _CHAT, _SFT),
    "reward": StageKind("a model that scores answers, from pairs", ("model.load", "reward.pairs"), learning=_REWARD),
    "density": StageKind("weights of prompts by how crowded their neighbourhood is", ("model.load", "density.prompts")),
    "grpo": StageKind("learning from rewards", ("model.load", "grpo.prompts"), learning=_GRPO),
    "evaluate": StageKind("questions with answers", ("model.load",)),
    "diversity": StageKind(
        "two models' answers compared", ("model.load", "diversity.prompts", "diversity.baseline", "diversity.compared")
    ),
}


LEARNING = {name: kind.learning for name, kind in STAGES.items() if kind.learning is not None}


def module(stage: str) -> str:
    return f"{_RECIPES}.{stage}"
