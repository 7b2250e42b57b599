"""It learns to answer: supervised fine-tuning."""

from __future__ import annotations

from stoker.training.config.derived import Learning
from stoker.training.stages import estimate
from stoker.training.stages.midtrain import CHAT_KEYS, chats
from stoker.training.stages.pretrain import headline
from stoker.training.stages.stage import LEARNS, Link, Stage

STAGE = Stage(
    name="sft",
    about="it learns to answer: loss on the answers alone",
    recipe="stoker.training.recipes.sft",
    sections=LEARNS,
    inputs=("model.load", "data.path"),
    outputs=("hf",),
    common=CHAT_KEYS,
    prepares=True,
    defaults={"data.kind": "chat"},
    # 0.5 and 0.4 made a small model forget the rest (docs/pipeline.md)
    learning=Learning(rate=1, passes=3, samples=32, steps_a_pass=32, power=0.25),
    links=(Link("sft", chats("sft", "midtrain"), "midtrain", "SFT"),),
    estimate=estimate.training,
    headline=headline,
)
