"""Where a run runs: on the hosts it names, a scheduler's nodes, machines started by hand with torchrun's flags, or here.

Of machines started by hand, each is the coordinator of its own ranks and keeps its own record.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from stoker.contract import schedulers
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.text import is_digits
from stoker.contract.units import plural
from stoker.control.cluster.hosts import Hosts, read_hosts_file
from stoker.control.launch.agents import Agents
from stoker.control.plan.options import ranks_asked
from stoker.control.plan.request import Request, by_hand, endpoint
from stoker.control.plan.run_plan import RunPlan

DEFAULT_PORT = 29500  # torchrun's
LAST_CALL_S = 30.0  # torchrun's, too


@frozen
class NodeGroup:
    """This machine among the others."""

    count: int
    rank: int
    first: int  # the number of its first rank
    world: int
    address: str  # of rank 0's store
    port: int


@frozen
class MeetingPoint:
    """What the flags say."""

    count: int  # at least so many
    rank: int | None  # None: to be found out where they meet
    address: str
    port: int  # 0: any, found out where they meet
    name: str  # --rdzv-id: who meets there belongs to the same job
    most: int = 0  # as many as that may come; 0: `count`
    last_call: float = 0.0  # seconds to wait for more than `count`


def meeting(request: Request, environment: Mapping[str, str]) -> MeetingPoint | None:
    """None: one machine, or machines that --hosts names."""
    options = request.options
    count, most = span_of(options.nnodes)
    if options.hosts is not None:
        if count > 1 or "node_rank" in request.given:
            raise _refusal("--hosts says which machines: leave --nnodes and --node-rank out")
        return None
    if not by_hand(options):
        if options.node_rank != 0:
            raise _refusal(f"--node-rank {options.node_rank} with one machine: its number is 0")
        return None
    if options.standalone:
        raise _refusal(f"--standalone and --nnodes {options.nnodes} contradict each other")
    address, port = _where(request, environment)
    numbered = "node_rank" in request.given or options.rdzv_backend == "static"
    if not address:
        meet = "say where the machines meet (--master-addr of machine 0, the same on all)"
        named = "name them with --hosts a,b,c and start it on one of them"
        raise _refusal(f"--nnodes {options.nnodes}: {meet}, or {named}")
    if not numbered and not options.rdzv_endpoint:
        flag = f"--node-rank 0 to {count - 1}"
        raise _refusal(f"--nnodes {options.nnodes} with --master-addr: say which machine this is with {flag}")
    if most > count and numbered:
        raise _refusal(f"--nnodes {options.nnodes} with --node-rank: give one number")
    if not 0 <= options.node_rank < count:
        raise _refusal(f"--node-rank {options.node_rank}: {count} machines have the numbers 0 to {count - 1}")
    rank = options.node_rank if numbered else None
    last_call = _last_call(options.rdzv_conf)
    return MeetingPoint(count, rank, address, port or DEFAULT_PORT, options.rdzv_id or "", most, last_call)


def _refusal(line: str) -> Refusal:
    return Refusal(line, EX_USAGE, cause="launch.nodes")


def span_of(nnodes: str) -> tuple[int, int]:
    """Of --nnodes: at least, at most."""
    low, colon, high = nnodes.partition(":")
    words = [low, high] if colon else [low]
    numbers = [int(word) for word in words if is_digits(word)]
    if len(numbers) != len(words) or numbers[0] < 1 or numbers[-1] < numbers[0]:
        raise Refusal(f"--nnodes {nnodes}: give a number of machines, or MIN:MAX", EX_USAGE)
    return numbers[0], numbers[-1]


def _last_call(told: str | None) -> float:
    """Of --rdzv-conf, torchrun's key for it."""
    for word in (told or "").split(","):
        key, _, value = word.partition("=")
        if key.strip() in ("last_call_timeout", "last_call"):
            try:
                return max(float(value), 0.0)
            except ValueError as problem:
                raise Refusal(f"--rdzv-conf {word}: give seconds", EX_USAGE) from problem
    return LAST_CALL_S


def _where(request: Request, environment: Mapping[str, str]) -> tuple[str, int]:
    options = request.options
    if options.rdzv_endpoint:
        address, port = endpoint(options.rdzv_endpoint)
        return address, port if port is not None else options.master_port or 0
    asked = environment.get("MASTER_PORT", "")
    found = options.master_port or (int(asked) if is_digits(asked) else 0)
    return options.master_addr or environment.get("MASTER_ADDR", ""), found


def numbered(plan: RunPlan, nodes: NodeGroup) -> RunPlan:
    """The plan of this machine's ranks with the numbers they have in the whole job."""
    ranked = enumerate(plan.places, nodes.first)
    places = tuple(replace(place, rank=rank, role_rank=rank, group_rank=nodes.rank) for rank, place in ranked)
    roles = tuple(replace(role, world=nodes.world) for role in plan.roles)
    ranks = f"ranks {nodes.first} to {nodes.first + len(places) - 1} of {nodes.world}"
    line = f"machine {nodes.rank} of {nodes.count}: {ranks}, store at {nodes.address}:{nodes.port}"
    return replace(plan, places=places, roles=roles, nodes=nodes, lines=(*plan.lines, line))


