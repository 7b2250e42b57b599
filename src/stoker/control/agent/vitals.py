"""Reads and reports the vitals of this host's ranks: beats, process states, memory, and the circumstances of a failure.

A rank that beats costs one read of shared memory twice a second. Only a rank without beats is looked up in /proc.
"""

from __future__ import annotations

import itertools
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

from stoker.contract import host_memory, kernel_messages
from stoker.contract.beat import Beat
from stoker.contract.evidence import ExitContext
from stoker.contract.frozen import as_json
from stoker.contract.process import find_process, read_kernel_file, read_kernel_lines, send_signal
from stoker.control.agent.spawn import RankProcess
from stoker.control.machine import host_limits, kernel_log, ports, procfs
from stoker.control.machine.model import GpuGauges, HostGauges
from stoker.control.machine.nvml import Nvml

BEATS_S = 0.5
QUIET_S = 1.0  # a rank without a beat for this long is looked up in /proc
VITALS_S = 2.0
MAX_LOSSES = 32  # of a rank in one message

Send = Callable[[dict[str, Any]], None]
OnFirstStep = Callable[[RankProcess, float], None]  # called with the rank and the time of its first beat


class Vitals:
    """Reads and reports the ranks' signs of life, at most every BEATS_S."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._beats_at = self._vitals_at = 0.0
        self._gpu_holders: dict[int, tuple[dict[str, Any], ...]] = {}  # by a rank's pid

    def report(self, ranks: dict[int, RankProcess], now: float, on_first_step: OnFirstStep) -> None:
        """Report new beats, and the process states of quiet ranks."""
        if now - self._beats_at < BEATS_S:
            return
        self._beats_at = now
        self.read_beats(ranks, on_first_step)
        are_vitals_due = now - self._vitals_at >= VITALS_S
        if are_vitals_due:
            self._vitals_at = now
        quiet_ranks: dict[str, list[Any]] = {}
        for rank in ranks.values():
            if rank.exit_code is not None:
                continue
            if are_vitals_due:
                descendants = procfs.read_descendants(rank.pid)
                resident = sum(procfs.resident_bytes(pid) or 0 for pid in (rank.pid, *descendants))
                rank.loader_workers = max(rank.loader_workers, sum(map(_is_loader_worker, descendants)))
                rank.rss.append((round(time.time(), 1), resident))
                if rank.port and not rank.is_listening and ports.is_listening(rank.port, (rank.pid, *descendants)):
                    rank.is_listening = True  # it listens on its STOKER_PORT, so it is a service
                    self._send({"is": "listening", "rank": rank.rank, "port": rank.port})
            if now - rank.last_beat_at > QUIET_S:
                process = find_process(rank.pid)
                state, before = process.state if process else "Z", rank.state
                rank.state = state
                was_stopped_or_continued = state != before and "T" in (state.upper(), before.upper())
                if are_vitals_due or was_stopped_or_continued:
                    quiet_ranks[str(rank.rank)] = [state, *_read_work_done(rank.pid)]
        if quiet_ranks:
            self._send({"is": "vitals", "ranks": quiet_ranks})

    def read_beats(self, ranks: dict[int, RankProcess], on_first_step: OnFirstStep) -> None:
        """Read and report the beats since the last call."""
        new_beats: dict[str, list[Any]] = {}
        for rank in ranks.values():
            if rank.reader is None or rank.reader.written == rank.reader.read_count:
                continue
            beats = rank.reader.read_new()
            if rank.reader.is_overwritten:
                rank.reader = None
                self._send({"is": "beatless", "rank": rank.rank})
                text = "its beats are unreadable because something overwrote them; it is watched without them"
                self._send({"is": "note", "rank": rank.rank, "text": text})
            if not beats:
                continue
            is_first = rank.steps == 0
            # The steps of one optimizer count. stoker.beat() in the script is optimizer 0, and counts if it is used.
            first_optimizer = min(beat.optimizer for beat in beats)
            steps = [beat for beat in beats if beat.optimizer == first_optimizer]
            rank.steps = max(1, rank.steps, *(beat.step for beat in steps))
            rank.last_beat_at = time.monotonic()
            last_ns, gap = steps[-1].time_ns, _find_longest_gap(rank.last_beat_ns, steps)
            new_beats[str(rank.rank)] = [rank.steps, last_ns, len(steps), gap, _find_newest_losses(steps)]
            rank.last_beat_ns = last_ns
            if is_first:
                on_first_step(rank, beats[0].time_ns / 1e9)
        if new_beats:
            self._send({"is": "beats", "ranks": new_beats})

    def note_gpu_holders(self, rank: RankProcess, nvml: Nvml | None, run_id: str) -> None:
        """Note the processes on a rank's GPU while it fails: once it has ended, NVML no longer lists it, nor perhaps others."""
        if nvml is not None and rank.gpu:
            self._gpu_holders[rank.pid] = tuple(
                {**as_json(holder), "ours": holder.pid == rank.pid or holder.run == run_id}
                for holder in nvml.read_holders(rank.gpu) or ()
            )

    def read_exit_context(self, rank: RankProcess, nvml: Nvml | None, run_id: str) -> dict[str, Any]:
        """Return the circumstances of a rank's failure (contract/evidence.py:ExitContext), as JSON."""
        total, available, _ = host_memory.read_memory()
        shm_free, shm_total = host_limits.read_shm_space()
        if rank.pid not in self._gpu_holders:
            self.note_gpu_holders(rank, nvml, run_id)
        gpu_memory = nvml.read_memory(rank.gpu) if nvml is not None and rank.gpu else None
        context: dict[str, Any] = as_json(
            ExitContext(
                tuple(rank.rss),
                available,
                total,
                _find_kernel_messages(rank),
                self._gpu_holders.get(rank.pid, ()),
                gpu_memory and gpu_memory[1],
                shm_free,
                shm_total,
                tuple(host_limits.find_full_disks()),
                rank.loader_workers,
                _read_address_space_limit(rank.pid),
            )
        )
        return context


