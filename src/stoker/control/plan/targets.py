"""Where a run runs: on the hosts it names, a scheduler's nodes, machines started by hand with torchrun's flags, or here.

Each machine that is started by hand launches its own ranks and keeps its own record.
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
from stoker.control.plan.options import requested_ranks
from stoker.control.plan.request import Request, is_started_by_hand, parse_endpoint
from stoker.control.plan.run_plan import RunPlan

DEFAULT_PORT = 29500  # torchrun's
LAST_CALL_S = 30.0  # torchrun's, too
ROUTE_S = 10.0  # for the local agent to find the interface towards machine 0


@frozen
class NodeGroup:
    """The machines of a run that is started by hand on each, and this machine's part in it."""

    count: int
    rank: int
    first: int  # this machine's first rank
    world: int  # ranks on all machines
    address: str  # of rank 0's store
    port: int


@frozen
class MeetingPoint:
    """Where machines that are started by hand meet, as their flags say."""

    count: int  # machines; with `most` set, the minimum
    rank: int | None  # None: assigned where they meet
    address: str
    port: int  # 0: a free one, agreed on where they meet
    name: str  # --rdzv-id: machines that give the same belong to one job
    most: int = 0  # maximum number of machines; 0: `count`
    last_call: float = 0.0  # seconds to wait for more than `count`


def meeting_point(request: Request, environment: Mapping[str, str]) -> MeetingPoint | None:
    """Return where the machines started by hand meet; None for one machine or --hosts. Raises Refusal."""
    options = request.options
    count, max_count = _parse_nnodes(options.nnodes)
    if options.hosts is not None:
        if count > 1 or "node_rank" in request.given:
            raise _refusal("--hosts names the machines: leave --nnodes and --node-rank out")
        return None
    if not is_started_by_hand(options):
        if options.node_rank != 0:
            raise _refusal(f"--node-rank {options.node_rank} with one machine: its number is 0")
        return None
    if options.standalone:
        raise _refusal(f"--standalone and --nnodes {options.nnodes} contradict each other")
    address, port = _store_endpoint(request, environment)
    is_numbered = "node_rank" in request.given or options.rdzv_backend == "static"
    if not address:
        by_address = "say where the machines meet (--master-addr of machine 0, the same on all)"
        by_name = "name them with --hosts a,b,c and start it on one of them"
        raise _refusal(f"--nnodes {options.nnodes}: {by_address}, or {by_name}")
    if not is_numbered and not options.rdzv_endpoint:
        flag = f"--node-rank 0 to {count - 1}"
        raise _refusal(f"--nnodes {options.nnodes} with --master-addr: say which machine this is with {flag}")
    if max_count > count and is_numbered:
        raise _refusal(f"--nnodes {options.nnodes} with --node-rank: give one number")
    if not 0 <= options.node_rank < count:
        raise _refusal(f"--node-rank {options.node_rank}: {count} machines have the numbers 0 to {count - 1}")
    rank = options.node_rank if is_numbered else None
    last_call = _last_call_seconds(options.rdzv_conf)
    return MeetingPoint(count, rank, address, port or DEFAULT_PORT, options.rdzv_id or "", max_count, last_call)


def _refusal(line: str) -> Refusal:
    return Refusal(line, EX_USAGE, cause="launch.nodes")


def _parse_nnodes(nnodes: str) -> tuple[int, int]:
    """Return the minimum and maximum of --nnodes N or MIN:MAX."""
    low, colon, high = nnodes.partition(":")
    parts = [low, high] if colon else [low]
    numbers = [int(part) for part in parts if is_digits(part)]
    if len(numbers) != len(parts) or numbers[0] < 1 or numbers[-1] < numbers[0]:
        raise Refusal(f"--nnodes {nnodes}: give a number of machines, or MIN:MAX", EX_USAGE)
    return numbers[0], numbers[-1]


def _last_call_seconds(rdzv_conf: str | None) -> float:
    """Return how long to wait for more machines than the minimum: torchrun's key in --rdzv-conf."""
    for setting in (rdzv_conf or "").split(","):
        key, _, value = setting.partition("=")
        if key.strip() in ("last_call_timeout", "last_call"):
            try:
                return max(float(value), 0.0)
            except ValueError as problem:
                raise Refusal(f"--rdzv-conf {setting}: give seconds", EX_USAGE) from problem
    return LAST_CALL_S


