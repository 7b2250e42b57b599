"""What blocks keep in host memory: the same bits as without, in memory that is taken once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from stoker.contract.errors import Refusal
from stoker.contract.frozen import replace
from stoker.training.model import host_kept, ready
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.config import KEPT, RECOMPUTED, ComputeConfig, block_kinds, host_bytes
from test_model import SMALL, tokens

CPU = torch.device("cpu")
SHAPE = replace(SMALL, layers=5)


def made(
    said: list[str] | None = None, frozen: bool = False, shape: ModelConfig = SHAPE, **compute: str
) -> Decoder:  # fmt: skip
    model = Decoder(shape, 64)
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


@pytest.fixture
def all_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors, too: those of this model."""
    monkeypatch.setattr(host_kept, "HOST_LEAST", 1)


@pytest.mark.usefixtures("all_moves")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recompute", ["full", "4", "2", "off"])
def test_losses_and_gradients_have_the_same_bits(recompute: str, frozen: bool) -> None:
    batches = [tokens(2, 16, seed=1), tokens(3, 24, seed=2), tokens(1, 16, seed=3)]
    plain = learned(made(frozen=frozen, recompute=recompute), batches)
    moved = learned(made(frozen=frozen, recompute=recompute, activations="host"), batches)
    assert len(plain) == len(moved) > 3
    assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))


@pytest.mark.usefixtures("all_moves")
@pytest.mark.parametrize("recompute", ["full", "2", "off"])
def test_two_forward_passes_before_a_backward_pass_do_not_meet(recompute: str) -> None:
    found = []
    for where in ("device", "host"):
        model = made(recompute=recompute, activations=where)
        losses = [model(batch, batch, torch.tensor(1.0)) for batch in (tokens(2, 16, seed=1), tokens(2, 16, seed=2))]
        (losses[0] + 2 * losses[1]).backward(retain_graph=True)
        losses[0].backward()  # once more
        losses[0] = losses[1] = model(tokens(1, 8, seed=3))  # never goes backward
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.usefixtures("all_moves")
def test_what_a_block_saves_is_read_from_the_copy_that_was_made_of_each_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, left, read = tokens(2, 16, seed=1), list[int](), list[int]()
    real = host_kept.copy
    monkeypatch.setattr(host_kept, "copy", lambda to, of: (left.append(of.nbytes), real(to, of))[1])
    model = made(recompute="off", activations="host")
    loss = model(batch, batch, torch.tensor(1.0))
    each = len(left) / (SHAPE.layers - 1)
    assert each == int(each) > 3, "the last block keeps all"
    assert max(left) < sum(p.nbytes for p in model.layers[0].parameters()), "no weights"
    monkeypatch.setattr(host_kept, "copy", lambda to, of: (read.append(of.nbytes), to.zero_())[1])
    loss.backward()
    assert sorted(read) == sorted(left), "each comes back once"
    spoiled = [p.grad for p in model.layers[0].parameters() if p.grad is not None]
    monkeypatch.setattr(host_kept, "copy", real)
    right = learned(made(recompute="off", activations="host"), [batch])[1:]
    assert not any(torch.equal(one, other) for one, other in zip(spoiled, right[1:], strict=False) if one.dim() == 2)


@pytest.mark.usefixtures("all_moves")
@pytest.mark.parametrize("recompute", ["full", "2", "off"])
def test_host_memory_is_taken_once_and_as_much_as_planned(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, real = list[host_kept._Room](), host_kept._Room._grow
    monkeypatch.setattr(host_kept._Room, "_grow", lambda room, pinned: (taken.append(room), real(room, pinned))[1])
    model = made(recompute=recompute, activations="host")

    def grown() -> int:
        rooms, sizes = set(taken), []
        for room in rooms:
            slab = host_kept.host_slab(room._size, room._pieces)[0]
            sizes.append(slab * taken.count(room))
            assert sizes[-1] == host_bytes(room._size, room._pieces)
        taken.clear()
        return sum(sizes)

    learned(model, [tokens(2, 16, seed=1)])
    once = grown()
    assert recompute != "full" or once == host_bytes(2 * 16 * SHAPE.dim * 4, 4)
    learned(model, [tokens(2, 16, seed=seed) for seed in range(5)])
    learned(model, [tokens(1, 16, seed=1)] * 3)  # into the same memory
    assert not taken
    learned(model, [tokens(4, 16, seed=1)] * 3)
    assert grown() > once


def test_the_planned_host_memory_holds_every_piece_and_little_more() -> None:
    for size in (1 << 20, 5120 * 2048 * 2, 5376 * 8192 * 2, 300 << 20):
        for pieces in (1, 32, 63):
            total = size * pieces
            assert total <= host_bytes(size, pieces) <= (2 if pieces == 1 else 1.3) * total
    assert host_bytes(1 << 20, 0) == 0


def test_blocks_that_move_what_they_save_are_spread_among_those_that_are_recomputed() -> None:
    for layers in (1, 2, 5, 32, 61):
        for again in range(layers + 1):
            kinds = block_kinds(layers, again, host=True)
            assert (len(kinds), kinds.count(RECOMPUTED)) == (layers, again)
            assert kinds.count(KEPT) == (again < layers) and (again == layers or kinds[-1] == KEPT)
            between = "".join(kind[0] for kind in kinds[:-1]).split("o")[1:-1]
            assert not between or max(map(len, between)) - min(map(len, between)) <= 1, kinds
            assert block_kinds(layers, again, host=False) == (RECOMPUTED,) * again + (KEPT,) * (layers - again)


def test_a_look_at_operations_computes_every_block_again() -> None:
    model = made(recompute="2", activations="host")
    model.fuse(True)
    ready.unfuse(model)
    batch = tokens(2, 16, seed=1)
    plain = learned(made(), [batch])
    assert all(torch.equal(one, other) for one, other in zip(plain, learned(model, [batch]), strict=True))
    assert all(block.forward.func is ready._checkpointed for block in model.layers)


def test_what_it_can_not_do_is_said() -> None:
    said: list[str] = []
    made(said, recompute="full", activations="host")
    assert any("no GPU here" in line for line in said)
    made(said := [], recompute="off", activations="host", shape=replace(SHAPE, layers=1))
    assert any("nothing to move" in line for line in said)
    for words in ({"compile": "on", "recompute": "full"}, {"recompute": "selective"}):
        with pytest.raises(Refusal, match=r"compute\.activations host"):
            made(activations="host", **words)
