"""On one real GPU: selection, refusal, waiting for a holder, memory that comes back, and no NVML entry of our own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import Stoker, alone_on_the_card, wait_for
from stoker.control.machine.nvml import DriverError, NoDriver, Nvml

try:
    NVML: Nvml | None = Nvml()
    WHY = "" if NVML.read_gpus() else "NVML shows no GPU"  # type: ignore[union-attr]
except (NoDriver, DriverError) as problem:
    NVML, WHY = None, f"no GPU here: {str(problem) or 'no NVIDIA driver'}"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY)]

HOLD = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def check(code): assert code == 0, code
check(cuda.cuInit(0)); context = ctypes.c_void_p(); check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)); check(cuda.cuCtxSetCurrent(context))
memory = ctypes.c_uint64(); check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(int(float(sys.argv[1]) * 1e9))))
print("holding", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def real(stoker: Stoker) -> Iterator[Stoker]:
    stoker.env.pop("STOKER_MACHINE")
    with alone_on_the_card():
        yield stoker
        assert wait_for(lambda: True if not _pids() & _mine(stoker) else None, 5)


def _mine(stoker: Stoker) -> set[int]:
    return {
        event["pid"]
        for path in stoker.cwd.glob("runs/2*/events.jsonl")
        for event in map(json.loads, path.read_text().splitlines())
        if event["event"] == "rank-up"
    }


def _gpu() -> Any:
    assert NVML is not None
    return NVML.read_gpus()[0]


def _pids() -> set[int]:
    assert NVML is not None
    return NVML.read_pids(_gpu().uuid)


def _holder(stoker: Stoker, gigabytes: float, seconds: float) -> subprocess.Popen[bytes]:
    stoker.script("hold.py", HOLD)
    holder = subprocess.Popen(
        [sys.executable, "hold.py", str(gigabytes), str(seconds)], cwd=stoker.cwd, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"holding\n"
    return holder


def test_the_card_is_found_and_described(real: Stoker) -> None:
    gpu = _gpu()
    assert gpu.uuid.startswith("GPU-") and gpu.memory_total > 10**9 and gpu.pci
    done = real("run", "--dry-run", "--json", real.script("ok.py", "print('ran')"))
    plan = json.loads(done.out)
    assert plan["places"][0]["label"] == f"GPU{gpu.index}" and plan["places"][0]["gpu"]["uuid"] == gpu.uuid


def test_looking_adds_no_entry_to_the_cards_processes(real: Stoker) -> None:
    """The process list is watched while dry runs happen."""
    real.script("ok.py", "print('ran')")
    before, during = _pids(), set()
    for _ in range(3):
        run = real.start("run", "--dry-run", "ok.py")
        while run.poll() is None:
            during |= _pids()
        assert run.returncode == 0
    assert during <= before


def test_a_rank_on_the_card(real: Stoker) -> None:
    script = real.script(
        "t.py",
        "import os, torch, torch.distributed as dist\ndist.init_process_group('nccl')\nd = torch.device('cuda', int(os.environ['LOCAL_RANK']))\n"
        "m = torch.nn.Linear(4096, 4096, device=d)\no = torch.optim.AdamW(m.parameters())\n"
        "for i in range(50): m(torch.randn(64, 4096, device=d)).sum().backward(); o.step()\n"
        "x = torch.ones(1, device=d); dist.all_reduce(x); print('sum', x.item(), os.environ['GPU_RANK'])\n"
        "import time; time.sleep(1); dist.destroy_process_group()\n",
    )
    done = real("run", script)
    gpu = _gpu()
    assert done.code == 0, done.err
    assert f"sum 1.0 {gpu.index}\n" == done.out and f"✓ Found {len(NVML.read_gpus())} GPU(s)" in done.err  # type: ignore[union-attr]
    assert (
        "[Rank 0] MEM:POST-MODEL RAM " in done.err
        and " GPU " in done.err.partition("MEM:POST-MODEL")[2].partition("\n")[0]
    )


def test_more_ranks_than_cards_are_refused(real: Stoker) -> None:
    assert NVML is not None
    count = len(NVML.read_gpus())
    done = real("run", "--nproc-per-node", str(count + 1), real.script("ok.py", "print('ran')"))
    assert done.code == 69 and f"{count + 1} ranks requested, but" in done.err and not (real.cwd / "runs").exists()
    done = real("run", "--gpus", "99", "ok.py")
    assert done.code == 69 and "GPU '99' does not exist; the GPUs here are 0 (" in done.err


def test_sharing_when_asked_for(real: Stoker) -> None:
    script = real.script(
        "s.py", "import os, torch; x = torch.ones(1, device='cuda:' + os.environ['LOCAL_RANK']); print('ok', x.item())"
    )
    done = real("run", "--nproc-per-node", "2", "--gpus", "0", "--share-gpus", script)
    assert done.code == 0 and done.out.count("GPU0:ok 1.0") == 2, done.err


def test_a_full_card_is_refused_and_waited_for(real: Stoker) -> None:
    """Half of what is free is held and three quarters are asked for: tests of other workers have room, and don't decide."""
    gpu = _gpu()
    free = (gpu.memory_total - gpu.memory_used) / 1e9
    needed = f"{0.75 * free:.1f}"
    needed_gib = f"{float(needed) * 1e9 / 2**30:.1f}"
    holder = _holder(real, free / 2, 600)
    try:
        script = real.script("ok.py", "print('ran')")
        done = real("run", "--min-free-memory", f"{needed}GB", script)
        assert (
            done.code == 69
            and f"{needed_gib} GiB needed" in done.err
            and f"by pid {holder.pid}" in done.err
            and "hold.py" in done.err
        )
        waiting = real.start("run", "--min-free-memory", f"{needed}GB", "--wait", "120s", script)
        assert waiting.stdout is not None
        assert any(b"waiting for up to" in line for line in waiting.stdout)
        holder.kill()
        printed = waiting.stdout.read()
        assert waiting.wait() == 0 and b"ran" in printed, printed
    finally:
        if holder.poll() is None:
            holder.kill()
        holder.wait()


def test_a_killed_ranks_memory_is_back_when_the_run_ends(real: Stoker) -> None:
    real.script("hold.py", HOLD)
    before = _gpu().memory_used
    run = real.start("run", "--name", "held", "hold.py", "20", "60")
    assert wait_for(lambda: True if _gpu().memory_used > before + 15e9 else None, 30)
    done = real("run", "hold.py", "1", "1")
    assert done.code == 69 and "in use by run" in done.err
    run.terminate()
    assert run.wait(100) == 143
    assert _gpu().memory_used < before + 1e9


def test_hidden_cards_mean_cpu_ranks(real: Stoker) -> None:
    script = real.script("c.py", "import os; print(repr(os.environ.get('CUDA_VISIBLE_DEVICES')))")
    done = real("run", "--nproc-per-node", "2", script, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.code == 0 and sorted(done.out.splitlines()) == ["CPU0:''", "CPU1:''"]
