"""The paged engine's Triton kernels: on a GPU, or by Triton's interpreter (TRITON_INTERPRET=1 before the tests start)."""

from __future__ import annotations

import os
import random
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from stoker.contract.frozen import replace
from stoker.training.generate import plain
from stoker.training.generate.config import Sampling
from stoker.training.model.config import ModelConfig
from stoker.training.serve import engine as engines
from stoker.training.serve.engine import PagedEngine, Sizes
from stoker.training.serve.paged import FIRST_BLOCK, Kernels
from test_serve_engine import alone, made, requests_of, served

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = 16


@pytest.fixture
def kernels() -> Kernels:
    return Kernels(import_module("stoker.training.generate.kernel"), import_module("stoker.training.serve.kernel"))


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (8, 8, 64), (16, 1, 128)])
def test_a_token_sees_all_of_its_row_wherever_its_blocks_lie(
    kernels: Kernels, rows: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    """1 row is split among programs, 40 are not."""
    draw = random.Random(rows)
    across, blocks = 20, 20 * rows + 1
    kv = torch.randn(2, 1, kv_heads, blocks * SIZE, head_dim, device=DEVICE)
    kv[:, :, :, -SIZE:] = float("nan")  # nobody's, which no row reads
    order = draw.sample(range(blocks - 1), blocks - 1)
    told = torch.full((rows, FIRST_BLOCK + across), blocks - 1, dtype=torch.int64)
    want = torch.empty(rows, heads * head_dim)
    q = torch.randn(rows, heads, head_dim, device=DEVICE)
    for row in range(rows):
        length = (1, 16, 17, 319)[row] if row < 4 else draw.randint(1, across * SIZE)
        own = order[row * across : row * across + -(-length // SIZE)]
        told[row, 0] = length - 1
        told[row, FIRST_BLOCK : FIRST_BLOCK + len(own)] = torch.tensor(own)
        slots = [own[place // SIZE] * SIZE + place % SIZE for place in range(length)]
        want[row] = plain.attend(q[row : row + 1], kv[:, :, :, slots], None).cpu()
    found = kernels.paged.attend(q, kv, told.to(DEVICE), FIRST_BLOCK, SIZE)
    torch.testing.assert_close(found.cpu(), want, rtol=1e-4, atol=1e-5)


def test_rows_are_split_only_where_there_are_few_of_them(kernels: Kernels) -> None:
    split = kernels.paged.splits_for
    assert [split(rows, 8, 4096, 64) for rows in (256, 64, 32, 16, 4, 1)] == [1, 1, 2, 4, 16, 32]
    assert split(1, 8, 256, 64) == 4 and split(1, 8, 16, 64) == 1


@pytest.mark.parametrize("qk_norm", [False, True])
def test_keys_and_values_of_a_step_go_to_each_rows_own_slot(kernels: Kernels, qk_norm: bool) -> None:
    heads, kv_heads, head_dim, rows = 4, 2, 16, 5
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, device=DEVICE)
    angle = torch.randn(rows, head_dim // 2, device=DEVICE)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
    norm = torch.rand(heads + kv_heads, head_dim, device=DEVICE) if qk_norm else None
    where = torch.tensor([70, 3, 18, 19, 0], device=DEVICE)
    ours, theirs = (torch.zeros(2, 1, kv_heads, 96, head_dim, device=DEVICE) for _ in range(2))
    args: tuple[Any, ...] = (qkv, cos, sin, norm, heads, 1e-6)
    want = plain.turn(*args, theirs, where, rows)
    found = kernels.between.turn(*args, ours, where, rows)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


WIDE = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=16, ff=48, vocab_size=96, init_std=0.3)


@pytest.mark.parametrize("c", [WIDE, replace(WIDE, qk_norm=True, kv_heads=1, tied=False)], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("turn", [1, 4])
def test_answers_by_kernels_are_those_of_one_at_a_time(
    kernels: Kernels, c: ModelConfig, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32: greedy ones are equal, drawn ones too, up to a number that falls on the border of two tokens. With turns of several
    tokens prompts are packed, as in 16 bits."""
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(engines, "_kernels", lambda *_: kernels)
    model = made(c).to(DEVICE)
    model.place(torch.device(DEVICE))
    draw = random.Random(4)
    count = 12 if INTERPRETED else 150
    hows = (Sampling(0.0), Sampling(), Sampling(0.7), Sampling(1.2, top_k=7), Sampling(0.9, top_p=0.8))
    requests = requests_of(draw, count, hows)
    engine = PagedEngine(model, Sizes(slots=6, length=64, memory=192, block=SIZE, turn=turn))
    engine._paged._packs = turn > 1
    found, given_up = served(engine, requests, draw)
    kept = [request for request in requests if request.id not in given_up]
    want = alone(model, kept)
    assert {one.id: tuple(found[one.id].tokens) for one in kept} == want
