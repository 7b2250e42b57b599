"""Secrets behind escapes, others' measurements, and small files that took minutes or ended in a traceback."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stoker.contract.effort import LookingAt

from conftest import Stoker
from security.shapes import body_of
from stoker.contract.errors import reading
from stoker.contract.names import EX_DATAERR, EX_NOINPUT, Refusal
from stoker.contract.quantities import span
from stoker.control.machine.model import machine_from_json
from stoker.control.record import finder, reader
from stoker.training.fit.cards import written
from stoker.training.fit.pace import measured
from stoker.training.fit.plan import Wish, make
from stoker.training.fit.runs import MOST_RUNS, recorded
from stoker.training.model import hf_config, hf_files
from stoker.training.model.config import AdapterConfig
from stoker.training.model.nf4_size import NF4_PARTS
from stoker.training.model.targets import targets

BOB = 12346
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 320, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "torch_dtype": "float32", "hidden_act": "silu",
}  # fmt: skip
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}  # fmt: skip
Q = "model.layers.0.self_attn.q_proj.weight"


def _described(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    keys = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(keys))
    return str(folder)


def _model(folder: Path, change: Callable[[dict[str, Any]], None] = lambda tensors: None, **keys: Any) -> str:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from safetensors.torch import save_file

    where = _described(folder, **keys)
    tensors = {
        part.name: torch.full(part.shape, 0.5)
        for place in hf_files.places(hf_config.shape_of(where))
        for part in place.parts
    }
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return where


# ---- secrets ----


def test_a_message_that_is_cut_within_a_token_keeps_no_part_of_it(stoker: Stoker) -> None:
    token = "hf_" + 2 * body_of("cut")
    script = f"token = {token!r}[:-1] + 'w'\nraise ValueError('x ' * 9994 + token)"  # 20,000 characters are kept
    failed = stoker("run", "--show", "none", stoker.script("fails.py", script))
    report = json.loads((failed.run_dir / "attempt-0" / "rank-0.error.json").read_text())
    assert "hf_" not in report["message"] and report["message"].startswith("x x")


# ---- what nobody foresaw ----


def test_whatever_a_strangers_file_raises_is_one_line() -> None:
    odd: Any = ["x"]
    for within in (LookingAt("model m"), reading("model m")):
        with pytest.raises(Refusal) as caught:
            with within:
                print({odd: 1})
        assert caught.value.line.startswith("model m can't be read: TypeError: unhashable type: 'list'")
        assert caught.value.code == EX_DATAERR and isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(Refusal) as caught:
        with reading("model m"):
            raise ValueError("\x1b[2J" + "long " * 10_000)
    assert len(caught.value.line) < 300 and "\x1b" not in caught.value.line
    with pytest.raises(Refusal, match="model m can't be read: No such file") as caught:
        with LookingAt("model m"):
            os.stat("/nowhere/at/all")
    assert caught.value.code == EX_NOINPUT


@pytest.mark.parametrize("problem", [Refusal("as it is"), KeyboardInterrupt(), SystemExit(3), BrokenPipeError()])
def test_what_has_an_answer_passes(problem: BaseException) -> None:
    for within in (LookingAt("m"), reading("m")):
        with pytest.raises(type(problem)) as caught:
            with within:
                raise problem
        assert caught.value is problem
    with pytest.raises(KeyError):
        with reading("m", KeyError):
            raise KeyError


def test_a_record_that_nobody_foresaw_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"schema": 1}')
    monkeypatch.setattr(reader, "_check", lambda data: data["schema"]["x"])
    listing = finder.look(str(tmp_path))
    assert not listing.runs and "run: it can't be read: TypeError" in listing.skipped
    with pytest.raises(Refusal, match="is damaged: it can't be read: TypeError"):
        finder.find(str(tmp_path / "run"), str(tmp_path))


# ---- others' measurements ----


def _measured(runs: Path, name: str, rate: float) -> Path:
    (runs / name).mkdir(parents=True)
    told = {"model": "m", "method": "full", "context": 128, "cards": ["H100"], "tokens_per_s": rate}
    (runs / name / "memory.json").write_text(json.dumps(told))
    return runs / name


@pytest.mark.skipif(os.getuid() != 0, reason="two real users need root to become them")
def test_only_ones_own_runs_steer_a_plan(tmp_path: Path) -> None:
    for number in range(MOST_RUNS + 5):  # so many that one's own would not be looked at
        name = f"2099-{number:03}"
        os.chown(_measured(tmp_path, name, 1e-320), BOB, BOB)
    os.chown(_measured(tmp_path, "2030-file", 1.0) / "memory.json", BOB, BOB)
    _measured(tmp_path, "2020-own", 4321.0)
    assert [name for name, _ in recorded(str(tmp_path))] == ["2020-own"]


def test_measurements_are_not_read_through_links(tmp_path: Path) -> None:
    elsewhere, runs = _measured(tmp_path / "elsewhere", "x", 1.0), tmp_path / "runs"
    (runs / "2030-file").mkdir(parents=True)
    (runs / "2030-file" / "memory.json").symlink_to(elsewhere / "memory.json")
    (runs / "2031-folder").symlink_to(elsewhere)
    assert not list(recorded(str(runs)))


def test_impossible_speeds_are_not_believed(tmp_path: Path) -> None:
    model = hf_config.shape_of(_described(tmp_path / "m"))
    found = make(written("H100") or [], Wish(model, 128, "full"))
    _measured(tmp_path / "runs", "1", 4321.0)
    for number, rate in enumerate((1e-320, 1e300, -1.0), 2):
        _measured(tmp_path / "runs", str(number), rate)
    pace = measured(str(tmp_path / "runs"), found, ("m",))
    assert pace is not None and pace.tokens_per_s == 4321.0
    assert span(math.inf) == span(1e300) == "thousands of years" and span(90) == "1 min 30 s"


# ---- small files that took minutes ----


def test_more_layers_than_any_model_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"num_hidden_layers in its config\.json is 10000"):
        hf_config.shape_of(_described(tmp_path / "m", num_hidden_layers=10_000))


def test_a_plan_that_takes_too_long_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_config.shape_of(_described(tmp_path / "m", num_hidden_layers=1024))
    monkeypatch.setattr("stoker.training.fit.plan.SECONDS", 0.1)
    with pytest.raises(Refusal, match="of CPU time to look at"):
        make(written("24GB") or [], Wish(model, 1024))


def test_a_recorded_gpu_has_a_name_of_some_length() -> None:
    machine = {"hostname": "h", "cores": 1, "memory_total": 1, "memory_available": 1, "schema": 1}
    gpus = [{"index": 0, "uuid": "GPU-1", "name": "a " * 200}]
    with pytest.raises(ValueError, match="a GPU's name has 400 characters"):
        machine_from_json({**machine, "gpus": gpus})


def test_names_of_layers_are_looked_up_once(tmp_path: Path) -> None:
    """The other way, each name is compared with each layer: minutes."""
    c = hf_config.shape_of(_described(tmp_path / "m", num_hidden_layers=500))
    names = [f"{layer}.self_attn.{name}_proj" for layer in range(500) for name in "qkv"]
    began = time.process_time()
    assert len(targets(c, AdapterConfig(lora_targets=",".join(names * 40)))) == 500
    assert time.process_time() - began < 8


@pytest.mark.parametrize(("names", "says"), [
    (["q_proj"] * 85_000, "85,000 names: at most"),
])  # fmt: skip
def test_an_adapter_names_a_layer_once(tmp_path: Path, names: list[str], says: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from stoker.training.model.adapters import settings_of

    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": names, "base_model_name_or_path": "x"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(told))
    with pytest.raises(Refusal, match=says):
        settings_of(str(tmp_path), "lora")


def test_every_layer_and_another_is_explained(tmp_path: Path) -> None:
    c = hf_config.shape_of(_described(tmp_path / "m"))
    with pytest.raises(Refusal, match="all-linear names every layer already; give it alone"):
        targets(c, AdapterConfig(lora_targets="all-linear,q_proj"))
    assert len(targets(c, AdapterConfig(lora_targets="all-linear,all-linear"))) == 4


# ---- files that ended in a traceback ----


def _state(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        import torch

        name = f"{Q}.{NF4_PARTS[-1]}"
        about = {**json.loads(bytes(tensors[name].tolist())), **changes}
        tensors[name] = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)

    return change


def _part(place: int, *shape: int, dtype: str = "float32") -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        import torch

        tensors[f"{Q}.{NF4_PARTS[place]}"] = torch.zeros(shape, dtype=getattr(torch, dtype))

    return change


HOSTILE_NF4: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "three levels": (_part(1, 3), "quant_map has 3 numbers"),
    "no levels": (_part(1, 0), "quant_map has 0 numbers"),
    "levels of integers": (_part(1, 16, dtype="int64"), "quant_map has 16 numbers of I64"),
    "a table of levels": (_part(3, 2, 3), "nested_quant_map has 6 numbers"),
    "no scales": (_part(0, 0, dtype="uint8"), "absmax has 0 numbers"),
    "no description": (_part(4, 0, dtype="uint8"), "its description can't be read"),
    "a description of floats": (_part(4, 2), "its description has 8 bytes of F32"),
    "a list of dtypes": (_state(dtype=["x"]), "dtype"),
    "a huge offset": (_state(nested_offset=10**39), "nested_offset"),
    "no number for an offset": (_state(nested_offset=math.nan), "nested_offset"),
    "another shape": (_state(shape=[32, 128]), r"says it is \[32, 128\]"),
}


@pytest.mark.parametrize("kind", HOSTILE_NF4)
def test_hostile_parts_of_4_bits_are_refused_by_their_headers(tmp_path: Path, kind: str) -> None:
    change, says = HOSTILE_NF4[kind]

    def quantized(tensors: dict[str, Any]) -> None:
        from stoker.training.model import nf4

        tensors.update(nf4.to_tensors(nf4.quantize(tensors.pop(Q)), Q))
        change(tensors)

    folder = _model(tmp_path / "m", quantized, quantization_config=NF4)
    with pytest.raises(Refusal, match=says) as caught:
        hf_files.check(folder, hf_config.shape_of(folder))
    assert "can't be read: TypeError" not in caught.value.line


def test_a_tensor_without_numbers_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from safetensors.torch import save_file

    from stoker.training.model.hf_stream import read_stored

    save_file({"x": torch.zeros(0, 4)}, tmp_path / "x.safetensors")
    assert read_stored(hf_config.header(str(tmp_path / "x.safetensors"))["x"]).shape == (0, 4)


@pytest.mark.parametrize("named", [..., [], None, "LlamaForCausalLM", [5]])
def test_an_export_names_its_architecture_whatever_was_loaded(tmp_path: Path, named: Any) -> None:
    """A folder may be known by its model_type alone."""
    try:
        c = hf_config.shape_of(_described(tmp_path / "m", architectures=named))
    except Refusal:
        assert named not in (..., [], None)  # those are read
        return
    assert hf_config.config_of(c, 128, "float32")["architectures"] == ["LlamaForCausalLM"]
