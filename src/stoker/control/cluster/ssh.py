"""The transport ssh: its command line, and what was said before any agent answered, as one line with cause and remedy."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from stoker.contract.frozen import replace
from stoker.contract.text import escape
from stoker.control.cluster.agent_zip import DAMAGED, NOT_WRITTEN, OLDEST_PYTHON, TOO_OLD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.hosts import Host, Hosts

CONNECT_S = 8  # a host that is switched off says nothing
# Asked every 2 s, gone after 6: before an agent is silent, so that the next attempt joins no dead connection.
_ALIVE = ("-oServerAliveInterval=2", "-oServerAliveCountMax=3")
# What a user's ~/.ssh/config may ask for at a keyboard, and would harm here.
_QUIET = ("-T", "-oBatchMode=yes", "-oClearAllForwardings=yes", "-oRemoteCommand=none")
_PERSIST_S = 5


class Ssh:
    name = "ssh"
    shows_share = False

    def python(self, host: Host, hosts: Hosts, words: Sequence[str]) -> list[str]:
        return ssh_command(host, hosts, [host.python or "python3", *words])


def ssh_command(host: Host, hosts: Hosts, words: Sequence[str]) -> list[str]:
    """The argv of an OpenSSH client that runs `words` there. ~/.ssh/config, agent, jump hosts and known_hosts apply.

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


def copy_command(host: Host, hosts: Hosts) -> list[str]:
    """For a user who types it: scp as ssh is called. A path on the host belongs behind its last word."""
    argv = ["scp", "-r"]
    for flag, value in (("-F", hosts.ssh_config), ("-P", host.port), ("-i", host.identity)):
        argv += [flag, str(value)] if value is not None else []
    argv += [option for option in hosts.ssh_options if option.startswith("-o")]  # others are not scp's
    target = f"[{host.target}]" if ":" in host.target else host.target
    return [*argv, f"{host.user}@{target}:" if host.user else f"{target}:"]


def afresh(hosts: Hosts) -> Hosts:
    """By connections that nothing shares, and soon given up."""
    options = ("-oControlMaster=no", "-oControlPath=none", "-oConnectTimeout=4", *hosts.ssh_options)
    return replace(hosts, ssh_options=options)


def remote_line(words: Sequence[str]) -> str:
    """For the login shell there, whichever it is: everything quoted, the ~ of the program apart."""
    program, *rest = words
    home = re.match(r"~[A-Za-z0-9_.-]*/", program)
    first = home[0] + shlex.quote(program[home.end() :]) if home else shlex.quote(program)
    return " ".join([first, *(shlex.quote(word) for word in rest)])


def _shared() -> list[str]:
    """ssh's own connection sharing, per process: no run may die of another's. A socket's path has 107 bytes."""
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
        return f"{folder} belongs to another user, or is open to others"
    return ""


_OLDEST = ".".join(str(part) for part in OLDEST_PYTHON)

