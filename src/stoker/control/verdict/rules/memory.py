"""Causes oom.*: a rank ran out of host memory, or reached a limit on it."""

from __future__ import annotations

import re
import signal

from stoker.contract import kernel_messages
from stoker.contract.evidence import ExitContext
from stoker.contract.units import format_bytes, format_duration, plural
from stoker.control.verdict.catalogue import CATALOGUE, Case, CauseMatch, Family, Match
from stoker.control.verdict.exit_text import (
    at_location,
    extract_searched_text,
    find_in_output,
    first_line,
    last_seen_at,
    line_of,
    location,
)

ORDER = 20
UNLIMITED = (
    "ulimit -v unlimited in the shell that starts stoker, and no resource.setrlimit(RLIMIT_AS) in the script: it limits"
    " address space, not memory, and a CUDA context alone reserves 18 GB of it; --ram-limit limits real memory"
)

FEWER_WORKERS = "fewer data-loader workers: each has its own copy of what the data set keeps in Python objects"
FEWER_RANKS = "fewer ranks on this host (--nproc-per-node)"

family = Family(__name__, UNLIMITED=UNLIMITED, FEWER_WORKERS=FEWER_WORKERS, FEWER_RANKS=FEWER_RANKS)
family.entries("""
oom.ram-limit: A rank used more memory than --ram-limit.
  seen: the rank and its workers together use more (PSS) than --ram-limit
  unless: the sum of resident sizes is over but the proportional one is not: shared pages counted twice
  fix: {FEWER_WORKERS}
  fix: a smaller batch, or a higher --ram-limit
""")


@family.cause("""
oom.host: The kernel killed a rank, or one of its workers, because the host or the container was out of memory.
  seen: SIGKILL that Stoker did not send to the rank, or a data-loader worker that vanished; and the cgroup's
      oom_kill counter rose, or the kernel's log says it killed that pid
  unless: neither of these: rank.killed, another process sent it. An allocation that was refused without a kill:
      oom.host-allocation
  fix: {FEWER_WORKERS}
  fix: {FEWER_RANKS}
  fix: --init-slots 1 loads models one after the other; safetensors with mmap reads weights without a second copy
  fix: --ram-limit SIZE stops the job before the kernel does; a container's own limit is in /sys/fs/cgroup/memory.max
""")
def match_host_kill(case: Case) -> CauseMatch | None:
    end = case.end
    ended = r"(?: exited unexpectedly| is killed by signal: Killed)"
    worker = find_in_output(case, r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)" + ended)
    if end.code != -signal.SIGKILL and worker is None:
        return None
    pids = worker[1].replace(",", " ").split() if worker else [str(end.pid)]
    kernel = [line for line in end.around.kernel if kernel_messages.parse_oom_kill(line) in pids]
    if not kernel and not end.oom_killed:
        return None
    process = f"a data-loader worker (pid {', '.join(pids)}) of {case.rank_name}" if worker else case.rank_name
    status = () if worker else ("wait status: killed by SIGKILL",)
    steps = (f"it had reached step {end.steps}",) if end.steps else ()
    counter = ("the cgroup's oom_kill counter went up",) if end.oom_killed else ()
    trend = describe_memory_trend(end.around)
    trend_text = f" ({trend[0]})" if trend else ""
    line = "" if worker else last_seen_at(case)
    last_seen = f"; last seen at {line}" if line else ""
    summary = f"{process} was killed by the kernel: out of memory{trend_text}{last_seen}"
    loader_workers = end.around.loader_workers
    workers = (f"it had {plural(loader_workers, 'data-loader worker')}",) if loader_workers else ()
    has_workers = worker is not None or bool(workers)
    fix = (
        line
        for line in CATALOGUE["oom.host"].fix
        if (has_workers or line != FEWER_WORKERS) and (case.evidence.world_size > 1 or line != FEWER_RANKS)
    )
    return CauseMatch(summary, (*status, *steps, *counter, *kernel[-2:], *trend, *workers), tuple(fix))


