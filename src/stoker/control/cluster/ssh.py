"""The ssh transport: builds the command line, explains failed connections, and measures the path MTU to a host's sshd."""

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

CONNECT_S = 8  # ssh gives up after this time: a host that is switched off never answers
# ssh gives up 6 s after the last sign of life. An agent counts as lost only later, so a new attempt reuses no dead
# connection.
_KEEPALIVE = ("-oServerAliveInterval=2", "-oServerAliveCountMax=3")
# Override settings of ~/.ssh/config that are meant for a terminal and do harm here.
_NON_INTERACTIVE = ("-T", "-oBatchMode=yes", "-oClearAllForwardings=yes", "-oRemoteCommand=none")
_PERSIST_S = 5  # a shared connection stays open this long after its last command


class Ssh:
    """Reaches a host with the OpenSSH client."""

    name = "ssh"
    shows_share = False

    def python(self, host: Host, hosts: Hosts, args: Sequence[str]) -> list[str]:
        return ssh_command(host, hosts, [host.python or "python3", *args])


def ssh_command(host: Host, hosts: Hosts, command: Sequence[str]) -> list[str]:
    """Return the ssh argv that runs a command on the host. ~/.ssh/config, the ssh agent, jump hosts and known_hosts apply.

    ssh asks for no password, checks host keys, and shares one connection among all commands of this process to a host.
    The command's words arrive unchanged, except that a leading ~ of the program means the home directory there.
    """
    argv = ["ssh", *_NON_INTERACTIVE]
    if hosts.ssh_config is not None:
        argv += ["-F", hosts.ssh_config]
    if host.port is not None:
        argv += ["-p", str(host.port)]
    if host.user is not None:
        argv += ["-l", host.user]
    if host.identity is not None:
        argv += ["-i", host.identity, "-oIdentitiesOnly=yes"]
    # ssh uses the first value given for an option, so the user's options come before our defaults.
    argv += [*hosts.ssh_options, *_KEEPALIVE, f"-oConnectTimeout={CONNECT_S}", *_sharing_options()]
    return [*argv, "--", host.target, remote_line(command)]


def copy_command(host: Host, hosts: Hosts) -> list[str]:
    """Return the scp command, for a user to type, that copies from the host. The remote path goes after its last word."""
    argv = ["scp", "-r"]
    for flag, value in (("-F", hosts.ssh_config), ("-P", host.port), ("-i", host.identity)):
        argv += [flag, str(value)] if value is not None else []
    argv += [option for option in hosts.ssh_options if option.startswith("-o")]  # scp does not know ssh's other options
    target = f"[{host.target}]" if ":" in host.target else host.target
    return [*argv, f"{host.user}@{target}:" if host.user else f"{target}:"]


def with_unshared_connections(hosts: Hosts) -> Hosts:
    """Return the hosts with ssh options that open a new connection for each command and give up after 4 s."""
    options = ("-oControlMaster=no", "-oControlPath=none", "-oConnectTimeout=4", *hosts.ssh_options)
    return replace(hosts, ssh_options=options)


def remote_line(command: Sequence[str]) -> str:
    """Quote a command for any login shell. Only the ~ at the start of the program is left for the shell to expand."""
    program, *args = command
    home = re.match(r"~[A-Za-z0-9_.-]*/", program)
    quoted = home[0] + shlex.quote(program[home.end() :]) if home else shlex.quote(program)
    return " ".join([quoted, *(shlex.quote(arg) for arg in args)])


def _sharing_options() -> list[str]:
    """Return ssh's options for connection sharing. The socket name has our pid, so that no run ends another's connection."""
    if why_unshared():
        return ["-oControlMaster=no", "-oControlPath=none"]
    # In /tmp, because the path of a socket may have at most 107 bytes.
    path = f"{_socket_dir()}/{os.getpid()}-%C"
    return ["-oControlMaster=auto", f"-oControlPath={path}", f"-oControlPersist={_PERSIST_S}"]


def _socket_dir() -> str:
    return f"/tmp/stoker-ssh-{os.getuid()}"


def why_unshared() -> str:
    """Make the folder of the sockets. Return why connections can't be shared, or ""."""
    folder = _socket_dir()
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as problem:
        return f"{folder} can't be made ({problem.strerror})"
    try:
        status = os.lstat(folder)
    except OSError as problem:
        return f"{folder} can't be read ({problem.strerror})"
    if status.st_uid != os.getuid() or status.st_mode & 0o170077 != 0o040000:
        return f"{folder} belongs to another user or is open to others"
    return ""


