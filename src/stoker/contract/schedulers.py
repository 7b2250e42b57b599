"""The job schedulers that Stoker supports, and the job that an environment belongs to.

To add a scheduler, add an entry to SCHEDULERS and its two modules in control/scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.contract.frozen import frozen


@frozen
class Scheduler:
    """A job scheduler. `engine` and `runs` name the modules of control/scheduler with these two protocols."""

    name: str  # as in `stoker why NAME:JOB`
    title: str
    job_variable: str  # a variable that its jobs have
    engine: str
    runs: str


SCHEDULERS = (Scheduler("slurm", "Slurm", "SLURM_JOB_ID", "slurm", "slurm_job"),)


def find_scheduler(environ: Mapping[str, str]) -> Scheduler | None:
    """Return the scheduler of the job that has this environment, or None."""
    return next((scheduler for scheduler in SCHEDULERS if environ.get(scheduler.job_variable)), None)


def find_scheduler_by_name(name: str) -> Scheduler | None:
    return next((scheduler for scheduler in SCHEDULERS if scheduler.name == name), None)


def job_id(environ: Mapping[str, str]) -> str:
    """Return the number of the job, NAME/NUMBER for schedulers other than the first, or "" outside a job."""
    scheduler = find_scheduler(environ)
    if scheduler is None:
        return ""
    number = environ[scheduler.job_variable]
    return number if scheduler is SCHEDULERS[0] else f"{scheduler.name}/{number}"


def describe_job(job: str) -> str:
    """Return a job id for a message: Slurm job 12."""
    name, _, number = job.rpartition("/")
    return f"{(find_scheduler_by_name(name) or SCHEDULERS[0]).title} job {number}"
