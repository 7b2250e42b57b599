"""Names of environment variables, signals and marks that cross a process boundary."""

from __future__ import annotations

RUN_ID = "STOKER_RUN_ID"
RUN_DIR = "STOKER_RUN_DIR"
RUN_ORIGIN = "STOKER_RUN_ORIGIN"  # which agent started the rank, and where (control/machine/run_origin.py)
KEEP = "STOKER_KEEP"  # set by a user inside a rank: what has it is not stopped when the run ends
HOST = "STOKER_HOST"  # the host's name in the hosts file, of a run with several: two of them may be one machine
TERMINAL = "STOKER_TERMINAL"  # 1: somebody watches the launcher's terminal: rank 0 may draw a bar
EARLY_CONTEXT = (
    "STOKER_EARLY_CONTEXT"  # 1: `stoker train` uses GPUs: a rank makes its CUDA context while it imports torch
)
PLOTS = "STOKER_PICTURES"  # 0: `stoker train` leaves no loss.png
MACHINE = "STOKER_MACHINE"  # a recorded machine (JSON) that stands in for the real one
GPU_LOCKS = "STOKER_GPU_LOCKS"  # the folder of the GPUs' lock files, where it is not /tmp/stoker-gpu-locks
GPU_LENDER = "STOKER_GPU_LENDER"  # a pid above this process: it holds GPU locks for the runs it starts
JOB = "STOKER_JOB"  # the run of which this one is a role
ROLE_ENV = "STOKER_GIVEN"  # a role's own variables, as JSON: command lines are visible to all users
PASSED_OPTIONS = "STOKER_HANDED"  # options of a `stoker run` that may hold secrets, as JSON, for the same reason
JOB_PID = "STOKER_PARENT"  # a pid: this `stoker run` is a role of that process's job, and ends when it is killed
RDZV_SECRET = "STOKER_RDZV_SECRET"  # what machines started by hand prove to know where they meet. No rank is given it
RDZV_SECRET_FILE = "STOKER_RDZV_SECRET_FILE"
PY_SPY = "STOKER_PY_SPY"  # the py-spy program; empty: none, stacks come from faulthandler
GPU_RANK = "GPU_RANK"
RECIPES = "stoker.training.recipes."  # how the modules begin that `stoker train` runs
# A phase (`stoker.phase`) that begins so: the rank waits for a server, and other ranks may wait for the rank.
WAITING_PHASE = "waiting for "
API_KEY = "STOKER_API_KEY"  # of `stoker serve`: what clients send
CHECKPOINT = "CHECKPOINT"  # rank 0's mark: one has been saved whole, the run may be ended and go on from there
PORT = "STOKER_PORT"  # the rank's own, with --port-base
SHARED_GPU = "STOKER_SHARED_GPU"  # 1: several ranks of this job use one GPU, which NCCL refuses
MICRO_BATCH_HALVINGS = "STOKER_MICRO_BATCH_HALVINGS"  # set after a recipe ran out of GPU memory
MEMORY_PLAN = "STOKER_MEMORY_PLAN"  # the memory plan that `stoker train` made before the start, as JSON, for its ranks

# What the shim reads and removes before the script can see it.
SHIM_BEATS = "STOKER_SHIM_BEATS"
SHIM_SOCKET = "STOKER_SHIM_SOCKET"
SHIM_FILES = "STOKER_SHIM_FILES"  # the base of layout.scratch_files
SHIM_TRACER = "STOKER_SHIM_TRACER"  # the agent's pid, where Yama asks whom a process allows to read its stack
SHIM_GATED = "STOKER_SHIM_GATED"
SHIM_PYTHONPATH = "STOKER_SHIM_PYTHONPATH"

# What a rank has because it is one: a new job that a rank submits is none.
RANK_VARIABLES = (RUN_ID, RUN_DIR, RUN_ORIGIN, KEEP, HOST, TERMINAL, SHARED_GPU, MICRO_BATCH_HALVINGS, MEMORY_PLAN,
             GPU_RANK, PORT, SHIM_BEATS, SHIM_SOCKET, SHIM_FILES, SHIM_TRACER, SHIM_GATED, SHIM_PYTHONPATH)  # fmt: skip

STOP_NOW_SIGNAL = 60  # SIGRTMAX - 4: `stoker stop --now` to the launcher
STACK_SIGNAL = 61  # SIGRTMAX - 3: asks a rank for its Python stacks. Not SIGUSR1: Lightning and schedulers have it
DETACH_SIGNAL = 59  # SIGRTMAX - 5: `stoker detach` tells a launcher to ignore the end of its terminal
