"""What a role is: its command, how many, on which GPUs, when it is ready, what happens when it ends. Pure.

`--role NAME:COUNT:COMMAND`, or a file with everything:

roles:
  server:
    command: python server.py --port ${port}
    count: 1                     # replicas, each a rank
    gpus: 1                      # for each of them; default: 1 where there are GPUs
    port: auto                   # of the first; the others have the next ones. $STOKER_PORT, ${port}
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
KINDS = ("port", "http", "file", "line", "mark")
READY_S = 600.0  # a model of 32 B from a network disk takes minutes
ANSWER_S = 30.0  # a first real answer may take as long
CHECK_S = 10.0  # between two looks at the health of a role that is ready
AUTO = -1
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_KEYS = ("command", "count", "gpus", "port", "env", "ready", "restart", "required", "after", "min_hosts", "batch")
_READY_KEYS = (*KINDS, "body", "contains", "answer", "timeout", "check", "metrics")
_MOST = 4096
_OF_JOB = {  # what a role's `stoker train` is given by its job
    "--detach", "--gpu", "--gpus", "--gpus-per-rank", "--hosts", "--max-restarts", "--min-hosts", "--name", "--nnodes", "--nproc-per-node",
    "--port-base", "--prefix", "--role", "--runs-dir",
}  # fmt: skip


@frozen
class Ready:
    """When a role is ready, and afterwards healthy."""

    kind: str
    value: str  # path, file, text or mark
    body: str = ""  # http: JSON that is posted; a server that answers a real question is there
    contains: str = ""  # http: what the answer must hold
    timeout: float = READY_S
    check: float = CHECK_S  # 0: not looked at again
    answer: float = ANSWER_S  # http: an answer that takes longer is none
    metrics: str = ""  # the path of a page that counts requests and tokens

    @property
    def words(self) -> str:
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
    name: str
    command: tuple[str, ...]
    count: int = 1
    gpus: int | None = None  # for each replica; None: one where there are GPUs
    port: int = 0  # of the first replica; 0: none, AUTO: a free one
    env: Mapping[str, str] = {}
    ready: Ready | None = None
    restart: str = NEVER
    required: bool | None = None  # the job waits for its end; None: unless it is a service
    after: tuple[str, ...] = ()
    min_hosts: int = 0  # its run continues with so many of its hosts; 0: it needs all
    batch: int = 0  # samples a step, which its replicas share; 0: not known

    @property
    def is_service(self) -> bool:
        """Return whether the job need not wait for this role, as far as its description says. Without `required`, a role with a
        ready rule is a service; others become one by what their processes do (see `RoleRun.find_service_reason`).
        """
        return self.ready is not None if self.required is None else not self.required

    @property
    def serves(self) -> bool:
        """The others ask it something while they run."""
        return self.ready is not None and self.ready.kind in ("port", "http")


def from_words(words: Sequence[str], counts: Mapping[str, int] | None = None) -> tuple[RoleSpec, ...]:
    """--role NAME:COUNT:COMMAND, once for each. `counts`: by an allocation, where the words have none."""
    found = []
    for word in words:
        parts = word.split(":", 2)
        if len(parts) == 2 and counts is not None:
            parts = [parts[0], str(counts.get(parts[0], 1)), parts[1]]
        if len(parts) < 3:
            raise Refusal(
                f"--role {word}: write NAME:COUNT:'COMMAND', such as trainer:3:'train.py --lr 1e-5'", EX_USAGE
            )
        name, count, command = parts
        if not is_digits(count) or not 1 <= int(count) <= _MOST:
            raise Refusal(f"--role {word}: {count!r} is not a number of replicas from 1 to {_MOST}", EX_USAGE)
        argv = _command(command, f"--role {name}", EX_USAGE)
        found.append(RoleSpec(name, argv, int(count), port=0 if trains(argv) else AUTO))
    return checked(found, "--role", EX_USAGE)


def from_file(path: str) -> tuple[RoleSpec, ...]:
    try:
        data = parse_yaml(read_text(path))
    except FileNotFoundError as problem:
        raise Refusal(f"no roles file {path}", EX_NOINPUT) from problem
    except OSError as problem:
        raise Refusal(f"the roles file {path} can't be read: {problem.strerror}", EX_NOINPUT) from problem
    except YamlError as problem:
        where = f", line {problem.line}" if problem.line else ""
        raise Refusal(f"{path}{where}: not YAML: {problem.problem}", EX_CONFIG) from problem
    except ValueError as problem:
        raise Refusal(f"the roles file {path} is not text: {problem}", EX_CONFIG) from problem
    roles = data.get("roles") if isinstance(data, dict) else None
    if not isinstance(roles, dict) or not roles:
        _refuse(path, "it has no key roles: with a name and settings for each role")
    for key in data:
        if key != "roles":
            _refuse(path, f"unknown key {key!r}; a roles file has one, roles")
    return checked([_role(name, about, f"{path}: {name}") for name, about in roles.items()], path, EX_CONFIG)


def _role(name: Any, about: Any, where: str) -> RoleSpec:
    where = escape(where, 200)
    if not isinstance(name, str):
        _refuse(where, "a role's name is a text; put it in quotes")
    if isinstance(about, str):
        about = {"command": about}
    if not isinstance(about, dict):
        _refuse(where, "write its settings below it, such as command: train.py")
    for key in about:
        if key not in _KEYS:
            _refuse(where, f"unknown key {key!r}{suggest(str(key), _KEYS)}")
    command = about.get("command")
    if not isinstance(command, str) or not command.strip():
        _refuse(where, "command: is missing; write the command line as one text")
    ready = _ready(about["ready"], f"{where}: ready") if "ready" in about else None
    port = _port(about.get("port", AUTO if ready is not None and ready.kind in ("port", "http") else 0), where)
    if ready is not None and ready.kind in ("port", "http") and not port:
        _refuse(where, f"ready: {ready.kind} needs a port; write port: auto, or a number")
    restart = about.get("restart", NEVER)
    if restart not in RESTARTS:
        _refuse(where, f"restart: {restart!r} is not one of {', '.join(RESTARTS)}")
    required = about.get("required", False if restart == ALWAYS else None)
    if "required" in about and not isinstance(required, bool):
        _refuse(where, f"required: {required!r} is not true or false")
    count, gpus = _number(about, "count", 1, where, 1), about.get("gpus")
    return RoleSpec(
        name,
        _command(command, where, EX_CONFIG),
        count,
        None if gpus is None else _number(about, "gpus", 0, where, 0),
        port,
        _texts(about.get("env") or {}, f"{where}: env"),
        ready,
        restart,
        required,
        _after(about["after"], where) if "after" in about else (),
        _number(about, "min_hosts", 0, where, 0),
        _number(about, "batch", 0, where, 0, 1 << 30),
    )


def _number(about: Mapping[str, Any], key: str, default: int, where: str, least: int, most: int = _MOST) -> int:
    value = about.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        _refuse(where, f"{key}: {value!r} is not a whole number from {least} to {most}")
    return value


def check_batch(spec: RoleSpec, replicas: int) -> None:
    if spec.batch % replicas:
        fits = next(number for number in range(replicas, 0, -1) if spec.batch % number == 0)
        line = f"role {spec.name}: {spec.batch} samples a step (batch) do not divide by {replicas}; {fits} would"
        raise Refusal(line, EX_CONFIG)


def _port(value: Any, where: str) -> int:
    if value in ("auto", AUTO):
        return AUTO
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        _refuse(where, f"port: {value!r} is not auto or a number up to 65535")
    return value


def _texts(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        _refuse(where, "write NAME: value below it")
    for name, text in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            _refuse(where, f"{name!r} is not a variable's name")
        if isinstance(text, (dict, list)) or text is None or "\0" in str(text):
            _refuse(where, f"{name}: write a text")
    return {name: str(text) for name, text in value.items()}


def _after(value: Any, where: str) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        _refuse(where, "after: write a list of roles, such as [server]")
    return tuple(names) or ("",)


def _ready(value: Any, where: str) -> Ready:
    if value == "port":
        value = {"port": True}
    if not isinstance(value, dict):
        _refuse(where, "write one of port: true, http: /health, file: PATH, line: TEXT, mark: READY")
    for key in value:
        if key not in _READY_KEYS:
            _refuse(where, f"unknown key {key!r}{suggest(str(key), _READY_KEYS)}")
    kinds = [kind for kind in KINDS if kind in value]
    if len(kinds) != 1:
        _refuse(where, f"give one of {', '.join(KINDS)}")
    kind = kinds[0]
    told = value[kind]
    if kind == "port":
        if told is not True:
            _refuse(where, f"port: {told!r} is not true; its number belongs to the role's own key port")
        told = ""
    elif not isinstance(told, str) or not told:
        _refuse(where, f"{kind}: {told!r} is not a text")
    if isinstance(told, str) and not told.isprintable():
        _refuse(where, f"{kind}: {told!a} has characters that can't be printed")
    if kind == "http" and (not told.startswith("/") or not told.isascii() or " " in told):
        _refuse(where, f"http: {told!r} is not a path such as /health")
    if kind != "http" and not value.keys().isdisjoint(("body", "contains", "answer")):
        _refuse(where, "body, contains and answer belong to http")
    page = value.get("metrics", "")
    if page and kind not in ("port", "http"):
        _refuse(where, "metrics belongs to port and http: a server's page that counts requests and tokens")
    if page and not (
        isinstance(page, str) and page.startswith("/") and page.isascii() and page.isprintable() and " " not in page
    ):
        _refuse(where, f"metrics: {page!r} is not a path such as /metrics")
    import json

    body = value.get("body", "")
    try:
        posted = body if isinstance(body, str) else json.dumps(body)
    except (TypeError, ValueError) as problem:  # a date, or what YAML calls binary
        _refuse(where, f"body: {escape(str(problem), 100)}; put such a value in quotes")
    times = {}
    for key, default in (("timeout", READY_S), ("check", CHECK_S), ("answer", ANSWER_S)):
        try:
            times[key] = parse_duration(str(value[key])) if key in value else default
        except ValueError as problem:
            _refuse(where, f"{key}: {problem}")
    if times["answer"] <= 0:
        _refuse(where, "answer: 0 s; no server is that fast")
    return Ready(
        kind,
        told,
        posted,
        str(value.get("contains", "")),
        times["timeout"],
        times["check"] if kind in ("port", "http") else 0.0,
        times["answer"],
        page,
    )


def _command(text: str, where: str, code: int) -> tuple[str, ...]:
    try:
        words = shlex.split(text)
    except ValueError as problem:
        raise Refusal(f"{where}: the command can't be read: {problem}", code) from problem
    if not words or "\0" in text:
        raise Refusal(f"{where}: the command is empty", code)
    return tuple(words)


def _refuse(where: str, what: str) -> NoReturn:
    raise Refusal(f"{where}: {what}", EX_CONFIG)


def checked(specs: Sequence[RoleSpec], where: str, code: int) -> tuple[RoleSpec, ...]:
    """With the roles that each waits for. Refuses two of one name, unknown ones, and an order that can't be."""
    names: list[str] = []
    made: list[RoleSpec] = []
    total = sum(spec.count for spec in specs)
    if total > _MOST:
        raise Refusal(f"{where}: the roles have {total} processes together, and {_MOST} are allowed", code)
    for spec in specs:
        if not _NAME.fullmatch(spec.name):
            rule = "a letter, then letters, digits, - and _, at most 40"
            raise Refusal(f"{where}: {escape(spec.name, 60)!r} can't be a role's name: {rule}", code)
        if spec.name in names:
            raise Refusal(f"{where}: two roles are named {spec.name}", code)
        like = next((name for name in names if variable(name) == variable(spec.name)), "")
        if like:
            raise Refusal(f"{where}: {like} and {spec.name} would both be {variable(spec.name)}: rename one", code)
        flag = next((word for word in spec.command if word.partition("=")[0].replace("_", "-") in _OF_JOB), "")
        if flag and trains(spec.command):
            raise Refusal(f"{where}: {spec.name}: leave {flag} out of its command: the job decides that", code)
        waits = spec.after or tuple(one.name for one in made if one.ready is not None)
        names.append(spec.name)
        made.append(replace(spec, after=tuple(name for name in waits if name)))
    for spec in made:
        for name in spec.after:
            if name not in names:
                raise Refusal(
                    f"{where}: {spec.name} waits for {name!r}, and there is no such role{suggest(name, names)}", code
                )
    in_order(made, where, code)
    if all(spec.required is False for spec in made):
        raise Refusal(
            f"{where}: no role is required, so the job would be over at once: set required: true for one", code
        )
    return tuple(made)


