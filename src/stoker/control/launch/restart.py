"""Whether, when and how to start again. Pure: the coordinator probes cards, waits and starts."""

from __future__ import annotations

import time
from typing import Any

from stoker.contract.env_vars import MICRO_BATCH_HALVINGS
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import frozen, replace
from stoker.control.launch.attempt import Attempt
from stoker.control.plan.options import RunOptions

BUSY_WAIT_S = 10.0  # "busy" may be a neighbour's last seconds
LONGEST_WAIT_S = 30.0
LIVED_S = 60.0  # an attempt that lived this long, or
SOME_STEPS = 10  # made so many, was no crash loop
HALVINGS = 6
CAN_HALVE = "CAN-HALVE-MICRO-BATCH"  # a recipe's mark: it keeps the global batch when told to halve the micro-batch
_ASYNCHRONOUS = ("gpu.assert", "gpu.illegal-access", "gpu.launch-failure")
_PROBED = (
    "gpu.busy", "gpu.lost", "gpu.ecc", "gpu.xid", "gpu.illegal-access", "gpu.launch-failure", "gpu.timeout", "nccl.cuda", "hang.gpu-kernel", "hang.disk",
)  # fmt: skip


@frozen
class Restart:
    line: str  # said to the user
    wait_s: float = 0.0
    env: tuple[tuple[str, str], ...] = ()  # for the next attempt only
    probe: bool = False  # the guilty rank's card first


class RestartState:
    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._made: dict[str, int] = {}  # restarts, by the role that failed
        self._before: tuple[Any, ...] = ()
        self._busy = 0
        self._debugged = False
        self._blocking = False  # the attempt under way has blocking launches
        self._halvings = 0
        self._quick = 0  # failures in a row of attempts that got nowhere

    def decide(self, verdict: Verdict, attempt: Attempt, lived_s: float) -> tuple[Verdict, Restart | None]:
        """The verdict, perhaps with what this attempt taught, and how to go on; None: it is final."""
        if verdict.status != "failed":
            return verdict, None
        same, self._before = self._before, signature(verdict, attempt)
        deterministic = same == self._before
        worked = max(attempt.steps.values(), default=0) >= SOME_STEPS or lived_s > LIVED_S
        self._quick = 0 if worked else self._quick + 1
        blocking, self._blocking = self._blocking, False
        special = self._halve(verdict, attempt) or self._debug(verdict)
        if special is not None:
            return verdict, special
        if blocking and verdict.cause in _ASYNCHRONOUS:
            return _final(verdict, "with blocking launches (CUDA_LAUNCH_BLOCKING=1): this line is the true one")
        if deterministic:
            verdict = replace(verdict, summary=f"{verdict.summary}; twice at the same place: deterministic")
            return _final(verdict, "the attempt before failed in the same way at the same place: deterministic")
        if verdict.cause == "gpu.busy":
            self._busy += 1
            if self._busy > 1:
                return _final(verdict, f"it was waited out once, for {BUSY_WAIT_S:.0f} s")
        role = attempt.plan.role_of(verdict.rank)
        made = self._made.get(role.name, 0) + 1
        if not verdict.retryable or made > role.max_restarts:
            return verdict, None
        self._made[role.name] = made
        wait = BUSY_WAIT_S if verdict.cause == "gpu.busy" else self._back_off()
        then = f" in {wait:.0f} s" if wait else ""
        line = f"{verdict.summary}; starting again{then} ({made} of {role.max_restarts})"
        return verdict, Restart(line, wait, self.env(), verdict.cause in _PROBED)

    def _back_off(self) -> float:
        """At once after an attempt that got somewhere, and after the first that did not; then 1, 2, 4 ... seconds."""
        return 0.0 if self._quick < 2 else min(LONGEST_WAIT_S, 2.0 ** (self._quick - 2))

    def env(self, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
        """What this run has learnt, for the next attempt."""
        halved = ((MICRO_BATCH_HALVINGS, str(self._halvings)),) if self._halvings else ()
        return (*halved, *more)

    def _halve(self, verdict: Verdict, attempt: Attempt) -> Restart | None:
        """Out of GPU memory in a recipe that can do with a smaller micro-batch: that, and the same global batch."""
        full = verdict.cause in ("oom.gpu", "oom.gpu-fragmentation")
        if not full or CAN_HALVE not in attempt.can or self._halvings >= HALVINGS:
            return None
        self._halvings += 1
        self._before = ()
        line = f"{verdict.summary}; starting again with the micro-batch halved and the same global batch"
        return Restart(line, env=self.env())

    def _debug(self, verdict: Verdict) -> Restart | None:
        if not self._options.debug_retry or self._debugged or verdict.cause not in _ASYNCHRONOUS:
            return None
        self._debugged = self._blocking = True
        self._before = ()
        line = f"{verdict.summary}; once more with blocking launches, for the true line (--debug-retry)"
        return Restart(line, env=self.env(("CUDA_LAUNCH_BLOCKING", "1")))


def _final(verdict: Verdict, why: str) -> tuple[Verdict, None]:
    return replace(verdict, retryable=False, evidence=(*verdict.evidence, why)), None


def signature(verdict: Verdict, attempt: Attempt) -> tuple[Any, ...]:
    """What makes two failures the same: cause, place, step; not the rank. A kill from outside never is."""
    if verdict.rank is None or verdict.cause in ("rank.killed", "rank.signal", "hang.stopped", "gpu.busy"):
        return (time.monotonic_ns(),)
    told = next((entry for entry in attempt.trouble if entry.get("rank") == verdict.rank), None)
    if told is not None:
        return verdict.cause, told.get("where", ""), told.get("step", 0)
    end = attempt.ends.get(verdict.rank)
    place = (end.error.type, end.error.file, end.error.line) if end and end.error else (end.code if end else None,)
    return verdict.cause, place, end.steps if end else 0
