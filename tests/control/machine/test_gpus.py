"""Which GPUs a run gets: a table of machines, wishes and answers."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import gpu_json, machine_json
from stoker.contract.errors import Refusal
from stoker.control.machine.model import machine_from_json
from stoker.control.plan.gpu_choice import choose_gpus
from stoker.control.plan.options import RunOptions

FULL = {
    "memory_used": 47_900_000_000,
    "holders": [{"pid": 77, "memory": 47 * 10**9, "command": "python other.py", "user": "ann", "run": None}],
}
MIG = [gpu_json(0, uuid=f"MIG-{n}", mig=n, mig_parent="GPU-0000") for n in range(2)] + [gpu_json(1)]


def pick(
    cards: Any,
    env: dict[str, str] | None = None,
    held: dict[str, str] | None = None,
    machine: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    return choose_gpus(
        RunOptions(**options), env or {}, machine_from_json(machine_json(cards, **(machine or {}))), held or {}
    )


def indices(choice: Any) -> list[int]:
    return [gpu.index for gpu in choice.gpus]


@pytest.mark.parametrize(
    ("gpus", "options", "env", "want", "line"),
    [
        (4, {}, {}, [0, 1, 2, 3], "✓ Found 4 GPU(s), using 4 GPUs"),
        (4, {"nproc_per_node": "3"}, {}, [0, 1, 2], "✓ Found 4 GPU(s), using 3 GPUs: GPU 0, GPU 1, GPU 2"),
        (4, {}, {"NPROC_PER_NODE": "3"}, [0, 1, 2], "✓ Found 4 GPU(s), using 3 GPUs (NPROC_PER_NODE=3): GPU 0, GPU 1, GPU 2"),
        (4, {}, {"NUM_GPUS": "2"}, [0, 1], "using 2 GPUs (NUM_GPUS=2)"),
        (4, {"nproc_per_node": "1"}, {"NPROC_PER_NODE": "3"}, [0], "using 1 GPUs"),
        (4, {"gpus": "3,0"}, {}, [3, 0], "using 2 GPUs: GPU 3, GPU 0"),
        (4, {"gpu": "2"}, {}, [2], "using 1 GPUs: GPU 2"),
        (4, {}, {"CUDA_VISIBLE_DEVICES": "2,1"}, [2, 1], "using 2 GPUs"),
        (4, {}, {"CUDA_VISIBLE_DEVICES": "GPU-2222"}, [2], "using 1 GPUs"),
        (4, {"gpus": "1"}, {"CUDA_VISIBLE_DEVICES": "0,1"}, [1], "using 1 GPUs"),
        (4, {"nproc_per_node": "gpu"}, {}, [0, 1, 2, 3], "using 4 GPUs"),
        (4, {"nproc_per_node": "auto"}, {}, [0, 1, 2, 3], "using 4 GPUs"),
        ([gpu_json(0, **FULL), gpu_json(1), gpu_json(2)], {}, {}, [1, 2], "left out: GPU 0 has 95.4 MiB free of 44.7 GiB, 953.7 MiB needed, by pid 77 (ann: python other.py)"),
        ([gpu_json(0, **FULL), gpu_json(1), gpu_json(2)], {"nproc_per_node": "2"}, {}, [1, 2], "using 2 GPUs: GPU 1, GPU 2"),
        ([gpu_json(0, memory_used=10**10), gpu_json(1, memory_used=2 * 10**10), gpu_json(2)], {"gpus": "any:2"}, {}, [0, 2], "GPU 0, GPU 2"),
        ([gpu_json(0, utilization=90), gpu_json(1, utilization=5)], {"gpus": "any:1"}, {}, [1], "GPU 1"),
        ([gpu_json(0, holders=[{"pid": 1}]), gpu_json(1, utilization=99)], {"gpus": "any"}, {}, [1], "GPU 1"),
        ([gpu_json(0, memory_used=4 * 10**10), gpu_json(1)], {"gpus": "any:1", "min_free_memory": 20 * 10**9}, {}, [1], "GPU 1"),
        ([gpu_json(0, memory_total=None, memory_used=None, utilization=None, holders=None, compute_mode=None)], {}, {}, [0], "using 1 GPUs"),
        (MIG, {}, {"CUDA_VISIBLE_DEVICES": "MIG-1"}, [0], "GPU 0.1"),
        (MIG, {"gpus": "0.0"}, {}, [0], "GPU 0.0"),
        (1, {"nproc_per_node": "2", "share_gpus": True}, {}, [0, 0], "(2 ranks)"),
        ([gpu_json(0, error="GPU is lost"), gpu_json(1)], {}, {}, [1], "left out: GPU 0 is not responding: GPU is lost"),
    ],
)  # fmt: skip
def test_choice(gpus: Any, options: dict[str, Any], env: dict[str, str], want: list[int], line: str) -> None:
    choice = pick(gpus, env, **options)
    assert indices(choice) == want and choice.ranks == len(want)
    assert line in choice.line


@pytest.mark.parametrize(
    ("gpus", "options", "env", "ranks", "line"),
    [
        (0, {}, {}, 1, "✓ No GPU found: 1 CPU rank, gloo"),
        (0, {"nproc_per_node": "3"}, {}, 3, "3 CPU ranks"),
        (0, {}, {"NPROC_PER_NODE": "2"}, 2, "2 CPU ranks"),
        (0, {"nproc_per_node": "auto"}, {}, 8, "8 CPU ranks"),
        (4, {"nproc_per_node": "cpu"}, {}, 8, "As requested: 8 CPU ranks"),
        (
            4,
            {"nproc_per_node": "2"},
            {"CUDA_VISIBLE_DEVICES": ""},
            2,
            "CUDA_VISIBLE_DEVICES hides the GPUs: 2 CPU ranks",
        ),
    ],
)
def test_cpu_ranks(gpus: int, options: dict[str, Any], env: dict[str, str], ranks: int, line: str) -> None:
    choice = pick(gpus, env, **options)
    assert choice.gpus == () and choice.ranks == ranks and line in choice.line


@pytest.mark.parametrize(
    ("gpus", "options", "env", "machine", "code", "says"),
    [
        (2, {"nproc_per_node": "3"}, {}, {}, 69, "3 ranks requested, but 2 GPUs usable: 2 GPUs here"),
        (2, {"gpus": "9"}, {}, {}, 69, "GPU '9' does not exist; the GPUs here are 0 (NVIDIA A40), 1 (NVIDIA A40)"),
        (2, {"gpus": "1,1"}, {}, {}, 64, "named twice"),
        (2, {"gpu": "1", "gpus": "0"}, {}, {}, 64, "--gpu and --gpus contradict"),
        (2, {"gpus": "any", "gpus_per_rank": 2}, {}, {}, 64, "contradict each other"),
        (4, {"gpus": "3"}, {"CUDA_VISIBLE_DEVICES": "0,1"}, {}, 69, "in CUDA_VISIBLE_DEVICES=0,1"),
        (2, {}, {"CUDA_VISIBLE_DEVICES": "0,7"}, {}, 69, "GPU '7' does not exist"),
        (2, {}, {"CUDA_VISIBLE_DEVICES": "GPU-"}, {}, 69, "GPU 'GPU-' does not exist"),
        ([gpu_json(0, **FULL)], {"gpus": "0"}, {}, {}, 69, "GPU 0 has 95.4 MiB free of 44.7 GiB"),
        ([gpu_json(0, **FULL)], {}, {}, {}, 69, "by pid 77 (ann: python other.py)"),
        ([gpu_json(0, memory_used=40 * 10**9)], {"min_free_memory": 20 * 10**9}, {}, {}, 69, "7.5 GiB free of 44.7 GiB, 18.6 GiB needed"),
        ([gpu_json(0, memory_used=47_900_000_000, holders=[])], {}, {}, {}, 69, "held from outside this container"),
        ([gpu_json(0, compute_mode="prohibited")], {}, {}, {}, 69, "prohibited compute mode"),
        (0, {"gpus": "0"}, {}, {}, 69, "this machine has none"),
        (0, {"nproc_per_node": "gpu"}, {}, {}, 69, "this machine has none"),
        (0, {}, {}, {"gpu_error": "NVML: driver/library mismatch"}, 69, "driver is not responding (NVML: driver/library mismatch"),
        (2, {"nproc_per_node": "0"}, {}, {}, 64, "from 1 up"),
        (2, {"nproc_per_node": "-1"}, {}, {}, 64, "from 1 up"),
        (2, {"nproc_per_node": "1e9"}, {}, {}, 64, "must be a number of ranks"),
        (0, {"nproc_per_node": "1000000000"}, {}, {}, 69, "30000 processes"),
        (2, {}, {"NPROC_PER_NODE": "many"}, {}, 64, "NPROC_PER_NODE must be"),
        (2, {"gpus": "any:0"}, {}, {}, 64, "--gpus any:0"),
        (2, {"gpus": "any:3"}, {}, {}, 69, "3 ranks requested"),
    ],
)  # fmt: skip
def test_refusal(
    gpus: Any, options: dict[str, Any], env: dict[str, str], machine: dict[str, Any], code: int, says: str
) -> None:
    with pytest.raises(Refusal) as refused:
        pick(gpus, env, machine=machine, **options)
    assert refused.value.code == code and says in refused.value.line
    assert "\n" not in refused.value.line


def test_a_gpu_another_run_holds_is_left_out_or_refused_by_name() -> None:
    held = {gpu_json(0)["uuid"]: "run exp1 (agent pid 5)"}
    assert indices(pick(2, held=held)) == [1]
    with pytest.raises(Refusal, match="GPU 0 is in use by run exp1"):
        pick(2, held=held, gpus="0")
    assert indices(pick(2, held=held, gpus="0", share_gpus=True)) == [0]


def test_a_busy_machine_never_falls_back_to_cpu() -> None:
    with pytest.raises(Refusal):
        pick([gpu_json(0, **FULL), gpu_json(1, **FULL)])
