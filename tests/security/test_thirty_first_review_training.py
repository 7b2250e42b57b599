"""What the thirty-first review found in the training plane."""

from __future__ import annotations

import bz2
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from stoker.contract import effort
from stoker.contract.memory import used_memory
from stoker.contract.names import Refusal
from stoker.training.data import unpack
from stoker.training.data.rows import rows
from stoker.training.data.sources import find_sources

# ---- files of holes: what a file may take is in proportion to what is stored of it ----

TERABYTE = 1 << 40


def with_hole(path: Path, data: bytes, end: bytes = b"") -> str:
    """A file of a terabyte that takes the room of `data` and `end`."""
    with open(path, "wb") as file:
        file.write(data)
        try:
            file.truncate(TERABYTE)
        except OSError:
            pytest.skip("no file of a terabyte can be made here")
        file.seek(TERABYTE)
        file.write(end)
        file.flush()
        try:
            if os.lseek(file.fileno(), 0, os.SEEK_HOLE) >= TERABYTE:
                pytest.skip("this file system knows of no holes")
        except OSError:
            pytest.skip("this file system knows of no holes")
    return str(path)


def test_a_packed_file_of_holes_unpacks_to_what_its_bytes_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """9 KB of an archive became 7 GB of rows in each rank: gz, bz2 and xz end before the zeros behind them."""
    monkeypatch.setattr(unpack, "ALWAYS", 1 << 20)
    line = json.dumps({"prompt": "a" * 1000, "answer": "b"}).encode() + b"\n"
    packed = bz2.compress(line * 4000)
    path = with_hole(tmp_path / "prompts.jsonl.bz2", packed)
    with pytest.raises(Refusal, match="unpacks to more than 200 times"):
        for _ in rows(path):
            pass


def test_looking_at_a_file_of_holes_has_the_limits_of_a_small_one(tmp_path: Path) -> None:
    path = with_hole(tmp_path / "prompts.jsonl", b"{}\n")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with effort.looking_at_file("a file", path):
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert 0 < limit < 64 << 30


def test_a_file_under_many_names_has_the_limits_of_one(tmp_path: Path) -> None:
    first = tmp_path / "q0.jsonl"
    first.write_bytes(b"{}\n" * (1 << 20))
    for number in range(1, 2000):
        (os.link if number % 2 else os.symlink)(first, tmp_path / f"q{number}.jsonl")
    with effort.looking_at_file("files", *(str(path) for path in tmp_path.iterdir())):
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    assert 0 < limit < 16 << 30


def test_one_task_named_many_times_is_held_in_the_room_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name had a gigabyte of its own: 40 names of a file of 7 MB took 2.7 GB."""
    from stoker.training.evaluate import tasks

    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    limits, read = [], tasks._task

    def measured(path: str, most: int) -> tasks.Task:
        limits.append(resource.getrlimit(resource.RLIMIT_DATA)[0])
        return read(path, most)

    monkeypatch.setattr(tasks, "_task", measured)
    most = used_memory() + effort.ROOM + (64 << 20)
    assert len(tasks.read_tasks([f"t{number}={path}" for number in range(200)], 0)) == 200
    assert len(limits) == 200 and all(0 < limit < most for limit in limits)


@pytest.mark.parametrize("name", ["book.txt", "book.jsonl", "book.csv"])
def test_a_text_of_holes_is_refused_before_it_is_cut_into_a_million_parts(name: str, tmp_path: Path) -> None:
    """Or hashed for hours."""
    path = with_hole(tmp_path / name, b"she sells sea shells\n" * 20_000)
    with pytest.raises(Refusal, match=r"unpacks to more than 200 times its 412\.0 KiB"):
        find_sources((path,), str(tmp_path / "cache"), lambda line: None)


def test_a_parquet_file_of_holes_has_the_rows_of_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A footer stands at the end, and what it names may lie anywhere before it."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"prompt": ["a" * 1000] * 4000, "answer": ["b"] * 4000})
    parquet.write_table(table, tmp_path / "whole.parquet", compression="NONE")
    data = (tmp_path / "whole.parquet").read_bytes()
    footer = data[-8 - int.from_bytes(data[-8:-4], "little") :]
    monkeypatch.setattr(unpack, "ALWAYS", 1 << 20)
    with pytest.raises(Refusal, match="unpacks to more than 200 times"):
        for _ in rows(with_hole(tmp_path / "holes.parquet", data, footer)):
            pass


def test_a_list_of_row_groups_has_a_limit_on_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """55 MB of it took 1.1 GB wherever the file was opened; a gigabyte, which packs to 30 MB, would take 20."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path, limits, opened = str(tmp_path / "a.parquet"), list[int](), parquet.ParquetFile
    parquet.write_table(arrow.table({"a": ["b"]}), path)

    def measured(path: str) -> Any:
        limits.append(resource.getrlimit(resource.RLIMIT_DATA)[0])
        return opened(path)

    def too_large(path: str) -> Any:
        raise OSError("Couldn't deserialize thrift: std::bad_alloc")  # as Arrow says it

    monkeypatch.setattr(parquet, "ParquetFile", measured)
    most = used_memory() + (1 << 30) + (64 << 20)
    assert [row for _, row in rows(path)] == [{"a": "b"}]
    assert limits and all(0 < limit < most for limit in limits)
    monkeypatch.setattr(parquet, "ParquetFile", too_large)
    with pytest.raises(Refusal, match="its list of row groups takes too much memory"):
        next(rows(path))


