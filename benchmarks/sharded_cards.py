"""Models in shards (FSDP2) on several cards of a stated size, as processes on one GPU with a hard limit on torch's memory each: do they run, and did the plan say so?

    PYTHONPATH=src python benchmarks/sharded_cards.py --json cards.jsonl --commit $(git rev-parse --short HEAD)      one GPU with the memory of all cards together: 8 minutes at most
    PYTHONPATH=src python benchmarks/sharded_cards.py --only tiny                                             no GPU: shows that it works, measures nothing
    PYTHONPATH=src python benchmarks/sharded_cards.py --only paths                                            one rank alone (NCCL on a GPU) through every path
    PYTHONPATH=src python benchmarks/sharded_cards.py --dry                                                   plans alone; no GPU

A row is a model's shape and a method on four cards of 24 GB; settings follow from the plan (`stoker fit --parallel fsdp`). Random weights, each rank makes its own
shards; two steps of two packed micro-batches, whose gradients are exchanged with each. NCCL refuses ranks that share a card: they exchange by shared host memory
(shared_exchange.py; `--exchange gloo` by gloo's sockets, many times slower). So memory is what is measured, and not speed. The plan's NCCL buffers are part of the limit, and
nobody uses them. Rank 0 prints the highest peak after every micro-batch and update: a row that runs into its time limit has measured that.

Where all weights learn, gradients are counted, too: as they are reduced, those of a rank in all, which must be at most its shard and two units (blocks, or the head).

paths: every stage with all weights, LoRA and QLoRA, every optimizer, both places of shards, a resumed run, an export, and what evaluates, each as `stoker train
--strategy fsdp` runs it with one rank: FSDP2's own code by NCCL. It shows that nothing of it fails there; between cards only several GPUs can show.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import qlora
from shapes import shape_of

from stoker.contract import env_vars
from stoker.contract.frozen import replace
from stoker.training.fit.cards import CONTEXT, GIB, NCCL, SHOWN, Card
from stoker.training.fit.plan import FSDP, OFFLOADED_WORDS, Plan, Wish
from stoker.training.fit.strategy import decide
from stoker.training.model.config import AdapterConfig
from stoker.training.parallel.config import recompute_word

STEPS, MICRO_STEPS, RANK = 2, 2, 16
BUDGET_S = 440.0  # of all rows together
STEP = "STEP "  # how a line of rank 0 begins that tells how far it is
TAKEN = "SHARDED_CARDS_TAKEN"  # bytes of a process besides its tensors, as measured by one that was alone
EXCHANGE = "SHARDED_CARDS_EXCHANGE"  # the descriptor of the shared memory; empty: gloo


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    size: str
    context: int
    method: str
    offload: str = "off"
    cards: int = 4
    gib: int = 24
    limit: float = 100.0  # seconds


ROWS = (
    Row("tiny QLoRA", "tiny", 256, "qlora", cards=2), Row("tiny LoRA, offloaded", "tiny", 256, "lora", "all", cards=2),
    Row("tiny, moments offloaded", "tiny", 256, "full", "optimizer", cards=2),
    Row("32B QLoRA", "32b", 2048, "qlora"), Row("14B LoRA", "14b", 2048, "lora", limit=80.0),
    Row("32B LoRA, offloaded", "32b", 2048, "lora", "all", limit=140.0),
    Row("8B, moments offloaded", "8b", 2048, "full", "optimizer", limit=80.0),
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
        "micro": s.micro, "recompute": recompute_word(s.recompute, s.mlp, plan.wish.layers), "optimizer": s.optimizer, "host": OFFLOADED_WORDS.get(s.offload, ""),
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

    begun, where, taken = time.monotonic(), device(), int(os.environ[TAKEN])
    gpu = where.type == "cuda"
    ready.environment(print)
    if gpu:
        qlora.cap(row.gib * SHOWN, taken + NCCL)
    plan = planned(row, taken)
    s = plan.settings
    group = Group(ParallelConfig(strategy="fsdp", offload=s.offload, device=where.type))
    counter = Gradients()
    counter.watch()
    torch.manual_seed(group.rank)
    model = in_shards(row, plan, group, where)
    if os.environ[EXCHANGE]:
        from shared_exchange import Exchange

        Exchange(int(os.environ[EXCHANGE]), group.rank, group.world).install(model)
    optimizer = Optimizer(model, OptimConfig(kind=s.optimizer, learning_rate=2e-4), group.visited)
    if group.visited is not None:
        kept = [local(one.detach()) for one in model.parameters()] + [tensor for _, tensor, _ in optimizer.state()]
        locked(kept, print)
    tokens = s.micro * row.context * MICRO_STEPS
    scale, bad = torch.tensor(1.0 / tokens, device=where), torch.zeros((), device=where)
    one_text = torch.zeros((s.micro, row.context), dtype=torch.int32)
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    made, losses, weights = time.monotonic() - begun, list[float](), torch.cuda.memory_allocated() if gpu else 0
    planned_gib = round(plan.shares[0].planned.total / GIB, 2)

    def tell(what: str) -> None:
        if gpu:
            torch.cuda.synchronize()
        peak = f", peak {torch.cuda.max_memory_allocated() / GIB:.2f} GiB of {planned_gib} planned" if gpu else ""
        if group.first:
            print(f"{STEP}{what} after {time.monotonic() - begun:.1f} s{peak}", flush=True)

    tell("made")
    with kernels("auto"):
        for number in range(STEPS):
            loss = torch.zeros((), device=where)
            for micro in range(MICRO_STEPS):
                inputs = torch.randint(0, model.config.vocab_size, (s.micro, row.context + 1), device=where)
                with no_sync(model, True, micro == MICRO_STEPS - 1):
                    part = model(
                        inputs[:, :-1].contiguous(), inputs[:, 1:].contiguous(), scale, documents(one_text, where)
                    )
                    part.backward()
                loss += part.detach()
                tell(f"step {number + 1}, micro-batch {micro + 1}")
            optimizer.step(1.0, gradient_norm(optimizer.parameters), bad)
            optimizer.zero()
            losses.append(round(float(loss), 6))
            tell(f"step {number + 1}, update")
    group.close()
    found = {
        **about(row, plan),
        "rank": group.rank,
        "context_gib": round(taken / GIB, 2),
        "made_s": round(made, 1),
        "losses": losses,
    }
    found["seconds"] = round(time.monotonic() - begun, 1)
    if gpu:
        peak = torch.cuda.max_memory_allocated() / GIB
        found |= {"peak_gib": round(peak, 2), "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2)}
        found |= {"weights_gib": round(weights / GIB, 2), "error": round(found["planned_gib"] / peak - 1, 4)}
    return {**found, **(counter.found() if row.method == "full" else {})}


class Gradients:
    """Bytes of gradients that this rank has, in shards, whole and in the buffers that they are reduced from: the most at any time."""

    def __init__(self) -> None:
        self._groups: list[Any] = []
        self._most, self._problem = 0, ""

    def watch(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        made, after = FSDPParamGroup.__init__, FSDPParamGroup.post_backward

        def init(group: Any, *args: Any, **how: Any) -> None:
            made(group, *args, **how)
            self._groups.append(group)

        def looked(group: Any, *args: Any, **how: Any) -> Any:
            self._look()
            found = after(group, *args, **how)  # type: ignore[no-untyped-call]
            self._look()
            return found

        FSDPParamGroup.__init__ = init  # type: ignore[method-assign]
        FSDPParamGroup.post_backward = looked  # type: ignore[method-assign]

    def _look(self) -> None:
        try:
            self._most = max(self._most, self._now())
        except AttributeError as problem:  # another torch names them otherwise: say so, and measure the rest
            self._problem = str(problem)

    def _now(self) -> int:
        total, buffers = 0, dict[int, int]()
        for group in self._groups:
            for one in group.fsdp_params:
                grad, whole = one.sharded_param.grad, getattr(one, "_unsharded_param", None)
                kept = (
                    None if grad is None else grad.to_local(),
                    None if whole is None else whole.grad,
                    one.unsharded_accumulated_grad,
                )
                total += sum(tensor.nbytes for tensor in kept if tensor is not None)
            states = getattr(group.comm_ctx, "reduce_scatter_states", None)  # torch before 2.13 keeps one
            states = [group.comm_ctx.reduce_scatter_state] if states is None else states
            buffers |= {id(state): state.reduce_scatter_input.nbytes for state in states if state is not None}
        return total + sum(buffers.values())

    def found(self) -> dict[str, Any]:
        """With what the bar is: the shard, and the two largest units."""
        learned = [
            [one.sharded_param for one in group.fsdp_params if one.sharded_param.requires_grad]
            for group in self._groups
        ]
        shard = sum(4 * one.to_local().numel() for some in learned for one in some)
        units = sorted(sum(4 * one.numel() for one in some) for some in learned)
        rest = sum(unit for unit in units if unit < units[-1] // 1000)  # the last norm waits for the end of the pass
        bar = shard + sum(units[-2:]) + rest
        if self._problem:
            return {"gradients": f"not counted: {self._problem}"}
        return {
            "gradients_gib": round(self._most / GIB, 3), "shard_gib": round(shard / GIB, 3), "two_units_gib": round(sum(units[-2:]) / GIB, 3),
            "whole_gib": round(sum(units) / GIB, 3), "gradients_met": 0 < self._most <= bar,
        }  # fmt: skip


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
    ready.make_ready(model, ComputeConfig(recompute=recompute_word(s.recompute, s.mlp, plan.wish.layers)), where, print)
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


def tried(at: int, row: Row, limit: float, taken: int, exchange: str) -> tuple[list[dict[str, Any]], str]:
    """What each rank measured, and what they said besides. Lines of rank 0 are passed on as they come."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    memory = None
    if exchange == "host":
        import shared_exchange

        memory = shared_exchange.made()
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(row.cards), "LOCAL_WORLD_SIZE": str(row.cards),
        "LOCAL_RANK": "0", env_vars.SHARED_GPU: "1", TAKEN: str(taken), EXCHANGE: "" if memory is None else str(memory),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        logs = [os.path.join(folder, str(rank)) for rank in range(row.cards)]
        ranks = [
            _started(["--one", str(at)], log, {**shared, "RANK": str(rank)}, memory) for rank, log in enumerate(logs)
        ]
        ended = _watched(ranks, limit, logs[0])
        if memory is not None:
            os.close(memory)
        return _read(logs, "" if ended else f"not done after {limit:.0f} s")


