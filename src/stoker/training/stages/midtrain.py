"""A base model learns what a conversation is."""

from __future__ import annotations

from typing import Any

from stoker.training.config.derived import CONTINUED, Learning
from stoker.training.stages import estimate
from stoker.training.stages.pretrain import headline
from stoker.training.stages.stage import LEARN_KEYS, LEARNS, RUN_KEYS, From, Link, Rows, Stage
from stoker.training.stages.tokenizer import SHARE_HELD_OUT

CHAT_KEYS = ("model.load", "data.path", "data.validation", *LEARN_KEYS, *RUN_KEYS)


def chats(role: str, model: str) -> dict[str, Any]:
    return {
        "model.load": From(model, "hf"),
        "data.kind": "chat",
        "data.path": Rows(role, many=True),
        "data.validation": Rows(f"{role}-held-out", otherwise=SHARE_HELD_OUT),
    }


STAGE = Stage(
    name="midtrain",
    about="a base model learns what a conversation is",
    recipe="stoker.training.recipes.midtrain",
    sections=LEARNS,
    inputs=("model.load", "data.path"),
    outputs=("hf",),
    common=CHAT_KEYS,
    prepares=True,
    defaults={"data.kind": "chat"},
    learning=Learning(rate=CONTINUED, passes=1, samples=128, steps_a_pass=50),
    links=(Link("midtrain", chats("midtrain", "base"), "base", "Midtrain"),),
    estimate=estimate.training,
    headline=headline,
)
