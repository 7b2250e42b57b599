"""The start-up gate: pure, and with real ranks."""

from __future__ import annotations

import re

from conftest import Stoker, machine_json
from stoker.control.agent.spawn import InitGate
from stoker.control.machine.model import machine_from_json
from stoker.control.plan.gpu_choice import GpuChoice
from stoker.control.plan.run_plan import _count_init_slots


def test_slots_are_passed_on_in_order() -> None:
    gate = InitGate((0, 1, 2, 3), 2, 10.0, 100.0, 0.0)
    assert gate.admit(0.0) == [0, 1] and gate.admit(1.0) == [] and gate.is_limiting
    assert gate.release(1) and not gate.release(1)
    assert gate.admit(2.0) == [2]
    assert gate.find_overdue(9.0) == [] and gate.find_overdue(10.0) == [0]


def test_the_first_rank_tells_how_many_fit() -> None:
    gate = InitGate(tuple(range(8)), 0, 10.0, 100.0, 0.0)
    assert gate.admit(0.0) == [0]
    gate.measure(peak=5 * 10**9, available=17 * 10**9)
    gate.release(0)
    assert gate.admit(1.0) == [1, 2, 3]


def test_everybody_goes_before_the_store_gives_up() -> None:
    gate = InitGate((0, 1, 2), 1, 1000.0, 50.0, 0.0)
    assert gate.admit(0.0) == [0]
    assert gate.admit(51.0) == [1, 2]


def test_memory_decides_the_default() -> None:
    def slots(ranks: int, available: float, asked: str | None = None) -> int:
        return _count_init_slots(
            asked, GpuChoice((), ranks, ""), machine_from_json(machine_json(0, memory_available=int(available * 10**9)))
        )

    assert (
        slots(4, 24) == 4
        and slots(4, 2) == 0
        and slots(1, 0.1) == 1
        and slots(8, 500, "3") == 3
        and slots(2, 1, "9") == 2
    )


LOADER = """
import os, sys, time
print("in", time.time(), flush=True)
time.sleep(0.4)
print("out", time.time(), flush=True)
import stoker
stoker.mark("POST-MODEL")
time.sleep(1.5)
"""


def test_one_slot_lets_ranks_through_one_by_one(stoker: Stoker) -> None:
    done = stoker("run", "--nproc-per-node", "3", "--init-slots", "1", stoker.script("load.py", LOADER))
    assert done.code == 0
    spans = [[float(line.split()[1]) for line in done.log(rank).splitlines()] for rank in range(3)]
    assert spans[0][1] <= spans[1][0] and spans[1][1] <= spans[2][0]
    for line in (
        r"\[Rank 0\] LOCK: acquired! Starting initialization\.\.\.",
        r"\[Rank 1\] LOCK: waiting for exclusive access\.\.\. \(rank 0 has it, until \d\d:\d\d:\d\d at the latest\)",
        r"\[Rank 0\] LOCK: released",
        r"\[Rank 2\] MEM:START RAM \d+ MB \(rank\) \d+\.\d/\d+\.\d GB \(host\)",
        r"\[Rank 2\] MEM:POST-MODEL RAM ",
    ):
        assert re.search(line, done.err), line
    assert [event["name"] for event in done.events if event["event"] == "mark"] == ["POST-MODEL"] * 3


def test_no_memory_is_reported_of_a_rank_that_has_ended(stoker: Stoker) -> None:
    done = stoker("run", stoker.script("short.py", "import os, stoker\nstoker.beat(step=1, loss=0.5)\nos._exit(0)\n"))
    told = [(event["at"], event["rss"] > 0) for event in done.events if event["event"] == "mem"]
    # It may have ended before anybody looked at it the first time, too.
    assert done.code == 0 and all(is_there for _, is_there in told), told


UNTIL_BOTH_RUN = """
import os, time
print(time.time(), flush=True)
open("runs-" + os.environ["RANK"], "w").close()
while not (os.path.exists("runs-0") and os.path.exists("runs-1")):
    time.sleep(0.05)
"""


def test_a_slot_comes_back_when_its_time_is_over(stoker: Stoker) -> None:
    script = stoker.script("never.py", UNTIL_BOTH_RUN)
    done = stoker("run", "--nproc-per-node", "2", "--init-slots", "1", "--init-timeout", "0.5s", script)
    starts = [float(done.log(rank)) for rank in (0, 1)]
    assert done.code == 0 and starts[1] - starts[0] >= 0.4
    assert "LOCK: released (deadline of 0.5 s over)" in done.err


def test_a_dead_rank_gives_its_slot_back_and_ends_the_job(stoker: Stoker) -> None:
    done = stoker("run", "--nproc-per-node", "2", "--init-slots", "1", stoker.script("die.py", "raise SystemExit(9)"))
    assert done.code == 9 and "deadline" not in done.err


def test_ram_limit_stops_the_job_with_a_verdict(stoker: Stoker) -> None:
    script = stoker.script(
        "eat.py",
        "import os, time\nif os.environ['RANK'] == '1':\n    kept = []\n    while True: kept.append(bytearray(b'x' * 20_000_000)); time.sleep(0.01)\ntime.sleep(60)\n",
    )
    done = stoker("run", "--nproc-per-node", "2", "--ram-limit", "400MB", script)
    assert done.code == 70 and done.verdict["cause"] == "oom.ram-limit" and done.verdict["rank"] == 1
    taken = int(re.search(r"resident memory (\d+)", done.verdict["evidence"][0])[1])  # type: ignore[index]
    assert 400e6 < taken < 1.5e9
