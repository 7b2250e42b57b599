"""With torch in the ranks: beats from its optimizer hook, marks of its import, the gate around init_process_group."""

from __future__ import annotations

import re

import pytest

from conftest import Stoker, at_length

pytest.importorskip("torch")

TRAIN = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(int(sys.argv[1]))]
for step in range(25):
    for optimizer in optimizers:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
print("weight", model.module.weight.sum().item())
__import__("time").sleep(0.3)  # gloo's own thread lets go of its last tensors
dist.destroy_process_group()
"""


LINGER = "\n__import__('time').sleep(3)\n"  # the memory of a rank that has ended can't be read


def test_beats_marks_and_memory_of_an_unmodified_script(stoker: Stoker) -> None:
    """Two optimizers beat twice a step: a step is one optimizer's count. Garbage is looked for after torch's import, not within it."""
    watched = "import gc; runs = []; gc.callbacks.append(lambda phase, _: runs.append(phase)); import torch\n"
    watched += "print('collector', gc.isenabled(), len(runs) <= 2)\n"
    done = stoker.torch("run", "--nproc-per-node", "2", stoker.script("train.py", watched + TRAIN + LINGER), "2")
    assert done.code == 0, done.err
    assert {event["steps"] for event in done.events if event["event"] == "rank-exit"} == {25}
    marks = [(event["rank"], event["at"]) for event in done.events if event["event"] == "mem"]
    assert sorted(marks) == [(rank, at) for rank in (0, 1) for at in ("POST-IMPORT", "POST-MODEL", "START")]
    assert re.search(r"\[Rank 1\] MEM:POST-IMPORT RAM [1-9]\d{1,2} MB \(rank\) ", done.err)
    assert done.log(0) == done.log(1) and done.log(0).startswith(b"collector True True\n")


def test_one_slot_does_not_deadlock_the_process_group(stoker: Stoker) -> None:
    script = stoker.script(
        "train.py",
        "import time, torch, torch.distributed as dist\ndist.init_process_group('gloo')\ndist.all_reduce(torch.ones(4))\n"
        "time.sleep(0.3)\ndist.destroy_process_group()\n",
    )
    done = stoker.torch("run", "--nproc-per-node", "2", "--init-slots", "1", script)
    assert done.code == 0, done.err
    locks = [(event["rank"], event["what"], event["why"]) for event in done.events if event["event"] == "lock"]
    assert locks == [
        (0, "acquired", None),
        (1, "waiting", None),
        (0, "released", "INIT"),
        (1, "acquired", None),
        (1, "released", "INIT"),
    ]


@at_length  # tests/faults has it too
def test_a_lost_peer_is_not_blamed(stoker: Stoker) -> None:
    script = stoker.script(
        "die.py",
        TRAIN.replace(
            "    for optimizer",
            "    if step == 20 and dist.get_rank() == 1: __import__('os')._exit(0)\n    for optimizer",
            1,
        ),
    )
    done = stoker.torch("run", "--nproc-per-node", "2", script, "1")
    assert done.code == 70 and (done.verdict["cause"], done.verdict["rank"]) == ("rank.early-exit", 1)
    assert "after step 20" in done.verdict["summary"]


@at_length
def test_stop_after_steps(stoker: Stoker) -> None:
    endless = TRAIN.replace("range(25)", "range(10**9)")
    done = stoker.torch(
        "run", "--nproc-per-node", "2", "--stop-after-steps", "50", stoker.script("endless.py", endless), "1"
    )
    assert (
        done.code == 0 and done.verdict["status"] == "completed" and "made at least 50 steps" in done.verdict["summary"]
    )
