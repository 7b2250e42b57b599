"""A stranger's text whose words are all different, and a model that is small and wide; tokens of services in text."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import at_length
from stoker.contract import hostmemory
from stoker.contract.names import Refusal


def all_different(size: int) -> Iterator[str]:
    """Text of so many bytes in which no word comes twice."""
    words = map("".join, itertools.product(string.ascii_letters, repeat=4))
    while size > 0:
        piece = " ".join(itertools.islice(words, 10_000)) + "\n"
        size -= len(piece)
        yield piece


@at_length
def test_training_a_tokenizer_keeps_to_the_memory_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    from stoker.training.data.config import DataConfig
    from stoker.training.data.prepare import prepare
    from stoker.training.tokenizer.config import TokenizerConfig

    (tmp_path / "book.txt").write_text("".join(all_different(9 << 20)))
    total, free = 8 << 30, 600 << 20
    monkeypatch.setattr(hostmemory, "memory", lambda: (total, free, None))
    data = DataConfig(path=(str(tmp_path / "book.txt"),), cache=str(tmp_path / "cache"), context_length=64)
    with pytest.raises(Refusal, match=r"takes more than .* of memory.*train_megabytes"):
        prepare(data, TokenizerConfig(vocab_size=300), lambda line: None)
    assert not any((tmp_path / "cache" / "tokenizers").glob("*/tokenizer.json")), "nothing half-made stays"


def test_a_tokenizer_that_is_trained_apart_is_the_same(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    from stoker.training.data.learn import train, train_apart

    texts = [*all_different(100_000), "the same words again, the same words again\n" * 50]
    here, apart = train(texts, 400, str(tmp_path / "here")), train_apart(texts, 400, str(tmp_path / "apart"))
    assert here.digest == apart.digest
    with pytest.raises(Refusal, match="too little text"):
        train_apart(["ab"], 400, str(tmp_path / "none"))


# Put together from pieces, so that no scanner takes this file for a leak.
