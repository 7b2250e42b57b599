"""Finds processes that dead runs left behind, and other processes on the GPUs. Only cleanup.py stops them."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterable, Mapping

from stoker.contract import errors
from stoker.contract.frozen import frozen
from stoker.contract.process import Process, find_process, process_owner
from stoker.contract.units import plural
from stoker.control.machine import procfs, run_origin
from stoker.control.machine.examine import observe_in_child
from stoker.control.machine.model import Holder, Machine
from stoker.control.machine.observe import read_recorded
from stoker.control.record import run_record

NVML_S = 5.0  # a driver that takes longer to answer is faulty
AGENTS = ("stoker-agent", "stoker-guard")
_SYSTEM = ("Xorg", "Xwayland", "gnome-shell", "nvidia-persiste", "nv-hostengine", "dcgm", "dcgm-exporter")


@frozen
class Leftover:
    """A process of a dead run, or one that the user has named, with the details that are shown."""

    process: Process
    user: str
    age: float
    rss: int | None
    gpu_memory: int | None
    command: str
    run: str | None
    why: str  # why it is a leftover or is left alone, or a note


@frozen
class GpuProcess:
    """A process that holds a GPU. One outside this container has neither user nor age nor command."""

    gpu: str
    pid: int
    user: str | None
    age: float | None
    memory: int | None
    command: str | None
    run: str | None
    advice: str


def observe_gpus(recorded: str | None, limit: float = NVML_S) -> Machine | str:
    """Return the machine, or why it is unknown. A child calls NVML, because a call to a faulty driver may never return."""
    return read_recorded(recorded) if recorded else observe_in_child(limit)


def sum_gpu_memory(machine: Machine) -> dict[int, int]:
    """Return the bytes of GPU memory that each pid holds. Skips pids of the host that this container doesn't know."""
    bytes_by_pid: dict[int, int] = {}
    for gpu in machine.gpus:
        for holder in gpu.holders or ():
            if holder.command is not None:
                bytes_by_pid[holder.pid] = bytes_by_pid.get(holder.pid, 0) + (holder.memory or 0)
    return bytes_by_pid


def describe_process(process: Process, gpu_memory: Mapping[int, int], run: str | None, why: str) -> Leftover:
    """Return a process as a Leftover. `gpu_memory` maps pids to bytes."""
    uid = process_owner(process.pid)
    return Leftover(
        process,
        procfs.user_name(uid) if uid is not None else "?",
        _age(process),
        procfs.resident_bytes(process.pid),
        gpu_memory.get(process.pid),
        procfs.read_command_line(process.pid) or process.name,
        run,
        why,
    )


def _age(process: Process) -> float:
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - process.start / os.sysconf("SC_CLK_TCK"))


def is_running(process: Process) -> bool:
    """Return whether this very process still runs. Its main thread may be a zombie while another one hangs."""
    now = find_process(process.pid)
    if now is None or now.start != process.start:
        return False
    if now.state not in "ZX":
        return True
    try:
        return len(os.listdir(f"/proc/{process.pid}/task")) > 1
    except OSError:
        return False


def protected_pids(processes: Iterable[Process]) -> set[int]:
    """Return pid 1, this process, its ancestors and its session's leader."""
    by_pid = {process.pid: process for process in processes}
    ancestors = (process.pid for process in run_origin.ancestors(os.getpid(), by_pid))
    return {1, os.getpid(), os.getppid(), os.getsid(0), *ancestors}


def _find_agent_above(pid: int, by_pid: Mapping[int, Process]) -> int:
    """Return the pid of an agent or guardian that supervises this process, or 0. A stopped one doesn't count."""
    for process in run_origin.ancestors(pid, by_pid):
        if process.name in AGENTS and process.state not in "TtZ":
            return process.pid
    return 0


@frozen
class RunState:
    is_over: bool | None  # None if unknown
    why: str = ""
    launcher: int = 0  # its pid if it is running, else 0


def find_run_state(run_id: str, run_dir: str) -> RunState:
    """Return whether a run is over. Only a dead launcher or a missing run directory proves it."""
    if not os.path.isabs(run_dir) or os.path.basename(run_dir) != run_id:
        return RunState(False)  # no run has set this tag: the command of --notify has an id without a folder
    try:
        os.stat(run_dir)
    except (FileNotFoundError, NotADirectoryError):
        return RunState(True, "its run directory is gone")
    except OSError as problem:
        return RunState(None, f"its run directory can't be read: {problem.strerror}")
    try:
        run = run_record.read_run(run_dir)
    except run_record.DamagedRecord as problem:
        return RunState(None, f"its record can't be read: {problem}")
    pid, start, host = run.launcher if run else (0, 0, "")
    if run is None or pid <= 0 or start <= 0:
        return RunState(None, "its run.json does not say which process started it")
    if not run.mine:
        return RunState(None, f"its run directory belongs to {run.user}")
    is_alive = run_record.is_alive(run)
    if is_alive is None:
        if host != os.uname().nodename:
            return RunState(None, f"its launcher is on host {host}")
        return RunState(None, f"its launcher (pid {pid}) can't be checked")
    return RunState(False, launcher=pid) if is_alive else RunState(True, f"its launcher (pid {pid}) is dead")


