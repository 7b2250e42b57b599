"""Attention within the documents of packed rows: by offsets, by blocks or by one bias; and what it costs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import Stoker, at_length
from devices import needs_gpu
from stoker.contract.frozen import replace
from stoker.training.data.config import DataConfig
from stoker.training.data.prepare import prepare
from stoker.training.data.shards import Prepared
from stoker.training.loop.feeder import from_prepared
from stoker.training.model import hf, outside
from stoker.training.model.attention import Documents, attend, begins, documents, kernels, packed_kernel, seen_by
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.model.hf_config import shape_for
from stoker.training.tokenizer.config import TokenizerConfig
from stoker.training.tokenizer.tokenizer import bytes_tokenizer

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


TEXTS = [
    "The river took seven boats.",
    "One.",
    "And she'll not come back, twelve times over, or so they say.",
    "Two words.",
]


def stream(folder: Path) -> tuple[Prepared, DataConfig]:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 8))
    data = DataConfig(
        path=(str(folder / "texts.jsonl"),),
        validation="0",
        context_length=64,
        cache=str(folder / "cache"),
        num_workers=1,
        documents=True,
    )
    return prepare(data, TokenizerConfig(path="bytes"), lambda line: None), data


def test_documents_of_a_stream_end_with_their_end_token(tmp_path: Path) -> None:
    prepared, data = stream(tmp_path)
    samples = from_prepared(prepared, data).train
    assert samples.packed and not samples.chat, "every target is learned"
    batch = samples.batch(np.arange(len(samples)))
    assert batch.segments is not None and batch.segments.dtype == np.int32
    for row, segments in zip(batch.inputs.tolist(), batch.segments.tolist(), strict=True):
        for place in range(1, 64):
            assert segments[place] - segments[place - 1] == (row[place - 1] == prepared.end_id)
    plain = from_prepared(prepared, replace(data, documents=False)).train
    whole = plain.batch(np.arange(len(plain)))
    assert not plain.packed and whole.segments is None
    assert np.array_equal(whole.inputs, batch.inputs) and np.array_equal(whole.targets, batch.targets)


def alone(model: Any, inputs: Tensor, segments: Tensor) -> Tensor:
    """Logits of each document as if there were no other."""
    found = []
    for row, own in zip(inputs, segments, strict=True):
        edges = [*begins(own[None])[0].nonzero()[:, 0].tolist(), len(own)]
        found.append(torch.cat([model(row[None, a:b])[0] for a, b in itertools.pairwise(edges)]))
    return torch.stack(found)


@pytest.mark.parametrize("engine", ["plain", "windows and soft caps", "transformers"])
def test_a_document_of_a_stream_has_the_logits_it_has_alone(engine: str, tmp_path: Path) -> None:
    prepared, data = stream(tmp_path)
    samples = from_prepared(prepared, data).train
    batch = samples.batch(np.arange(len(samples)))
    inputs, segments = torch.from_numpy(batch.inputs), torch.from_numpy(batch.segments)
    assert int(segments.max()) > 2
    model: Any
    if engine == "transformers":
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        shape = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=272, **none)
        transformers.BloomForCausalLM(shape).save_pretrained(tmp_path / "bloom")
        given = shape_for(ModelConfig(), str(tmp_path / "bloom"))
        model = outside.opened(given, 64, torch.float32, torch.device("cpu"), lambda line: None)
    else:
        more: dict[str, Any] = (
            {} if engine == "plain" else {"windows": (5, 0), "attention_cap": 20.0, "final_cap": 10.0}
        )
        model = Decoder(
            ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ff=64, vocab_size=272, **more), 64
        )
        model.start(0)
    with torch.no_grad():
        want = alone(model, inputs, segments)
        torch.testing.assert_close(model(inputs, None, None, documents(segments, torch.device("cpu"))), want)
        assert not torch.allclose(model(inputs), want, atol=1e-3), "the documents before it would change them"


@needs_gpu
def test_fused_blocks_keep_documents_of_a_stream_apart(tmp_path: Path) -> None:
    prepared, data = stream(tmp_path)
    samples = from_prepared(prepared, data).train
    batch = samples.batch(np.arange(len(samples)))
    device = torch.device("cuda")
    inputs, segments = torch.from_numpy(batch.inputs).to(device), torch.from_numpy(batch.segments)
    with torch.device(device):
        c = ModelConfig(layers=2, dim=256, heads=4, kv_heads=2, head_dim=64, ff=512, vocab_size=512)
        model = Decoder(c, 64, torch.bfloat16)
    model.start(0)
    model.fuse(True)
    with torch.no_grad():
        found = model(inputs, None, None, documents(segments, device)).float()
        want = alone(model, inputs, segments).float()
    assert ((found - want).norm() / want.norm()).item() < 0.02


@at_length
def test_pretraining_on_documents_starts_with_the_loss_of_each_alone(stoker: Stoker, tmp_path: Path) -> None:
    """The real command. With the option off the loss is that of whole rows."""
    prepared, data = stream(tmp_path)
    samples = from_prepared(prepared, data).train
    model = Decoder(ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, head_dim=8, ff=64, vocab_size=272), 64)
    model.start(0)
    with torch.no_grad():
        for parameter in model.parameters():  # so that what is seen matters
            if parameter.dim() == 2:
                parameter *= 10
    bytes_tokenizer().save(str(tmp_path / "words"))
    hf.save(model, str(tmp_path / "hf"), say=lambda line: None, tokenizer_folder=str(tmp_path / "words"))
    batch = samples.batch(np.arange(len(samples)))
    inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
    found = {}
    for documents_on in ("true", "false"):
        done = stoker.torch(
            "train", "pretrain", "--model.load", str(tmp_path / "hf"), "--data", data.path[0], "--data.validation", "0",
            "--data.documents", documents_on, "--context_length", "64", "--batch.tokens", str(64 * len(samples)), "--max-steps", "1",
            "--log_every", "1", "--parallel.device", "cpu", "--no-preflight", "--name", documents_on,
        )  # fmt: skip
        assert done.code == 0, done.out + done.err
        (run,) = (path for path in (stoker.cwd / "runs").glob(f"*-{documents_on}") if not path.is_symlink())
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        found[documents_on] = next(line["loss"] for line in lines if "loss" in line)
    with torch.no_grad():
        apart = alone(model, inputs, torch.from_numpy(batch.segments))
        want = {"true": apart, "false": model(inputs)}
    for key, logits in want.items():
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
        assert found[key] == pytest.approx(loss, rel=1e-4), key
    assert abs(found["true"] - found["false"]) > 1e-2