def _started(words: list[str], log: str, env: dict[str, str], memory: int | None = None) -> subprocess.Popen[bytes]:
    """To a file: nobody waits for a pipe that is full."""
    with open(log, "wb") as file:
        return subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), *words], env={**os.environ, **env}, stdout=file,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, pass_fds=() if memory is None else (memory,),
        )  # fmt: skip


def _watched(processes: list[subprocess.Popen[bytes]], limit: float, log: str) -> bool:
    """Until all have ended, or one has failed and the others had 10 s, or the time is over; none is left. True: all have ended."""
    deadline, shown = time.monotonic() + limit, 0
    try:
        while any(one.poll() is None for one in processes) and time.monotonic() < deadline:
            if any(one.poll() for one in processes):
                deadline = min(deadline, time.monotonic() + 10)
            time.sleep(0.2)
            with open(log, errors="replace") as file:
                lines = [line for line in file.read().split("\n")[:-1] if line.startswith(STEP)]
            for line in lines[shown:]:
                print(f"  {line.removeprefix(STEP)}", flush=True)
            shown = len(lines)
        return all(one.poll() is not None for one in processes)
    finally:
        for one in processes:
            one.kill()
            one.wait()


def _read(logs: list[str], said: str) -> tuple[list[dict[str, Any]], str]:
    found, lines = list[dict[str, Any]](), [said] * bool(said)
    for rank, log in enumerate(logs):
        with open(log, errors="replace") as file:
            text = file.read().splitlines()
        found += [json.loads(line.removeprefix(qlora.CELL)) for line in text if line.startswith(qlora.CELL)]
        lines += [f"rank {rank}: {line}" for line in text if not line.startswith(qlora.CELL)]
    return found, "\n".join(lines)


