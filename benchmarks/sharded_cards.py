"""Models in shards (FSDP2) on several cards of a stated size, as processes on one GPU with a hard limit on torch's memory each: do they run, and did the plan say so?

    PYTHONPATH=src python benchmarks/sharded_cards.py --json cards.jsonl --commit $(git rev-parse --short HEAD)      one GPU with the memory of all cards together
    PYTHONPATH=src python benchmarks/sharded_cards.py --only tiny                                             no GPU: shows that it works, measures nothing
    PYTHONPATH=src python benchmarks/sharded_cards.py --dry                                                   plans alone; no GPU

A row is a model's shape and a method on four cards of 24 GB; settings follow from the plan (`stoker fit --parallel fsdp`). Random weights, each rank makes its own
shards; five steps of two packed micro-batches, whose gradients are exchanged with each. Ranks share the card over gloo, which NCCL does not do: memory is what is
measured here, and speed is that of gloo. The plan's NCCL buffers are part of the limit, and nobody uses them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import qlora
from shapes import shape_of

from stoker.contract import names
from stoker.contract.shape import replace
from stoker.training.fit.cards import CONTEXT, GIB, NCCL, SHOWN, Card
from stoker.training.fit.plan import FSDP, OFFLOADED_WORDS, Plan, Wish
from stoker.training.fit.strategy import decide
from stoker.training.model.config import AdapterConfig

STEPS, MICRO_STEPS, RANK = 5, 2, 16
PATIENCE_S = 540.0


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    size: str
    context: int
    method: str
    offload: str = "off"
    cards: int = 4
    gib: int = 24


ROWS = (
    Row("tiny QLoRA", "tiny", 256, "qlora", cards=2), Row("tiny LoRA, offloaded", "tiny", 256, "lora", "all", cards=2),
    Row("tiny, moments offloaded", "tiny", 256, "full", "optimizer", cards=2),
    Row("32B QLoRA", "32b", 2048, "qlora"), Row("14B LoRA", "14b", 2048, "lora"), Row("32B LoRA, offloaded", "32b", 2048, "lora", "all"),
    Row("8B, moments offloaded", "8b", 2048, "full", "optimizer"),
)  # fmt: skip


def planned(row: Row, taken: int) -> Plan:
    """On cards with this GPU's kernels, where a process takes `taken` bytes besides its tensors."""
    total = int(row.gib * SHOWN * GIB)
    there = [Card("H200", total, total, f"GPU {at}", context=taken) for at in range(row.cards)]
    told = AdapterConfig(lora_rank=RANK, lora_alpha=2.0 * RANK)
    wish = Wish(shape_of(row.size), row.context, row.method, told, samples=MICRO_STEPS * row.cards, offload=row.offload)
    # One sample at a time: a step has two, so that gradients are added to gradients.
    return decide(there, replace(wish, micro=1), FSDP).plan


def about(row: Row, plan: Plan) -> dict[str, Any]:
    s, share = plan.settings, plan.shares[0]
    return {
        "row": row.name, "size": row.size, "method": row.method, "context": row.context, "cards": row.cards, "card_gb": row.gib,
        "micro": s.micro, "recompute": s.recompute, "optimizer": s.optimizer, "host": OFFLOADED_WORDS.get(s.offload, ""),
        "plan_fits": plan.fits, "planned_gib": round(share.planned.total / GIB, 2), "needs_gib": round(share.needs / GIB, 2),
        "host_gib": round(share.host_bytes / GIB, 2),
    }  # fmt: skip


