"""Schedulers behind one protocol: `Engine` finds a job's hosts and starts their agents, `Runs` explains how a job ended.

The code of one scheduler is in the modules that contract/schedulers.py names for it.
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
    def allocation(self, environ: Mapping[str, str]) -> Hosts | None:
        """Return the hosts of our job, in rank order, with their transports. None: this is an ordinary local run."""


class Runs(Protocol):
    def run_of(self, root: str, job: str) -> RunRecord | None:
        """Return the newest run that was started in this job."""

    def verdict_of(self, root: str, job: str) -> Verdict:
        """Return the verdict of a job that is over, whether a run began in it or not."""

    def explained(self, root: str, run: RunRecord, verdict: Verdict | None) -> Verdict | None:
        """Return a run's verdict with what the scheduler knows about the job's end."""


def engine(scheduler: Scheduler) -> Engine:
    return cast("Engine", import_module(f"{__name__}.{scheduler.engine}"))


def runs(scheduler: Scheduler) -> Runs:
    return cast("Runs", import_module(f"{__name__}.{scheduler.runs}"))
