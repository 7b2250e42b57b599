"""What the twenty-eighth review found."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch
from hostile_files import SHAPE, write_model
from safetensors.torch import save_file

from conftest import at_length
from stoker.cli import chat, export, nan
from stoker.contract import effort, hostmemory
from stoker.contract.memory import Bounded
from stoker.contract.names import EX_UNAVAILABLE, Refusal
from stoker.training.checkpoint.manifest import NAME, Entry, Manifest, Piece, Sums, encode
from stoker.training.checkpoint.reading import open_checkpoint
from stoker.training.data.learn import train
from stoker.training.forensics import reading
from stoker.training.model.config import parameters
from stoker.training.model.hf_config import Stored
from stoker.training.model.hf_stream import Stream

# ---- a model's file of holes, whose tensors are more than what is free ----


def only(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    total = 1 << 40
    monkeypatch.setattr(hostmemory, "memory", lambda: (total, free, total))


@pytest.mark.parametrize("form", [(), ("--gguf",)], ids=["folder", "gguf"])
def test_no_tensor_is_exported_that_the_free_memory_cant_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    write_model(tmp_path / "m")
    if form:
        pytest.importorskip("gguf")
        train(["the quick brown fox jumps over the lazy dog\n"] * 3, SHAPE.vocab_size, str(tmp_path / "m"))
    words = [str(tmp_path / "m"), str(tmp_path / ("out.gguf" if form else "out")), *form]
    largest = SHAPE.vocab_size * SHAPE.dim
    only(5 * largest, monkeypatch)
    with pytest.raises(Refusal, match=r"embed\.weight alone takes .* of memory to convert, and .* is free") as problem:
        export.main(words)
    assert problem.value.code == EX_UNAVAILABLE and [one.name for one in tmp_path.iterdir()] == ["m"]
    only(9 * largest, monkeypatch)
    assert export.main(words) == 0


def test_a_model_is_opened_in_the_memory_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which --device cpu sets, for good
    only(4 * parameters(SHAPE) - 1, monkeypatch)
    with pytest.raises(Refusal, match=r"parameters take .* of memory or more, and .* is free") as problem:
        chat.main([str(tmp_path / "m"), "--device", "cpu", "--prompt", "hi", "--max-tokens", "1"])
    assert problem.value.code == EX_UNAVAILABLE


@at_length
def test_weights_are_converted_some_rows_at_a_time(tmp_path: Path) -> None:
    rows, columns = 1 << 17, 1 << 10
    whole = torch.arange(rows, dtype=torch.float32).to(torch.bfloat16)[:, None].expand(rows, columns).contiguous()
    path, size = tmp_path / "weights", whole.numel() * 2
    path.write_bytes(whole.view(torch.uint8).numpy().data)
    out = torch.empty(rows, columns)
    with Bounded(size // 2):
        Stream(torch.device("cpu")).fill(Stored(str(path), "BF16", (rows, columns), 0, size), out)
    assert torch.equal(out, whole.float())


def test_no_tensor_of_a_checkpoint_is_read_that_the_free_memory_cant_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = "rank-00000.safetensors"
    save_file({"a": torch.ones(64, 64)}, str(tmp_path / file))
    data = (tmp_path / file).read_bytes()
    sums = {file: Sums(len(data), 1 << 24, (zlib.crc32(data),))}
    entry = Entry((64, 64), "F32", (Piece(file, "a", (0, 0), (64, 64)),))
    (tmp_path / NAME).write_bytes(encode(Manifest(1, 1, "t", sums, {"model.x": entry}, {})))
    opened = open_checkpoint(str(tmp_path))
    only(64 * 64 * 4, monkeypatch)
    assert opened.read("model.x").sum() == 64 * 64
    only(64 * 64 * 4 - 1, monkeypatch)
    with pytest.raises(Refusal, match=r"model\.x takes .* of memory, and .* is free"):
        opened.read("model.x")


# ---- a NaN dump: all of it is looked at within limits, not its report alone ----


@pytest.mark.parametrize("tensor", [(), ("--tensor", "gradients/none")], ids=["samples", "tensors"])
def test_no_part_of_a_nan_dump_takes_long_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: tuple[str, ...]
) -> None:
    report = {"step": 3, "rank": 0, "world": 1, "label": "CPU 0", "loss": "nan", "grad_norm": "nan", "phase": "forward"}
    (tmp_path / "report.json").write_text(json.dumps({"report": report}))
    (tmp_path / "batch.json").write_text(json.dumps({"samples": [{"id": 1}] * 200_000}))
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"a tensor {number}": empty for number in range(50_000)}).encode()
    (tmp_path / "gradients.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    monkeypatch.setattr(effort, "SECONDS", 0.1)
    monkeypatch.setattr(effort, "BYTES_A_SECOND", 1 << 40)
    monkeypatch.setattr(reading, "SECONDS", 0.1)
    with pytest.raises(Refusal, match=r"s of CPU time to look at, which no ordinary file does"):
        nan.main([str(tmp_path), *tensor])


# ---- the meeting point of several machines, taken by another user before the launcher that would be number 0 ----
