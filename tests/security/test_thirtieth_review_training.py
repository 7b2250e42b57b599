"""What the thirtieth review found in the training plane."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.contract.names import Refusal
from stoker.training.checkpoint import folders
from stoker.training.data.rows import rows

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


# ---- packed tables ----


@pytest.mark.parametrize("name", ["a.parquet.gz", "a.arrow.gz"])
def test_unpacking_a_table_leaves_some_of_the_disk(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 MB unpacks to 200 MB, and 500 MB to 100 GB, in /tmp: which is memory on many machines."""
    with gzip.open(tmp_path / name, "wb") as file:
        for _ in range(128):
            file.write(bytes(1 << 20))
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    real, full = os.statvfs, SimpleNamespace(f_bavail=10, f_blocks=1000, f_frsize=1 << 20)
    monkeypatch.setattr(os, "statvfs", lambda path: full if str(path).startswith(str(place)) else real(path))
    with pytest.raises(Refusal, match="stay free"):
        next(rows(str(tmp_path / name)))
    assert not os.listdir(place)


# ---- pairs of answers ----


def test_a_packed_file_has_no_more_pairs_than_one_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.8 MB stood for 5.5 million pairs, which take 8 GB in each rank."""
    pytest.importorskip("tokenizers")
    from stoker.training.reward import pairs
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    monkeypatch.setattr(pairs, "MOST_PAIRS", 500, raising=False)
    lines = (json.dumps({"prompt": "Which is it?", "chosen": "this", "rejected": "that"}) + "\n").encode() * 2000
    (tmp_path / "plain.jsonl").write_bytes(lines)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines))

    def read(name: str) -> int:
        path = str(tmp_path / name)
        return sum(map(len, pairs.pairs_of(path, "", bytes_tokenizer(), 256, "dpo", lambda line: None)))

    assert read("plain.jsonl") == 2000
    with pytest.raises(Refusal, match=r"more than 5[01][0-9] pairs"):
        read("packed.jsonl.gz")


# ---- held-out text ----


def test_no_more_of_a_text_is_encoded_than_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 32 MB took 1 GB in each rank for the 10,000 tokens that were asked for; one of 0.8 MB may unpack to 256 MB."""
    pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    from stoker.training.data.config import DataConfig
    from stoker.training.evaluate.likelihood import documents, windows
    from stoker.training.tokenizer.tokenizer import Tokenizer, bytes_tokenizer

    (tmp_path / "held-out.txt").write_bytes(b"she sells sea shells\n" * 400_000)
    encoded, array = [], Tokenizer.array

    def counted(words: Tokenizer, data: bytes) -> Any:
        encoded.append(len(data))
        return array(words, data)

    monkeypatch.setattr(Tokenizer, "array", counted)
    parts = documents(str(tmp_path / "held-out.txt"), DataConfig(cache=str(tmp_path / "cache")), lambda line: None)
    rows_, sizes = windows(bytes_tokenizer(), parts, 256, 10_000)
    assert sum(sizes) == 10_240 and len(rows_) == 40
    assert sum(encoded) < 1 << 20


def test_the_questions_of_a_task_have_so_many_tokens_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.8 MB of a packed file became 3 GB of token ids in each rank."""
    pytest.importorskip("tokenizers")
    from stoker.training.data.formats.questions import Question
    from stoker.training.evaluate import asking
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    questions = [Question((("user", "a" * 1000),), "x", "kind")] * 10
    manner = asking.Manner(chat=False)
    assert len(asking.as_asked(questions, bytes_tokenizer(), manner, 16)) == 10
    monkeypatch.setattr(asking, "MOST_TOKENS", 5000, raising=False)
    with pytest.raises(Refusal, match="10 questions have more than 5,000 tokens"):
        asking.as_asked(questions, bytes_tokenizer(), manner, 16)
