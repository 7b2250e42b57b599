"""`stoker burnin`: the judge by tables, and real replicas on CPUs, one of them with a flipped bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, at_length, wait_for
from stoker.control.doctor.burnin_analysis import (
    Link,
    Replica,
    Speed,
    find_data_sheet,
    judge,
    parse_links,
    parse_replica,
)

ROUND = 4


def replica(rank: int, bits: str, **more: Any) -> Replica:
    """`bits`: one letter a step. By default an H200, healthy and as fast as its twins."""
    given = {
        "card": "NVIDIA H200",
        "device": f"GPU-{rank}",
        "twin": "H200",
        "start": Speed(780, 4100),
        "end": Speed(770, 4100),
        **more,
    }
    steps = tuple((step, letter, letter) for step, letter in enumerate(bits))
    return Replica(rank=rank, label=f"GPU{rank}", round=ROUND, steps=steps, **given)


GOOD = "abcdabcdabcd"


@pytest.mark.parametrize(
    ("replicas", "agrees", "first", "says"),
    [
        pytest.param([GOOD, GOOD, GOOD], [True] * 3, [None] * 3, [], id="all agree"),
        pytest.param([GOOD], [True], [None], [], id="one card agrees with itself"),
        pytest.param(["abc"], [None], [None], [], id="one card, one round: nothing compared"),
        pytest.param([GOOD, GOOD[:5], ""], [True, True, None], [None] * 3, [], id="a slow one is compared as far as it came"),
        pytest.param([GOOD, "abcdaxyzabcd", GOOD], [True, False, True], [None, 5, None], ["rank 1 (GPU 1, NVIDIA H200) computes different results: from step 5 its bits of loss and parameters differ from those of its 2 twins, in 1 of 3 rounds"], id="once, of three"),
        pytest.param(["abcd", "abzz", "abcd"], [True, False, True], [None, 2, None], ["from step 2 its bits of loss and parameters differ from those of its 2 twins, in 2 of 4 steps"], id="within one round"),
        pytest.param(["abxxabxxabxx", GOOD, GOOD], [False, True, True], [2, None, None], ["rank 0 (GPU 0, NVIDIA H200) computes different results: from step 2", ], id="always, of three"),
        pytest.param([GOOD, "abcdaxyzabcd"], [True, False], [None, 5], ["rank 1 ", ], id="of two, the one that contradicts itself"),
        pytest.param(["abxyabcd", "abcdabcd"], [False, True], [2, None], ["rank 0 "], id="of two, wrong in the first round"),
        pytest.param(["abxx" * 9, "abcd" * 2], [False, False], [2, 2], ["rank 0 (GPU 0, NVIDIA H200) and rank 1 (GPU 1, NVIDIA H200) disagree from step 2; 2 replicas can't show"], id="of two, always: undecided, and the faster one has no more votes"),
        pytest.param(["abcdabcxabcd"], [False], [7], ["differ from those of its other rounds, in 1 of 3 rounds"], id="one card contradicts itself"),
        pytest.param(["aq", "ar", "as"], [False] * 3, [1] * 3, ["disagree from step 1; 3 replicas"], id="no two agree"),
        pytest.param([GOOD, GOOD, "abcdaxyzabcd", GOOD, "abcdabcdabcx"], [True, True, False, True, False], [None, None, 5, None, 11], ["rank 2 ", "rank 4 "], id="two bad ones of five"),
    ],
)  # fmt: skip
def test_who_computes_something_else(
    replicas: list[str], agrees: list[bool | None], first: list[int | None], says: list[str]
) -> None:
    found = judge([replica(rank, bits) for rank, bits in enumerate(replicas)], [])
    assert [opinion.agrees for opinion in found.opinions] == agrees
    assert [opinion.first for opinion in found.opinions] == first
    assert [(finding.id, finding.level) for finding in found.findings] == [("burnin.mismatch", "fail")] * len(says)
    assert all(part in finding.text for part, finding in zip(says, found.findings, strict=True)), found.findings


def test_unlike_cards_may_round_differently() -> None:
    found = judge([replica(0, "abcd"), replica(1, "axyz", card="NVIDIA A40", twin="A40", start=None, end=None)], [])
    assert found.findings == () and [opinion.agrees for opinion in found.opinions] == [None, None]


@pytest.mark.parametrize(
    ("speeds", "more", "says"),
    [
        pytest.param([(780, 4100), (770, 4000), (790, 4200)], {}, [], id="alike"),
        pytest.param([(780, 4100), (640, 4100), (790, 4100)], {}, ["rank 1 (GPU 1, NVIDIA H200) is slow: 640 TFLOP/s; its 2 twins reach 785 (data sheet: 989)"], id="compute"),
        pytest.param([(780, 4100), (780, 3000)], {}, ["rank 1 (GPU 1, NVIDIA H200) is slow: 3000 GB/s; its twin reaches 4100 (data sheet: 4800)"], id="memory"),
        pytest.param([(350, 4100)], {}, ["350 TFLOP/s; such a GPU should reach more (data sheet: 989)"], id="alone, against the data sheet"),
        pytest.param([(300, 700)], {"card": "NVIDIA Nobody", "start": Speed(400, 700)}, ["300 TFLOP/s; before the load it reached 400 (data sheet: n/a)"], id="hot, of an unknown card"),
        pytest.param([(780, 4100), (100, 900)], {"device": "GPU-shared"}, [], id="ranks that share a card"),
        pytest.param([(0.1, 10), (0.02, 3)], {"device": None, "card": None}, [], id="CPU ranks: the scheduler's doing"),
    ],
)  # fmt: skip
def test_who_is_slow(speeds: list[tuple[float, float]], more: dict[str, Any], says: list[str]) -> None:
    found = judge(
        [replica(rank, GOOD, **{"start": None, **more, "end": Speed(*speed)}) for rank, speed in enumerate(speeds)], []
    )
    assert [(finding.id, finding.level) for finding in found.findings] == [("burnin.slow", "warn")] * len(says)
    assert all(part in finding.text for part, finding in zip(says, found.findings, strict=True)), found.findings


@pytest.mark.parametrize(
    ("links", "stopped", "says"),
    [
        pytest.param([Link((0, 1, 2), "nccl", 400.0), Link((0, 1), "nccl", 390.0), Link((0, 2), "nccl", 260.0), Link((1, 2), "nccl", 395.0)], False, [], id="fine"),
        pytest.param([Link((0, 1), "nccl", 390.0), Link((0, 2), "nccl", 20.0), Link((1, 2), "nccl", 395.0)], False, [("warn", "the link GPU0–GPU2 is slow: 20.0 GB/s; the other pairs reach 392.5")], id="one slow"),
        pytest.param([Link((0, 1), "gloo", 0.5), Link((0, 2), "gloo", 0.1), Link((1, 2), "gloo", 0.5)], False, [], id="gloo: no speed judged"),
        pytest.param([Link((0, 1, 2), "nccl", 400.0, {"2": 7})], False, [("fail", "all-reduce over all 3 ranks gives wrong sums (elements: GPU2 7; nccl)")], id="wrong sum"),
        pytest.param([Link((1, 2), "nccl")], False, [("fail", "all-reduce over GPU1–GPU2 did not finish (nccl)")], id="hung"),
        pytest.param([Link((1, 2), "nccl")], True, [], id="the user stopped it"),
    ],
)  # fmt: skip
def test_links(links: list[Link], stopped: bool, says: list[tuple[str, str]]) -> None:
    found = judge([replica(rank, GOOD) for rank in range(3)], links, stopped)
    assert [(finding.id, finding.level) for finding in found.findings] == [("burnin.link", level) for level, _ in says]
    assert all(part in finding.text for (_, part), finding in zip(says, found.findings, strict=True)), found.findings


@pytest.mark.parametrize(
    ("card", "figures"),
    [
        ("NVIDIA H200", (989, 4800)), ("NVIDIA H100 80GB HBM3", (989, 3350)), ("NVIDIA H100 PCIe", (756, 2000)), ("NVIDIA A100-SXM4-80GB", (312, 2039)),
        ("NVIDIA A100-SXM4-40GB", (312, 1555)), ("NVIDIA A10G", (70, 600)), ("NVIDIA A10", (125, 600)), ("NVIDIA L40S", (362, 864)), ("NVIDIA L4", (121, 300)),
        ("NVIDIA GeForce RTX 4090", (165, 1008)), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GB200", None), ("Tesla T4", None), (None, None),
    ],
)  # fmt: skip
def test_data_sheets(card: str | None, figures: tuple[float, float] | None) -> None:
    assert find_data_sheet(card) == figures


def test_records_become_replicas_and_links() -> None:
    head = {"is": "replica", "rank": 1, "card": None, "uuid": None, "units": 1, "torch": "2.13", "round": 40}
    assert parse_replica([], "CPU1") is None
    found = parse_replica(
        [
            head,
            {"is": "speed", "when": "start", "tflops": 0.1, "gbs": 9},
            {"is": "step", "step": 0, "loss": "3f", "sum": "aa", "seconds": 0.5},
        ],
        "CPU1",
    )
    assert (
        found
        and found.steps == ((0, "3f", "aa"),)
        and found.start == Speed(0.1, 9)
        and found.end is None
        and found.step_s == 0.5
    )
    begun = {"is": "begun", "ranks": [0, 1], "backend": "nccl"}
    assert parse_links([begun]) == [Link((0, 1), "nccl")]
    assert parse_links([begun, {**begun, "is": "link", "bus_gbs": 5.0, "wrong": {}}]) == [Link((0, 1), "nccl", 5.0)]


# ---- real runs ----


def test_a_flipped_bit_names_its_replica_and_step(stoker: Stoker) -> None:
    pytest.importorskip("torch")
    done = stoker.torch("burnin", "--nproc-per-node", "3", "--steps", "12", "--flip", "1:7")
    assert done.code == 2, done.err
    table = [line.split() for line in done.out.splitlines()[1:4]]
    assert [(row[1], row[3], " ".join(row[6:])) for row in table] == [
        ("CPU0", "12", "yes"),
        ("CPU1", "12", "NO, step 7"),
        ("CPU2", "12", "yes"),
    ]
    assert (
        done.out.count("FAIL") == 1
        and "FAIL burnin.mismatch: rank 1 (CPU 1) computes different results: from step 7" in done.out
    )
    steps = {
        rank: [json.loads(line) for line in (done.run_dir / f"burnin/rank-{rank}.jsonl").read_text().splitlines()]
        for rank in range(3)
    }
    bits = {
        rank: [(one["step"], one["loss"], one["sum"]) for one in records if one["is"] == "step"]
        for rank, records in steps.items()
    }
    assert bits[0] == bits[2] and bits[0][:7] == bits[1][:7] and bits[0][7:] != bits[1][7:]


@at_length
def test_healthy_replicas_raise_nothing_and_their_links_are_proven(stoker: Stoker) -> None:
    pytest.importorskip("torch")
    done = stoker.torch("burnin", "--nproc-per-node", "2", "--minutes", "0.02", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["schema"] == 1 and told["findings"] == [] and told["run"] == done.run_dir.name
    assert [(one["label"], one["agrees"], one["twins"]) for one in told["replicas"]] == [
        ("CPU0", True, 1),
        ("CPU1", True, 1),
    ]
    assert all(one["steps"] > 5 and one["end"]["tflops"] > 0 and one["end"]["gbs"] > 0 for one in told["replicas"])
    [link] = told["links"]
    assert (link["ranks"], link["backend"], link["wrong"]) == ([0, 1], "gloo", {}) and link["bus_gbs"] > 0


def test_a_run_that_fails_is_not_a_verdict_on_the_machine(stoker: Stoker, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    stoker.script("broken/torch.py", "raise ImportError('libcudart.so is missing')")
    path = f"{tmp_path / 'broken'}:{stoker.env.get('PYTHONPATH', '')}"
    done = stoker("burnin", "--steps", "5", "--nproc-per-node", "2", env={"PYTHONPATH": path})
    assert done.code == 3 and "could not be checked: " in done.out and "libcudart.so is missing" in done.out
    assert json.loads(stoker("burnin", "--gpus", "3", "--json").out) == {
        "schema": 1,
        "run": None,
        "status": "refused",
        "summary": None,
        "exit_code": 3,
        "replicas": [],
        "left_out": [],
        "links": [],
        "findings": [],
    }


def test_stopped_by_the_user(stoker: Stoker) -> None:
    pytest.importorskip("torch")
    run = stoker.start("burnin", "--nproc-per-node", "1", "--minutes", "5")
    assert wait_for(
        lambda: (
            True
            if b'"step"' in b"".join(path.read_bytes() for path in stoker.cwd.glob("runs/*/burnin/rank-0.jsonl"))
            else None
        ),
        60,
    )
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=100)
    assert run.returncode == 130 and b"FAIL" not in out and b"could not be checked" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--minutes", "0"), "--minutes must be above 0, got 0"), (("--minutes", "nan"), "--minutes must be above 0"), (("--steps", "0"), "--steps must be at least 1, got 0"),
        (("--minutes", "soon"), "invalid float value: 'soon'"), (("--flip", "1"), "must be RANK:STEP"), (("--json", "--show", "all"), "--show can't be combined with --json"),
        (("--wait", "soon"), "'soon' is not a duration"),
    ],
)  # fmt: skip
def test_refusals(stoker: Stoker, args: tuple[str, ...], says: str) -> None:
    done = stoker("burnin", *args)
    assert done.code == 64 and says in done.err and done.err.count("\n") == 1 and not (stoker.cwd / "runs").exists()
