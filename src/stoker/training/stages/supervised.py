"""The tokenizer, and the stages that learn from rows: a base model, what a conversation is, and to answer."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.units import finite_number
from stoker.training.config.derived import CONTINUED, Learning
from stoker.training.stages import estimate
from stoker.training.stages.blocks import Cell
from stoker.training.stages.significance import ABSENT, Row, number, percent, random_guess, untested_row
from stoker.training.stages.stage import Curves, From, Link, Metrics, Reported, Rows, Stage, joined

SHARE_HELD_OUT = "0.01"
TEXT = {"data.path": Rows("base", many=True), "data.validation": Rows("base-held-out", otherwise=SHARE_HELD_OUT)}


def _tokenizer_headline(metrics: Metrics) -> str:
    whole_words = finite_number(metrics, "words_bytes_per_token")
    reference = "" if whole_words is None else f" (whole words have {whole_words:.2f})"
    return joined((f"{{:.2f}} bytes of text per token{reference}", finite_number(metrics, "bytes_per_token")))


def _tokenizer_effects(link: Reported) -> Iterator[Row]:
    if link.metrics is None:
        return
    ours, reference = (finite_number(link.metrics, f"{which}bytes_per_token") for which in ("", "words_"))
    yield (
        Cell("Tokenizer", "bytes per token; reference: one token per word"),
        Cell(f"reference {number(reference)}, this one {number(ours)}"),
        Cell(f"{percent(ours / reference)} of the reference" if ours is not None and reference else ABSENT),
    )


TOKENIZER = Stage(
    name="tokenizer",
    about="text becomes a tokenizer",
    sections=frozenset(("tokenizer",)),
    inputs=("data.path",),
    outputs=("tokenizer",),
    common=("data.validation", "tokenizer.vocab_size", "tokenizer.train_megabytes", "data.cache"),
    one_process=True,
    links=(Link("tokenizer", TEXT),),
    estimate=estimate.tokenizer,
    headline=_tokenizer_headline,
    effects=_tokenizer_effects,
)


LOSSES = Curves("losses", "Training", "Loss of base, midtraining and SFT")


def headline(metrics: Metrics) -> str:
    return joined(
        ("{:.3f} bits per byte held out", finite_number(metrics, "val_bits_per_byte")),
        ("loss {:.3f}", finite_number(metrics, "val_loss")),
    )


def _effects(link: Reported) -> Iterator[Row]:
    if link.metrics is not None:
        measure = "bits per byte of its own held-out chats, lower is better; before: its first step"
        numbers = (finite_number(link.metrics, f"val_bits_per_byte{when}") for when in ("_before", ""))
        yield untested_row(link.title, measure, *numbers, higher_is_better=False)
    yield from link.answers("questions", "strict")


def chat_stage(name: str, about: str, title: str, model: str, learning: Learning, short: str = "") -> Stage:
    """One that learns chats, beginning with the model of another link."""
    given = {
        "model.load": From(model, "hf"),
        "data.kind": "chat",
        "data.path": Rows(name, many=True),
        "data.validation": Rows(f"{name}-held-out", otherwise=SHARE_HELD_OUT),
    }
    return Stage(
        name=name,
        about=about,
        sections=frozenset(("adapter",)),
        inputs=("model.load", "data.path"),
        outputs=("hf",),
        common=("data.validation", "adapter.method", "adapter.lora_rank"),
        prepares=True,
        defaults={"data.kind": "chat"},
        learning=learning,
        links=(Link(name, given, model, title, short),),
        estimate=estimate.training,
        headline=headline,
        effects=_effects,
        curves=LOSSES,
    )


def _pretrain_effects(link: Reported) -> Iterator[Row]:
    if link.metrics is not None:
        measure = "bits per byte of held-out text, lower is better; before: a random guess"
        guess, after = random_guess(link.given.get("tokenizer.path")), finite_number(link.metrics, "val_bits_per_byte")
        yield untested_row(link.title, measure, guess, after, higher_is_better=False)


PRETRAIN = Stage(
    name="pretrain",
    about="text becomes a base model",
    sections=frozenset(("model", "adapter")),
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
    effects=_pretrain_effects,
    curves=LOSSES,
)
MIDTRAIN = chat_stage(
    "midtrain",
    "a base model learns what a conversation is",
    "Midtrain",
    "base",
    Learning(rate=CONTINUED, passes=1, samples=128, steps_a_pass=50),
    short="Mid",
)
SFT = chat_stage(
    "sft",
    "it learns to answer: loss on the answers alone",
    "SFT",
    "midtrain",
    # 0.5 and 0.4 made a small model forget the rest (docs/pipeline.md)
    Learning(rate=1, passes=3, samples=32, steps_a_pass=32, power=0.25),
)
STAGES = (TOKENIZER, PRETRAIN, MIDTRAIN, SFT)
