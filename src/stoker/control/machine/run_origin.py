"""Where a run's processes come from: its agent says so in their environment, and everything they start inherits it.

The environment alone proves nothing. Schedulers, at, systemd-run and cron hand it to jobs of their own, which must outlive
the run. What a run started itself is below its agent, or was: then its parent is one of those that were above the
agent, in the agent's own control group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from stoker.contract import env_vars, schedulers
from stoker.contract.frozen import frozen
from stoker.contract.process import Process, find_process, kernel_lines
from stoker.contract.text import is_digits
from stoker.control.machine.procfs import environment

_KEEPERS = ("stoker-agent", "stoker-guard")


@frozen
class Origin:
    agent: int
    start: int  # clock ticks since boot
    job: str  # of a scheduler; empty for none
    above: tuple[int, ...]  # the agent's parents. An orphan is given to one of them: to pid 1, or to a subreaper
    cgroup: str

    def text(self) -> str:
        return f"{self.agent}:{self.start}:{self.job}:{','.join(map(str, self.above))}:{self.cgroup}"


def own_origin(environ: Mapping[str, str]) -> Origin:
    """The agent's own."""
    me = find_process(os.getpid())
    parents = tuple(one.pid for one in ancestors(os.getpid()))
    return Origin(os.getpid(), me.start if me else 0, schedulers.job_id(environ), parents, cgroup(os.getpid()))


def read(text: str | None) -> Origin | None:
    try:
        agent, start, job, parents, group = (text or "").split(":", 4)
        return Origin(int(agent), int(start), job, tuple(int(pid) for pid in parents.split(",") if pid), group)
    except ValueError:
        return None


def ancestors(pid: int, table: Mapping[int, Process] | None = None) -> list[Process]:
    """Its parent, that one's parent, and so on."""
    look = find_process if table is None else table.get
    found: list[Process] = []
    one = look(pid)
    while one is not None and one.parent and one.parent not in {parent.pid for parent in found}:
        one = look(one.parent)
        if one is not None:
            found.append(one)
    return found


def cgroup(pid: int) -> str:
    """The unified hierarchy, or version 1's named one: version 1's controllers may move a process at any time."""
    lines = [line.partition(":")[2] for line in kernel_lines(f"/proc/{pid}/cgroup")]
    return ";".join(sorted(line for line in lines if line.startswith((":", "name=systemd:"))))


def current_run(environ: Mapping[str, str]) -> str:
    """The run in whose rank this process was started; empty for none. A scheduler's job has only its environment."""
    run, origin = environ.get(env_vars.RUN_ID, ""), read(environ.get(env_vars.RUN_ORIGIN))
    if not run or origin is None:
        return ""
    return run if any(one.pid == origin.agent and one.start == origin.start for one in ancestors(os.getpid())) else ""


def gpu_lender(environ: Mapping[str, str]) -> int:
    """The process above this one that holds GPU locks for the runs it starts; 0 for none."""
    pid = environ.get(env_vars.GPU_LENDER, "")
    return int(pid) if is_digits(pid) and any(one.pid == int(pid) for one in ancestors(os.getpid())) else 0


def is_kept(pid: int) -> bool:
    """Its user wants it to outlive the run."""
    return bool(environment(pid).get(env_vars.KEEP))


def why_another_started_it(one: Process, table: Mapping[int, Process]) -> str:
    """Why a process with a run's environment, whose agent is gone, is not the run's own; empty: it is."""
    environ = environment(one.pid)
    origin = read(environ.get(env_vars.RUN_ORIGIN))
    if origin is None:
        return "its environment does not say where it was started"
    if one.start < origin.start:
        return "it is older than its run"
    job = schedulers.job_id(environ)
    if job != origin.job:
        if job:
            return f"it belongs to {schedulers.describe_job(job)}"
        return f"it runs outside its run's {schedulers.describe_job(origin.job)}"
    if cgroup(one.pid) != origin.cgroup:
        return f"another service started it: its control group is {cgroup(one.pid).rpartition(':')[2] or 'unknown'}"
    run, parents = environ.get(env_vars.RUN_ID), ancestors(one.pid, table)
    of_the_run = [parent for parent in parents if environment(parent.pid).get(env_vars.RUN_ID) == run]
    top = of_the_run[-1] if of_the_run else one
    starter = table.get(top.parent)
    if starter is None or starter.pid in (1, origin.agent, *origin.above) or starter.name in _KEEPERS:
        return ""
    return f"another process started it: pid {starter.pid} ({starter.name})"
