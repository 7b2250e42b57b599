"""oom.*: memory of the GPU and of the host."""

from __future__ import annotations

import re
import signal

from stoker.contract import kernel_messages
from stoker.contract.evidence import ExitContext
from stoker.contract.units import format_bytes, format_duration, plural
from stoker.control.verdict.catalogue import CATALOGUE, Case, CauseMatch, Family, Match
from stoker.control.verdict.exit_text import at, find, first_line, last_seen, line_of, place, said

ORDER = 20
UNLIMITED = (
    "ulimit -v unlimited in the shell that starts stoker, and no resource.setrlimit(RLIMIT_AS) in the script: it limits"
    " address space, not memory, and a CUDA context alone reserves 18 GB of it; --ram-limit limits real memory"
)

FEWER_WORKERS = "fewer data-loader workers: each holds its own copy of what the dataset keeps in Python objects"
FEWER_RANKS = "fewer ranks on this host (--nproc-per-node)"

family = Family(__name__, UNLIMITED=UNLIMITED, FEWER_WORKERS=FEWER_WORKERS, FEWER_RANKS=FEWER_RANKS)
family.entries("""
oom.ram-limit: A rank's resident memory passed --ram-limit.
  seen: the rank and its workers together hold more (PSS) than --ram-limit
  unless: the sum of resident sizes is over but the proportional one is not: shared pages counted twice
  fix: {FEWER_WORKERS}
  fix: a smaller batch, or a higher --ram-limit
""")


@family.cause("""
oom.host: The kernel killed a rank, or a worker of it, because the host or the container was out of memory.
  seen: SIGKILL that Stoker did not send to the rank, or a data-loader worker of it that vanished; and the cgroup's
      oom_kill counter rose, or the kernel's log says it killed that pid
  unless: neither of these: rank.killed, another process sent it. An allocation that was refused without a kill:
      oom.host-allocation
  fix: {FEWER_WORKERS}
  fix: {FEWER_RANKS}
  fix: --init-slots 1 loads models one after the other; safetensors with mmap reads weights without a second copy
  fix: --ram-limit SIZE stops the job before the kernel does; a container's own limit is in /sys/fs/cgroup/memory.max
""")
def host(case: Case) -> CauseMatch | None:
    end = case.end
    ended = r"(?: exited unexpectedly| is killed by signal: Killed)"
    worker = find(case, r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)" + ended)
    if end.code != -signal.SIGKILL and worker is None:
        return None
    pids = worker[1].replace(",", " ").split() if worker else [str(end.pid)]
    kernel = [line for line in end.around.kernel if kernel_messages.parse_oom_kill(line) in pids]
    if not kernel and not end.oom_killed:
        return None
    who = f"a data-loader worker (pid {', '.join(pids)}) of {case.who}" if worker else case.who
    how = () if worker else ("wait status: killed by SIGKILL",)
    steps = (f"it had reached step {end.steps}",) if end.steps else ()
    counter = ("the cgroup's oom_kill counter went up",) if end.oom_killed else ()
    trend = memory_trend(end.around)
    grew = f" ({trend[0]})" if trend else ""
    where = "" if worker else last_seen(case)
    summary = f"{who} was killed by the kernel: out of memory{grew}{where and f'; last seen at {where}'}"
    workers = (
        (f"it had {plural(end.around.loader_workers, 'data-loader worker')}",) if end.around.loader_workers else ()
    )
    has_workers = worker is not None or bool(workers)
    fix = (
        line
        for line in CATALOGUE["oom.host"].fix
        if (has_workers or line != FEWER_WORKERS) and (case.evidence.world_size > 1 or line != FEWER_RANKS)
    )
    return CauseMatch(summary, (*how, *steps, *counter, *kernel[-2:], *trend, *workers), tuple(fix))


def memory_trend(around: ExitContext) -> tuple[str, ...]:
    """How the rank's memory went, and what the host had left."""
    lines = []
    if len(around.rss) > 1:
        (since, first), (until, last) = around.rss[0], around.rss[-1]
        verb = "grew" if last > first else "went"
        lines.append(
            f"its resident memory {verb} from {format_bytes(first)} to {format_bytes(last)} in {format_duration(until - since)}"
        )
    elif around.rss:
        lines.append(f"its resident memory was {format_bytes(around.rss[0][1])}")
    if around.host_available is not None:
        of = f" of {format_bytes(around.host_total)}" if around.host_total is not None else ""
        lines.append(f"the host had {format_bytes(around.host_available)}{of} available")
    return tuple(lines)


@family.cause(r"""
oom.host-allocation: The host refused memory to the rank: too little RAM, or a limit on its address space.
  perhaps: std::bad_alloc|DefaultCPUAllocator: (?:can't|not enough)[^\n]*|\[Errno 12\][^\n]*|
      unable to mmap[^\n]*Cannot allocate memory[^\n]*
  seen: MemoryError, std::bad_alloc, errno 12, or torch's "DefaultCPUAllocator: can't allocate memory"
  unless: the process was killed and not refused: oom.host. The memory is the GPU's: oom.gpu
  fix: free -h, and cat /sys/fs/cgroup/memory.max: is there enough for what was requested?
  fix: a CPU rank of stoker train may take its part of what was free when it started: close other programs, or use fewer
      ranks (--nproc-per-node), a smaller --micro or a shorter --context-length
  fix: {UNLIMITED}
  fix: --init-slots 1: one rank at a time imports and loads its model
  fix: memory-map the weights and the data instead of reading them whole
""")
def allocation(case: Case, found: Match | None) -> CauseMatch | None:
    error = case.end.error
    if found is None and not (error is not None and error.type in ("MemoryError", "_ArrayMemoryError")):
        return None
    requested = _requested(said(case))
    size = format_bytes(requested) if requested else ""
    around = case.end.around
    limit = around.address_limit
    # The kernel refuses address space above the limit, and otherwise only what the host can't have at all.
    is_too_much = bool(requested and around.host_total and requested > around.host_total)
    if limit is not None and not is_too_much:
        failed = line_of(found) if found else "MemoryError"
        summary = f"{case.who}: out of address space{at(case)}: limited to {format_bytes(limit)} (ulimit -v, RLIMIT_AS)"
        refused = f"{failed}: an allocation{f' of {size}' if size else ''} was refused by that limit, not by the host"
        return CauseMatch(summary, (refused, *memory_trend(around)), (UNLIMITED,))
    fix: tuple[str, ...] = ()
    if around.host_total is not None and limit is None:  # the agent looked, and there is no limit
        fix = tuple(line for line in CATALOGUE["oom.host-allocation"].fix if line != UNLIMITED)
    if is_too_much and around.host_total:
        piece = f"{size} in one piece is more than the host has ({format_bytes(around.host_total)})"
        fix = (f"{piece}: look at the shape at {place(case.end)}",)
    said_so = (f"{error.type}: {first_line(error.message)}",) if error else ()
    if found:
        said_so = (line_of(found),)
    location = (f"at {place(case.end)}",) if error else ()
    summary = f"{case.who}: host memory allocation failed{f': {size}' if size else ''}"
    return CauseMatch(summary, (*said_so, *location, *memory_trend(around)), fix)


def _requested(text: str) -> int:
    """Return the bytes that torch or numpy says it wanted; 0 if they don't say."""
    if match := re.search(r"tried to (?:allocate|mmap) (\d+) bytes", text):
        return int(match[1])
    if match := re.search(r"Unable to allocate ([\d.]+) (bytes|[KMGTPE]iB) for an array with shape ", text):
        return int(float(match[1]) * 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB").index(match[2]))
    return 0
