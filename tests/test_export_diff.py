"""Every family: a folder that transformers saved, loaded and exported, untrained and after a step. What differs is on a list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("tokenizers")

import torch
import transformers

from conftest import Stoker, at_length_but
from published import PUBLISHED
from stoker.cli import export
from stoker.training.model import families
from stoker.training.model.hf_write import EXPORTED
from stoker.training.tokenizer.tokenizer import Tokenizer, load

LIKE = PUBLISHED["llama-3"]  # ends a turn with another token than a text
SIZE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8,
    "max_position_embeddings": 256, "pad_token_id": None, "attention_dropout": 0.0, "rms_norm_eps": 2e-6,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 128, "rope_theta": 5e3,
}  # fmt: skip
# One of each family, with keys that are not its defaults; which dtype it is stored in.
FAMILIES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}, torch.bfloat16),
    "mistral": ("Mistral", {"sliding_window": 64}, torch.bfloat16),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, torch.float16),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}, torch.float32),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 16, "sliding_window": 32, "final_logit_softcapping": 20.0}, torch.bfloat16),
    "gemma3_text": ("Gemma3", {"query_pre_attn_scalar": 16, "sliding_window": 32}, torch.bfloat16),
    "phi3": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 128}, torch.bfloat16),
    "olmo2": ("Olmo2", {}, torch.float32),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}, torch.bfloat16),
    "gpt2": ("GPT2", {}, torch.float32),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, torch.bfloat16),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, torch.bfloat16),
}  # fmt: skip
JSON = ("config.json", "generation_config.json", "tokenizer_config.json")


def theirs(where: Path, name: str) -> Tokenizer:
    """Model, generation settings and tokenizer, each written by transformers."""
    LIKE.folder(where / "words")
    words = load(str(where / "words"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(where / "words")
    kind, keys, dtype = FAMILIES[name]
    ends = {"bos_token_id": words.start[0], "eos_token_id": words.special["<|end_of_text|>"]}
    size = {**SIZE, **keys, **ends, "vocab_size": words.vocab_size}
    if kind == "GPT2":
        size = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "attn_pdrop": 0.0, "vocab_size": words.vocab_size, **ends}  # fmt: skip
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")(**size)
    torch.manual_seed(1)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).to(dtype)
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.05, **ends
    )
    model.save_pretrained(where / "theirs")
    tokenizer.save_pretrained(where / "theirs")
    return words


def differences(before: Path, after: Path) -> dict[str, Any]:
    """File -> what it has now: a whole file that is new or gone, else keys with their new values. Weights are no part."""
    found: dict[str, Any] = {}
    names = {path.name for folder in (before, after) for path in folder.iterdir() if path.suffix != ".safetensors"}
    for name in names:
        old, new = before / name, after / name
        if not (old.exists() and new.exists()):
            found[name] = "new" if new.exists() else "gone"
        elif name in JSON:
            was, now = json.loads(old.read_text()), json.loads(new.read_text())
            changed = {
                key: now.get(key, "gone") for key in {**was, **now} if was.get(key, "none") != now.get(key, "gone")
            }
            found |= {name: changed} if changed else {}
        elif old.read_bytes() != new.read_bytes():
            found[name] = "other bytes"
    return found


def test_every_family_is_compared() -> None:
    assert set(FAMILIES) == set(families._families())


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_without_training_changes_nothing(name: str, tmp_path: Path) -> None:
    theirs(tmp_path, name)
    assert export.main([str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    half = FAMILIES[name][2] == torch.float16
    # Weights of fp16 become bf16, which has its range in training; all else stays.
    intended = {"config.json": {"dtype": "bfloat16"}} if half else {}
    assert differences(tmp_path / "theirs", tmp_path / "ours") == {**intended, EXPORTED: "new"}


def chats(path: Path) -> str:
    said = [{"role": "user", "content": "the river"}, {"role": "assistant", "content": "seven boats"}]
    path.write_text("\n".join([json.dumps({"messages": said})] * 12))
    return str(path)


def after_a_step(stoker: Stoker, tmp_path: Path) -> Path:
    done = stoker.torch(
        "train", "sft", "--model.load", str(tmp_path / "theirs"), "--data", chats(tmp_path / "chats.jsonl"), "--train.max_steps", "1",
        "--parallel.device", "cpu", "--no-preflight", "--data.validation", "0", "--data.context_length", "64",
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    return stoker.latest / "hf"


# Tied weights in fp16, norms on both sides, no rotary positions, experts: the others differ in what test_families.py compares.
@pytest.mark.parametrize("name", at_length_but(["qwen2"], FAMILIES))
def test_after_a_step_only_the_end_of_an_answer_and_the_card_are_new(name: str, stoker: Stoker, tmp_path: Path) -> None:
    words = theirs(tmp_path, name)
    ends = [words.special["<|eot_id|>"], words.special["<|end_of_text|>"]]  # what ends a turn was taught
    half = {"dtype": "bfloat16"} if FAMILIES[name][2] == torch.float16 else {}
    assert differences(tmp_path / "theirs", after_a_step(stoker, tmp_path)) == {
        "config.json": {"eos_token_id": ends, **half},
        "generation_config.json": {"eos_token_id": ends},
        "README.md": "new",
    }
