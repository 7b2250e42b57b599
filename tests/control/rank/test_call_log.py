"""The log of torch.distributed calls: what the shim writes into shared memory and the agent reads, and what verdicts make of it."""

from __future__ import annotations

import itertools
import os
import types
from mmap import mmap
from typing import Any

import pytest

from conftest import Stoker
from stoker.control.rank import call_log
from stoker.control.watch.call_paths import find_first_difference
from stoker.control.watch.rank_inspection import RankInspection, parse_inspection


class Tensor:
    """As much of a tensor as the log looks at."""

    dtype = "torch.float32"

    def __init__(self, elements: int) -> None:
        self._elements = elements

    def numel(self) -> int:
        return self._elements


@pytest.fixture
def log() -> tuple[mmap, call_log.CallLogWriter, Any]:
    """The memory, its writer, and a module with wrapped functions."""
    memory, ticks = mmap(-1, call_log.SIZE), itertools.count(10)
    writer = call_log.CallLogWriter(memory, 0, lambda: next(ticks))
    code = """
def all_reduce(tensor, op=None, group=None, async_op=False):
    if tensor.numel() == 0:
        raise ValueError("empty")
def all_gather_object(object_list, obj, group=None):
    all_reduce(object_list[0])
def all_gather(tensor_list, tensor, group=None, async_op=False): ...
def send(tensor, dst=None, group=None, tag=0, group_dst=None): ...
def barrier(group=None): ...
"""
    module = types.ModuleType("c10d")
    module.__dict__["_world"] = types.SimpleNamespace(pg_names={"pair": "3"})
    exec(compile(code, "/x/site-packages/torch/c10d.py", "exec"), module.__dict__)
    writer.wrap(module)
    return memory, writer, module


def test_a_call_is_recorded_with_its_lines(log: tuple[mmap, call_log.CallLogWriter, Any]) -> None:
    memory, _, torch = log

    def helper() -> None:
        torch.all_reduce(Tensor(12), group="pair")

    helper()
    (call,) = call_log.read_calls(memory, 0)
    first = helper.__code__.co_firstlineno
    assert (call["name"], call["group"], call["elements"], call["dtype"]) == ("all_reduce", "3", 12, "float32")
    assert call["frames"][0] == ["helper", __file__, first + 1]
    assert call["frames"][1][:2] == ["test_a_call_is_recorded_with_its_lines", __file__]
    assert call["left_ns"] > call["entered_ns"]


def test_of_all_gather_the_tensor_that_the_rank_gives_is_recorded(
    log: tuple[mmap, call_log.CallLogWriter, Any],
) -> None:
    memory, _, torch = log
    torch.all_gather([Tensor(1), Tensor(1)], Tensor(5))
    torch.all_gather([], tensor=Tensor(7))
    assert [call["elements"] for call in call_log.read_calls(memory, 0)] == [5, 7]


def test_calls_within_calls_are_not_recorded(log: tuple[mmap, call_log.CallLogWriter, Any]) -> None:
    memory, _, torch = log
    torch.all_gather_object([Tensor(1)], None)
    assert [call["name"] for call in call_log.read_calls(memory, 0)] == ["all_gather_object"]


def test_a_call_that_raises_has_not_returned(log: tuple[mmap, call_log.CallLogWriter, Any]) -> None:
    memory, _, torch = log
    with pytest.raises(ValueError, match="empty"):
        torch.all_reduce(Tensor(0))
    (call,) = parse_inspection(0, {"calls": call_log.read_calls(memory, 0)}).calls
    assert not call.returned


def test_messages_are_counted_apart_from_collectives(log: tuple[mmap, call_log.CallLogWriter, Any]) -> None:
    memory, _, torch = log
    torch.barrier()
    torch.send(Tensor(3), 1)
    torch.barrier()
    calls = call_log.read_calls(memory, 0)
    assert [(call["name"], call["count"], call["peer"]) for call in calls] == [
        ("barrier", 1, None),
        ("send", 1, 1),
        ("barrier", 2, None),
    ]


def test_the_newest_calls_are_kept(log: tuple[mmap, call_log.CallLogWriter, Any]) -> None:
    memory, _, torch = log
    for _ in range(3 * call_log.SLOTS + 5):
        torch.barrier()
    calls = call_log.read_calls(memory, 0)
    assert [call["number"] for call in calls] == list(range(2 * call_log.SLOTS + 6, 3 * call_log.SLOTS + 6))


def test_a_call_is_recorded_when_there_is_no_space_for_new_lines(log: tuple[mmap, call_log.CallLogWriter, Any]) -> None:
    memory, _, torch = log
    for number in range(3000):  # as many lines as a generated program may have
        exec(compile(f"call()  # {number}", f"/generated/{number}.py", "exec"), {"call": torch.barrier})
    calls = call_log.read_calls(memory, 0)
    assert len(calls) == call_log.SLOTS
    assert calls[-1]["frames"] == []