# (what was said, what it means, what to do). The first that fits counts. {0} is the first group, {host} the host.
_TABLE: tuple[tuple[str, str, str], ...] = (
    (re.escape(TOO_OLD) + r" (\S+)", "its Python is {0}, too old", f"name a Python of {_OLDEST} or later with python: or --python"),
    (r"Unknown option: -I", "its Python is too old", f"name a Python of {_OLDEST} or later with python: or --python"),
    (re.escape(NOT_WRITTEN) + r" (.*)", "the agent's files can't be written there: {0}", "make room or give the user a home that can be written"),
    (re.escape(DAMAGED), "the agent's files did not arrive whole", "try again; a login script there may read standard input"),
    (r"Could not resolve hostname (?:\S+): (.*)", "unknown host ({0})", "fix the name, or give an address or an alias of ~/.ssh/config"),
    (r"Could not resolve proxy|stdio forwarding failed|UNKNOWN port 65535", "its jump host does not let us through", "try `ssh {host}` by hand"),
    (r"Connection refused", "connection refused: nothing listens on its ssh port", "start sshd there, or fix the port"),
    (r"No route to host|Network is unreachable", "no route to it: switched off, unplugged or on another network", "switch it on, look at its cable"),
    (r"Connection to \S+ port \d+ timed out", "ssh connected, but no data came back",
     "`stoker cluster check` tells whether full-size packets vanish on the way"),
    (r"(?:Connection|Operation) timed out", "no answer: switched off, or a firewall drops its ssh port", "switch it on, or open the port"),
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key changed since it was last known{key}",
     "find out why; if it was installed again: ssh-keygen -R {host}"),
    (r"Host key verification failed", "Host key verification failed: its key is not known here", "connect once by hand (`ssh {host}`) and compare its key"),
    (r"Permissions (\d+) for '([^']*)' are too open", "permission denied: the private key {1} has permissions {0}, so ssh does not use it", "chmod 600 {1}"),
    (r"UNPROTECTED PRIVATE KEY", "permission denied: a private key that others can read is not used by ssh", "chmod 600 that key"),
    (r'Load key "([^"]*)": (.*)', "the private key {0} can't be read ({1})", "give another one with identity:"),
    (r"Too many authentication failures", "too many keys were offered", "name the right one with identity:"),
    (r"Permission denied \(([^)]*)\)", "Permission denied ({0}): none of our keys is accepted{user}",
     "ssh-copy-id there, or name user: and identity:"),
    (r"Bad owner or permissions on (\S+)", "ssh does not read {0}: its owner or permissions are wrong", "chmod 600 {0}"),
    (r"(\S+ ?line \d+|command-line): (.*(?:[Bb]ad|unsupported|missing).*)", "ssh's settings: {0}: {1}", "fix that line"),
    (r"(unknown option -- .|illegal option -- .)", "ssh's options: {0}", "fix --ssh-option"),
    (r"This account is (?:currently )?not available|nologin", "its user may not log in", "name another one with user:"),
    (r"kex_exchange_identification|Connection (?:closed|reset) by", "its sshd closed the connection: too many at once, or this user or address is not allowed",
     "look at its sshd's log"),
)  # fmt: skip
# Characters that are looked at, and of a line: a login may print pages, and a pattern's time grows with the square of a line.
_MAX_LOOKED_AT, _MAX_LINE = 8192, 300
_NOT_RUN = re.compile(
    r"no such file|not found|denied|is a directory|cannot execute|exec format|unknown command", re.IGNORECASE
)
_SHELL = {126: "can't be executed there", 127: "does not exist there"}


def explain(host: str, said: str, code: int | None) -> str:
    """`said`: all of stderr, and what came before the agent's first word. `code`: None: it has not ended."""
    said = "\n".join(escape(line, _MAX_LINE) for line in said[-_MAX_LOOKED_AT:].splitlines())
    if code in _SHELL:  # 126 and 127 are the login shell's: ssh itself has 255
        return f"host {host}: no Python: {_program(said)} {_SHELL[code]}; name one with python:, venv: or --python"
    for pattern, means, fix in _TABLE:
        found = re.search(pattern, said)
        if found:
            groups = [group or "" for group in found.groups()]
            more = {"host": host, "key": _offending(said), "user": _as_whom(said)}
            words = map(shlex.quote, groups)  # what to do is a command to copy, and a path may hold a blank
            return f"host {host}: {means.format(*groups, **more)}; {fix.format(*words, **more)}"
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    if code is None:
        return f"host {host}: no agent answered{': ' + last if last else ''}"
    return f"host {host}: {last or 'it said nothing'} (exit code {code})"


def _program(said: str) -> str:
    """The path in a shell's complaint: `bash: line 1: /x/python: No such file`, `sh: 1: python3: not found`."""
    lines = [line for line in said.splitlines() if _NOT_RUN.search(line)]
    parts = [part.strip() for part in lines[-1].split(": ")] if lines else []
    named = [part for part in parts[1:] if not _NOT_RUN.search(part) and not re.fullmatch(r"(line )?\d+", part)]
    return named[-1] if named else "the program"


def _offending(said: str) -> str:
    found = re.search(r"Offending .*key in (\S+?):?(\d+)?\s*$", said, re.MULTILINE)
    return f" ({found[1]}{', line ' + found[2] if found[2] else ''})" if found else ""


def _as_whom(said: str) -> str:
    found = re.search(r"([^\s@]+)@[^\s@:]+: Permission denied", said)
    return f" for user {found[1]}" if found else ""
