"""After a host was lost and is back: what is left there of the agent before, so that two never run ranks side by side."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from stoker.control.agent import kernel
from stoker.control.agent.sweep import Sweeper
from stoker.control.machine import processes
from stoker.control.machine.processes import Process

SECONDS = 5.0


def take_over(former: Sequence[Sequence[int]], sweeper: Sweeper) -> list[str]:
    """`former`: pid and start time of the guardian and the agent that ran here for this run. Ends them and their descendants at once:
    a frozen one would wake up later and sweep, by the same tag, the ranks of the new one. Returns what was found, in words.
    """
    table = processes.all_processes()
    old = [one for pid, start in former for one in table if one.pid == pid and one.start == start]  # after a reboot the number is a stranger's
    below = {pid for one in old for pid in processes.descendants(one.pid, table)}
    doomed = [*old, *(one for one in table if one.pid in below and one not in old)]
    said = [f"{one.name} {'was stopped' if one.state == 'T' else 'still ran'}" for one in old]
    for one in doomed:
        kernel.send(one, signal.SIGKILL)
    _await_end(doomed)
    sweeper.kill()
    return said


def _await_end(doomed: list[Process]) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        now = {one.pid: one for pid in {one.pid for one in doomed} if (one := processes.process(pid)) is not None}
        if not any(one.pid in now and now[one.pid].start == one.start and now[one.pid].state != "Z" for one in doomed):
            return
        time.sleep(0.01)
