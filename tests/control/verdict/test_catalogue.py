"""The catalogue: each cause by the words torch, NCCL, gloo, safetensors and the kernel really print, and the near misses that are something else.

Texts marked H200 were printed by torch 2.11 and NCCL 2.28.9 on one; those of gloo, the loader and the files by torch 2.13 on a CPU, and
the scripts at the end provoke them again.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Stoker, at_length
from faults.around import cannot
from stoker.contract.checkpoints import SavedCheckpoint
from stoker.contract.evidence import STOP_RULES, Evidence, ExitContext, RankError, RankExit, ScriptEnd, Stall, Verdict
from stoker.contract.frozen import replace
from stoker.contract.units import format_bytes
from stoker.control.verdict import cause_docs
from stoker.control.verdict.catalogue import CATALOGUE
from stoker.control.verdict.echo import unquote_traceback
from stoker.control.verdict.hangs import make_stall_report
from stoker.control.verdict.judge import judge
from stoker.control.verdict.rules.gpu_memory import parse_out_of_memory

ROOT = Path(__file__).resolve().parents[3]
GIB = 2**30


def err(type: str, message: str, traceback: str = "", module: str = "builtins", at: float = 5.0) -> RankError:
    return RankError(type, message, "train.py", 7, "main", traceback, int(at * 1e9), module=module)


def end(
    error: RankError | None = None,
    code: int | None = 1,
    *,
    rank: int = 0,
    label: str = "GPU0",
    time: float = 5.0,
    **more: Any,
) -> RankExit:
    return RankExit(rank, "", label, 100 + rank, code, time, error=error, **more)


def verdict(*ends: RankExit) -> Verdict:
    return judge(Evidence(max(2, len(ends)), ends))


def test_a_web_server_that_hangs_up_is_no_peer_that_left() -> None:
    lost = err(
        "ConnectionError",
        "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
        module="requests.exceptions",
    )
    found = verdict(end(lost, time=9.0), end(None, 0, rank=1, time=5.0))
    assert (found.rank, found.exit_code) == (0, 1) and found.cause != "rank.early-exit"
    for module, at, guilty in (
        ("builtins", 5.2, 1),
        ("builtins", 60.0, 0),
    ):  # a socket of the script's own, and a tracker's a minute later
        reset = err("ConnectionResetError", "[Errno 104] Connection reset by peer", module=module, at=at)
        assert verdict(end(reset, time=at), end(None, 0, rank=1, time=5.0)).rank == guilty


HANDING_OVER = """Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1291, in _try_get_data
    data = self._data_queue.get(timeout=timeout)
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 395, in _recv
    chunk = read(handle, remaining)
"""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("EOFError", ""),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        ("FileNotFoundError", "[Errno 2] No such file or directory"),
    ],
)
def test_a_worker_that_dies_while_it_hands_a_batch_over(kind: str, message: str) -> None:
    """And its rank is to blame, though a broken connection is what a lost peer leaves too."""
    found = verdict(
        end(err(kind, message, HANDING_OVER + f"{kind}: {message}")),
        end(err("RuntimeError", "[gloo/transport/tcp/pair.cc:553] Connection closed by peer", at=4.0), rank=1),
    )
    assert (found.cause, found.rank) == ("data.worker-died", 0)
    inside = f'Caught {kind} in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File "data.py", line 3, in __getitem__\n{kind}: {message}'
    assert verdict(end(err(kind, inside, HANDING_OVER))).cause != "data.worker-died"


def test_the_line_inside_another_process() -> None:
    library = '  File "/venv/lib/python3.11/site-packages/torch/x.py", line 9, in call\n    f()\n'
    inner = f'Traceback (most recent call last):\n  File "/me/data.py", line 3, in load\n    raise\n{library}ValueError: boom\nof two lines'
    worker = unquote_traceback(
        err("ValueError", f"Caught ValueError in DataLoader worker process 1.\nOriginal {inner}")
    )
    assert (worker.file, worker.line, worker.function, worker.type) == ("/me/data.py", 3, "load", "ValueError")
    assert worker.message.startswith("boom (in DataLoader worker process 1)\n")
    spawned = unquote_traceback(
        err(
            "ProcessRaisedException",
            f"\n\n-- Process 1 terminated with the following error:\n{inner}",
            module="torch.multiprocessing.spawn",
        )
    )
    assert (spawned.line, spawned.type, spawned.message.splitlines()[0]) == (
        3,
        "ValueError",
        "boom (in process 1 that it started)",
    )
    plain = err("ValueError", "no traceback in it")
    assert unquote_traceback(plain) == plain


FATAL = """Fatal Python error: Segmentation fault

Thread 0x00007f5f52ffd6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f5f95634b80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/numpy/core.py", line 519 in dot
  File "/me/model.py", line 94 in attend

Thread 0x00007f5f95634b90 (most recent call first):
  File "/me/train.py", line 12 in main
