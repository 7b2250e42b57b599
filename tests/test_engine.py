"""model.engine transformers: an architecture that no family knows trains, resumes and exports; the rest is refused in one line."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers

from conftest import Done, Stoker, at_length
from forked_ranks import Server, program, server
from stoker.contract.errors import Refusal
from stoker.training.checkpoint.reading import open_checkpoint
from stoker.training.model import hf, outside
from stoker.training.model.attention import Documents, documents
from stoker.training.model.config import ModelConfig
from stoker.training.model.hf_config import check_adapters_outside, shape_for, shape_of
from stoker.training.model.ready import make_ready
from stoker.training.parallel.config import ComputeConfig
from stoker.training.serve.batch import BatchEngine
from stoker.training.tokenizer.tokenizer import bytes_tokenizer
from test_sft import chats

TOKENS = torch.randint(0, 272, (2, 40), generator=torch.Generator().manual_seed(1))


def packed_rows(segments: list[list[int]]) -> Documents | None:
    return documents(torch.tensor(segments), torch.device("cpu"))


REMOTE = {
    "configuration_own.py": """
from transformers import PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "own"
    def __init__(self, width=16, vocab_size=272, **more):
        self.width, self.vocab_size, self.hidden_size, self.num_hidden_layers = width, vocab_size, width, 1
        super().__init__(**more)
""",
    "modeling_own.py": """
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_own import OwnConfig

class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    _tied_weights_keys = {}
    def __init__(self, config):
        super().__init__(config)
        self.words, self.out = nn.Embedding(config.vocab_size, config.width), nn.Linear(config.width, config.vocab_size)
        self.post_init()
    def forward(self, input_ids, attention_mask=None, use_cache=None, **more):
        return CausalLMOutput(logits=self.out(self.words(input_ids)))
""",
}


def nothing(_: str) -> None:
    pass


@pytest.fixture
def bloom(tmp_path: Path) -> Path:
    """With positions that no option of our block has."""
    torch.manual_seed(3)
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.BloomConfig(
        hidden_size=32, n_layer=2, n_head=4, vocab_size=272, attention_dropout=0.1, **none
    )
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    bytes_tokenizer().save(str(tmp_path / "bloom"))
    return tmp_path / "bloom"


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def words_for(folder: Path, *words: str) -> list[str]:
    return [
        "--model.load", str(folder), "--data", "chats.jsonl", "--data.validation", "0", "--parallel.device", "cpu",
        "--context_length", "64", "--batch.micro", "2", "--learning-rate", "1e-3", "--max-steps", "6", "--log_every", "1",
        "--checkpoint.every_steps", "3", "--deterministic", "true", *words,
    ]  # fmt: skip


def trained(stoker: Stoker, folder: Path, name: str, *words: str) -> tuple[Done, Path]:
    (stoker.cwd / "chats.jsonl").write_text(chats(60, 0))
    done = stoker.torch("train", "sft", "--no-preflight", "--name", name, *words_for(folder, *words))
    return done, next((path for path in (stoker.cwd / "runs").glob(f"*-{name}") if not path.is_symlink()), Path())


# The recipes as torchrun would start them, one rank each, forked from a process that has torch, transformers and peft already.
FORKS = program("""
import importlib.util
import torch, torch._dynamo, transformers
if importlib.util.find_spec("peft"):
    import peft
from stoker.training.recipes import dpo, sft, stage

def work(job, rank):
    return stage.run({"dpo": dpo, "sft": sft}[job["stage"]].main, job["words"])
