"""How the coordinator reaches an agent: through a pipe on this host, through ssh on another. The protocol is the same."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker.control.cluster.hosts import Host, Hosts

ROOT = os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
)  # the folder that holds stoker
# Appended: ROOT may be a site-packages folder, and nothing in one may stand in for a module of the standard library.
_BOOT = "import sys; sys.path.append(sys.argv[1]); from stoker.control.agent.guardian import boot; boot(sys.argv[2:])"

CONNECT_S = 8  # a host that is switched off says nothing
# Asked every 2 s, gone after 6: sooner than an agent's own silence is, so that a dead shared connection is never joined
# by the next attempt.
_ALIVE = ("-oServerAliveInterval=2", "-oServerAliveCountMax=3")
# What a user's ~/.ssh/config may ask for at a keyboard, and would harm here.
_QUIET = ("-T", "-oBatchMode=yes", "-oClearAllForwardings=yes", "-oRemoteCommand=none")
_PERSIST_S = 5


class Link:
    """A started agent: what to write to, what to read from, whom to wait for. `local`: it inherits our environment."""

    def __init__(self, host: str, pid: int, orders: int, answers: int, errors: int, local: bool = False) -> None:
        self.host = host
        self.pid = pid
        self.orders = orders
        self.answers = answers
        self.errors = errors  # its stderr: what ssh or a dying agent has to say
        self.local = local or not host
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


def reach(host: Host, hosts: Hosts) -> Link:
    """The agent of any host of a hosts file: by ssh (in a Slurm job by srun), or by a pipe where it is this very
    machine.
    """
    if host.name in hosts.srun and not host.here:
        from stoker.control.cluster import slurm

        return slurm.link(host, hosts)
    if not host.here:
        return ssh(host, hosts)
    return _start([sys.executable, "-I", "-S", "-c", _BOOT, ROOT, "-1"], host.name, local=True)


def ssh(host: Host, hosts: Hosts) -> Link:
    """Nothing needs to be installed there: the agent's files go first, over the same stream."""
    from stoker.control.cluster import agentzip

    packed = agentzip.pack()
    link = _start(
        ssh_command(
            host,
            hosts,
            [host.python or "python3", "-I", "-S", "-c", agentzip.unpack(), agentzip.announced(packed), "-1"],
        ),
        host.name,
    )
    link.first_bytes = packed
    return link


def ssh_command(host: Host, hosts: Hosts, words: Sequence[str]) -> list[str]:
    """The argv of an OpenSSH client that runs `words` there: the user's ~/.ssh/config, agent, jump hosts and
    known_hosts apply.

    No password prompt, host keys checked, one connection shared by all that this process asks of a host. Each word
    arrives as it is; only a program that begins with ~ is looked for in the home there.
    """
    argv = ["ssh", *_QUIET]
    if hosts.ssh_config is not None:
        argv += ["-F", hosts.ssh_config]
    if host.port is not None:
        argv += ["-p", str(host.port)]
    if host.user is not None:
        argv += ["-l", host.user]
    if host.identity is not None:
        argv += ["-i", host.identity, "-oIdentitiesOnly=yes"]
    # ssh takes the first value it is given: what a user told stands before what we would like.
    argv += [*hosts.ssh_options, *_ALIVE, f"-oConnectTimeout={CONNECT_S}", *_shared()]
    return [*argv, "--", host.target, remote_line(words)]


def python_command(host: Host, hosts: Hosts, words: Sequence[str]) -> list[str]:
    """The argv that runs the host's Python with these words, whichever way leads there."""
    if host.here:
        return [sys.executable, *words]
    if host.name in hosts.srun:
        from stoker.control.cluster import slurm

        return slurm.srun_command(host, hosts, [host.python or sys.executable, *words])
    return ssh_command(host, hosts, [host.python or "python3", *words])


def remote_line(words: Sequence[str]) -> str:
    """For the login shell there, whichever it is: everything quoted, the ~ of the program apart."""
    import re
    import shlex

    program, *rest = words
    home = re.match(r"~[A-Za-z0-9_.-]*/", program)
    first = home[0] + shlex.quote(program[home.end() :]) if home else shlex.quote(program)
    return " ".join([first, *(shlex.quote(word) for word in rest)])


def _shared() -> list[str]:
    """ssh's own connection sharing. By process: a run must not die of another run's connection. The socket's path may
    have 107 bytes.
    """
    if unshared():
        return ["-oControlMaster=no", "-oControlPath=none"]
    return ["-oControlMaster=auto", f"-oControlPath={_sockets()}/{os.getpid()}-%C", f"-oControlPersist={_PERSIST_S}"]


def _sockets() -> str:
    return f"/tmp/stoker-ssh-{os.getuid()}"


def unshared() -> str:
    """Why every command has to make a connection of its own; empty where connections are shared."""
    folder = _sockets()
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as problem:
        return f"{folder} can't be made ({problem.strerror})"
    try:
        seen = os.lstat(folder)
    except OSError as problem:
        return f"{folder} can't be read ({problem.strerror})"
    if seen.st_uid != os.getuid() or seen.st_mode & 0o170077 != 0o040000:
        return f"{folder} is somebody else's, or open to others"
    return ""


def _start(argv: list[str], host: str, local: bool = False) -> Link:
    there, orders = os.pipe()
    answers, back = os.pipe()
    errors, complaints = os.pipe()
    for handle in (orders, answers, errors):
        os.set_blocking(handle, False)
    try:
        pid = os.posix_spawnp(
            argv[0],
            argv,
            os.environ,
            setsid=True,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, there, 0),
                (os.POSIX_SPAWN_DUP2, back, 1),
                (os.POSIX_SPAWN_DUP2, complaints, 2),
            ],
        )
    except OSError:
        for handle in (orders, answers, errors):
            os.close(handle)
        raise
    finally:
        os.close(there)
        os.close(back)
        os.close(complaints)
    return Link(host, pid, orders, answers, errors, local)
