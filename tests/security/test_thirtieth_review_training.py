"""What the thirtieth review found in the training plane."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker.contract.names import Refusal
from stoker.training.data.rows import rows

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
