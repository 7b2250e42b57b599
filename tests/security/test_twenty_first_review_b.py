"""What the twenty-first review found: questions, prompts and rows whose cost grew with their square."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.contract.names import Refusal
from stoker.training.evaluate.tasks import read_tasks


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
