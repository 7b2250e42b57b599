"""Ends a run's processes on one host: the descendants of its agent and its guardian, and nothing else.

Both are subreapers: every process that a rank starts stays their descendant, in any session and with any environment.
Sessions don't identify the processes of a run, because session numbers are reused. Nor do environments, because
schedulers and `at` pass them on to jobs that are not the run's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from stoker.contract import env_vars
from stoker.contract.frozen import pick_fields
from stoker.contract.process import Process, find_process, process_owner, send_signal, signal_group
from stoker.control.agent.relay import Relay
from stoker.control.agent.spawn import RankProcess
from stoker.control.machine import procfs, run_origin
from stoker.control.machine.nvml import Nvml


class Sweeper:
    """Finds and signals the descendants of `root`, a subreaper. `spare` are Stoker's own processes."""

    def __init__(self, root: int, spare: set[int]) -> None:
        self.root = root
        self.spare = spare
        # Process groups of the ranks. Each leader is alive or our unreaped zombie, so nobody else can have its number.
        self.groups: set[int] = set()

    def find_leftovers(self) -> list[Process]:
        """Return the living descendants, without those that their user wants to keep (STOKER_KEEP)."""
        table = procfs.list_processes()
        pids = procfs.descendants(self.root, table)
        for pid in [pid for pid in pids - self.groups - self.spare if run_origin.is_kept(pid)]:
            pids -= {pid, *procfs.descendants(pid, table)}
        pids -= self.spare
        uid = os.getuid()
        living = [process for process in table if process.pid in pids and process.state != "Z"]
        return [process for process in living if process_owner(process.pid) == uid]

    def signal_all(self, signum: int, targets: list[Process]) -> None:
        for process in targets:
            if process.state == "T" and signum != signal.SIGKILL:
                send_signal(process, signal.SIGCONT)
            send_signal(process, signum)

    def kill(self, seconds: float = 3.0) -> list[Process]:
        """Send SIGKILL until two searches in a row find no process, for at most `seconds`. Return the survivors (D state)."""
        deadline = time.monotonic() + seconds
        empty_searches = 0
        while True:
            living = self.find_leftovers()
            empty_searches = 0 if living else empty_searches + 1
            if empty_searches == 2:
                return []
            # Also signal the groups: this reaches children that were forked since the search.
            for group in self.groups:
                signal_group(group, signal.SIGKILL)
            self.signal_all(signal.SIGKILL, living)
            reap(self.groups)
            if living and time.monotonic() > deadline:
                return living
            time.sleep(0.005)  # a SIGKILL takes effect when its target is next scheduled


def reap(keep: set[int] | frozenset[int] = frozenset()) -> dict[int, int]:
    """Collect the children that ended: pid -> wait status. It stops at a child in `keep`, which stays a zombie."""
    statuses: dict[int, int] = {}
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return statuses
        if ended is None or ended.si_pid in keep:
            return statuses
        statuses[ended.si_pid] = os.waitpid(ended.si_pid, 0)[1]


def read_exit(pid: int) -> tuple[int, bool] | None:
    """Return an ended child's exit code (negative for a signal) and whether it dumped core, or None if it is alive.

    The child stays a zombie.
    """
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    if ended.si_code == os.CLD_EXITED:
        return ended.si_status, False
    return -ended.si_status, ended.si_code == os.CLD_DUMPED


# ---- a lost host that has returned: ranks of two agents of a run must never run at the same time ----

KILL_S = 5.0


def take_over(former: Sequence[Sequence[int]], run_id: str, run_dir: str, host: str) -> list[str]:
    """Kill the processes that an earlier agent of this run left on this host. Describe each process of `former` that was found.

    `former` holds the pid and start time of its guardian and its agent; they die with their descendants. If the guardian
    was killed, the run's orphans are found by their environment: `host` is this host's name in the run, because another
    host of the same run may be this very machine.
    """
    table = procfs.list_processes()
    # Compare start times, too: after a reboot the pid may be another process's.
    former_processes = [
        process for pid, start in former for process in table if (process.pid, process.start) == (pid, start)
    ]
    descendants = {pid for process in former_processes for pid in procfs.descendants(process.pid, table)}
    children = [process for process in table if process.pid in descendants and process not in former_processes]
    _kill_and_wait([*former_processes, *(process for process in children if not run_origin.is_kept(process.pid))])
    deadline = time.monotonic() + KILL_S
    while (orphans := _find_orphans(run_id, run_dir, host)) and time.monotonic() < deadline:
        _kill_and_wait(orphans)
    return [
        f"{process.name} {'was stopped' if process.state == 'T' else 'was still running'}"
        for process in former_processes
    ]


def _find_orphans(run_id: str, run_dir: str, host: str) -> list[Process]:
    """Return the processes that the run started on this host and that are no agent's descendants."""
    table = {process.pid: process for process in procfs.list_processes()}

    def is_orphan(process: Process) -> bool:
        if process.state == "Z" or procfs.read_run_tag(process.pid) != (run_id, run_dir):
            return False
        if process_owner(process.pid) != os.getuid():
            return False
        if procfs.read_environment(process.pid).get(env_vars.HOST, "") != host:
            return False
        return not run_origin.is_kept(process.pid) and not run_origin.why_another_started_it(process, table)

    return [process for process in table.values() if is_orphan(process)]


