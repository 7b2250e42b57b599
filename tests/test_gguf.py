"""`stoker export --gguf`: read back by the package's own reader, and computed as readers of GGUF compute it, the logits are transformers'."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from published import PUBLISHED
from stoker.cli import export
from stoker.contract.errors import EX_CANTCREAT, EX_DATAERR, Refusal
from stoker.contract.tensor_header import pack_header
from stoker.training.model.config import ModelConfig
from stoker.training.model.hf_config import config_of
from stoker.training.model.hf_files import places
from stoker.training.tokenizer.tokenizer import Tokenizer, load

BANDS = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 500.0,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama", {}),
    "llama with bands and biases": ("Llama", "llama", {"rope_parameters": BANDS, "attention_bias": True, "mlp_bias": True}),
    "llama stretched": ("Llama", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}),
    "qwen2": ("Qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 16}),
}  # fmt: skip
NO_GGUF = "the package gguf is not installed"


def saved(where: Path, kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Tokenizer:
    name, _, keys = MODELS[kind]
    PUBLISHED["llama-3"].folder(where)
    words = load(str(where))
    config = getattr(transformers, f"{name}Config")(
        **{
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
            "vocab_size": words.vocab_size + 5, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": None,
            "bos_token_id": words.start[0], "eos_token_id": words.special["<|eot_id|>"], **keys, **more,
        }
    )  # fmt: skip
    torch.manual_seed(2)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.to(dtype).save_pretrained(where)
    return words


class Read:
    """What the file says, and the logits that follow."""

    def __init__(self, path: Path) -> None:
        gguf = pytest.importorskip("gguf", reason=NO_GGUF)
        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.kind = self.fields["general.architecture"]
        self.types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        self.tensors = {
            tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
            for tensor in reader.tensors
        }

    def of(self, key: str) -> Any:
        return self.fields[f"{self.kind}.{key}"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.of("attention.layer_norm_rms_epsilon")
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.tensors[f"{name}.weight"]

    def turn(self, x: Tensor) -> Tensor:
        """[H, T, D]: neighbours together where the architecture is llama, else the halves of a head."""
        size = x.shape[-1]
        frequency = self.of("rope.freq_base") ** (-torch.arange(0, size, 2).double() / size)
        if "rope_freqs.weight" in self.tensors:
            frequency = frequency / self.tensors["rope_freqs.weight"].double()
        if f"{self.kind}.rope.scaling.factor" in self.fields:
            assert self.of("rope.scaling.type") == "linear"
            frequency = frequency / self.of("rope.scaling.factor")
        angle = torch.outer(torch.arange(x.shape[1]).double(), frequency)
        cos, sin = angle.cos().float(), angle.sin().float()
        if self.kind == "llama":
            one, two = x[..., 0::2], x[..., 1::2]
            return torch.stack([one * cos - two * sin, two * cos + one * sin], -1).flatten(-2)
        one, two = x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    def logits(self, ids: Tensor) -> Tensor:
        heads, kv = self.of("attention.head_count"), self.of("attention.head_count_kv")
        size, length = self.of("attention.key_length"), len(ids)
        x = self.tensors["token_embd.weight"][ids]
        for layer in range(self.of("block_count")):
            at = f"blk.{layer}."
            y = self.norm(x, f"{at}attn_norm")
            q, k, v = (
                self.linear(y, f"{at}attn_{one}").view(length, count, size).transpose(0, 1)
                for one, count in (("q", heads), ("k", kv), ("v", kv))
            )
            if f"{at}attn_q_norm.weight" in self.tensors:
                q, k = self.norm(q, f"{at}attn_q_norm"), self.norm(k, f"{at}attn_k_norm")
            q, k = self.turn(q), self.turn(k)
            k, v = (some.repeat_interleave(heads // kv, 0) for some in (k, v))
            scores = q @ k.transpose(1, 2) / math.sqrt(size)
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
            y = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
            x = x + self.linear(y, f"{at}attn_output")
            y = self.norm(x, f"{at}ffn_norm")
            gate, up = self.linear(y, f"{at}ffn_gate"), self.linear(y, f"{at}ffn_up")
            x = x + self.linear(F.silu(gate) * up, f"{at}ffn_down")
        x = self.norm(x, "output_norm")
        return F.linear(x, self.tensors.get("output.weight", self.tensors["token_embd.weight"]))


@pytest.mark.parametrize("kind", MODELS)
def test_the_logits_computed_from_the_file_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    saved(tmp_path / "model", kind)
    assert export.main([str(tmp_path / "model"), str(tmp_path / "out.gguf"), "--gguf"]) == 0
    read = Read(tmp_path / "out.gguf")
    assert read.kind == MODELS[kind][1] and set(read.types.values()) == {"F32"}
    ids = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(read.logits(ids), model(ids[None]).logits[0], atol=1e-4, rtol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.gguf"], "nothing half-written"


def test_the_file_holds_tokenizer_template_and_weights_as_they_are_stored(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    words = saved(tmp_path / "model", "llama", torch.bfloat16)
    assert export.main([str(tmp_path / "model"), str(tmp_path / "out.gguf"), "--gguf"]) == 0
    read = Read(tmp_path / "out.gguf")
    assert {read.types[name] for name in read.types if "norm" not in name} == {"BF16"}
    assert {read.types[name] for name in read.types if "norm" in name} == {"F32"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert torch.equal(read.tensors["token_embd.weight"].bfloat16(), theirs.model.embed_tokens.weight)
    assert torch.equal(read.tensors["blk.1.ffn_down.weight"].bfloat16(), theirs.model.layers[1].mlp.down_proj.weight)
    told = {name.removeprefix("tokenizer."): value for name, value in read.fields.items() if name.startswith("tok")}
    assert told["ggml.model"] == "gpt2" and told["ggml.pre"] == "gpt-2" and told["ggml.add_bos_token"] is True
    assert told["ggml.bos_token_id"] == words.start[0] and told["ggml.eos_token_id"] == words.special["<|eot_id|>"]
    assert told["chat_template"] == PUBLISHED["llama-3"].template
    stored = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    tokens = told["ggml.tokens"]
    assert all(tokens[number] == text for text, number in stored["model"]["vocab"].items())
    assert [tokens[one["id"]] for one in stored["added_tokens"]] == [one["content"] for one in stored["added_tokens"]]
    assert [told["ggml.token_type"][one["id"]] for one in stored["added_tokens"]] == [3] * len(stored["added_tokens"])
    assert len(tokens) == words.vocab_size + 5 and told["ggml.token_type"][-5:] == [5] * 5
    assert told["ggml.merges"] == [" ".join(pair) for pair in stored["model"]["merges"]]


@pytest.mark.parametrize("flags", [[], ["--gguf"]], ids=["folder", "file"])
def test_an_earlier_export_is_replaced_only_with_force(flags: list[str], tmp_path: Path) -> None:
    if flags:
        pytest.importorskip("gguf", reason=NO_GGUF)
    saved(tmp_path / "model", "llama")
    out = tmp_path / ("out.gguf" if flags else "out")
    given = [str(tmp_path / "model"), str(out), *flags]
    assert export.main([*given, "--dtype", "fp32"]) == 0
    written = out if flags else out / "model.safetensors"
    before = written.read_bytes()
    with pytest.raises(Refusal, match="--force") as refused:
        export.main([*given, "--dtype", "bf16"])
    assert refused.value.code == EX_CANTCREAT and "\n" not in refused.value.line and written.read_bytes() == before
    assert export.main([*given, "--dtype", "bf16", "--force"]) == 0
    assert len(written.read_bytes()) < len(before)


def test_what_it_can_not_hold_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "model", "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)

    def refused(*words: str) -> str:
        with pytest.raises(Refusal) as told:
            export.main([str(tmp_path / "model"), *words, "--gguf"])
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        return told.value.line

    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "gguf", None)
        assert "pip install gguf" in refused(str(tmp_path / "out.gguf"))
    pytest.importorskip("gguf", reason=NO_GGUF)
    assert "ends in .gguf" in refused(str(tmp_path / "out"))
    assert "has no sliding window" in refused(str(tmp_path / "out.gguf"))
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_sliding_window": False, "layer_types": None}))
    words = tmp_path / "model" / "tokenizer.json"
    told = json.loads(words.read_text())
    words.write_text(json.dumps({**told, "normalizer": {"type": "Lowercase"}}))
    assert "its tokenizer is not a byte-level BPE" in refused(str(tmp_path / "out.gguf"))


NUMBERS = {
    "a context beyond 32 bits": {"max_position_embeddings": 1 << 40},
    "a context below nothing": {"max_position_embeddings": -5},
    "a base beyond fp32": {"rope_theta": 1e300},
}


@pytest.mark.parametrize("keys", NUMBERS.values(), ids=NUMBERS)
def test_a_models_numbers_that_gguf_has_no_room_for_are_one_line(tmp_path: Path, keys: dict[str, Any]) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from published import PUBLISHED
    from stoker.cli import export

    folder = tmp_path / "model"
    PUBLISHED["llama-3"].folder(folder)
    c = ModelConfig(layers=1, dim=16, heads=1, kv_heads=1, head_dim=16, ff=16, vocab_size=448)
    (folder / "config.json").write_text(json.dumps({**config_of(c, 64, "float32"), **keys}))
    sizes = {part.name: ("F32", part.stored) for place in places(c) for part in place.parts}
    numbers = sum(math.prod(size) for _, size in sizes.values())
    (folder / "model.safetensors").write_bytes(pack_header(sizes, {"format": "pt"}) + bytes(4 * numbers))
    with pytest.raises(Refusal, match="can't be read") as problem:
        export.main([str(folder), str(tmp_path / "out.gguf"), "--gguf"])
    assert problem.value.code == EX_DATAERR and not [*tmp_path.glob("out*")]
