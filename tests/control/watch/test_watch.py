"""The watch room's reasoning, on hand-made evidence: who waits for whom, what a stuck rank does, when to look and when to stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.contract.evidence import BadNumber, Stall
from stoker.contract.flight_recorder import summarize_trace
from stoker.contract.frozen import replace
from stoker.contract.units import format_ranks
from stoker.control.agent.stack_dump import find_conditions_around
from stoker.control.verdict.hangs import cause_of, make_stall_report, summarize_stall
from stoker.control.verdict.rules import numbers
from stoker.control.watch.culprit import describe_stuck_rank, find_culprit
from stoker.control.watch.loss_monitor import LossMonitor
from stoker.control.watch.rank_inspection import RankInspection, Thread, parse_inspection
from stoker.control.watch.rank_progress import RankProgress
from stoker.control.watch.straggler import StragglerDetector, explain_slow_rank, find_late_rank
from stoker.control.watch.watcher import Busy, Inspect, Recovered, Stop, Suspect, Watcher

SCRIPT, TORCH = "/home/me/train.py", "/venv/lib/python3.11/site-packages/torch"
BACKWARD = [
    ["_engine_run_backward", f"{TORCH}/autograd/graph.py", 979],
    ["backward", f"{TORCH}/_tensor.py", 600],
    ["main", SCRIPT, 40, [30]],
]
ALL_REDUCE = [["all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 2955], ["main", SCRIPT, 41, [30]]]
LOADER = [
    ["poll", "/usr/lib/python3.11/selectors.py", 415],
    ["_try_get_data", f"{TORCH}/utils/data/dataloader.py", 1300],
    ["main", SCRIPT, 33, [30]],
]


def op(
    seq: int,
    name: str = "gloo:all_reduce",
    sizes: Any = ((72,),),
    done: bool = True,
    p2p: int = 0,
    order: int | None = None,
) -> dict[str, Any]:
    return {
        "seq": seq,
        "p2p": p2p,
        "name": name,
        "sizes": [list(one) for one in sizes],
        "done": done,
        "order": seq if order is None else order,
    }


def group(
    *ops: dict[str, Any], name: str = "0", about: str = "default_pg", ranks: list[int] | None = None
) -> dict[str, Any]:
    return {"name": name, "about": about, "ops": list(ops), **({"ranks": ranks} if ranks else {})}


def rank(number: int, *groups: dict[str, Any], frames: Any = (), **more: Any) -> RankInspection:
    thread = {"main": True, "active": more.pop("active", False), "gil": more.pop("gil", False), "frames": list(frames)}
    return parse_inspection(
        number,
        {
            "state": "S",
            "syscall": "futex",
            "samples": [[thread], [thread]],
            "groups": list(groups),
            "stacks_by": "py-spy",
            **more,
        },
    )


def found(
    *ranks: RankInspection,
    world: int = 0,
    members: dict[str, tuple[int, ...]] | None = None,
    ended: dict[int, int] | None = None,
) -> Any:
    table = {one.rank: one for one in ranks}
    return find_culprit(
        table, world or len(ranks), members or {}, ended or {}, dict.fromkeys(table, 4.0), dict.fromkeys(table, 20)
    )


def waiting(number: int, seq: int = 26, **more: Any) -> RankInspection:
    return rank(number, group(op(seq - 1), op(seq, done=False, **more)), frames=BACKWARD)


def at(line: int, name: str = "load", loops: tuple[int, ...] = (30,)) -> list[Any]:
    return [[name, SCRIPT, line, []], ["main", SCRIPT, 35, list(loops)]]


DONE = group(op(24), op(25))


@pytest.mark.parametrize(
    ("culprit", "kind", "proof"),
    [
        (rank(1, DONE, frames=at(12), syscall="clock_nanosleep"), "sleep", False),
        (rank(1, DONE, frames=at(12), syscall="futex"), "lock", False),
        (rank(1, DONE, frames=at(12), syscall="read", wchan="pipe_read"), "io", False),
        (rank(1, DONE, frames=at(12), syscall="", wchan="hrtimer_nanosleep"), "sleep", False),
        (rank(1, DONE, frames=at(12), syscall="wait4", workers=[{"pid": 7, "name": "sleep", "state": "S", "command": "sleep 1000"}]), "child", False),
        (rank(1, DONE, frames=at(12), syscall="clock_nanosleep", gil=True), "gil", False),
        (rank(1, DONE, frames=at(12), syscall="running", main_cpu=1.0, cpu=1.0, active=True, gil=True, state="R"), "spin", False),
        (rank(1, DONE, frames=at(12), state="D", wchan="nfs_wait"), "disk", False),
        (rank(1, DONE, frames=at(12), syscall="running", main_cpu=0.2, cpu=0.2, waiting_for_core=0.8, active=True, state="R"), "spin", False),  # a busy machine
        (rank(1, frames=at(12), state="T"), "stopped", False), (rank(1, frames=at(12), state="t"), "debugged", False),
        (rank(1, DONE, frames=at(12), syscall="running", main_cpu=1.0, cpu=1.0, active=True, gpu={"use": 100}), "kernel", False),
    ],
)  # fmt: skip
def test_what_a_stuck_rank_does(culprit: RankInspection, kind: str, proof: bool) -> None:
    stall = found(waiting(0), culprit, waiting(2), waiting(3))
    assert (stall.kind, stall.rank, stall.proof) == (kind, 1, proof)
    assert stall.where == f"{SCRIPT}:12, in load"
    assert stall.step == 20 and stall.waiting == (0, 2, 3)


def test_a_stuck_worker_is_quoted() -> None:
    worker = {
        "pid": 77,
        "state": "S",
        "syscall": "clock_nanosleep",
        "threads": [
            {
                "main": True,
                "frames": [
                    ["__getitem__", SCRIPT, 8],
                    ["fetch", f"{TORCH}/utils/data/_utils/fetch.py", 50],
                    ["_worker_loop", f"{TORCH}/utils/data/_utils/worker.py", 300],
                ],
            }
        ],
    }
    idle = {
        "pid": 78,
        "state": "S",
        "threads": [
            {
                "main": True,
                "frames": [
                    ["get", "/usr/lib/python3.11/multiprocessing/queues.py", 113],
                    ["_worker_loop", f"{TORCH}/utils/data/_utils/worker.py", 250],
                ],
            }
        ],
    }
    stall = found(waiting(0), rank(1, DONE, frames=LOADER, syscall="poll", workers=[idle, worker]))
    assert (stall.kind, stall.rank, stall.where) == ("worker", 1, f"{SCRIPT}:8, in __getitem__")
    assert "worker 77" in stall.detail


def test_another_operation_and_another_shape_are_proof() -> None:
    other = rank(
        1,
        group(op(25), op(26, "gloo:broadcast", [[3]], done=False)),
        frames=[["broadcast", f"{TORCH}/distributed/distributed_c10d.py", 1], *at(14, "odd")],
    )
    stall = found(waiting(0), other, waiting(2))
    assert (stall.kind, stall.rank, stall.proof) == ("op-mismatch", 1, True)
    shape = rank(1, group(op(25), op(26, sizes=[[5]], done=False)), frames=BACKWARD)
    stall = found(waiting(0), shape, waiting(2))
    assert (stall.kind, stall.rank, stall.proof) == ("shape-mismatch", 1, True)
    elsewhere = rank(
        1,
        group(op(25), op(26, sizes=[[5]], done=False)),
        frames=[["all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 1], *at(14, "odd")],
    )
    stall = found(waiting(0), elsewhere, waiting(2))
    assert (stall.kind, stall.rank, stall.proof) == ("diverged", 1, True)


def test_the_same_numbers_in_another_shape_are_fine() -> None:
    flat = rank(0, group(op(26, sizes=[[4]], done=False)), frames=ALL_REDUCE)
    square = rank(1, group(op(26, sizes=[[1, 4]], done=False)), frames=ALL_REDUCE)
    assert found(flat, square).kind == "together"


def test_a_group_made_again_is_counted_anew() -> None:
    entries = [
        {
            "process_group": ["0", "default_pg"],
            "collective_seq_id": seq,
            "profiling_name": name,
            "retired": True,
            "time_created_ns": n,
        }
        for n, (seq, name) in enumerate([(1, "gloo:barrier"), (2, "gloo:broadcast"), (1, "gloo:all_reduce")])
    ]
    assert [one["name"] for one in summarize_trace({"entries": entries})[0]["ops"]] == ["gloo:all_reduce"]


def test_asynchronous_operations_in_another_order_are_no_proof() -> None:
    """Rank 0 has one under way and evaluates; it waits in neither."""

    def pair(number: int, first: str, second: str, frames: Any) -> RankInspection:
        return rank(
            number,
            group(op(1), name=second, about=""),
            group(op(1), op(2, done=False, order=50), name=first, about=""),
            frames=frames,
        )

    stall = found(pair(0, "1", "2", at(12)), pair(1, "2", "1", ALL_REDUCE), members={"1": (0, 1), "2": (0, 1)})
    assert not stall.proof


def test_a_debugger_is_no_proof_and_a_decorator_no_collective() -> None:
    assert not found(waiting(0), rank(1, DONE, frames=at(12), state="t")).proof
    record = [["wrapper", f"{TORCH}/distributed/elastic/multiprocessing/errors/__init__.py", 355]]
    stall = found(rank(0, frames=[*at(12), *record], syscall="clock_nanosleep"))
    assert (stall.kind, stall.rank) == ("sleep", 0)


def test_sizes_may_differ_where_they_may() -> None:
    a = rank(0, group(op(26, "gloo:all_to_all", [[3]], done=False)), frames=ALL_REDUCE)
    b = rank(1, group(op(26, "gloo:all_to_all", [[5]], done=False)), frames=ALL_REDUCE)
    assert found(a, b).kind == "together"


def test_fewer_batches_are_told_from_another_call_in_the_loop() -> None:
    barrier = [["barrier", f"{TORCH}/distributed/distributed_c10d.py", 1], ["main", SCRIPT, 50, []]]
    left = rank(1, group(op(25), op(26, "gloo:barrier", [], done=False)), frames=barrier)
    assert (found(waiting(0), left).kind, found(waiting(0), left).rank) == ("unequal", 1)
    inside = rank(
        1, group(op(25), op(26, "gloo:barrier", [], done=False)), frames=[barrier[0], ["main", SCRIPT, 38, [30]]]
    )
    assert found(waiting(0), inside).kind == "op-mismatch"
    # nanoGPT: the others are in the loop of micro-steps, which begins after the line this one is at, within the loop of steps.
    micro = rank(0, group(op(25), op(26, done=False)), frames=[*BACKWARD[:2], ["main", SCRIPT, 40, [30, 39]]])
    assert found(micro, inside).kind == "op-mismatch"


def test_a_missing_rank_of_a_subgroup() -> None:
    def sub(number: int, *ops: dict[str, Any]) -> RankInspection:
        return rank(number, DONE, group(*ops, name="5", about=""), frames=ALL_REDUCE)

    members = {"4": (0, 1), "5": (2, 3)}
    fine = [
        rank(n, group(op(25), op(26, done=False)), group(op(3), name="4", about=""), frames=ALL_REDUCE) for n in (0, 1)
    ]
    late = rank(3, DONE, group(op(3), name="5", about=""), frames=at(12), syscall="clock_nanosleep")
    stall = found(*fine, sub(2, op(3), op(4, done=False, order=60)), late, members=members)
    assert (stall.kind, stall.rank, set(stall.waiting)) == ("sleep", 3, {0, 1, 2})
    # The same with a group that has never been used before: only its members say whom rank 2 waits for.
    new = rank(2, DONE, group(op(1, done=False, order=60), name="9", about=""), frames=ALL_REDUCE)
    stall = found(*fine, new, rank(3, DONE, frames=at(12), syscall="clock_nanosleep"), members={**members, "9": (2, 3)})
    assert (stall.kind, stall.rank) == ("sleep", 3)


def test_groups_entered_in_opposite_order() -> None:
    def pair(number: int, first: str, second: str) -> RankInspection:
        return rank(
            number,
            group(op(1), name=second, about=""),
            group(op(1), op(2, done=False, order=50), name=first, about=""),
            frames=ALL_REDUCE,
        )

    stall = found(pair(0, "1", "2"), pair(1, "2", "1"), members={"1": (0, 1), "2": (0, 1)})
    assert (stall.kind, stall.proof) == ("diverged", True)


def entry(number: int, seq: int, name: str = "gloo:all_reduce", size: int = 72, pg: str = "0") -> dict[str, Any]:
    return {
        "process_group": [pg, "default_pg" if pg == "0" else "undefined"],
        "collective_seq_id": seq,
        "profiling_name": name,
        "input_sizes": [[size]],
        "retired": True,
        "time_created_ns": number,
    }


def test_what_comes_next_is_known_from_what_came_before() -> None:
    """Each step reduces a metric, then the gradients. A rank that leaves the metric out makes an operation that never came next."""
    steps = [entry(n, n, size=5 if n % 2 else 289) for n in range(1, 41)]
    said = {
        "as before": entry(41, 41, size=5),
        "left out": entry(41, 41, size=289),
        "another": entry(41, 41, "gloo:barrier", 1),
    }
    assert {name: summarize_trace({"entries": [*steps, one]})[0]["ops"][-1]["usual"] for name, one in said.items()} == {
        "as before": True,
        "left out": False,
        "another": False,
    }
    assert summarize_trace({"entries": steps[:3]})[0]["ops"][-1]["usual"] is None  # nothing has repeated itself yet
    evaluated = [entry(n, n, size=7 if n % 20 == 0 else 289) for n in range(1, 100)]  # an evaluation now and then
    assert summarize_trace({"entries": [*evaluated, entry(100, 100, size=7)]})[0]["ops"][-1]["usual"]


@pytest.mark.parametrize("guilty", [0, 1])
def test_of_two_ranks_the_one_that_left_the_usual_order(guilty: int) -> None:
    def one(number: int) -> RankInspection:
        usual = number != guilty
        last = {**op(26, "gloo:all_reduce" if usual else "gloo:barrier", done=False), "usual": usual}
        return rank(
            number,
            group(op(25), last),
            frames=BACKWARD if usual else [["barrier", f"{TORCH}/distributed/distributed_c10d.py", 1], *at(14, "save")],
        )

    stall = found(one(0), one(1))
    assert (stall.kind, stall.rank, stall.waiting) == ("op-mismatch", guilty, (1 - guilty,))
    text = summarize_stall(stall, "CPU0")
    assert (
        f"it entered gloo:barrier of shape [72] at {SCRIPT}:14" in text
        and f"rank {1 - guilty} entered gloo:all_reduce of shape [72] at {SCRIPT}:40" in text
    )


def test_of_two_ranks_that_gloo_ended_one_still_knows_its_operations() -> None:
    """Rank 0 was aborted and left its stack; rank 1, with two reductions under way, made a first one that never came next."""
    watch, _ = watched()
    watch.note_failure(0, (), at(14, "metric"))
    ops = [
        {**op(103), "usual": True},
        {**op(104, sizes=[[289]]), "usual": False},
        {**op(105, sizes=[[4]]), "usual": None},
    ]
    watch.note_failure(1, [group(*ops)], [["main", SCRIPT, 40]])
    stall = watch.final_stall(sizes_differ=True)
    assert (
        stall is not None
        and (stall.kind, stall.rank) == ("diverged", 1)
        and "all_reduce of shape [289]" in summarize_stall(stall, "CPU1")
        and f"{SCRIPT}:14" in summarize_stall(stall, "CPU1")
    )
    for one in ops:
        one["usual"] = True
    watch.note_failure(1, [group(*ops)], [["main", SCRIPT, 40]])
    stall = watch.final_stall(sizes_differ=True)
    assert stall is not None and stall.rank == 0
    assert watch.final_stall(sizes_differ=False) is None


def test_a_tie_names_both_with_their_lines() -> None:
    stall = found(
        waiting(0),
        rank(
            1,
            group(op(25), op(26, "gloo:broadcast", done=False)),
            frames=[["broadcast", f"{TORCH}/distributed/distributed_c10d.py", 1], *at(14, "odd")],
        ),
    )
    assert (stall.kind, stall.rank, stall.ranks, stall.step) == ("op-mismatch", None, (), 20)
    text = summarize_stall(stall, "")
    assert f"{SCRIPT}:40" in text and f"{SCRIPT}:14" in text and "unknown which of them is wrong" in text


@pytest.mark.parametrize("used", [True, False], ids=["used before", "never used"])
@pytest.mark.parametrize("guilty", [0, 1, 2, 3])
def test_who_leaves_its_pairs_operation_out_is_blamed_and_not_its_partner(guilty: int, used: bool) -> None:
    """Everybody ends up waiting for the partner, who waits for the guilty one."""
    partner = guilty ^ 1

    def one(number: int) -> RankInspection:
        past = [op(1, order=24)] if used else []
        mine = [] if number == guilty else [op(len(past) + 1, done=number != partner, order=30)]
        world = [op(25, order=25)] if number == partner else [op(25, order=25), op(26, done=False, order=40)]
        pair = group(*past, *mine, name=str(1 + number // 2), about="")
        return rank(
            number,
            group(op(23, order=23), *world),
            *([pair] if past or mine else []),
            frames=ALL_REDUCE if number == partner else BACKWARD,
        )

    stall = found(*(one(n) for n in range(4)), members={"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3)})
    assert (stall.kind, stall.rank, stall.proof) == ("diverged", guilty, True)


def test_stages_of_a_pipeline_may_differ() -> None:
    """Ranks 0 and 1 reduce other sizes than ranks 2 and 3, in every step; rank 3 sleeps."""

    def one(number: int) -> RankInspection:
        stage = number // 2
        mine = group(
            *(
                op(n, sizes=[[10 + stage]], done=not (n == 9 and number == 2), order=2 * n)
                for n in range(5, 9 if number == 3 else 10)
            ),
            name=str(1 + stage),
            about="",
        )
        return rank(
            number,
            group(*(op(n, order=2 * n + 1) for n in range(5, 9))),
            mine,
            frames=at(12) if number == 3 else ALL_REDUCE,
            syscall="clock_nanosleep",
        )

    assert found(*(one(n) for n in range(4)), members={"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3)}).rank == 3


def test_a_receive_without_a_send() -> None:
    stall = found(
        rank(0, group(op(0, "gloo:recv 0<-1", [[4]], done=False, p2p=1)), frames=ALL_REDUCE),
        rank(1, DONE, frames=at(12), syscall="clock_nanosleep"),
    )
    assert (stall.kind, stall.rank) == ("sleep", 1)


def test_a_cycle_of_requests_names_where_they_are_waited_for_and_where_they_were_started() -> None:
    def one(number: int) -> RankInspection:
        call = {"number": 1, "count": 1, "name": "irecv", "group": "0", "entered_ns": 5, "left_ns": 6, "elements": 4,
                "dtype": "float32", "peer": 1 - number, "frames": [["refresh", "/x/train.py", 31]]}  # fmt: skip
        return parse_inspection(
            number, {"state": "S", "samples": [[{"main": True, "frames": at(32, "refresh")}]], "calls": [call]}
        )

    stall = found(one(0), one(1))
    assert (stall.kind, stall.rank) == ("diverged", None)
    for ranks, entered, where in stall.parties:
        assert f"from rank {1 - ranks[0]}" in entered and "train.py:31" in entered and ":32, in refresh" in where


def test_a_rank_that_left_and_one_everybody_is_in() -> None:
    stall = found(waiting(0), waiting(2), world=3, ended={1: 0})
    assert (stall.kind, stall.rank, stall.proof) == ("left", 1, True)
    stall = found(waiting(0), waiting(1))
    assert (stall.kind, stall.rank, stall.proof) == ("together", None, False)


def test_without_a_flight_recorder_the_stack_that_differs() -> None:
    stall = found(
        rank(0, frames=ALL_REDUCE, no_groups="no worker server"),
        rank(1, frames=at(12), syscall="clock_nanosleep"),
        rank(2, frames=ALL_REDUCE),
    )
    assert (stall.kind, stall.rank, stall.waiting) == ("sleep", 1, (0, 2))
    assert any("no flight recorder" in line for line in stall.evidence)


JOINING = [["rendezvous", f"{TORCH}/distributed/rendezvous.py", 200],
           ["init_process_group", f"{TORCH}/distributed/distributed_c10d.py", 1700], ["main", SCRIPT, 3]]  # fmt: skip
COMPUTING = {"state": "R", "syscall": "running", "main_cpu": 0.6, "cpu": 0.6}


def test_one_rank_alone_never_waits_in_a_collective() -> None:
    pending = group(op(26, done=False))
    for groups in ((), (pending,)):
        stall = found(rank(0, *groups, frames=BACKWARD, **COMPUTING), world=1)
        assert (stall.kind, stall.rank, stall.waiting) == ("spin", 0, ())
        line = summarize_stall(replace(stall, silent_s=12.0, step=20), "CPU0")
        assert line == "rank 0 (CPU 0) has not finished a step for 12 s after step 20: it is computing (0.6 cores, always on this line) at /home/me/train.py:40, in main"  # fmt: skip
    stall = found(rank(0, frames=JOINING, syscall="poll"), world=1)
    assert (stall.kind, stall.rank) == ("io", 0) and "it is still connecting" in stall.detail


def test_ranks_that_connect_or_compute_are_not_said_to_wait_in_a_collective() -> None:
    """The first rank makes the store and the second connects to it: not the same innermost function."""
    stall = found(rank(0, frames=JOINING, syscall="poll"), rank(1, frames=JOINING[1:], syscall="poll"))
    assert (stall.kind, stall.rank) == ("together", None)
    line = summarize_stall(replace(stall, silent_s=8.0), "")
    assert line.startswith("no rank has made progress for 8 s: every rank is still connecting") and "train.py:3" in line
    stall = found(*(rank(number, frames=BACKWARD, **COMPUTING) for number in (0, 1)))
    assert (stall.kind, stall.rank, stall.detail) == ("spin", None, "every rank is computing in the backward pass")
    stall = found(*(rank(number, frames=BACKWARD) for number in (0, 1)))
    assert (stall.kind, stall.rank, stall.detail) == ("together", None, "every rank is waiting in a collective")


def test_nothing_at_all_is_no_accusation() -> None:
    assert find_culprit({}, 2, {}, {}, {}, {}) is None
    assert parse_inspection(0, {}) == RankInspection(0)


def test_a_recorder_that_marks_nothing_done() -> None:
    """Then only the newest operation can be the one it waits in."""
    never = [op(n, done=False) for n in range(1, 31)]
    assert (
        found(
            rank(0, group(*never, op(31, done=False)), frames=BACKWARD),
            rank(1, group(*never), frames=at(12), syscall="clock_nanosleep"),
        ).rank
        == 1
    )


def test_digest_keeps_what_is_pending() -> None:
    entries = [
        {
            "process_group": ["0", "default_pg"],
            "collective_seq_id": n,
            "profiling_name": "nccl:all_reduce",
            "input_sizes": [[4]],
            "state": "completed" if n < 60 else "scheduled",
            "record_id": n,
        }
        for n in range(100)
    ]
    ops = summarize_trace({"entries": entries, "pg_config": {"0": {"ranks": "[0, 1]"}}})[0]
    assert ops["ranks"] == [0, 1] and not ops["ops"][0]["done"] and ops["ops"][0]["seq"] == 60
    assert summarize_trace({}) == []


# ---- when ----


def watched(
    world: int = 2, timeout: float = 300.0, steps: int = 40, busy_timeout: float = 1800.0
) -> tuple[Watcher, float]:
    watch, now = Watcher(world, timeout, frozenset([""]), 0.0, busy_timeout=busy_timeout), 0.0
    for n in range(1, steps + 1):
        now = n * 0.5
        for one in range(world):
            watch.note_steps(one, n * 10, 10, 0.05, now)
        watch.stragglers.next_order = lambda *_: None  # type: ignore[method-assign]
    return watch, now


def answer(watch: Watcher, action: Inspect, now: float, *ranks: dict[str, Any]) -> None:
    watch.take_answer("", action.order["ask"], json.dumps({str(n): one for n, one in enumerate(ranks)}).encode(), now)


SLEEPING = {
    "state": "S",
    "syscall": "clock_nanosleep",
    "groups": [DONE],
    "samples": [[{"main": True, "frames": at(12)}]],
}
WAITING = {
    "state": "S",
    "syscall": "futex",
    "groups": [group(op(25), op(26, done=False))],
    "samples": [[{"main": True, "frames": BACKWARD}]],
}


def drive(
    watch: Watcher, now: float, seconds: float, *ranks: dict[str, Any], printing: float = 0.0
) -> list[tuple[float, Any]]:
    """Looks four times a second and answers every inspection; what it decided, and when after `now`. `printing`: for so long rank 1 prints."""
    actions = []
    for n in range(int(seconds * 4)):
        at_ = now + n * 0.25
        if n * 0.25 < printing:
            watch.note_output(1, at_)
        for action in watch.next_actions(at_):
            if isinstance(action, Inspect):
                answer(watch, action, at_, *ranks)
            else:
                actions.append((at_ - now, action))
    return actions


def test_a_rank_without_python_frames_is_on_no_line() -> None:
    """Python shuts down in native code, with the GIL held."""
    shutting_down = (Thread(main=True, active=True, gil=True, frames=()),)
    kind, frame, detail = describe_stuck_rank(
        RankInspection(1, state="R", cpu=0.9, main_cpu=0.9, samples=(shutting_down,) * 3)
    )
    assert (kind, frame) == ("spin", None)
    assert "always on this line" not in detail and "no Python stack seen" in detail


def test_a_stall_is_explained_in_seconds_and_stopped_at_the_timeout() -> None:
    watch, now = watched(timeout=60.0)
    actions = drive(watch, now, 90, WAITING, SLEEPING)
    (when, suspicion), *_ = actions
    assert isinstance(suspicion, Suspect) and suspicion.stall.rank == 1 and 3 <= when <= 5
    stops = [when for when, action in actions if isinstance(action, Stop)]
    assert stops and 59 <= stops[0] <= 61
    assert sum(isinstance(action, Suspect) for _, action in actions) == 1, "said once"


def test_one_that_computes_and_keeps_nobody_waiting_is_given_longer() -> None:
    """A step on a busy machine may take three seconds; one that sleeps does nothing in them."""
    computing = {**COMPUTING, "samples": [[{"main": True, "frames": BACKWARD}]]}
    for doing, first, last in ((computing, 10, 15), ({**SLEEPING, "groups": []}, 3, 5)):
        watch, now = watched(world=1, timeout=60.0)
        actions = drive(watch, now, 90, doing)
        when, suspicion = actions[0]
        assert isinstance(suspicion, Suspect) and suspicion.stall.rank == 0 and first <= when <= last
        stops = [when for when, action in actions if isinstance(action, Stop)]
        assert stops and 59 <= stops[0] <= 61
    watch, now = watched(timeout=60.0)
    when, suspicion = drive(watch, now, 20, WAITING, {**computing, "groups": [DONE]})[0]
    assert suspicion.stall.kind == "spin" and 3 <= when <= 5, "another rank waits for it"


def test_lines_and_collectives_keep_it_alive_for_a_while() -> None:
    """An evaluation that prints is no hang at the timeout; a livelock that prints is stopped in the end, and is no hang."""
    watch, now = watched(timeout=60.0, busy_timeout=360.0)
    stops = [
        (when, action)
        for when, action in drive(watch, now, 400, WAITING, SLEEPING, printing=400)
        if isinstance(action, Stop)
    ]
    assert stops and 355 <= stops[0][0] <= 365
    assert cause_of(stops[0][1].stall) == "rank.busy" and stops[0][1].stall.rank == 1


Look = dict[str, Any]


def looks(watch: Watcher, now: float, seconds: float, look: Callable[[float, int], Look]) -> list[tuple[float, Any]]:
    """Drive with a rank 1 that looks different each time: `look` gets the seconds since `now` and the number of the look."""
    actions, count = [], 0
    for n in range(int(seconds * 4)):
        for action in watch.next_actions(now + n * 0.25):
            if isinstance(action, Inspect):
                answer(watch, action, now + n * 0.25, WAITING, look(n * 0.25, count))
                count += 1
            else:
                actions.append((n * 0.25, action))
    return actions


def thread(line: int, name: str = "evaluate", values: str = "") -> list[Look]:
    return [{"main": True, "active": True, "values": values, "frames": at(line, name)}]


SPINNING: Look = {"state": "R", "syscall": "running", "main_cpu": 1.0, "cpu": 1.0, "groups": [DONE]}
POOL = [["wait", "/usr/lib/python3.11/threading.py", 320], ["get", "/usr/lib/python3.11/multiprocessing/pool.py", 768],
        *at(12, "tokenize")]  # fmt: skip
IN_POOL: Look = {"state": "S", "syscall": "futex", "groups": [DONE], "samples": [[{"main": True, "frames": POOL}]]}
CHILD: Look = {"pid": 7, "state": "R", "cpu": 1.0}


def child(line: int, values: str = "") -> Look:
    return {**CHILD, "threads": thread(line, "encode", values)}


def helper(number: int) -> Look:
    """A thread of the rank that is seen in one of two functions."""
    return {"main": False, "frames": at(50, f"part{number % 2}")}


WORKS: dict[str, Callable[[float, int], Look]] = {
    "a stack that moves": lambda s, n: {**SPINNING, "samples": [thread(12), thread(20, f"part{n % 3}")]},
    "variables that change on one line": lambda s, n: {**SPINNING, "samples": [thread(12, values=f"{n}")]},
    "three lines of one function": lambda s, n: {**SPINNING, "samples": [thread(11 + i) for i in range(3)]},
    "files that are read": lambda s, n: {**SLEEPING, "syscall": "read", "main_bytes": int(s * 50_000)},
    "native code that touches memory": lambda s, n: {**SPINNING, "samples": [thread(12)], "all_faults": int(s * 900)},
    "a mapped file": lambda s, n: {**SLEEPING, "state": "D", "main_faults": int(s * 900)},
    "a child whose stack moves": lambda s, n: {**IN_POOL, "workers": [child(3, values=f"{n}")]},
    "a child that writes": lambda s, n: {**IN_POOL, "workers": [{**CHILD, "moved": int(s * 90_000)}]},
    "one child after the other": lambda s, n: {**IN_POOL, "children": [7 + n]},
    "threads on a busy machine": lambda s, n: {**IN_POOL, "cpu": 0.2, "samples": [[*IN_POOL["samples"][0], helper(n)]]},
    "children that end within a look": lambda s, n: {**IN_POOL, "children_before": [7]},
    "collectives that advance": lambda s, n: {
        **SLEEPING,
        "groups": [group(op(25), op(26 + n, order=1 + int(s * 1e9)))],
    },
}


@pytest.mark.parametrize("look", WORKS.values(), ids=WORKS)
def test_a_rank_that_works_has_until_the_busy_timeout_and_is_no_hang(look: Callable[[float, int], Look]) -> None:
    watch, now = watched(timeout=20.0, busy_timeout=100.0)
    actions = looks(watch, now, 130, look)
    ends = [(when, action) for when, action in actions if isinstance(action, Stop)]
    assert ends and 98 <= ends[0][0] <= 102, actions
    assert (cause_of(ends[0][1].stall), ends[0][1].stall.rank) == ("rank.busy", 1)
    busy = [(when, action) for when, action in actions if isinstance(action, Busy)]
    suspected = [when for when, action in actions if isinstance(action, Suspect) and when < ends[0][0]]
    first, last = (
        (suspected[0], suspected[0] + 4) if suspected else (18, 27)
    )  # a suspicion is withdrawn by the next look
    assert len(busy) == 1 and first < busy[0][0] <= last and len(suspected) < 2, "reported once"
    assert busy[0][1].stops_in == pytest.approx(100 - busy[0][0], abs=2) and busy[0][1].stall.waiting == (0,)


IDLE: dict[str, tuple[str, Look]] = {
    "one line": ("hang.spin", {**SPINNING, "samples": [thread(12), thread(12)]}),
    "head and body of a loop": ("hang.spin", {**SPINNING, "samples": [thread(12), thread(13)]}),
    "polls and sleeps": ("hang.sleep", {**SLEEPING, "main_cpu": 0.02, "samples": [thread(12, values="a"), thread(13, values="b")]}),
    "an idle pool": ("hang.lock", {**IN_POOL, "workers": [{**child(3), "cpu": 0.0}]}),
    "a child on one line": ("hang.lock", {**IN_POOL, "workers": [child(3)]}),
    "asleep beside a busy child": ("hang.sleep", {**SLEEPING, "workers": [{**CHILD, "moved": 10**9}]}),
    "a busy GPU": ("hang.gpu-kernel", {**SPINNING, "samples": [thread(12)], "gpu": {"use": 100}}),
}  # fmt: skip


@pytest.mark.parametrize(("cause", "look"), IDLE.values(), ids=IDLE)
def test_cpu_time_without_evidence_of_work_is_a_hang_at_its_timeout(cause: str, look: Look) -> None:
    watch, now = watched(timeout=20.0, busy_timeout=100.0)
    actions = looks(watch, now, 60, lambda seconds, n: look)
    assert isinstance(actions[0][1], Suspect) and 3 <= actions[0][0] <= 5
    ends = [(when, action) for when, action in actions if isinstance(action, Stop)]
    assert ends and 19 <= ends[0][0] <= 21
    assert (cause_of(ends[0][1].stall), ends[0][1].stall.rank) == (cause, 1)


A_LITTLE_CPU: Look = {**SLEEPING, "main_cpu": 0.001}
EARLY_SIGNS: dict[str, Callable[[float, int], Look]] = {
    "a slow reader": lambda s, n: {**A_LITTLE_CPU, "main_bytes": int(s * 80_000)},
    "a child that computes": lambda s, n: {**IN_POOL, "workers": [child(3, values=f"{n}")]},
    "one child after the other": lambda s, n: {**IN_POOL, "children_before": [6 + n], "children": [7 + n]},
}


@pytest.mark.parametrize("look", EARLY_SIGNS.values(), ids=EARLY_SIGNS)
def test_a_rank_that_used_cpu_is_looked_at_twice_before_it_is_suspected(look: Callable[[float, int], Look]) -> None:
    watch, now = watched(timeout=60.0)
    actions = looks(watch, now, 50, look)
    assert not any(isinstance(action, Suspect) for _, action in actions), actions


def test_a_rank_that_used_cpu_and_does_nothing_else_is_suspected_at_the_second_look() -> None:
    watch, now = watched(timeout=60.0)
    when, suspicion = looks(watch, now, 10, lambda seconds, n: A_LITTLE_CPU)[0]
    assert isinstance(suspicion, Suspect) and suspicion.stall.rank == 1 and 4 <= when <= 6


def test_a_line_printed_after_the_last_step_is_evidence_at_the_first_look() -> None:
    watch, now = watched(timeout=60.0)
    actions = drive(watch, now, 10, WAITING, SLEEPING, printing=2.0)
    assert [when for when, action in actions if isinstance(action, Suspect) and when < 6] == []


def test_a_rank_that_stops_working_is_a_hang_one_timeout_later() -> None:
    watch, now = watched(timeout=20.0, busy_timeout=1800.0)
    until = 60.0

    def look(seconds: float, n: int) -> Look:
        return WORKS["a stack that moves"](seconds, n) if seconds < until else SLEEPING

    actions = looks(watch, now, 120, look)
    ends = [(when, action) for when, action in actions if isinstance(action, Stop)]
    assert ends and until + 14 <= ends[0][0] <= until + 21 and cause_of(ends[0][1].stall) == "hang.sleep"


def test_a_rank_in_a_collective_is_not_accused_while_another_works() -> None:
    """Each has an asynchronous operation that the other has not entered; rank 1 waits in its own, and rank 0 evaluates."""
    watch, now = watched(timeout=20.0)
    watch.note_groups("1=0,1;2=0,1")

    def one(first: str, second: str, **more: Any) -> Look:
        pending = group(op(1), op(2, done=False, order=50), name=first, about="")
        return {"groups": [group(op(1), name=second, about=""), pending], **more}

    waits_ = one("2", "1", state="S", syscall="futex", samples=[[{"main": True, "frames": ALL_REDUCE}]])
    actions: list[Any] = []
    for n in range(320):
        for action in watch.next_actions(now + n * 0.25):
            if isinstance(action, Inspect):
                samples = [thread(12, values="a"), thread(12, values="b")]
                answer(watch, action, now + n * 0.25, {**SPINNING, **one("1", "2", samples=samples)}, waits_)
            else:
                actions.append(action)
    assert [(type(action), action.stall.rank) for action in actions] == [(Busy, 0)]


def test_a_rank_that_works_is_never_stopped_without_a_limit_and_in_an_announced_phase() -> None:
    for busy_timeout, phase in ((0.0, ""), (100.0, "eval")):
        watch, now = watched(timeout=20.0, busy_timeout=busy_timeout)
        watch.note_mark(1, now, phase)
        actions = looks(watch, now, 900, WORKS["a stack that moves"])
        assert [type(action) for _, action in actions] == [Busy] and actions[0][1].stops_in is None


def test_an_announced_phase_takes_as_long_as_it_gives_signs() -> None:
    watch, now = watched(timeout=60.0)
    for one in (0, 1):
        watch.note_mark(one, now, "eval")
    stops = [
        when for when, action in drive(watch, now, 2000, WAITING, SLEEPING, printing=1500) if isinstance(action, Stop)
    ]
    assert stops and 1500 + 350 <= stops[0] <= 1500 + 370, "six times the timeout after its last line"


def test_ranks_that_wait_for_a_server_are_not_suspected_while_they_say_so() -> None:
    """Rank 1 waits for the server, rank 0 for rank 1."""
    watch, now = watched(timeout=60.0)
    watch.note_mark(1, now, "waiting for the server")
    for minute in range(10):
        assert drive(watch, now + 20 * minute, 20, WAITING, SLEEPING) == []
        watch.note_mark(1, now + 20 * (minute + 1), "waiting for the server")
    now += 200
    watch.note_mark(1, now, "train")
    assert drive(watch, now, 1, WAITING, SLEEPING) == [], "nothing was suspected: nothing is taken back"
    suspected = [action for _, action in drive(watch, now + 1, 30, WAITING, SLEEPING)]
    assert [type(action) for action in suspected] == [Suspect] and suspected[0].stall.rank == 1


def test_a_rank_that_no_longer_says_that_it_waits_is_suspected_of_hanging() -> None:
    watch, now = watched(timeout=60.0)
    watch.note_mark(1, now, "waiting for the server")
    when = [when for when, action in drive(watch, now, 120, WAITING, SLEEPING) if isinstance(action, Suspect)]
    assert len(when) == 1 and 60 <= when[0] <= 65


def test_ranks_that_are_seen_right_after_a_failure_are_not_suspected_of_standing_still() -> None:
    watch, now = watched(world=3, timeout=60.0)
    watch.note_exit(2, -6)
    watch.inspect_survivors()
    dying = {"state": "R", "main_cpu": 0.9, "cpu": 0.9, "groups": [DONE], "samples": [[{"main": True, "frames": []}]]}
    assert drive(watch, now, 1.5, WAITING, dying) == []
    assert watch.survivors_inspected and watch.stall is None


def test_nothing_seen_is_stopped_all_the_same() -> None:
    watch, now = watched(timeout=60.0)
    stops = [action for _, action in drive(watch, now, 120) if isinstance(action, Stop)]
    assert stops and stops[0].stall.kind == "place"


def test_a_standing_suspicion_is_not_inspected_for_ever() -> None:
    watch, now = watched(timeout=3600.0)
    asked = 0
    for n in range(2400):
        for action in watch.next_actions(now + n * 0.25):
            if isinstance(action, Inspect):
                asked += 1
                answer(watch, action, now + n * 0.25, WAITING, SLEEPING)
    assert asked < 20, "ten minutes"


def test_proof_stops_without_the_timeout() -> None:
    watch, now = watched(timeout=300.0)
    other = {**WAITING, "groups": [group(op(25), op(26, "gloo:broadcast", [[3]], done=False))]}
    stops = [when for when, action in drive(watch, now, 60, WAITING, other) if isinstance(action, Stop)]
    assert stops and stops[0] < 12


def test_no_timeout_means_never() -> None:
    watch, now = watched(timeout=0.0)
    assert not any(isinstance(action, Stop) for _, action in drive(watch, now, 900, WAITING, SLEEPING))


def test_what_goes_on_is_relieved() -> None:
    watch, now = watched()
    drive(watch, now, 30, WAITING, SLEEPING)
    for one in (0, 1):
        watch.note_steps(one, 401, 1, 30.0, now + 31)
    assert [type(action) for action in watch.next_actions(now + 31)] == [Recovered]
    assert watch.stall is None


def test_who_has_ended_does_not_make_progress_again() -> None:
    watch, now = watched()
    drive(watch, now, 30, WAITING, SLEEPING)
    watch.note_exit(1, 0)
    watch.note_steps(0, 401, 1, 30.0, now + 31)
    assert watch.next_actions(now + 31) == [] and watch.stall is None


def test_a_stopped_process_is_given_the_whole_timeout() -> None:
    watch, now = watched(timeout=60.0)
    for one in (0, 1):
        watch.note_vitals(one, "T" if one else "S", 0.0, 0, now)
    stopped = {"state": "T", "samples": [[{"main": True, "frames": at(12)}]]}
    actions = drive(watch, now, 90, WAITING, stopped)
    suspected, stopped_at = (
        next((when, action) for when, action in actions if isinstance(action, kind)) for kind in (Suspect, Stop)
    )
    assert suspected[0] < 5 and 50 < suspected[0] + suspected[1].stops_in < 65 and 55 < stopped_at[0] < 65
    assert suspected[1].stall.kind == "stopped"


def test_a_phase_is_given_time_and_a_slow_training_too() -> None:
    watch, now = watched()
    for one in (0, 1):
        watch.note_mark(one, now, "eval")
    assert drive(watch, now, 55, WAITING, SLEEPING) == []
    slow = RankProgress(0.0)
    for n in range(1, 50):
        slow.note_steps(n, 8.0, n * 8.0)
    assert slow.max_silence_s >= 40


def test_who_steps_again_is_training_again() -> None:
    """phase("eval") and no phase("train") after it."""
    watch, now = watched()
    for one in (0, 1):
        watch.note_mark(one, now, "eval")
        for n in range(1, 5):
            watch.note_steps(one, 400 + n, 1, 0.05, now + n)
    actions = drive(watch, now + 4, 10, WAITING, SLEEPING)
    assert actions and isinstance(actions[0][1], Suspect)


def test_a_long_pause_now_and_then_does_not_make_it_blind() -> None:
    one = RankProgress(0.0)
    for n in range(1, 200):
        one.note_steps(n, 60.0 if n == 100 else 0.05, n * 0.5)
    assert one.max_silence_s == 3.0


def test_who_never_steps_is_left_alone() -> None:
    """Nothing beats, nobody waits for anybody: sleeping is no crime."""
    watch = Watcher(2, 30.0, frozenset([""]), 0.0)
    asleep = {"state": "S", "syscall": "clock_nanosleep", "samples": [[{"main": True, "frames": at(12)}]]}
    assert drive(watch, 0.0, 600, asleep, asleep) == []
    busy = Watcher(2, 30.0, frozenset([""]), 0.0)
    for n in range(300):
        for one in (0, 1):
            busy.note_vitals(one, "R", n * 2.0, 0, n * 2.0)
        assert busy.next_actions(n * 2.0) == []


def test_a_rank_that_never_joins_is_named_before_the_first_step() -> None:
    watch = Watcher(2, 10.0, frozenset([""]), 0.0)
    joining = {
        "state": "S",
        "syscall": "poll",
        "samples": [
            [
                {
                    "main": True,
                    "frames": [
                        ["init_process_group", f"{TORCH}/distributed/distributed_c10d.py", 1700],
                        ["main", SCRIPT, 3],
                    ],
                }
            ]
        ],
    }
    actions = drive(watch, 0.0, 120, joining, {**SLEEPING, "groups": []})
    assert [(type(action), action.stall.rank) for _, action in actions[:1]] == [(Suspect, 1)]
    assert isinstance(actions[-1][1], Stop) and actions[-1][0] >= 59, "start-up has a floor of its own"


def test_unreadable_answers_are_less_evidence_and_no_crash() -> None:
    watch, now = watched()
    for n in range(40):
        for action in watch.next_actions(now + n):
            if isinstance(action, Inspect):
                watch.take_answer("", action.order["ask"], b"{not json", now + n)
    assert watch.stall is None


# ---- numbers ----


def test_three_bad_losses_are_firm_one_is_not() -> None:
    losses = LossMonitor()
    one = losses.heard(0, 5, float("nan"))
    assert one is not None and not one.firm
    assert losses.heard(0, 6, 2.0) is None
    assert losses.heard(0, 7, float("nan")) is None
    losses.heard(0, 8, float("inf"))
    firm = losses.heard(0, 9, float("nan"))
    assert firm is not None and firm.firm and firm.step == 7


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        (b"step 21 loss nan\n", True), (b"GPU0:INFO | Step [3/100] | Loss: nan | LR: 1e-5\n", True), (b"{'loss': nan, 'grad_norm': nan}\n", True),
        (b"epoch 1 train_loss=inf\n", True), (b"step 4: loss = -inf\n", True), (b"val_loss: nan\n", False), (b"eval loss: nan\n", False),
        (b"no loss nan\n", False), (b"loss: nanometers\n", False), (b"step 3 loss 2.5\n", False), (b"lossless compression: nan\n", False),
        (b"[eval] step 3 loss: nan\n", False), (b"Validation - loss: nan\n", False), (b"eval/lm_loss: nan\n", False), (b"lm loss: nan\n", True),
        (b"epoch 3 | 5 min | loss: nan\n", True), (b"best 2.31 last 2.40 | loss nan\n", True), (b"best loss: nan\n", False),
        (b"{'loss': '0', 'grad_norm': 'nan', 'learning_rate': '4.7e-05', 'epoch': '0.06'}\n", True),  # transformers 5
        (b"{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 4.7e-05, 'epoch': 0.06}\n", True),  # transformers 4
        (b"{'loss': '0', 'grad_norm': '0.0', 'epoch': '0.06'}\n", False), (b"{'loss': '2.31', 'grad_norm': '1.2'}\n", False),
        (b"{'loss': '0', 'grad_norm': 'nan', 'num_tokens': '4096', 'mean_token_accuracy': '0', 'rewards/chosen': 'nan', 'kl': 'nan'}\n", True),  # TRL
        (b"Epoch 0:   5%|5   | 21/400 [00:01<00:24, 15.6it/s, v_num=0, train_loss=nan.0]\r", True),  # Lightning, tqdm
        (b"Epoch 0:   5%|5   | 21/400 [00:01<00:24, 15.6it/s, v_num=0, train_loss=2.310]\r", False),
        (b"Epoch 0/9 --- 41/400 0:00:03 * 0:00:28 13.08it/s v_num: 0.000 \x1b[37mtrain_loss: \x1b[0mnan\n", True),  # Lightning, rich
        (b"epoch 0: step 20: {'train_loss': nan, 'lr': 0.001}\n", True), (b"loss: tensor(nan, grad_fn=<MeanBackward0>)\n", True),  # accelerate
        (b"iter 21: loss nan, time 28.27ms, mfu -100.00%\n", True), (b"{'eval_loss': 'nan', 'epoch': '1'}\n", False),
        (b"glossary: inf\n", False), (b"the loss is a number\n", False), (b"loss: 1.5 | nan checks: 0\n", False),
    ],
)  # fmt: skip
def test_step_lines(line: bytes, bad: bool) -> None:
    losses = LossMonitor()
    assert bool(losses.read(0, line)) == bad


@pytest.mark.parametrize(
    "line",
    [
        b"{'train_runtime': 12.3, 'train_samples_per_second': 8.1, 'train_loss': 3.5, 'epoch': 1.0}\n",
        b"{'train_runtime': '12.3', 'train_samples_per_second': '8.1', 'train_loss': '3.5', 'epoch': '1'}\n",
        b"  train_loss               =        3.5\n",  # Trainer.log_metrics
    ],
)
def test_the_mean_that_the_hf_trainer_ends_with_is_not_the_last_loss(line: bytes) -> None:
    losses = LossMonitor()
    losses.read(0, b"{'loss': 2.25, 'grad_norm': 1.0, 'epoch': 0.9}\n" + line)
    assert losses.newest[0][1] == 2.25
    losses.read(0, line.replace(b"3.5", b"nan"))
    assert [one.value for one in losses.unresolved()] == ["nan"], "a mean is NaN only if a loss was"


def test_a_loss_of_another_name_is_said_and_ends_nothing() -> None:
    losses = LossMonitor()
    told = [one for n in range(30) for one in losses.read(0, b"critic loss: %.1f\n" % (0.1 if n < 12 else 500.0))]
    assert told == [], "a critic's may grow as it should"
    told = [one for _ in range(9) for one in losses.read(0, b"aux_loss: nan\n")]
    assert [(one.kind, one.firm, one.stops) for one in told] == [("loss", False, False)]


def test_a_gradient_scaler_may_overflow_for_a_while() -> None:
    fine, bad = b"{'loss': '2.3', 'grad_norm': '1.1'}\n", b"{'loss': '2.3', 'grad_norm': 'inf'}\n"
    told = LossMonitor().read(0, (bad * 9 + fine) * 3)
    assert [(one.kind, one.firm) for one in told] == [("grad-norm", False)]
    told = LossMonitor().read(0, fine + bad * 10)
    assert [(one.kind, one.firm) for one in told] == [("grad-norm", False), ("grad-norm", True)]


def test_a_bar_that_is_drawn_again_counts_once() -> None:
    losses, bar = LossMonitor(), b"Epoch 0:   5%%|5   | %d/400 [00:01<00:24, train_loss=nan.0]\r"
    assert not any(one.firm for one in losses.read(0, bar % 21 * 5))
    assert any(one.firm for one in losses.read(0, bar % 22 + bar % 23))


def test_a_loss_that_one_rank_prints_may_be_any_ranks() -> None:
    losses = LossMonitor()
    assert [one.shared for one in losses.read(0, b"loss nan\n")] == [True]
    losses.read(1, b"loss 2.0\n")
    assert [one.shared for one in losses.read(0, b"loss nan\nloss nan\n")] == [False]


def test_a_last_loss_that_is_no_number_is_noted() -> None:
    losses = LossMonitor()
    losses.read(0, b"loss 2.0\nloss nan\n")
    assert [one.value for one in losses.unresolved()] == ["nan"]
    losses.read(0, b"loss 2.0\n")
    assert losses.unresolved() == []


def test_lines_that_come_in_pieces_and_floods() -> None:
    losses = LossMonitor()
    assert losses.read(0, b"step 1 loss: n") == []
    assert losses.read(0, b"an\n")
    assert LossMonitor().read(0, b"loss: nan\n" * 10000) == []


def test_exploding() -> None:
    losses = LossMonitor()
    for n in range(20):
        assert losses.heard(0, n, 2.0 + n % 3) is None
    assert losses.heard(0, 20, 500.0) is None, "a spike"
    assert losses.heard(0, 21, 3.0) is None
    told = [losses.heard(0, 22 + n, 900.0 * (n + 1)) for n in range(6)]
    quiet = LossMonitor()
    assert not any(quiet.heard(0, n, 0.0 if n < 10 else 0.9) for n in range(30)), "RL begins with 0"
    assert [one.kind for one in told if one] == ["exploding"] and told[4] is not None


# ---- stragglers ----


def times(late: dict[int, float], steps: int = 12, world: int = 3, jitter: float = 0.0) -> dict[int, list[list[Any]]]:
    step = 0.05 + max(late.values(), default=0.0)
    return {
        r: [["0", n, int((n * step + late.get(r, 0.0) + ((n * 7 + r * 3) % 5) * jitter) * 1e9)] for n in range(steps)]
        for r in range(world)
    }


def test_the_late_one_is_named() -> None:
    late = find_late_rank(times({1: 0.9}))
    assert (
        late is not None
        and late.rank == 1
        and late.wait_s == pytest.approx(0.9, abs=0.01)
        and late.step_s == pytest.approx(0.95, abs=0.01)
    )
    assert find_late_rank(times({1: 0.9}), after=late.late_at) is None, "no news since"


def test_a_slow_member_of_a_pair_is_named_although_its_partner_is_late_for_all_others_too() -> None:
    timings: dict[int, list[list[Any]]] = {rank: [] for rank in range(4)}
    for n in range(12):
        begun = {rank: n + (0.6 if rank == 1 else 0.1) for rank in range(4)}
        for rank in range(4):
            pair = (0, 1) if rank < 2 else (2, 3)
            timings[rank].append([f"pair {pair[0]}", n, int(begun[rank] * 1e9)])
            done = max(begun[one] for one in pair) + 0.001 * rank
            timings[rank].append(["0", n, int(done * 1e9)])
    late = find_late_rank(timings)
    assert late is not None and late.rank == 1 and late.wait_s == pytest.approx(0.5, abs=0.01)


def test_one_who_keeps_up_again_is_reported_once_and_can_be_named_again() -> None:
    stragglers = StragglerDetector(2)
    clock, steps = 0.0, 0

    def look(late: float) -> None:
        """Twelve steps, then a look at the collectives and, where it asks why, at the stacks."""
        nonlocal clock, steps
        entries: dict[str, Any] = {"0": {"timings": []}, "1": {"timings": []}}
        for number in range(12):
            for name, wait in ("0", 0.0), ("1", late):
                entry = int((clock + number * (0.5 + late) + wait) * 1e9)
                entries[name]["timings"].append(["0", steps + number, entry])
        clock, steps = clock + 12 * (0.5 + late) + 61, steps + 12
        for one in (0, 1):
            stragglers.add_steps(one, int(steps), 12, 0.5, clock)
        assert stragglers.next_order(clock, {0: int(steps), 1: int(steps)}) == {"timings": True}
        stragglers.add_timings("here", entries)
        stragglers.conclude({})
        if stragglers.next_order(clock, {0: int(steps), 1: int(steps)}) is not None:
            stragglers.conclude({0: rank(0, frames=BACKWARD), 1: rank(1, frames=at(12))})

    for _ in range(2):
        look(0.5)
        look(0.5)
        assert [one.rank for one in stragglers.newly_slow] == [1] and not stragglers.recovered
        stragglers.newly_slow.clear()
        look(0.5)
        assert not stragglers.newly_slow and not stragglers.recovered, "reported once"
        look(0.0)
        assert not stragglers.recovered, "once may be chance"
        look(0.0)
        assert stragglers.recovered == [1] and not stragglers.newly_slow
        stragglers.recovered.clear()
        look(0.0)
        assert not stragglers.recovered


def test_nobody_is_late() -> None:
    assert find_late_rank(times({})) is None
    assert find_late_rank(times({}, jitter=0.003)) is None
    assert find_late_rank(times({1: 0.9, 2: 0.9})) is None, "two equally slow ones"
    assert find_late_rank(times({1: 0.9}, steps=3)) is None, "too short to say"
    assert find_late_rank({0: [], 1: []}) is None


@pytest.mark.parametrize(
    ("late", "peer", "cause", "words"),
    [
        ({"gpu": {"throttle": ["hardware thermal slowdown"]}}, {"gpu": {"throttle": []}}, "slow.throttle", "hardware thermal slowdown"),
        ({"gpu": {"throttle": ["power cap"]}}, {"gpu": {"throttle": ["power cap"]}}, "slow.code", "train.py:12"),
        ({"gpu": {"lanes": [4, 16]}}, {"gpu": {"lanes": [16, 16]}}, "slow.link", "4 of 16 lanes"),
        ({"gpu": {"lanes": [8, 16]}}, {"gpu": {"lanes": [8, 16]}}, "slow.code", "train.py:12"),
        ({"swap": 2 * 10**9, "faults": 300.0}, {}, "slow.swap", "300 page faults"),
        ({"waiting_for_core": 0.6, "cpus": 1}, {"waiting_for_core": 0.1}, "slow.cpu", "60% of the time; it may run on 1 CPU"),
        ({"waiting_for_core": 0.6}, {"waiting_for_core": 0.6}, "slow.code", "train.py:12"),
        ({"frames": LOADER}, {}, "slow.data", "data loader"),
        ({"frames": ()}, {}, "slow.unknown", "no reason"),
        ({"frames": BACKWARD}, {}, "slow.unknown", "no reason"),
    ],
)  # fmt: skip
def test_why_it_is_slow(late: dict[str, Any], peer: dict[str, Any], cause: str, words: str) -> None:
    told, because, _ = explain_slow_rank(rank(1, **{"frames": at(12), **late}), rank(0, **{"frames": BACKWARD, **peer}))
    assert told == cause and words in because, because


def test_uneven_steps_are_no_straggler() -> None:
    """Now this rank comes last, now that one, by a lot: nobody is persistently late."""
    turns = [0, 1, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0]
    uneven = {
        r: [["0", n, int((n + (0.5 if r == turn else 0.0)) * 1e9)] for n, turn in enumerate(turns)] for r in range(2)
    }
    assert find_late_rank(uneven) is None


def test_a_wrong_clock_is_no_straggler() -> None:
    """Two seconds behind at steps of 50 ms: nobody can make the others wait longer than a step."""
    assert find_late_rank({r: [["0", n, int((n * 0.05 + 2.0 * r) * 1e9)] for n in range(20)] for r in range(2)}) is None


def test_ranks_in_words() -> None:
    assert [format_ranks(ranks) for ranks in ([2], [0, 1], [0, 2, 3, 4], [0, 1, 2, 7])] == [
        "rank 2",
        "ranks 0, 1",
        "ranks 0, 2-4",
        "ranks 0-2, 7",
    ]


def test_a_step_that_was_counted_is_not_called_the_step_of_the_bad_number() -> None:
    """A line without a step arrives when some step has been counted; the value may be of a later one."""
    bad = BadNumber("loss", 0, 14, "nan", "line", "loss nan", shared=True)
    assert (
        numbers.summarize_bad_number(bad, "CPU0", 2) == "the loss is nan at step 14 (printed by rank 0, for all ranks)"
    )
    assert (
        numbers.summarize_bad_number(replace(bad, counted=True), "CPU0", 2)
        == "the loss is nan, seen after step 14 (printed by rank 0, for all ranks)"
    )


# ---- a collective that one rank alone enters: if rank == 0: save_model() ----

SAVES = """import torch.distributed as dist
def main(rank, model):
    for step in range(9):
        train()
        if rank == 0:
            save(model)
        else:
            print("not me")
        dist.barrier()