"""


def test_a_crash_is_told_of_the_thread_it_happened_in() -> None:
    found = verdict(end(None, -11, stack=FATAL))
    assert found.summary.endswith(
        "died of SIGSEGV at /me/model.py:94, in attend (in dot, /venv/lib/python3.11/site-packages/numpy/core.py:519)"
    )
    nowhere = FATAL.replace("Current thread", "Thread")
    assert (
        "in a thread without Python code; the main thread was at /me/train.py:12, in main"
        in verdict(end(None, -11, stack=nowhere)).summary
    )


def test_our_own_line_about_a_full_disk_is_no_evidence() -> None:
    found = verdict(
        end(
            None,
            1,
            tail="Traceback ...\nValueError: boom\nstoker: could not write the error report: [Errno 28] No space left on device\n",
        )
    )
    assert found.cause == "rank.exit"


def test_another_attempt_is_not_promised_after_a_mistake_in_the_program() -> None:
    assert not verdict(end(err("TypeError", "main() takes 0 positional arguments but 1 was given"))).retryable
    assert verdict(end(err("ValueError", "boom"))).retryable


SLEEPS = Stall(
    "sleep",
    1,
    (1,),
    (0,),
    "train.py:31, in load",
    "it is sleeping",
    "gloo:all_reduce of shape [4]",
    "gloo",
    silent_s=20.0,
    step=20,
    evidence=("rank 1: load",),
)


def test_a_run_that_is_stopped_keeps_what_was_known() -> None:
    def ended(number: int) -> RankExit:
        return RankExit(number, "", f"CPU{number}", 100 + number, -9, 60.0, ours=True)

    late = judge(Evidence(2, (ended(0), ended(1)), stop_signal=2, stopped_at=10.0))
    assert "--grace" in late.fix[0] and "Before the stop" not in late.summary
    known = judge(Evidence(2, (ended(0), ended(1)), stop_signal=2, stopped_at=10.0, stall=SLEEPS))
    assert (
        known.cause == "launch.stopped"
        and "Before the stop: rank 1 (CPU 1) has made no progress since step 20: it is sleeping at train.py:31"
        in known.summary
    )
    assert (
        "rank 1: load" in known.evidence
        and not any("--grace" in line for line in known.fix)
        and "look at train.py:31, in load" in known.fix
    )
    noted = judge(
        Evidence(
            2,
            (ended(0), ended(1)),
            stop_signal=2,
            stopped_at=10.0,
            notes=("rank 1 (CPU 1) is slow because it is swapping",),
        )
    )
    assert "it is swapping" in noted.summary and noted.fix == ()


def test_a_rank_that_raised_and_hangs_at_its_exit_is_judged_by_its_exception() -> None:
    stuck = RankExit(1, "", "CPU1", 101, -15, 60.0, ours=True, error=err("ValueError", "boom"))
    found = judge(
        Evidence(
            2,
            (end(None, -15, ours=True), stuck),
            stopped_at=50.0,
            trouble=(make_stall_report(SLEEPS, "CPU1", "the time is over"),),
        )
    )
    assert (found.cause, found.rank) == ("rank.exception", 1)


@pytest.mark.parametrize(("ended_at", "cause"), [(5.2, "rank.early-exit"), (30.0, "hang.spin")])
def test_a_rank_that_ended_before_its_peers_failed_was_not_stuck(ended_at: float, cause: str) -> None:
    """A suspicion may come while a rank shuts down. If its end comes long after the failures, they waited in vain."""
    stall = Stall("spin", 1, (1,), (0,), "", "it is computing (0.4 cores)", "gloo:broadcast", step=20, silent_s=4.0)
    lost = err("RuntimeError", "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer", at=5.0)
    verdict = judge(Evidence(2, (end(lost, time=6.0), end(None, 0, rank=1, time=ended_at)), stall=stall))
    assert (verdict.cause, verdict.rank) == (cause, 1)


@pytest.mark.parametrize("stopped", [True, False])
def test_an_early_exit_names_the_line_that_called_sys_exit(stopped: bool) -> None:
    """By whatever the others ended: Stoker stopped them, or they lost the rank."""
    stall = Stall("left", 1, (1,), (0,), "train.py:36", "", "gloo:all_reduce", step=30, silent_s=4.3)
    left = end(None, 0, rank=1, time=5.0, script_end=ScriptEnd("exit", "0", "reader.py", 25, "rows"))
    if stopped:
        reported = (make_stall_report(stall, "GPU1", "it can't continue by itself"),)
        evidence = Evidence(2, (end(None, -15, ours=True, time=12.0), left), stopped_at=11.0, trouble=reported)
    else:
        lost = err("RuntimeError", "[gloo/transport/tcp/pair.cc:534] Connection closed by peer", at=5.0)
        evidence = Evidence(2, (end(lost, time=6.0), left), stall=stall)
    verdict = judge(evidence)
    assert (verdict.cause, verdict.rank, verdict.exit_code) == ("rank.early-exit", 1, 70)
    assert "reader.py:25" in verdict.summary


def cuda(words: str) -> RankError:
    tail = "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
    return err(
        "AcceleratorError",
        f"CUDA error: {words}{tail}\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n",
        module="torch",
    )


def nccl(kind: str, name: str, last: str) -> RankError:
    text = f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, {kind} (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n{name}\nLast error:\n{last}"
    return err("DistBackendError", text, module="torch.distributed")


def oom(
    needed: str, rest: str, *, cards: str = "GPU 0 has a total capacity of 139.80 GiB", what: str = "CUDA"
) -> RankError:
    hint = " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation"
    return err(
        "OutOfMemoryError", f"{what} out of memory. Tried to allocate {needed}. {cards}{rest}{hint}", module="torch"
    )


INVALID = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."
SYSTEM = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
# H200
FOREIGN = oom(
    "60.00 GiB",
    " of which 38.77 GiB is free. Process 727 has 100.51 GiB memory in use. Including non-PyTorch memory, this process has 518.00 MiB memory in use. "
    "Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.",
)
FULL = oom(
    "10.00 GiB",
    " of which 9.29 GiB is free. Including non-PyTorch memory, this process has 130.51 GiB memory in use. Of the allocated memory 130.00 GiB is "
    "allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.",
)
ALLOWED = oom(
    "20.00 GiB",
    " of which 139.29 GiB is free. Including non-PyTorch memory, this process has 518.00 MiB memory in use. 6.99 GiB allowed; Of the allocated memory "
    "0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.",
)
PIECES = oom(
    "1.50 GiB",
    " of which 336.56 MiB is free. Including non-PyTorch memory, this process has 139.47 GiB memory in use. Of the allocated memory 131.20 GiB is allocated "
    "by PyTorch, with 22.00 MiB allocated in private pools (e.g., CUDA Graphs), and 7.77 GiB is reserved by PyTorch but unallocated.",
)
NEARLY = oom(
    "2.00 GiB",
    " of which 1.91 GiB is free. Including non-PyTorch memory, this process has 137.30 GiB memory in use. Of the allocated memory 136.05 GiB is allocated by "
    "PyTorch, and 0.75 GiB is reserved by PyTorch but unallocated.",
)
# In a container the driver names our own process by the host's pid, and torch does not know it for its own.
OWN_UNDER_ANOTHER_PID = oom(
    "14.00 MiB",
    " of which 4.69 MiB is free. Process 860120 has 22.29 GiB memory in use. Of the allocated memory 21.92 GiB is allocated by PyTorch, with "
    "22.00 MiB allocated in private pools (e.g., CUDA Graphs), and 16.47 MiB is reserved by PyTorch but unallocated.",
    cards="GPU 0 has a total capacity of 22.30 GiB",
)
# Others that torch can't name: 79.15 - 1.91 - 58.31 GiB.
UNSEEN = oom(
    "2.00 GiB",
    " of which 1.91 GiB is free. Including non-PyTorch memory, this process has 58.31 GiB memory in use. Of the allocated memory 56.75 GiB is allocated by "
    "PyTorch, and 1.05 GiB is reserved by PyTorch but unallocated.",
    cards="GPU 0 has a total capacity of 79.15 GiB",
)
HELD = ExitContext(
    holders=(
        {"pid": 100, "memory": GIB // 2, "command": "train.py", "user": "me", "run": "", "ours": True},
        {
            "pid": 727,
            "memory": 100 * GIB,
            "command": "python serve.py",
            "user": "bob",
            "run": "20260101-serve",
            "ours": False,
        },
    )
)
OUTSIDE = ExitContext(
    holders=({"pid": 4711, "memory": 100 * GIB, "command": "", "user": "", "run": "", "ours": False},),
    gpu_total=140 * GIB,
)
BUS = (
    "RuntimeError: DataLoader worker (pid 3499) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your "
    'shared memory limit.\n\nThe above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n  File "train.py", line 6, in <module>\n'
    "RuntimeError: DataLoader worker (pid(s) 3499) exited unexpectedly\n"
)
WORKER = err(
    "RuntimeError",
    "DataLoader worker (pid(s) 2027) exited unexpectedly",
    BUS.replace("3499", "2027").replace("Bus error. It is possible that", "Killed. \n"),
)
BUS_ERROR = err("RuntimeError", "DataLoader worker (pid(s) 3499) exited unexpectedly", BUS)
IN_A_WORKER = err(
    "FileNotFoundError",
    'Caught FileNotFoundError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File "worker.py", line 349, in _worker_loop\n'
    "    raise RuntimeError('CUDA error: out of memory')\nFileNotFoundError: [Errno 2] No such file or directory: '/data/shard-3.bin'\n",
)
KILLED_LINE = "Memory cgroup out of memory: Killed process 100 (python) total-vm:98304kB, anon-rss:61440kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:92kB oom_score_adj:0"
XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid='<unknown>', name=<unknown>, {}"
WATCHDOG = (
    "[rank0]:[E1115 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=600000) ran for 600051 milliseconds before timing out.\nframe #0: c10::Error::Error\nterminate called after throwing an instance of 'c10::DistBackendError'\n"
)
SHAPE = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] "
    "op.preamble.length <= op.nbytes. 1000000 vs 12. Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?\n"
)
ECHO = err(
    "RuntimeError",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:50599: Connection reset by peer.",
    at=4.9,
)
STORE_TYPES = {"module": "torch.distributed"}
SUBPROCESS = 'Traceback (most recent call last):\n  File "/usr/lib/python3.11/subprocess.py", line 1955, in _execute_child\n    raise child_exception_type(errno_num, err_msg)\n'
JSON_LOAD = 'Traceback (most recent call last):\n  File "/usr/lib/python3.11/json/__init__.py", line 293, in {}\n    return loads(fp.read())\n'

# (cause, the end, tried again, words of the summary)
CASES: list[tuple[str, RankExit, bool, tuple[str, ...]]] = [
    ("nan.traced", end(err("NonFinite", "step 12: NaN first in aten.bmm of layers.3.attention (forward) on rank 0, samples 17, 18", module="stoker.training.forensics.culprit")), False, ("step 12", "aten.bmm of layers.3.attention", "samples 17, 18")),
    ("grpo.broken", end(code=70, tail="INFO | [GPU 0] GRPO stopped itself: the divergence from the first model stayed above 10 for 3 steps (since step 40), now 12.5\n"), False, ("stayed above 10",)),
    ("grpo.other-weights", end(code=70, tail="INFO | [GPU 0] GRPO stopped itself: the server at 127.0.0.1:8000 answers with other weights than the trainers': on a test prompt its log-probabilities differ by 0.31 a token\n"), False, ("127.0.0.1:8000 answers with other weights",)),
    ("grpo.identical", end(code=70, tail="INFO | [GPU 0] GRPO stopped itself: all answers to a prompt were the same text, for every prompt for 10 steps (since step 4), so nothing is learned\n"), False, ("the same text", "since step 4")),
    ("grpo.cut", end(code=70, tail="INFO | [GPU 0] GRPO stopped itself: 97% of the answers were cut at generate.new_tokens for 10 steps (since step 4), mean length 64.0\n"), False, ("97% of the answers were cut",)),
    ("grpo.no-signal", end(code=70, tail="INFO | [GPU 0] Step [9/60] | Reward: 0.000\nINFO | [GPU 0] GRPO stopped itself: the reward was exactly 0 for every answer for 10 steps (since step 0), so nothing is learned\n"), False, ("the reward was exactly 0", "since step 0")),
    ("grpo.no-signal", end(code=70, tail="INFO | [GPU 0] GRPO stopped itself: exact paid for no answer for 10 steps (since step 4): only the reward model's opinion is learned\n"), False, ("exact paid for no answer",)),
    ("grpo.reward", end(code=70, tail="INFO | [GPU 0] GRPO stopped: reward rewards.py:score failed: rewards.py, line 7: ValueError: no digits; prompt '2 + 3?', answer 'five' (step 3)\n"), False, ("rewards.py, line 7: ValueError", "prompt '2 + 3?'")),
    ("grpo.rollout", end(code=70, tail="INFO | [GPU 0] GRPO stopped: rollout game.py:rollout, prompt 4: game.py, line 7: ValueError: no digits; no rollout of the step was left (step 3)\n"), False, ("game.py, line 7: ValueError", "prompt 4")),
    ("grpo.server", end(code=70, tail="INFO | [GPU 0] GRPO stopped: the server at 127.0.0.1:8000 did not answer /v1/completions for 10 min: [Errno 111] Connection refused (step 3)\n"), True, ("Connection refused",)),
    ("rank.exit", end(code=65, tail="starting\nstoker: data.path x.jsonl: no row has messages\n"), False, ("refused: data.path x.jsonl: no row",)),
    ("rank.exit", end(code=69, tail="stoker: this torch sees no GPU\n"), True, ("exit code 69",)),
    ("rank.exit", end(code=65, tail="a script's own code\n"), True, ("exit code 65",)),
    ("rank.exit", end(code=1, tail="INFO | [GPU 0] GRPO stopped itself: a line that a script prints\n"), True, ("exit code 1",)),
    ("oom.gpu", end(FULL), False, ("10.0 GiB needed", "9.3 GiB of 139.8 GiB free")),
    ("oom.gpu", end(ALLOWED), False, ("20.0 GiB needed", "limits itself to 7.0 GiB", "set_per_process_memory_fraction")),
    ("oom.gpu", end(NEARLY), False, ("2.0 GiB needed", "768.0 MiB reserved and unused")),
    ("oom.gpu", end(OWN_UNDER_ANOTHER_PID), False, ("14.0 MiB needed",)),
    ("oom.gpu", end(oom("14.00 MiB", " of which 4.69 MiB is free. Of the allocated memory 139.00 GiB is allocated by PyTorch, and 16.47 MiB is reserved by PyTorch but unallocated.", what="HIP")), False, ("14.0 MiB",)),
    ("oom.gpu", end(cuda("out of memory")), False, ("out of GPU memory",)),
    ("oom.gpu", end(err("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")), False, ("out of GPU memory",)),
    ("oom.gpu", end(nccl("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.", "Cuda failure 2 'out of memory'")), False, ("out of GPU memory",)),
    ("oom.gpu", end(tail="step 3\ntorch.OutOfMemoryError: " + FULL.message + "\n"), False, ("10.0 GiB needed",)),
    ("oom.gpu-foreign", end(FOREIGN), True, ("60.0 GiB needed", "38.8 GiB of 139.8 GiB free", "pid 727 holds 100.5 GiB")),
    ("oom.gpu-foreign", end(FOREIGN, around=HELD), True, ("pid 727 (python serve.py, user bob, run 20260101-serve) holds 100.0 GiB",)),
    ("oom.gpu-foreign", end(UNSEEN), True, ("18.9 GiB are held by processes that can't be seen",)),
    ("oom.gpu-foreign", end(cuda("out of memory"), around=OUTSIDE), True, ("pid 4711 holds 100.0 GiB, from outside this container",)),
    ("oom.gpu-fragmentation", end(PIECES), False, ("1.5 GiB needed", "7.8 GiB reserved and unused")),
    ("oom.host", end(code=-9, oom_killed=True, around=ExitContext(rss=((0.0, 3 * 10**9), (40.0, 58 * 10**9)), host_available=4 * 10**8, host_total=64 * 10**9)), False, ("killed by the kernel", "grew from 2.8 GiB to 54.0 GiB in 40 s")),
    ("oom.host", end(code=-9, around=ExitContext(kernel=(KILLED_LINE,))), False, ("killed by the kernel",)),
    ("oom.host", end(WORKER, around=ExitContext(kernel=("Out of memory: Killed process 2027 (python3) total-vm:9kB",))), False, ("data-loader worker (pid 2027)", "killed by the kernel")),
    ("oom.host-allocation", end(err("MemoryError", "")), False, ("allocation failed",)),
    ("oom.host-allocation", end(err("MemoryError", "std::bad_alloc")), False, ("allocation failed",)),
    ("oom.host-allocation", end(code=-6, tail="terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"), False, ("allocation failed",)),
    ("oom.host-allocation", end(err("RuntimeError", "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)")), False, ("8.0 GiB",)),
    ("oom.host-allocation", end(err("_ArrayMemoryError", "Unable to allocate 71.1 PiB for an array with shape (10000000000000000,) and data type float64", module="numpy._core._exceptions")), False, ("71.1 PiB",)),
    ("gpu.busy", end(cuda("CUDA-capable device(s) is/are busy or unavailable")), True, ("busy or unavailable", "error 46", "compute mode; the GPU may be faulty")),
    ("gpu.busy", end(cuda("CUDA-capable device(s) is/are busy or unavailable"), around=HELD), True, ("pid 727",)),
    ("gpu.ordinal", end(cuda("invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?")), False, ("invalid device ordinal",)),
    ("gpu.assert", end(cuda("device-side assert triggered"), tail="/pytorch/aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.\n"), False, ("t < n_classes", "a label is not below")),
    ("gpu.assert", end(cuda("device-side assert triggered"), tail="Indexing.cu:1515: indexSelectSmallIndex: block: [0,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"), False, ("a token id beyond the vocabulary",)),
    ("gpu.illegal-access", end(cuda("an illegal memory access was encountered")), True, ("illegal memory access",)),
    ("gpu.illegal-access", end(cuda("an illegal memory access was encountered"), around=ExitContext(kernel=(XID.format(31, "MMU Fault"),))), True, ("illegal memory access",)),
    ("gpu.launch-failure", end(cuda("unspecified launch failure")), True, ("unspecified launch failure",)),
    ("gpu.timeout", end(cuda("the launch timed out and was terminated")), False, ("watchdog",)),
    ("gpu.ecc", end(cuda("uncorrectable ECC error encountered")), True, ("ECC",)),
    ("gpu.ecc", end(cuda("unspecified launch failure"), around=ExitContext(kernel=(XID.format(95, "Uncontained ECC error"),))), True, ("ECC",)),
    ("gpu.lost", end(cuda("unknown error")), True, ("lost",)),
    ("gpu.lost", end(code=-6, tail="CUDA error: unspecified launch failure\n", around=ExitContext(kernel=(XID.format(79, "GPU has fallen off the bus."),))), True, ("Xid 79",)),
    ("gpu.xid", end(cuda("unspecified launch failure"), around=ExitContext(kernel=(XID.format(119, "Timeout waiting for RPC from GSP!"),))), True, ("Xid 119", "GSP")),
    ("gpu.xid", end(cuda("unspecified launch failure"), around=ExitContext(kernel=(XID.format(94, "Contained ECC error"),))), True, ("Xid 94",)),
    ("gpu.duplicate", end(nccl("invalid usage", INVALID, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60")), False, ("rank 0 and rank 1 are on the same GPU",)),
    ("gpu.arch", end(cuda("no kernel image is available for execution on the device")), False, ("architecture",)),
    ("gpu.driver", end(err("RuntimeError", "No CUDA GPUs are available")), False, ("No CUDA GPUs are available",)),
    ("gpu.driver", end(err("RuntimeError", "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading and installing a new version")), False, ("too old (found version 11040)",)),
    ("gpu.driver", end(err("RuntimeError", "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver")), False, ("Found no NVIDIA driver",)),
    ("gpu.driver", end(err("RuntimeError", "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices()? Error 802: system not yet initialized")), False, ("802",)),
    ("gpu.not-initialized", end(err("RuntimeError", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")), False, ("cuBLAS could not start",)),
    ("net.port-in-use", end(err("DistNetworkError", "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use", **STORE_TYPES)), True, ("port 29500",)),
    ("nccl.version", end(nccl("invalid usage", INVALID, "Mismatched NCCL version detected : rank 0 version 22605 rank 1 version 22708")), False, ("rank 1 version 22708",)),
    ("nccl.version", end(err("ImportError", "/opt/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommWindowRegister")), False, ("ncclCommWindowRegister",)),
    ("nccl.interface", end(nccl("invalid usage", INVALID, "Bootstrap : no socket interface found")), False, ("no network interface", "NCCL_SOCKET_IFNAME")),
    ("nccl.interface", end(nccl("internal error", "ncclInternalError: Internal check failed.", "ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6(10)")), False, ("no network interface",)),
    ("nccl.shm", end(nccl("unhandled system error", SYSTEM, "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on device (28)"), around=ExitContext(shm_free=10 * 2**20, shm_total=64 * 2**20)), False, ("shared memory", "10.0 MiB of 64.0 MiB free")),
    ("nccl.connection", end(nccl("remote process exited or there was a network error", REMOTE, "socketPollConnect: connect to 10.0.0.2<41234> returned Connection refused, exceeded error retry count (35)")), True, ("10.0.0.2<41234>",)),
    ("nccl.connection", end(nccl("unhandled system error", SYSTEM, "socketStartConnect: Connect to 172.17.0.2<54321> failed : No route to host")), True, ("172.17.0.2<54321>",)),
    ("nccl.connection", end(err("DistStoreError", "Timed out after 601 seconds waiting for clients. 15/16 clients joined.", **STORE_TYPES)), True, ("15 of 16 ranks",)),
    ("nccl.cuda", end(nccl("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.", "Cuda failure 1 'invalid argument'")), True, ("unhandled cuda error", "Cuda failure 1 'invalid argument'")),
    ("nccl.cuda", end(nccl("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.", "Cuda failure 999 'unknown error'")), True, ("unknown error",)),
    ("nccl.system", end(nccl("unhandled system error", SYSTEM, "Call to ibv_reg_mr failed with error Cannot register memory")), True, ("ibv_reg_mr",)),
    ("nccl.timeout", end(code=-6, tail=WATCHDOG), True, ("ALLREDUCE number 6", "after 600 s")),
    ("gloo.interface", end(err("RuntimeError", "[enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth77"), label="CPU0"), False, ("eth77",)),
    ("gloo.shape", end(code=-6, label="CPU0", tail=SHAPE), False, ("1000000 bytes where it expected 12",)),
    ("gloo.connection", end(err("DistNetworkError", "The client socket has timed out after 3000ms while trying to connect to (127.0.0.1, 1).", **STORE_TYPES), label="CPU0"), True, ("127.0.0.1:1",)),
    ("gloo.connection", end(err("RuntimeError", "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"), label="CPU0"), True, ("can't connect to a peer",)),
    ("gloo.timeout", end(err("RuntimeError", "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"), label="CPU0"), True, ("4 s", "recv")),
    ("data.worker-died", end(WORKER), True, ("data-loader worker (pid 2027)", "Killed")),
    ("data.worker-died", end(BUS_ERROR, around=ExitContext(shm_free=60 * GIB, shm_total=64 * GIB)), True, ("Bus error",)),
    ("data.shm", end(BUS_ERROR, around=ExitContext(shm_free=60 * 2**20, shm_total=64 * 2**20)), False, ("bus error", "of 64.0 MiB free")),
    ("data.shm", end(err("RuntimeError", "unable to allocate shared memory(shm) for file </torch_2328_314884356_0>: No space left on device (28)")), False, ("shared memory",)),
    ("data.shm", end(err("RuntimeError", "DataLoader worker is killed. ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).")), False, ("shared memory",)),
    ("data.shm", end(code=-7, around=ExitContext(shm_free=0, shm_total=64 * 2**20)), False, ("bus error",)),
    ("data.too-many-files", end(err("OSError", "[Errno 24] Too many open files: '/dev/null'")), False, ("ulimit -n",)),
    ("data.too-many-files", end(err("RuntimeError", "received 0 items of ancdata")), False, ("ulimit -n",)),
    ("data.too-many-files", end(err("RuntimeError", "unable to open shared memory object </torch_1_2_3> in read-write mode: Too many open files (24)")), False, ("ulimit -n",)),
    ("data.no-space", end(err("OSError", "[Errno 28] No space left on device: '/ckpt/step-100.pt'")), False, ("/ckpt/step-100.pt",)),
    ("data.no-space", end(err("SafetensorError", "Error while serializing: I/O error: No space left on device (os error 28)", module="safetensors")), False, ("no space left",)),
    ("data.no-space", end(err("RuntimeError", "[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")), False, ("no space left",)),
    ("data.no-space", end(err("OSError", "100000 requested and 8176 written")), False, ("no space left",)),
    ("data.no-space", end(err("RuntimeError", "PytorchStreamWriter failed writing file data/0: file write failed")), False, ("no space left",)),
    ("data.corrupt", end(err("SafetensorError", "Error while deserializing header: incomplete metadata, file not fully covered", module="safetensors")), False, ("incomplete metadata",)),
    ("data.corrupt", end(err("RuntimeError", "PytorchStreamReader failed reading zip archive: failed finding central directory. This is an internal miniz error.")), False, ("failed finding central directory",)),
    ("data.corrupt", end(err("UnpicklingError", "invalid load key, 'v'.", module="_pickle")), False, ("git-lfs pointer",)),
    ("data.corrupt", end(err("UnpicklingError", "Weights only load failed. In PyTorch 2.6, we changed the default value\nPlease file an issue: WeightsUnpickler error: \n\nUnsupported operand 118\n\nCheck", module="_pickle")), False, ("Unsupported operand 118", "git-lfs")),
    ("data.corrupt", end(err("BadZipFile", "File is not a zip file", module="zipfile")), False, ("not a zip file",)),
    ("data.corrupt", end(err("EOFError", "", 'File "/x/torch/serialization.py", line 1634, in load\nEOFError\n')), False, ("ends too early",)),
    ("data.corrupt", end(err("JSONDecodeError", "Expecting ':' delimiter: line 1 column 5 (char 4)", JSON_LOAD.format("load"))), False, ("Expecting ':'",)),
    ("data.network-fs", end(err("OSError", "[Errno 116] Stale file handle: '/mnt/nfs/train.bin'")), True, ("/mnt/nfs/train.bin",)),
    ("data.network-fs", end(err("OSError", "[Errno 5] Input/output error")), True, ("Input/output error",)),
    ("data.permission", end(err("PermissionError", "[Errno 13] Permission denied: '/etc/shadow'")), False, ("/etc/shadow", "permission denied")),
    ("data.permission", end(err("OSError", "[Errno 30] Read-only file system: '/data/cache'")), False, ("read-only",)),
    ("data.file-missing", end(err("FileNotFoundError", "[Errno 2] No such file or directory: '/data/train.bin'")), False, ("/data/train.bin does not exist",)),
    ("data.file-missing", end(IN_A_WORKER), False, ("/data/shard-3.bin does not exist",)),
    ("data.file-missing", end(err("OSError", "meta-llama/Lama-3 is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'")), False, ("meta-llama/Lama-3",)),
    ("env.cuda-build", end(err("AssertionError", "Torch not compiled with CUDA enabled"), label="CPU0"), False, ("without CUDA",)),
    ("env.cuda-build", end(err("RuntimeError", "Distributed package doesn't have NCCL built in"), label="CPU0"), False, ("without CUDA",)),
    ("env.version", end(err("ImportError", "/venv/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi")), False, ("undefined symbol",)),
    ("env.version", end(err("ImportError", "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.34' not found (required by /venv/x.so)")), False, ("GLIBC_2.34",)),
    ("env.version", end(err("OSError", "libcudart.so.12: cannot open shared object file: No such file or directory")), False, ("libcudart.so.12",)),
    ("env.version", end(err("RuntimeError", "Numpy is not available")), False, ("Numpy",)),
    ("env.version", end(err("ImportError", "tokenizers>=0.21,<0.22 is required for a normal functioning of this module, but found tokenizers==0.20.3.")), False, ("tokenizers",)),
    ("env.version", end(err("ImportError", "Using the `Trainer` with `PyTorch` requires `accelerate>=0.26.0`: Please run `pip install transformers[torch]`")), False, ("accelerate",)),
    ("env.import", end(RankError("ModuleNotFoundError", "No module named 'einops'", "t.py", 1, "<module>", import_name="einops")), False, ("einops",)),
    ("env.shadowed", end(RankError("ModuleNotFoundError", "No module named 'torch.distributed'; 'torch' is not a package", "/x/t.py", 1, "<module>", import_name="torch.distributed", module_file="/x/torch.py")), False, ("/x/torch.py",)),
    ("env.shadowed", end(RankError("ImportError", "cannot import name 'Integral' from 'numbers' (/x/numbers.py)", "/x/t.py", 1, "<module>", module_file="/x/numbers.py")), False, ("/x/numbers.py",)),
    ("env.shadowed", end(RankError("ImportError", "cannot import name 'Random' from partially initialized module 'random' (/x/random.py)", "/x/random.py", 3, "<module>", 'Traceback:\n  File "/x/t.py", line 12, in <module>\n  File "/x/random.py", line 3, in <module>\n', module_file="/x/random.py")), False, ("/x/t.py:12",)),
    ("data.corrupt", end(RankError("JSONDecodeError", "Expecting value: line 1 column 1 (char 0)", "/x/t.py", 1, "rows", JSON_LOAD.format("loads"), files=("/x/part-3.jsonl",))), False, ("/x/part-3.jsonl",)),
    ("data.worker-died", end(err("RuntimeError", "DataLoader worker (pid 5) exited unexpectedly with exit code 1. Details are lost due to multiprocessing.")), True, ("exit code 1",)),
    ("env.syntax", end(err("SyntaxError", "invalid syntax (t.py, line 3)", "  File 't.py', line 3\nSyntaxError: invalid syntax\n")), False, ("invalid syntax",)),
    ("host.processes", end(err("RuntimeError", "can't start new thread")), False, ("can't start new thread",)),
    ("host.processes", end(err("BlockingIOError", "[Errno 11] Resource temporarily unavailable", SUBPROCESS)), False, ("Resource temporarily unavailable",)),
    ("host.processes", end(tail="libgomp: Thread creation failed: Resource temporarily unavailable\n"), False, ("Thread creation failed",)),
    ("torch.device-mismatch", end(err("RuntimeError", "Expected all tensors to be on the same device, but got mat2 is on cpu, different from other tensors on cuda:0 (when checking argument in method wrapper_CUDA_mm)")), False, ("mat2 is on cpu",)),
    ("torch.device-mismatch", end(err("RuntimeError", "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!")), False, ("cuda:0 and cpu",)),
    ("torch.device-mismatch", end(err("RuntimeError", "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same")), False, ("torch.cuda.FloatTensor",)),
    ("torch.device-mismatch", end(err("RuntimeError", "Expected a 'cuda' device type for generator but found 'cpu'")), False, ("generator",)),
    ("torch.dtype-mismatch", end(err("RuntimeError", "expected scalar type Half but found Float")), False, ("Half",)),
    ("torch.dtype-mismatch", end(err("RuntimeError", "\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'")), False, ("'Int'",)),
    ("torch.state-dict", end(err("RuntimeError", "Error(s) in loading state_dict for Net:\n\tsize mismatch for head.weight: copying a param with shape torch.Size([9, 8]) from checkpoint")), False, ("RuntimeError: Error(s)", "size mismatch for head.weight")),
    ("torch.autograd", end(err("RuntimeError", "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss.")), False, ("finished reduction",)),
    ("torch.autograd", end(err("RuntimeError", "Expected to mark a variable ready only once. This error is caused by one of the following reasons: …")), False, ("ready only once",)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "ended", "retryable", "words"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)]
)
def test_each_cause_by_its_words(cause: str, ended: RankExit, retryable: bool, words: tuple[str, ...]) -> None:
    found = verdict(ended)
    assert (found.cause, found.retryable) == (cause, retryable), found.summary
    assert all(word in found.summary for word in words), found.summary
    assert found.fix and found.evidence and "\n" not in found.summary


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        ("grpo.reward", "GRPO stopped: reward rewards.py:score failed: line 7: ValueError: no digits (step 0); {}"),
        (
            "grpo.rollout",
            "GRPO stopped: rollout game.py:rollout, prompt 4: line 7: ValueError: x; no rollout of the step was left (step 0); {}",
        ),
        ("grpo.broken", "GRPO stopped itself: the loss or its gradient was not finite for 3 steps; {}"),
    ],
)
def test_a_checkpoint_is_spoken_of_only_where_one_was_saved(cause: str, line: str) -> None:
    saved, none = (
        verdict(end(code=70, tail=f"INFO | [GPU 0] {line.format(last_good)}\n"))
        for last_good in (
            "the last good checkpoint is runs/x/checkpoints/step-00000003",
            "no checkpoint was saved before it",
        )
    )
    assert saved.cause == none.cause == cause and any("checkpoint that the message names" in fix for fix in saved.fix)
    assert not any("the message names a" in fix or "checkpoint that" in fix for fix in none.fix), none.fix


# What looks like a cause and is not: (not this one, the end, what it is)
NEAR: list[tuple[str, RankExit, str]] = [
    # the text was printed and survived: the rank was killed, or failed of something else
    ("oom.gpu", end(code=-9, tail="torch.OutOfMemoryError: " + FULL.message), "rank.killed"),
    ("oom.gpu", end(err("KeyError", "'labels'"), tail="skipped a batch: " + FULL.message), "rank.exception"),
    # an error that was being handled is not the reason of the next one
    ("oom.gpu", end(err("KeyError", "'x'", "torch.OutOfMemoryError: " + FULL.message + "\n\nDuring handling of the above exception, another exception occurred:\n\nKeyError: 'x'\n")), "rank.exception"),
    ("oom.gpu", end(err("ValueError", "the host's words: memory of CUDA cores")), "rank.exception"),
    # a desktop's 300 MiB do not make it somebody else's fault
    ("oom.gpu-foreign", end(FULL, around=ExitContext(holders=({"pid": 9, "memory": 300 * 2**20, "command": "Xorg", "user": "root", "run": "", "ours": False},))), "oom.gpu"),
    ("oom.gpu-foreign", end(OWN_UNDER_ANOTHER_PID), "oom.gpu"),
    ("oom.gpu-foreign", end(FOREIGN, around=ExitContext(holders=({"pid": 727, "memory": 100 * GIB, "command": "train.py", "user": "me", "run": "r", "ours": True},))), "oom.gpu"),
    ("oom.gpu-fragmentation", end(NEARLY), "oom.gpu"),
    ("oom.gpu-fragmentation", end(OWN_UNDER_ANOTHER_PID), "oom.gpu"),
    # somebody else was killed for memory, not this pid
    ("oom.host", end(code=-9, around=ExitContext(kernel=(KILLED_LINE.replace("100", "1001"),))), "rank.killed"),
    ("oom.host", end(code=3, oom_killed=True), "rank.exit"),
    ("gpu.xid", end(err("KeyError", "'labels'"), around=ExitContext(kernel=(XID.format(79, "GPU has fallen off the bus."),))), "rank.exception"),
    ("gpu.xid", end(cuda("unspecified launch failure"), around=ExitContext(kernel=(XID.format(43, "Reset Channel"),))), "gpu.launch-failure"),
    ("gpu.lost", end(err("RuntimeError", "unknown error in the tokenizer")), "rank.exception"),
    ("gloo.connection", end(err("ConnectionRefusedError", "[Errno 111] Connection refused"), label="CPU0"), "rank.exception"),
    ("gloo.connection", end(err("RuntimeError", "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), label="CPU0"), "rank.exception"),
    ("nccl.version", end(nccl("invalid usage", INVALID, "Invalid root 9 (root should be in the 0..2 range)")), "rank.exception"),
    ("nccl.cuda", end(nccl("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.", "Cuda failure 700 'an illegal memory access was encountered'")), "gpu.illegal-access"),
    ("data.no-space", end(nccl("unhandled system error", SYSTEM, "Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes, error: No space left on device (28)")), "nccl.shm"),
    ("data.shm", end(code=-7, around=ExitContext(shm_free=60 * GIB, shm_total=64 * GIB)), "rank.crash"),
    ("data.file-missing", end(err("FileNotFoundError", "[Errno 2] No such file or directory: 'ninja'", SUBPROCESS)), "rank.exception"),
    ("data.corrupt", end(err("UnpicklingError", "Weights only load failed.\nWeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was not an allowed global", module="_pickle")), "rank.exception"),
    ("data.corrupt", end(err("EOFError", "Ran out of input")), "rank.exception"),
    ("data.corrupt", end(err("JSONDecodeError", "Expecting value: line 1 column 1 (char 0)", JSON_LOAD.format("loads"))), "rank.exception"),
    ("data.permission", end(err("PermissionError", "[Errno 1] Operation not permitted")), "rank.exception"),
    ("env.shadowed", end(RankError("ImportError", "cannot import name 'f' from 'utils' (/x/utils.py)", "/x/t.py", 1, "<module>", module_file="/x/utils.py")), "env.import"),
    ("env.version", end(err("TypeError", "main() missing 1 required positional argument: 'version'")), "rank.exception"),
    ("env.version", end(err("ValueError", "this model requires a version of you that sleeps")), "rank.exception"),
    ("host.processes", end(err("BlockingIOError", "[Errno 11] Resource temporarily unavailable")), "rank.exception"),
    ("torch.device-mismatch", end(err("ValueError", "no device for rank 3 is free")), "rank.exception"),
    ("torch.device-mismatch", end(cuda("invalid device ordinal")), "gpu.ordinal"),
    ("torch.shape-mismatch", end(err("ValueError", "the shape of rank 1 differs")), "rank.exception"),
    ("torch.state-dict", end(err("RuntimeError", "PytorchStreamReader failed reading zip archive: not a ZIP archive, while loading state_dict")), "data.corrupt"),
]  # fmt: skip


def test_a_failed_check_of_the_number_of_ranks_says_how_many_there_are_and_which_option_sets_it() -> None:
    trace = '  File "t.py", line 9, in check\n    assert dist.get_world_size() == 4\nAssertionError'
    found = verdict(end(err("AssertionError", "", trace)))
    assert found.cause == "rank.exception" and "--nproc-per-node" in found.fix[0]
    other = verdict(end(err("AssertionError", "", "assert loss > 0\nAssertionError")))
    assert not any("--nproc-per-node sets" in line for line in other.fix)


@pytest.mark.parametrize(
    ("file", "checkpoint", "pointer"),
    [("/x/rows.jsonl", False, True), ("/x/a.pt", True, True), ("/x/a.npy", False, False)],
)
def test_advice_about_a_damaged_file_is_about_files_of_its_kind(file: str, checkpoint: bool, pointer: bool) -> None:
    message = "Failed to read all data for array. Expected (5000,) = 5000 elements"
    found = verdict(end(RankError("ValueError", message, "/x/t.py", 1, "load", "", files=(file,))))
    text = " ".join(found.fix)
    assert (file in text, "a checkpoint:" in text, "git-lfs" in text) == (True, checkpoint, pointer)


def test_advice_for_one_message_of_a_cause_is_left_out_for_the_others() -> None:
    twice = verdict(
        end(
            err("RuntimeError", "Trying to backward through the graph a second time (or directly access saved tensors)")
        )
    )
    assert any(".detach() it" in line for line in twice.fix) and not any("find_unused" in line for line in twice.fix)
    half = verdict(end(err("RuntimeError", "\"addmm\" not implemented for 'Half'")))
    assert any("bfloat16" in line for line in half.fix)
    other = verdict(end(err("RuntimeError", "expected scalar type Half but found Float")))
    assert other.fix and not any("bfloat16" in line for line in other.fix)


def test_a_summary_names_the_line_of_an_exception_unless_it_was_only_noticed_there() -> None:
    used = verdict(
        end(
            err(
                "DistNetworkError",
                "The server socket has failed to listen: EADDRINUSE, port: 29500",
                module="torch.distributed",
            )
        )
    )
    assert used.cause == "net.port-in-use" and used.summary.count("train.py:7") == 1
    asynchronous = verdict(end(cuda("an illegal memory access was encountered")))
    assert asynchronous.cause.startswith("gpu.") and "train.py:7" not in asynchronous.summary


@pytest.mark.parametrize(
    ("how", "present", "absent"),
    [("Killed", "ulimit -t", "used after a fork"), ("Segmentation fault", "used after a fork", "SIGKILL")],
)
def test_advice_about_a_dead_worker_is_about_the_signal_that_ended_it(how: str, present: str, absent: str) -> None:
    found = verdict(end(err("RuntimeError", f"DataLoader worker (pid 5) is killed by signal: {how}.")))
    text = " ".join(found.fix)
    assert found.cause == "data.worker-died" and present in text and absent not in text
    assert "probably" not in text, "nothing is known about the host's memory"


MISUSES: list[tuple[str, str]] = [
    ("torch.device-mismatch", "torch.ones(2, 2) + torch.ones(2, 2, device='meta')"),
    ("torch.dtype-mismatch", "torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.float64)"),
    ("torch.dtype-mismatch", "torch.nn.Linear(2, 2)(torch.ones(2, 2, dtype=torch.float16))"),
    ("torch.dtype-mismatch", "torch.nn.Conv1d(2, 2, 1)(torch.ones(1, 2, 2, dtype=torch.float16))"),
    ("torch.dtype-mismatch", "torch.nn.Embedding(2, 2)(torch.ones(2))"),
    ("torch.dtype-mismatch", "torch.nn.functional.cross_entropy(torch.ones(2, 2), torch.zeros(2, dtype=torch.int32))"),
    ("torch.dtype-mismatch", "torch.ones(2, dtype=torch.int64).add_(torch.ones(2))"),
    ("torch.dtype-mismatch", "torch.ones(2, 2).gather(0, torch.zeros(1, 2))"),
    ("torch.dtype-mismatch", "torch.ones(2)[torch.ones(1)]"),
    ("torch.shape-mismatch", "torch.ones(2, 3) @ torch.ones(2, 2)"),
    ("torch.shape-mismatch", "torch.ones(2, 3) + torch.ones(2, 2)"),
    ("torch.shape-mismatch", "torch.cat([torch.ones(2, 3), torch.ones(2, 2)])"),
    ("torch.shape-mismatch", "torch.ones(2, 3).view(4, 2)"),
    ("torch.shape-mismatch", "torch.stack([torch.ones(2), torch.ones(3)])"),
    ("torch.shape-mismatch", "torch.ones(2, 3).expand(4, 3)"),
    ("torch.shape-mismatch", "torch.nn.functional.cross_entropy(torch.ones(2, 2), torch.zeros(3, dtype=torch.int64))"),
    ("torch.shape-mismatch", "torch.nn.LayerNorm(3)(torch.ones(2, 2))"),
    ("torch.shape-mismatch", "torch.nn.Conv1d(2, 2, 1)(torch.ones(1, 3, 2))"),
    ("torch.state-dict", "torch.nn.Linear(2, 2).load_state_dict({})"),
    ("torch.state-dict", "torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(2, 3).state_dict())"),
    ("torch.state-dict", "sgd(ones).load_state_dict(sgd(ones, torch.ones(2, requires_grad=True)).state_dict())"),
    ("torch.autograd", "[loss.backward() for _ in range(2)]"),
    ("torch.autograd", "ones.exp().add_(1).sum().backward()"),
    ("torch.autograd", "torch.ones(1).backward()"),
    ("torch.autograd", "ones.add_(1)"),
    ("torch.autograd", "(ones * 2).backward()"),
]


@pytest.mark.parametrize(("cause", "code"), MISUSES, ids=[f"{cause}-{n}" for n, (cause, _) in enumerate(MISUSES)])
def test_what_the_program_does_wrong_with_tensors_is_not_tried_again(cause: str, code: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    ones = torch.ones(2, requires_grad=True)
    known = {
        "torch": torch,
        "ones": ones,
        "loss": (ones * ones).sum(),
        "sgd": lambda *weights: torch.optim.SGD(list(weights)),
    }
    with pytest.raises(Exception) as raised:
        eval(code, known)
    error = raised.value
    found = verdict(end(err(type(error).__name__, str(error), f"{type(error).__name__}: {error}")))
    assert (found.cause, found.retryable) == (cause, False), (found.summary, str(error))
    assert found.fix and found.evidence and "train.py:7" in found.summary


@pytest.mark.parametrize(("wrong", "ended", "right"), NEAR, ids=[f"{case[0]}-{n}" for n, case in enumerate(NEAR)])
def test_near_misses(wrong: str, ended: RankExit, right: str) -> None:
    found = verdict(ended)
    assert found.cause == right != wrong, found.summary


@pytest.mark.parametrize(
    ("own", "cause"),
    [
        # said in torch's and gloo's own words, and yet no echo: a peer's end can't cause these
        (end(code=-6, rank=1, label="CPU1", tail=SHAPE), "gloo.shape"),
        (end(nccl("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.", "Cuda failure 1 'invalid argument'"), rank=1), "nccl.cuda"),
        (end(nccl("invalid usage", INVALID, "Bootstrap : no socket interface found"), rank=1), "nccl.interface"),
        (end(code=-6, rank=1, tail="Process group watchdog thread terminated with exception: CUDA error: unspecified launch failure\nSome NCCL operations have failed or timed out\n"), "gpu.launch-failure"),
    ],
)  # fmt: skip
def test_a_ranks_own_network_trouble_is_no_echo(own: RankExit, cause: str) -> None:
    """The peer that lost its connection is seen first."""
    found = verdict(end(ECHO, time=4.9, label="CPU0"), own)
    assert (found.rank, found.cause) == (1, cause)


def test_a_start_that_fails_is_the_echo_of_a_rank_that_failed_by_itself() -> None:
    waited = end(
        err(
            "DistStoreError",
            "Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
            module="torch.distributed",
            at=4.0,
        ),
        time=4.0,
    )
    found = verdict(waited, end(err("ValueError", "boom"), rank=1))
    assert (found.rank, found.cause) == (1, "rank.exception")


def test_memory_nobody_owns_up_to_may_be_another_rank_s_of_the_same_card() -> None:
    assert verdict(end(UNSEEN), end(rank=1, code=None, label="GPU1")).cause == "oom.gpu-foreign"
    assert verdict(end(UNSEEN), end(rank=1, code=None, label="GPU0")).cause == "oom.gpu"


def test_the_allocators_numbers() -> None:
    refused = parse_out_of_memory(PIECES.message)
    assert refused is not None
    assert (refused.needed, refused.free, refused.unused) == (int(1.5 * GIB), int(336.56 * 2**20), int(7.77 * GIB))
    mine = parse_out_of_memory(OWN_UNDER_ANOTHER_PID.message)
    assert mine is not None and mine.own == int(22.29 * GIB) and mine.others == ()
    several = parse_out_of_memory(
        FOREIGN.message.replace("Process 727", "Process 9 has 2.00 KiB memory in use. Process 727")
    )
    assert (
        several is not None and several.others == ((9, 2048), (727, int(100.51 * GIB))) and several.own == 518 * 2**20
    )
    assert parse_out_of_memory("CUDA error: out of memory") is None


def test_fixes_are_in_order_and_repeat_no_mistake_of_the_field_notes() -> None:
    order = ["loss", "checkpointing", "micro-batch", "8-bit optimizer", "FSDP", "sequence"]
    fixes = CATALOGUE["oom.gpu"].fix
    assert all(word in fix for word, fix in zip(order, fixes, strict=True))
    assert "expandable_segments" in CATALOGUE["oom.gpu-fragmentation"].fix[0]
    assert verdict(end(NEARLY)).fix[0].startswith("PYTORCH_ALLOC_CONF")
    assert "stoker stop 20260101-serve" in verdict(end(FOREIGN, around=HELD)).fix[0]
    everything = "\n".join(fix for one in CATALOGUE.values() for fix in one.fix)
    assert not re.search(
        r"pkill|fuser|killall|fewer accumulation|LoRA rank|load_in_8bit|cuda-toolkit|NCCL_ALGO|NCCL_PROTO|setrlimit\(RLIMIT_AS, ",
        everything,
    )


def test_ranks_that_went_different_ways_are_looked_for_at_the_places_of_both() -> None:
    """The one that went on stands at its next call; the condition that the other skipped it by is where that one is."""
    parties = (
        ((1,), "gloo:all_reduce of shape [64]", "skip.py:11"),
        ((0,), "gloo:all_reduce of shape [1]", "skip.py:14"),
    )
    parted = Stall("diverged", 1, (1,), (0,), "skip.py:11", backend="gloo", parties=parties)
    assert make_stall_report(parted, "CPU1", "they wait for each other")["fix"][0].startswith(
        "look at skip.py:11, and at skip.py:14: a branch that depends on the rank"
    )
    alike = replace(parted, parties=tuple((*party[:2], "skip.py:11") for party in parties))
    assert make_stall_report(alike, "CPU1", "they wait for each other")["fix"][0].startswith(
        "look at skip.py:11: a branch"
    )
    left = verdict(end(code=0), end(err("RuntimeError", "Connection closed by peer"), rank=1, time=6.0))
    assert left.cause == "rank.early-exit" and "under an `if rank`" in left.fix[1]


def test_every_cause_is_complete_and_has_a_case() -> None:
    cause_docs.make_page()
    assert all(one.description and one.seen and one.description.endswith(".") for one in CATALOGUE.values())
    read_off = {one.id for one in CATALOGUE.values() if one.explain is not None and not one.id.startswith("rank.")}
    assert read_off - {case[0] for case in CASES} - {cause for cause, _ in MISUSES} == set()


def test_every_cause_that_stoker_can_name_is_in_the_catalogue() -> None:
    cause_docs.make_page()
    named = set()
    for path in (ROOT / "src" / "stoker").rglob("*.py"):
        named |= set(
            re.findall(r'(?:cause=|"cause": |broken\(|Verdict\("\w+", )"([a-z]+(?:\.[a-z-]+)?)"', path.read_text())
        )
    assert len(named) > 15 and named - CATALOGUE.keys() == set()


def test_the_page_is_current() -> None:
    # In a process of its own: the order of the causes is that in which their modules were imported.
    page = subprocess.run(
        [sys.executable, "-m", cause_docs.__name__], capture_output=True, check=True, text=True
    ).stdout
    assert all(f"### {id}\n" in page for id in CATALOGUE)
    assert (ROOT / "docs" / "verdicts.md").read_text() == page, (
        "python -m stoker.control.verdict.cause_docs > docs/verdicts.md"
    )


PLAIN = """
import json, os, resource, subprocess, sys, threading, time
how = sys.argv[1]
if os.getuid() == 0 and how in ("permission", "thread"): os.setuid(65534)
if how == "missing": open("/data/train.bin")
if how == "full": open("/dev/full", "wb", 0).write(b"x")
if how == "files":
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    kept = [open("/dev/null") for _ in range(40)]
if how == "permission": open("/etc/shadow")
if how == "memory": bytearray(10**15)
if how == "address":
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(2 << 30)
if how == "json":
    open("config.json", "w").write('{"a"')
    json.load(open("config.json"))
