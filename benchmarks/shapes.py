"""Shapes of published models, and decoders of such a shape with random weights and adapters: what the benchmarks of fine-tuning share.

PYTHONPATH=src python benchmarks/shapes.py 8b [FOLDER]      writes such a model, once, as transformers has it, with a tokenizer of bytes; prints where
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, cast

import torch

from stoker.training.model import adapters, hf, nf4, ready
from stoker.training.model.config import AdapterConfig, ModelConfig, tensors
from stoker.training.model.decoder import Decoder
from stoker.training.model.linear import Linear
from stoker.training.model.nf4_size import BLOCK, SECOND_BLOCK
from stoker.training.parallel.config import ComputeConfig
from stoker.training.tokenizer.tokenizer import bytes_tokenizer


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _model(
    family: str, layers: int, dim: int, heads: int, kv_heads: int, ff: int, vocab: int, **more: Any
) -> ModelConfig:
    more = {"head_dim": dim // heads, "tied": False, **more}
    return ModelConfig(
        family=family, layers=layers, dim=dim, heads=heads, kv_heads=kv_heads, ff=ff, vocab_size=vocab, **more
    )


def _qwen3(layers: int, dim: int, heads: int, ff: int, *, tied: bool) -> ModelConfig:
    return _model("qwen3", layers, dim, heads, 8, ff, 151936, head_dim=128, tied=tied, qk_norm=True)


def _gemma3(layers: int, dim: int, heads: int, kv_heads: int, ff: int) -> ModelConfig:
    return _model(
        "gemma3_text", layers, dim, heads, kv_heads, ff, 262144, head_dim=256, tied=True, qk_norm=True, norms="both",
        norm_offset=1.0, activation="gelu_tanh", attention_scale=256**-0.5, embedding_scale=dim**0.5, window_theta=10000.0,
        windows=tuple(0 if at % 6 == 5 else 512 for at in range(layers)),
    )  # fmt: skip


SHAPES = {
    "tiny": _model("llama", 2, 128, 4, 2, 256, 512),
    "smollm2-135m": _model("llama", 30, 576, 9, 3, 1536, 49152, tied=True),
    "tinyllama-1.1b": _model("llama", 22, 2048, 32, 4, 5632, 32000),
    "llama-3.2-3b": _model("llama", 28, 3072, 24, 8, 8192, 128256, tied=True),
    "llama-3.1-8b": _model("llama", 32, 4096, 32, 8, 14336, 128256),
    "qwen2.5-0.5b": _model("qwen2", 24, 896, 14, 2, 4864, 151936, tied=True, qkv_bias=True),
    "qwen2.5-1.5b": _model("qwen2", 28, 1536, 12, 2, 8960, 151936, tied=True, qkv_bias=True),
    "qwen2.5-14b": _model("qwen2", 48, 5120, 40, 8, 13824, 152064, qkv_bias=True),
    "qwen2.5-32b": _model("qwen2", 64, 5120, 40, 8, 27648, 152064, qkv_bias=True),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600, tied=False),
    "gemma3-1b": _gemma3(26, 1152, 4, 1, 6912),
    "gemma3-4b": _gemma3(34, 2560, 8, 4, 10240),
    "mistral-7b": _model("mistral", 32, 4096, 32, 8, 14336, 32768, windows=(4096,) * 32),
}
SHORT = {"1b": "tinyllama-1.1b", "8b": "llama-3.1-8b", "14b": "qwen2.5-14b", "32b": "qwen2.5-32b"}


def shape_of(name: str) -> ModelConfig:
    return SHAPES[SHORT.get(name, name)]


def built(
    c: ModelConfig, told: AdapterConfig, context: int, recompute: str = "off", *, host: bool = False, quick: bool = False,
    activations: str = "device", kind: type[Decoder] = Decoder,
) -> Decoder:  # fmt: skip
    """Layer by layer: no moment holds a model in 16 bits that has 4. `host`: its embedding lies in host memory; `quick`: codes are
    drawn, since quantizing numbers takes longer than all the rest. `activations`: compute.activations."""
    where = device()
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = kind(c, context, dtype)
    if told.method != "off":
        adapters.freeze(model, told)
    how = ComputeConfig(recompute=recompute, activations=activations)
    ready.make_ready(model, how, where, lambda line: print(f"  {line}"))
    model.embed_on_host = host
    model.place(where)
    fill(model)
    for layer in model.modules():
        if isinstance(layer, Linear) and cast(Any, layer.weight) is None:
            sizes = [(rows, layer.in_features) for rows in layer.parts]
            adapters.quantize(layer, (_codes(*size, dtype) if quick else _numbers(*size, dtype) for size in sizes))
    if told.method != "off":
        adapters.attach(model, told, 0)
    return model


@torch.no_grad()
def fill(model: Decoder) -> None:
    """With random weights, and norms that change nothing."""
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0 - model.config.norm_offset)


def _numbers(rows: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, inputs, device=device(), dtype=dtype) * 0.02


def _codes(rows: int, inputs: int, dtype: torch.dtype) -> nf4.Quantized:
    where, blocks = device(), rows * inputs // BLOCK
    codes = torch.randint(0, 256, (rows * inputs // 2,), dtype=torch.uint8, device=where)
    scales = torch.full((blocks,), 128, dtype=torch.uint8, device=where)
    second = torch.full((-(-blocks // SECOND_BLOCK),), 1e-3, device=where)
    return nf4.Quantized(codes, scales, second, torch.full((), 0.05, device=where), (rows, inputs), dtype)


def written(size: str, folder: str = "") -> str:
    """A folder of random weights in bf16, in files of 5 GB; there already, it stays as it is."""
    folder = folder or os.path.join(tempfile.gettempdir(), f"stoker-bench-{size}")
    if os.path.exists(os.path.join(folder, "config.json")):
        return folder
    with tempfile.TemporaryDirectory() as words:
        bytes_tokenizer().save(words)
        say = lambda line: print(line, file=sys.stderr)  # noqa: E731
        hf.save_from(
            _drawn(shape_of(size)), shape_of(size), folder, context_length=8192, say=say, dtype=torch.bfloat16,
            tokenizer_folder=words,
        )  # fmt: skip
    return folder


def _drawn(c: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """As pretraining begins. With large matrices at the end of each block a deep model multiplies every rounding many times."""
    residual = 1 / math.sqrt(2 * c.layers)
    for name, sizes in tensors(c):
        whole = (sum(size[0] for size in sizes), *sizes[0][1:])
        if len(whole) == 1:
            yield name, torch.full(whole, 0.0 if name.endswith("bias") else 1.0 - c.norm_offset)
        else:
            ends = name.endswith(("attention.out.weight", "mlp.down.weight"))
            yield name, torch.randn(whole, device=device(), dtype=torch.bfloat16).mul_(0.02 * (residual if ends else 1))


if __name__ == "__main__":
    print(written(*sys.argv[1:3]))
