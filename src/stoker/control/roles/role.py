"""Parses roles: their commands, replicas and GPUs, when they are ready, and what happens when they end. Pure.

`--role NAME:COUNT:COMMAND`, or a file with all settings:

roles:
  server:
    command: python server.py --port ${port}
    count: 1                     # replicas, each a rank
    gpus: 1                      # of each replica; default: 1 if there are GPUs
    port: auto                   # of the first replica; the others have the next ones. $STOKER_PORT, ${port}
    ready: {http: /health}       # or port: true, file: PATH, line: TEXT, mark: READY
    restart: always              # alone; never: its failure ends the job; job: starts all roles again
    required: false              # the job does not wait for its end; default: only if the role turns out to be a service
  trainer:
    command: train.py --lr 1e-5
    count: 3
    after: [server]              # default: the roles above that have a ready rule
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from stoker.contract.errors import EX_CONFIG, EX_NOINPUT, EX_USAGE, Refusal
from stoker.contract.frozen import frozen, replace
from stoker.contract.options import suggest
from stoker.contract.safe_io import read_text
from stoker.contract.text import escape, is_digits
from stoker.contract.units import parse_duration
from stoker.contract.yaml_text import YamlError, parse_yaml

ALWAYS, NEVER, JOB = "always", "never", "job"
RESTARTS = (ALWAYS, NEVER, JOB)
READY_KINDS = ("port", "http", "file", "line", "mark")
READY_S = 600.0  # a model of 32 B parameters from a network disk takes minutes
ANSWER_S = 30.0  # the first real answer of a server may take this long
CHECK_S = 10.0  # between two health checks of a role that is ready
AUTO = -1
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_KEYS = ("command", "count", "gpus", "port", "env", "ready", "restart", "required", "after", "min_hosts", "batch")
_READY_KEYS = (*READY_KINDS, "body", "contains", "answer", "timeout", "check", "metrics")
_MAX_PROCESSES = 4096
_MAX_BATCH = 1 << 30
_SET_BY_JOB = {  # flags that a role's `stoker train` is given by its job
    "--detach", "--gpu", "--gpus", "--gpus-per-rank", "--hosts", "--max-restarts", "--min-hosts", "--name", "--nnodes", "--nproc-per-node",
    "--port-base", "--prefix", "--role", "--runs-dir",
}  # fmt: skip


@frozen
class ReadyRule:
    """The rule that a role must satisfy to be ready, and afterwards to be healthy."""

    kind: str
    value: str  # path, file, text or mark
    body: str = ""  # http: JSON to post, so that the server must answer a real request
    contains: str = ""  # http: text that the response must contain
    ready_timeout_s: float = READY_S
    check_interval_s: float = CHECK_S  # between health checks; 0: none
    answer_timeout_s: float = ANSWER_S  # http: longest wait for a response
    metrics: str = ""  # path of a page that counts requests and tokens

    @property
    def description(self) -> str:
        """Return what the job waits for, as a phrase."""
        if self.kind == "port":
            return "its port to accept connections"
        if self.kind == "http":
            return f"an answer to {'POST' if self.body else 'GET'} {self.value}"
        return {
            "file": f"the file {self.value}",
            "line": f"a line with {self.value!r}",
            "mark": f"stoker.mark({self.value!r})",
        }[self.kind]


@frozen
class RoleSpec:
    """A role as its user described it."""

    name: str
    command: tuple[str, ...]
    count: int = 1
    gpus: int | None = None  # of each replica; None: one if there are GPUs
    port: int = 0  # of the first replica; 0: none, AUTO: a free one
    env: Mapping[str, str] = {}
    ready: ReadyRule | None = None
    restart: str = NEVER
    required: bool | None = None  # whether the job waits for its end; None: if it is no service
    after: tuple[str, ...] = ()
    min_hosts: int = 0  # its run continues with at least this many of its hosts; 0: it needs all
    batch: int = 0  # samples a step, divided among its replicas; 0: unknown

    @property
    def is_service(self) -> bool:
        """Whether the job need not wait for this role, as far as its description says.

        Without `required`, a role with a ready rule is a service. Others become one by what their processes do
        (`RoleProcess.find_service_reason`).
        """
        return self.ready is not None if self.required is None else not self.required

    @property
    def is_server(self) -> bool:
        """Whether other roles send it requests."""
        return self.ready is not None and self.ready.kind in ("port", "http")


# ---- --role and --roles ----


def parse_role_flags(flags: Sequence[str], counts: Mapping[str, int] | None = None) -> tuple[RoleSpec, ...]:
    """Read --role NAME:COUNT:COMMAND flags. With `counts`, those of an allocation, a flag may leave its COUNT out."""
    specs = []
    for flag in flags:
        parts = flag.split(":", 2)
        if len(parts) == 2 and counts is not None:
            parts = [parts[0], str(counts.get(parts[0], 1)), parts[1]]
        if len(parts) < 3:
            example = "trainer:3:'train.py --lr 1e-5'"
            raise Refusal(f"--role {flag}: write NAME:COUNT:'COMMAND', such as {example}", EX_USAGE)
        name, count, command = parts
        if not is_digits(count) or not 1 <= int(count) <= _MAX_PROCESSES:
            line = f"--role {flag}: {count!r} is not a number of replicas from 1 to {_MAX_PROCESSES}"
            raise Refusal(line, EX_USAGE)
        argv = _parse_command(command, f"--role {name}", EX_USAGE)
        specs.append(RoleSpec(name, argv, int(count), port=0 if is_stoker_train(argv) else AUTO))
    return check_roles(specs, "--role", EX_USAGE)


def read_roles_file(path: str) -> tuple[RoleSpec, ...]:
    try:
        data = parse_yaml(read_text(path))
    except FileNotFoundError as problem:
        raise Refusal(f"roles file {path} does not exist", EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"the roles file {path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except YamlError as problem:
        where = f", line {problem.line}" if problem.line else ""
        raise Refusal(f"{path}{where}: not YAML: {problem.problem}", EX_CONFIG) from problem
    except ValueError as problem:
        raise Refusal(f"the roles file {path} is not text: {problem}", EX_CONFIG) from problem
    roles = data.get("roles") if isinstance(data, dict) else None
    if not isinstance(roles, dict) or not roles:
        _refuse(path, "a roles file must have the key roles:, with a name and settings for each role")
    for key in data:
        if key != "roles":
            _refuse(path, f"unknown key {key!r}; the only key of a roles file is roles")
    specs = [_parse_role(name, settings, f"{path}: {name}") for name, settings in roles.items()]
    return check_roles(specs, path, EX_CONFIG)


def check_roles(specs: Sequence[RoleSpec], where: str, code: int) -> tuple[RoleSpec, ...]:
    """Return the roles with the defaults of `after`. Refuses duplicate names, unknown roles and circular waits."""
    total = sum(spec.count for spec in specs)
    if total > _MAX_PROCESSES:
        line = f"the roles have {total} processes together, but at most {_MAX_PROCESSES} are allowed"
        raise Refusal(f"{where}: {line}", code)
    checked: list[RoleSpec] = []
    for spec in specs:
        names = [earlier.name for earlier in checked]
        if not _NAME.fullmatch(spec.name):
            rule = "a letter, then letters, digits, - and _, at most 40"
            raise Refusal(f"{where}: {escape(spec.name, 60)!r} can't be a role's name: {rule}", code)
        if spec.name in names:
            raise Refusal(f"{where}: two roles are named {spec.name}", code)
        variable = address_variable(spec.name)
        for name in names:
            if address_variable(name) == variable:
                raise Refusal(f"{where}: {name} and {spec.name} would both be {variable}: rename one", code)
        if is_stoker_train(spec.command):
            for word in spec.command:
                if (flag := word.partition("=")[0].replace("_", "-")) in _SET_BY_JOB:
                    line = f"{where}: {spec.name}: leave {flag} out of its command: the job sets it"
                    raise Refusal(line, code)
        after = spec.after or tuple(earlier.name for earlier in checked if earlier.ready is not None)
        checked.append(replace(spec, after=tuple(name for name in after if name)))
    names = [spec.name for spec in checked]
    for spec in checked:
        for name in spec.after:
            if name not in names:
                line = f"{spec.name} waits for {name!r}, but there is no such role{suggest(name, names)}"
                raise Refusal(f"{where}: {line}", code)
    sort_by_dependency(checked, where, code)
    if all(spec.required is False for spec in checked):
        line = "no role is required, so the job would end immediately; set required: true for one"
        raise Refusal(f"{where}: {line}", code)
    return tuple(checked)


def sort_by_dependency(specs: Sequence[RoleSpec], where: str, code: int) -> list[RoleSpec]:
    """Return the roles with each after those it waits for, otherwise in the order they were written."""
    waiting, ordered = list(specs), list[RoleSpec]()
    while waiting:
        names = {spec.name for spec in ordered}
        spec = next((spec for spec in waiting if set(spec.after) <= names), None)
        if spec is None:
            circle = ", ".join(f"{spec.name} waits for {' and '.join(spec.after)}" for spec in waiting)
            raise Refusal(f"{where}: no role can start first: {circle}", code)
        ordered.append(spec)
        waiting.remove(spec)
    return ordered


def check_batch(spec: RoleSpec, replicas: int) -> None:
    """Refuse a batch that can't be divided among the replicas."""
    if spec.batch % replicas:
        fits = next(number for number in range(replicas, 0, -1) if spec.batch % number == 0)
        line = f"role {spec.name}: {spec.batch} samples a step (batch) can't be divided among {replicas} replicas; use {fits}"
        raise Refusal(line, EX_CONFIG)