# ---- one rank alone, through every path ----

METHODS = ((), ("--lora",), ("--qlora",))
PATHS: dict[str, list[tuple[str, ...]]] = {
    "pretrain": [
        *METHODS, ("--optimizer", "adamw8bit"), ("--optimizer", "muon"), ("--offload", "optimizer"), ("--offload", "all"),
        ("--accumulate", "sharded"), ("--accumulate", "whole"), ("--lora", "--offload", "all"), ("--qlora", "--optimizer", "adamw8bit", "--offload", "all"),
        ("resumed",),
    ],
    "midtrain": [*METHODS], "sft": [*METHODS], "reward": [*METHODS], "dpo": [*METHODS],
    "grpo": [*METHODS, ("--qlora", "--generate.bits", "4")],
    "evaluate": [()], "density": [()], "diversity": [()],
}  # fmt: skip
PATHS_S = 100.0


def paths(stage: str, folder: str) -> None:
    """In one process: each ends its group, and the next begins with a new one."""
    from importlib import import_module

    from stoker.training.recipes import stage as running

    words = _words(stage, folder)
    for number, more in enumerate(PATHS[stage]):
        begun, rounds = time.monotonic(), [more]
        if more == ("resumed",):
            kept = ("--checkpoint.folder", os.path.join(folder, "kept"))
            rounds = [
                (*kept, "--max-steps", "2"),
                (*kept, "--max-steps", "3", "--strategy", "ddp"),
                (*kept, "--max-steps", "4"),
            ]
        codes = []
        for part, one in enumerate(rounds):
            place = os.path.join(folder, f"{number}-{part}")
            os.makedirs(place)
            os.chdir(place)
            codes.append(
                running.run(
                    import_module(f"stoker.training.recipes.{stage}").main, ["--strategy", "fsdp", *words, *one]
                )
            )
        row = {
            "path": f"{stage} {' '.join(more)}".strip(),
            "codes": codes,
            "seconds": round(time.monotonic() - begun, 1),
        }
        print(qlora.CELL + json.dumps(row), flush=True)