def _kill_and_wait(targets: list[Process]) -> None:
    """Send SIGKILL to these processes and wait for their end, for at most KILL_S."""

    def is_alive(target: Process) -> bool:
        process = find_process(target.pid)
        return process is not None and process.start == target.start and process.state != "Z"

    for target in targets:
        send_signal(target, signal.SIGKILL)
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline and any(map(is_alive, targets)):
        time.sleep(0.01)


# ---- stopping ranks: SIGCONT, the signal to each rank alone, grace, SIGTERM to its group, SIGKILL ----

EXCEPTION_GRACE_S = 2.0
GROUP_S = 1.0


class StopSequence:
    """Stops the ranks of an attempt: first each rank alone, later the process groups.

    A SIGTERM to a whole group would kill the data-loader workers first and turn a clean save into an error. A rank that
    has just reported an exception is about to exit; it gets EXCEPTION_GRACE_S, so that its own exit code survives.
    """

    def __init__(
        self, ranks: dict[int, RankProcess], sweeper: Sweeper, signum: int, grace: float, without_grace: set[int]
    ) -> None:
        self._ranks = ranks
        self._sweeper = sweeper
        self._signum = signum
        self._grace = grace
        self._without_grace = without_grace  # ranks that are killed immediately
        self._started_at = time.monotonic()
        self._signalled: set[int] = set()
        self._groups_signalled_at = 0.0

    def list_living(self) -> list[RankProcess]:
        return [rank for rank in self._ranks.values() if rank.exit_code is None]

    def skip_grace(self) -> None:
        """End the grace now, and send SIGKILL at the next step."""
        self._grace = 0.0
        self._groups_signalled_at = self._groups_signalled_at or time.monotonic() - GROUP_S

    def step(self) -> None:
        """Send the signals that are due, without waiting. Call it until no rank lives."""
        now = time.monotonic()
        for rank in self.list_living():
            if rank.rank in self._without_grace:
                self._send(rank, signal.SIGKILL)
            elif rank.pid not in self._signalled and not (
                self._grace > 0 and now - rank.exception_at < EXCEPTION_GRACE_S
            ):
                self._signalled.add(rank.pid)
                send_signal(rank.process, signal.SIGCONT)
                self._send(rank, self._signum)
        if now - self._started_at < self._grace or not self.list_living():
            return
        if not self._groups_signalled_at:
            self._groups_signalled_at = now
            self._sweeper.signal_all(signal.SIGTERM, self._sweeper.find_leftovers())
        if now - self._groups_signalled_at >= GROUP_S:
            for rank in self.list_living():
                rank.is_signalled = True
            self._sweeper.signal_all(signal.SIGKILL, self._sweeper.find_leftovers())

    @staticmethod
    def _send(rank: RankProcess, signum: int) -> None:
        rank.is_signalled = True
        is_caught = signum == signal.SIGKILL or procfs.catches_signal(rank.pid, signum)
        if not is_caught and procfs.catches_signal(rank.pid, signal.SIGTERM):
            # Scripts save a checkpoint on SIGTERM: a closed terminal (SIGHUP) must not cost more than a stop.
            signum = signal.SIGTERM
        send_signal(rank.process, signum)


# ---- after the ranks: the processes they left behind get their own grace and are killed; then the GPUs must be free ----

TERM_S = 1.0
GPUS_S = 2.0


class FinalSweep:
    """Ends the processes that the ranks of an attempt left behind, and reports them."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._started_at = time.monotonic()
        self._terminated_at = 0.0
        self._stopped: list[str] = []
        self._has_reported = False

    def step(
        self,
        sweeper: Sweeper,
        relay: Relay,
        ranks: Mapping[int, RankProcess],
        nvml: Nvml | None,
        collect: Callable[[], None],
    ) -> bool:
        """Do what is due. Return True once everything is swept and reported.

        `collect` notes how the ranks ended; it is called while they are still our zombies.
        """
        now = time.monotonic()
        reap(sweeper.groups)
        living = sweeper.find_leftovers()
        if living and not self._terminated_at:
            names = [f"pid {process.pid} ({process.name})" for process in living]
            if now - self._started_at < self._grace:
                if not self._has_reported and now - self._started_at > 1.0:
                    self._has_reported = True
                    relay.send({"is": "helpers", "names": names, "seconds": self._grace})
                return False
            self._terminated_at = now
            self._stopped = names
            sweeper.signal_all(signal.SIGTERM, living)
            return False
        if living and now - self._terminated_at < TERM_S:
            return False
        survivors = sweeper.kill()
        collect()
        sweeper.groups.clear()
        reap()
        for fd in list(relay.streams):
            relay.read_all(fd)
            if fd in relay.streams:
                relay.close(fd)
        gpus_held = _wait_for_gpus(ranks, nvml)
        stuck = [pick_fields(process, "pid", "name", "state") for process in survivors]
        relay.send({"is": "finished", "stopped": self._stopped, "gpus_held": gpus_held, "stuck": stuck})
        return True


def _wait_for_gpus(ranks: Mapping[int, RankProcess], nvml: Nvml | None) -> list[str]:
    """Wait until NVML shows no rank on its GPU, for at most GPUS_S; an H200 takes 0.15 s. Return the GPUs still held."""
    if nvml is None:
        return []
    pids = {rank.pid for rank in ranks.values()}
    gpus = {rank.gpu for rank in ranks.values() if rank.gpu}
    deadline = time.monotonic() + GPUS_S
    while True:
        held = [gpu for gpu in gpus if nvml.read_pids(gpu) & pids]
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.02)
