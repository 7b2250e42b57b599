"""Slurm as the engine: reads the allocation a run is started in, and reaches each of its nodes through one `srun`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.slurm_job import ASK_S, run_slurm
from stoker.contract.text import is_digits
from stoker.control.machine.run_origin import current_run

if TYPE_CHECKING:
    from stoker.control.cluster.hosts import Host, Hosts
    from stoker.control.cluster.transport import Transport

_INTERACTIVE_STEP = "4294967290"  # salloc's own shell, where the site puts it on the first node

# What a job's request leaves in the environment becomes a default of every srun in it: a job made with --gpus-per-task
# would give our one task one GPU, --ntasks-per-node=8 a warning, --cpus-per-task a step bound to that many CPUs.
_REQUEST = re.compile(
    r"(SLURM|SRUN)_(.*(GPU|GRES|TRES|CPUS_PER_TASK|NTASKS|NPROCS|TASKS_PER_NODE|_BIND|DISTRIBUTION|MEM_PER_|THREADS|CORE_SPEC|HINT|EXACT|EXCLUSIVE|WHOLE).*"
    r"|NNODES|NODELIST|EXPORT_ENV|LABELIO|UNBUFFEREDIO|OPEN_MODE|(STD)?(IN|OUT|ERR)PUT.*|STD(IN|OUT|ERR)MODE|WAIT|KILL_BAD_EXIT|MULTI_PROG)"
)


def _unusable(line: str, code: int = EX_UNAVAILABLE) -> Refusal:
    return Refusal(line, code, cause="slurm.allocation")


def allocation(environ: Mapping[str, str]) -> Hosts | None:
    """The nodes of our job, in Slurm's order. None: no allocation, or one task of it: an ordinary local run."""
    job = environ.get("SLURM_JOB_ID")
    if not job or current_run(environ):
        return None  # a rank's own `stoker run` has its rank's place, not the whole job's
    if not _whole_job(environ):
        return None
    if environ.get("SLURM_HET_SIZE"):
        line = f"Slurm job {job} is heterogeneous ({environ['SLURM_HET_SIZE']} parts), which Stoker can't use as one"
        raise _unusable(f"{line}; name the nodes with --hosts", EX_USAGE)
    told = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not told:
        line = f"Slurm job {job} has no node list here (SLURM_JOB_NODELIST)"
        raise _unusable(f"{line}: start stoker run in the job script or in salloc's shell")
    nodes = expand_nodelist(told)
    tasks = dict(zip(nodes, parse_tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", "1")), strict=False))
    gpus = _gpus(_running(job))
    addresses = _addresses(nodes)
    here = environ.get("SLURMD_NODENAME", "")
    base = step_options(job, binds=_binds())
    from stoker.control.cluster.hosts import Host, Hosts

    hosts = tuple(
        Host(
            name=node,
            target=node,
            address=addresses.get(node),
            python=sys.executable,
            slots=None if gpus.get(node) else tasks.get(node, 1),
            here=node == here,
        )
        for node in nodes
    )
    ways: dict[str, Transport] = {
        node: Srun((*base, *((f"--gpus={gpus[node]}",) if gpus.get(node) else ()), f"--nodelist={node}"))
        for node in nodes
    }
    return Hosts(hosts, transports=ways, scheduler="slurm")


def _whole_job(environ: Mapping[str, str]) -> bool:
    """Are we the job's script or shell? Else a task of a step: alone in it, or one of many (never meant)."""
    step = environ.get("SLURM_STEP_ID")
    if step is None or step == _INTERACTIVE_STEP or environ.get("SLURM_PTY_PORT"):
        return True
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if is_digits(tasks) and int(tasks) > 1:
        fix = "start `stoker run` once, without srun, in the job script or in salloc's shell"
        line = f"srun has started this once per task ({tasks} times): {fix}; it starts the ranks on all nodes itself"
        raise _unusable(line, EX_USAGE)
    return False


class Srun:
    """An srun of its own for each node."""

    name = "srun"
    shows_share = True

    def __init__(self, options: tuple[str, ...]) -> None:
        self._options = options

    def python(self, host: Host, hosts: Hosts, words: Sequence[str]) -> list[str]:
        """Not srun's --unbuffered: that puts a terminal between us, which changes bytes."""
        drop = [name for name in sorted(os.environ) if _REQUEST.fullmatch(name)]
        without = [word for name in drop for word in ("-u", name)]
        return ["env", *without, "srun", *self._options, "--", host.python or sys.executable, *words]


def step_options(job: str, binds: bool) -> tuple[str, ...]:
    """--overlap: the step shares the job's CPUs with its script and with other agents' steps."""
    one_task = ("--nodes=1", "--ntasks=1", "--ntasks-per-node=1")
    found = (f"--jobid={job}", *one_task, "--overlap", "--mpi=none", "--export=ALL", "--job-name=stoker-agent")
    return (*found, "--cpu-bind=none") if binds else found  # where Slurm binds nothing, srun complains about the option


def ask_slurm(*argv: str) -> str:
    """What one of Slurm's own programs answers."""
    try:
        done = run_slurm(argv)
    except FileNotFoundError as problem:
        line = f"this is a Slurm job, and there is no {argv[0]} on the PATH"
        raise _unusable(f"{line}: load Slurm's module, or name the nodes with --hosts") from problem
    except subprocess.TimeoutExpired as problem:
        line = f"Slurm does not answer {argv[0]} within {ASK_S:.0f} s"
        raise Refusal(line, EX_UNAVAILABLE, cause="slurm.unreachable") from problem
    if done.returncode:
        line = f"Slurm's {argv[0]} fails: {_line(done.stderr) or f'exit code {done.returncode}'}"
        raise Refusal(line, EX_UNAVAILABLE, cause="slurm.unreachable")
    return done.stdout


def _line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def expand_nodelist(nodelist: str) -> list[str]:
    """node[1-3,7] written out: by Slurm itself, whose grammar it is."""
    return ask_slurm("scontrol", "show", "hostnames", nodelist).split()


def parse_tasks_per_node(text: str) -> list[int]:
    """SLURM_TASKS_PER_NODE: 2(x3),1 is 2, 2, 2, 1."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match:
            found += [int(match[1])] * int(match[2] or 1)
    return found


def _running(job: str) -> str:
    """What Slurm says of the job. A shell may outlive its job, and a variable a shell."""
    way = "start it inside a job, or `unset SLURM_JOB_ID` for a run on this machine"
    try:
        told = ask_slurm("scontrol", "show", "job", "-d", job)
    except Refusal as refusal:
        if "Invalid job id" not in refusal.line:
            raise
        raise _unusable(f"SLURM_JOB_ID is {job}, and Slurm knows no such job: {way}") from refusal
    state = re.search(r"\bJobState=(\S+)", told)
    if state is not None and state[1] != "RUNNING":
        raise _unusable(f"SLURM_JOB_ID is {job}, and that job is {state[1]}: {way}")
    return told


def _gpus(told: str) -> dict[str, int]:
    """GPUs the job has on each node, of `scontrol show job -d`; the environment knows those of one node only."""
    found: dict[str, int] = {}
    for nodes, held in gres_lines(told):
        count = gpu_count(held)
        if count:
            found.update(
                dict.fromkeys([nodes] if "[" not in nodes and "," not in nodes else expand_nodelist(nodes), count)
            )
    return found


def gres_lines(text: str) -> list[tuple[str, str]]:
    """(nodes, what they give) in `scontrol show job -d`."""
    return re.findall(r"^\s+Nodes=(\S+) .*?\bGRES=(\S*)", text, re.MULTILINE)


def gpu_count(held: str) -> int:
    """gpu:2(IDX:0-1), gpu:a100:4(IDX:0-3),gpu:h100:1(IDX:4), shard:3: the GPUs in it."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)(?=\(|,|$)", held))


def _addresses(nodes: list[str]) -> dict[str, str]:
    """Where Slurm's daemons reach each node, as a number. Loopback is no address for the others."""
    import ipaddress
    import socket

    found: dict[str, str] = {}
    told = ask_slurm("scontrol", "--oneliner", "show", "node", ",".join(nodes))
    for name, address in re.findall(r"NodeName=(\S+).*?\bNodeAddr=(\S+)", told):
        try:
            found[name] = str(ipaddress.ip_address(address))
            continue
        except ValueError:
            pass  # a name: resolved below
        try:
            number = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            continue  # not to be resolved here: the node's own agent will say how it is reached
        if not ipaddress.ip_address(number.partition("%")[0]).is_loopback:
            found[name] = number
    return found


def _binds() -> bool:
    """Does this Slurm bind tasks to CPUs?"""
    plugin = re.search(r"^TaskPlugin\s*=\s*(.*)$", ask_slurm("scontrol", "show", "config"), re.MULTILINE)
    return plugin is not None and plugin[1].strip() not in ("", "(null)", "none", "task/none")