def find_leftovers(gpu_memory: Mapping[int, int], root: str | None = None) -> tuple[list[Leftover], list[Leftover]]:
    """Return (leftovers of dead runs, processes of runs that may be over but are left alone).

    `gpu_memory` maps pids to bytes. With `root`, only runs in this folder count.
    """
    processes = procfs.list_processes()
    by_pid = {process.pid: process for process in processes}
    uid = os.getuid()
    own = [
        process
        for process in processes
        if process_owner(process.pid) == uid and is_running(process) and not run_origin.is_kept(process.pid)
    ]
    tags = {process.pid: tag for process in own if (tag := procfs.read_run_tag(process.pid)) is not None and tag[1]}
    states = {tag: find_run_state(*tag) for tag in set(tags.values())}
    real_root = os.path.realpath(root) if root is not None else None
    protected = protected_pids(processes)
    # A running run may have been started inside a dead one: its launcher, agent and ranks are not leftovers.
    run_by_pid: dict[int, str] = {}
    for (run_id, _), state in states.items():
        if state.launcher:
            run_by_pid |= dict.fromkeys({state.launcher, *procfs.descendants(state.launcher, processes)}, run_id)

    leftovers: dict[int, Leftover] = {}
    left_alone: list[Leftover] = []
    for process in own:
        tag = tags.get(process.pid)
        if tag is None or states[tag].is_over is False:
            continue
        if real_root is not None and os.path.realpath(os.path.dirname(tag[1])) != real_root:
            continue
        state = states[tag]
        objection = "" if state.is_over else state.why
        objection = objection or _why_left_alone(process, by_pid, protected, run_by_pid, tag)
        if objection:
            left_alone.append(describe_process(process, gpu_memory, tag[0], objection))
        else:
            leftovers[process.pid] = describe_process(process, gpu_memory, tag[0], state.why)
    # Children without a tag count, too: setproctitle overwrites the environment, and workers that hold memory use it.
    for parent in list(leftovers):
        descendants = procfs.descendants(parent, processes)
        for process in own:
            if (
                process.pid not in descendants
                or process.pid in leftovers
                or procfs.read_run_tag(process.pid) is not None
            ):
                continue
            if not _why_left_alone(process, by_pid, protected, run_by_pid, None):
                run = leftovers[parent].run
                leftovers[process.pid] = describe_process(process, gpu_memory, run, f"started by pid {parent}")
    return list(leftovers.values()), left_alone


def _why_left_alone(
    process: Process,
    by_pid: Mapping[int, Process],
    protected: set[int],
    run_by_pid: Mapping[int, str],
    tag: tuple[str, str] | None,
) -> str:
    """Return why a process of a dead run is not stopped, or ""."""
    if process.pid in protected:
        return "this command runs inside it"
    if tag is not None and process.group == os.getpgid(0) and procfs.read_run_tag(os.getpid()) == tag:
        return "this command runs in its process group"  # `stoker clean | less` in a shell that a rank has opened
    if process.pid in run_by_pid:
        return f"run {run_by_pid[process.pid]} is running in it"
    if not _is_in_our_container(process.pid):
        return "it runs in another container, where its run may be alive"
    agent = _find_agent_above(process.pid, by_pid)
    if agent:
        return f"its agent (pid {agent}) is alive and supervises it"
    return run_origin.why_another_started_it(process, by_pid) if tag is not None else ""


def _is_in_our_container(pid: int) -> bool:
    """Return whether a process shares our pids and files. Otherwise a missing run directory or launcher means nothing."""
    try:
        return all(
            os.readlink(f"/proc/{pid}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}")
            for kind in ("pid", "mnt", "cgroup")
        )
    except OSError:
        return False


