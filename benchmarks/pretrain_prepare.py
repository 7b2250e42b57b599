"""What all cells of benchmarks/pretrain.py get: tokens, weights, and the card's own product to be measured by. Started
by it, with a JSON argument.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pretrain_score import SIZES, Size

SEED = 0
VERSIONS = ("torch", "transformers", "accelerate", "lightning", "numpy")
CUDA = torch.cuda.is_available()


def prepare(folder: Path, sizes: list[str], steps: int) -> dict[str, Any]:
    for name in sizes:
        make_tokens(folder / name / "data", SIZES[name], steps)
        make_weights(folder / name / "weights", SIZES[name])
    found = {name: version(name) for name in VERSIONS}
    device = torch.cuda.get_device_name() if CUDA else f"CPU, {len(os.sched_getaffinity(0))} cores"
    return {
        "device": device,
        "product_tflops": product() if CUDA else None,
        "versions": {"python": sys.version.split()[0], **found},
    }


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def make_tokens(folder: Path, size: Size, steps: int) -> None:
    """As `stoker prepare` lays them out. Zipf's law; every second token, on average, follows from the one before it."""
    from stoker.contract.safe_io import write_json
    from stoker.training.data import shards

    count = (
        max(steps, size.steps, size.parity) * size.rows * size.context + 1
    )  # the same for short runs as for long ones: so their losses compare
    random = np.random.default_rng(SEED)
    weights = 1 / np.arange(3, size.vocabulary + 3) ** 1.05
    drawn = np.searchsorted(np.cumsum(weights / weights.sum())[:-1], random.random(count))
    places = np.arange(count)
    fresh = np.maximum.accumulate(np.where(random.random(count) < 0.5, places, 0))
    tokens = (drawn[fresh] + places - fresh) % size.vocabulary
    folder.mkdir(parents=True)
    dtype = shards.dtype_for(size.vocabulary)
    writer = shards.ShardWriter(str(folder), "train", np.dtype(dtype).itemsize)
    writer.put(tokens.astype(dtype).tobytes())
    nothing = {"tokens": 0, "bytes": 0, "documents": 0, "inked": False, "shards": []}
    train = {"tokens": count, "bytes": count, "documents": 1, "inked": True, "shards": writer.close()}
    manifest = {
        "schema": shards.SCHEMA,
        "key": "made-up",
        "kind": "stream",
        "context": None,
        "tokenizer_digest": "",
        "vocab_size": size.vocabulary,
        "end_id": 0,
        "dtype": dtype,
        "seconds": 0.0,
        "splits": {"train": train, "validation": nothing},
    }
    write_json(str(folder / shards.MANIFEST), manifest)


def make_weights(folder: Path, size: Size) -> None:
    """In bf16: half the disk, and both sides widen them to the same fp32 numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    experts: dict[str, Any] = {}
    if size.experts:  # without the balancing loss: transformers adds it once per micro-batch, we once per step
        experts = {
            "num_experts": size.experts,
            "num_experts_per_tok": size.experts_per_token,
            "moe_intermediate_size": size.ff,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.0,
        }
    config = AutoConfig.for_model(
        size.family,
        vocab_size=size.vocabulary,
        hidden_size=size.dim,
        intermediate_size=size.ff,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        **experts,
    )
    torch.manual_seed(SEED)
    with torch.device("cuda" if CUDA else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def product() -> float:
    """TFLOP/s of 8192³ in bf16. Random numbers: constants draw less power and run faster."""
    side = 8192
    a = torch.randn(side, side, device="cuda").bfloat16()
    out = torch.empty_like(a)
    found: list[float] = []
    end = time.perf_counter() + 2.0
    while time.perf_counter() < end:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for _ in range(20):  # back to back, as in training: a wait after each costs a sixth of the figure
            torch.mm(a, a, out=out)
        marks[1].record()
        marks[1].synchronize()
        found.append(marks[0].elapsed_time(marks[1]) / 20 / 1e3)
    return round(2 * side**3 / statistics.median(found) / 1e12, 1)


def hand_over(found: dict[str, Any], told: dict[str, Any]) -> None:
    """The result is there whole, or not."""
    temporary = Path(told["result"] + ".tmp")
    temporary.write_text(json.dumps(found))
    temporary.rename(told["result"])


if __name__ == "__main__":
    TOLD = json.loads(sys.argv[1])
    hand_over(prepare(Path(TOLD["folder"]), TOLD["sizes"], TOLD["steps"]), TOLD)
