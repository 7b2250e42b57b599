"""Places the processes of each role on hosts and GPUs, and moves them after a host is lost. Pure.

GPUs are assigned in the order of the roles, each once. Processes without GPUs are spread over the hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.units import plural
from stoker.control.roles.role import RoleSpec


@frozen
class GpuSlot:
    """A GPU that the job can use."""

    uuid: str
    label: str
    index: int
    host: str = ""  # "" for this machine
    name: str | None = None  # of the model


@frozen
class RankSlot:
    """The host and GPUs of one process."""

    host: str
    gpus: tuple[GpuSlot, ...] = ()


def place_roles(
    specs: Sequence[RoleSpec],
    gpus: Sequence[GpuSlot],
    share: Mapping[str, str] | None = None,
    hosts: Sequence[str] = ("",),
) -> dict[str, tuple[RankSlot, ...]]:
    """Return the slots of each role. `share` maps a role to another whose GPUs it also uses. `hosts` are in rank order."""
    share = share or {}
    wanted = {spec.name: spec.count * gpus_per_replica(spec, gpus) for spec in specs}
    for name, other in share.items():
        if wanted[name] != wanted[other]:
            raise Refusal(f"roles {name} and {other} share GPUs, but need {wanted[name]} and {wanted[other]}", EX_USAGE)
    free = {host: [gpu for gpu in gpus if gpu.host == host] for host in hosts}
    slots: dict[str, tuple[RankSlot, ...]] = {}
    cpu_processes = 0
    for spec in specs:
        if spec.name in share:
            continue
        needed = gpus_per_replica(spec, gpus)
        if not needed:
            indices = sorted((cpu_processes + number) % len(hosts) for number in range(spec.count))
            slots[spec.name] = tuple(RankSlot(hosts[index]) for index in indices)
            cpu_processes += spec.count
            continue
        placed: list[RankSlot] = []
        for host in hosts:
            while len(placed) < spec.count and len(free[host]) >= needed:
                placed.append(RankSlot(host, tuple(free[host][:needed])))
                del free[host][:needed]
        if len(placed) < spec.count:
            raise _too_few({name: number for name, number in wanted.items() if name not in share}, gpus, hosts)
        slots[spec.name] = tuple(placed)
    for spec in specs:
        if spec.name in share:
            shared = [gpu for slot in slots[share[spec.name]] for gpu in slot.gpus]
            needed = gpus_per_replica(spec, gpus)
            slots[spec.name] = tuple(
                RankSlot(shared[first].host, tuple(shared[first : first + needed]))
                for first in range(0, len(shared), needed or 1)
            )
    for spec in specs:
        used_hosts = len({slot.host for slot in slots[spec.name]})
        if spec.min_hosts > used_hosts:
            line = f"role {spec.name}: min_hosts is {spec.min_hosts}, but its processes are on {plural(used_hosts, 'host')}"
            raise Refusal(f"{line}; raise its count, or leave min_hosts out", EX_USAGE)
    return {spec.name: slots[spec.name] for spec in specs}


def move_role(
    spec: RoleSpec, slots: Mapping[str, Sequence[RankSlot]], gpus: Sequence[GpuSlot], hosts: Sequence[str]
) -> tuple[RankSlot, ...] | None:
    """Return new slots for a role on `hosts` only, or None if it does not fit.

    Processes on these hosts stay. The others go to GPUs that no role has, or to the hosts with the fewest processes.
    """
    placed = [slot for slot in slots[spec.name] if slot.host in hosts]
    needed = max(len(slot.gpus) for slot in slots[spec.name])
    taken = {(gpu.host, gpu.uuid) for role_slots in slots.values() for slot in role_slots for gpu in slot.gpus}
    free = {host: [gpu for gpu in gpus if gpu.host == host and (host, gpu.uuid) not in taken] for host in hosts}
    processes = Counter(slot.host for role_slots in slots.values() for slot in role_slots)
    while len(placed) < spec.count:
        able = [host for host in hosts if len(free[host]) >= needed]
        if not able:
            return None
        host = min(able, key=lambda name: processes[name])
        placed.append(RankSlot(host, tuple(free[host][:needed])))
        del free[host][:needed]
        processes[host] += 1
    return tuple(sorted(placed, key=lambda slot: hosts.index(slot.host)))


class Placement:
    """The slots of a running job's roles. Moves roles away from lost hosts."""

    def __init__(
        self,
        specs: Sequence[RoleSpec],
        slots: Mapping[str, tuple[RankSlot, ...]],
        gpus: Sequence[GpuSlot],
        hosts: Sequence[str],
        share: Mapping[str, str],
        on_move: Callable[[RoleSpec, tuple[RankSlot, ...]], object],
    ) -> None:
        """`on_move` is called with the new slots of a role before its next start."""
        self.slots = dict(slots)
        self._specs = specs
        self._gpus = gpus
        self._all_hosts = hosts
        self._share = share
        self._on_move = on_move
        self._lost_hosts: set[str] = set()

    @property
    def _hosts(self) -> list[str]:
        return [host for host in self._all_hosts if host not in self._lost_hosts]

    @property
    def _usable_gpus(self) -> list[GpuSlot]:
        return [gpu for gpu in self._gpus if gpu.host in self._hosts]

    def lose(self, host: str) -> None:
        self._lost_hosts.add(host)

    def regain(self, role: str) -> None:
        """Count the hosts of a role as present, because it has run there again."""
        self._lost_hosts -= {slot.host for slot in self.slots[role]}

    def is_on_lost_host(self, role: str) -> bool:
        return any(slot.host not in self._hosts for slot in self.slots[role])

    def move(self, spec: RoleSpec) -> str:
        """Move a role's processes from lost hosts to others. Returns why it can't, or ""."""
        slots = move_role(spec, self.slots, self._usable_gpus, self._hosts)
        if slots is None:
            others = plural(len(self._hosts), "other host")
            return f"none of the {others} has free GPUs for it" if self._hosts else "there is no other host"
        self._set(spec, slots)
        return ""

    def move_all(self) -> str:
        """Place all roles on the remaining hosts. Returns why it can't, or ""."""
        if not self._hosts:
            return "there is no other host"
        try:
            slots = place_roles(self._specs, self._usable_gpus, self._share, self._hosts)
        except Refusal as refusal:
            return refusal.line
        for spec in self._specs:
            self._set(spec, slots[spec.name])
        return ""

    def _set(self, spec: RoleSpec, slots: tuple[RankSlot, ...]) -> None:
        self.slots[spec.name] = slots
        self._on_move(spec, slots)


