"""What a check of several hosts found out: each host, each ordered pair, all together. Frozen, and as JSON."""

from __future__ import annotations

from typing import Any

from stoker.contract.frozen import as_json, frozen
from stoker.control.cluster.path_mtu import MtuHole
from stoker.control.machine.examination import Examination, Torch

SCHEMA = 1


@frozen
class OneHost:
    name: str
    error: str = ""  # why it could not be asked; the rest is then unknown
    fix: str = ""
    hole: MtuHole | None = None  # it could not be asked because full-size packets vanish on the way to it
    address: str | None = None  # where the others reach it
    interface: str | None = None  # the one that leads to them
    mtu: int | None = None
    speed: int | None = None  # Mbit/s, as the driver states it
    physical: bool = False  # a virtual interface states what it likes
    hostname: str | None = None
    resolves: dict[str, tuple[str, ...]] | None = None  # hostname -> the addresses it has here
    skew: float | None = None  # seconds its clock is ahead of ours
    skew_error: float | None = None
    python: str | None = None  # of the ranks
    torch: Torch | None = None
    examination: Examination | None = None
    files: dict[str, str] | None = None  # what must be the same everywhere -> its digest; "" where it is not there


@frozen
class Pair:
    """What one host reaches of another."""

    source: str
    target: str
    ports: dict[int, str]  # "" where it answers, else how it does not
    rtt: float | None = None  # seconds
    segment: int | None = None  # bytes in a full TCP segment
    big: bool | None = None  # do full segments arrive
    passes: int | None = None  # the largest packet that does, where full ones don't
    rate: float | None = None  # bytes a second over one connection
    error: str = ""  # the source could not take part

    @property
    def closed(self) -> dict[int, str]:
        return {port: why for port, why in self.ports.items() if why}


@frozen
class Reduce:
    """A short all-reduce with the hosts' own torch, one rank a host."""

    world: int
    backend: str = ""
    bytes: int = 0
    times: tuple[float, ...] = ()
    error: str = ""

    @property
    def bus(self) -> float | None:
        """Bytes a second each link carries: 2(n-1)/n of the message, in the median time."""
        if not self.times:
            return None
        return 2 * (self.world - 1) / self.world * self.bytes / sorted(self.times)[len(self.times) // 2]


@frozen
class Facts:
    hosts: tuple[OneHost, ...]
    pairs: tuple[Pair, ...] = ()
    reduce: Reduce | None = None
    store_port: int = 0  # the first port of each pair's two
    program: tuple[str, ...] = ()  # how script and package differ, a line a host
    quick: bool = False  # nothing was measured
    schema: int = SCHEMA

    @property
    def there(self) -> tuple[OneHost, ...]:
        return tuple(host for host in self.hosts if not host.error)

    def pair(self, source: str, target: str) -> Pair | None:
        return next((pair for pair in self.pairs if (pair.source, pair.target) == (source, target)), None)

    def to_json(self) -> dict[str, Any]:
        return dict(as_json(self))
