"""What the thirtieth review found in the training plane."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.training.checkpoint import folders

# ---- answers that repeat their prompts ----


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("tokenizers")
    from stoker.training.data.learn import train
    from stoker.training.serve import api

    folder = tmp_path_factory.mktemp("words")
    return api.Served("m", train([" " * 128 + "x\n"] * 30, 400, str(folder)), 1 << 15)


def asked(served: Any, **body: Any) -> int:
    """How many answers; -1: the body is refused as one that asks for too much."""
    from stoker.training.serve import api

    try:
        return len(api.read(json.dumps(body).encode(), False, served).requests)
    except api.Problem as problem:
        assert "are too many: at most" in problem.line
        return -1


def test_the_log_probabilities_of_echoed_prompts_are_counted(served: Any) -> None:
    """A body of 20 KB got 80 times 4,090 of them, against a limit of 262,144."""
    prompt = {"prompt": [65] * 4090, "max_tokens": 1}
    assert asked(served, **prompt, echo=True, logprobs=0) == 1
    assert asked(served, **prompt, n=80, logprobs=0) == 80
    assert asked(served, **prompt, n=80, echo=True, logprobs=0) == -1


def test_echoed_prompts_have_so_many_bytes_and_no_more(served: Any) -> None:
    """Tokens have up to 1,024 characters: 80 KB of ids in a body became 500 MB of text in its answer."""
    longest = int(served.tokenizer.lengths.argmax())
    assert served.tokenizer.lengths[longest] > 100
    prompt = {"prompt": [longest] * 32_000, "max_tokens": 1}
    assert asked(served, **prompt, echo=True) == 1
    assert asked(served, **prompt, n=128) == 128
    assert asked(served, **prompt, n=128, echo=True) == -1


def test_ids_of_prompts_are_repeated_so_often_and_no_more(served: Any) -> None:
    prompt = {"prompt": [65] * 32_000, "max_tokens": 1, "return_token_ids": True}
    assert asked(served, **prompt, n=16) == 16
    assert asked(served, **prompt, n=128) == -1


# ---- checkpoints in a folder that others may write to ----


def test_another_spelling_of_a_step_hides_no_checkpoint(tmp_path: Path) -> None:
    """In a --checkpoint.folder of mode 1777 another user's step-000000007 stood in the place of step-00000007: the run began anew."""
    own = [tmp_path / folders.name_of(step) for step in (7, 8, 123_456_789)]
    others = [f"step-{'0' * zeros}{step}" for step in (7, 8, 123_456_789) for zeros in range(1, 40)]
    wide = ["step-" + "".join(chr(0xFF10 + int(digit)) for digit in "00000008"), "step-0000000\u0668"]
    for name in {*others, *wide} - {path.name for path in own}:
        (tmp_path / name).mkdir()
    for path in own:
        path.mkdir()
    assert folders.steps_in(str(tmp_path)) == {123_456_789: str(own[2]), 8: str(own[1]), 7: str(own[0])}
