"""slurm.*: what the scheduler did to a run, asked of Slurm by `stoker why` and `stoker submit`."""

from __future__ import annotations

from stoker.contract.errors import EX_SOFTWARE
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import replace
from stoker.contract.slurm_job import SlurmJob
from stoker.control.verdict.catalogue import CATALOGUE, Cause, Family

# What a run that was ended from outside looks like from inside. Anything else is the run's own cause, and stays it.
_CONSEQUENCES = {
    "launch.stopped", "launch.killed", "host.agent-lost", "host.lost", "rank.signal", "rank.killed", "unknown", "gloo.connection", "gloo.timeout",
    "nccl.connection", "nccl.timeout", "nccl.system",
}  # fmt: skip

_OWN = "the run had a cause of its own before: then that is the verdict, and Slurm's word is in its evidence"

family = Family(__name__, OWN=_OWN)
family.entries("""
slurm.allocation: The Slurm job can't be used as it was started.
  seen: before the start: srun started Stoker once per task, or a heterogeneous job, or a job without a node list
  fix: start `stoker run` once, in the job script or in salloc's shell, without srun
slurm.unreachable, again: Slurm's commands do not answer.
  seen: scontrol or sbatch fails or takes more than 20 s
  fix: scontrol ping   # does the controller answer?
slurm.refused: sbatch refused the job.
  seen: before the start: a partition, an account or an amount the cluster does not have or does not allow
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
  fix: --time with more, or stoker submit --requeue: it saves before the end and resumes by itself
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
  fix: submit it again; --sbatch-option=--exclude=NODE leaves a bad one out
slurm.out-of-memory: The job used more host memory than it asked for.
  summary: Slurm job {id} used more host memory than it had asked for
  seen: the job's state is OUT_OF_MEMORY
  unless: {OWN}
  fix: --mem with more (0: all of the node)
  fix: fewer data-loader workers, or fewer ranks a node
slurm.notice, again: Slurm gave notice that the job's end is near, and the run was stopped so that it could save.
  summary: Slurm job {id} was told that its end is near{limit}, and stopped so that it could save
  seen: USR1 to the job's script, as long before the time limit as --signal-before says, or before a preemption
  unless: {OWN}
  fix: submit it again under the same --name, or once with --requeue: it resumes from its last checkpoint
  fix: --time with more
slurm.requeued, again: The job waits in the queue again.
  summary: Slurm job {id} waits in the queue again{reason}
  seen: the job's state is PENDING, or REQUEUED, after a start
  unless: it was never started
  fix: nothing: it resumes from its last checkpoint when it starts again
slurm.no-run: The job ended and no run began in it.
  summary: job {id} ended ({state}) before a run began in it
  seen: the job is over, and no run directory belongs to it
  unless: it was cancelled while it waited: slurm.cancelled
  fix: read what the job printed; the path is in the evidence
""")

_CANCELLED, _NODE_FAIL, _NOTICE, _REQUEUED = "slurm.cancelled", "slurm.node-fail", "slurm.notice", "slurm.requeued"
_STATES = {
    "CANCELLED": _CANCELLED, "TIMEOUT": "slurm.timeout", "DEADLINE": "slurm.timeout", "PREEMPTED": "slurm.preempted", "NODE_FAIL": _NODE_FAIL,
    "BOOT_FAIL": _NODE_FAIL, "OUT_OF_MEMORY": "slurm.out-of-memory",
}  # fmt: skip


def word(job: SlurmJob) -> str:
    """Slurm's own, in one line."""
    said = f"Slurm: job {job.id} is {job.state}" + (f" ({job.reason})" if job.reason else "")
    if job.over:
        said += f", exit code {job.exit_code}" + (f", signal {job.signal}" if job.signal else "")
    said += f", restarted {job.restarts} times" if job.restarts else ""
    return said + (f", on {job.nodes}" if job.nodes else "")


def refined(verdict: Verdict, job: SlurmJob) -> Verdict:
    """The run's verdict with Slurm's word: instead of it where Slurm's act is what ended the run, else as evidence."""
    told = replace(verdict, evidence=(*verdict.evidence, word(job)))
    cause = cause_of(job)
    if not cause or verdict.status == "completed" or verdict.cause not in _CONSEQUENCES:
        return told
    found = CATALOGUE[cause]
    return replace(
        told,
        status="failed" if cause in (_NODE_FAIL, "slurm.out-of-memory") else "stopped",
        cause=cause,
        summary=_summary(found, job),
        rank=None,
        host=None,
        gpu=None,
        retryable=found.retryable,
        fix=found.fix,
        evidence=(word(job), verdict.summary, *verdict.evidence),
    )


def without_run(job: SlurmJob, evidence: tuple[str, ...] = ()) -> Verdict:
    """Of a job in which no run began."""
    found = CATALOGUE[cause_of(job) or "slurm.no-run"]
    return Verdict(
        "stopped" if found.id in (_CANCELLED, _NOTICE, _REQUEUED) else "failed",
        found.id,
        _summary(found, job),
        job.code or (143 if found.id == _CANCELLED else EX_SOFTWARE),
        evidence=(word(job), *evidence),
        retryable=found.retryable,
        fix=found.fix,
    )


def cause_of(job: SlurmJob) -> str:
    """Empty where Slurm's act did not end it."""
    if job.restarts and job.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
        return _REQUEUED
    return _STATES.get(job.state) or (_NOTICE if job.noticed and job.over and job.state != "COMPLETED" else "")


def _summary(found: Cause, job: SlurmJob) -> str:
    limit = job.limit if job.limit != "UNLIMITED" else ""
    return found.summary.format(
        id=job.id,
        state=job.state,
        by=f" by user {job.by}" if job.by else "",
        of_limit=f" of {limit}" if limit else "",
        limit=f" (time limit {limit})" if limit else "",
        nodes=f" (nodes {job.nodes})" if job.nodes else "",
        reason=f" ({job.reason})" if job.reason else "",
    )