""")


class Forks:
    def __init__(self, ranks: Server, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder

    def __call__(self, name: str, words: list[str], stage: str = "sft") -> tuple[int, str, Path]:
        """Exit code, all that it printed, and its run directory."""
        folder = self._folder / name
        folder.mkdir()
        (folder / "chats.jsonl").write_text(chats(60, 0))
        self._ranks.begin(1, folder, stage=stage, words=words)
        (code,) = self._ranks.codes()
        return code, (folder / "rank-0.log").read_text(), next((folder / "runs").glob("torchrun-*"), folder / "no run")


@pytest.fixture(scope="module")
def fork_server() -> Iterator[Server]:
    with server(FORKS) as ranks:
        yield ranks


@pytest.fixture
def forks(fork_server: Server, tmp_path: Path) -> Forks:
    return Forks(fork_server, tmp_path)


@at_length
def test_an_unknown_architecture_trains_resumes_and_exports(stoker: Stoker, forks: Forks, bloom: Path) -> None:
    whole, run = trained(stoker, bloom, "whole")
    assert whole.code == 0, whole.out[-2000:] + whole.err[-3000:]
    said = whole.out + whole.err
    assert said.count("BloomForCausalLM is computed by transformers' own module (slower, no fused kernels") == 1, said
    curve = losses(run)
    assert len(curve) == 6 and curve[-1] < curve[0]

    half = run / "checkpoints" / "step-3"
    half = half if half.exists() else sorted((run / "checkpoints").glob("step-*"))[0]
    code, said, other = forks("resumed", words_for(bloom, "--checkpoint.resume", str(half)))
    assert code == 0, said
    assert losses(other) == curve[3:]

    before, after = (json.loads((folder / "config.json").read_text()) for folder in (bloom, run / "hf"))
    assert {key: after[key] for key in after if after[key] != before.get(key)} == {
        "eos_token_id": bytes_tokenizer().special["<|im_end|>"]
    }, "what chats taught"
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "hf").eval()
    again = outside.Outside(shape_for(ModelConfig(), str(run / "hf")), 64).eval()
    outside.load(again, str(run / "hf"), nothing)
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS), model(TOKENS).logits)
    assert (run / "hf" / "tokenizer.json").exists()

    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    exported = stoker.torch("export", str(last), "out")
    assert exported.code == 0, exported.err
    by_hand = transformers.AutoModelForCausalLM.from_pretrained(stoker.cwd / "out")
    for one, two in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(one, two)


SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48, "vocab_size": 272,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "GPTNeoX": {},
    "Granite": {"logits_scaling": 4.0},  # the head's product is not the logits
    "Mamba": {"state_size": 4},  # no attention at all
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_learn_and_export(name: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **OTHERS[name]})
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path / "theirs")
    model = outside.Outside(shape_for(ModelConfig(), str(tmp_path / "theirs")), 64)
    outside.load(model, str(tmp_path / "theirs"), nothing)
    optimizer, packed = torch.optim.SGD(model.parameters(), lr=0.1), packed_rows([[0] * 11 + [1] * 29] * 2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(model(TOKENS, TOKENS.roll(-1, 1), torch.tensor(1 / 80), packed))
        losses[-1].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]
    model.eval()
    hf.save(model, str(tmp_path / "again"), say=nothing)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        alone = torch.cat([model(TOKENS[:, :11]), model(TOKENS[:, 11:])], dim=1)
        torch.testing.assert_close(model(TOKENS, None, None, packed), alone)
        torch.testing.assert_close(other(TOKENS).logits, model(TOKENS))


def test_packed_texts_are_computed_alone_and_the_loss_is_the_decoders(bloom: Path) -> None:
    model = outside.Outside(shape_for(ModelConfig(), str(bloom)), 64)
    outside.load(model, str(bloom), nothing)
    packed = packed_rows([[0] * 11 + [1] * 29, [0] * 40])
    with torch.no_grad():
        alone = torch.cat([model(TOKENS[:, :11]), model(TOKENS[:, 11:])], dim=1)
        together = model(TOKENS, None, None, packed)
        torch.testing.assert_close(together[0], alone[0])
        torch.testing.assert_close(together[1], model(TOKENS)[1])
        targets = TOKENS.roll(-1, 1)
        targets[0, :7] = -100
        want = torch.nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), targets.flatten(), reduction="sum") / 73
        torch.testing.assert_close(model(TOKENS, targets, torch.tensor(1 / 73)), want)
    model.train()
    assert torch.equal(model(TOKENS), model(TOKENS)), "its own dropout is off: ours says how much is dropped"


def test_it_answers_what_transformers_answers(stoker: Stoker, bloom: Path) -> None:
    shape = shape_for(ModelConfig(), str(bloom))
    model = outside.opened(shape, 64, torch.float32, torch.device("cpu"), nothing).eval()
    prompts = [TOKENS[0, :length].tolist() for length in (3, 21, 9, 9)]
    want = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        ids = model.module.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=8, do_sample=False)
        want.append(ids[0, len(prompt) :].tolist())
    engine = BatchEngine(model, rows=3, length=64)
    assert engine.generate(prompts, new_tokens=8, stop=(), temperature=0) == want
    assert (
        list(engine.stream(prompts[1], new_tokens=8, stop={want[1][4]}, temperature=0))
        == want[1][: want[1].index(want[1][4]) + 1]
    )
    chat = stoker.torch(
        "chat", str(bloom), "--prompt", "hello", "--raw", "--max-tokens", "4", "--device", "cpu", "--context", "0"
    )
    assert chat.code == 0, chat.err


def refusal(folder: Path, **asked: Any) -> str:
    with pytest.raises(Refusal) as told:
        shape_for(ModelConfig(**asked), str(folder))
    assert "\n" not in told.value.line
    return told.value.line


def rewrite(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def test_what_it_has_not_is_refused_in_one_line(forks: Forks, bloom: Path) -> None:
    assert "BloomForCausalLM" in refusal(bloom, engine="native")
    with pytest.raises(Refusal, match=r"model\.engine transformers"):
        shape_of(str(bloom))
    for words, what in (
        (("--optim.kind", "muon"), "optim.kind muon"),
        (("--model.vocab_size", "320"), "a new model.vocab_size"),
    ):
        code, said, _ = forks(f"refused{words[0]}", words_for(bloom, *words))
        assert code not in (0, 1) and f"model.engine transformers does not support {what}" in said, said
        assert "Traceback" not in said
    model = outside.Outside(shape_for(ModelConfig(), str(bloom)), 64)
    for compute in (ComputeConfig(compile="on"), ComputeConfig(fp8="tensorwise")):
        with pytest.raises(Refusal, match="does not work with model"):
            make_ready(model, compute, torch.device("cpu"), nothing)
    rewrite(bloom, architectures=["BloomForSequenceClassification"])
    assert "not a causal language model" in refusal(bloom)
    rewrite(bloom, architectures=["BloomForCausalLM"], quantization_config={"quant_method": "awq"})
    assert "quantized" in refusal(bloom)


def test_weights_that_are_missing_cut_or_pickled_are_refused_for_every_architecture(bloom: Path) -> None:
    weights = bloom / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-10])
    assert "is damaged: it is cut off" in refusal(bloom) and "download it again" in refusal(bloom)
    weights.rename(bloom / "pytorch_model.bin")
    line = refusal(bloom)
    assert "is a pickle" in line and f'save_pretrained(sys.argv[1])" {bloom}' in line
    (bloom / "pytorch_model.bin").unlink()
    assert "it has no weights" in refusal(bloom)


@at_length
def test_the_conversion_that_the_refusal_prints_makes_the_folder_load(bloom: Path) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(bloom / "model.safetensors"), bloom / "pytorch_model.bin")
    (bloom / "model.safetensors").unlink()
    command = refusal(bloom).partition("safetensors: ")[2]
    assert command.startswith("python -c ")
    done = subprocess.run(
        command.replace("python", sys.executable, 1), shell=True, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert shape_for(ModelConfig(), str(bloom)).engine == "transformers"


def test_code_of_the_folder_runs_only_with_trust(stoker: Stoker, bloom: Path) -> None:
    folder = bloom.parent / "own"
    folder.mkdir()
    for name, text in REMOTE.items():
        (folder / name).write_text(text)
    keys = {
        "architectures": ["OwnForCausalLM"], "model_type": "own", "vocab_size": 272, "width": 16,
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(keys))
    from safetensors.torch import load_file, save_file

    draw = torch.Generator().manual_seed(random.Random(2).randrange(1000))
    tensors = {
        "words.weight": torch.randn(272, 16, generator=draw), "out.weight": torch.randn(272, 16, generator=draw), "out.bias": torch.zeros(272),
    }  # fmt: skip
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (bloom / name).exists():
            shutil.copy(bloom / name, folder)
    line = refusal(folder)
    assert "OwnForCausalLM runs Python code that comes with the folder" in line and "--trust-remote-code" in line
    refused, _ = trained(stoker, folder, "refused")
    assert refused.code not in (0, 1) and "--trust-remote-code" in refused.err
    done, run = trained(stoker, folder, "trusted", "--trust-remote-code", "true")
    assert done.code == 0, done.out[-2000:] + done.err[-3000:]
    assert not torch.equal(load_file(run / "hf" / "model.safetensors")["out.weight"], tensors["out.weight"])
    assert (run / "hf" / "modeling_own.py").read_text() == REMOTE["modeling_own.py"]


def test_without_transformers_it_is_refused_with_what_to_install(bloom: Path) -> None:
    script = (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'transformers' else real(name, *more)\n"
        "from stoker.contract.errors import Refusal\n"
        "from stoker.training.model.config import ModelConfig; from stoker.training.model.hf_config import shape_for\n"
        "try: shape_for(ModelConfig(), sys.argv[1])\n"
        "except Refusal as refusal: print(refusal.line)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(bloom)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "pip install transformers" in done.stdout, done.stderr


def test_adapters_on_an_unknown_architecture_go_through_peft(stoker: Stoker, forks: Forks, bloom: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: adapters of transformers' own modules need it")
    more = ("--lora", "--lora_rank", "4", "--learning-rate", "1e-2")
    code, said, run = forks("whole", words_for(bloom, *more))
    assert code == 0 and "adapter: lora by peft, rank 4" in said, said
    curve = losses(run)
    assert len(curve) == 6 and curve[-1] < curve[0] - 0.02, curve
    held = open_checkpoint(str(sorted((run / "checkpoints").glob("step-*"))[0])).tensors
    assert held and all("lora_" in name for name in held), "the frozen weights stay where they are"

    half = sorted((run / "checkpoints").glob("step-*"))[0]
    code, said, resumed = forks("again", words_for(bloom, *more, "--checkpoint.resume", str(half)))
    assert code == 0 and "resumes at step 3" in said, said
    assert losses(resumed) == curve[3:]

    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(str(run / "hf")).eval()
    shape = shape_for(ModelConfig(), str(run / "hf"))
    ours = outside.opened(shape, 64, torch.float32, torch.device("cpu"), nothing).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)
    code, said, _ = forks("on", words_for(run / "hf", *more, "--max-steps", "1"))
    assert code == 0 and f"adapter from {run / 'hf'}: rank 4" in said, said
    done = stoker.torch("chat", str(run / "hf"), "--prompt", "hello", "--max-tokens", "3", "--device", "cpu")
    assert done.code == 0, done.err

    code, said, _ = forks("four", words_for(bloom, "--qlora"))
    assert code != 0 and "the frozen weights stay whole; use --lora" in said, said
    code, said, _ = forks("targets", words_for(bloom, "--lora", "--lora_targets", "wq"))
    assert code != 0 and "adapter.lora_targets wq: " in said and "Traceback" not in said, said


def test_dpo_of_adapters_on_an_unknown_architecture_compares_with_the_model_without_them(
    forks: Forks, bloom: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="peft is not installed: adapters of transformers' own modules need it")
    rows = [{"prompt": f"is {n}?", "chosen": f"yes {n}", "rejected": f"no {n} it is"} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "--model.load", str(bloom), "--dpo.pairs", str(tmp_path / "pairs.jsonl"), "--preset", "small", "--lora",
        "--context_length", "128", "--batch.micro", "2", "--batch.tokens", "512", "--learning-rate", "1e-2",
        "--max-steps", "10", "--log_every", "1", "--parallel.device", "cpu", "--eval_every", "0",
    ]  # fmt: skip
    code, said, run = forks("prefer", words, stage="dpo")
    assert code == 0, said
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert abs(lines[0]["reward_margin"]) < 1e-4 < lines[9]["reward_margin"], "the reference stays where it was"


def test_without_peft_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Refusal, match="pip install peft"):
        check_adapters_outside("lora")
    check_adapters_outside("off")