def equal(told: MeetingPoint, ranks: int) -> NodeGroup:
    """With --node-rank nobody asks the others: all have as many ranks as this one."""
    assert told.rank is not None
    return NodeGroup(told.count, told.rank, told.rank * ranks, told.count * ranks, told.address, told.port)


# ---- this machine among those that were started by hand ----

ROUTE_S = 10.0


def join_nodes(
    agents: Agents, request: Request, plan: RunPlan, say: Callable[[str], None]
) -> tuple[RunPlan, tuple[str, int], str]:
    """The plan with its numbers in the whole job, the store's address and port, and the interface towards the others."""
    told = meeting(request, os.environ)
    assert told is not None
    if told.rank is not None:
        nodes = equal(told, len(plan.places))
        if nodes.rank == 0:
            agents.reserve(told.address, told.port, bool(told.port))
    else:
        from stoker.control.launch import rendezvous

        nodes = rendezvous.meet(
            told, len(plan.places), lambda: agents.reserve(told.address, 0, False)[1], lambda: agents.pause(0.02), say
        )
    return numbered(plan, nodes), (nodes.address, nodes.port), _interface(agents, told.address)


def _interface(agents: Agents, address: str) -> str:
    """Towards machine 0, or on that one the interface that has the address."""
    answer = agents.probe("route", {"": {"to": [address]}}, ROUTE_S)[""]
    way = answer.get("routes", {}).get(address, {})
    owner = next((name for name, mine in answer.get("addresses", {}).items() if way.get("address") in mine), None)
    return owner or way.get("interface") or ""


def resolve_hosts(request: Request, environment: Mapping[str, str]) -> tuple[Request, Hosts | None]:
    """The request, filled in, and its hosts (None: this machine). Refuses what does not add up."""
    options = request.options
    meeting(request, environment)
    hosts: Hosts | None = None
    if options.hosts is not None:
        hosts = _with_python(_reached(read_hosts_file(options.hosts, options.ssh_option), environment), options.python)
    elif options.nnodes == "1" and (scheduler := schedulers.find_scheduler(environment)) is not None:
        # What the user names (--hosts, --nnodes by hand) wins over the job's nodes.
        from stoker.control.scheduler import engine

        request, hosts = _given(request, engine(scheduler).allocation(environment), environment)
    if hosts is None and (options.min_hosts or options.sync or options.stage):
        raise Refusal("--min-hosts, --sync and --stage are for several hosts: name them with --hosts", EX_USAGE)
    if hosts is not None and options.min_hosts and not 1 <= options.min_hosts <= len(hosts.hosts):
        there = plural(len(hosts.hosts), "host")
        raise Refusal(f"--min-hosts {options.min_hosts}: the run has {there}; give a number from 1 to that", EX_USAGE)
    return request, hosts


def _reached(hosts: Hosts, environment: Mapping[str, str]) -> Hosts:
    """Where the file names nodes of a scheduler's job: by its way to them."""
    if not hosts.scheduler:
        return hosts
    from stoker.control.scheduler import engine

    scheduler = schedulers.scheduler_named(hosts.scheduler)
    assert scheduler is not None
    ours = engine(scheduler).allocation(environment)
    missing = [host.name for host in hosts.hosts if ours is None or host.name not in ours.transports]
    if ours is None or missing:
        line = f"{hosts.path}: {missing[0]} is not a node of the {scheduler.title} job that this was started in"
        raise Refusal(line, EX_USAGE, cause="launch.hosts")
    return replace(hosts, transports={host.name: ours.transports[host.name] for host in hosts.hosts})


def _given(request: Request, hosts: Hosts | None, environment: Mapping[str, str]) -> tuple[Request, Hosts | None]:
    """Inside a scheduler's job: its nodes, without being told."""
    options = request.options
    if hosts is None:
        return request, None
    if ranks_asked(options.nproc_per_node, environment):  # a number, and not the job's number of tasks
        hosts = replace(hosts, hosts=tuple(replace(host, slots=None) for host in hosts.hosts))
    only = hosts.hosts[0]
    if len(hosts.hosts) == 1 and only.here:  # one node, and we are on it: a pipe will do
        if only.slots and only.slots > 1:
            request = replace(request, options=replace(options, nproc_per_node=str(only.slots)))
        return request, None
    return request, _with_python(hosts, options.python)


def _with_python(hosts: Hosts, python: str | None) -> Hosts:
    if python is None:
        return hosts
    return replace(hosts, hosts=tuple(replace(host, python=python) for host in hosts.hosts))
