"""Text becomes a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.quantities import number_at
from stoker.training.stages import estimate
from stoker.training.stages.blocks import Cell
from stoker.training.stages.significance import ABSENT, Row, number, percent
from stoker.training.stages.stage import Link, Metrics, Reported, Rows, Stage, joined

SHARE_HELD_OUT = "0.01"
TEXT = {"data.path": Rows("base", many=True), "data.validation": Rows("base-held-out", otherwise=SHARE_HELD_OUT)}


def headline(metrics: Metrics) -> str:
    return joined(
        ("{:.2f} bytes per token", number_at(metrics, "bytes_per_token")),
        ("a token per word would have {:.2f}", number_at(metrics, "words_bytes_per_token")),
    )


def effects(link: Reported) -> Iterator[Row]:
    if link.metrics is None:
        return
    ours, reference = (number_at(link.metrics, f"{which}bytes_per_token") for which in ("", "words_"))
    yield (
        Cell("Tokenizer", "bytes per token; reference: one token per word"),
        Cell(f"reference {number(reference)}, this one {number(ours)}"),
        Cell(f"{percent(ours / reference)} of the reference" if ours is not None and reference else ABSENT),
    )


STAGE = Stage(
    name="tokenizer",
    about="text becomes a tokenizer",
    sections=frozenset(("tokenizer",)),
    inputs=("data.path",),
    outputs=("tokenizer",),
    common=("data.validation", "tokenizer.vocab_size", "tokenizer.train_megabytes", "data.cache"),
    one_process=True,
    links=(Link("tokenizer", TEXT),),
    estimate=estimate.tokenizer,
    headline=headline,
    effects=effects,
)
