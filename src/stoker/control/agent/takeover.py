"""After a host was lost and is back: what is left there of the agent before, so that two never run ranks side by side."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from stoker.contract import names
from stoker.contract.process import send
from stoker.control.machine import origin, processes
from stoker.control.machine.processes import Process

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