def run(row: Row) -> dict[str, Any]:
    """One rank."""
    import torch
    from shapes import device

    from stoker.training.model import ready
    from stoker.training.model.attention import documents, kernels
    from stoker.training.optim.config import OptimConfig
    from stoker.training.optim.host import locked
    from stoker.training.optim.muon import local
    from stoker.training.optim.optimizer import Optimizer, gradient_norm
    from stoker.training.parallel.config import ParallelConfig
    from stoker.training.parallel.group import Group, no_sync

    begun, where = time.monotonic(), device()
    taken = qlora.cap(row.gib * SHOWN, NCCL) if where.type == "cuda" else CONTEXT
    ready.environment(print)
    plan = planned(row, taken)
    s = plan.settings
    group = Group(ParallelConfig(strategy="fsdp", offload=s.offload, device=where.type))
    model = in_shards(row, plan, group, where)
    optimizer = Optimizer(model, OptimConfig(kind=s.optimizer, learning_rate=2e-4), group.visited)
    if group.visited is not None:
        kept = [local(one.detach()) for one in model.parameters()] + [tensor for _, tensor, _ in optimizer.state()]
        locked(kept, print)
    tokens = s.micro * row.context * MICRO_STEPS
    scale, bad = torch.tensor(1.0 / tokens, device=where), torch.zeros((), device=where)
    one_text = torch.zeros((s.micro, row.context), dtype=torch.int32)
    torch.manual_seed(group.rank)

    def step() -> float:
        loss = torch.zeros((), device=where)
        for number in range(MICRO_STEPS):
            inputs = torch.randint(0, model.config.vocab_size, (s.micro, row.context + 1), device=where)
            with no_sync(model, True, number == MICRO_STEPS - 1):
                part = model(inputs[:, :-1].contiguous(), inputs[:, 1:].contiguous(), scale, documents(one_text, where))
                part.backward()
            loss += part.detach()
        optimizer.step(1.0, gradient_norm(optimizer.parameters), bad)
        optimizer.zero()
        return float(loss)

    with kernels("auto"):
        seen = qlora.measured(step, tokens, STEPS, begun)
    group.close()
    found = about(row, plan)
    if "peak_gib" in seen:
        seen["error"] = round(found["planned_gib"] / seen["peak_gib"] - 1, 4)
    return {**found, "rank": group.rank, "context_gib": round(taken / GIB, 2), **seen}


def in_shards(row: Row, plan: Plan, group: Any, where: Any) -> Any:
    """As recipes/build.py makes it, with numbers that are drawn where they are needed."""
    import torch
    from shapes import _codes

    from stoker.training.model import adapters, ready
    from stoker.training.model.decoder import Decoder
    from stoker.training.model.linear import Linear
    from stoker.training.optim.muon import local
    from stoker.training.parallel.config import ComputeConfig
    from stoker.training.parallel.sharded import shard

    s, dtype = plan.settings, torch.bfloat16 if where.type == "cuda" else torch.float32
    told = AdapterConfig(method="off" if row.method == "full" else row.method, lora_rank=RANK, lora_alpha=2.0 * RANK)
    with torch.device("meta"):
        model = Decoder(shape_of(row.size), row.context, dtype)
    if told.method != "off":
        adapters.freeze(model, told)
    ready.make_ready(model, ComputeConfig(recompute=str(s.recompute) if s.recompute else "off"), where, print)
    if told.method != "off":
        adapters.cut_codes(model)
        adapters.add(model, told, torch.device("meta"))
    shard(model, group, dtype if told.method == "off" else None)
    model.place(group.device, group.home)
    with torch.no_grad():
        for parameter in model.parameters():
            own = local(parameter.detach())
            own.copy_(torch.randn(own.shape, device=where, dtype=own.dtype) * 0.02 if own.dim() > 1 else torch.ones(()))
        for layer in model.modules():
            if isinstance(layer, Linear) and layer.cut is not None:
                layer.cut.fill([_codes(rows, layer.in_features, dtype) for rows in layer.parts])
    if told.method != "off":
        adapters.start(model, told, 0)
    return model


def tried(at: int, row: Row) -> tuple[list[dict[str, Any]], str]:
    """What each rank measured, and what they said besides."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(row.cards),
        "LOCAL_WORLD_SIZE": str(row.cards),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--one", str(at)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": "0", names.SHARED_GPU: "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(row.cards)
    ]  # fmt: skip
    found, said, deadline = list[dict[str, Any]](), list[str](), time.monotonic() + PATIENCE_S
    try:
        for rank, process in enumerate(ranks):
            output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 1.0))
            lines = output.splitlines()
            found += [json.loads(line.removeprefix(qlora.CELL)) for line in lines if line.startswith(qlora.CELL)]
            said += [f"rank {rank}: {line}" for line in lines if not line.startswith(qlora.CELL)]
    except subprocess.TimeoutExpired:
        said.append(f"not done after {PATIENCE_S:.0f} s")
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return found, "\n".join(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--dry", action="store_true", help="plans alone")
    parser.add_argument("--json", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--one", type=int, default=-1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one >= 0:
        print(qlora.CELL + json.dumps(run(ROWS[given.one])), flush=True)
        return 0
    wrong = 0
    for at, row in enumerate(ROWS):
        if given.only not in row.name or (not given.only and row.size == "tiny"):
            continue
        if given.dry:
            qlora.keep(about(row, planned(row, CONTEXT)), given.json)
            continue
        found, said = tried(at, row)
        for rank in found:
            qlora.keep({**rank, "commit": given.commit}, given.json)
        if len(found) < row.cards:
            wrong += 1
            print(f"{row.name}: {len(found)} of {row.cards} ranks ended\n{qlora.tail(said)}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
