"""What the stages have in common that learn from rows: pretrain, midtrain, sft."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contract.quantities import number_at
from stoker.training.config.derived import Learning
from stoker.training.stages import estimate
from stoker.training.stages.significance import Row, untested_row
from stoker.training.stages.stage import Curves, From, Link, Metrics, Reported, Rows, Stage, joined
from stoker.training.stages.tokenizer import SHARE_HELD_OUT

LOSSES = Curves("losses", "Training", "Loss of base, midtraining and SFT")


def headline(metrics: Metrics) -> str:
    return joined(
        ("{:.3f} bits per byte held out", number_at(metrics, "val_bits_per_byte")),
        ("loss {:.3f}", number_at(metrics, "val_loss")),
    )


def _effects(link: Reported) -> Iterator[Row]:
    if link.metrics is not None:
        measure = "bits per byte of its own held-out chats, lower is better; before: its first step"
        numbers = (number_at(link.metrics, f"val_bits_per_byte{when}") for when in ("_before", ""))
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
        inputs=("model.load", "data.path"),
        outputs=("hf",),
        common=("data.validation",),
        prepares=True,
        defaults={"data.kind": "chat"},
        learning=learning,
        links=(Link(name, given, model, title, short),),
        estimate=estimate.training,
        headline=headline,
        effects=_effects,
        curves=LOSSES,
    )
