"""Reads the gauges of a host and its GPUs repeatedly, at little cost and without a CUDA context."""

from __future__ import annotations

import os
import time
from collections.abc import Collection

from stoker.contract import host_memory, kernel_messages
from stoker.contract.frozen import pick_fields, replace
from stoker.contract.process import read_kernel_file, read_kernel_lines
from stoker.contract.text import parse_json
from stoker.contract.typed_values import read_frozen
from stoker.control.machine import host_limits, kernel_log
from stoker.control.machine.examination import GpuHealth
from stoker.control.machine.model import Gpu, GpuGauges, HostGauges
from stoker.control.machine.observe import Observer, read_recorded

_SECTOR_BYTES = 512  # the unit of /proc/diskstats, whatever the disk's own sector size is
# These are not disks, or they consist of disks and their bytes would be counted twice.
_NOT_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd")
_NOT_LINKS = ("lo", "docker", "veth", "br-", "virbr", "tun", "tap", "dummy")
_MAX_XIDS = 16  # per GPU; older ones are dropped


class HostMeter:
    """Reads the host's gauges. Keeps the counters of the last reading, for the rates."""

    def __init__(self, disk: str = ".") -> None:
        self._disk = disk
        self._last_reading: tuple[float, dict[str, int]] | None = None

    def read(self) -> HostGauges:
        now, counters = time.monotonic(), _read_counters()
        total, available, _ = host_memory.read_memory()
        disk_free, disk_total = _read_disk_space(self._disk)
        rates: dict[str, float] = {}
        if self._last_reading is not None:
            last_time, last_counters = self._last_reading
            seconds = max(now - last_time, 1e-3)
            for name, value in counters.items():
                # A counter goes back when a device is removed or a container moves.
                if name in last_counters and value >= last_counters[name]:
                    rates[name] = (value - last_counters[name]) / seconds
        self._last_reading = now, counters
        cpu_busy, cpu_total = rates.get("cpu_busy"), rates.get("cpu_all")
        return HostGauges(
            name=os.uname().nodename,
            time=time.time(),
            cores=host_limits.count_cores(),
            load=_read_load(),
            cpu=min(cpu_busy / cpu_total, 1.0) if cpu_busy is not None and cpu_total else None,
            memory_total=total,
            memory_available=available,
            swap_used=host_limits.read_swap_used(),
            disk_path=self._disk,
            disk_free=disk_free,
            disk_total=disk_total,
            disk_read=rates.get("disk_read"),
            disk_written=rates.get("disk_written"),
            received=rates.get("received"),
            sent=rates.get("sent"),
            link=_read_link_speed(),
            pressure_cpu=_read_pressure("cpu"),
            pressure_io=_read_pressure("io"),
            pressure_memory=_read_pressure("memory"),
        )


class Gauges:
    """Reads the gauges of this machine, or of a recorded one. NVML stays open between readings."""

    def __init__(self, recorded: str | None = None, disk: str = ".", observer: Observer | None = None) -> None:
        self._recorded = recorded
        self._meter = HostMeter(disk)
        self._observer = observer
        self._xids: dict[str, list[tuple[float, int]]] = {}  # UUID -> (when, number)
        self._has_read_kernel_log = False

    def read(self, only: Collection[str] | None = None) -> tuple[HostGauges, tuple[GpuGauges, ...]]:
        """Return the gauges of the host and of its GPUs. An error of the driver is reported with the host.

        `only` reads just these GPUs, without their processes and Xids.
        """
        host = self._meter.read()
        if self._recorded:
            host, gpus = _read_recorded_gauges(self._recorded, host)
            return host, tuple(gpu for gpu in gpus if only is None or gpu.uuid in only)
        if self._observer is None:
            self._observer = Observer()
        try:
            nvml = self._observer.nvml
            if nvml is None:
                return replace(host, gpu_error=self._observer.gpu_error), ()
            if only is not None:
                return host, nvml.read_gauges(only, processes=False)
            gpus = nvml.read_gauges()
            self._read_xids(gpus)
            gpus = tuple(replace(gpu, host=host.name, xids=tuple(self._xids.get(gpu.uuid, ()))) for gpu in gpus)
            return replace(host, driver=nvml.read_driver()), gpus
        except Exception as problem:  # NVML makes its error classes at run time
            return replace(host, gpu_error=f"NVML stopped responding: {problem}"), ()

    def _read_xids(self, gpus: tuple[GpuGauges, ...]) -> None:
        """Add the new Xids. Those of the kernel's log get time 0, because they happened before the first reading."""
        assert self._observer is not None and self._observer.nvml is not None
        if not self._has_read_kernel_log:
            self._has_read_kernel_log = True
            for pci, number in filter(None, map(kernel_messages.parse_xid, kernel_log.read_messages())):
                for gpu in gpus:
                    if kernel_log.is_same_gpu(gpu.pci or "", pci):
                        self._add_xid(gpu.uuid, 0.0, number)
        for uuid, number in self._observer.nvml.read_new_xids():
            self._add_xid(uuid, time.time(), number)

    def _add_xid(self, uuid: str, when: float, number: int) -> None:
        self._xids[uuid] = [*self._xids.get(uuid, ()), (when, number)][-_MAX_XIDS:]


