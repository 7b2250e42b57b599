"""The fault suite's table: which script, on how many ranks, and what the verdict has to be. The tests and benchmarks/faults.py read it.

A new fault is a script in this folder and a line here. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent

HANG_TIMEOUT = ("--hang-timeout", "10s")
KILLED, ABORTED, CRASHED, TERMINATED, OURS = 137, 134, 139, 143, 70


@dataclass(frozen=True)
class Case:
    name: str
    script: str
    ranks: int
    cause: tuple[str, ...]  # any of these is right; of a "slow" case: the cause of its straggler event
    rank: tuple[int | None, ...]  # the guilty one: any of these is right; None: nobody in particular
    exit_code: tuple[int, ...]
    kind: str  # crash | hang | slow | numbers | memory | launch | restart
    family: str  # CI runs one case of each
    args: tuple[str, ...] = ()  # more options for `stoker run`
    torchrun_args: tuple[str, ...] = ()
    script_args: tuple[str, ...] = ()
    around: tuple[str, ...] = ()  # the words for around.py before the launcher's
    needs: str = ""  # gpu | root | cgroup | safetensors
    torchrun: bool = True  # has a meaning under torchrun too
    attempts: int = 1
    says: str = ""  # a word that the verdict has to hold
    line: tuple[str, ...] = ()  # lines the summary has to name: marked `# line: NAME` in the script or in mistakes.py
    reason: str = ""  # why more than one cause is right
    ci: bool = False

    @property
    def places(self) -> list[str]:
        """`mistakes.py:97,` for each line that the summary has to name."""
        found = {}
        for path in (HERE / "mistakes.py", HERE / self.script):
            for number, text in enumerate(path.read_text().splitlines(), 1):
                _, marked, name = text.partition("  # line: ")
                if marked:
                    found[name] = f"{path.name}:{number},"
        return [found[name] for name in self.line]


def _crash(
    script: str, family: str, cause: str | tuple[str, ...], code: int, ranks: int = 2, ci: bool = False, **more: object
) -> Case:
    """Named after its script. Rank 1 does it, unless `more` says otherwise."""
    given = {"rank": (1,), "exit_code": (code,), "kind": "crash", **more}
    return Case(
        script.removesuffix(".py"),
        script,
        ranks,
        cause if isinstance(cause, tuple) else (cause,),
        family=family,
        ci=ci,
        **given,
    )  # type: ignore[arg-type]


def _hangs(
    script: str,
    family: str,
    cause: str | tuple[str, ...],
    ranks: tuple[int, ...] = (2, 4),
    ci: bool = False,
    **more: object,
) -> list[Case]:
    """The same on 2 and on 4 ranks. Stoker ends the job, so the code is ours."""
    given = {"rank": (1,), "exit_code": (OURS,), "kind": "hang", "args": HANG_TIMEOUT, **more}
    causes = cause if isinstance(cause, tuple) else (cause,)
    return [
        Case(
            f"{script.removesuffix('.py')}-{count}",
            script,
            count,
            causes,
            family=family,
            ci=ci and count == min(ranks),
            **given,
        )  # type: ignore[arg-type]
        for count in ranks
    ]


_EXCEPTIONS = [
    _crash("crash_exception.py", "exception", "rank.exception", 1, ci=True),
    _crash("crash_exception_everywhere.py", "exception", "rank.exception", 1, rank=(0, 1)),
    _crash("crash_exception_while_waited_for.py", "exception", "rank.exception", 1, ranks=4),
    _crash("crash_exception_in_worker.py", "exception", "rank.exception", 1),
    _crash("crash_own_excepthook.py", "exception", "rank.exception", 1),
    _crash("crash_spawned.py", "exception", "rank.exception", 1, ranks=1, rank=(0,), line=("spawned",)),
    _crash("crash_breakpoint.py", "exception", "rank.breakpoint", 1, rank=(0, 1), line=("breakpoint",)),
    _crash(
        "crash_full_tmp.py",
        "exception",
        "rank.exception",
        1,
        needs="root",
        around=("mount", "16m", "/mnt", "env", "TMPDIR=/mnt"),
        script_args=("/mnt",),
        line=("full-tmp",),
    ),
    _crash(
        "crash_import.py",
        "environment",
        "env.import",
        1,
        ci=True,
        args=("--max-restarts", "3"),
        torchrun_args=("--max-restarts", "3"),
    ),
    _crash("crash_syntax.py", "environment", "env.syntax", 1),
]

_TORCH = [
    _crash(
        "torch_device_mismatch.py",
        "torch",
        "torch.device-mismatch",
        1,
        args=("--max-restarts", "3"),
        torchrun_args=("--max-restarts", "3"),
        ci=True,
    ),
]

_EXITS = [
    _crash("crash_exit_code.py", "exit", "rank.exit", 3),
    _crash("crash_os_exit_zero.py", "exit", "rank.early-exit", OURS, ci=True),
    _crash("crash_sys_exit_zero.py", "exit", "rank.early-exit", OURS),
    _crash("crash_short_rank.py", "exit", "rank.early-exit", OURS),
]

_SIGNALS = [
    _crash("crash_sigkill.py", "signal", "rank.killed", KILLED, ci=True),
    _crash("crash_sigsegv.py", "signal", "rank.crash", CRASHED),
    _crash("crash_sigabrt.py", "signal", "rank.crash", ABORTED),
    _crash("crash_sigterm.py", "signal", "rank.signal", TERMINATED),
]

_HANGS = [
    *_hangs("hang_sleep.py", "hang", "hang.sleep", ci=True),
    *_hangs("hang_gil.py", "hang", "hang.gil"),
    *_hangs("hang_stopped.py", "stopped", "hang.stopped", ci=True),
    *_hangs("hang_spin.py", "hang", "hang.spin"),
    *_hangs("hang_lock.py", "hang", "hang.lock"),
    *_hangs("hang_fifo.py", "hang", "hang.io"),
    *_hangs("hang_socket.py", "hang", "hang.io"),
    *_hangs("hang_subprocess.py", "hang", "hang.child"),
    *_hangs("hang_d_state.py", "hang", "hang.disk"),
    *_hangs("hang_before_init.py", "hang", "hang.sleep"),
    *_hangs("hang_own_timeout.py", "hang", "hang.sleep", exit_code=(OURS, 1)),
    *_hangs("hang_worker.py", "worker", "hang.worker", ci=True),
    *_hangs("hang_worker_stopped.py", "worker", "hang.worker"),
]

# What ranks do to each other. Of two ranks that do different things for the first time nobody can say which is wrong: the verdict names both.
_BETWEEN_RANKS = [
    *_hangs("hang_op_mismatch.py", "mismatch", "hang.op-mismatch", ranks=(4,)),
    *_hangs("hang_op_mismatch.py", "mismatch", "hang.op-mismatch", ranks=(2,), rank=(None,), ci=True),
    *_hangs("hang_subgroup.py", "mismatch", "hang.sleep", ranks=(4,), rank=(3,)),
    *_hangs("hang_subgroup_order.py", "mismatch", "gloo.diverged", ranks=(4,)),
    *_hangs("hang_subgroup_order.py", "mismatch", "gloo.diverged", ranks=(2,), rank=(None,)),
    *_hangs("hang_rank_only.py", "mismatch", "hang.rank-only", ranks=(2,), rank=(0,)),
    *_hangs("hang_rank_only.py", "mismatch", "hang.rank-only", ranks=(4,), rank=(0,)),
    *_hangs("hang_unequal_barrier.py", "mismatch", "gloo.unequal-batches"),
    *_hangs(
        "hang_recv.py", "mismatch", "gloo.diverged", rank=(0, 1)
    ),  # one receives what the other never sends: the verdict names both
    _crash("crash_shape_smaller.py", "mismatch", "hang.shape-mismatch", ABORTED, ranks=4),
    _crash("crash_shape_larger.py", "mismatch", "hang.shape-mismatch", ABORTED, ranks=4, exit_code=(ABORTED, OURS, 1)),
    _crash("crash_extra_collective.py", "mismatch", "gloo.diverged", ABORTED, ranks=4),
]

_DATA = [
    _crash("data_worker_killed.py", "data", "data.worker-died", 1, ci=True),
    _crash("data_file_missing.py", "data", "data.file-missing", 1),
    _crash(
        "data_no_space.py",
        "data",
        "data.no-space",
        1,
        needs="root",
        around=("mount", "4m", "/mnt"),
        script_args=("/mnt",),
    ),
    _crash(
        "data_no_space_checkpoint.py",
        "data",
        "data.no-space",
        1,
        needs="root",
        around=("mount", "4m", "/mnt"),
        script_args=("/mnt",),
    ),
    _crash("data_too_many_files.py", "data", "data.too-many-files", 1),
    _crash("data_corrupt_safetensors.py", "data", "data.corrupt", 1, needs="safetensors"),
    _crash("data_corrupt_checkpoint.py", "data", "data.corrupt", 1),
    _crash(
        "data_shm.py",
        "data",
        "data.shm",
        OURS,
        kind="hang",
        args=HANG_TIMEOUT,
        needs="root",
        around=("mount", "1m", "/dev/shm"),
        exit_code=(OURS, 1),
    ),
    _crash("data_shm_bus_error.py", "data", "data.shm", 1, needs="root", around=("mount", "1m", "/dev/shm")),
]

_ON_NAN = ("--on-nan", "stop")
_NUMBERS = [
    _crash("numbers_beat_nan.py", "numbers", "nan.loss", OURS, kind="numbers", args=_ON_NAN, ci=True),
    _crash("numbers_printed_nan.py", "numbers", "nan.loss", OURS, kind="numbers", args=_ON_NAN, rank=(None,)),
    _crash("numbers_exploding.py", "numbers", "nan.exploding", OURS, kind="numbers", args=_ON_NAN, rank=(0, 1, None)),
]

_SLOW = [
    _crash("slow_data.py", "slow", "slow.data", 0, ranks=4, kind="slow"),
    _crash(
        "slow_cpu.py",
        "slow",
        ("slow.code", "slow.cpu"),
        0,
        kind="slow",
        ci=True,
        reason="it burns CPU at one line: which of both is seen depends on whether a core is free for it",
    ),
]

_MEMORY = [
    Case(
        "memory_cgroup",
        "memory_grows.py",
        2,
        ("oom.host",),
        (1,),
        (KILLED,),
        "memory",
        "memory",
        needs="cgroup",
        around=("cgroup", "1000m"),
    ),
    Case(
        "memory_ram_limit",
        "memory_grows.py",
        2,
        ("oom.ram-limit",),
        (1,),
        (OURS,),
        "memory",
        "memory",
        args=("--ram-limit", "1GB"),
        torchrun=False,
    ),
    _crash("memory_address_space.py", "memory", "oom.host-allocation", 1, kind="memory", ci=True),
    _crash("memory_allocator.py", "memory", "oom.host-allocation", 1, kind="memory"),
]

_AGAIN = ("--max-restarts", "3")
_RESTARTS = [
    _crash(
        "restart_crash_loop.py",
        "restart",
        "rank.exception",
        1,
        kind="restart",
        args=_AGAIN,
        torchrun_args=_AGAIN,
        attempts=2,
        says="deterministic",
        ci=True,
    ),
    _crash(
        "restart_once.py",
        "restart",
        "completed",
        0,
        kind="restart",
        args=_AGAIN,
        torchrun_args=_AGAIN,
        attempts=2,
        rank=(None,),
    ),
]

_LAUNCH = [
    _crash("launch_ignores_sigterm.py", "launch", "rank.exception", 1, kind="launch"),
    _crash("launch_setsid_helper.py", "launch", "rank.exception", 1, kind="launch", ci=True),
    _crash("launch_killed.py", "launch", "launch.killed", KILLED, kind="launch", rank=(None,), around=("kill",)),
    _crash("launch_port_taken.py", "launch", "net.port-in-use", 1, kind="launch"),
    _crash("launch_output_flood.py", "launch", "rank.exception", 1, kind="launch"),
    _crash("launch_long_message.py", "launch", "rank.exception", 1, kind="launch"),
]


def _gpu(script: str, cause: str, code: int, **more: object) -> Case:
    return _crash(script, "gpu", cause, code, ranks=1, needs="gpu", **{"rank": (0,), **more})  # type: ignore[arg-type]


_GPU = [
    _gpu("gpu_foreign_holder.py", "oom.gpu-foreign", 1, kind="memory", around=("hold", "0.8")),
    _gpu("gpu_too_big.py", "oom.gpu", 1, kind="memory"),
    _gpu("gpu_fragmentation.py", "oom.gpu-fragmentation", 1, kind="memory"),
    _gpu("gpu_assert.py", "gpu.assert", 1, exit_code=(1, ABORTED), ci=True),
    _gpu("gpu_illegal_access.py", "gpu.illegal-access", 1, exit_code=(1, ABORTED)),
    _gpu("gpu_endless_kernel.py", "hang.gpu-kernel", OURS, kind="hang", args=HANG_TIMEOUT),
    _gpu("gpu_killed_holding.py", "rank.killed", KILLED),
    Case(
        "gpu_duplicate",
        "gpu_duplicate.py",
        2,
        ("gpu.duplicate",),
        (0, 1, None),
        (1, ABORTED),
        "crash",
        "gpu",
        args=("--share-gpus",),
        needs="gpu",
    ),
    _gpu("gpu_ordinal.py", "gpu.ordinal", 1),
]

# Mistakes of programs in the styles people write: mistake -> (cause, exit codes, kind, the marked lines).
_MISTAKES: dict[str, tuple[str, tuple[int, ...], str, tuple[str, ...]]] = {
    "raises": ("rank.exception", (1,), "crash", ("raises",)),
    "shape": ("torch.shape-mismatch", (1,), "crash", ("shape",)),
    "crashes": ("rank.crash", (CRASHED,), "crash", ("crashes",)),
    "crashes-in-thread": ("rank.crash", (CRASHED,), "crash", ("crashes-in-thread",)),
    "killed": ("rank.killed", (KILLED,), "crash", ()),
    "leaves": ("rank.early-exit", (OURS,), "crash", ()),
    "exits": ("rank.exit", (3,), "crash", ()),
    "debugs": ("rank.breakpoint", (1,), "crash", ("debugs",)),
    "sleeps": ("hang.sleep", (OURS,), "hang", ("sleeps",)),
    "spins": ("hang.spin", (OURS,), "hang", ("spins",)),
    "waits-for-lock": ("hang.lock", (OURS,), "hang", ("waits-for-lock",)),
    "stops": ("hang.stopped", (OURS,), "hang", ()),
    # gloo ends a rank that receives more than it expects: whether that is the guilty one depends on the sizes.
    "extra-reduce": ("gloo.diverged", (ABORTED, 1), "crash", ("extra-reduce",)),
    "skips-reduce": ("gloo.diverged", (ABORTED, 1), "crash", ("skips-reduce",)),
    "extra-barrier": ("hang.op-mismatch", (OURS,), "hang", ("extra-barrier",)),
    "other-operation": ("hang.op-mismatch", (OURS,), "hang", ("other-operation",)),
    "first-time-apart": ("hang.op-mismatch", (OURS,), "hang", ("first-time-apart", "first-time-apart-others")),
    "groups-swapped": ("gloo.diverged", (OURS,), "hang", ("groups-swapped",)),
    "skips-pair": ("gloo.diverged", (OURS,), "hang", ("skips-pair",)),
    "skips-pair-once": ("gloo.diverged", (OURS,), "hang", ("skips-pair-once",)),
    "fewer-batches": ("gloo.unequal-batches", (OURS,), "hang", ("fewer-batches",)),
    "worker-killed": ("data.worker-died", (1,), "crash", ()),
    "workers-lost": ("data.worker-died", (1,), "crash", ()),
    "worker-raises": ("rank.exception", (1,), "crash", ("worker-raises",)),
    "worker-sleeps": ("hang.worker", (OURS,), "hang", ("worker-sleeps",)),
    "nan": ("nan.loss", (OURS,), "numbers", ()),
}
_NEEDS = {"hf": "transformers", "lightning": "lightning", "accelerate": "accelerate"}


def _style(style: str, mistake: str, guilty: int, ranks: int, ci: bool = False) -> Case:
    cause, codes, kind, line = _MISTAKES[mistake]
    # A loss that rank 0 prints for all ranks, or two ranks that part for the first time, accuse nobody.
    nobody = mistake == "nan" or (mistake == "first-time-apart" and ranks == 2)
    args = HANG_TIMEOUT if kind == "hang" else ()
    return Case(
        f"{style}_{mistake}-{guilty}of{ranks}",
        f"style_{style}.py",
        ranks,
        (cause,),
        (None,) if nobody else (guilty,),
        codes,
        kind,
        "style",
        args,
        script_args=(mistake, str(guilty)),
        needs=_NEEDS.get(style, ""),
        line=line,
        ci=ci,
    )


_STYLES = [
    *(_style("plain", *which) for which in [
        ("raises", 0, 2), ("raises", 2, 3), ("crashes", 0, 2, True), ("crashes-in-thread", 1, 2), ("killed", 0, 3), ("leaves", 0, 2), ("exits", 1, 2),
        ("debugs", 1, 2), ("sleeps", 0, 4), ("spins", 0, 2), ("waits-for-lock", 2, 3), ("stops", 1, 2), ("extra-reduce", 0, 2), ("extra-reduce", 1, 3),
        ("extra-barrier", 0, 2), ("extra-barrier", 3, 4), ("skips-reduce", 0, 2), ("skips-reduce", 1, 2, True), ("skips-reduce", 2, 3),
        ("other-operation", 0, 2), ("other-operation", 1, 3), ("first-time-apart", 0, 2), ("first-time-apart", 1, 2), ("first-time-apart", 0, 3),
        ("groups-swapped", 0, 2), ("groups-swapped", 3, 4), ("skips-pair", 0, 4), ("skips-pair", 3, 4), ("skips-pair-once", 2, 4),
        ("fewer-batches", 0, 2), ("fewer-batches", 2, 3), ("worker-killed", 1, 2), ("workers-lost", 0, 2), ("worker-raises", 0, 2), ("worker-sleeps", 0, 3),
    ]),
    *(_style("nanogpt", *which) for which in [
        ("raises", 0, 2), ("shape", 1, 2), ("skips-reduce", 0, 2), ("extra-barrier", 1, 2), ("fewer-batches", 0, 3), ("nan", 1, 2), ("sleeps", 2, 4),
    ]),
    *(_style("accelerate", *which) for which in [
        ("shape", 0, 2), ("skips-reduce", 1, 2), ("extra-reduce", 0, 3), ("fewer-batches", 1, 2), ("nan", 0, 2), ("worker-killed", 0, 2), ("sleeps", 1, 2),
    ]),
    *(_style("lightning", *which) for which in [
        ("raises", 0, 2), ("shape", 1, 2), ("crashes", 0, 2), ("extra-barrier", 0, 2), ("nan", 1, 2), ("sleeps", 1, 3), ("worker-raises", 1, 2),
    ]),
    *(_style("hf", *which) for which in [
        ("raises", 1, 2), ("shape", 0, 2), ("crashes", 1, 2), ("extra-barrier", 0, 2), ("skips-reduce", 1, 2), ("nan", 0, 2), ("sleeps", 0, 3),
        ("worker-killed", 1, 2),
    ]),
]  # fmt: skip

CASES: tuple[Case, ...] = (
    *_EXCEPTIONS, *_TORCH, *_EXITS, *_SIGNALS, *_HANGS, *_BETWEEN_RANKS, *_DATA, *_NUMBERS, *_SLOW, *_MEMORY, *_RESTARTS, *_LAUNCH, *_STYLES, *_GPU,
)  # fmt: skip