# ---- answers whose tokens are long ----


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousandth of what answers may say in any case, as these tokens have 128 characters, and not 4,096 bytes."""
    from stoker.training.serve import api

    monkeypatch.setattr(api, "MOST_SAID", 1 << 12, raising=False)
    monkeypatch.setattr(api, "SAID_A_TOKEN", 100, raising=False)


# ---- templates ----


def test_a_template_writes_so_many_special_tokens_and_no_more() -> None:
    """Each is found by a name of 45 characters: 4 million of one letter took 1.4 GB."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    from stoker.training.tokenizer.template import Unfit
    from stoker.training.tokenizer.tokenizer import Tokenizer, bytes_tokenizer

    base = bytes_tokenizer()
    told = json.loads(base.data)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    told["added_tokens"].append({**flags, "id": base.vocab_size, "content": "\u2603", "special": True})
    source = "{{ '\u2603' * (messages[0].content | int) }}"
    words = Tokenizer(json.dumps(told).encode(), {**base.config, "chat_template": source}, "x")
    assert words.template is not None
    assert len(words.template.prompt([{"role": "user", "content": "20000"}])) == 20_000
    with pytest.raises(Unfit, match=r"more than [0-9,]+ special tokens"):
        words.template.prompt([{"role": "user", "content": "100000"}])


# ---- tokens, and choices ----


def test_a_token_has_so_many_bytes_and_no_more() -> None:
    """1,024 emoji are 4 KB, of which every answer may be made."""
    pytest.importorskip("tokenizers")
    from stoker.training.tokenizer.tokenizer import Tokenizer

    def made(token: str) -> Tokenizer:
        model = {"type": "WordPiece", "unk_token": "<|endoftext|>", "continuing_subword_prefix": "##"}
        model |= {"max_input_chars_per_word": 100, "vocab": {"<|endoftext|>": 0, token: 1}}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = [{**flags, "id": 0, "content": "<|endoftext|>", "special": True}]
        return Tokenizer(json.dumps({"added_tokens": added, "model": model}).encode(), {}, "x")

    assert made("\U0001f600" * 256).vocab_size == 2
    with pytest.raises(Refusal, match=r"a token has 1,028 bytes; 1,024 is the most"):
        assert made("\U0001f600" * 257).vocab_size


def test_the_first_row_of_a_table_is_looked_for_in_its_first_lines(tmp_path: Path) -> None:
    """Cells that each have a line's end made one row of a whole file, twelve times its size in memory."""
    from stoker.speedrun import material

    (tmp_path / "a.csv").write_text('"what\nis it?",a,b,c,d,A\n')
    assert material._is_mmlu(str(tmp_path / "a.csv"))
    (tmp_path / "b.csv").write_bytes(b'"x\n",' * 100_000 + b"\xff")  # where it is no UTF-8 it is not read
    assert not material._is_mmlu(str(tmp_path / "b.csv"))
