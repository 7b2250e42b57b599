"""What others can make longer and longer: weights that wait, cards that come and go, a run's history, the text of a token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.contract.names import Refusal
from stoker.training.tokenizer.tokenizer import bytes_tokenizer, load


def test_a_token_of_a_page_of_text_is_refused(tmp_path: Path) -> None:
    """A model that writes nothing else made 3.2 GB of one answer, and took 8.4 GB of memory for it."""
    bytes_tokenizer().save(str(tmp_path))
    told = json.loads((tmp_path / "tokenizer.json").read_text())
    told["model"]["vocab"]["\U0001f600" * 1024] = 400
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    assert load(str(tmp_path)).vocab_size == 401
    told["model"]["vocab"]["\U0001f600" * 1025] = 401
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(Refusal, match=r"a token has 1,025 characters; 1,024 is the most"):
        _ = load(str(tmp_path)).vocab_size