def find_named(pids: list[int], gpu_memory: Mapping[int, int]) -> list[Leftover]:
    """Return the processes that the user wants to stop. Raises Refusal for the first that must not be stopped."""
    processes = procfs.list_processes()
    by_pid = {process.pid: process for process in processes}
    protected = protected_pids(processes)
    named: list[Leftover] = []
    for pid in dict.fromkeys(pids):
        process = by_pid.get(pid)
        if process is None:
            raise errors.Refusal(f"--pid {pid}: there is no such process", errors.EX_NOINPUT)
        if pid in protected:
            what = "init" if pid == 1 else "this command, one of its parents or its session's leader"
            raise errors.Refusal(f"--pid {pid}: this command can't stop {what}", errors.EX_USAGE)
        uid = process_owner(pid)
        if uid != os.getuid():
            user = procfs.user_name(uid) if uid is not None else "another user"
            line = f"--pid {pid}: it belongs to {user}, and you can only stop your own processes; ask {user} to end it"
            raise errors.Refusal(line, errors.EX_NOPERM)
        if not is_running(process):
            line = f"--pid {pid}: it is already dead, a zombie that its parent (pid {process.parent}) has to collect"
            raise errors.Refusal(line, errors.EX_UNAVAILABLE)
        if pid == 2 or process.parent == 2:
            raise errors.Refusal(f"--pid {pid}: {process.name} is a kernel thread", errors.EX_USAGE)
        descendants = procfs.descendants(pid, processes)
        tags = (procfs.read_run_tag(member) for member in (pid, *descendants))
        run = next((tag[0] for tag in tags if tag is not None and find_run_state(*tag).launcher), "")
        if run:
            line = f"--pid {pid}: run {run} is running in it; stop it with `stoker stop {shlex.quote(run)}`"
            raise errors.Refusal(line, errors.EX_UNAVAILABLE)
        agent = _find_agent_above(pid, by_pid)
        if agent:
            line = f"--pid {pid}: its agent (pid {agent}) is alive and supervises it"
            raise errors.Refusal(f"{line}; stop its run where it was started", errors.EX_UNAVAILABLE)
        children = [child for child in sorted(descendants) if child not in pids]
        tag = procfs.read_run_tag(pid)
        note = ""
        if children:
            flags = " ".join(f"--pid {child}" for child in children[:16])
            note = (
                f"its {plural(len(children), 'child process')} won't be stopped with it; to stop them, too, add {flags}"
            )
        named.append(describe_process(process, gpu_memory, tag[0] if tag else None, note))
    return named


# ---- other processes on the GPUs ----


def find_other_processes(machine: Machine, ours: set[int], recorded: bool) -> list[GpuProcess]:
    """Return the processes on the GPUs except `ours`, the leftovers. A `recorded` machine has no /proc."""
    gpu_processes: list[GpuProcess] = []
    listed_pids = {os.getpid(), *ours}
    for gpu in machine.gpus:
        for holder in gpu.holders or ():
            if holder.pid not in ours:
                listed_pids.add(holder.pid)
                process = find_process(holder.pid) if holder.command is not None and not recorded else None
                gpu_processes.append(_describe_holder(gpu.label, holder, _age(process) if process else None))
    if not recorded:
        for pid, devices in _find_device_openers().items():
            process = find_process(pid)
            if pid not in listed_pids and process is not None:
                uid, tag = process_owner(pid), procfs.read_run_tag(pid)
                user = procfs.user_name(uid) if uid is not None else None
                command = procfs.read_command_line(pid) or process.name
                holder = Holder(pid, None, command, user, tag[0] if tag else None)
                gpu_processes.append(_describe_holder(", ".join(devices), holder, _age(process)))
    return gpu_processes


def _describe_holder(gpu: str, holder: Holder, age: float | None) -> GpuProcess:
    advice = _choose_advice(holder)
    return GpuProcess(gpu, holder.pid, holder.user, age, holder.memory, holder.command, holder.run, advice)


def _choose_advice(holder: Holder) -> str:
    if holder.command is None:
        return "held from outside this container, where only its owner can end it"
    program = next(iter(holder.command.split()), "")  # a command may be empty or consist of spaces
    if os.path.basename(program).startswith(_SYSTEM):
        return "a service of this machine; don't stop it"
    if holder.user != procfs.user_name(os.getuid()):
        return f"ask {holder.user or 'its owner'} to end it, or use what is free: `stoker run --gpus any:N`"
    if holder.run:
        return f"belongs to run {holder.run}; stop it with `stoker stop {shlex.quote(holder.run)}`"
    return f"your own, but not started by Stoker; stop it with `stoker clean --pid {holder.pid}`"


def _find_device_openers() -> dict[int, list[str]]:
    """Return the processes that have a GPU's device file open. In a container, NVML shows the host's pids instead."""
    openers: dict[int, list[str]] = {}
    for pid in procfs.list_pids():
        devices = {path[5:] for path in procfs.list_open_files(pid) if re.fullmatch(r"/dev/nvidia\d+", path)}
        if devices:
            openers[pid] = sorted(devices)
    return openers
