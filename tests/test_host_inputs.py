"""Inputs of recomputed blocks in host memory: the same bits as without, in memory that is taken once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from stoker.contract.names import Refusal
from stoker.contract.shape import replace
from stoker.training.model import host_inputs, ready
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.config import ComputeConfig, host_bytes
from test_model import SMALL, tokens

CPU = torch.device("cpu")
SHAPE = replace(SMALL, layers=5)


def made(said: list[str] | None = None, frozen: bool = False, **compute: str) -> Decoder:
    model = Decoder(SHAPE, 64)
    model.start(1)
    model.embed.requires_grad_(not frozen)
    ready.make_ready(model, ComputeConfig(**compute), CPU, (said if said is not None else []).append)
    return model


def learned(model: Decoder, batches: Sequence[Tensor]) -> list[Tensor]:
    losses = []
    for batch in batches:  # gradients add up
        loss = model(batch, batch.roll(-1, 1), torch.tensor(1 / 32))
        loss.backward()
        losses.append(loss.detach())
    return losses + [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recompute", ["full", "4", "2"])
def test_losses_and_gradients_have_the_same_bits(recompute: str, frozen: bool) -> None:
    batches = [tokens(2, 16, seed=1), tokens(3, 24, seed=2), tokens(1, 16, seed=3)]
    plain = learned(made(frozen=frozen, recompute=recompute), batches)
    moved = learned(made(frozen=frozen, recompute=recompute, activations="host"), batches)
    assert len(plain) == len(moved) > 3
    assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))


def test_two_forward_passes_before_a_backward_pass_do_not_meet() -> None:
    found = []
    for where in ("device", "host"):
        model = made(recompute="full", activations=where)
        losses = [model(batch, batch, torch.tensor(1.0)) for batch in (tokens(2, 16, seed=1), tokens(2, 16, seed=2))]
        (losses[0] + 2 * losses[1]).backward()
        losses[0] = losses[1] = model(tokens(1, 8, seed=3))  # never goes backward
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_host_memory_is_taken_once_and_as_much_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, real = list[int](), host_inputs.host_slab

    def counted(size: int, blocks: int) -> tuple[int, int]:
        taken.append(real(size, blocks)[0])
        return real(size, blocks)

    monkeypatch.setattr(host_inputs, "host_slab", counted)
    model = made(recompute="full", activations="host")
    learned(model, [tokens(2, 16, seed=seed) for seed in range(5)])
    learned(model, [tokens(1, 16, seed=1)] * 3)  # into the same memory
    assert sum(taken) == host_bytes(2 * 16 * SHAPE.dim * 4, 5)
    taken.clear()
    learned(model, [tokens(4, 16, seed=1)] * 3)
    assert sum(taken) == host_bytes(4 * 16 * SHAPE.dim * 4, 5)


def test_the_planned_host_memory_holds_every_input_and_little_more() -> None:
    for size in (1 << 20, 5120 * 2048 * 2, 5376 * 8192 * 2, 300 << 20):
        for blocks in (2, 33, 64):
            inputs = size * (blocks - 1)
            assert inputs <= host_bytes(size, blocks) <= (2 if blocks == 2 else 1.3) * inputs
    assert host_bytes(1 << 20, 1) == host_bytes(1 << 20, 0) == 0


def test_what_it_can_not_do_is_said() -> None:
    said: list[str] = []
    made(said, recompute="full", activations="host")
    assert any("no GPU here" in line for line in said)
    made(said := [], recompute="1", activations="host")
    assert any("nothing to move" in line for line in said)
    for words in ({"compile": "on", "recompute": "full"}, {"recompute": "selective"}):
        with pytest.raises(Refusal, match=r"compute\.activations host"):
            made(activations="host", **words)
