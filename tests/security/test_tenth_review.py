"""Files of strangers that are long and hold nothing: refused soon, whichever reader they come to."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="numpy is not installed")

from stoker.contract.names import Refusal
from stoker.training.data.config import DataConfig
from stoker.training.data.order import mixture_of
from stoker.training.data.parquet import open_parquet
from stoker.training.evaluate import tasks
from stoker.training.evaluate.tasks import read_tasks


@pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz", "q.csv.gz", "q.json"])
def test_questions_are_held_up_to_a_number_of_rows(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_MOST_ROWS", 100)
    row = "a,b,c,d,e,A" if ".csv" in name else json.dumps({"question": "a", "answer": "b"})
    text = "\n".join([row] * 101) if not name.endswith(".json") else f"[{','.join([row] * 101)}]"
    data = text.encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(Refusal, match="has more than 100 rows"):
        read_tasks((str(path),), 0)


def test_empty_rows_count_against_a_parquet_files_bytes(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "empty.parquet"
    parquet.write_table(arrow.table({"text": [""] * 300_000}), path)
    assert path.stat().st_size < 10_000
    with pytest.raises(Refusal, match="300,000 rows in"):
        open_parquet(str(path))
    short = tmp_path / "short.parquet"
    parquet.write_table(arrow.table({"text": [f"{number} is a short text" for number in range(300_000)]}), short)
    assert open_parquet(str(short)).metadata.num_rows == 300_000


def test_shares_that_add_up_to_no_number_are_refused() -> None:
    with pytest.raises(Refusal, match=r"data\.mixture"):
        mixture_of(DataConfig(path=("a", "b"), mixture=("1e308 1e308",)))


def test_rows_that_are_no_pairs_end_the_reading(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.reward.pairs import read_pairs
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    read = []

    def rows() -> object:
        for number in range(1_000_000):
            read.append(number)
            yield number, {"x": 1}

    with pytest.raises(Refusal, match="not usable pairs"):
        read_pairs(rows(), bytes_tokenizer(), 128, "dpo.pairs x", lambda line: None)  # type: ignore[arg-type]
    assert len(read) <= 2000
