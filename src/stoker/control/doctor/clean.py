"""`stoker clean`: finds what dead runs left behind and frees it. The only file of the doctor that acts.

What may be signalled: a process of this uid whose run is proven to be over, or one the user has named; known by pid and start time
and held by a pidfd, so that a pid that was given away meanwhile is never hit. What may be removed: a file of this uid that no process
uses. What can't be told is left alone and said to be.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import select
import shutil
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from stoker.contract import names
from stoker.contract.shape import shape
from stoker.control.machine import processes
from stoker.control.machine.model import Holder, Machine, machine_from_json
from stoker.control.machine.observe import Observer, read_recorded
from stoker.control.machine.processes import Process, process
from stoker.control.record import reader

LOCKS = "/tmp/stoker-gpu-locks"
NVML_S = 5.0  # a driver that says nothing for so long is sick
GROUP_S = 1.0  # between a child's SIGTERM and SIGKILL, once its parent's grace is over
KILL_S = 10.0  # a killed process that held 100 GB of pinned memory takes seconds to end
BACK_S = 5.0
FRESH_S = 60.0  # a file younger than this may be about to be opened
_POLL_S = 0.02
_AGENTS = ("stoker-agent", "stoker-guard")
_SYSTEM = ("Xorg", "Xwayland", "gnome-shell", "nvidia-persiste", "nv-hostengine", "dcgm", "dcgm-exporter")


# ---- what is there ----


@shape
class Found:
    """A process, as it is shown."""

    process: Process
    user: str
    age: float
    rss: int | None
    gpu_memory: int | None
    command: str
    run: str | None
    why: str  # it is a leftover, or is left alone; or what its owner could do


@shape
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


@shape
class Lock:
    """A lock file of a GPU. The kernel frees it when its holder dies, and it is never unlinked: see agent/locks.py."""

    gpu: str
    held: bool
    who: str


@shape
class Debris:
    kind: str  # shared memory | agent's folder
    path: str
    size: int
    age: float


def look_at_gpus(recorded: str | None, limit: float = NVML_S) -> Machine | str:
    """The machine, or why it can't be had. NVML is asked in a child: a call into a sick driver may never return, not even for a SIGKILL."""
    if recorded:
        return read_recorded(recorded)
    answer, back = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = json.dumps(Observer().look().to_json())
        except Exception as problem:
            said = json.dumps({"error": f"{type(problem).__name__}: {problem}"})
        with os.fdopen(back, "w", encoding="utf-8") as pipe:
            pipe.write(said)
        os._exit(0)
    os.close(back)
    data, deadline = b"", time.monotonic() + limit
    with os.fdopen(answer, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            more = file.read(1 << 16)
            if not more:
                os.waitpid(child, 0)
                told = json.loads(data) if data else {"error": "the process that asks NVML died"}
                return str(told["error"]) if "error" in told else machine_from_json(told)
            data += more
    os.kill(child, signal.SIGKILL)  # our own child, not waited for: its pid can't be anyone else's
    return f"NVML has not answered within {limit:.0f} s"


def gpu_memory(machine: Machine) -> dict[int, int]:
    """pid -> bytes. A pid that NVML knows and this container doesn't is the host's, and could be anybody's here: left out."""
    found: dict[int, int] = {}
    for holder in _holders(machine):
        if holder.command is not None:
            found[holder.pid] = found.get(holder.pid, 0) + (holder.memory or 0)
    return found


def _holders(machine: Machine) -> Iterator[Holder]:
    for gpu in machine.gpus:
        yield from gpu.holders or ()


def describe(one: Process, held: Mapping[int, int], run: str | None, why: str) -> Found:
    uid = processes.owner(one.pid)
    return Found(
        one, processes.user_name(uid) if uid is not None else "?", _age(one), processes.resident(one.pid), held.get(one.pid),
        processes.command(one.pid) or one.name, run, why,
    )  # fmt: skip


def _age(one: Process) -> float:
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - one.start / os.sysconf("SC_CLK_TCK"))


def lives(one: Process) -> bool:
    """Still that process, and not merely waiting to be collected. The first thread may be gone while another hangs in the driver."""
    now = process(one.pid)
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
    return {1, os.getpid(), os.getppid(), os.getsid(0), *(one.pid for one in _above(os.getpid(), here))}


