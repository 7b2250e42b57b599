"""What the models can do: the report's sections about results. Pure: a Chain in, blocks out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stoker.speedrun.gather import Chain, StageRecord, marks, measured, number_at
from stoker.speedrun.report_blocks import Block, Cell, Figure, Heading, Table, Text, tone_of
from stoker.speedrun.significance import (
    ABSENT,
    Change,
    Measured,
    between,
    change,
    judged,
    number,
    number_and_interval,
    percent,
    points,
    share_with_interval,
)

MODELS = {"base": "Base", "midtrain": "Midtrain", "sft": "SFT", "grpo-uniform": "GRPO uniform", "grpo-density": "GRPO density"}


def models_table(chain: Chain) -> Iterator[Block]:
    yield Heading("The models, stage by stage")
    found = {name: chain.evaluation(name) for name in MODELS}
    if not any(found.values()):
        yield Text("No model was evaluated yet.")
        return
    asked = next((one.everything.likeliest.total for one in found.values() if one and one.everything.likeliest.total), None)
    held_out = f"{asked:,} held-out questions" if asked else "held-out questions"
    yield Text(f"Right answers to {held_out}, below each share its 95 % interval. Likeliest: the model's first choice; drawn: answers drawn at a temperature.")
    kinds = dict.fromkeys(kind for one in found.values() if one for kind in one.kinds)
    rows = [("all, likeliest", [one.everything.likeliest if one else Measured() for one in found.values()])]
    files = dict.fromkeys(name for one in found.values() if one for name in one.files)
    rows += [(f"file {name}", [one.files[name].likeliest if one and name in one.files else Measured() for one in found.values()]) for name in files]
    rows += [(kind, [one.kinds[kind].likeliest if one and kind in one.kinds else Measured() for one in found.values()]) for kind in kinds]
    rows += [("all, drawn", [one.everything.drawn if one else Measured() for one in found.values()])]
    made = [(Cell(label), *(_share(value) for value in values)) for label, values in rows]
    made.append((Cell("bits per byte"), *(Cell(number(one.bits_per_byte if one else None)) for one in found.values())))
    yield Table(("", *MODELS.values()), tuple(made))
    yield Figure("accuracy", "Right answers to held-out questions after each stage, with 95 % intervals")
    yield Figure("kinds", "Right answers (likeliest) by kind of question, with 95 % intervals; u: uniform, d: density")


def _share(value: Measured) -> Cell:
    return Cell(percent(value.value), between(value))


def effects(chain: Chain) -> Iterator[Block]:
    yield Heading("Did each stage help?")
    rows = [row for row in (*_tokenizer(chain), *_trainings(chain), *_reward_row(chain), *_grpo(chain)) if row]
    if not rows:
        yield Text("No stage has a measurement before and after it yet.")
        return
    yield Table(("Stage and its measure", "Before → after", "Verdict"), tuple(rows), words=True, stacked=True)
    yield Text(
        "Outside the noise: the 95 % interval of the difference (two proportions, Newcombe) leaves out 0. "
        "Both sides answer the same questions, so the test is on the cautious side."
    )


Row = tuple[Cell, ...]


def _tokenizer(chain: Chain) -> Iterator[Row]:
    found = chain.result("tokenizer")
    if found is None:
        return
    ours, reference = found.number("bytes_per_token"), found.number("words_bytes_per_token")
    part = f"{percent(ours / reference)} of the reference" if ours is not None and reference else ABSENT
    yield Cell("Tokenizer", "bytes per token; reference: one token per word"), Cell(f"reference {number(reference)}, ours {number(ours)}"), Cell(part)


def _trainings(chain: Chain) -> Iterator[Row]:
    base, words = chain.result("base"), chain.result("tokenizer")
    if base is not None:
        size, packed = (words.number("vocab_size"), words.number("bytes_per_token")) if words else (None, None)
        guess = math.log2(size) / packed if size and size > 0 and packed else None
        yield _untested("Base", "held-out bits per byte; before: every token alike", guess, base.number("val_bits_per_byte"), False)
    for before, name in (("base", "midtrain"), ("midtrain", "sft")):
        found = chain.result(name)
        if found is not None:
            first, last = found.number("val_bits_per_byte_before"), found.number("val_bits_per_byte")
            yield _untested(MODELS[name], "its own held-out bits per byte; before: its first step", first, last, False)
        yield from _answers(chain, before, name, MODELS[name])


def _untested(stage: str, what: str, before: float | None, after: float | None, higher_is_better: bool) -> Row:
    verdict = judged(change(Measured(before), Measured(after)), higher_is_better)
    return Cell(stage, what), Cell(f"{number(before)} → {number(after)}"), Cell(verdict, tone=tone_of(verdict))


def _answers(chain: Chain, before: str, after: str, stage: str) -> Iterator[Row]:
    old, new = chain.evaluation(before), chain.evaluation(after)
    if old is None or new is None:
        return
    told = [("questions right", old.questions, new.questions)]
    if old.prompts and new.prompts and before not in ("base", "midtrain"):
        told.append(("held-out prompts of GRPO's kind right", old.prompts, new.prompts))
    for what, was, now in told:
        for how, one, two in (("likeliest", was.likeliest, now.likeliest), ("drawn", was.drawn, now.drawn)):
            if one.value is not None and two.value is not None:
                yield _shares(stage, f"{what}, {how}; before: {MODELS[before]}", one, two)


def _shares(stage: str, what: str, before: Measured, after: Measured) -> Row:
    found = change(before, after)
    verdict = judged(found)
    return Cell(stage, what), Cell(f"{percent(before.value)} → {percent(after.value)}"), Cell(verdict, points(found), tone_of(verdict))


def _reward_row(chain: Chain) -> Iterator[Row]:
    found = chain.result("reward")
    if found is not None:
        yield _shares("Reward model", "held-out pairs told right; before: a coin", Measured(0.5, 0.5, 0.5), pairs_right(found))


def pairs_right(found: StageRecord) -> Measured:
    return marks(found.metrics).likeliest


def _grpo(chain: Chain) -> Iterator[Row]:
    for name in ("grpo-uniform", "grpo-density"):
        yield from _answers(chain, "sft", name, MODELS[name])
        found = chain.result(name)
        if found is not None:
            yield _untested(MODELS[name], "reward in training, mean of 5 steps", found.number("reward_first"), found.number("reward_last"), True)
    yield from _answers(chain, "grpo-uniform", "grpo-density", "Density or uniform")


def over_sft(chain: Chain, name: str) -> tuple[Change, str]:
    """What a GRPO run added to SFT, and on what: the likeliest answers to held-out prompts like its own, or to all questions where there are no such."""
    old, new = chain.evaluation("sft"), chain.evaluation(name)
    if old is None or new is None:
        return Change(None), ""
    if old.prompts and new.prompts:
        return change(old.prompts.likeliest, new.prompts.likeliest), "held-out prompts of its kind"
    return change(old.everything.likeliest, new.everything.likeliest), "all questions (no prompts of its kind were held out)"


def training(chain: Chain) -> Iterator[Block]:
    if any(chain.stages[name].steps for name in ("base", "midtrain", "sft") if name in chain.stages):
        yield Heading("Training")
        yield Figure("losses", "Loss of base, midtraining and SFT")
    if any(chain.stages[name].steps for name in ("grpo-uniform", "grpo-density") if name in chain.stages):
        yield Heading("GRPO")
        yield Figure("rewards", "GRPO: reward, divergence from SFT, length and entropy of the answers; thin: each step, thick: mean of 5")
        density = chain.result("density")
        if density is not None:
            yield Text(
                f"Density weights: {number(density.number('prompts'))} prompts in {number(density.number('clusters'))} clusters"
                f" (Gini {number(density.number('gini'), 2)}); weights from {number(density.number('weight_min'), 2)}"
                f" to {number(density.number('weight_max'), 2)}"
                " times the mean. Prompts with few neighbours are drawn more often."
            )


def reward_model(chain: Chain) -> Iterator[Block]:
    found = chain.result("reward")
    if found is None:
        return
    yield Heading("Reward model")
    right = pairs_right(found)
    of = f" of {right.total:,}" if right.total else ""
    yield Text(f"It prefers the better answer in {share_with_interval(right)}{of} held-out pairs; a coin would in 50 %.")
    kinds = found.metrics.get("by_kind")
    if isinstance(kinds, dict) and kinds:
        rows = []
        for kind, value in kinds.items():
            rows.append((Cell(str(kind)), _share(marks(value).likeliest), Cell(number(number_at(value, "total")))))
        yield Table(("Pairs", "Told right", "Count"), tuple(rows))
    yield Figure("calibration", "How sure it is of a pair, and how often it is right then: on the dashed line both agree. Numbers: pairs")


def diversity(chain: Chain) -> Iterator[Block]:
    found = chain.result("diversity")
    if found is None:
        return
    yield Heading("Diversity: density against uniform")
    verdict = found.metrics.get("verdict")
    yield Text(_by_name(verdict) if verdict else f"Verdict: {ABSENT}", lead=True)
    differences = found.metrics.get("difference")
    rows = []
    for name, value in differences.items() if isinstance(differences, dict) else ():
        judgement = value.get("verdict") if isinstance(value, dict) else None
        sides = (measured(found.metrics.get(side), name) for side in ("baseline", "compared", "difference"))
        rows.append((Cell(name.replace("_", " "), _by_name(judgement or ABSENT)), *(Cell(*number_and_interval(side)) for side in sides)))
    if rows:
        yield Table(("Measure, verdict", "Uniform", "Density", "Difference"), tuple(rows))
    yield Figure("diversity", "Density against uniform, in percent of uniform's value, with 95 % intervals; diamond: the interval leaves out 0. Table and"
                 " figure judge each measure by itself; the line above them corrects for their number (Holm)")


def _by_name(verdict: object) -> str:
    """The diversity stage compares any two models; here it is known which."""
    return str(verdict).replace("baseline", "uniform").replace("compared", "density")
