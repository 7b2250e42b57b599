"""Text becomes a base model."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.quantities import number_at
from stoker.training.config.derived import Learning
from stoker.training.stages import estimate
from stoker.training.stages.significance import Row, random_guess, untested_row
from stoker.training.stages.stage import From, Link, Reported, Stage
from stoker.training.stages.supervised import LOSSES, headline
from stoker.training.stages.tokenizer import TEXT


def effects(link: Reported) -> Iterator[Row]:
    if link.metrics is not None:
        measure = "bits per byte of held-out text, lower is better; before: a random guess"
        guess, after = random_guess(link.given.get("tokenizer.path")), number_at(link.metrics, "val_bits_per_byte")
        yield untested_row(link.title, measure, guess, after, higher_is_better=False)


STAGE = Stage(
    name="pretrain",
    about="text becomes a base model",
    sections=frozenset(("model",)),
    inputs=("data.path",),
    outputs=("hf",),
    common=("data.validation", "tokenizer.path", "model.depth", "model.load"),
    prepares=True,
    # Text may be read four times before that is worth much less than new text (Muennighoff and others, 2023, arXiv
    # 2305.16264).
    learning=Learning(rate=0, passes=4, steps_a_pass=50, most_steps=True),
    links=(Link("base", {**TEXT, "tokenizer.path": From("tokenizer", "tokenizer")}, "tokenizer", "Base"),),
    estimate=estimate.training,
    headline=headline,
    effects=effects,
    curves=LOSSES,
)
