"""Fine-tuning with adapters on one GPU: tokens/s and peak memory of Stoker and of peft (+ bitsandbytes), same shapes, random weights.

    python benchmarks/qlora.py --cells 8b:4:2048,8b:1:2048 --json cells.jsonl --commit $(git rev-parse --short HEAD)
    python benchmarks/qlora.py --size tiny --cells tiny:2:64 --peers stoker     no GPU: shows that it works, measures nothing

    python benchmarks/qlora.py --peers stoker --cap 8 --cells 8b:1:2048:31:adamw8bit   does it run on a card of 8 GB?

A cell is SIZE:MICRO:CONTEXT[:RECOMPUTED[:OPTIMIZER[:host]]]: RECOMPUTED blocks of Stoker's model are computed again in the backward pass (0 if not given; `full`: all);
peft always recomputes all of them (gradient checkpointing), as its guides do. Rank 16 on all linear layers, AdamW. host: the embedding lies in host memory.
--cap: torch may take so many GiB less what the CUDA context takes, as on a card of that size; more is out of memory.

stoker         NF4 with double quantization, fused blocks
stoker-lora    the same beside bf16 weights
peft           bitsandbytes' NF4 with double quantization, peft, gradient checkpointing
peft-lora      the same beside bf16 weights

Every cell is a process of its own; a step is forward, backward and update on fresh random tokens; the median of the steps after the warm-up counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

PEERS = ("stoker", "peft", "stoker-lora", "peft-lora")
WARM = 2
LLAMA, QWEN = "llama", "qwen2"
# family, layers, width, of the MLP, heads, heads of keys, vocabulary
SHAPES = {
    "tiny": (LLAMA, 2, 128, 256, 4, 2, 512),
    "1b": (LLAMA, 22, 2048, 5632, 32, 4, 32000),
    "8b": (LLAMA, 32, 4096, 14336, 32, 8, 128256),
    "14b": (QWEN, 48, 5120, 13824, 40, 8, 152064),
    "32b": (QWEN, 64, 5120, 27648, 40, 8, 152064),
}


def stoker(size: str, context: int, recompute: str, method: str, host: bool = False) -> Any:
    """A model with adapters, made layer by layer: no moment holds it in 16 bits."""
    import torch

    from stoker.training.model import adapters, ready
    from stoker.training.model.config import AdapterConfig, ModelConfig
    from stoker.training.model.decoder import Decoder
    from stoker.training.model.linear import Linear
    from stoker.training.parallel.config import ComputeConfig

    family, layers, dim, ff, heads, kv_heads, vocabulary = SHAPES[size]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    c = ModelConfig(
        layers=layers, dim=dim, heads=heads, kv_heads=kv_heads, head_dim=dim // heads, ff=ff, vocab_size=vocabulary,
        tied=False, qkv_bias=family == QWEN, family=family,
    )  # fmt: skip
    told = AdapterConfig(method=method, lora_rank=16, lora_alpha=32.0)
    with torch.device("meta"):
        model = Decoder(c, context, dtype)
    adapters.freeze(model, told)
    ready.make_ready(model, ComputeConfig(recompute=recompute), device, print)
    model.embed_on_host = host
    model.place(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02) if parameter.dim() == 2 else parameter.fill_(1.0)
        for module in model.modules():
            if isinstance(module, Linear) and module.weight is None:
                rows = [
                    torch.randn(rows, module.in_features, device=device, dtype=dtype) * 0.02 for rows in module.parts
                ]
                adapters.quantize(module, rows)
    adapters.attach(model, told, 0)
    return model


def run_stoker(size: str, micro: int, context: int, how: list[str], method: str, steps: int) -> dict[str, Any]:
    """`how`: blocks computed again, optimizer, place of the embedding."""
    import torch

    from stoker.training.model import ready
    from stoker.training.optim.config import OptimConfig
    from stoker.training.optim.optimizer import Optimizer, gradient_norm

    ready.environment(print)
    begun = time.monotonic()
    recompute, kind, place = [*how, *["off", "adamw", "device"][len(how) :]]
    model = stoker(size, context, recompute, method, place == "host")
    optimizer = Optimizer(model, OptimConfig(kind=kind, learning_rate=2e-4))
    device = model.tables[0][0].device
    scale, bad = torch.tensor(1 / (micro * context), device=device), torch.zeros((), device=device)

    def step() -> float:
        inputs = torch.randint(0, model.config.vocab_size, (micro, context + 1), device=device)
        loss = model(inputs[:, :-1].contiguous(), inputs[:, 1:].contiguous(), scale)
        loss.backward()
        optimizer.step(1.0, gradient_norm(optimizer.parameters), bad)
        optimizer.zero()
        return float(loss)

    return measured(step, micro * context, steps, begun)


def run_peft(size: str, micro: int, context: int, method: str, steps: int) -> dict[str, Any]:
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    family, layers, dim, ff, heads, kv_heads, vocabulary = SHAPES[size]
    kind, config = (LlamaForCausalLM, LlamaConfig) if family == LLAMA else (Qwen2ForCausalLM, Qwen2Config)
    begun = time.monotonic()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = kind(
            config(
                vocab_size=vocabulary,
                hidden_size=dim,
                intermediate_size=ff,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                max_position_embeddings=8192,
                tie_word_embeddings=False,
            )
        )
    torch.set_default_dtype(torch.float32)
    if method == "qlora":
        _quantize_by_bitsandbytes(model)
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4, fused=True)
    model.train()

    def step() -> float:
        inputs = torch.randint(0, vocabulary, (micro, context), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return measured(step, micro * context, steps, begun)


def _quantize_by_bitsandbytes(model: Any) -> None:
    import bitsandbytes as bnb
    import torch

    for _, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, torch.nn.Linear) or name == "lm_head":
                continue
            with_bias = child.bias is not None
            quantized = bnb.nn.Linear4bit(
                child.in_features,
                child.out_features,
                bias=with_bias,
                compute_dtype=torch.bfloat16,
                compress_statistics=True,
                quant_type="nf4",
            )
            quantized.weight = bnb.nn.Params4bit(
                child.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True
            )
            if with_bias:
                quantized.bias = child.bias
            setattr(module, name, quantized.to("cuda"))
    model.is_loaded_in_4bit = True
    torch.cuda.empty_cache()


def measured(step: Any, tokens: int, steps: int, begun: float) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    made = time.monotonic() - begun
    seconds, losses = [], []
    for _ in range(steps):
        start = time.monotonic()
        losses.append(step())
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - start)
    found = {
        "tokens_per_s": round(tokens / statistics.median(seconds[WARM:])),
        "first_step_s": round(seconds[0], 2),
        "made_s": round(made, 1),
        "loss": round(losses[-1], 4),
    }
    if gpu:
        found |= {
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
            "weights_gib": round(held / 2**30, 2),
        }
    return found


def cap(gib: float) -> None:
    """As on a card of that size: its memory less what the context and the kernels of this process take."""
    import torch

    from stoker.training.model import ready

    ready.environment(print)  # before CUDA starts: expandable segments
    torch.ones(1, device="cuda") @ torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((gib * 2**30 - context) / total)
    print(f"context {context / 2**30:.2f} GiB", file=sys.stderr)


def cell(peer: str, text: str, steps: int) -> dict[str, Any]:
    size, micro, context, *more = text.split(":")
    method = "lora" if peer.endswith("-lora") else "qlora"
    if peer.startswith("stoker"):
        return run_stoker(size, int(micro), int(context), more, method, steps)
    return run_peft(size, int(micro), int(context), method, steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="8b:4:2048:full")
    parser.add_argument("--peers", default="stoker,peft")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--cap", type=float, default=0.0)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        peer, _, text = given.one.partition("=")
        if given.cap:
            cap(given.cap)
        print("CELL", json.dumps(cell(peer, text, given.steps)), flush=True)
        return 0
    failed = False
    for text in given.cells.split(","):
        seen = set()
        for peer in given.peers.split(","):
            alike = text if peer.startswith("stoker") else ":".join(text.split(":")[:3])
            if (peer, alike) in seen:
                continue
            seen.add((peer, alike))
            argv = [
                sys.executable,
                os.path.abspath(__file__),
                "--one",
                f"{peer}={alike}",
                "--steps",
                str(given.steps),
                "--cap",
                str(given.cap),
            ]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("CELL ")]
            found = json.loads(lines[-1][5:]) if lines else {"failed": done.stderr.strip().splitlines()[-1:]}
            failed = failed or not lines
            row = {
                "peer": peer,
                "cell": alike,
                **({"cap_gib": given.cap} if given.cap else {}),
                **found,
                "commit": given.commit,
            }
            print(json.dumps(row), flush=True)
            if given.json:
                with open(given.json, "a") as file:
                    file.write(json.dumps(row) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
