"""Reads GPUs through NVML, without a CUDA context and without an entry in nvidia-smi. A value that a GPU doesn't have is None."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from stoker.contract.process import find_process, process_owner
from stoker.control.machine import kernel_log, procfs
from stoker.control.machine.examination import GpuHealth
from stoker.control.machine.model import Gpu, GpuGauges, Holder

_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
# The reasons for a lower clock that are reported; idle, application clocks and sync boost are not.
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

# NVML sets the power-cap reason for moments on GPUs that draw half of their limit. A cap that slows a GPU holds it at its
# limit, and lasts.
NEAR_LIMIT = 0.95  # of the enforced power limit
LASTING_S = 0.25  # how long the reason must last; NVML's power is itself a mean over up to a second
EVENTS_S = 0.2  # how long to wait for new Xid events
_MAX_EVENTS = 100  # per call; a broken GPU may report without end


class NoDriver(Exception):
    """This machine has no NVIDIA driver and so no GPU. Nothing is wrong."""


class DriverError(Exception):
    """This machine has an NVIDIA driver that can't be used. The text says why."""


def _load_pynvml() -> Any:
    """Return nvidia-ml-py, initialized. Raises NoDriver or DriverError.

    It is imported only where the driver's library loads, because the import takes 20 ms.
    """
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as problem:
        if "No such file" in str(problem):
            if os.path.exists("/dev/nvidiactl"):
                line = "the driver's library libnvidia-ml.so.1 is missing, although /dev/nvidiactl exists"
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
        may_be_absent = problem.value in (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_NO_PERMISSION)
        if may_be_absent and not os.path.exists("/dev/nvidiactl"):
            raise NoDriver from problem
        raise DriverError(f"NVML does not start: {problem}") from problem
    return pynvml


