"""Slurm's engine: finds the nodes of the job that a run is started in, and reaches each node with one `srun`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.slurm_job import COMMAND_S, run_slurm
from stoker.contract.text import is_digits
from stoker.control.machine.run_origin import find_current_run

if TYPE_CHECKING:
    from stoker.control.cluster.hosts import Host, Hosts
    from stoker.control.cluster.transport import Transport

_INTERACTIVE_STEP = "4294967290"  # the step id of salloc's shell, at sites that run it on the first node

# A job's request stays in the environment, where srun takes its defaults from. In a job made with --gpus-per-task our one
# task would get only one GPU, with --cpus-per-task only that many CPUs, and --ntasks-per-node=8 would cause a warning. So
# these variables are unset for srun.
_REQUEST = re.compile(
    r"(SLURM|SRUN)_(.*(GPU|GRES|TRES|CPUS_PER_TASK|NTASKS|NPROCS|TASKS_PER_NODE|_BIND|DISTRIBUTION|MEM_PER_|THREADS|CORE_SPEC|HINT|EXACT|EXCLUSIVE|WHOLE).*"
    r"|NNODES|NODELIST|EXPORT_ENV|LABELIO|UNBUFFEREDIO|OPEN_MODE|(STD)?(IN|OUT|ERR)PUT.*|STD(IN|OUT|ERR)MODE|WAIT|KILL_BAD_EXIT|MULTI_PROG)"
)


def _make_refusal(line: str, code: int = EX_UNAVAILABLE) -> Refusal:
    return Refusal(line, code, cause="slurm.allocation")


def find_allocation(environ: Mapping[str, str]) -> Hosts | None:
    """Return the nodes of our job, in Slurm's order. Return None outside a job, in a rank, or in the only task of a step.

    Raises Refusal if the job can't be used.
    """
    job = environ.get("SLURM_JOB_ID")
    if not job or find_current_run(environ):
        return None  # a `stoker run` inside a rank uses only the rank's resources, not the whole job
    if not _is_whole_job(environ):
        return None
    if environ.get("SLURM_HET_SIZE"):
        line = f"Slurm job {job} is heterogeneous ({environ['SLURM_HET_SIZE']} parts), which Stoker does not support"
        raise _make_refusal(f"{line}; give the nodes with --hosts", EX_USAGE)
    nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodelist:
        line = f"Slurm job {job} has no node list in this environment (SLURM_JOB_NODELIST)"
        raise _make_refusal(f"{line}; start `stoker run` in the job script or in salloc's shell")
    nodes = expand_nodelist(nodelist)
    tasks = dict(zip(nodes, parse_tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", "1")), strict=False))
    gpus = _count_gpus_by_node(_describe_running_job(job))
    addresses = _find_addresses(nodes)
    options = make_step_options(job, bind_cpus=_slurm_binds_cpus())
    from stoker.control.cluster.hosts import Host, Hosts

    hosts: list[Host] = []
    transports: dict[str, Transport] = {}
    for node in nodes:
        count = gpus.get(node)
        hosts.append(
            Host(
                name=node,
                target=node,
                address=addresses.get(node),
                python=sys.executable,
                slots=None if count else tasks.get(node, 1),
                here=node == environ.get("SLURMD_NODENAME", ""),
            )
        )
        transports[node] = Srun((*options, *((f"--gpus={count}",) if count else ()), f"--nodelist={node}"))
    return Hosts(tuple(hosts), transports=transports, scheduler="slurm")


def _is_whole_job(environ: Mapping[str, str]) -> bool:
    """Return whether we are the job's script or shell, not the only task of a step. Raises Refusal for one of many tasks."""
    step = environ.get("SLURM_STEP_ID")
    if step is None or step == _INTERACTIVE_STEP or environ.get("SLURM_PTY_PORT"):
        return True
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if is_digits(tasks) and int(tasks) > 1:
        line = f"srun has started `stoker run` once per task ({tasks} times), but one `stoker run` starts the ranks on all nodes"
        fix = "start it once, without srun, in the job script or in salloc's shell"
        raise _make_refusal(f"{line}; {fix}", EX_USAGE)
    return False


class Srun:
    """Reaches one node with a separate srun."""

    name = "srun"
    shows_share = True

    def __init__(self, options: tuple[str, ...]) -> None:
        self._options = options

    def python(self, host: Host, hosts: Hosts, args: Sequence[str]) -> list[str]:
        # --unbuffered must not be used: srun would start a terminal, which changes bytes of the protocol.
        unset = [arg for name in sorted(os.environ) if _REQUEST.fullmatch(name) for arg in ("-u", name)]
        return ["env", *unset, "srun", *self._options, "--", host.python or sys.executable, *args]


