"""Signs of life of this host's ranks, cheap enough to take all the time.

A rank that beats costs one look at shared memory twice a second. Only one that is quiet is looked up in /proc.
"""

from __future__ import annotations

import itertools
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

from stoker.contract import host_memory, kernel_messages, process
from stoker.contract.beat import Beat
from stoker.contract.evidence import ExitContext
from stoker.contract.frozen import as_json
from stoker.contract.process import kernel_lines, read_kernel_file, send_signal
from stoker.control.agent.spawn import RankProcess
from stoker.control.machine import host_limits, kernel_log, ports, procfs
from stoker.control.machine.model import GpuGauges, HostGauges
from stoker.control.machine.nvml import Nvml

BEATS_S = 0.5
QUIET_S = 1.0  # without a beat for this long a rank's state is looked up
VITALS_S = 2.0
MOST_LOSSES = 32  # per rank and look

Say = Callable[[dict[str, Any]], None]


class Vitals:
    def __init__(self, say: Say) -> None:
        self._say = say
        self._beats_at = self._vitals_at = 0.0
        self._holders: dict[int, tuple[dict[str, Any], ...]] = {}

    def look(self, ranks: dict[int, RankProcess], now: float, first_step: Callable[[RankProcess, float], None]) -> None:
        if now - self._beats_at < BEATS_S:
            return
        self._beats_at = now
        self.beats(ranks, first_step)
        due = now - self._vitals_at >= VITALS_S
        if due:
            self._vitals_at = now
        found: dict[str, list[Any]] = {}
        for rank in ranks.values():
            if rank.ended is not None:
                continue
            if due:
                below = children(rank.pid)
                resident = sum(procfs.resident_bytes(pid) or 0 for pid in (rank.pid, *below))
                rank.loader_workers = max(rank.loader_workers, sum(map(_is_loader_worker, below)))
                rank.rss.append((round(time.time(), 1), resident))
                self._report_listening(rank)
            if now - rank.beaten > QUIET_S:
                one = process.find_process(rank.pid)
                state = one.state if one else "Z"
                turned, rank.state = state != rank.state and "T" in (state.upper(), rank.state.upper()), state
                if due or turned:
                    found[str(rank.rank)] = [state, *_work(rank.pid)]
        if found:
            self._say({"is": "vitals", "ranks": found})

    def beats(self, ranks: dict[int, RankProcess], first_step: Callable[[RankProcess, float], None]) -> None:
        fresh: dict[str, list[Any]] = {}
        for rank in ranks.values():
            if rank.reader is None or rank.reader.written == rank.reader.seen:
                continue
            news = rank.reader.new()
            if rank.reader.torn:
                rank.reader = None
                self._say({"is": "beatless", "rank": rank.rank})
                text = "its beats are unreadable (something wrote over them): it is watched without them"
                self._say({"is": "note", "rank": rank.rank, "text": text})
            if not news:
                continue
            first = rank.steps == 0
            # A step is one optimizer's count; the script's own word (optimizer 0) wins where there is one.
            lead = min(beat.optimizer for beat in news)
            mine = [beat for beat in news if beat.optimizer == lead]
            rank.steps = max(1, rank.steps, *(beat.step for beat in mine))
            rank.beaten = time.monotonic()
            last, longest = mine[-1].time_ns, _longest(rank.beat_ns, mine)
            fresh[str(rank.rank)] = [rank.steps, last, len(mine), longest, _losses(mine)]
            rank.beat_ns = last
            if first:
                first_step(rank, news[0].time_ns / 1e9)
        if fresh:
            self._say({"is": "beats", "ranks": fresh})

    def _report_listening(self, rank: RankProcess) -> None:
        """Report, once, that the rank or a process below it listens on the port it was given: it is a service."""
        if rank.port and not rank.is_listening and ports.is_listening(rank.port, (rank.pid, *children(rank.pid))):
            rank.is_listening = True
            self._say({"is": "listening", "rank": rank.rank, "port": rank.port})

    def note_holders(self, rank: RankProcess, nvml: Nvml | None, run_id: str) -> None:
        """Who is on its card while it fails: once it is gone, so is its own entry, and perhaps the other's."""
        if nvml is not None and rank.gpu:
            self._holders[rank.pid] = tuple(
                {**as_json(one), "ours": one.pid == rank.pid or one.run == run_id}
                for one in nvml.holders(rank.gpu) or ()
            )

    def around(self, rank: RankProcess, nvml: Nvml | None, run_id: str) -> dict[str, Any]:
        total, available, _ = host_memory.read_memory()
        free, whole = host_limits.shared_memory()
        if rank.pid not in self._holders:
            self.note_holders(rank, nvml, run_id)
        card = nvml.memory(rank.gpu) if nvml is not None and rank.gpu else None
        holders = self._holders.get(rank.pid, ())
        seen = ExitContext(
            tuple(rank.rss),
            available,
            total,
            _kernel_lines(rank),
            holders,
            card and card[1],
            free,
            whole,
            tuple(host_limits.full_disks()),
            rank.loader_workers,
            address_space_limit(rank.pid),
        )
        found: dict[str, Any] = as_json(seen)
        return found