def save_all(self, model):
    if not self.is_main_process:
        return
    save(model)
    if step % 10 == 0:
        log()
"""


def test_conditions_on_the_rank_are_read_from_the_source(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SAVES)
    around = {line: find_conditions_around(str(path), line) for line in range(1, 16)}
    assert around[6] == [[5, "if rank == 0"]] and around[8] == [[5, "else of if rank == 0"]]
    assert around[13] == around[15] == [[11, "if not self.is_main_process: return"]]
    assert not any(around[line] for line in (1, 4, 5, 9, 11)), "the condition itself is no line that depends on it"
    assert around[12] == [[11, "if not self.is_main_process"]]
    assert (
        find_conditions_around("/usr/lib/python3.11/selectors.py", 415) == find_conditions_around("absent.py", 1) == []
    )


GATHER = ["all_gather", f"{TORCH}/distributed/distributed_c10d.py", 3900]
BARRIER = ["barrier", f"{TORCH}/distributed/distributed_c10d.py", 4800]
ALONE = [GATHER, ["save", SCRIPT, 12, []], ["main", SCRIPT, 44, [30], [[43, "if rank == 0"]]]]


def entered(number: int, name: str, frames: Any) -> RankInspection:
    return rank(number, group(op(25), op(26, name=name, done=False)), frames=frames)


def test_a_collective_inside_a_condition_on_the_rank_is_that_ranks_fault() -> None:
    elsewhere = [BARRIER, ["main", SCRIPT, 46, [30]]]
    for others in (1, 3):
        ranks = [entered(number, "gloo:barrier", elsewhere) for number in range(1, others + 1)]
        stall = found(entered(0, "gloo:all_gather", ALONE), *ranks)
        assert (stall.kind, stall.rank, stall.proof) == (
            "rank-only",
            0,
            True,
        ) and stall.where == f"{SCRIPT}:44, in main"
        said = summarize_stall(stall, "GPU 0")
        assert "rank 0 (GPU 0) entered a collective alone after step 20, inside `if rank == 0`" in said
        assert "gloo:barrier" in said and "gloo:all_gather" in said
    ended = found(entered(0, "gloo:all_gather", ALONE), world=2, ended={1: 0})
    assert (ended.kind, ended.rank) == ("rank-only", 0) and "rank 1 did not enter it" in summarize_stall(ended, "GPU 0")


def test_ranks_in_the_other_branch_or_on_their_way_are_judged_as_before() -> None:
    branch = [BARRIER, ["main", SCRIPT, 48, [30], [[43, "else of if rank == 0"]]]]
    two = found(entered(0, "gloo:all_gather", ALONE), entered(1, "gloo:barrier", branch))
    assert two.kind == "op-mismatch" and two.rank is None
    # if rank != 0: barrier(); load(); if rank == 0: barrier(): rank 0 is late, and the others are right to wait.
    first = [BARRIER, ["main", SCRIPT, 51, [], [[50, "if rank != 0"]]]]
    late = found(rank(0, DONE, frames=at(12, loops=()), syscall="read"), entered(1, "gloo:barrier", first))
    assert late.rank == 0 and late.kind == "io"


def test_a_loss_that_never_changes_is_reported_once() -> None:
    losses = LossMonitor()
    reports = [bad for step in range(60) for bad in losses.read(0, b"step %d loss 0.6931\n" % step)]
    reports += [bad for step in range(60) for bad in losses.read(1, b"step %d loss 0.6931\n" % step)]
    assert [(bad.kind, bad.rank, bad.value, bad.firm, bad.stops) for bad in reports] == [
        ("constant", 0, "loss 0.6931", False, False)
    ]


def test_a_loss_that_has_converged_is_not_called_constant() -> None:
    losses = LossMonitor()
    lines = [b"step 0 loss 2.3\n", *(b"step %d loss 0.0001\n" % step for step in range(1, 80))]
    assert [bad for line in lines for bad in losses.read(0, line)] == []


def test_of_a_step_with_a_reward_the_reward_is_read_and_not_the_loss() -> None:
    line = "{{'loss': 0.0, 'reward': {}, 'reward_std': 0.0, 'step': {}}}\n"
    varying, flat = LossMonitor(), LossMonitor()
    assert [bad for n in range(50) for bad in varying.read(0, line.format(n % 3, n).encode())] == []
    reports = [bad for n in range(50) for bad in flat.read(0, line.format(0.0, n).encode())]
    assert [bad.value for bad in reports] == ["reward 0"]


def test_the_rank_whose_loss_was_bad_first_is_named() -> None:
    """Averaging spreads a NaN: another rank's lines may arrive before those of the one that began."""
    losses = LossMonitor()
    for step in range(30):
        for rank in range(2):
            losses.read(rank, b"step %d: loss 0.5%d\n" % (step, step % 7))
    losses.read(1, b"step 30: loss nan\n")
    losses.read(0, b"step 30: loss 0.51\n")
    reports = [bad for step in (31, 32, 33) for bad in losses.read(0, b"step %d: loss nan\n" % step)]
    assert [(bad.rank, bad.step) for bad in reports if bad.firm] == [(1, 30)]


