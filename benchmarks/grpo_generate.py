"""One cell of benchmarks/grpo.py's generation: a process that writes answers with one peer. Started by it, with a JSON
argument.

Weights and prompts are the same for all; every answer has all its tokens (no stop token for ours, min_new_tokens for
transformers). Times are of whole calls, prompts' pass included, from a quiet device to a quiet device; the first call,
which captures and compiles, is told by itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from grpo_step import SIZES, Size, make_weights

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
Writer = Callable[[int, float], torch.Tensor]  # seed, temperature -> [rows, tokens]


def prompts(size: Size) -> torch.Tensor:
    return torch.randint(
        0, size.vocabulary, (size.prompts * size.group, size.prompt), generator=torch.Generator().manual_seed(0)
    )


def stoker(folder: str, size: Size) -> Writer:
    from stoker.training.model import hf
    from stoker.training.model.decoder import Decoder
    from stoker.training.serve.batch import BatchEngine

    torch.set_float32_matmul_precision("high")
    with torch.device("meta"):
        model = Decoder(hf.shape_of(folder), size.prompt + size.new, DTYPE)
    model.place(torch.device(DEVICE))
    hf.load(model, folder, lambda _: None)
    engine = BatchEngine(model, rows=size.prompts * size.group, length=size.prompt + size.new)
    given = prompts(size).tolist()

    def write(seed: int, temperature: float) -> torch.Tensor:
        return torch.tensor(engine.generate(given, new_tokens=size.new, stop=(), temperature=temperature, seed=seed))

    return write


def transformers(folder: str, size: Size) -> Writer:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).to(DEVICE).eval()
    given = prompts(size).to(DEVICE)
    drawn: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0}

    def write(seed: int, temperature: float) -> torch.Tensor:
        torch.manual_seed(seed)
        how = {**drawn, "temperature": temperature} if temperature else {"do_sample": False}
        more = {"max_new_tokens": size.new, "min_new_tokens": size.new, "pad_token_id": 0}
        with torch.no_grad():
            whole: torch.Tensor = model.generate(given, attention_mask=torch.ones_like(given), **how, **more)
        return whole[:, size.prompt :].cpu()

    return write


PEERS: dict[str, Callable[[str, Size], Writer]] = {"stoker": stoker, "transformers": transformers}


def quiet() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(told: dict[str, Any]) -> dict[str, Any]:
    size = SIZES[told["size"]]
    write = PEERS[told["peer"]](told["weights"], size)
    began = quiet()
    greedy = write(0, 0.0)
    write(0, 1.0)
    first = quiet() - began
    seconds = []
    for seed in range(1, told["repeats"] + 1):
        began = quiet()
        answers = write(seed, 1.0)
        seconds.append(quiet() - began)
        if tuple(answers.shape) != (size.prompts * size.group, size.new):
            raise SystemExit(f"answers of {tuple(answers.shape)}")
    return {
        "peer": told["peer"],
        "size": told["size"],
        "seconds": seconds,
        "first_s": first,
        "tokens": size.prompts * size.group * size.new,
        "new": size.new,
        "greedy": greedy[:, 0].tolist(),
        "memory": torch.cuda.max_memory_allocated() if CUDA else None,
        "device": torch.cuda.get_device_name() if CUDA else f"CPU, {len(os.sched_getaffinity(0))} cores",
    }


def main() -> int:
    told = json.loads(sys.argv[1])
    if told["peer"] == "weights":
        make_weights(Path(told["weights"]), SIZES[told["size"]])
        found: dict[str, Any] = {}
    else:
        found = measure(told)
    Path(told["result"]).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
