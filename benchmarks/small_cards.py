"""Fine-tuning on cards of a stated size, by a hard limit on torch's memory: does it run, and did the plan say so?

    PYTHONPATH=src python benchmarks/small_cards.py --json cards.jsonl       one GPU, at least as large as the largest of those cards
    PYTHONPATH=src python benchmarks/small_cards.py --together 5             at most five rows at a time, as the GPU has place: no speeds
    PYTHONPATH=src python benchmarks/small_cards.py --dry                    plans alone; no GPU

A row is a size of card with a context, and settings by the plan (`stoker fit`); or a shipped config (its context, rank, micro-batch and recomputing) at the
memory it states, with the model it names and the largest that its comment allows. Random weights, built layer by layer; five steps of two packed micro-batches.
A config for eight cards runs as one rank: without the others, and without the memory that is planned for exchanging gradients with them.
`refuses` is the next context, in steps of 64 tokens, for which the plan finds no settings on that card. Rows without a config are also run with that context
and with the one before it, which the plan accepts. (The refused one may run: a plan keeps 1 % and 64 MiB for gaps between tensors.)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import qlora
from shapes import shape_of

from stoker.contract.frozen import replace
from stoker.training.config.files import load
from stoker.training.fit.cards import CONTEXT, GIB, NCCL, SHOWN, Card
from stoker.training.fit.plan import STEP, Plan, Wish, make
from stoker.training.model.config import AdapterConfig
from stoker.training.parallel.config import recompute_word

STEPS, MICRO_STEPS, LONGEST = 5, 2, 1 << 17


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    size: str
    context: int
    gib: int
    method: str
    rank: int = 16
    cards: int = 1
    fixed: bool = False  # micro-batch, recomputing and optimizer are the config's


def _shipped(name: str, size: str) -> Row:
    told = load(name)
    adapter, needs = told["adapter"], told["needs"]
    assert told["batch"]["micro"] == 1 and told["compute"]["recompute"] == "full", name
    gib = int(str(needs["vram"]).removesuffix("GB"))
    context = told["data"]["context_length"]
    return Row(name, size, context, gib, adapter["method"], adapter["lora_rank"], needs["gpus"], fixed=True)


ROWS = (
    Row("8B on 8 GB", "8b", 2048, 8, "qlora"), Row("14B on 12 GB", "14b", 1024, 12, "qlora"), Row("32B on 24 GB", "32b", 2048, 24, "qlora"),
    _shipped("qlora_8GB", "tinyllama-1.1b"), _shipped("qlora_8GB", "8b"), _shipped("qlora_12GB", "tinyllama-1.1b"), _shipped("qlora_12GB", "8b"),
    _shipped("lora_24GB", "qwen3-8b"), _shipped("finetune_14b", "qwen3-14b"), _shipped("finetune_32b", "qwen3-32b"),
)  # fmt: skip


def planned(row: Row, context: int, taken: int, cards: int) -> Plan:
    """On cards with this GPU's kernels, where a process takes `taken` bytes besides its tensors."""
    total = int(row.gib * SHOWN * GIB)
    there = [Card("H200", total, total, f"GPU {at}", context=taken) for at in range(cards)]
    c, told = shape_of(row.size), AdapterConfig(method=row.method, lora_rank=row.rank, lora_alpha=2.0 * row.rank)
    wish = Wish(c, context, row.method, told, samples=MICRO_STEPS * cards)
    if row.fixed:
        wish = replace(wish, optimizer="adamw", recompute=c.layers, micro=1, on_host=False)
    return make(there, wish)


def refused(row: Row, taken: int) -> int:
    """The shortest context, from the row's on, that the plan refuses."""
    low, high = row.context // STEP, LONGEST // STEP
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if planned(row, middle * STEP, taken, row.cards).fits else (low, middle)
    return high * STEP