def _above(pid: int, here: Mapping[int, Process]) -> Iterator[Process]:
    """Its parent, that one's parent, and so on."""
    seen: set[int] = set()
    one = here.get(pid)
    while one is not None and one.pid not in seen:
        seen.add(one.pid)
        one = here.get(one.parent)
        if one is not None:
            yield one


def _agent_above(pid: int, here: Mapping[int, Process]) -> int:
    """An agent or guardian that lives and looks after this process; 0 for none. One that is stopped looks after nobody."""
    return next((one.pid for one in _above(pid, here) if one.name in _AGENTS and one.state not in "TtZ"), 0)


# ---- leftovers of our runs ----


@shape
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
        run = reader.load(run_dir)
        pid, start, host = run.launcher if run else (0, 0, "")
    except (TypeError, ValueError, AttributeError):
        run, pid, start, host = None, 0, 0, ""
    if run is None or pid <= 0 or start <= 0:
        return Standing(None, "its run.json does not say who started it")
    alive = reader.alive(run)
    if alive is None:
        return Standing(None, f"its launcher is on host {host}")
    return Standing(False, launcher=pid) if alive else Standing(True, f"its launcher (pid {pid}) is dead")


def find_leftovers(held: Mapping[int, int], root: str | None = None) -> tuple[list[Found], list[Found]]:
    """(leftovers, those with a tag that are left alone because something speaks against it). `root`: of runs in this folder only."""
    table = processes.all_processes()
    here = {one.pid: one for one in table}
    me = os.getuid()
    mine = [one for one in table if processes.owner(one.pid) == me and lives(one)]
    tags = {one.pid: tag for one in mine if (tag := processes.run_tag(one.pid)) is not None and tag[1]}
    runs = {tag: standing(*tag) for tag in set(tags.values())}
    inside = os.path.realpath(root) if root is not None else None
    spared = untouchable(table)
    busy: dict[int, str] = {}  # a living run's launcher, agent, ranks: a dead outer run's tag makes no leftovers of them
    for (run_id, _), how in runs.items():
        if how.launcher:
            busy |= dict.fromkeys({how.launcher, *processes.descendants(how.launcher, table)}, run_id)

    leftovers: dict[int, Found] = {}
    alone: list[Found] = []
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
    below = processes.descendants(root, table)
    yield from (one for one in mine if one.pid in below and processes.run_tag(one.pid) is None)


def _speaks_against(one: Process, here: Mapping[int, Process], spared: set[int], busy: Mapping[int, str], tag: tuple[str, str] | None) -> str:
    if one.pid in spared:
        return "this command runs inside it"
    if tag is not None and one.group == os.getpgid(0) and processes.run_tag(os.getpid()) == tag:
        return "this command runs beside it"  # `stoker clean | less`, typed in a shell that a rank had opened
    if one.pid in busy:
        return f"run {busy[one.pid]} is under way in it"
    if not _same_container(one.pid):
        return "it runs in another container, where its run may be alive"
    agent = _agent_above(one.pid, here)
    return f"its agent (pid {agent}) is alive and looks after it" if agent else ""


def _same_container(pid: int) -> bool:
    """Its pids and its files are ours: only then does a missing run directory or launcher mean anything."""
    try:
        return all(os.readlink(f"/proc/{pid}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt"))
    except OSError:
        return False


