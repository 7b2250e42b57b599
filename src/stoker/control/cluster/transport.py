"""How the coordinator reaches an agent: through a pipe on this host, through ssh on another. The protocol is the same."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # the folder that holds stoker
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from stoker.control.agent.guardian import boot; boot(sys.argv[2:])"


@dataclass
class Link:
    """A started agent: what to write to, what to read from, whom to wait for."""

    host: str
    pid: int
    orders: int
    answers: int
    errors: int  # its stderr: what ssh or a dying agent has to say
    local: bool
    first_bytes: bytes = b""


def local(run_id: str, run_dir: str, stdin: int) -> Link:
    """The guardian in a session of its own: the terminal's Ctrl-C reaches the coordinator alone.

    -I -S: the agent needs the standard library only, and an interpreter without site starts in half the time.
    """
    argv = [sys.executable, "-I", "-S", "-c", _BOOT, ROOT, run_id, run_dir]
    pass_on = []
    if stdin >= 0:
        keep = os.dup(stdin)
        os.set_inheritable(keep, True)
        pass_on = [keep]
        argv.append(str(keep))
    link = _start(argv, "")
    for handle in pass_on:
        os.close(handle)
    return link


def ssh(host: str, run_id: str, run_dir: str, options: tuple[str, ...] = (), python: str = "python3") -> Link:
    """OpenSSH's client: the user's ~/.ssh/config, agent and known_hosts apply; no password prompt, host keys checked.

    Nothing needs to be installed there: the agent's files go first, over the same stream.
    """
    from stoker.control.cluster import bundle

    packed = bundle.pack()
    command = " ".join(shlex.quote(word) for word in (python, "-I", "-S", "-c", bundle.UNPACK, str(len(packed)), run_id, run_dir))
    argv = ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-T", *options, "--", host, command]
    link = _start(argv, host)
    link.first_bytes = packed
    return link


def _start(argv: list[str], host: str) -> Link:
    there, orders = os.pipe()
    answers, back = os.pipe()
    errors, complaints = os.pipe()
    for handle in (orders, answers, errors):
        os.set_blocking(handle, False)
    try:
        pid = os.posix_spawnp(
            argv[0], argv, os.environ, setsid=True,
            file_actions=[(os.POSIX_SPAWN_DUP2, there, 0), (os.POSIX_SPAWN_DUP2, back, 1), (os.POSIX_SPAWN_DUP2, complaints, 2)],
        )  # fmt: skip
    finally:
        os.close(there)
        os.close(back)
        os.close(complaints)
    return Link(host, pid, orders, answers, errors, local=not host)
