"""Decides whether a completion answers a question correctly: one rule for evaluation, GRPO's `correct` and rollouts.jsonl.

docs/pipeline.md ("How answers are marked") describes the rule. It is not GRPO's reward, which may pay for something else.
No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from stoker.training.data.formats.format import Unusable
from stoker.training.data.formats.questions import Question, gsm8k, prompt_and_answer
from stoker.training.evaluate.marking import Alternatives, alternatives, phrases, right, stated, words
from stoker.training.evaluate.mathematics import same_value

# Answers that are compared by value: LaTeX, powers, fractions and percentages. "2020-01-02" is not one of them.
_EXPRESSION = re.compile(r"\\|\^|^-?\d+/\d+$|%$")


class Grader:
    """Grades completions of the questions of one file.

    A question's `alternatives` are the wrong answers that a correct completion must not name. Where a question has none,
    they are the other answers of its `kind` in the file.
    """

    def __init__(self, questions: Iterable[Question]) -> None:
        self._answers: dict[str, set[str]] = {}
        for question in questions:
            self._answers.setdefault(question.kind, set()).add(question.answer)
        self._phrases: dict[str, frozenset[tuple[str, ...]]] = {}

    def __call__(self, completion: str, question: Question, *, truncated: bool) -> bool:
        """Return whether the completion is correct. `truncated`: the token limit ended it."""
        if question.alternatives:
            others = alternatives(question.alternatives)
        else:
            others = Alternatives(self._phrases_of(question.kind), words(question.text))
        if right(completion, question.answer, others, cut=truncated):
            return True
        is_expression = _EXPRESSION.search(stated(question.answer)) is not None
        return is_expression and same_value(completion, question.answer, cut=truncated)

    def _phrases_of(self, kind: str) -> frozenset[tuple[str, ...]]:
        if kind not in self._phrases:
            self._phrases[kind] = phrases(self._answers.get(kind, ()))
        return self._phrases[kind]


def open_question(row: Mapping[str, Any]) -> Question | None:
    """Return the row as evaluation asks it, or None where it has no answer, or choices instead of one."""
    for form in (prompt_and_answer, gsm8k):
        try:
            question = form(row, "prompts")  # the kind of rows that name none
        except Unusable:
            return None
        if question is not None:
            return question
    return None
