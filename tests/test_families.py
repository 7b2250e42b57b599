"""Families: one file each, inside the package or outside; what each says of its block computes what transformers does."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import stoker
from conftest import at_length, at_length_but
from stoker.contract.errors import Refusal
from stoker.contract.frozen import replace
from stoker.training.generate.cached import kernels_for
from stoker.training.loop.resume import check as check_resume
from stoker.training.model import families, hf, hf_config
from stoker.training.model.attention import documents
from stoker.training.model.config import OPTIONS, ModelConfig, check_options, lacking, matmul_parameters, parameters
from stoker.training.model.decoder import Decoder
from stoker.training.model.families import ConfigJson, register
from stoker.training.model.hf_config import shape_of
from stoker.training.model.loss import token_logprobs
from stoker.training.serve.batch import BatchEngine

SMALL = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ff=48, vocab_size=96, init_std=0.3)
TOKENS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
SIZE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 96,
    "initializer_range": 0.3, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WINDOWED = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2}


def nothing(_: str) -> None:
    pass


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
BANDS = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 500.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16, "rope_theta": 500.0,
}  # fmt: skip
GEMMA = {**WINDOWED, "head_dim": 16, "query_pre_attn_scalar": 24}
EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.3}
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("Llama", {"rope_parameters": BANDS, "head_dim": 16}),
    "llama stretched evenly": ("Llama", {"rope_parameters": LINEAR}),
    "llama with yarn": ("Llama", {"rope_parameters": YARN}),
    "llama with yarn of its own": (
        "Llama",
        {"rope_parameters": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.3}},
    ),
    "llama with gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama with exact gelu": ("Llama", {"hidden_act": "gelu", "tie_word_embeddings": True}),
    "mistral with a window": ("Mistral", {"sliding_window": 7}),
    "mistral with a window beyond the context": ("Mistral", {"sliding_window": 4096}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 with windows and biases": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "attention_bias": True},
    ),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3",
        {
            **GEMMA,
            "rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 9e3}, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
        },
    ),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4}}),
    "phi3 with a window": ("Phi3", {"sliding_window": 7}),
    "phi3 with longrope": (
        "Phi3",
        {"rope_parameters": LONG, "max_position_embeddings": 64, "original_max_position_embeddings": 16},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0]}),
    "gpt2": ("GPT2", {}),
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 4, "sliding_window": 7}),
    "qwen3 with experts": (
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 6, "moe_intermediate_size": 16, "mlp_only_layers": [1], "norm_topk_prob": True, "head_dim": 16},
    ),
    "qwen3 with experts whose shares don't add up": (
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.0},
    ),
}  # fmt: skip


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = dict(families._families())
    yield
    families._registered.clear()
    families._registered.update(before)


def made(kind: str) -> Any:
    """A model of transformers, with no weight at the value it starts from: a bias of 0 would show nothing."""
    name, keys = FOLDERS[kind]
    config = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    size = SIZE
    if name == "GPT2":
        size = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, **{key: SIZE[key] for key in SIZE if "_" in key and key[:3] in ("voc", "ini", "bos", "eos", "pad")}}  # fmt: skip
    torch.manual_seed(5)
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, head)(getattr(transformers, config)(**{**size, **keys}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made(request.param).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@torch.no_grad()
def logits_of_theirs(folder: Path) -> Tensor:
    logits: Tensor = theirs(folder)(TOKENS).logits
    return logits.float()


def gradients_of_theirs(folder: Path, where: Path) -> Decoder:
    """As weights of a model of ours: transformers itself writes them under the names of its files."""
    model = theirs(folder)
    out = model(TOKENS, **({"output_router_logits": True} if hasattr(model.config, "router_aux_loss_coef") else {}))
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), TOKENS.roll(-1, 1).flatten())
    if hasattr(model.config, "router_aux_loss_coef"):
        loss = loss + model.config.router_aux_loss_coef * out.aux_loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(where)
    return opened(where)


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(shape_of(str(folder)), 64, dtype)
    hf.load(model, str(folder), nothing)
    return model.eval()


def without_cache(model: Decoder, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + count:
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def written(model: Decoder, prompts: list[list[int]], count: int) -> Iterator[list[list[int]]]:
    for rows in (1, 3):
        yield BatchEngine(model, rows=rows, length=64).generate(prompts, new_tokens=count, stop=(), temperature=0)


@pytest.mark.parametrize("folder", FOLDERS, indirect=True)
def test_logits_and_gradients_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    model = opened(folder)
    c = model.config
    with torch.no_grad():
        ours = model(TOKENS)
    assert ours.std() > 0.3
    torch.testing.assert_close(ours, logits_of_theirs(folder), atol=1e-4, rtol=0)
    assert parameters(c) == sum(one.numel() for one in model.parameters())
    if not c.experts:
        assert matmul_parameters(c) == sum(
            one.numel()
            for name, one in model.named_parameters()
            if one.dim() == 2 and (c.tied or name != "embed.weight") and name != "positions.weight"
        )
    want = dict(gradients_of_theirs(folder, tmp_path / "gradients").named_parameters())
    model.train()
    for how in ("auto", "plain"):
        model.loss = how
        model.zero_grad()
        model(TOKENS, TOKENS.roll(-1, 1), torch.tensor(1 / 80)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            torch.testing.assert_close(parameter.grad, want[name], rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")  # fmt: skip


# One of each family; the variants' logits are compared above.
ANSWERING = (
    "llama", "mistral with a window", "qwen2 with windows", "qwen3", "gemma2", "gemma3", "olmo2", "phi3", "smollm3", "gpt2", "mixtral", "qwen3 with experts",
)  # fmt: skip


@pytest.mark.parametrize("folder", at_length_but(ANSWERING, FOLDERS), indirect=True)
def test_greedy_answers_are_those_of_transformers_and_of_a_loop_without_a_cache(folder: Path) -> None:
    """Prompts shorter and longer than any window; answers go beyond it."""
    model, other = opened(folder), theirs(folder)
    prompts = [TOKENS[0, :length].tolist() for length in (3, 21, 9)]
    want = [without_cache(model, prompt, 12) for prompt in prompts]
    assert all(answers == want for answers in written(model, prompts, 12))
    if model.config.rope_kind == "longrope":  # theirs changes its table where a text passes rope_original
        prompts, want = prompts[1:2], want[1:2]
    for prompt, answer in zip(prompts, want, strict=True):
        given = torch.tensor([prompt])
        ids = other.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False)
        assert ids[0, len(prompt) :].tolist() == answer


@pytest.mark.parametrize("folder", ["mistral with a window", "gemma2", "qwen2 with windows"], indirect=True)
def test_answers_that_end_early_leave_others_with_windows_unharmed(folder: Path) -> None:
    model = opened(folder)
    prompts = [TOKENS[row % 2, row : row + length].tolist() for row, length in enumerate((3, 21, 9, 14, 2, 30))]
    want = [without_cache(model, prompt, 20) for prompt in prompts]
    stop = {answer[place] for answer, place in zip(want[:4], (1, 4, 2, 9), strict=True)}
    cut = [next((answer[: at + 1] for at, token in enumerate(answer) if token in stop), answer) for answer in want]
    assert len({len(answer) for answer in cut}) > 2
    engine = BatchEngine(model, rows=6, length=64)
    assert engine.generate(prompts, new_tokens=20, stop=stop, temperature=0) == cut


@pytest.mark.parametrize("folder", FOLDERS, indirect=True)
def test_an_export_opens_in_transformers_and_its_config_changes_only_where_meant(folder: Path, tmp_path: Path) -> None:
    model = opened(folder)
    before = json.loads((folder / "config.json").read_text())
    want = logits_of_theirs(folder)
    hf.save(model, str(tmp_path / "again"), say=nothing)
    torch.testing.assert_close(logits_of_theirs(tmp_path / "again"), want, atol=1e-4, rtol=0)
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == before
    assert replace(shape_of(str(tmp_path / "again")), load=model.config.load) == model.config
    hf.save(model, str(tmp_path / "bf16"), say=nothing, dtype=torch.bfloat16, end_ids=(3, 4))
    after = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert {key: after[key] for key in after if after[key] != before.get(key)} == {
        "dtype": "bfloat16",
        "eos_token_id": [3, 4],
    }
    model.config = replace(model.config, kept="", longest=0)  # of a model that no folder describes
    hf.save(model, str(tmp_path / "own"), say=nothing)
    if model.config.rope_kind != "longrope" or "attention_factor" in before.get("rope_parameters", {}):
        torch.testing.assert_close(logits_of_theirs(tmp_path / "own"), want, atol=1e-4, rtol=0)
        assert replace(shape_of(str(tmp_path / "own")), load="", kept="", longest=0) == replace(model.config, load="")


def as_4x(keys: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers 4.x writes it."""
    rope = keys.pop("rope_parameters", None)
    keys["torch_dtype"] = keys.pop("dtype")
    if rope is None:
        return keys
    local = rope.get("sliding_attention")
    if local is not None:
        keys["rope_local_base_freq"], rope = local["rope_theta"], rope["full_attention"]
        keys["sliding_window_pattern"] = 2
    if keys["model_type"] in ("gemma2", "gemma3_text", "qwen2", "qwen3", "smollm3"):
        del keys["layer_types"]
    if "num_local_experts" in keys and keys["model_type"] == "qwen3_moe":
        keys["num_experts"] = keys.pop("num_local_experts")
    keys["rope_theta"] = rope.pop("rope_theta")
    share = rope.pop("partial_rotary_factor", None)
    if share is not None:
        keys["partial_rotary_factor"] = share
    if "original_max_position_embeddings" in keys:
        rope.pop("original_max_position_embeddings", None)
    keys["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return keys


@pytest.mark.parametrize("folder", FOLDERS, indirect=True)
def test_the_config_of_4x_says_the_same_as_that_of_5x(folder: Path) -> None:
    now = shape_of(str(folder))
    keys = json.loads((folder / "config.json").read_text())
    if keys["model_type"] in ("qwen2", "qwen3"):
        keys["max_window_layers"] = 2
    (folder / "config.json").write_text(json.dumps(as_4x(keys)))
    assert replace(shape_of(str(folder)), kept=now.kept) == now


@pytest.mark.parametrize("folder", ["gpt2", "qwen2"], indirect=True)
def test_a_folder_of_the_model_without_its_head_loads(folder: Path) -> None:
    """As the hub's first one is stored: names without their prefix, and masks that are no weights."""
    want = logits_of_theirs(folder)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    if "wte.weight" in bare:
        bare |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(4)}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        torch.testing.assert_close(opened(folder)(TOKENS), want, atol=1e-4, rtol=0)


