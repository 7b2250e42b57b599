"""What the twenty-second review found in files of strangers: a config that sent a key away, data that filled a disk."""

from __future__ import annotations

import bz2
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import at_length_but
from stoker.cli import run, train
from stoker.contract import diskroom
from stoker.contract.names import EX_CANTCREAT, EX_CONFIG, EX_DATAERR, Refusal
from stoker.contract.tensorheader import pack_header
from stoker.control.doctor.caches import cache_roots
from stoker.speedrun.gather import gather
from stoker.speedrun.material import material
from stoker.training.config import layers
from stoker.training.config.flags import parse
from stoker.training.data import sources, unpack
from stoker.training.data.config import DataConfig
from stoker.training.data.prepare import prepare
from stoker.training.model.config import ModelConfig
from stoker.training.model.hf_config import config_of
from stoker.training.model.hf_files import places
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


# ---- a config file that asks for more memory than there is ----

ASKS = {
    "width": "model: {layers: 2, dim: 4194304, heads: 32768}",
    "layers": "model: {layers: 10000, dim: 65536, heads: 512}",
    "ranks": "model: {layers: 1, dim: 64, heads: 1}\nbatch: {tokens: 80000000}\nrun: {nproc_per_node: 1000000}",
}


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_a_config_file_cant_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text to learn " * 400)
    bytes_tokenizer().save(str(tmp_path / "tokenizer"))
    given = "data: {path: [text.txt], context_length: 64}\ntokenizer: {path: tokenizer}\ntrain: {max_steps: 1}\nparallel: {device: cpu}"
    (tmp_path / "c.yaml").write_text(f"{given}\n{asks}\n")
    started: list[Any] = []
    monkeypatch.setattr(run, "start", lambda *told: started.append(told) or 0)
    with pytest.raises(Refusal, match=r"this does not fit: .* on the CPU with .* and this machine has"):
        train.main(["pretrain", "--config", "c.yaml"])
    assert not started


def test_a_config_file_names_no_more_layers_than_are_quickly_planned(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {layers: 10001, dim: 64, heads: 1}\nparallel: {device: cpu}\n")
    with pytest.raises(Refusal, match=r"model\.layers 10001 is out of range: from 1 to 10000"):
        train.main(["pretrain", "--config", str(path), "--dry-run"])


# ---- smaller ones ----

NUMBERS = {
    "a context beyond 32 bits": {"max_position_embeddings": 1 << 40},
    "a context below nothing": {"max_position_embeddings": -5},
    "a base beyond fp32": {"rope_theta": 1e300},
}


@pytest.mark.parametrize("keys", NUMBERS.values(), ids=NUMBERS)
def test_a_models_numbers_that_gguf_has_no_room_for_are_one_line(tmp_path: Path, keys: dict[str, Any]) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from published import PUBLISHED
    from stoker.cli import export

    folder = tmp_path / "model"
    PUBLISHED["llama-3"].folder(folder)
    c = ModelConfig(layers=1, dim=16, heads=1, kv_heads=1, head_dim=16, ff=16, vocab_size=448)
    (folder / "config.json").write_text(json.dumps({**config_of(c, 64, "float32"), **keys}))
    sizes = {part.name: ("F32", part.stored) for place in places(c) for part in place.parts}
    numbers = sum(math.prod(size) for _, size in sizes.values())
    (folder / "model.safetensors").write_bytes(pack_header(sizes, {"format": "pt"}) + bytes(4 * numbers))
    with pytest.raises(Refusal, match="can't be read") as problem:
        export.main([str(folder), str(tmp_path / "out.gguf"), "--gguf"])
    assert problem.value.code == EX_DATAERR and not [*tmp_path.glob("out*")]


def test_a_report_reads_a_run_once(tmp_path: Path) -> None:
    (tmp_path / "stages/x").mkdir(parents=True)
    (tmp_path / "stages/x/metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n' * 1000)
    rows = [{"name": f"n{number}", "stage": "sft", "run": f"stages/{'./' * number}x"} for number in range(5000)]
    (tmp_path / "chain.json").write_text(json.dumps({"schema": 1, "stages": rows}))
    chain = gather(str(tmp_path))
    assert sum(len(stage.steps) for stage in chain.stages.values()) == 1000


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