def make_step_options(job: str, bind_cpus: bool) -> tuple[str, ...]:
    """Return srun's options. With --overlap the step shares the job's CPUs with the job script and other agents' steps."""
    one_task = ("--nodes=1", "--ntasks=1", "--ntasks-per-node=1")
    options = (f"--jobid={job}", *one_task, "--overlap", "--mpi=none", "--export=ALL", "--job-name=stoker-agent")
    return (*options, "--cpu-bind=none") if bind_cpus else options  # without binding, srun would warn about the option


def run_slurm_command(*argv: str) -> str:
    """Run one of Slurm's programs and return its output. Raises Refusal if it fails."""
    try:
        process = run_slurm(argv)
    except FileNotFoundError as problem:
        line = f"this is a Slurm job, but {argv[0]} is not on the PATH"
        raise _make_refusal(f"{line}; load Slurm's module, or give the nodes with --hosts") from problem
    except subprocess.TimeoutExpired as problem:
        line = f"Slurm's {argv[0]} did not finish within {COMMAND_S:.0f} s"
        raise Refusal(line, EX_UNAVAILABLE, cause="slurm.unreachable") from problem
    if process.returncode:
        lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
        line = f"Slurm's {argv[0]} failed: {lines[-1] if lines else f'exit code {process.returncode}'}"
        raise Refusal(line, EX_UNAVAILABLE, cause="slurm.unreachable")
    return process.stdout


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the node names in a list such as node[1-3,7], as scontrol expands it."""
    return run_slurm_command("scontrol", "show", "hostnames", nodelist).split()


def parse_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node: [2, 2, 2, 1] for SLURM_TASKS_PER_NODE=2(x3),1."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match:
            tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _describe_running_job(job: str) -> str:
    """Return scontrol's description of the job. Raises Refusal if the job is over: a shell may still have its SLURM_JOB_ID."""
    fix = "start the run inside a job, or `unset SLURM_JOB_ID` for a run on this machine"
    try:
        description = run_slurm_command("scontrol", "show", "job", "-d", job)
    except Refusal as refusal:
        if "Invalid job id" not in refusal.line:
            raise
        raise _make_refusal(f"SLURM_JOB_ID is {job}, but Slurm does not know that job; {fix}") from refusal
    state = re.search(r"\bJobState=(\S+)", description)
    if state is not None and state[1] != "RUNNING":
        raise _make_refusal(f"SLURM_JOB_ID is {job}, but that job is {state[1]}; {fix}")
    return description


def _count_gpus_by_node(description: str) -> dict[str, int]:
    """Return how many GPUs the job has on each node. The environment has only the number for one node."""
    gpus: dict[str, int] = {}
    for nodes, gres in parse_gres_lines(description):
        count = count_gpus(gres)
        if count:
            gpus |= dict.fromkeys([nodes] if "[" not in nodes and "," not in nodes else expand_nodelist(nodes), count)
    return gpus


def parse_gres_lines(text: str) -> list[tuple[str, str]]:
    """Return (nodes, GRES) of each line of `scontrol show job -d` that has both."""
    return re.findall(r"^\s+Nodes=(\S+) .*?\bGRES=(\S*)", text, re.MULTILINE)


def count_gpus(gres: str) -> int:
    """Count the GPUs in gpu:2(IDX:0-1) or gpu:a100:4(IDX:0-3),gpu:h100:1(IDX:4),shard:3."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)(?=\(|,|$)", gres))


def _find_addresses(nodes: list[str]) -> dict[str, str]:
    """Return node -> the numeric address at which Slurm's daemons reach it. Nodes with a loopback address are left out."""
    import ipaddress
    import socket

    addresses: dict[str, str] = {}
    listing = run_slurm_command("scontrol", "--oneliner", "show", "node", ",".join(nodes))
    for node, address in re.findall(r"NodeName=(\S+).*?\bNodeAddr=(\S+)", listing):
        try:
            addresses[node] = str(ipaddress.ip_address(address))
            continue
        except ValueError:
            pass  # it is a host name
        try:
            resolved = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            continue  # it does not resolve on this node; the other node's agent will report its address
        if not ipaddress.ip_address(resolved.partition("%")[0]).is_loopback:
            addresses[node] = resolved
    return addresses


def _slurm_binds_cpus() -> bool:
    """Return whether the cluster's task plugin binds tasks to CPUs."""
    plugin = re.search(r"^TaskPlugin\s*=\s*(.*)$", run_slurm_command("scontrol", "show", "config"), re.MULTILINE)
    return plugin is not None and plugin[1].strip() not in ("", "(null)", "none", "task/none")
