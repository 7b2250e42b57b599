"""Text becomes a base model."""

from __future__ import annotations

from stoker.contract.quantities import number_at
from stoker.training.config.derived import Learning
from stoker.training.stages import estimate
from stoker.training.stages.stage import LEARN_KEYS, LEARNS, RUN_KEYS, From, Link, Metrics, Stage, joined
from stoker.training.stages.tokenizer import TEXT


def headline(metrics: Metrics) -> str:
    return joined(
        ("{:.3f} bits per byte held out", number_at(metrics, "val_bits_per_byte")),
        ("loss {:.3f}", number_at(metrics, "val_loss")),
    )


STAGE = Stage(
    name="pretrain",
    about="text becomes a base model",
    recipe="stoker.training.recipes.pretrain",
    sections=LEARNS | {"model"},
    inputs=("data.path",),
    outputs=("hf",),
    common=("data.path", "data.validation", "tokenizer.path", "model.depth", "model.load", *LEARN_KEYS, *RUN_KEYS),
    prepares=True,
    # Text may be read four times before that is worth much less than new text (Muennighoff and others, 2023, arXiv
    # 2305.16264).
    learning=Learning(rate=0, passes=4, steps_a_pass=50, most_steps=True),
    links=(Link("base", {**TEXT, "tokenizer.path": From("tokenizer", "tokenizer")}, "tokenizer", "Base"),),
    estimate=estimate.training,
    headline=headline,
)
