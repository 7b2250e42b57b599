"""The hosts of a run, in rank order: parses a hosts file (YAML or JSON) or `a,b,user@c`, and raises Refusal for mistakes.

A hosts file looks like this:

ssh_config: ~/.ssh/config        # optional
defaults: {user: train, python: ~/venv/bin/python, workdir: ~/train}
hosts:
  - {host: 192.168.1.100, slots: 2}
  - {host: 192.168.1.101, slots: 1, interface: eth1}
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from stoker.contract import schedulers
from stoker.contract.errors import EX_CONFIG, EX_NOINPUT, EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.options import suggest
from stoker.contract.safe_io import read_text
from stoker.contract.yaml_text import YamlError, parse_yaml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.transport import Transport

_EXTENSIONS = (".yaml", ".yml", ".json")
_FILE_KEYS = ("ssh_config", "ssh_options", "defaults", "hosts", "env", "scheduler")
_TEXT_KEYS = ("user", "identity", "python", "venv", "workdir", "interface", "address")
_HOST_KEYS = ("host", *_TEXT_KEYS, "gpus", "port", "slots", "local")
NO_GPUS = "none"  # for `gpus:` of a host whose ranks run on the CPU
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")


@frozen
class Host:
    name: str  # unique; in messages, and the key of all that is stored per host
    target: str  # the name that is passed to ssh
    address: str | None = None  # where the other hosts reach it; None if the file does not set it
    user: str | None = None
    port: int | None = None
    identity: str | None = None
    python: str | None = None  # a leading ~ is expanded on the host
    workdir: str | None = None  # None: the coordinator's; a leading ~ is expanded on the host
    gpus: str | None = None  # in the format of --gpus, or NO_GPUS; None: all GPUs
    interface: str | None = None
    slots: int | None = None
    here: bool = False  # whether it is this machine, reached over a pipe instead of ssh

    @property
    def no_gpus(self) -> bool:
        return self.gpus == NO_GPUS


@frozen
class Hosts:
    hosts: tuple[Host, ...]
    ssh_config: str | None = None
    ssh_options: tuple[str, ...] = ()
    path: str | None = None
    env: dict[str, str] = {}  # noqa: RUF012  (immutable) variables for all ranks, such as --tune writes
    transports: dict[str, Transport] = {}  # noqa: RUF012  (immutable) host -> a scheduler's transport
    scheduler: str = ""  # the scheduler whose nodes these are; its allocation fills `transports`

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)


def read_hosts_file(argument: str, ssh_options: tuple[str, ...] = ()) -> Hosts:
    """Parse the argument of --hosts: the path of a hosts file, or names separated by commas. Raises Refusal."""
    if argument.endswith(_EXTENSIONS):
        return parse_hosts(_read_yaml(argument), argument, ssh_options)
    if "/" in argument or os.path.isfile(argument):
        line = f"--hosts {argument}: the name of a hosts file must end in .yaml, .yml or .json; separate host names with commas"
        raise Refusal(line, EX_USAGE)
    names = [name.strip() for name in argument.split(",")]
    if not any(names):
        raise Refusal(f"--hosts {argument!r} has no host name; write a,b,c or the path of a hosts file", EX_USAGE)
    if not all(names):
        raise Refusal(f"--hosts {argument}: a host name is empty; remove the extra comma", EX_USAGE)
    hosts = [_parse_host(_split_user(name, "--hosts"), "--hosts", "", ssh_options, None) for name in names]
    _refuse_duplicates(hosts, "--hosts")
    return Hosts(tuple(hosts), ssh_options=ssh_options)


def parse_hosts(data: Mapping[Any, Any], path: str, ssh_options: tuple[str, ...] = (), written: bool = True) -> Hosts:
    """Parse the content of a hosts file. File names in it are relative to the folder of `path`.

    `written` is False if the file at `path` does not exist yet. Raises Refusal with `path` in the message.
    """
    for key in data:
        if key not in _FILE_KEYS:
            _refuse(path, f"unknown key {key!r}{suggest(str(key), _FILE_KEYS)}")
    defaults = data.get("defaults") or {}
    if not isinstance(defaults, dict):
        _refuse(path, f"defaults: must be a mapping, {_got(defaults)}; write it like {{user: train}}")
    _check_keys(defaults, f"{path}: defaults", without=("host", "address"))
    entries = data.get("hosts")
    if not isinstance(entries, list) or not entries:
        example = "write one entry per host, such as - {host: 192.168.1.100, slots: 2}"
        _refuse(path, f"hosts: must be a list of hosts, {_got(entries)}; {example}")
    folder = os.path.dirname(os.path.abspath(path))
    ssh_config = _find_file(data.get("ssh_config"), f"{path}: ssh_config", folder)
    options = data.get("ssh_options") or []
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        _refuse(path, f"ssh_options: must be a list, {_got(options)}; write it like [-oCompression=yes]")
    ssh_options = (*ssh_options, *options)  # ssh uses the first value, so flags override the file
    hosts = []
    for number, entry in enumerate(entries, 1):
        entry = _split_user(entry, f"{path}: host {number}")
        name = entry.get("host", number)
        location = f"{path}: host {name if isinstance(name, str) and name.isprintable() else number}"
        _check_keys(entry, location)
        if "python" in entry or "venv" in entry:  # an entry's python replaces a default venv, and vice versa
            inherited = {key: value for key, value in defaults.items() if key not in ("python", "venv")}
        else:
            inherited = defaults
        hosts.append(_parse_host({**inherited, **entry}, location, folder, ssh_options, ssh_config))
    env = _parse_env(data.get("env") or {}, path)
    scheduler = data.get("scheduler", "")
    names = [entry.name for entry in schedulers.SCHEDULERS]
    if scheduler not in ("", *names):
        _refuse(path, f"scheduler: must be one of {', '.join(names)}, {_got(scheduler)}")
    _refuse_duplicates(hosts, path, EX_CONFIG if written else EX_USAGE)
    return Hosts(tuple(hosts), ssh_config, ssh_options, path if written else None, env, scheduler=scheduler)


def _read_yaml(path: str) -> dict[Any, Any]:
    try:
        data = parse_yaml(read_text(path))  # JSON is YAML
    except FileNotFoundError as problem:
        line = f"the hosts file {path} does not exist; `stoker cluster init HOST HOST` writes one"
        raise Refusal(line, EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"the hosts file {path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except YamlError as problem:
        line_number = f", line {problem.line}" if problem.line else ""
        raise Refusal(f"{path}{line_number}: not valid YAML: {problem.problem}", EX_CONFIG) from problem
    except ValueError as problem:
        raise Refusal(f"the hosts file {path} is not text: {problem}", EX_CONFIG) from problem
    if not isinstance(data, dict):
        _refuse(path, f"must have a key hosts: with a list of hosts, {_got(data)}")
    return data


def _split_user(entry: Any, location: str) -> dict[str, Any]:
    """Return an entry as a mapping. `user@host` stands for {user: user, host: host}."""
    if isinstance(entry, str):
        user, at, host = entry.rpartition("@")
        return {"user": user, "host": host} if at else {"host": entry}
    if not isinstance(entry, dict):
        fix = "put the name in quotes" if isinstance(entry, (bool, int, float)) else "write {host: NAME}"
        _refuse(location, f"must be a name or a mapping, {_got(entry)}; {fix}")
    if isinstance(entry.get("host"), str) and "@" in entry["host"] and "user" not in entry:
        user, _, host = entry["host"].rpartition("@")
        return {**entry, "user": user, "host": host}
    return entry


def _check_keys(entry: Mapping[Any, Any], location: str, without: tuple[str, ...] = ()) -> None:
    """Check the keys of an entry, or of the defaults, and the types of their values."""
    keys = [key for key in _HOST_KEYS if key not in without]
    for key, value in entry.items():
        if key not in keys:
            _refuse(location, f"unknown key {key!r}{suggest(str(key), keys)}")
        if value is None or value == "":
            _refuse(location, f"{key}: must have a value; add one, or remove the key")
        if key in ("host", *_TEXT_KEYS) and not isinstance(value, str):
            _refuse(location, f"{key}: must be text, {_got(value)}; put it in quotes")
        if key in ("port", "slots") and (isinstance(value, bool) or not isinstance(value, int)):
            _refuse(location, f"{key}: must be a whole number, {_got(value)}")
        if key == "port" and not 1 <= value <= 65535:
            _refuse(location, f"port: must be between 1 and 65535, {_got(value)}")
        if key == "slots" and value < 1:
            _refuse(
                location, f"slots: must be 1 or more, {_got(value)}; to run no rank on a host, remove it from the file"
            )
        if key == "local" and not isinstance(value, bool):
            _refuse(location, f"local: must be true or false, {_got(value)}")
    if "python" in entry and "venv" in entry:
        _refuse(location, "python and venv can't both be set; keep one of them")


def _parse_host(
    entry: Mapping[str, Any], location: str, folder: str, ssh_options: tuple[str, ...], ssh_config: str | None
) -> Host:
    name, user, port = entry.get("host", ""), entry.get("user"), entry.get("port")
    if not name:
        _refuse(location, "host: is missing; set it to the name or address to pass to ssh")
    _refuse_port_in_name(name, location)
    for key in ("host", "user", "interface", "address"):
        value = entry.get(key)
        if value == "":
            _refuse(location, f"{key}: must not be empty")
        # Such a value is a typo, or ssh would parse it as an option.
        if value and (value.startswith("-") or not value.isprintable() or re.search(r"[\s@/,]", value)):
            _refuse(location, f"{key} {value!r} is not a valid name; remove blanks and special characters")
    for key in ("identity", "python", "venv", "workdir"):
        if "\0" in (entry.get(key) or ""):
            _refuse(location, f"{key}: must not contain a NUL character")
    python = entry.get("python") or (os.path.join(entry["venv"], "bin", "python") if entry.get("venv") else None)
    if python is not None and "/" in python and not python.startswith(("/", "~")):
        key = "venv" if entry.get("venv") else "python"
        _refuse(location, f"{key}: must be an absolute path, got {entry[key]}; begin it with / or ~/")
    workdir = entry.get("workdir")
    if workdir is not None and not workdir.startswith(("/", "~")):
        _refuse(location, f"workdir: must be an absolute path, got {workdir}; begin it with / or ~/")
    here = entry.get("local")
    if here is None:
        here = not port and not ssh_options and _is_this_machine(name, user, ssh_config is None)
    return Host(
        name,
        target=name,
        address=entry.get("address"),
        user=user,
        port=port,
        identity=_find_file(entry.get("identity"), f"{location}: identity", folder),
        python=python,
        workdir=workdir,
        gpus=_parse_gpus(entry.get("gpus"), location),
        interface=entry.get("interface"),
        slots=entry.get("slots"),
        here=here,
    )


def _refuse_port_in_name(name: str, location: str) -> None:
    """Raise Refusal for host:22, [fe80::1] and [fe80::1]:22, which are formats of URLs."""
    match = re.fullmatch(r"\[([^\[\]]*)\](?::(\d+))?|([^:\[\]]+):(\d+)", name)
    if match is None:
        return
    bare, port = match[1] or match[3], match[2] or match[4]
    fix = f"write {bare} without brackets" if match[1] else f"write {bare}"
    if port and location == "--hosts":
        fix += f", and its port in a hosts file (port: {port}) or in ~/.ssh/config"
    elif port:
        fix += f", and port: {port}"
    _refuse(location, f"host {name!r}: {fix}")


def is_address(text: str) -> bool:
    """Return whether the text is an IPv4 or IPv6 address, which may end in %interface."""
    import socket

    bare, _, interface = text.partition("%")
    if not all(character.isalnum() or character in "._-" for character in interface):
        return False
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, bare)
            return True
        except (OSError, ValueError):  # ValueError: a NUL in it
            continue
    return False


def _is_this_machine(name: str, user: str | None, plain_ssh: bool) -> bool:
    """Return whether the host is this machine: its name is the address of an interface, or loopback.

    Loopback counts only with `plain_ssh`, because an ssh_config may map such a name to another machine.
    """
    import getpass
    import socket

    if user is not None:
        try:
            if user != getpass.getuser():
                return False
        except (KeyError, OSError):  # our uid is not in the password database (OSError since Python 3.13)
            return False
    if _LOOPBACK.fullmatch(name):
        return plain_ssh
    if not is_address(name) or "%" in name:
        return False
    with socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((name, 0))
        except OSError:
            return False
    return True


def _parse_gpus(value: Any, location: str) -> str | None:
    if isinstance(value, list) and all(isinstance(gpu, (int, str)) and not isinstance(gpu, bool) for gpu in value):
        value = ",".join(str(gpu) for gpu in value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, str)) or value == ""):
        _refuse(location, f"gpus: must have the format of --gpus, {_got(value)}; write 0,3 or UUIDs or any:2, or none")
    return None if value is None else str(value)


def _find_file(value: Any, location: str, folder: str) -> str | None:
    """Return the absolute path of a file named relative to the hosts file."""
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        _refuse(location, f"must be a path, {_got(value)}")
    path = os.path.join(folder, os.path.expanduser(value))
    if not os.path.isfile(path):
        raise Refusal(f"{location}: the file {path} does not exist", EX_NOINPUT)
    return path


def _parse_env(env: Any, path: str) -> dict[str, str]:
    if not isinstance(env, dict):
        _refuse(path, f"env: must be a mapping, {_got(env)}; write NAME: VALUE pairs")
    for name, value in env.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            _refuse(path, f"env: {name!r} is not a valid name of a variable")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            _refuse(path, f"env: {name}: must be text, {_got(value)}; put it in quotes")
    return {name: str(value) for name, value in env.items()}


def _refuse_duplicates(hosts: list[Host], location: str, code: int = EX_USAGE) -> None:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            _refuse(location, f"host {name} is listed twice; list it once, with more slots", code)
    local = [host.name for host in hosts if host.here]
    if len(local) > 1:
        _refuse(location, f"{' and '.join(local)} are the same machine, this one; list it once", code)


def _got(value: Any) -> str:
    return "got nothing" if value is None else f"got {value!r}"


def _refuse(location: str, why: str, code: int = EX_CONFIG) -> NoReturn:
    raise Refusal(f"{location}: {why}", EX_USAGE if location == "--hosts" else code)
