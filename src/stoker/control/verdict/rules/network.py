"""Causes net.*, gloo.* and nccl.*: problems with ports and with connections between ranks."""

from __future__ import annotations

import re

from stoker.control.verdict.catalogue import Case, CauseMatch, Family, Match
from stoker.control.verdict.exit_text import (
    at_location,
    extract_searched_text,
    find_in_output,
    first_line,
    line_of,
    location,
    shm_evidence,
)

ORDER = 40

# Ranks of either backend connect to the store (MASTER_ADDR, MASTER_PORT) before they connect to each other.
STORE = (
    r"The client socket has (?:timed out after [^\n]*trying to connect to|failed to connect to[^\n]*) ?\(([^)]*)\)|"
    r"Timed out after (\d+) seconds waiting for clients\. (\d+/\d+) clients joined"
)
_REACH = """every host must reach every other on the ephemeral ports (/proc/sys/net/ipv4/ip_local_port_range), in both
    directions: MASTER_PORT is only for the store, the data uses other ports
    fix: MASTER_ADDR must be an address the other hosts can reach, not 127.0.0.1 and not a name that only one of them
        knows (getent hosts NAME, on each)"""
_WARN = "stoker run --env NCCL_DEBUG=WARN …   # NCCL then prints more before it gives up"


def _line_and_location(case: Case, line: str) -> tuple[str, ...]:
    return (line, at_location(case).strip()) if at_location(case) else (line,)


gloo = Family(__name__, _line_and_location, REACH=_REACH)


@gloo.cause("""
net.port-in-use, again: The script asked for a port that is in use.
  seen: EADDRINUSE in the exception: the script listens on a port that it chose itself and that another process uses
  unless: the port is Stoker's own (MASTER_PORT): that one is reserved before the ranks start
  fix: for the rendezvous of the ranks, use env:// (MASTER_ADDR and MASTER_PORT, which Stoker sets to a free port) instead of your own
      port
  fix: for a server, choose another port, or end the process that uses this one (ss -ltnp shows it)
""")
def match_port_in_use(case: Case) -> CauseMatch | None:
    error = case.end.error
    if error is None or not ("EADDRINUSE" in error.message or "address already in use" in error.message.lower()):
        return None
    match = re.search(r"port:? (\d+)", error.message)
    summary = f"{case.rank_name}: {f'port {match[1]}' if match else 'a port'} is already in use"
    return CauseMatch(summary, _line_and_location(case, f"{error.type}: {first_line(error.message)}"))


@gloo.cause(r"""
gloo.interface: gloo was told to use a network interface that this host does not have.
  perhaps: Unable to (?:find address|find interface|resolve hostname)[^\n:]*:? ?(\S*)
  seen: gloo's "Unable to find address for: eth0" or "Unable to find interface for", or a host name it can't resolve
  unless: the interface exists and the peer is not responding: gloo.connection
  fix: unset GLOO_SOCKET_IFNAME, or set it to an interface of this host (ip -brief address); hosts may need
      different ones
  fix: without it gloo uses the address of the host's own name: getent hosts $(hostname) must print it
""")
def match_gloo_interface(case: Case, match: Match | None) -> CauseMatch | None:
    if not match or not find_in_output(case, r"gloo|GLOO|Gloo"):
        return None
    summary = f"{case.rank_name}: gloo found no address for {match[1] or 'this host'}"
    return CauseMatch(summary, _line_and_location(case, line_of(match)))


gloo.entries(r"""
gloo.shape: Ranks sent each other tensors of different sizes in one collective.
  said: op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)
  summary: {who} received {0} bytes where it expected {1}: the ranks' collectives differ in size
  seen: gloo's "op.preamble.length <= op.nbytes": a rank received more bytes than it expected
  unless: the connection broke before: then the peer's exit is the cause
  fix: ranks called a collective with tensors of different sizes or types, or in another order: print shape and dtype
      before it on each rank
  fix: lists of unequal length: all_gather_object, or pad to the longest; a last batch that is smaller: drop_last=True
  fix: a model that differs between ranks (a layer that only rank 0 has, another vocabulary size)
""")


@gloo.cause(r"""
gloo.connection, again: A rank could not connect to its peers at the start.
  perhaps: connectFullMesh failed|gloo/transport/[^\n]*(?:Connection refused|No route to host|[Cc]onnect timeout|
      timed out connecting)
  seen: at start-up, ranks on CPU: the store can't be reached or not all ranks joined, or gloo's full mesh of
      connections could not be made
  unless: the connection was established and broke later (reset, closed by peer): a consequence of another rank's exit. A refused
      connection to something other than a peer: rank.exception
  fix: {REACH}
""")
def match_gloo_connection(case: Case, match: Match | None) -> CauseMatch | None:
    if match:
        summary = f"{case.rank_name} can't connect to a peer (gloo)"
        return CauseMatch(summary, _line_and_location(case, line_of(match)))
    return None if "GPU" in case.end.label else _match_store_failure(case)


