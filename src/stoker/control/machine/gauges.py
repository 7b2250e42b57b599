"""What a host and its GPUs are doing right now, read again and again: cheap, and without a CUDA context."""

from __future__ import annotations

import os
import time
from collections.abc import Collection

from stoker.contract import host_memory, kernel_messages
from stoker.contract.frozen import pick_fields, replace
from stoker.contract.process import kernel_lines, read_kernel_file
from stoker.contract.text import parse_json
from stoker.contract.typed_values import read_frozen
from stoker.control.machine import host_limits, kernel_log
from stoker.control.machine.examination import Health
from stoker.control.machine.model import Gpu, GpuGauges, HostGauges
from stoker.control.machine.observe import Observer, read_recorded

_SECTOR = 512  # bytes, in /proc/diskstats whatever the disk's own are
_NOT_A_DISK = (
    "loop",
    "ram",
    "zram",
    "dm-",
    "md",
    "sr",
    "fd",
)  # and partitions: their bytes are counted with the disk's
_NO_LINK = ("lo", "docker", "veth", "br-", "virbr", "tun", "tap", "dummy")
_MOST_XIDS = 16


class HostMeter:
    """Keeps the counters of the reading before."""

    def __init__(self, disk: str = ".") -> None:
        self._disk = disk
        self._before: tuple[float, dict[str, int]] | None = None

    def read(self) -> HostGauges:
        now, counters = time.monotonic(), _counters()
        total, available, _ = host_memory.read_memory()
        free, size = _space(self._disk)
        rates: dict[str, float] = {}
        if self._before is not None:
            then, before = self._before
            took = max(now - then, 1e-3)
            # A counter that went back: a device was taken out, or a container moved.
            rates = {
                name: (value - before[name]) / took
                for name, value in counters.items()
                if name in before and value >= before[name]
            }
        self._before = now, counters
        busy, whole = rates.get("cpu_busy"), rates.get("cpu_all")
        return HostGauges(
            name=os.uname().nodename,
            time=time.time(),
            cores=host_limits.cores(),
            load=_load(),
            cpu=min(busy / whole, 1.0) if busy is not None and whole else None,
            memory_total=total,
            memory_available=available,
            swap_used=host_limits.swap_used(),
            disk_path=self._disk,
            disk_free=free,
            disk_total=size,
            disk_read=rates.get("disk_read"),
            disk_written=rates.get("disk_written"),
            received=rates.get("received"),
            sent=rates.get("sent"),
            link=_link(),
            pressure_cpu=_pressure("cpu"),
            pressure_io=_pressure("io"),
            pressure_memory=_pressure("memory"),
        )


class Gauges:
    """One machine's, or a recorded one's: NVML stays open between readings."""

    def __init__(self, recorded: str | None = None, disk: str = ".", observer: Observer | None = None) -> None:
        self._recorded = recorded
        self._meter = HostMeter(disk)
        self._observer = observer
        self._xids: dict[str, list[tuple[float, int]]] = {}
        self._told_before = False

    def read(self, only: Collection[str] | None = None) -> tuple[HostGauges, tuple[GpuGauges, ...]]:
        """A driver that does not answer is a fact of the host. `only`: these cards, and not who is on them."""
        here = self._meter.read()
        if self._recorded:
            described, cards = recorded_gauges(self._recorded, here)
            return described, tuple(card for card in cards if only is None or card.uuid in only)
        if self._observer is None:
            self._observer = Observer()
        try:
            nvml = self._observer.nvml
            if nvml is None:
                return replace(here, gpu_error=self._observer.gpu_error), ()
            if only is not None:
                return here, nvml.gauges(only, processes=False)
            cards = nvml.gauges()
            self._hear_xids(cards)
            cards = tuple(replace(one, host=here.name, xids=tuple(self._xids.get(one.uuid, ()))) for one in cards)
            return replace(here, driver=nvml.driver()), cards
        except Exception as problem:  # NVML's own error classes are made at run time
            return replace(here, gpu_error=f"NVML stopped answering: {problem}"), ()

    def _hear_xids(self, cards: tuple[GpuGauges, ...]) -> None:
        """Those in the kernel's log are from before: with no time."""
        assert self._observer is not None and self._observer.nvml is not None
        if not self._told_before:
            self._told_before = True
            for where, number in filter(None, map(kernel_messages.parse_xid, kernel_log.lines())):
                for card in cards:
                    if kernel_log.same_card(card.pci or "", where):
                        self._keep_xid(card.uuid, 0.0, number)
        for uuid, number in self._observer.nvml.new_xids():
            self._keep_xid(uuid, time.time(), number)

    def _keep_xid(self, uuid: str, when: float, number: int) -> None:
        self._xids[uuid] = [*self._xids.get(uuid, ()), (when, number)][-_MOST_XIDS:]