def _is_loader_worker(pid: int) -> bool:
    """Return whether torch's DataLoader started this process: it names its workers since torch 2.7."""
    return read_kernel_file(f"/proc/{pid}/comm").strip() == "pt_data_worker"


def address_space_limit(pid: int) -> int | None:
    """Return RLIMIT_AS of a process in bytes, or None if it has none. A zombie still has its limits."""
    try:
        limit = resource.prlimit(pid, resource.RLIMIT_AS)[0]
    except OSError:
        return None
    return None if limit == resource.RLIM_INFINITY else limit


# What a run's history keeps of a host and of a card: fields of HostGauges and GpuGauges.
_OF_HOST = (
    "cores", "cpu", "memory_total", "memory_available", "swap_used", "disk_free", "disk_total", "disk_read", "disk_written", "received", "sent", "link",
    "pressure_cpu", "pressure_io", "pressure_memory",
)  # fmt: skip
_OF_CARD = ("utilization", "memory_used", "memory_total", "temperature", "power", "throttle")


def gauges_message(here: HostGauges, cards: tuple[GpuGauges, ...], resident: dict[str, int]) -> dict[str, Any]:
    """`resident`: bytes by rank."""
    known = {name: _short(getattr(here, name)) for name in _OF_HOST}
    known["load"] = here.load[0] if here.load else None
    gpus = {card.uuid: {name: _short(getattr(card, name)) for name in _OF_CARD} for card in cards if card.uuid}
    return {"is": "gauges", "host": known, "gpus": gpus, "ranks": resident}


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _longest(before: int, beats: list[Beat]) -> float:
    """Seconds of the longest gap between these beats, and between them and the one before."""
    times = [before or beats[0].time_ns, *(beat.time_ns for beat in beats)]
    return round(max(after - one for one, after in itertools.pairwise(times)) / 1e9, 4)


def _losses(beats: list[Beat]) -> list[list[Any]]:
    """[step, loss] of the newest beats that carry one. As text: JSON has no NaN."""
    told = [beat for beat in beats if beat.loss is not None]
    return [[beat.step, repr(beat.loss)] for beat in told[-MOST_LOSSES:]]


def _work(pid: int) -> tuple[float, int]:
    """(CPU seconds, bytes read and written) of a process and its children so far."""
    cpu, moved = 0.0, 0
    for one in (pid, *children(pid)):
        cpu += procfs.cpu_seconds(one) or 0.0
        moved += procfs.bytes_moved(one) or 0
    return round(cpu, 2), moved


def _kernel_lines(rank: RankProcess) -> tuple[str, ...]:
    words = (f"process {rank.pid} ", f"[{rank.pid}]", "Out of memory", "oom-kill", "Memory cgroup out of memory")

    def concerns(line: str) -> bool:
        found = kernel_messages.parse_xid(line)
        return kernel_log.same_card(rank.pci, found[0]) if found else any(word in line for word in words)

    return tuple(line[:300] for line in kernel_log.lines(rank.started) if concerns(line))[-12:]


# ---- memory: the MEM lines' numbers, and the guard on resident memory ----
#
# Resident memory, never RLIMIT_AS: that limits address space, which a CUDA context alone fills with tens of gigabytes.


def memory_now(pid: int, gpu: str | None, nvml: Nvml | None) -> dict[str, Any]:
    total, available, _ = host_memory.read_memory()
    card = nvml.memory(gpu) if nvml is not None and gpu else None
    of_host = {"host_used": total - available, "host_total": total}
    return {"rss": procfs.resident_bytes(pid), **of_host, "gpu": list(card) if card else None}


def keep_below(limit: int, ranks: dict[int, RankProcess], say: Say) -> None:
    """0: no limit."""
    for rank in ranks.values() if limit else ():
        if rank.ended is not None or rank.over:
            continue
        family = [rank.pid, *children(rank.pid)]
        if sum(procfs.resident_bytes(pid) or 0 for pid in family) <= limit:
            continue
        # Forked workers share pages with the rank, which the sum counts twice. PSS is exact, and slow to read.
        taken = sum(_proportional(pid) for pid in family)
        if taken > limit:
            rank.over = taken
            rank.signalled = True
            send_signal(rank.me, signal.SIGSTOP)  # no further growth while the coordinator hears of it
            workers = max(rank.loader_workers, sum(map(_is_loader_worker, family)))
            say({"is": "ram", "rank": rank.rank, "bytes": taken, "limit": limit, "loader_workers": workers})


def children(pid: int) -> list[int]:
    """Its children, and theirs."""
    direct = [int(child) for child in read_kernel_file(f"/proc/{pid}/task/{pid}/children").split()]
    return direct + [grandchild for child in direct for grandchild in children(child)]


def _proportional(pid: int) -> int:
    lines = kernel_lines(f"/proc/{pid}/smaps_rollup")
    exact = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), None)
    return procfs.resident_bytes(pid) or 0 if exact is None else exact  # gone, or a kernel without it: the next best