def find_named(pids: list[int], held: Mapping[int, int]) -> list[Found]:
    """The processes a user asks to be stopped; refuses the first that may not be."""
    table = processes.all_processes()
    here = {one.pid: one for one in table}
    spared = untouchable(table)
    found: list[Found] = []
    for pid in dict.fromkeys(pids):
        one = here.get(pid)
        if one is None:
            raise names.Refusal(f"--pid {pid}: no such process", names.EX_NOINPUT)
        if pid in spared:
            what = "init" if pid == 1 else "this very command, one of its parents or its session's leader"
            raise names.Refusal(f"--pid {pid}: that is {what}; it is not stopped from here", names.EX_USAGE)
        uid = processes.owner(pid)
        if uid != os.getuid():
            who = processes.user_name(uid) if uid is not None else "another user"
            raise names.Refusal(f"--pid {pid}: it belongs to {who}, and only your own processes are stopped; ask {who} to end it", names.EX_NOPERM)
        if not lives(one):
            raise names.Refusal(f"--pid {pid}: it is dead already, a zombie that its parent (pid {one.parent}) has to collect", names.EX_UNAVAILABLE)
        if pid == 2 or one.parent == 2:
            raise names.Refusal(f"--pid {pid}: {one.name} is a thread of the kernel", names.EX_USAGE)
        run = _living_run(pid, table)
        if run:
            raise names.Refusal(f"--pid {pid}: run {run} is under way in it; `stoker stop {run}` ends that", names.EX_UNAVAILABLE)
        agent = _agent_above(pid, here)
        if agent:
            raise names.Refusal(f"--pid {pid}: its agent (pid {agent}) is alive and looks after it; stop its run where that was started", names.EX_UNAVAILABLE)
        children = [child for child in sorted(processes.descendants(pid, table)) if child not in pids]
        tag = processes.run_tag(pid)
        note = f"{len(children)} below it, not stopped with it: {' '.join(f'--pid {child}' for child in children[:16])}" if children else ""
        found.append(describe(one, held, tag[0] if tag else None, note))
    return found


def _living_run(pid: int, table: list[Process]) -> str:
    """The run that would lose its launcher, its agent or a rank."""
    for member in (pid, *processes.descendants(pid, table)):
        tag = processes.run_tag(member)
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
                known = process(holder.pid) if holder.command is not None and not recorded else None
                found.append(
                    OnGpu(gpu.label, holder.pid, holder.user, _age(known) if known else None, holder.memory, holder.command, holder.run, _advice(holder))
                )
    if not recorded:
        for pid, devices in _device_openers().items():
            one = process(pid)
            if pid not in seen and one is not None:
                uid, tag = processes.owner(pid), processes.run_tag(pid)
                who = Holder(pid, None, processes.command(pid) or one.name, processes.user_name(uid) if uid is not None else None, tag[0] if tag else None)
                found.append(OnGpu(", ".join(devices), pid, who.user, _age(one), None, who.command, who.run, _advice(who)))
    return found


def _advice(holder: Holder) -> str:
    if holder.command is None:
        return "held from outside this container: only its owner, out there, can end it"
    if os.path.basename(holder.command.split()[0]).startswith(_SYSTEM):
        return "a service of this machine: leave it"
    if holder.user != processes.user_name(os.getuid()):
        return f"ask {holder.user or 'its owner'} to end it, or use what is free: `stoker run --gpus any:N`"
    if holder.run:
        return f"of run {holder.run}: `stoker stop {holder.run}` ends it"
    return f"yours, not started by Stoker: `stoker clean --pid {holder.pid}` stops it"


def _device_openers() -> dict[int, list[str]]:
    """Who has a GPU's device file open: in a container the only pids that are certainly ours to name."""
    found: dict[int, list[str]] = {}
    for pid in _pids():
        devices = {path[5:] for path in _descriptors(pid) if re.fullmatch(r"/dev/nvidia\d+", path)}
        if devices:
            found[pid] = sorted(devices)
    return found


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _descriptors(pid: int) -> list[str]:
    found = []
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    except OSError:
        return found  # it ended, or is another user's
    return found


# ---- locks and files ----


def find_locks(folder: str = LOCKS) -> list[Lock]:
    found: list[Lock] = []
    try:
        entries = sorted(os.listdir(folder))
    except FileNotFoundError:
        return found
    for name in entries:
        try:
            handle = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as problem:
            found.append(Lock(name, False, f"can't be read: {problem.strerror}"))
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            held = False
        except BlockingIOError:
            held = True
        try:
            said = json.loads(os.pread(handle, 4096, 0))
            who = f"run {said['run']} (agent pid {said['pid']})"
        except (ValueError, KeyError, TypeError):
            who = "unknown"
        finally:
            os.close(handle)
        found.append(Lock(name, held, who))
    return found


_SHM = re.compile(r"torch_(\d+)_\d+_\d+|pym-(\d+)-\w+|psm_\w+|nccl-\w+")
_AGENT_FOLDER = re.compile(r"stoker-[a-z0-9_]{8}")  # tempfile's eight random characters
_AGENT_FILE = re.compile(r"s|\d+-\d+\.(error\.json|stack|elastic\.json)")