def describe_memory_trend(context: ExitContext) -> tuple[str, ...]:
    """Return lines about how the rank's memory changed before its end and how much the host had available."""
    lines = []
    if len(context.rss) > 1:
        (since, first), (until, last) = context.rss[0], context.rss[-1]
        verb, duration = "grew" if last > first else "went", format_duration(until - since)
        lines.append(f"its resident memory {verb} from {format_bytes(first)} to {format_bytes(last)} in {duration}")
    elif context.rss:
        lines.append(f"its resident memory was {format_bytes(context.rss[0][1])}")
    if context.host_available is not None:
        total = f" of {format_bytes(context.host_total)}" if context.host_total is not None else ""
        lines.append(f"the host had {format_bytes(context.host_available)}{total} available")
    return tuple(lines)


@family.cause(r"""
oom.host-allocation: The host refused memory to the rank: too little RAM, or a limit on its address space.
  perhaps: std::bad_alloc|DefaultCPUAllocator: (?:can't|not enough)[^\n]*|\[Errno 12\][^\n]*|
      unable to mmap[^\n]*Cannot allocate memory[^\n]*
  seen: MemoryError, std::bad_alloc, errno 12, or torch's "DefaultCPUAllocator: can't allocate memory"
  unless: the process was killed and not refused: oom.host. The memory is the GPU's: oom.gpu
  fix: free -h, and cat /sys/fs/cgroup/memory.max: is there enough for what was requested?
  fix: a CPU rank of stoker train may use its share of what was free when it started: close other programs, or use fewer
      ranks (--nproc-per-node), a smaller --micro or a shorter --context-length
  fix: {UNLIMITED}
  fix: --init-slots 1: only one rank at a time imports and loads its model
  fix: memory-map the weights and the data instead of reading them into memory
""")
def match_host_allocation(case: Case, match: Match | None) -> CauseMatch | None:
    error = case.end.error
    if match is None and not (error is not None and error.type in ("MemoryError", "_ArrayMemoryError")):
        return None
    requested = _parse_requested_bytes(extract_searched_text(case))
    size = format_bytes(requested) if requested else ""
    context = case.context
    limit = context.address_limit
    # The kernel refuses an allocation only if it is above the rank's limit, or larger than all of the host's memory.
    exceeds_host = bool(requested and context.host_total and requested > context.host_total)
    at = at_location(case)
    if limit is not None and not exceeds_host:
        failure = line_of(match) if match else "MemoryError"
        summary = f"{case.rank_name}: out of address space{at}: limited to {format_bytes(limit)} (ulimit -v, RLIMIT_AS)"
        refused = f"{failure}: an allocation{f' of {size}' if size else ''} was refused by that limit, not by the host"
        return CauseMatch(summary, (refused, *describe_memory_trend(context)), (UNLIMITED,))
    fix: tuple[str, ...] = ()
    # host_total shows that the agent read the limits: the rank had none, so don't advise to raise it.
    if context.host_total is not None and limit is None:
        fix = tuple(line for line in CATALOGUE["oom.host-allocation"].fix if line != UNLIMITED)
    if exceeds_host and context.host_total:
        excess = f"one allocation of {size} is more than the host has ({format_bytes(context.host_total)})"
        fix = (f"{excess}: check the shape at {location(case.end)}",)
    raised = (f"{error.type}: {first_line(error.message)}",) if error else ()
    if match:
        raised = (line_of(match),)
    raised_at = (f"at {location(case.end)}",) if error else ()
    summary = f"{case.rank_name}: host memory allocation failed{f': {size}' if size else ''}"
    return CauseMatch(summary, (*raised, *raised_at, *describe_memory_trend(context)), fix)


def _parse_requested_bytes(text: str) -> int:
    """Return the number of bytes that torch or numpy reports as requested, or 0."""
    if match := re.search(r"tried to (?:allocate|mmap) (\d+) bytes", text):
        return int(match[1])
    if match := re.search(r"Unable to allocate ([\d.]+) (bytes|[KMGTPE]iB) for an array with shape ", text):
        return int(float(match[1]) * 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB").index(match[2]))
    return 0
