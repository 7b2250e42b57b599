"""Asks NVML: no CUDA context, no torch, no entry in `nvidia-smi`. What a card doesn't have is None."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from stoker.contract import process
from stoker.control.machine import kernel_log, procfs
from stoker.control.machine.examination import Health
from stoker.control.machine.model import Gpu, GpuGauges, Holder

_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}


# What slows a clock and is worth a word; idle, application clocks and sync boost are not.
_POWER_CAP = 0x4
_THROTTLE = {
    _POWER_CAP: "power cap", 0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake",
}  # fmt: skip
THROTTLE_REASONS = tuple(_THROTTLE.values())
_RECOVERY = {
    0: "none", 1: "reset", 2: "reboot", 3: "drain", 4: "drain and reset", 5: "recovery of the IMEX domain", 6: "bus reset", 7: "reboot of the system",
}  # fmt: skip
_PEER = {
    0: "ok", 1: "chipset does not support it", 2: "the GPU does not support it", 3: "topology does not support it", 4: "disabled by a registry key",
    5: "not supported", 6: "unknown",
}  # fmt: skip


# NVML sets the power-cap reason for moments on cards that draw half of their limit. A cap that slows a card holds it at its
# limit, and lasts.
NEAR_LIMIT = 0.95  # of the enforced power limit
LASTING_S = 0.25  # that the reason must last; NVML's power is itself a mean over up to a second
EVENTS_S = 0.2
_MOST_EVENTS = 100  # that one look takes: a sick card may report without end


class NoDriver(Exception):
    """No NVIDIA driver on this machine: nothing is wrong, there just is no GPU."""


class DriverError(Exception):
    """A driver is there and does not answer."""


def _library() -> Any:
    """nvidia-ml-py, loaded only where the driver's library opens: importing it costs 20 ms a laptop need not pay."""
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as problem:
        if "No such file" in str(problem):
            if os.path.exists("/dev/nvidiactl"):
                line = "/dev/nvidiactl is there but libnvidia-ml.so.1 is not: the driver's library is missing"
                raise DriverError(line) from problem
            raise NoDriver from problem
        raise DriverError(f"libnvidia-ml.so.1 does not load: {problem}") from problem
    try:
        import pynvml
    except ImportError as problem:
        raise DriverError("the Python package nvidia-ml-py is not installed") from problem
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as problem:
        absent = problem.value in (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_NO_PERMISSION)
        if absent and not os.path.exists("/dev/nvidiactl"):
            raise NoDriver from problem
        raise DriverError(f"NVML does not start: {problem}") from problem
    return pynvml


