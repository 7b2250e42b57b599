"""nccl.*: NCCL's own errors. torch prints "NCCL error in: …", the kind, and "Last error:" with NCCL's last warning."""

from __future__ import annotations

import re

from stoker.control.verdict.catalogue import Case, Found, Match, cause, steps
from stoker.control.verdict.lastwords import amount, find, first_line, line_of, place, said
from stoker.control.verdict.rules import network

ORDER = 45

_WARN = "stoker run --env NCCL_DEBUG=WARN …   # NCCL then says more before it gives up"


def _last_error(case: Case) -> str:
    found = re.search(r"Last error:\s*\n(?:\[rank\d+\]: )?([^\n]+)", said(case))
    return found[1].strip() if found else ""


def _evidence(case: Case, line: str) -> tuple[str, ...]:
    last = _last_error(case)
    at = (f"at {place(case.end)}",) if case.end.error else ()
    return (line, *((f"NCCL's last error: {last}",) if last and last not in line else ()), *at)


@cause(
    "nccl.version",
    said=r"Mismatched NCCL version detected[^\n]*|NCCL version mismatch[^\n]*|undefined symbol: nccl\w+",
    seen='"Mismatched NCCL version detected", or a symbol of NCCL that the library found at run time does not have',
    contradicts="other invalid usage (two ranks on one GPU: gpu.duplicate; no interface: nccl.interface)",
    fix=steps("""
    python -c 'import torch; print(torch.__version__, torch.cuda.nccl.version())' on each host: the same torch build \
    everywhere
    LD_LIBRARY_PATH or LD_PRELOAD that brings in a system's libnccl: unset it; torch's wheels bring their own (pip \
    list | grep nccl)
    """),
)
def version(case: Case, found: Match) -> Found:
    """The ranks, or torch and the library it found, have different versions of NCCL."""
    return Found(f"{case.who}: {first_line(found[0])}", _evidence(case, line_of(found)))


@cause(
    "nccl.interface",
    said=r"no socket interface found|is neither AF_INET",
    seen='NCCL\'s "Bootstrap : no socket interface found", or an address without a family',
    contradicts="the interface is there and the peer does not answer: nccl.connection",
    fix=steps("""
    unset NCCL_SOCKET_IFNAME, or name an interface that exists on this host (ip -brief address): hosts may have \
    different ones, and the value is a prefix (=eth0 is exact, ^docker excludes)
    is it still set in ~/.bashrc, /etc/nccl.conf or ~/.nccl.conf?
    """),
)
def interface(case: Case, found: Match) -> Found:
    """NCCL found no network interface to use."""
    return Found(f"{case.who}: NCCL finds no network interface (NCCL_SOCKET_IFNAME?)", _evidence(case, line_of(found)))


@cause(
    "nccl.shm",
    said=(
        r"[Ee]rror while (?:creating|attaching to) shared memory segment|failed to extend"
        r" /dev/shm/nccl-|posix_fallocate failed"
    ),
    seen="""NCCL's "Error while creating shared memory segment /dev/shm/nccl-…", or its /dev/shm file that could not
    be extended""",
    contradicts="torch's own shared memory between a loader and its workers: data.shm",
    fix=steps("""
    a larger /dev/shm: docker run --shm-size=16g or --ipc=host; in Kubernetes an emptyDir with medium: Memory on \
    /dev/shm
    stoker clean   # shows segments that dead runs left there
    NCCL_SHM_DISABLE=1 goes on without, slower
    """),
)
def shm(case: Case, found: Match) -> Found:
    """NCCL could not get shared memory: /dev/shm is too small, or full."""
    around = case.end.around
    room = (
        (f"/dev/shm: {amount(around.shm_free or 0)} of {amount(around.shm_total)} free",)
        if around.shm_total is not None
        else ()
    )
    return Found(
        f"{case.who}: NCCL got no shared memory{' (' + room[0] + ')' if room else ''}",
        (*_evidence(case, line_of(found)), *room),
    )


