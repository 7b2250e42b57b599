"""What an export may replace, checkpoints and metrics that nobody foresaw, and packed files of empty frames."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hostile_files import write_model

from conftest import Stoker
from stoker.contract import layout
from stoker.contract.names import Refusal
from stoker.contract.safe_io import refuse_other_kind
from stoker.contract.shape import as_json
from stoker.control.show.comparison import noise
from stoker.control.show.curves import MOST_METRICS, Curve, MetricsTail, smoothed
from stoker.control.show.drawing import Line, chart, mean, sparkline
from stoker.training.checkpoint.manifest import NAME, Entry, Manifest, Piece, Sums, encode
from stoker.training.generate.finding import Found
from stoker.training.model.hf_config import shape_of
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

ENOUGH_S = 8  # of processor time


def _export(model: Path, out: Path, **how: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.generate.exporting import export

    export(Found(str(model), checkpoint=(model / NAME).exists()), str(out), None, None, lambda line: None, **how)


def _bytes_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _saved(out: Path) -> None:
    write_model(out)


def _folder_of_weights(out: Path) -> None:
    (out / "model.safetensors").mkdir(parents=True)
    (out / "model.safetensors" / "diary.txt").write_text("precious")


def _settings(out: Path) -> None:
    out.mkdir()
    (out / "config.json").write_text('{"my": "project"}')


def _link(out: Path) -> None:
    write_model(out.parent / "elsewhere")
    out.symlink_to("elsewhere")


@pytest.mark.parametrize("make", [_saved, _folder_of_weights, _settings, _link])
def test_an_export_replaces_no_folder_that_no_export_wrote(tmp_path: Path, make: Any) -> None:
    write_model(tmp_path / "model")
    make(tmp_path / "out")
    before = _bytes_in(tmp_path)
    with pytest.raises(Refusal, match="give"):
        _export(tmp_path / "model", tmp_path / "out")
    assert _bytes_in(tmp_path) == before


def test_an_export_replaces_an_export_but_not_the_base_of_what_it_merges(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    for _ in range(2):
        _export(tmp_path / "model", tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(tmp_path / "base")}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(told))
    before = _bytes_in(tmp_path)
    with pytest.raises(Refusal, match="is the folder of the model or of its tokenizer"):
        _export(tmp_path / "adapter", tmp_path / "base", merge=True)
    assert _bytes_in(tmp_path) == before


def test_half_a_character_in_a_config_is_kept_as_it_is(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "note": "\ud800"}))
    _export(tmp_path / "model", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["note"] == "\ud800"


def test_a_checkpoint_that_contradicts_itself_is_one_line(tmp_path: Path) -> None:
    """An adapter's rows of a model whose width it leaves out."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from safetensors.torch import save_file

    from stoker.training.model.adapters import base_digest

    write_model(tmp_path / "base")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    name = "model.layers.0.mlp.gate_up.adapter"
    tensors = {f"{name}.a": torch.zeros(4, 16), f"{name}.up": torch.zeros(32, 2)}
    save_file(tensors, checkpoint / "rank-00000.safetensors")
    entries = {
        key: Entry(tuple(tensor.shape), "F32", (Piece("rank-00000.safetensors", key, (0, 0), tuple(tensor.shape)),))
        for key, tensor in tensors.items()
    }
    model = {key: value for key, value in as_json(shape_of(str(tmp_path / "base"))).items() if key != "ff"}
    meta = {
        "model": model, "data": {"context": 16}, "tokenizer_digest": bytes_tokenizer().digest, "tokenizer": str(tmp_path / "base"),
        "adapter": {"method": "lora", "lora_rank": 2, "lora_alpha": 4.0, "lora_targets": "gate_proj,up_proj", "base": base_digest(str(tmp_path / "base"))},
    }  # fmt: skip
    size = (checkpoint / "rank-00000.safetensors").stat().st_size
    manifest = Manifest(1, 1, "t", {"rank-00000.safetensors": Sums(size, 1 << 24, (0,))}, entries, meta)
    (checkpoint / NAME).write_bytes(encode(manifest))
    with pytest.raises(Refusal, match="can't be read: RuntimeError"):
        _export(checkpoint, tmp_path / "out")
    assert not os.path.exists(tmp_path / "out")