if how == "thread":
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    threading.Thread(target=time.sleep, args=(1,)).start()
if how == "program": subprocess.run(["no-such-program"])
if how == "library": __import__("ctypes").CDLL("libnothere.so.12")
if how == "printed":
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", flush=True)
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("missing", "data.file-missing"), ("full", "data.no-space"), ("files", "data.too-many-files"), ("permission", "data.permission"),
        ("memory", "oom.host-allocation"), ("address", "oom.host-allocation"), ("json", "data.corrupt"), ("thread", "host.processes"),
        ("program", "rank.exception"), ("library", "env.version"), ("printed", "oom.gpu"),
    ],
)  # fmt: skip
def test_provoked(stoker: Stoker, how: str, cause: str) -> None:
    stoker.cwd.chmod(0o777)
    done = stoker("run", "--nproc-per-node", "1", stoker.script("bad.py", PLAIN), how)
    assert done.verdict["cause"] == cause, done.verdict["summary"]


@pytest.mark.parametrize("by", ["the script", "the shell"])
def test_an_address_space_limit_is_named_and_the_host_is_not_blamed(stoker: Stoker, by: str) -> None:
    script = stoker.script(
        "bad.py", PLAIN if by == "the script" else "import time; time.sleep(0.1); bytearray(20 << 30)\n"
    )
    limit = 1 << 30 if by == "the script" else 5 << 30
    if by == "the script":
        done = stoker("run", "--nproc-per-node", "1", script, "address")
    else:
        words = f"ulimit -v {limit >> 10}; exec {sys.executable} -m stoker run --nproc-per-node 1 {script}"
        subprocess.run(["bash", "-c", words], cwd=stoker.cwd, env=stoker.environment(), check=False)
        done = stoker.result(1)
    told = done.verdict
    assert told["cause"] == "oom.host-allocation" and format_bytes(limit) in told["summary"], told
    assert "RLIMIT_AS" in told["summary"] and "ulimit -v" in told["summary"] and "bad.py:" in told["summary"]
    assert "ulimit -v unlimited" in told["fix"][0] and not any("free -h" in line for line in told["fix"]), told["fix"]


