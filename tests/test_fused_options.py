"""Options of the block in the fused execution. Its kernels need a GPU; here plain torch stands in for them, so that what lies
between them (biases, offsets, norms behind, experts) is compared with the plain block on any machine."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import Tensor

from stoker.contract.frozen import replace
from stoker.training.generate import plain
from stoker.training.model import experts
from stoker.training.model.attention import rotary_table, rotate
from stoker.training.model.config import ModelConfig, unfusable
from stoker.training.model.decoder import Decoder
from stoker.training.model.linear import _backward, swiglu

SMALL = ModelConfig(layers=3, dim=32, heads=4, kv_heads=2, head_dim=8, ff=48, vocab_size=96, init_std=0.3)
TOKENS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
EXPERTS = {"experts": 6, "experts_per_token": 2, "expert_ff": 16, "router_aux": 0.5}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "biases and a norm of queries": {"qkv_bias": True, "qk_norm": True},
    "norms before and behind, with an offset": {"norms": "both", "norm_offset": 1.0, "qk_norm": True, "activation": "gelu_tanh"},
    "no gate": {"gated": False, "activation": "gelu", "positions": "learned", "position_rows": 64, "unrotated": (0, 1, 2)},
    "experts": EXPERTS,
    "experts in some layers": {**EXPERTS, "dense": (0,), "norms": "both", "rope_kind": "yarn", "rope_factor": 4.0, "rope_attention": 1.3},
}  # fmt: skip


def turned(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, head_dim: int, sign: float) -> None:
    parts = qkv.view(-1, cos.shape[-2], qkv.shape[1] // head_dim, head_dim)[:, :, :heads]
    parts.copy_(rotate(parts, cos, sin * sign))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def stand_in() -> types.ModuleType:
    """fused_kernel.py's functions, by autograd where they are derivatives."""
    module: Any = types.ModuleType("stoker.training.model.fused_kernel")

    def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        out = x if delta is None else x + delta
        return out, norm(out, weight, eps), torch.rsqrt(out.square().mean(-1) + eps)

    def norm_backward(g: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, onward: Tensor | None) -> tuple[Tensor, ...]:
        unit = x * rstd[:, None]
        inner = g * weight
        dx = (inner - unit * (inner * unit).mean(-1, keepdim=True)) * rstd[:, None]
        return dx if onward is None else dx + onward, unit * weight, (g * unit).sum(0)

    def both(
        qkv: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, kv_heads: int, eps: float
    ) -> Tensor:
        weight = torch.cat([q_weight.expand(heads, -1), k_weight.expand(kv_heads, -1)])
        parts = qkv.view(-1, cos.shape[-2], heads + 2 * kv_heads, len(q_weight))[:, :, : heads + kv_heads]
        return rotate(norm(parts, weight, eps), cos, sin).reshape(len(qkv), -1)

    def norm_rotate(qkv: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
        module.eps = how[-1]
        return both(qkv, *how), torch.empty(0)

    def norm_rotate_backward(
        g: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, _: Tensor, dqkv: Tensor, *counts: int
    ) -> tuple[Tensor, Tensor]:
        given = [one.detach().requires_grad_() for one in (qkv, q, k)]
        with torch.enable_grad():
            out = both(given[0], cos, sin, given[1], given[2], *counts, module.eps)
        dx, dq, dk = torch.autograd.grad(out, given, g)
        dqkv[:, : g.shape[1]] = dx[:, : g.shape[1]]
        return dq, dk

    module.add_norm, module.norm_backward, module.rotate_in_place, module.swiglu = (
        add_norm,
        norm_backward,
        turned,
        swiglu,
    )
    module.norm_rotate, module.norm_rotate_backward = norm_rotate, norm_rotate_backward
    module.swiglu_backward = _backward
    return module


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    package, kernel = "stoker.training.model", stand_in()
    monkeypatch.setitem(sys.modules, f"{package}.fused_kernel", kernel)
    # `fused` is imported anew, with the stand-ins. Set before it is deleted: only so is that module forgotten afterwards.
    monkeypatch.setitem(sys.modules, f"{package}.fused", types.ModuleType("nothing"))
    monkeypatch.setattr(sys.modules[package], "fused", None, raising=False)
    monkeypatch.setattr(sys.modules[package], "fused_kernel", kernel, raising=False)
    del sys.modules[f"{package}.fused"]
    del sys.modules[package].__dict__["fused"]


def made(c: ModelConfig) -> Decoder:
    model = Decoder(c, 64)
    model.start(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    return model


@pytest.mark.parametrize("kind", OPTIONS)
def test_fused_blocks_compute_what_plain_ones_do(kind: str, kernels: None) -> None:
    c = replace(SMALL, **OPTIONS[kind])
    assert unfusable(c) == ""
    model, found = made(c), []
    for fused in (False, True):
        model.fuse(fused)
        model.zero_grad()
        loss = model(TOKENS, TOKENS.roll(-1, 1), torch.tensor(1 / 48))
        loss.backward()
        found.append(
            (loss.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
        )
    torch.testing.assert_close(found[1][0], found[0][0])
    assert len(found[0][1]) == len(list(model.parameters()))
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(
            found[1][1][name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_what_fused_blocks_lack_is_named() -> None:
    for fields, words in (
        ({"attention_cap": 30.0}, "soft cap of attention scores"),
        ({"norms": "post"}, "norm after attention and MLP alone"),
        ({"norm_kind": "layer"}, "norm of another kind than RMS"),
        ({"rope_share": 0.5}, "partly turned heads"),
        ({"qk_norm": True, "qk_norm_whole": True}, "norm over all heads"),
    ):
        assert words in unfusable(replace(SMALL, **fields)), fields


def test_grouped_products_and_those_by_all_experts_compute_what_one_by_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No token is dropped: one expert gets nearly all, some get none."""
    c = replace(SMALL, **EXPERTS)
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(30, c.dim, generator=draw)
    router, wide, narrow = (
        torch.randn(*size, generator=draw) * 0.3 for size in ((c.experts, c.dim), (c.experts * 2 * c.expert_ff, c.dim), (c.experts * c.dim, c.expert_ff))
    )  # fmt: skip
    x += 1.0
    router[0] += 0.5
    found = []
    for how in ("one by one", "grouped", "all"):
        with monkeypatch.context() as patched:
            if how == "grouped":
                patched.setattr(experts, "grouped", lambda x, c: True)
                patched.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
            given = [one.clone().requires_grad_() for one in (x, router, wide, narrow)]
            y, load = experts.mixture(c, *given, captured=how == "all")
            (y.square().sum() + experts.balance_loss(load, torch.tensor(30.0), replace(c, layers=1))).backward()
        found.append((y.detach(), load.detach(), *(one.grad for one in given)))
    assert found[0][1][0].sum() == 60 and found[0][1][0].max() >= 25
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("whole", [False, True])
def test_trainer_and_generator_round_the_norm_of_queries_and_keys_alike(whole: bool) -> None:
    """bf16, bit for bit: else answers are sampled from another model than the one that learns."""
    c = replace(SMALL, head_dim=16, qk_norm=True, qk_norm_whole=whole, rope_theta=100.0)
    model = Decoder(c, 64, torch.bfloat16)
    model.start(5)
    attention = model.layers[0].attention
    with torch.no_grad():
        for one in (attention.q_norm, attention.k_norm):
            one.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(2))
        x = torch.randn(1, 64, c.dim, generator=torch.Generator().manual_seed(6)).bfloat16()
        qkv = attention.qkv(x)
        q, k, _ = qkv.view(1, 64, -1, 16).split([4, 2, 2], dim=2)
        if whole:
            q, k = attention.q_norm(q.flatten(2)).view_as(q), attention.k_norm(k.flatten(2)).view_as(k)
        else:
            q, k = attention.q_norm(q), attention.k_norm(k)
        cos, sin = rotary_table(64, c)
        want = rotate(q, cos, sin)[0], rotate(k, cos, sin)[0]
        weights = (attention.q_norm.weight, attention.k_norm.weight)
        rows = [weight.view(-1, 16).expand(count, -1) for weight, count in zip(weights, (4, 2), strict=True)]
        kv = torch.zeros(2, 1, 2, 64, 16, dtype=torch.bfloat16)
        angles = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        queries = plain.turn(qkv[0], *angles, torch.cat(rows), 4, c.norm_eps, kv, 0, 64, whole)
    assert torch.equal(queries, want[0])
    assert torch.equal(kv[0, 0].transpose(0, 1), want[1])