def find_debris(tmp: str = "/tmp", shm: str = "/dev/shm") -> list[Debris]:
    tmp, shm = os.path.realpath(tmp), os.path.realpath(shm)  # as /proc spells them
    used = paths_in_use((tmp + "/stoker-", shm + "/"))
    return [*_dead_folders(tmp, used), *_dead_shared_memory(shm, used)]


def _own_entries(folder: str, pattern: re.Pattern[str]) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Entries of this uid with such a name, old enough, and no links."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if pattern.fullmatch(entry.name):
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if found.st_uid == os.getuid() and time.time() - max(found.st_mtime, found.st_ctime) > FRESH_S:
                yield entry, found


def _dead_shared_memory(folder: str, used: set[str]) -> Iterator[Debris]:
    for entry, about in _own_entries(folder, _SHM):
        match = _SHM.fullmatch(entry.name)
        maker = match and (match[1] or match[2])
        if not stat.S_ISREG(about.st_mode) or entry.path in used or (maker and process(int(maker)) is not None):
            continue
        if _alone_with(entry.path, about, unlink=False):
            yield Debris("shared memory", entry.path, about.st_blocks * 512, time.time() - about.st_mtime)


def _dead_folders(folder: str, used: set[str]) -> Iterator[Debris]:
    for entry, about in _own_entries(folder, _AGENT_FOLDER):
        try:
            if stat.S_ISDIR(about.st_mode) and not _folder_in_use(entry.path, used):
                size = sum(about.st_blocks * 512 for _, about in _walk(entry.path))
                yield Debris("agent's folder", entry.path, size, time.time() - about.st_mtime)
        except FileNotFoundError:
            continue  # its agent has just ended in good order


def _folder_in_use(path: str, used: set[str]) -> bool:
    """An agent's folder holds its socket and its ranks' reports. One with anything else in it is not an agent's."""
    inside = os.listdir(path)
    if not all(_AGENT_FILE.fullmatch(name) for name in inside) or any(one == path or one.startswith(path + "/") for one in used):
        return True
    if "s" not in inside:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as letter:  # sends nothing
        try:
            letter.connect(os.path.join(path, "s"))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def paths_in_use(prefixes: tuple[str, ...]) -> set[str]:
    """Paths that begin so and that some process has open, mapped, or stands in; of the processes we may look into."""
    found: set[str] = set()
    marks = [prefix.encode() for prefix in prefixes]
    for pid in _pids():
        links = _descriptors(pid)
        for what in ("cwd", "exe"):
            try:
                links.append(os.readlink(f"/proc/{pid}/{what}"))
            except OSError:
                continue
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                mapped = file.read()
        except OSError:
            mapped = b""
        if any(mark in mapped for mark in marks):
            links += [os.fsdecode(line.split(None, 5)[5]) for line in mapped.splitlines() if any(mark in line for mark in marks)]
        found |= {link for link in links if link.startswith(prefixes)}
    return found


