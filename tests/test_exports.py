"""A model from elsewhere, fine-tuned by the real command: its export is that model, with what training taught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import os

import pytest
import torch
import transformers

from published import PUBLISHED, Published, byte_level
from small_model import write_model
from stoker.cli import export as exporting
from stoker.contract.errors import Refusal
from stoker.contract.frozen import as_json
from stoker.training.checkpoint.manifest import NAME, Entry, Manifest, Piece, Sums, encode
from stoker.training.data.config import DataConfig
from stoker.training.data.formats.questions import Question
from stoker.training.data.prepare import prepare
from stoker.training.evaluate.asking import Manner, prompt_ids, stop_ids
from stoker.training.evaluate.likelihood import windows
from stoker.training.generate import gguf_file
from stoker.training.generate.finding import Found
from stoker.training.model.hf_config import shape_of
from stoker.training.reward.pairs import answered
from stoker.training.rl.rollout import read as read_prompts
from stoker.training.tokenizer.config import TokenizerConfig
from stoker.training.tokenizer.tokenizer import bytes_tokenizer, load

ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
}  # fmt: skip
HOW = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
CPU = ("--parallel.device", "cpu", "--no-preflight", "--data.validation", "0", "--data.context_length", "96")


def json_of(path: Path) -> Any:
    return json.loads(path.read_text())


def base(where: Path, like: Published, ends: list[int] | int | None = None) -> Path:
    folder = like.folder(where)
    words = load(str(folder))
    config = transformers.LlamaConfig(
        vocab_size=-(-words.vocab_size // 64) * 64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=4096, rope_theta=500000.0, rope_scaling=dict(ROPE), bos_token_id=words.start[0], eos_token_id=words.end_id, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(eos_token_id=ends or words.end_id, **HOW)
    model.save_pretrained(folder)
    return folder


def chats(path: Path, count: int = 12, turns: int = 1) -> Path:
    said = [
        {"role": "user", "content": "the river <|eot_id|>"},
        {"role": "assistant", "content": "seven boats"},
    ] * turns
    path.write_text("\n".join([json.dumps({"messages": said})] * count))
    return path


def trained(stoker: Stoker, tmp_path: Path, stage: str, folder: Path, data: Path, *more: str) -> tuple[Path, str]:
    given = ("--model.load", str(folder), "--data", str(data), "--train.max_steps", "2", *CPU, *more)
    done = stoker.torch("train", stage, *given, "--runs-dir", str(tmp_path / "runs"), "--name", "one")
    assert done.code == 0, done.out + done.err
    (run,) = (tmp_path / "runs").glob("*-one")
    return run, done.out + done.err


def test_fine_tuning_keeps_the_loaded_models_values_and_adds_what_it_taught(stoker: Stoker, tmp_path: Path) -> None:
    like = PUBLISHED["llama-3"]
    folder = base(tmp_path / "base", like)
    run, _ = trained(stoker, tmp_path, "sft", folder, chats(tmp_path / "chats.jsonl"))
    before, after, words = json_of(folder / "config.json"), json_of(run / "hf/config.json"), load(str(folder))
    assert after["max_position_embeddings"] == 4096 and (after.get("dtype") or after["torch_dtype"]) == "bfloat16"
    rope = after.get("rope_scaling") or after["rope_parameters"]
    assert {key: rope[key] for key in ROPE} == ROPE
    assert after["bos_token_id"] == before["bos_token_id"]
    eot, end = words.special["<|eot_id|>"], words.special["<|end_of_text|>"]
    assert after["eos_token_id"] == [eot, end]
    generation = json_of(run / "hf/generation_config.json")
    assert generation["eos_token_id"] == [eot, end] and {key: generation[key] for key in HOW} == HOW
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (run / "hf" / name).read_bytes() == (folder / name).read_bytes()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run / "hf", dtype="auto")
    assert theirs.dtype == torch.bfloat16 and theirs.generation_config.eos_token_id == [eot, end]
    assert transformers.AutoTokenizer.from_pretrained(run / "hf").chat_template == like.template
    card = (run / "hf/README.md").read_text()
    assert "chats.jsonl" in card and "loss" in card and "learning_rate" in card and "library_name: transformers" in card
    out = tmp_path / "out"
    for dtype, kind in ((), torch.bfloat16), (("--dtype", "fp32"), torch.float32):
        assert exporting.main([str(run), str(out), *dtype, "--force"]) == 0
        assert (
            json_of(out / "generation_config.json") == generation
            and json_of(out / "config.json")["max_position_embeddings"] == 4096
        )
        assert transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == kind
        assert "stage sft" in (out / "README.md").read_text()
    steps = sorted((run / "checkpoints").glob("step-*"))
    assert exporting.main([str(steps[-1]), str(tmp_path / "other")]) == 0
    assert json_of(tmp_path / "other/config.json") == json_of(run / "hf/config.json")
    assert (tmp_path / "other/model.safetensors").read_bytes() == (run / "hf/model.safetensors").read_bytes()


def test_training_on_text_adds_no_end_of_turn_and_puts_the_first_token_before_each_document(
    stoker: Stoker, tmp_path: Path
) -> None:
    folder = base(tmp_path / "base", PUBLISHED["llama-3"], ends=[3, 4])
    (tmp_path / "texts.jsonl").write_text("\n".join([json.dumps({"text": "the river took seven boats"})] * 200))
    run, _ = trained(stoker, tmp_path, "pretrain", folder, tmp_path / "texts.jsonl")
    before, after = json_of(folder / "config.json"), json_of(run / "hf/config.json")
    assert after["eos_token_id"] == before["eos_token_id"] and after["max_position_embeddings"] == 4096
    assert json_of(run / "hf/generation_config.json")["eos_token_id"] == [3, 4]
    data = DataConfig(
        path=(str(tmp_path / "texts.jsonl"),), validation="0", context_length=96, cache=str(tmp_path / "cache")
    )
    made = prepare(data, TokenizerConfig(path=str(folder)), lambda line: None)
    (shard,) = Path(made.folder).glob("train-*.bin")
    words = load(str(folder))
    one = [*words.begin, *words.encode("the river took seven boats"), words.end_id]
    ids = memoryview(shard.read_bytes()).cast("H").tolist()
    assert words.begin == (words.special["<|begin_of_text|>"],) and ids == one * 200


def test_a_base_model_with_chatml_marks_is_taught_chatml_and_says_so(stoker: Stoker, tmp_path: Path) -> None:
    marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    like = Published(lambda: byte_level(marks), "", {"eos_token": "<|endoftext|>"}, "<|im_end|>")
    folder = base(tmp_path / "base", like)
    run, _ = trained(stoker, tmp_path, "sft", folder, chats(tmp_path / "chats.jsonl"))
    words = transformers.AutoTokenizer.from_pretrained(run / "hf")
    assert "<|im_start|>" in words.chat_template
    mark, end = (words.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|endoftext|>"))
    assert json_of(run / "hf/generation_config.json")["eos_token_id"] == [mark, end]


def test_a_template_that_rewrites_turns_is_announced_and_rows_it_refuses_are_named(tmp_path: Path) -> None:
    lines: list[str] = []
    qwen = PUBLISHED["qwen-3"].folder(tmp_path / "qwen")
    data = DataConfig(
        path=(str(chats(tmp_path / "chats.jsonl", turns=2)),),
        kind="chat",
        validation="0",
        context_length=96,
        cache=str(tmp_path / "cache"),
    )
    prepare(data, TokenizerConfig(path=str(qwen)), lines.append)
    assert any("12 of 12 conversations" in line and "only the last answer is learned" in line for line in lines), lines
    llama = PUBLISHED["llama-2"].folder(tmp_path / "llama")
    with pytest.raises(Exception, match="roles must alternate") as refused:
        rows = [{"messages": [{"role": "user", "content": "a"}] * 2 + [{"role": "assistant", "content": "b"}]}]
        (tmp_path / "wrong.jsonl").write_text("\n".join(map(json.dumps, rows)))
        prepare(
            DataConfig(
                path=(str(tmp_path / "wrong.jsonl"),), kind="chat", validation="0", cache=str(tmp_path / "cache")
            ),
            TokenizerConfig(path=str(llama)),
            lines.append,
        )
    assert "wrong.jsonl, line 1" in str(refused.value) and "\n" not in str(refused.value)


def test_another_template_is_other_data(tmp_path: Path) -> None:
    data = DataConfig(
        path=(str(chats(tmp_path / "chats.jsonl")),),
        kind="chat",
        validation="0",
        context_length=96,
        cache=str(tmp_path / "cache"),
    )
    like = PUBLISHED["chatml"]
    folders = set()
    for number, template in enumerate((like.template, like.template.replace("'\\n' +", "' ' +"))):
        folder = Published(like.make, template, like.names, like.end).folder(tmp_path / str(number))
        folders.add(prepare(data, TokenizerConfig(path=str(folder)), lambda line: None).folder)
    assert len(folders) == 2


def test_chat_evaluation_and_grpo_ask_as_the_template_says(stoker: Stoker, tmp_path: Path) -> None:
    folder = base(tmp_path / "base", PUBLISHED["llama-3"])
    words, theirs = load(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the river <b>"}]
    want = theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    question = Question((("user", "the river <b>"),), "boats", "kind")
    manner = Manner(chat=True, system="Be brief.")
    assert prompt_ids(words, question, manner) == want
    eot, begin, end = (words.special[name] for name in ("<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>"))
    assert stop_ids(words, manner) == {eot, end}
    plain = prompt_ids(words, question, Manner(chat=False))
    assert plain[0] == begin and begin not in plain[1:] and end not in plain
    rows, sizes = windows(words, [(b"the river", True), ("cafe\u0301".encode(), True)], 64, 0)
    assert [row[0] for row in rows] == [[begin], [begin]] and sizes == [9, 6]
    prompts, left_out = read_prompts([{"prompt": asked, "answer": "boats"}], words, 500, "here")
    assert list(prompts[0].ids) == list(want) and not left_out
    pair = answered(words, asked, "boats")
    assert pair == [*want, *words.encode("boats"), eot]
    for more in (), ("--raw",):
        told = ("--prompt", "the river", "--max-tokens", "4", "--device", "cpu", "--seed", "1")
        done = stoker.torch("chat", str(folder), *told, *more)
        assert done.code == 0 and done.out.endswith("\n"), done.err


def test_a_template_that_can_not_ask_is_one_line(stoker: Stoker, tmp_path: Path) -> None:
    broken = Published(PUBLISHED["llama-3"].make, "{% for x in %}", PUBLISHED["llama-3"].names, "")
    done = stoker.torch("chat", str(base(tmp_path / "base", broken)), "--prompt", "x", "--device", "cpu")
    last = done.err.splitlines()[-1]
    assert done.code == 65 and last.startswith("stoker: tokenizer") and "its chat template can't be used" in last, (
        done.err
    )
    assert "line 1" in done.err and "Traceback" not in done.err


def test_rows_with_tools_and_thinking_are_learned_by_the_template(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "the river"},
        {"role": "assistant", "content": None, "reasoning_content": "look", "tool_calls": [call]},
        {"role": "tool", "content": "12", "name": "weather"},
        {"role": "assistant", "content": "seven boats"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "description": "x", "parameters": {}}}]
    row = {"messages": messages, "tools": tools}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    pyarrow.parquet.write_table(
        pyarrow.table({"messages": [messages], "tools": [json.dumps(tools)]}), tmp_path / "rows.parquet"
    )
    folder = PUBLISHED["qwen-3"].folder(tmp_path / "qwen")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    want = theirs.apply_chat_template(messages, tools=tools, return_dict=True)["input_ids"]
    for name in ("rows.jsonl", "rows.parquet"):
        data = DataConfig(
            path=(str(tmp_path / name),),
            kind="chat",
            validation="0",
            context_length=len(want) - 1,
            cache=str(tmp_path / "cache"),
        )
        made = prepare(data, TokenizerConfig(path=str(folder)), lambda line: None)
        (shard,) = Path(made.folder).glob("train-0*.bin")
        assert memoryview(shard.read_bytes()).cast("H").tolist() == want, name
    data = DataConfig(path=(str(tmp_path / "rows.jsonl"),), kind="chat", validation="0", cache=str(tmp_path / "cache"))
    with pytest.raises(Refusal, match=r"rows\.jsonl, line 1: it has tools.*no chat template for them"):
        prepare(data, TokenizerConfig(path="bytes"), lambda line: None)


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


def test_an_export_replaces_an_export_in_a_folder_that_others_may_write_to(tmp_path: Path) -> None:
    """A pod's volume, or a team's folder."""
    write_model(tmp_path / "model")
    (tmp_path / "team").mkdir()
    (tmp_path / "team").chmod(0o777)
    for _ in range(2):
        _export(tmp_path / "model", tmp_path / "team" / "out")
    assert os.listdir(tmp_path / "team") == ["out"]


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


def test_an_export_writes_over_no_file_of_others(tmp_path: Path) -> None:
    out = tmp_path / "big.gguf"
    out.write_bytes(b"GGUF and the weights of somebody")
    link = tmp_path / "link.gguf"
    link.symlink_to(out)
    for path in (out, link):
        with pytest.raises(Refusal, match="was not written by stoker export"):
            gguf_file.write(str(tmp_path / "model"), str(path), None, None, print)
    assert out.read_bytes().endswith(b"of somebody") and link.is_symlink()


def test_a_runs_words_are_text_in_the_card_of_its_model(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from stoker.training.generate.exporting import card_of

    (tmp_path / "config.yaml").write_text("data:\n  path: ['a<img src=x>|b', '[text](https://example.org)']\n")
    card = card_of(str(tmp_path), "sft\n# A heading\x1b[31m<script>alert(1)</script>")
    before_settings = card.partition("## Settings")[0]
    assert "\n# A heading" not in card and "\x1b" not in card
    assert "<script" not in before_settings and "<img" not in before_settings and "\\[text\\](" in before_settings