def test_a_refused_allocation_without_a_limit_says_nothing_of_limits(stoker: Stoker) -> None:
    done = stoker("run", "--nproc-per-node", "1", stoker.script("bad.py", PLAIN), "memory")
    assert done.verdict["cause"] == "oom.host-allocation" and "ulimit" not in json.dumps(done.verdict), done.verdict


KERNELS = ExitContext(kernel=("Out of memory: Killed process 100 (python3) total-vm:9kB",))
LM_TRACE = '  File "model.py", line 9, in forward\n    return F.cross_entropy(logits, targets)\n'


def test_out_of_memory_says_where_and_advises_only_what_the_program_has() -> None:
    plain = verdict(end(FULL))
    assert "train.py:7" in plain.summary, "the line that ran out is in the verdict's first line"
    assert not re.search("logits|sequence|8-bit|checkpointing|loader", " ".join(plain.fix)), plain.fix
    lm = verdict(end(replace(FULL, traceback=LM_TRACE)))
    assert (
        re.search("logits", " ".join(lm.fix)) and re.search("sequence", " ".join(lm.fix)) and "FSDP" in " ".join(lm.fix)
    )
    alone = judge(Evidence(1, (end(replace(FULL, traceback=LM_TRACE)),)))
    assert "FSDP" not in " ".join(alone.fix), "there are no ranks to shard over"
    stepped = verdict(end(FULL, steps=5))
    assert "8-bit optimizer" in " ".join(stepped.fix) and "logits" not in " ".join(stepped.fix)


