"""A machine as observed at one moment, and its gauges. A field that the hardware doesn't have is None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.contract.frozen import as_json, frozen
from stoker.contract.typed_values import Real, read_recorded

SCHEMA = 1


@frozen
class Holder:
    """A process with a context on a GPU. In a container its pid may be the host's; then it has no command and user."""

    pid: int
    memory: int | None = None
    command: str | None = None
    user: str | None = None
    run: str | None = None  # id of the Stoker run it belongs to
    age: float | None = None  # seconds


@frozen
class Gpu:
    """A GPU, or a MIG instance of one."""

    index: int  # as nvidia-smi shows it
    uuid: str
    name: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    utilization: int | None = None  # percent
    compute_mode: str | None = None
    pci: str | None = None
    holders: tuple[Holder, ...] | None = None
    mig: int | None = None  # instance number on its parent GPU; None for a whole GPU
    mig_parent: str | None = None
    error: str | None = None  # why NVML can't read this GPU at all

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
    """A host and its GPUs."""

    hostname: str
    cores: int
    memory_total: int
    memory_available: int
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    gpu_error: str | None = None  # why the installed driver can't be used
    cgroup_limit: int | None = None  # bytes
    max_processes: int | None = None
    max_files: int | None = None
    python: str | None = None
    platform: str | None = None
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return dict(as_json(self))


def machine_from_json(data: Any) -> Machine:
    """Return the machine that `to_json` wrote. Raises ValueError for any other value."""
    return read_recorded(Machine, data, SCHEMA)


# ---- gauges, which change from second to second; machine/gauges.py reads them ----
#
# Units are bytes, seconds, watts, degrees Celsius, hertz, and shares from 0 to 1. Rates are per second, over the time since
# the last reading.

OK, OFFLINE = "OK", "OFFLINE"


@frozen
class GpuGauges:
    """The gauges of one GPU."""

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
    temperature_slowdown: int | None = None  # at which the driver begins to lower the clock
    power: Real | None = None
    power_limit: Real | None = None
    clock: Real | None = None  # of the streaming multiprocessors
    clock_max: Real | None = None
    memory_clock: Real | None = None
    throttle: tuple[str, ...] | None = None  # the reasons for a lowered clock, in words
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    ecc_corrected: int | None = None  # since the driver was loaded
    ecc_uncorrected: int | None = None
    energy: Real | None = None  # joules since the driver was loaded
    xids: tuple[tuple[Real, int], ...] = ()  # (when it was seen, number), newest last
    processes: tuple[Holder, ...] | None = None
    error: str | None = None  # why NVML can't read this GPU
    # gauge -> its newest values, oldest first, evenly spaced; filled in by the viewer that keeps them
    recent: Mapping[str, tuple[Real | None, ...]] = {}

    @property
    def label(self) -> str:
        return f"GPU{self.index}" if self.mig is None else f"GPU{self.index}.{self.mig}"


@frozen
class HostGauges:
    """The gauges of a host."""

    name: str
    time: float = 0.0  # when it was read, by the host's clock
    state: str = OK  # or OFFLINE, with a reason
    reason: str = ""
    cores: int | None = None
    # Average number of processes that run or are ready to run, over 1, 5 and 15 minutes.
    load: tuple[float, ...] | None = None
    cpu: Real | None = None  # share of the time of all cores
    memory_total: int | None = None  # the cgroup's limit if that is less than the host's memory
    memory_available: int | None = None
    swap_used: int | None = None
    disk_path: str | None = None
    disk_free: int | None = None
    disk_total: int | None = None
    disk_read: Real | None = None
    disk_written: Real | None = None
    received: Real | None = None  # over all interfaces except loopback
    sent: Real | None = None
    link: Real | None = None  # bytes per second of the fastest interface that is up
    # Share of the last 10 s in which some process was waiting for this resource (the kernel's pressure stall information).
    pressure_cpu: Real | None = None
    pressure_io: Real | None = None
    pressure_memory: Real | None = None
    driver: str | None = None
    gpu_error: str | None = None  # why the installed driver can't be used
    recent: Mapping[str, tuple[Real | None, ...]] = {}
