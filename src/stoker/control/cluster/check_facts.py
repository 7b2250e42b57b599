"""What `stoker cluster check` measures: facts about each host, each ordered pair of hosts, and an all-reduce."""

from __future__ import annotations

from typing import Any

from stoker.contract.frozen import as_json, frozen
from stoker.control.machine.examination import Examination, TorchBuild

SCHEMA = 1


@frozen
class MtuHole:
    """An MTU black hole: full-size packets are lost on the way from this machine to a host."""

    passes: int  # bytes of the largest packet that arrives, among the sizes tried


@frozen
class HostFacts:
    name: str
    error: str = ""  # why it could not be probed; the other facts are then unknown
    fix: str = ""
    hole: MtuHole | None = None  # set if an MTU black hole is the reason for `error`
    address: str | None = None  # where the other hosts reach it
    interface: str | None = None  # the one with the route to them
    mtu: int | None = None
    speed: int | None = None  # link speed in Mbit/s, as the driver reports it
    physical: bool = False  # False: the interface is virtual, so `speed` means nothing
    hostname: str | None = None
    resolves: dict[str, tuple[str, ...]] | None = None  # hostname -> the addresses it resolves to on this host
    skew: float | None = None  # seconds that its clock is ahead of this machine's
    skew_error: float | None = None
    python: str | None = None  # version of the ranks' Python
    torch: TorchBuild | None = None
    examination: Examination | None = None
    files: dict[str, str] | None = None  # label of a file that must match -> its digest on this host, or "" if missing

    @property
    def torch_build(self) -> str:
        """Return what must match between hosts (the versions of torch, its CUDA and its NCCL), or "" without torch."""
        if self.torch is None or not self.torch.version:
            return ""
        cuda = f"CUDA {self.torch.cuda}" if self.torch.cuda else ""
        nccl = f"NCCL {self.torch.nccl}" if self.torch.nccl else ""
        return ", ".join(part for part in (self.torch.version, cuda, nccl) if part)


@frozen
class PairFacts:
    """How one host (source) reaches another (target)."""

    source: str
    target: str
    ports: dict[int, str]  # port -> "" if a connection succeeded, else why not
    rtt: float | None = None  # seconds
    segment: int | None = None  # bytes in a full TCP segment
    big: bool | None = None  # whether full segments arrive
    passes: int | None = None  # bytes of the largest packet that arrives, if full segments don't
    rate: float | None = None  # bytes per second over one connection
    error: str = ""  # why the source could not be tested

    @property
    def closed(self) -> dict[int, str]:
        """Return the ports without a connection, and why."""
        return {port: why for port, why in self.ports.items() if why}


@frozen
class AllReduceFacts:
    """An all-reduce with the hosts' own torch, one rank per host."""

    world: int  # number of ranks
    backend: str = ""
    bytes: int = 0
    times: tuple[float, ...] = ()  # seconds of each repetition
    error: str = ""

    @property
    def bus(self) -> float | None:
        """Return the bus bandwidth in bytes per second: 2(n-1)/n of the message size divided by the median time."""
        if not self.times:
            return None
        return 2 * (self.world - 1) / self.world * self.bytes / sorted(self.times)[len(self.times) // 2]


@frozen
class ClusterFacts:
    hosts: tuple[HostFacts, ...]
    pairs: tuple[PairFacts, ...] = ()
    reduce: AllReduceFacts | None = None  # None: it was not tried
    store_port: int = 0  # the port on the first host that was tested for torch's store
    program: tuple[str, ...] = ()  # a line for each host whose script or package differs
    quick: bool = False  # --quick: no rates were measured and no all-reduce was tried
    schema: int = SCHEMA

    @property
    def reachable(self) -> tuple[HostFacts, ...]:
        """Return the hosts that could be probed."""
        return tuple(host for host in self.hosts if not host.error)

    def pair(self, source: str, target: str) -> PairFacts | None:
        return next((pair for pair in self.pairs if (pair.source, pair.target) == (source, target)), None)

    def to_json(self) -> dict[str, Any]:
        return dict(as_json(self))


def format_bandwidth(bytes_per_second: float) -> str:
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
