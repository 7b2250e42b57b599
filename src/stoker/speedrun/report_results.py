"""What the models can do: the report's sections about results. Pure: a Chain in, blocks out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from stoker.contract.frozen import replace
from stoker.speedrun.gather import BEFORE, MODELS, Chain, Evaluation, Sample
from stoker.speedrun.report_summary import Regression, regressions, right_by_measure
from stoker.training.stages.blocks import BAD, GOOD, Block, Cell, Figure, Heading, Table, Text
from stoker.training.stages.evaluate import PROMPTS, TASKS
from stoker.training.stages.registry import links
from stoker.training.stages.significance import (
    ABSENT,
    Measured,
    Row,
    between,
    number,
    percent,
    random_guess,
    shares_row,
)
from stoker.training.stages.stage import Reported, variant

RISEN = 1.1  # bits per byte above this many times the first model's need an explanation
LONGEST = 400  # characters of a sample
MOST = 8  # questions that samples are shown of


def effects(chain: Chain) -> Iterator[Block]:
    yield Heading("Did each stage help?")
    yield Text("Each stage by its own measure, compared with the model it began with.")
    rows = tuple(_effects(chain))
    if not rows:
        yield Text("No stage has a measurement before and after it yet.")
        return
    yield Table(("Stage and its measure", "Before → after", "Verdict"), rows, words=True, stacked=True)
    yield Text(
        "Significant: the 95 % interval of the difference does not contain 0 (two proportions, Newcombe's method). Both"
        " models answer the same questions, so this test is cautious. Not tested: there is no interval for this number."
    )


def _effects(chain: Chain) -> Iterator[Row]:
    for link, kind in links():
        done, before = chain.result(link.name), BEFORE.get(link.name, "")

        def answers(*which: str, before: str = before, name: str = link.name) -> Iterator[Row]:
            return _answers(chain, before, name, MODELS[name], which)

        yield from kind.effects(Reported(link.title, done.metrics if done else None, chain.given(link), answers))
        if link.versus is not None:
            yield from _answers(chain, link.versus[0], link.name, link.versus[1], ("questions", "prompts"))


def _answers(chain: Chain, before: str, after: str, stage: str, which: tuple[str, ...]) -> Iterator[Row]:
    old, new = chain.evaluation(before), chain.evaluation(after)
    if old is None or new is None:
        return
    shares = []
    if "questions" in which:
        shares += [("questions right, greedy", old.questions.greedy, new.questions.greedy)]
        shares += [("questions right, sampled", old.questions.sampled, new.questions.sampled)]
    if "prompts" in which and old.prompts and new.prompts:
        shares += [(f"{TASKS[PROMPTS]} right, greedy", old.prompts.greedy, new.prompts.greedy)]
        shares += [(f"{TASKS[PROMPTS]} right, sampled", old.prompts.sampled, new.prompts.sampled)]
    if "strict" in which:
        shares += [("right and in the expected form, greedy", old.everything.strict, new.everything.strict)]
    for what, was, now in shares:
        if was.value is not None and now.value is not None:
            yield shares_row(stage, f"{what}; before: {MODELS[before]}", was, now)


def training(chain: Chain) -> Iterator[Block]:
    """What was logged at every step."""
    for curves in {kind.curves.figure: kind.curves for _, kind in links() if kind.curves is not None}.values():
        shown = [link for link, kind in links() if kind.curves is curves and link.name in chain.stages]
        if not any(chain.stages[link.name].steps for link in shown):
            continue
        metric, _, words = curves.optional
        more = words if any(chain.stages[link.name].curve(metric)[0] for link in shown) else ""
        yield Heading(curves.heading)
        yield Figure(curves.figure, curves.caption.format(more=more))
        for link in shown:
            yield from curves.about(chain.given(link))


def own_sections(chain: Chain) -> Iterator[Block]:
    """Of the stages that have one."""
    for link, kind in links():
        done = chain.result(link.name)
        if done is not None:
            yield from kind.report(done.metrics)


def models_table(chain: Chain) -> Iterator[Block]:
    """The models stage by stage, with every measure."""
    yield Heading("The models, stage by stage")
    evaluated = chain.evaluations
    if not evaluated:
        yield Text("No model was evaluated yet.")
        return
    asked = next((one.everything.greedy.total for one in evaluated.values() if one.everything.greedy.total), None)
    held_out = f"{asked:,} held-out questions and prompts" if asked else "held-out questions"
    yield Text(
        f"Shares of {held_out}, with the 95 % interval below each share. Answers are greedy, where not called sampled:"
        " the model always takes its most likely token. Sampled: each token is picked at random by its probability. ▼"
        " marks a stage that is significantly worse than the best stage before it."
    )
    worse = {(one.stage, one.measure): one for one in regressions(chain)}
    measures = dict.fromkeys(measure for one in evaluated.values() for measure in _measures(one))
    rows = [_row(measure, evaluated, worse) for measure in measures]
    bits = [number(evaluated[name].bits_per_byte if name in evaluated else None) for name in MODELS]
    rows.append((Cell("bits per byte of plain text", "lower is better"), *map(Cell, bits)))
    yield Table(("", *MODELS.values()), tuple(rows))
    yield from _about_bits(chain, evaluated)
    questions = next((one.questions.greedy.total for one in evaluated.values() if one.questions.greedy.total), None)
    counted = f"the {questions:,} held-out questions" if questions else "held-out questions"
    yield Figure("accuracy", f"Right answers to {counted} after each stage, with 95 % intervals")
    variants = ", ".join(f"{word[0]}: {word}" for link, kind in links() if (word := variant(link, kind)))
    yield Figure("kinds", f"Right answers (greedy) by kind of question, with 95 % intervals; {variants}")


def _measures(found: Evaluation) -> dict[str, Measured]:
    everything = found.everything
    return {
        **right_by_measure(found),
        "in the expected form": everything.form,
        "right and in the expected form": everything.strict,
        "cut at the token limit": everything.cut,
        "cut, sampled answers": everything.sampled_cut,
    }


def _row(measure: str, evaluated: dict[str, Evaluation], worse: dict[tuple[str, str], Regression]) -> Row:
    cells = []
    for name in MODELS:
        value = _measures(evaluated[name]).get(measure, Measured()) if name in evaluated else Measured()
        lost = worse.get((name, measure))
        if lost is None:
            cells.append(Cell(percent(value.value), between(value)))
        else:
            cells.append(Cell(f"▼ {percent(value.value)}", f"{between(value)}\nbelow {MODELS[lost.best]}", BAD))
    return (Cell(measure), *cells)


def _about_bits(chain: Chain, evaluated: dict[str, Evaluation]) -> Iterator[Block]:
    bits = {name: one.bits_per_byte for name, one in evaluated.items() if one.bits_per_byte is not None}
    if not bits:
        return
    first, last = next(iter(MODELS)), max(bits, key=lambda name: bits[name])
    guesses = (random_guess(found.metrics) for found in chain.stages.values() if found.done)
    guess = next((guess for guess in guesses if guess is not None), None)
    scale = f" A random guess would need {number(guess)}." if guess is not None else ""
    text = (
        "Bits per byte: how many bits the model needs to predict a byte of held-out text like that of the"
        f" {first} stage.{scale}"
    )
    if first in bits and bits[last] > RISEN * bits[first]:
        text += (
            f" It rises from {number(bits[first])} ({MODELS[first]}) to {number(bits[last])} ({MODELS[last]}). The"
            " later stages learn only the assistant's words in chats, so the model forgets how to continue plain text."
            f" This is expected, and it is the price of these stages: chat with this model, and use the {first} model"
            " where you need plain text. How well it answers in chats is measured above, not by this number."
        )
    yield Text(text)


Key = tuple[str, str, int]  # kind, answer, and which of those with the same two


def samples(chain: Chain) -> Iterator[Block]:
    """The same questions, answered after each stage. Matched by kind and answer: a base model's prompt is worded
    otherwise.
    """
    evaluated = {MODELS[name]: one for name, one in chain.evaluations.items() if one.samples}
    if not evaluated:
        return
    yield Heading("The same questions after each stage")
    yield Text(
        "Greedy answers to the first questions of each kind. They are examples: the tables above count all questions."
    )
    table: dict[Key, dict[str, Sample]] = {}
    for title, one in evaluated.items():
        for key, sample in _keyed(one):
            table.setdefault(key, {})[title] = sample
    for key in _some_of_each_kind(table):
        by_model = table[key]
        asked = next(reversed(by_model.values())).prompt
        kind = f" ({key[0]})" if key[0] else ""
        rows = tuple((Cell(title), *_answer(by_model.get(title))) for title in evaluated)
        caption = f"{_shortened(asked)} — expected: {_shortened(key[1])}{kind}"
        yield Table(("Model", "Answer", ""), rows, words=True, title=caption)


def _keyed(one: Evaluation) -> Iterator[tuple[Key, Sample]]:
    seen: dict[tuple[str, str], int] = {}
    for sample in one.samples:
        pair = (sample.kind, sample.answer)
        seen[pair] = seen.get(pair, 0) + 1
        yield (*pair, seen[pair]), sample


def _some_of_each_kind(keys: Iterable[Key]) -> list[Key]:
    """The first of each kind, then the second of each: few enough for a phone."""
    kinds: dict[str, list[Key]] = {}
    for key in keys:
        kinds.setdefault(key[0], []).append(key)
    return [key for turn in zip_longest(*kinds.values()) for key in turn if key is not None][:MOST]


def _answer(sample: Sample | None) -> tuple[Cell, Cell]:
    if sample is None:
        return Cell(ABSENT), Cell("")
    mark = {True: Cell("right", tone=GOOD), False: Cell("wrong", tone=BAD), None: Cell("")}[sample.correct]
    notes = [*(["not in the expected form"] if sample.in_form is False else []), *(["cut"] if sample.cut else [])]
    return Cell(_shortened(sample.completion) or "(nothing)"), replace(mark, small=", ".join(notes))


def _shortened(text: str) -> str:
    text = text.strip()
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
