"""Finds the machines of a run: named hosts, a scheduler's nodes, machines started by hand (torchrun's flags), or this one.

Each machine that is started by hand launches its own ranks and keeps its own record.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from stoker.contract import schedulers
from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.text import is_digits
from stoker.control.cluster.hosts import Hosts, read_hosts_file
from stoker.control.launch.agents import Agents
from stoker.control.plan.options import requested_ranks
from stoker.control.plan.request import Request, is_started_by_hand, parse_endpoint
from stoker.control.plan.run_plan import RunPlan

DEFAULT_PORT = 29500  # torchrun's default
LAST_CALL_S = 30.0  # torchrun's default of last_call_timeout
ROUTE_S = 10.0  # for the local agent to find the interface towards machine 0


@frozen
class NodeGroup:
    """The machines of a run that is started by hand on each, and this machine's part in it."""

    count: int
    rank: int
    first_rank: int  # on this machine
    world_size: int  # ranks on all machines
    address: str  # of rank 0's store
    port: int


@frozen
class RendezvousConfig:
    """The rendezvous of machines that are started by hand, as their flags describe it."""

    count: int  # machines, or the minimum if `max_count` is set
    rank: int | None  # None: assigned at the rendezvous
    address: str
    port: int  # 0: a free one, agreed at the rendezvous
    name: str  # --rdzv-id, the same on all machines of a job
    max_count: int = 0  # maximum number of machines; 0: `count`
    last_call_s: float = 0.0  # seconds to wait for more than `count`


def read_rendezvous_config(request: Request, environment: Mapping[str, str]) -> RendezvousConfig | None:
    """Return the rendezvous of machines started by hand, or None for one machine or --hosts.

    Raises Refusal if the flags about machines contradict each other.
    """
    options = request.options
    count, max_count = _parse_nnodes(options.nnodes)
    if options.hosts is not None:
        if count > 1 or "node_rank" in request.given:
            raise _refusal("--hosts names the machines: leave --nnodes and --node-rank out")
        return None
    if not is_started_by_hand(options):
        if options.node_rank != 0:
            raise _refusal(f"--node-rank must be 0 on one machine, got {options.node_rank}")
        return None
    if options.standalone:
        raise _refusal(f"--standalone and --nnodes {options.nnodes} contradict each other")
    address, port = _read_store_endpoint(request, environment)
    is_numbered = "node_rank" in request.given or options.rdzv_backend == "static"
    if not address:
        by_address = "give --master-addr, the same on all"
        by_name = "name the machines with --hosts a,b,c and start the run on one of them"
        raise _refusal(f"--nnodes {options.nnodes} needs the address of machine 0: {by_address}, or {by_name}")
    if not is_numbered and not options.rdzv_endpoint:
        flag = f"--node-rank, from 0 to {count - 1}"
        raise _refusal(f"--nnodes {options.nnodes} with --master-addr needs the number of this machine; add {flag}")
    if max_count > count and is_numbered:
        raise _refusal(f"--nnodes must be one number with --node-rank, got {options.nnodes}")
    if not 0 <= options.node_rank < count:
        raise _refusal(f"--node-rank must be from 0 to {count - 1}, got {options.node_rank}")
    rank = options.node_rank if is_numbered else None
    last_call = _parse_last_call(options.rdzv_conf)
    return RendezvousConfig(count, rank, address, port or DEFAULT_PORT, options.rdzv_id or "", max_count, last_call)


def _refusal(line: str) -> Refusal:
    return Refusal(line, EX_USAGE, cause="launch.nodes")


def _parse_nnodes(nnodes: str) -> tuple[int, int]:
    """Return the minimum and maximum of --nnodes N or MIN:MAX."""
    low, colon, high = nnodes.partition(":")
    parts = [low, high] if colon else [low]
    numbers = [int(part) for part in parts if is_digits(part)]
    if len(numbers) != len(parts) or numbers[0] < 1 or numbers[-1] < numbers[0]:
        raise Refusal(f"--nnodes must be a number of machines or MIN:MAX, got {nnodes}", EX_USAGE)
    return numbers[0], numbers[-1]


def _parse_last_call(rdzv_conf: str | None) -> float:
    """Return how long to wait for more machines than the minimum: torchrun's key in --rdzv-conf."""
    for setting in (rdzv_conf or "").split(","):
        key, _, value = setting.partition("=")
        if key.strip() in ("last_call_timeout", "last_call"):
            try:
                return max(float(value), 0.0)
            except ValueError as problem:
                raise Refusal(
                    f"--rdzv-conf {key.strip()} must be a number of seconds, got {value!r}", EX_USAGE
                ) from problem
    return LAST_CALL_S