SEND = ((0,), "gloo:send to rank 1 of 16 elements", "/x/t.py:3, in send")
RECEIVE = ((1,), "gloo:recv from rank 0 of 8 elements", "/x/t.py:9, in receive")
SHARDED_SAVE = ("rank 0: all_gather (distributed_c10d.py:9) < get_model_state_dict (t.py:3)",)


@pytest.mark.parametrize(
    ("stall", "present", "absent"),
    [
        (Stall("diverged", None, (), (0, 1), parties=(SEND, RECEIVE)), "tag", "seeds"),
        (Stall("diverged", 0, (0,), (1,), parties=(((0,), "gloo:all_reduce", "t.py:3"),)), "seeds", "tag"),
        (Stall("shape-mismatch", 0, (0,), (1,), "t.py:3", "dtype"), "dtype", "last batch"),
        (Stall("shape-mismatch", 0, (0,), (1,), "t.py:3", ""), "last batch", "loader"),
        (Stall("rank-only", 0, (0,), (1,), "t.py:3", "if rank == 0"), "all ranks must make this call", "sharded"),
        (Stall("rank-only", 0, (0,), (1,), "t.py:3", "if rank == 0", evidence=SHARDED_SAVE), "sharded", "loader"),
    ],
    ids=["messages", "collectives", "dtypes", "shapes", "a plain call", "a sharded save"],
)
def test_advice_applies_to_the_calls_in_question(stall: Stall, present: str, absent: str) -> None:
    text = " ".join(make_stall_report(stall, "CPU0", "proof")["fix"])
    assert present in text and absent not in text, text
