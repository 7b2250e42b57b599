"""How the coordinator reaches an agent: by a pipe on this host, by a transport on another. The protocol is the same."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from stoker.control.cluster.hosts import Host, Hosts

    class Transport(Protocol):
        """A command whose streams are those of a Python on the host. It ends when its standard input closes."""

        name: str
        shows_share: bool  # its agent is shown the GPUs that are ours there, and no others

        def python(self, host: Host, hosts: Hosts, words: Sequence[str]) -> list[str]:
            """The argv that runs the host's Python with these words."""
            ...


# The folder that holds stoker.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
# Appended: ROOT may be a site-packages folder, and nothing in one may stand in for a module of the standard library.
_BOOT = "import sys; sys.path.append(sys.argv[1]); from stoker.control.agent.guardian import boot; boot(sys.argv[2:])"


class Pipe:
    name = "pipe"
    shows_share = False

    def python(self, host: Host, hosts: Hosts, words: Sequence[str]) -> list[str]:
        return [sys.executable, *words]


class AgentLink:
    """A started agent: what to write to, what to read from, whom to wait for. `local`: it inherits our environment."""

    def __init__(self, host: str, pid: int, orders: int, answers: int, errors: int, local: bool = False) -> None:
        self.host = host
        self.pid = pid
        self.orders = orders
        self.answers = answers
        self.errors = errors  # its stderr: what ssh or a dying agent has to say
        self.local = local or not host
        self.first_bytes = b""


def start_local_agent(stdin: int) -> AgentLink:
    """In a session of its own: Ctrl-C reaches the coordinator alone. -I -S: it starts in half the time."""
    argv = [sys.executable, "-I", "-S", "-c", _BOOT, ROOT]
    if stdin < 0:
        return start([*argv, "-1"], "")
    keep = os.dup(stdin)
    os.set_inheritable(keep, True)
    try:
        return start([*argv, str(keep)], "")
    finally:
        os.close(keep)


def transport_for(host: Host, hosts: Hosts) -> Transport:
    """A pipe where it is this very machine; what its scheduler has for it; else ssh."""
    if host.here:
        return Pipe()
    if host.name in hosts.transports:
        return hosts.transports[host.name]
    from stoker.control.cluster.ssh import Ssh

    return Ssh()


def reach(host: Host, hosts: Hosts) -> AgentLink:
    """The agent of any host. Elsewhere nothing needs to be installed: the agent's files go first."""
    if host.here:
        return start([sys.executable, "-I", "-S", "-c", _BOOT, ROOT, "-1"], host.name, local=True)
    from stoker.control.cluster import agent_zip

    packed = agent_zip.pack()
    words = ["-I", "-S", "-c", agent_zip.unpack(), agent_zip.announced(packed), "-1"]
    link = start(transport_for(host, hosts).python(host, hosts, words), host.name)
    link.first_bytes = packed
    return link


def reach_all(hosts: Hosts) -> list[AgentLink]:
    from stoker.contract.errors import EX_UNAVAILABLE, Refusal

    try:
        return [reach(host, hosts) for host in hosts.hosts]
    except FileNotFoundError as problem:
        line = "other hosts are reached by the ssh client, and there is none on the PATH"
        raise Refusal(line, EX_UNAVAILABLE) from problem


def start(argv: list[str], host: str, local: bool = False) -> AgentLink:
    there, orders = os.pipe()
    answers, back = os.pipe()
    errors, complaints = os.pipe()
    for handle in (orders, answers, errors):
        os.set_blocking(handle, False)
    try:
        streams = [(os.POSIX_SPAWN_DUP2, handle, number) for number, handle in enumerate((there, back, complaints))]
        pid = os.posix_spawnp(argv[0], argv, os.environ, setsid=True, file_actions=streams)
    except OSError:
        for handle in (orders, answers, errors):
            os.close(handle)
        raise
    finally:
        os.close(there)
        os.close(back)
        os.close(complaints)
    return AgentLink(host, pid, orders, answers, errors, local)
