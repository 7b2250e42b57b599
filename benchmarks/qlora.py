"""Fine-tuning with adapters on one GPU: tokens/s and peak memory of Stoker and of peft (+ bitsandbytes), same shapes, random weights.

    python benchmarks/qlora.py --cells 8b:4:2048,8b:1:2048 --json cells.jsonl --commit $(git rev-parse --short HEAD)
    python benchmarks/qlora.py --cells tiny:2:64 --peers stoker     no GPU: shows that it works, measures nothing

    python benchmarks/qlora.py --peers stoker --cap 8 --cells 8b:1:2048:31:adamw8bit   does it run on a card of 8 GB?

A cell is SIZE:MICRO:CONTEXT[:RECOMPUTED[:OPTIMIZER[:EMBEDDING[:ACTIVATIONS[:GRAPHS]]]]]: RECOMPUTED blocks of Stoker's model are computed again in the backward pass (0 if not given; `full`: all; mlp17: the MLP's first product in 17; 4+mlp: 4 in full, that product in the others);
peft always recomputes all of them (gradient checkpointing), as its guides do. Rank 16 on all linear layers, AdamW. EMBEDDING and ACTIVATIONS:
device or host, where the embedding lies and where what blocks keep waits for the backward pass. GRAPHS: compute.cuda_graphs
(auto, on, off), where nothing lies on the host.
--cap: torch may take so many GiB less what the CUDA context takes, as on a card of that size; more is out of memory.

stoker         NF4 with double quantization, fused blocks
stoker-lora    the same beside bf16 weights
peft           bitsandbytes' NF4 with double quantization, peft, gradient checkpointing
peft-lora      the same beside bf16 weights
unsloth        its QLoRA (unsloth_peer.py has variants, too)

Every cell is a process of its own; a step is forward, backward and update on fresh random tokens; the median of the steps after the warm-up counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from typing import Any

CELL = "CELL "  # how the line of a child begins that holds its result
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WARM = 5  # steps: of Stoker's the fourth may capture a graph
TAIL = 60  # lines of a failed cell
INSTEAD = {"unsloth": "unsloth-plain", "unsloth-plain": "unsloth-direct"}  # where one fails


@dataclasses.dataclass(frozen=True)
class Cell:
    size: str
    micro: int
    context: int
    recompute: str = "off"
    optimizer: str = "adamw"
    place: str = "device"  # of the embedding
    activations: str = "device"
    graphs: str = "auto"
    rank: int = 16
    micro_steps: int = 1  # of a step
    packed: bool = False
    quick: bool = False  # codes are drawn, not computed from numbers


def cell_of(text: str) -> Cell:
    size, micro, context, *more = text.split(":")
    how = dict(zip(("recompute", "optimizer", "place", "activations", "graphs"), more, strict=False))
    recompute = re.sub(r"^mlp(?=\d)", "mlp:", how.pop("recompute", "off"))
    return dataclasses.replace(Cell(size, int(micro), int(context), recompute), **how)  # type: ignore[arg-type]


def run_stoker(cell: Cell, method: str, steps: int) -> dict[str, Any]:
    import torch
    from shapes import built, device, shape_of

    from stoker.training.fit.described import describe
    from stoker.training.fit.terms import Job, predict
    from stoker.training.loop.feeder import MicroBatch
    from stoker.training.loop.step import MicroStep
    from stoker.training.model import ready
    from stoker.training.model.attention import kernels
    from stoker.training.model.config import AdapterConfig
    from stoker.training.optim.config import OptimConfig
    from stoker.training.optim.optimizer import Optimizer, gradient_norm
    from stoker.training.parallel.config import recomputed_blocks

    ready.environment(print)
    begun, where, tokens = time.monotonic(), device(), cell.micro * cell.context
    told = AdapterConfig(method=method, lora_rank=cell.rank, lora_alpha=2.0 * cell.rank)
    host, c = cell.place == "host", shape_of(cell.size)
    model = built(c, told, cell.context, cell.recompute, host=host, quick=cell.quick, activations=cell.activations)
    optimizer = Optimizer(model, OptimConfig(kind=cell.optimizer, learning_rate=2e-4))
    scale = torch.tensor(1 / (tokens * cell.micro_steps), device=where)
    bad, one_text = torch.zeros((), device=where), torch.zeros((cell.micro, cell.context), dtype=torch.int32)
    on_host = host or cell.activations == "host"
    graph_with = None if cell.graphs == "off" or on_host or where.type != "cuda" else optimizer
    micro_step = MicroStep(model, scale, graph_with, only_if_bound=cell.graphs == "auto")

    def step() -> float:
        loss = torch.zeros((), device=where)
        for _ in range(cell.micro_steps):
            inputs = torch.randint(0, c.vocab_size, (cell.micro, cell.context + 1), device=where)
            segments = one_text if cell.packed else None
            loss += micro_step(MicroBatch((), inputs[:, :-1].contiguous(), inputs[:, 1:].contiguous(), segments))
        optimizer.step(1.0, gradient_norm(optimizer.parameters), bad)
        optimizer.zero(keep=micro_step.graphed)
        return float(loss)

    with kernels("auto"):
        found = measured(step, tokens * cell.micro_steps, steps, begun)
    again, mlp = recomputed_blocks(cell.recompute, c.layers)
    job = Job(
        cell.micro, cell.context, cell.optimizer, cell.packed, recomputed=again, mlp=mlp,
        accumulates=cell.micro_steps > 1, on_host=host, inputs_on_host=cell.activations == "host",
    )  # fmt: skip
    planned = round(predict(describe(c, told), job).total / 2**30, 2)
    return found | {"planned_gib": planned, "graphed": micro_step.graphed}


def run_peft(cell: Cell, method: str, steps: int) -> dict[str, Any]:
    import torch

    peft: Any = importlib.import_module("peft")
    begun, shape = time.monotonic(), (cell.micro, cell.context)
    model = transformers_model(cell.size)
    vocabulary = model.config.vocab_size
    if method == "qlora":
        quantize_by_bitsandbytes(model)
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=NAMES, task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4, fused=True)
    model.train()

    def step() -> float:
        inputs = torch.randint(0, vocabulary, shape, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return measured(step, cell.micro * cell.context, steps, begun)


def transformers_model(size: str) -> Any:
    """On the GPU, in bf16."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(transformers_config(size))
    torch.set_default_dtype(torch.float32)
    return model


