"""Who sits where in a job under way, and where else once a host is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stoker.contract.errors import Refusal
from stoker.contract.units import plural
from stoker.control.roles.placement import GpuSlot, RankSlot, deal, moved
from stoker.control.roles.role import RoleSpec


class GpuSharing:
    """`share`: role -> another whose GPUs it uses, too. `hosts`: in rank order."""

    def __init__(
        self,
        specs: Sequence[RoleSpec],
        dealt: Mapping[str, tuple[RankSlot, ...]],
        cards: Sequence[GpuSlot],
        hosts: Sequence[str],
        share: Mapping[str, str],
        write: Callable[[RoleSpec, tuple[RankSlot, ...]], object],
    ) -> None:
        """`write`: what a role's next start reads its hosts from."""
        self.seats = dict(dealt)
        self._specs, self._cards, self._all, self._share, self._write = specs, cards, hosts, share, write
        self._lost: set[str] = set()

    def lose(self, host: str) -> None:
        self._lost.add(host)

    def regain(self, name: str) -> None:
        """The hosts of a role that ran there again."""
        self._lost -= {seat.host for seat in self.seats[name]}

    @property
    def _hosts(self) -> list[str]:
        return [host for host in self._all if host not in self._lost]

    def sits_on_lost(self, name: str) -> bool:
        return any(seat.host not in self._hosts for seat in self.seats[name])

    def move(self, spec: RoleSpec) -> str:
        """Its processes on lost hosts go elsewhere; the others stay. Returns why they can't; empty: they can."""
        cards = [card for card in self._cards if card.host in self._hosts]
        seats = moved(spec, self.seats, cards, self._hosts)
        if seats is None:
            left = plural(len(self._hosts), "other host")
            return f"none of the {left} has free GPUs for it" if self._hosts else "there is no other host"
        self._take(spec, seats)
        return ""

    def move_all(self) -> str:
        """All roles anew, on the hosts that are left."""
        cards = [card for card in self._cards if card.host in self._hosts]
        try:
            dealt = deal(self._specs, cards, self._share, self._hosts) if self._hosts else None
        except Refusal as refusal:
            return refusal.line
        if dealt is None:
            return "there is no other host"
        for spec in self._specs:
            self._take(spec, dealt[spec.name])
        return ""

    def _take(self, spec: RoleSpec, seats: tuple[RankSlot, ...]) -> None:
        self.seats[spec.name] = seats
        self._write(spec, seats)
