"""The hosts of a run, in rank order: from a hosts file (YAML or JSON) or from `a,b,user@c`. Everything that can't be is refused here.

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
from stoker.contract.frozen import frozen, replace
from stoker.contract.options import suggest
from stoker.contract.safe_io import read_text
from stoker.contract.yaml_text import YamlError, parse_yaml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stoker.control.cluster.transport import Transport

_FILE = (".yaml", ".yml", ".json")
_TOP = ("ssh_config", "ssh_options", "defaults", "hosts", "env", "scheduler")
_TEXT = ("user", "identity", "python", "venv", "workdir", "interface", "address")
_KEYS = ("host", *_TEXT, "gpus", "port", "slots", "local")
_PATHS = ("identity", "python", "venv", "workdir")
NO_GPUS = "none"  # of a host: its ranks run on the CPU
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")


@frozen
class Host:
    name: str  # unique; printed, and the key of everything that is kept by host
    target: str  # what ssh is given
    address: str | None = None  # where the other hosts reach it, if told
    user: str | None = None
    port: int | None = None
    identity: str | None = None
    python: str | None = None  # a leading ~ is expanded there
    workdir: str | None = None  # None: the coordinator's own; a leading ~ is expanded there
    gpus: str | None = None  # NO_GPUS: none of those it has
    interface: str | None = None
    slots: int | None = None
    here: bool = False  # this very machine: a pipe instead of ssh

    @property
    def no_gpus(self) -> bool:
        return self.gpus == NO_GPUS


@frozen
class Hosts:
    hosts: tuple[Host, ...]
    ssh_config: str | None = None
    ssh_options: tuple[str, ...] = ()
    path: str | None = None
    env: dict[str, str] = {}  # noqa: RUF012  frozen: what measurably helps on this network, given to all ranks
    transports: dict[str, Transport] = {}  # noqa: RUF012  where a scheduler has its own; the others are reached by ssh
    scheduler: str = ""  # whose nodes they are; transports: once it was asked

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)


def read_hosts_file(told: str, ssh_options: tuple[str, ...] = ()) -> Hosts:
    if told.endswith(_FILE):
        return from_mapping(_parse(told), told, ssh_options)
    if "/" in told or os.path.isfile(told):
        line = f"--hosts {told}: a hosts file ends in .yaml, .yml or .json; host names are separated by commas"
        raise Refusal(line, EX_USAGE)
    words = [word.strip() for word in told.split(",")]
    if not any(words):
        raise Refusal(f"--hosts {told!r} names no host; write a,b,c or the path of a hosts file", EX_USAGE)
    if not all(words):
        raise Refusal(f"--hosts {told}: an empty name between two commas", EX_USAGE)
    hosts = [_host(_entry(word, "--hosts"), "--hosts", "", ssh_options, None) for word in words]
    return _checked(hosts, "--hosts", None, ssh_options, None, {})


def from_mapping(data: Mapping[Any, Any], path: str, more_options: tuple[str, ...] = (), written: bool = True) -> Hosts:
    """What a hosts file holds. `path` is named in refusals; files are looked for beside it. `written`: it exists."""
    for key in data:
        if key not in _TOP:
            _refuse(path, f"unknown key {key!r}{suggest(str(key), _TOP)}")
    defaults = data.get("defaults") or {}
    if not isinstance(defaults, dict):
        _refuse(path, f"defaults: {_found(defaults)}; write keys and values, such as {{user: train}}")
    _known_keys(defaults, f"{path}: defaults", without=("host", "address"))
    entries = data.get("hosts")
    if not isinstance(entries, list) or not entries:
        right = "write a list with one entry a host, such as - {host: 192.168.1.100, slots: 2}"
        line = f"hosts: {_found(entries)}; {right}"
        _refuse(path, line)
    folder = os.path.dirname(os.path.abspath(path))
    config = _local_file(data.get("ssh_config"), f"{path}: ssh_config", folder)
    options = data.get("ssh_options") or []
    if not isinstance(options, list) or not all(isinstance(one, str) for one in options):
        _refuse(path, f"ssh_options: {_found(options)}; write a list such as [-oCompression=yes]")
    ssh_options = (*more_options, *options)  # ssh takes the first it is given: a flag wins over the file
    hosts = []
    for number, entry in enumerate(entries, 1):
        entry = _entry(entry, f"{path}: host {number}")
        name = entry.get("host", number)
        where = f"{path}: host {name if isinstance(name, str) and name.isprintable() else number}"
        _known_keys(entry, where)
        own_python = "python" in entry or "venv" in entry
        base = {key: value for key, value in defaults.items() if not (own_python and key in ("python", "venv"))}
        hosts.append(_host({**base, **entry}, where, folder, ssh_options, config))
    env = _environment(data.get("env") or {}, path)
    scheduler = data.get("scheduler", "")
    if scheduler not in ("", *(one.name for one in schedulers.SCHEDULERS)):
        _refuse(
            path, f"scheduler: {_found(scheduler)}; there is {', '.join(one.name for one in schedulers.SCHEDULERS)}"
        )
    made = _checked(hosts, path, config, ssh_options, path if written else None, env)
    return replace(made, scheduler=scheduler)


def _parse(path: str) -> dict[Any, Any]:
    try:
        data = parse_yaml(read_text(path))  # JSON is YAML
    except FileNotFoundError as problem:
        line = f"no hosts file {path}; `stoker cluster init HOST HOST` writes one by asking the hosts"
        raise Refusal(line, EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"the hosts file {path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except YamlError as problem:
        where = f", line {problem.line}" if problem.line else ""
        raise Refusal(f"{path}{where}: not YAML: {problem.problem}", EX_CONFIG) from problem
    except ValueError as problem:
        raise Refusal(f"the hosts file {path} is not text: {problem}", EX_CONFIG) from problem
    if not isinstance(data, dict):
        _refuse(path, f"{_found(data)}; a hosts file has a key hosts: with a list")
    return data


def _entry(entry: Any, where: str) -> dict[str, Any]:
    """`user@host` is short for {user: user, host: host}."""
    if isinstance(entry, str):
        user, at, host = entry.rpartition("@")
        return {"user": user, "host": host} if at else {"host": entry}
    if not isinstance(entry, dict):
        fix = "put the name in quotes" if isinstance(entry, (bool, int, float)) else "write {host: NAME}"
        _refuse(where, f"{_found(entry)}; {fix}")
    if isinstance(entry.get("host"), str) and "@" in entry["host"] and "user" not in entry:
        user, _, host = entry["host"].rpartition("@")
        return {**entry, "user": user, "host": host}
    return entry


def _known_keys(entry: Mapping[Any, Any], where: str, without: tuple[str, ...] = ()) -> None:
    known = [key for key in _KEYS if key not in without]
    for key, value in entry.items():
        if key not in known:
            _refuse(where, f"unknown key {key!r}{suggest(str(key), known)}")
        if value is None or value == "":
            _refuse(where, f"{key}: has no value; leave the key out instead")
        if key in ("host", *_TEXT) and not isinstance(value, str):
            _refuse(where, f"{key}: {_found(value)}, not text; put it in quotes")
        if key in ("port", "slots") and (isinstance(value, bool) or not isinstance(value, int)):
            _refuse(where, f"{key}: {_found(value)}, not a whole number")
        if key == "port" and not 1 <= value <= 65535:
            _refuse(where, f"port: {value} is not between 1 and 65535")
        if key == "slots" and value < 1:
            _refuse(where, f"slots: {value}; a host has at least one rank, or is left out of the file")
        if key == "local" and not isinstance(value, bool):
            _refuse(where, f"local: {_found(value)}, not true or false")
    if "python" in entry and "venv" in entry:
        _refuse(where, "python and venv are both given; a venv means its bin/python")


def _host(
    entry: Mapping[str, Any], where: str, folder: str, ssh_options: tuple[str, ...], ssh_config: str | None
) -> Host:
    name = entry.get("host", "")
    if not name:
        _refuse(where, "host: is missing; it is the name or address that ssh is given")
    user = entry.get("user")
    _no_port(name, where)
    for key in ("host", "user", "interface", "address"):
        if entry.get(key) is not None:
            _check_name(key, entry[key], where)
    for key in _PATHS:
        if "\0" in (entry.get(key) or ""):
            _refuse(where, f"{key}: holds a NUL character")
    python = entry.get("python") or (os.path.join(entry["venv"], "bin", "python") if entry.get("venv") else None)
    if python is not None and "/" in python and not python.startswith(("/", "~")):
        key = "venv" if entry.get("venv") else "python"
        _refuse(where, f"{key}: {entry[key]} is relative; begin it with / or ~/")
    workdir = entry.get("workdir")
    if workdir is not None and not workdir.startswith(("/", "~")):
        _refuse(where, f"workdir: {workdir} is relative; begin it with / or ~/")
    port = entry.get("port")
    here = entry.get("local")
    if here is None:
        here = not port and not ssh_options and _is_here(name, user, ssh_config is None)
    identity = _local_file(entry.get("identity"), f"{where}: identity", folder)
    same = {key: entry.get(key) for key in ("address", "user", "port", "workdir", "interface", "slots")}
    gpus = _gpus(entry.get("gpus"), where)
    return Host(name, name, identity=identity, python=python, gpus=gpus, here=here, **same)


def _no_port(name: str, where: str) -> None:
    """As a URL has them: host:22, [fe80::1], [fe80::1]:22."""
    found = re.fullmatch(r"\[([^\[\]]*)\](?::(\d+))?|([^:\[\]]+):(\d+)", name)
    if found is None:
        return
    bare, port = found[1] or found[3], found[2] or found[4]
    means = f"write {bare} without brackets" if found[1] else f"write {bare}"
    if port and where == "--hosts":
        means += f", and its port in a hosts file (port: {port}) or in ~/.ssh/config"
    elif port:
        means += f", and port: {port}"
    _refuse(where, f"host {name!r}: {means}")


def _check_name(key: str, value: str, where: str) -> None:
    """Refuse what is certainly a slip, and what would be taken for an option of ssh."""
    if not value:
        _refuse(where, f"an empty {key}")
    if value.startswith("-") or not value.isprintable() or re.search(r"[\s@/,]", value):
        _refuse(where, f"{key} {value!r} is not a name; ssh can't be given that")


def is_address(word: str) -> bool:
    import socket

    bare, _, interface = word.partition("%")
    if not all(sign.isalnum() or sign in "._-" for sign in interface):
        return False
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, bare)
            return True
        except (OSError, ValueError):  # ValueError: a NUL in it
            continue
    return False


def _is_here(name: str, user: str | None, plain_ssh: bool) -> bool:
    """Loopback, unless ssh settings may lead it elsewhere (a forwarded port), or the address of an interface of ours."""
    import socket

    if user is not None and user != _own_name():
        return False
    if _LOOPBACK.fullmatch(name):
        return plain_ssh
    if not is_address(name) or "%" in name:
        return False
    with socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((name, 0))
        except OSError:  # not an address of ours
            return False
    return True


def _own_name() -> str | None:
    """As getpass has it. None: this uid has no entry in the password database, as in many containers."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        return None


