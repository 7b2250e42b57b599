"""Attention within the documents of packed rows: by offsets, by blocks or by one bias; and what it costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from stoker.training.model.attention import Documents, attend, documents, kernels, packed_kernel, seen_by
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen and flex attention need a GPU")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _usual_kernels() -> Iterator[None]:
    with kernels("auto"):
        yield


def rows(batch: int, length: int, seed: int = 0) -> Tensor:
    """Documents of 1 to a third of the row."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(batch, length, generator=generator) < 6 / length
    return begins.int().cumsum(1).int()


def test_documents_are_found_and_their_sizes_rounded_up() -> None:
    segments = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
    packed = documents(segments, CPU)
    assert packed is not None
    assert packed.offsets.dtype == torch.int32
    assert packed.offsets.tolist() == [0, 3, 5, 6, 10, 10, 10, 10, 10] and packed.longest == 4
    whole = documents(torch.zeros(1, 5), CPU)
    assert whole is not None and whole.longest == 5, "never longer than a row"
    assert documents(None, CPU) is None


def test_all_layers_share_one_bias_where_no_kernel_knows_documents() -> None:
    model = Decoder(ModelConfig(layers=3, dim=32, heads=4, kv_heads=2, head_dim=8, ff=64, vocab_size=16), 16)
    x = torch.zeros(2, 16, 32)
    biases = [seen.bias for _, _, seen in model._views(x, documents(rows(2, 16), CPU))[0]]
    assert len(biases) == 1 and biases[0] is not None and biases[0].dtype == x.dtype
    assert packed_kernel(CPU, torch.bfloat16, 64) == "bias"


@needs_gpu
@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_every_kernel_has_the_values_and_gradients_of_the_bias(
    window: int, cap: float, packed: bool, scale: float | None
) -> None:
    if not packed and not window and not cap:
        pytest.skip("plain causal attention")
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(1)
    shapes = ((2, 256, 4, 64), (2, 256, 2, 64), (2, 256, 2, 64))
    made = [torch.randn(s, device=device, dtype=torch.bfloat16, generator=generator) for s in shapes]
    where = documents(rows(2, 256), device) if packed else None
    kind = packed_kernel(device, torch.bfloat16, 64, window=window, cap=cap)
    assert kind == ("flex" if cap else "varlen") or (window and torch.__version__ < "2.11")

    def run(which: str) -> list[Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in made)
        with kernels(which):
            y = attend(q, k, v, seen_by(where, window, q, head_dim=64, cap=cap), 0.0, scale, cap)
        y.backward(torch.ones_like(y))
        return [y.detach(), *(x.grad for x in (q, k, v))]  # type: ignore[list-item]

    for name, found, want in zip("yqkv", run("auto"), run("math"), strict=True):
        error = ((found.float() - want.float()).norm() / want.float().norm()).item()
        assert error < 0.02, (name, error)


@needs_gpu
@pytest.mark.parametrize("fused", [False, True])
def test_packing_takes_no_more_memory_than_whole_rows(fused: bool) -> None:
    device = torch.device("cuda")
    c = ModelConfig(layers=6, dim=512, heads=8, kv_heads=4, head_dim=64, ff=1024, vocab_size=1024, qk_norm=True)
    with torch.device(device):
        model = Decoder(c, 8192, torch.bfloat16)
    model.start(0)
    model.to(torch.bfloat16)
    model.fuse(fused)
    inputs = torch.randint(0, 1024, (1, 8192), device=device)

    def peak(packed: Documents | None) -> int:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model(inputs, inputs, None, packed).backward()
        return torch.cuda.max_memory_allocated()

    peak(None)
    whole, packed = peak(None), peak(documents(rows(1, 8192), device))
    assert packed < 1.05 * whole, (packed, whole)


@needs_gpu
def test_a_compiled_block_takes_documents() -> None:
    device = torch.device("cuda")
    c = ModelConfig(layers=2, dim=256, heads=4, kv_heads=2, head_dim=64, ff=512, vocab_size=512)
    with torch.device(device):
        model = Decoder(c, 256, torch.bfloat16)
    model.start(0)
    inputs = torch.randint(0, 512, (2, 256), device=device)
    packed = documents(rows(2, 256), device)
    want = model(inputs, inputs, None, packed).item()
    for block in model.layers:
        block.compile(fullgraph=True, dynamic=False)
    assert model(inputs, inputs, None, packed).item() == pytest.approx(want, rel=1e-2)
