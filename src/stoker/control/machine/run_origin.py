"""Tells whether a run started a process: its agent writes where it runs into the environment, which children inherit.

The environment alone proves nothing: schedulers, at, systemd-run and cron pass it on to their jobs, which must outlive the
run. A process of the run is a descendant of its agent. If it is an orphan, its parent is an ancestor of the agent, and it
is in the agent's control group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from stoker.contract import env_vars, schedulers
from stoker.contract.frozen import frozen
from stoker.contract.process import Process, find_process, read_kernel_lines
from stoker.contract.text import is_digits
from stoker.control.machine.procfs import read_environment

_OWN_NAMES = ("stoker-agent", "stoker-guard")


@frozen
class RunOrigin:
    """Identifies the agent that started a run's processes, and its surroundings."""

    agent: int
    start: int  # the agent's, in clock ticks since boot
    job: str  # the scheduler's job, or ""
    ancestors: tuple[int, ...]  # the agent's. An orphan gets one of them as its parent: pid 1 or a subreaper
    cgroup: str

    def text(self) -> str:
        return f"{self.agent}:{self.start}:{self.job}:{','.join(map(str, self.ancestors))}:{self.cgroup}"


def find_own_origin(environ: Mapping[str, str]) -> RunOrigin:
    """Return the origin of the ranks that this process, an agent, starts."""
    pid = os.getpid()
    agent = find_process(pid)
    parents = tuple(parent.pid for parent in ancestors(pid))
    return RunOrigin(pid, agent.start if agent else 0, schedulers.job_id(environ), parents, read_cgroup(pid))


def parse_origin(text: str | None) -> RunOrigin | None:
    try:
        agent, start, job, parents, group = (text or "").split(":", 4)
        return RunOrigin(int(agent), int(start), job, tuple(int(pid) for pid in parents.split(",") if pid), group)
    except ValueError:
        return None


def ancestors(pid: int, table: Mapping[int, Process] | None = None) -> list[Process]:
    """Return the parent of a process, that one's parent, and so on."""
    find = find_process if table is None else table.get
    parents: list[Process] = []
    process = find(pid)
    while process is not None and process.parent and process.parent not in {parent.pid for parent in parents}:
        process = find(process.parent)
        if process is not None:
            parents.append(process)
    return parents


def read_cgroup(pid: int) -> str:
    """Return the control group of a process: of the unified hierarchy, or of version 1's named one.

    Version 1's controllers are left out, because they may move a process at any time.
    """
    lines = [line.partition(":")[2] for line in read_kernel_lines(f"/proc/{pid}/cgroup")]
    return ";".join(sorted(line for line in lines if line.startswith((":", "name=systemd:"))))


def find_current_run(environ: Mapping[str, str]) -> str:
    """Return the run in whose rank this process was started, or "".

    A scheduler's job that only inherited the run's environment is not in it.
    """
    run, origin = environ.get(env_vars.RUN_ID, ""), parse_origin(environ.get(env_vars.RUN_ORIGIN))
    if not run or origin is None:
        return ""
    is_below = any((parent.pid, parent.start) == (origin.agent, origin.start) for parent in ancestors(os.getpid()))
    return run if is_below else ""


def find_gpu_lender(environ: Mapping[str, str]) -> int:
    """Return the pid of the process above this one that holds GPU locks for the runs it starts, or 0."""
    pid = environ.get(env_vars.GPU_LENDER, "")
    return int(pid) if is_digits(pid) and any(parent.pid == int(pid) for parent in ancestors(os.getpid())) else 0


def is_kept(pid: int) -> bool:
    """Return whether the user wants a process to outlive the run (STOKER_KEEP)."""
    return bool(read_environment(pid).get(env_vars.KEEP))


def why_another_started_it(process: Process, table: Mapping[int, Process]) -> str:
    """Return why a process with a run's environment, whose agent is gone, is not the run's own, or "" if it is."""
    environ = read_environment(process.pid)
    origin = parse_origin(environ.get(env_vars.RUN_ORIGIN))
    if origin is None:
        return "its environment does not say where it was started"
    if process.start < origin.start:
        return "it is older than its run"
    job = schedulers.job_id(environ)
    if job != origin.job:
        if job:
            return f"it belongs to {schedulers.describe_job(job)}"
        return f"it runs outside its run's {schedulers.describe_job(origin.job)}"
    group = read_cgroup(process.pid)
    if group != origin.cgroup:
        return f"another service started it: its control group is {group.rpartition(':')[2] or 'unknown'}"
    run, parents = environ.get(env_vars.RUN_ID), ancestors(process.pid, table)
    run_ancestors = [parent for parent in parents if read_environment(parent.pid).get(env_vars.RUN_ID) == run]
    top = run_ancestors[-1] if run_ancestors else process
    starter = table.get(top.parent)
    if starter is None or starter.pid in (1, origin.agent, *origin.ancestors) or starter.name in _OWN_NAMES:
        return ""
    return f"another process started it: pid {starter.pid} ({starter.name})"
