"""It learns to answer: supervised fine-tuning."""

from __future__ import annotations

from stoker.training.config.derived import Learning
from stoker.training.stages.supervised import chat_stage

STAGE = chat_stage(
    "sft",
    "it learns to answer: loss on the answers alone",
    "SFT",
    "midtrain",
    # 0.5 and 0.4 made a small model forget the rest (docs/pipeline.md)
    Learning(rate=1, passes=3, samples=32, steps_a_pass=32, power=0.25),
)
