"""The schedulers Stoker knows, and whether we are in a job of one. Adding one: a line here, and its modules."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.contract.frozen import frozen


@frozen
class Scheduler:
    """`engine` and `runs`: modules of control/scheduler with its functions of these names' protocols."""

    name: str  # as in `stoker why NAME:JOB`
    title: str
    job_variable: str  # what its jobs have in their environment
    engine: str
    runs: str


SCHEDULERS = (Scheduler("slurm", "Slurm", "SLURM_JOB_ID", "slurm", "slurm_job"),)


def find_scheduler(environ: Mapping[str, str]) -> Scheduler | None:
    """Of the job whose environment this is."""
    return next((one for one in SCHEDULERS if environ.get(one.job_variable)), None)


def scheduler_named(name: str) -> Scheduler | None:
    return next((one for one in SCHEDULERS if one.name == name), None)


def job_id(environ: Mapping[str, str]) -> str:
    """The job's number, or NAME/NUMBER where it is not of the first known scheduler; empty for none."""
    scheduler = find_scheduler(environ)
    if scheduler is None:
        return ""
    number = environ[scheduler.job_variable]
    return number if scheduler is SCHEDULERS[0] else f"{scheduler.name}/{number}"


def describe_job(job: str) -> str:
    """What `job` says, in words."""
    name, _, number = job.rpartition("/")
    return f"{(scheduler_named(name) or SCHEDULERS[0]).title} job {number}"