def test_metrics_with_other_names_in_every_line_take_time_in_proportion(tmp_path: Path) -> None:
    with (tmp_path / layout.METRICS).open("w") as file:
        for step in range(6000):
            file.write(
                json.dumps({"step": step, "loss": 1.0, **{f"k{step}_{number}": 1 for number in range(40)}}) + "\n"
            )
    tail = MetricsTail(str(tmp_path))
    began = time.process_time()
    assert tail.look()
    assert time.process_time() - began < ENOUGH_S
    assert len(tail.curves) == MOST_METRICS
    assert len(tail.curves["loss"].steps) == 6000


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_an_export_of_another_user_is_not_replaced(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.model.hf_write import refuse_anothers, refuse_other_models

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / ".stoker-export").write_text("stoker\n")
    refuse_other_models(str(theirs))
    refuse_anothers(str(theirs))
    os.chown(theirs, 65534, 65534)
    for refuse in (refuse_other_models, refuse_anothers):
        with pytest.raises(Refusal, match="theirs belongs to nobody"):
            refuse(str(theirs))


@pytest.mark.parametrize(
    "words",
    [
        ("web", "--save", "nosuch", "thesis"),
        ("doctor", "--only", "host.disk", "--no-probe", "--bundle", "thesis"),
        ("doctor", "--only", "host.disk", "--no-probe", "--record", "thesis"),
    ],
)
def test_a_mistyped_name_costs_no_other_file(stoker: Stoker, words: tuple[str, ...]) -> None:
    thesis = stoker.cwd / "thesis"
    thesis.write_text("a year of work")
    done = stoker(*words)
    assert (
        done.code == 73 and "thesis already exists and is not a" in done.err and thesis.read_text() == "a year of work"
    )


def test_a_file_of_the_same_kind_is_replaced(tmp_path: Path) -> None:
    for name, data in (("page", b"<!DOCTYPE html><p>"), ("empty", b"")):
        (tmp_path / name).write_bytes(data)
        refuse_other_kind(str(tmp_path / name), b"<!doctype html", "an HTML page")
    with pytest.raises(Refusal, match="page already exists and is not a PNG picture"):
        refuse_other_kind(str(tmp_path / "page"), b"\x89PNG", "a PNG picture")


@pytest.mark.parametrize("line", [b"[\n", b"{}}\n"])
def test_a_flood_of_damaged_metrics_costs_little(tmp_path: Path, line: bytes) -> None:
    """10 MB of them took 34 s. What is whole before them is shown."""
    whole = b"".join(b'{"step": %d, "loss": 1.0}\n{"step"\n' % step for step in range(2000))
    (tmp_path / layout.METRICS).write_bytes(whole + line * (9_800_000 // len(line)))
    tail = MetricsTail(str(tmp_path))
    began = time.process_time()
    assert tail.look()
    assert time.process_time() - began < ENOUGH_S
    assert len(tail.curves["loss"].steps) == 2000


@pytest.mark.parametrize("values", [[1e308, -1e308], [1e308, 1e308], [-1.7e308, 1e308, 2.0]])
def test_the_largest_numbers_are_drawn_or_left_out(values: list[float]) -> None:
    curve = Curve()
    curve.extend(list(range(200)), [values[at % len(values)] for at in range(200)])
    for window in (1, 10):
        chart([Line("a", smoothed(curve, window))], 60, 10)
    noise(curve, curve)
    sparkline(curve.values)
    assert mean([1e308, 1e308]) == pytest.approx(1e308)
