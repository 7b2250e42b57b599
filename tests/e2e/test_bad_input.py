"""Models and data that can't be used, given to the real commands: one line that says what and where, and nothing half-written."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("tokenizers")

import torch
import transformers

from conftest import Done, Stoker, at_length_but
from published import PUBLISHED
from stoker.training.tokenizer.tokenizer import load

USER, ANSWER = {"role": "user", "content": "the river"}, {"role": "assistant", "content": "seven boats"}
CHAT: dict[str, Any] = {"messages": [USER, ANSWER]}
PAIR = {"prompt": "the river", "chosen": "seven boats", "rejected": "none"}
TEXT = {"text": "The river took seven boats."}
DATA = {"sft": CHAT, "pretrain": TEXT, "dpo": PAIR}
CPU = ("--parallel.device", "cpu", "--no-preflight", "--data.context_length", "96", "--train.max_steps", "1")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = PUBLISHED["chatml"].folder(tmp_path_factory.mktemp("models") / "good")
    words = load(str(folder))
    config = transformers.LlamaConfig(
        vocab_size=words.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=words.end_id,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def keys(folder: Path, name: str = "config.json", **more: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


def without_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def half_downloaded(folder: Path) -> None:
    shard = sorted(folder.glob("model-*"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])


def one_shard_missing(folder: Path) -> None:
    sorted(folder.glob("model-*"))[1].unlink()


def needs_code(folder: Path) -> None:
    keys(folder, architectures=["OwnForCausalLM"], model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})


def quantized(folder: Path, method: str) -> None:
    keys(folder, quantization_config={"quant_method": method})


MODELS = {
    "without weights": (without_weights, "it has no weights"),
    "half-downloaded": (half_downloaded, "model-00002-of-"),
    "a shard missing": (one_shard_missing, "is missing: the folder is not complete"),
    "no language model": (lambda folder: keys(folder, architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
    "needs its own code": (needs_code, "trust-remote-code|OwnForCausalLM"),
    **{
        method: (lambda folder, method=method: quantized(folder, method), f'quantized \\("{method}"\\)')
        for method in ("gptq", "awq", "fp8", "mxfp4")
    },
}  # fmt: skip


def rows(path: Path, made: list[Any]) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in made)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def one_line(done: Done, *parts: str) -> str:
    """The refusal, which is the last line."""
    line = done.err.strip().splitlines()[-1]
    assert done.code in (64, 65, 66, 69, 78) and line.startswith("stoker: "), done.err
    assert "Traceback" not in done.out + done.err
    assert all(part in line for part in parts), line
    return line


def leftovers(folder: Path) -> list[str]:
    """What is prepared, unpacked or half-written; locks and the sums of files may stay."""
    found = [
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, names in os.walk(folder)
        for name in names
        if not name.endswith(".lock") and name not in ("digests.json", "CACHEDIR.TAG")
    ]
    return [name for name in found if name.startswith(("cache", "runs", "out")) or ".tmp" in name]


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_can_not_be_loaded_is_refused_before_any_work(
    kind: str, good: Path, stoker: Stoker, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    spoil, says = MODELS[kind]
    spoil(folder)
    for stage in DATA if kind == "half-downloaded" else ("sft",):
        data = rows(stoker.cwd / f"{stage}.jsonl", [DATA[stage]] * 60)
        given = ("--dpo.pairs" if stage == "dpo" else "--data", str(data))
        done = stoker.torch("train", stage, "--model.load", str(folder), *given, *CPU)
        assert re.search(says, one_line(done, str(folder))), done.err
    assert re.search(says, one_line(stoker.torch("chat", str(folder), "--prompt", "a"), str(folder)))
    assert re.search(says, one_line(stoker.torch("export", str(folder), "out"), str(folder)))
    assert leftovers(stoker.cwd) == []


def test_an_architecture_that_nobody_knows_is_one_line(good: Path, stoker: Stoker, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    keys(folder, architectures=["FooForCausalLM"], model_type="foo")
    line = one_line(stoker.torch("chat", str(folder), "--prompt", "a", "--device", "cpu"), str(folder))
    assert "does not know the architecture FooForCausalLM (model_type 'foo')" in line and "pip install" in line
    data = rows(stoker.cwd / "chats.jsonl", [CHAT] * 40)
    done = stoker.torch("train", "sft", "--model.load", str(folder), "--data", str(data), *CPU)
    assert done.code == 65 and "rank 0 (CPU 0) refused: model" in done.err and "FooForCausalLM" in done.err, done.err
    assert "Traceback" not in done.out + done.err


TEMPLATES = {
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 2 s of CPU time"),
    "reads a file": ("{% include '/etc/passwd' %}", "it reads the file '/etc/passwd'"),
    "reads Python": ("{{ messages.__class__.__mro__ }}", "unsafe"),
    "is no template": ("{% for m in messages %}{{ m.content }", "line 1: unexpected '}'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", at_length_but(["reads a file", "is no template"], TEMPLATES))
def test_a_template_that_can_not_be_used_is_not_blamed_on_the_rows(
    kind: str, good: Path, stoker: Stoker, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    source, says = TEMPLATES[kind]
    keys(folder, "tokenizer_config.json", chat_template=source)
    chats, texts = rows(stoker.cwd / "chats.jsonl", [CHAT] * 40), rows(stoker.cwd / "texts.jsonl", [TEXT] * 60)
    parts = (f"tokenizer {folder}: its chat template can't be used", says)
    one_line(stoker("data", "show", str(chats), "--tokenizer", str(folder)), *parts)
    given = ("--model.load", str(folder), "--data.validation", "0", *CPU)
    one_line(stoker.torch("train", "sft", "--data", str(chats), *given), *parts)
    one_line(stoker.torch("chat", str(folder), "--prompt", "a", "--device", "cpu"), *parts)
    assert leftovers(stoker.cwd) == []
    if kind == "is no template":  # plain text needs none
        assert stoker.torch("train", "pretrain", "--data", str(texts), *given).code == 0


LONG = {"messages": [{"role": "user", "content": "boats " * 500}, ANSWER]}
ROWS: dict[str, tuple[list[Any], str]] = {
    "no answer": ([CHAT, {"messages": [USER]}], "{}, line 2: no message is the assistant's"),
    "an empty conversation": ([CHAT, CHAT, {"messages": []}], "{}, line 3: an empty conversation"),
    "two formats": ([CHAT, {"instruction": "a", "output": "b"}], "{}, line 2: the row is of format alpaca"),
    "too long": ([LONG] * 3, "{}: no conversation has words of the assistant within 96 tokens"),
    "a key twice": ([CHAT, '{"messages": [], "messages": []}'], "{}, line 2 is not JSON that can be used: the key 'messages' appears twice"),
    "no JSON": ([CHAT, '{"messages": ['], "{}, line 2 is not JSON"),
}  # fmt: skip
PAIRS: dict[str, tuple[list[Any], str]] = {
    "no answer": ([PAIR, {"prompt": [USER], "chosen": [USER], "rejected": [USER, ANSWER]}], "chosen does not end with an answer of the assistant (row 2)"),
    "an empty conversation": ([PAIR, {"chosen": [], "rejected": []}], "chosen is an empty conversation (row 2)"),
    "two formats": ([PAIR, CHAT], "no chosen; found messages (row 2)"),
    "too long": ([{**PAIR, "chosen": "boats " * 500}] * 3, "raise data.context_length: the longest needs"),
    "a key twice": ([PAIR, '{"prompt": "a", "prompt": "b"}'], "line 2 is not JSON that can be used: the key 'prompt' appears twice"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_can_not_be_learned_are_named_with_their_file(kind: str, good: Path, stoker: Stoker) -> None:
    made, says = ROWS[kind]
    path = rows(stoker.cwd / "rows.jsonl.gz", made)
    given = ("--model.load", str(good), "--data", str(path), "--data.validation", "0", *CPU)
    one_line(stoker.torch("train", "sft", *given), says.format(path))
    show = stoker("data", "show", str(path), "--tokenizer", str(good), "--context-length", "96")
    if show.code:
        one_line(show, says.format(path))
    else:
        assert "training refuses this file: " in show.out, show.out
    assert [name for name in leftovers(stoker.cwd) if not name.startswith("cache/unpacked/")] == []


@pytest.mark.parametrize("kind", at_length_but(["no answer"], PAIRS))
def test_pairs_that_can_not_be_learned_are_named_with_their_file(kind: str, good: Path, stoker: Stoker) -> None:
    made, says = PAIRS[kind]
    path = rows(stoker.cwd / "pairs.jsonl.gz", made)
    done = stoker.torch("train", "dpo", "--model.load", str(good), "--dpo.pairs", str(path), *CPU)
    one_line(done, says, str(path))
    assert done.code == 65 and not (stoker.cwd / "runs").exists(), "refused before anything starts"
    show = stoker("data", "show", str(path), "--tokenizer", str(good), "--context-length", "96")
    assert "training refuses this file: " in show.out if show.code == 0 else says in show.err


def test_a_damaged_archive_is_one_line_and_leaves_no_half_of_it(good: Path, stoker: Stoker) -> None:
    for stage, row in DATA.items():
        path = rows(stoker.cwd / f"{stage}.jsonl.gz", [{**row, "id": number} for number in range(10_000)])
        path.write_bytes(path.read_bytes()[:-2000])
        given = ("--dpo.pairs" if stage == "dpo" else "--data", str(path))
        done = stoker.torch("train", stage, "--model.load", str(good), *given, *CPU)
        one_line(done, f"{path} is damaged", "download it again")
        one_line(stoker("data", "show", str(path)), f"{path} is damaged", "download it again")
    assert leftovers(stoker.cwd) == []


def test_an_empty_file_is_called_empty(good: Path, stoker: Stoker) -> None:
    path = rows(stoker.cwd / "rows.jsonl", [])
    line = one_line(stoker("data", "show", str(path)), f"{path} is empty")
    assert "known" not in line
    one_line(stoker.torch("train", "sft", "--model.load", str(good), "--data", str(path), *CPU), f"{path} is empty")
