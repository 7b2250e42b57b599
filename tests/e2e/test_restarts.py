"""Starting again: when, how, and when not. The policy on hand-made verdicts, then real runs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, gpu_json, machine_json, wait_for
from stoker.contract.evidence import RankError, RankExit, Verdict
from stoker.control.launch.attempt import Attempt
from stoker.control.launch.restart import CAN_HALVE, Restart, RestartState
from stoker.control.plan.options import RunOptions
from stoker.control.plan.run_plan import RolePlan, RunPlan


def plan_with(max_restarts: int) -> RunPlan:
    return RunPlan((), (RolePlan("default", (), 2, True, max_restarts),), ("",), False, False, {}, (), {})


class Policy:
    """Of a job with one role."""

    def __init__(self, max_restarts: int = 0, debug_retry: bool = False) -> None:
        self._restarts = RestartState(RunOptions(debug_retry=debug_retry))
        self._plan = plan_with(max_restarts)

    def decide(self, verdict: Verdict, attempt: Attempt, lived_s: float) -> tuple[Verdict, Restart | None]:
        attempt.plan = self._plan
        return self._restarts.decide(verdict, attempt, lived_s)


def failure(cause: str, retryable: bool = True, rank: int | None = 1) -> Verdict:
    return Verdict("failed", cause, f"{cause} happened", 1, rank=rank, retryable=retryable)


def attempt(line: int = 1, steps: int = 20, can: tuple[str, ...] = ()) -> Attempt:
    made = Attempt(0, plan_with(0))
    made.ends[1] = RankExit(1, "", "CPU1", 7, 1, 0.0, error=RankError("ValueError", "x", "train.py", line), steps=steps)
    made.steps = {1: steps}
    made.capabilities.update(can)
    return made


def test_only_what_is_retryable_and_only_so_often() -> None:
    restarts = Policy(max_restarts=2)
    assert restarts.decide(failure("env.import", retryable=False), attempt(), 5)[1] is None
    for n in (1, 2):
        again = restarts.decide(failure("rank.killed"), attempt(), 5)[1]
        assert again is not None and f"({n} of 2)" in again.line and again.wait_s == 0.0
    assert restarts.decide(failure("rank.killed"), attempt(), 5)[1] is None
    assert Policy().decide(failure("rank.killed"), attempt(), 5)[1] is None, "none unless asked for"
    assert restarts.decide(Verdict("completed", "completed", "", 0), attempt(), 5)[1] is None


def test_the_same_place_twice_is_deterministic_another_place_is_not() -> None:
    restarts = Policy(max_restarts=9)
    assert restarts.decide(failure("rank.exception"), attempt(line=1), 5)[1] is not None
    assert restarts.decide(failure("rank.exception"), attempt(line=2), 5)[1] is not None
    verdict, again = restarts.decide(failure("rank.exception"), attempt(line=2), 5)
    assert again is None and not verdict.retryable and "deterministic" in verdict.summary


def test_back_off_is_for_crash_loops() -> None:
    restarts = Policy(max_restarts=20)
    nowhere = [restarts.decide(failure("rank.killed"), attempt(steps=0), 1)[1] for _ in range(8)]
    assert [one.wait_s for one in nowhere if one] == [0, 1, 2, 4, 8, 16, 30, 30]
    somewhere = restarts.decide(failure("rank.killed"), attempt(steps=50), 1)[1]
    assert somewhere is not None and somewhere.wait_s == 0


def test_busy_is_waited_out_once_and_its_card_is_probed() -> None:
    restarts = Policy(max_restarts=5)
    again = restarts.decide(failure("gpu.busy"), attempt(), 2)[1]
    assert again is not None and again.wait_s == 10 and again.probe
    verdict, again = restarts.decide(failure("gpu.busy"), attempt(), 2)
    assert (
        again is None and not verdict.retryable and any("still busy after a wait" in line for line in verdict.evidence)
    )


def test_blocking_launches_once_and_never_after() -> None:
    restarts = Policy(max_restarts=1, debug_retry=True)
    again = restarts.decide(failure("gpu.assert", retryable=False), attempt(), 5)[1]
    assert again is not None and dict(again.env) == {"CUDA_LAUNCH_BLOCKING": "1"}
    verdict, last = restarts.decide(failure("gpu.assert", retryable=False), attempt(), 5)
    assert last is None and any("the error is at this line" in line for line in verdict.evidence)
    other = Policy(max_restarts=2, debug_retry=True)
    other.decide(failure("gpu.illegal-access"), attempt(), 5)
    after = other.decide(failure("rank.killed"), attempt(), 5)[1]
    assert after is not None and after.env == (), "the variable never stays on"


def test_out_of_gpu_memory_halves_the_micro_batch_of_who_can() -> None:
    restarts = Policy()
    assert restarts.decide(failure("oom.gpu", retryable=False), attempt(), 5)[1] is None, "a script of the user's can't"
    halved = [restarts.decide(failure("oom.gpu", retryable=False), attempt(can=(CAN_HALVE,)), 5)[1] for _ in range(7)]
    assert [dict(one.env)["STOKER_MICRO_BATCH_HALVINGS"] for one in halved if one] == ["1", "2", "3", "4", "5", "6"]
    assert halved[6] is None and halved[0] is not None and "same global batch" in halved[0].line


# ---- real ----


@pytest.fixture
def with_probes(tmp_path: Path) -> Callable[..., dict[str, str]]:
    def make(dead: tuple[int, ...], count: int = 3) -> dict[str, str]:
        cards = [gpu_json(n) for n in range(count)]
        probes = {
            card["uuid"]: {
                "outcome": "dead" if n in dead else "ok",
                "detail": "error 999 in cuInit" if n in dead else "",
                "seconds": 0.1,
                "left": 0,
            }
            for n, card in enumerate(cards)
        }
        (tmp_path / "probed.json").write_text(
            json.dumps({"schema": 1, "machine": machine_json(cards), "probes": probes})
        )
        return {"STOKER_MACHINE": str(tmp_path / "probed.json")}

    return make


ECC = """
import os, time
print("ranks", os.environ["WORLD_SIZE"], flush=True)
if os.environ["GPU_RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
time.sleep(0.3)
"""


def test_a_card_that_fails_its_proof_is_left_out(stoker: Stoker, with_probes: Callable[..., dict[str, str]]) -> None:
    done = stoker("run", "--max-restarts", "2", stoker.script("job.py", ECC), env=with_probes((1,)))
    assert done.code == 0, done.err
    assert "GPU1" in done.err and "fails its test" in done.err and "left out" in done.err
    assert done.log(0, 1) == b"ranks 2\n"
    assert [event["world_size"] for event in done.events if event["event"] == "attempt"] == [3, 2]


def test_a_sound_card_stays_and_a_fixed_count_is_kept(
    stoker: Stoker, with_probes: Callable[..., dict[str, str]]
) -> None:
    done = stoker("run", "--max-restarts", "2", stoker.script("job.py", ECC), env=with_probes(()))
    assert done.code == 0 and done.log(0, 1) == b"ranks 3\n"
    done = stoker("run", "--max-restarts", "2", "--nproc-per-node", "3", "job.py", env=with_probes((1,)))
    assert done.code == 1 and done.verdict["cause"] == "gpu.ecc" and not done.verdict["retryable"]
    assert any("without it" in line for line in done.verdict["evidence"]), done.verdict


def test_busy_is_diagnosed_in_the_end(stoker: Stoker, box: Any) -> None:
    """One attempt is enough for that: the ten seconds of waiting are tested above."""
    name = stoker.script(
        "job.py", "raise RuntimeError('CUDA error: CUDA-capable device(s) is/are busy or unavailable')"
    )
    env = box(
        [
            gpu_json(
                0,
                compute_mode="default",
                holders=[{"pid": 4711, "memory": 10**9, "command": "python other.py", "user": "eve"}],
            )
        ]
    )
    done = stoker("run", "--nproc-per-node", "1", "--share-gpus", name, env=env)
    assert done.verdict["cause"] == "gpu.busy"
    assert any("pid 4711 (python other.py, eve)" in line for line in done.verdict["evidence"]), done.verdict


PREEMPTED = """
import os, signal, sys, time
import stoker
begin = int(open(stoker.resume()).read()) if stoker.resume() else 0
folder = os.path.join(os.environ["STOKER_RUN_DIR"], "checkpoints")
os.makedirs(folder, exist_ok=True)
step = begin
def save(*_):
    with open(os.path.join(folder, "step.tmp"), "w") as out:
        out.write(str(step))
    os.replace(os.path.join(folder, "step.tmp"), os.path.join(folder, f"step-{step}"))
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("from", begin, flush=True)
while step < begin + 40:
    step += 1
    stoker.beat(step=step)
    time.sleep(0.05)
"""


def test_preempted_and_started_again_by_its_container(stoker: Stoker) -> None:
    """SIGTERM with notice: the rank saves. The same command again goes on from there; once complete it is nothing to do."""
    command = ("run", "--nproc-per-node", "1", "--name", "pod", stoker.script("job.py", PREEMPTED))
    launcher = stoker.start(*command)
    assert wait_for(
        lambda: (
            True
            if (stoker.cwd / "runs/latest/events.jsonl").exists()
            and "first-step" in (stoker.cwd / "runs/latest/events.jsonl").read_text()
            else None
        ),
        20,
    )
    os.kill(launcher.pid, signal.SIGTERM)
    launcher.communicate(timeout=100)
    assert launcher.returncode == 143 and stoker.result().verdict["status"] == "stopped"
    again = stoker(*command)
    assert again.code == 0 and "starting run" in again.err
    assert b"from 0" not in again.log(0, 1) and b"from" in again.log(0, 1)
    third = stoker(*command)
    assert third.code == 0 and "is complete" in third.err