def _is_loader_worker(pid: int) -> bool:
    """Return whether torch's DataLoader started this process: it names its workers since torch 2.7."""
    return read_kernel_file(f"/proc/{pid}/comm").strip() == "pt_data_worker"


def _read_address_space_limit(pid: int) -> int | None:
    """Return RLIMIT_AS of a process in bytes, or None if it has none. A zombie still has its limits."""
    try:
        limit = resource.prlimit(pid, resource.RLIMIT_AS)[0]
    except OSError:
        return None
    return None if limit == resource.RLIM_INFINITY else limit


# These fields of HostGauges and GpuGauges are kept in a run's history.
_HOST_FIELDS = (
    "cores", "cpu", "memory_total", "memory_available", "swap_used", "disk_free", "disk_total", "disk_read", "disk_written", "received", "sent", "link",
    "pressure_cpu", "pressure_io", "pressure_memory",
)  # fmt: skip
_GPU_FIELDS = ("utilization", "memory_used", "memory_total", "temperature", "power", "throttle")


def make_gauges_message(host: HostGauges, gpus: tuple[GpuGauges, ...], resident: dict[str, int]) -> dict[str, Any]:
    """Return the "gauges" message. `resident` has the resident memory of each rank in bytes."""
    host_values = {name: _round(getattr(host, name)) for name in _HOST_FIELDS}
    host_values["load"] = host.load[0] if host.load else None
    gpu_values = {gpu.uuid: {name: _round(getattr(gpu, name)) for name in _GPU_FIELDS} for gpu in gpus if gpu.uuid}
    return {"is": "gauges", "host": host_values, "gpus": gpu_values, "ranks": resident}


def _round(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _find_longest_gap(last_ns: int, beats: list[Beat]) -> float:
    """Return the longest gap in seconds between these beats, counted from the last beat before them."""
    times = [last_ns or beats[0].time_ns, *(beat.time_ns for beat in beats)]
    return round(max(after - before for before, after in itertools.pairwise(times)) / 1e9, 4)


def _find_newest_losses(beats: list[Beat]) -> list[list[Any]]:
    """Return [step, loss] of the newest beats that have a loss; the loss as text, because JSON has no NaN."""
    with_loss = [beat for beat in beats if beat.loss is not None]
    return [[beat.step, repr(beat.loss)] for beat in with_loss[-MAX_LOSSES:]]


def _read_work_done(pid: int) -> tuple[float, int]:
    """Return the CPU seconds and the bytes read and written so far by a process and its descendants."""
    seconds, moved = 0.0, 0
    for each in (pid, *procfs.read_descendants(pid)):
        seconds += procfs.cpu_seconds(each) or 0.0
        moved += procfs.bytes_moved(each) or 0
    return round(seconds, 2), moved


def _find_kernel_messages(rank: RankProcess) -> tuple[str, ...]:
    """Return the newest lines of the kernel's log about a rank's process, its GPU, or memory."""
    phrases = (f"process {rank.pid} ", f"[{rank.pid}]", "Out of memory", "oom-kill", "Memory cgroup out of memory")

    def is_about_rank(line: str) -> bool:
        xid = kernel_messages.parse_xid(line)
        return kernel_log.is_same_gpu(rank.pci, xid[0]) if xid else any(phrase in line for phrase in phrases)

    return tuple(line[:300] for line in kernel_log.read_messages(rank.started) if is_about_rank(line))[-12:]


# ---- memory: the numbers of the MEM lines, and the limit on resident memory ----


def measure_memory(pid: int, gpu: str | None, nvml: Nvml | None) -> dict[str, Any]:
    """Return the memory of a process, its host and its GPU, as fields of the "mem" message."""
    total, available, _ = host_memory.read_memory()
    gpu_memory = nvml.read_memory(gpu) if nvml is not None and gpu else None
    return {
        "rss": procfs.resident_bytes(pid),
        "host_used": total - available,
        "host_total": total,
        "gpu": list(gpu_memory) if gpu_memory else None,
    }


def enforce_memory_limit(limit: int, ranks: dict[int, RankProcess], send: Send) -> None:
    """Stop and report each rank whose processes have more than `limit` bytes of resident memory. A limit of 0 is none.

    RLIMIT_AS can't be used: it limits address space, of which a CUDA context alone takes tens of gigabytes.
    """
    for rank in ranks.values() if limit else ():
        if rank.exit_code is not None or rank.over_limit:
            continue
        pids = [rank.pid, *procfs.read_descendants(rank.pid)]
        if sum(procfs.resident_bytes(pid) or 0 for pid in pids) <= limit:
            continue
        # The sum counts pages that forked workers share with the rank more than once. PSS is exact, but slow to read.
        total = sum(_read_proportional_bytes(pid) for pid in pids)
        if total > limit:
            rank.over_limit = total
            rank.is_signalled = True
            send_signal(rank.process, signal.SIGSTOP)  # it must not grow before the coordinator has decided
            workers = max(rank.loader_workers, sum(map(_is_loader_worker, pids)))
            send({"is": "ram", "rank": rank.rank, "bytes": total, "limit": limit, "loader_workers": workers})


def _read_proportional_bytes(pid: int) -> int:
    """Return the PSS of a process, or its resident memory if the kernel does not report the PSS."""
    lines = read_kernel_lines(f"/proc/{pid}/smaps_rollup")
    pss = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), None)
    return procfs.resident_bytes(pid) or 0 if pss is None else pss