def test_a_rank_that_the_kernel_killed_is_where_the_suspicion_had_seen_it() -> None:
    stall = Stall("spin", 0, where="load.py:41, in read_all")
    killed = end(code=-9, around=KERNELS)
    found = judge(Evidence(1, (killed,), stall=stall))
    assert found.cause == "oom.host" and "load.py:41, in read_all" in found.summary
    assert "load.py" not in judge(Evidence(2, (killed,), stall=replace(stall, rank=1))).summary, "another rank's line"
    assert not re.search("worker|fewer ranks", " ".join(found.fix)), "it had neither workers nor other ranks"
    workers = judge(Evidence(2, (replace(killed, around=replace(KERNELS, loader_workers=4)),)))
    assert re.search("fewer data-loader workers", " ".join(workers.fix)) and "4 data-loader workers" in str(
        workers.evidence
    )


WORKERS = """
import sys, time, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, index): time.sleep(0.1); return index
def main():
    kept = []
    for batch in torch.utils.data.DataLoader(Data(), num_workers=int(sys.argv[1])):
        kept.append(b"x" * 20_000_000)
if __name__ == "__main__": main()
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_fewer_loader_workers_are_advised_where_there_are_some(stoker: Stoker, workers: int) -> None:
    pytest.importorskip("torch")
    words = ("--nproc-per-node", "1", "--ram-limit", "900MB", stoker.script("grows.py", WORKERS), str(workers))
    told = stoker("run", *words).verdict
    assert told["cause"] == "oom.ram-limit", told
    assert ("data-loader workers" in " ".join(told["fix"])) == bool(workers), told["fix"]


def test_a_full_disk_is_named_with_what_is_complete() -> None:
    line = (
        "the checkpoint of step 40 was not written in /data/runs/r/checkpoints: no space left: rank-00000.safetensors needs"
        " 6.0 MB, 0.4 MB are free in /data/runs/r/checkpoints; the last good one is step-00000010"
    )
    tail = f"{line}\nINFO | [CPU 0] wrote /data/runs/r/hf: 2.0 MB of float32 as LlamaForCausalLM\n"
    disks = (("/", 0, 10**10), ("/data", 4 * 10**5, 14 * 10**6), ("/other", 0, 10**9))
    full = end(code=73, tail=tail, around=ExitContext(full_disks=disks))
    saved = SavedCheckpoint("/data/runs/r/checkpoints/step-00000010", 1.0)
    found = judge(Evidence(1, (full,), checkpoint=saved))
    assert found.cause == "data.no-space" and "/data/runs/r/checkpoints" in found.summary
    assert "full: /data (" in found.summary and "/other" not in found.summary, "the file system that holds the folder"
    assert "checkpoints/step-00000010" in found.summary and "r/hf" in found.summary, "both are complete"
    assert "/data/runs/r/checkpoints" in found.fix[0]
    assert "incomplete" not in " ".join(found.fix), (
        "the checkpoint under way is gone already: nothing of it is left to avoid"
    )
    nothing = judge(Evidence(1, (replace(full, tail=line),)))
    assert "complete:" not in nothing.summary and "incomplete" in " ".join(nothing.fix)
    half = judge(
        Evidence(1, (replace(full, tail=line),), checkpoint=SavedCheckpoint("/data/runs/r/checkpoints/7.pt", 1.0))
    )
    assert "7.pt" not in half.summary, "a file in place may be the one whose write failed"


def test_a_write_that_names_no_file_has_the_full_file_system_named(stoker: Stoker) -> None:
    if reason := cannot("root"):
        pytest.skip(reason)
    text = "file = open('/mnt/x', 'wb', buffering=0)\nfor _ in range(64): file.write(bytes(1_000_000))\n"
    words = f"mount -t tmpfs -o size=4m tmpfs /mnt && {sys.executable} -m stoker run --nproc-per-node 1 {stoker.script('full.py', text)}"
    subprocess.run(["unshare", "--mount", "bash", "-c", words], cwd=stoker.cwd, env=stoker.environment(), check=False)
    told = stoker.result(1).verdict
    assert told["cause"] == "data.no-space" and "full: /mnt (" in told["summary"], told


TORCH = """
import os, signal, sys, torch, torch.distributed as dist
how, rank = sys.argv[1], int(os.environ["RANK"])

