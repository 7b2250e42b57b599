"""slurm.*: what the scheduler did to a run, asked of Slurm by `stoker why` and `stoker submit`."""

from __future__ import annotations

from stoker.contract.names import EX_SOFTWARE
from stoker.contract.shape import replace
from stoker.contract.shapes import Verdict
from stoker.contract.slurmjob import Job
from stoker.control.verdict.catalogue import Cause, entry

# What a run that was ended from outside looks like from inside. Anything else is the run's own cause, and stays it.
_CONSEQUENCES = {
    "launch.stopped", "launch.killed", "host.agent-lost", "host.lost", "rank.signal", "rank.killed", "unknown", "gloo.connection", "gloo.timeout",
    "nccl.connection", "nccl.timeout", "nccl.system",
}  # fmt: skip

_OWN = "the run had a cause of its own before: then that is the verdict, and Slurm's word is in its evidence"

entry(
    "slurm.allocation",
    "The Slurm job can't be used as it was started.",
    seen="before the start: srun started Stoker once per task, or a heterogeneous job, or a job without a node list",
    fix=("start `stoker run` once, in the job script or in salloc's shell, without srun",),
)
entry(
    "slurm.unreachable",
    "Slurm's own programs do not answer.",
    seen="scontrol or sbatch fails or takes more than 20 s",
    fix=("scontrol ping   # is the controller there?",),
    retryable=True,
)
entry(
    "slurm.refused",
    "sbatch did not take the job.",
    seen="before the start: a partition, an account or an amount the cluster does not have or does not allow",
    fix=("sinfo and sacctmgr show assoc user=$USER say what there is",),
)
CANCELLED = entry(
    "slurm.cancelled",
    "Somebody cancelled the job.",
    seen="the job's state is CANCELLED: scancel, by its owner or an administrator",
    contradicts=_OWN,
    fix=("submit it again under the same --name: it goes on from its last checkpoint",),
)
TIMEOUT = entry(
    "slurm.timeout",
    "The job's time was up.",
    seen="the job's state is TIMEOUT or DEADLINE",
    contradicts=_OWN,
    fix=("--time with more, or stoker submit --requeue: it saves before the end and goes on by itself",),
    retryable=True,
)
PREEMPTED = entry(
    "slurm.preempted",
    "Another job took the nodes.",
    seen="the job's state is PREEMPTED",
    contradicts=_OWN,
    fix=("stoker submit --requeue goes on when there is room again",),
    retryable=True,
)
NODE_FAIL = entry(
    "slurm.node-fail",
    "A node of the job failed.",
    seen="the job's state is NODE_FAIL or BOOT_FAIL",
    contradicts=_OWN,
    fix=(
        "sinfo -R   # why nodes are down",
        "submit it again; --sbatch-option=--exclude=NODE leaves a bad one out",
    ),
    retryable=True,
)
OUT_OF_MEMORY = entry(
    "slurm.out-of-memory",
    "The job used more host memory than it asked for.",
    seen="the job's state is OUT_OF_MEMORY",
    contradicts=_OWN,
    fix=("--mem with more (0: all of the node)", "fewer data-loader workers, or fewer ranks a node"),
)
NOTICE = entry(
    "slurm.notice",
    "Slurm gave notice that the job's end is near, and the run was stopped so that it could save.",
    seen="USR1 to the job's script, so long before the time limit as --signal-before says, or before a preemption",
    contradicts=_OWN,
    fix=(
        "submit it again under the same --name, or once with --requeue: it goes on from its last checkpoint",
        "--time with more",
    ),
    retryable=True,
)
REQUEUED = entry(
    "slurm.requeued",
    "The job waits in the queue again.",
    seen="the job's state is PENDING, or REQUEUED, after a start",
    contradicts="it was never started",
    fix=("nothing: it goes on from its last checkpoint when it starts again",),
    retryable=True,
)
NOT_STARTED = entry(
    "slurm.no-run",
    "The job ended and no run began in it.",
    seen="the job is over, and no run directory belongs to it",
    contradicts="it was cancelled while it waited: slurm.cancelled",
    fix=("what the job printed says why; its path is in the evidence",),
)

_STATES = {
    "CANCELLED": CANCELLED, "TIMEOUT": TIMEOUT, "DEADLINE": TIMEOUT, "PREEMPTED": PREEMPTED, "NODE_FAIL": NODE_FAIL, "BOOT_FAIL": NODE_FAIL,
    "OUT_OF_MEMORY": OUT_OF_MEMORY,
}  # fmt: skip


def word(job: Job) -> str:
    """Slurm's own, in one line."""
    said = f"Slurm: job {job.id} is {job.state}" + (f" ({job.reason})" if job.reason else "")
    if job.over:
        said += f", exit code {job.exit_code}" + (f", signal {job.signal}" if job.signal else "")
    return (
        said
        + (f", restarted {job.restarts} times" if job.restarts else "")
        + (f", on {job.nodes}" if job.nodes else "")
    )


def refined(verdict: Verdict, job: Job) -> Verdict:
    """The run's verdict with Slurm's word: instead of it where Slurm's act is what ended the run, else as evidence."""
    told = replace(verdict, evidence=(*verdict.evidence, word(job)))
    found = cause_of(job)
    if found is None or verdict.status == "completed" or verdict.cause not in _CONSEQUENCES:
        return told
    return replace(
        told,
        status="failed" if found in (NODE_FAIL, OUT_OF_MEMORY) else "stopped",
        cause=found.id,
        summary=_summary(found, job),
        rank=None,
        host=None,
        gpu=None,
        retryable=found.retryable,
        fix=found.fix,
        evidence=(word(job), verdict.summary, *verdict.evidence),
    )


def without_run(job: Job, evidence: tuple[str, ...] = ()) -> Verdict:
    """Of a job in which no run began."""
    found = cause_of(job) or NOT_STARTED
    summary = f"job {job.id} ended ({job.state}) before a run began in it"
    if found is not NOT_STARTED:
        summary = _summary(found, job)
    return Verdict(
        "stopped" if found in (CANCELLED, NOTICE, REQUEUED) else "failed",
        found.id,
        summary,
        job.code or (143 if found is CANCELLED else EX_SOFTWARE),
        evidence=(word(job), *evidence),
        retryable=found.retryable,
        fix=found.fix,
    )


def cause_of(job: Job) -> Cause | None:
    if job.restarts and job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
        return REQUEUED
    return _STATES.get(job.state) or (NOTICE if job.noticed and job.over and job.state != "COMPLETED" else None)


def _summary(found: Cause, job: Job) -> str:
    who = f" by user {job.by}" if job.by else ""
    return {
        "slurm.cancelled": f"Slurm job {job.id} was cancelled{who}",
        "slurm.timeout": (
            f"Slurm job {job.id} reached its time limit"
            + (f" of {job.limit}" if job.limit and job.limit != "UNLIMITED" else "")
        ),
        "slurm.preempted": f"Slurm job {job.id} was preempted: another job took its nodes",
        "slurm.node-fail": f"a node of Slurm job {job.id} failed" + (f" (nodes {job.nodes})" if job.nodes else ""),
        "slurm.out-of-memory": f"Slurm job {job.id} used more host memory than it had asked for",
        "slurm.notice": (
            f"Slurm job {job.id} was told that its end is near"
            + (f" (time limit {job.limit})" if job.limit and job.limit != "UNLIMITED" else "")
            + ", and stopped so that it could save"
        ),
        "slurm.requeued": f"Slurm job {job.id} waits in the queue again" + (f" ({job.reason})" if job.reason else ""),
    }[found.id]
