"""What the twenty-second review found in files of strangers: a config that sent a key away, data that filled a disk."""

from __future__ import annotations

import bz2
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import at_length_but
from stoker.contract import diskroom
from stoker.contract.names import EX_CANTCREAT, EX_CONFIG, EX_DATAERR, Refusal
from stoker.control.doctor.caches import cache_roots
from stoker.speedrun.material import material
from stoker.training.config import layers
from stoker.training.config.flags import parse
from stoker.training.data import sources, unpack
from stoker.training.data.config import DataConfig
from stoker.training.data.prepare import prepare
from stoker.training.tokenizer.config import TokenizerConfig
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

# ---- a config file names the server that gets the API key and the prompts ----

ELSEWHERE = {
    "an address": "http://192.0.2.7:8000",
    "a name": "http://collector.example:8000/v1",
    "behind one of ours": "http://127.0.0.1:8000,http://192.0.2.7:8000",
    "ours as its user": "http://127.0.0.1:8000@192.0.2.7:8000",
    "a name that looks like ours": "http://127.0.0.1.example:8000",
    "an address of all interfaces": "http://[::]:8000",
    "no address at all": "http://[::1:8000",
}


@pytest.mark.parametrize("server", ELSEWHERE.values(), ids=ELSEWHERE)
def test_only_the_users_own_config_file_names_a_server_elsewhere(tmp_path: Path, server: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f'grpo:\n  server: "{server}"\n')
    assert layers.gather(parse(["--config", str(path)]), {}).told("grpo.server")[0] == server  # type: ignore[index]
    path.chmod(0o666)
    with pytest.raises(Refusal, match=r"config file of your own.*--grpo\.server") as problem:
        layers.gather(parse(["--config", str(path)]), {})
    assert problem.value.code == EX_CONFIG and str(path) in problem.value.line
    given = layers.gather(parse(["--config", str(path), "--grpo.server", server]), {})
    assert given.told("grpo.server")[0] == server  # type: ignore[index]


@pytest.mark.parametrize(
    "server", ["", "server", "http://localhost:8000", "http://127.0.0.1:8000,http://[::1]:8001/v1"]
)
def test_a_config_file_may_name_a_server_of_this_machine(tmp_path: Path, server: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f'grpo:\n  server: "{server}"\n')
    assert layers.gather(parse(["--config", str(path)]), {}).told("grpo.server")[0] == server  # type: ignore[index]


# ---- a few bytes of data that fill the disk or the memory ----


def _prepare(where: Path, *paths: str) -> Any:
    tokens = where / "tokenizer"
    bytes_tokenizer().save(str(tokens))
    data = DataConfig(path=paths, cache=str(where / "cache"), context_length=16, num_workers=1, validation="0")
    return prepare(data, TokenizerConfig(path=str(tokens)), lambda line: None)


def _kept(where: Path) -> int:
    """Bytes of data in the cache."""
    made = [*(where / "cache").glob("unpacked/*"), *(where / "cache").glob("datasets/*/*.bin")]
    return sum(path.stat().st_size for path in made)


def test_many_packed_files_unfold_to_no_more_than_one_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "ALWAYS", 1 << 20)
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt.bz2").write_bytes(bz2.compress(f"{number} ".encode() * (400 << 10)))
    with pytest.raises(Refusal, match="unpacks to more than 200 times") as problem:
        _prepare(tmp_path, str(folder))
    assert problem.value.code == EX_DATAERR
    assert _kept(tmp_path) <= 1 << 20
    assert _prepare(tmp_path, str(folder / "0.txt.bz2")).train_tokens > 700 << 10  # one of them alone may


def test_many_packed_files_of_ordinary_text_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "ALWAYS", 1 << 10)
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(8):
        text = " ".join(str(number * 7919 + step * step) for step in range(2000))
        (folder / f"{number}.txt.bz2").write_bytes(bz2.compress(text.encode()))
    assert _prepare(tmp_path, str(folder)).train_tokens > 90_000


def test_a_packed_table_stands_for_no_more_than_its_packed_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column of zeros makes the table large, so that its texts may be long; packed, all of it is a few bytes."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(unpack, "ALWAYS", 2 << 20)
    rows = 1000
    texts = arrow.array(["a b c d e " * 2000] * rows)  # 20 MB, and a dictionary's one text in the file
    zeros = arrow.array([bytes(1000)] * rows, arrow.binary(1000))
    table = tmp_path / "data.parquet"
    parquet.write_table(
        arrow.table({"text": texts, "zeros": zeros}), table, use_dictionary=["text"], compression="none"
    )
    packed = tmp_path / "data.parquet.bz2"
    packed.write_bytes(bz2.compress(table.read_bytes()))
    assert table.stat().st_size > 1_000_000 and packed.stat().st_size < 10 << 10
    with pytest.raises(Refusal, match="unpacks to more than 200 times") as problem:
        _prepare(tmp_path, str(packed))
    assert problem.value.code == EX_DATAERR and not _kept(tmp_path)