def _words(stage: str, folder: str) -> list[str]:
    """Tiny data, and a tiny model that is loaded."""
    import torch
    from shapes import shape_of

    from stoker.training.model import hf
    from stoker.training.model.decoder import Decoder
    from stoker.training.tokenizer.tokenizer import bytes_tokenizer

    bytes_tokenizer().save(os.path.join(folder, "tokenizer"))
    model = Decoder(shape_of("tiny"), 128)
    model.start(1)
    told, load = os.path.join(folder, "tokenizer"), os.path.join(folder, "model")
    hf.save(model, load, say=lambda line: None, tokenizer_folder=told, dtype=torch.bfloat16)
    texts = [f"{'ab cde fgh '[: 3 + at % 8]}{at}" for at in range(80)]
    rows: list[dict[str, Any]] = [{"text": " ".join([text] * 8)} for text in texts]
    if stage in ("midtrain", "sft"):
        rows = [
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]} for text in texts
        ]
    elif stage in ("reward", "dpo"):
        rows = [{"prompt": text, "chosen": f"{text} yes", "rejected": f"no {text}"} for text in texts]
    elif stage != "pretrain":
        rows = [
            {"question": f"What follows {text}?", "prompt": f"What follows {text}?", "answer": "ab"}
            for text in texts[:12]
        ]
    data = os.path.join(folder, "rows.jsonl")
    with open(data, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    learns = [
        "--model.load", load, "--tokenizer.path", "bytes", "--preset", "small", "--context_length", "128", "--batch.tokens", "512", "--batch.micro", "2",
        "--max-steps", "3", "--log_every", "1", "--learning_rate", "1e-3", "--eval_every", "0",
    ]  # fmt: skip
    asks = ["--model.load", load, "--tokenizer.path", "bytes", "--context_length", "128", "--generate.new_tokens", "8"]
    given = {
        "reward": ["--reward.pairs", data], "dpo": ["--dpo.pairs", data],
        "grpo": ["--grpo.prompts", data, "--grpo.group", "4", "--grpo.prompts_per_step", "2", "--generate.new_tokens", "8"],
        "evaluate": ["--evaluate.tasks", data], "density": ["--density.prompts", data, "--density.clusters", "3"],
        "diversity": [
            "--diversity.prompts", data, "--diversity.baseline", load, "--diversity.compared", load, "--diversity.answers", "2",
            "--diversity.rounds", "50", "--diversity.clusters", "3",
        ],
    }.get(stage, ["--data", data, "--data.validation", "0.1", "--cache", os.path.join(folder, "cache")])  # fmt: skip
    return [*(asks if stage in ("evaluate", "density", "diversity") else learns), *given]


def all_paths(limit: float, path: str, commit: str) -> int:
    """Stages side by side, a process each. How many did not do all of theirs."""
    wrong, cores = 0, len(os.sched_getaffinity(0))
    deadline, waiting = time.monotonic() + limit, list(PATHS)
    alone = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    running = dict[str, tuple[subprocess.Popen[bytes], str]]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < max(cores // 2, 1) and time.monotonic() < deadline:
                    stage = waiting.pop(0)
                    place, log = os.path.join(folder, stage), os.path.join(folder, f"{stage}.log")
                    os.makedirs(place)
                    with socket.create_server(("127.0.0.1", 0)) as free:
                        env = {**alone, "MASTER_PORT": str(free.getsockname()[1])}
                    running[stage] = (_started(["--paths", stage, "--folder", place], log, env), log)
                over = time.monotonic() >= deadline
                for stage, (process, log) in list(running.items()):
                    if process.poll() is None and not over:
                        continue
                    process.kill()
                    process.wait()
                    del running[stage]
                    found, said = _read([log], "")
                    for row in found:
                        qlora.keep({**row, "commit": commit}, path)
                    good = [row for row in found if not any(row["codes"])]
                    if len(good) < len(PATHS[stage]):
                        wrong += 1
                        print(
                            f"{stage}: {len(good)} of {len(PATHS[stage])} paths{' in time' if over else ''}\n{qlora.tail(said)}",
                            flush=True,
                        )
                if over and waiting:
                    print(f"not begun after {limit:.0f} s: {', '.join(waiting)}", flush=True)
                    return wrong + len(waiting)
                time.sleep(0.2)
        finally:
            for process, _ in running.values():
                process.kill()
                process.wait()
    return wrong


def taken_alone(limit: float) -> int:
    """Bytes of a process besides its tensors, by one that is alone on the card. Without a GPU: what is usual."""
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        _watched([_started(["--taken"], log, {})], limit, log)
        found, said = _read([log], "")
    if not found:
        print(
            f"what a process takes besides its tensors could not be measured: {CONTEXT / GIB:.2f} GiB are assumed\n{qlora.tail(said)}",
            flush=True,
        )
    return int(found[0]["taken"]) if found else CONTEXT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name holds this, or paths")
    parser.add_argument("--dry", action="store_true", help="plans alone")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S", help="of all together (default 440)")
    parser.add_argument("--exchange", choices=("host", "gloo"), default="host")
    parser.add_argument("--json", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--one", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--taken", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--paths", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one >= 0:
        print(qlora.CELL + json.dumps(run(ROWS[given.one])), flush=True)
        os._exit(0)  # gloo may wait for itself in its own shutdown
    if given.paths:
        paths(given.paths, given.folder)
        os._exit(0)
    if given.taken:
        import torch

        print(
            qlora.CELL + json.dumps({"taken": qlora.taken()[0] if torch.cuda.is_available() else CONTEXT}), flush=True
        )
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no rank is left then either
    chosen = [at for at, row in enumerate(ROWS) if given.only in row.name and (given.only or row.size != "tiny")]
    if given.dry:
        for at in chosen:
            qlora.keep(about(ROWS[at], planned(ROWS[at], CONTEXT)), given.json)
        return 0
    until, wrong = time.monotonic() + given.budget, 0
    taken = taken_alone(60.0) if chosen else CONTEXT
    for at in chosen:
        row, left = ROWS[at], until - time.monotonic()
        if left < 30:
            wrong += 1
            print(f"{row.name}: not begun, the time is over (--budget)", flush=True)
            continue
        print(f"{row.name}: {row.cards} ranks, {min(row.limit, left):.0f} s at most", flush=True)
        found, said = tried(at, row, min(row.limit, left), taken, given.exchange)
        for rank in found:
            qlora.keep({**rank, "exchange": given.exchange, "commit": given.commit}, given.json)
        if len(found) < row.cards:
            wrong += 1
            print(f"{row.name}: {len(found)} of {row.cards} ranks ended\n{qlora.tail(said)}", flush=True)
        wrong += any(rank.get("gradients_met") is False for rank in found)
    if given.only in ("", "paths"):
        wrong += all_paths(max(min(PATHS_S, until - time.monotonic()), 30.0), given.json, given.commit)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