class Nvml:
    """An open connection to NVML. Dictionaries are by UUID. Raises NoDriver or DriverError."""

    def __init__(self) -> None:
        self._nvml = _load_pynvml()
        self._handles: dict[str, Any] = {}
        self._constants: dict[str, dict[str, Any]] = {}  # gauges that don't change; each would cost a call
        self._reserved: dict[str, int] = {}  # bytes that the driver keeps for itself
        self._capped_since: dict[str, float] = {}  # when the GPU was first seen at its power cap
        self._events: Any = None  # the set of Xid events
        self._registered: set[str] = set()  # GPUs whose Xid events are in it
        # nvidia-ml-py raises NVMLLibraryMismatchError, which is no NVMLError, if the driver is older than it.
        mismatch = getattr(self._nvml, "NVMLLibraryMismatchError", self._nvml.NVMLError)
        self._unsupported: tuple[type[Exception], ...] = (self._nvml.NVMLError, mismatch)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of nvidia-ml-py. Return None if this GPU or driver does not support it."""
        try:
            return function(*args)
        except self._unsupported:
            return None

    def _read_running_processes(self, handle: Any) -> Any:
        """Return the compute processes of a GPU. An older driver knows only version 2 of the call."""
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2"):
            processes = self._call(getattr(self._nvml, name), handle) if hasattr(self._nvml, name) else None
            if processes is not None:
                return processes
        return None

    def read_driver(self) -> str | None:
        return _text(self._call(self._nvml.nvmlSystemGetDriverVersion))

    def read_gpus(self) -> tuple[Gpu, ...]:
        """Return all GPUs, with the MIG instances of a GPU in its place."""
        gpus: list[Gpu] = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(self._nvml.nvmlDeviceGetUUID(handle)) or ""
            except self._nvml.NVMLError as problem:
                gpus.append(Gpu(index=index, uuid="", error=str(problem)))
                continue
            gpu = self._read_gpu(handle, index, uuid)
            mig_mode = self._call(self._nvml.nvmlDeviceGetMigMode, handle)
            instances = self._read_mig_instances(handle, gpu) if mig_mode and mig_mode[0] == 1 else []
            gpus.extend(instances or [gpu])
        return tuple(gpus)

    def _read_mig_instances(self, handle: Any, parent: Gpu) -> list[Gpu]:
        instances: list[Gpu] = []
        for number in range(self._call(self._nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            instance = self._call(self._nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            uuid = _text(self._call(self._nvml.nvmlDeviceGetUUID, instance)) if instance is not None else None
            if uuid:
                instances.append(self._read_gpu(instance, parent.index, uuid, mig=number, parent=parent))
        return instances

    def _read_gpu(self, handle: Any, index: int, uuid: str, mig: int | None = None, parent: Gpu | None = None) -> Gpu:
        nvml = self._nvml
        self._handles[uuid] = handle
        memory = self._call(nvml.nvmlDeviceGetMemoryInfo, handle)
        utilization = self._call(nvml.nvmlDeviceGetUtilizationRates, handle)
        mode = self._call(nvml.nvmlDeviceGetComputeMode, handle)
        pci = self._call(nvml.nvmlDeviceGetPciInfo, handle)
        return Gpu(
            index=index,
            uuid=uuid,
            mig=mig,
            mig_parent=parent.uuid if parent else None,
            name=_text(self._call(nvml.nvmlDeviceGetName, handle)),
            memory_total=int(memory.total) if memory else None,
            memory_used=int(memory.used) if memory else None,
            utilization=int(utilization.gpu) if utilization else None,
            compute_mode=parent.compute_mode if parent else _MODES.get(mode),
            pci=_text(pci.busId) if pci else getattr(parent, "pci", None),
            holders=self._read_holders(handle),
        )

    def _read_reserved_bytes(self, handle: Any) -> int:
        """Return the memory that the driver keeps for itself, or 0 if unknown.

        It is in the result of `read_memory`, but not in what nvidia-smi and DCGM show as used.
        """
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        memory = self._call(self._nvml.nvmlDeviceGetMemoryInfo, handle, version) if version is not None else None
        return int(memory.reserved) if memory else 0

    def _read_holders(self, handle: Any) -> tuple[Holder, ...] | None:
        processes = self._read_running_processes(handle)
        return None if processes is None else tuple(_describe_holder(process) for process in processes)

    def read_memory(self, uuid: str) -> tuple[int, int] | None:
        """Return the (used, total) bytes of a GPU."""
        handle = self._handles.get(uuid)
        memory = self._call(self._nvml.nvmlDeviceGetMemoryInfo, handle) if handle is not None else None
        return (int(memory.used), int(memory.total)) if memory else None

    def read_holders(self, uuid: str) -> tuple[Holder, ...] | None:
        """Return the processes with a context on a GPU."""
        handle = self._handles.get(uuid)
        return self._read_holders(handle) if handle is not None else None

    def read_work(self, uuids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return for each GPU its utilization in percent, the reasons for a lowered clock, and its PCIe lanes."""
        handles = {uuid: self._handles[uuid] for uuid in uuids if uuid in self._handles}
        for uuid in handles:
            self._read_throttle_reasons(uuid)
        if self._capped_since:  # a second reading shows whether the cap lasts
            time.sleep(LASTING_S)
        work = {}
        for uuid, handle in handles.items():
            utilization = self._call(self._nvml.nvmlDeviceGetUtilizationRates, handle)
            reasons = self._read_throttle_reasons(uuid)
            work[uuid] = {
                "use": int(utilization.gpu) if utilization else None,
                "throttle": None if reasons is None else list(reasons),
                "lanes": [
                    self._call(self._nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
                    self._call(self._nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
                ],
            }
        return work

    def _read_throttle_reasons(self, uuid: str) -> tuple[str, ...] | None:
        """Return the reasons for a lowered clock, in words, or None if NVML does not know.

        A power cap counts if the GPU draws about its enforced limit, now and at a reading at least LASTING_S earlier, and
        no reading in between saw it uncapped.
        """
        handle = self._handles[uuid]
        reasons = self._call(self._nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if reasons is None:
            return None
        now = time.monotonic()
        if reasons & _POWER_CAP and self._is_near_power_limit(handle):
            since = self._capped_since.setdefault(uuid, now)
            is_capped = now - since >= LASTING_S
        else:
            self._capped_since.pop(uuid, None)
            is_capped = False
        return tuple(reason for bit, reason in _THROTTLE.items() if reasons & bit and (bit != _POWER_CAP or is_capped))

    def _is_near_power_limit(self, handle: Any) -> bool:
        power = self._call(self._nvml.nvmlDeviceGetPowerUsage, handle)
        limit = self._call(self._nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return power is not None and bool(limit) and power >= NEAR_LIMIT * limit

    def read_gauges(self, only: Collection[str] | None = None, processes: bool = True) -> tuple[GpuGauges, ...]:
        """Return the gauges of the GPUs in `only`, or of all. A GPU that can't be read has an error.

        Without `processes`, their holders are not read.
        """
        if only is None:
            gpus = self.read_gpus()
        else:
            indices = {uuid: self._constants.get(uuid, {}).get("index", -1) for uuid in only if uuid in self._handles}
            gpus = tuple(Gpu(index=index, uuid=uuid) for uuid, index in indices.items())
        return tuple(
            GpuGauges(index=gpu.index, uuid="", error=gpu.error) if gpu.error else self._read_gauges(gpu, processes)
            for gpu in gpus
        )

    def _read_gauges(self, gpu: Gpu, processes: bool) -> GpuGauges:
        nvml, call, handle = self._nvml, self._call, self._handles[gpu.uuid]
        if gpu.uuid not in self._constants:
            limit = call(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
            clock_max = call(nvml.nvmlDeviceGetMaxClockInfo, handle, 1)
            self._constants[gpu.uuid] = {
                **{name: getattr(gpu, name) for name in ("index", "name", "mig", "mig_parent", "pci")},
                "power_limit": None if limit is None else limit / 1000,
                "clock_max": None if clock_max is None else clock_max * 1e6,
                "temperature_slowdown": call(nvml.nvmlDeviceGetTemperatureThreshold, handle, 1),
                "pcie_width_max": call(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            }
            self._reserved[gpu.uuid] = self._read_reserved_bytes(handle)
        utilization, memory = call(nvml.nvmlDeviceGetUtilizationRates, handle), self.read_memory(gpu.uuid)
        power = call(nvml.nvmlDeviceGetPowerUsage, handle)
        clock, memory_clock = (call(nvml.nvmlDeviceGetClockInfo, handle, kind) for kind in (1, 2))
        energy = call(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        holders = gpu.holders  # if they have just been read
        if processes and holders is None:
            holders = self._read_holders(handle)
        return GpuGauges(
            uuid=gpu.uuid,
            utilization=utilization.gpu / 100 if utilization else None,
            memory_used=max(memory[0] - self._reserved[gpu.uuid], 0) if memory else None,
            memory_total=memory[1] if memory else None,
            temperature=call(nvml.nvmlDeviceGetTemperature, handle, 0),
            power=None if power is None else power / 1000,
            clock=None if clock is None else clock * 1e6,
            memory_clock=None if memory_clock is None else memory_clock * 1e6,
            throttle=self._read_throttle_reasons(gpu.uuid),
            pcie_width=call(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            ecc_corrected=call(nvml.nvmlDeviceGetTotalEccErrors, handle, 0, 0),
            ecc_uncorrected=call(nvml.nvmlDeviceGetTotalEccErrors, handle, 1, 0),
            energy=None if energy is None else energy / 1000,
            processes=holders,
            **self._constants[gpu.uuid],
        )

    def read_new_xids(self) -> list[tuple[str, int]]:
        """Return the (UUID, number) of the Xids since the last call. The first call starts to record them."""
        nvml = self._nvml
        if self._events is None:
            self._events = self._call(nvml.nvmlEventSetCreate)
        if self._events is None:
            return []
        for uuid in self._handles.keys() - self._registered:
            self._registered.add(uuid)
            kind = nvml.nvmlEventTypeXidCriticalError
            self._call(nvml.nvmlDeviceRegisterEvents, self._handles[uuid], kind, self._events)
        xids: list[tuple[str, int]] = []
        while len(xids) < _MAX_EVENTS:
            event = self._call(nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:  # no more events
                break
            gpu_uuid = _text(self._call(nvml.nvmlDeviceGetUUID, event.device))
            if gpu_uuid:
                xids.append((gpu_uuid, int(event.eventData)))
        return xids

    def read_pids(self, uuid: str) -> set[int]:
        """Return the pids of the processes with a context on a GPU."""
        handle = self._handles.get(uuid)
        processes = self._read_running_processes(handle) if handle is not None else None
        return {int(process.pid) for process in processes or ()}

    def read_health(self, kernel_xids: dict[str, list[int]]) -> dict[str, GpuHealth]:
        """Return the health of each GPU. `kernel_xids` has the Xids of the kernel's log by PCI address.

        This makes many calls, which take seconds with a broken driver, so a launch never waits for it.
        """
        gpus = [gpu for gpu in self.read_gpus() if gpu.mig is None and not gpu.error]
        for uuid, numbers in self._wait_for_xids(gpus, EVENTS_S).items():
            kernel_xids.setdefault(uuid, []).extend(numbers)
        return {gpu.uuid: self._read_health(gpu, gpus, kernel_xids) for gpu in gpus}

    def _wait_for_xids(self, gpus: list[Gpu], seconds: float) -> dict[str, list[int]]:
        """Return the Xids that the driver reports in the next seconds. Earlier ones are in the kernel's log."""
        nvml = self._nvml
        xids: dict[str, list[int]] = {}
        events = self._call(nvml.nvmlEventSetCreate)
        if events is None:
            return xids
        for gpu in gpus:
            handle, kind = self._handles[gpu.uuid], nvml.nvmlEventTypeXidCriticalError
            self._call(nvml.nvmlDeviceRegisterEvents, handle, kind, events)
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            event = self._call(nvml.nvmlEventSetWait_v2, events, int(remaining * 1000) + 1)
            if event is None:  # no event, or this GPU has none
                break
            uuid = _text(self._call(nvml.nvmlDeviceGetUUID, event.device))
            if uuid:
                xids.setdefault(uuid, []).append(int(event.eventData))
        self._call(nvml.nvmlEventSetFree, events)
        return xids

    def _read_health(self, gpu: Gpu, gpus: list[Gpu], kernel_xids: dict[str, list[int]]) -> GpuHealth:
        nvml, call, handle = self._nvml, self._call, self._handles[gpu.uuid]
        power, limit = call(nvml.nvmlDeviceGetPowerUsage, handle), call(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        rows = call(nvml.nvmlDeviceGetRemappedRows, handle)  # corrected, uncorrected, pending, failed
        pending = call(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        capability = call(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        display = call(nvml.nvmlDeviceGetDisplayActive, handle)
        nvlinks = [call(nvml.nvmlDeviceGetNvLinkState, handle, number) for number in range(18)]
        pci = gpu.pci or ""
        keys = [key for key in kernel_xids if key and (key == gpu.uuid or kernel_log.is_same_gpu(pci, key))]
        return GpuHealth(
            temperature=call(nvml.nvmlDeviceGetTemperature, handle, 0),
            temperature_slowdown=call(nvml.nvmlDeviceGetTemperatureThreshold, handle, 1),
            power=None if power is None else power / 1000,
            power_limit=None if limit is None else limit / 1000,
            throttle=self._read_throttle_reasons(gpu.uuid),
            pcie_generation=call(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            pcie_generation_max=call(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            pcie_width=call(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            pcie_width_max=call(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            ecc_uncorrected=call(nvml.nvmlDeviceGetTotalEccErrors, handle, 1, 0),
            pages_pending=None if pending is None else bool(pending),
            rows_pending=None if rows is None else bool(rows[2]),
            rows_failed=None if rows is None else bool(rows[3]),
            recovery=self._read_recovery(handle),
            nvlinks=tuple(bool(state) for state in nvlinks if state is not None) or None,
            display=None if display is None else bool(display),
            capability=None if capability is None else f"{capability[0]}.{capability[1]}",
            xids=tuple(xid for key in keys for xid in kernel_xids[key]),
            peers={other.uuid: self._read_peer_access(handle, other) for other in gpus if other.uuid != gpu.uuid}
            or None,
        )

    def _read_recovery(self, handle: Any) -> str | None:
        """Return the recovery action that the driver requests for the GPU, in words."""
        field = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        values = self._call(self._nvml.nvmlDeviceGetFieldValues, handle, [field]) if field is not None else None
        if not values or values[0].nvmlReturn != 0:
            return None
        action = int(values[0].value.uiVal)
        return _RECOVERY.get(action, f"action {action}")

    def _read_peer_access(self, handle: Any, other: Gpu) -> str:
        """Return "ok", or why a GPU can't read another one's memory."""
        status = self._call(self._nvml.nvmlDeviceGetP2PStatus, handle, self._handles[other.uuid], 0)
        return "unknown" if status is None else _PEER.get(int(status), f"status {status}")


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _describe_holder(entry: Any) -> Holder:
    pid = int(entry.pid)
    memory = None if entry.usedGpuMemory is None else int(entry.usedGpuMemory)
    process = find_process(pid)
    # In a container, NVML's pid is the host's, and here another process may have that number.
    if process is None or not _has_device_open(pid):
        return Holder(pid, memory)
    uid = process_owner(pid)
    tag = procfs.read_run_tag(pid)
    return Holder(
        pid,
        memory,
        procfs.read_command_line(pid) or process.name,
        procfs.user_name(uid) if uid is not None else None,
        tag[0] if tag else None,
        round(max(0.0, time.time() - procfs.started_at(process.start)), 1),
    )


def _has_device_open(pid: int) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        return any(os.readlink(f"{folder}/{fd}").startswith("/dev/nvidia") for fd in os.listdir(folder))
    except PermissionError:
        return find_process(pid) is not None  # another user's, whose open files we may not read
    except OSError:
        return False
