"""Finding what dead runs left behind, and who else is on the GPUs. Looks only; clean.py acts."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping

from stoker.contract import errors, process
from stoker.contract.frozen import frozen
from stoker.contract.process import Process, find_process
from stoker.control.machine import procfs, run_origin
from stoker.control.machine.examine import look_aside
from stoker.control.machine.model import Holder, Machine
from stoker.control.machine.observe import read_recorded
from stoker.control.record import run_record

NVML_S = 5.0  # a driver that says nothing for so long is sick
AGENTS = ("stoker-agent", "stoker-guard")
_SYSTEM = ("Xorg", "Xwayland", "gnome-shell", "nvidia-persiste", "nv-hostengine", "dcgm", "dcgm-exporter")


@frozen
class Leftover:
    """A process, as it is shown."""

    process: Process
    user: str
    age: float
    rss: int | None
    gpu_memory: int | None
    command: str
    run: str | None
    why: str  # it is a leftover, or is left alone; or what its owner could do


@frozen
class OnGpu:
    """Somebody's hold on a GPU. What lies outside this container has neither user nor age nor command."""

    gpu: str
    pid: int
    user: str | None
    age: float | None
    memory: int | None
    command: str | None
    run: str | None
    advice: str


def look_at_gpus(recorded: str | None, limit: float = NVML_S) -> Machine | str:
    """The machine, or why not. NVML is asked in a child: a call into a sick driver may never return."""
    return read_recorded(recorded) if recorded else look_aside(limit)


def gpu_memory(machine: Machine) -> dict[int, int]:
    """pid -> bytes. A pid that NVML knows and this container doesn't is the host's: left out."""
    found: dict[int, int] = {}
    for holder in _holders(machine):
        if holder.command is not None:
            found[holder.pid] = found.get(holder.pid, 0) + (holder.memory or 0)
    return found


def _holders(machine: Machine) -> Iterator[Holder]:
    for gpu in machine.gpus:
        yield from gpu.holders or ()


def describe(one: Process, held: Mapping[int, int], run: str | None, why: str) -> Leftover:
    uid = process.process_owner(one.pid)
    return Leftover(
        one,
        procfs.user_name(uid) if uid is not None else "?",
        _age(one),
        procfs.resident_bytes(one.pid),
        held.get(one.pid),
        procfs.command_line(one.pid) or one.name,
        run,
        why,
    )


def _age(one: Process) -> float:
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - one.start / os.sysconf("SC_CLK_TCK"))


def lives(one: Process) -> bool:
    """Still that process, and no zombie. Its first thread may be gone while another hangs in the driver."""
    now = find_process(one.pid)
    if now is None or now.start != one.start:
        return False
    if now.state not in "ZX":
        return True
    try:
        return len(os.listdir(f"/proc/{one.pid}/task")) > 1
    except OSError:
        return False


def untouchable(table: Iterable[Process]) -> set[int]:
    """This process, all its parents and its session's leader; and pid 1."""
    here = {one.pid: one for one in table}
    return {1, os.getpid(), os.getppid(), os.getsid(0), *(one.pid for one in run_origin.ancestors(os.getpid(), here))}


def _agent_above(pid: int, here: Mapping[int, Process]) -> int:
    """An agent or guardian that lives and looks after this process; 0 for none. One that is stopped looks after nobody."""
    return next((one.pid for one in run_origin.ancestors(pid, here) if one.name in AGENTS and one.state not in "TtZ"), 0)


@frozen
class Standing:
    over: bool | None  # None: can't be told
    why: str = ""
    launcher: int = 0


def standing(run_id: str, run_dir: str) -> Standing:
    """Is this run over? Only a launcher that is known to be dead, or a record that is gone, says so."""
    if not os.path.isabs(run_dir) or os.path.basename(run_dir) != run_id:
        return Standing(False)  # not a tag that a run has set: --notify's command carries an id alone
    try:
        os.stat(run_dir)
    except (FileNotFoundError, NotADirectoryError):
        return Standing(True, "its run directory is gone")
    except OSError as problem:
        return Standing(None, f"its run directory can't be read: {problem.strerror}")
    try:
        run = run_record.read_run(run_dir)
    except run_record.Damaged as problem:
        return Standing(None, f"its record can't be read: {problem}")
    pid, start, host = run.launcher if run else (0, 0, "")
    if run is None or pid <= 0 or start <= 0:
        return Standing(None, "its run.json does not say who started it")
    if not run.mine:
        return Standing(None, f"its run directory belongs to {run.user}")
    alive = run_record.is_alive(run)
    if alive is None:
        if host != os.uname().nodename:
            return Standing(None, f"its launcher is on host {host}")
        return Standing(None, f"its launcher (pid {pid}) can't be checked")
    return Standing(False, launcher=pid) if alive else Standing(True, f"its launcher (pid {pid}) is dead")


