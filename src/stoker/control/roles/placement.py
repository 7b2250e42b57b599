"""Where each role's processes go: GPUs are dealt out in the order of the roles, each once; those on CPUs are spread over the
hosts. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stoker.contract.errors import EX_UNAVAILABLE, EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.units import plural
from stoker.control.roles.role import RoleSpec


@frozen
class GpuSlot:
    """A GPU that can be used."""

    uuid: str
    label: str
    index: int
    host: str = ""  # "" for this machine
    name: str | None = None  # the model


@frozen
class RankSlot:
    """One process's place."""

    host: str
    cards: tuple[GpuSlot, ...] = ()


def deal(
    specs: Sequence[RoleSpec],
    cards: Sequence[GpuSlot],
    share: Mapping[str, str] | None = None,
    hosts: Sequence[str] = ("",),
) -> dict[str, tuple[RankSlot, ...]]:
    """`share`: role -> another whose GPUs it uses, too. `hosts`: in rank order."""
    share = share or {}
    wanted = {spec.name: spec.count * each(spec, cards) for spec in specs}
    for name, other in share.items():
        if wanted[name] != wanted[other]:
            raise Refusal(f"roles {name} and {other} share GPUs and want {wanted[name]} and {wanted[other]}", EX_USAGE)
    left = {host: [card for card in cards if card.host == host] for host in hosts}
    found: dict[str, tuple[RankSlot, ...]] = {}
    spread = 0
    for spec in specs:
        need = each(spec, cards)
        if spec.name in share:
            continue
        if not need:
            chosen = sorted(hosts.index(hosts[(spread + number) % len(hosts)]) for number in range(spec.count))
            spread += spec.count
            found[spec.name] = tuple(RankSlot(hosts[at]) for at in chosen)
            continue
        seats: list[RankSlot] = []
        for host in hosts:
            while len(seats) < spec.count and len(left[host]) >= need:
                seats.append(RankSlot(host, tuple(left[host][:need])))
                del left[host][:need]
        if len(seats) < spec.count:
            raise _too_few({name: number for name, number in wanted.items() if name not in share}, cards, hosts)
        found[spec.name] = tuple(seats)
    for name, other in share.items():
        mine = [card for seat in found[other] for card in seat.cards]
        spec = next(spec for spec in specs if spec.name == name)
        need = each(spec, cards)
        found[name] = tuple(
            RankSlot(mine[at].host if mine else "", tuple(mine[at : at + need]))
            for at in range(0, len(mine), need or 1)
        )
    for spec in specs:
        there = len({seat.host for seat in found[spec.name]})
        if spec.min_hosts > there:
            line = f"role {spec.name}: min_hosts: {spec.min_hosts}, and its processes are on {plural(there, 'host')}"
            raise Refusal(f"{line}; raise its count, or leave min_hosts out", EX_USAGE)
    return {spec.name: found[spec.name] for spec in specs}


def moved(
    spec: RoleSpec, dealt: Mapping[str, Sequence[RankSlot]], cards: Sequence[GpuSlot], hosts: Sequence[str]
) -> tuple[RankSlot, ...] | None:
    """Its seats, with those on other hosts than `hosts` put on these: on GPUs that no role has, or where the fewest processes
    are. None: they do not fit.
    """
    seats = [seat for seat in dealt[spec.name] if seat.host in hosts]
    need = max(len(seat.cards) for seat in dealt[spec.name])
    taken = {(card.host, card.uuid) for mine in dealt.values() for seat in mine for card in seat.cards}
    free = {host: [card for card in cards if card.host == host and (host, card.uuid) not in taken] for host in hosts}
    load = Counter(seat.host for mine in dealt.values() for seat in mine)
    while len(seats) < spec.count:
        able = [host for host in hosts if len(free[host]) >= need]
        if not able:
            return None
        host = min(able, key=lambda one: load[one])
        seats.append(RankSlot(host, tuple(free[host][:need])))
        del free[host][:need]
        load[host] += 1
    return tuple(sorted(seats, key=lambda seat: hosts.index(seat.host)))


def _too_few(wanted: Mapping[str, int], cards: Sequence[GpuSlot], hosts: Sequence[str]) -> Refusal:
    total = sum(wanted.values())
    parts = ", ".join(f"{name} {number}" for name, number in wanted.items() if number)
    line = f"the roles need {plural(total, 'GPU')} ({parts}) and {len(cards)} can be used"
    if total <= len(cards) and len(hosts) > 1:
        line = f"the roles need {plural(total, 'GPU')} ({parts}), those of a process on one host: {len(cards)} on {len(hosts)} hosts do not divide so"
    advice = "lower a count, or gpus: 0 in the roles file for a role that runs on the CPU"
    return Refusal(f"{line}; {advice}", EX_UNAVAILABLE, cause="gpu.too-few")


def each(spec: RoleSpec, cards: Sequence[GpuSlot]) -> int:
    """GPUs of one replica."""
    if spec.gpus is None:
        return 1 if cards else 0
    return spec.gpus


def numbered(seats: Sequence[RankSlot]) -> list[tuple[RankSlot, int]]:
    """With its number among the role's processes on its host."""
    there: dict[str, int] = {}
    found = []
    for seat in seats:
        found.append((seat, there.get(seat.host, 0)))
        there[seat.host] = there.get(seat.host, 0) + 1
    return found
