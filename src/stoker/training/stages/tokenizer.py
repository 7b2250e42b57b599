"""Text becomes a tokenizer."""

from __future__ import annotations

from stoker.contract.quantities import number_at
from stoker.training.stages import estimate
from stoker.training.stages.stage import Link, Metrics, Rows, Stage, joined

SHARE_HELD_OUT = "0.01"
TEXT = {"data.path": Rows("base", many=True), "data.validation": Rows("base-held-out", otherwise=SHARE_HELD_OUT)}


def headline(metrics: Metrics) -> str:
    return joined(
        ("{:.2f} bytes per token", number_at(metrics, "bytes_per_token")),
        ("a token per word would have {:.2f}", number_at(metrics, "words_bytes_per_token")),
    )


STAGE = Stage(
    name="tokenizer",
    about="text becomes a tokenizer",
    recipe="stoker.training.recipes.tokenizer",
    sections=frozenset(("tokenizer",)),
    inputs=("data.path",),
    outputs=("tokenizer",),
    common=("data.path", "data.validation", "tokenizer.vocab_size", "tokenizer.train_megabytes", "data.cache"),
    one_process=True,
    links=(Link("tokenizer", TEXT),),
    estimate=estimate.tokenizer,
    headline=headline,
)
