"""The schedule's shapes, and the three rules against what they are meant to be: torch's AdamW, fp32 moments, orthogonal updates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stoker.training.optim import loss_scale  # noqa: E402
from stoker.training.optim.config import BLOCK, OptimConfig, rate_share, warmup_length  # noqa: E402
from stoker.training.optim.muon import orthogonal  # noqa: E402
from stoker.training.optim.optimizer import (  # noqa: E402
    Optimizer,
    gradient_norm,
    pack_first,
    pack_second,
    unpack_first,
    unpack_second,
)

KINDS = ("adamw", "adamw8bit", "muon")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors, and other work on the same cores: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- the schedule ----


def curve(steps: int, **told: Any) -> list[float]:
    c = OptimConfig(**{"warmup_ratio": 0.0, **told})
    return [rate_share(c, step, steps) for step in range(steps)]


def test_warm_up_rises_in_a_line_from_above_nothing_to_the_peak() -> None:
    for kind in ("cosine", "linear", "constant", "wsd"):
        found = curve(100, schedule=kind, warmup_steps=4)
        assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]), kind
    assert (
        warmup_length(OptimConfig(warmup_steps=0, warmup_ratio=0.1), 50) == 5
        and warmup_length(OptimConfig(warmup_steps=3, warmup_ratio=0.1), 50) == 3
    )
    assert all(0 < one <= 1 for one in curve(3, warmup_steps=10)), "a warm-up longer than the run"


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_cosine_and_linear_fall_from_the_peak_towards_their_share_of_it(kind: str) -> None:
    found = curve(1000, schedule=kind, min_ratio=0.1)
    assert found[0] == 1.0 and found[500] == pytest.approx(0.55) and found[-1] == pytest.approx(0.1, abs=1e-3)
    assert all(later < earlier for earlier, later in itertools.pairwise(found))
    assert found[250] == pytest.approx(0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi / 4)) if kind == "cosine" else 0.775)
    assert rate_share(OptimConfig(schedule=kind, min_ratio=0.1), 5000, 1000) == pytest.approx(0.1), (
        "behind its end it stays there"
    )


def test_wsd_holds_and_then_falls_over_its_last_part_and_constant_never_falls() -> None:
    found = curve(100, schedule="wsd", cooldown=0.2, min_ratio=0.0)
    assert found[:81] == [1.0] * 81 and found[90] == pytest.approx(0.5) and found[99] == pytest.approx(0.05)
    assert curve(100, schedule="wsd", cooldown=0.0) == curve(100, schedule="constant") == [1.0] * 100


# ---- the rules ----


class Small(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A matrix, a fused one, norms, an embedding: one of each kind of parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(17, 24)
        self.fused = torch.nn.Linear(24, 48, bias=False)
        self.fused.parts = (24, 12, 12)  # as the decoder's Linear tells what it fuses
        self.norm = torch.nn.LayerNorm(48, bias=False)
        self.down = torch.nn.Linear(48, 24, bias=False)
        self.head = torch.nn.Linear(24, 17, bias=False)

    def forward(self, ids: Any) -> Any:
        return self.head(torch.nn.functional.gelu(self.down(self.norm(self.fused(self.embed(ids))))))


def loss_of(model: Small, step: int, scale: float = 1.0) -> Any:
    ids = torch.randint(0, 17, (64,), generator=torch.Generator().manual_seed(step))
    return torch.nn.functional.cross_entropy(model(ids), (ids * 5 + 3) % 17) * scale


def train(c: OptimConfig, steps: int, scale: float = 1.0) -> tuple[Small, Optimizer, list[float]]:
    model = Small()
    optimizer = Optimizer(model, c)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, scale)
        loss.backward()
        losses.append(float(loss.detach()) / scale)
        optimizer.step(1.0, gradient_norm(optimizer.parameters), torch.zeros(()))
        optimizer.zero()
    return model, optimizer, losses


@pytest.mark.parametrize("scale", [1.0, 400.0], ids=["below the clip", "clipped"])
@pytest.mark.parametrize("limit", [0.0, 1.0], ids=["no limit", "limit 1"])
def test_adamw_is_torchs_with_clipping_before_it(scale: float, limit: float) -> None:
    c = OptimConfig(kind="adamw", learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, max_grad_norm=limit)
    mine, _, losses = train(c, 5, scale)
    model = Small()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(5):
        loss = loss_of(model, step, scale)
        loss.backward()
        assert losses[step] == pytest.approx(float(loss.detach()) / scale, rel=1e-6)
        if limit:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        theirs.step()
        theirs.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            mine.get_parameter(name), parameter, rtol=2e-6, atol=2e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_scaled_loss_makes_the_same_steps(kind: str) -> None:
    """By a power of two: not a bit differs, clipping included."""
    c = OptimConfig(kind=kind, learning_rate=1e-2, max_grad_norm=0.1)
    plain, _, _ = train(c, 4)
    model = Small()
    optimizer, scale = Optimizer(model, c), torch.tensor(4096.0)
    for step in range(4):
        (loss_of(model, step) * scale).backward()
        optimizer.step(1.0, gradient_norm(optimizer.parameters) / scale, torch.zeros(()), scale)
        optimizer.zero()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-6, atol=1e-7)


def test_the_scale_falls_with_every_overflow_and_grows_after_many_steps_without() -> None:
    scale, yes, no = loss_scale.LossScale(torch.device("cpu")), torch.ones(()), torch.zeros(())
    for power in range(16, 0, -1):
        assert float(scale.value) == 2.0**power and not scale.lasting(yes)
        scale.update(yes, no)
    assert float(scale.value) == 1.0 and scale.lasting(yes) and not scale.lasting(no)
    scale.update(yes, no)
    assert float(scale.value) == loss_scale.SMALLEST
    for _ in range(loss_scale.GROWS_AFTER - 1):
        scale.update(no, no)
    other = loss_scale.LossScale(torch.device("cpu"))
    other.go_on(scale.to_json())
    scale.update(no, yes)
    assert float(scale.value) == 1.0, "a bad step changes nothing"
    other.update(no, no)
    assert float(other.value) == 2.0, "as the checkpoint left it"
    other.go_on(None)
    assert float(other.value) == 2.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_step_moves_nothing_and_does_not_count(kind: str, value: float) -> None:
    model, optimizer, _ = train(OptimConfig(kind=kind, learning_rate=1e-2), 3)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    state = {name: tensor.clone() for name, tensor, _ in optimizer.state()}
    loss_of(model, 3).backward()
    model.fused.weight.grad[3, 5] = value
    optimizer.step(1.0, gradient_norm(optimizer.parameters), torch.ones(()))
    optimizer.zero()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    for name, tensor, _ in optimizer.state():
        assert torch.equal(tensor, state[name]), name

    # The next good one is the fourth, not the fifth: the corrections of the moments have not counted it.
    other, same, _ = train(OptimConfig(kind=kind, learning_rate=1e-2), 3)
    for one, rule in ((model, optimizer), (other, same)):
        loss_of(one, 4).backward()
        rule.step(0.5, gradient_norm(rule.parameters), torch.zeros(()))
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)) and not torch.equal(parameter, weights[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_state_copied_by_name_and_the_count_of_steps_go_on_bit_for_bit(kind: str) -> None:
    c = OptimConfig(kind=kind, learning_rate=1e-2)
    model, optimizer, _ = train(c, 4)
    other = Small(seed=1)
    copied = Optimizer(other, c)
    other.load_state_dict(model.state_dict())
    there = {name: tensor for name, tensor, _ in copied.state()}
    for name, tensor, like in optimizer.state():
        there[name].copy_(tensor)
        assert "8" in name.rpartition(".")[2] or tensor.shape == like.shape
    copied.set_count(4)
    for one, rule in ((model, optimizer), (other, copied)):
        loss_of(one, 9).backward()
        rule.step(1.0, gradient_norm(rule.parameters), torch.zeros(()))
    assert all(torch.equal(parameter, other.get_parameter(name)) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_learns_a_small_problem(kind: str) -> None:
    _, _, losses = train(OptimConfig(kind=kind, learning_rate=1e-2, muon_learning_rate=0.02, weight_decay=0.0), 60)
    assert losses[0] > 2.5 and losses[-1] < 0.25, losses[::10]


def test_eight_bits_learn_a_regression_nearly_as_well_as_thirty_two() -> None:
    def fit(kind: str) -> float:
        torch.manual_seed(0)
        x = torch.randn(512, 20)
        y = (x @ torch.randn(20, 8)).tanh() + 0.05 * torch.randn(512, 8)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 64, bias=False), torch.nn.Tanh(), torch.nn.Linear(64, 8, bias=False)
        )
        optimizer = Optimizer(model, OptimConfig(kind=kind, learning_rate=5e-3, weight_decay=0.0))
        for step in range(300):
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step(
                rate_share(OptimConfig(warmup_ratio=0.0), step, 300),
                gradient_norm(optimizer.parameters),
                torch.zeros(()),
            )
            optimizer.zero()
        return float((model(x) - y).square().mean().detach())

    full, eight = fit("adamw"), fit("adamw8bit")
    assert full < 0.02 and eight < full * 1.05, (full, eight)


def test_eight_bits_keep_two_bytes_a_parameter_and_two_scales_a_block() -> None:
    model = torch.nn.Linear(300, 70, bias=False)  # a row is two blocks of 150
    optimizer = Optimizer(model, OptimConfig(kind="adamw8bit"))
    kept = sum(tensor.numel() * tensor.element_size() for _, tensor, _ in optimizer.state())
    assert kept == 70 * 2 * (2 * 150 + 2 * 4) and kept < 21_000 * 2.06


def test_packed_moments_keep_sign_zero_and_order_of_magnitude() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, BLOCK, generator=generator) * 10.0 ** torch.linspace(-12, 4, 16)[:, None]
    x[:, ::7] = 0
    first = unpack_first(*pack_first(x))
    assert torch.equal(first[:, ::7], x[:, ::7]) and bool(((first == 0) | (first.sign() == x.sign())).all())
    assert float(((first - x).abs() / x.abs().amax(-1, keepdim=True)).max()) < 0.01, (
        "within a hundredth of the block's largest"
    )
    squares = x.square()
    second = [unpack_second(*pack_second(squares, torch.tensor(float(step)))) for step in range(64)]
    assert all(torch.equal(one == 0, squares == 0) for one in second), (
        "never 0 where there was something: the step would be infinite"
    )
    large = squares > squares.amax(-1, keepdim=True) * 1e-3
    assert max(float(((one / squares)[large] - 1).abs().max()) for one in second) < 0.1
    mean = torch.stack(second).mean(0)
    assert float(((mean / squares)[large] - 1).abs().max()) < 0.02, "over the steps it is rounded neither up nor down"
    assert torch.equal(unpack_first(*pack_first(torch.zeros(1, BLOCK))), torch.zeros(1, BLOCK))


@pytest.mark.parametrize("size", [(64, 64), (32, 128), (128, 32), (3, 48, 24)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_of_muon_has_singular_values_near_one(size: tuple[int, ...], dtype: str) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(2)) * 1e-3
    found = orthogonal(x, getattr(torch, dtype)).float()
    values = torch.linalg.svdvals(found)
    assert found.shape == x.shape and float(values.min()) > 0.4 and float(values.max()) < 1.3, values
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    assert float(torch.nn.functional.cosine_similarity(found.flatten(), (left @ right).flatten(), dim=0)) > 0.95, (
        "it points where the nearest orthogonal one does"
    )


def muon_step(change: Callable[[Any], None]) -> dict[str, Any]:
    """The update that one step of Muon makes, per parameter."""
    model = Small()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = Optimizer(model, OptimConfig(kind="muon", muon_learning_rate=0.02, weight_decay=0.0, max_grad_norm=0.0))
    loss_of(model, 0).backward()
    change(model)
    optimizer.step(1.0, gradient_norm(optimizer.parameters), torch.zeros(()))
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def test_the_parts_of_a_fused_matrix_are_maps_of_their_own() -> None:
    plain = muon_step(lambda model: None)

    def louder(model: Any) -> None:
        model.fused.weight.grad[24:36] *= 1000.0  # only the second part: of one matrix it would drown the others

    loud = muon_step(louder)
    for begin, end in ((0, 24), (24, 36), (36, 48)):
        one = plain["fused.weight"][begin:end]
        torch.testing.assert_close(loud["fused.weight"][begin:end], one, rtol=1e-3, atol=1e-5)
        values = torch.linalg.svdvals(one) / 0.02
        assert float(values[:12].min()) > 0.4 and float(values.max()) < 1.3, (
            begin,
            values,
        )  # 17 words: the gradient has no higher rank
    # Embedding, head and norms are AdamW's: its first step is the learning rate in every coordinate that has a gradient.
    for name in ("embed.weight", "head.weight", "norm.weight"):
        moved = plain[name].abs()
        assert float(moved.max()) == pytest.approx(3e-4, rel=1e-3), name


def test_the_norm_is_that_of_all_gradients_together_and_not_finite_when_one_is_not() -> None:
    model = Small()
    loss_of(model, 0).backward()
    parameters = list(model.parameters())
    whole = torch.cat([parameter.grad.flatten() for parameter in parameters]).double().norm()
    assert float(gradient_norm(parameters)) == pytest.approx(float(whole), rel=1e-6)
    for value in (math.nan, math.inf):
        model.down.weight.grad[0, 0] = value
        assert not bool(torch.isfinite(gradient_norm(parameters)))
