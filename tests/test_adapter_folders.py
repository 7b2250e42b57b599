"""Folders of adapters and of weights in 4 bits: merged, chatted with, evaluated, trained beside, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed: what weights are compared with")

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import Stoker
from forked_recipes import trained
from stoker.training.model import adapters, hf, nf4
from stoker.training.model.config import AdapterConfig
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import shape_of
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

CPU = torch.device("cpu")
SIZE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Phi3": {"pad_token_id": 0},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
}
TOKENS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
TOLD = AdapterConfig(method="lora", lora_rank=4, lora_alpha=8.0)
ASK = ("--prompt", "hello?", "--temperature", "0", "--max-tokens", "8", "--device", "cpu")


def quiet(line: str) -> None:
    pass


def base(folder: Path, kind: str = "Llama", dtype: torch.dtype = torch.float32) -> Path:
    """A model of transformers with our tokenizer of bytes."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**SIZE, **KINDS[kind]})
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    getattr(transformers, head)(config).eval().to(dtype).save_pretrained(folder)
    bytes_tokenizer().save(str(folder))
    return folder


def adapter(base: Path, folder: Path, told: AdapterConfig = TOLD, bare: bool = True) -> Path:
    """An adapter with numbers in it. `bare`: as peft saves one, nothing but the adapter."""
    with torch.device("meta"):
        model = Decoder(shape_of(str(base)), 64)
    adapters.freeze(model, told)
    model.place(CPU)
    hf.load_named(model, hf.named(model), str(base), quiet)
    adapters.attach(model, told, 0)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in adapters.learned(model).values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapters.save(model, told, str(base), str(folder), None, quiet)
    if not bare:
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            if (base / name).exists():
                shutil.copy(base / name, folder / name)
    return folder