# ---- why a connection failed ----

_OLDEST = ".".join(str(part) for part in OLDEST_PYTHON)

# (pattern in the output, cause, remedy). The first match counts. {0} stands for its first group, {host} for the host.
_FAILURES: tuple[tuple[str, str, str], ...] = (
    (re.escape(TOO_OLD) + r" (\S+)", "its Python is {0}, too old", f"name a Python of {_OLDEST} or later with python: or --python"),
    (r"Unknown option: -I", "its Python is too old", f"name a Python of {_OLDEST} or later with python: or --python"),
    (re.escape(NOT_WRITTEN) + r" (.*)", "the agent's files can't be written there: {0}", "free disk space, or give the user a writable home"),
    (re.escape(DAMAGED), "the agent's files did not arrive whole", "try again, and check that no login script reads standard input"),
    (r"Could not resolve hostname (?:\S+): (.*)", "unknown host ({0})", "fix the name, or give an address or an alias of ~/.ssh/config"),
    (r"Could not resolve proxy|stdio forwarding failed|UNKNOWN port 65535", "its jump host refused the connection", "try `ssh {host}` by hand"),
    (r"Connection refused", "connection refused: nothing listens on its ssh port", "start sshd there, or fix the port"),
    (r"No route to host|Network is unreachable", "no route to it: it is switched off, unplugged or on another network", "switch it on, or check its cable"),
    (r"Connection to \S+ port \d+ timed out", "ssh connected, but no data came back",
     "run `stoker cluster check`, which finds out whether full-size packets are lost on the way"),
    (r"(?:Connection|Operation) timed out", "no answer: it is switched off, or a firewall drops its ssh port", "switch it on, or open the port"),
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key changed since it was last known{key}",
     "find out why; after a new installation, run ssh-keygen -R {host}"),
    (r"Host key verification failed", "Host key verification failed: its key is not known here", "connect once by hand (`ssh {host}`) and compare its key"),
    (r"Permissions (\d+) for '([^']*)' are too open", "permission denied: the private key {1} has permissions {0}, so ssh does not use it", "chmod 600 {1}"),
    (r"UNPROTECTED PRIVATE KEY", "permission denied: ssh does not use a private key that others can read", "chmod 600 that key"),
    (r'Load key "([^"]*)": (.*)', "the private key {0} can't be read ({1})", "set identity: to another one"),
    (r"Too many authentication failures", "too many keys were offered", "set identity: to the right one"),
    (r"Permission denied \(([^)]*)\)", "Permission denied ({0}): none of our keys is accepted{user}",
     "ssh-copy-id to it, or set user: and identity:"),
    (r"Bad owner or permissions on (\S+)", "ssh refuses to read {0}: its owner or permissions are wrong", "chmod 600 {0}"),
    (r"(\S+ ?line \d+|command-line): (.*(?:[Bb]ad|unsupported|missing).*)", "ssh can't read its settings: {0}: {1}", "fix that line"),
    (r"(unknown option -- .|illegal option -- .)", "ssh does not know an option: {0}", "fix --ssh-option"),
    (r"This account is (?:currently )?not available|nologin", "its user may not log in", "set user: to another one"),
    (r"kex_exchange_identification|Connection (?:closed|reset) by", "its sshd closed the connection: too many connections at a time, or this user or address is not allowed",
     "read its sshd's log"),
)  # fmt: skip
# A login may print pages, and the time to match a pattern grows with the square of the line length.
_MAX_CHARACTERS, _MAX_LINE = 8192, 300
_NOT_RUN = re.compile(
    r"no such file|not found|denied|is a directory|cannot execute|exec format|unknown command", re.IGNORECASE
)
_SHELL_CODES = {126: "can't be executed there", 127: "does not exist there"}


