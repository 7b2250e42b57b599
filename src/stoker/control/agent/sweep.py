"""Finds what a run left behind, and nothing else: the descendants of its agent and its guardian.

Both are subreapers: whatever a rank starts stays below them, in any session, with any environment. Not by session: a
session's number, once its rank is gone, may be a stranger's. Not by environment: schedulers and at hand it to jobs that are
not the run's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from stoker.contract import names
from stoker.contract.process import send, send_to_group
from stoker.control.machine import origin, processes
from stoker.control.machine.processes import Process


class Sweeper:
    """`root` is the subreaper whose descendants are ours; `spare` are Stoker's own processes."""

    def __init__(self, root: int, spare: set[int]) -> None:
        self.root = root
        self.spare = spare
        self.groups: set[int] = (
            set()
        )  # of the ranks; each leader is alive or our unreaped zombie, so the number is nobody else's

    def leftovers(self) -> list[Process]:
        table = processes.all_processes()
        below = processes.descendants(self.root, table)
        for pid in [pid for pid in below - self.groups - self.spare if origin.kept(pid)]:
            below -= {pid, *processes.descendants(pid, table)}
        me = os.getuid()
        return [
            one
            for one in table
            if one.pid in below and one.pid not in self.spare and one.state != "Z" and processes.owner(one.pid) == me
        ]

    def signal_all(self, signum: int, targets: list[Process]) -> None:
        for one in targets:
            if one.state == "T" and signum != signal.SIGKILL:
                send(one, signal.SIGCONT)
            send(one, signum)

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
                send_to_group(group, signal.SIGKILL)
            self.signal_all(signal.SIGKILL, left)
            reap(self.groups)
            if left and time.monotonic() > deadline:
                return left
            time.sleep(0.005)  # polling with a deadline: a SIGKILL takes effect when its target is next scheduled


def reap(keep: set[int] | frozenset[int] = frozenset()) -> dict[int, int]:
    """Collects every child that ended: pid -> wait status. Those in `keep` stay zombies, and the ones behind them wait
    for another call.
    """
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
    """(exit code, negative for a signal; did it dump core) of a child that has ended, without collecting it. None while
    it lives.
    """
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
    table = processes.all_processes()
    old = [
        one for pid, start in former for one in table if one.pid == pid and one.start == start
    ]  # after a reboot the number is a stranger's
    below = {pid for one in old for pid in processes.descendants(one.pid, table)}
    doomed = [*old, *(one for one in table if one.pid in below and one not in old and not origin.kept(one.pid))]
    said = [f"{one.name} {'was stopped' if one.state == 'T' else 'still ran'}" for one in old]
    for one in doomed:
        send(one, signal.SIGKILL)
    _await_end(doomed)
    deadline = time.monotonic() + SECONDS
    while (orphans := _orphans(run_id, run_dir, host)) and time.monotonic() < deadline:
        for one in orphans:
            send(one, signal.SIGKILL)
        _await_end(orphans)
    return said


def _orphans(run_id: str, run_dir: str, host: str) -> list[Process]:
    """What the run started here and nobody looks after."""
    me = os.getuid()
    table = {one.pid: one for one in processes.all_processes()}
    tagged = [
        one
        for one in table.values()
        if one.state != "Z" and processes.run_tag(one.pid) == (run_id, run_dir) and processes.owner(one.pid) == me
    ]
    return [
        one
        for one in tagged
        if processes.environment(one.pid).get(names.HOST, "") == host
        and not origin.kept(one.pid)
        and not origin.why_another_started_it(one, table)
    ]


def _await_end(doomed: list[Process]) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        now = {one.pid: one for pid in {one.pid for one in doomed} if (one := processes.process(pid)) is not None}
        if not any(one.pid in now and now[one.pid].start == one.start and now[one.pid].state != "Z" for one in doomed):
            return
        time.sleep(0.01)