def test_a_context_beyond_the_learned_positions_is_refused(tmp_path: Path) -> None:
    made("gpt2").save_pretrained(tmp_path / "theirs")
    c = shape_of(str(tmp_path / "theirs"))
    assert c.longest == c.position_rows == 64
    with pytest.raises(Refusal, match="64 learned positions, and the context has 65 tokens"):
        Decoder(c, 65)


# What makers' folders say, with the keys that decide; sizes are small.
HUB: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 3.2": (
        {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5, "head_dim": 16, "tie_word_embeddings": True, "pretraining_tp": 1,
         "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
        {"rope_factor": 32.0, "rope_original": 8192, "tied": True, "windows": ()},
    ),
    "Mistral 7B v0.1": ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, {"windows": (4096,) * 4}),
    "Qwen2.5": (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28},
        {"qkv_bias": True, "windows": ()},
    ),
    "Qwen2.5 with yarn": (
        {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        {"rope_kind": "yarn", "rope_factor": 4.0, "rope_original": 32768, "rope_low": 1.0, "rope_high": 32.0},
    ),
    "Gemma 2": (
        {"architectures": ["Gemma2ForCausalLM"], "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
         "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid"},
        {"tied": True, "windows": (4096, 0, 4096, 0), "attention_cap": 50.0, "final_cap": 30.0, "attention_scale": 1 / 16, "norm_offset": 1.0},
    ),
    "Gemma 3 1B": (
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 2, "rope_theta": 1000000,
         "rope_local_base_freq": 10000, "rope_scaling": None, "attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 256},
        {"tied": True, "windows": (512, 0, 512, 0), "rope_theta": 1e6, "window_theta": 1e4, "attention_cap": 0.0, "final_cap": 0.0, "rope_factor": 1.0},
    ),
    "Phi-3 mini, whose code comes along": (
        {"architectures": ["Phi3ForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}, "sliding_window": 2047, "rope_scaling": None,
         "original_max_position_embeddings": 4096, "max_position_embeddings": 4096},
        {"windows": (2047,) * 4, "norm_eps": 1e-5, "rope_kind": "bands"},
    ),
    "Phi-4 mini": (
        {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "hidden_size": 64,
         "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}, "sliding_window": 262144, "tie_word_embeddings": True},
        {"rope_share": 0.75, "rope_kind": "longrope", "rope_original": 4096, "rope_attention": math.sqrt(1 + math.log(32) / math.log(4096))},
    ),
    "SmolLM3": (
        {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 4, "rope_theta": 5e6, "sliding_window": None, "use_sliding_window": False},
        {"tied": True, "unrotated": (3,), "windows": ()},
    ),
    "Qwen3 30B A3B": (
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
         "mlp_only_layers": [], "head_dim": 128, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 48, "router_aux_loss_coef": 0.001},
        {"experts": 128, "experts_per_token": 8, "expert_ff": 768, "router_sum": True, "dense": (), "qk_norm": True, "windows": ()},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_the_config_that_makers_publish_is_read(name: str, tmp_path: Path) -> None:
    keys, want = HUB[name]
    small = {key: value for key, value in SIZE.items() if not key.endswith("_id")}
    about = {"torch_dtype": "bfloat16", "transformers_version": "4.45.0", "bos_token_id": 1, "eos_token_id": [2, 3]}
    (tmp_path / "config.json").write_text(json.dumps({**small, **about, **keys}))
    c = shape_of(str(tmp_path))
    assert {field: getattr(c, field) for field in want} == want
    assert "auto_map" not in c.kept


@pytest.mark.parametrize(
    "folder", ["gemma2", "phi3", "qwen3 with windows and biases", "gpt2", "mixtral"], indirect=True
)
def test_packed_rows_compute_what_their_texts_compute_alone(folder: Path) -> None:
    model = opened(folder)
    packed = documents(torch.tensor([[0] * 11 + [1] * 29] * 2), torch.device("cpu"))
    with torch.no_grad():
        alone = torch.cat([model(TOKENS[:, :11]), model(TOKENS[:, 11:])], dim=1)
        torch.testing.assert_close(model(TOKENS, packed=packed), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("folder", ["gemma2", "olmo2", "llama with biases", "gpt2"], indirect=True)
def test_a_block_is_one_graph_for_the_compiler(folder: Path) -> None:
    model = opened(folder)
    with torch.no_grad():
        want = model(TOKENS)
        for block in model.layers:
            block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        torch.testing.assert_close(model(TOKENS), want)


def test_capped_log_probabilities_have_autograds_gradients() -> None:
    x, weight = torch.randn(20, 8, generator=torch.Generator().manual_seed(1)), torch.eye(8)[:, :] * 3
    targets = torch.arange(20) % 8
    found = []
    for plain in (False, True):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        if plain:
            logits = 2.0 * torch.tanh(a @ b.t() / 2.0) / 0.7
            chosen = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        else:
            chosen, _ = token_logprobs(a, b, targets, 0.7, 2.0)
        (chosen * torch.linspace(0, 1, 20)).sum().backward()
        found.append((chosen.detach(), a.grad, b.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


TOY = '''
"""A family from elsewhere: its own names, joined projections, one width for all, and no gate."""
from stoker.training.model.config import ModelConfig
from stoker.training.model.families import Family

class Toy(Family):
    name = "toy"
    architecture = "ToyForCausalLM"
    outside = {"embed": "words", "norm": "last", "head": "out"}
    layers = "block"
    inside = {
        "attention_norm": ("n1",), "attention.qkv": ("qkv",), "attention.out": ("o",), "mlp_norm": ("n2",), "mlp.gate_up": ("up",), "mlp.down": ("down",),
    }

    def shape(self, told):
        width = told.count("width")
        return ModelConfig(
            load=told.folder, family=self.name, layers=told.count("blocks"), dim=width, heads=2, kv_heads=2, head_dim=width // 2, ff=2 * width,
            vocab_size=told.count("vocab_size"), init_std=0.3, **self.options(told),
        )

    def common(self, c, context_length):
        return {"width": c.dim, "blocks": c.layers, "vocab_size": c.vocab_size, "max_position_embeddings": context_length}

    def options(self, told):
        return {"gated": False, "mlp_bias": True, "activation": "gelu_tanh"}

    def keys(self, c):
        return {}
'''


def module_at(path: Path, text: str) -> Any:
    path.write_text(text)
    # A compiled file of the same second and size would pass for this text's.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_a_family_from_one_file_outside_loads_trains_generates_and_exports(
    tmp_path: Path, clean_registry: None
) -> None:
    register(module_at(tmp_path / "toy_family.py", TOY).Toy())
    fresh = Decoder(families._registered["toy"].shape(ConfigJson("", {"width": 16, "blocks": 2, "vocab_size": 96})), 64)
    fresh.start(3)
    hf.save(fresh, str(tmp_path / "hf"), say=nothing)
    told = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (told["architectures"], told["width"]) == (["ToyForCausalLM"], 16)
    model = opened(tmp_path / "hf")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(model(TOKENS, TOKENS.roll(-1, 1), torch.tensor(1 / 80)))
        losses[-1].backward()
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]
    want = [without_cache(model, TOKENS[0, :9].tolist(), 10)]
    assert all(answers == want for answers in written(model, [TOKENS[0, :9].tolist()], 10))
    hf.save(model, str(tmp_path / "trained"), say=nothing)
    from safetensors import safe_open

    with safe_open(tmp_path / "trained" / "model.safetensors", "pt") as file:
        assert set(file.keys()) >= {"words.weight", "block.1.qkv.weight", "block.0.up.bias", "last.weight"}
    with torch.no_grad():
        assert torch.equal(opened(tmp_path / "trained")(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('name = "toy"', 'name = "llama"'), ["bad_family.py", "llama is registered already, in", "families/llama.py"]),
        (('"ToyForCausalLM"', '"Qwen3ForCausalLM"'), ["bad_family.py", "Qwen3ForCausalLM is registered already", "qwen3.py"]),
        (('name = "toy"', 'name = "auto"'), ["bad_family.py", "auto is a reserved name"]),
        (('name = "toy"', ""), ["bad_family.py", "Toy has no name"]),
        (("def keys", "def other"), ["bad_family.py", "toy has no keys"]),
        (('"attention.out": ("o",), ', ""), ["bad_family.py", "toy has no name for attention.out"]),
        (('"head": "out"', '"x": "y"'), ["bad_family.py", "toy has no name for head"]),
        (("class Toy(Family)", "class Toy"), ["bad_family.py", "derived from Family"]),
    ],
)  # fmt: skip
def test_a_family_that_cannot_be_is_refused_in_one_line_with_its_file(
    change: tuple[str, str], words: list[str], tmp_path: Path, clean_registry: None
) -> None:
    before = dict(families._registered)
    made = module_at(tmp_path / "bad_family.py", TOY.replace(*change)).Toy()
    with pytest.raises(Refusal) as refused:
        register(made)
    assert "\n" not in refused.value.line and all(word in refused.value.line for word in words), refused.value.line
    assert families._registered == before


def test_a_file_among_the_families_without_one_is_refused_with_its_name(tmp_path: Path) -> None:
    """In a copy of the package: what is in it is imported by every other test."""
    import shutil

    shutil.copytree(Path(stoker.__file__).parent, tmp_path / "stoker", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "stoker" / "training" / "model" / "families" / "notes.py").write_text("x = 1\n")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from stoker.training.model.families import _families; _families()"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "families/notes.py: there is no FAMILY in it" in done.stderr


def test_what_no_execution_has_is_refused_by_name_when_the_folder_is_read(tmp_path: Path, clean_registry: None) -> None:
    for field, word in (
        ('"experts": 8', "0 of 8 experts"),
        ('"shared_experts": 1', "shared experts"),
        ('"positions": "alibi"', "position embedding"),
        ('"norm_kind": "batch"', "norm of another kind"),
        ('"activation": "relu"', "activation"),
        ('"rope_kind": "dynamic"', "rotary"),
        ('"norms": "sandwich"', "norm after attention"),
        ('"windows": (4,)', "1 windows for 2 layers"),
    ):
        text = TOY.replace('"gated": False, "mlp_bias": True, "activation": "gelu_tanh"', field)
        families._registered.pop("toy", None)
        register(module_at(tmp_path / "toy_family.py", text).Toy())
        (tmp_path / "config.json").write_text(
            json.dumps({"architectures": ["ToyForCausalLM"], "width": 16, "blocks": 2, "vocab_size": 96})
        )
        with pytest.raises(Refusal, match=word) as refused:
            shape_of(str(tmp_path))
        assert str(tmp_path) in refused.value.line
        with pytest.raises(Refusal, match=word):
            Decoder(families._registered["toy"].shape(ConfigJson("", {"width": 16, "blocks": 2, "vocab_size": 96})), 8)


def test_every_option_has_words_and_an_unsupported_one_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    settings = set(ModelConfig.__options__)  # type: ignore[attr-defined]
    about = {"family", "kept", "longest", "stored"}
    belong = {
        "positions": {"position_rows"},
        "rope_kind": {"rope_attention", "rope_truncate", "rope_short", "rope_long"},
        "experts": {"experts_per_token", "expert_ff", "shared_experts", "dense", "router_sum", "router_aux"},
    }
    own = set(ModelConfig.__fields__) - settings - about - set.union(*belong.values())  # type: ignore[attr-defined]
    assert own == set(OPTIONS)
    both = replace(SMALL, head_dim=16, qkv_bias=True, windows=(3, 0))
    assert lacking(SMALL, ()) == "" and lacking(both, ("qkv_bias",)) == "sliding window"
    assert lacking(both, ()) == "bias on queries, keys and values, sliding window"
    check_options(both, "model")
    for windows in ((3, 0), (8, 0)):
        assert kernels_for(replace(both, norms="both", windows=windows), 8, torch.device("cuda")) is None
    assert capfd.readouterr().err.splitlines() == [
        "the generation kernels don't support norm after attention and MLP, sliding window yet; using plain torch",
        "the generation kernels don't support norm after attention and MLP yet; using plain torch",
    ]


def test_a_checkpoint_of_other_options_is_refused_and_an_old_one_is_not() -> None:
    class Words:
        tokenizer_digest, vocab_size = "x", 96

    old = {"tokenizer_digest": "x", "model": {"layers": 2, "dim": 32, "qk_norm": False}}  # before there were options
    check_resume(old, "there", SMALL, Words.tokenizer_digest, "adamw")
    with pytest.raises(Refusal, match=r"model\.windows is \[4, 0\] there and \[\] here"):
        check_resume({**old, "model": {"windows": [4, 0]}}, "there", SMALL, Words.tokenizer_digest, "adamw")


def test_families_need_no_torch() -> None:
    script = "import sys; from stoker.training.model.families import _families; print(*_families()); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (
        0,
        "gemma2 gemma3_text gpt2 llama mistral mixtral olmo2 phi3 qwen2 qwen3 qwen3_moe smollm3\n",
    ), done.stderr


def test_no_other_code_knows_a_familys_name() -> None:
    """Names and texts of the code; comments and docstrings may say what was measured on which model."""
    names = re.compile("llama|qwen|mistral|gemma|phi3|olmo|smollm|mixtral|gpt2", re.IGNORECASE)
    root = Path(stoker.__file__).parent
    training = root / "training"
    skipped = {training / "world" / "world.py": "an animal", training / "tokenizer" / "definition.py": "a splitter"}
    found = []
    for path in sorted(root.rglob("*.py")):
        if path in skipped or path.parent.name == "families":
            continue
        text = path.read_text()
        if not names.search(text):
            continue
        tree = ast.parse(text)
        docs = {
            node.body[0].value
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            text = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
                text = node.value
            if isinstance(text, str) and names.search(text):
                found.append(f"{path.relative_to(root)}:{node.lineno}: {text[:60]}")
    assert not found


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


@pytest.mark.parametrize("named", [..., [], None, "LlamaForCausalLM", [5]])
def test_an_export_names_its_architecture_whatever_was_loaded(tmp_path: Path, named: Any) -> None:
    """A folder may be known by its model_type alone."""
    try:
        c = hf_config.shape_of(_described(tmp_path / "m", architectures=named))
    except Refusal:
        assert named not in (..., [], None)  # those are read
        return
    assert hf_config.config_of(c, 128, "float32")["architectures"] == ["LlamaForCausalLM"]


@at_length
def test_a_gemma_4_model_trains_with_its_own_module_of_transformers(tmp_path: Path) -> None:
    """Its vocab_size_per_layer_input is 262,144: no number of a config.json is too large by itself."""
    if "gemma4_text" not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers does not know gemma4_text")
    from stoker.training.model import outside

    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING["gemma4_text"](
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, global_head_dim=8, layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0,
        hidden_size_per_layer_input=4, vocab_size_per_layer_input=262_144, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    shape = hf_config.shape_for(ModelConfig(), str(tmp_path))
    model = outside.opened(shape, 32, torch.float32, torch.device("cpu"), lambda line: None)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    ids = torch.arange(32)[None] % 7
    losses = []
    for _ in range(5):
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
