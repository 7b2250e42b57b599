"""net.*, gloo.*: ports and connections between ranks. NCCL has its own file."""

from __future__ import annotations

import re

from stoker.control.verdict.catalogue import Case, Found, Match, cause, steps
from stoker.control.verdict.lastwords import at, find, first_line, line_of

ORDER = 40

# The store (MASTER_ADDR, MASTER_PORT) is where ranks of either backend meet first.
STORE = (
    r"The client socket has (?:timed out after [^\n]*trying to connect to|failed to connect to[^\n]*) ?\(([^)]*)\)|"
    r"Timed out after (\d+) seconds waiting for clients\. (\d+/\d+) clients joined"
)
REACH = steps("""
    every host must reach every other on the ephemeral ports (/proc/sys/net/ipv4/ip_local_port_range), in both \
    directions: MASTER_PORT is only where they meet, the data has ports of its own
    MASTER_ADDR must be an address the other hosts can reach, not 127.0.0.1 and not a name that only one of them knows \
    (getent hosts NAME, on each)
    """)


def _where(case: Case) -> tuple[str, ...]:
    return (at(case).strip(),) if at(case) else ()


@cause(
    "net.port-in-use",
    seen="EADDRINUSE in the exception: the script listens on a port of its own choice that somebody else has",
    contradicts="the port is Stoker's own (MASTER_PORT): that one is reserved before the ranks start",
    fix=("use env:// (MASTER_ADDR and MASTER_PORT, which Stoker sets to a free port) instead of a port of your own",),
    retryable=True,
)
def port_in_use(case: Case) -> Found | None:
    """The script asked for a port that is taken."""
    error = case.end.error
    if error is None or not ("EADDRINUSE" in error.message or "address already in use" in error.message.lower()):
        return None
    port = re.search(r"port:? (\d+)", error.message)
    which = f"port {port[1]}" if port else "a port"
    return Found(
        f"{case.who}: {which} is already in use", (f"{error.type}: {first_line(error.message)}", *_where(case))
    )


@cause(
    "gloo.interface",
    seen=(
        'gloo\'s "Unable to find address for: eth0" or "Unable to find interface for", or a host name it can\'t resolve'
    ),
    contradicts="the interface is there and the peer does not answer: gloo.connection",
    fix=steps("""
    unset GLOO_SOCKET_IFNAME, or name an interface that exists on this host (ip -brief address); hosts may need \
    different ones
    without it gloo takes the address of the host's own name: getent hosts $(hostname) must answer
    """),
)
def gloo_interface(case: Case) -> Found | None:
    """gloo was told to use a network interface that this host does not have."""
    found = find(case, r"Unable to (?:find address|find interface|resolve hostname)[^\n:]*:? ?(\S*)")
    if not found or not find(case, r"gloo|GLOO|Gloo"):
        return None
    return Found(f"{case.who}: gloo finds no address for {found[1] or 'this host'}", (line_of(found), *_where(case)))


@cause(
    "gloo.shape",
    said=r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)",
    seen='gloo\'s "op.preamble.length <= op.nbytes": a rank received more bytes than it expected',
    contradicts="the connection broke before: then the peer's end is the cause",
    fix=steps("""
    ranks called a collective with tensors of different sizes or types, or in another order: print shape and dtype \
    before it on each rank
    lists of unequal length: all_gather_object, or pad to the longest; a last batch that is smaller: drop_last=True
    a model that differs between ranks (a layer only rank 0 has, another vocabulary size)
    """),
)
def gloo_shape(case: Case, found: Match) -> Found:
    """Ranks sent each other tensors of different sizes in one collective."""
    return Found(
        f"{case.who} received {found[1]} bytes where it expected {found[2]}: the ranks' collectives differ in size",
        (line_of(found), *_where(case)),
    )


@cause(
    "gloo.connection",
    seen="""at start-up, ranks on CPU: the store can't be reached or not all ranks came, or gloo's full mesh of
    connections could not be made""",
    contradicts="""the connection was there and broke (reset, closed by peer): the echo of another rank's end. A
    refused connection to something else than a peer: rank.exception""",
    fix=REACH,
    retryable=True,
)
def gloo_connection(case: Case) -> Found | None:
    """A rank could not connect to its peers at the start."""
    mesh = find(
        case,
        r"connectFullMesh failed|gloo/transport/[^\n]*(?:Connection refused|No route to host|[Cc]onnect timeout|timed"
        r" out connecting)",
    )
    if mesh:
        return Found(f"{case.who} can't connect to a peer (gloo)", (line_of(mesh), *_where(case)))
    return None if "GPU" in case.end.label else store(case)


def store(case: Case) -> Found | None:
    found = find(case, STORE)
    if not found:
        return None
    if found[3]:
        here, _, all_of = found[3].partition("/")
        text = f"{case.who} waited {found[2]} s for the others: {here} of {all_of} ranks came to the store"
    else:
        text = f"{case.who} can't reach the store at {found[1].replace(', ', ':')}"
    return Found(text, (line_of(found), *_where(case)))


@cause(
    "gloo.timeout",
    said=r"gloo/transport/[^\n]*Timed out waiting (\d+)ms for (\w+) operation",
    seen='gloo\'s "Timed out waiting 1800000ms for recv operation to complete", and no rank failed or left',
    contradicts="a rank that failed, left early or is seen to hang: that is the cause",
    fix=steps("""
    a rank that did not take part: unequal numbers of batches, an `if rank == 0` around a collective, a slow save or \
    evaluation on one rank
    long work on one rank between collectives: init_process_group(timeout=timedelta(hours=2))
    """),
    retryable=True,
)
def gloo_timeout(case: Case, found: Match) -> Found:
    """A collective of gloo was not finished in time, and nothing shows why."""
    return Found(
        f"{case.who} waited {int(found[1]) / 1000:.0f} s for a peer in a {found[2]}",
        (line_of(found), *_where(case)),
    )