def in_order(specs: Sequence[RoleSpec], where: str, code: int) -> list[RoleSpec]:
    """Each after those that it waits for; otherwise as written."""
    left, placed = list(specs), list[RoleSpec]()
    while left:
        free = next((spec for spec in left if {*spec.after} <= {one.name for one in placed}), None)
        if free is None:
            circle = ", ".join(f"{spec.name} waits for {' and '.join(spec.after)}" for spec in left)
            raise Refusal(f"{where}: no role can start first: {circle}", code)
        placed.append(free)
        left.remove(free)
    return placed


def program(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """(flags of `stoker run`, script and its arguments). `python X` is X, started as `stoker run` starts a script."""
    words = list(command)
    if re.fullmatch(r"python(3(\.\d+)?)?", os.path.basename(words[0])) and len(words) > 1:
        flags = [] if os.path.basename(words[0]) == words[0] else ["--python", words[0]]
        if words[1] == "-m" and len(words) > 2:
            return [*flags, "--module"], words[2:]
        if not words[1].startswith("-"):
            return flags, words[1:]
        return ["--no-python"], words
    return ([] if words[0].endswith(".py") else ["--no-python"]), words


def trains(command: Sequence[str]) -> bool:
    """`stoker train STAGE ...`: the role is that run, and no process that starts one."""
    return os.path.basename(command[0]) == "stoker" and command[1:2] == ("train",) and len(command) > 2


def variable(name: str) -> str:
    """Where the other roles find its addresses."""
    return f"STOKER_ROLE_{name.upper().replace('-', '_')}"
