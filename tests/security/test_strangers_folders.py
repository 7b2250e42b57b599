"""Models, checkpoints, caches and job folders that came from somebody else: no link is followed out of them, no number makes us compute for hours."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stoker.contract.names import Refusal
from stoker.training.data import build, ours, shards


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_caches_lock_that_is_something_else_is_not_written_through(tmp_path: Path, kind: str) -> None:
    (tmp_path / "victim").write_text("mine")
    lock = tmp_path / "key.lock"
    {
        "link": lambda: lock.symlink_to(tmp_path / "victim"),
        "pipe": lambda: os.mkfifo(lock),
    }[kind]()
    with pytest.raises(OSError), build.alone(str(tmp_path / "key"), print):
        pass
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize("file", ["/dev/zero", "../x.bin", "a/b.bin", "", 5, None])
def test_a_cache_that_names_files_elsewhere_is_no_cache(tmp_path: Path, file: object) -> None:
    manifest = {"schema": shards.SCHEMA, "splits": {"train": {"shards": [{"file": file, "bytes": 0, "crc32": 0}]}}}
    (tmp_path / shards.MANIFEST).write_text(json.dumps(manifest))
    assert shards.read_manifest(str(tmp_path)) is None


def test_a_shard_that_is_a_link_is_damage(tmp_path: Path) -> None:
    (tmp_path / "train-00000.bin").symlink_to("/dev/zero")
    split = {"tokens": 0, "bytes": 0, "documents": 0, "shards": [{"file": "train-00000.bin", "bytes": 0, "crc32": 0}]}
    about = {"key": "k", "kind": "stream", "context": None, "tokenizer_digest": "d", "vocab_size": 9, "end_id": 1}
    splits = {"train": split, "validation": {**split, "shards": []}}
    manifest = {"schema": shards.SCHEMA, **about, "seconds": 0.1, "splits": splits}
    (tmp_path / shards.MANIFEST).write_text(json.dumps(manifest))
    found = shards.read_manifest(str(tmp_path))
    assert found is not None and "is a symbolic link" in (shards.damage(str(tmp_path), found, verify=True) or "")


def test_a_cache_that_is_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / "absent")
    with pytest.raises(
        Refusal, match=r"cache is a link to .*absent, which does not exist: create it, or remove the link"
    ):
        ours.own_cache(str(tmp_path / "cache"), print)
    (tmp_path / "absent").mkdir()
    assert ours.own_cache(str(tmp_path / "cache"), print) == str(tmp_path / "cache")
