"""Schedulers, behind one protocol. A scheduler says which hosts a job has and how their agents are started (`Engine`), and
what became of a job (`Runs`). All that is of one scheduler is in the modules that contract/schedulers.py names for it.
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
        """The hosts of our job, in rank order, with their transports. None: an ordinary local run."""


class Runs(Protocol):
    def run_of(self, root: str, job: str) -> RunRecord | None:
        """The newest run that was started in this job."""

    def verdict_of(self, root: str, job: str) -> Verdict:
        """Of a job that is over, whether a run began in it or not."""

    def explained(self, root: str, run: RunRecord, verdict: Verdict | None) -> Verdict | None:
        """A run's verdict, with the scheduler's word."""


def engine(scheduler: Scheduler) -> Engine:
    return cast("Engine", import_module(f"{__name__}.{scheduler.engine}"))


def runs(scheduler: Scheduler) -> Runs:
    return cast("Runs", import_module(f"{__name__}.{scheduler.runs}"))
