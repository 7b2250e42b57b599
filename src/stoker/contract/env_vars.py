"""Names of environment variables, signals and marks that cross a process boundary."""

from __future__ import annotations

RUN_ID = "STOKER_RUN_ID"
RUN_DIR = "STOKER_RUN_DIR"
RUN_ORIGIN = "STOKER_RUN_ORIGIN"  # which agent started the rank, and where (control/machine/run_origin.py)
KEEP = "STOKER_KEEP"  # a user sets it inside a rank: processes that have it are not stopped when the run ends
HOST = "STOKER_HOST"  # the host's name in the hosts file, if the run has several: two names may be one machine
TERMINAL = "STOKER_TERMINAL"  # 1: the launcher has a terminal, so rank 0 may draw a progress bar
# 1: `stoker train` uses GPUs, so a rank creates its CUDA context while it imports torch.
EARLY_CONTEXT = "STOKER_EARLY_CONTEXT"
PLOTS = "STOKER_PICTURES"  # 0: `stoker train` writes no loss.png
MACHINE = "STOKER_MACHINE"  # a recorded machine (JSON) that replaces the real one
GPU_LOCKS = "STOKER_GPU_LOCKS"  # the folder of the GPUs' lock files, instead of /tmp/stoker-gpu-locks
GPU_LENDER = "STOKER_GPU_LENDER"  # pid of an ancestor that holds GPU locks for the runs it starts
JOB = "STOKER_JOB"  # the run of which this one is a role
ROLE_ENV = "STOKER_GIVEN"  # a role's own variables, as JSON: all users can read command lines
PASSED_OPTIONS = "STOKER_HANDED"  # options of a `stoker run` that may hold secrets, as JSON, for the same reason
JOB_PID = "STOKER_PARENT"  # pid of the job of which this `stoker run` is a role; the run ends when the job is killed
RDZV_SECRET = "STOKER_RDZV_SECRET"  # machines started by hand prove to know it at their rendezvous; ranks never get it
RDZV_SECRET_FILE = "STOKER_RDZV_SECRET_FILE"
PY_SPY = "STOKER_PY_SPY"  # the py-spy program; if it is empty, stacks come from faulthandler
GPU_RANK = "GPU_RANK"
RECIPES = "stoker.training.recipes."  # prefix of the modules that `stoker train` runs
# Prefix of phases (`stoker.phase`) in which a rank waits for a server, and other ranks may wait for the rank.
WAITING_PHASE = "waiting for "
API_KEY = "STOKER_API_KEY"  # what clients of `stoker serve` send
CHECKPOINT = "CHECKPOINT"  # mark of rank 0: a checkpoint is complete, so the run may end and resume from it
PORT = "STOKER_PORT"  # the rank's own port, with --port-base
SHARED_GPU = "STOKER_SHARED_GPU"  # 1: several ranks of this job use one GPU, which NCCL refuses
MICRO_BATCH_HALVINGS = "STOKER_MICRO_BATCH_HALVINGS"  # set after a recipe ran out of GPU memory
MEMORY_PLAN = "STOKER_MEMORY_PLAN"  # the memory plan that `stoker train` made before the start, as JSON

# The shim reads these and removes them before the script can see them.
SHIM_BEATS = "STOKER_SHIM_BEATS"
SHIM_SOCKET = "STOKER_SHIM_SOCKET"
SHIM_FILES = "STOKER_SHIM_FILES"  # the base of layout.scratch_files
SHIM_TRACER = "STOKER_SHIM_TRACER"  # the agent's pid: under Yama a process must name whom it allows to read its stack
SHIM_GATED = "STOKER_SHIM_GATED"
SHIM_PYTHONPATH = "STOKER_SHIM_PYTHONPATH"

# Variables of a rank. A new job that a rank submits must not inherit them.
RANK_VARIABLES = (
    *(RUN_ID, RUN_DIR, RUN_ORIGIN, KEEP, HOST, TERMINAL, SHARED_GPU, MICRO_BATCH_HALVINGS, MEMORY_PLAN, GPU_RANK, PORT),
    *(SHIM_BEATS, SHIM_SOCKET, SHIM_FILES, SHIM_TRACER, SHIM_GATED, SHIM_PYTHONPATH),
)

STOP_NOW_SIGNAL = 60  # SIGRTMAX - 4: `stoker stop --now` to the launcher
STACK_SIGNAL = 61  # SIGRTMAX - 3: asks a rank for its Python stacks. Lightning and schedulers use SIGUSR1
DETACH_SIGNAL = 59  # SIGRTMAX - 5: `stoker detach` tells a launcher to ignore the end of its terminal