def _read_counters() -> dict[str, int]:
    """Return what the kernel counts since boot: CPU ticks, and bytes of disks and network interfaces."""
    counters: dict[str, int] = {}
    fields = read_kernel_file("/proc/stat").partition("\n")[0].split()[1:]
    if len(fields) >= 8:
        ticks = [int(field) for field in fields[:8]]
        counters["cpu_all"] = sum(ticks)
        counters["cpu_busy"] = counters["cpu_all"] - ticks[3] - ticks[4]  # without idle and waiting for a disk
    rows = [line.split() for line in read_kernel_lines("/proc/diskstats")]
    disks = [row for row in rows if len(row) > 9 and _is_disk(row[2])]
    if disks:
        counters["disk_read"] = sum(int(row[5]) for row in disks) * _SECTOR_BYTES
        counters["disk_written"] = sum(int(row[9]) for row in disks) * _SECTOR_BYTES
    lines = [line.partition(":") for line in read_kernel_lines("/proc/net/dev") if ":" in line]
    links = [numbers.split() for name, _, numbers in lines if not name.strip().startswith(_NOT_LINKS)]
    if links:
        counters["received"] = sum(int(row[0]) for row in links)
        counters["sent"] = sum(int(row[8]) for row in links)
    return counters


def _is_disk(name: str) -> bool:
    """Return whether a row of /proc/diskstats is a disk. Partitions aren't: their bytes are counted with the disk's."""
    return not name.startswith(_NOT_DISKS) and os.path.exists(f"/sys/block/{name}")


def _read_load() -> tuple[float, ...] | None:
    try:
        return os.getloadavg()
    except OSError:
        return None


def _read_disk_space(path: str) -> tuple[int | None, int | None]:
    """Return the (free, total) bytes of the disk of a folder, or of its nearest parent that exists."""
    path = os.path.abspath(path)
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    try:
        status = os.statvfs(path)
    except OSError:
        return None, None
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def _read_link_speed() -> float | None:
    """Return the bytes per second of the fastest interface, or None if unknown."""
    try:
        names = [name for name in os.listdir("/sys/class/net") if not name.startswith(_NOT_LINKS)]
    except OSError:
        return None
    speeds = [read_kernel_file(f"/sys/class/net/{name}/speed").strip() for name in names]
    return max((int(speed) * 1e6 / 8 for speed in speeds if speed.isdigit() and int(speed)), default=None)


def _read_pressure(resource: str) -> float | None:
    """Return the share of the last 10 s in which some process waited for a resource, or None if unknown."""
    for line in read_kernel_lines(f"/proc/pressure/{resource}"):
        kind, _, averages = line.partition(" ")
        percent = averages.partition("avg10=")[2].partition(" ")[0]
        if kind == "some" and percent:
            return float(percent) / 100
    return None


# ---- recorded machines ----


def _read_recorded_gauges(path: str, host: HostGauges) -> tuple[HostGauges, tuple[GpuGauges, ...]]:
    """Return a recorded machine's gauges, with the health of the examination if the file is one.

    The file is read at each call, because tests change it.
    """
    machine, health = read_recorded(path), _read_recorded_health(path)
    host = replace(
        host,
        name=machine.hostname,
        driver=machine.driver,
        gpu_error=machine.gpu_error,
        **pick_fields(machine, "cores", "memory_total", "memory_available"),
    )
    return host, tuple(_make_recorded_gpu(gpu, health.get(gpu.uuid), machine.hostname) for gpu in machine.gpus)


def _make_recorded_gpu(gpu: Gpu, health: GpuHealth | None, hostname: str) -> GpuGauges:
    shared_fields = ("index", "uuid", "name", "mig", "mig_parent", "pci", "memory_used", "memory_total", "error")
    gauges = GpuGauges(
        host=hostname,
        processes=gpu.holders,
        utilization=None if gpu.utilization is None else gpu.utilization / 100,
        **{name: getattr(gpu, name) for name in shared_fields},
    )
    if health is None:
        return gauges
    names = ("temperature", "temperature_slowdown", "power", "power_limit", "throttle", "pcie_width", "pcie_width_max")
    values = {name: getattr(health, name) for name in (*names, "ecc_uncorrected")}
    return replace(gauges, xids=tuple((0.0, number) for number in health.xids), **values)


def _read_recorded_health(path: str) -> dict[str, GpuHealth]:
    try:
        with open(path, encoding="utf-8") as file:
            data = parse_json(file.read())
    except (OSError, ValueError):
        return {}
    by_uuid = data.get("health") if isinstance(data, dict) else None
    health: dict[str, GpuHealth] = {}
    for uuid, recorded in by_uuid.items() if isinstance(by_uuid, dict) else ():
        try:
            health[uuid] = read_frozen(GpuHealth, recorded)
        except ValueError:
            continue  # an older Stoker recorded it
    return health
