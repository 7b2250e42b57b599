"""The decoder: its loss, its gradients, its packed rows and its start, each against the plain way to compute it."""

from __future__ import annotations

import sys
import types
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import Tensor

from devices import needs_gpu
from stoker.contract.errors import Refusal
from stoker.contract.frozen import replace
from stoker.training.model import config, linear, loss, ready
from stoker.training.model.attention import Seen, attend, documents, kernels, rotary_table, rotate, seen_by
from stoker.training.model.config import ModelConfig, flops_per_token, matmul_parameters
from stoker.training.model.decoder import Decoder
from stoker.training.model.linear import swiglu_linear
from stoker.training.model.loss import IGNORED, chunk_rows, linear_cross_entropy
from stoker.training.parallel.config import ComputeConfig, block_kinds

SMALL = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ff=48, vocab_size=96, init_std=0.2)


def drawn(*size: int, seed: int, std: float = 1.0) -> Tensor:
    return torch.empty(size).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))


def tokens(*size: int, seed: int, below: int = 96) -> Tensor:
    return torch.randint(0, below, size, generator=torch.Generator().manual_seed(seed))


def made(c: ModelConfig = SMALL, seed: int = 1, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(c, 64, dtype)
    model.start(seed)
    return model


def loss_and_gradients(
    how: str, x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
    value = linear_cross_entropy(a, b, targets, scale, how)
    value.backward()
    assert a.grad is not None and b.grad is not None
    return value.detach(), a.grad, b.grad


@pytest.mark.parametrize("scale", [None, 0.01])
@pytest.mark.parametrize("masked", ["none", "some", "all of a chunk"])
def test_the_loss_in_chunks_is_the_plain_one_with_its_gradients(
    masked: str, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CHUNK_BYTES", 1)
    rows, words = 700, 50
    assert chunk_rows(rows, words, 4) == 256  # three chunks, the last one short
    x, weight, targets = drawn(rows, 16, seed=1), drawn(words, 16, seed=2), tokens(rows, seed=3, below=words)
    if masked == "some":
        targets[::3] = IGNORED
    elif masked == "all of a chunk":
        targets[256:512] = IGNORED
    factor = None if scale is None else torch.tensor(scale)
    for got, want in zip(
        loss_and_gradients("auto", x, weight, targets, factor),
        loss_and_gradients("plain", x, weight, targets, factor),
        strict=True,
    ):
        assert want.abs().max() > 0
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(
            linear_cross_entropy(x, weight, targets, factor),
            linear_cross_entropy(x, weight, targets, factor, "plain"),
            rtol=1e-5,
            atol=0,
        )


def test_targets_that_are_all_masked_have_no_loss_and_no_gradient() -> None:
    x, weight, targets = drawn(8, 16, seed=1), drawn(50, 16, seed=2), torch.full((8,), IGNORED)
    for got in loss_and_gradients("auto", x, weight, targets, torch.tensor(0.5)):
        assert not got.any()


def test_chunks_hold_as_many_rows_as_fit_but_never_more_than_there_are() -> None:
    assert chunk_rows(1 << 20, 131072, 2) == 2048
    assert chunk_rows(100, 131072, 2) == 100
    assert chunk_rows(1 << 20, 1 << 29, 4) == 256


@pytest.mark.parametrize(
    "c",
    [SMALL, replace(SMALL, tied=False), replace(SMALL, qk_norm=True, head_dim=24)],
    ids=["tied", "untied", "qk-norm"],
)
def test_a_training_step_has_the_gradients_of_the_plain_loss(c: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_BYTES", 1)
    inputs, targets = tokens(8, 40, seed=4), tokens(8, 40, seed=5)
    targets[0, :7] = IGNORED
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for how in ("auto", "plain"):
        model = made(c)
        model.loss = how
        value = model(inputs, targets, torch.tensor(1 / 313))
        value.backward()
        found.append(
            (value.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None})
        )
    (value, gradients), (want, expected) = found
    torch.testing.assert_close(value, want, rtol=1e-5, atol=0)
    assert gradients.keys() == expected.keys() == dict(made(c).named_parameters()).keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_loss_of_a_batch_is_the_sum_over_its_logits() -> None:
    model = made()
    inputs, targets = tokens(2, 24, seed=6), tokens(2, 24, seed=7)
    targets[1, 3:9] = IGNORED
    with torch.no_grad():
        want = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        torch.testing.assert_close(model(inputs, targets), want, rtol=1e-5, atol=0)


def test_swiglu_and_its_product_have_autograds_gradients() -> None:
    gate_up, weight, outer = drawn(3, 5, 24, seed=1), drawn(8, 12, seed=2), drawn(3, 5, 8, seed=3)

    def gradients(fused: bool) -> tuple[Tensor, Tensor, Tensor]:
        a, b = gate_up.clone().requires_grad_(), weight.clone().requires_grad_()
        gate, up = a.chunk(2, dim=-1)
        y = swiglu_linear(a, b, False) if fused else F.linear(F.silu(gate) * up, b)
        y.backward(outer)
        assert a.grad is not None and b.grad is not None
        return y.detach(), a.grad, b.grad

    for got, want in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_turned_pair_keeps_its_length_and_products_depend_on_distance_only() -> None:
    cos, sin = rotary_table(64, ModelConfig(head_dim=16))
    q, k = drawn(1, 1, 1, 16, seed=1), drawn(1, 1, 1, 16, seed=2)
    turned_q, turned_k = rotate(q.expand(1, 64, 1, 16), cos, sin), rotate(k.expand(1, 64, 1, 16), cos, sin)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1).expand(1, 64, 1))
    products = turned_q[0, :, 0] @ turned_k[0, :, 0].t()
    for distance in (-17, 0, 5, 40):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert (products.diagonal(5)[0] - products.diagonal(40)[0]).abs() > 1e-2


def test_attention_sees_the_past_of_its_own_segment_and_shares_grouped_heads() -> None:
    q, k, v = drawn(2, 9, 4, 8, seed=1), drawn(2, 9, 2, 8, seed=2), drawn(2, 9, 2, 8, seed=3)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9])
    with kernels("auto"):
        plain, packed = (
            attend(q, k, v, Seen()),
            attend(q, k, v, seen_by(documents(segments, q.device), 0, q, head_dim=8)),
        )
    for row in range(2):
        for place in range(9):
            for head in range(4):
                own = [at for at in range(place + 1) if segments[row, at] == segments[row, place]]
                for got, seen in ((plain, list(range(place + 1))), (packed, own)):
                    weights = (k[row, seen, head // 2] @ q[row, place, head] / 8**0.5).softmax(0)
                    torch.testing.assert_close(
                        got[row, place, head], weights @ v[row, seen, head // 2], rtol=1e-4, atol=1e-5
                    )


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_packed_row_computes_what_its_texts_compute_alone(qk_norm: bool) -> None:
    model = made(replace(SMALL, qk_norm=qk_norm))
    first, second, third = tokens(1, 11, seed=1), tokens(1, 1, seed=2), tokens(1, 20, seed=3)
    row = torch.cat([first, second, third], dim=1)
    packed = documents(torch.tensor([[0] * 11 + [1] + [2] * 20]), torch.device("cpu"))
    with torch.no_grad():
        alone = torch.cat([model(one) for one in (first, second, third)], dim=1)
        torch.testing.assert_close(model(row, packed=packed), alone, rtol=1e-4, atol=1e-5)
        assert (model(row) - alone).abs().max() > 1e-2  # without segments the texts see each other


def test_the_start_is_the_same_for_the_same_seed_and_of_the_stated_width() -> None:
    c = replace(SMALL, dim=64, ff=256, init_std=0.02)
    one, two, other = (dict(made(c, seed).named_parameters()) for seed in (7, 7, 8))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(torch.equal(one[name], other[name]) == (one[name].dim() == 1) for name in one)
    torch.manual_seed(0)
    torch.rand(5)
    assert torch.equal(made(c, 7).embed.weight, one["embed.weight"])  # whatever the global generator did
    assert one["layers.0.mlp.gate_up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert one["layers.1.mlp.down.weight"].std().item() == pytest.approx(0.01, rel=0.05)  # 0.02 / sqrt(2 * 2 layers)
    assert bool((one["norm.weight"] == 1).all())


def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not() -> None:
    tied, untied = made(), made(replace(SMALL, tied=False))
    assert tied.head is None and tied.head_weight is tied.embed.weight
    assert untied.head is not None and not torch.equal(untied.head.weight, untied.embed.weight)
    assert "head.weight" not in dict(tied.named_parameters())


def test_dropout_drops_in_training_and_not_in_evaluation() -> None:
    wet, dry = made(replace(SMALL, dropout=0.3)), made()
    inputs = tokens(1, 16, seed=1)
    with torch.no_grad():
        assert torch.equal(wet.eval()(inputs), dry.eval()(inputs))
        wet.train()
        assert not torch.equal(wet(inputs), wet(inputs))
        assert torch.equal(dry.train()(inputs), dry.eval()(inputs))


def test_bf16_activations_leave_the_weights_and_their_gradients_in_fp32() -> None:
    model = made(dtype=torch.bfloat16)
    inputs, targets = tokens(2, 16, seed=1), tokens(2, 16, seed=2)
    assert model(inputs).dtype == torch.bfloat16
    value = model(inputs, targets, torch.tensor(1 / 32))
    value.backward()
    assert value.dtype == torch.float32
    assert {(one.dtype, one.grad.dtype) for one in model.parameters() if one.grad is not None} == {
        (torch.float32, torch.float32)
    }
    torch.testing.assert_close(value, made()(inputs, targets, torch.tensor(1 / 32)), rtol=0.02, atol=0)


def test_flops_of_a_token_are_those_counted_by_hand() -> None:
    # One layer: queries and output 32·32 each, keys and values 16·32 each, feed-forward 3·48·32; the head 96·32.
    per_layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32
    assert per_layer == 7680
    assert matmul_parameters(SMALL) == 2 * 7680 + 96 * 32 == 18432
    assert flops_per_token(SMALL, 64) == 6 * 18432 + 12 * 2 * 4 * 8 * 64 == 159744
    assert matmul_parameters(replace(SMALL, tied=False)) == 18432


def test_matmul_parameters_are_the_models_own_without_norms_and_lookups() -> None:
    for c in (SMALL, replace(SMALL, tied=False), replace(SMALL, qk_norm=True, head_dim=24)):
        matrices = sum(
            one.numel()
            for name, one in Decoder(c, 8).named_parameters()
            if one.dim() == 2 and (c.tied or name != "embed.weight")
        )
        assert matmul_parameters(c) == matrices


def test_the_llama_3_2_1b_shape_has_its_published_size() -> None:
    c = ModelConfig(layers=16, dim=2048, heads=32, kv_heads=8, head_dim=64, ff=8192, vocab_size=128256)
    assert matmul_parameters(c) == 1_235_814_400 - 33 * 2048  # as published, less the norms
    assert flops_per_token(c, 2048) == 6 * 1_235_746_816 + 805_306_368


def test_how_a_block_runs_by_device_fp8_and_heads() -> None:
    gpu, cpu, said = torch.device("cuda"), torch.device("cpu"), list[str]()
    auto, fp8 = ComputeConfig(), ComputeConfig(fp8="tensorwise")
    plain = replace(SMALL, head_dim=64)
    assert ready.fused(auto, plain, gpu, said.append) and not ready.compiled(auto, gpu, plain)
    assert not ready.fused(fp8, plain, gpu, said.append) and ready.compiled(fp8, gpu, plain)
    assert not ready.fused(auto, plain, cpu, said.append) and not ready.compiled(auto, cpu, plain)
    assert not said
    for other, word in (
        (replace(plain, head_dim=96), "heads of 96"),
        (replace(plain, rope_share=0.5, attention_cap=9.0), "soft cap of attention scores, partly turned heads"),
    ):
        assert not ready.fused(auto, other, gpu, said.append) and ready.compiled(auto, gpu, other)
        assert word in said[-1] and "using the plain one, compiled" in said[-1]
    with pytest.raises(Refusal, match="needs a GPU"):
        ready.fused(ComputeConfig(compile="fused"), plain, cpu, said.append)
    with pytest.raises(Refusal, match="soft cap of logits"):
        ready.make_ready(made(replace(SMALL, final_cap=9.0)), ComputeConfig(loss="liger"), cpu, said.append)


def test_unfused_for_a_look_blocks_keep_nothing_and_compute_the_same() -> None:
    """Fused blocks may have filled the card: plain ones keep twice as much."""
    inputs = tokens(2, 16, seed=3)

    def held(model: Decoder) -> tuple[int, Tensor]:
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.numel()) or one, lambda one: one):
            value = model(inputs, inputs.roll(-1, 1), torch.tensor(1 / 32))
        value.backward()
        return sum(kept), value.detach()

    plain, looked_at = made(), made()
    looked_at.fuse(True)
    ready.unfuse(looked_at)
    assert not looked_at.fused
    (much, value), (little, same) = held(plain), held(looked_at)
    assert little < much / 2 and torch.equal(value, same)
    for one, other in zip(plain.parameters(), looked_at.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def _turned(rows: Tensor, cos: Tensor, sin: Tensor, heads: int, head_dim: int, sign: float) -> None:
    """As the kernel does it: in place, unseen by autograd and by dispatch modes."""
    numbers, half = rows.detach().numpy(), head_dim // 2
    place = [row % len(cos) for row in range(len(numbers))]
    c, s = cos.numpy()[place], sign * sin.numpy()[place]
    for head in range(heads):
        low, high = slice(head * head_dim, head * head_dim + half), slice(head * head_dim + half, (head + 1) * head_dim)
        first, second = numbers[:, low].copy(), numbers[:, high].copy()
        numbers[:, low], numbers[:, high] = first * c - second * s, second * c + first * s


def _added_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    out = x if delta is None else x + delta
    rstd = torch.rsqrt(out.square().mean(-1) + eps)
    return out, out * rstd[:, None] * weight, rstd


def _norm_gradient(
    g: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, onward: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    unit, inner = x * rstd[:, None], g * weight
    dx = (inner - unit * (inner * unit).mean(-1, keepdim=True)) * rstd[:, None]
    return dx if onward is None else dx + onward, unit * weight, (g * unit).sum(0)


# Options that the fused blocks have as well (config.FUSED), for three layers.
FUSED: dict[str, Any] = {
    "attention_scale": 0.2, "embedding_scale": 3.0, "final_cap": 4.0, "windows": (0, 9, 5), "unrotated": (0,), "window_theta": 50.0, "rope_kind": "linear",
    "rope_factor": 2.0,
}  # fmt: skip

WIDER: dict[str, Any] = {
    "qkv_bias": True, "out_bias": True, "mlp_bias": True, "norms": "both", "norm_offset": 1.0, "activation": "gelu_tanh", "gated": False,
    "positions": "learned", "position_rows": 256,
}  # fmt: skip
ROUTED: dict[str, Any] = {"experts": 6, "experts_per_token": 2, "expert_ff": 64, "router_aux": 0.1, "dense": (1,)}
FUSED_OPTIONS = pytest.mark.parametrize(
    "options", [{}, FUSED, WIDER, ROUTED], ids=["no options", "options", "wider", "experts"]
)


def test_the_options_that_fused_blocks_are_tested_with_are_those_they_claim() -> None:
    besides = {"rope_factor", "position_rows", "experts_per_token", "expert_ff", "router_aux", "dense"}
    assert set(config.FUSED) == {*FUSED, *WIDER, *ROUTED} - besides


@FUSED_OPTIONS
@pytest.mark.parametrize("recompute", ["off", "full", "selective", "mlp"])
def test_recomputed_blocks_have_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, recompute: str, options: dict[str, Any]
) -> None:
    """Plain blocks, and fused ones with stand-ins for the kernels that no CPU can run."""
    kernels_ = types.SimpleNamespace(
        add_norm=_added_norm, norm_backward=_norm_gradient, rotate_in_place=_turned, swiglu=linear.swiglu,
        swiglu_backward=linear._backward,
    )  # fmt: skip
    package = "stoker.training.model"
    monkeypatch.setitem(sys.modules, f"{package}.fused_kernel", cast(Any, kernels_))
    # `fused` is imported anew, with the stand-ins. Set before it is deleted: only so is that module forgotten afterwards.
    monkeypatch.setitem(sys.modules, f"{package}.fused", cast(Any, None))
    monkeypatch.setattr(sys.modules[package], "fused", None, raising=False)
    monkeypatch.setattr(sys.modules[package], "fused_kernel", kernels_, raising=False)
    del sys.modules[f"{package}.fused"]
    del sys.modules[package].__dict__["fused"]
    inputs = tokens(2, 16, seed=3)
    found = []
    for fused, how in ((False, "off"), (False, recompute), (True, recompute)):
        model = made(replace(SMALL, kv_heads=4, layers=3, **options))
        model.fuse(fused)
        gated = all(block.mlp is not None and block.mlp.activation is None for block in model.layers)
        if how == "mlp" and fused and not gated:
            with pytest.raises(Refusal, match="is for blocks with SwiGLU"):
                ready.keep_by_kind(model, block_kinds(3, 0, False, 3))
        elif how == "mlp":
            ready.keep_by_kind(model, block_kinds(3, 0, False, 3))
        for block in model.layers if how in ("full", "selective") else ():
            ready.checkpoint_block(block, how == "selective", False)
        model(inputs, inputs.roll(-1, 1), torch.tensor(1 / 32)).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for one in found[1:]:
        for name, want in found[0].items():
            assert ((one[name] - want).norm() / want.norm()).item() < 1e-5, name


def test_no_stand_in_is_left_behind() -> None:
    """The tests on a GPU need the real ones."""
    for name in ("fused", "fused_kernel"):
        module = sys.modules.get(f"stoker.training.model.{name}")
        assert module is None or isinstance(module, types.ModuleType)
        assert getattr(sys.modules["stoker.training.model"], name, module) is module
    fused = sys.modules.get("stoker.training.model.fused")
    assert fused is None or isinstance(fused.kernel, types.ModuleType)


@needs_gpu
@pytest.mark.parametrize("recompute", ["off", "full", "selective"])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@FUSED_OPTIONS
def test_fused_blocks_have_the_loss_and_gradients_of_plain_ones(
    qk_norm: bool, packed: bool, recompute: str, options: dict[str, Any]
) -> None:
    device = torch.device("cuda")
    size = ModelConfig(layers=3, dim=192, heads=6, kv_heads=2, head_dim=64, ff=320, vocab_size=512, qk_norm=qk_norm)
    c = replace(size, **options)
    with torch.device(device):
        model = Decoder(c, 128)
    model.start(0)
    inputs = tokens(4, 128, seed=1, below=512).to(device)
    rows = documents((torch.arange(128) // 50).expand(4, 128).contiguous(), device) if packed else None
    found = []
    for yes in (False, True):
        model.fuse(yes)
        for block in model.layers if yes and recompute != "off" else ():
            ready.checkpoint_block(block, recompute == "selective", False)
        model.zero_grad()
        value = model(inputs, inputs.roll(-1, 1), torch.tensor(1 / 512, device=device), rows)
        value.backward()
        found.append(
            {"loss": value.detach()}
            | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
    assert len(found[0]) == 1 + len(list(model.parameters()))
    for name, want in found[0].items():
        assert ((found[1][name] - want).norm() / want.norm()).item() < 1e-4, name