def _store_endpoint(request: Request, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return (address, port) of rank 0's store by flags or variables; "" and 0 where nothing gives them."""
    options = request.options
    if options.rdzv_endpoint:
        address, port = parse_endpoint(options.rdzv_endpoint)
        return address, port if port is not None else options.master_port or 0
    variable = environment.get("MASTER_PORT", "")
    port = options.master_port or (int(variable) if is_digits(variable) else 0)
    return options.master_addr or environment.get("MASTER_ADDR", ""), port


def join_nodes(
    agents: Agents, request: Request, plan: RunPlan, say: Callable[[str], None]
) -> tuple[RunPlan, tuple[str, int], str]:
    """Join the other machines that were started by hand.

    Returns the plan with the numbers that its ranks have in the whole job, the store's address and port, and the network
    interface towards the other machines.
    """
    meeting = meeting_point(request, os.environ)
    assert meeting is not None
    if meeting.rank is not None:
        # With --node-rank the machines don't talk before the ranks do: each takes it that all have as many ranks.
        ranks = len(plan.places)
        first, world = meeting.rank * ranks, meeting.count * ranks
        nodes = NodeGroup(meeting.count, meeting.rank, first, world, meeting.address, meeting.port)
        if nodes.rank == 0:
            agents.reserve(meeting.address, meeting.port, bool(meeting.port))
    else:
        from stoker.control.launch import rendezvous

        nodes = rendezvous.meet(
            meeting,
            len(plan.places),
            lambda: agents.reserve(meeting.address, 0, False)[1],
            lambda: agents.pause(0.02),
            say,
        )
    return _renumber(plan, nodes), (nodes.address, nodes.port), _interface_to(agents, meeting.address)


def _renumber(plan: RunPlan, nodes: NodeGroup) -> RunPlan:
    """Return this machine's plan with the numbers that its ranks have in the whole job."""
    numbered = enumerate(plan.places, nodes.first)
    places = tuple(replace(place, rank=rank, role_rank=rank, group_rank=nodes.rank) for rank, place in numbered)
    roles = tuple(replace(role, world=nodes.world) for role in plan.roles)
    ranks = f"ranks {nodes.first} to {nodes.first + len(places) - 1} of {nodes.world}"
    line = f"machine {nodes.rank} of {nodes.count}: {ranks}, store at {nodes.address}:{nodes.port}"
    return replace(plan, places=places, roles=roles, nodes=nodes, lines=(*plan.lines, line))


def _interface_to(agents: Agents, address: str) -> str:
    """Return the network interface towards machine 0, or on machine 0 the one that has the address; "" if unknown."""
    answer = agents.probe("route", {"": {"to": [address]}}, ROUTE_S)[""]
    route = answer.get("routes", {}).get(address, {})
    interfaces = answer.get("addresses", {})
    own = next((name for name, addresses in interfaces.items() if route.get("address") in addresses), None)
    return own or route.get("interface") or ""


def resolve_hosts(request: Request, environment: Mapping[str, str]) -> tuple[Request, Hosts | None]:
    """Return the request, completed from a scheduler's job, and its hosts; None for this machine alone.

    Raises Refusal if the flags about hosts contradict each other.
    """
    options = request.options
    meeting_point(request, environment)
    hosts: Hosts | None = None
    if options.hosts is not None:
        hosts = read_hosts_file(options.hosts, options.ssh_option)
        if hosts.scheduler:
            hosts = _with_scheduler_transports(hosts, environment)
        hosts = _with_python(hosts, options.python)
    elif options.nnodes == "1" and (scheduler := schedulers.find_scheduler(environment)) is not None:
        # Only without --hosts and --nnodes: what the user names wins over the job's nodes.
        from stoker.control.scheduler import load_engine

        request, hosts = _use_allocation(request, load_engine(scheduler).find_allocation(environment), environment)
    if hosts is None and (options.min_hosts or options.sync or options.stage):
        raise Refusal("--min-hosts, --sync and --stage are for several hosts: name them with --hosts", EX_USAGE)
    if hosts is not None and options.min_hosts and not 1 <= options.min_hosts <= len(hosts.hosts):
        count = plural(len(hosts.hosts), "host")
        raise Refusal(f"--min-hosts {options.min_hosts}: the run has {count}; give a number from 1 to that", EX_USAGE)
    return request, hosts


def _with_scheduler_transports(hosts: Hosts, environment: Mapping[str, str]) -> Hosts:
    """Return hosts, which are nodes of a scheduler's job, with the scheduler's way to reach them."""
    from stoker.control.scheduler import load_engine

    scheduler = schedulers.scheduler_named(hosts.scheduler)
    assert scheduler is not None
    allocation = load_engine(scheduler).find_allocation(environment)
    missing = [host.name for host in hosts.hosts if allocation is None or host.name not in allocation.transports]
    if allocation is None or missing:
        line = f"{hosts.path}: {missing[0]} is not a node of the {scheduler.title} job that this was started in"
        raise Refusal(line, EX_USAGE, cause="launch.hosts")
    return replace(hosts, transports={host.name: allocation.transports[host.name] for host in hosts.hosts})


def _use_allocation(
    request: Request, allocation: Hosts | None, environment: Mapping[str, str]
) -> tuple[Request, Hosts | None]:
    """Return the request and the hosts for the nodes that a scheduler allocated; no hosts if it is only this one."""
    options = request.options
    if allocation is None:
        return request, None
    hosts = allocation.hosts
    if requested_ranks(options.nproc_per_node, environment):  # wins over the job's number of tasks
        hosts = tuple(replace(host, slots=None) for host in hosts)
    if len(hosts) == 1 and hosts[0].here:  # a pipe to the local agent will do
        slots = hosts[0].slots
        if slots and slots > 1:
            request = replace(request, options=replace(options, nproc_per_node=str(slots)))
        return request, None
    return request, _with_python(replace(allocation, hosts=hosts), options.python)


def _with_python(hosts: Hosts, python: str | None) -> Hosts:
    """Return hosts whose ranks use --python, if it is given."""
    if python is None:
        return hosts
    return replace(hosts, hosts=tuple(replace(host, python=python) for host in hosts.hosts))
