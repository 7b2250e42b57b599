"""How the coordinator reaches an agent: through a pipe on this host, through ssh on another. The protocol is the same."""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # the folder that holds stoker
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from stoker.control.agent.guardian import boot; boot(sys.argv[2:])"


class Link:
    """A started agent: what to write to, what to read from, whom to wait for."""

    def __init__(self, host: str, pid: int, orders: int, answers: int, errors: int) -> None:
        self.host = host
        self.pid = pid
        self.orders = orders
        self.answers = answers
        self.errors = errors  # its stderr: what ssh or a dying agent has to say
        self.local = not host
        self.first_bytes = b""


def local(stdin: int) -> Link:
    """The guardian in a session of its own: the terminal's Ctrl-C reaches the coordinator alone.

    -I -S: the agent needs the standard library only, and an interpreter without site starts in half the time.
    """
    argv = [sys.executable, "-I", "-S", "-c", _BOOT, ROOT]
    if stdin < 0:
        return _start([*argv, "-1"], "")
    keep = os.dup(stdin)
    os.set_inheritable(keep, True)
    try:
        return _start([*argv, str(keep)], "")
    finally:
        os.close(keep)


def ssh(host: str, options: tuple[str, ...] = (), python: str = "python3") -> Link:
    """OpenSSH's client: the user's ~/.ssh/config, agent and known_hosts apply; no password prompt, host keys checked.

    Nothing needs to be installed there: the agent's files go first, over the same stream.
    """
    import shlex

    from stoker.control.cluster import bundle

    packed = bundle.pack()
    command = " ".join(shlex.quote(word) for word in (python, "-I", "-S", "-c", bundle.UNPACK, str(len(packed)), "-1"))
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
    return Link(host, pid, orders, answers, errors)