# ---- one role of a file ----


def _parse_role(name: Any, settings: Any, where: str) -> RoleSpec:
    where = escape(where, 200)
    if not isinstance(name, str):
        _refuse(where, "the name of a role must be a text; put it in quotes")
    if isinstance(settings, str):
        settings = {"command": settings}
    if not isinstance(settings, dict):
        _refuse(where, "write its settings below it, such as command: train.py")
    for key in settings:
        if key not in _KEYS:
            _refuse(where, f"unknown key {key!r}{suggest(str(key), _KEYS)}")
    command = settings.get("command")
    if not isinstance(command, str) or not command.strip():
        _refuse(where, "command: is missing; write the command line as one text")
    ready = _parse_ready(settings["ready"], f"{where}: ready") if "ready" in settings else None
    needs_port = ready is not None and ready.kind in ("port", "http")
    port = settings.get("port", AUTO if needs_port else 0)
    if port == "auto":
        port = AUTO
    if port != AUTO and (isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535):
        _refuse(where, f"port: {port!r} is not auto or a number up to 65535")
    if ready is not None and needs_port and not port:
        _refuse(where, f"ready: {ready.kind} needs a port; write port: auto, or a number")
    restart = settings.get("restart", NEVER)
    if restart not in RESTARTS:
        _refuse(where, f"restart: {restart!r} is not one of {', '.join(RESTARTS)}")
    required = settings.get("required", False if restart == ALWAYS else None)
    if "required" in settings and not isinstance(required, bool):
        _refuse(where, f"required: {required!r} is not true or false")
    after = settings.get("after", ())
    if "after" in settings:
        after = [after] if isinstance(after, str) else after
        if not isinstance(after, list) or not all(isinstance(other, str) for other in after):
            _refuse(where, "after: write a list of roles, such as [server]")
        after = after or [""]  # an empty list means that it waits for no role, not the default
    return RoleSpec(
        name,
        _parse_command(command, where, EX_CONFIG),
        _parse_number(settings, "count", 1, where, 1),
        None if settings.get("gpus") is None else _parse_number(settings, "gpus", 0, where, 0),
        port,
        _parse_env(settings.get("env") or {}, f"{where}: env"),
        ready,
        restart,
        required,
        tuple(after),
        _parse_number(settings, "min_hosts", 0, where, 0),
        _parse_number(settings, "batch", 0, where, 0, _MAX_BATCH),
    )


