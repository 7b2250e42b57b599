"""A machine, as observed at one moment. A field the hardware doesn't have is None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.contract.frozen import as_json, frozen
from stoker.contract.typed_values import Real, read_recorded

SCHEMA = 1


@frozen
class Holder:
    """A process with a context on a GPU. In a container its pid may be the host's: no command and user then."""

    pid: int
    memory: int | None = None
    command: str | None = None
    user: str | None = None
    run: str | None = None  # Stoker's run tag, if it has one
    age: float | None = None  # seconds


@frozen
class Gpu:
    index: int  # as nvidia-smi shows it
    uuid: str
    name: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    utilization: int | None = None  # percent
    compute_mode: str | None = None
    pci: str | None = None
    holders: tuple[Holder, ...] | None = None
    mig: int | None = None  # instance number on its parent card; None for a whole card
    mig_parent: str | None = None
    error: str | None = None  # NVML refused to talk about this card at all

    @property
    def memory_free(self) -> int | None:
        if self.memory_total is None or self.memory_used is None:
            return None
        return self.memory_total - self.memory_used

    @property
    def label(self) -> str:
        return f"GPU{self.index}" if self.mig is None else f"GPU{self.index}.{self.mig}"


@frozen
class Machine:
    hostname: str
    cores: int
    memory_total: int
    memory_available: int
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    gpu_error: str | None = None  # a driver is there but does not answer
    cgroup_limit: int | None = None
    max_processes: int | None = None
    max_files: int | None = None
    python: str | None = None
    platform: str | None = None
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return dict(as_json(self))


def machine_from_json(data: Any) -> Machine:
    """Return the machine that `to_json` wrote. Raises ValueError if it is none."""
    return read_recorded(Machine, data, SCHEMA)


# ---- gauges: what changes from second to second (machine/gauges.py reads them). Units are bytes, seconds, watts, degrees
# Celsius, hertz and shares from 0 to 1; rates are per second, over the time since the reading before ----

OK, OFFLINE = "OK", "OFFLINE"


@frozen
class GpuGauges:
    index: int  # as nvidia-smi shows it
    uuid: str
    name: str | None = None
    mig: int | None = None
    mig_parent: str | None = None
    pci: str | None = None
    host: str = ""
    utilization: Real | None = None  # share of the time in which a kernel ran
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: int | None = None
    temperature_slowdown: int | None = None  # where the driver begins to lower the clock
    power: Real | None = None
    power_limit: Real | None = None
    clock: Real | None = None  # of the multiprocessors
    clock_max: Real | None = None
    memory_clock: Real | None = None
    throttle: tuple[str, ...] | None = None  # what holds the clock down now, in words; (): nothing
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    ecc_corrected: int | None = None  # since the driver was loaded
    ecc_uncorrected: int | None = None
    energy: Real | None = None  # joules since the driver was loaded
    xids: tuple[tuple[Real, int], ...] = ()  # (when it was seen, number), newest last
    processes: tuple[Holder, ...] | None = None
    error: str | None = None  # NVML refused to talk about this card
    # name of a gauge -> its newest values, oldest first, evenly spaced; filled in by who keeps them
    recent: Mapping[str, tuple[Real | None, ...]] = {}

    @property
    def label(self) -> str:
        return f"GPU{self.index}" if self.mig is None else f"GPU{self.index}.{self.mig}"


@frozen
class HostGauges:
    name: str
    time: float = 0.0  # of this reading, by the host's own clock
    state: str = OK  # or OFFLINE, and why
    reason: str = ""
    cores: int | None = None
    load: tuple[float, ...] | None = None  # processes that run or want to, over 1, 5 and 15 minutes
    cpu: Real | None = None  # share of all cores at work
    memory_total: int | None = None  # this process may count on: of the cgroup where it is tighter
    memory_available: int | None = None
    swap_used: int | None = None
    disk_path: str | None = None
    disk_free: int | None = None
    disk_total: int | None = None
    disk_read: Real | None = None
    disk_written: Real | None = None
    received: Real | None = None  # over all interfaces but loopback
    sent: Real | None = None
    link: Real | None = None  # bytes a second of the fastest interface that is up
    # Share of the last 10 s in which some process waited for it (the kernel's pressure stall information).
    pressure_cpu: Real | None = None
    pressure_io: Real | None = None
    pressure_memory: Real | None = None
    driver: str | None = None
    gpu_error: str | None = None  # a driver is there but does not answer
    recent: Mapping[str, tuple[Real | None, ...]] = {}
