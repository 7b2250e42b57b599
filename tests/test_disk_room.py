"""Preparing data stops before it fills the disk."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("numpy", reason="numpy is not installed")

from stoker.contract import disk_space
from stoker.contract.errors import EX_CANTCREAT, Refusal
from stoker.training.data import sources, work
from stoker.training.data.config import DataConfig
from stoker.training.data.prepare import prepare
from stoker.training.data.rows import rows
from stoker.training.tokenizer.config import TokenizerConfig
from stoker.training.tokenizer.tokenizer import bytes_tokenizer, load


def prepared(where: Path, *paths: str) -> Any:
    tokens = where / "tokenizer"
    bytes_tokenizer().save(str(tokens))
    data = DataConfig(path=paths, cache=str(where / "cache"), context_length=16, num_workers=1, validation="0")
    return prepare(data, TokenizerConfig(path=str(tokens)), lambda line: None)


def bytes_kept(where: Path) -> int:
    """Bytes of data in the cache."""
    made = [*(where / "cache").glob("unpacked/*"), *(where / "cache").glob("datasets/*/*.bin")]
    return sum(path.stat().st_size for path in made)


def keep_all_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space, "RESERVED_FRACTION", 1.0)
    monkeypatch.setattr(disk_space, "MAX_RESERVED_BYTES", 1 << 62)
    monkeypatch.setattr(disk_space, "_BYTES_BETWEEN_CHECKS", 64 << 10)


@pytest.mark.parametrize("kind", ["stream", "chat"])
def test_data_takes_no_more_of_a_disk_than_leaves_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    row = {
        "text": "x" * 1000,
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 999}],
    }
    (folder / "first.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    for number in range(50):
        os.symlink("first.jsonl", folder / f"{number}.jsonl")
    bytes_tokenizer().save(str(tmp_path / "tokenizer"))
    data = DataConfig(path=(str(folder),), cache=str(tmp_path / "cache"), context_length=1200, kind=kind)
    keep_all_of_the_disk(monkeypatch)
    with pytest.raises(Refusal, match=r"free, and .* stay free; --data\.cache") as problem:
        prepare(data, TokenizerConfig(path=str(tmp_path / "tokenizer")), lambda line: None)
    assert problem.value.code == EX_CANTCREAT and not [
        *(tmp_path / "cache/datasets").glob("*.tmp"),
        *(tmp_path / "cache/datasets").glob("*/*"),
    ]


def test_unpacked_files_leave_some_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(8):  # each is too small to be looked at alone
        (folder / f"{number}.txt.bz2").write_bytes(bz2.compress(f"{number} ".encode() * (20 << 10)))
    keep_all_of_the_disk(monkeypatch)
    with pytest.raises(Refusal, match=r"stay free; --data\.cache"):
        prepared(tmp_path, str(folder))
    assert bytes_kept(tmp_path) <= 64 << 10


class Hub:
    """As `datasets`: its rows come one by one."""

    def __init__(self, rows: Iterator[dict[str, Any]]) -> None:
        self._rows = rows

    def load_dataset_builder(self, *names: Any, **more: Any) -> Any:
        return SimpleNamespace(config=SimpleNamespace(data_files=None), as_streaming_dataset=lambda split: self._rows)


def test_rows_of_the_hub_leave_some_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_all_of_the_disk(monkeypatch)
    rows = ({"text": "x" * 1000} for _ in range(100_000))
    monkeypatch.setitem(sys.modules, "datasets", Hub(rows))
    with pytest.raises(Refusal, match=r"stay free; --data\.cache"):
        sources.fetch("owner/name", str(tmp_path), lambda line: None)
    assert not [*(tmp_path / "hub").iterdir()]


@pytest.mark.parametrize("kind", ["stream", "chat"])
def test_one_part_of_prepared_data_leaves_some_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A row group of any size is one part."""
    bytes_tokenizer().save(str(tmp_path))
    texts = [(b"some words", True)] * 100
    said = [([("user", b"some"), ("assistant", b"words")], "here")] * 100
    monkeypatch.setattr(work, "texts", lambda span, key: iter(texts))
    monkeypatch.setattr(work, "conversations", lambda span, wrong: iter(said))
    monkeypatch.setattr(disk_space, "_BYTES_BETWEEN_CHECKS", 64)
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=1, f_frsize=4096, f_blocks=1000))
    told = SimpleNamespace(kind=kind, dtype="<u2", text_key="text", longest=512)
    span = SimpleNamespace(form="jsonl", begin=0, entry=0)
    with pytest.raises(Refusal, match="stay free"):
        work.do(load(str(tmp_path)), cast(Any, told), [cast(Any, span)], str(tmp_path / "part"))


@pytest.mark.parametrize("name", ["a.parquet.gz", "a.arrow.gz"])
def test_unpacking_a_table_leaves_some_of_the_disk(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unpacked in /tmp, which is memory on many machines."""
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
