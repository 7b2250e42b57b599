"""Training a tokenizer on any text: within the memory that is free, in its own process or not, and whatever words it has."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="training a tokenizer needs tokenizers")

from conftest import Stoker, at_length
from stoker.contract import host_memory
from stoker.contract.errors import Refusal
from stoker.training.data.config import DataConfig
from stoker.training.data.learn import train, train_apart
from stoker.training.data.prepare import prepare
from stoker.training.tokenizer.config import TokenizerConfig
from stoker.training.tokenizer.definition import OURS
from stoker.training.tokenizer.tokenizer import load


def all_different(size: int) -> Iterator[str]:
    """Text of so many bytes in which no word comes twice."""
    words = map("".join, itertools.product(string.ascii_letters, repeat=4))
    while size > 0:
        piece = " ".join(itertools.islice(words, 10_000)) + "\n"
        size -= len(piece)
        yield piece


@at_length
def test_training_a_tokenizer_keeps_to_the_memory_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    (tmp_path / "book.txt").write_text("".join(all_different(9 << 20)))
    total, free = 8 << 30, 600 << 20
    monkeypatch.setattr(host_memory, "read_memory", lambda: (total, free, None))
    data = DataConfig(path=(str(tmp_path / "book.txt"),), cache=str(tmp_path / "cache"), context_length=64)
    with pytest.raises(Refusal, match=r"takes more than .* of memory.*train_megabytes"):
        prepare(data, TokenizerConfig(vocab_size=300), lambda line: None)
    assert not any((tmp_path / "cache" / "tokenizers").glob("*/tokenizer.json")), "nothing half-made stays"


def test_a_tokenizer_that_is_trained_apart_is_the_same(tmp_path: Path) -> None:

    texts = [*all_different(100_000), "the same words again, the same words again\n" * 50]
    here, apart = train(texts, 400, str(tmp_path / "here")), train_apart(texts, 400, str(tmp_path / "apart"))
    assert here.digest == apart.digest
    with pytest.raises(Refusal, match="too little text"):
        train_apart(["ab"], 400, str(tmp_path / "none"))


def test_long_words_are_cut_to_train_a_tokenizer(stoker: Stoker) -> None:
    """Each merge would go through all words that have the pair: 6 MB without a blank took minutes."""

    words = "".join(random.Random(1).choices("abcdefgh", k=2000))
    (stoker.cwd / "d.txt").write_text(f"{'xy' * 2000} {words}\n" * 3)
    argv = ["prepare", "--data", "d.txt", "--tokenizer.vocab_size", "5000", "--data.context_length", "16"]
    done = stoker(*argv, timeout=300)
    assert done.code == 0, done.err
    shown = done.out + done.err
    assert shown.count("the data has runs of more than 256 letters, signs or blanks") == 1, shown
    (folder,) = {path.parent for path in (stoker.cwd / "cache" / "tokenizers").rglob("tokenizer.json")}
    told = load(str(folder)).told
    assert max(map(len, told.vocabulary)) <= 257, "a word, and a blank before it"
    assert told.pattern == OURS, "only training cuts"
