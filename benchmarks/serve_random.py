"""Random requests, aborts and new weights: is every token of every answer the one that the weights of its version give, one answer at a time?

    python benchmarks/serve_random.py                        1,000 requests on the GPU in bf16, or on the CPU in fp32: a minute
    python benchmarks/serve_random.py --requests 100 --device cpu

Requests come at random, a twentieth of the looks gives one up, new weights come every few steps; half of the requests finish with the weights they began with,
the others continue with the new ones. Memory holds a part of what all slots could need, so that answers give way and are computed again. Afterwards each answer
is computed without a cache, alone, by the weights that its tokens name: a token that is not the most likely one there must be a near-tie, so close to it that
rounding decides (8 units in the last place of the largest logit; in fp32 1e-4). Nothing may be lost, and no block of memory kept.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from stoker.training.generate.config import Sampling
from stoker.training.model.config import ModelConfig
from stoker.training.model.decoder import Decoder
from stoker.training.serve.engine import PagedEngine, Sizes
from stoker.training.serve.request import ABORTED, CONTINUE, FINISH, Event, Request

SHAPES = {
    "cuda": ModelConfig(
        layers=12, dim=1024, heads=16, kv_heads=8, head_dim=64, ff=3072, vocab_size=32_000, qk_norm=True
    ),
    "cpu": ModelConfig(layers=4, dim=64, heads=4, kv_heads=2, head_dim=16, ff=160, vocab_size=512, qk_norm=True),
}
LENGTH, SLOTS, VERSIONS = 256, 64, 4
UNITS = {torch.bfloat16: 8 * 2.0**-8, torch.float32: 0.0}  # of the largest logit
LEAST = {torch.bfloat16: 0.0, torch.float32: 1e-4}
SWAP, ABORT = 0.03, 0.05  # at each look


def made(c: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype) -> Decoder:
    with torch.device(device):
        model = Decoder(c, LENGTH, dtype)
    model.place(device)
    model.start(seed)
    return model.eval().requires_grad_(False)


def requests_of(draw: random.Random, count: int, vocab: int) -> list[Request]:
    beginnings = [[draw.randrange(vocab) for _ in range(length)] for length in (17, 40, 64)]
    found: list[Request] = []
    for number in range(count):
        own = [draw.randrange(vocab) for _ in range(draw.randint(1, 60))]
        kind = draw.random()
        again = found and kind < 0.2
        prompt = draw.choice(found).prompt if again else tuple((draw.choice(beginnings) if kind < 0.6 else []) + own)
        policy = draw.choice((FINISH, CONTINUE))
        found.append(Request(str(number), prompt, draw.randint(1, 96), Sampling(0.0), on_update=policy))
    return found


class Trial:
    def __init__(self, models: Sequence[Decoder], served: Decoder, draw: random.Random) -> None:
        self._models, self._served, self._draw = models, served, draw
        memory = LENGTH * SLOTS // 6
        turn = 4 if served.device.type == "cuda" else 1
        self.engine = PagedEngine(served, Sizes(SLOTS, LENGTH, memory, turn=turn))
        self.events: dict[str, list[Event]] = {}
        self.of_version: dict[int, int] = {0: 0}  # which model
        self.aborts = self._asked_versions = 0

    def run(self, requests: Sequence[Request]) -> None:
        to_come, engine, draw = list(requests), self.engine, self._draw
        while to_come or engine.busy:
            for _ in range(draw.choice((0, 0, 1, 3, 9, 20))):
                if to_come:
                    request = to_come.pop(0)
                    self.events[request.id] = []
                    engine.add(request)
            is_open = [name for name, listed in self.events.items() if not listed or not listed[-1].finish]
            if draw.random() < ABORT and is_open and engine.abort(draw.choice(is_open)):
                self.aborts += 1
            if draw.random() < SWAP:
                self._swap()
            for event in engine.step():
                listed = self.events[event.id]
                if listed and listed[-1].finish:
                    raise SystemExit(f"answer {event.id} goes on behind its end")
                listed.append(event)
        if engine.pool.held:
            raise SystemExit(f"{engine.pool.held} blocks of memory are still held")

    def _swap(self) -> None:
        which = self._draw.randrange(len(self._models))
        self._asked_versions += 1
        version = self._asked_versions

        def change() -> None:
            for mine, new in zip(self._served.parameters(), self._models[which].parameters(), strict=True):
                mine.copy_(new)
            self.of_version[version] = which

        self.engine.update(change, version)


@torch.inference_mode()
def gaps(models: Sequence[Decoder], of_version: dict[int, int], request: Request, events: list[Event]) -> list[tuple[float, float]]:  # fmt: skip
    """For each token that is not the most likely one of its version's weights: (by how much, how much is a near-tie)."""
    told = [event for event in events if event.token is not None]
    tokens = [int(event.token) for event in told if event.token is not None]
    if not tokens:
        return []
    found = []
    ids = torch.tensor([[*request.prompt, *tokens[:-1]]], device=models[0].device)
    rows = torch.arange(len(request.prompt) - 1, ids.shape[1])
    for which in {of_version[event.version] for event in told}:
        logits = models[which](ids)[0, rows].float()
        for place, event in enumerate(told):
            if of_version[event.version] != which:
                continue
            best = logits[place].max()
            gap = float(best - logits[place, tokens[place]])
            if gap > 0:
                dtype = models[which].dtype
                found.append((gap, LEAST[dtype] + UNITS[dtype] * float(logits[place].abs().max())))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown")
    told = parser.parse_args()
    device, draw = torch.device(told.device), random.Random(told.seed)
    dtype = torch.bfloat16 if told.device == "cuda" else torch.float32
    shape = SHAPES[told.device]
    models = [made(shape, seed, device, dtype) for seed in range(VERSIONS)]
    trial = Trial(models, made(shape, 0, device, dtype), draw)
    requests = requests_of(draw, told.requests, shape.vocab_size)
    began = time.monotonic()
    trial.run(requests)
    seconds = time.monotonic() - began
    unlike: list[tuple[float, float]] = []
    tokens = lost = continued = 0
    for request in requests:
        events = trial.events[request.id]
        count = sum(event.token is not None for event in events)
        if not events or not events[-1].finish or (events[-1].finish != ABORTED and count != request.new_tokens):
            lost += 1
        versions = {event.version for event in events if event.token is not None}
        if len(versions) > 1:
            continued += 1
            if request.on_update == FINISH:
                lost += 1
        tokens += count
        unlike += gaps(models, trial.of_version, request, events)
    wrong = [pair for pair in unlike if pair[0] > pair[1]]
    row: dict[str, Any] = {
        "device": told.device, "dtype": str(dtype).removeprefix("torch."), "requests": told.requests, "aborts": trial.aborts,
        "versions": len(trial.of_version), "answers_of_several_versions": continued, "tokens": tokens, "lost": lost,
        "preemptions": trial.engine.schedule.preemptions, "shared_tokens": trial.engine.schedule.shared_tokens,
        "near_ties": len(unlike) - len(wrong), "largest_gap": round(max((pair[0] for pair in unlike), default=0.0), 5),
        "wrong": len(wrong), "seconds": round(seconds, 1), "commit": told.commit, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    print(json.dumps(row))
    return 0 if not wrong and not lost else 1


if __name__ == "__main__":
    sys.exit(main())