def _gpus(told: Any, where: str) -> str | None:
    if isinstance(told, list) and all(isinstance(one, (int, str)) and not isinstance(one, bool) for one in told):
        told = ",".join(str(one) for one in told)
    if told is not None and (isinstance(told, bool) or not isinstance(told, (int, str)) or told == ""):
        _refuse(where, f"gpus: {_found(told)}; write 0,3 or UUIDs or any:2, as --gpus has it, or none")
    return None if told is None else str(told)


def _local_file(told: Any, where: str, folder: str) -> str | None:
    if told is None:
        return None
    if not isinstance(told, str) or not told:
        _refuse(where, f"{_found(told)}, not a path")
    path = os.path.join(folder, os.path.expanduser(told))
    if not os.path.isfile(path):
        raise Refusal(f"{where}: no file {path}", EX_NOINPUT)
    return path


def _environment(told: Any, path: str) -> dict[str, str]:
    if not isinstance(told, dict):
        _refuse(path, f"env: {_found(told)}; write NAME: VALUE pairs")
    for name, value in told.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            _refuse(path, f"env: {name!r} is not a variable's name")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            _refuse(path, f"env: {name}: {_found(value)}; put it in quotes")
    return {name: str(value) for name, value in told.items()}


def _checked(
    hosts: list[Host], where: str, config: str | None, options: tuple[str, ...], path: str | None, env: dict[str, str]
) -> Hosts:
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            line = f"host {host.name} is listed twice; list each host once and give it more slots"
            _refuse(where, line, EX_CONFIG if path else EX_USAGE)
        seen.add(host.name)
    ours = [host.name for host in hosts if host.here]
    if len(ours) > 1:
        _refuse(where, f"{' and '.join(ours)} are all this machine; name it once", EX_CONFIG if path else EX_USAGE)
    return Hosts(tuple(hosts), config, options, path, env)


def _found(value: Any) -> str:
    return "nothing" if value is None else f"found {value!r}"


def _refuse(where: str, what: str, code: int = EX_CONFIG) -> NoReturn:
    raise Refusal(f"{where}: {what}", EX_USAGE if where == "--hosts" else code)
