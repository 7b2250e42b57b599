"""Packed files are read as what they hold, whatever frames they consist of."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy", reason="numpy is not installed")

from stoker.contract.errors import Refusal
from stoker.training.data.config import DataConfig
from stoker.training.data.prepare import prepare
from stoker.training.data.rows import rows
from stoker.training.data.unpack import open_unpacked
from stoker.training.tokenizer.config import TokenizerConfig


def prepared(where: Path, path: str) -> Any:
    data = DataConfig(path=(path,), cache=str(where / "cache"), context_length=16, num_workers=1, validation="0")
    return prepare(data, TokenizerConfig(path="bytes"), lambda line: None)


def test_a_packed_table_is_read_as_it_is_unpacked(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = tmp_path / "data.parquet"
    parquet.write_table(arrow.table({"text": [f"text {number}" for number in range(500)]}), table)
    packed = tmp_path / "packed.parquet.bz2"
    packed.write_bytes(bz2.compress(table.read_bytes()))
    whole, again = prepared(tmp_path, str(table)), prepared(tmp_path, str(packed))
    assert whole.train_tokens == again.train_tokens > 0


def test_small_frames_of_xz_are_read_and_a_cut_one_is_named(tmp_path: Path) -> None:
    frames = [lzma.compress(b""), lzma.compress(b"a")]
    (tmp_path / "empty.jsonl.xz").write_bytes(frames[0] * 30_000 + frames[1] * 3000 + b"\0" * 8)
    began = time.process_time()
    with open_unpacked(str(tmp_path / "empty.jsonl.xz")) as stream:
        assert stream.read() == b"a" * 3000
    assert time.process_time() - began < 10
    (tmp_path / "cut.jsonl.xz").write_bytes(frames[1] + frames[1][:-9])
    with (
        pytest.raises(Refusal, match="it ends in the middle"),
        open_unpacked(str(tmp_path / "cut.jsonl.xz")) as stream,
    ):
        stream.read()


def test_one_decompressor_reads_all_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one takes longer than reading a frame: a million empty frames took 20 s."""
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    frame = zstandard.ZstdCompressor().compress
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(frame(b"one\n") + frame(b"") * 1000 + frame(b"two\n"))
    made = []
    real = zstandard.ZstdDecompressor
    monkeypatch.setattr(zstandard, "ZstdDecompressor", lambda **told: made.append(told) or real(**told))
    with open_unpacked(str(path)) as stream:
        assert stream.read() == b"one\ntwo\n"
    assert len(made) == 1


def test_texts_that_many_rows_share_are_read(tmp_path: Path) -> None:
    """A dictionary column, and rows of several megabytes."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    shared = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0, 1, 0, 1, 0], pyarrow.int32()), pyarrow.array(["x " * 10_000, "y " * 20_000])
    )
    parquet.write_table(pyarrow.table({"text": shared}), tmp_path / "shared.parquet")
    parquet.write_table(
        pyarrow.table({"text": [f"{number} " * 500_000 for number in range(20)]}), tmp_path / "long.parquet"
    )
    sizes = {"shared.parquet": 2 * (3 * 10_000 + 2 * 20_000), "long.parquet": 500_000 * (2 * 10 + 3 * 10)}
    for name, size in sizes.items():
        assert prepared(tmp_path, str(tmp_path / name)).train_bytes == size


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.csv.bz2", "rows.parquet"])
def test_small_files_that_stand_for_many_rows_are_read(name: str, tmp_path: Path) -> None:
    """Their size says nothing about what they hold."""
    path = tmp_path / name
    if name == "rows.jsonl.gz":
        path.write_bytes(gzip.compress(b'{"text": "one and the same"}\n' * 200_000))
    elif name == "rows.csv.bz2":
        path.write_bytes(bz2.compress(b"text\n" + b"one and the same\n" * 200_000))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"text": ["one and the same"] * 200_000}), path)
    assert path.stat().st_size < 30_000
    found = prepared(tmp_path, str(path))
    assert found.train_documents == 200_000 and found.train_tokens == 200_000 * 17


def test_a_row_of_many_megabytes_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * (70 << 20)}) + "\n" + json.dumps({"text": "y"}) + "\n")
    assert [len(row["text"]) for _, row in rows(str(tmp_path / "a.jsonl"))] == [70 << 20, 1]
    assert prepared(tmp_path, str(tmp_path / "a.jsonl")).train_bytes == (70 << 20) + 1


def test_a_sparse_file_is_read_as_what_it_holds(tmp_path: Path) -> None:
    """Some file systems report no blocks at all, and a pretokenized file may have holes."""
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"text": "one"}\n')
        file.seek(32 << 20)
        file.write(b'\n{"text": "two"}\n')
    with pytest.raises(Refusal, match="line 2"):  # zeros are no row
        list(rows(str(tmp_path / "a.jsonl")))
