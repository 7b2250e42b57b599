"""Adapters asked for in a way that can't be: one line, before any work where that is possible. And the shipped configs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed: it makes the models here")

import time
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from conftest import Stoker, at_length_but
from forked_recipes import trained
from stoker.contract.errors import Refusal
from stoker.training.config.files import load, shipped
from stoker.training.model import adapters, hf, hf_config
from stoker.training.model.config import AdapterConfig, ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.model.targets import targets
from stoker.training.tokenizer.tokenizer import bytes_tokenizer
from test_adapter_folders import adapter, base, chats, sft


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--lora", "--lora-rank", "0"], "adapter.lora_rank 0"),
        (["--lora", "--lora_targets", "q_pro"], "did you mean q_proj?"),
        (["--lora", "--lora_targets", "wq"], "no linear layer of this model is called that"),
        (["--qlora", "--also_train", "lm_heat"], "did you mean lm_head?"),
        (
            ["--lora", "--strategy", "fsdp", "--embedding", "host"],
            "adapter.method lora does not support parallel.strategy fsdp with compute.embedding host yet",
        ),
        (["--lora", "--optim.kind", "muon"], "adapter.method lora does not support optim.kind muon yet"),
        (["--lora", "--lora_dropout", "1"], "adapter.lora_dropout 1"),
        (["--adapter.method", "loro"], "'loro' is not one of off, lora, qlora"),
    ],
)
def test_settings_that_can_not_be_are_one_line_before_data_is_prepared(
    words: list[str], line: str, stoker: Stoker, tmp_path: Path
) -> None:
    folder, data = base(tmp_path / "base"), chats(tmp_path / "chats.jsonl")
    done = stoker.torch(*sft("no", folder, data, *words))
    last = done.err.strip().splitlines()[-1]
    assert done.code != 0 and last.startswith("stoker: ") and line in last, done.err
    assert "Traceback" not in done.err + done.out and not (stoker.cwd / "cache" / "datasets").exists()


def test_adapters_need_a_model(stoker: Stoker, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words\n" * 200)
    done = stoker.torch("train", "pretrain", "--preset", "small", "--data", str(text), "--lora")
    assert done.code != 0 and "needs a model to adapt: name its folder or hub id with --model.load" in done.err


def test_training_goes_on_with_an_adapter_of_this_base_only(stoker: Stoker, tmp_path: Path) -> None:
    folder, data = base(tmp_path / "base"), chats(tmp_path / "chats.jsonl")
    ours = adapter(folder, tmp_path / "ours")
    done = stoker.torch(*sft("on", ours, data, "--lora", "--max-steps", "1"))
    assert done.code == 0 and f"adapter from {ours}: rank 4" in done.out, done.out + done.err
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    done = trained(stoker, sft("no", ours, data, "--lora"))
    assert done.code != 0 and "was trained on other weights" in done.out + done.err, done.err
    settings = json.loads((ours / adapters.SETTINGS).read_text())
    other = base(tmp_path / "other")
    words = sft("other", folder, data, "--lora", "--adapter.continue_from", str(adapter(other, tmp_path / "b")))
    done = trained(stoker, words)
    assert done.code != 0 and "was trained on other weights than those in" in done.out + done.err, done.err
    (ours / adapters.SETTINGS).write_text(json.dumps({**settings, "base_model_name_or_path": str(tmp_path / "gone")}))
    done = stoker.torch(*sft("gone", ours, data, "--lora"))
    assert done.code != 0 and "gone does not exist" in done.err and "Traceback" not in done.err, done.err
    (ours / adapters.SETTINGS).write_text(json.dumps({**settings, "base_model_name_or_path": str(ours)}))
    done = stoker.torch(*sft("itself", ours, data, "--lora"))
    assert done.code != 0 and "which is an adapter itself: merge that one first" in done.err, done.err


def test_a_matrix_whose_elements_are_no_multiple_of_64_stays_whole_and_is_announced(
    stoker: Stoker, tmp_path: Path
) -> None:
    bytes_tokenizer().save(str(tmp_path / "tokenizer"))
    model = Decoder(ModelConfig(layers=2, dim=40, heads=4, kv_heads=2, head_dim=10, ff=72, vocab_size=320), 64)
    model.start(1)
    hf.save(model, str(tmp_path / "base"), say=lambda line: None, tokenizer_folder=str(tmp_path / "tokenizer"))
    words = sft("odd", tmp_path / "base", chats(tmp_path / "chats.jsonl"), "--qlora", "--lora-rank", "2")
    done = trained(stoker, words)
    assert done.code == 0, done.out + done.err
    line = "qlora: the elements of layers.0.attention.qkv (20 × 40) and 1 more are not a multiple of 64: they stay in 16 bits"
    assert line in done.out, done.out


FINETUNES = ["finetune_14b", "finetune_32b", "lora_24GB", "qlora_12GB", "qlora_8GB"]


def test_the_configs_for_fine_tuning_are_shipped() -> None:
    assert set(FINETUNES) <= set(shipped())
    for name in FINETUNES:
        told = load(name)
        assert told["adapter"]["method"] in ("lora", "qlora") and told["needs"]["vram"] and told["needs"]["gpus"]


@pytest.mark.parametrize("name", at_length_but(["qlora_8GB"], FINETUNES))
def test_a_shipped_config_trains_and_is_refused_where_its_cards_are_missing(
    name: str, stoker: Stoker, tmp_path: Path
) -> None:
    folder, data = base(tmp_path / "base"), chats(stoker.cwd / "chats.jsonl")
    given = ("--model.load", str(folder), "--parallel.device", "cpu", "--context-length", "64", "--max-steps", "1")
    done = stoker.torch("train", "sft", "--config", name, "--data", str(data), *given)
    assert done.code != 0 and f"config file {name}: needs.gpus: " in done.err, done.err
    there = ("--needs.gpus", "0", "--needs.vram", "0")
    done = stoker.torch("train", "sft", "--config", name, "--data", str(data), *given, *there)
    assert done.code == 0 and "numbers learn" in done.out, done.out + done.err
    shutil.rmtree(stoker.cwd / "runs")


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 320, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "torch_dtype": "float32", "hidden_act": "silu",
}  # fmt: skip


def _described(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    keys = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(keys))
    return str(folder)


def test_names_of_layers_are_looked_up_once(tmp_path: Path) -> None:
    """The other way, each name is compared with each layer: minutes."""
    c = hf_config.shape_of(_described(tmp_path / "m", num_hidden_layers=500))
    names = [f"{layer}.self_attn.{name}_proj" for layer in range(500) for name in "qkv"]
    began = time.process_time()
    assert len(targets(c, AdapterConfig(lora_targets=",".join(names * 40)))) == 500
    assert time.process_time() - began < 8


def test_every_layer_and_another_is_explained(tmp_path: Path) -> None:
    c = hf_config.shape_of(_described(tmp_path / "m"))
    with pytest.raises(Refusal, match="all-linear names every layer already; give it alone"):
        targets(c, AdapterConfig(lora_targets="all-linear,q_proj"))
    assert len(targets(c, AdapterConfig(lora_targets="all-linear,all-linear"))) == 4
