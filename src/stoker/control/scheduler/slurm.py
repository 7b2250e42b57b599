"""Slurm as the engine: finds the nodes of the job that a run is started in, and reaches each of them with one `srun`."""

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

_INTERACTIVE_STEP = "4294967290"  # salloc's own shell, at sites that run it on the first node

# srun takes its defaults from what a job's request leaves in the environment: in a job made with --gpus-per-task our one
# task would get one GPU, with --ntasks-per-node=8 a warning, with --cpus-per-task a step bound to that many CPUs.
_REQUEST = re.compile(
    r"(SLURM|SRUN)_(.*(GPU|GRES|TRES|CPUS_PER_TASK|NTASKS|NPROCS|TASKS_PER_NODE|_BIND|DISTRIBUTION|MEM_PER_|THREADS|CORE_SPEC|HINT|EXACT|EXCLUSIVE|WHOLE).*"
    r"|NNODES|NODELIST|EXPORT_ENV|LABELIO|UNBUFFEREDIO|OPEN_MODE|(STD)?(IN|OUT|ERR)PUT.*|STD(IN|OUT|ERR)MODE|WAIT|KILL_BAD_EXIT|MULTI_PROG)"
)


def _refusal(line: str, code: int = EX_UNAVAILABLE) -> Refusal:
    return Refusal(line, code, cause="slurm.allocation")