@cause(
    "nccl.connection",
    seen="""at start-up, ranks on GPUs: NCCL's connection to a peer was refused, had no route or timed out; or the
    store can't be reached or not all ranks came""",
    contradicts=(
        "the connection was there and broke (reset by peer, remote process exited): the echo of another rank's end"
    ),
    fix=(
        *network.REACH,
        *steps(f"""
    a host with several networks: NCCL_SOCKET_IFNAME must name the one between the hosts (ip route get ADDRESS), not \
    docker0 or a VPN
    {_WARN}
    """),
    ),
    retryable=True,
)
def connection(case: Case) -> Found | None:
    """A rank could not connect to its peers at the start."""
    found = find(
        case,
        r"socket(?:StartConnect|PollConnect|Connect)[^\n]*(?:[Cc]onnect(?:ing)? to |poll\(\))[^\n]*|"
        r"(?:NCCL|nccl)[^\n]*[Cc]all to connect[^\n]*(?:refused|No route|timed out|unreachable)[^\n]*",
    )
    if found and "reset by peer" not in found[0]:
        peer = re.search(r"to ([\d.:a-f\[\]%\w]+<\d+>)", found[0])
        return Found(
            f"{case.who} can't connect to {peer[1] if peer else 'a peer'} (NCCL)", _evidence(case, line_of(found))
        )
    return network.store(case) if "GPU" in case.end.label else None


@cause(
    "nccl.cuda",
    said=r"unhandled cuda error|ncclUnhandledCudaError",
    seen='"unhandled cuda error" (ncclUnhandledCudaError), and its last error names no better cause',
    contradicts="the last error is out of memory, an illegal access, an ECC error …: then that is the cause",
    fix=steps(f"""
    the torch build and its NCCL must be the same on all hosts (python -c 'import torch; print(torch.__version__, \
    torch.cuda.nccl.version())'); an installed CUDA toolkit does not matter, torch brings its own
    the driver must be new enough for torch's CUDA build, and the card in its list: stoker doctor, on each host
    not the firewall: a port that is closed says so (connection refused, timed out), and 29500 is only the store
    NCCL_P2P_DISABLE=1, for one run: if it helps, the cards can't reach each other's memory (IOMMU or ACS in the BIOS, \
    a virtual machine)
    {_WARN}
    """),
    retryable=True,
)
def cuda(case: Case, found: Match) -> Found:
    """A CUDA call inside NCCL failed."""
    last = _last_error(case)
    return Found(
        f"{case.who}: NCCL: unhandled cuda error{': ' + first_line(last) if last else ''}",
        _evidence(case, line_of(found)),
    )


@cause(
    "nccl.system",
    seen='"unhandled system error" (ncclSystemError), and its last error names no better cause',
    contradicts="""shared memory: nccl.shm; a peer that can't be reached: nccl.connection; too many open files:
    data.too-many-files""",
    fix=steps(f"""
    {_WARN}
    limits: ulimit -l (locked memory, unlimited for InfiniBand), ulimit -n, docker's --ulimit memlock=-1
    """)
    + network.REACH,
    retryable=True,
)
def system(case: Case) -> Found | None:
    """A system call inside NCCL failed."""
    found = find(case, r"unhandled system error|ncclSystemError")
    if not found or find(case, r"(?i)reset by peer|remote process exited|Too many open files"):
        return None
    last = _last_error(case)
    return Found(
        f"{case.who}: NCCL: unhandled system error{': ' + first_line(last) if last else ''}",
        _evidence(case, line_of(found)),
    )


@cause(
    "nccl.timeout",
    said=r"Watchdog caught collective operation timeout[^\n]*|collective operation timeout: [^\n]*",
    seen="""NCCL's watchdog ended the process after the process group's timeout, and no rank failed, left or is seen
    to hang""",
    contradicts="a rank that failed by itself, left early or stopped: that is the cause, and the timeout its echo",
    fix=steps("""
    a rank that did not take part: unequal numbers of batches, an `if rank == 0` around a collective (saving a sharded \
    model is one), other code paths
    where was each rank? `stoker logs --rank N`, and the stacks in the record of the attempt
    long work on one rank between collectives: init_process_group(timeout=timedelta(hours=1)); NCCL_IB_TIMEOUT is \
    something else
    """),
    retryable=True,
)
def timeout(case: Case, found: Match) -> Found:
    """A collective was not finished in time, and nothing shows why."""
    line = line_of(found)
    work, ran = re.search(r"SeqNum=(\d+), OpType=(\w+)", line), re.search(r"ran for (\d+) milliseconds", line)
    what = f"{work[2]} number {work[1]}" if work else "a collective"
    late = f"after {int(ran[1]) / 1000:.0f} s" if ran else "in time"
    return Found(f"{case.who}: {what} was not finished {late}, and no rank is seen to have failed", (line,))
