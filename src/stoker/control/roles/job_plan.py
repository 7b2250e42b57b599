"""Plans a multi-role job: its resources, ports and hosts files, and the checks before anything starts."""

from __future__ import annotations

import socket
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.contract.errors import EX_CONFIG, EX_DATAERR, EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen, pick_fields, replace
from stoker.contract.units import plural
from stoker.control.cluster.hosts import NO_GPUS, Hosts
from stoker.control.launch.children import stoker_command
from stoker.control.machine.model import Gpu
from stoker.control.plan import request
from stoker.control.plan.options import RunOptions
from stoker.control.plan.request import Request
from stoker.control.plan.run_changes import digest_contents
from stoker.control.plan.run_plan import RankPlan, RolePlan, RunPlan
from stoker.control.roles.placement import GpuSlot, RankSlot, number_on_hosts
from stoker.control.roles.role import AUTO, RoleSpec, is_stoker_train, split_command

MAX_PORT = 65535


@frozen
class JobPlan:
    """The roles of a job. `share` maps a role to another role whose GPUs it also uses."""

    specs: tuple[RoleSpec, ...]
    share: Mapping[str, str] = {}


@frozen
class JobResources:
    """The GPUs and hosts that a job can use."""

    gpus: tuple[GpuSlot, ...]
    lines: tuple[str, ...]  # describe the GPUs to the user
    hosts: tuple[str, ...] = ("",)  # in rank order
    cluster: Hosts | None = None  # None: this machine


# ---- programs ----


def check_programs(specs: Sequence[RoleSpec], options: RunOptions, here: bool) -> None:
    """Refuse a program that can't start, before its server has loaded a model. `here`: the roles run on this machine."""
    for spec in specs:
        if is_stoker_train(spec.command):
            if spec.after and here:
                _check_training(spec)
            continue
        try:
            request.rank_command(_role_request(spec, options))
        except Refusal as refusal:
            line, *more = refusal.line.removeprefix("--no-python: ").split("\n")
            raise Refusal(f"role {spec.name}: {line}", refusal.code, cause=refusal.cause, more=more) from refusal


