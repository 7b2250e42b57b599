"""Decides whether, when and how a failed run starts again. Pure: `Run` tests GPUs, waits and starts."""

from __future__ import annotations

import time
from typing import Any

from stoker.contract.env_vars import MICRO_BATCH_HALVINGS
from stoker.contract.evidence import Verdict
from stoker.contract.frozen import frozen, replace
from stoker.control.launch.attempt import Attempt
from stoker.control.plan.options import RunOptions

BUSY_WAIT_S = 10.0  # the program on a busy GPU may be exiting
MAX_WAIT_S = 30.0
# An attempt that ran this long or finished this many steps counts as healthy, not as part of a crash loop.
HEALTHY_S = 60.0
HEALTHY_STEPS = 10
MAX_HALVINGS = 6
CAN_HALVE = "CAN-HALVE-MICRO-BATCH"  # a recipe's mark: it can halve the micro-batch and keep the global batch
_OUT_OF_MEMORY = ("oom.gpu", "oom.gpu-fragmentation")
_ASYNCHRONOUS = ("gpu.assert", "gpu.illegal-access", "gpu.launch-failure")  # CUDA reports these later than they happen
# Causes after which the failed rank's GPU is tested before the restart.
_TESTS_GPU = (
    "gpu.busy", "gpu.lost", "gpu.ecc", "gpu.xid", "gpu.illegal-access", "gpu.launch-failure", "gpu.timeout", "nccl.cuda", "hang.gpu-kernel", "hang.disk",
)  # fmt: skip
_FROM_OUTSIDE = (
    "rank.killed",
    "rank.signal",
    "hang.stopped",
    "gpu.busy",
)  # these come from outside, so no two count as the same failure


@frozen
class Restart:
    """How the next attempt starts."""

    line: str  # for the user
    wait_s: float = 0.0
    env: tuple[tuple[str, str], ...] = ()  # for the next attempt only
    probe: bool = False  # test the failed rank's GPU first


class RestartState:
    """The restarts of one run so far, from which the next decision follows."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._restarts: dict[str, int] = {}  # by the role that failed
        self._last_failure: tuple[Any, ...] = ()
        self._busy_failures = 0
        self._tried_blocking = False
        self._is_blocking = False  # this attempt has CUDA_LAUNCH_BLOCKING=1
        self._halvings = 0
        self._quick_failures = 0  # in a row

    def decide(self, verdict: Verdict, attempt: Attempt, lifetime_s: float) -> tuple[Verdict, Restart | None]:
        """Return the verdict with the evidence of this attempt, and the restart, or None if the verdict is final."""
        if verdict.status != "failed":
            return verdict, None
        failure = make_failure_key(verdict, attempt)
        is_deterministic, self._last_failure = failure == self._last_failure, failure
        worked = max(attempt.steps.values(), default=0) >= HEALTHY_STEPS or lifetime_s > HEALTHY_S
        self._quick_failures = 0 if worked else self._quick_failures + 1
        was_blocking, self._is_blocking = self._is_blocking, False
        restart = self._halve_micro_batch(verdict, attempt) or self._retry_blocking(verdict)
        if restart is not None:
            return verdict, restart
        if was_blocking and verdict.cause in _ASYNCHRONOUS:
            return _final(verdict, "with blocking launches (CUDA_LAUNCH_BLOCKING=1): the error is at this line")
        if is_deterministic:
            verdict = replace(verdict, summary=f"{verdict.summary}; twice at the same place: deterministic")
            return _final(verdict, "the previous attempt failed in the same way at the same place: deterministic")
        if verdict.cause == "gpu.busy":
            self._busy_failures += 1
            if self._busy_failures > 1:
                return _final(verdict, f"the GPU was still busy after a wait of {BUSY_WAIT_S:.0f} s")
        role = attempt.plan.role_of(verdict.rank)
        restarts = self._restarts.get(role.name, 0) + 1
        if not verdict.retryable or restarts > role.max_restarts:
            return verdict, None
        self._restarts[role.name] = restarts
        wait = BUSY_WAIT_S if verdict.cause == "gpu.busy" else self._back_off()
        delay = f" in {wait:.0f} s" if wait else ""
        line = f"{verdict.summary}; starting again{delay} ({restarts} of {role.max_restarts})"
        return verdict, Restart(line, wait, self.make_env(), verdict.cause in _TESTS_GPU)

    def make_env(self, *variables: tuple[str, str]) -> tuple[tuple[str, str], ...]:
        """Return the variables of the next attempt, with those that earlier attempts made necessary."""
        halvings = ((MICRO_BATCH_HALVINGS, str(self._halvings)),) if self._halvings else ()
        return (*halvings, *variables)

    def _back_off(self) -> float:
        """Return 0 s after an attempt that worked and after the first quick failure, then 1, 2, 4 ... s."""
        return 0.0 if self._quick_failures < 2 else min(MAX_WAIT_S, 2.0 ** (self._quick_failures - 2))

    def _halve_micro_batch(self, verdict: Verdict, attempt: Attempt) -> Restart | None:
        """Restart a recipe that ran out of GPU memory with half the micro-batch and the same global batch."""
        if (
            verdict.cause not in _OUT_OF_MEMORY
            or CAN_HALVE not in attempt.capabilities
            or self._halvings >= MAX_HALVINGS
        ):
            return None
        self._halvings += 1
        self._last_failure = ()
        line = f"{verdict.summary}; starting again with the micro-batch halved and the same global batch"
        return Restart(line, env=self.make_env())

    def _retry_blocking(self, verdict: Verdict) -> Restart | None:
        if not self._options.debug_retry or self._tried_blocking or verdict.cause not in _ASYNCHRONOUS:
            return None
        self._tried_blocking = self._is_blocking = True
        self._last_failure = ()
        line = f"{verdict.summary}; starting again with blocking launches to find the true line (--debug-retry)"
        return Restart(line, env=self.make_env(("CUDA_LAUNCH_BLOCKING", "1")))


def _final(verdict: Verdict, reason: str) -> tuple[Verdict, None]:
    return replace(verdict, retryable=False, evidence=(*verdict.evidence, reason)), None


def make_failure_key(verdict: Verdict, attempt: Attempt) -> tuple[Any, ...]:
    """Return what makes two failures the same: cause, place and step, but not the rank."""
    if verdict.rank is None or verdict.cause in _FROM_OUTSIDE:
        return (time.monotonic_ns(),)  # a unique key
    entry = next((entry for entry in attempt.trouble if entry.get("rank") == verdict.rank), None)
    if entry is not None:
        return verdict.cause, entry.get("where", ""), entry.get("step", 0)
    end = attempt.ends.get(verdict.rank)
    if end is None:
        return verdict.cause, (None,), 0
    location = (end.error.type, end.error.file, end.error.line) if end.error else (end.code,)
    return verdict.cause, location, end.steps
