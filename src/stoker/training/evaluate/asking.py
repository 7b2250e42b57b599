"""How a question is put to a model, as a chat or, to a base model, as plain text; and where its answer ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from stoker.contract.errors import EX_DATAERR, Refusal
from stoker.contract.frozen import frozen
from stoker.training.data.formats.questions import Question
from stoker.training.evaluate.tasks import TOLERATED
from stoker.training.tokenizer.chat import check
from stoker.training.tokenizer.chat import prompt as chat_prompt
from stoker.training.tokenizer.tokenizer import Tokenizer

_CALCULATOR = re.compile(r"<<[^<>]*>>")  # GSM8K's notes in its answers, for a calculator and not for readers


@frozen
class Manner:
    """`evaluate.chat`, `evaluate.shots` and `generate.system`."""

    chat: bool
    shots: int = 0
    system: str = ""


def lettered(question: Question, manner: Manner) -> bool:
    """A chat names one of the choices it is shown; a base model completes by each choice's text, MMLU by letters."""
    return bool(question.labels) and (manner.chat or question.lettered)


def prompt_ids(
    tokenizer: Tokenizer, question: Question, manner: Manner, examples: Sequence[Question] = ()
) -> list[int]:
    if manner.chat:
        *before, (role, _) = question.messages
        if manner.system and not any(who == "system" for who, _ in before):
            before = [("system", manner.system), *before]
        return chat_prompt(tokenizer, [(who, what.encode()) for who, what in (*before, (role, question.shown))])
    shots = "".join(_example(one, manner) for one in examples)
    return [*tokenizer.start, *tokenizer.encode(shots + _plain(question, manner))]


def choice_ids(tokenizer: Tokenizer, question: Question, manner: Manner) -> list[list[int]]:
    """What each choice adds to the prompt."""
    words = question.labels if lettered(question, manner) else question.choices
    return [tokenizer.continued(word if manner.chat else f" {word}") for word in words]


def stop_ids(tokenizer: Tokenizer, manner: Manner) -> set[int]:
    if manner.chat:
        check(tokenizer)
        return set(tokenizer.stop_ids)
    newlines = {number for number in range(tokenizer.vocab_size) if b"\n" in tokenizer.decode_bytes([number])}
    return newlines | {tokenizer.end_id}


def answer_text(tokenizer: Tokenizer, ids: Sequence[int], manner: Manner) -> str:
    """Without the mark that ended it; a plain answer is one line."""
    marks = set(tokenizer.special.values())
    while ids and ids[-1] in marks:
        ids = ids[:-1]
    text = tokenizer.decode(ids)
    return (text if manner.chat else text.partition("\n")[0]).strip()


def examples_for(questions: Sequence[Question], shots: int) -> Callable[[int], list[Question]]:
    """Of a place, the first others of its kind: each stage's model is shown the same ones, and none its own question."""
    first: dict[str, list[int]] = {}
    for place, question in enumerate(questions):
        of_kind = first.setdefault(question.kind, [])
        if len(of_kind) <= shots:  # one more, for it may be the question itself
            of_kind.append(place)

    def examples(place: int) -> list[Question]:
        return [questions[other] for other in first[questions[place].kind] if other != place][:shots]

    return examples


def as_asked(
    questions: Sequence[Question], tokenizer: Tokenizer, manner: Manner, new_tokens: int
) -> list[tuple[list[int], int]]:
    """Each question's ids, and how many there are with room for its answer."""
    found, examples = [], examples_for(questions, 0 if manner.chat else manner.shots)
    for place, question in enumerate(questions):
        ids = prompt_ids(tokenizer, question, manner, examples(place))
        choices = [len(one) for one in choice_ids(tokenizer, question, manner)] if question.labels else []
        found.append((ids, len(ids) + (max(choices) if choices else new_tokens)))
    return found


def refuse_long(lengths: Sequence[int], room: int, what: str) -> list[int]:
    """Places of the prompts that fit; those that don't are left out below 1 %."""
    long = [place for place, length in enumerate(lengths) if length > room]
    if long and len(long) >= TOLERATED * len(lengths):
        raise Refusal(
            f"{what}: {len(long)} of {len(lengths)} are longer than {room} tokens (number {long[0] + 1} has"
            f" {lengths[long[0]]}): raise data.context_length or lower generate.new_tokens",
            EX_DATAERR,
        )
    return [place for place, length in enumerate(lengths) if length <= room]


def _example(question: Question, manner: Manner) -> str:
    return f"{_plain(question, manner)} {_solution(question, manner)}\n\n"


def _plain(question: Question, manner: Manner) -> str:
    parts = []
    for role, text in question.messages:
        parts.append({"user": f"Question: {text}", "assistant": f"Answer: {text}\n"}.get(role, text))
    listed = question.listed if lettered(question, manner) else ""
    return "\n".join(parts) + f"{listed}\nAnswer:"


def _solution(question: Question, manner: Manner) -> str:
    """On one line, for a line is where a plain answer ends."""
    if question.labels:
        chosen = question.choices[question.labels.index(question.answer)]
        return question.answer if lettered(question, manner) else chosen
    return " ".join(_CALCULATOR.sub("", question.answer).split())
