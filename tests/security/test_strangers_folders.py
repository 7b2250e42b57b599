"""Models, checkpoints, caches and job folders that came from somebody else: no link is followed out of them, no number makes us compute for hours."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localuser import ATTACKER, VICTIM, do_as
from stoker.contract.names import Refusal
from stoker.training.checkpoint import folders
from stoker.training.checkpoint.config import CheckpointConfig
from stoker.training.checkpoint.manifest import Entry, Piece, disagreement
from stoker.training.checkpoint.saver import Saver
from stoker.training.data import build, ours, shards
from stoker.training.loop.resume import check_before_launch
from stoker.training.model.config import ModelConfig

SOON = 5.0  # seconds of processor time


def test_pieces_that_overlap_in_every_pair_are_refused_at_once() -> None:
    side = 141
    pieces = tuple(
        Piece("f", f"{row}-{column}", (row, column), (1, 1)) for row in range(side) for column in range(side)
    )
    began = time.process_time()
    assert disagreement({"f": object()}, {"t": Entry((side, side), "F32", pieces)})  # type: ignore[dict-item]
    assert time.process_time() - began < SOON


def test_a_checkpoint_folders_lock_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / folders.LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(Refusal):
        folders.hold(str(tmp_path / "c"), print)
    assert (tmp_path / "victim").read_text() == "mine"


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


def test_an_export_copies_nothing_from_outside_the_models_folder(tmp_path: Path) -> None:
    from stoker.training.model.hf_write import beside

    model = tmp_path / "models--a--b" / "snapshots" / "1"
    model.mkdir(parents=True)
    (tmp_path / "token").write_text("a token")
    (model / "vocab.json").symlink_to(tmp_path / "token")
    with pytest.raises(Refusal, match="leads out of its folder"):
        beside(str(model / "vocab.json"))
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / "models--a--b" / "blobs" / "0a").write_text("{}")
    (model / "tokenizer.json").symlink_to("../../blobs/0a")
    assert beside(str(model / "tokenizer.json")) == b"{}"


def test_another_users_checkpoints_are_not_counted_removed_or_put_back(public: Path) -> None:
    """In a folder that several users share."""
    names = ("step-00000003", ".replaced-step-00000002", ".gone-x", "step-00000001.other-0.tmp")
    do_as(ATTACKER, lambda: [(public / name).mkdir() for name in names])

    def save() -> None:
        said: list[str] = []
        saver = Saver(str(public), rank=0, world=1, token="t", say=said.append, keep=2, keep_best=True)
        for step in (1, 2, 4, 5):
            saver.save(step, {}, {"step": step}, float(step), wait=True)
        saver.close()
        assert not said, said

    do_as(VICTIM, save)
    ours = {".writer", "step-00000001", "step-00000004", "step-00000005"}  # the best one, and the newest two
    assert sorted(os.listdir(public)) == sorted({*names, *ours})


def test_another_users_checkpoint_is_not_checked_before_the_launch(public: Path) -> None:
    """The ranks do not take it, so it refuses nothing."""
    made: Any = SimpleNamespace(tokenizer_digest="ours", vocab_size=9)

    def save(step: int, digest: str) -> None:
        saver = Saver(str(public), rank=0, world=1, token="t", say=print, keep=2, keep_best=True)
        saver.save(step, {}, {"step": step, "tokenizer_digest": digest}, 1.0, wait=True)
        saver.close()

    def begins() -> int | None:
        return check_before_launch(CheckpointConfig(folder=str(public)), ModelConfig(), "adamw", made)

    do_as(ATTACKER, lambda: save(9, "theirs"))
    (public / folders.LOCK).unlink()

    def launch() -> None:
        assert begins() is None
        save(3, "ours")
        assert begins() == 3

    do_as(VICTIM, launch)


def test_a_cache_that_is_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / "absent")
    with pytest.raises(
        Refusal, match=r"cache is a link to .*absent, which does not exist: create it, or remove the link"
    ):
        ours.own_cache(str(tmp_path / "cache"), print)
    (tmp_path / "absent").mkdir()
    assert ours.own_cache(str(tmp_path / "cache"), print) == str(tmp_path / "cache")
