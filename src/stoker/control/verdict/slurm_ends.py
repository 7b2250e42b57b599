"""Causes slurm.*: how Slurm ended a run, which `stoker why` and `stoker submit` learn from Slurm's commands."""

from __future__ import annotations

from stoker.contract.errors import EX_SOFTWARE
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import replace
from stoker.contract.slurm_job import SlurmJob
from stoker.control.verdict.catalogue import CATALOGUE, Cause, Family

# A run that Slurm ends shows one of these causes. Any other cause explains more than Slurm's state and stays the verdict.
_CONSEQUENCES = {
    "launch.stopped", "launch.killed", "host.agent-lost", "host.lost", "rank.signal", "rank.killed", "unknown", "gloo.connection", "gloo.timeout",
    "nccl.connection", "nccl.timeout", "nccl.system",
}  # fmt: skip

_OWN_CAUSE = "the run already had another cause: then that is the verdict, and Slurm's state is in its evidence"

family = Family(__name__, OWN=_OWN_CAUSE)
family.entries("""
slurm.allocation: The Slurm job can't be used as it was started.
  seen: before the start: srun started Stoker once per task, or a heterogeneous job, or a job without a node list
  fix: start `stoker run` once, in the job script or in salloc's shell, without srun
slurm.unreachable, again: Slurm is not responding.
  seen: scontrol or sbatch fails or takes more than 20 s
  fix: scontrol ping   # does the controller answer?
slurm.refused: sbatch refused the job.
  seen: before the start: a partition, an account or an amount that the cluster does not have or does not allow
  fix: sinfo, and sacctmgr show assoc user=$USER, list what you can use
slurm.cancelled: The job was cancelled.
  summary: Slurm job {id} was cancelled{by}
  seen: the job's state is CANCELLED: scancel, by its owner or an administrator
  unless: {OWN}
  fix: submit it again under the same --name: it resumes from its last checkpoint
slurm.timeout, again: The job reached its time limit.
  summary: Slurm job {id} reached its time limit{of_limit}
  seen: the job's state is TIMEOUT or DEADLINE
  unless: {OWN}
  fix: a longer --time, or stoker submit --requeue: the job saves before its end and resumes automatically
slurm.preempted, again: Another job took the nodes.
  summary: Slurm job {id} was preempted: another job took its nodes
  seen: the job's state is PREEMPTED
  unless: {OWN}
  fix: stoker submit --requeue resumes it when nodes are free again
slurm.node-fail, again: A node of the job failed.
  summary: a node of Slurm job {id} failed{nodes}
  seen: the job's state is NODE_FAIL or BOOT_FAIL
  unless: {OWN}
  fix: sinfo -R   # why nodes are down
  fix: submit it again; --sbatch-option=--exclude=NODE excludes a bad one
slurm.out-of-memory: The job used more host memory than it requested.
  summary: Slurm job {id} used more host memory than it had requested
  seen: the job's state is OUT_OF_MEMORY
  unless: {OWN}
  fix: a larger --mem (0: all of the node)
  fix: fewer data-loader workers, or fewer ranks per node
slurm.notice, again: Slurm gave notice that the job's end is near, and the run was stopped so that it could save.
  summary: Slurm gave notice that the end of job {id} is near{limit}; the run was stopped so that it could save
  seen: USR1 to the job's script, as long before the time limit as --signal-before says, or before a preemption
  unless: {OWN}
  fix: submit it again under the same --name, or once with --requeue: it resumes from its last checkpoint
  fix: a longer --time
slurm.requeued, again: The job is waiting in the queue again.
  summary: Slurm job {id} is waiting in the queue again{reason}
  seen: the job's state is PENDING, or REQUEUED, after a start
  unless: it was never started
  fix: nothing: it resumes from its last checkpoint when it starts again
slurm.no-run: The job ended before a run started in it.
  summary: job {id} ended ({state}) before a run started in it
  seen: the job is over, and no run directory belongs to it
  unless: it was cancelled while it waited: slurm.cancelled
  fix: read what the job printed; the path is in the evidence
""")

_CANCELLED, _NODE_FAIL, _NOTICE, _REQUEUED = "slurm.cancelled", "slurm.node-fail", "slurm.notice", "slurm.requeued"
_STATES = {
    "CANCELLED": _CANCELLED, "TIMEOUT": "slurm.timeout", "DEADLINE": "slurm.timeout", "PREEMPTED": "slurm.preempted", "NODE_FAIL": _NODE_FAIL,
    "BOOT_FAIL": _NODE_FAIL, "OUT_OF_MEMORY": "slurm.out-of-memory",
}  # fmt: skip


def format_state(job: SlurmJob) -> str:
    """Return one line with Slurm's state of the job."""
    line = f"Slurm: job {job.id} is {job.state}" + (f" ({job.reason})" if job.reason else "")
    if job.is_over:
        line += f", exit code {job.exit_code}" + (f", signal {job.signal}" if job.signal else "")
    line += f", restarted {job.restarts} times" if job.restarts else ""
    return line + (f", on {job.nodes}" if job.nodes else "")


def refine_verdict(verdict: Verdict, job: SlurmJob) -> Verdict:
    """Return Slurm's verdict if Slurm ended the run, else the run's verdict with Slurm's state as evidence."""
    cause_id = cause_of(job)
    if not cause_id or verdict.status == "completed" or verdict.cause not in _CONSEQUENCES:
        return replace(verdict, evidence=(*verdict.evidence, format_state(job)))
    cause = CATALOGUE[cause_id]
    return replace(
        verdict,
        status="failed" if cause_id in (_NODE_FAIL, "slurm.out-of-memory") else "stopped",
        cause=cause_id,
        summary=_format_summary(cause, job),
        rank=None,
        host=None,
        gpu=None,
        retryable=cause.retryable,
        fix=cause.fix,
        evidence=(format_state(job), verdict.summary, *verdict.evidence),
    )


def make_verdict_without_run(job: SlurmJob, evidence: tuple[str, ...] = ()) -> Verdict:
    """Return the verdict of a job that ended before a run started in it."""
    cause = CATALOGUE[cause_of(job) or "slurm.no-run"]
    return Verdict(
        "stopped" if cause.id in (_CANCELLED, _NOTICE, _REQUEUED) else "failed",
        cause.id,
        _format_summary(cause, job),
        job.code or (143 if cause.id == _CANCELLED else EX_SOFTWARE),
        evidence=(format_state(job), *evidence),
        retryable=cause.retryable,
        fix=cause.fix,
    )


def cause_of(job: SlurmJob) -> str:
    """Return the id of the cause if Slurm ended or requeued the job, or ""."""
    if job.restarts and job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
        return _REQUEUED
    return _STATES.get(job.state) or (_NOTICE if job.noticed and job.is_over and job.state != "COMPLETED" else "")


def _format_summary(cause: Cause, job: SlurmJob) -> str:
    limit = job.limit if job.limit != "UNLIMITED" else ""
    return cause.summary.format(
        id=job.id,
        state=job.state,
        by=f" by user {job.by}" if job.by else "",
        of_limit=f" of {limit}" if limit else "",
        limit=f" (time limit {limit})" if limit else "",
        nodes=f" (nodes {job.nodes})" if job.nodes else "",
        reason=f" ({job.reason})" if job.reason else "",
    )
