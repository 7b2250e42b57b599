"""What the twenty-third review found in files of strangers: a few KB that stood for any amount of memory."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker.contract.names import EX_DATAERR, Refusal
from stoker.training.checkpoint.manifest import NAME, Entry, Manifest, Piece, Sums, encode
from stoker.training.checkpoint.reading import open_checkpoint, verify

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
