"""What the thirty-fifth review found in folders that strangers packed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hostile_files import write_model

from stoker.contract import layout
from stoker.contract.names import Refusal
from stoker.contract.tensorheader import pack_header
from stoker.speedrun import state
from stoker.speedrun.state import Entry
from stoker.training.checkpoint.manifest import Sums, sizes_wrong_in
from stoker.training.data import sources
from stoker.training.data.shards import damage
from stoker.training.generate.finding import Found
from stoker.training.model.hf_files import refuse_holes


def run_in(place: Path, name: str, **about: Any) -> Path:
    folder = place / name
    folder.mkdir(parents=True)
    (folder / layout.RUN).write_text(json.dumps({"name": name, "started": 1.7e9, **about}))
    return folder


# ---- events without end ----


def test_a_speedruns_stage_keeps_the_last_restarts(tmp_path: Path) -> None:
    """`stoker speedrun` in a folder with events.jsonl of 32 MB, one file for 14 stages (an archive of 83 KB), took 4.5 GB."""
    run = run_in(tmp_path, "20260101-000000-a")
    with open(run / layout.EVENTS, "w") as file:
        file.writelines(f'{{"event":"restart","time":{number}}}\n' for number in range(5000))
    restarts = state.seen(str(tmp_path), Entry("base", "pretrain", "", run=run.name)).restarts
    assert [restart["time"] for restart in restarts] == list(range(4000, 5000))


# ---- files of holes, and pipes behind links ----


def test_a_prepared_shard_of_holes_is_damaged(tmp_path: Path) -> None:
    """cache/ with a shard of 8 TB, nothing of it stored: `stoker prepare` summed it up, and the third Ctrl-C ended it."""
    (tmp_path / "train-00000.bin").touch()
    os.truncate(tmp_path / "train-00000.bin", 32 << 20)
    shard = {"file": "train-00000.bin", "bytes": 32 << 20, "crc32": 0}
    split = {"shards": [shard]}
    assert layout.HOLES in str(damage(str(tmp_path), {"splits": {"train": split}}, verify=False))


def test_a_checkpoints_file_of_holes_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "rank-0.safetensors").touch()
    os.truncate(tmp_path / "rank-0.safetensors", 32 << 20)
    assert layout.HOLES in sizes_wrong_in(str(tmp_path), {"rank-0.safetensors": Sums(32 << 20, 32 << 20, (0,))})[0]


def test_weights_of_holes_are_not_written_again(tmp_path: Path) -> None:
    """`stoker export` made 3.1 GB of a model of 14 layers that an archive of 4 KB held; more layers, more of the disk."""
    size = 32 << 20
    header = pack_header({"a": ("BF16", (size // 2,))}, {})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(header)
    os.truncate(weights, len(header) + size)
    with pytest.raises(Refusal, match=layout.HOLES):
        refuse_holes(str(tmp_path))
    weights.write_bytes(header + bytes(size))
    refuse_holes(str(tmp_path))


def test_an_export_looks_for_holes_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.generate.exporting import export

    write_model(tmp_path / "model")
    monkeypatch.setattr(layout, "consists_of_holes", lambda about: True)  # a real one has 16 MB of weights at least
    with pytest.raises(Refusal, match=layout.HOLES):
        export(Found(str(tmp_path / "model")), str(tmp_path / "out"), None, None, lambda line: None)
    assert os.listdir(tmp_path) == ["model"]


# ---- data sets of the hub ----


def test_a_data_set_of_the_hub_has_no_files_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page names a path as one of its files, and `datasets` read it: rows of a private file would be learned."""
    datasets = pytest.importorskip("datasets")
    private, page = tmp_path / "private.jsonl", tmp_path / "name" / "README.md"
    private.write_text('{"text": "private"}\n')
    page.parent.mkdir()
    page.write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {private}\n---\n"
    )
    real = datasets.load_dataset_builder

    def builder(name: str, config: str | None, revision: str | None) -> object:
        return real(str(page.parent), config, cache_dir=str(tmp_path / "hf"))  # as if it had been downloaded

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    with pytest.raises(Refusal, match=f"its page names {private} as one of its files"):
        sources.fetch("owner/name", str(tmp_path / "cache"), lambda line: None)
    assert not (tmp_path / "cache" / "hub").exists()