def gpus_per_replica(spec: RoleSpec, gpus: Sequence[GpuSlot]) -> int:
    if spec.gpus is None:
        return 1 if gpus else 0
    return spec.gpus


def number_on_hosts(slots: Sequence[RankSlot]) -> list[tuple[RankSlot, int]]:
    """Return each slot with its number among the role's processes on its host."""
    counts: Counter[str] = Counter()
    numbered = []
    for slot in slots:
        numbered.append((slot, counts[slot.host]))
        counts[slot.host] += 1
    return numbered


def _too_few(wanted: Mapping[str, int], gpus: Sequence[GpuSlot], hosts: Sequence[str]) -> Refusal:
    total = sum(wanted.values())
    parts = ", ".join(f"{name} {number}" for name, number in wanted.items() if number)
    line = f"the roles need {plural(total, 'GPU')} ({parts}), but {len(gpus)} can be used"
    if total <= len(gpus) and len(hosts) > 1:
        line = f"the roles need {plural(total, 'GPU')} ({parts}), and each process needs its GPUs on one host: "
        line += f"the {len(gpus)} GPUs of the {len(hosts)} hosts can't be divided like that"
    advice = "lower a count, or set gpus: 0 in the roles file for a role that runs on the CPU"
    return Refusal(f"{line}; {advice}", EX_UNAVAILABLE, cause="gpu.too-few")