def find_leftovers(held: Mapping[int, int], root: str | None = None) -> tuple[list[Leftover], list[Leftover]]:
    """(leftovers, those with a tag that something speaks against). `root`: of runs in this folder only."""
    table = procfs.all_processes()
    here = {one.pid: one for one in table}
    me = os.getuid()
    mine = [one for one in table if process.process_owner(one.pid) == me and lives(one) and not run_origin.is_kept(one.pid)]
    tags = {one.pid: tag for one in mine if (tag := procfs.run_tag(one.pid)) is not None and tag[1]}
    runs = {tag: standing(*tag) for tag in set(tags.values())}
    inside = os.path.realpath(root) if root is not None else None
    spared = untouchable(table)
    # A living run's launcher, agent, ranks: a dead outer run's tag makes no leftovers of them.
    busy: dict[int, str] = {}
    for (run_id, _), how in runs.items():
        if how.launcher:
            busy |= dict.fromkeys({how.launcher, *procfs.descendants(how.launcher, table)}, run_id)

    leftovers: dict[int, Leftover] = {}
    alone: list[Leftover] = []
    for one in mine:
        tag = tags.get(one.pid)
        how = runs[tag] if tag else Standing(False)
        if tag is None or how.over is False or inside not in (None, os.path.realpath(os.path.dirname(tag[1]))):
            continue
        against = "" if how.over else how.why
        against = against or _speaks_against(one, here, spared, busy, tag)
        if against:
            alone.append(describe(one, held, tag[0], against))
        else:
            leftovers[one.pid] = describe(one, held, tag[0], how.why)
    for root_pid in list(leftovers):
        for one in _untagged_below(root_pid, table, mine):
            if one.pid not in leftovers and not _speaks_against(one, here, spared, busy, None):
                leftovers[one.pid] = describe(one, held, leftovers[root_pid].run, f"started by pid {root_pid}")
    return list(leftovers.values()), alone


def _untagged_below(root: int, table: list[Process], mine: list[Process]) -> Iterator[Process]:
    """setproctitle writes over a process's environment, and the workers that hold the memory are who use it."""
    below = procfs.descendants(root, table)
    yield from (one for one in mine if one.pid in below and procfs.run_tag(one.pid) is None)


def _speaks_against(
    one: Process, here: Mapping[int, Process], spared: set[int], busy: Mapping[int, str], tag: tuple[str, str] | None
) -> str:
    if one.pid in spared:
        return "this command runs inside it"
    if tag is not None and one.group == os.getpgid(0) and procfs.run_tag(os.getpid()) == tag:
        return "this command runs beside it"  # `stoker clean | less`, typed in a shell that a rank had opened
    if one.pid in busy:
        return f"run {busy[one.pid]} is under way in it"
    if not _same_container(one.pid):
        return "it runs in another container, where its run may be alive"
    agent = _agent_above(one.pid, here)
    if agent:
        return f"its agent (pid {agent}) is alive and looks after it"
    return run_origin.why_another_started_it(one, here) if tag is not None else ""


def _same_container(pid: int) -> bool:
    """Its pids and its files are ours: only then does a missing run directory or launcher mean anything."""
    try:
        spaces = [(f"/proc/{pid}/ns/{kind}", f"/proc/self/ns/{kind}") for kind in ("pid", "mnt", "cgroup")]
        return all(os.readlink(its) == os.readlink(own) for its, own in spaces)
    except OSError:
        return False


