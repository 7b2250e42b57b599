"""Burn-in: the same small training on every GPU, compared bit for bit; then the links between them.

    stoker burnin --minutes 5
    torchrun --nproc-per-node 2 burnin.py --steps 200      # works too; the judging is `stoker burnin`'s

Replicas with one seed and no gradient sync: what one computes, its twins must compute, to the last bit. Every ROUND steps the
training begins anew from the seed, so that each card is its own twin, too: a single card that errs once is found, and of two that
disagree the one that changed its mind is known. Nobody waits for anybody until the links are tried.
Writes burnin/rank-N.jsonl and burnin/links.jsonl in the run directory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from datetime import timedelta
from itertools import combinations, pairwise
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only so, and reads it once

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import stoker
from stoker.contract.safe_io import APPEND
from stoker.control.record import private_folders

SCHEMA = 1
SEED = 20020
ROUND = 40  # steps from the seed until the next beginning
MATMUL_S = 0.5  # time given to each speed measurement on a GPU
LINK_S = 120.0  # a collective that takes longer hangs
EVERY_PAIR = 8  # ranks up to which every pair is tried (28 pairs); beyond, neighbours only

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
LOCAL = int(os.environ.get("LOCAL_RANK", "0"))


class Model:
    """Matmuls, exp, reductions and an optimizer that reads all memory find bad silicon: attention is left out."""

    def __init__(self, width: int, blocks: int, classes: int, device: torch.device) -> None:
        block = [(2 * width, width), (2 * width,), (width, 2 * width), (width,)]
        shapes = [*block * blocks, (classes, width), (classes,)]
        self.parameters = [torch.empty(shape, device=device, requires_grad=True) for shape in shapes]

    def begin(self, seed: torch.Generator) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=seed)

    def __call__(self, x: Tensor) -> Tensor:
        *blocks, head, bias = self.parameters
        for up, up_bias, down, down_bias in zip(*[iter(blocks)] * 4, strict=True):
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), up, up_bias)), down, down_bias)
        return F.linear(x, head, bias)


def sizes(device: torch.device) -> tuple[int, int, int]:
    """(width, blocks, batch) by the card's total memory, which twins share; what is free on them may differ."""
    if device.type == "cpu":
        return 256, 2, 128
    total = torch.cuda.get_device_properties(device).total_memory
    if total >= 20e9:
        return 4096, 4, 8192  # 0.27 B parameters, 9 GB in all
    return (2048, 4, 4096) if total >= 6e9 else (1024, 4, 2048)


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def precision(device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16


def median_seconds(work: Any, device: torch.device) -> float:
    """One call, waited for: the median over MATMUL_S on a GPU and a fifth of it on a CPU core."""
    for _ in range(2):
        work()
    sync(device)
    found: list[float] = []
    end = time.perf_counter() + (MATMUL_S if device.type == "cuda" else MATMUL_S / 5)
    while len(found) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        sync(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def speed(device: torch.device) -> dict[str, float]:
    """TFLOP/s of one fixed matmul, and GB/s of a copy, read and write counted."""
    big = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= 6e9
    side, count = (4096, 1 << 28) if device.type == "cuda" else (512, 1 << 25)
    if big:
        side, count = 8192, 1 << 30
    # Constants draw less power: an H200 makes 894 TFLOP/s of zeros, 788 of these.
    a = torch.randn(side, side, device=device).to(precision(device))
    out = torch.empty_like(a)
    tflops = 2 * side**3 / median_seconds(lambda: torch.mm(a, a, out=out), device) / 1e12
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"tflops": tflops, "gbs": 2 * count / median_seconds(lambda: target.copy_(source), device) / 1e9}


def batch_of(step: int, width: int, batch: int, classes: int, seed: torch.Generator) -> tuple[Tensor, Tensor]:
    """The data of a step: the class is the largest of the first numbers, so there is something to learn."""
    seed.manual_seed(SEED + 1 + step)
    x = torch.randn(batch, width, device=seed.device, generator=seed)
    return x, x[:, :classes].argmax(-1)


def bits(loss: Tensor, parameters: list[Tensor]) -> tuple[str, str]:
    """The loss's bits, and the parameters' summed as integers: exact in any order, one copy to the host."""
    sums = [parameter.detach().view(torch.int32).sum(dtype=torch.int64) for parameter in parameters]
    first, *rest = torch.stack([loss.detach().float().view(torch.int32).to(torch.int64), *sums]).tolist()
    total = 0
    for value in rest:
        total = (total * 1000003 + value) % (1 << 64)
    return f"{first & 0xFFFFFFFF:08x}", f"{total:016x}"


def replica(told: argparse.Namespace, device: torch.device, write: Any) -> None:
    width, blocks, batch = sizes(device)
    classes = width // 4
    model = Model(width, blocks, classes, device)
    optimizer = torch.optim.AdamW(model.parameters, lr=0.1 / width, fused=device.type == "cuda")
    seed = torch.Generator(device=device)
    kind = precision(device)
    stoker.mark("POST-MODEL")  # the next rank may load
    write({"is": "speed", "when": "start", **speed(device)})
    flip_at = told.flip[1] if told.flip and told.flip[0] == RANK else -1
    began = said = time.monotonic()
    step = 0
    while (told.steps is None or step < told.steps) and (
        told.minutes is None or time.monotonic() - began < told.minutes * 60
    ):
        begin = time.perf_counter()
        if step % ROUND == 0:
            seed.manual_seed(SEED)
            model.begin(seed)
            optimizer.state.clear()
        if step == flip_at:
            model.parameters[0].detach().view(-1).view(torch.int32)[0] ^= 1 << 10
        x, y = batch_of(step % ROUND, width, batch, classes, seed)
        with torch.autocast(device.type, kind, enabled=device.type == "cuda"):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        loss_bits, total = bits(loss, model.parameters)
        seconds = round(time.perf_counter() - begin, 6)
        write({"is": "step", "step": step, "loss": loss_bits, "sum": total, "seconds": seconds})
        step += 1
        now = time.monotonic()
        if RANK == 0 and now - said >= 5.0:
            said = now
            of, eta = f"/{told.steps}" if told.steps else "", left(told, step, now - began)
            print(f"Step [{step}{of}] | Loss: {loss.item():.4f} | ETA: {eta}", flush=True)
    write({"is": "speed", "when": "end", **speed(device)})


def left(told: argparse.Namespace, step: int, spent: float) -> str:
    ways = [told.minutes * 60 - spent] if told.minutes is not None else []
    ways += [(told.steps - step) * spent / step] if told.steps is not None else []
    seconds = max(int(min(ways)), 0)
    return f"{seconds // 60}:{seconds % 60:02d}"


def links(device: torch.device, where: str) -> None:
    """All-reduce of integers, exact in any order: all ranks together, then pair by pair, nobody else on the wires."""
    dist.init_process_group("gloo")
    cards: list[str] = [""] * WORLD
    dist.all_gather_object(cards, str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "")
    # NCCL refuses two ranks on one card.
    backend = "nccl" if all(cards) and len(set(cards)) == WORLD and dist.is_nccl_available() else "gloo"
    if backend == "gloo":
        device = torch.device("cpu")
    pairs = list(combinations(range(WORLD), 2) if WORLD <= EVERY_PAIR else pairwise(range(WORLD)))
    with (
        os.fdopen(os.open(os.path.join(where, "links.jsonl"), APPEND | os.O_TRUNC, 0o644), "w", 1, "utf-8")
        if RANK == 0
        else open(os.devnull, "w", encoding="utf-8")
    ) as file:
        for ranks in [tuple(range(WORLD)), *(pairs if WORLD > 2 else [])]:
            about = {"schema": SCHEMA, "ranks": ranks, "backend": backend}
            print(json.dumps({**about, "is": "begun"}), file=file)  # a link that hangs is the last one begun
            group = dist.new_group(list(ranks), backend=backend, timeout=timedelta(seconds=LINK_S))
            mine = all_reduce(group, ranks, device, backend) if RANK in ranks else None
            found: list[dict[str, Any] | None] = [None] * WORLD
            dist.all_gather_object(found, mine)
            told = [one for one in found if one is not None]
            seconds, size = max(one["seconds"] for one in told), told[0]["bytes"]
            bus = 2 * (len(ranks) - 1) / len(ranks) * size / seconds / 1e9
            wrong = {str(rank): one["wrong"] for rank, one in enumerate(found) if one is not None and one["wrong"]}
            measured = {"bytes": size, "seconds": seconds, "bus_gbs": bus, "wrong": wrong}
            print(json.dumps({**about, "is": "link", **measured}), file=file)
            if RANK in ranks:
                dist.destroy_process_group(group)
    dist.barrier()
    time.sleep(0.3)  # gloo's own thread lets go of its last tensors: torch 2.13 can deadlock with it at exit
    dist.destroy_process_group()


def all_reduce(group: Any, ranks: tuple[int, ...], device: torch.device, backend: str) -> dict[str, Any]:
    count = (1 << 26) if backend == "nccl" else (1 << 20)  # 256 MB, 4 MB
    places = torch.arange(count, dtype=torch.int32, device=device)

    def share(rank: int) -> Tensor:
        return (places * (2 * rank + 1) + rank) & 0xFFFFF  # 2^20 a rank: up to 2,047 ranks fit in 31 bits

    own, wanted = share(RANK), torch.zeros_like(places)
    for rank in ranks:
        wanted += share(rank)
    wrong, times = 0, []
    for _ in range(8):
        x = own.clone()
        sync(device)
        begin = time.perf_counter()
        dist.all_reduce(x, group=group)
        sync(device)
        times.append(time.perf_counter() - begin)
        wrong += int((x != wanted).sum())
    seconds = statistics.median(times[2:])  # the first ones make the connections
    return {"seconds": seconds, "bytes": 4 * count, "wrong": wrong}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Same-seed replicas compared bit for bit, then the links. Started by `stoker burnin`."
    )
    parser.add_argument(
        "--minutes", type=float, help="how long the replicas train (default: 5, where --steps is not given)"
    )
    parser.add_argument("--steps", type=int, help="how many steps")
    parser.add_argument("--flip", help=argparse.SUPPRESS)  # RANK:STEP, one mantissa bit: a bad card, for the tests
    told = parser.parse_args()
    if told.minutes is None and told.steps is None:
        told.minutes = 5.0
    if told.flip:
        told.flip = tuple(int(word) for word in told.flip.split(":"))
    return told