def transformers_config(size: str) -> Any:
    from shapes import shape_of
    from transformers import AutoConfig

    from stoker.training.model.hf_config import config_of

    return AutoConfig.for_model(**config_of(shape_of(size), 8192, "bfloat16"))


def quantize_by_bitsandbytes(model: Any) -> None:
    import torch

    bnb: Any = importlib.import_module("bitsandbytes")

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
        "tokens_per_s": round(tokens / statistics.median(seconds[WARM:] or seconds[-1:])),
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


def taken() -> tuple[int, int]:
    """(what the context and the kernels of this process take on the card, where nobody else is; all it has)."""
    import torch

    from stoker.training.model import ready

    ready.environment(print)  # before CUDA starts: expandable segments
    square = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    (square @ square).sum().item()  # cuBLAS takes its part
    del square
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved(), total


def cap(gib: float, less: int) -> None:
    """As on a card of that size, of which `less` bytes are not for tensors."""
    import torch

    from stoker.training.model import ready

    ready.environment(print)
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((gib * 2**30 - less) / total)


def run_cell(peer: str, text: str, steps: int) -> dict[str, Any]:
    cell, method = cell_of(text), "lora" if peer.endswith("-lora") else "qlora"
    if peer.startswith("stoker"):
        return run_stoker(cell, method, steps)
    if peer.startswith("unsloth"):
        import unsloth_peer

        return dict(unsloth_peer.run(cell, peer, steps))
    return run_peft(cell, method, steps)


def apart(argv: list[str]) -> tuple[dict[str, Any] | None, str]:
    """(what the child measured, what it said besides)."""
    done = subprocess.run(
        [sys.executable, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    lines = done.stdout.splitlines()
    found = [json.loads(line.removeprefix(CELL)) for line in lines if line.startswith(CELL)]
    said = "\n".join(line for line in lines if not line.startswith(CELL))
    return (found[-1], said) if found else (None, f"{said}\nexit code {done.returncode}")


def keep(row: dict[str, Any], path: str) -> None:
    print(json.dumps(row), flush=True)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def tail(said: str) -> str:
    return "\n".join(f"  | {line}" for line in said.splitlines()[-TAIL:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="8b:4:2048:full")
    parser.add_argument("--peers", default="stoker,peft")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--cap", type=float, default=0.0)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        peer, _, text = given.one.partition("=")
        if given.cap:
            cap(given.cap, taken()[0])
        print(CELL + json.dumps(run_cell(peer, text, given.steps)), flush=True)
        return 0
    failed, seen = False, set()
    for text in given.cells.split(","):
        peers = given.peers.split(",")
        for peer in peers:  # grows by what stands in for one that fails
            alike = text if peer.startswith("stoker") else ":".join(text.split(":")[:3])
            if (peer, alike) in seen:
                continue
            seen.add((peer, alike))
            same = ["--steps", str(given.steps), "--cap", str(given.cap)]
            found, said = apart([os.path.abspath(__file__), "--one", f"{peer}={alike}", *same])
            failed = failed or found is None
            of_card = {"cap_gib": given.cap} if given.cap else {}
            keep(
                {"peer": peer, "cell": alike, **of_card, **(found or {"failed": True}), "commit": given.commit},
                given.json,
            )
            if found is None and peer in INSTEAD:
                peers.append(INSTEAD[peer])
            if found is None or peer.startswith("unsloth"):
                print(tail(said), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
