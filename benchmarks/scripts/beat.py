"""What a beat costs, inside a rank under stoker: beat.py ROUNDS. Microseconds per call, one number per round."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim import optimizer as hooks_of

from stoker.control.rank import shim

CALLS = 10_000
BLOCK = 500
COLD_CALLS = 25


def us_per_call(call: Callable[[], object], calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begun) / calls * 1e6


def us_after_work(call: Callable[[], object], work: torch.Tensor) -> float:
    """The middle one of some single calls, each after 64 MB went through the caches, less that of a call that does
    nothing.
    """
    taken: dict[Callable[[], object], list[float]] = {call: [], nothing: []}
    for _ in range(COLD_CALLS):
        for one, times in taken.items():
            work.add_(1)
            times.append(us_per_call(one, 1))
    return statistics.median(taken[call]) - statistics.median(taken[nothing])


def nothing() -> None:
    return


def main() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    work = torch.zeros(16 << 20)
    registered = hooks_of._global_optimizer_post_hooks
    ours = dict(registered)
    assert shim._on_step in ours.values(), "the shim's hook is not there"

    def beat() -> None:
        shim._on_step(optimizer, (), {})

    found: dict[str, list[float]] = {"direct": [], "hook": [], "cold": []}
    for _ in range(int(sys.argv[1])):
        found["direct"].append(us_per_call(beat, CALLS))
        differences = []
        for _ in range(CALLS // BLOCK):  # small blocks in turn: what else the machine does hits both alike
            hooked = us_per_call(optimizer.step, BLOCK)
            registered.clear()
            differences.append(hooked - us_per_call(optimizer.step, BLOCK))
            registered.update(ours)
        found["hook"].append(statistics.median(differences))
        found["cold"].append(us_after_work(beat, work))
    Path(os.environ["BENCH_DIR"], f"beat-{os.environ['RANK']}.json").write_text(json.dumps(found))


main()