def main() -> None:
    told = parse()
    device = torch.device("cuda", LOCAL) if torch.cuda.is_available() else torch.device("cpu")
    about: dict[str, Any] = {"device": "cpu", "card": None, "uuid": None, "units": 1}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        properties = torch.cuda.get_device_properties(device)
        card = {"card": properties.name, "uuid": str(properties.uuid), "units": properties.multi_processor_count}
        about = {"device": "cuda", **card}
    else:
        torch.set_num_threads(1)  # a CPU rank is one core, and its sums have one order
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  mypy does not know it; it writes over every fresh tensor: time for nothing here
    where = private_folders.own_folder(os.environ.get("STOKER_RUN_DIR", "."), "burnin")
    os.makedirs(where, exist_ok=True)
    handle = os.open(os.path.join(where, f"rank-{RANK}.jsonl"), APPEND | os.O_TRUNC, 0o644)
    with os.fdopen(handle, "w", buffering=1, encoding="utf-8") as file:

        def write(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")

        about |= {"torch": torch.__version__, "round": ROUND, "seed": SEED}
        write({"schema": SCHEMA, "is": "replica", "rank": RANK, "world_size": WORLD, **about})
        replica(told, device, write)
        write({"is": "end"})
    if WORLD > 1:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        links(device, where)


if __name__ == "__main__":
    main()
