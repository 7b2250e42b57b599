"""Families on one real GPU, in bf16: fused or compiled blocks compute what plain ones do, learn, and write the same answers.
Skipped, with the reason, where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from stoker.contract.frozen import replace
from stoker.training.model import hf, ready
from stoker.training.model.attention import rotary_table
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import shape_of
from stoker.training.parallel.config import ComputeConfig
from stoker.training.serve.batch import BatchEngine
from test_real_gpu import WHY

pytestmark = [pytest.mark.gpu(seconds=8), pytest.mark.skipif(bool(WHY), reason=WHY)]  # some compile their blocks

SIZE: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 320,
    "head_dim": 32, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.1,
}  # fmt: skip
WINDOWS = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 32,
}
EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {  # class, keys, whether its blocks are fused
    "llama": ("Llama", {}, True),
    "qwen2": ("Qwen2", {}, True),
    "qwen3": ("Qwen3", {}, True),
    "mistral": ("Mistral", {"sliding_window": 24}, True),
    "gemma2": ("Gemma2", WINDOWS, False),
    "gemma3": ("Gemma3", WINDOWS, True),
    "phi3": ("Phi3", {}, True),
    "phi3, partly turned": (
        "Phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4}}, False,
    ),
    "olmo2": ("Olmo2", {}, False),
    "smollm3": ("SmolLM3", {}, True),
    "gpt2": ("GPT2", {}, False),
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 8}, True),
    "qwen3 with experts": ("Qwen3Moe", {**EXPERTS, "num_experts": 8, "moe_intermediate_size": 64}, True),
}  # fmt: skip
CUDA = torch.device("cuda")


def tokens(rows: int = 4, length: int = 96) -> torch.Tensor:
    return torch.randint(0, 320, (rows, length), generator=torch.Generator().manual_seed(1)).to(CUDA)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name, keys, _ = KINDS[request.param]
    size = SIZE if name != "Phi3" else {key: value for key, value in SIZE.items() if key != "head_dim"}
    if name == "GPT2":
        ids = {
            key: value
            for key, value in SIZE.items()
            if key.endswith("_id") or key in ("vocab_size", "initializer_range")
        }
        size = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128, **ids}
    torch.manual_seed(5)
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")(**{**size, **keys})
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    getattr(transformers, head)(config).save_pretrained(tmp_path / "theirs")
    return str(tmp_path / "theirs")


def opened(folder: str, compile_as: str, said: list[str]) -> Decoder:
    with torch.device(CUDA):
        model = Decoder(shape_of(folder), 128, torch.bfloat16)
    model.place(CUDA)
    hf.load(model, folder, said.append)
    ready.make_ready(model, ComputeConfig(compile=compile_as), CUDA, said.append)
    return model


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_blocks_on_a_gpu_compute_what_plain_ones_do_and_learn(folder: str, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["folder"]
    said: list[str] = []
    plain, fast = opened(folder, "off", []), opened(folder, "auto", said)
    assert fast.fused == KINDS[kind][2]
    if not fast.fused:
        assert sum("the fused execution has no" in line for line in said) == 1, said
    inputs, scale = tokens(), torch.tensor(1 / 384, device=CUDA)
    with torch.no_grad():
        want, found = plain(inputs).float(), fast(inputs).float()
    assert want.isfinite().all()
    each = (found - want).norm(dim=-1) / want.norm(dim=-1)
    if plain.config.experts:  # of two experts that are nearly alike, rounding may choose the other: a few tokens differ
        assert each.median().item() < 0.05 and each.mean().item() < 0.2
    else:
        assert each.max().item() < 0.1
    gradients = []
    for model in (plain, fast):
        model.train()
        model(inputs, inputs.roll(-1, 1), scale).backward()
        gradients.append({name: one.grad for name, one in hf.named(model)})
    for name, gradient in gradients[0].items():
        other = gradients[1][name]
        assert gradient is not None and other is not None and other.isfinite().all(), name
        alike = torch.nn.functional.cosine_similarity(other.flatten(), gradient.flatten(), dim=0).item()
        assert alike > (0.9 if plain.config.experts else 0.98), f"{name}: {alike}"
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = fast(inputs, inputs.roll(-1, 1), scale)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_answers_on_a_gpu_follow_the_models_own_logits(folder: str) -> None:
    """Each token is as likely as the most likely one, up to rounding: bf16 products of other sizes may swap near equals. Answers go
    beyond every window."""
    model = opened(folder, "off", []).eval()
    prompts = [row[:length].tolist() for row, length in zip(tokens(), (3, 60, 17, 30), strict=True)]
    for rows in (1, 4):
        answers = BatchEngine(model, rows=rows, length=128).generate(prompts, new_tokens=30, stop=(), temperature=0)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer) == 30
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *answer]], device=CUDA))[0, len(prompt) - 1 : -1].float()
            best, chosen = logits.max(-1).values, logits.gather(-1, torch.tensor(answer, device=CUDA)[:, None])[:, 0]
            near = ((best - chosen) <= 0.1 * logits.std(-1) + 1e-3).float().mean().item()
            assert near > (0.8 if model.config.experts else 0.95)


def test_experts_on_a_gpu_lose_no_token_in_grouped_products() -> None:
    from stoker.training.model.experts import _by_chosen, _one_by_one, _together, grouped, ungrouped

    c = ModelConfig(layers=1, dim=64, heads=2, kv_heads=2, head_dim=32, ff=64, vocab_size=64, experts=8, experts_per_token=2, expert_ff=32)  # fmt: skip
    x = torch.randn(777, 64, device=CUDA, dtype=torch.bfloat16)
    if not grouped(x, c):
        pytest.skip(ungrouped(c, CUDA))
    wide, narrow = (torch.randn(8, *size, device=CUDA, dtype=torch.bfloat16) * 0.1 for size in ((64, 64), (64, 32)))
    chosen = torch.stack([torch.randperm(8, device=CUDA)[:2] for _ in range(777)])
    share = torch.rand(777, 2, device=CUDA)
    activate = lambda gate_up: gate_up.chunk(2, -1)[0] * gate_up.chunk(2, -1)[1]  # noqa: E731
    found = []
    for product in (_one_by_one, _together):
        given = [one.clone().requires_grad_() for one in (x, wide, narrow)]
        y = _by_chosen(given[0], given[1], given[2], activate, chosen, share, product)
        y.float().square().sum().backward()
        found.append([y.detach().float(), *(one.grad.float() for one in given if one.grad is not None)])
    for one, other in zip(*found, strict=True):
        assert ((one - other).norm() / one.norm()).item() < 0.02


def test_fused_trainer_and_generator_round_the_norm_of_queries_and_keys_alike() -> None:
    """Sums of a head may be added in another order: a bit in a thousand may differ, not one in ten."""
    from stoker.training.generate import kernel
    from stoker.training.model import fused_kernel

    c = ModelConfig(layers=1, dim=64, heads=4, kv_heads=2, head_dim=64, ff=64, vocab_size=64, qk_norm=True)
    cos, sin = (table.to(CUDA) for table in rotary_table(128, c))
    qkv = torch.randn(128, 8 * 64, device=CUDA).bfloat16()
    q_weight, k_weight = (torch.rand(64, device=CUDA) + 0.5 for _ in range(2))
    trained, _ = fused_kernel.norm_rotate(qkv, cos, sin, q_weight, k_weight, 4, 2, c.norm_eps)
    kv = torch.zeros(2, 1, 2, 128, 64, device=CUDA, dtype=torch.bfloat16)
    rows = torch.cat([q_weight.expand(4, -1), k_weight.expand(2, -1)]).contiguous()
    angles = torch.cat([cos, cos], -1).contiguous(), torch.cat([-sin, sin], -1).contiguous()
    queries = kernel.turn(qkv, *angles, rows, 4, c.norm_eps, kv, 0, 128)
    keys = kv[0, 0].transpose(0, 1)
    trained = trained.view(128, 6, 64)
    assert (queries == trained[:, :4]).float().mean() > 0.999
    assert (keys == trained[:, 4:]).float().mean() > 0.999


def test_a_float32_model_with_experts_says_that_they_are_computed_one_by_one() -> None:
    c = ModelConfig(layers=2, dim=64, heads=2, kv_heads=2, head_dim=32, ff=64, vocab_size=64, experts=4, experts_per_token=2, expert_ff=32)  # fmt: skip
    said: list[str] = []
    with torch.device(CUDA):
        model = Decoder(replace(c, attention_cap=30.0), 64)
    ready.make_ready(model, ComputeConfig(), CUDA, said.append)
    assert any(
        "grouped products need bf16; experts are computed one by one, and blocks are not compiled" in line
        for line in said
    )