def allocation(environ: Mapping[str, str]) -> Hosts | None:
    """Return the nodes of our job, in Slurm's order. None for an ordinary local run: no job, or a single task of one."""
    job = environ.get("SLURM_JOB_ID")
    if not job or find_current_run(environ):
        return None  # a `stoker run` inside a rank uses what the rank has, not the whole job
    if not _is_whole_job(environ):
        return None
    if environ.get("SLURM_HET_SIZE"):
        line = f"Slurm job {job} is heterogeneous ({environ['SLURM_HET_SIZE']} parts), which Stoker can't use as one"
        raise _refusal(f"{line}; name the nodes with --hosts", EX_USAGE)
    nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodelist:
        line = f"Slurm job {job} has no node list here (SLURM_JOB_NODELIST)"
        raise _refusal(f"{line}: start stoker run in the job script or in salloc's shell")
    nodes = expand_nodelist(nodelist)
    tasks = dict(zip(nodes, parse_tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", "1")), strict=False))
    gpus = _gpus_by_node(_describe_running_job(job))
    addresses = _addresses(nodes)
    options = step_options(job, binds=_binds_cpus())
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
    """Return whether we are the job's script or shell, and not the one task of a step. Raises Refusal for one of many."""
    step = environ.get("SLURM_STEP_ID")
    if step is None or step == _INTERACTIVE_STEP or environ.get("SLURM_PTY_PORT"):
        return True
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if is_digits(tasks) and int(tasks) > 1:
        fix = "start `stoker run` once, without srun, in the job script or in salloc's shell"
        line = f"srun has started this once per task ({tasks} times): {fix}; it starts the ranks on all nodes itself"
        raise _refusal(line, EX_USAGE)
    return False


class Srun:
    """Reaches one node with an srun of its own."""

    name = "srun"
    shows_share = True

    def __init__(self, options: tuple[str, ...]) -> None:
        self._options = options

    def python(self, host: Host, hosts: Hosts, args: Sequence[str]) -> list[str]:
        # Without --unbuffered: srun would use a terminal, which changes bytes.
        unset = [arg for name in sorted(os.environ) if _REQUEST.fullmatch(name) for arg in ("-u", name)]
        return ["env", *unset, "srun", *self._options, "--", host.python or sys.executable, *args]


def step_options(job: str, binds: bool) -> tuple[str, ...]:
    """Return srun's options. With --overlap the step shares the job's CPUs with its script and with other agents' steps."""
    one_task = ("--nodes=1", "--ntasks=1", "--ntasks-per-node=1")
    options = (f"--jobid={job}", *one_task, "--overlap", "--mpi=none", "--export=ALL", "--job-name=stoker-agent")
    return (*options, "--cpu-bind=none") if binds else options  # srun warns about it where Slurm binds nothing


def ask_slurm(*argv: str) -> str:
    """Return the output of one of Slurm's programs. Raises Refusal."""
    try:
        done = run_slurm(argv)
    except FileNotFoundError as problem:
        line = f"this is a Slurm job, and there is no {argv[0]} on the PATH"
        raise _refusal(f"{line}: load Slurm's module, or name the nodes with --hosts") from problem
    except subprocess.TimeoutExpired as problem:
        line = f"Slurm does not answer {argv[0]} within {COMMAND_S:.0f} s"
        raise Refusal(line, EX_UNAVAILABLE, cause="slurm.unreachable") from problem
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        line = f"Slurm's {argv[0]} fails: {lines[-1] if lines else f'exit code {done.returncode}'}"
        raise Refusal(line, EX_UNAVAILABLE, cause="slurm.unreachable")
    return done.stdout


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the names in node[1-3,7]. Slurm itself parses its grammar."""
    return ask_slurm("scontrol", "show", "hostnames", nodelist).split()


def parse_tasks_per_node(text: str) -> list[int]:
    """Return [2, 2, 2, 1] for SLURM_TASKS_PER_NODE=2(x3),1."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match:
            tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _describe_running_job(job: str) -> str:
    """Return Slurm's description of the job. Raises Refusal if it does not run: SLURM_JOB_ID may outlive its job in a shell."""
    fix = "start it inside a job, or `unset SLURM_JOB_ID` for a run on this machine"
    try:
        description = ask_slurm("scontrol", "show", "job", "-d", job)
    except Refusal as refusal:
        if "Invalid job id" not in refusal.line:
            raise
        raise _refusal(f"SLURM_JOB_ID is {job}, and Slurm knows no such job: {fix}") from refusal
    state = re.search(r"\bJobState=(\S+)", description)
    if state is not None and state[1] != "RUNNING":
        raise _refusal(f"SLURM_JOB_ID is {job}, and that job is {state[1]}: {fix}")
    return description


def _gpus_by_node(description: str) -> dict[str, int]:
    """Return how many GPUs the job has on each node. The environment knows those of one node only."""
    gpus: dict[str, int] = {}
    for nodes, gres in gres_lines(description):
        count = gpu_count(gres)
        if count:
            gpus |= dict.fromkeys([nodes] if "[" not in nodes and "," not in nodes else expand_nodelist(nodes), count)
    return gpus


def gres_lines(text: str) -> list[tuple[str, str]]:
    """Return (nodes, GRES) of each line of `scontrol show job -d` that has both."""
    return re.findall(r"^\s+Nodes=(\S+) .*?\bGRES=(\S*)", text, re.MULTILINE)


def gpu_count(gres: str) -> int:
    """Count the GPUs in gpu:2(IDX:0-1) or gpu:a100:4(IDX:0-3),gpu:h100:1(IDX:4),shard:3."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)(?=\(|,|$)", gres))


def _addresses(nodes: list[str]) -> dict[str, str]:
    """Return the numeric address of each node where Slurm's daemons reach it, if that is not loopback."""
    import ipaddress
    import socket

    addresses: dict[str, str] = {}
    listing = ask_slurm("scontrol", "--oneliner", "show", "node", ",".join(nodes))
    for node, address in re.findall(r"NodeName=(\S+).*?\bNodeAddr=(\S+)", listing):
        try:
            addresses[node] = str(ipaddress.ip_address(address))
            continue
        except ValueError:
            pass  # it is a name
        try:
            number = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            continue  # it does not resolve here: the node's own agent will report its address
        if not ipaddress.ip_address(number.partition("%")[0]).is_loopback:
            addresses[node] = number
    return addresses


def _binds_cpus() -> bool:
    """Return whether this Slurm binds tasks to CPUs."""
    plugin = re.search(r"^TaskPlugin\s*=\s*(.*)$", ask_slurm("scontrol", "show", "config"), re.MULTILINE)
    return plugin is not None and plugin[1].strip() not in ("", "(null)", "none", "task/none")
