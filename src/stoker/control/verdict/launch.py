"""launch.*: what Stoker itself was told or decided."""

from __future__ import annotations

import signal
from typing import Any

from stoker.contract.names import EX_OSERR, EX_SOFTWARE, Refusal
from stoker.contract.quantities import gb
from stoker.contract.shapes import Evidence, Verdict


def stopped(evidence: Evidence) -> Verdict:
    name = signal.Signals(evidence.stop_signal).name
    how = "at once" if evidence.stop_now else "gracefully"
    ends = [f"rank {end.rank} ended with {end.code}" for end in evidence.ends[:8]]
    return Verdict(
        "stopped", "launch.stopped", f"stopped by {name}, {how}", 128 + evidence.stop_signal,
        evidence=(f"the launcher received {name}", *ends), retryable=False,
    )  # fmt: skip


def trouble(evidence: Evidence) -> Verdict:
    """Stoker stopped the job itself, for a reason it knows."""
    first = evidence.trouble[0]
    end = next((end for end in evidence.ends if end.rank == first.get("rank")), None)
    return Verdict(
        "failed", first["cause"], first["summary"], int(first.get("exit_code", EX_SOFTWARE)), rank=first.get("rank"),
        host=(end.host or None) if end else first.get("host"), gpu=end.label if end and "GPU" in end.label else None,
        evidence=tuple(first.get("evidence", ())), retryable=bool(first.get("retryable", False)), fix=tuple(first.get("fix", ())),
    )  # fmt: skip


def unknown(evidence: Evidence) -> Verdict:
    ends = [f"rank {end.rank} ended with {end.code}" for end in evidence.ends]
    missing = evidence.world_size - len([end for end in evidence.ends if end.code is not None])
    return Verdict(
        "failed", "unknown", f"the job ended without a cause that can be seen; {missing} of {evidence.world_size} ranks have no end on record",
        EX_SOFTWARE, evidence=tuple(ends), retryable=False, fix=("stoker logs --rank N, for each rank", "dmesg, for what the kernel did"),
    )  # fmt: skip


def lost(run: str) -> Verdict:
    """The launcher is gone and left no verdict."""
    return Verdict(
        "lost", "launch.killed", "the launcher ended without a verdict: it was killed (SIGKILL), or the machine went down", 137, run=run,
        evidence=("no verdict.json, and the launcher's process is gone",), retryable=True,
        fix=("the agent stopped the ranks when the launcher vanished; start the same command again",),
    )  # fmt: skip


def over_ram_limit(rank: int, label: str, taken: int, limit: int) -> dict[str, Any]:
    return {
        "cause": "oom.ram-limit", "rank": rank, "at_once": True, "exit_code": EX_SOFTWARE,
        "summary": f"rank {rank} ({label}) took {gb(taken)} of memory, past --ram-limit {gb(limit)}",
        "evidence": [f"resident memory {taken} bytes, limit {limit}"], "fix": ["fewer data-loader workers, a smaller batch, or a higher --ram-limit"],
    }  # fmt: skip


def agent_lost(host: str, why: str, complaint: str) -> dict[str, Any]:
    return {
        "cause": "host.agent-lost", "host": host, "exit_code": EX_SOFTWARE,
        "summary": f"the agent on {f'host {host}' if host else 'this machine'} was lost: {why}; its ranks are stopped",
        "evidence": [complaint] if complaint else [], "fix": ["was it killed? dmesg may know"],
    }  # fmt: skip


def not_started(rank: int, why: str) -> dict[str, Any]:
    return {
        "cause": "launch.not-started", "rank": rank, "summary": f"rank {rank} could not be started: {why}", "exit_code": EX_OSERR,
        "fix": ["does the program exist, may it be executed, and are there descriptors and processes left (ulimit -n, -u)?"],
    }  # fmt: skip


def refused(refusal: Refusal) -> Verdict:
    return Verdict("refused", refusal.cause, refusal.line.splitlines()[0], refusal.code, fix=(refusal.fix,) if refusal.fix else ())


def broken(cause: str, line: str, code: int, evidence: tuple[str, ...] = ()) -> Verdict:
    """Stoker itself could not go on after the start."""
    return Verdict("failed", cause, line, code, evidence=evidence)
