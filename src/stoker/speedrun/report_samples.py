"""The same questions, answered after each stage: the report's section of samples. Pure: a Chain in, blocks out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from stoker.contract.shape import replace
from stoker.speedrun.gather import Chain, Evaluation, Sample
from stoker.speedrun.report_results import MODELS
from stoker.training.stages.blocks import BAD, GOOD, Block, Cell, Heading, Table, Text
from stoker.training.stages.significance import ABSENT

LONGEST = 400  # characters
MOST = 8  # questions
Key = tuple[str, str, int]  # kind, answer, and which of those with the same two


def samples(chain: Chain) -> Iterator[Block]:
    """Matched by kind and answer: a base model's prompt is worded otherwise."""
    found = {MODELS[name]: one for name in MODELS if (one := chain.evaluation(name)) is not None and one.samples}
    if not found:
        return
    yield Heading("The same questions after each stage")
    yield Text(
        "Greedy answers to the first questions of each kind. They are examples: the tables above count all questions."
    )
    table: dict[Key, dict[str, Sample]] = {}
    for title, one in found.items():
        for key, sample in _keyed(one):
            table.setdefault(key, {})[title] = sample
    for key in _some_of_each_kind(table):
        by_model = table[key]
        asked = next(reversed(by_model.values())).prompt
        kind = f" ({key[0]})" if key[0] else ""
        rows = tuple((Cell(title), *_said(by_model.get(title))) for title in found)
        yield Table(
            ("Model", "Answer", ""), rows, words=True, title=f"{shortened(asked)} — expected: {shortened(key[1])}{kind}"
        )


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


def _said(sample: Sample | None) -> tuple[Cell, Cell]:
    if sample is None:
        return Cell(ABSENT), Cell("")
    mark = {True: Cell("right", tone=GOOD), False: Cell("wrong", tone=BAD), None: Cell("")}[sample.correct]
    notes = [*(["not in the expected form"] if sample.in_form is False else []), *(["cut"] if sample.cut else [])]
    return Cell(shortened(sample.completion) or "(nothing)"), replace(mark, small=", ".join(notes))


def shortened(text: str) -> str:
    text = text.strip()
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
