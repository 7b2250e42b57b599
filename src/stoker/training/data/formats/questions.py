"""A row of a question file, whatever its publisher calls the columns, becomes a Question. Pure; no torch.

Each form is one function: it gives a Question, or raises Unusable with what is wrong, or None where a row is not of its
form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker.contract.frozen import frozen
from stoker.contract.units import plural
from stoker.training.data.formats.format import Format, Row, Turn, Unusable
from stoker.training.tokenizer.roles import LEARNED, ROLES

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@frozen
class Question:
    messages: tuple[tuple[str, str], ...]  # (role, text); a plain question is one user's message
    answer: str  # for a choice: its label
    kind: str
    labels: tuple[str, ...] = ()  # of a choice; empty: an open question
    choices: tuple[str, ...] = ()
    lettered: bool = False  # answered by letter though it is asked as plain text, as MMLU is
    alternatives: tuple[str, ...] = ()  # other answers of its class, all wrong here; empty: the file names none

    @property
    def text(self) -> str:
        """For people."""
        return "\n".join(text for _, text in self.messages)

    @property
    def listed(self) -> str:
        """Its choices, a line each."""
        return "".join(f"\n{label}. {text}" for label, text in zip(self.labels, self.choices, strict=True))

    @property
    def shown(self) -> str:
        """The last message as a chat is asked."""
        text = self.messages[-1][1]
        return f"{text}{self.listed}\nAnswer with the letter only." if self.labels else text


def prompt_and_answer(row: Row, kind: str) -> Question | None:
    if "prompt" not in row or "answer" not in row:
        return None
    others = _list(row["alternatives"], "alternatives") if row.get("alternatives") else []
    kind = _text(row.get("kind", kind), "kind")
    return Question(
        messages_of(row["prompt"]), _answer(row["answer"]), kind, alternatives=tuple(_answer(other) for other in others)
    )


def gsm8k(row: Row, kind: str) -> Question | None:
    if not isinstance(row.get("question"), str) or "answer" not in row or "choices" in row:
        return None
    return Question(messages_of(row["question"]), _answer(row["answer"]), kind)


def arc(row: Row, kind: str) -> Question | None:
    """AI2's own files have question.stem and question.choices, the hub's a question and two columns of choices."""
    if "answerKey" not in row or "question" not in row:
        return None
    asked: Any = row["question"]
    choices: Any = row.get("choices")
    if isinstance(asked, Mapping):
        asked, choices = asked.get("stem"), asked.get("choices", choices)
    if isinstance(choices, Mapping):
        labels, texts = _list(choices.get("label"), "choices.label"), _list(choices.get("text"), "choices.text")
    else:
        listed = _list(choices, "choices")
        if not all(isinstance(one, Mapping) for one in listed):
            raise Unusable("choices are not objects with label and text")
        labels, texts = [one.get("label") for one in listed], [one.get("text") for one in listed]
    return _choice(asked, labels, texts, row["answerKey"], kind, lettered=False)


def mmlu(row: Row, kind: str) -> Question | None:
    """The hub's: the answer is the place of a choice."""
    if "answerKey" in row or not {"question", "choices", "answer"} <= row.keys():
        return None
    texts, place = _list(row["choices"], "choices"), row["answer"]
    if isinstance(place, int) and not isinstance(place, bool):
        if not 0 <= place < min(len(texts), len(LETTERS)):
            raise Unusable(f"answer {place} is not one of its {plural(len(texts), 'choice')}")
        place = LETTERS[place]
    subject = row.get("subject")
    return _choice(
        row["question"],
        list(LETTERS[: len(texts)]),
        texts,
        place,
        subject if isinstance(subject, str) and subject else kind,
        lettered=True,
    )


def mmlu_cells(cells: Sequence[str], kind: str) -> Question:
    """A line of the published csv: question, A, B, C, D, answer."""
    if len(cells) != 6:
        raise Unusable(f"{plural(len(cells), 'cell')}, not the six of question,A,B,C,D,answer")
    return _choice(cells[0], list("ABCD"), list(cells[1:5]), cells[5].strip(), kind, lettered=True)


def messages_of(prompt: Any) -> tuple[tuple[str, str], ...]:
    """A text, or a list of role and content."""
    if isinstance(prompt, str):
        return (("user", _text(prompt, "prompt")),)
    found = []
    for number, one in enumerate(_list(prompt, "prompt"), 1):
        role, content = (one.get("role"), one.get("content")) if isinstance(one, Mapping) else (None, None)
        if role not in ROLES:
            raise Unusable(f"message {number} has the role {role!r}, not one of {', '.join(ROLES)}")
        found.append((str(role), _text(content, f"message {number}")))
    return tuple(found)


def _choice(asked: Any, labels: list[Any], texts: list[Any], key: Any, kind: str, *, lettered: bool) -> Question:
    if len(labels) != len(texts) or len(texts) < 2:
        raise Unusable(f"{plural(len(texts), 'choice')} with {plural(len(labels), 'label')}")
    names = tuple(_text(label, "a choice's label").strip() for label in labels)
    answer = _text(key, "the answer").strip()
    if answer not in names or len(set(names)) < len(names):
        raise Unusable(f"the answer {answer!r} is not one of the labels {', '.join(names)}")
    return Question(messages_of(asked), answer, kind, names, tuple(_text(text, "a choice") for text in texts), lettered)


def _answer(value: Any) -> str:
    """A number is what it would be as text."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else _text(value, "answer")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        kind = "null" if value is None else type(value).__name__
        raise Unusable(f"{what} is {'empty' if isinstance(value, str) else kind}, not text")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, (list, tuple)) or not value:
        kind = "missing" if value is None else type(value).__name__
        raise Unusable(f"{what} is {'empty' if value in ([], ()) else kind}, not a list")
    return list(value)


Form = Callable[[Row, str], Question | None]


def _entry(name: str, about: str, columns: tuple[str, ...], needs: set[str], form: Form) -> tuple[Format, Form]:
    def conversation(row: Row) -> list[Turn]:
        question = form(row, name)
        if question is None:
            raise Unusable(f"it lacks {about}")
        role = question.messages[-1][0]
        return [*question.messages[:-1], (role, question.shown), (LEARNED, question.answer)]

    return Format(name, about, columns, lambda row: needs <= row.keys(), conversation), form


_ENTRIES = (
    _entry(
        "prompt-answer",
        "prompt and answer (and kind, alternatives)",
        ("prompt", "answer", "kind", "alternatives"),
        {"prompt", "answer"},
        prompt_and_answer,
    ),
    _entry(
        "arc",
        "ARC's question, choices and answerKey",
        ("question", "choices", "answerKey"),
        {"question", "answerKey"},
        arc,
    ),
    _entry(
        "mmlu",
        "MMLU's question, choices and answer",
        ("question", "choices", "answer", "subject"),
        {"question", "choices", "answer"},
        mmlu,
    ),
    _entry("gsm8k", "GSM8K's question and answer", ("question", "answer"), {"question", "answer"}, gsm8k),
)
FORMATS = tuple(made for made, _ in _ENTRIES)
FORMS: dict[str, Form] = {made.about: form for made, form in _ENTRIES}  # what an evaluation asks
