"""Explains slow ranks: which rank is slow, what differs on its GPU or host, and how long the other ranks wait.

A rank is slow if the watch has found it (control/watch/straggler.py), or if it waits least while all others wait. The
reason comes from the current gauges, so a GPU that has cooled down or a disk that is idle again is not blamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stoker.contract.units import format_bytes, rank_name
from stoker.control.machine.model import GpuGauges, HostGauges
from stoker.control.show.run_tail import RunTail
from stoker.control.show.snapshot import RUNNING, UNKNOWN, RankView, RunView, SlowRank, parse_finite

MIN_WAITING = 0.2  # a rank counts as slow if all others wait for at least this share of their time
MIN_CPU = 0.95  # share of the CPU time that is in use
MIN_PRESSURE = 0.4  # share of the time in which some process waits for the disk or for memory
MIN_LINK_LOAD = 0.8  # share of the network link's speed


def find_slow_ranks(
    run: RunView, tail: RunTail | None, hosts: Sequence[HostGauges], gpus: Sequence[GpuGauges]
) -> tuple[SlowRank, ...]:
    """Return the slow ranks of a run that is running, those found by the watch first."""
    if run.state not in (RUNNING, UNKNOWN) or tail is None or len(run.ranks) < 2:
        return ()
    findings = tail.events.slow
    slow = [(rank, findings[rank.rank]) for rank in run.ranks if rank.rank in findings and rank.state == "running"]
    late = find_late_rank(run.ranks)
    if late is not None and late.rank not in findings:
        slow.append((late, {}))
    return tuple(_explain(rank, finding, run, hosts, gpus) for rank, finding in slow)


def find_late_rank(ranks: Sequence[RankView]) -> RankView | None:
    """Return the rank that all others wait for, or None."""
    running = [rank for rank in ranks if rank.state == "running"]
    if len(running) < len(ranks):
        return None
    index = find_late_index([rank.waiting for rank in running])
    return running[index] if index is not None else None


def find_late_index(waiting_shares: Sequence[float | None]) -> int | None:
    """Return the index of the rank that all others wait for, or None. A share is the part of its time that a rank waits."""
    known_shares = [share for share in waiting_shares if share is not None]
    if len(known_shares) < 2 or len(known_shares) < len(waiting_shares):
        return None
    lowest, second = sorted(known_shares)[:2]
    return waiting_shares.index(lowest) if second >= MIN_WAITING and second >= 2 * lowest else None


def _explain(
    rank: RankView, finding: dict[str, Any], run: RunView, hosts: Sequence[HostGauges], gpus: Sequence[GpuGauges]
) -> SlowRank:
    """Build a SlowRank. `finding` is the watch's event, or {} if find_late_rank found the rank."""
    others = [other for other in run.ranks if other.rank != rank.rank]
    wait_s, step_s = parse_finite(finding.get("wait_s")), parse_finite(finding.get("step_s"))
    waits = sorted(
        other.waiting * other.step_s for other in others if other.waiting is not None and other.step_s is not None
    )
    if not finding and waits:
        wait_s, step_s = waits[len(waits) // 2], rank.step_s
    because, cause = explain_gpu(gpu_of(rank, gpus), [gpu_of(other, gpus) for other in others]), "slow.throttle"
    if because.startswith("its GPU's PCIe"):
        cause = "slow.link"
    # A host that all ranks share can't make one of them slow.
    on_other_hosts = [other for other in others if other.host != rank.host]
    if not because and on_other_hosts:
        cause, because = explain_host(host_of(rank, hosts), [host_of(other, hosts) for other in on_other_hosts])
    if not because:
        cause = str(finding.get("cause") or "slow.unknown")
        # The watch writes: rank 1 (GPU 1) is slow because REASON; the others wait 0.9 s of each 2.1 s step.
        sentence = str(finding.get("summary") or "")
        because = sentence.partition(" is slow because ")[2].rpartition("; the others wait")[0]
        because = because or "of an unknown cause"
    cost = f"; the others wait {wait_s:.2g} s" if wait_s is not None else ""
    cost += f" of each {step_s:.2g} s step" if cost and step_s is not None else ""
    since = float(finding.get("time") or run.updated or run.started)
    summary = f"{rank_name(rank.rank, rank.label)} is slow because {because}{cost}"
    return SlowRank(rank.rank, rank.label, rank.host, rank.gpu, cause, because, wait_s, step_s, since, summary)


def gpu_of(rank: RankView, gpus: Iterable[GpuGauges]) -> GpuGauges | None:
    """Return the rank's GPU, or None. Prefer the rank's host, because recorded machines of several hosts may share a uuid."""
    matches = [gpu for gpu in gpus if gpu.uuid == rank.gpu and rank.gpu]
    return next((gpu for gpu in matches if gpu.host == rank.host), matches[0] if matches else None)


def host_of(rank: RankView, hosts: Iterable[HostGauges]) -> HostGauges | None:
    return next((host for host in hosts if host.name == rank.host), None)


def explain_gpu(gpu: GpuGauges | None, peers: Sequence[GpuGauges | None]) -> str:
    """Return the reason why this GPU is slow, or "". A reason that all its peers share does not count."""
    if gpu is None:
        return ""
    known_peers = [peer for peer in peers if peer is not None]
    reasons = [
        reason
        for reason in gpu.throttle or ()
        if not known_peers or not all(reason in (peer.throttle or ()) for peer in known_peers)
    ]
    if reasons:
        is_hot = gpu.temperature is not None and any("therm" in reason for reason in reasons)
        return f"its GPU's clock is held down: {', '.join(reasons)}{f' at {gpu.temperature} °C' if is_hot else ''}"
    lanes, max_lanes = gpu.pcie_width, gpu.pcie_width_max
    if not lanes or not max_lanes or lanes >= max_lanes:
        return ""
    if all((peer.pcie_width or max_lanes) < max_lanes for peer in known_peers):
        return ""
    return f"its GPU's PCIe link has {lanes} of {max_lanes} lanes"


def explain_host(host: HostGauges | None, others: Sequence[HostGauges | None]) -> tuple[str, str]:
    """Return (cause, reason) for a resource that is exhausted on this host and on no other, or ("", "")."""
    if host is None:
        return "", ""
    known_others = [other for other in others if other is not None]

    def find_excess(name: str, limit: float) -> float | None:
        """Return the gauge if it reaches the limit on this host and on no other, else None."""
        value = getattr(host, name)
        other_values = [getattr(other, name) for other in known_others if getattr(other, name) is not None]
        return value if value is not None and value >= limit and all(other < limit for other in other_values) else None

    waiting = find_excess("pressure_memory", MIN_PRESSURE)
    if waiting is not None:
        reason = f"its host {host.name} is short of memory: processes wait for it {waiting:.0%} of the time"
        return "slow.memory", reason
    waiting = find_excess("pressure_io", MIN_PRESSURE)
    if waiting is not None:
        rate = format_bytes((host.disk_read or 0.0) + (host.disk_written or 0.0))
        return "slow.disk", f"its host {host.name} waits for its disk {waiting:.0%} of the time ({rate}/s)"
    busy = find_excess("cpu", MIN_CPU)
    if busy is not None:
        return "slow.cpu", f"its host {host.name} has its CPUs busy ({busy:.0%} of {host.cores} cores)"
    if host.link:
        load = _link_load(host)
        if load >= MIN_LINK_LOAD and all(_link_load(other) < MIN_LINK_LOAD for other in known_others if other.link):
            return "slow.network", f"its host {host.name} has its network full ({format_bytes(load * host.link)}/s)"
    return "", ""


def _link_load(host: HostGauges) -> float:
    return max(host.received or 0.0, host.sent or 0.0) / (host.link or 1.0)