def _check_training(spec: RoleSpec) -> None:
    """Refuse wrong flags and settings of a training that waits for other roles, which may create missing files."""
    words = [*spec.command[1:], "--nproc-per-node", str(spec.count), "--dry-run"]
    done = subprocess.run(stoker_command(words), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode in (EX_USAGE, EX_DATAERR, EX_CONFIG):
        messages = [line.removeprefix("stoker: ") for line in done.stderr.splitlines() if line.startswith("stoker: ")]
        message = messages[-1] if messages else f"its dry run ended with exit code {done.returncode}"
        raise Refusal(f"role {spec.name}: {message}", done.returncode)


def digest_programs(specs: Sequence[RoleSpec], options: RunOptions) -> tuple[tuple[str, str], ...]:
    """Return the digests of the roles' programs. A `stoker train` compares its own inputs when it starts."""
    requests = (_role_request(spec, options) for spec in specs if not is_stoker_train(spec.command))
    return tuple(digest for role_request in requests for digest in digest_contents(role_request))


def _role_request(spec: RoleSpec, options: RunOptions) -> Request:
    """Return a role's command as a request. `options` are those of the job."""
    flags, words = split_command(spec.command)
    python = flags[flags.index("--python") + 1] if "--python" in flags else options.python
    role_options = replace(options, no_python="--no-python" in flags, module="--module" in flags, python=python)
    return Request(role_options, words[0], tuple(words[1:]), frozenset())


# ---- the plan for the record and the user ----


def make_run_plan(
    specs: Sequence[RoleSpec], slots: Mapping[str, Sequence[RankSlot]], lines: Sequence[str], hosts: Sequence[str]
) -> RunPlan:
    """Return the plan of all roles' ranks, numbered through the job."""
    ranks: list[RankPlan] = []
    roles = []
    for spec in specs:
        local_world_sizes = Counter(slot.host for slot in slots[spec.name])
        for role_rank, (slot, local_rank) in enumerate(number_on_hosts(slots[spec.name])):
            gpus = [Gpu(gpu.index, gpu.uuid, gpu.name) for gpu in slot.gpus]
            label = (f"{slot.host}/" if slot.host else "") + (gpus[0].label if gpus else f"CPU{local_rank}")
            ranks.append(
                RankPlan(
                    len(ranks),
                    local_rank,
                    local_world_sizes[slot.host],
                    hosts.index(slot.host),
                    slot.host,
                    gpus[0] if gpus else None,
                    label,
                    spec.name,
                    role_rank,
                    tuple(gpus[1:]),
                )
            )
        shim = "--no-python" not in split_command(spec.command)[0]
        roles.append(RolePlan(spec.name, spec.command, spec.count, shim, 0, spec.env))
    return RunPlan(tuple(ranks), tuple(roles), tuple(hosts), False, False, {}, tuple(lines), {})


def describe_roles(
    specs: Sequence[RoleSpec], slots: Mapping[str, Sequence[RankSlot]], ports: Mapping[str, int]
) -> list[str]:
    """Return a line for each role: its ranks, places and ports, and which roles it waits for."""
    lines = []
    for spec in specs:
        role_slots = slots[spec.name]
        places = ", ".join(gpu.label for slot in role_slots for gpu in slot.gpus)
        places = places or ", ".join(dict.fromkeys(slot.host for slot in role_slots if slot.host)) or "CPU"
        line = f"role {spec.name}: {plural(spec.count, 'rank')} on {places}"
        if spec.name in ports:
            first = ports[spec.name]
            last = first + max(number for _, number in number_on_hosts(role_slots))
            line += f", port {first}" if first == last else f", ports {first}-{last}"
        line += f", after {' and '.join(spec.after)}" if spec.after else ""
        lines.append(line)
    return lines


def make_hosts_file(cluster: Hosts, slots: Sequence[RankSlot]) -> dict[str, Any]:
    """Return the content of a role's hosts file, with its share of the GPUs.

    The variables of the job's own hosts file are left out: they may hold secrets, and reach the role in another way.
    """
    entries = []
    for host in cluster.hosts:
        host_slots = [slot for slot in slots if slot.host == host.name]
        if not host_slots:
            continue
        fields = pick_fields(host, "user", "port", "identity", "python", "workdir", "interface", "address")
        entry = {"host": host.target, **{key: value for key, value in fields.items() if value is not None}}
        gpus = ",".join(gpu.uuid for slot in host_slots for gpu in slot.gpus) or NO_GPUS
        entries.append({**entry, "slots": len(host_slots), "local": host.here, "gpus": gpus})
    top = {
        "ssh_config": cluster.ssh_config,
        "ssh_options": list(cluster.ssh_options),
        "scheduler": cluster.scheduler or None,
    }
    return {**{key: value for key, value in top.items() if value}, "hosts": entries}


# ---- ports ----


def choose_ports(specs: Sequence[RoleSpec], here: bool = True) -> dict[str, int]:
    """Return the port of each role's first replica; its other replicas have the next ones.

    The ports are free now, but may be taken before the role listens. On other hosts (not `here`) they are not checked.
    """
    ports: dict[str, int] = {}
    used: set[int] = set()
    for spec in specs:
        if not spec.port:
            continue
        first = _find_free_ports(spec.count, used) if spec.port == AUTO else spec.port
        role_ports = range(first, first + spec.count)
        if role_ports[-1] > MAX_PORT or not used.isdisjoint(role_ports):
            raise Refusal(
                f"role {spec.name}: ports {first} to {role_ports[-1]} are above {MAX_PORT} or used by another role",
                EX_USAGE,
            )
        busy = next((port for port in role_ports if here and not _is_free(port)), None)
        if busy is not None:
            line = f"role {spec.name}: port {busy} is in use by another program; write port: auto for a free one"
            raise Refusal(line, EX_UNAVAILABLE, cause="launch.port-in-use")
        used.update(role_ports)
        ports[spec.name] = first
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # allows a port that a server had until just now
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _find_free_ports(count: int, used: set[int]) -> int:
    """Return the first of `count` free ports in a row."""
    for _ in range(100):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            first = int(listener.getsockname()[1])
        ports = range(first, first + count)
        if ports[-1] <= MAX_PORT and used.isdisjoint(ports) and all(map(_is_free, ports)):
            return first
    raise Refusal(f"could not find {count} free ports in a row", EX_UNAVAILABLE, cause="launch.port")
