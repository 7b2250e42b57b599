"""An instruct model with a chat template of its own: `stoker train evaluate` gives the answers, and so the score, of transformers' generate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("tokenizers")

import torch
import transformers

from conftest import Stoker, at_length
from published import PUBLISHED
from stoker.training.tokenizer.tokenizer import load

NEW_TOKENS = 10
COUNT, TAUGHT = 24, 14  # questions, and how many of them it is taught
WORDS = ("river", "boats", "seven", "times", "answer", "question", "model", "curious", "weather", "user")
# Its own marks and first token; [INST] in a byte-fallback tokenizer; roles that have other names; thinking.
LIKE = ("llama-3", "mistral-v3", "gemma", "qwen-3")


def questions() -> list[dict[str, str]]:
    return [
        {"prompt": f"Which word has the number {n * 37 % 100}?", "answer": WORDS[n % len(WORDS)], "kind": "words"}
        for n in range(COUNT)
    ]


def instructed(folder: Path, name: str) -> Any:
    """Trained by transformers and torch alone, until it knows what it was taught and not the rest."""
    PUBLISHED[name].folder(folder)
    words, tokenizer = load(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    end = words.special[PUBLISHED[name].end]
    config = transformers.LlamaConfig(
        vocab_size=words.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=end, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config)
    rows = []
    for row in questions()[:TAUGHT]:
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_dict=False
        )
        answer = tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
        rows.append((asked, [*answer, end]))
    longest = max(len(asked) + len(answer) for asked, answer in rows)
    inputs, labels = torch.zeros(len(rows), longest, dtype=torch.int64), torch.full((len(rows), longest), -100)
    for place, (asked, answer) in enumerate(rows):
        inputs[place, : len(asked) + len(answer)] = torch.tensor(asked + answer)
        labels[place, len(asked) : len(asked) + len(answer)] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        if loss.item() < 0.05:
            break
    model.generation_config = transformers.GenerationConfig(eos_token_id=[end, words.end_id], do_sample=False)
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generated(model: Any, tokenizer: Any, prompt: str) -> str:
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ids = model.generate(**asked, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(ids[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small is slower with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@at_length  # the text that each template writes is compared in test_templates.py
@pytest.mark.parametrize("name", LIKE)
def test_the_score_is_that_of_transformers_generate(name: str, stoker: Stoker, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = instructed(folder, name)
    (stoker.cwd / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions()))
    done = stoker.torch(
        "train", "evaluate", "--model.load", str(folder), "--evaluate.tasks", "questions.jsonl", "--generate.new_tokens", str(NEW_TOKENS),
        "--generate.rows", "5", "--context_length", "200", "--dtype", "fp32", "--parallel.device", "cpu", "--no-preflight",
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    completions = [json.loads(line) for line in (stoker.latest / "completions.jsonl").read_text().splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = [generated(model, tokenizer, row["prompt"]) for row in questions()]
    assert [row["completion"] for row in completions] == theirs
    right = sum(said == row["answer"] for said, row in zip(theirs, questions(), strict=True))
    assert 0 < right < COUNT, "a score that says something"
    score = json.loads((stoker.latest / "result.json").read_text())["metrics"]["all"]
    assert (score["strict_correct"], score["strict_total"]) == (right, COUNT)