class Nvml:
    def __init__(self) -> None:
        self._nvml = _library()
        self._handles: dict[str, Any] = {}
        self._fixed: dict[str, dict[str, Any]] = {}  # by uuid: what does not change, and costs a question each
        self._kept: dict[str, int] = {}  # by uuid: bytes that the driver keeps for itself
        self._capped_since: dict[str, float] = {}  # by uuid: when the card was first seen at its power cap
        self._listener: Any = None  # of Xid events
        self._heard: set[str] = set()  # cards it listens to
        # nvidia-ml-py's own complaint when the driver is older than it, which is no NVMLError.
        mismatch = getattr(self._nvml, "NVMLLibraryMismatchError", self._nvml.NVMLError)
        self._unanswered: tuple[type[Exception], ...] = (self._nvml.NVMLError, mismatch)

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """None for what this card or driver does not support."""
        try:
            return call(*args)
        except self._unanswered:
            return None

    def _running(self, handle: Any) -> Any:
        """An older driver knows only the second version of this question."""
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2"):
            found = self._ask(getattr(self._nvml, name), handle) if hasattr(self._nvml, name) else None
            if found is not None:
                return found
        return None

    def driver(self) -> str | None:
        return _text(self._ask(self._nvml.nvmlSystemGetDriverVersion))

    def gpus(self) -> tuple[Gpu, ...]:
        found: list[Gpu] = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(self._nvml.nvmlDeviceGetUUID(handle)) or ""
            except self._nvml.NVMLError as problem:
                found.append(Gpu(index=index, uuid="", error=str(problem)))
                continue
            card = self._gpu(handle, index, uuid)
            mig = self._ask(self._nvml.nvmlDeviceGetMigMode, handle)
            slices = self._slices(handle, card) if mig and mig[0] == 1 else []
            found.extend(slices or [card])
        return tuple(found)

    def _slices(self, handle: Any, card: Gpu) -> list[Gpu]:
        slices: list[Gpu] = []
        for n in range(self._ask(self._nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            child = self._ask(self._nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, n)
            uuid = _text(self._ask(self._nvml.nvmlDeviceGetUUID, child)) if child is not None else None
            if uuid:
                slices.append(self._gpu(child, card.index, uuid, mig=n, parent=card))
        return slices

    def _gpu(self, handle: Any, index: int, uuid: str, mig: int | None = None, parent: Gpu | None = None) -> Gpu:
        nvml = self._nvml
        self._handles[uuid] = handle
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        use = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        mode = self._ask(nvml.nvmlDeviceGetComputeMode, handle)
        pci = self._ask(nvml.nvmlDeviceGetPciInfo, handle)
        return Gpu(
            index=index,
            uuid=uuid,
            mig=mig,
            mig_parent=parent.uuid if parent else None,
            name=_text(self._ask(nvml.nvmlDeviceGetName, handle)),
            memory_total=int(memory.total) if memory else None,
            memory_used=int(memory.used) if memory else None,
            utilization=int(use.gpu) if use else None,
            compute_mode=parent.compute_mode if parent else _MODES.get(mode),
            pci=_text(pci.busId) if pci else getattr(parent, "pci", None),
            holders=self._holders(handle),
        )

    def _reserved(self, handle: Any) -> int:
        """By the driver, for itself: in `memory`, but not in what nvidia-smi and DCGM call used. 0: it does not tell."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle, version) if version is not None else None
        return int(memory.reserved) if memory else 0

    def _holders(self, handle: Any) -> tuple[Holder, ...] | None:
        found = self._running(handle)
        return None if found is None else tuple(_holder(one) for one in found)

    def memory(self, uuid: str) -> tuple[int, int] | None:
        """(used, total) bytes of one card, now."""
        handle = self._handles.get(uuid)
        found = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle) if handle is not None else None
        return (int(found.used), int(found.total)) if found else None

    def holders(self, uuid: str) -> tuple[Holder, ...] | None:
        handle = self._handles.get(uuid)
        return self._holders(handle) if handle is not None else None

    def work(self, uuids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return what each GPU is doing now: utilisation in percent, why its clock is held down, its PCIe lanes."""
        known = [uuid for uuid in uuids if uuid in self._handles]
        for uuid in known:
            self._throttle_reasons(uuid)
        if self._capped_since:  # a second look shows whether the cap lasts
            time.sleep(LASTING_S)
        return {uuid: self._work_of(uuid) for uuid in known}

    def _work_of(self, uuid: str) -> dict[str, Any]:
        handle = self._handles[uuid]
        use = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
        reasons = self._throttle_reasons(uuid)
        return {
            "use": int(use.gpu) if use else None,
            "throttle": None if reasons is None else list(reasons),
            "lanes": [
                self._ask(self._nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
                self._ask(self._nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            ],
        }

    def _throttle_reasons(self, uuid: str) -> tuple[str, ...] | None:
        """Return what slows the card's clock, in words; None if NVML does not know.

        A power cap counts if the card draws about its enforced limit, now and at a look at least LASTING_S before, with
        no look between that saw it uncapped.
        """
        handle = self._handles[uuid]
        reasons = self._ask(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if reasons is None:
            return None
        now = time.monotonic()
        if reasons & _POWER_CAP and self._is_near_power_limit(handle):
            since = self._capped_since.setdefault(uuid, now)
            is_capped = now - since >= LASTING_S
        else:
            self._capped_since.pop(uuid, None)
            is_capped = False
        return tuple(word for bit, word in _THROTTLE.items() if reasons & bit and (bit != _POWER_CAP or is_capped))

    def _is_near_power_limit(self, handle: Any) -> bool:
        power = self._ask(self._nvml.nvmlDeviceGetPowerUsage, handle)
        limit = self._ask(self._nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return power is not None and bool(limit) and power >= NEAR_LIMIT * limit

    def gauges(self, only: Collection[str] | None = None, processes: bool = True) -> tuple[GpuGauges, ...]:
        """What every card is doing now; of `only` these where it is given. One that does not answer says so."""
        return tuple(
            GpuGauges(index=gpu.index, uuid="", error=gpu.error) if gpu.error else self._gauges_of(gpu, processes)
            for gpu in (self._known(only) if only is not None else self.gpus())
        )

    def _known(self, uuids: Collection[str]) -> Iterator[Gpu]:
        for uuid in uuids:
            if uuid in self._handles:
                yield Gpu(index=self._fixed.get(uuid, {}).get("index", -1), uuid=uuid)

    def _gauges_of(self, gpu: Gpu, processes: bool) -> GpuGauges:
        nvml, ask, handle = self._nvml, self._ask, self._handles[gpu.uuid]
        if gpu.uuid not in self._fixed:
            limit, top = (
                ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
                ask(nvml.nvmlDeviceGetMaxClockInfo, handle, 1),
            )
            self._fixed[gpu.uuid] = {
                **{name: getattr(gpu, name) for name in ("index", "name", "mig", "mig_parent", "pci")},
                "power_limit": None if limit is None else limit / 1000,
                "clock_max": None if top is None else top * 1e6,
                "temperature_slowdown": ask(nvml.nvmlDeviceGetTemperatureThreshold, handle, 1),
                "pcie_width_max": ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            }
            self._kept[gpu.uuid] = self._reserved(handle)
        use, memory = ask(nvml.nvmlDeviceGetUtilizationRates, handle), self.memory(gpu.uuid)
        power = ask(nvml.nvmlDeviceGetPowerUsage, handle)
        clocks = [ask(nvml.nvmlDeviceGetClockInfo, handle, kind) for kind in (1, 2)]  # multiprocessors, memory
        energy = ask(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        holders = gpu.holders  # where the card was looked at just now
        if processes and holders is None:
            holders = self._holders(handle)
        return GpuGauges(
            uuid=gpu.uuid,
            utilization=use.gpu / 100 if use else None,
            memory_used=max(memory[0] - self._kept[gpu.uuid], 0) if memory else None,
            memory_total=memory[1] if memory else None,
            temperature=ask(nvml.nvmlDeviceGetTemperature, handle, 0),
            power=None if power is None else power / 1000,
            clock=None if clocks[0] is None else clocks[0] * 1e6,
            memory_clock=None if clocks[1] is None else clocks[1] * 1e6,
            throttle=self._throttle_reasons(gpu.uuid),
            pcie_width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            ecc_corrected=ask(nvml.nvmlDeviceGetTotalEccErrors, handle, 0, 0),
            ecc_uncorrected=ask(nvml.nvmlDeviceGetTotalEccErrors, handle, 1, 0),
            energy=None if energy is None else energy / 1000,
            processes=holders,
            **self._fixed[gpu.uuid],
        )

    def new_xids(self) -> list[tuple[str, int]]:
        """(uuid, number) that the driver reported since the last call. The first call begins to listen."""
        nvml = self._nvml
        if self._listener is None:
            self._listener = self._ask(nvml.nvmlEventSetCreate)
        if self._listener is None:
            return []
        for uuid in self._handles.keys() - self._heard:
            self._heard.add(uuid)
            self._ask(
                nvml.nvmlDeviceRegisterEvents, self._handles[uuid], nvml.nvmlEventTypeXidCriticalError, self._listener
            )
        found: list[tuple[str, int]] = []
        while len(found) < _MOST_EVENTS:
            event = self._ask(nvml.nvmlEventSetWait_v2, self._listener, 0)
            if event is None:  # nothing more
                break
            card = _text(self._ask(nvml.nvmlDeviceGetUUID, event.device))
            if card:
                found.append((card, int(event.eventData)))
        return found

    def pids(self, uuid: str) -> set[int]:
        handle = self._handles.get(uuid)
        found = self._running(handle) if handle is not None else None
        return {int(one.pid) for one in found or ()}

    def health(self, kernel_xids: dict[str, list[int]]) -> dict[str, Health]:
        """Every card's, by uuid. Asks many questions: seconds on a sick driver, so never on the launch path."""
        cards = [gpu for gpu in self.gpus() if gpu.mig is None and not gpu.error]
        for uuid, numbers in self._events(cards, EVENTS_S).items():
            kernel_xids.setdefault(uuid, []).extend(numbers)
        return {gpu.uuid: self._health_of(gpu, cards, kernel_xids) for gpu in cards}

    def _events(self, cards: list[Gpu], seconds: float) -> dict[str, list[int]]:
        """Xids the driver reports while we listen, by uuid. Earlier ones are in the kernel's log."""
        nvml = self._nvml
        found: dict[str, list[int]] = {}
        listener = self._ask(nvml.nvmlEventSetCreate)
        if listener is None:
            return found
        for gpu in cards:
            handle, kind = self._handles[gpu.uuid], nvml.nvmlEventTypeXidCriticalError
            self._ask(nvml.nvmlDeviceRegisterEvents, handle, kind, listener)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            event = self._ask(nvml.nvmlEventSetWait_v2, listener, int(left * 1000) + 1)
            if event is None:  # nothing came, or this card has no events
                break
            uuid = _text(self._ask(nvml.nvmlDeviceGetUUID, event.device))
            if uuid:
                found.setdefault(uuid, []).append(int(event.eventData))
        self._ask(nvml.nvmlEventSetFree, listener)
        return found

    def _health_of(self, gpu: Gpu, cards: list[Gpu], kernel_xids: dict[str, list[int]]) -> Health:
        nvml, ask, handle = self._nvml, self._ask, self._handles[gpu.uuid]
        power, limit = ask(nvml.nvmlDeviceGetPowerUsage, handle), ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        rows = ask(nvml.nvmlDeviceGetRemappedRows, handle)  # corrected, uncorrected, pending, failed
        pending = ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        capability = ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        display = ask(nvml.nvmlDeviceGetDisplayActive, handle)
        links = [ask(nvml.nvmlDeviceGetNvLinkState, handle, n) for n in range(18)]
        pci = (gpu.pci or "").lower()
        here = [where for where in kernel_xids if where and (where == gpu.uuid or kernel_log.same_card(pci, where))]
        return Health(
            temperature=ask(nvml.nvmlDeviceGetTemperature, handle, 0),
            temperature_slowdown=ask(nvml.nvmlDeviceGetTemperatureThreshold, handle, 1),
            power=None if power is None else power / 1000,
            power_limit=None if limit is None else limit / 1000,
            throttle=self._throttle_reasons(gpu.uuid),
            pcie_generation=ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            pcie_generation_max=ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            pcie_width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            pcie_width_max=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            ecc_uncorrected=ask(nvml.nvmlDeviceGetTotalEccErrors, handle, 1, 0),
            pages_pending=None if pending is None else bool(pending),
            rows_pending=None if rows is None else bool(rows[2]),
            rows_failed=None if rows is None else bool(rows[3]),
            recovery=self._recovery(handle),
            nvlinks=tuple(bool(link) for link in links if link is not None) or None,
            display=None if display is None else bool(display),
            capability=None if capability is None else f"{capability[0]}.{capability[1]}",
            xids=tuple(xid for where in here for xid in kernel_xids[where]),
            peers={other.uuid: self._peer(handle, other) for other in cards if other.uuid != gpu.uuid} or None,
        )

    def _recovery(self, handle: Any) -> str | None:
        field = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        found = self._ask(self._nvml.nvmlDeviceGetFieldValues, handle, [field]) if field is not None else None
        if not found or found[0].nvmlReturn != 0:
            return None
        action = int(found[0].value.uiVal)
        return _RECOVERY.get(action, f"action {action}")

    def _peer(self, handle: Any, other: Gpu) -> str:
        status = self._ask(self._nvml.nvmlDeviceGetP2PStatus, handle, self._handles[other.uuid], 0)
        return "unknown" if status is None else _PEER.get(int(status), f"status {status}")


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _holder(entry: Any) -> Holder:
    pid = int(entry.pid)
    memory = None if entry.usedGpuMemory is None else int(entry.usedGpuMemory)
    one = process.find_process(pid)
    # A pid of the host's, seen from inside a container, may be somebody else's here.
    if one is None or not _has_device_open(pid):
        return Holder(pid, memory)
    uid = process.process_owner(pid)
    tag = procfs.run_tag(pid)
    return Holder(
        pid,
        memory,
        procfs.command_line(pid) or one.name,
        procfs.user_name(uid) if uid is not None else None,
        tag[0] if tag else None,
        round(max(0.0, time.time() - procfs.started_at(one.start)), 1),
    )


def _has_device_open(pid: int) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        return any(os.readlink(f"{folder}/{fd}").startswith("/dev/nvidia") for fd in os.listdir(folder))
    except PermissionError:
        return process.find_process(pid) is not None  # another user's: its descriptors are not ours to read
    except OSError:
        return False
