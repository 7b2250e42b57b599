"""Questions to answers: the engine writes open ones, choices are compared by likelihood. Ranks share the questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from stoker.contract.frozen import frozen
from stoker.contract.progress import Progress
from stoker.training.evaluate.asking import (
    Manner,
    answer_text,
    as_asked,
    choice_ids,
    lettered,
    refuse_long,
    stop_ids,
)
from stoker.training.evaluate.likelihood import log_likelihoods
from stoker.training.evaluate.marking import in_form, right_in_form
from stoker.training.evaluate.tasks import Task
from stoker.training.generate.config import GenerateConfig
from stoker.training.model.decoder import Decoder
from stoker.training.serve.batch import BatchEngine
from stoker.training.tokenizer.tokenizer import Tokenizer

# questions whose answers are sampled in one call: part of what an answer depends on, unlike the number of ranks and of
# rows
BLOCK = 64


@frozen
class Asked:
    """A task's questions as a model sees them."""

    task: Task
    prompts: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]  # the questions that fit into the context

    @property
    def open(self) -> list[int]:
        return [place for place in self.places if not self.task.questions[place].labels]

    @property
    def closed(self) -> list[int]:
        return [place for place in self.places if self.task.questions[place].labels]


@frozen
class Written:
    text: str
    cut: bool  # at generate.new_tokens: it did not end by itself


@frozen
class Marked:
    """`correct`: by content; `in_form`: in the expected form; `strict`: correct in that form, which GRPO's `exact` pays for."""

    completion: str
    correct: bool
    in_form: bool
    strict: bool
    cut: bool = False


@frozen
class Outcome:
    task: str
    index: int
    kind: str
    prompt: str
    answer: str
    greedy: Marked
    open: bool  # it was written, not chosen
    sampled: tuple[Marked, ...] = ()


def mark(task: Task, written: Written, place: int) -> Marked:
    """Return the marks of an answer to the task's question at `place`."""
    question, text = task.questions[place], written.text
    correct = task.grader(text, question, truncated=written.cut)
    return Marked(text, correct, in_form(text, question.answer), right_in_form(text, question.answer), written.cut)


def put(task: Task, tokenizer: Tokenizer, manner: Manner, context: int, new_tokens: int) -> Asked:
    asked, what = (
        as_asked(task.questions, tokenizer, manner, new_tokens),
        f"task {task.name}, questions with their answers",
    )
    return Asked(
        task, tuple(tuple(ids) for ids, _ in asked), tuple(refuse_long([length for _, length in asked], context, what))
    )


def choose(asked: Asked, places: Sequence[int], model: Decoder, tokenizer: Tokenizer, manner: Manner) -> list[Outcome]:
    """The choice of the largest log-likelihood; texts are of unlike length, so theirs is per byte."""
    rows, owners = [], []
    for place in places:
        for number, ids in enumerate(choice_ids(tokenizer, asked.task.questions[place], manner)):
            rows.append((asked.prompts[place], ids))
            owners.append((place, number))
    scores: dict[int, list[float]] = {}
    for (place, number), likelihood in zip(owners, log_likelihoods(model, rows), strict=True):
        question = asked.task.questions[place]
        size = 1 if lettered(question, manner) else len(question.choices[number].encode())
        scores.setdefault(place, []).append(likelihood / size)
    return [_chosen(asked, place, scores[place]) for place in places]


@frozen
class Answerer:
    """Who writes answers, and how."""

    engine: BatchEngine
    tokenizer: Tokenizer
    manner: Manner
    how: GenerateConfig

    def write(self, asked: Asked, places: Sequence[int]) -> list[Outcome]:
        """The greedy answers."""
        prompts = [asked.prompts[place] for place in places]
        with Progress("answering", len(prompts), unit="questions") as progress:
            answers = self._written(prompts, told=progress.at, temperature=0.0) if places else []
        outcomes = []
        for place, answer in zip(places, answers, strict=True):
            question = asked.task.questions[place]
            shown = (question.kind, question.text, question.answer)
            outcomes.append(Outcome(asked.task.name, place, *shown, mark(asked.task, answer, place), open=True))
        return outcomes

    def sample(
        self, prompts: Sequence[Sequence[int]], count: int, seed: int, mine: Callable[[int], bool]
    ) -> dict[int, list[Written]]:
        """`count` sampled answers to each prompt of the blocks that are `mine`, by the prompt's place."""
        answers: dict[int, list[Written]] = {}
        blocks = {
            block: range(begin, min(begin + BLOCK, len(prompts)))
            for block, begin in enumerate(range(0, len(prompts), BLOCK))
            if mine(block)
        }
        with Progress("sampling", count * sum(map(len, blocks.values())), unit="answers") as progress:
            for block, places in blocks.items():
                asked = [prompts[place] for place in places for _ in range(count)]
                before = count * len(answers)
                how = {"told": lambda done, before=before: progress.at(before + done), **self.how.sampling}
                texts = self._written(asked, seed=seed * 1_000_003 + block, **how)
                answers |= {place: texts[number * count : (number + 1) * count] for number, place in enumerate(places)}
        return answers

    def _written(self, prompts: Sequence[Sequence[int]], **how: Any) -> list[Written]:
        found = self.engine.generate(prompts, new_tokens=self.how.new_tokens, stop=self._stop, **how)
        texts = [answer_text(self.tokenizer, ids, self.manner) for ids in found]
        return [Written(text, cut=not ids or ids[-1] not in self._stop) for text, ids in zip(texts, found, strict=True)]

    @cached_property
    def _stop(self) -> set[int]:
        return stop_ids(self.tokenizer, self.manner)


def _chosen(asked: Asked, place: int, scores: Sequence[float]) -> Outcome:
    question = asked.task.questions[place]
    best = question.labels[max(range(len(scores)), key=scores.__getitem__)]
    correct, shown = best == question.answer, question.text + question.listed
    marked = Marked(best, correct, in_form=True, strict=correct)
    return Outcome(asked.task.name, place, question.kind, shown, question.answer, marked, open=False)
