"""How a run's processes end on one host: the descendants of its agent and its guardian, and nothing else.

Both are subreapers: whatever a rank starts stays below them, in any session, with any environment. Not by session: a
session's number may be a stranger's by now. Not by environment: schedulers and at hand it to jobs that are not the run's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from stoker.contract import env_vars, process
from stoker.contract.frozen import pick_fields
from stoker.contract.process import Process, send_signal, signal_group
from stoker.control.agent.relay import Relay
from stoker.control.agent.spawn import RankProcess
from stoker.control.machine import procfs, run_origin
from stoker.control.machine.nvml import Nvml


class Sweeper:
    """`root` is the subreaper whose descendants are ours; `spare` are Stoker's own processes."""

    def __init__(self, root: int, spare: set[int]) -> None:
        self.root = root
        self.spare = spare
        # Of the ranks. Each leader is alive or our unreaped zombie, so the number is nobody else's.
        self.groups: set[int] = set()

    def leftovers(self) -> list[Process]:
        table = procfs.all_processes()
        below = procfs.descendants(self.root, table)
        for pid in [pid for pid in below - self.groups - self.spare if run_origin.is_kept(pid)]:
            below -= {pid, *procfs.descendants(pid, table)}
        me = os.getuid()
        there = (one for one in table if one.pid in below and one.pid not in self.spare and one.state != "Z")
        return [one for one in there if process.process_owner(one.pid) == me]

    def signal_all(self, signum: int, targets: list[Process]) -> None:
        for one in targets:
            if one.state == "T" and signum != signal.SIGKILL:
                send_signal(one, signal.SIGCONT)
            send_signal(one, signum)

    def kill(self, seconds: float = 3.0) -> list[Process]:
        """SIGKILL until two looks in a row find nothing, for at most `seconds`. Returns what survived: D state."""
        deadline = time.monotonic() + seconds
        empty = 0
        while True:
            left = self.leftovers()
            empty = 0 if left else empty + 1
            if empty == 2:
                return []
            # By group too: the kernel reaches all of it at once, also a child forked since the look.
            for group in self.groups:
                signal_group(group, signal.SIGKILL)
            self.signal_all(signal.SIGKILL, left)
            reap(self.groups)
            if left and time.monotonic() > deadline:
                return left
            time.sleep(0.005)  # polling with a deadline: a SIGKILL takes effect when its target is next scheduled


def reap(keep: set[int] | frozenset[int] = frozenset()) -> dict[int, int]:
    """Collects every child that ended: pid -> wait status. Those in `keep` stay zombies, and hide those behind."""
    ended: dict[int, int] = {}
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return ended
        if found is None or found.si_pid in keep:
            return ended
        ended[found.si_pid] = os.waitpid(found.si_pid, 0)[1]