def _counters() -> dict[str, int]:
    found: dict[str, int] = {}
    words = read_kernel_file("/proc/stat").partition("\n")[0].split()[1:]
    if len(words) >= 8:
        ticks = [int(word) for word in words[:8]]
        found["cpu_all"] = sum(ticks)
        found["cpu_busy"] = found["cpu_all"] - ticks[3] - ticks[4]  # idle, and waiting for a disk
    disks = [line.split() for line in kernel_lines("/proc/diskstats")]
    whole = [words for words in disks if len(words) > 9 and _is_disk(words[2])]
    if whole:
        found["disk_read"] = sum(int(words[5]) for words in whole) * _SECTOR
        found["disk_written"] = sum(int(words[9]) for words in whole) * _SECTOR
    links = [line.partition(":") for line in kernel_lines("/proc/net/dev") if ":" in line]
    numbers = [rest.split() for name, _, rest in links if not name.strip().startswith(_NO_LINK)]
    if numbers:
        found["received"] = sum(int(words[0]) for words in numbers)
        found["sent"] = sum(int(words[8]) for words in numbers)
    return found


def _is_disk(name: str) -> bool:
    return not name.startswith(_NOT_A_DISK) and os.path.exists(f"/sys/block/{name}")


def _load() -> tuple[float, ...] | None:
    try:
        return os.getloadavg()
    except OSError:
        return None


def _space(path: str) -> tuple[int | None, int | None]:
    """(free, total) bytes where runs go, or would: the nearest folder that is there."""
    path = os.path.abspath(path)
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    try:
        space = os.statvfs(path)
    except OSError:
        return None, None
    return space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize


def _link() -> float | None:
    try:
        names = [name for name in os.listdir("/sys/class/net") if not name.startswith(_NO_LINK)]
    except OSError:
        return None
    words = [read_kernel_file(f"/sys/class/net/{name}/speed").strip() for name in names]
    return max((int(word) * 1e6 / 8 for word in words if word.isdigit() and int(word)), default=None)


def _pressure(what: str) -> float | None:
    for line in kernel_lines(f"/proc/pressure/{what}"):
        kind, _, rest = line.partition(" ")
        word = rest.partition("avg10=")[2].partition(" ")[0]
        if kind == "some" and word:
            return float(word) / 100
    return None


def recorded_gauges(path: str, here: HostGauges) -> tuple[HostGauges, tuple[GpuGauges, ...]]:
    """A recorded machine's, with the health of an examination where the file has one. Read anew: a test changes it."""
    machine, health = read_recorded(path), _recorded_health(path)
    described = replace(
        here,
        name=machine.hostname,
        driver=machine.driver,
        gpu_error=machine.gpu_error,
        **pick_fields(machine, "cores", "memory_total", "memory_available"),
    )
    return described, tuple(_recorded_card(gpu, health.get(gpu.uuid), machine.hostname) for gpu in machine.gpus)


def _recorded_card(gpu: Gpu, health: Health | None, hostname: str) -> GpuGauges:
    same = ("index", "uuid", "name", "mig", "mig_parent", "pci", "memory_used", "memory_total", "error")
    card = GpuGauges(
        host=hostname,
        processes=gpu.holders,
        utilization=None if gpu.utilization is None else gpu.utilization / 100,
        **{name: getattr(gpu, name) for name in same},
    )
    if health is None:
        return card
    known = ("temperature", "temperature_slowdown", "power", "power_limit", "throttle", "pcie_width", "pcie_width_max")
    more = {name: getattr(health, name) for name in (*known, "ecc_uncorrected")}
    return replace(card, xids=tuple((0.0, number) for number in health.xids), **more)


def _recorded_health(path: str) -> dict[str, Health]:
    try:
        with open(path, encoding="utf-8") as file:
            data = parse_json(file.read())
    except (OSError, ValueError):
        return {}
    told = data.get("health") if isinstance(data, dict) else None
    found: dict[str, Health] = {}
    for uuid, one in (told or {}).items() if isinstance(told, dict) else ():
        try:
            found[uuid] = read_frozen(Health, one)
        except ValueError:
            continue  # an older Stoker's
    return found