def _match_store_failure(case: Case) -> CauseMatch | None:
    """Match a rank that could not reach the store, or that waited there for ranks that did not join."""
    match = find_in_output(case, STORE)
    if not match:
        return None
    if match[3]:
        joined, _, total = match[3].partition("/")
        text = f"{case.rank_name} waited {match[2]} s for the others: {joined} of {total} ranks joined the store"
    else:
        text = f"{case.rank_name} can't reach the store at {match[1].replace(', ', ':')}"
    return CauseMatch(text, _line_and_location(case, line_of(match)))


@gloo.cause(r"""
gloo.timeout, again: A gloo collective timed out, and nothing shows why.
  said: gloo/transport/[^\n]*Timed out waiting (\d+)ms for (\w+) operation
  seen: gloo's "Timed out waiting 1800000ms for recv operation to complete", and no rank failed or left
  unless: a rank that failed, left early or is seen to hang: that is the cause
  fix: a rank that did not take part: unequal numbers of batches, an `if rank == 0` around a collective, a slow save
      or evaluation on one rank
  fix: long work on one rank between collectives: init_process_group(timeout=timedelta(hours=2))
""")
def match_gloo_timeout(case: Case, match: Match) -> CauseMatch:
    summary = f"{case.rank_name} waited {int(match[1]) / 1000:.0f} s for a peer in a {match[2]}"
    return CauseMatch(summary, _line_and_location(case, line_of(match)))


# ---- NCCL ----


def _find_nccl_error(case: Case) -> str:
    match = re.search(r"Last error:\s*\n(?:\[rank\d+\]: )?([^\n]+)", extract_searched_text(case))
    return match[1].strip() if match else ""


def _nccl_evidence(case: Case, line: str) -> tuple[str, ...]:
    last = _find_nccl_error(case)
    at = (f"at {location(case.end)}",) if case.end.error else ()
    return (line, *((f"NCCL's last error: {last}",) if last and last not in line else ()), *at)


nccl = Family(__name__, _nccl_evidence, REACH=_REACH, WARN=_WARN)
nccl.entries(r"""
nccl.version: The ranks, or torch and the library it loads, have different versions of NCCL.
  said: Mismatched NCCL version detected[^\n]*|NCCL version mismatch[^\n]*|undefined symbol: nccl\w+
  summary: {who}: {said}
  seen: "Mismatched NCCL version detected", or a symbol that the NCCL library loaded at run time does not have
  unless: other invalid usage (two ranks on one GPU: gpu.duplicate; no interface: nccl.interface)
  fix: python -c 'import torch; print(torch.__version__, torch.cuda.nccl.version())' on each host: the same torch build
      everywhere
  fix: LD_LIBRARY_PATH or LD_PRELOAD that loads a system's libnccl: unset it; torch's wheels have their own (pip
      list | grep nccl)
nccl.interface: NCCL found no network interface to use.
  said: no socket interface found|is neither AF_INET
  summary: {who}: NCCL found no network interface (NCCL_SOCKET_IFNAME?)
  seen: NCCL's "Bootstrap : no socket interface found", or an address without a family
  unless: the interface exists and the peer is not responding: nccl.connection
  fix: unset NCCL_SOCKET_IFNAME, or set it to an interface of this host (ip -brief address): hosts may have
      different ones, and the value is a prefix (=eth0 is exact, ^docker excludes)
  fix: is it still set in ~/.bashrc, /etc/nccl.conf or ~/.nccl.conf?
""")


@nccl.cause("""
nccl.shm: NCCL could not get shared memory: /dev/shm is too small, or full.
  said: [Ee]rror while (?:creating|attaching to) shared memory segment|failed to extend /dev/shm/nccl-|
      posix_fallocate failed
  seen: NCCL's "Error while creating shared memory segment /dev/shm/nccl-…", or its /dev/shm file that could not be
      extended
  unless: torch's own shared memory between a loader and its workers: data.shm
  fix: a larger /dev/shm: docker run --shm-size=16g or --ipc=host; in Kubernetes an emptyDir with medium: Memory on
      /dev/shm
  fix: stoker clean   # shows segments that dead runs left there
  fix: NCCL_SHM_DISABLE=1 continues without it, slower
""")
def match_nccl_shm(case: Case, match: Match) -> CauseMatch:
    shm_free = shm_evidence(case.context)
    summary = f"{case.rank_name}: NCCL could not get shared memory{' (' + shm_free[0] + ')' if shm_free else ''}"
    return CauseMatch(summary, (*_nccl_evidence(case, line_of(match)), *shm_free))


