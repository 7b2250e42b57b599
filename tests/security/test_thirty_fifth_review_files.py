"""What the thirty-fifth review found in folders that strangers packed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stoker.contract import layout
from stoker.contract.names import Refusal
from stoker.training.data import sources
from stoker.training.data.shards import damage


def run_in(place: Path, name: str, **about: Any) -> Path:
    folder = place / name
    folder.mkdir(parents=True)
    (folder / layout.RUN).write_text(json.dumps({"name": name, "started": 1.7e9, **about}))
    return folder


# ---- events without end ----


# ---- files of holes, and pipes behind links ----


def test_a_prepared_shard_of_holes_is_damaged(tmp_path: Path) -> None:
    """cache/ with a shard of 8 TB, nothing of it stored: `stoker prepare` summed it up, and the third Ctrl-C ended it."""
    (tmp_path / "train-00000.bin").touch()
    os.truncate(tmp_path / "train-00000.bin", 32 << 20)
    shard = {"file": "train-00000.bin", "bytes": 32 << 20, "crc32": 0}
    split = {"shards": [shard]}
    assert layout.HOLES in str(damage(str(tmp_path), {"splits": {"train": split}}, verify=False))


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