def find_named(pids: list[int], held: Mapping[int, int]) -> list[Leftover]:
    """The processes a user asks to be stopped; refuses the first that may not be."""
    table = procfs.all_processes()
    here = {one.pid: one for one in table}
    spared = untouchable(table)
    found: list[Leftover] = []
    for pid in dict.fromkeys(pids):
        one = here.get(pid)
        if one is None:
            raise errors.Refusal(f"--pid {pid}: no such process", errors.EX_NOINPUT)
        if pid in spared:
            what = "init" if pid == 1 else "this very command, one of its parents or its session's leader"
            raise errors.Refusal(f"--pid {pid}: that is {what}; it is not stopped from here", errors.EX_USAGE)
        uid = process.process_owner(pid)
        if uid != os.getuid():
            who = procfs.user_name(uid) if uid is not None else "another user"
            line = f"--pid {pid}: it belongs to {who}, and only your own processes are stopped; ask {who} to end it"
            raise errors.Refusal(line, errors.EX_NOPERM)
        if not lives(one):
            line = f"--pid {pid}: it is dead already, a zombie that its parent (pid {one.parent}) has to collect"
            raise errors.Refusal(line, errors.EX_UNAVAILABLE)
        if pid == 2 or one.parent == 2:
            raise errors.Refusal(f"--pid {pid}: {one.name} is a thread of the kernel", errors.EX_USAGE)
        run = _living_run(pid, table)
        if run:
            line = f"--pid {pid}: run {run} is under way in it; `stoker stop {shlex.quote(run)}` ends that"
            raise errors.Refusal(line, errors.EX_UNAVAILABLE)
        agent = _agent_above(pid, here)
        if agent:
            line = f"--pid {pid}: its agent (pid {agent}) is alive and looks after it"
            raise errors.Refusal(f"{line}; stop its run where that was started", errors.EX_UNAVAILABLE)
        children = [child for child in sorted(procfs.descendants(pid, table)) if child not in pids]
        tag = procfs.run_tag(pid)
        note = ""
        if children:
            flags = " ".join(f"--pid {child}" for child in children[:16])
            note = f"{len(children)} below it, not stopped with it: {flags}"
        found.append(describe(one, held, tag[0] if tag else None, note))
    return found


def _living_run(pid: int, table: list[Process]) -> str:
    """The run that would lose its launcher, its agent or a rank."""
    for member in (pid, *procfs.descendants(pid, table)):
        tag = procfs.run_tag(member)
        if tag is not None and standing(*tag).launcher:
            return tag[0]
    return ""


# ---- who else is on the GPUs ----


def find_others(machine: Machine, ours: set[int], recorded: bool) -> list[OnGpu]:
    """Everybody on a GPU whom we leave alone, with what their owner could do."""
    found: list[OnGpu] = []
    seen = {os.getpid(), *ours}
    for gpu in machine.gpus:
        for holder in gpu.holders or ():
            if holder.pid not in ours:
                seen.add(holder.pid)
                known = find_process(holder.pid) if holder.command is not None and not recorded else None
                found.append(_on_gpu(gpu.label, holder, _age(known) if known else None))
    if not recorded:
        for pid, devices in _device_openers().items():
            one = find_process(pid)
            if pid not in seen and one is not None:
                uid, tag = process.process_owner(pid), procfs.run_tag(pid)
                user = procfs.user_name(uid) if uid is not None else None
                who = Holder(pid, None, procfs.command_line(pid) or one.name, user, tag[0] if tag else None)
                found.append(_on_gpu(", ".join(devices), who, _age(one)))
    return found


def _on_gpu(gpu: str, who: Holder, age: float | None) -> OnGpu:
    return OnGpu(gpu, who.pid, who.user, age, who.memory, who.command, who.run, _advice(who))


def _advice(holder: Holder) -> str:
    if holder.command is None:
        return "held from outside this container: only its owner, out there, can end it"
    program = next(iter(holder.command.split()), "")  # one may have no words, and a name of spaces
    if os.path.basename(program).startswith(_SYSTEM):
        return "a service of this machine: leave it"
    if holder.user != procfs.user_name(os.getuid()):
        return f"ask {holder.user or 'its owner'} to end it, or use what is free: `stoker run --gpus any:N`"
    if holder.run:
        return f"of run {holder.run}: `stoker stop {shlex.quote(holder.run)}` ends it"
    return f"yours, not started by Stoker: `stoker clean --pid {holder.pid}` stops it"


def _device_openers() -> dict[int, list[str]]:
    """Who has a GPU's device file open: in a container the only pids that are certainly ours to name."""
    found: dict[int, list[str]] = {}
    for pid in procfs.pids_here():
        devices = {path[5:] for path in procfs.open_files(pid) if re.fullmatch(r"/dev/nvidia\d+", path)}
        if devices:
            found[pid] = sorted(devices)
    return found