def explain_failure(host: str, output: str, code: int | None) -> str:
    """Return one line with the cause and the remedy of a failed connection.

    `output` is ssh's stderr and everything printed before the agent's greeting. `code` is None if ssh still runs.
    """
    output = "\n".join(escape(line, _MAX_LINE) for line in output[-_MAX_CHARACTERS:].splitlines())
    if code in _SHELL_CODES:  # from the login shell; a failure of ssh itself has 255
        return f"host {host}: no Python: {_find_program(output)} {_SHELL_CODES[code]}; set python:, venv: or --python"
    for pattern, cause, remedy in _FAILURES:
        if match := re.search(pattern, output):
            groups = [group or "" for group in match.groups()]
            key = re.search(r"Offending .*key in (\S+?):?(\d+)?\s*$", output, re.MULTILINE)
            user = re.search(r"([^\s@]+)@[^\s@:]+: Permission denied", output)
            names = {
                "host": host,
                "key": f" ({key[1]}{', line ' + key[2] if key[2] else ''})" if key else "",
                "user": f" for user {user[1]}" if user else "",
            }
            quoted = map(shlex.quote, groups)  # users paste the remedy into a shell, and a path may contain a blank
            return f"host {host}: {cause.format(*groups, **names)}; {remedy.format(*quoted, **names)}"
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    if code is None:
        return f"host {host}: no agent answered{': ' + last if last else ''}"
    return f"host {host}: {last or 'it printed nothing'} (exit code {code})"


def _find_program(output: str) -> str:
    """Return the program in a shell's error message, such as /x/python in `bash: line 1: /x/python: No such file`."""
    lines = [line for line in output.splitlines() if _NOT_RUN.search(line)]
    parts = [part.strip() for part in lines[-1].split(": ")] if lines else []
    names = [part for part in parts[1:] if not _NOT_RUN.search(part) and not re.fullmatch(r"(line )?\d+", part)]
    return names[-1] if names else "the program"


# ---- the path MTU: if full-size packets are lost, ssh connects and then hangs ----

_SEGMENTS = (536, 1000, 1160, 1240, 1340, 1360, 1400, 1420)  # TCP segment sizes to try
_HEADERS = 40  # bytes of the IP and TCP headers of a packet
_MTU_WAIT_S = 2.0
_TIOCOUTQ = 0x5411  # ioctl that returns how many sent bytes the other kernel has not acknowledged


def find_largest_packet(host: Host, hosts: Hosts) -> int | None:
    """Return the bytes of the largest packet that reaches the host's sshd, if full-size packets are lost.

    Return None if full-size packets arrive, if no packet arrives, or if ssh uses a jump host.
    """
    import subprocess
    from concurrent.futures import ThreadPoolExecutor

    argv = ssh_command(host, hosts, ["true"])
    print_settings = [argv[0], "-G", *argv[1:-1]]  # ssh resolves aliases and settings
    done = subprocess.run(
        print_settings, capture_output=True, text=True, timeout=5, check=False, stdin=subprocess.DEVNULL
    )
    settings = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    if done.returncode or any(settings.get(key, "none") != "none" for key in ("proxyjump", "proxycommand")):
        return None
    address = settings["hostname"], int(settings["port"])
    if _arrives(address, 0) is not False:
        return None
    with ThreadPoolExecutor(len(_SEGMENTS)) as pool:
        arrived = list(pool.map(lambda segment: _arrives(address, segment), _SEGMENTS))
    return max(
        (segment + _HEADERS for segment, has_arrived in zip(_SEGMENTS, arrived, strict=True) if has_arrived),
        default=None,
    )


def _arrives(address: tuple[str, int], segment: int) -> bool | None:
    """Return whether an 8 kB message arrives in segments of this size (0 for the default), or None without a connection."""
    import fcntl
    import socket
    import struct
    import time

    # SSH_MSG_IGNORE (RFC 4253, before encryption begins): an ssh server reads and drops it.
    payload = b"\x02" + struct.pack("!I", 8000) + bytes(8000)
    padding = 16 - (5 + len(payload)) % 8
    message = struct.pack("!IB", 1 + len(payload) + padding, padding) + payload + bytes(padding)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as connection:
            connection.settimeout(_MTU_WAIT_S)
            if segment:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
            connection.connect(target)
            connection.sendall(b"SSH-2.0-stoker\r\n" + message)
            deadline = time.monotonic() + _MTU_WAIT_S
            while time.monotonic() < deadline:
                if struct.unpack("i", fcntl.ioctl(connection, _TIOCOUTQ, bytes(4)))[0] == 0:
                    return True
                time.sleep(0.01)
            return False
    except OSError:
        return None