def test_a_packed_table_is_read_as_it_is_unpacked(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = tmp_path / "data.parquet"
    parquet.write_table(arrow.table({"text": [f"text {number}" for number in range(500)]}), table)
    packed = tmp_path / "packed.parquet.bz2"
    packed.write_bytes(bz2.compress(table.read_bytes()))
    whole, again = _prepare(tmp_path, str(table)), _prepare(tmp_path, str(packed))
    assert whole.train_tokens == again.train_tokens > 0


def _keep_all_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diskroom, "SHARE", 1.0)
    monkeypatch.setattr(diskroom, "MOST", 1 << 62)
    monkeypatch.setattr(diskroom, "_BETWEEN", 64 << 10)


@pytest.mark.parametrize("kind", ["stream", "chat"])
def test_data_takes_no_more_of_a_disk_than_leaves_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One file under many names is read as often as it has names."""
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
    _keep_all_of_the_disk(monkeypatch)
    with pytest.raises(Refusal, match=r"left, and .* stay free; --data\.cache") as problem:
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
    _keep_all_of_the_disk(monkeypatch)
    with pytest.raises(Refusal, match=r"stay free; --data\.cache"):
        _prepare(tmp_path, str(folder))
    assert _kept(tmp_path) <= 64 << 10


@pytest.mark.parametrize("role", at_length_but(["pairs"], ["base", "sft", "pairs"]))
def test_packed_files_of_a_speedrun_unfold_to_no_more_than_one_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setattr(unpack, "ALWAYS", 1 << 20)
    folder = tmp_path / "data"
    (folder / role).mkdir(parents=True)
    row = {
        "base": {"text": "x " * 500},
        "sft": {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y " * 500}]},
        "pairs": {"prompt": "x", "chosen": "y " * 300, "rejected": "z " * 200},
    }[role]
    for number in range(8):
        lines = json.dumps({**row, "number": number}) + "\n"
        (folder / role / f"{number}.jsonl.bz2").write_bytes(bz2.compress(lines.encode() * 800))
    with pytest.raises(Refusal, match="unpacks to more than 200 times"):
        material(str(folder), str(tmp_path / "speedrun"), str(tmp_path / "cache"))[1]()
    assert _kept(tmp_path) <= 1 << 20
    for number in range(1, 8):
        (folder / role / f"{number}.jsonl.bz2").unlink()
    data, _ = material(str(folder), str(tmp_path / "speedrun"), str(tmp_path / "cache"))
    assert any(role in line for line in data.lines)  # one of them alone may


class _Hub:
    """As `datasets`: its rows come one by one."""

    def __init__(self, rows: Iterator[dict[str, Any]]) -> None:
        self._rows = rows

    def load_dataset_builder(self, *names: Any, **more: Any) -> Any:
        return SimpleNamespace(config=SimpleNamespace(data_files=None), as_streaming_dataset=lambda split: self._rows)


def test_rows_of_the_hub_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_HUB_ROOM", 64 << 20)
    rows = ({"text": "x" * (number << 27)} for number in (0, 2))
    monkeypatch.setitem(sys.modules, "datasets", _Hub(rows))
    with pytest.raises(Refusal, match="owner/name: its rows unpack to more than") as problem:
        sources.fetch("owner/name", str(tmp_path), lambda line: None)
    assert problem.value.code == EX_DATAERR and not [*(tmp_path / "hub").iterdir()]


def test_rows_of_the_hub_leave_some_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _keep_all_of_the_disk(monkeypatch)
    rows = ({"text": "x" * 1000} for _ in range(100_000))
    monkeypatch.setitem(sys.modules, "datasets", _Hub(rows))
    with pytest.raises(Refusal, match=r"stay free; --data\.cache"):
        sources.fetch("owner/name", str(tmp_path), lambda line: None)
    assert not [*(tmp_path / "hub").iterdir()]


# ---- smaller ones ----


def test_a_folder_of_other_things_is_not_marked_as_a_cache(tmp_path: Path) -> None:
    """Backups leave out what is marked so, and a config file may name any folder as its cache."""
    (tmp_path / "text.txt").write_text("some text to learn " * 400)
    home, cache = tmp_path / "home", tmp_path / "cache"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    for folder in (home, cache):
        data = DataConfig(path=(str(tmp_path / "text.txt"),), cache=str(folder), context_length=16)
        prepare(data, TokenizerConfig(path="bytes"), lambda line: None)
    assert sorted(os.listdir(home)) == ["stoker-cache", "thesis.tex"]
    assert (home / "stoker-cache/CACHEDIR.TAG").exists() and (cache / "CACHEDIR.TAG").exists()
    roots = [root for kind, root, _ in cache_roots({"STOKER_CACHE": str(home)}, str(tmp_path)) if kind == "data"]
    assert roots == [str(cache / "datasets"), str(home / "stoker-cache/datasets")]