def ending(pid: int) -> tuple[int, bool] | None:
    """(exit code, negative for a signal; did it dump core) of an ended child, left uncollected. None: it lives."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    if found.si_code == os.CLD_EXITED:
        return found.si_status, False
    return -found.si_status, found.si_code == os.CLD_DUMPED


# ---- a host that was lost and is back: two agents of a run never have ranks side by side ----

SECONDS = 5.0


def take_over(former: Sequence[Sequence[int]], run_id: str, run_dir: str, host: str) -> list[str]:
    """`former`: pid and start time of the guardian and the agent that ran here for this run. Ends them and their
    descendants at once, and what is left of those whose guardian was killed. `host`: as the run calls us; another host
    of the same run may be this very machine. Returns what was found, in words.
    """
    table = procfs.all_processes()
    # By start time, too: after a reboot the number is a stranger's.
    old = [one for pid, start in former for one in table if (one.pid, one.start) == (pid, start)]
    below = {pid for one in old for pid in procfs.descendants(one.pid, table)}
    doomed = [*old, *(one for one in table if one.pid in below and one not in old and not run_origin.is_kept(one.pid))]
    said = [f"{one.name} {'was stopped' if one.state == 'T' else 'still ran'}" for one in old]
    for one in doomed:
        send_signal(one, signal.SIGKILL)
    _await_end(doomed)
    deadline = time.monotonic() + SECONDS
    while (orphans := _orphans(run_id, run_dir, host)) and time.monotonic() < deadline:
        for one in orphans:
            send_signal(one, signal.SIGKILL)
        _await_end(orphans)
    return said


def _orphans(run_id: str, run_dir: str, host: str) -> list[Process]:
    """What the run started here and nobody looks after."""
    table = {one.pid: one for one in procfs.all_processes()}

    def ours(one: Process) -> bool:
        tagged = one.state != "Z" and procfs.run_tag(one.pid) == (run_id, run_dir)
        if not tagged or process.process_owner(one.pid) != os.getuid():
            return False
        here = procfs.environment(one.pid).get(env_vars.HOST, "") == host
        return here and not run_origin.is_kept(one.pid) and not run_origin.why_another_started_it(one, table)

    return [one for one in table.values() if ours(one)]


def _await_end(doomed: list[Process]) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        now = {one.pid: one for pid in {one.pid for one in doomed} if (one := process.find_process(pid)) is not None}
        if not any(one.pid in now and now[one.pid].start == one.start and now[one.pid].state != "Z" for one in doomed):
            return
        time.sleep(0.01)


# ---- the stop sequence: SIGCONT, the signal to each rank alone, grace, SIGTERM to its group, SIGKILL ----
#
# Ranks first and their groups later: a SIGTERM to a whole group kills the data-loader workers first and turns a clean
# save into an error. A rank that has just reported an exception is on its way out and is not disturbed for a moment, so
# that its own exit code survives.

ON_ITS_WAY_S = 2.0
GROUP_S = 1.0


class StopSequence:
    def __init__(self, ranks: dict[int, RankProcess], sweeper: Sweeper, signum: int, grace: float, at_once: set[int]) -> None:
        self._ranks = ranks
        self._sweeper = sweeper
        self._signum = signum
        self._grace = grace
        self._at_once = at_once  # ranks that get no grace
        self._begun = time.monotonic()
        self._asked: set[int] = set()
        self._group_asked = 0.0

    def living(self) -> list[RankProcess]:
        return [rank for rank in self._ranks.values() if rank.ended is None]

    def hurry(self) -> None:
        self._grace = 0.0
        self._group_asked = self._group_asked or time.monotonic() - GROUP_S

    def step(self) -> None:
        """Called until nothing lives. Does what is due and returns at once."""
        now = time.monotonic()
        for rank in self.living():
            if rank.rank in self._at_once:
                self._send(rank, signal.SIGKILL)
            elif rank.pid not in self._asked and not (self._grace > 0 and now - rank.reported < ON_ITS_WAY_S):
                self._asked.add(rank.pid)
                send_signal(rank.me, signal.SIGCONT)
                self._send(rank, self._signum)
        if now - self._begun < self._grace or not self.living():
            return
        if not self._group_asked:
            self._group_asked = now
            self._sweeper.signal_all(signal.SIGTERM, self._sweeper.leftovers())
        if now - self._group_asked >= GROUP_S:
            for rank in self.living():
                rank.signalled = True
            self._sweeper.signal_all(signal.SIGKILL, self._sweeper.leftovers())

    @staticmethod
    def _send(rank: RankProcess, signum: int) -> None:
        rank.signalled = True
        caught = signum == signal.SIGKILL or procfs.catches(rank.pid, signum)
        if not caught and procfs.catches(rank.pid, signal.SIGTERM):
            signum = signal.SIGTERM  # what scripts save on: a closed terminal must not cost more than a stop
        send_signal(rank.me, signum)


# ---- after the ranks: what they left behind gets its own grace, then goes; then the GPUs' memory is back ----

ASKED_S = 1.0
GPUS_S = 2.0


class Finishing:
    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._begun = time.monotonic()
        self._asked = 0.0
        self._named: list[str] = []
        self._said = False

    def step(
        self, sweeper: Sweeper, relay: Relay, ranks: Mapping[int, RankProcess], nvml: Nvml | None, collect: Callable[[], None]
    ) -> bool:
        """Until True: all is swept, and told. `collect`: notes how ranks ended, while they are still our zombies."""
        now = time.monotonic()
        reap(sweeper.groups)
        left = sweeper.leftovers()
        if left and not self._asked:
            if now - self._begun < self._grace:
                if not self._said and now - self._begun > 1.0:
                    self._said = True
                    relay.say({"is": "helpers", "names": _names(left), "seconds": self._grace})
                return False
            self._asked = now
            self._named = _names(left)
            sweeper.signal_all(signal.SIGTERM, left)
            return False
        if left and now - self._asked < ASKED_S:
            return False
        stuck = sweeper.kill()
        collect()
        sweeper.groups.clear()
        reap()
        for handle in list(relay.streams):
            relay.read_all(handle)
            if handle in relay.streams:
                relay.forget(handle)
        held = _wait_for_gpus(ranks, nvml)
        left_over = [pick_fields(one, "pid", "name", "state") for one in stuck]
        relay.say({"is": "finished", "stopped": self._named, "gpus_held": held, "stuck": left_over})
        return True


def _names(left: list[Process]) -> list[str]:
    return [f"pid {one.pid} ({one.name})" for one in left]


def _wait_for_gpus(ranks: Mapping[int, RankProcess], nvml: Nvml | None) -> list[str]:
    """Until NVML has our processes off the cards; 2 s at most. On an H200 it takes 0.15 s."""
    if nvml is None:
        return []
    ours = {rank.pid for rank in ranks.values()}
    cards = {rank.gpu for rank in ranks.values() if rank.gpu}
    deadline = time.monotonic() + GPUS_S
    while True:
        busy = [card for card in cards if nvml.pids(card) & ours]
        if not busy or time.monotonic() > deadline:
            return busy
        time.sleep(0.02)
