"""Starts agents: over a pipe on this host, over ssh or a scheduler's transport on others. All use the same protocol."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from stoker.control.cluster.hosts import Host, Hosts

    class Transport(Protocol):
        """Runs Python on a host through a local command, which forwards stdin, stdout and stderr and ends when stdin closes."""

        name: str
        shows_share: bool  # whether the agent sees only the GPUs that a scheduler has allocated to us

        def python(self, host: Host, hosts: Hosts, args: Sequence[str]) -> list[str]:
            """Return the argv that runs the host's Python with these arguments."""
            ...


# The folder with the stoker package.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
# ROOT goes to the end of sys.path: it may be a site-packages folder, which must not shadow the standard library.
_BOOT = "import sys; sys.path.append(sys.argv[1]); from stoker.control.agent.guardian import boot; boot(sys.argv[2:])"


class Pipe:
    """Starts Python on this machine."""

    name = "pipe"
    shows_share = False

    def python(self, host: Host, hosts: Hosts, args: Sequence[str]) -> list[str]:
        return [sys.executable, *args]


class AgentLink:
    """The pipes and pid of a started agent, or of the local client (such as ssh) that connects to it."""

    def __init__(self, host: str, pid: int, stdin: int, stdout: int, stderr: int, local: bool = False) -> None:
        self.host = host
        self.pid = pid
        self.stdin = stdin  # our end of each pipe
        self.stdout = stdout
        self.stderr = stderr  # error messages of ssh or of the agent
        self.local = local or not host  # whether it runs on this machine
        self.first_bytes = b""  # sent before any message


def start_local_agent(stdin: int) -> AgentLink:
    """Start the agent of this machine, in its own session so that Ctrl-C reaches only the coordinator.

    The ranks read from the descriptor `stdin`. With -1 they have no stdin.
    """
    argv = [sys.executable, "-I", "-S", "-c", _BOOT, ROOT]  # -I -S halve the start time
    if stdin < 0:
        return spawn_agent([*argv, "-1"], "")
    duplicate = os.dup(stdin)
    os.set_inheritable(duplicate, True)
    try:
        return spawn_agent([*argv, str(duplicate)], "")
    finally:
        os.close(duplicate)


def transport_for(host: Host, hosts: Hosts) -> Transport:
    """Return the transport of a host: a pipe for this machine, the scheduler's if it has one for the host, or ssh."""
    if host.here:
        return Pipe()
    if host.name in hosts.transports:
        return hosts.transports[host.name]
    from stoker.control.cluster.ssh import Ssh

    return Ssh()


def connect(host: Host, hosts: Hosts) -> AgentLink:
    """Start the agent of a host. The agent's files are sent first, so that other hosts need no installation."""
    if host.here:
        return spawn_agent([sys.executable, "-I", "-S", "-c", _BOOT, ROOT, "-1"], host.name, local=True)
    from stoker.control.cluster import agent_zip

    packed = agent_zip.pack_agent()
    args = ["-I", "-S", "-c", agent_zip.unpack_code(), agent_zip.size_and_digest(packed), "-1"]
    link = spawn_agent(transport_for(host, hosts).python(host, hosts, args), host.name)
    link.first_bytes = packed
    return link


def connect_all(hosts: Hosts) -> list[AgentLink]:
    """Start the agents of all hosts. Raises Refusal if there is no ssh client."""
    from stoker.contract.errors import EX_UNAVAILABLE, Refusal

    try:
        return [connect(host, hosts) for host in hosts.hosts]
    except FileNotFoundError as problem:
        raise Refusal(
            "ssh is not on the PATH; install the OpenSSH client, which connects to other hosts", EX_UNAVAILABLE
        ) from problem


def spawn_agent(argv: list[str], host: str, local: bool = False) -> AgentLink:
    """Run a command with pipes for stdin, stdout and stderr. Raises FileNotFoundError if the program does not exist."""
    child_stdin, stdin = os.pipe()
    stdout, child_stdout = os.pipe()
    stderr, child_stderr = os.pipe()
    for fd in (stdin, stdout, stderr):
        os.set_blocking(fd, False)
    try:
        actions = [
            (os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((child_stdin, child_stdout, child_stderr))
        ]
        pid = os.posix_spawnp(argv[0], argv, os.environ, setsid=True, file_actions=actions)
    except OSError:
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        raise
    finally:
        for fd in (child_stdin, child_stdout, child_stderr):
            os.close(fd)
    return AgentLink(host, pid, stdin, stdout, stderr, local)
