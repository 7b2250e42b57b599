"""The agent's parent: tiny, does nothing but wait. When the agent dies or stalls it sweeps the run's processes away.

Started on each host as   python -I -S -c BOOT <folder of stoker> <run id> <run dir> [<stdin fd>]
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from stoker.contract import protocol
from stoker.control.agent import kernel
from stoker.control.agent.agent import Agent
from stoker.control.agent.sweep import Sweeper, reap

STALL_S = 2 * protocol.SILENCE_S  # the agent writes a byte a second; a machine that swaps may be late


def main(run_id: str, run_dir: str, stdin_fd: int = -1) -> int:
    kernel.become_subreaper()
    kernel.set_name(b"stoker-guard")
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # orders come over the protocol; who wants us gone closes it
    heart_read, heart_write = os.pipe()
    life_read, life_write = os.pipe()
    guardian = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(heart_read)
        os.close(life_write)
        try:
            code = Agent(run_id, run_dir, heart_write, life_read, guardian, stdin_fd).serve()
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 70
        os._exit(code)
    os.close(heart_write)
    os.close(life_read)
    _let_go_of_protocol(stdin_fd)
    status = _wait(child, heart_read)
    survivors = Sweeper(run_id, run_dir, os.getpid(), {os.getpid()}).kill()
    for one in survivors:
        print(f"stoker: pid {one.pid} ({one.name}) can't be killed: state {one.state}", file=sys.stderr)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _let_go_of_protocol(stdin_fd: int) -> None:
    """The agent alone holds the protocol's ends: otherwise its death would close nothing."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    if stdin_fd >= 0:
        os.close(stdin_fd)


def _wait(child: int, heart: int) -> int:
    """The agent's wait status. A stalled agent is killed: ranks it can't watch must not run on."""
    last = time.monotonic()
    while True:
        ready, _, _ = select.select([heart], [], [], 1.0)
        if ready:
            if not os.read(heart, 4096):  # end of file: the agent is gone
                return _reap_for(child)
            last = time.monotonic()
        elif time.monotonic() - last > STALL_S:
            print(f"stoker: the agent (pid {child}) has stalled for {STALL_S:.0f} s: stopping its ranks", file=sys.stderr)
            os.kill(child, signal.SIGKILL)
            return _reap_for(child)


def _reap_for(child: int) -> int:
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        ended = reap()
        if child in ended:
            return ended[child]
        time.sleep(0.005)
    return 0


def boot(argv: list[str]) -> None:
    os._exit(main(argv[0], argv[1], int(argv[2]) if len(argv) > 2 else -1))


BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from stoker.control.agent.guardian import boot; boot(sys.argv[2:])"