@nccl.cause(r"""
nccl.connection, again: A rank could not connect to its peers at the start.
  perhaps: socket(?:StartConnect|PollConnect|Connect)[^\n]*(?:[Cc]onnect(?:ing)? to |poll\(\))[^\n]*|(?:NCCL|
      nccl)[^\n]*[Cc]all to connect[^\n]*(?:refused|No route|timed out|unreachable)[^\n]*
  seen: at start-up, ranks on GPUs: NCCL's connection to a peer was refused, had no route or timed out; or the store
      can't be reached or not all ranks joined
  unless: the connection was established and broke later (reset by peer, remote process exited): a consequence of another rank's exit
  fix: {REACH}
  fix: a host with several networks: NCCL_SOCKET_IFNAME must name the one between the hosts (ip route get ADDRESS),
      not docker0 or a VPN
  fix: {WARN}
""")
def match_nccl_connection(case: Case, match: Match | None) -> CauseMatch | None:
    if match and "reset by peer" not in match[0]:
        peer = re.search(r"to ([\d.:a-f\[\]%\w]+<\d+>)", match[0])
        summary = f"{case.rank_name} can't connect to {peer[1] if peer else 'a peer'} (NCCL)"
        return CauseMatch(summary, _nccl_evidence(case, line_of(match)))
    return _match_store_failure(case) if "GPU" in case.end.label else None


@nccl.cause("""
nccl.cuda, again: A CUDA call inside NCCL failed.
  said: unhandled cuda error|ncclUnhandledCudaError
  seen: "unhandled cuda error" (ncclUnhandledCudaError), and its last error shows no more specific cause
  unless: the last error is out of memory, an illegal access, an ECC error …: then that is the cause
  fix: the torch build and its NCCL must be the same on all hosts (python -c 'import torch; print(torch.__version__,
      torch.cuda.nccl.version())'); an installed CUDA toolkit does not matter, torch has its own
  fix: the driver must be new enough for torch's CUDA build, and the build must support the GPU: stoker doctor, on each host
  fix: it is not the firewall: a closed port gives "connection refused" or "timed out", and 29500 is only the store
  fix: NCCL_P2P_DISABLE=1, for one run: if it helps, the GPUs can't access each other's memory (IOMMU or ACS in the
      BIOS, a virtual machine)
  fix: {WARN}
""")
def match_nccl_cuda(case: Case, match: Match) -> CauseMatch:
    last = _find_nccl_error(case)
    summary = f"{case.rank_name}: NCCL: unhandled cuda error{': ' + first_line(last) if last else ''}"
    return CauseMatch(summary, _nccl_evidence(case, line_of(match)))


@nccl.cause("""
nccl.system, again: A system call inside NCCL failed.
  perhaps: unhandled system error|ncclSystemError
  seen: "unhandled system error" (ncclSystemError), and its last error shows no more specific cause
  unless: shared memory: nccl.shm; a peer that can't be reached: nccl.connection; too many open files:
      data.too-many-files
  fix: {WARN}
  fix: limits: ulimit -l (locked memory, unlimited for InfiniBand), ulimit -n, docker's --ulimit memlock=-1
  fix: {REACH}
""")
def match_nccl_system(case: Case, match: Match | None) -> CauseMatch | None:
    if not match or find_in_output(case, r"(?i)reset by peer|remote process exited|Too many open files"):
        return None
    last = _find_nccl_error(case)
    summary = f"{case.rank_name}: NCCL: unhandled system error{': ' + first_line(last) if last else ''}"
    return CauseMatch(summary, _nccl_evidence(case, line_of(match)))


@nccl.cause(r"""
nccl.timeout, again: A NCCL collective timed out, and nothing shows why.
  said: Watchdog caught collective operation timeout[^\n]*|collective operation timeout: [^\n]*
  seen: NCCL's watchdog ended the process after the process group's timeout, and no rank failed, left or is seen to
      hang
  unless: a rank that failed, left early or got stuck: that is the cause, and the timeout a consequence
  fix: a rank that did not take part: unequal numbers of batches, an `if rank == 0` around a collective (saving a
      sharded model is one), other code paths
  fix: where was each rank? `stoker logs --rank N`, and attempt-N/stacks.txt in the run directory
  fix: long work on one rank between collectives: init_process_group(timeout=timedelta(hours=1)); NCCL_IB_TIMEOUT is
      something else
""")
def match_nccl_timeout(case: Case, match: Match) -> CauseMatch:
    line = line_of(match)
    work, duration = re.search(r"SeqNum=(\d+), OpType=(\w+)", line), re.search(r"ran for (\d+) milliseconds", line)
    collective = f"{work[2]} number {work[1]}" if work else "a collective"
    how_long = f"after {int(duration[1]) / 1000:.0f} s" if duration else "in time"
    return CauseMatch(
        f"{case.rank_name}: {collective} was not finished {how_long}, and no failed rank was found", (line,)
    )