def _alone_with(path: str, about: os.stat_result, unlink: bool) -> bool:
    """Nobody else has this file open or mapped, in this container or any other: the kernel gives a write lease only then.

    Unlinked under the lease: who opens it in that instant waits until it is gone. Where a file system knows no leases, /proc has spoken.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        now = os.fstat(handle)
        if (now.st_dev, now.st_ino, now.st_uid) != (about.st_dev, about.st_ino, os.getuid()):
            return False
        try:
            fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)  # a lease is called back by SIGIO, which would kill us; this one is ignored
            fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as problem:
            if problem.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                return False
        if unlink:
            os.unlink(path)
        return True
    finally:
        os.close(handle)


def remove_debris(found: list[Debris]) -> list[tuple[Debris, str]]:
    """Looks once more, then removes. Returns what stays, and why."""
    kept: list[tuple[Debris, str]] = []
    folders = {os.path.dirname(one.path) for one in found}
    used = paths_in_use(tuple(folder + "/" for folder in folders)) if found else set()
    for one in found:
        try:
            if one.kind == "shared memory":
                gone = one.path not in used and _alone_with(one.path, os.lstat(one.path), unlink=True)
            else:
                gone = not _folder_in_use(one.path, used)
                if gone:
                    for name in os.listdir(one.path):
                        os.unlink(os.path.join(one.path, name))
                    os.rmdir(one.path)
            if not gone:
                kept.append((one, "somebody uses it now"))
        except FileNotFoundError:
            continue
        except OSError as problem:
            kept.append((one, problem.strerror or str(problem)))
    return kept


# ---- stopping ----


@shape
class Stopped:
    seconds: float
    killed: tuple[int, ...]  # those that SIGTERM did not end
    survivors: tuple[Process, ...]  # as they are now: state D waits in the kernel, and no signal reaches it


def signal_exactly(who: Process, signum: int) -> bool:
    """Signals this process of this uid and no other: by pidfd, with its start time and owner compared after the pidfd is held.

    agent/kernel.py has its like; the agent travels alone and the doctor may not import it.
    """
    try:
        handle = os.pidfd_open(who.pid)
    except OSError as problem:
        if problem.errno == errno.ENOSYS:
            raise names.Refusal(
                "this kernel has no pidfd (Linux 5.3 has): without it a reused pid could be hit, so nothing is stopped", names.EX_OSERR
            ) from problem
        return False
    try:
        now = process(who.pid)
        if now is None or now.start != who.start or processes.owner(who.pid) != os.getuid():
            return False
        signal.pidfd_send_signal(handle, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


def stop_ladder(targets: list[Process], grace: float, more: Callable[[], list[Process]] = list) -> Stopped:
    """SIGCONT, SIGTERM, grace, SIGKILL. Parents first: a worker that goes before its rank turns a clean save into an error.

    `more` is asked when all are gone: what they started in the meantime gets SIGKILL.
    """
    spared = untouchable(processes.all_processes())
    targets = [one for one in targets if one.pid not in spared]
    began = time.monotonic()
    asked: set[int] = set()
    killed: set[int] = set()
    kill_at = began + grace
    for one in targets:
        signal_exactly(one, signal.SIGCONT)
    while True:
        left = [one for one in targets if lives(one)]
        now = time.monotonic()
        if not left:
            left = [one for one in more() if one.pid not in spared and lives(one)]
            if not left:
                return Stopped(now - began, tuple(sorted(killed)), ())
            targets, kill_at = left, min(kill_at, now)
        if now - began > grace + GROUP_S + KILL_S:
            return Stopped(now - began, tuple(sorted(killed)), tuple(process(one.pid) or one for one in left))
        unasked = [one for one in left if one.pid not in asked]
        pids = {one.pid for one in left}
        due = [one for one in unasked if one.parent not in pids] if now < began + grace else unasked
        if due and now >= began + grace > began:
            kill_at = now + GROUP_S
        for one in due:
            asked.add(one.pid)
            signal_exactly(one, signal.SIGTERM)
        if now >= kill_at:
            for one in left:
                if signal_exactly(one, signal.SIGKILL):
                    killed.add(one.pid)
        time.sleep(_POLL_S)


@shape
class Back:
    """What a GPU has got back."""

    gpu: str
    freed: int
    seconds: float
    whole: bool  # False: the time was over before all of it was seen


def wait_for_memory(before: Machine, pids: set[int], look: Callable[[], Machine | str], limit: float = BACK_S) -> list[Back]:
    """Until NVML neither names these processes nor counts what they held."""
    began = time.monotonic()
    owed = {gpu.uuid: sum(holder.memory or 0 for holder in gpu.holders or () if holder.pid in pids) for gpu in before.gpus}
    waiting = {gpu.uuid: gpu for gpu in before.gpus if any(holder.pid in pids for holder in gpu.holders or ())}
    found: list[Back] = []
    while waiting:
        seen = look()
        seconds = time.monotonic() - began
        late = seconds > limit
        now = {gpu.uuid: gpu for gpu in seen.gpus} if isinstance(seen, Machine) else {}
        for uuid, old in list(waiting.items()):
            gpu = now.get(uuid)
            freed = (old.memory_used or 0) - (gpu.memory_used or 0) if gpu else 0
            # Nine tenths: others on the card may have taken some meanwhile.
            whole = gpu is not None and not any(holder.pid in pids for holder in gpu.holders or ()) and freed >= 0.9 * owed[uuid]
            if whole or late:
                found.append(Back(old.label, max(0, freed), seconds, whole))
                del waiting[uuid]
        if waiting:
            time.sleep(_POLL_S)
    return found


# ---- caches ----


@shape
class Cache:
    kind: str  # data | compile | agent
    root: str
    path: str
    size: int
    idle: float  # seconds since anything in it was last read or written
    kept: str = ""  # why it must not be pruned


def cache_roots(environment: Mapping[str, str], cwd: str) -> list[tuple[str, str, str]]:
    """(kind, folder, pattern of the entries in it)."""
    home = os.path.expanduser("~")
    user = re.sub(r'[\\/:*?"<>|]', "_", processes.user_name(os.getuid()))  # torch spells it so
    data = [os.path.join(cwd, "cache")]
    if environment.get("STOKER_CACHE"):
        data.append(os.path.abspath(environment["STOKER_CACHE"]))
    return [
        *(("data", os.path.join(folder, "datasets"), ".*") for folder in dict.fromkeys(data)),
        ("compile", f"/tmp/torchinductor_{user}", ".*"), ("compile", os.path.join(home, ".triton", "cache"), ".*"),
        ("agent", os.path.join(home, ".cache", "stoker"), r"agent-.*"),
    ]  # fmt: skip


def find_caches(roots: list[tuple[str, str, str]]) -> list[Cache]:
    """Each root must be a real folder of this user: /tmp is everybody's, and a link there could point into anything."""
    found: list[Cache] = []
    real = [(kind, os.path.realpath(folder), pattern) for kind, folder, pattern in roots if _own_folder(folder)]
    used = paths_in_use(tuple(folder + "/" for _, folder, _ in real)) if real else set()
    agents = any(one.name in _AGENTS for one in processes.all_processes())
    for kind, folder, pattern in real:
        device = os.lstat(folder).st_dev
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if re.fullmatch(pattern, entry.name):
                found.append(_cache(kind, folder, entry.path, device, used, agents))
    return found


