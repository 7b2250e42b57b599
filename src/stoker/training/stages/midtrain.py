"""A base model learns what a conversation is."""

from __future__ import annotations

from stoker.training.config.derived import CONTINUED, Learning
from stoker.training.stages.supervised import chat_stage

STAGE = chat_stage(
    "midtrain",
    "a base model learns what a conversation is",
    "Midtrain",
    "base",
    Learning(rate=CONTINUED, passes=1, samples=128, steps_a_pass=50),
    short="Mid",
)
