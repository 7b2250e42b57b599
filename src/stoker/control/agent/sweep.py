"""Finds what a run left behind, and nothing else: our descendants and processes with our run's tag.

Not by session: orphans below a subreaper stay descendants whatever session they are in, and a session's number, once its rank
is gone, may be a stranger's.
"""

from __future__ import annotations

import os
import signal
import time

from stoker.control.agent import kernel
from stoker.control.machine import processes
from stoker.control.machine.processes import Process


class Sweeper:
    """`root` is the subreaper whose descendants are ours; `spare` are Stoker's own processes."""

    def __init__(self, root: int, spare: set[int]) -> None:
        self.root = root
        self.spare = spare
        self.run_id = ""  # known once the coordinator has said it
        self.run_dir = ""

    def leftovers(self) -> list[Process]:
        table = processes.all_processes()
        below = processes.descendants(self.root, table)
        me = os.getuid()
        return [
            one for one in table
            if one.pid not in self.spare and one.state != "Z"
            and (one.pid in below or self._tagged(one.pid))
            and processes.owner(one.pid) == me
        ]  # fmt: skip

    def _tagged(self, pid: int) -> bool:
        # Kernel threads and other users' processes have no readable environment: run_tag is None for them.
        return bool(self.run_id) and processes.run_tag(pid) == (self.run_id, self.run_dir)

    def signal_all(self, signum: int, targets: list[Process]) -> None:
        for one in targets:
            if one.state == "T" and signum != signal.SIGKILL:
                kernel.send(one, signal.SIGCONT)
            kernel.send(one, signum)

    def kill(self, seconds: float = 5.0) -> list[Process]:
        """SIGKILL until nothing is left, for at most `seconds`. Returns what survived: D state."""
        deadline = time.monotonic() + seconds
        while True:
            left = self.leftovers()
            if not left:
                return []
            self.signal_all(signal.SIGKILL, left)
            reap()
            if time.monotonic() > deadline:
                return left
            time.sleep(0.01)  # polling with a deadline: a SIGKILL takes effect when its target is next scheduled


def reap() -> dict[int, int]:
    """Collects every child that ended: pid -> wait status."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status