def test_a_forked_worker_writes_nothing(log: tuple[mmap, call_log.CallLogWriter, Any]) -> None:
    memory, writer, torch = log
    writer.is_active = False
    torch.barrier()
    assert call_log.read_calls(memory, 0) == []


def test_memory_that_the_script_overwrote_is_no_log(log: tuple[mmap, call_log.CallLogWriter, Any]) -> None:
    memory, _, torch = log
    torch.barrier()
    memory[: len(memory)] = os.urandom(len(memory))
    call_log.read_calls(memory, 0)  # whatever it holds: no exception
    memory[: len(memory)] = b"\xff" * len(memory)
    assert call_log.read_calls(memory, 0) == []


# ---- the first call in which ranks differ ----


def snapshot(rank: int, *calls: tuple[str, int, bool], dtype: str = "float32", state: str = "S") -> RankInspection:
    """`calls`: (name, elements, whether it returned)."""
    entries = [
        {
            "number": number,
            "count": number,
            "name": name,
            "group": "0",
            "entered_ns": number,
            "left_ns": number + 1 if returned else 0,
            "elements": elements,
            "dtype": dtype,
            "peer": None,
            "frames": [["step", "train.py", 7]],
        }
        for number, (name, elements, returned) in enumerate(calls, 10)
    ]
    return parse_inspection(rank, {"state": state, "calls": entries})


STEP = ("all_reduce", 8, True)


def test_ranks_that_differ_are_parties() -> None:
    waits, other = ("all_reduce", 8, False), ("broadcast", 8, False)
    ranks = {0: snapshot(0, STEP, waits), 1: snapshot(1, STEP, other), 2: snapshot(2, STEP, waits)}
    assert sorted(party.ranks for party in find_first_difference(ranks)) == [(0, 2), (1,)]


def test_a_difference_that_held_up_nobody_is_by_design() -> None:
    ranks = {0: snapshot(0, ("gather", 4, True), STEP), 1: snapshot(1, ("scatter", 4, True), STEP)}
    assert find_first_difference(ranks) == []


def test_an_aborted_rank_agrees_with_those_that_made_its_call() -> None:
    waits = ("all_reduce", 8, False)
    ranks = {
        0: snapshot(0, STEP, waits, state="Z"),
        1: snapshot(1, STEP, waits, dtype="float64"),
        2: snapshot(2, STEP, waits),
    }
    # The data type of rank 1 differs in the first call already, which returned: only the second held somebody up.
    assert sorted(party.ranks for party in find_first_difference(ranks)) == [(0, 2), (1,)]


# ---- end to end ----

ABORTED = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
def reduce(x):
    dist.all_reduce(x)
for step in range(200):
    x = torch.ones(1000)
    if rank == 1 and step == 9:
        x = {odd}
    reduce(x)
    time.sleep(0.02)
"""


@pytest.mark.parametrize("odd", ["x.double()", "torch.ones(10)"])
def test_the_rank_that_differs_is_blamed_and_not_the_one_that_gloo_aborted(stoker: Stoker, odd: str) -> None:
    done = stoker("run", "--nproc-per-node", "3", stoker.script("train.py", ABORTED.format(odd=odd)))
    verdict = done.verdict
    assert (verdict["cause"], verdict["rank"]) == ("hang.shape-mismatch", 1)


EXITS = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
def finish():
    sys.exit({status})
for step in range(200):
    dist.all_reduce(torch.ones(8))
    time.sleep(0.02)
    if rank == 1 and step == 9:
        finish()
"""


@pytest.mark.parametrize(("status", "cause"), [("3", "rank.exit"), ("0", "rank.early-exit")])
def test_the_line_that_called_sys_exit_is_named(stoker: Stoker, status: str, cause: str) -> None:
    source = EXITS.format(status=status)
    done = stoker("run", "--nproc-per-node", "2", stoker.script("train.py", source))
    verdict = done.verdict
    line = source.splitlines().index(f"    sys.exit({status})") + 1
    assert (verdict["cause"], verdict["rank"]) == (cause, 1)
    assert f":{line}, in finish" in verdict["summary"]


OUT_OF_DESCRIPTORS = """
import resource, torch
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
kept = []
def more(folder):
    kept.append(folder.joinpath("x").open("w"))
for _ in range(100):
    more(Path("."))
"""


def test_a_rank_without_free_descriptors_reports_its_error(stoker: Stoker) -> None:
    done = stoker("run", "--nproc-per-node", "1", stoker.script("train.py", OUT_OF_DESCRIPTORS))
    verdict = done.verdict
    assert verdict["cause"] == "data.too-many-files"
    assert "train.py:7, in more" in verdict["summary"]
