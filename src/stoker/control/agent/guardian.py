"""The agent's parent: it only waits. When the agent dies or stalls, it kills all processes of the run on this host.

Started on each host as   python -I -S -c BOOT <folder of stoker> <stdin fd or -1>
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time

from stoker.contract import protocol
from stoker.contract.process import signal_child
from stoker.contract.text import escape
from stoker.control.agent import prctl
from stoker.control.agent.agent import Agent
from stoker.control.agent.sweep import Sweeper, reap

# The agent writes a heartbeat every second (protocol.PING_S), and may be late on a machine that swaps. The guardian waits
# 2 s longer than the coordinator (SILENCE_S, 8 s), so the coordinator has given up the host before its ranks are killed.
STALL_S = protocol.SILENCE_S + 2.0


def main(stdin_fd: int = -1) -> int:
    """Fork the agent, wait for its end, sweep, and return its exit code."""
    prctl.become_subreaper()
    prctl.set_name(b"stoker-guard")
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # orders come over the protocol; closing it ends the agent
    heartbeat_read, heartbeat_write = os.pipe()
    guardian_read, guardian_write = os.pipe()
    guardian = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(heartbeat_read)
        os.close(guardian_write)
        try:
            code = Agent(heartbeat_write, guardian_read, guardian, stdin_fd).serve()
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 70
        os._exit(code)
    os.close(heartbeat_write)
    os.close(guardian_read)
    # Only the agent may hold the connection to the coordinator open: its death must close it.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    if stdin_fd >= 0:
        os.close(stdin_fd)
    sweeper = Sweeper(os.getpid(), {os.getpid()})
    status, agent_dir = _wait_for_agent(child, heartbeat_read)
    survivors = sweeper.kill() if status or sweeper.find_leftovers() else []
    if agent_dir:
        shutil.rmtree(agent_dir, ignore_errors=True)  # an agent that was killed could not remove it
    for process in survivors:
        text = f"stoker: pid {process.pid} ({escape(process.name)}) can't be killed: it is in state {process.state}"
        print(text, file=sys.stderr)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _wait_for_agent(child: int, heartbeat_fd: int) -> tuple[int, str]:
    """Return the agent's wait status and its folder, or "". Kill a stalled agent: its ranks must not run unwatched."""
    last_heartbeat_at = time.monotonic()
    partial, agent_dir = b"", ""
    while True:
        ready, _, _ = select.select([heartbeat_fd], [], [], 1.0)
        if ready:
            data = os.read(heartbeat_fd, 4096)
            if not data:  # end of file: the agent has ended
                return _reap_agent(child), agent_dir
            last_heartbeat_at = time.monotonic()
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                if line:  # an empty line is a heartbeat
                    agent_dir = os.fsdecode(line)
        elif time.monotonic() - last_heartbeat_at > STALL_S:
            text = f"stoker: the agent (pid {child}) has stalled for {STALL_S:.0f} s; stopping its ranks"
            print(text, file=sys.stderr)
            signal_child(child, signal.SIGKILL)
            return _reap_agent(child), agent_dir


def _reap_agent(child: int) -> int:
    """Return the agent's wait status, or 0 if it does not end within 5 s."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        statuses = reap()
        if child in statuses:
            return statuses[child]
        time.sleep(0.005)
    return 0


def boot(argv: list[str]) -> None:
    os._exit(main(int(argv[0])))
