"""Folders of `transformers`: ours open there and theirs open here, with the same logits; what can't is refused in one line."""

from __future__ import annotations

import http.server
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import pytest
import safetensors.torch as safetensors
import torch
import transformers
from torch import Tensor

from conftest import at_length
from stoker.contract.errors import Refusal
from stoker.contract.frozen import replace
from stoker.contract.host_memory import limit_memory, read_used_memory
from stoker.training.model import hf, hf_config, hf_stream, hf_write
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import Stored, header, shape_of
from stoker.training.model.hf_files import check
from stoker.training.model.hf_stream import Stream
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

LLAMA = ModelConfig(
    layers=2,
    dim=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ff=48,
    vocab_size=96,
    rope_theta=500.0,
    norm_eps=1e-5,
    init_std=0.3,
)
SHAPES = {
    "llama tied": LLAMA,
    "llama untied": replace(LLAMA, tied=False),
    "llama with as many key heads": replace(LLAMA, kv_heads=4),
    "llama with heads that don't divide its width": replace(LLAMA, heads=6),
    "llama 3.1": replace(
        LLAMA, head_dim=16, rope_theta=5e5, rope_factor=8.0, rope_low=1.0, rope_high=4.0, rope_original=64
    ),
    "qwen3 with wide heads": replace(LLAMA, qk_norm=True, head_dim=24, rope_theta=1e6, norm_eps=1e-6),
    "qwen3 untied": replace(LLAMA, qk_norm=True, head_dim=24, tied=False),
}
TOKENS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))


def nothing(_: str) -> None:
    pass


