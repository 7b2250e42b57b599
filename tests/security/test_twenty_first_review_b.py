"""What the twenty-first review found: questions, prompts and rows whose cost grew with their square."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.contract.names import Refusal
from stoker.training.data.formats.questions import Question
from stoker.training.evaluate import asking
from stoker.training.evaluate.asking import Manner, as_asked
from stoker.training.evaluate.tasks import read_tasks
from stoker.training.recipes import density
from stoker.training.rl import scoring
from stoker.training.tokenizer.tokenizer import bytes_tokenizer


class Counting(tuple[Question, ...]):
    """Questions that count how often they are looked at."""

    looks = 0

    def __iter__(self) -> Any:
        for one in super().__iter__():
            Counting.looks += 1
            yield one


def test_examples_are_looked_for_once(tmp_path: Path) -> None:
    """5 MB of short questions took hours to be asked with examples, before the first one was."""
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}", "answer": "a"}}\n' for number in range(300)))
    (task,) = read_tasks([str(path)], 0)
    Counting.looks = 0
    as_asked(Counting(task.questions), bytes_tokenizer(), Manner(False, shots=4), 8)
    assert Counting.looks < 4 * 300


def test_long_examples_are_not_put_before_every_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.7 MB of them took 4 GB and more."""
    monkeypatch.setattr(asking, "MOST_OF_EXAMPLES", 100_000)
    path = tmp_path / "q.jsonl"
    rows = ["long " * 1000] * 3 + ["short"] * 20
    path.write_text("".join(f'{{"prompt": "{text}", "answer": "a"}}\n' for text in rows))
    (task,) = read_tasks([str(path)], 0)
    with pytest.raises(Refusal, match=r"evaluate\.shots 2 puts more than"):
        as_asked(task.questions, bytes_tokenizer(), Manner(False, shots=2), 8)
    assert len(as_asked(task.questions, bytes_tokenizer(), Manner(True, shots=2), 8)) == 23


def test_neighbours_of_many_prompts_are_looked_for_among_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400,000 prompts, 10 MB, all pairs were compared."""
    monkeypatch.setattr(density, "MOST_OTHERS", 50)
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(173, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    others = np.arange(50) * 173 // 50
    similar = vectors @ vectors[others].T
    similar[others, np.arange(50)] = -np.inf
    expected = 1 - np.sort(similar, axis=1)[:, -5:].mean(1)
    assert np.allclose(density.distances(vectors, 5), expected, atol=1e-6)


def test_rows_with_a_million_keys_are_refused() -> None:
    """A reward that gets all answers at once got a list for each key: 10 MB took a minute of every step."""
    rows = [{f"{row}-{key}": 0 for key in range(1000)} for row in range(20)]
    with pytest.raises(Refusal, match="different keys"):
        scoring.columns_of(rows)
    assert scoring.columns_of(rows[:2]) == [*rows[0], *rows[1]]


def test_a_question_has_no_more_choices_than_can_be_computed(tmp_path: Path) -> None:
    """The question is computed once for each choice: one with half a million, 6 MB, took minutes."""
    path = tmp_path / "arc.jsonl"
    for count in (256, 257):
        choices = {"label": [str(number) for number in range(count)], "text": ["a"] * count}
        path.write_text(json.dumps({"question": "Which?", "choices": choices, "answerKey": "1"}) + "\n")
        if count == 256:
            assert len(read_tasks([str(path)], 0)[0].questions[0].choices) == 256
        else:
            with pytest.raises(Refusal, match="no row can be asked"):
                read_tasks([str(path)], 0)
