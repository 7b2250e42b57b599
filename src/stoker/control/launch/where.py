"""Where a run runs: on the hosts it names, on its Slurm job's nodes, or here."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.contract.names import EX_USAGE, Refusal
from stoker.contract.quantities import counted
from stoker.contract.shape import replace
from stoker.control.cluster.hosts import Hosts, read
from stoker.control.launch.nodes import meeting
from stoker.control.launch.request import Request


def hosts_of(request: Request, environment: Mapping[str, str]) -> tuple[Request, Hosts | None]:
    """The request, as what was found fills it in, and its hosts; None: this machine. Refuses what does not add up,
    before anything is started.
    """
    options = request.options
    meeting(request, environment)
    hosts: Hosts | None = None
    if options.hosts is not None:
        hosts = read(options.hosts, options.ssh_option)
        if options.python is not None:
            hosts = replace(hosts, hosts=tuple(replace(host, python=options.python) for host in hosts.hosts))
    elif "SLURM_JOB_ID" in environment:
        from stoker.control.launch.allotment import allotted

        request, hosts = allotted(request, environment)
    if hosts is None and (options.min_hosts or options.sync or options.stage):
        raise Refusal("--min-hosts, --sync and --stage are for several hosts: name them with --hosts", EX_USAGE)
    if hosts is not None and options.min_hosts and not 1 <= options.min_hosts <= len(hosts.hosts):
        raise Refusal(
            f"--min-hosts {options.min_hosts}: the run has {counted(len(hosts.hosts), 'host')}; give a number from 1 to"
            " that",
            EX_USAGE,
        )
    return request, hosts