def made(c: ModelConfig, seed: int = 3) -> Decoder:
    model = Decoder(c, 64)
    model.start(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # norms that are all one would hide one taken for another
            if parameter.dim() == 1:
                parameter.copy_(
                    torch.empty(parameter.shape).uniform_(
                        0.5, 1.5, generator=torch.Generator().manual_seed(len(parameter) + seed)
                    )
                )
    return model.eval()


def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def logits_of_theirs(folder: Path) -> Tensor:
    return theirs(folder)(TOKENS).logits.float()


@torch.no_grad()
def logits_of_ours(folder: Path) -> Tensor:
    model = Decoder(shape_of(str(folder)), 64)
    hf.load(model, str(folder), nothing)
    return model.eval()(TOKENS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export to damage."""
    hf.save(made(LLAMA), str(tmp_path / "hf"), say=nothing)
    return tmp_path / "hf"


def refused(action: Callable[[], Any]) -> str:
    with pytest.raises(Refusal) as told:
        action()
    assert "\n" not in told.value.line
    return told.value.line


def change(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize("kind", SHAPES)
def test_an_export_has_the_same_logits_in_transformers(kind: str, tmp_path: Path) -> None:
    model = made(SHAPES[kind])
    hf.save(model, str(tmp_path / "hf"), say=nothing)
    with torch.no_grad():
        ours = model(TOKENS)
    assert ours.std() > 0.3
    torch.testing.assert_close(logits_of_theirs(tmp_path / "hf"), ours, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "llama of 4.x", "mistral"])
def test_a_folder_of_transformers_has_the_same_logits_here(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    size = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 96,
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
    }
    if kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**size, head_dim=24, tie_word_embeddings=True))
    elif kind == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**size, sliding_window=None))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, rms_norm_eps=1e-5))
    model.save_pretrained(tmp_path / "theirs")
    if kind == "llama of 4.x":
        path = tmp_path / "theirs" / "config.json"
        told = json.loads(path.read_text())
        del told["rope_parameters"], told["dtype"], told["head_dim"]
        path.write_text(json.dumps({**told, "rope_theta": 777.0, "rope_scaling": None, "torch_dtype": "float32"}))
    torch.testing.assert_close(
        logits_of_ours(tmp_path / "theirs"), logits_of_theirs(tmp_path / "theirs"), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("kind", SHAPES)
def test_every_bit_of_shape_and_weights_comes_back(kind: str, tmp_path: Path) -> None:
    model = made(SHAPES[kind])
    hf.save(model, str(tmp_path / "hf"), say=nothing)
    back = shape_of(str(tmp_path / "hf"))
    assert json.loads(back.kept) == json.loads((tmp_path / "hf" / "config.json").read_text()) and back.longest == 64
    assert replace(back, load="", family="", kept="", longest=0) == SHAPES[kind]
    other = Decoder(back, 64)
    hf.load(other, str(tmp_path / "hf"), nothing)
    for (name, one), (same, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert name == same and torch.equal(one, two), name
    assert torch.equal(model.tables[0][0], other.tables[0][0])


def test_a_bf16_export_is_the_rounded_model_and_opens_as_bf16(tmp_path: Path) -> None:
    model = made(LLAMA)
    hf.save(model, str(tmp_path / "hf"), say=nothing, dtype=torch.bfloat16)
    opened = theirs(tmp_path / "hf")
    assert opened.dtype == torch.bfloat16
    assert torch.equal(opened.model.layers[1].mlp.down_proj.weight, model.layers[1].mlp.down.weight.bfloat16())
    again = Decoder(LLAMA, 64)
    hf.load(again, str(tmp_path / "hf"), nothing)
    assert torch.equal(again.layers[1].mlp.down.weight, model.layers[1].mlp.down.weight.bfloat16().float())


def test_a_large_model_is_written_in_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_write, "SHARD_BYTES", 9000)
    model = made(SHAPES["llama untied"])
    hf.save(model, str(tmp_path / "hf"), say=nothing)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files == sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert index["metadata"]["total_size"] == sum(parameter.numel() * 4 for parameter in model.parameters())
    for name in files:
        tensors = safetensors.load_file(tmp_path / "hf" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == set(tensors)
        assert len(tensors) == 1 or sum(one.numel() * 4 for one in tensors.values()) <= 9000
    with torch.no_grad():
        ours = model(TOKENS)
    torch.testing.assert_close(logits_of_theirs(tmp_path / "hf"), ours, atol=1e-4, rtol=0)
    assert torch.equal(logits_of_ours(tmp_path / "hf"), ours)


def test_shards_that_transformers_wrote_load(tmp_path: Path) -> None:
    size = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 96,
        "initializer_range": 0.3,
    }
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)).save_pretrained(
        tmp_path / "theirs", max_shard_size="20KB"
    )
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    torch.testing.assert_close(
        logits_of_ours(tmp_path / "theirs"), logits_of_theirs(tmp_path / "theirs"), atol=1e-4, rtol=0
    )


def test_the_tokenizer_lies_beside_and_says_which_token_ends_a_text(tmp_path: Path) -> None:
    bytes_tokenizer().save(str(tmp_path / "tokenizer"))
    c = replace(LLAMA, vocab_size=320)
    hf.save(made(c), str(tmp_path / "hf"), say=nothing, tokenizer_folder=str(tmp_path / "tokenizer"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = theirs(tmp_path / "hf")
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == bytes_tokenizer().end_id
    assert model.generation_config.bos_token_id is None
    ids = tokenizer("hello", return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] <= len("hello") + 3
    hf.save(made(c), str(tmp_path / "chat"), say=nothing, end_ids=(256, 258))
    assert theirs(tmp_path / "chat").generation_config.eos_token_id == [256, 258]


def test_an_export_without_a_tokenizer_ends_at_no_token(folder: Path) -> None:
    assert theirs(folder).generation_config.eos_token_id is None


def test_rows_beyond_the_files_vocabulary_are_the_mean_of_its_own(folder: Path) -> None:
    wide = Decoder(replace(shape_of(str(folder)), vocab_size=128), 64)
    said: list[str] = []
    hf.load(wide, str(folder), said.append)
    file = safetensors.load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(wide.embed.weight[:96], file)
    torch.testing.assert_close(wide.embed.weight[96:], file.mean(0).expand(32, -1))
    assert wide.head is None
    assert "rows 96 to 127" in said[0]


def test_a_smaller_vocabulary_is_refused(folder: Path) -> None:
    line = refused(lambda: hf.load(Decoder(replace(LLAMA, vocab_size=64), 64), str(folder), nothing))
    assert "vocab_size 64" in line and "96 rows" in line


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, "BloomForCausalLM"),
    "a classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "no architecture": ({"architectures": None, "model_type": "bloom"}, "'bloom'"),
    "a bias in words": ({"attention_bias": "some"}, "attention_bias"),
    "llama 3.1's rotary embedding without its numbers": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "low_freq_factor",
    ),
    "another scaling": ({"rope_parameters": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 5e5}}, "dynamic"),
    "yarn without its factor": ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor"),
    "longrope without its factors": ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "long_factor"),
    "longrope with too few factors": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "1 and 1 factors for 4 frequencies",
    ),
    "an older scaling without its factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    "partly turned heads": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "a window that is not used": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "use_sliding_window": False,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 512,
        },
        "sliding window of 512",
    ),
    "layers of another kind": ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    "too few kinds of layers": ({"layer_types": ["full_attention"]}, "does not name 2 layers"),
    "sliding layers": (
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 512},
        "sliding window of 512",
    ),
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, 'quantized ("gptq")'),
    "awq": ({"quantization_config": {"quant_method": "awq", "bits": 4}}, 'quantized ("awq")'),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, 'quantized ("fp8")'),
    "mxfp4 of an unknown architecture": (
        {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}},
        'quantized ("mxfp4")',
    ),
    "another activation": ({"hidden_act": "relu"}, "relu"),
    "no width": ({"hidden_size": None}, "hidden_size"),
    "heads in words": ({"num_attention_heads": "four"}, "num_attention_heads"),
    "key heads that don't divide": ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_shape_our_decoder_would_compute_differently_is_refused(kind: str, folder: Path) -> None:
    keys, word = CONFIGS[kind]
    change(folder, **keys)
    assert word in refused(lambda: shape_of(str(folder)))


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_quantized_weights_are_known_by_the_file_beside_them(name: str, folder: Path) -> None:
    (folder / name).write_text("{}")
    assert f'quantized ("{name}")' in refused(lambda: shape_of(str(folder)))


def test_an_unused_sliding_window_is_no_reason_to_refuse(tmp_path: Path) -> None:
    hf.save(made(SHAPES["qwen3 untied"]), str(tmp_path / "hf"), say=nothing)
    change(tmp_path / "hf", use_sliding_window=False, sliding_window=4096, max_window_layers=1, layer_types=None)
    assert shape_of(str(tmp_path / "hf")).qk_norm


def rewrite(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = safetensors.load_file(folder / "model.safetensors")
    edit(tensors)
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _missing(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.self_attn.k_proj.weight"]


def _left_over(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)


def _other_shape(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(40, 32)


def _integers(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)


def _untied(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (_missing, "model.layers.1.self_attn.k_proj.weight is missing"),
        (_left_over, "model.layers.0.self_attn.q_proj.bias"),
        (_other_shape, "model.layers.0.mlp.up_proj.weight is [40, 32]"),
        (_integers, "model.norm.weight is I8"),
        (_untied, "lm_head.weight differs"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(
    edit: Callable[[dict[str, Tensor]], None], word: str, folder: Path
) -> None:
    rewrite(folder, edit)
    model = made(LLAMA, seed=9)
    before = [parameter.clone() for parameter in model.parameters()]
    assert word in refused(lambda: hf.load(model, str(folder), nothing))
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


def test_a_tied_head_that_is_stored_all_the_same_loads(folder: Path) -> None:
    def twice(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    before = logits_of_ours(folder)
    rewrite(folder, twice)
    assert torch.equal(logits_of_ours(folder), before)


def test_a_cut_file_a_pointer_and_a_missing_shard_are_refused_by_name(folder: Path) -> None:
    c = shape_of(str(folder))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    assert f"{weights} is damaged" in refused(lambda: check(str(folder), c))
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git lfs pull" in refused(lambda: check(str(folder), c))
    weights.unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}))
    assert "model-00001-of-00002.safetensors is missing" in refused(lambda: check(str(folder), c))
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}}))
    assert "../model.safetensors" in refused(lambda: check(str(folder), c))


def test_pickles_are_refused_by_name(folder: Path) -> None:
    c = shape_of(str(folder))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in refused(lambda: check(str(folder), c))


def test_a_folder_without_a_config_and_a_broken_one_are_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": ')
    assert "JSON" in refused(lambda: shape_of(str(folder)))
    (folder / "config.json").unlink()
    assert "model.safetensors" in refused(lambda: shape_of(str(folder)))
    assert "no such folder" in refused(lambda: shape_of(str(folder / "elsewhere")))


def test_shape_and_check_need_no_torch(folder: Path) -> None:
    script = (
        "import sys; from stoker.training.model.hf_config import shape_of; from stoker.training.model.hf_files import check; from stoker.training.model import hf_hub\n"
        "print(len(check(sys.argv[1], shape_of(sys.argv[1])))); assert not {'torch', 'numpy', 'safetensors', 'huggingface_hub'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "20\n"), done.stderr


def test_a_second_export_replaces_the_first_and_leaves_nothing_else(folder: Path) -> None:
    (folder.parent / f".hf.{os.uname().nodename}-999999999.tmp").mkdir()  # of an export that was killed
    model = made(LLAMA, seed=11)
    hf.save(model, str(folder), say=nothing)
    assert os.listdir(folder.parent) == ["hf"]
    with torch.no_grad():
        assert torch.equal(logits_of_ours(folder), model(TOKENS))


def test_a_folder_with_somebodys_files_is_not_replaced(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    assert "notes.txt" in refused(lambda: hf.save(made(LLAMA), str(folder), say=nothing))
    assert (folder / "notes.txt").read_text() == "mine" and os.listdir(folder.parent) == ["hf"]


def test_an_export_that_fails_half_way_keeps_the_one_before(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    model = made(LLAMA, seed=12)
    tensors = dict(hf.named(model))
    drawn: list[str] = []

    def some() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            drawn.append(name)
            yield name, tensor[:-1] if name == "layers.0.mlp.down.weight" else tensor

    line = refused(lambda: hf.save_from(some(), LLAMA, str(folder), context_length=64, say=nothing))
    assert "layers.0.mlp.down.weight" in line
    assert drawn == list(tensors)  # other ranks gather every tensor, so this one must as well
    assert (folder / "model.safetensors").read_bytes() == before and os.listdir(folder.parent) == ["hf"]


def test_a_read_only_place_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "can't be written" in refused(lambda: hf.save(made(LLAMA), str(tmp_path / "file" / "hf"), say=nothing))


SHARDED = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from stoker.contract.errors import Refusal
from stoker.training.model import hf
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import shape_of
rank, work = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{work}/meeting", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
model = Decoder(shape_of(f"{work}/hf"), 64)
for block in (*model.layers, model):
    fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
hf.load(model, f"{work}/hf", print)
with torch.no_grad():
    model(torch.zeros(1, 4, dtype=torch.long))  # leaves the outermost weights gathered and rounded to bf16
hf.save(model, f"{work}/again", say=print, write=rank == 0)
if rank == 0:
    open(f"{work}/taken", "w").close()
try:
    hf.save(model, f"{work}/taken", say=print, write=rank == 0)  # rank 0 can't, and nobody hangs
except Refusal as refusal:
    print("refused", refusal.line)
dist.barrier()
print("done", flush=True)
os._exit(0)  # torch 2.13's gloo may abort in its own shutdown
"""


@at_length
def test_ranks_of_a_sharded_model_load_and_save_together(folder: Path) -> None:
    work = folder.parent
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), str(work)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert all(text.endswith("done\n") for text in said), said
    assert "refused" in said[0] and "refused" not in said[1]
    assert (work / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as one model needs."""

    folder: Path
    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, whole: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        entries = [
            {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": "1" * 40}
            for one in self.folder.iterdir()
        ]
        if path.startswith("/api/models/maker/small/revision/"):
            body = json.dumps(
                {"id": "maker/small", "sha": self.commit, "siblings": [{"rfilename": one["path"]} for one in entries]}
            ).encode()
        elif path.startswith("/api/models/maker/small/tree/"):
            body = json.dumps(entries).encode()
        elif path.startswith("/maker/small/resolve/") and (self.folder / name).exists():
            body = (self.folder / name).read_bytes()
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()
        if whole:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


HUB = """
import sys
from stoker.contract.errors import Refusal
from stoker.training.model.hf_hub import folder_of
from stoker.training.model.hf_config import shape_of
from stoker.training.model.hf_files import check
for name in sys.argv[1:]:
    try:
        folder = folder_of(name, lambda text: None)
        print("found", len(check(folder, shape_of(folder))))
    except Refusal as refusal:
        print("refused", refusal.line)
"""


def test_a_hub_id_is_fetched_once_and_refused_in_one_line_where_that_fails(folder: Path, tmp_path: Path) -> None:
    (folder / "pytorch_model.bin").write_text("never fetched")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Serving", (Hub,), {"folder": folder}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    gone = (
        "HF_TOKEN",
        "HF_HUB_OFFLINE",
        "HF_HUB_CACHE",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "http_proxy",
        "https_proxy",
        "ALL_PROXY",
        "all_proxy",
    )
    env = {key: value for key, value in os.environ.items() if key not in gone}
    env |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }

    def ask(*names: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", HUB, *names], env=env, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first = ask("maker/small", "maker/unknown", "./not/there")
    assert first[0] == "found 20"
    assert first[1].startswith("refused model maker/unknown: no such folder here, and it can't be fetched from the hub")
    assert first[2].startswith("refused model ./not/there does not exist") and len(first) == 3
    assert not list((tmp_path / "home").rglob("pytorch_model.bin"))
    server.shutdown()
    server.server_close()
    shutil.rmtree(folder)
    after = ask("maker/small", "maker/other")
    assert after[0] == "found 20" and after[1].startswith("refused model maker/other") and len(after) == 2


def test_data_of_another_tokenizer_than_the_weights_is_refused(tmp_path: Path) -> None:
    from stoker.cli.train import _check_weights
    from stoker.training.data.learn import train
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    train(["some words and some more " * 50], 300, str(tmp_path / "words"))
    bytes_tokenizer().save(str(tmp_path / "bytes"))
    hf.save(made(replace(LLAMA, vocab_size=300)), str(tmp_path / "hf"), say=nothing)

    def ready(name: str) -> Any:
        return types.SimpleNamespace(vocab_size=300, tokenizer=str(tmp_path / name))

    _check_weights(
        ModelConfig(load=str(tmp_path / "hf")), ready("bytes")
    )  # weights without a tokenizer: nothing to compare
    shutil.copy(tmp_path / "words" / "tokenizer.json", tmp_path / "hf")
    _check_weights(ModelConfig(load=str(tmp_path / "hf")), ready("words"))
    line = refused(lambda: _check_weights(ModelConfig(load=str(tmp_path / "hf")), ready("bytes")))
    assert (
        "the data's tokenizer differs from that of" in line
        and " here; " in line
        and f"--tokenizer.path {tmp_path / 'hf'}" in line
    )


def check_pieces(device: torch.device, folder: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    tensors = {
        "long": torch.randn(3, hf_stream.PIECE // 4 + 1001, generator=generator).bfloat16(),
        "wide": torch.randn(hf_stream.SLOTS * 2 + 1, hf_stream.PIECE // 4, generator=generator),
        "short": torch.randn(7, generator=generator).half(),
    }
    safetensors.save_file(tensors, folder / "model.safetensors")
    with closing(hf_stream.Stream(device, staged=True)) as stream:
        for name, one in header(str(folder / "model.safetensors")).items():
            assert torch.equal(stream.read(one).cpu(), tensors[name])
            for dtype in (torch.float32, torch.bfloat16):
                out = torch.full(tensors[name].shape, torch.nan, dtype=dtype, device=device)
                assert torch.equal(stream.fill(one, out).cpu(), tensors[name].to(dtype)), (name, dtype)


def test_weights_that_are_read_in_pieces_are_whole(tmp_path: Path) -> None:
    check_pieces(torch.device("cpu"), tmp_path)


@at_length
def test_weights_are_converted_some_rows_at_a_time(tmp_path: Path) -> None:
    rows, columns = 1 << 17, 1 << 10
    whole = torch.arange(rows, dtype=torch.float32).to(torch.bfloat16)[:, None].expand(rows, columns).contiguous()
    path, size = tmp_path / "weights", whole.numel() * 2
    path.write_bytes(whole.view(torch.uint8).numpy().data)
    out = torch.empty(rows, columns)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit_memory(read_used_memory() + size // 2)
    try:
        Stream(torch.device("cpu")).fill(Stored(str(path), "BF16", (rows, columns), 0, size), out)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert torch.equal(out, whole.float())


def test_a_tensor_without_numbers_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from safetensors.torch import save_file

    from stoker.training.model.hf_stream import read_stored

    save_file({"x": torch.zeros(0, 4)}, tmp_path / "x.safetensors")
    assert read_stored(hf_config.header(str(tmp_path / "x.safetensors"))["x"]).shape == (0, 4)