def about(row: Row, taken: int) -> tuple[dict[str, Any], Plan]:
    whole, one_rank = (planned(row, row.context, taken, cards) for cards in (row.cards, 1))
    s, share = one_rank.settings, one_rank.shares[0]
    cell = {
        "micro": s.micro,
        "recompute": recompute_word(s.recompute, s.mlp, one_rank.wish.layers),
        "optimizer": s.optimizer,
        "place": "host" if s.on_host else "device",
        "activations": "host" if s.inputs_on_host else "device",
    }
    sizes = {"needs_gib": whole.shares[0].needs / GIB, "planned_gib": share.planned.total / GIB}
    found = {
        "row": row.name, "size": row.size, "method": row.method, "context": row.context, "card_gb": row.gib, "cards": row.cards, **cell,
        "plan_fits": whole.fits, **{key: round(value, 2) for key, value in sizes.items()}, "refuses": refused(row, taken) if whole.fits else row.context,
    }  # fmt: skip
    return found, one_rank


def run(row: Row, taken: int) -> dict[str, Any]:
    """In a process of its own. Where the plan finds nothing that fits, with the settings that take the least."""
    qlora.cap(row.gib * SHOWN, taken + (NCCL if row.cards > 1 else 0))
    found, plan = about(row, taken)
    s = plan.settings
    cell = qlora.Cell(
        row.size, s.micro, row.context, found["recompute"], s.optimizer,
        "host" if s.on_host else "device", "host" if s.inputs_on_host else "device", rank=row.rank,
        micro_steps=MICRO_STEPS, packed=True, quick=True,
    )  # fmt: skip
    print(f"planned: {json.dumps(found)}", flush=True)
    seen = qlora.run_stoker(cell, row.method, STEPS)
    off = {"error": round(found["planned_gib"] / seen["peak_gib"] - 1, 4)}
    return {**found, "context_gib": round(taken / GIB, 2), **off, **seen}


class Place:
    """GiB of the GPU that no row has."""

    def __init__(self, gib: int) -> None:
        self._free, self._changed = gib, threading.Condition()

    @contextmanager
    def for_card(self, gib: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= gib)
            self._free -= gib
        try:
            yield
        finally:
            with self._changed:
                self._free += gib
                self._changed.notify_all()


def tried(at: int, row: Row, taken: int) -> tuple[dict[str, Any], str]:
    argv = [os.path.abspath(__file__), "--one", str(at), "--context", str(row.context), "--taken", str(taken)]
    seen, said = qlora.apart(argv)
    return seen or {**about(row, taken)[0], "failed": True}, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name or size holds this")
    parser.add_argument("--dry", action="store_true", help="plans alone")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="rows at a time")
    parser.add_argument("--json", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--one", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--taken", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        taken, total = qlora.taken()
        print(qlora.CELL + json.dumps({"taken": taken, "total": total}), flush=True)
        return 0
    if given.one >= 0:
        row = dataclasses.replace(ROWS[given.one], context=given.context)
        print(qlora.CELL + json.dumps(run(row, given.taken)), flush=True)
        return 0
    rows = [(at, row) for at, row in enumerate(ROWS) if given.only in f"{row.name} {row.size}"]
    if given.dry:
        for _, row in rows:
            qlora.keep({**about(row, CONTEXT)[0], "commit": given.commit}, given.json)
        return 0
    seen, said = qlora.apart([os.path.abspath(__file__), "--alone"])  # before others are on the card
    if seen is None:
        print(qlora.tail(said), file=sys.stderr)
        return 69
    taken, place = int(seen["taken"]), Place(int(seen["total"] / GIB))

    def measured(one: tuple[int, Row]) -> tuple[dict[str, Any], str]:
        with place.for_card(one[1].gib):
            return tried(*one, taken)

    wrong = 0
    with ThreadPoolExecutor(given.together) as pool:
        for found, said in pool.map(measured, list(contexts(rows, taken))):
            qlora.keep({**found, "commit": given.commit}, given.json)
            if "failed" in found:
                print(qlora.tail(said), flush=True)
            wrong += found["plan_fits"] and "failed" in found
    return int(wrong > 0)


def contexts(rows: list[tuple[int, Row]], taken: int) -> Iterator[tuple[int, Row]]:
    """Each row; of those without a config also the longest context that the plan accepts, and the next."""
    yield from rows
    for at, row in rows:
        if not row.fixed:
            first = refused(row, taken)
            yield from ((at, dataclasses.replace(row, context=context)) for context in (first - STEP, first))


if __name__ == "__main__":
    sys.exit(main())
