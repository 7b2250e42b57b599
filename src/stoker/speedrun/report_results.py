"""What the models can do: the report's sections about results. Pure: a Chain in, blocks out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stoker.speedrun.gather import Chain, StageRecord
from stoker.training.stages.blocks import Block, Cell, Figure, Heading, Table, Text, tone_of
from stoker.training.stages.registry import STAGES, links
from stoker.training.stages.significance import (
    ABSENT,
    Change,
    Measured,
    between,
    change,
    judged,
    marks,
    number,
    percent,
    points,
)
from stoker.training.stages.stage import From

MODELS = {link.name: link.title for link, _ in links() if link.title}
# The model that a stage began with.
BEFORE = {
    link.name: begun.stage
    for link, _ in links()
    if link.name in MODELS and isinstance(begun := link.keys.get("model.load"), From)
}
GRPO = ("grpo-uniform", "grpo-density")


def effects(chain: Chain) -> Iterator[Block]:
    yield Heading("Did each stage help?")
    yield Text("Each stage by its own measure, compared with the model it began with.")
    rows = [row for row in (*_tokenizer(chain), *_trainings(chain), *_reward_row(chain), *_grpo(chain)) if row]
    if not rows:
        yield Text("No stage has a measurement before and after it yet.")
        return
    yield Table(("Stage and its measure", "Before → after", "Verdict"), tuple(rows), words=True, stacked=True)
    yield Text(
        "Significant: the 95 % interval of the difference does not contain 0 (two proportions, Newcombe's method). Both"
        " models answer the same questions, so this test is cautious. Not tested: there is no interval for this number."
    )


Row = tuple[Cell, ...]


def _tokenizer(chain: Chain) -> Iterator[Row]:
    found = chain.result("tokenizer")
    if found is None:
        return
    ours, reference = found.number("bytes_per_token"), found.number("words_bytes_per_token")
    part = f"{percent(ours / reference)} of the reference" if ours is not None and reference else ABSENT
    yield (
        Cell("Tokenizer", "bytes per token; reference: one token per word"),
        Cell(f"reference {number(reference)}, this one {number(ours)}"),
        Cell(part),
    )


def _trainings(chain: Chain) -> Iterator[Row]:
    base = chain.result("base")
    if base is not None:
        guess = random_guess(chain)
        yield _untested(
            "Base",
            "bits per byte of held-out text, lower is better; before: a random guess",
            guess,
            base.number("val_bits_per_byte"),
            False,
        )
    for before, name in (("base", "midtrain"), ("midtrain", "sft")):
        found = chain.result(name)
        if found is not None:
            first, last = found.number("val_bits_per_byte_before"), found.number("val_bits_per_byte")
            yield _untested(
                MODELS[name],
                "bits per byte of its own held-out chats, lower is better; before: its first step",
                first,
                last,
                False,
            )
        yield from _answers(chain, before, name, MODELS[name])


def random_guess(chain: Chain) -> float | None:
    """Bits per byte of a model to which all tokens are equally likely."""
    words = chain.result("tokenizer")
    size, packed = (words.number("vocab_size"), words.number("bytes_per_token")) if words else (None, None)
    return math.log2(size) / packed if size and size > 0 and packed else None


def _untested(stage: str, what: str, before: float | None, after: float | None, higher_is_better: bool) -> Row:
    verdict = judged(change(Measured(before), Measured(after)), higher_is_better)
    return Cell(stage, what), Cell(f"{number(before)} → {number(after)}"), Cell(verdict, tone=tone_of(verdict))


def _answers(chain: Chain, before: str, after: str, stage: str) -> Iterator[Row]:
    old, new = chain.evaluation(before), chain.evaluation(after)
    if old is None or new is None:
        return
    told = [("questions right", old.questions, new.questions)]
    if old.prompts and new.prompts and before not in ("base", "midtrain"):
        told.append(("prompts like GRPO's right", old.prompts, new.prompts))
    for what, was, now in told:
        for how, one, two in (("greedy", was.greedy, now.greedy), ("sampled", was.sampled, now.sampled)):
            if one.value is not None and two.value is not None:
                yield _shares(stage, f"{what}, {how}; before: {MODELS[before]}", one, two)
    if (
        after in ("midtrain", "sft")
        and old.everything.strict.value is not None
        and new.everything.strict.value is not None
    ):
        yield _shares(
            stage,
            f"right and in the expected form, greedy; before: {MODELS[before]}",
            old.everything.strict,
            new.everything.strict,
        )


def _shares(stage: str, what: str, before: Measured, after: Measured) -> Row:
    found = change(before, after)
    verdict = judged(found)
    return (
        Cell(stage, what),
        Cell(f"{percent(before.value)} → {percent(after.value)}"),
        Cell(verdict, points(found), tone_of(verdict)),
    )


def _reward_row(chain: Chain) -> Iterator[Row]:
    found = chain.result("reward")
    if found is not None:
        yield _shares(
            "Reward model",
            "held-out pairs in the right order; before: a coin toss",
            Measured(0.5, 0.5, 0.5),
            pairs_right(found),
        )


def pairs_right(found: StageRecord) -> Measured:
    return marks(found.metrics).greedy


def _grpo(chain: Chain) -> Iterator[Row]:
    for name in GRPO:
        yield from _answers(chain, "sft", name, MODELS[name])
        found = chain.result(name)
        if found is not None:
            yield _untested(
                MODELS[name],
                "reward in training, mean of 5 steps",
                found.number("reward_first"),
                found.number("reward_last"),
                True,
            )
    yield from _answers(chain, "grpo-uniform", "grpo-density", "Density or uniform")


def over_sft(chain: Chain, name: str) -> tuple[Change, str]:
    """What a GRPO run added to SFT, and on what: greedy answers to held-out prompts like its own, or to all questions
    where there are none.
    """
    old, new = chain.evaluation("sft"), chain.evaluation(name)
    if old is None or new is None:
        return Change(None), ""
    if old.prompts and new.prompts:
        return change(old.prompts.greedy, new.prompts.greedy), "held-out prompts like its own"
    return change(old.everything.greedy, new.everything.greedy), "all questions (no prompts like its own were held out)"


def training(chain: Chain) -> Iterator[Block]:
    if any(chain.stages[name].steps for name in ("base", "midtrain", "sft") if name in chain.stages):
        yield Heading("Training")
        yield Figure("losses", "Loss of base, midtraining and SFT")
    if any(chain.stages[name].steps for name in GRPO if name in chain.stages):
        yield Heading("GRPO")
        cut = (
            ", share cut at the token limit"
            if any(chain.stages[name].curve("cut")[0] for name in GRPO if name in chain.stages)
            else ""
        )
        yield Figure(
            "rewards",
            f"GRPO: reward, divergence from SFT (KL), length and entropy of the answers{cut}. Thin: each step; thick:"
            " mean of 5",
        )
        density = chain.result("density")
        if density is not None:
            yield Text(
                f"Density weights: {number(density.number('prompts'))} prompts in {number(density.number('clusters'))}"
                f" clusters (Gini {number(density.number('gini'), 2)}); weights from"
                f" {number(density.number('weight_min'), 2)} to {number(density.number('weight_max'), 2)} times the"
                " mean. Prompts with few neighbours are sampled more often."
            )


def share_cell(value: Measured) -> Cell:
    return Cell(percent(value.value), between(value))


def own_sections(chain: Chain) -> Iterator[Block]:
    """Of the stages that have one."""
    for name, stage in STAGES.items():
        for link in stage.links:
            found = chain.result(link.name)
            if found is not None:
                yield from STAGES[name].report(found.metrics)
