"""The interface to job schedulers: `Engine` finds the hosts of our job, `JobRuns` finds a job's runs and explains its end.

contract/schedulers.py names the two modules of each scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from stoker.contract.evidence import Verdict
    from stoker.contract.schedulers import Scheduler
    from stoker.control.cluster.hosts import Hosts
    from stoker.control.record.run_record import RunRecord


class Engine(Protocol):
    """The module that finds the hosts of the job that we run in."""

    def find_allocation(self, environ: Mapping[str, str]) -> Hosts | None:
        """Return the hosts of our job, in rank order, with their transports, or None for an ordinary local run."""


class JobRuns(Protocol):
    """The module that finds the runs of a job and explains how the job ended."""

    def run_of(self, root: str, job: str) -> RunRecord | None:
        """Return the newest run that was started in this job."""

    def verdict_of(self, root: str, job: str) -> Verdict:
        """Return the verdict of a job that is over. The job may have ended before a run began."""

    def explain_end(self, root: str, run: RunRecord, verdict: Verdict | None) -> Verdict | None:
        """Return the verdict of a run, refined by the scheduler's information about the end of the job."""


def load_engine(scheduler: Scheduler) -> Engine:
    """Import the scheduler's module with the functions of `Engine`."""
    return cast("Engine", import_module(f"{__name__}.{scheduler.engine}"))


def load_runs(scheduler: Scheduler) -> JobRuns:
    """Import the scheduler's module with the functions of `JobRuns`."""
    return cast("JobRuns", import_module(f"{__name__}.{scheduler.runs}"))
