"""The joined explanation: which rank is slow, what its GPU or its host has that the others' don't, and how long the others
wait for it. Pure.

Who is slow is the watch's finding (control/watch/straggler.py), or who waits least while the others wait. Why is looked up
in the gauges, now: a card that has cooled down, or a disk that is idle again, is not blamed any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stoker.contract.units import format_bytes, rank_name
from stoker.control.machine.model import GpuGauges, HostGauges
from stoker.control.show.run_tail import RunTail
from stoker.control.show.snapshot import RUNNING, UNKNOWN, RankView, RunView, SlowRank, finite, parse_metric

WAITING = 0.2  # share of a step that the others wait, for it to be worth a word
BUSY_CPU = 0.95
PRESSED = 0.4  # share of the time in which somebody waits for the CPU, the disk or memory
FULL_LINK = 0.8


def find_slow_ranks(
    run: RunView, folder: RunTail | None, hosts: Sequence[HostGauges], gpus: Sequence[GpuGauges]
) -> tuple[SlowRank, ...]:
    if run.state not in (RUNNING, UNKNOWN) or folder is None or len(run.ranks) < 2:
        return ()
    found = folder.events.slow
    told = [(rank, found[rank.rank]) for rank in run.ranks if rank.rank in found and rank.state == "running"]
    late = find_late_rank(run.ranks)
    if late is not None and late.rank not in found:
        told.append((late, {}))
    return tuple(_joined(rank, event, run, hosts, gpus) for rank, event in told)


def find_late_rank(ranks: Sequence[RankView]) -> RankView | None:
    """Who waits least, where all the others wait for a good part of their time."""
    running = [rank for rank in ranks if rank.state == "running"]
    if len(running) < len(ranks):
        return None
    late = late_index([rank.waiting for rank in running])
    return running[late] if late is not None else None


def late_index(shares: Sequence[float | None]) -> int | None:
    """The place of the one whom all the others wait for, by the share of its time that each waits."""
    known = [share for share in shares if share is not None]
    if len(known) < 2 or len(known) < len(shares):
        return None
    first, second = sorted(known)[:2]
    return shares.index(first) if second >= WAITING and second >= 2 * first else None


def _joined(
    rank: RankView, event: dict[str, Any], run: RunView, hosts: Sequence[HostGauges], gpus: Sequence[GpuGauges]
) -> SlowRank:
    others = [one for one in run.ranks if one.rank != rank.rank]
    wait_s, step_s = finite(parse_metric(event.get("wait_s"))), finite(parse_metric(event.get("step_s")))
    waits = sorted(one.waiting * one.step_s for one in others if one.waiting is not None and one.step_s is not None)
    if not event and waits:
        wait_s, step_s = waits[len(waits) // 2], rank.step_s
    card, host = gpu_of(rank, gpus), host_of(rank, hosts)
    peers = [gpu_of(one, gpus) for one in others]
    # A host that all ranks share does not make one of them slow; then only the watch's own finding counts.
    alone = [one for one in {one.host for one in others} if one != rank.host]
    because, cause = explain_gpu(card, peers), "slow.throttle"
    if because.startswith("its GPU's PCIe"):
        cause = "slow.link"
    if not because and alone:
        cause, because = explain_host(host, [host_of(one, hosts) for one in others if one.host != rank.host])
    if not because:
        cause = str(event.get("cause") or "slow.unknown")
        because = _reason(str(event.get("summary") or "")) or "no reason can be seen from outside"
    cost = f"; the others wait {wait_s:.2g} s" if wait_s is not None else ""
    cost += f" of each {step_s:.2g} s step" if cost and step_s is not None else ""
    since = float(event.get("time") or run.updated or run.started)
    summary = f"{rank_name(rank.rank, rank.label)} is slow because {because}{cost}"
    return SlowRank(rank.rank, rank.label, rank.host, rank.gpu, cause, because, wait_s, step_s, since, summary)


def _reason(summary: str) -> str:
    """Of the watch's own sentence: rank 1 (GPU1) is slow because REASON; the others wait ..."""
    return summary.partition(" is slow because ")[2].rpartition("; the others wait")[0]


def gpu_of(rank: RankView, gpus: Iterable[GpuGauges]) -> GpuGauges | None:
    cards = [card for card in gpus if card.uuid == rank.gpu and rank.gpu]
    return next((card for card in cards if card.host == rank.host), cards[0] if cards else None)


def host_of(rank: RankView, hosts: Iterable[HostGauges]) -> HostGauges | None:
    return next((host for host in hosts if host.name == rank.host), None)


def explain_gpu(card: GpuGauges | None, peers: Sequence[GpuGauges | None]) -> str:
    """What holds this card back, and not every other one; empty where nothing does."""
    if card is None:
        return ""
    known = [peer for peer in peers if peer is not None]

    def everybody(word: str) -> bool:
        return bool(known) and all(word in (peer.throttle or ()) for peer in known)

    words = [word for word in card.throttle or () if not everybody(word)]
    if words:
        hot = (
            f" at {card.temperature} °C"
            if card.temperature is not None and any("therm" in word for word in words)
            else ""
        )
        return f"its GPU's clock is held down: {', '.join(words)}{hot}"
    now, most = card.pcie_width, card.pcie_width_max
    if now and most and now < most and not all((peer.pcie_width or most) < most for peer in known):
        return f"its GPU's PCIe link has {now} of {most} lanes"
    return ""


def explain_host(host: HostGauges | None, others: Sequence[HostGauges | None]) -> tuple[str, str]:
    """(cause, reason): what this host lacks and the others don't."""
    if host is None:
        return "", ""

    def only_here(name: str, limit: float) -> float | None:
        mine = getattr(host, name)
        theirs = [getattr(one, name) for one in others if one is not None and getattr(one, name) is not None]
        return mine if mine is not None and mine >= limit and all(one < limit for one in theirs) else None

    pressed = only_here("pressure_memory", PRESSED)
    if pressed is not None:
        return (
            "slow.memory",
            f"its host {host.name} is short of memory: processes wait for it {pressed:.0%} of the time",
        )
    pressed = only_here("pressure_io", PRESSED)
    if pressed is not None:
        moved = sum(rate or 0.0 for rate in (host.disk_read, host.disk_written))
        return (
            "slow.disk",
            f"its host {host.name} waits for its disk {pressed:.0%} of the time ({format_bytes(moved)}/s)",
        )
    busy = only_here("cpu", BUSY_CPU)
    if busy is not None:
        return "slow.cpu", f"its host {host.name} has its CPUs busy ({busy:.0%} of {host.cores} cores)"
    if host.link:
        used = max(host.received or 0.0, host.sent or 0.0) / host.link
        full = [max(one.received or 0.0, one.sent or 0.0) / one.link for one in others if one is not None and one.link]
        if used >= FULL_LINK and all(one < FULL_LINK for one in full):
            return "slow.network", f"its host {host.name} has its network full ({format_bytes(used * host.link)}/s)"
    return "", ""