class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        if how == "killed": os.kill(os.getpid(), signal.SIGKILL)
        open("/data/shard-3.bin")

def main():
    if how == "cut":
        torch.save({"a": torch.zeros(1000)}, "c.pt")
        os.truncate("c.pt", 2000)
        torch.load("c.pt")
    if how in ("killed", "missing"): list(torch.utils.data.DataLoader(Data(), num_workers=1))
    if how == "interface": os.environ["GLOO_SOCKET_IFNAME"] = "eth77"
    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1_000_000 if rank else 10))

if __name__ == "__main__": main()
"""


@pytest.mark.parametrize(
    ("how", "ranks", "cause"),
    [
        ("cut", 1, "data.corrupt"),
        pytest.param("killed", 1, "data.worker-died", marks=at_length),
        pytest.param("missing", 1, "data.file-missing", marks=at_length),
        pytest.param("interface", 1, "gloo.interface", marks=at_length),
        ("shape", 2, "hang.shape-mismatch"),
    ],
)
def test_provoked_with_torch(stoker: Stoker, how: str, ranks: int, cause: str) -> None:
    pytest.importorskip("torch")
    done = stoker.torch("run", "--nproc-per-node", str(ranks), stoker.script("bad.py", TORCH), how)
    assert done.verdict["cause"] == cause, done.verdict["summary"]


def test_a_lost_server_of_the_scripts_own_is_no_echo_of_a_stall() -> None:
    """A tracker's connection breaks on rank 0 while rank 1 sleeps: rank 0 failed by itself, whoever else stands still."""
    lost = end(
        err(
            "ConnectionError",
            "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
            module="requests.exceptions",
        )
    )
    stall = Stall("sleep", 1, (1,), (0,), "train.py:3, in f", "it is sleeping")
    assert judge(Evidence(2, (lost,), stall=stall)).cause == "rank.exception"
    echo = end(err("RuntimeError", "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"))
    assert judge(Evidence(2, (echo,), stall=stall)).cause == "hang.sleep"


def test_stop_rules_are_causes_after_which_another_attempt_would_not_help() -> None:
    assert not any(CATALOGUE[rule].retryable for rule in STOP_RULES)
