"""What the twenty-third review found in files of strangers: a few KB that stood for any amount of memory."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import SHAPE, write_model
from safetensors.torch import save_file

from stoker.cli import chat, train
from stoker.contract import hostmemory
from stoker.contract.names import EX_DATAERR, EX_UNAVAILABLE, Refusal
from stoker.contract.shape import replace
from stoker.control.show.web.folders import Folders
from stoker.control.show.web.pages import _json
from stoker.control.show.web.texts import rows
from stoker.training.checkpoint.manifest import NAME, Entry, Manifest, Piece, Sums, encode
from stoker.training.checkpoint.reading import open_checkpoint, verify
from stoker.training.model.config import parameters
from stoker.training.model.hf_config import shape_for
from stoker.training.model.outside import Outside
from stoker.training.rl.kept import FOLDER, Kept
from stoker.training.rl.sampler import Written

# ---- a checkpoint whose tensors are the same few bytes again and again ----

FIRST, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"


def checkpoint(folder: Path, tensors: dict[str, Entry], *names: str) -> str:
    """With files of these names: each holds the tensors a and b of 2 × 2 numbers."""
    folder.mkdir()
    files = {}
    for number, name in enumerate(names):
        save_file({"a": torch.full((2, 2), float(number)), "b": torch.zeros(2, 2)}, str(folder / name))
        data = (folder / name).read_bytes()
        files[name] = Sums(len(data), 1 << 24, (zlib.crc32(data),))
    (folder / NAME).write_bytes(encode(Manifest(1, len(names), "t", files, tensors, {})))
    return str(folder)


def tensor(*pieces: tuple[str, str]) -> Entry:
    """(file, key) of the rows, two by two."""
    made = tuple(Piece(file, key, (2 * place, 0), (2, 2)) for place, (file, key) in enumerate(pieces))
    return Entry((2 * len(pieces), 2), "F32", made)


REPEATED = {
    "in one tensor": {"model.x": tensor((FIRST, "a"), (FIRST, "a"))},
    "in two": {"model.x": tensor((FIRST, "a")), "model.y": tensor((FIRST, "b"), (FIRST, "a"))},
}


@pytest.mark.parametrize("tensors", REPEATED.values(), ids=REPEATED)
def test_each_piece_of_a_checkpoint_has_bytes_of_its_own(tmp_path: Path, tensors: dict[str, Entry]) -> None:
    path = checkpoint(tmp_path / "step-00000001", tensors, FIRST)
    with pytest.raises(Refusal, match=r"'a' in rank-00000\.safetensors is a piece twice") as problem:
        open_checkpoint(path)
    assert problem.value.code == EX_DATAERR and verify(path) == [problem.value.line]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_one_file_is_not_many_files_of_a_checkpoint(tmp_path: Path, link: Any) -> None:
    tensors = {"model.x": tensor((FIRST, "a"), (SECOND, "a"), (FIRST, "b"))}
    path = checkpoint(tmp_path / "step-00000001", tensors, FIRST, SECOND)
    whole = open_checkpoint(path).read("model.x")
    assert whole[:, 0].tolist() == [0, 0, 1, 1, 0, 0] and verify(path) == []
    os.unlink(os.path.join(path, FIRST))
    shutil.copy(os.path.join(path, SECOND), os.path.join(path, FIRST))  # the same bytes, twice on the disk
    open_checkpoint(path)
    os.unlink(os.path.join(path, SECOND))
    link(os.path.join(path, FIRST), os.path.join(path, SECOND))
    with pytest.raises(Refusal, match=f"{SECOND} is the same file as {FIRST}"):
        open_checkpoint(path)


# ---- a model's file of holes: 94 GB in an archive of 9 KB ----


def test_weights_that_the_memory_cant_hold_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which --device cpu sets, for good
    words = ["--device", "cpu", "--prompt", "hi", "--max-tokens", "1"]
    assert chat.main([str(tmp_path / "m"), *words]) == 0
    monkeypatch.setattr(hostmemory, "memory", lambda: (4 * parameters(SHAPE) - 1, 1 << 40, None))
    with pytest.raises(Refusal, match=r"parameters take .* of memory or more, and this machine has") as problem:
        chat.main([str(tmp_path / "m"), *words])
    assert problem.value.code == EX_UNAVAILABLE and str(tmp_path / "m") in problem.value.line
    asked = replace(SHAPE, engine="transformers", load="")
    with pytest.raises(Refusal, match="of memory or more"):
        Outside(shape_for(asked, str(tmp_path / "m")), 16)


@pytest.mark.parametrize(
    ("flag", "width"), [((), 16), (("--lora",), 2), (("--qlora",), 0.5)], ids=["all", "lora", "qlora"]
)
def test_no_rank_is_started_for_weights_that_the_memory_cant_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: tuple[str, ...], width: float
) -> None:
    write_model(tmp_path / "m")
    data = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "cow?"}, {"role": "assistant", "content": "moo"}]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    started: list[Any] = []
    monkeypatch.setattr("stoker.cli.run.start", lambda *request: started.append(request) or 0)
    words = ["sft", "--device", "cpu", "--model.load", "m", "--data", "chats.jsonl", "--validation", "0", *flag]
    here, least = train.look(), (100 << 20) + int(width * parameters(SHAPE))
    monkeypatch.setattr(train, "look", lambda: replace(here, memory_total=least))
    assert train.main(words) == 0 and len(started) == 1
    monkeypatch.setattr(train, "look", lambda: replace(here, memory_total=least - 1))
    with pytest.raises(Refusal, match="this does not fit: 1 rank on the CPU with"):
        train.main(words)
    assert len(started) == 1


# ---- rows of a run that are no JSON for a browser; answers that no server sent ----


def test_rows_with_no_numbers_are_shown(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").write_text("{}")
    (tmp_path / "r" / "rollouts.jsonl").write_text('{"reward": NaN, "parts": {"exact": [-Infinity, 1.5]}}\n')
    found = rows(Folders(str(tmp_path), everybody=True), "r", "rollouts.jsonl", 0)
    assert found["rows"] == [{"reward": "nan", "parts": {"exact": ["-inf", 1.5]}}]
    assert json.loads(_json(found).body)["rows"] == found["rows"]


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"key": "k", "first": 0, "answers": [[[1e999], [0], [0]]]}',
        '{"key": "k", "first": 1e999, "answers": []}',
    ],
)
def test_answers_that_are_none_are_asked_for_again(tmp_path: Path, line: str) -> None:
    kept = Kept(str(tmp_path), 0, "s")
    kept.keep(1, [1, 2], 7, 0, [Written((3,), (-0.5,), (0,))])
    with (tmp_path / FOLDER / "step-00000001-rank-0.jsonl").open("a") as file:
        file.write(f"\n{line}\n")
    again = Kept(str(tmp_path), 0, "s")
    assert again.count == 1 and again.find([1, 2], 7, 0, 1) == [Written((3,), (-0.5,), (0,))]