def _parse_number(
    settings: Mapping[str, Any], key: str, default: int, where: str, minimum: int, maximum: int = _MAX_PROCESSES
) -> int:
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        _refuse(where, f"{key}: {value!r} is not a whole number from {minimum} to {maximum}")
    return value


def _parse_env(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        _refuse(where, "write NAME: value below it")
    for name, text in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            _refuse(where, f"{name!r} is not a variable's name")
        if isinstance(text, (dict, list)) or text is None or "\0" in str(text):
            _refuse(where, f"{name}: write a text")
    return {name: str(text) for name, text in value.items()}


def _parse_ready(value: Any, where: str) -> ReadyRule:
    if value == "port":
        value = {"port": True}
    if not isinstance(value, dict):
        _refuse(where, "write one of port: true, http: /health, file: PATH, line: TEXT, mark: READY")
    for key in value:
        if key not in _READY_KEYS:
            _refuse(where, f"unknown key {key!r}{suggest(str(key), _READY_KEYS)}")
    kinds = [kind for kind in READY_KINDS if kind in value]
    if len(kinds) != 1:
        _refuse(where, f"give one of {', '.join(READY_KINDS)}")
    kind = kinds[0]
    expected = value[kind]
    if kind == "port":
        if expected is not True:
            _refuse(where, f"port: {expected!r} is not true; its number belongs to the role's own key port")
        expected = ""
    elif not isinstance(expected, str) or not expected:
        _refuse(where, f"{kind}: {expected!r} is not a text")
    if not expected.isprintable():
        _refuse(where, f"{kind}: {expected!a} has characters that can't be printed")
    if kind == "http" and not _is_url_path(expected):
        _refuse(where, f"http: {expected!r} is not a path such as /health")
    if kind != "http" and not value.keys().isdisjoint(("body", "contains", "answer")):
        _refuse(where, "body, contains and answer belong to http")
    metrics = value.get("metrics", "")
    if metrics and kind not in ("port", "http"):
        _refuse(where, "metrics belongs to port and http: a server's page that counts requests and tokens")
    if metrics and not (isinstance(metrics, str) and metrics.isprintable() and _is_url_path(metrics)):
        _refuse(where, f"metrics: {metrics!r} is not a path such as /metrics")
    import json

    body = value.get("body", "")
    try:
        body = body if isinstance(body, str) else json.dumps(body)
    except (TypeError, ValueError) as problem:  # a date, or what YAML calls binary
        _refuse(where, f"body: {escape(str(problem), 100)}; put such a value in quotes")
    seconds = {}
    for key, default in (("timeout", READY_S), ("check", CHECK_S), ("answer", ANSWER_S)):
        try:
            seconds[key] = parse_duration(str(value[key])) if key in value else default
        except ValueError as problem:
            _refuse(where, f"{key}: {problem}")
    if seconds["answer"] <= 0:
        _refuse(where, "answer must be more than 0 s")
    check = seconds["check"] if kind in ("port", "http") else 0.0
    contains = str(value.get("contains", ""))
    return ReadyRule(kind, expected, body, contains, seconds["timeout"], check, seconds["answer"], metrics)


def _is_url_path(text: str) -> bool:
    return text.startswith("/") and text.isascii() and " " not in text


def _refuse(where: str, problem: str) -> NoReturn:
    raise Refusal(f"{where}: {problem}", EX_CONFIG)


# ---- commands ----


def _parse_command(text: str, where: str, code: int) -> tuple[str, ...]:
    try:
        words = shlex.split(text)
    except ValueError as problem:
        raise Refusal(f"{where}: the command can't be read: {problem}", code) from problem
    if not words or "\0" in text:
        raise Refusal(f"{where}: the command is empty", code)
    return tuple(words)


def split_command(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command into flags of `stoker run` and the script with its arguments. `python X` becomes the script X."""
    words = list(command)
    if re.fullmatch(r"python(3(\.\d+)?)?", os.path.basename(words[0])) and len(words) > 1:
        flags = [] if os.path.basename(words[0]) == words[0] else ["--python", words[0]]
        if words[1] == "-m" and len(words) > 2:
            return [*flags, "--module"], words[2:]
        if not words[1].startswith("-"):
            return flags, words[1:]
        return ["--no-python"], words
    return ([] if words[0].endswith(".py") else ["--no-python"]), words


def is_stoker_train(command: Sequence[str]) -> bool:
    """Return whether a command is `stoker train STAGE ...`, which is a run and not a process inside one."""
    return os.path.basename(command[0]) == "stoker" and command[1:2] == ("train",) and len(command) > 2


def address_variable(name: str) -> str:
    """Return the variable in which other roles find a role's addresses."""
    return f"STOKER_ROLE_{name.upper().replace('-', '_')}"
