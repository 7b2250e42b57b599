"""What a run has because Slurm gave it: inside an allocation, its nodes, without being told."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.contract.shape import replace
from stoker.control.cluster import slurm
from stoker.control.cluster.hosts import Hosts
from stoker.control.launch.request import Request


def allotted(request: Request, environment: Mapping[str, str]) -> tuple[Request, Hosts | None]:
    """The request, and the hosts it runs on; None: this machine. What the user names (--hosts, --nnodes by hand) wins
    over the job's nodes.
    """
    options = request.options
    if options.hosts is not None or options.nnodes != "1":
        return request, None
    hosts = slurm.allocation(environment)
    if hosts is None:
        return request, None
    counted = options.nproc_per_node is not None or any(
        environment.get(name) for name in ("NPROC_PER_NODE", "NUM_GPUS")
    )
    if counted:  # a number that was asked for, and not the job's number of tasks
        hosts = replace(hosts, hosts=tuple(replace(host, slots=None) for host in hosts.hosts))
    only = hosts.hosts[0]
    if len(hosts.hosts) == 1 and only.here:  # one node, and we are on it: a pipe will do
        return (
            replace(request, options=replace(options, nproc_per_node=str(only.slots)))
            if only.slots and only.slots > 1
            else request
        ), None
    if options.python is not None:
        hosts = replace(hosts, hosts=tuple(replace(host, python=options.python) for host in hosts.hosts))
    return request, hosts