def _own_folder(path: str) -> bool:
    try:
        about = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()


def _cache(kind: str, root: str, path: str, device: int, used: set[str], agents: bool) -> Cache:
    size, last, kept = 0, 0.0, ""
    for name, about in _walk(path):
        size += about.st_blocks * 512
        # Reading a folder touches its access time, and we have just read it: a file's alone says that somebody used it.
        last = max(last, about.st_mtime, 0.0 if stat.S_ISDIR(about.st_mode) else about.st_atime)
        if about.st_dev != device:
            kept = kept or f"another file system is mounted at {name}"
        if about.st_uid != os.getuid():
            kept = kept or f"{name} is not yours"
    if os.path.islink(path):
        kept = "a symbolic link, not followed"
    elif any(one == path or one.startswith(path + "/") for one in used):
        kept = "in use"
    elif kind == "agent" and agents:
        kept = "an agent is running, perhaps from here"
    return Cache(kind, root, path, size, max(0.0, time.time() - last), kept)


def _walk(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """The thing itself and all below it; links are looked at, never followed, and what is mounted in it is not entered."""
    todo = [path]
    top: int | None = None
    while todo:
        here = todo.pop()
        try:
            about = os.lstat(here)
            yield here, about
            top = about.st_dev if top is None else top
            if stat.S_ISDIR(about.st_mode) and about.st_dev == top:
                todo += [entry.path for entry in os.scandir(here)]
        except OSError:
            continue  # gone meanwhile


def choose_to_prune(caches: list[Cache], older_than: float | None, max_size: int | None) -> list[Cache]:
    """What has been idle too long; then, while all together are too large, what has been idle longest."""
    free = [one for one in caches if not one.kept]
    chosen = [one for one in free if older_than is not None and one.idle >= older_than]
    if max_size is not None:
        total = sum(one.size for one in caches) - sum(one.size for one in chosen)
        for one in sorted((one for one in free if one not in chosen), key=lambda one: -one.idle):
            if total <= max_size:
                break
            chosen.append(one)
            total -= one.size
    return chosen


def prune(chosen: list[Cache]) -> list[tuple[Cache, str]]:
    """Returns what stays, and why. rmtree holds folders by descriptor and follows no link."""
    kept: list[tuple[Cache, str]] = []
    for one in chosen:
        try:
            if _own_folder(one.path):
                shutil.rmtree(one.path)
            else:
                os.unlink(one.path)
        except FileNotFoundError:
            continue
        except OSError as problem:
            kept.append((one, problem.strerror or str(problem)))
    return kept