def _read_store_endpoint(request: Request, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the address ("" if unknown) and port (0 if unknown) of rank 0's store from flags or variables."""
    options = request.options
    if options.rdzv_endpoint:
        address, port = parse_endpoint(options.rdzv_endpoint)
        return address, port if port is not None else options.master_port or 0
    variable = environment.get("MASTER_PORT", "")
    port = options.master_port or (int(variable) if is_digits(variable) else 0)
    return options.master_addr or environment.get("MASTER_ADDR", ""), port


def join_nodes(
    agents: Agents, request: Request, plan: RunPlan, log: Callable[[str], None]
) -> tuple[RunPlan, tuple[str, int], str]:
    """Join the other machines that were started by hand.

    Returns the plan with the numbers that its ranks have in the whole job, the store's address and port, and the network
    interface towards the other machines.
    """
    config = read_rendezvous_config(request, os.environ)
    assert config is not None
    if config.rank is not None:
        # With --node-rank the machines don't talk before the ranks do: each assumes that all have as many ranks as it has.
        ranks = len(plan.places)
        first_rank, world_size = config.rank * ranks, config.count * ranks
        nodes = NodeGroup(config.count, config.rank, first_rank, world_size, config.address, config.port)
        if nodes.rank == 0:
            agents.reserve(config.address, config.port, bool(config.port))
    else:
        from stoker.control.launch import rendezvous

        nodes = rendezvous.join_machines(
            config,
            len(plan.places),
            lambda: agents.reserve(config.address, 0, False)[1],
            lambda: agents.pause(0.02),
            log,
        )
    return _renumber(plan, nodes), (nodes.address, nodes.port), _find_interface_to(agents, config.address)


def _renumber(plan: RunPlan, nodes: NodeGroup) -> RunPlan:
    """Return this machine's plan with the numbers that its ranks have in the whole job."""
    numbered = enumerate(plan.places, nodes.first_rank)
    places = tuple(replace(place, rank=rank, role_rank=rank, group_rank=nodes.rank) for rank, place in numbered)
    roles = tuple(replace(role, world=nodes.world_size) for role in plan.roles)
    ranks = f"ranks {nodes.first_rank} to {nodes.first_rank + len(places) - 1} of {nodes.world_size}"
    line = f"machine {nodes.rank} of {nodes.count}: {ranks}, store at {nodes.address}:{nodes.port}"
    return replace(plan, places=places, roles=roles, nodes=nodes, lines=(*plan.lines, line))


def _find_interface_to(agents: Agents, address: str) -> str:
    """Return the network interface towards machine 0, or on machine 0 the one that has the address; "" if unknown."""
    answer = agents.probe("route", {"": {"to": [address]}}, ROUTE_S)[""]
    route = answer.get("routes", {}).get(address, {})
    interfaces = answer.get("addresses", {})
    local = next((name for name, addresses in interfaces.items() if route.get("address") in addresses), None)
    return local or route.get("interface") or ""


def resolve_hosts(request: Request, environment: Mapping[str, str]) -> tuple[Request, Hosts | None]:
    """Return the request, with the ranks of a scheduler's job, and its hosts, or None for this machine alone.

    Raises Refusal if the flags about hosts contradict each other.
    """
    options = request.options
    # Called only for its checks: it refuses contradicting flags.
    read_rendezvous_config(request, environment)
    hosts: Hosts | None = None
    if options.hosts is not None:
        hosts = read_hosts_file(options.hosts, options.ssh_option)
        if hosts.scheduler:
            hosts = _with_scheduler_transports(hosts, environment)
        hosts = _with_python(hosts, options.python)
    elif options.nnodes == "1" and (scheduler := schedulers.find_scheduler(environment)) is not None:
        # --hosts and --nnodes win over the nodes of the scheduler's job.
        from stoker.control.scheduler import load_engine

        request, hosts = _use_allocation(request, load_engine(scheduler).find_allocation(environment), environment)
    if hosts is None and (options.min_hosts or options.sync or options.stage):
        raise Refusal("--min-hosts, --sync and --stage need several hosts; name them with --hosts", EX_USAGE)
    if hosts is not None and options.min_hosts and not 1 <= options.min_hosts <= len(hosts.hosts):
        line = f"--min-hosts must be from 1 to {len(hosts.hosts)}, the number of hosts, got {options.min_hosts}"
        raise Refusal(line, EX_USAGE)
    return request, hosts


def _with_scheduler_transports(hosts: Hosts, environment: Mapping[str, str]) -> Hosts:
    """Return the hosts, which are nodes of a scheduler's job, with the scheduler's transports."""
    from stoker.control.scheduler import load_engine

    scheduler = schedulers.find_scheduler_by_name(hosts.scheduler)
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
    """Return the request and the hosts for a scheduler's allocation. The hosts are None if it is only this one."""
    options = request.options
    if allocation is None:
        return request, None
    hosts = allocation.hosts
    if requested_ranks(options.nproc_per_node, environment):  # wins over the job's number of tasks
        hosts = tuple(replace(host, slots=None) for host in hosts)
    if len(hosts) == 1 and hosts[0].here:  # a pipe to the local agent is enough
        slots = hosts[0].slots
        if slots and slots > 1:
            request = replace(request, options=replace(options, nproc_per_node=str(slots)))
        return request, None
    return request, _with_python(replace(allocation, hosts=hosts), options.python)


def _with_python(hosts: Hosts, python: str | None) -> Hosts:
    """Return the hosts with --python as the interpreter of their ranks, if it is set."""
    if python is None:
        return hosts
    return replace(hosts, hosts=tuple(replace(host, python=python) for host in hosts.hosts))