def logits(folder: Path, context: int = 64) -> Tensor:
    with torch.no_grad():
        return hf.opened(str(folder), context, torch.float32, CPU, quiet)(TOKENS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_merged_export_is_what_peft_merges(kind: str, dtype: str, stoker: Stoker, tmp_path: Path) -> None:
    folder = base(tmp_path / "base", kind)
    also = "" if kind == "GPT2" else "lm_head"
    told = AdapterConfig(method="lora", lora_rank=4, lora_alpha=8.0, also_train=also)
    ours, out = adapter(folder, tmp_path / "ours", told), tmp_path / "out"
    done = stoker.torch("export", str(ours), str(out), "--merge", *(("--dtype", "fp32") if dtype == "fp32" else ()))
    assert done.code == 0 and "added to the weights" in done.err + done.out, done.out + done.err
    whole = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert next(whole.parameters()).dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    peft = pytest.importorskip("peft", reason="no peft here to compare with")
    merged = peft.AutoPeftModelForCausalLM.from_pretrained(str(ours)).merge_and_unload()
    if dtype == "bf16":
        for name, tensor in merged.to(torch.bfloat16).state_dict().items():  # a last bit may be rounded otherwise
            torch.testing.assert_close(whole.state_dict()[name], tensor, rtol=2**-7, atol=1e-6)
    else:
        torch.testing.assert_close(whole(TOKENS).logits, merged(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_chat_evaluate_and_export_take_an_adapter_as_they_take_a_model(stoker: Stoker, tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    bare, full = adapter(folder, tmp_path / "bare"), adapter(folder, tmp_path / "full", bare=False)
    done = stoker.torch("export", str(full), str(tmp_path / "out"), "--merge", "--dtype", "fp32")
    assert done.code == 0, done.err
    answers = []
    for one in (bare, full, tmp_path / "out"):
        done = stoker.torch("chat", str(one), *ASK)
        assert done.code == 0, done.err
        answers.append(done.out)
    assert answers[0] == answers[1] == answers[2] != stoker.torch("chat", str(folder), *ASK).out
    in_4_bits = stoker.torch("chat", str(full), *ASK, "--bits", "4")
    assert in_4_bits.code == 0 and "in 4 bits" in in_4_bits.err and in_4_bits.out, in_4_bits.err
    questions = tmp_path / "questions.jsonl"
    rows = [{"question": f"what is {number}?", "answer": str(number)} for number in range(6)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = []
    for name, one in (("a", bare), ("b", tmp_path / "out")):
        done = stoker.torch(
            "train", "evaluate", "--name", name, "--model.load", str(one), "--evaluate.tasks", f"q={questions}",
            "--context_length", "128", "--generate.new_tokens", "8", "--parallel.device", "cpu", "--preset", "small",
        )  # fmt: skip
        assert done.code == 0, done.out + done.err
        (run,) = (stoker.cwd / "runs").glob(f"*-{name}")
        told.append((run / "completions.jsonl").read_text())
    assert told[0] == told[1]


def test_an_adapter_and_a_whole_model_are_not_taken_for_each_other(stoker: Stoker, tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    ours = adapter(folder, tmp_path / "ours")
    for words, line in (
        (
            [str(ours), str(tmp_path / "out")],
            "is an adapter, which peft can open as it is: add --merge to write the whole model",
        ),
        ([str(folder), str(tmp_path / "out"), "--merge"], "there is nothing to merge"),
        ([str(ours), str(tmp_path / "out.gguf"), "--gguf"], "export it with --merge first"),
    ):
        done = stoker.torch("export", *words)
        assert done.code != 0 and line in done.err and "Traceback" not in done.err, done.err
        assert not (tmp_path / "out").exists() and not (tmp_path / "out.gguf").exists()
    other = load_file(folder / "model.safetensors")
    other["model.norm.weight"] += 1
    save_file(other, folder / "model.safetensors", {"format": "pt"})
    for words in (["chat", str(ours), *ASK], ["export", str(ours), str(tmp_path / "out"), "--merge"]):
        done = stoker.torch(*words)
        assert done.code != 0 and "was trained on other weights" in done.err, done.err


def in_4_bits(whole: Path, folder: Path, **keys: Any) -> Path:
    """As transformers saves a model that bitsandbytes quantized; `keys` change its quantization_config."""
    shutil.copytree(whole, folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(whole / "model.safetensors").items():
        if tensor.dim() == 2 and "layers." in name:
            tensors |= {key: part.contiguous() for key, part in nf4.to_tensors(nf4.quantize(tensor), name).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    told = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16", **keys,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": told}))
    return folder


def test_a_folder_that_bitsandbytes_quantized_is_computed_with_its_own_codes(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="no bitsandbytes here to compare with")
    whole = base(tmp_path / "base")
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(whole, quantization_config=how, device_map="cpu")
    theirs.save_pretrained(tmp_path / "four")
    # On CPUs its product rounds to 16 bits: its own dequantized numbers, in a model without codes, are what to compare with.
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "four", device_map="cpu")
    plain = transformers.AutoModelForCausalLM.from_pretrained(whole)
    with torch.no_grad():
        for name, layer in again.named_modules():
            if isinstance(layer, bnb.nn.Linear4bit):
                values = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
                plain.get_submodule(name).weight.copy_(values)
        want = plain(TOKENS).logits
    torch.testing.assert_close(logits(tmp_path / "four"), want, rtol=1e-3, atol=1e-3)
    told = AdapterConfig(method="qlora", lora_rank=4)
    with torch.device("meta"):
        model = Decoder(shape_of(str(tmp_path / "four")), 64)
    adapters.freeze(model, told)
    model.place(CPU)
    hf.load_named(model, hf.named(model), str(tmp_path / "four"), quiet)
    stored = load_file(tmp_path / "four" / "model.safetensors")
    down = model.get_submodule("layers.0.mlp.down").quantized[0]  # type: ignore[union-attr, index]
    assert torch.equal(down.codes, stored["model.layers.0.mlp.down_proj.weight"].flatten())
    torch.testing.assert_close(model(TOKENS), want, rtol=1e-3, atol=1e-3)


def chats(path: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"it is {n}"}]}
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sft(name: str, load: Path, data: Path, *more: str) -> list[str]:
    return [
        "train", "sft", "--name", name, "--preset", "small", "--model.load", str(load), "--data", str(data),
        "--context_length", "64", "--batch.tokens", "256", "--batch.micro", "2", "--max-steps", "4", "--log_every", "1",
        "--parallel.device", "cpu", *more,
    ]  # fmt: skip


def test_a_folder_in_4_bits_trains_with_qlora_alone_and_answers_and_exports(stoker: Stoker, tmp_path: Path) -> None:
    whole = base(tmp_path / "base")
    four, data = in_4_bits(whole, tmp_path / "four"), chats(tmp_path / "chats.jsonl")
    for more in ((), ("--lora",)):
        done = stoker.torch(*sft("no", four, data, *more))
        assert done.code != 0 and "train an adapter beside them with --qlora" in done.err, done.err
        assert "Traceback" not in done.err and not list((stoker.cwd / "runs").glob("*-no/hf"))
    losses = []
    for name, load in (("four", four), ("whole", whole)):
        words = sft(name, load, data, "--qlora", "--lora-rank", "4")
        done = stoker.torch(*words) if name == "four" else trained(stoker, words)
        assert done.code == 0, done.out + done.err
        (run,) = (stoker.cwd / "runs").glob(f"*-{name}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), "the same codes as those that are made while loading"
    (run,) = (stoker.cwd / "runs").glob("*-four")
    for load in (run / "hf", four):
        done = stoker.torch("chat", str(load), *ASK)
        assert done.code == 0, done.err
    done = stoker.torch("export", str(run), str(tmp_path / "out"), "--merge")
    assert done.code == 0, done.err
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    torch.testing.assert_close(logits(tmp_path / "out"), logits(run / "hf"), rtol=0.1, atol=0.3)
    (saved,) = run.glob("checkpoints/step-*4")
    for more, out in (((), "from-steps"), (("--merge",), "from-steps-merged")):
        done = stoker.torch("export", str(saved), str(tmp_path / out), *more)
        assert done.code == 0, done.err
    assert torch.equal(logits(tmp_path / "from-steps"), logits(run / "hf")), "a checkpoint is an adapter, too"
    assert torch.equal(logits(tmp_path / "from-steps-merged"), logits(tmp_path / "out"))
    done = stoker.torch("export", str(four), str(tmp_path / "plain"), "--dtype", "fp32")
    assert done.code == 0, done.err
    assert torch.equal(logits(tmp_path / "plain"), logits(four))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, "bitsandbytes, FP4"),
        ({"bnb_4bit_use_double_quant": False}, "NF4 without double quantization"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "bitsandbytes, 8 bits"),
        ({"quant_method": "gptq"}, '("gptq")'),
        ({"quant_method": "awq"}, '("awq")'),
    ],
)
def test_other_quantized_weights_are_one_line(keys: dict[str, Any], words: str, stoker: Stoker, tmp_path: Path) -> None:
    four = in_4_bits(base(tmp_path / "base"), tmp_path / "four", **keys)
    data = chats(tmp_path / "chats.jsonl")
    for command in (["chat", str(four), *ASK], sft("no", four, data, "--qlora")):
        done = stoker.torch(*command)
        last = done.err.strip().splitlines()[-1]
        assert done.code != 0 and words in last and "only NF4 with double quantization" in last, done.err
        assert "Traceback" not in done.err


def test_damaged_codes_are_one_line(stoker: Stoker, tmp_path: Path) -> None:
    four = in_4_bits(base(tmp_path / "base"), tmp_path / "four")
    whole = load_file(four / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for changed, words in (
        ({name: whole[name][:-32]}, "bytes of codes"),
        ({f"{name}.absmax": whole[f"{name}.absmax"][:-1]}, "absmax has"),
        ({f"{name}.nested_absmax": None}, "nested_absmax is missing"),
        ({f"{name}.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)}, "can't be read"),
    ):
        tensors = {key: tensor for key, tensor in {**whole, **changed}.items() if tensor is not None}
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, four / "model.safetensors")
        done = stoker.torch("chat", str(four), *ASK)
        assert done.code != 0 and words in done.err and "Traceback" not in done.err, done.err
