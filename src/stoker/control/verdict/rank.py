"""rank.*: what one rank did wrong by itself."""

from __future__ import annotations

import signal

from stoker.contract.shapes import Evidence, RankEnd, Verdict
from stoker.control.verdict import environment, network
from stoker.control.verdict.wording import base, first_line, place


def explain(end: RankEnd, evidence: Evidence) -> Verdict:
    for family in (environment.explain, network.explain, _exception, _left_early, _signal, _exit):
        verdict = family(end, evidence)
        if verdict is not None:
            return verdict
    raise AssertionError(f"rank {end.rank} ended with {end.code} and no family took it")


def _exception(end: RankEnd, _evidence: Evidence) -> Verdict | None:
    if end.error is None:
        return None
    error = end.error
    said = first_line(error.message)
    return base(
        end, "rank.exception", f"rank {end.rank} ({end.label}): {error.type}{': ' + said if said else ''} at {place(end)}", retryable=True,
        evidence=[f"exception {error.type} at {place(end)}", *error.traceback.strip().splitlines()[-12:]],
        fix=[f"look at {error.file}:{error.line}", f"stoker logs --rank {end.rank}"],
    )  # fmt: skip


def _left_early(end: RankEnd, evidence: Evidence) -> Verdict | None:
    if end.code != 0:
        return None
    others = [other for other in evidence.ends if other.rank != end.rank and other.code != 0]
    after = f" after step {end.steps}" if end.steps else ""
    heard = [f"rank {other.rank}: {other.error.type}: {first_line(other.error.message)}" for other in others if other.error]
    return base(
        end, "rank.early-exit", f"rank {end.rank} ({end.label}) ended with 0{after} while the others were still working", retryable=False,
        evidence=[f"rank {end.rank} ended with exit code 0", *heard[:4]],
        fix=["look for sys.exit(), os._exit(0) or a loop that is shorter on this rank (unequal number of batches)", f"stoker logs --rank {end.rank}"],
    )  # fmt: skip


def _signal(end: RankEnd, _evidence: Evidence) -> Verdict | None:
    if end.code is None or end.code > 0:
        return None
    number = -end.code
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    seen = [f"wait status: killed by {name}"] + ([f"it had reached step {end.steps}"] if end.steps else [])
    if number == signal.SIGKILL:
        if end.oom_killed:
            return base(
                end, "oom.host", f"rank {end.rank} ({end.label}) was killed by the kernel: out of memory", retryable=False,
                evidence=[*seen, "the cgroup's oom_kill counter went up"],
                fix=["fewer data-loader workers or ranks, or a machine with more memory", "--init-slots 1 loads models one after the other"],
            )  # fmt: skip
        return base(
            end, "rank.killed", f"rank {end.rank} ({end.label}) was killed with SIGKILL from outside", retryable=True,
            evidence=[*seen, "no out-of-memory kill was counted in this cgroup"], fix=["who sent it? an admin, a script, or the host's OOM killer (dmesg)"],
        )  # fmt: skip
    stack = [line for line in end.stack.strip().splitlines() if line][:25]
    crash = number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
    at = next((line.strip() for line in stack if line.lstrip().startswith("File ")), "")
    return base(
        end, "rank.crash" if crash else "rank.signal", f"rank {end.rank} ({end.label}) died of {name}{' at ' + at if at else ''}", retryable=True,
        evidence=seen + stack, fix=[*(["the Python stack is in the record: rank-*.stack.txt"] if stack else []), f"stoker logs --rank {end.rank}"],
    )  # fmt: skip


def _exit(end: RankEnd, _evidence: Evidence) -> Verdict | None:
    last = [line for line in end.tail.strip().splitlines() if line.strip()][-3:]
    return base(
        end, "rank.exit", f"rank {end.rank} ({end.label}) ended with exit code {end.code}", retryable=True,
        evidence=[f"exit code {end.code}, no exception", *last], fix=[f"stoker logs --rank {end.rank}"],
    )  # fmt: skip
