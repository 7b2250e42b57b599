"""The hosts of a run, in rank order: parses a hosts file (YAML or JSON) or `a,b,user@c`, and refuses what can't work.

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
    name: str  # unique; printed, and the key of everything that is stored per host
    target: str  # the name that ssh gets
    address: str | None = None  # where the other hosts reach it, if the file says so
    user: str | None = None
    port: int | None = None
    identity: str | None = None
    python: str | None = None  # a leading ~ is expanded on the host
    workdir: str | None = None  # None: the coordinator's own; a leading ~ is expanded on the host
    gpus: str | None = None  # as --gpus has it, or NO_GPUS; None: all
    interface: str | None = None
    slots: int | None = None
    here: bool = False  # it is this machine, reached by a pipe instead of ssh

    @property
    def no_gpus(self) -> bool:
        return self.gpus == NO_GPUS


@frozen
class Hosts:
    hosts: tuple[Host, ...]
    ssh_config: str | None = None
    ssh_options: tuple[str, ...] = ()
    path: str | None = None
    env: dict[str, str] = {}  # noqa: RUF012  frozen: variables for all ranks that measurably help on this network
    transports: dict[str, Transport] = {}  # noqa: RUF012  host -> a scheduler's transport; the others use ssh
    scheduler: str = ""  # the name of the scheduler whose nodes these are; `transports` is filled when it is asked

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)


def read_hosts_file(argument: str, ssh_options: tuple[str, ...] = ()) -> Hosts:
    """Parse the argument of --hosts: the path of a hosts file, or names separated by commas. Raises Refusal."""
    if argument.endswith(_EXTENSIONS):
        return parse_hosts(_read_yaml(argument), argument, ssh_options)
    if "/" in argument or os.path.isfile(argument):
        line = f"--hosts {argument}: a hosts file ends in .yaml, .yml or .json; host names are separated by commas"
        raise Refusal(line, EX_USAGE)
    names = [name.strip() for name in argument.split(",")]
    if not any(names):
        raise Refusal(f"--hosts {argument!r} names no host; write a,b,c or the path of a hosts file", EX_USAGE)
    if not all(names):
        raise Refusal(f"--hosts {argument}: an empty name between two commas", EX_USAGE)
    hosts = [_parse_host(_split_user(name, "--hosts"), "--hosts", "", ssh_options, None) for name in names]
    _refuse_duplicates(hosts, "--hosts")
    return Hosts(tuple(hosts), ssh_options=ssh_options)


def parse_hosts(data: Mapping[Any, Any], path: str, ssh_options: tuple[str, ...] = (), written: bool = True) -> Hosts:
    """Parse the content of a hosts file. `path` is named in refusals; files are looked up relative to it.

    `written` is False for a file that does not exist yet.
    """
    for key in data:
        if key not in _FILE_KEYS:
            _refuse(path, f"unknown key {key!r}{suggest(str(key), _FILE_KEYS)}")
    defaults = data.get("defaults") or {}
    if not isinstance(defaults, dict):
        _refuse(path, f"defaults: {_show(defaults)}; write keys and values, such as {{user: train}}")
    _check_keys(defaults, f"{path}: defaults", without=("host", "address"))
    entries = data.get("hosts")
    if not isinstance(entries, list) or not entries:
        example = "write a list with one entry a host, such as - {host: 192.168.1.100, slots: 2}"
        _refuse(path, f"hosts: {_show(entries)}; {example}")
    folder = os.path.dirname(os.path.abspath(path))
    ssh_config = _find_file(data.get("ssh_config"), f"{path}: ssh_config", folder)
    options = data.get("ssh_options") or []
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        _refuse(path, f"ssh_options: {_show(options)}; write a list such as [-oCompression=yes]")
    ssh_options = (*ssh_options, *options)  # ssh uses the first value it gets: a flag wins over the file
    hosts = []
    for number, entry in enumerate(entries, 1):
        entry = _split_user(entry, f"{path}: host {number}")
        name = entry.get("host", number)
        location = f"{path}: host {name if isinstance(name, str) and name.isprintable() else number}"
        _check_keys(entry, location)
        if "python" in entry or "venv" in entry:  # either one replaces both defaults
            inherited = {key: value for key, value in defaults.items() if key not in ("python", "venv")}
        else:
            inherited = defaults
        hosts.append(_parse_host({**inherited, **entry}, location, folder, ssh_options, ssh_config))
    env = _parse_env(data.get("env") or {}, path)
    scheduler = data.get("scheduler", "")
    names = [known.name for known in schedulers.SCHEDULERS]
    if scheduler not in ("", *names):
        _refuse(path, f"scheduler: {_show(scheduler)}; write {', '.join(names)}")
    _refuse_duplicates(hosts, path, EX_CONFIG if written else EX_USAGE)
    return Hosts(tuple(hosts), ssh_config, ssh_options, path if written else None, env, scheduler=scheduler)


def _read_yaml(path: str) -> dict[Any, Any]:
    try:
        data = parse_yaml(read_text(path))  # JSON is YAML
    except FileNotFoundError as problem:
        line = f"no hosts file {path}; `stoker cluster init HOST HOST` writes one by asking the hosts"
        raise Refusal(line, EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"the hosts file {path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except YamlError as problem:
        line_number = f", line {problem.line}" if problem.line else ""
        raise Refusal(f"{path}{line_number}: not YAML: {problem.problem}", EX_CONFIG) from problem
    except ValueError as problem:
        raise Refusal(f"the hosts file {path} is not text: {problem}", EX_CONFIG) from problem
    if not isinstance(data, dict):
        _refuse(path, f"{_show(data)}; a hosts file has a key hosts: with a list")
    return data


def _split_user(entry: Any, location: str) -> dict[str, Any]:
    """Return an entry as a mapping. `user@host` stands for {user: user, host: host}."""
    if isinstance(entry, str):
        user, at, host = entry.rpartition("@")
        return {"user": user, "host": host} if at else {"host": entry}
    if not isinstance(entry, dict):
        fix = "put the name in quotes" if isinstance(entry, (bool, int, float)) else "write {host: NAME}"
        _refuse(location, f"{_show(entry)}; {fix}")
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
            _refuse(location, f"{key}: has no value; leave the key out instead")
        if key in ("host", *_TEXT_KEYS) and not isinstance(value, str):
            _refuse(location, f"{key}: {_show(value)}, not text; put it in quotes")
        if key in ("port", "slots") and (isinstance(value, bool) or not isinstance(value, int)):
            _refuse(location, f"{key}: {_show(value)}, not a whole number")
        if key == "port" and not 1 <= value <= 65535:
            _refuse(location, f"port: {value} is not between 1 and 65535")
        if key == "slots" and value < 1:
            _refuse(location, f"slots: {value}; a host has at least one rank, or is left out of the file")
        if key == "local" and not isinstance(value, bool):
            _refuse(location, f"local: {_show(value)}, not true or false")
    if "python" in entry and "venv" in entry:
        _refuse(location, "python and venv are both given; a venv means its bin/python")


def _parse_host(
    entry: Mapping[str, Any], location: str, folder: str, ssh_options: tuple[str, ...], ssh_config: str | None
) -> Host:
    name, user, port = entry.get("host", ""), entry.get("user"), entry.get("port")
    if not name:
        _refuse(location, "host: is missing; it is the name or address that ssh is given")
    _refuse_port_in_name(name, location)
    for key in ("host", "user", "interface", "address"):
        value = entry.get(key)
        if value == "":
            _refuse(location, f"an empty {key}")
        # What is certainly a typo, or what ssh would take for an option.
        if value and (value.startswith("-") or not value.isprintable() or re.search(r"[\s@/,]", value)):
            _refuse(location, f"{key} {value!r} is not a name; ssh can't be given that")
    for key in ("identity", "python", "venv", "workdir"):
        if "\0" in (entry.get(key) or ""):
            _refuse(location, f"{key}: contains a NUL character")
    python = entry.get("python") or (os.path.join(entry["venv"], "bin", "python") if entry.get("venv") else None)
    if python is not None and "/" in python and not python.startswith(("/", "~")):
        key = "venv" if entry.get("venv") else "python"
        _refuse(location, f"{key}: {entry[key]} is relative; begin it with / or ~/")
    workdir = entry.get("workdir")
    if workdir is not None and not workdir.startswith(("/", "~")):
        _refuse(location, f"workdir: {workdir} is relative; begin it with / or ~/")
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
    """Refuse host:22, [fe80::1] and [fe80::1]:22, as URLs have them."""
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
    """Return whether this is an IPv4 or IPv6 address, with or without %interface, and not a name."""
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
    """Return whether it is the address of one of our interfaces, or loopback if no ssh settings may redirect that."""
    import getpass
    import socket

    if user is not None:
        try:
            if user != getpass.getuser():
                return False
        except (KeyError, OSError):  # this uid has no entry in the password database; OSError since Python 3.13
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
        _refuse(location, f"gpus: {_show(value)}; write 0,3 or UUIDs or any:2, as --gpus has it, or none")
    return None if value is None else str(value)


def _find_file(value: Any, location: str, folder: str) -> str | None:
    """Return the absolute path of a file named relative to the hosts file."""
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        _refuse(location, f"{_show(value)}, not a path")
    path = os.path.join(folder, os.path.expanduser(value))
    if not os.path.isfile(path):
        raise Refusal(f"{location}: no file {path}", EX_NOINPUT)
    return path


def _parse_env(env: Any, path: str) -> dict[str, str]:
    if not isinstance(env, dict):
        _refuse(path, f"env: {_show(env)}; write NAME: VALUE pairs")
    for name, value in env.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            _refuse(path, f"env: {name!r} is not a variable's name")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            _refuse(path, f"env: {name}: {_show(value)}; put it in quotes")
    return {name: str(value) for name, value in env.items()}


def _refuse_duplicates(hosts: list[Host], location: str, code: int = EX_USAGE) -> None:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            _refuse(location, f"host {name} is listed twice; list each host once and give it more slots", code)
    local = [host.name for host in hosts if host.here]
    if len(local) > 1:
        _refuse(location, f"{' and '.join(local)} are all this machine; name it once", code)


def _show(value: Any) -> str:
    return "nothing" if value is None else f"found {value!r}"


def _refuse(location: str, why: str, code: int = EX_CONFIG) -> NoReturn:
    raise Refusal(f"{location}: {why}", EX_USAGE if location == "--hosts" else code)
