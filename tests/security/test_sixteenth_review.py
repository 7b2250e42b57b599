"""What the sixteenth review found: folders and files of other programs, bent checkpoints, secrets in other clothes."""

from __future__ import annotations

import pytest

from stoker.training.rl.config import names_code


@pytest.mark.parametrize("reward", ["rewards.py:score", "a=b.py:score=1", "lang=en/r.py:score=1", "r.py:score=0.5"])
def test_a_config_file_names_no_code(reward: str) -> None:
    """However a weight is cut off it."""
    assert names_code([reward]) and names_code((reward,)) and names_code(reward)
    assert not names_code(["exact", "regex:a.py=1", "length=0.1"])
